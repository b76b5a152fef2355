"""Balances the work of data-parallel ranks: assigns the rows of a global batch to ranks by their cost.

With attention inside documents, a row's cost is about the sum of its documents' squared lengths, and the
slowest rank decides how long a step takes. `WorkBalance` starts from the order's own parts (rank r has the
r-th) and swaps rows between expensive and cheap ranks until no rank costs more than 1/32 above the mean. Each
rank keeps `batch_size` rows, and the set of rows in a global batch does not change: states, audits and
resuming are not affected. It swaps as few rows as it can, because a row that moves to another machine is not
in the lanes that this machine reads: it is fetched by itself (`shardkit.cache.run`).

    cost of a row   linear * tokens + quadratic * sum of squared document lengths    (`CostModel`, integers)
    a round         sorts ranks by work and pairs the i-th most expensive with the i-th cheapest (in later
                    rounds, with others of the cheaper half); each pair swaps the two rows that make it
                    most nearly equal
    the end         all ranks are within 1/32 of the mean, or the most expensive rank has been paired with
                    all possible partners, or 32 rounds are over

Where optimizer steps are known (`global_batch`), whole shares of a batch are then exchanged between ranks, in
the same way, so that the sums over a step's batches are balanced too: gradient accumulation without
communication waits for the largest sum. The largest share of each batch stays as it is. Rows never move
between the batches of a step, because a state may be saved between them.

The result is a function of the rows' costs, world size, batch size and step sizes, in integers, with ties
broken by row number: every rank computes it alone, with the same result. Golden vectors and a plain-Python
reference in the tests pin it. The shorter last batch of tail "pad" keeps its parts.

Costs: locating all positions of a global batch instead of one rank's (100-150 ns each), and the rounds: 1 to
3 ms for 4,096 rows on 1,024 ranks (tests/benchmarks/bench_balance.py), in the prefetching thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from shardkit.arrays import Ints
from shardkit.order.batches import BatchPlan, SampleOrder, Steps, StepSizes
from shardkit.order.order import Located
from shardkit.units import whole_number

BALANCED_POSITIONS = 1 << 16  # maximum number of positions, of all ranks, balanced at once: tens of ms
MAX_ROWS = 1 << 24  # limit for a global batch or an optimizer step: sums of costs stay below 2**62
_TOLERANCE = 32  # a rank may cost 1/32 more than the mean
_ROUNDS = 32
_PARTNERS = 32  # number of rounds after which the pairing has gone through the cheaper half once
_CANDIDATES = 16  # number of rows of a rank considered for a swap, evenly spread over its costs
_PIECE = 1 << 17  # number of rows assigned at once

_Ranks = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class CostModel:
    """The cost of a row: `linear` per token, and `quadratic` times the sum of squared document lengths.

    For a transformer of width d with causal attention inside documents, the work of a layer is about
    12 * d * tokens + squares, in units of 2 * d: CostModel(linear=12 * d). Coefficients are whole numbers;
    only their ratio matters. The linear part is the same for all rows of one length: it determines the share
    of attention in the total work, and so how many rows are worth moving.
    """

    linear: int = 0
    quadratic: int = 1

    def __post_init__(self) -> None:
        for name, least in (("linear", 0), ("quadratic", 1)):
            value = whole_number(getattr(self, name), name)
            if not least <= value <= 1 << 32:
                raise ValueError(f"{name} of a CostModel must be from {least} to 2**32, not {value:,}")
            object.__setattr__(self, name, value)


Balance: TypeAlias = Literal["attention"] | CostModel | None


def cost_model(balance: Balance) -> CostModel | None:
    """Return the cost model for the loader option `balance`; raises ValueError for an invalid value."""
    if balance not in (None, "attention") and not isinstance(balance, CostModel):
        raise ValueError(f'balance must be "attention", a CostModel or None, not {balance!r:.80}')
    return CostModel() if balance == "attention" else balance


@dataclass(frozen=True, slots=True)
class DocumentIds:
    """The token ids that mark documents in rows (loader options). Raises ValueError if they conflict."""

    eos_id: int | None = None
    bos_id: int | None = None
    pad_id: int | None = None

    def __post_init__(self) -> None:
        if self.eos_id is not None and self.bos_id is not None:
            raise ValueError("documents are found by eos_id or by bos_id: give one of the two, not both")
        if self.pad_id is not None and self.pad_id in (self.eos_id, self.bos_id):
            raise ValueError("pad_id is only for an id that neither ends nor begins documents: leave it out")

    def __str__(self) -> str:
        """Return the ids as part of the file name of a table of row costs."""
        first = f"eos{self.eos_id}" if self.bos_id is None else f"bos{self.bos_id}"
        return first if self.pad_id is None else f"{first}-pad{self.pad_id}"


@dataclass(frozen=True, slots=True, eq=False)
class RowCosts:
    """The sum of squared document lengths of every row of a dataset, in dataset order.

    `length`: the number of tokens in a row. `digest`: the digest of the table's bytes
    (`shardkit.datasets.row_costs`).
    """

    squares: npt.NDArray[np.unsignedinteger[Any]]
    length: int
    digest: str


def level(costs: Ints, before: Ints | None = None) -> Ints:
    """Assign the rows of batches to ranks so that the ranks' summed costs become nearly equal.

    `costs`, [batches, ranks, rows], has the rows in the order's own parts. Returns int64[batches, ranks,
    rows]: the number, within its batch, of the row at each place. `before` [batches, ranks] is the work that
    each rank has done already. Costs must be at least 0, and the sum of a batch's costs and the work before
    it below 2**62.
    """
    batches, ranks, rows = costs.shape
    places = np.tile(np.arange(ranks * rows).reshape(ranks, rows), (batches, 1, 1))
    if ranks == 1 or not batches:
        return places
    before = np.zeros((batches, ranks), dtype=np.int64) if before is None else before
    costs = costs.copy()
    totals = costs.sum(axis=(1, 2)) + before.sum(axis=1)
    half = ranks // 2
    stride = half // _PARTNERS + 1
    patience = -(-(ranks - half) // stride)  # number of rounds until partners repeat
    idle, dearest = np.zeros(batches, dtype=np.int64), np.full(batches, np.iinfo(np.int64).max)
    active = np.arange(batches)
    for number in range(_ROUNDS):
        work = before[active] + costs[active].sum(axis=2)
        now = work.max(axis=1)
        idle[active] = np.where(now < dearest[active], 0, idle[active] + 1)
        dearest[active] = now
        goes_on = _is_dear(now, totals[active], ranks) & (idle[active] < patience)
        active, work = active[goes_on], work[goes_on]
        if not len(active):
            break
        by_work = np.argsort(work, axis=1, kind="stable")
        dear = by_work[:, : -half - 1 : -1]
        cheap = np.roll(by_work[:, : ranks - half], -number * stride, axis=1)[:, :half]
        gaps = np.take_along_axis(work, dear, axis=1) - np.take_along_axis(work, cheap, axis=1)
        meets = _is_dear(np.take_along_axis(work, dear, axis=1), totals[active, None], ranks)
        batch, pair = np.nonzero(meets)
        _swap(costs, places, active[batch], dear[batch, pair], cheap[batch, pair], gaps[batch, pair])
    return places


def _is_dear(work: Ints, totals: Ints, ranks: int) -> npt.NDArray[np.bool_]:
    """Return whether each rank's work is more than 1/32 above the mean of the batch's ranks."""
    mean = totals // ranks
    dear: npt.NDArray[np.bool_] = work > mean + mean // _TOLERANCE
    return dear


def _swap(costs: Ints, places: Ints, batch: _Ranks, dear: Ints, cheap: Ints, gaps: Ints) -> None:
    """Swap one row of each pair of ranks, if that makes their work more equal."""
    own, other = costs[batch, dear], costs[batch, cheap]
    which_own, which_other = _candidates(own), _candidates(other)
    own, other = np.take_along_axis(own, which_own, axis=1), np.take_along_axis(other, which_other, axis=1)
    left = np.abs(gaps[:, None, None] - 2 * (own[:, :, None] - other[:, None, :])).reshape(len(batch), -1)
    best = left.argmin(axis=1)
    pairs = np.flatnonzero(left[np.arange(len(batch)), best] < gaps)
    first, second = np.divmod(best[pairs], which_own.shape[1])
    first, second = which_own[pairs, first], which_other[pairs, second]
    batch, dear, cheap = batch[pairs], dear[pairs], cheap[pairs]
    for values in (costs, places):
        moved = values[batch, dear, first]
        values[batch, dear, first] = values[batch, cheap, second]
        values[batch, cheap, second] = moved


def _candidates(costs: Ints) -> Ints:
    """Return the rows of each rank [pairs, rows] that may be swapped: all, or a few spread over its costs."""
    rows = costs.shape[1]
    if rows <= _CANDIDATES:
        return np.broadcast_to(np.arange(rows), costs.shape)
    some = np.arange(_CANDIDATES) * (rows - 1) // (_CANDIDATES - 1)
    return np.argsort(costs, axis=1, kind="stable")[:, some]


@dataclass(slots=True)
class _StepSum:
    """Each rank's work so far in an optimizer step: `placed` with balancing, `plain` without."""

    placed: Ints
    plain: Ints


