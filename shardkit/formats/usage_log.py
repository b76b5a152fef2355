"""Read and write usage logs, which record the samples that one rank delivered to its training loop.

    magic "SKUSAGE1", then records: u32 length, u32 crc32, payload; little endian
    payload "R" + JSON          a run starts or resumes: `RunHead`
    payload "S" + u64 position + ids    a step: its start, and the id of each sample, u32 or u64; an id whose
                                        bits are all 1 is padding
    payload "E" + u64 position  the log was closed properly at this position

Ids number the rows of all streams' datasets consecutively. Each record is one write, so if a process is
killed, at most its last record is truncated; `scan` omits it and reports its size. Ids take 4 bytes per
sample (8 in runs of more than 2**32 - 2 rows): 0.1 % of the size of rows of 2,048 two-byte tokens.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from shardkit.errors import ShardError, StateError
from shardkit.files import load_json
from shardkit.order.run_settings import RunSettings

MAGIC = b"SKUSAGE1"
SUFFIX = ".usage"
MAX_RECORD_BYTES = 1 << 28  # fits a step of 2**24 sequences per rank with ids of 8 bytes, and any head

_FRAME = struct.Struct("<II")
_STEP = struct.Struct("<cQ")
_READ_BYTES = 1 << 20

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RunHead:
    """Head of a log's section: settings of the steps in it; `position` counts the samples before them."""

    settings: RunSettings
    rank: int
    world_size: int
    batch_size: int
    position: int
    id_bytes: int
    time_ns: int
    process: str
    """Host name and process id."""
    replica: int | None = None
    """Global rank of the process if others, such as tensor-parallel peers, log the same steps; else None."""

    def record(self) -> bytes:
        data = {name: getattr(self, name) for name in self.__slots__ if name != "settings"}
        return _framed(b"R" + json.dumps(data | {"settings": self.settings.to_dict()}).encode())

    @classmethod
    def parse(cls, text: bytes) -> RunHead:
        """Parse the JSON of a run's head. Raises StateError if it is malformed."""
        try:
            data = load_json(text)
            head = cls(**(data | {"settings": RunSettings.from_dict(data["settings"])}))
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"malformed head of a run: {type(error).__name__}: {error}") from error
        numbers = [head.rank, head.world_size, head.batch_size, head.position, head.time_ns]
        numbers += [] if head.replica is None else [head.replica]
        if any(isinstance(n, bool) or not isinstance(n, int) for n in numbers) or head.id_bytes not in (4, 8):
            raise StateError(f"malformed head of a run: {text!r:.300}")
        if not 0 <= head.rank < head.world_size or head.batch_size < 1 or head.position < 0:
            raise StateError(f"malformed head of a run: {text!r:.300}")
        return head


def id_type(samples: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the dtype that stores ids below `samples`; its maximum value is reserved for padding."""
    return np.dtype("<u4") if samples < (1 << 32) - 1 else np.dtype("<u8")


def step_record(position: int, ids: bytes) -> bytes:
    return _framed(_STEP.pack(b"S", position) + ids)


def end_record(position: int) -> bytes:
    return _framed(_STEP.pack(b"E", position))


def _framed(payload: bytes) -> bytes:
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


@dataclass(slots=True)
class Section:
    """The steps that follow one head in a rank's log file: `count` records from byte `offset` on."""

    path: Path
    head: RunHead
    offset: int
    count: int = 0
    first: int = 0
    """Position of the first step, or of the head if there are no steps."""
    last: int = -1
    """Position of the last step; -1 if there are no steps."""
    ended: bool = False
    """Whether the log was closed properly after these steps."""

    def read(self, first: int, count: int) -> tuple[_Ints, _Ints]:
        """Return (int64[count] positions, int64[count, batch] ids) of `count` steps from step `first` on.

        An id of -1 is padding.
        """
        width = self.head.id_bytes
        record = np.dtype(
            [
                ("frame", "V8"),
                ("kind", "S1"),
                ("position", "<u8"),
                ("ids", f"<u{width}", (self.head.batch_size,)),
            ]
        )
        with self.path.open("rb") as file:
            file.seek(self.offset + first * record.itemsize)
            data = file.read(count * record.itemsize)
        steps = np.frombuffer(data, dtype=record)
        if len(steps) != count:
            raise ShardError(self.path, "was truncated while it was being read")
        ids = steps["ids"].astype(np.int64)
        if width == 4:
            ids[ids == (1 << 32) - 1] = -1
        return steps["position"].astype(np.int64), ids


@dataclass(slots=True)
class UsageFile:
    """The content of a log file whose record checksums have been verified."""

    path: Path
    sections: list[Section] = field(default_factory=list)
    cut: int = 0
    """Size in bytes of a last record that was truncated when its process ended."""
    damage: str | None = None
    """The first error in the file; `sections` holds the records before it."""


def scan(path: Path) -> UsageFile:
    """Read a whole log file and verify its records. Raises ShardError if it is not a usage log."""
    found = UsageFile(path)
    with path.open("rb", buffering=_READ_BYTES) as file:
        magic = file.read(len(MAGIC))
        if magic != MAGIC:
            if MAGIC.startswith(magic):
                found.cut = len(magic)
                return found
            raise ShardError(path, "is not a usage log of this version of shardkit")
        offset = len(MAGIC)
        for size, payload in _records(file, found, path.stat().st_size):
            if not _take(found, payload, offset, size):
                found.damage = f"byte {offset:,}: a record does not follow from the records before it"
                break
            offset += size
    return found


def _records(file: BinaryIO, found: UsageFile, file_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield (size in bytes, payload) of complete records; describe a bad one in `found.cut` or `.damage`."""
    offset = len(MAGIC)
    while offset < file_bytes:
        rest = file_bytes - offset
        frame = file.read(_FRAME.size)
        length, checksum = _FRAME.unpack(frame) if len(frame) == _FRAME.size else (0, 0)
        size = _FRAME.size + length
        payload = file.read(length) if length <= MAX_RECORD_BYTES and size <= rest else b""
        is_whole = length > 0 and len(payload) == length
        if is_whole and zlib.crc32(payload) == checksum:
            yield size, payload
            offset += size
            continue
        # A killed process or a crashed machine leaves a part of the last record, or zeros.
        is_last = len(frame) < _FRAME.size or (length <= MAX_RECORD_BYTES and size >= rest)
        if is_last or not any(frame + payload + file.read(_READ_BYTES)):
            found.cut = rest
        else:
            found.damage = (
                f"byte {offset:,}: the checksum of a record is wrong; {rest:,} bytes from there are ignored"
            )
        return


def _take(found: UsageFile, payload: bytes, offset: int, size: int) -> bool:
    """Add a record, of `size` bytes at byte `offset`, to `found`; return False if it is invalid there."""
    kind = payload[:1]
    if kind == b"R":
        try:
            head = RunHead.parse(payload[1:])
        except StateError:
            return False
        found.sections.append(Section(found.path, head, offset + size, first=head.position))
        return True
    if not found.sections or len(payload) < _STEP.size:
        return False
    section = found.sections[-1]
    position = _STEP.unpack_from(payload)[1]
    if kind == b"E" and len(payload) == _STEP.size:
        section.ended = True
        return True
    ids = len(payload) - _STEP.size
    if kind != b"S" or ids != section.head.batch_size * section.head.id_bytes:
        return False
    if section.ended or position <= section.last or position >= 1 << 62:
        return False
    if not section.count:
        section.first = position
    section.count += 1
    section.last = position
    return True
