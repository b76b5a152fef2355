"""Numba: the decorator of all kernels, the cache of their machine code, and a watch on compilation.

A kernel is a function in Numba's subset of Python with real type annotations, which Numba ignores and mypy
checks. `kernel` compiles it on first use, releases the GIL while it runs, and caches the machine code on
disk.

Numba's own cache checks only the file that a kernel is in, so a kernel that calls one of another file would
be loaded from the cache although the other one has changed. The cache folder is therefore named after a
digest of every source file with kernels. It is below `user_cache_folder`, so that neither the installation
nor a home must be writable, unless the user names another (NUMBA_CACHE_DIR). It holds some megabytes and may
be deleted at any time; versions that were not used for a month are deleted. Numba raises what it meets there:
a folder that cannot be written, a full disk, a file that a power cut has cut. Here none of it is an error,
because a kernel can always be compiled: what cannot be read is written again, and where nothing can be
written each process compiles for itself, which one warning says.

The first use of a kernel on a machine takes seconds without progress, so `CompilationWatch` reports it, from
Numba's own events. Kernels that are compiled for one another are one compilation.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt

from shardkit.errors import warn_user
from shardkit.files import can_write_in, user_cache_folder

Bools = npt.NDArray[np.bool_]
UInt8s = npt.NDArray[np.uint8]
UInt16s = npt.NDArray[np.uint16]
UInt32s = npt.NDArray[np.uint32]
UInt64s = npt.NDArray[np.uint64]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]

# NumPy's types to Numba, Python's to mypy: in a kernel both are machine numbers.
int64 = cast(Callable[[Any], int], np.int64)
boolean = cast(Callable[[Any], bool], np.bool_)

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_VARIABLE = "NUMBA_CACHE_DIR"
_LOADED = "_already_initialized"  # of Numba's module `entrypoints`: extensions have been loaded
_UNUSED_SECONDS = 30 * 24 * 3600


@overload
def kernel(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]: ...


@overload
def kernel(
    *, inline: bool = False, allocates: bool = True
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]: ...


def kernel(
    function: Callable[..., Any] | None = None, *, inline: bool = False, allocates: bool = True
) -> Any:
    """Compile a function with Numba when it is first called, and return Numba's dispatcher.

    `inline` copies the function into each kernel that calls it. One that makes no array, nor calls a function
    that does, says so by `allocates=False`: Numba then counts no references, which otherwise costs two atomic
    additions each time an array is taken out of a tuple, a third of the time of some kernels. Numba refuses
    to compile it if it makes an array. Numba is imported here, so that modules with kernels need it and users
    of this module's other functions do not.
    """
    import numba

    njit: Any = numba.njit  # whose stubs do not know `_nrt`
    compiler = njit(nogil=True, inline="always" if inline else "never", _nrt=allocates)

    def compiled(function: Callable[..., Any]) -> Any:
        dispatcher = compiler(function)
        if folder := _cache_folder():
            dispatcher._cache = _numba_cache(function, folder)
        return dispatcher

    return compiled if function is None else compiled(function)


def start_numba() -> None:
    """Have Numba load what it needs for any kernel, which takes it a quarter of a second.

    Other packages extend Numba, and it would import them: awkward, which gigatoken brings, takes as long
    again. No kernel needs them. Numba has no setting for it, so this is only for processes of our own.
    """
    from numba.core import entrypoints

    setattr(entrypoints, _LOADED, True)
    kernel(_nothing)()


def load_extensions() -> None:
    """Undo what `start_numba` leaves out, for code of the user: the next compilation loads extensions."""
    if entrypoints := sys.modules.get("numba.core.entrypoints"):
        setattr(entrypoints, _LOADED, False)


def _nothing() -> None:
    """The smallest kernel."""


def kernel_cache() -> dict[str, str]:
    """Return environment variables for workers; {} if the user has set one that can be used.

    The folder is empty text where none can be written: then workers cache nothing, and do not warn again.
    """
    given = os.environ.get(_VARIABLE)
    if given == "" or (given is not None and can_write_in(Path(given))):
        return {}
    with suppress(OSError):
        if (parent := user_cache_folder()) is not None:
            folder = parent / f"kernels-{_kernel_version()}"
            folder.mkdir(mode=0o700, exist_ok=True)
            os.utime(folder)
            for other in parent.glob("kernels-*"):
                if other.stat().st_mtime < time.time() - _UNUSED_SECONDS:
                    shutil.rmtree(other, ignore_errors=True)
            return {_VARIABLE: str(folder)}
    return {_VARIABLE: ""}


@functools.cache
def _cache_folder() -> str:
    """Return the folder of this process's kernels; "", after a warning, if none can be written."""
    found = kernel_cache().get(_VARIABLE, os.environ.get(_VARIABLE, ""))
    if not found and os.environ.get(_VARIABLE) != "":
        warn_user(
            "compiled kernels cannot be kept, because no cache folder can be written (NUMBA_CACHE_DIR, "
            "XDG_CACHE_HOME, HOME and TMPDIR were looked at): each process compiles them anew, which takes "
            "up to a minute; set TMPDIR or NUMBA_CACHE_DIR to a folder that only you can write"
        )
    return found


def _numba_cache(function: Callable[..., Any], folder: str) -> Any:
    """Return Numba's cache of a function in `folder`, whose files raise nothing, whatever happens to them."""
    from numba.core import caching

    config: Any = import_module("numba.core.config")  # whose stubs do not know its settings
    base: Any = caching.FunctionCache

    class KernelCache(base):  # type: ignore[misc]
        def load_overload(self, signature: Any, target: Any) -> Any:
            try:
                return super().load_overload(signature, target)
            except Exception:  # whatever a damaged file makes of unpickling
                with suppress(OSError):
                    self.flush()
                return None

        def save_overload(self, signature: Any, data: Any) -> None:
            with suppress(OSError):
                super().save_overload(signature, data)

    before, config.CACHE_DIR = config.CACHE_DIR, folder
    try:
        return KernelCache(function)
    except RuntimeError:  # "no locator available": read-only since then, or sources lie in an archive
        return caching.NullCache()
    finally:
        config.CACHE_DIR = before


def _kernel_version() -> str:
    """Digest of all modules below writers/ that mention Numba, directly or by importing this one."""
    state = hashlib.blake2b(importlib.metadata.version("numba").encode(), digest_size=8)
    for source in sorted(Path(__file__).parent.parent.rglob("*.py")):
        data = source.read_bytes()
        if b"numba" in data:
            state.update(data)
    return state.hexdigest()


class CompilationWatch:
    """Calls `report(None)` when a compilation starts and `report(seconds)` when it ends, in that thread."""

    def __init__(self, report: Callable[[float | None], None]) -> None:
        self._report = report
        self._installed = False
        self._depth = 0
        self._start = 0.0

    def install(self) -> None:
        """Subscribe to Numba's events if Numba has been imported; call this before each task, it is cheap."""
        if self._installed or "numba" not in sys.modules:
            return
        from numba.core import event

        watch = self

        class Listener(event.Listener):
            def on_start(self, _: Any) -> None:
                watch._begin()

            def on_end(self, _: Any) -> None:
                watch._end()

        event.register("numba:compile", Listener())  # type: ignore[no-untyped-call]
        self._installed = True

    def _begin(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._start = time.perf_counter()
            self._report(None)

    def _end(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._report(time.perf_counter() - self._start)
