"""Runs a scenario: how long steps wait, and what each node fetches, keeps and requests.

All nodes step together, as the collectives of a training run make them: a step begins when the slowest node
has its batch, and then takes `step_seconds`. Between steps, readers and fetchers proceed independently. Costs
about 30 microseconds per fetch and a few microseconds per step and node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from support.virtual_run.reading import Reading
from support.virtual_run.scenario import AllUses, Demand, NodeUses, Scenario

__all__ = ["SLOW_STEP_SECONDS", "NodeOutcome", "Outcome", "simulate"]

SLOW_STEP_SECONDS = 1e-3  # a step that waited longer is a stall, as in the loader's own figures

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class NodeOutcome:
    """What one node did."""

    fetched_bytes: int
    """Whole shards."""
    ahead_bytes: int
    """Of these, the part of shards in the cache that the node has yet to read when the run ends."""
    row_bytes: int
    """Rows that were read singly, by two requests each."""
    used_bytes: int
    """Rows delivered to the node's ranks, or planned to be."""
    hits: int
    """Shards that were in the cache when a plan opened them."""
    misses: int
    row_reads: int
    refetched_bytes: int
    bypassed: int
    evictions: int
    throttled: int
    cached_bytes: int
    """At the end."""
    requests: _Floats
    """When each was made."""
    moved: _Floats
    """float64[n, 2]: seconds, and bytes of shards that had arrived by then."""
    prefilled: _Floats
    """float64[n, 3]: begin, end and bytes of fetches of shards that were not needed within the horizon."""

    @classmethod
    def of(cls, reader: Reading, scenario: Scenario) -> NodeOutcome:
        fetching = reader.fetching
        counts = fetching.counts
        names = ("fetched_bytes", "refetched_bytes", "bypassed", "evictions", "throttled")
        return cls(
            **{name: counts[name] for name in names},
            ahead_bytes=reader.ahead_bytes,
            row_bytes=2 * reader.row_reads * scenario.shards.sample_bytes,
            used_bytes=reader.used_rows * scenario.shards.sample_bytes,
            hits=reader.hits,
            misses=reader.misses,
            row_reads=reader.row_reads,
            cached_bytes=fetching.used_bytes,
            requests=np.sort(np.array(fetching.requests, dtype=np.float64)),
            moved=np.array(fetching.moved, dtype=np.float64).reshape(-1, 2),
            prefilled=np.array(fetching.prefilled, dtype=np.float64).reshape(-1, 3),
        )


