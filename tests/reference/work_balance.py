"""Rows placed on ranks, in plain Python: the definition that the vectorized one is tested against."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Row = tuple[int, int]


def level_one(costs: Sequence[Sequence[int]], before: Sequence[int] | None = None) -> list[list[Row]]:
    """`shardkit.order.balance.level` of one batch: of each place, the (rank, index) of its row."""
    ranks = len(costs)
    placed = [[(rank, index) for index in range(len(rows))] for rank, rows in enumerate(costs)]
    done = list(before or [0] * ranks)

    def cost(row: Row) -> int:
        return costs[row[0]][row[1]]

    mean = (sum(map(sum, costs)) + sum(done)) // ranks
    most = mean + mean // 32
    half, cheaper = ranks // 2, ranks - ranks // 2
    stride = half // 32 + 1
    idle, dearest = 0, 1 << 62
    for number in range(32):
        work = [done[rank] + sum(map(cost, rows)) for rank, rows in enumerate(placed)]
        idle = 0 if max(work) < dearest else idle + 1
        dearest = max(work)
        if ranks == 1 or dearest <= most or idle >= -(-cheaper // stride):
            break
        by_work = sorted(range(ranks), key=work.__getitem__)
        pairs = [(by_work[-1 - i], by_work[(i + number * stride) % cheaper]) for i in range(half)]
        for dear, cheap in pairs:
            if work[dear] > most:
                swaps = [
                    (abs(work[dear] - work[cheap] - 2 * (cost(placed[dear][i]) - cost(placed[cheap][j]))), n)
                    for n, (i, j) in enumerate(candidate_pairs(placed, dear, cheap, cost))
                ]
                left, best = min(swaps)
                if left < work[dear] - work[cheap]:
                    i, j = candidate_pairs(placed, dear, cheap, cost)[best]
                    placed[dear][i], placed[cheap][j] = placed[cheap][j], placed[dear][i]
    return placed


def candidate_pairs(
    placed: list[list[Row]], dear: int, cheap: int, cost: Callable[[Row], int]
) -> list[tuple[int, int]]:
    """Which rows of two ranks may be swapped: all pairs, or of 16 rows of each, evenly spread by cost."""
    chosen: list[Sequence[int]] = []
    for rank in (dear, cheap):
        rows = len(placed[rank])
        by_cost = sorted(range(rows), key=lambda i: cost(placed[rank][i]))
        chosen.append(range(rows) if rows <= 16 else [by_cost[i * (rows - 1) // 15] for i in range(16)])
    return [(i, j) for i in chosen[0] for j in chosen[1]]
