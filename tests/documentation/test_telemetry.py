"""The page on what a step costs: its blocks run with each client, and the dashboard shows gauges of a run."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit.formats import mds
from shardkit.loaders.step_report import PREFIX, StepReport
from support.pages import ROOT, Block, blocks

PAGE = ROOT / "docs" / "guides" / "telemetry.md"
DASHBOARD = json.loads((ROOT / "examples" / "grafana.json").read_text())
# Modules of clients that the blocks import, and what they import of each.
CLIENTS = {
    "wandb": [("wandb", "init")],
    "opentelemetry": [
        ("opentelemetry.sdk.metrics", "MeterProvider"),
        ("opentelemetry.sdk.metrics.export", "ConsoleMetricExporter"),
        ("opentelemetry.sdk.metrics.export", "PeriodicExportingMetricReader"),
    ],
    "prometheus_client": [("prometheus_client", "start_http_server")],
}


class Recorded:
    """Any object of a client that is not installed: it takes every call, and notes its name."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any, **named: Any) -> Recorded:
            self.calls.append(name)
            return self

        return call


def stand_in(monkeypatch: pytest.MonkeyPatch, client: str, calls: list[str]) -> None:
    """Put modules of recorded calls in the place of a client's."""
    recorded = Recorded(calls)
    for path, name in [*CLIENTS[client], ("prometheus_client", "Gauge"), ("prometheus_client", "REGISTRY")]:
        words = path.split(".")
        for end in range(1, len(words) + 1):
            module = ".".join(words[:end])
            if module not in sys.modules:
                monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
        setattr(sys.modules[path], name, getattr(recorded, name))


def of_clients() -> list[Any]:
    found = {client: block for block in blocks(PAGE, "python") for client in CLIENTS if client in block.text}
    return [pytest.param(client, found[client], id=client) for client in CLIENTS]


@pytest.mark.parametrize(("client", "block"), of_clients())
def test_a_block_runs_with_its_client_or_with_calls_recorded_in_its_place(
    client: str, block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    is_recorded = importlib.util.find_spec(client) is None
    if is_recorded:
        stand_in(monkeypatch, client, calls)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    rows = np.arange(88 * 9, dtype=np.uint16).reshape(88, 9)
    with mds.MdsWriter(tmp_path / "out", columns={"tokens": "ndarray:uint16:9"}) as writer:
        writer.write_rows(rows)
    space: dict[str, Any] = {}
    first, _, logged = list(blocks(PAGE, "python"))[:3]
    exec(compile(first.text, str(PAGE), "exec"), space)
    exec(compile(logged.text.split("\n\n")[0], str(PAGE), "exec"), space)
    exec(compile(block.text, str(PAGE), "exec"), space)
    expected = {
        "wandb": ["init", "define_metric", "log"],
        "opentelemetry": ["MeterProvider", "get_meter", "create_gauge", "set", "shutdown"],
        "prometheus_client": ["start_http_server", "Gauge", "labels", "set"],
    }[client]
    if is_recorded:
        assert [*dict.fromkeys(name for name in calls if name in expected)] == expected


def test_the_dashboard_shows_gauges_that_a_loader_sets() -> None:
    known = StepReport(
        steps=1, seconds=1.0, wait_seconds=0.1, copy_seconds=0.1, rest_seconds=0.8, wait_p50_seconds=0.1,
        wait_p99_seconds=0.1, wait_max_seconds=0.1, tokens_per_second=1.0, mfu=0.4, mfu_without_waits=0.5,
        idle_dollars=1.0,
    )  # fmt: skip
    gauges = {f"shardkit_{PREFIX}{name}".replace("/", "_") for name in [*known.to_dict(), "step"]}
    panels = DASHBOARD["panels"]
    shown = [expr["expr"] for panel in panels for expr in panel["targets"]]
    shown += [one["query"] for one in DASHBOARD["templating"]["list"]]
    named = set(re.findall(r"shardkit_\w+", " ".join(shown)))
    assert named <= gauges
    assert len(named) >= 7
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24, "a row of Grafana has 24 columns"
