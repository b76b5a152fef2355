"""`shardkit simulate`: the input of a training run in virtual time, for any number of nodes."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardkit.cli.common import (
    BATCH_SIZE,
    GPUS_PER_NODE,
    NETWORK,
    SHARD_BYTES,
    SHUFFLE_SIZES,
    Quantity,
    add_json_argument,
    add_quantities,
    add_quiet_argument,
    add_storage_arguments,
    argument,
    file_path,
    format_rate,
    print_columns,
    print_json,
    read_quantities,
    storage_options,
)
from shardkit.tools.plan.quantities import (
    format_count,
    format_seconds,
    parse_count,
    parse_number,
    parse_rate,
    parse_seconds,
)
from shardkit.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from shardkit.tools.simulate.run import Outcome
    from shardkit.tools.simulate.scenario import Scenario, Shards

__all__ = ["SETTINGS", "add_parser", "run"]

MAX_RUNS = 256
PREFIX_REQUESTS = 5_500  # GETs a second that S3 guarantees for each prefix

_NETWORK = (
    *NETWORK,
    Quantity("--latency-p99", "latency_p99_seconds", parse_seconds, format_seconds,
             "99th percentile of log-normal latencies with median --latency; default: constant latency",
             "TIME"),
    Quantity("--store-bandwidth", "store_bytes_per_second", parse_rate, format_rate,
             "bandwidth of the store, shared equally by all nodes; default: no limit", "RATE"),
    Quantity("--throttle", "throttled_share", parse_number, lambda v: f"{100 * float(v):g}%",
             "share of requests answered with 503, from 0 to 0.9", "X", "0"),
)  # fmt: skip
SETTINGS = (
    Quantity("--nodes", "nodes", parse_count, str, "number of machines", "N", "1"),
    GPUS_PER_NODE, BATCH_SIZE, *SHUFFLE_SIZES,
    Quantity("--cache", "cache_bytes", parse_bytes, format_bytes, "cache size of each node", "BYTES",
             "100GB"),
    Quantity("--prefetch", "prefetch_batches", parse_count, str, "batches that a loader prepares ahead", "N",
             "64"),
    Quantity("--connections", "connections", parse_count, str, "concurrent fetches of each rank", "N", "16"),
    *_NETWORK,
    Quantity("--step-seconds", "step_seconds", parse_seconds, format_seconds, "compute time of a step",
             "TIME", "1s"),
    Quantity("--steps", "steps", parse_count, str, "number of steps from the start of the run", "N", "1000"),
    Quantity("--seed", "seed", lambda text: int(parse_number(text)), str,
             "seed of the order and of random latencies", "N", "17"),
)  # fmt: skip
SYNTHETIC = (
    Quantity("--samples", "samples", parse_count, format_count,
             "number of samples in a synthetic dataset; default: taken from PATH", "N"),
    Quantity("--shards", "shards", parse_count, format_count,
             "number of its shards; default: follows from --shard-bytes", "N"),
    Quantity("--sample-bytes", "sample_bytes", parse_bytes, format_bytes,
             "size of a sample; 16KiB is 4,096 tokens of 4 bytes", "BYTES", "16KiB"),
    SHARD_BYTES,
)  # fmt: skip


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "simulate",
        help="the input of a training run in virtual time: stalls, hits, traffic of thousands of ranks",
        description="Simulate how the ranks of a run are fed: the real order and cache plan, a modelled "
        "network and store. Reports stalls, waits, hit rate, bytes per node, requests. Nothing is fetched: "
        "only the index of PATH is read, or --samples describes a synthetic dataset.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "path", metavar="PATH", nargs="?", help="dataset whose index is read (or give --samples)"
    )
    data = parser.add_argument_group("synthetic dataset")
    add_quantities(data, SYNTHETIC)
    add_quantities(parser.add_argument_group("the run"), SETTINGS)
    parser.add_argument(
        "--sample-nodes",
        type=argument(parse_count),
        metavar="N",
        help="simulate only N of the nodes, which are statistically alike (default: all up to 16, else 8)",
    )
    parser.add_argument(
        "--sweep",
        nargs="+",
        default=[],
        metavar="NAME=A,B,…",
        help="run all combinations of these option values, such as lanes=16,64 cache=50GB,1TB, and print a "
        "table (default: one run)",
    )
    parser.add_argument(
        "--plot", type=file_path, metavar="FILE", help="write a plot, .png, .svg or .pdf (default: none)"
    )
    add_json_argument(parser)
    add_quiet_argument(parser)
    add_storage_arguments(parser)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Simulate, and print the figures."""
    try:
        values, _ = read_quantities(arguments, SETTINGS)
        names, combinations = _sweep(arguments.sweep)
        shards = _shards(arguments)
        scenarios = [_scenario(shards, values | chosen, arguments.sample_nodes) for chosen in combinations]
    except ValueError as error:
        arguments.parser.error(str(error))
    results: list[dict[str, Any]] = []
    for number, scenario in enumerate(scenarios, 1):
        label = f"run {number} of {len(scenarios)}" if len(scenarios) > 1 else "simulate"
        outcome, seconds = _simulate(scenario, label, quiet=arguments.quiet)
        results.append(outcome.to_dict() | {"wall_seconds": round(seconds, 2)})
        if len(scenarios) == 1:
            _report(outcome, results[0], arguments)
    if len(scenarios) > 1:
        shown = [{q.key: q.show(chosen[q.name]) for q in names} for chosen in combinations]
        _report_sweep([q.key for q in names], shown, results, arguments)
    if not arguments.quiet:
        _note(results)
    return 0


