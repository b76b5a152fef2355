"""Logs which samples a training loop received: one file per rank and process start.

    loader = StreamingLoader("out", batch_size=8, usage_log="logs/run-7")
    shardkit audit --logs logs/run-7 out

A step is logged by one unbuffered write before it is handed over, so the log of a killed process has every
step that its loop received, except that the last record may be truncated. The file is created with the first
step. If writing fails, the loader warns once and training continues: the audit will miss those steps.
`shardkit.formats.usage_log` documents the format.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardkit.errors import warn_user
from shardkit.files import local_path
from shardkit.formats.usage_log import MAGIC, SUFFIX, RunHead, end_record, id_type, step_record
from shardkit.loaders.placement import Place, process_place, usage_log_role
from shardkit.loaders.streams import Streams
from shardkit.order.run_settings import RunSettings


def open_usage_log(
    folder: str | os.PathLike[str] | None, streams: Streams, place: Place, *, batch_size: int
) -> UsageLog | None:
    """Return a usage log; None if `folder` is None, or if another replica of this rank writes the log."""
    if folder is None or (role := usage_log_role(place, folder)) == "replica":
        return None
    process = process_place() if role == "unknown" else None
    replica = None if process is None else process[0]
    return UsageLog(folder, streams, place.rank, place.world_size, batch_size, replica=replica)


class UsageLog:
    """The log of one rank in `folder`, a local path that may be on a file system shared by all machines."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        streams: Streams,
        rank: int,
        world_size: int,
        batch_size: int,
        *,
        replica: int | None = None,
    ) -> None:
        """`replica`: world rank of this process if other replicas log the same steps, too; else None."""
        self._folder, self._names = local_path(folder, "usage_log").absolute(), streams.names
        self._rank, self._world_size, self._batch_size = rank, world_size, batch_size
        self._replica = replica
        self._type = id_type(sum(map(len, streams.datasets)))
        self._head, self._head_due = b"", False
        self._descriptor: int | None = None
        self._process: int | None = None
        self._failed = False
        self._end = 0
        self.path: Path | None = None
        """Path of the log file; None before the first step."""

    def begin(self, settings: RunSettings, position: int) -> None:
        """Log `settings` and `position`, where the run starts or continues, together with the next step."""
        self._head_due = True
        self._head = RunHead(
            settings=settings.named(self._names),
            rank=self._rank,
            world_size=self._world_size,
            batch_size=self._batch_size,
            position=position,
            id_bytes=self._type.itemsize,
            time_ns=time.time_ns(),
            process=f"{socket.gethostname()}:{os.getpid()}",
            replica=self._replica,
        ).record()

    def step(self, start: int, ids: npt.NDArray[np.int64], after: int) -> None:
        """Log a batch: its step's positions `start` to `after`, and its sample ids (-1 is padding)."""
        if self._failed:
            return
        record = step_record(start, ids.astype(self._type).tobytes())
        try:
            if self._descriptor is None or self._process != os.getpid():
                self._create()
            if self._head_due:
                record, self._head_due = self._head + record, False
            self._write(record)
        except OSError as error:
            self._fail(error)
        self._end = after

    def close(self) -> None:
        """Record that the run ended normally."""
        if self._descriptor is not None and self._process == os.getpid():
            try:
                self._write(end_record(self._end))
            except OSError as error:
                self._fail(error)
            os.close(self._descriptor)
        self._descriptor = None

    def _create(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        name = f"rank-{self._rank:05d}-of-{self._world_size:05d}.{stamp}.{secrets.token_hex(6)}{SUFFIX}"
        self.path = self._folder / name
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o644)
        self._process, self._head_due = os.getpid(), True
        self._write(MAGIC)

    def _write(self, data: bytes) -> None:
        assert self._descriptor is not None
        while data:
            data = data[os.write(self._descriptor, data) :]

    def _fail(self, error: OSError) -> None:
        self._failed = True
        where = self.path or self._folder
        warn_user(f"{where}: cannot write the usage log ({error}); training continues without it")
