"""Local files: paths as users write them, durable writes, memory maps, and checks of who can write.

A file's bytes are durable after `fsync` of the file, its name after `fsync` of its folder. A memory map of
this module keeps no file descriptor open.

Another user who can write in a folder can put wrong data, links and pipes there and replace folders in it.
`who_else_writes` reports whether another user can; it checks one folder, not its parents.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import mmap
import os
import re
import shutil
import stat
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import unquote

from shardkit.errors import PathError, warn_user

if TYPE_CHECKING:
    from shardkit.arrays import Bytes


LACKING = (
    errno.EINVAL,
    errno.ENODEV,
    errno.ENOLCK,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.ENOTTY,
    errno.EPERM,
)
"""Error numbers of file systems that do not support a call (FUSE, 9p, NFS, FAT, shared folders of VMs)."""
PART_SUFFIX = ".shardkit-part"
_HASH_BYTES = 16
_ZEROS = bytes(1 << 20)
# A scheme has two letters or more, so that "a:/b" is a path. One slash is enough, because `pathlib.Path`
# turns "s3://bucket" into "s3:/bucket".
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
_WITHOUT_SLASHES = re.compile(r"(s3|gs|gcs|hf|https?|az|abfss?|sftp):(?!/)", re.IGNORECASE)

FileVersion = tuple[int, int, int, int]
"""(bytes, mtime in ns, ctime in ns, inode) of a file, as `file_version` returns it."""


class Closing:
    """A context manager whose exit calls `close`."""

    __slots__ = ()

    def close(self) -> None:
        """Release all resources; safe to call again."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def is_remote(url: str | os.PathLike[str]) -> bool:
    """Return whether `url` is a URL other than file://; paths and file:// URLs are on this machine."""
    text = os.fspath(url)
    return "://" in text and not text.lower().startswith("file://")


def local_path(url: str | os.PathLike[str], option: str | None = None) -> Path:
    """Return the path on this machine that `url` names: a path, "~" expanded, or a file:// URL.

    Raises PathError, beginning with the name of the `option`, for another scheme, for an unexpanded shell
    variable, and for an empty path.
    """
    text = os.fsdecode(url)
    where = repr(text) if option is None else f"{option}: {text!r}"
    scheme = _SCHEME.match(text)
    if scheme is not None and scheme[1].lower() == "file":
        return _path_of_file_url(text, where)
    if not text or "\0" in text:
        raise PathError(f"{where} is not a path: it is empty or has a NUL character")
    if scheme is not None or "://" in text:
        hint = "" if "://" in text else "; pathlib.Path removes slashes of URLs: give URLs as text"
        raise PathError(f"{where} is a URL; give a path on this machine{hint}")
    if scheme := _WITHOUT_SLASHES.match(text):
        raise PathError(
            f"{where} lacks the slashes of a URL: write {scheme[1]}://…, or for a file of this name ./{text}"
        )
    if text.startswith("$"):
        name = re.match(r"\$\{?(\w*)", text)
        known = f' (in Python, os.environ["{name[1]}"])' if name and name[1] else ""
        raise PathError(
            f"{where} begins with a variable, which is not expanded: give its value{known}; "
            f"if the folder really has this name, write ./{text}"
        )
    if text.startswith("~"):
        return _expanded(text, where)
    path = Path(text)  # drops a leading "./", which may protect a name that begins with "$" or "~"
    looks_else = str(path)[:1] in ("$", "~") or _SCHEME.match(str(path)) or _WITHOUT_SLASHES.match(str(path))
    return path.absolute() if looks_else else path


def _expanded(text: str, where: str) -> Path:
    """Return the path that begins with "~" or "~user"."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        if os.path.lexists(text):  # as in a shell: without a user of that name, "~" is a plain character
            return Path(text).absolute()
        problem = "HOME is not set" if text.partition("/")[0] == "~" else "there is no such user"
        raise PathError(f"{where}: {problem}; give the absolute path") from error


def _path_of_file_url(text: str, where: str) -> Path:
    """Return the path of file:///path, file://localhost/path or file:/path, percent signs decoded."""
    rest = text.partition(":")[2]
    if rest.startswith("//"):
        host, slash, rest = rest[2:].partition("/")
        if not slash or host.lower() not in ("", "localhost"):
            raise PathError(f"{where} names the host {host!r}; write file:///path, or a plain path")
        rest = f"/{rest}"
    path = unquote(rest)
    if "\0" in path:
        raise PathError(f"{where} has a NUL character")
    return Path(path)


