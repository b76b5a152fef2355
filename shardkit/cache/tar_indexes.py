"""What scans of tars found, kept beside the cache, so that nobody on the machine scans a tar a second time.

    CACHE_DIR/shardkit-cache-1/tars/NAME        one file a tar, see `shardkit.tar.index_file`
                                    NAME.lock   flocked by whoever scans it

A file is named by the tar's URL and the version of the object (of a local file: its time, inode and size), so
a tar that is replaced is scanned again. Files are checked when they are read and appear by rename; they are
not synced, because what a power cut damages is recognised and made anew. The least recently used give way
beyond `MAX_BYTES`. Without a folder nothing is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardkit.cache.folder import SUBFOLDER, make_subfolders
from shardkit.cache.locks import FileLock
from shardkit.cache.slot import CacheFolderError
from shardkit.local_files import open_regular
from shardkit.tar.index import TarIndex
from shardkit.tar.index_file import Scanned, index_file_bytes, read_head, read_index

__all__ = ["TarIndexes"]

MAX_BYTES = 16 << 30  # 500 million members


@dataclass(frozen=True, slots=True)
class TarIndexes:
    """The indexes of a dataset's tars, by number. Plain data: may be pickled."""

    folder: Path | None
    origins: Sequence[str]

    @classmethod
    def beside(
        cls, cache_folder: str | os.PathLike[str] | None, objects: Sequence[tuple[str, str]]
    ) -> TarIndexes:
        """`objects`: (URL, version) of each tar; `cache_folder` as the user gave it."""
        origins = [f"{url}\n{version}" for url, version in objects]
        if cache_folder is None:
            return cls(None, origins)
        folder = Path(cache_folder).absolute()
        try:
            make_subfolders(folder, ["tars"])
        except OSError as error:
            problem = f"the cache folder cannot be used: {error.strerror or error}"
            raise CacheFolderError(f"{cache_folder}: {problem}; give another cache_dir") from error
        return cls(folder / SUBFOLDER / "tars", origins)

    def scanned(self, number: int) -> Scanned | None:
        """What a manifest states of a tar, if it was scanned before."""
        file = self._file(number)
        if file is None:
            return None
        try:
            with os.fdopen(open_regular(file, follow_links=False), "rb") as handle:
                return read_head(handle, self.origins[number])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def index(self, number: int) -> TarIndex | None:
        """The members of a tar, if it was scanned before."""
        file = self._file(number)
        if file is None:
            return None
        try:
            with os.fdopen(open_regular(file, follow_links=False), "rb") as handle:
                _, index = read_index(handle, self.origins[number])
                with contextlib.suppress(OSError):
                    os.utime(handle.fileno())  # what is in use is removed last
                return index
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, number: int, scanned: Scanned, index: TarIndex) -> None:
        """Write down what a scan found; a disk that does not take it costs the next opening another scan."""
        file = self._file(number)
        if file is None:
            return
        temporary = file.with_name(f"{file.name}.tmp-{os.getpid()}-{threading.get_ident()}")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o664)
            with os.fdopen(descriptor, "wb") as handle:
                handle.write(index_file_bytes(self.origins[number], scanned, index))
            temporary.replace(file)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def claim(self, number: int, timeout_seconds: float) -> FileLock | None:
        """The right to scan a tar while others wait; None if another has it for all of that time."""
        file = self._file(number)
        assert file is not None, "there is nobody to share with"
        lock = FileLock(file.with_name(f"{file.name}.lock"))
        try:
            return lock if lock.acquire(timeout_seconds) else None
        except OSError:
            return None

    def trim(self) -> None:
        """Remove the least recently used files beyond the limit, of this dataset and of others."""
        if self.folder is None:
            return
        found = []
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, status.st_size, entry.path))
        excess = sum(size for _, size, _ in found) - MAX_BYTES
        for _, size, path in sorted(found):
            if excess <= 0:
                return
            with contextlib.suppress(OSError):
                Path(path).unlink()
            excess -= size

    def _file(self, number: int) -> Path | None:
        if self.folder is None:
            return None
        origin = self.origins[number].encode("utf-8", "surrogateescape")
        return self.folder / hashlib.blake2b(origin, digest_size=20).hexdigest()
