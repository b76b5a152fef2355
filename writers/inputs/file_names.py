"""A path of a recipe, which may be a file, a folder or a glob, as the files that it names.

Unlike the standard library's glob, `**` never follows a link into a folder that it is already inside, so a
loop of links ends. Names that begin with a dot or an underscore (`_SUCCESS`, `.crc`) are left out unless the
pattern spells them. A folder, named or matched by a glob (Spark, Dask and Ray write `part.parquet/`), means
all files below it. `key_matches` has the same rules for the keys of a bucket.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from os.path import normpath
from pathlib import Path

__all__ = ["expand_path", "fixed_part", "key_matches"]

_MAGIC = re.compile(r"[*?\[]")


def expand_path(folder: Path, pattern: str) -> list[Path]:
    """Sorted paths that `pattern`, relative to `folder`, names; a literal file wins over a glob."""
    whole = folder / pattern
    if whole.is_dir():
        found = set(_below(whole))
    elif _exists(whole) or not _MAGIC.search(pattern):
        found = {whole} if _exists(whole) else set()
    else:
        parts = [part for part in pattern.split("/") if part not in ("", ".")]
        if parts[-1] == "**":
            parts.append("*")
        found = set(_matches(Path("/") if pattern.startswith("/") else folder, parts))
    return sorted(Path(normpath(path)) for path in found)


def fixed_part(pattern: str) -> str:
    """What all that matches begins with; the whole pattern if it is no glob."""
    found = _MAGIC.search(pattern)
    return pattern[: found.start()] if found else pattern


def key_matches(pattern: str, key: str) -> bool:
    """Whether the glob `pattern` names `key`; both relative to the same place, with "/" between the parts."""
    if key.endswith("/"):
        return False  # a marker that some tools write to show an empty folder
    parts = pattern.split("/")
    return _parts_match([*parts, "*"] if parts[-1] == "**" else parts, key.split("/"))


def _parts_match(pattern: Sequence[str], key: Sequence[str]) -> bool:
    if not pattern:  # `key` is what lies below a folder that the pattern matched
        return not any(name.startswith((".", "_")) for name in key)
    if not key:
        return False
    part, name = pattern[0], key[0]
    if part == "**":
        inside = len(key) > 1 and not name.startswith((".", "_"))
        return _parts_match(pattern[1:], key) or (inside and _parts_match(pattern, key[1:]))
    if _MAGIC.search(part):
        is_match = fnmatchcase(name, part) and (not name.startswith((".", "_")) or part[0] == name[0])
    else:
        is_match = part == name
    return is_match and _parts_match(pattern[1:], key[1:])


def _matches(base: Path, parts: list[str]) -> Iterator[Path]:
    part, rest = parts[0], parts[1:]
    if part == "**":
        yield from _matches(base, rest)
        for folder in _folders_below(base):
            yield from _matches(folder, rest)
        return
    if _MAGIC.search(part):
        candidates = [
            path
            for path in _entries(base)
            if fnmatchcase(path.name, part) and (not _hidden(path) or part[0] == path.name[0])
        ]
    else:
        candidates = [base / part]
    for path in candidates:
        if rest:
            yield from _matches(path, rest)
        elif path.is_dir():
            if not base.resolve().is_relative_to(path.resolve()):  # else a link to where it lies in
                yield from _below(path)
        elif _exists(path):
            yield path


def _below(folder: Path) -> Iterator[Path]:
    """All files below a folder."""
    for base in (folder, *_folders_below(folder)):
        yield from (path for path in _entries(base) if not _hidden(path) and not path.is_dir())


def _folders_below(base: Path, inside: frozenset[Path] = frozenset()) -> Iterator[Path]:
    inside = inside | {base.resolve()}
    for path in _entries(base):
        if not _hidden(path) and path.is_dir() and path.resolve() not in inside:
            yield path
            yield from _folders_below(path, inside)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (NotADirectoryError, FileNotFoundError):
        return []


def _exists(path: Path) -> bool:
    """Also true for a broken link, which the caller reports rather than skips."""
    return path.exists() or path.is_symlink()


def _hidden(path: Path) -> bool:
    return path.name.startswith((".", "_"))
