"""`shardkit plan`: estimate the resources of a build or a training run before it starts.

A plan is only as good as its assumptions, so each quantity is printed with its value and its origin: given,
measured or assumed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from shardkit.cli.common import (
    Quantity,
    add_json_argument,
    add_override_argument,
    add_quantities,
    add_storage_arguments,
    count,
    format_rate,
    print_columns,
    print_json,
    read_quantities,
    storage_options,
)
from shardkit.cli.declared import add_keys, add_options, argument, settings
from shardkit.tools.plan.quantities import (
    Prices,
    format_count,
    format_seconds,
    parse_count,
    parse_number,
    parse_rate,
    parse_seconds,
    parse_share,
)
from shardkit.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from shardkit.tools.plan.build import BuildNeeds, BuildPlan, Funnel, Measured
    from shardkit.tools.plan.train import TrainNeeds, TrainPlan


def _days(text: str) -> Fraction:
    return parse_number(text) * 86400


def _show_days(seconds: Any) -> str:
    return f"{float(seconds / 86400):g} days"


def _parts(text: str) -> frozenset[str]:
    return frozenset() if text == "none" else frozenset(map(str.strip, text.split(",")))


def _yes(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError(f"must be yes or no, not {text!r}")
    return text == "yes"


def _number(value: Any) -> str:
    return f"{float(value):.3g}"


def _dollars(value: Any) -> str:
    return f"${float(value):g}"


def _money(dollars: Any) -> str:
    """Return an amount as text, in whole dollars from 100 on."""
    return f"${float(dollars):,.0f}" if dollars >= 100 else f"${float(dollars):,.2f}"


def _percent(share: Any) -> str:
    return f"{100 * float(share):.3g}%"


def _bytes(value: Any) -> str:
    return format_bytes(float(value))


SHARD_BYTES = Quantity(
    "--shard-bytes", "shard_bytes", parse_bytes, format_bytes, "size of a shard", "BYTES", "64MiB"
)
_OF_PRICES = "shardkit.tools.plan.quantities:Prices"
_PRICES = {
    name: Quantity(f"--price {name}", name, parse_number, _dollars, price.doc.rstrip("."), "$",
                   f"{float(getattr(Prices(), name)):g}")
    for name, price in settings(_OF_PRICES).items()
}  # fmt: skip
TRAIN = (
    Quantity("--tokens", "tokens", parse_count, format_count, "tokens to train on, such as 14.8e12 or 14.8T",
             "N", required=True),
    Quantity("--days", "seconds", _days, _show_days, "duration of the run", "D", required=True),
    Quantity("--gpus", "gpus", parse_count, lambda v: f"{v:,}", "number of GPUs", "N", required=True),
    Quantity("--bytes-per-token", "bytes_per_token", parse_number, _number,
             "bytes per stored token; 4 for uint32, 2 for uint16", "B", "4"),
    Quantity("--gpus-per-node", "gpus_per_node", parse_count, str, "GPUs that share a machine and its cache",
             "N", "8"),
    Quantity("--sequence-length", "sequence_length", parse_count, lambda v: f"{v:,}", "tokens per sequence",
             "N", "4096"),
    Quantity("--batch-size", "batch_size", parse_count, "{:,}".format, "sequences per GPU and step", "N",
             "8"),
    Quantity("--epochs", "epochs", parse_number, _number, "passes over the dataset", "N", "1"),
    SHARD_BYTES,
    Quantity("--lanes", "lanes", parse_count, str,
             "lanes of the shuffle; default: the loader's, a power of two that grows with the shards", "N"),
    Quantity("--window", "window", parse_count, "{:,}".format,
             "samples that a lane shuffles together; default: the loader's, the samples of two shards, or of "
             "64 shards over all lanes, and larger ones with --shuffled no", "N"),
    Quantity("--shuffled", "is_shuffled", _yes, lambda v: "yes" if v else "no",
             "whether rows were shuffled when they were written, as builds do; no: converted and third-party "
             "data", "yes|no", "yes"),
    Quantity("--bandwidth", "node_bytes_per_second", parse_rate, format_rate,
             "network bandwidth of a node; 10Gbit/s is 1.25 GB/s", "RATE", "10Gbit/s"),
    Quantity("--connection-bandwidth", "connection_bytes_per_second", parse_rate, format_rate,
             "bandwidth of one request", "RATE", "80MB/s"),
    Quantity("--latency", "latency_seconds", parse_seconds, format_seconds,
             "time to the first byte of a request", "TIME", "50ms"),
    Quantity("--measured", "measured_tokens_per_second", parse_number, lambda v: f"{float(v):,.0f}",
             "tokens/s that the loaders of a node deliver, as a benchmark or loader.stats() measured; "
             "default: enough", "N"),
    *(price for name, price in _PRICES.items() if name != "core_hour"),
)  # fmt: skip
BUILD = (
    Quantity("--tokens", "tokens", parse_count, format_count,
             "size of the dataset in tokens, such as 14.8e12; or give --raw", "N"),
    Quantity("--raw", "raw", parse_bytes, _bytes,
             "bytes of raw text, instead of --tokens; measured for a recipe: all its inputs", "BYTES"),
    Quantity("--bytes-per-token-of-text", "text_bytes_per_token", parse_number, _number,
             "bytes of kept text per token; 4 to 4.8 for English, less for code", "B", "4"),
    Quantity("--speed", "core_bytes_per_second", parse_rate, lambda v: f"{format_bytes(float(v))}/s/core",
             "raw text that one core processes per second, over the whole build", "RATE", "10MB/s/core"),
    Quantity("--days", "seconds", _days, _show_days, "time limit of the build", "D", "14"),
    Quantity("--stored-per-text", "stored_bytes_per_text_byte", parse_number, _number,
             "stored bytes per byte of raw text; 0.3 to 0.4 if compressed", "X", "1"),
    Quantity("--token-bytes", "token_bytes", parse_number, _number,
             "bytes per stored token; 4 for uint32, 2 for uint16 (vocabularies up to 65,536)", "B", "4"),
    Quantity("--padding", "padding", parse_number, _percent, "share of padding in the output", "X", "0"),
    SHARD_BYTES,
    Quantity("--memory", "memory", parse_bytes, _bytes,
             "memory per task; the key `memory` of the recipe", "BYTES", "2GB"),
    Quantity("--document-bytes", "document_bytes", parse_number, lambda v: f"{float(v):,.0f}",
             "bytes of kept text per document; 2,000 to 5,000 for web pages", "B", "2600"),
    Quantity("--split-bytes", "split_bytes", parse_number, _bytes,
             "raw text per compressed input file; plain files are split every 64 MiB", "B", "1e9"),
    Quantity("--dedup", "dedup", _parts, lambda parts: ",".join(sorted(parts)) or "none",
             "duplicate removal: url, exact, lines, near, semantic, spans, or none; as in a recipe",
             "PARTS", "exact,near"),
    *(price for name, price in _PRICES.items() if name != "gpu_hour"),
)  # fmt: skip
_SHOWN_STAGES = 10


@dataclass(frozen=True, slots=True)
class _Plan:
    """The output of a plan: tables as (title, columns, rows), plain results, quantities and notes."""

    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]]
    results: Mapping[str, Any]
    values: Mapping[str, Any]
    origins: Mapping[str, str]
    notes: Sequence[str]


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb and its two kinds."""
    parser = verbs.add_parser(
        "plan",
        help="estimate what a build or a training run needs: raw input, cores, disk, bandwidth, cache, cost",
        description="Compute resources from numbers of tokens. `plan train` computes tokens/s, bytes/s, "
        "cache, prefetch and requests from tokens, days and GPUs. `plan build` computes raw text, cores, "
        "disk, requests and cost from tokens and the share that each stage keeps, assumed or measured on a "
        "part of the real input. Every assumption is printed with its default and can be overridden.",
        allow_abbrev=False,
    )
    add_json_argument(parser)
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for kind, quantities, plan in ((_add_train(kinds), TRAIN, _train), (_add_build(kinds), BUILD, _build)):
        # --json may come before or after the kind; SUPPRESS keeps the kind from resetting an earlier --json.
        add_json_argument(kind, default=argparse.SUPPRESS)
        kind.add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS,
            help="show the traceback of an error (default: one line)",
        )
        prices = [each.name for each in quantities if each.name in _PRICES]
        add_quantities(kind, [each for each in quantities if each.name not in _PRICES])
        add_keys(kind, "--price", "a price in dollars", _OF_PRICES, prices, parse=parse_number)
        kind.set_defaults(plan=plan, quantities=quantities, parser=kind)
    parser.set_defaults(run=run)