def load_json(text: str | bytes) -> Any:
    """Parse untrusted JSON. Raises ValueError if anything is wrong with it, including too deep nesting."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("brackets nest too deeply") from None


def user_cache_folder() -> Path | None:
    """Return the folder for files that all builds share: $XDG_CACHE_HOME/shardkit (~/.cache/shardkit).

    It may be deleted at any time. If it cannot be written (no home, a read-only root), return a private
    folder below the system's temporary folder ($TMPDIR); return None if neither can be written. A folder in
    which other users can write is not used, because machine code is run from it.
    """
    with suppress(OSError, RuntimeError):  # RuntimeError: the user has no home folder
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardkit"
        if can_write_in(folder) and who_else_writes(folder.resolve(), group=True) is None:
            return folder
    with suppress(OSError):
        folder = Path(tempfile.gettempdir()) / f"shardkit-{os.getuid()}"
        if can_write_in(folder) and who_else_writes(folder) is None:
            return folder
    return None


def can_write_in(folder: Path) -> bool:
    """Create `folder` for this user alone if it is missing; return whether files can be created in it.

    This creates a file: permission bits alone are not enough, because the mount may be read-only.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def file_version(status: os.stat_result) -> FileVersion:
    """Return (bytes, mtime, ctime, inode) of a file, times in ns: equal only while its content is the same.

    Size and mtime alone are not enough: `cp -p`, `rsync -t`, `tar x` and os.utime set the mtime, but nothing
    sets the ctime. The inode distinguishes files copied from an image that does not store the ctime. The
    device is left out, because its number changes when a network file system is mounted again. Equal files on
    another machine, or in a copy of a folder, have other versions: treat a difference as "read it again".
    """
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


@contextmanager
def not_for_everyone() -> Iterator[None]:
    """Set the umask in the block so that at most owner and group can write files that are created then."""
    before = os.umask(0o077)  # the umask can only be read by setting it
    os.umask(before | stat.S_IWOTH)
    try:
        yield
    finally:
        os.umask(before)


def fsync_path(path: Path) -> None:
    """Sync a file's bytes, or the names in a folder, to the disk, so that they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some file systems cannot sync folders
        if error.errno not in LACKING or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
    finally:
        os.close(descriptor)


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it to `path` at the end, or remove it after an error."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def publish_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically and durably: after a power cut it is there whole or not at all."""
    # Threads, and hosts whose process ids are equal, may write the same file at the same time. The name is
    # not random, so that a writer that runs again overwrites the leftover of a killed one.
    writer = f"{os.uname().nodename}-{os.getpid()}-{threading.get_ident()}"
    temporary = path.with_name(f".{path.name}.tmp-{writer}")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync_path(path.parent)


def publish_hashed(path: Path, data: bytes) -> None:
    """Write a hash of `data`, then `data`, as `publish_bytes` does; `read_hashed` reads it back."""
    publish_bytes(path, hashlib.blake2b(data, digest_size=_HASH_BYTES).digest() + data)


def read_hashed(path: Path) -> bytes | None:
    """Return what `publish_hashed` wrote; None if the file is missing or damaged. Marks it as used now."""
    try:
        with os.fdopen(open_regular(path, follow_links=False), "rb") as file:
            stored = file.read()
        with suppress(OSError):
            os.utime(path, follow_symlinks=False)  # so that whoever removes the least recently used keeps it
    except (OSError, ValueError):
        return None
    data = stored[_HASH_BYTES:]
    is_whole = stored[:_HASH_BYTES] == hashlib.blake2b(data, digest_size=_HASH_BYTES).digest()
    return data if is_whole else None


def part_of(path: Path) -> Path:
    """Return the temporary name under which a file is written before it is renamed."""
    return path.with_name(f".{path.name}{PART_SUFFIX}")


def link_or_copy(source: Path, target: Path) -> None:
    """Give `source` a second name `target` by a hard link, or copy and sync it if it cannot be linked.

    An existing `target` is replaced atomically. The name is durable once its folder is synced.
    """
    temporary = part_of(target)
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        shutil.copyfile(source, temporary)
        fsync_path(temporary)
    temporary.replace(target)
    temporary.unlink(missing_ok=True)  # rename(2) does nothing if both names are links to one file


def move_durably(source: Path, target: Path) -> None:
    """Sync a file, then rename it. The new name is durable once its folder is synced."""
    fsync_path(source)
    source.rename(target)


def rename_new(source: Path, target: Path) -> None:
    """Rename a file to a name that must not exist; otherwise raise FileExistsError.

    This is atomic where the system has renameat2. Elsewhere (SMB, some FUSE) an empty file is created first
    to reserve the name; a process that is killed between the two steps leaves that file.
    """
    if (renameat2 := getattr(_libc, "renameat2", None)) is not None:
        names = os.fsencode(source), os.fsencode(target)
        if not renameat2(_THIS_FOLDER, names[0], _THIS_FOLDER, names[1], _NO_REPLACE):
            return
        number = ctypes.get_errno()
        if number not in LACKING:
            raise OSError(number, os.strerror(number), str(target))
    target.open("xb").close()
    try:
        source.rename(target)
    except BaseException as error:
        target.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):  # raised for the empty file that this function created
            raise OSError(errno.EOPNOTSUPP, "this file system cannot rename over an existing file") from error
        raise


