"""Belady's MIN on demand, in plain Python: the bound that plans are measured by."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def min_fetched_bytes(requests: Sequence[Collection[int]], sizes: Sequence[int], capacity: int) -> int:
    """What a cache fetches that knows `requests`, fetches on demand and evicts what is needed farthest ahead.

    Each step requests shards that must be there together. For shards of equal size no cache fetches less; it
    is the bound that plans are measured by. Plain Python: for thousands of steps, not millions.
    """
    uses: dict[int, list[int]] = {}
    for step in reversed(range(len(requests))):
        for shard in requests[step]:
            uses.setdefault(shard, []).append(step)  # the next one is the last in the list
    cached: set[int] = set()
    used = fetched = 0
    for step, requested in enumerate(requests):
        for shard in requested:
            uses[shard].pop()
        for shard in sorted(set(requested) - cached):
            while used + sizes[shard] > capacity:
                idle = sorted(cached - set(requested))
                if not idle:
                    raise ValueError(f"step {step} requests more than {capacity:,} bytes at once")
                victim = max(idle, key=lambda one: uses[one][-1] if uses[one] else len(requests))
                cached.remove(victim)
                used -= sizes[victim]
            cached.add(shard)
            used += sizes[shard]
            fetched += sizes[shard]
    return fetched
