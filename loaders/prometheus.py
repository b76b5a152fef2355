"""A loader's figures for Prometheus: text of the exposition format 0.0.4, and a file that stays current.

Names are `shardkit_…` in base units (seconds, bytes); what only grows is a counter and ends in `_total`. The
file is meant for the textfile collector of node_exporter: always whole (renamed into place), one per rank,
named `….prom`. It is written by the training step that finds it due, never by a thread, and a file that
cannot be written costs one warning, never the training.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields

from shardkit.errors import warn_user
from shardkit.files import local_path
from shardkit.loaders.metrics import HELP, METRIC, LoaderStats, Telemetry

__all__ = ["MetricsFile", "render"]

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def render(stats: LoaderStats, labels: Mapping[str, object] | None = None) -> str:
    """The figures since the start as exposition text; every sample has the `labels` (rank, job, …)."""
    return "".join(f"{line}\n" for line in _lines(stats, labels or {}))


class MetricsFile:
    """Keeps `path` current with `telemetry`: call `step` at every step and `write` at the end.

    Each rank needs its own path. A step that finds the file current only reads the clock.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        telemetry: Telemetry,
        *,
        every_seconds: float = 10.0,
        labels: Mapping[str, object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not every_seconds > 0:
            raise ValueError(f"every_seconds must be above 0, not {every_seconds}")
        self.path = local_path(path, "metrics_file").absolute()
        self._labels = dict(labels or {})
        _label_text(self._labels)  # a bad label is the caller's mistake: say so now, not in a warning later
        self._telemetry = telemetry
        self._every_seconds = every_seconds
        self._clock = clock
        self._due = clock()
        self._warned = False

    def step(self) -> None:
        """Write the file if it is due."""
        now = self._clock()
        if now >= self._due:
            self._due = now + self._every_seconds
            self.write()

    def write(self) -> None:
        """Write the file now. Warn once if that fails."""
        # A name that the collector passes over, in the same folder so that the rename is atomic.
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            # Not flushed to disk: after a crash of the machine nobody scrapes these figures.
            temporary.write_text(render(self._telemetry.stats(), self._labels), encoding="utf-8")
            temporary.replace(self.path)
        except Exception as error:  # whatever it is, figures are not worth a training run
            if not self._warned:
                self._warned = True
                why = f"{type(error).__name__}: {error}"
                with contextlib.suppress(RuntimeWarning):  # python -W error: still no reason to stop training
                    warn_user(f"{self.path}: cannot write the loader's metrics ({why}); training continues")


def _lines(stats: LoaderStats, labels: Mapping[str, object]) -> Iterator[str]:
    text, name = _label_text(labels), "shardkit_step_wait_seconds"
    yield from _head(name, "summary", "What steps waited for their batch.")
    for quantile, value in (("0.5", stats.wait_p50_seconds), ("0.99", stats.wait_p99_seconds)):
        yield f"{name}{_label_text(labels, quantile)} {_number(value)}"
    yield f"{name}_sum{text} {_number(stats.wait_seconds)}"
    yield f"{name}_count{text} {_number(stats.steps)}"
    parts = (("", stats), ("cache_", stats.cache), ("store_", stats.store), ("balance_", stats.balance))
    for prefix, part in parts:
        for figure in fields(part) if part is not None else ():
            value = getattr(part, figure.name)
            if METRIC in figure.metadata and value is not None:
                name = f"shardkit_{prefix}{figure.metadata[METRIC].format(figure.name)}"
                kind = "counter" if name.endswith("_total") else "gauge"
                yield from _head(name, kind, figure.metadata[HELP])
                yield f"{name}{text} {_number(value)}"


def _head(name: str, kind: str, described: str) -> tuple[str, str]:
    return f"# HELP {name} {described}", f"# TYPE {name} {kind}"


def _label_text(labels: Mapping[str, object], quantile: str | None = None) -> str:
    """{rank="3",job="a \\"b\\""}, or nothing without labels; ValueError for a name that is refused."""
    pairs = []
    for name, value in labels.items():
        if not _LABEL.fullmatch(name) or name.startswith("__") or name in ("quantile", "le"):
            raise ValueError(f"{name!r} cannot be a label: use letters, digits and _, not quantile or le")
        escaped = str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        pairs.append(f'{name}="{escaped}"')
    if quantile is not None:
        pairs.append(f'quantile="{quantile}"')
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _number(value: float) -> str:
    if value != value or value in (float("inf"), float("-inf")):
        return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}[str(float(value))]
    return str(int(value)) if value == int(value) else repr(float(value))