@dataclass(frozen=True, eq=False)
class Outcome:
    """The outcome of a run; figures per node are means over the nodes that were simulated."""

    scenario: Scenario
    seconds: float
    """Duration in virtual time."""
    begins: _Floats
    """float64[steps]: when each step began."""
    waits: _Floats
    """float64[steps]: how long the run waited for each step, which is how long its slowest node did."""
    nodes: tuple[NodeOutcome, ...]

    @property
    def first_batch_seconds(self) -> float:
        return float(self.waits[0])

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain data. Waits and stalls exclude the first batch, which has its own figure."""
        scenario = self.scenario
        later = self.waits[1:]
        slow = later > SLOW_STEP_SECONDS
        fetched = self._mean("fetched_bytes") + self._mean("row_bytes")
        used, ahead = self._mean("used_bytes"), self._mean("ahead_bytes")
        opened = self._mean("hits") + self._mean("misses")
        per_second = self._peak_requests()
        return {
            "steps": scenario.steps,
            "seconds": self.seconds,
            "first_batch_seconds": self.first_batch_seconds,
            "stalled_steps": int(slow.sum()),
            "stalled_steps_share": float(slow.mean()) if len(later) else 0.0,
            "stall_seconds": float(later[slow].sum()),
            "stall_share": float(later[slow].sum()) / max(self.seconds - self.first_batch_seconds, 1e-9),
            "wait_p50_seconds": float(np.quantile(later, 0.5)) if len(later) else 0.0,
            "wait_p99_seconds": float(np.quantile(later, 0.99)) if len(later) else 0.0,
            "wait_max_seconds": float(later.max(initial=0.0)),
            "hit_rate": self._mean("hits") / opened if opened else 1.0,
            "fetched_bytes_per_node": fetched,
            "used_bytes_per_node": used,
            "ahead_bytes_per_node": ahead,
            "read_amplification": (fetched - ahead) / used if used else 0.0,
            "fetched_bytes_per_node_per_step": fetched / scenario.steps,
            "fetched_bytes_per_node_per_second": fetched / max(self.seconds, 1e-9),
            "refetched_bytes_per_node": self._mean("refetched_bytes"),
            "row_reads_per_node": self._mean("row_reads"),
            "bypassed_per_node": self._mean("bypassed"),
            "evictions_per_node": self._mean("evictions"),
            "throttled_per_node": self._mean("throttled"),
            "cached_bytes_per_node": self._mean("cached_bytes"),
            "requests": round(sum(len(n.requests) for n in self.nodes) * scenario.nodes / len(self.nodes)),
            "requests_per_second": self._all_nodes(sum(len(n.requests) for n in self.nodes))
            / max(self.seconds, 1e-9),
            "peak_requests_per_second": per_second,
            "peak_prefill_per_byte_used": self._peak_prefill(),
            "nodes_simulated": len(self.nodes),
            "nodes": scenario.nodes,
            "lanes": scenario.lanes,
            "window": scenario.window,
            "cache_bytes": scenario.cache_bytes,
        }

    def _all_nodes(self, count: float) -> float:
        return count * self.scenario.nodes / len(self.nodes)

    def _mean(self, name: str) -> float:
        return float(np.mean([getattr(node, name) for node in self.nodes]))

    def _peak_prefill(self) -> float:
        """Bytes that fill the caches of all simulated nodes in the busiest second, against those used."""
        begin, end, count = np.concatenate([node.prefilled for node in self.nodes]).T
        filled = np.zeros(int(end.max(initial=0.0)) + 2)
        for second, until, size in zip(begin.tolist(), end.tolist(), count.tolist(), strict=True):
            places = np.arange(int(second), int(until) + 1)
            share = np.minimum(places + 1, until) - np.maximum(places, second)
            filled[places] += size * share / max(until - second, 1e-9)
        used = self._mean("used_bytes") * len(self.nodes) / max(self.seconds, 1e-9)
        return float(filled.max()) / used if used else 0.0

    def _peak_requests(self) -> float:
        """Requests of all nodes in the busiest second."""
        seconds = np.concatenate([node.requests for node in self.nodes])
        if not len(seconds):
            return 0.0
        return self._all_nodes(int(np.bincount(seconds.astype(np.int64)).max()))


def simulate(scenario: Scenario, advance: Callable[[int], None] = lambda steps: None) -> Outcome:
    """Run a scenario; `advance` is called from time to time with the number of further steps done."""
    order = scenario.order()
    demand, every = Demand(scenario, order), AllUses(order)
    last_epoch = (scenario.steps * scenario.global_batch - 1) // order.samples
    readers = []
    for place, node in enumerate(scenario.simulated_nodes):
        uses = NodeUses(every, scenario.lanes_of(node), last_epoch, scenario.lane_parts(node, order))
        readers.append(Reading(scenario, demand, uses, place, node))
    now = 0.0
    begins = np.empty(scenario.steps)
    waits = np.empty(scenario.steps)
    for step in range(scenario.steps):
        began = max([reader.batch_at(step, now) for reader in readers])
        waits[step], begins[step] = began - now, began
        now = began + scenario.step_seconds
        if (step + 1) % 64 == 0:
            advance(64)
    for reader in readers:
        reader.run_until(now)
    advance(scenario.steps % 64)
    nodes = [NodeOutcome.of(reader, scenario) for reader in readers]
    return Outcome(scenario, now, begins, waits, tuple(nodes))
