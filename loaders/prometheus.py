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
from pathlib import Path

from shardkit.errors import warn_user
from shardkit.loaders.metrics import LoaderStats, Telemetry

__all__ = ["MetricsFile", "render"]

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_WAIT = ("step_wait_seconds", "What steps waited for their batch.")
_Metrics = tuple[tuple[str, str, str], ...]  # (field of the figures, name, help)
_LOADER: _Metrics = (
    ("samples", "samples_total", "Samples handed over by this rank."),
    ("seconds", "running_seconds_total", "Time since the first batch was asked for."),
    ("slow_steps", "slow_steps_total", "Steps that waited longer than the threshold."),
    ("slow_wait_seconds", "slow_wait_seconds_total", "What the slow steps waited together."),
    ("slow_step_seconds", "slow_step_threshold_seconds", "Steps that wait longer are slow."),
    ("first_wait_seconds", "first_wait_seconds", "The wait for the first batch."),
    ("wait_last_seconds", "last_wait_seconds", "The latest wait."),
    ("wait_max_seconds", "max_wait_seconds", "The longest wait."),
    ("queue_depth", "queue_depth", "Batches ready behind the latest one."),
)
_CACHE: _Metrics = (
    ("hits", "hits_total", "Shards that were in the cache."),
    ("misses", "misses_total", "Shards that were not."),
    ("evictions", "evictions_total", "Shards removed to make room."),
    ("fetched_bytes", "fetched_bytes_total", "Bytes fetched into the cache."),
    ("refetched_bytes", "refetched_bytes_total", "Bytes fetched again after their eviction."),
    ("decompressed_bytes", "decompressed_bytes_total", "Bytes that decompression gave."),
    ("row_reads", "row_reads_total", "Rows read before their shard was there."),
    ("bypassed", "bypassed_total", "Shards read without being kept."),
    ("quarantined", "quarantined_total", "Shards whose bytes were wrong."),
    ("used_bytes", "used_bytes", "Bytes in the cache."),
    ("capacity_bytes", "capacity_bytes", "Bytes that the cache may hold."),
)
_STORE: _Metrics = (
    ("requests", "requests_total", "Requests sent to the object store."),
    ("read_bytes", "read_bytes_total", "Bytes read from the object store."),
    ("retries", "retries_total", "Requests made again after a failure."),
    ("outages", "outages_total", "Times that requests failed for more than a few seconds."),
    ("throttled", "throttled_total", "Answers 503, slow down."),
    ("hedges", "hedges_total", "Requests doubled because the first took long."),
    ("resumed_bodies", "resumed_bodies_total", "Reads continued on a new connection."),
    ("errors", "errors_total", "Requests that failed."),
    ("first_byte_p50_seconds", "first_byte_p50_seconds", "Half of the first bytes came sooner."),
    ("first_byte_p99_seconds", "first_byte_p99_seconds", "99 % of the first bytes came sooner."),
)


def render(stats: LoaderStats, labels: Mapping[str, object] | None = None) -> str:
    """The figures since the start as exposition text; `labels` (rank, job, …) stand on every sample."""
    return "".join(f"{line}\n" for line in _lines(stats, labels or {}))


class MetricsFile:
    """Keeps `path` current with `telemetry`: call `step` at every step and `write` at the end.

    Every rank needs a path of its own. A step that finds the file current costs a look at the clock.
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
        self.path = Path(path)
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
        """Write the file now. What goes wrong is warned of once."""
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
                    warn_user(f"{self.path}: cannot write the loader's metrics ({why}); training goes on")


def _lines(stats: LoaderStats, labels: Mapping[str, object]) -> Iterator[str]:
    text = _label_text(labels)
    name, described = f"shardkit_{_WAIT[0]}", _WAIT[1]
    yield from _head(name, "summary", described)
    for quantile, value in (("0.5", stats.wait_p50_seconds), ("0.99", stats.wait_p99_seconds)):
        yield f"{name}{_label_text(labels, quantile)} {_number(value)}"
    yield f"{name}_sum{text} {_number(stats.wait_seconds)}"
    yield f"{name}_count{text} {_number(stats.steps)}"
    parts = (("", stats, _LOADER), ("cache_", stats.cache, _CACHE), ("store_", stats.store, _STORE))
    for prefix, part, metrics in parts:
        for field, short, described in metrics if part is not None else ():
            value = getattr(part, field)
            if value is not None:
                name = f"shardkit_{prefix}{short}"
                yield from _head(name, "counter" if name.endswith("_total") else "gauge", described)
                yield f"{name}{text} {_number(value)}"


def _head(name: str, kind: str, described: str) -> tuple[str, str]:
    escaped = described.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {escaped}", f"# TYPE {name} {kind}"


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
