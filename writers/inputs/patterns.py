"""Expands an input's path to names: a file, a folder, a glob or a list in braces.

A folder means all files below it, also a folder that a glob matches: Spark, Dask and Ray write folders such
as `part.parquet/`. `**` crosses folders; unlike the standard library's glob it never follows a link into a
folder that it is already inside, so a loop of links ends. `{a,b}` and `{000..123}` are lists of names, as in
the shell and WebDataset. If a file's literal name is the pattern, only that file matches.

Names that begin with a dot or an underscore are hidden, as for Hadoop, Spark and Arrow (`_SUCCESS`,
`.part-0.crc`, `_temporary/`): they are skipped and reported, unless the pattern contains that character at
the same place. The keys of a bucket are matched by the same rules.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from enum import IntEnum
from fnmatch import fnmatchcase
from os.path import normpath
from pathlib import Path

from shardkit.formats.tar.shard_list import expand_braces

_GLOB = re.compile(r"[*?\[]")
_PATTERN = re.compile(r"[*?\[{]")


class Match(IntEnum):
    """Whether a pattern matches a file."""

    NO = 0
    HIDDEN = 1  # it matches, but a name in the path begins with a dot or an underscore
    YES = 2


def alternatives(pattern: str) -> list[str]:
    """Return all patterns that result from expanding lists in braces; the pattern itself if it has none."""
    try:
        return list(dict.fromkeys(expand_braces(pattern)))
    except ValueError:
        return [pattern]  # an unbalanced brace is part of a literal name


def is_glob(pattern: str) -> bool:
    """Return whether a pattern contains *, ? or [."""
    return _GLOB.search(pattern) is not None


def fixed_part(pattern: str) -> str:
    """Return the literal prefix of a pattern; all of it if it is neither a glob nor a list in braces."""
    found = _PATTERN.search(pattern)
    return pattern[: found.start()] if found else pattern


def expand_path(folder: Path, pattern: str) -> dict[Path, Match]:
    """Return the files that `pattern`, relative to `folder`, matches, sorted, each with YES or HIDDEN.

    Raises FileNotFoundError with the first item of a list in braces that matches no file.
    """
    graded: dict[Path, Match] = {}
    found = list(_expand(folder, pattern))  # first take braces literally: file names may contain them
    for one in [] if found else alternatives(pattern):
        more = list(_expand(folder, one))
        if not more and one != pattern:
            raise FileNotFoundError(one)
        found += more
    for path, match in found:
        path = path if normpath(path) == str(path) else Path(normpath(path))
        graded[path] = max(match, graded.get(path, Match.NO))
    return dict(sorted(graded.items(), key=lambda item: item[0].parts))


def _expand(folder: Path, pattern: str) -> Iterator[tuple[Path, Match]]:
    whole = folder / pattern
    if whole.is_dir():
        return _below(whole, Match.YES)
    if _exists(whole):
        return iter([(whole, Match.YES)])
    if not is_glob(pattern):
        return iter(())
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    if parts[-1] == "**":
        parts.append("*")
    return _matches(Path("/") if pattern.startswith("/") else folder, parts, Match.YES)


def key_matches(pattern: str, key: str) -> bool:
    """Return whether the glob `pattern` matches `key`; both are relative to the same place, and use "/"."""
    return grade_of(pattern, key) is Match.YES


def grade_of(pattern: str, key: str) -> Match:
    """Return whether the glob `pattern` matches `key`, or would match it if its names were not hidden."""
    if key.endswith("/"):
        return Match.NO  # an object that some tools write as a marker for an empty folder
    parts = pattern.split("/")
    return _parts_match([*parts, "*"] if parts[-1] == "**" else parts, key.split("/"))


def _parts_match(pattern: Sequence[str], key: Sequence[str]) -> Match:
    if not pattern:  # the pattern matched a folder, and `key` is the rest of the path below it
        return min(map(_shown, key), default=Match.YES)
    if not key:
        return Match.NO
    part, name = pattern[0], key[0]
    if part == "**":
        here = _parts_match(pattern[1:], key)
        if here is Match.YES or len(key) == 1:
            return here
        return max(here, min(_shown(name), _parts_match(pattern, key[1:])))
    match = _name_matches(part, name)
    return min(match, _parts_match(pattern[1:], key[1:])) if match else match


def _name_matches(part: str, name: str) -> Match:
    """Return whether a part of a glob matches a name; HIDDEN if a wildcard matches its leading dot or "_"."""
    if not is_glob(part):
        return Match.YES if part == name else Match.NO
    if not fnmatchcase(name, part):
        return Match.NO
    return Match.YES if part[0] == name[0] else _shown(name)


def _shown(name: str) -> Match:
    return Match.HIDDEN if name.startswith((".", "_")) else Match.YES


def _matches(base: Path, parts: list[str], above: Match) -> Iterator[tuple[Path, Match]]:
    part, rest = parts[0], parts[1:]
    if part == "**":
        yield from _matches(base, rest, above)
        for folder, match in _folders_below(base, above):
            yield from _matches(folder, rest, match)
        return
    if not is_glob(part):
        path = base / part
        candidates = [(path, path.is_dir(), _exists(path), above)]
    else:
        candidates = []
        for entry in _entries(base):
            if match := _name_matches(part, entry.name):
                candidates.append((base / entry.name, entry.is_dir(), True, min(above, match)))
    for path, is_folder, exists, match in candidates:
        if rest:
            yield from _matches(path, rest, match)
        elif is_folder:
            if not base.resolve().is_relative_to(path.resolve()):  # otherwise a link to a folder above itself
                yield from _below(path, match)
        elif exists:
            yield path, match


def _below(folder: Path, above: Match) -> Iterator[tuple[Path, Match]]:
    """Yield (file, match) for all files below a folder, whose own match is `above`."""
    for base, match in ((folder, above), *_folders_below(folder, above)):
        for entry in _entries(base):
            if not entry.is_dir():
                yield base / entry.name, min(match, _shown(entry.name))


def _folders_below(
    base: Path, above: Match, inside: frozenset[Path] = frozenset()
) -> Iterator[tuple[Path, Match]]:
    inside = inside | {base.resolve()}
    for entry in _entries(base):
        if not entry.is_dir():
            continue
        path, match = base / entry.name, min(above, _shown(entry.name))
        if path.resolve() not in inside:
            yield path, match
            yield from _folders_below(path, match, inside)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """List the entries of a folder, sorted by name; [] if there is no such folder.

    For most entries, `is_dir` needs no further access to the disk.
    """
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda entry: entry.name)
    except (NotADirectoryError, FileNotFoundError):
        return []


def _exists(path: Path) -> bool:
    """Return whether a path exists; true for a broken link, too, so that the caller reports it."""
    return path.exists() or path.is_symlink()
