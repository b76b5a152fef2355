"""What a reservation costs in a cache folder with many entries, with room and without.

    python tests/benchmarks/bench_cache.py [--entries 10000 100000] [--json]

CPU time of this process, the median of `TRIES`. "evicting" finds its victim in a plan, as training does;
"oldest" evicts the least recently used, as random access does; "listing" is what finding out by a listing
would take. A plan decides on 64 fetches.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np

from figures import benchmark_parser, give
from shardkit.cache.belady import Fetch, Future
from shardkit.cache.entry import EntryNames
from shardkit.cache.folder import SUBFOLDER, CacheFolder
from shardkit.cache.planner import LoopPosition, Planner
from shardkit.cache.protocol import Contents
from shardkit.order.order import Order, OrderSpec

TRIES = 50
BYTES = 100  # of an entry


def measure(entries: int) -> dict[str, object]:
    """Median milliseconds of each case with so many entries."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, shards = Path(scratch), Path(scratch) / SUBFOLDER / "shards"
        CacheFolder(folder, 1)
        names = [f"e{number:07}" for number in range(entries + TRIES)]
        for name in names[:entries]:
            (shards / name).write_bytes(bytes(BYTES))
        began = time.process_time()
        for entry in os.scandir(shards):
            entry.stat()
        listing = time.process_time() - began
        roomy, full = CacheFolder(folder, 1 << 40), CacheFolder(folder, entries * BYTES)
        order = Order(np.full(len(names), 10), OrderSpec(1, 1, 1, "none"))
        planner = Planner(
            Future(order),
            EntryNames.of(names),
            np.full(len(names), BYTES),
            order.samples,
            LoopPosition(10 * TRIES),
        )
        planner.plan(full, ())
        began = time.process_time()
        planner.plan(full, ())
        plan = time.process_time() - began
        fetches = [Fetch(entries + n, 10 * (entries + n), 0, (n,), True) for n in range(TRIES)]
        fresh = count()

        def tried(cache: CacheFolder, victims: Iterable[Callable[[Contents], Iterable[str]]]) -> float:
            seconds = []
            for chosen in victims:
                began = time.process_time()
                slot = cache.reserve(f"new{next(fresh)}", BYTES - 64, chosen)
                seconds.append(time.process_time() - began)
                assert slot is not None
                slot.commit()
            return 1e3 * statistics.median(seconds)

        return {
            "entries": entries,
            "evicting_ms": tried(full, [partial(planner.victims_for, fetch) for fetch in fetches]),
            "oldest_ms": tried(full, [lambda contents: contents] * TRIES),
            "room_ms": tried(roomy, [lambda contents: []] * TRIES),
            "plan_ms": 1e3 * plan,
            "listing_ms": 1e3 * listing,
        }


HEADS = {
    "entries": ("entries", ","),
    "room_ms": ("with room ms", ".3f"),
    "evicting_ms": ("evicting ms", ".3f"),
    "oldest_ms": ("oldest ms", ".3f"),
    "plan_ms": ("a plan ms", ".1f"),
    "listing_ms": ("listing ms", ".1f"),
}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--entries", type=int, nargs="+", default=[10_000, 100_000])
    arguments = parser.parse_args()
    give(arguments, [measure(entries) for entries in arguments.entries], HEADS)


if __name__ == "__main__":
    main()