def _add_train(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    return kinds.add_parser(
        "train",
        help="compute tokens/s, bytes/s, cache, prefetch, requests and cost from tokens, days and GPUs",
        description="Compute what the data input of a training run must deliver. KB, MB, GB are 10**3, "
        "10**6, 10**9 bytes; KiB, MiB, GiB are powers of 1,024.",
        allow_abbrev=False,
    )


def _add_build(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    parser = kinds.add_parser(
        "build",
        help="compute raw input, cores, disk, requests and cost from tokens and retention",
        description="Compute the resources for building a dataset. The share that each stage keeps is "
        "assumed (--retention), taken from a finished dataset (--from), or measured by building from a part "
        "of a recipe's input (RECIPE, --sample), which also measures speed and disk. Options override "
        "measurements.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "recipe", metavar="RECIPE", nargs="?", help="measure this recipe on a part of its input (YAML file)"
    )
    parser.add_argument(
        "--retention",
        action="append",
        default=[],
        type=argument(_stage),
        metavar="NAME=SHARE",
        help="share of the text that a stage keeps, such as dedup=0.5; give it once for each stage, in order "
        "(default: everything is kept)",
    )
    parser.add_argument(
        "--from",
        dest="dataset",
        metavar="DATASET",
        help="take retention and bytes per token from the card of a finished dataset (default: none)",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--sample",
        type=argument(parse_share),
        metavar="SHARE",
        help="share of the recipe's input, by stored bytes, to build from (default: 0.01)",
    )
    size.add_argument(
        "--sample-bytes",
        type=argument(parse_bytes),
        metavar="BYTES",
        help="size of the sample in stored bytes, such as 1GB (default: as set by --sample)",
    )
    add_options(parser, "shardkit.writers.executors:Execution", "workers", number=count)
    add_override_argument(parser, "pack.sequence_length=4096")
    add_storage_arguments(parser)
    return parser


def _stage(text: str) -> tuple[str, Fraction]:
    name, mark, share = text.rpartition("=")
    if not mark or not name:
        raise ValueError(f"{text!r} must be NAME=SHARE, such as dedup=0.5")
    return name, parse_share(share)


def run(arguments: argparse.Namespace) -> int:
    """Make the plan and print it."""
    make: Callable[[argparse.Namespace], _Plan] = arguments.plan
    try:
        plan = make(arguments)
    except ValueError as error:  # quantities contradict each other
        arguments.parser.error(str(error))
    quantities = [quantity for quantity in arguments.quantities if quantity.name in plan.values]
    if arguments.json:
        inputs = {
            each.name: {"value": plan.values[each.name], "origin": plan.origins[each.name]}
            for each in quantities
        }
        print_json(_plain({"inputs": inputs, **plan.results, "notes": plan.notes}))
        return 0
    for title, columns, rows in plan.tables:
        left = [number for number, name in enumerate(columns) if number == 0 or name == "how"]
        print_columns(title, columns, rows, left=left)
        sys.stdout.write("\n")
    sources = [
        [plan.origins[each.name], each.flag, each.show(plan.values[each.name]), each.help.partition(";")[0]]
        for each in quantities
    ]
    print_columns("From", [""] * 4, sources, left=range(4))
    sys.stdout.flush()
    for note in plan.notes:
        sys.stderr.write(f"shardkit: note: {note}\n")
    return 0


def _plain(value: Any) -> Any:
    """Return a value as plain data for JSON, with fractions as numbers."""
    if isinstance(value, Fraction):
        return int(value) if value.denominator == 1 else float(value)
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, frozenset):
        return sorted(value)
    return value


def _train(arguments: argparse.Namespace) -> _Plan:
    from shardkit.tools.plan.train import TrainNeeds, plan_train

    values, origins = read_quantities(arguments, TRAIN)
    prices = Prices(**{name: value for name, value in values.items() if name in _PRICES})
    needs = TrainNeeds(**{n: v for n, v in values.items() if n not in _PRICES}, prices=prices)
    plan = plan_train(needs)
    for name in ("lanes", "window"):
        if name not in values:
            values[name], origins[name] = getattr(plan, name), "assumed"
    results = asdict(plan)
    del results["lanes_per_node"]
    return _Plan(_train_tables(needs, plan), results, values, origins, _train_notes(needs, plan))


def _train_tables(
    needs: TrainNeeds, plan: TrainPlan
) -> list[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
    parts = (1, plan.nodes, needs.gpus)
    rates = [
        ["tokens/s", *(f"{float(plan.tokens_per_second / n):,.0f}" for n in parts)],
        ["bytes/s used", *(format_rate(plan.bytes_per_second / n) for n in parts)],
        ["bytes/s fetched", format_rate(plan.bytes_per_second * plan.fetch_factor),
         format_rate(plan.fetched_per_second_per_node), ""],
    ]  # fmt: skip
    run = [
        ["duration", format_seconds(plan.run_seconds), "longer than --days if the loaders are slower"],
        ["steps", f"{plan.steps:,}",
         f"global batch of {plan.global_batch:,} sequences, "
         f"{plan.global_batch * needs.sequence_length:,} tokens"],
        ["step time", format_seconds(plan.step_seconds), "tokens of a global batch / (tokens/s)"],
        ["dataset", _bytes(plan.dataset_bytes), "tokens / epochs x bytes per token"],
        ["shards", f"{plan.shards:,}", f"of {format_bytes(needs.shard_bytes)}"],
    ]  # fmt: skip
    node = [
        ["lanes", f"{max(plan.lanes_per_node)} of {plan.lanes}",
         f"{plan.nodes:,} nodes; a byte is fetched by {float(plan.fetch_factor):g} of them on average"],
        ["window", f"{plan.window:,}", f"samples, {format_bytes(plan.window_bytes)} of each lane"],
        ["minimum cache", format_bytes(plan.cache_bytes), "lanes x (one window + two shards)"],
        ["network used", _percent(plan.network_share), f"of {format_rate(needs.node_bytes_per_second)}"],
        ["fetch of a shard", format_seconds(plan.fetch_seconds),
         "latency + shard / bandwidth of one request: prefetch at least this long ahead"],
        ["prefetch window", f"{plan.prefetch_steps:,} step{'s' * (plan.prefetch_steps > 1)}",
         f"or {_bytes(plan.prefetch_bytes)}: fetched bytes/s x fetch of a shard"],
        ["fetches in flight", _number(plan.fetches_in_flight),
         "Little's law: shards/s x fetch of a shard; each GPU's loader has 16 connections"],
    ]  # fmt: skip
    how = {"reads and traffic": "requests and GB read", "dataset stored": "for the duration of the run",
           "GPUs": f"for {_show_days(plan.run_seconds)}"}  # fmt: skip
    costs = [(name, cost) for name, cost in plan.costs.items() if name != "GPUs" or needs.prices.gpu_hour]
    store = [
        ["requests", f"{plan.gets:,}",
         f"one per shard and node that reads it; {_number(plan.gets / needs.seconds)}/s"],
        ["traffic", _bytes(plan.fetched_bytes), "read from the store"],
        *([name, _money(cost), how[name]] for name, cost in costs),
    ]  # fmt: skip
    return [
        ("Rates", ("", "in total", "per node", "per GPU"), rates),
        ("Run", ("", "", "how"), run),
        ("Input of a node", ("", "", "how"), node),
        ("Store", ("", "", "how"), store),
    ]


def _train_notes(needs: TrainNeeds, plan: TrainPlan) -> list[str]:
    notes = []
    if plan.fetch_factor > 1:
        better = 1 << (plan.nodes - 1).bit_length()
        hint = f"; --lanes {better} gives each node lanes of its own" if better > plan.lanes else ""
        notes.append(
            f"{plan.lanes} lanes for {plan.nodes:,} nodes: each byte of the dataset is fetched by "
            f"{_number(plan.fetch_factor)} nodes on average{hint}"
        )
    if (able := needs.measured_tokens_per_second) is not None and plan.run_seconds > needs.seconds:
        price = f" and cost {_money(plan.waiting_dollars)} of waiting GPUs" if needs.prices.gpu_hour else ""
        needed = float(plan.tokens_per_second / plan.nodes)
        notes.append(
            f"the loaders are too slow: a node needs {needed:,.0f} tokens/s "
            f"and gets {float(able):,.0f}, so {_show_days(needs.seconds)} become "
            f"{_show_days(plan.run_seconds)}{price}"
        )
    if plan.network_share > 1:
        notes.append("the nodes' network is too slow for this, with any cache and any window")
    elif plan.fetches_in_flight > 16 * needs.gpus_per_node:
        notes.append(
            "more fetches must be in flight than the loaders' 16 connections per GPU: raise connections"
        )
    return notes


def _build(arguments: argparse.Namespace) -> _Plan:
    from shardkit.tools.plan.build import MANY_TASKS, BuildNeeds, plan_build

    found, raw, notes = _measure(arguments)
    funnel, funnel_origin = _funnel(arguments, found)
    facts = {} if found is None else {q.name: getattr(found, q.name, None) for q in BUILD}
    # Leave out the size of the measured build: the goal of the plan is the size that the user gives.
    facts = {name: value for name, value in facts.items() if name != "tokens"} | {"raw": raw}
    if arguments.tokens is not None and arguments.raw is not None:
        raise ValueError("give either --tokens or --raw, not both: each is computed from the other")
    if arguments.tokens is not None:
        facts["raw"] = None
    values, origins = read_quantities(arguments, BUILD, facts)
    if "tokens" not in values and "raw" not in values:
        raise ValueError("give --tokens, --raw, --from DATASET, or a RECIPE to measure")
    prices = Prices(**{name: value for name, value in values.items() if name in _PRICES})
    rest: dict[str, Any] = {n: v for n, v in values.items() if n not in _PRICES and n != "raw"}
    measured = {} if found is None else {"shape": found.shape, "text_output": found.text_output}
    needs = BuildNeeds(**({"tokens": 1} | rest | measured), funnel=funnel, prices=prices)
    if "raw" in values:
        needs = BuildNeeds.of_raw(Fraction(values["raw"]), needs)
    plan = plan_build(needs)
    results = _build_results(needs, plan, funnel_origin, found)
    if plan.tasks > MANY_TASKS:
        notes.append(
            f"{plan.tasks:,} tasks take {format_seconds(plan.driver_seconds)} of CPU time and "
            f"{_bytes(plan.driver_bytes)} of memory in the driver: use fewer, larger input files"
        )
    return _Plan(_build_tables(needs, plan, funnel_origin), results, values, origins, notes)


def _measure(arguments: argparse.Namespace) -> tuple[Measured | None, int | None, list[str]]:
    """Return measurements of a dataset or a sample, the bytes of raw text in all inputs, and notes."""
    from shardkit.tools.plan.build import measured_from_card

    if arguments.recipe is None and (arguments.sample is not None or arguments.sample_bytes is not None):
        raise ValueError("--sample and --sample-bytes need a RECIPE whose input is sampled")
    if arguments.recipe is not None and arguments.dataset is not None:
        raise ValueError("give either a RECIPE to measure or --from DATASET, not both")
    if arguments.dataset is not None:
        from shardkit.card import DatasetCard
        from shardkit.datasets.dataset import open_dataset

        with open_dataset(arguments.dataset, storage=storage_options(arguments)) as dataset:
            found = measured_from_card(dataset.card or DatasetCard({}, dataset.location))
        return found, found.read_bytes, []
    if arguments.recipe is None:
        return None, None, []
    from shardkit.tools.plan.sampling import measure_sample

    sample = measure_sample(
        arguments.recipe,
        share=arguments.sample,
        sample_bytes=arguments.sample_bytes,
        overrides=arguments.overrides,
        workers=arguments.workers,
        progress=not arguments.quiet,
        storage=storage_options(arguments),
    )
    return sample.measured, sample.whole_text_bytes, list(sample.notes)


def _funnel(arguments: argparse.Namespace, found: Measured | None) -> tuple[Funnel, str]:
    from shardkit.tools.plan.build import Funnel, Stage

    if arguments.retention:
        return Funnel(tuple(Stage(name, share) for name, share in arguments.retention)), "given"
    if found is not None:
        return found.funnel, "measured"
    return Funnel(()), "assumed: everything is kept"


def _build_tables(
    needs: BuildNeeds, plan: BuildPlan, funnel_origin: str
) -> list[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
    days = _show_days(needs.seconds)
    funnel = [
        [stage.name, _percent(stage.retention), _bytes(read), _bytes(left)]
        for stage, read, left in needs.funnel.amounts(plan.raw_bytes)
    ]
    funnel.append(
        ["all stages", _percent(needs.funnel.retention), _bytes(plan.raw_bytes), _bytes(plan.kept_bytes)]
    )
    build = [
        ["tokens" if needs.shape.packed else "tokens of the text", format_count(needs.tokens),
         f"{_number(needs.text_bytes_per_token)} bytes of text per token"],
        ["raw text", _bytes(plan.raw_bytes),
         f"kept text / {_percent(needs.funnel.retention)}; {_bytes(plan.raw_stored_bytes)} as stored"],
        ["cores", f"{plan.cores:,}",
         f"for {days} at {_bytes(needs.core_bytes_per_second)}/s/core; "
         f"takes {format_seconds(plan.seconds_with(plan.cores))}"],
        ["core-hours", f"{float(plan.core_seconds / 3600):,.0f}", "raw text / speed"],
        ["work folder", _bytes(plan.work_bytes), "the most at a time, shards included"],
        ["output", _bytes(plan.output_bytes),
         f"{plan.shards:,} shards of {format_bytes(needs.shard_bytes)}; of all outputs"],
        ["reads of the store", f"{plan.gets:,}", "raw input, and a work folder if it is in a store"],
        ["writes of the store", f"{plan.puts:,}", "a work folder as above, in parts of 16 MiB; the output"],
        ["memory per task", _bytes(needs.memory), "needed for each core"],
        ["tasks", f"{plan.tasks:,}", "of all stages"],
        ["driver", format_seconds(plan.driver_seconds),
         f"CPU time, {_bytes(plan.driver_bytes)} of memory; with Ray, on a separate node"],
    ]  # fmt: skip
    how = {"raw input stored": f"for {days}"}
    cost = [
        *([name, _money(dollars), how.get(name, "")] for name, dollars in plan.costs.items()),
        ["total", _money(sum(plan.costs.values(), Fraction(0))), ""],
        ["output stored", _money(plan.output_month_cost), "per 30 days after the build"],
    ]
    return [
        (f"Funnel ({funnel_origin})", ("stage", "keeps", "text in", "text out"), funnel),
        ("Build", ("", "", "how"), build),
        _store_table(plan),
        ("Cost", ("", "", "how"), cost),
    ]


def _store_table(plan: BuildPlan) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    from shardkit.writers.stages.needs import together

    most = sorted(plan.stages, key=lambda stage: -stage.gets)[:_SHOWN_STAGES]
    rows = [
        [stage.stage, f"{stage.tasks:,}", f"{stage.gets:,}", f"{stage.puts:,}",
         _bytes(stage.read_bytes), _bytes(stage.written_bytes)]
        for stage in (*(stage for stage in plan.stages if stage in most), together(plan.stages))
    ]  # fmt: skip
    columns = ("stage", "tasks", "reads", "writes", "bytes read", "written")
    return f"Work and output in a store: total, and the {_SHOWN_STAGES} top readers", columns, rows


def _build_results(
    needs: BuildNeeds, plan: BuildPlan, origin: str, found: Measured | None
) -> Mapping[str, Any]:
    stages = [
        {"stage": stage.name, "retention": stage.retention, "in_bytes": read, "out_bytes": left}
        for stage, read, left in needs.funnel.amounts(plan.raw_bytes)
    ]
    results = {"tokens": needs.tokens, "retention": needs.funnel.retention, "funnel_origin": origin}
    results |= {"funnel": stages} | asdict(plan)
    if found is not None:
        facts = ("read_bytes", "stored_bytes", "kept_bytes", "tokens")
        results["measured_on"] = {name: getattr(found, name) for name in facts}
    return results
