"""`shardkit plan build`: tokens, or the raw text there is, to what building the dataset takes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from shardkit.cli.common import (
    Quantity,
    add_quantities,
    add_storage_arguments,
    argument,
    count,
    origins_of,
    storage_options,
    values_of,
)
from shardkit.cli.plan_train import PRICES, Plan, format_money
from shardkit.tools.plan.quantities import (
    format_count,
    format_seconds,
    parse_count,
    parse_number,
    parse_rate,
    parse_share,
)
from shardkit.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from shardkit.tools.plan.build import BuildPlan, Funnel, Measured

__all__ = ["QUANTITIES", "add_parser", "make"]


def _number(value: Any) -> str:
    return f"{float(value):.3g}"


QUANTITIES = (
    Quantity("--tokens", "tokens", parse_count, format_count,
             "tokens wanted, such as 14.8e12; or give --raw", "N"),
    Quantity("--raw", "raw", parse_bytes, format_bytes,
             "bytes of raw text there are, instead of --tokens; of a recipe: all its inputs", "BYTES"),
    Quantity("--bytes-per-token-of-text", "text_bytes_per_token", parse_number, _number,
             "bytes of kept text that make a token; English 4 to 4.8, code less", "B", "4"),
    Quantity("--speed", "core_bytes_per_second", parse_rate, lambda v: f"{format_bytes(float(v))}/s/core",
             "raw text that a core takes through the whole build", "RATE", "10MB/s/core"),
    Quantity("--days", "seconds", lambda text: parse_number(text) * 86400,
             lambda v: f"{float(v / 86400):g} days", "how long the build may take", "D", "14"),
    Quantity("--stored-per-text", "stored_bytes_per_text_byte", parse_number, _number,
             "stored bytes of a byte of raw text; compressed 0.3 to 0.4", "X", "1"),
    Quantity("--work-per-text", "work_bytes_per_text_byte", parse_number, _number,
             "bytes of the work folder for a byte of kept text, shards left out", "X", "2"),
    Quantity("--token-bytes", "token_bytes", parse_number, _number,
             "bytes of a stored token; 4 is uint32, 2 uint16 (vocabularies up to 65,536)", "B", "4"),
    Quantity("--padding", "padding", lambda text: parse_number(text), lambda v: f"{100 * float(v):.3g} %",
             "part of the output that is padding", "X", "0"),
    Quantity("--shard-bytes", "shard_bytes", parse_bytes, format_bytes, "size of a shard", "BYTES", "64MiB"),
    *PRICES,
)  # fmt: skip


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Register the kind."""
    parser = kinds.add_parser(
        "build",
        help="tokens and retention to raw input, cores, disk, requests and cost; measured with --sample",
        description="What building a dataset takes. What each stage keeps is assumed (--retention), taken "
        "from a finished dataset (--from), or measured by building from a part of a recipe's input, which "
        "measures speed and disk as well. What is given on the command line wins over what was measured.",
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
        help="what part of the text a stage keeps, such as dedup=0.5; once for each stage, in their order "
        "(default: everything is kept)",
    )
    parser.add_argument(
        "--from",
        dest="dataset",
        metavar="DATASET",
        help="take retention and bytes per token from a finished dataset's card (default: none)",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--sample",
        type=argument(parse_share),
        metavar="SHARE",
        help="part of the recipe's input, by stored bytes, to build from (default: 0.01)",
    )
    size.add_argument(
        "--sample-bytes",
        type=argument(parse_bytes),
        metavar="BYTES",
        help="as much of the input, such as 1GB (default: --sample)",
    )
    parser.add_argument(
        "--workers", type=count, metavar="N", help="processes that build the sample (default: one a core)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="replace a key of the recipe (default: as it is)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr (default: show it)")
    add_quantities(parser, QUANTITIES)
    add_storage_arguments(parser)
    return parser


def _stage(text: str) -> tuple[str, Fraction]:
    name, mark, share = text.rpartition("=")
    if not mark or not name:
        raise ValueError(f"{text!r} is not NAME=SHARE, such as dedup=0.5")
    return name, parse_share(share)


def make(arguments: argparse.Namespace) -> Plan:
    """The plan; ValueError if the quantities do not go together."""
    from shardkit.tools.plan.build import BuildNeeds, BuildPlan
    from shardkit.tools.plan.quantities import Prices

    found, raw, notes = _measure(arguments)
    funnel, funnel_origin = _funnel(arguments, found)
    facts = {} if found is None else {q.name: getattr(found, q.name, None) for q in QUANTITIES}
    # How much the measured build had is no goal: the plan is for what was asked.
    facts = {name: value for name, value in facts.items() if name != "tokens"} | {"raw": raw}
    if arguments.tokens is not None and arguments.raw is not None:
        raise ValueError("give --tokens or --raw: each follows from the other")
    if arguments.tokens is not None:
        facts["raw"] = None
    values, origins = (each(arguments, QUANTITIES, facts) for each in (values_of, origins_of))
    if "tokens" not in values and "raw" not in values:
        raise ValueError("give --tokens, --raw, --from a dataset, or a recipe to measure")
    money: dict[str, Any] = {price.name: values[price.name] for price in PRICES}
    rest: dict[str, Any] = {n: v for n, v in values.items() if n not in money and n != "raw"}
    needs = BuildNeeds(**({"tokens": 1} | rest), funnel=funnel, prices=Prices(**money))
    if "raw" in values:
        needs = BuildNeeds.of_raw(Fraction(values["raw"]), needs)
    plan = BuildPlan(needs)
    tables = [
        (f"Funnel ({funnel_origin})", ("stage", "keeps", "text in", "text out"), _funnel_rows(plan)),
        ("Build", ("", "", "how"), _build_rows(plan)),
        ("Cost", ("", "", "how"), _cost_rows(plan)),
    ]
    return Plan(tables, _results(plan, funnel_origin, found), values, origins, notes)


def _measure(arguments: argparse.Namespace) -> tuple[Measured | None, int | None, list[str]]:
    """(what was measured, bytes of raw text there are, what to know of it)."""
    from shardkit.tools.plan.build import measured_from_card

    sampling = arguments.sample is not None or arguments.sample_bytes is not None
    if arguments.recipe is None and sampling:
        raise ValueError("--sample and --sample-bytes need a RECIPE, whose input they take a part of")
    if arguments.recipe is not None and arguments.dataset is not None:
        raise ValueError("give a recipe to measure or --from a dataset, not both")
    if arguments.dataset is not None:
        from shardkit.datasets.dataset import open_dataset

        with open_dataset(arguments.dataset, storage=storage_options(arguments)) as dataset:
            card, where = dataset.card, dataset.location
        found = measured_from_card(card or {}, where)
        return found, found.read_bytes, []
    if arguments.recipe is None:
        return None, None, []
    from shardkit.tools.plan.sampling import measure_sample

    sample = measure_sample(
        arguments.recipe,
        share=None if arguments.sample is None else arguments.sample,
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


def _percent(share: Fraction) -> str:
    return f"{100 * float(share):.3g} %"


def _funnel_rows(plan: BuildPlan) -> list[list[str]]:
    rows = [
        [stage.name, _percent(stage.retention), format_bytes(float(read)), format_bytes(float(left))]
        for stage, read, left in plan.needs.funnel.amounts(plan.raw_bytes)
    ]
    total = plan.needs.funnel.retention
    both = [format_bytes(float(plan.raw_bytes)), format_bytes(float(plan.kept_bytes))]
    return [*rows, ["all stages", _percent(total), *both]]


def _build_rows(plan: BuildPlan) -> list[list[str]]:
    needs = plan.needs
    hours = plan.core_seconds / 3600
    return [
        ["tokens", format_count(needs.tokens), f"{float(needs.text_bytes_per_token):.3g} bytes of text each"],
        ["raw text", format_bytes(float(plan.raw_bytes)),
         f"kept text / {_percent(needs.funnel.retention)}; "
         f"{format_bytes(float(plan.raw_stored_bytes))} as stored"],
        ["cores", f"{plan.cores:,}",
         f"for {float(needs.seconds / 86400):g} days at "
         f"{format_bytes(float(needs.core_bytes_per_second))}/s/core; "
         f"takes {format_seconds(plan.seconds_with(plan.cores))}"],
        ["core-hours", f"{float(hours):,.0f}", "raw text / speed"],
        ["work folder", format_bytes(float(plan.work_bytes)), "kept text x bytes of work, and the shards"],
        ["output", format_bytes(float(plan.output_bytes)),
         f"{plan.shards:,} shards of {format_bytes(needs.shard_bytes)}"],
        ["reads of the store", f"{plan.gets:,}", "raw input in ranges of 4 MiB; none of local disks"],
        ["writes of the store", f"{plan.puts:,}", "shards in parts of 16 MiB"],
    ]  # fmt: skip


def _cost_rows(plan: BuildPlan) -> list[list[str]]:
    days = f"{float(plan.needs.seconds / 86400):g} days"
    how = {"raw input stored": f"for {days}"}
    rows = [[name, format_money(cost), how.get(name, "")] for name, cost in plan.costs.items()]
    total = sum(plan.costs.values(), Fraction(0))
    return [
        *rows,
        ["together", format_money(total), ""],
        ["output stored", format_money(plan.output_month_cost), "each 30 days, from then on"],
    ]


def _results(plan: BuildPlan, origin: str, found: Measured | None) -> Mapping[str, Any]:
    names = (
        "kept_bytes", "raw_bytes", "raw_stored_bytes", "core_seconds", "cores", "work_bytes", "output_bytes",
        "shards", "gets", "puts", "costs", "output_month_cost",
    )  # fmt: skip
    funnel = plan.needs.funnel
    stages = [
        {"stage": stage.name, "retention": stage.retention, "in_bytes": read, "out_bytes": left}
        for stage, read, left in funnel.amounts(plan.raw_bytes)
    ]
    results = {"tokens": plan.needs.tokens, "retention": funnel.retention, "funnel_origin": origin}
    results |= {"funnel": stages} | {name: getattr(plan, name) for name in names}
    if found is not None:
        facts = ("read_bytes", "stored_bytes", "kept_bytes", "tokens")
        results["measured_on"] = {name: getattr(found, name) for name in facts}
    return results
