"""From tokens, days and GPUs to tokens and bytes a second, cache, prefetch and requests of a training run.

    tokens/s   = tokens / seconds                     bytes/s = tokens/s * bytes_per_token
    in flight  = shards/s * seconds of one fetch      (Little's law: so many fetches at a time keep up)
    lead       = seconds of one fetch                 (what is asked for later than that comes too late)
    cache      = lanes of a node * (two windows + two shards)      as shardkit.loaders.defaults reckons

A node fetches whole shards of the lanes that its ranks read. Where lanes are fewer than nodes, several nodes
read the same lane, and each fetches its shards: `fetch_factor` says how often a byte of the dataset travels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil

from shardkit.order.order import default_lanes, default_window, rank_slice
from shardkit.order.residency import lanes_of_part
from shardkit.tools.plan.quantities import Prices

__all__ = ["TrainNeeds", "TrainPlan"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainNeeds:
    """What a run is planned from. Where a field has a default, that is an assumption."""

    tokens: int
    """Tokens that the run trains on, over all its epochs."""
    seconds: Fraction
    gpus: int
    bytes_per_token: Fraction = Fraction(4)
    """As stored: 4 (uint32) or 2 (uint16), divided by 1 - the share of padding."""
    gpus_per_node: int = 8
    sequence_length: int = 4096
    batch_size: int = 8
    """Sequences of each GPU in a step."""
    epochs: Fraction = Fraction(1)
    """How often the run passes over its dataset."""
    shard_bytes: int = 1 << 26
    lanes: int | None = None
    """None: the loader's default."""
    window: int | None = None
    """Samples; None: the loader's default."""
    node_bytes_per_second: Fraction = Fraction(1_250_000_000)
    """What a node can receive from the store: 1.25 GB/s is 10 Gbit/s."""
    connection_bytes_per_second: Fraction = Fraction(80_000_000)
    """What one request delivers."""
    latency_seconds: Fraction = Fraction("0.05")
    """Until a request's first byte."""
    prices: Prices = field(default_factory=Prices)

    def __post_init__(self) -> None:
        numbers = (
            "tokens", "seconds", "gpus", "bytes_per_token", "gpus_per_node", "sequence_length", "batch_size",
            "epochs", "shard_bytes", "node_bytes_per_second", "connection_bytes_per_second",
        )  # fmt: skip
        for name in numbers:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {float(getattr(self, name)):g}")
        if self.latency_seconds < 0:
            raise ValueError("latency_seconds must not be negative")
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise ValueError(
                f"{self.gpus:,} GPUs do not fill nodes of {self.gpus_per_node}: give a multiple, or "
                "gpus_per_node"
            )


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """What `needs` come to."""

    needs: TrainNeeds

    @property
    def nodes(self) -> int:
        return ceil(Fraction(self.needs.gpus, self.needs.gpus_per_node))

    @property
    def tokens_per_second(self) -> Fraction:
        return self.needs.tokens / self.needs.seconds

    @property
    def tokens_per_second_per_gpu(self) -> Fraction:
        return self.tokens_per_second / self.needs.gpus

    @property
    def bytes_per_second(self) -> Fraction:
        """What all GPUs together consume."""
        return self.tokens_per_second * self.needs.bytes_per_token

    @property
    def bytes_per_second_per_node(self) -> Fraction:
        return self.bytes_per_second / self.nodes

    @property
    def global_batch(self) -> int:
        """Sequences of a step over all GPUs."""
        return self.needs.batch_size * self.needs.gpus

    @property
    def steps(self) -> int:
        return ceil(Fraction(self.needs.tokens, self.global_batch * self.needs.sequence_length))

    @property
    def step_seconds(self) -> Fraction:
        return self.global_batch * self.needs.sequence_length / self.tokens_per_second

    @property
    def sample_bytes(self) -> int:
        return ceil(self.needs.sequence_length * self.needs.bytes_per_token)

    @property
    def dataset_bytes(self) -> Fraction:
        return self.needs.tokens / self.needs.epochs * self.needs.bytes_per_token

    @property
    def shards(self) -> int:
        return ceil(self.dataset_bytes / self.needs.shard_bytes)

    @property
    def lanes(self) -> int:
        return self.needs.lanes or default_lanes(self.global_batch, self.nodes)

    @property
    def window(self) -> int:
        """Samples that a lane shuffles together."""
        return self.needs.window or default_window(self.lanes, self.sample_bytes)

    @property
    def window_bytes(self) -> int:
        return self.window * self.sample_bytes

    @property
    def lanes_per_node(self) -> list[int]:
        """Lanes that the ranks of each node read."""
        batch, nodes = self.global_batch, self.nodes
        parts = (rank_slice(batch, node, nodes) for node in range(nodes))
        return [len(lanes_of_part(batch, self.lanes, part)) for part in parts]

    @property
    def fetch_factor(self) -> Fraction:
        """How many nodes fetch each byte of the dataset, on average."""
        return Fraction(sum(self.lanes_per_node), self.lanes)

    @property
    def fetched_per_second_per_node(self) -> Fraction:
        """Bytes that the busiest node must fetch to keep up, of which nothing is cached from before."""
        return self.bytes_per_second * max(self.lanes_per_node) / self.lanes

    @property
    def network_share(self) -> Fraction:
        """Part of a node's bandwidth that this takes; above 1, no cache and no window helps."""
        return self.fetched_per_second_per_node / self.needs.node_bytes_per_second

    @property
    def fetch_seconds(self) -> Fraction:
        """One shard over one connection."""
        return self.needs.latency_seconds + self.needs.shard_bytes / self.needs.connection_bytes_per_second

    @property
    def fetches_in_flight(self) -> Fraction:
        """Shards that a node must be fetching at a time, on average."""
        return self.fetched_per_second_per_node / self.needs.shard_bytes * self.fetch_seconds

    @property
    def prefetch_bytes(self) -> Fraction:
        """What a node consumes while one shard comes: fetches must begin that far ahead."""
        return self.fetched_per_second_per_node * self.fetch_seconds

    @property
    def prefetch_steps(self) -> int:
        return ceil(self.fetch_seconds / self.step_seconds)

    @property
    def cache_bytes(self) -> int:
        """A node's least: two windows of its lanes, and the shards that those begin and end in."""
        return max(self.lanes_per_node) * 2 * (self.window_bytes + self.needs.shard_bytes)

    @property
    def gets(self) -> int:
        """Requests for shards over the whole run, each read whole."""
        return ceil(self.shards * self.needs.epochs * self.fetch_factor)

    @property
    def fetched_bytes(self) -> Fraction:
        """What leaves the store over the whole run."""
        return self.dataset_bytes * self.needs.epochs * self.fetch_factor

    @property
    def costs(self) -> dict[str, Fraction]:
        """Dollars by what they pay for."""
        prices = self.needs.prices
        return {
            "reads and traffic": prices.reading(self.gets, self.fetched_bytes),
            "dataset stored": prices.storing(self.dataset_bytes, self.needs.seconds),
        }
