"""List files that users give: one entry a line, blank lines and those that start with # left out.

What is made of a list is made once a process, whatever the number of splits it cleans; entries are streamed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from shardkit.errors import RecipeError

__all__ = ["load_list"]

_Made = TypeVar("_Made")
_Files = tuple[tuple[Path, int, int], ...]  # with time and size, so that a changed file is read anew


def load_list(folder: Path, paths: Iterable[str], make: Callable[[Iterator[str]], _Made]) -> _Made:
    """What `make`, a module's function, makes of the entries of all files; RecipeError names a bad file."""
    files = []
    for path in paths:
        try:
            state = (folder / path).stat()
        except OSError as error:
            raise RecipeError(f"{path}: {error.strerror or error}") from None
        files.append((folder / path, state.st_mtime_ns, state.st_size))
    made: _Made = _load(make, tuple(files))
    return made


@lru_cache(maxsize=32)
def _load(make: Callable[[Iterator[str]], Any], files: _Files) -> Any:
    return make(_entries(files))


def _entries(files: _Files) -> Iterator[str]:
    """Entries without white space at their ends."""
    for path, _, _ in files:
        try:
            with path.open(encoding="utf-8-sig") as file:
                stripped = map(str.strip, file)
                yield from (entry for entry in stripped if entry and not entry.startswith("#"))
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{path}: not a list, one entry a line in UTF-8: {error}") from None
