"""Runs a scenario: nodes take their steps together, as a training run's collectives make them.

A step begins when the slowest node has its batch, and then takes `step_seconds`. Between steps the nodes'
readers and fetchers go on by themselves. Costs about 30 microseconds a fetch and a few for a node's step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardkit.simulation.demand import AllUses, Demand, NodeUses
from shardkit.simulation.outcome import NodeOutcome, Outcome
from shardkit.simulation.reading import Reading
from shardkit.simulation.scenario import Scenario

__all__ = ["simulate"]


def simulate(scenario: Scenario, progress: Callable[[int, int], None] = lambda step, steps: None) -> Outcome:
    """What comes of it; `progress` hears now and then of the steps done and of their number."""
    order = scenario.order()
    demand, every = Demand(scenario, order), AllUses(order)
    last_epoch = (scenario.steps * scenario.global_batch - 1) // order.samples
    readers = [
        Reading(scenario, demand, NodeUses(every, scenario.lanes_of(node), last_epoch), place, node)
        for place, node in enumerate(scenario.simulated_nodes)
    ]
    now = 0.0
    begins = np.empty(scenario.steps)
    waits = np.empty(scenario.steps)
    own = np.empty((len(readers), scenario.steps), dtype=np.float32)
    for step in range(scenario.steps):
        ready = [reader.batch_at(step, now) for reader in readers]
        own[:, step] = np.array(ready) - now
        began = max(ready)
        waits[step], begins[step] = began - now, began
        now = began + scenario.step_seconds
        if step % 64 == 0:
            progress(step, scenario.steps)
    for reader in readers:
        reader.finish(now)
    progress(scenario.steps, scenario.steps)
    nodes = [NodeOutcome.of(reader, scenario) for reader in readers]
    return Outcome(scenario, now, begins, waits, own, tuple(nodes))