def _note(results: Sequence[Mapping[str, Any]]) -> None:
    """Print caveats of the figures."""
    some = [result for result in results if result["nodes_simulated"] < result["nodes"]]
    sys.stdout.flush()
    if some:
        sys.stderr.write(
            f"shardkit: note: {some[0]['nodes_simulated']} of {some[0]['nodes']:,} nodes were simulated; a "
            "step waits for the slowest of all, so real waits may be longer (--sample-nodes)\n"
        )
    peak = max(result["peak_requests_per_second"] for result in results)
    if peak > PREFIX_REQUESTS:
        sys.stderr.write(
            f"shardkit: note: up to {peak:,.0f} requests in a second; S3 answers about {PREFIX_REQUESTS:,} "
            "GETs a second for each prefix and 503 beyond (--throttle)\n"
        )


def _shards(arguments: argparse.Namespace) -> Shards:
    from shardkit.tools.simulate.scenario import Shards

    if (arguments.path is None) == (arguments.samples is None):
        raise ValueError("give the PATH of a dataset, or --samples for a synthetic one")
    if arguments.path is None:
        return Shards.synthetic(**read_quantities(arguments, SYNTHETIC)[0])
    if any(getattr(arguments, quantity.key) is not None for quantity in SYNTHETIC):
        raise ValueError("--shards, --sample-bytes and --shard-bytes belong to --samples")
    from shardkit.datasets.dataset import open_dataset

    with open_dataset(arguments.path, storage=storage_options(arguments)) as dataset:
        return Shards.of(dataset)


def _scenario(shards: Shards, values: Mapping[str, Any], sample_nodes: int | None) -> Scenario:
    from shardkit.tools.simulate.scenario import Network, Scenario, spread_nodes

    network = {each.name: float(values[each.name]) for each in _NETWORK if each.name in values}
    settings = {name: value for name, value in values.items() if name not in network}
    settings["step_seconds"] = float(settings["step_seconds"])
    return Scenario(
        shards=shards,
        delivered_bytes=2 * shards.sample_bytes,
        network=Network(**network),
        simulated=spread_nodes(values["nodes"], sample_nodes),
        **settings,
    )


def _sweep(texts: Sequence[str]) -> tuple[list[Quantity], list[dict[str, Any]]]:
    """(varied quantities, settings of each run)."""
    known = {quantity.key: quantity for quantity in SETTINGS}
    varied: list[Quantity] = []
    choices: list[list[Any]] = []
    for text in texts:
        name, _, several = text.partition("=")
        quantity = known.get(name.strip("-").replace("-", "_"))
        if quantity is None or not several:
            options = ", ".join(known)
            raise ValueError(f"--sweep {text!r} is not NAME=A,B,…; names are {options}")
        if quantity in varied:
            raise ValueError(f"--sweep names {name} twice")
        varied.append(quantity)
        choices.append([quantity.parse(part) for part in several.split(",")])
    names = [quantity.name for quantity in varied]
    combinations = [dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*choices)]
    if len(combinations) > MAX_RUNS:
        raise ValueError(f"--sweep asks for {len(combinations):,} runs; at most {MAX_RUNS}")
    return varied, combinations