class WorkBalance:
    """Assigns the rows of a run's global batches to ranks.

    `costs`: the row costs of each stream's dataset; rows are numbered through all datasets. `step_sizes`: the
    sizes of the optimizer steps, if known.
    """

    def __init__(
        self, costs: Sequence[RowCosts], model: CostModel, step_sizes: StepSizes | None = None
    ) -> None:
        self._costs, self._model = tuple(costs), model
        self._first_samples = np.cumsum([0, *(len(each.squares) for each in costs[:-1])])
        self.step_sizes = step_sizes
        largest = max(model.linear * n + model.quadratic * n * n for n in (each.length for each in costs))
        if largest >= 1 << 62:
            raise ValueError(
                f"with {self._model}, a row can cost up to {largest:,}, but costs must be below 2**62: make "
                "both coefficients smaller"
            )
        # Scales costs so that all sums stay below 2**61. Rows of less than 2**18 tokens lose no bits.
        self._shift = max(0, (largest * MAX_ROWS).bit_length() - 61)
        sizes = [] if step_sizes is None else [size for _, size in step_sizes.changes]
        if max(sizes, default=0) > MAX_ROWS:
            raise ValueError(f"balance supports steps of at most {MAX_ROWS:,} rows, not {max(sizes):,}")

    def with_step_sizes(self, step_sizes: StepSizes | None) -> WorkBalance:
        """Return the same balance for optimizer steps of these sizes."""
        return WorkBalance(self._costs, self._model, step_sizes)

    def __str__(self) -> str:
        """Return cost model and table digests as text; they must be equal on all ranks."""
        return f"{self._model} {' '.join(each.digest for each in self._costs)}"

    def steps(
        self, plan: BatchPlan, order: SampleOrder, position: int, count: int, *, every: int = 1
    ) -> Steps:
        """Return batches as `BatchPlan.steps` does, with the balanced rows of this rank and with `work`."""
        if (size := plan.global_batch) > MAX_ROWS:
            raise ValueError(f"balance supports global batches of at most {MAX_ROWS:,} rows, not {size:,}")
        steps = plan.steps(order, position, count, every=every)
        shape = (count, plan.batch_size)
        shard, row = steps.shard.reshape(shape).copy(), steps.row.reshape(shape).copy()
        sample_id = steps.sample_id.reshape(shape).copy()
        positions = steps.position.reshape(shape).copy()
        work = np.zeros((count, 6), dtype=np.int64)
        low, whole = 0, count - steps.padded
        for located, places, figures in self._placed(plan, order, plan.start(position), whole, every):
            piece = slice(low, low + len(places))
            own = places[:, plan.rank]
            shard[piece] = np.take_along_axis(located.shard, own, axis=1)
            row[piece] = np.take_along_axis(located.row, own, axis=1)
            sample_id[piece] = np.take_along_axis(located.sample_id, own, axis=1)
            positions[piece] = np.take_along_axis(located.position, own, axis=1)
            work[piece], low = figures, piece.stop
        return replace(steps, shard=shard, row=row, sample_id=sample_id, position=positions, work=work)

    def places(self, plan: BatchPlan, order: SampleOrder, start: int) -> Ints:
        """Return how the order's global batch at `start` is rearranged, int64[global batch].

        Entry i of the result is the index, in the order's batch, of the i-th row of the balanced batch, which
        has the rows of rank 0 first, then those of rank 1, and so on.
        """
        if plan.tail == "pad" and plan.samples - start % plan.samples < plan.global_batch:
            return np.arange(plan.samples - start % plan.samples)
        [(_, places, _)] = self._placed(plan, order, start, 1, 1)
        return places.reshape(-1)

    def _placed(
        self, plan: BatchPlan, order: SampleOrder, start: int, count: int, every: int
    ) -> Iterator[tuple[Located, Ints, Ints]]:
        """Yield (locations of the rows in the unbalanced order, balanced assignment, work).

        Each item is for one group of batches. `assignment[batch, rank, i]` is the index, in the unbalanced
        batch, of the i-th row that the rank gets.
        """
        size = plan.global_batch
        # The shares of a step's later batches depend on the earlier ones, so begin at the step's first batch.
        begin = start if self.step_sizes is None else self._first_of_step(start, size)
        stride = every * size if self.step_sizes is None else size
        total = (start - begin + (count - 1) * every * size) // stride + 1 if count else 0
        done = _StepSum(*np.zeros((2, plan.world_size), dtype=np.int64))
        most = max(1, _PIECE // size)
        for number in range(0, total, most):
            some, first = min(most, total - number), begin + number * stride
            located = order.global_batches(first, size, some, part=slice(None), every=stride // size)
            costs = self._costs_of(located.sample_id).reshape(some, plan.world_size, plan.batch_size)
            places, work = level(costs), np.zeros((some, 6), dtype=np.int64)
            if self.step_sizes is not None:
                self._level_steps(costs, places, work, done, first)
            work[:, :3] = _work(costs, places)
            ahead = first - start + np.arange(some) * stride
            wanted = np.flatnonzero((ahead >= 0) & (ahead % (every * size) == 0))
            if len(wanted):
                yield located.take(wanted), places[wanted], work[wanted]

    def _first_of_step(self, start: int, size: int) -> int:
        """Return the first position of the first batch of the optimizer step that includes `start`."""
        assert self.step_sizes is not None
        begin, _ = self.step_sizes.step_at(start)
        return begin + (start - begin) % size

    def _level_steps(self, costs: Ints, places: Ints, work: Ints, done: _StepSum, first: int) -> None:
        """Exchange shares of batches from position `first` on between ranks, in `places`.

        For each batch that ends a step, writes the step's totals into columns 3 to 5 of `work`.
        """
        assert self.step_sizes is not None
        batches, ranks, rows = costs.shape
        for number in range(batches):
            start = first + number * ranks * rows
            if self._first_of_step(start, ranks * rows) == start:
                done.placed, done.plain = np.zeros((2, ranks), dtype=np.int64)
            shares = costs[number].reshape(-1)[places[number]].sum(axis=1)
            ways = level(shares[None, :, None], done.placed[None])[0, :, 0]
            places[number] = places[number][ways]
            done.placed, done.plain = done.placed + shares[ways], done.plain + costs[number].sum(axis=1)
            if start + ranks * rows >= self.step_sizes.step_at(start)[1]:
                work[number, 3:] = done.placed.sum(), done.placed.max(), done.plain.max()

    def _costs_of(self, sample_ids: Ints) -> Ints:
        """Return the cost of each sample, in the shape of `sample_ids`."""
        if len(self._costs) == 1:
            return self._scaled(0, sample_ids)
        stream = np.searchsorted(self._first_samples, sample_ids, side="right") - 1
        found = np.empty_like(sample_ids)
        for number in np.unique(stream).tolist():
            own = stream == number
            found[own] = self._scaled(number, sample_ids[own] - self._first_samples[number])
        return found

    def _scaled(self, stream: int, rows: Ints) -> Ints:
        table, model = self._costs[stream], self._model
        squares = table.squares[rows].astype(np.int64)
        costs: Ints = model.quadratic * squares + model.linear * table.length >> self._shift
        return costs


def planned_steps(
    plan: BatchPlan,
    balance: WorkBalance | None,
    order: SampleOrder,
    position: int,
    count: int,
    *,
    every: int = 1,
) -> Steps:
    """Return a rank's next batches as `BatchPlan.steps` does, with rows reassigned if `balance` is given."""
    if balance is None:
        return plan.steps(order, position, count, every=every)
    return balance.steps(plan, order, position, count, every=every)


def _work(costs: Ints, places: Ints) -> Ints:
    """Return (total work, largest share of a rank, largest share without balancing), int64[batches, 3]."""
    batches = len(costs)
    placed = np.take_along_axis(costs.reshape(batches, -1), places.reshape(batches, -1), axis=1)
    shares = placed.reshape(costs.shape).sum(axis=2)
    return np.stack([shares.sum(axis=1), shares.max(axis=1), costs.sum(axis=2).max(axis=1)], axis=1)
