"""What a mixture costs over one stream of the same size: planning, seeking, exclusions.

    python tests/benchmarks/bench_mixture.py [--streams 5] [--shards 45000] [--runs 15] [--json]

Times are of the fastest run on one thread; all cases take turns, so that a busy machine slows all of them.
"rank_of_8" plans one of eight ranks, and a rank works out of which stream the others' samples are. Read
figures of one run only against each other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from figures import benchmark_parser, print_figures, timed
from shardkit.order.exclusions import Exclusions
from shardkit.order.mixture import Mixture, Schedule
from shardkit.order.order import Order, OrderSpec, rank_slice
from shardkit.order.streams import MixedOrder, StreamOrder, stream_seed

Cases = dict[str, Callable[[], object]]

SAMPLES_PER_SHARD = 8222
LANES, WINDOW = 64, 8192
SAMPLES = 65_536
WEIGHTS = {
    "mixture_of_10": (4, 3, 1, 1, 1),
    "mixture_of_1000": (613, 211, 97, 53, 26),
    "mixture_of_100003": (61_313, 21_111, 9_701, 5_303, 2_575),
}


def stream_orders(streams: int, shards: int) -> list[StreamOrder]:
    sizes = np.full(shards // streams, SAMPLES_PER_SHARD)
    return [
        StreamOrder(Order(sizes, OrderSpec(stream_seed(17, number), LANES, WINDOW)), None, sizes)
        for number in range(streams)
    ]


def weights_of(name: str, streams: int) -> tuple[int, ...]:
    weights = WEIGHTS[name]
    return weights if streams == len(weights) else weights[:1] + weights[-1:] * (streams - 1)


def one_stream(shards: int) -> tuple[Order, Cases, Cases]:
    """The order to compare with, and what is measured of it: (per sample, per call)."""
    sizes, spec = np.full(shards, SAMPLES_PER_SHARD), OrderSpec(17, LANES, WINDOW)
    order = Order(sizes, spec)
    rows = np.random.default_rng(0).choice(order.samples, 100_000, replace=False)
    excluded = Exclusions.of(rows)
    kept = StreamOrder(Order(excluded.kept_of_shards(sizes), spec), excluded, sizes)
    per_sample, per_call = cases_of("one_stream", order, order.samples // 3)
    exclusions, _ = cases_of("one_stream_with_exclusions", kept, order.samples // 3)
    return order, per_sample | exclusions, per_call | {"exclusions_make": partial(Exclusions.of, rows)}


def cases_of(name: str, order: Order | StreamOrder | MixedOrder, start: int) -> tuple[Cases, Cases]:
    plan, eighth = order.global_batches, rank_slice(4096, 3, 8)
    per_sample: Cases = {
        name: partial(plan, start, 512, SAMPLES // 512),
        f"{name}_rank_of_8": partial(plan, start, 4096, SAMPLES // 512, part=eighth),
    }
    return per_sample, {f"{name}_batch": partial(plan, start, 4096, 1, part=eighth)}


def measure(streams: int, shards: int, runs: int) -> dict[str, float]:
    one, per_sample, per_call = one_stream(shards)
    orders, start = stream_orders(streams, shards), one.samples // 3
    for name in WEIGHTS:
        schedule = Schedule.of(weights_of(name, streams))
        mixture = Mixture(17, schedule)
        more, calls = cases_of(name, MixedOrder(orders, mixture, one.samples), start)
        per_sample |= more | {f"{name}_streams_alone": partial(mixture.locate, start, SAMPLES)}
        per_call |= calls | {
            f"{name}_make": partial(Mixture, 17, schedule),
            f"{name}_counts": partial(mixture.counts, start + 7),
            f"{name}_position_of": partial(mixture.position_of, 1, start),
        }
    figures: dict[str, float] = {"streams": streams, "shards": shards, "samples": one.samples}
    for name, seconds in timed(per_sample, runs).items():
        figures[f"{name}_ns_per_sample"] = round(min(seconds) * 1e9 / SAMPLES, 1)
    for name, seconds in timed(per_call, runs).items():
        figures[f"{name}_us"] = round(min(seconds) * 1e6, 1)
    return figures


def main() -> None:
    parser = benchmark_parser(__doc__, runs=15)
    parser.add_argument("--streams", type=int, default=5, help="streams in the mixture (default: 5)")
    parser.add_argument(
        "--shards", type=int, default=45_000, help="shards over all streams (default: 45,000)"
    )
    arguments = parser.parse_args()
    print_figures(arguments, measure(arguments.streams, arguments.shards, arguments.runs))


if __name__ == "__main__":
    main()
