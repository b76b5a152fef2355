"""Results of a pass over files, made once by all processes of a node together and kept in a folder.

    FOLDER/NAME         the hash of the rest, and a result
           NAME.lock    flocked by the process that makes the result

Each process takes results that no other has locked, with several threads, so all processes of a node, and all
nodes that see the folder, work together. A result appears by rename: a pass that is interrupted continues.
Damaged files are made again. Files are not synced, because damage by a power cut is noticed. On a full disk,
the next start makes the results again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from shardkit.files import publish_hashed, read_hashed
from shardkit.locks import FileLock
from shardkit.progress import reading

WAIT_SECONDS = 600.0  # longest wait for another process that makes a result, before this one makes it, too

T = TypeVar("T")


@dataclass(frozen=True)
class KeptResults(Generic[T]):
    """Results by number, kept in `folder` (None: nowhere) under `names`."""

    folder: Path | None
    names: Sequence[str]
    make: Callable[[int], T]
    pack: Callable[[T], bytes]
    unpack: Callable[[int, bytes], T | None]
    """Returns the result of a number from what `pack` returned; None if it is of something else."""
    wait_seconds: float = WAIT_SECONDS
    threads: int = 1
    max_bytes: int | None = None
    """Size of the folder above which the least recently used results in it are removed."""

    def stored(self, number: int) -> T | None:
        """Return a result that is kept; None if it is missing, damaged, or of something else."""
        if self.folder is None or (data := read_hashed(self.folder / self.names[number])) is None:
            return None
        return self.unpack(number, data)

    def all(self, step: str, sizes: Sequence[int]) -> list[T]:
        """Return all results, made if they are missing.

        `step` names the work and `sizes` its amounts in bytes, by number, for the progress that is shown.
        """
        found = {n: one for n in range(len(self.names)) if (one := self.stored(n)) is not None}
        missing = [number for number in range(len(self.names)) if number not in found]
        found |= self.make_all(step, sizes, missing)
        for number in missing:
            if number not in found:
                one = self.stored(number)
                found[number] = self.make(number) if one is None else one  # damaged or removed since
        return [found[number] for number in range(len(self.names))]

    def make_all(self, step: str, sizes: Sequence[int], missing: Sequence[int]) -> dict[int, T]:
        """Make the results `missing`, which are not kept yet; return those that cannot be stored."""
        kept: dict[int, T] = {}
        if not missing:
            return kept
        with reading(step, {number: sizes[number] for number in missing}) as advance:
            for patience in (0.0, self.wait_seconds):  # first those that nobody else makes

                def one(number: int, patience: float = patience) -> bool:
                    is_done, made = self._make(number, patience)
                    if made is not None:
                        kept[number] = made
                    if is_done:
                        advance(number)
                    return is_done

                missing = self._each(one, missing)
        if self.folder is not None and self.max_bytes is not None:
            trim(self.folder, self.max_bytes)
        return kept

    def _each(self, one: Callable[[int], bool], numbers: Sequence[int]) -> list[int]:
        """Call `one` for each number, in threads; return those for which it returns False."""
        if not numbers:
            return []
        first = os.getpid() % len(numbers)  # processes that start together begin in different places
        turned = [*numbers[first:], *numbers[:first]]
        threads = min(self.threads, len(numbers))
        with ThreadPoolExecutor(threads, thread_name_prefix="shardkit-index") as pool:
            jobs = {pool.submit(one, number): number for number in turned}
            try:
                return sorted(jobs[job] for job in as_completed(jobs) if not job.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _make(self, number: int, patience: float) -> tuple[bool, T | None]:
        """Make and store a result. Return (whether it is made, the result if it cannot be stored).

        It is not made if another process has locked it and `patience`, in seconds, is 0.
        """
        if self.folder is None:
            return True, self.make(number)
        lock = FileLock(self.folder / f"{self.names[number]}.lock")
        try:
            is_locked = lock.acquire(patience)
        except OSError:  # a read-only or full disk
            return True, self.make(number)
        if not is_locked and not patience:
            return False, None
        try:
            if self.stored(number) is not None:  # another process was faster
                return True, None
            made = self.make(number)
            try:
                publish_hashed(self.folder / self.names[number], self.pack(made))
            except OSError:
                return True, made
            return True, None
        finally:
            if is_locked:
                lock.release()


def trim(folder: Path, max_bytes: int) -> None:
    """Remove the least recently used files of a folder until the rest fit `max_bytes`."""
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                found.append((status.st_mtime_ns, status.st_size, entry.path))
    excess = sum(size for _, size, _ in found) - max_bytes
    for _, size, path in sorted(found):
        if excess <= 0:
            return
        with contextlib.suppress(OSError):
            Path(path).unlink()
        excess -= size
