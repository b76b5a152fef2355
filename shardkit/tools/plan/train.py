"""Computes rates, cache, prefetch, requests and cost of a training run from its tokens, days and GPUs.

    tokens/s   = tokens / seconds                     bytes/s = tokens/s * bytes_per_token
    in flight  = shards/s * seconds of one fetch      (Little's law: concurrent fetches needed to keep up)
    lead       = seconds of one fetch                 (a fetch that starts later delays a step)
    cache      = lanes of a node * (a window + two shards)         as in shardkit.loaders.defaults
    run        = seconds * max(1, tokens/s of a node / what its loaders were measured to deliver)

A node fetches whole shards of the lanes that its ranks read. If there are fewer lanes than nodes, several
nodes read the same lane, and each fetches its shards: `fetch_factor` is how often each byte of the dataset is
fetched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil

from shardkit.order.order import OrderSpec, default_lanes, default_window, rank_slice
from shardkit.order.residency import BatchLanes
from shardkit.tools.plan.quantities import Prices


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainNeeds:
    """The inputs of a training plan. Defaults are assumptions."""

    tokens: int
    """Tokens to train on, over all epochs."""
    seconds: Fraction
    gpus: int
    bytes_per_token: Fraction = Fraction(4)
    """Stored bytes per token: 4 (uint32) or 2 (uint16), divided by (1 - share of padding)."""
    gpus_per_node: int = 8
    sequence_length: int = 4096
    batch_size: int = 8
    """Sequences per GPU and step."""
    epochs: Fraction = Fraction(1)
    """Number of passes over the dataset."""
    shard_bytes: int = 1 << 26
    lanes: int | None = None
    """Number of lanes; None means the loader's default."""
    window: int | None = None
    """Size of the shuffle window, in samples; None means the loader's default."""
    is_shuffled: bool = True
    """Whether rows were shuffled when they were written; default windows are larger if they were not."""
    node_bytes_per_second: Fraction = Fraction(1_250_000_000)
    """Bandwidth from the store to a node: 1.25 GB/s is 10 Gbit/s."""
    connection_bytes_per_second: Fraction = Fraction(80_000_000)
    """Bandwidth of one request, in bytes per second."""
    latency_seconds: Fraction = Fraction("0.05")
    """Time until a request's first byte, in seconds."""
    measured_tokens_per_second: Fraction | None = None
    """Tokens per second that the loaders of a node deliver when nothing else slows them; None: enough."""
    prices: Prices = field(default_factory=Prices)

    def __post_init__(self) -> None:
        numbers = (
            "tokens", "seconds", "gpus", "bytes_per_token", "gpus_per_node", "sequence_length", "batch_size",
            "epochs", "shard_bytes", "node_bytes_per_second", "connection_bytes_per_second",
        )  # fmt: skip
        for name in numbers:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {float(getattr(self, name)):g}")
        if self.measured_tokens_per_second is not None and self.measured_tokens_per_second <= 0:
            raise ValueError("measured_tokens_per_second must be above 0")
        if self.latency_seconds < 0:
            raise ValueError("latency_seconds must not be negative")
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise ValueError(
                f"{self.gpus:,} GPUs do not fill nodes of {self.gpus_per_node}: give a multiple of it, or "
                "another gpus_per_node"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainPlan:
    """The result of planning a training run; rates and bytes are for all nodes unless named otherwise."""

    nodes: int
    tokens_per_second: Fraction
    tokens_per_second_per_gpu: Fraction
    bytes_per_second: Fraction
    bytes_per_second_per_node: Fraction
    fetched_per_second_per_node: Fraction
    """Bytes per second fetched by the node that reads the most lanes."""
    fetch_factor: Fraction
    """Average number of nodes that fetch each byte of the dataset."""
    global_batch: int
    """Sequences per step, over all GPUs."""
    steps: int
    step_seconds: Fraction
    sample_bytes: int
    dataset_bytes: Fraction
    shards: int
    lanes: int
    lanes_per_node: tuple[int, ...]
    window: int
    """Number of samples that a lane shuffles together."""
    window_bytes: int
    cache_bytes: int
    """Minimum cache of a node: for each lane, a window and the shards in which it begins and ends."""
    network_share: Fraction
    """Share of a node's bandwidth in use; above 1, neither a cache nor a window helps."""
    fetch_seconds: Fraction
    """Duration of fetching one shard over one connection, in seconds."""
    fetches_in_flight: Fraction
    """Average number of concurrent fetches per node."""
    prefetch_bytes: Fraction
    """Bytes that a node consumes during one fetch."""
    prefetch_steps: int
    gets: int
    """Number of read requests of the whole run; each reads a shard."""
    fetched_bytes: Fraction
    """Bytes fetched by all nodes in the whole run."""
    run_seconds: Fraction
    """Duration of the run: longer than wanted if the loaders deliver less than is needed."""
    waiting_dollars: Fraction
    """Price of the GPUs while they wait for loaders that deliver less than is needed."""
    costs: Mapping[str, Fraction]
    """Costs by item, in dollars."""


def plan_train(needs: TrainNeeds) -> TrainPlan:
    """Plan a training run by the formulas in the module docstring."""
    nodes = ceil(Fraction(needs.gpus, needs.gpus_per_node))
    tokens_per_second = needs.tokens / needs.seconds
    bytes_per_second = tokens_per_second * needs.bytes_per_token
    global_batch = needs.batch_size * needs.gpus
    step_tokens = global_batch * needs.sequence_length
    step_seconds = step_tokens / tokens_per_second
    sample_bytes = ceil(needs.sequence_length * needs.bytes_per_token)
    dataset_bytes = needs.tokens / needs.epochs * needs.bytes_per_token
    shards = ceil(dataset_bytes / needs.shard_bytes)

    samples = ceil(needs.tokens / needs.epochs / needs.sequence_length)
    lanes = needs.lanes or default_lanes(shards)
    window = needs.window or default_window(samples, shards, lanes, is_shuffled=needs.is_shuffled)
    batch_lanes = BatchLanes(OrderSpec(0, lanes, window), global_batch)
    parts = (rank_slice(global_batch, node, nodes) for node in range(nodes))
    lanes_per_node = tuple(len(batch_lanes.of_part(part)) for part in parts)
    most_lanes = max(lanes_per_node)
    # fetch_factor is at least 1, because each lane is fetched at least once. The sum of lanes_per_node may
    # still be below `lanes`: if the batch size does not divide the lanes, `of_part` compares only some
    # batches and may miss lanes.
    fetch_factor = max(Fraction(1), Fraction(sum(lanes_per_node), lanes))
    fetched_per_second = bytes_per_second * most_lanes / lanes
    fetch_seconds = needs.latency_seconds + needs.shard_bytes / needs.connection_bytes_per_second
    gets = ceil(shards * needs.epochs * fetch_factor)
    fetched_bytes = dataset_bytes * needs.epochs * fetch_factor
    run_seconds = needs.seconds
    if (able := needs.measured_tokens_per_second) is not None:
        run_seconds *= max(Fraction(1), tokens_per_second / nodes / able)
    return TrainPlan(
        nodes=nodes,
        tokens_per_second=tokens_per_second,
        tokens_per_second_per_gpu=tokens_per_second / needs.gpus,
        bytes_per_second=bytes_per_second,
        bytes_per_second_per_node=bytes_per_second / nodes,
        fetched_per_second_per_node=fetched_per_second,
        fetch_factor=fetch_factor,
        global_batch=global_batch,
        steps=ceil(Fraction(needs.tokens, step_tokens)),
        step_seconds=step_seconds,
        sample_bytes=sample_bytes,
        dataset_bytes=dataset_bytes,
        shards=shards,
        lanes=lanes,
        lanes_per_node=lanes_per_node,
        window=window,
        window_bytes=window * sample_bytes,
        cache_bytes=most_lanes * (window * sample_bytes + 2 * needs.shard_bytes),
        network_share=fetched_per_second / needs.node_bytes_per_second,
        fetch_seconds=fetch_seconds,
        fetches_in_flight=fetched_per_second / needs.shard_bytes * fetch_seconds,
        prefetch_bytes=fetched_per_second * fetch_seconds,
        prefetch_steps=ceil(fetch_seconds / step_seconds),
        gets=gets,
        fetched_bytes=fetched_bytes,
        run_seconds=run_seconds,
        waiting_dollars=needs.prices.computing(needs.gpus, run_seconds - needs.seconds),
        costs=_costs(needs, gets, fetched_bytes, dataset_bytes, run_seconds),
    )


def _costs(
    needs: TrainNeeds, gets: int, fetched_bytes: Fraction, dataset_bytes: Fraction, run_seconds: Fraction
) -> dict[str, Fraction]:
    prices = needs.prices
    return {
        "reads and traffic": prices.reading(gets, fetched_bytes),
        "dataset stored": prices.storing(dataset_bytes, run_seconds),
        "GPUs": prices.computing(needs.gpus, run_seconds),
    }