def _simulate(scenario: Scenario, label: str, *, quiet: bool) -> tuple[Outcome, float]:
    """The outcome, and how many seconds it took to compute."""
    from shardkit.progress import counting
    from shardkit.tools.simulate.run import simulate

    began = time.perf_counter()
    with counting(label, scenario.steps, "steps", progress=not quiet) as advance:
        outcome = simulate(scenario, advance)
    return outcome, time.perf_counter() - began


def _report(outcome: Outcome, figures: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    if arguments.plot is not None:
        from shardkit.tools.simulate.plot import plot_run

        plot_run(outcome, arguments.plot)
    if arguments.json:
        print_json(figures)
    else:
        print_columns("", ["", "", ""], _rows(outcome.scenario, figures), left=(0, 2))


def _rows(scenario: Scenario, figures: Mapping[str, Any]) -> list[list[str]]:
    f = figures
    later = max(1, scenario.steps - 1)
    return [
        ["run", f"{f['steps']:,} steps",
         f"{f['nodes']:,} node{'s' * (f['nodes'] > 1)} x {scenario.gpus_per_node} ranks; lanes {f['lanes']}, "
         f"window {f['window']:,}; takes {format_seconds(f['seconds'])}"],
        ["first batch", format_seconds(f["first_batch_seconds"]), "from an empty cache"],
        ["stalled steps", f"{100 * f['stalled_steps_share']:.3g}%",
         f"{f['stalled_steps']:,} of {later:,} waited longer than 1 ms"],
        ["lost to waits", format_seconds(f["stall_seconds"]), f"{100 * f['stall_share']:.3g}% of the time"],
        ["wait of a step", format_seconds(f["wait_p50_seconds"]),
         f"median; p99 {format_seconds(f['wait_p99_seconds'])}, "
         f"longest {format_seconds(f['wait_max_seconds'])}"],
        ["hit rate", f"{100 * f['hit_rate']:.3g}%", "share of opened shards that were cached"],
        ["fetched per node", format_bytes(f["fetched_bytes_per_node"]),
         f"{format_bytes(f['fetched_bytes_per_node_per_step'])} a step, "
         f"{format_bytes(f['fetched_bytes_per_node_per_second'])}/s; "
         f"{format_bytes(f['ahead_bytes_per_node'])} of it for later steps"],
        ["read / used", f"{f['read_amplification']:.3g}",
         "bytes that are not for later steps per byte of batches "
         f"({format_bytes(f['used_bytes_per_node'])})"],
        ["fetched again", format_bytes(f["refetched_bytes_per_node"]),
         f"{f['bypassed_per_node']:.3g} shards found no room, "
         f"{f['row_reads_per_node']:.4g} rows were read one by one"],
        ["filling caches", f"{f['peak_prefill_per_byte_used']:.3g}",
         "bytes in the busiest second per byte used, of shards that are not needed within two minutes"],
        ["requests", format_count(f["requests"]),
         f"{f['requests_per_second']:,.4g}/s of all nodes, {f['peak_requests_per_second']:,.0f} in the "
         "busiest second"],
    ]  # fmt: skip


def _report_sweep(
    names: Sequence[str],
    shown: Sequence[Mapping[str, str]],
    results: Sequence[Mapping[str, Any]],
    arguments: argparse.Namespace,
) -> None:
    rows = [dict(result) | dict(settings) for result, settings in zip(results, shown, strict=True)]
    if arguments.plot is not None:
        from shardkit.tools.simulate.plot import plot_sweep

        plot_sweep(names, rows, arguments.plot)
    if arguments.json:
        print_json({"swept": list(names), "runs": rows})
        return
    columns = [
        *names, "first batch", "stalled steps", "time lost", "wait p99", "hit rate", "read/used", "MB/s/node",
        "requests/s",
    ]  # fmt: skip
    table = [
        [
            *(row[name] for name in names),
            format_seconds(row["first_batch_seconds"]),
            f"{100 * row['stalled_steps_share']:.3g}%",
            f"{100 * row['stall_share']:.3g}%",
            format_seconds(row["wait_p99_seconds"]),
            f"{100 * row['hit_rate']:.3g}%",
            f"{row['read_amplification']:.3g}",
            f"{row['fetched_bytes_per_node_per_second'] / 1e6:.3g}",
            f"{row['requests_per_second']:,.3g}",
        ]
        for row in rows
    ]
    print_columns("", columns, table, left=())
