"""Numba: the decorator of all kernels, the cache of their machine code, and a watch on compilation.

A kernel is a function in Numba's subset of Python with real type annotations, which Numba ignores and mypy
checks. `kernel` compiles it on first use, releases the GIL while it runs, and caches the machine code on
disk.

Numba's own cache checks only the file that a kernel is in, so a kernel that calls a kernel of another file
would be loaded from the cache although the other file has changed. The cache folder is therefore named after
a digest of every source file with kernels. Unless the user sets another folder (NUMBA_CACHE_DIR), it is below
`user_cache_folder`, so that neither the installation nor a home folder must be writable. It holds some
megabytes and may be deleted at any time; versions that were not used for a month are deleted. Numba raises an
error for a folder that cannot be written, a full disk, or a truncated file. Here these are not errors,
because a kernel can always be compiled: a file that cannot be read is written again, and if nothing can be
written, each process compiles for itself, after one warning.

The first use of a kernel on a machine takes seconds without progress, so `CompilationWatch` reports it, using
Numba's own events. The compilation of a kernel includes that of the kernels it calls.
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

# Numba sees NumPy's types here, and mypy functions that return int and bool. In kernels, they are the same.
int64 = cast(Callable[[Any], int], np.int64)
boolean = cast(Callable[[Any], bool], np.bool_)

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_VARIABLE = "NUMBA_CACHE_DIR"
_LOADED = "_already_initialized"  # name of the flag in numba.core.entrypoints that extensions were loaded
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

    `inline` copies the function into each kernel that calls it. `allocates=False` declares that neither the
    function nor the functions it calls make arrays. Numba then does not count references, which costs two
    atomic additions each time an array is taken out of a tuple, a third of the time of some kernels; it
    refuses to compile a function that does make an array. Numba is imported here, so that modules with
    kernels need it, but users of this module's other functions do not.
    """
    import numba

    njit: Any = numba.njit  # Any, because the type stubs do not have `_nrt`
    compiler = njit(nogil=True, inline="always" if inline else "never", _nrt=allocates)

    def compiled(function: Callable[..., Any]) -> Any:
        dispatcher = compiler(function)
        if folder := _cache_folder():
            dispatcher._cache = _numba_cache(function, folder)
        return dispatcher

    return compiled if function is None else compiled(function)


def start_numba() -> None:
    """Make Numba load the modules that every kernel needs, without extensions, in a quarter of a second.

    By default, Numba also imports packages that extend it, which no kernel needs: awkward, a dependency of
    gigatoken, takes another quarter of a second. Numba has no setting for this, so this function sets a
    private flag; call it only in processes that this package starts itself.
    """
    from numba.core import entrypoints

    setattr(entrypoints, _LOADED, True)
    kernel(_nothing)()


def load_extensions() -> None:
    """Let the next compilation load extensions, which `start_numba` leaves out; user code may need them."""
    if entrypoints := sys.modules.get("numba.core.entrypoints"):
        setattr(entrypoints, _LOADED, False)


def _nothing() -> None:
    """Do nothing; the smallest kernel."""


def kernel_cache() -> dict[str, str]:
    """Return {"NUMBA_CACHE_DIR": folder} for the environment of workers; {} if the user's value can be used.

    The folder is "" if no folder can be written: workers then cache nothing, and do not warn again.
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
    """Return the cache folder of this process; "", after a warning, if no folder can be written."""
    found = kernel_cache().get(_VARIABLE, os.environ.get(_VARIABLE, ""))
    if not found and os.environ.get(_VARIABLE) != "":
        warn_user(
            "compiled kernels cannot be kept, because no cache folder can be written (tried NUMBA_CACHE_DIR, "
            "XDG_CACHE_HOME, HOME and TMPDIR): each process compiles them again, which takes up to a minute; "
            "set TMPDIR or NUMBA_CACHE_DIR to a folder that only you can write"
        )
    return found


def _numba_cache(function: Callable[..., Any], folder: str) -> Any:
    """Return Numba's cache of a function in `folder`; it ignores errors when it reads or writes files."""
    from numba.core import caching

    config: Any = import_module("numba.core.config")  # Any, because the type stubs do not have its settings
    base: Any = caching.FunctionCache

    class KernelCache(base):  # type: ignore[misc]
        def load_overload(self, signature: Any, target: Any) -> Any:
            try:
                return super().load_overload(signature, target)
            except Exception:  # unpickling a damaged file may raise anything
                with suppress(OSError):
                    self.flush()
                return None

        def save_overload(self, signature: Any, data: Any) -> None:
            with suppress(OSError):
                super().save_overload(signature, data)

    before, config.CACHE_DIR = config.CACHE_DIR, folder
    try:
        return KernelCache(function)
    except RuntimeError:  # "no locator available": the folder became read-only, or sources are in a zip
        return caching.NullCache()
    finally:
        config.CACHE_DIR = before


def _kernel_version() -> str:
    """Return a digest of all modules below writers/ that mention Numba or import this module."""
    state = hashlib.blake2b(importlib.metadata.version("numba").encode(), digest_size=8)
    for source in sorted(Path(__file__).parent.parent.rglob("*.py")):
        data = source.read_bytes()
        if b"numba" in data:
            state.update(data)
    return state.hexdigest()


class CompilationWatch:
    """Calls `report(None)` when a compilation starts and `report(seconds)` when it ends, in its thread."""

    def __init__(self, report: Callable[[float | None], None]) -> None:
        self._report = report
        self._installed = False
        self._depth = 0
        self._start = 0.0

    def install(self) -> None:
        """Subscribe to Numba's events if Numba has been imported. It is cheap: call it before each task."""
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
