"""Runs for audits: plans of datasets that exist as an index only, real runs with logs, ways to break both."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.datasets.dataset import Dataset
from shardkit.datasets.locate import Found, LocalFiles
from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.config import LoaderConfig, grouped
from shardkit.loaders.streams import open_streams
from shardkit.manifest import Column, FileInfo, Manifest, ShardInfo
from shardkit.order.batches import SampleOrder
from shardkit.order.exclusions import Exclusions
from shardkit.order.order import Located
from shardkit.tools.audit.findings import AuditReport
from shardkit.tools.audit.logs import audit_logs
from shardkit.tools.audit.plan import Leg, PlannedRun, audit_plan

Remap = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]
State = dict[str, Any]
Break = Callable[[StreamingLoader], None]


def index_only(sizes: Sequence[int]) -> Dataset:
    """A dataset of shards with so many samples each, of which no file exists."""
    column = Column("tokens", "ndarray:uint16:8", 16)
    infos = [
        ShardInfo(FileInfo(f"shard.{number:05d}.mds", 100 + 16 * size), size, (column,))
        for number, size in enumerate(sizes)
    ]
    manifest = Manifest("mds", infos)
    return Dataset(LocalFiles(Found(Path("/nowhere"), manifest)), manifest)


class RemappedOrder:
    """Delivers at each position what another one has."""

    def __init__(self, order: SampleOrder, remap: Remap) -> None:
        self._order, self._remap = order, remap

    def __getattr__(self, name: str) -> Any:
        return getattr(self._order, name)

    def locate(self, positions: npt.NDArray[np.int64]) -> Located:
        return self._order.locate(self._remap(positions))

    def global_batch(self, position: int, size: int) -> npt.NDArray[np.int64]:
        return self._order.global_batch(position, size)

    def global_batches(self, position: int, size: int, count: int, **options: Any) -> Located:
        return self.locate(self._order.global_batches(position, size, count, **options).position)


def plan_report(
    streams: Dataset | list[Stream],
    *,
    batch_sizes: Sequence[int] = (4,),
    world_sizes: Sequence[int] = (1, 2, 3, 8),
    tail: Any = "carry",
    shuffle: Any = "window",
    epochs: int = 2,
    resumes: Sequence[int] = (),
    workers: int = 0,
    seed: int = 17,
    broken: Callable[[PlannedRun], None] = lambda run: None,
    **options: Any,
) -> AuditReport:
    """Audit the plan of each world size, with the batch sizes in turn; `broken` spoils a run that begins."""
    config = LoaderConfig(**options)
    legs = [Leg(batch_sizes[n % len(batch_sizes)], ranks) for n, ranks in enumerate(world_sizes)]

    def start(*arguments: Any, **sizes: Any) -> PlannedRun:
        run = PlannedRun(*arguments, **sizes)
        broken(run)
        return run

    return audit_plan(
        open_streams(streams, config, 1),
        config,
        legs,
        seed=seed,
        shuffle=shuffle,
        tail=tail,
        epochs=epochs,
        resume_at=resumes,
        workers=workers,
        key=bytes(range(24)),
        start=start,
        progress=False,
    )


def logged_run(
    dataset: str | Path | list[Stream],
    logs: Path,
    *,
    world_size: int,
    batch_size: int,
    steps: int,
    state: State | None = None,
    breaks: dict[int, Break] | None = None,
    keep: int | None = None,
    close: bool = True,
    **options: Any,
) -> State:
    """All ranks of a run, one after another; the state after `keep` steps (None: all).

    `breaks` spoil a rank's loader before its first step. Without `close` ranks end as if they were killed.
    """
    states = []
    for rank in range(world_size):
        loader = StreamingLoader(
            dataset if isinstance(dataset, list) else str(dataset),
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            usage_log=logs,
            endless=True,
            **grouped({"prefetch_batches": 0, **options}),
        )
        if state is not None:
            loader.load_state_dict(state)
        if breaks and rank in breaks:
            breaks[rank](loader)
        for number, _ in enumerate(islice(loader, steps), 1):
            if number == (keep or steps):
                states.append(json.loads(json.dumps(loader.state_dict())))
        if close:
            loader.close()
    return states[0]  # type: ignore[no-any-return]


def log_report(logs: Path, *datasets: Dataset, exclusions: Sequence[Exclusions | None] = ()) -> AuditReport:
    key = bytes(range(24))
    return audit_logs(logs, datasets, exclusions or [None] * len(datasets), key=key, progress=False)


def kinds(report: AuditReport) -> set[str]:
    return {kind for kind, count in report.findings.counts.items() if count}