def make_folder(folder: Path) -> bool:
    """Create a folder and its missing parents durably; return whether it was missing."""
    if folder.is_dir():
        return False
    make_folder(folder.parent)
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, f"{folder} is not a folder") from None
    fsync_path(folder.parent)
    return True


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,  # off_t on all 64-bit systems that Python supports, except Windows
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value
_THIS_FOLDER, _NO_REPLACE = -100, 1  # AT_FDCWD and RENAME_NOREPLACE of Linux
_addresses: set[int] = set()  # addresses of open maps; needs no lock, because its operations are atomic


class NotRegularFileError(OSError):
    """The path is a pipe, a folder, a device, or a link where links are not allowed."""


def who_else_writes(
    folder: Path, *, group: bool = False, sticky: bool = False, other_owner: bool = False
) -> str | None:
    """Return why users other than this one and root can change a folder, as a clause; None if they cannot.

    `group`: allow its group to write; `sticky`: allow everybody to write if the sticky bit keeps them from
    renaming files of others; `other_owner`: allow any owner. A symbolic link is never trusted. Raises
    OSError.
    """
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return "is a link" if stat.S_ISLNK(status.st_mode) else "is not a folder"
    if not other_owner and status.st_uid not in (0, os.geteuid()):
        return f"belongs to another user (number {status.st_uid})"
    if sticky and status.st_mode & stat.S_ISVTX:
        return None
    if status.st_mode & stat.S_IWOTH:
        return "everybody can write there"
    if status.st_mode & stat.S_IWGRP and not group:
        return "its group can write there"
    return None


def open_regular(file: str | os.PathLike[str], *, follow_links: bool = True) -> int:
    """Open a regular file for reading, without blocking. Raises NotRegularFileError for anything else."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # O_NONBLOCK: opening a pipe must not wait
    try:
        descriptor = os.open(file, flags if follow_links else flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ENXIO or (error.errno == errno.ELOOP and not follow_links):
            raise NotRegularFileError(error.errno, "is not a regular file") from error  # a socket or a link
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegularFileError(errno.EINVAL, "is not a regular file")
    return descriptor


def map_path(file: Path) -> Bytes:
    """Return a regular file's bytes as a read-only map. Raises OSError."""
    descriptor = open_regular(file)
    try:
        return map_file(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def map_file(descriptor: int, size: int, *, start: int = 0, writable: bool = False) -> Bytes:
    """Return `size` bytes of an open file as a map, which stays valid after the descriptor is closed.

    A writable map is shared with the file. A read-only map is private, because more file systems support
    that; where maps are not supported at all, the bytes are read into memory, after one warning.

    The map is removed when the last array that shows it is freed, and not before. `mmap.mmap` would hold a
    duplicate of the descriptor until then (Python 3.13 can avoid that), and the default limit is 1,024 open
    files per process.
    """
    import numpy as np  # imported late: the command loads this module even for --help

    if not size:
        return np.empty(0, dtype=np.uint8)
    before = start % mmap.ALLOCATIONGRANULARITY
    try:
        whole: Bytes = np.asarray(_Map(descriptor, before + size, start - before, writable))
    except OSError as error:
        if writable or error.errno not in LACKING or not size:
            raise
        return _read_instead(descriptor, size, start, error)
    return whole[before:] if before else whole


_warned_of_maps = False


def _read_instead(descriptor: int, size: int, start: int, error: OSError) -> Bytes:
    """Read part of a file into memory, because its file system does not support maps."""
    import numpy as np

    global _warned_of_maps  # one warning for all files of a process
    if not _warned_of_maps:
        _warned_of_maps = True
        warn_user(
            f"a file system does not support mmap ({error.strerror}): its files are read into memory "
            "by each process; copy the dataset to a local disk if that takes too much memory"
        )
    data = np.empty(size, dtype=np.uint8)
    view, filled = data.data, 0
    while filled < size:
        count = os.preadv(descriptor, [view[filled:]], start + filled)
        if not count:
            raise OSError(errno.EIO, f"the file ends {size - filled:,} bytes before the requested end")
        filled += count
    data.flags.writeable = False
    return data


def allocate(descriptor: int, size: int) -> None:
    """Reserve `size` bytes on the disk for an empty file. Raises OSError if the disk is full."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size)
            return
        except OSError as error:
            if error.errno not in LACKING:
                raise
    for start in range(0, size, len(_ZEROS)):  # macOS and some file systems lack posix_fallocate
        os.pwrite(descriptor, _ZEROS[: size - start], start)


def open_maps() -> int:
    """Return the number of maps from `map_file` that are open in this process."""
    return len(_addresses)


class _Map:
    """The owner of a memory map; every NumPy array that shows the memory keeps a reference to it."""

    def __init__(self, descriptor: int, size: int, start: int, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        kind = mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE
        address = _libc.mmap(None, size, protection, kind, descriptor, start)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        _addresses.add(address)
        # Do not unmap at exit: arrays may be read until the very end of the process.
        weakref.finalize(self, _unmap, address, size).atexit = False
        self.__array_interface__ = {
            "version": 3,
            "data": (address, not writable),
            "shape": (size,),
            "typestr": "|u1",
        }


def _unmap(address: int, size: int) -> None:
    _addresses.discard(address)  # do this first: after munmap, another map may get the same address
    _libc.munmap(address, size)
