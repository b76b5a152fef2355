"""`shardkit plan train`: tokens, days and GPUs to what the input must deliver."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from shardkit.cli.common import Quantity, add_quantities, origins_of, values_of
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
    from shardkit.tools.plan.train import TrainPlan

__all__ = ["PRICES", "QUANTITIES", "Plan", "add_parser", "format_money", "make"]


def format_money(dollars: Any) -> str:
    """Whole dollars above 100."""
    return f"${float(dollars):,.0f}" if dollars >= 100 else f"${float(dollars):,.2f}"


def _days(text: str) -> Fraction:
    return parse_number(text) * 86400


def _show_days(seconds: Any) -> str:
    return f"{float(seconds / 86400):g} days"


def _show_number(value: Any) -> str:
    return f"{float(value):g}"


def _show_rate(value: Any) -> str:
    return f"{format_bytes(float(value))}/s"


def _show_bytes(value: Any) -> str:
    return format_bytes(float(value))


PRICES = (
    Quantity(
        "--price-core-hour", "core_hour", parse_number, format_money,
        "dollars for a core and hour; AWS list, on demand", "$", "0.05",
    ),
    Quantity(
        "--price-get", "get_1000", parse_number, lambda v: f"${float(v):g}",
        "dollars for 1,000 reads; AWS list, S3 Standard", "$", "0.0004",
    ),
    Quantity(
        "--price-put", "put_1000", parse_number, lambda v: f"${float(v):g}",
        "dollars for 1,000 writes; AWS list, S3 Standard", "$", "0.005",
    ),
    Quantity(
        "--price-gb-month", "gb_month", parse_number, lambda v: f"${float(v):g}",
        "dollars for a GB stored 30 days; AWS list, S3 Standard", "$", "0.023",
    ),
    Quantity(
        "--price-egress-gb", "egress_gb", parse_number, lambda v: f"${float(v):g}",
        "dollars for a GB read; inside a region nothing, to another AWS region 0.02, to the Internet 0.09",
        "$", "0",
    ),
)  # fmt: skip
QUANTITIES = (
    Quantity("--tokens", "tokens", parse_count, format_count, "tokens to train on, such as 14.8e12 or 14.8T",
             "N", required=True),
    Quantity("--days", "seconds", _days, _show_days, "how long the run may take", "D", required=True),
    Quantity("--gpus", "gpus", parse_count, lambda v: f"{v:,}", "GPUs in all", "N", required=True),
    Quantity("--bytes-per-token", "bytes_per_token", parse_number, _show_number,
             "bytes of a stored token; 4 is uint32, 2 uint16", "B", "4"),
    Quantity("--gpus-per-node", "gpus_per_node", parse_count, str, "GPUs that share a machine and its cache",
             "N", "8"),
    Quantity("--sequence-length", "sequence_length", parse_count, lambda v: f"{v:,}", "tokens of a sequence",
             "N", "4096"),
    Quantity("--batch-size", "batch_size", parse_count, lambda v: f"{v:,}",
             "sequences of each GPU in a step", "N", "8"),
    Quantity("--epochs", "epochs", parse_number, _show_number, "how often the run passes over its dataset",
             "N", "1"),
    Quantity("--shard-bytes", "shard_bytes", parse_bytes, _show_bytes, "size of a shard", "BYTES", "64MiB"),
    Quantity("--lanes", "lanes", parse_count, str,
             "lanes of the shuffle; default: the loader's, a divisor of the global batch up to 64", "N"),
    Quantity("--window", "window", parse_count, lambda v: f"{v:,}",
             "samples that a lane shuffles together; default: the loader's, two windows of all lanes hold "
             "4 GiB", "N"),
    Quantity("--bandwidth", "node_bytes_per_second", parse_rate, _show_rate,
             "what a node can receive; 10Gbit/s is 1.25 GB/s", "RATE", "10Gbit/s"),
    Quantity("--connection-bandwidth", "connection_bytes_per_second", parse_rate, _show_rate,
             "what one request delivers", "RATE", "80MB/s"),
    Quantity("--latency", "latency_seconds", parse_seconds, format_seconds, "time to a request's first byte",
             "TIME", "50ms"),
    *PRICES[1:],
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan as it is shown: (title, columns, rows) of tables, plain results, and what was assumed."""

    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]]
    results: Mapping[str, Any]
    values: Mapping[str, Any]
    origins: Mapping[str, str]
    notes: Sequence[str] = field(default=())


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Register the kind."""
    parser = kinds.add_parser(
        "train",
        help="tokens, days and GPUs to tokens/s, bytes/s, cache, prefetch, requests and cost",
        description="What the input of a training run must deliver. KB, MB, GB are 10**3, 10**6, 10**9 "
        "bytes; KiB, MiB, GiB are powers of 1,024.",
        allow_abbrev=False,
    )
    add_quantities(parser, QUANTITIES)
    return parser


def make(arguments: argparse.Namespace) -> Plan:
    """The plan; ValueError if the quantities do not go together."""
    from shardkit.tools.plan.quantities import Prices
    from shardkit.tools.plan.train import TrainNeeds, TrainPlan

    values = values_of(arguments, QUANTITIES)
    names = [price.name for price in PRICES[1:]]
    prices = Prices(**{name: values[name] for name in names})
    plan = TrainPlan(TrainNeeds(**{n: v for n, v in values.items() if n not in names}, prices=prices))
    origins = origins_of(arguments, QUANTITIES)
    for name in ("lanes", "window"):
        if name not in values:
            values[name], origins[name] = getattr(plan, name), "assumed"
    tables = [
        ("Rates", ("", "in total", "per node", "per GPU"), _rates(plan)),
        ("Run", ("", "", "how"), _run_rows(plan)),
        ("Input of a node", ("", "", "how"), _node_rows(plan)),
        ("Store", ("", "", "how"), _store_rows(plan)),
    ]
    return Plan(tables, _results(plan), values, origins, _notes(plan))


def _rates(plan: TrainPlan) -> list[list[str]]:
    nodes, gpus = plan.nodes, plan.needs.gpus
    tokens, count = plan.tokens_per_second, plan.bytes_per_second
    return [
        ["tokens/s", *(f"{float(tokens / n):,.0f}" for n in (1, nodes, gpus))],
        ["bytes/s used", *(f"{format_bytes(float(count / n))}/s" for n in (1, nodes, gpus))],
        ["bytes/s fetched",
         f"{format_bytes(float(count * plan.fetch_factor))}/s",
         f"{format_bytes(float(plan.fetched_per_second_per_node))}/s", ""],
    ]  # fmt: skip


def _run_rows(plan: TrainPlan) -> list[list[str]]:
    needs = plan.needs
    return [
        ["steps", f"{plan.steps:,}",
         f"global batch of {plan.global_batch:,} sequences, "
         f"{plan.global_batch * needs.sequence_length:,} tokens"],
        ["time of a step", format_seconds(plan.step_seconds), "global batch / tokens/s"],
        ["dataset", format_bytes(float(plan.dataset_bytes)), "tokens / epochs x bytes per token"],
        ["shards", f"{plan.shards:,}", f"of {format_bytes(needs.shard_bytes)}"],
    ]  # fmt: skip


def _node_rows(plan: TrainPlan) -> list[list[str]]:
    needs, lanes = plan.needs, max(plan.lanes_per_node)
    return [
        ["lanes", f"{lanes} of {plan.lanes}",
         f"{plan.nodes:,} nodes; a byte is fetched by {float(plan.fetch_factor):g} of them on average"],
        ["window", f"{plan.window:,}", f"samples, {format_bytes(plan.window_bytes)} of each lane"],
        ["least cache", format_bytes(plan.cache_bytes), "lanes x (two windows + two shards)"],
        ["network used", f"{100 * float(plan.network_share):.3g} %",
         f"of {format_bytes(float(needs.node_bytes_per_second))}/s"],
        ["fetch of a shard", format_seconds(plan.fetch_seconds),
         "latency + shard / bandwidth of a connection: prefetch at least so far ahead"],
        ["prefetch window", f"{plan.prefetch_steps:,} step{'s' * (plan.prefetch_steps > 1)}",
         f"or {format_bytes(float(plan.prefetch_bytes))}: fetched bytes/s x fetch of a shard"],
        ["fetches in flight", f"{float(plan.fetches_in_flight):.3g}",
         "Little's law: shards/s x fetch of a shard; each GPU's loader has 16 connections"],
    ]  # fmt: skip


def _store_rows(plan: TrainPlan) -> list[list[str]]:
    per_second = plan.gets / plan.needs.seconds
    rows = [
        ["requests", f"{plan.gets:,}", f"one a shard and node that reads it; {float(per_second):.3g}/s"],
        ["traffic", format_bytes(float(plan.fetched_bytes)), "what leaves the store"],
    ]
    how = {"reads and traffic": "requests and GB read", "dataset stored": "for the time of the run"}
    return rows + [[name, format_money(cost), how[name]] for name, cost in plan.costs.items()]


def _results(plan: TrainPlan) -> dict[str, Any]:
    names = (
        "nodes", "tokens_per_second", "tokens_per_second_per_gpu", "bytes_per_second",
        "bytes_per_second_per_node", "fetched_per_second_per_node", "fetch_factor", "global_batch", "steps",
        "step_seconds", "sample_bytes", "dataset_bytes", "shards", "lanes", "window", "window_bytes",
        "cache_bytes", "network_share", "fetch_seconds", "fetches_in_flight", "prefetch_bytes",
        "prefetch_steps", "gets", "fetched_bytes", "costs",
    )  # fmt: skip
    return {name: getattr(plan, name) for name in names}


def _notes(plan: TrainPlan) -> list[str]:
    notes = []
    if plan.fetch_factor > 1:
        better = next(
            (n * plan.nodes for n in range(1, 65) if plan.global_batch % (n * plan.nodes) == 0), None
        )
        hint = f"; --lanes {better} gives each node lanes of its own" if better else ""
        notes.append(
            f"{plan.lanes} lanes for {plan.nodes:,} nodes: each byte of the dataset is fetched by "
            f"{float(plan.fetch_factor):.3g} nodes on average{hint}"
        )
    if plan.network_share > 1:
        notes.append("the nodes' network cannot deliver this: no cache and no window changes that")
    elif plan.fetches_in_flight > 16 * plan.needs.gpus_per_node:
        notes.append("more fetches must be in flight than the loaders' 16 connections per GPU: raise them")
    return notes
