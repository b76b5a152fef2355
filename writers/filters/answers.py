"""A folder of answers of models, each kept by the content of its request, so that it is paid for once.

    <host>-<n>.jsonl   one line per answer; one process at a time appends to a file, and holds a lock on it
    claims             byte-range locks: requests that processes have in flight
    <step>.meter       what a step has spent, and when its next request may start

An answer is appended before it is used, so killing a process loses none that it received. `sync` is called
about once a second and after each batch: a power cut loses at most the answers since then. A line that was
cut off is ignored, and removed when the next process takes over the file. Lines are found by an index in
memory, 32 bytes an answer in each process; `refresh` adds what other processes have appended since.

A process claims a request before it sends it, and looks again for an answer after that: processes that share
the folder never have one request in flight twice. Locks hold between the processes of a machine, and between
machines on file systems that support them (NFS 4, Lustre mounted with `flock`, CephFS).
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardkit.files import make_folder
from shardkit.locks import held_file
from shardkit.writers.execution.resources import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

_KEY_AT = slice(8, 40)  # place of the key's hex digits in a line: {"key":"
_LINE = re.compile(rb'\{"key":"[0-9a-f]{32}",.*\}')
_READ_BYTES = 4 << 20
_COMPACTED = 1 << 16  # number of new answers after which they are moved from a dict to sorted arrays
_METER = struct.Struct("<ddqq")
_METER_SECONDS = 30.0  # longest wait for the lock of a meter, which is held for microseconds
_FILES = 100_000
_PLACE = np.dtype([("low", "<u8"), ("start", "<u8"), ("file", "<u4"), ("size", "<u4")])


@dataclass(frozen=True, slots=True)
class Answer:
    """A model's answer: its text, why it ended (`stop`, `length`, …), whether the model refused, tokens."""

    text: str
    finish: str = "stop"
    refused: bool = False
    tokens_in: int = 0
    tokens_out: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request has no answer after all attempts."""

    problem: str


class Answers:
    """The kept answers of one folder, as this process sees them. Use it in one thread at a time.

    Raises UnavailableError if the folder cannot be written, or if its file system has no locks.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: list[int] = []  # descriptors
        self._numbers: dict[str, int] = {}
        self._ends: list[int] = []  # bytes of each file that are in the index
        self._own: int | None = None
        self._own_end = 0
        self._changed = -1
        self._new: dict[bytes, tuple[int, int, int]] = {}
        self._high = np.empty(0, np.uint64)  # first halves of keys, ascending
        self._places = np.empty(0, _PLACE)  # for each, the second half and the line
        self._unsynced = False
        with _naming(folder):
            make_folder(folder)
            self._claims = os.open(folder / "claims", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.refresh()

    @property
    def is_current(self) -> bool:
        """Whether the folder on disk is still the one that was opened, not one made anew in its place."""
        try:
            return os.path.samestat(os.fstat(self._claims), (self.folder / "claims").stat())
        except OSError:
            return False

    def refresh(self) -> None:
        """Add the answers that other processes have appended since the last call."""
        try:
            changed = self.folder.stat().st_mtime_ns
            if changed != self._changed:
                # A file that is made within the clock's granularity leaves the time as it is: look once more.
                self._changed = -1 if time.time_ns() - changed < 100_000_000 else changed
                for path in sorted(self.folder.glob("*.jsonl")):
                    if path.name not in self._numbers:
                        self._open(path)
            for number in range(len(self._files)):
                if number != self._own:
                    self._read_new(number)
        except OSError as error:
            raise _described(error, self.folder) from error

    def find(self, key: bytes) -> Answer | None:
        """Return the kept answer to the request with this 16-byte key; None if there is none."""
        place = self._new.get(key) or self._place(key)
        if place is None:
            return None
        import orjson

        number, start, size = place
        try:
            line = orjson.loads(os.pread(self._files[number], size, start))
            if line["key"] != key.hex():
                return None
            return Answer(line["text"], line["finish"], line["refused"], line["in"], line["out"])
        except (OSError, ValueError, KeyError, TypeError):
            return None  # a damaged line: as if there were no answer

    def keep(self, key: bytes, answer: Answer, step: str, model: str) -> None:
        """Append an answer to this process's file. Raises UnavailableError if it cannot be written."""
        import orjson

        line = orjson.dumps(
            {
                "key": key.hex(),
                "text": answer.text,
                "finish": answer.finish,
                "refused": answer.refused,
                "in": answer.tokens_in,
                "out": answer.tokens_out,
                "step": step,
                "model": model,
                "at": int(time.time()),
            },
            option=orjson.OPT_APPEND_NEWLINE,
        )
        number = self._take_file() if self._own is None else self._own
        written = 0
        try:
            while written < len(line):
                written += os.pwrite(self._files[number], line[written:], self._own_end + written)
        except OSError as error:
            raise _described(error, self.folder) from error
        self._new[key] = number, self._own_end, len(line) - 1
        self._own_end += len(line)
        self._unsynced = True

    def sync(self) -> None:
        """Wait until the answers that this process has appended are on the disk."""
        if self._own is not None and self._unsynced:
            self._unsynced = False
            with _naming(self.folder):
                os.fdatasync(self._files[self._own])

    def claim(self, key: bytes) -> bool:
        """Claim a request for this process; False if another process has it in flight."""
        try:
            fcntl.lockf(self._claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _place_of(key))
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:
            raise UnavailableError(
                f"{self.folder}: {error.strerror}: this file system has no locks; set `answers` to a folder "
                "on another"
            ) from None
        return True

    def release(self, key: bytes) -> None:
        """Release a claim; the kernel does so too when the process ends."""
        fcntl.lockf(self._claims, fcntl.LOCK_UN, 1, _place_of(key))

    def _open(self, path: Path, descriptor: int | None = None) -> int:
        made = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if descriptor is None else descriptor
        self._numbers[path.name] = number = len(self._files)
        self._files.append(made)
        self._ends.append(0)
        return number

    def _read_new(self, number: int) -> None:
        """Add the whole lines of a file that are not in the index yet."""
        file, size = self._files[number], os.fstat(self._files[number]).st_size
        while (start := self._ends[number]) < size:
            data = os.pread(file, _READ_BYTES, start)
            while (whole := data.rfind(b"\n") + 1) == 0:
                more = os.pread(file, _READ_BYTES, start + len(data))
                if not more:
                    return
                data += more
            at = 0
            for line in data[:whole].split(b"\n")[:-1]:
                if _LINE.fullmatch(line):  # otherwise damaged: as if there were no answer
                    self._new[bytes.fromhex(line[_KEY_AT].decode())] = number, start + at, len(line)
                at += len(line) + 1
            self._ends[number] = start + whole
            if len(self._new) > max(_COMPACTED, len(self._high) // 2):
                self._compact()

    def _compact(self) -> None:
        """Move new answers to arrays sorted by key."""
        rows = np.empty(len(self._new), _PLACE)
        high, rows["low"] = np.frombuffer(b"".join(self._new), ">u8").reshape(-1, 2).T
        rows["file"], rows["start"], rows["size"] = np.array([*self._new.values()], np.int64).T
        keys = np.concatenate([self._high, high.astype(np.uint64)])
        order = np.argsort(keys, kind="stable")
        self._high, self._places = keys[order], np.concatenate([self._places, rows])[order]
        self._new.clear()

    def _place(self, key: bytes) -> tuple[int, int, int] | None:
        if not len(self._high):
            return None
        high, low = np.uint64(int.from_bytes(key[:8], "big")), int.from_bytes(key[8:], "big")
        at, found = int(np.searchsorted(self._high, high)), None
        while at < len(self._high) and self._high[at] == high:
            if int(self._places["low"][at]) == low:
                found = tuple(int(self._places[name][at]) for name in ("file", "start", "size"))
            at += 1
        return found  # type: ignore[return-value]  # three integers

    def _take_file(self) -> int:
        """Lock a file that no process of this machine appends to, and cut off a torn line at its end."""
        host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname()) or "host"
        with _naming(self.folder):
            for number in range(_FILES):
                path = self.folder / f"{host}-{number}.jsonl"
                descriptor = held_file(path, shared=False)
                if descriptor is not None:
                    break
            else:
                raise UnavailableError(
                    f"{self.folder}: {_FILES:,} files are in use; remove those of dead hosts"
                )
            known = self._numbers.get(path.name)
            number = self._open(path, descriptor) if known is None else known
            if known is not None:
                os.close(self._files[number])
                self._files[number] = descriptor
            self._read_new(number)
            os.ftruncate(descriptor, self._ends[number])
        self._own, self._own_end = number, self._ends[number]
        return number


_OPENED: dict[tuple[int, Path], Answers] = {}


def open_answers(folder: Path) -> Answers:
    """Return the answers of a folder; this process opens it once, because its index is read whole."""
    key = os.getpid(), folder.resolve()
    found = _OPENED.get(key)
    if found is None or not found.is_current:
        found = _OPENED[key] = Answers(folder)
    return found


class BudgetSpentError(UnavailableError):
    """A step has spent its budget."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Limits on what a step may send: per minute, and in all builds together; None: no limit."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    requests: int | None = None
    tokens: int | None = None

    @property
    def is_limited(self) -> bool:
        """Whether any limit is set."""
        return self != Rates()


class Meter:
    """The requests and tokens of a step in all processes that share a folder of answers, and its rates.

    Requests are counted before they are sent, so that a killed build cannot exceed its budget: those in
    flight when it was killed stay counted.
    """

    def __init__(self, path: Path, rates: Rates) -> None:
        self._path, self._rates = path, rates
        with _naming(path):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def close(self) -> None:
        """Close the meter's file."""
        os.close(self._file)

    def reserve(self, tokens: int) -> float:
        """Count a request of about `tokens` and return 0, or the seconds to wait before another attempt.

        Raises BudgetSpentError if the budget has no room for the request.
        """
        with self._locked():
            next_request, next_tokens, requests, spent = self._read()
            if self._rates.requests is not None and requests >= self._rates.requests:
                raise BudgetSpentError(self._spent(requests, spent))
            if self._rates.tokens is not None and spent + tokens > self._rates.tokens:
                raise BudgetSpentError(self._spent(requests, spent))
            now = time.time()
            gaps = [
                60.0 / self._rates.requests_per_minute if self._rates.requests_per_minute else 0.0,
                60.0 * tokens / self._rates.tokens_per_minute if self._rates.tokens_per_minute else 0.0,
            ]
            due = [next_request, next_tokens]
            # A time far ahead is of a clock that was set back.
            due = [now if at > now + max(3600.0, 2 * gap) else at for at, gap in zip(due, gaps, strict=True)]
            if (wait := max(due) - now) > 0:
                return wait
            due = [max(at, now) + gap for at, gap in zip(due, gaps, strict=True)]
            self._write(due[0], due[1], requests + 1, spent + tokens)
            return 0.0

    def settle(self, requests: int, tokens: int) -> None:
        """Correct the counts: -1 request for one that was refused, and the difference to the estimate."""
        with self._locked():
            next_request, next_tokens, before, spent = self._read()
            self._write(next_request, next_tokens, max(0, before + requests), max(0, spent + tokens))

    def _spent(self, requests: int, tokens: int) -> str:
        return (
            f"ask: the budget is spent: {requests:,} requests and {tokens:,} tokens. All answers are kept in "
            f"{self._path.parent}; raise `budget` and run the same command again to continue"
        )

    def _read(self) -> tuple[float, float, int, int]:
        data = os.pread(self._file, _METER.size, 0)
        found: tuple[float, float, int, int] = (
            _METER.unpack(data) if len(data) == _METER.size else (0.0, 0.0, 0, 0)
        )
        return found

    def _write(self, next_request: float, next_tokens: float, requests: int, tokens: int) -> None:
        with _naming(self._path):
            os.pwrite(self._file, _METER.pack(next_request, next_tokens, requests, tokens), 0)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        deadline = time.monotonic() + _METER_SECONDS
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UnavailableError(
                        f"{self._path}: another process has held its lock for {_METER_SECONDS:g} s; is it "
                        "stopped?"
                    ) from None
                time.sleep(0.001)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


def _place_of(key: bytes) -> int:
    return int.from_bytes(key[:8], "big") >> 2


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _described(error, folder) from error


def _described(error: OSError, folder: Path) -> UnavailableError:
    return UnavailableError(f"ask: answers: {error.filename or folder}: {error.strerror or error}")
