"""Which tars a user names, as text: brace lists, "::", patterns. Nothing here looks at a disk or a store.

    part-{000..099}.tar    {train,extra}/*.tar    a.tar::b.tar

Braces mean what they mean to bash and to webdataset: comma lists, ranges of numbers (a leading zero pads) or
of letters with an optional step, nested; what they name keeps the order in which it is written. "*", "?" and
"[...]" stay within one folder, "**" stands for any folders; what a pattern matches is sorted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

__all__ = ["common_folder", "expand_braces", "fixed_folder", "is_pattern", "matches", "split_names"]

MAX_NAMES = 1 << 20  # of one brace list: a million tars; a typing mistake should not fill the memory
_MAGIC = frozenset("*?[")
_RANGE = re.compile(r"(?:(-?\d{1,18})\.\.(-?\d{1,18})|([A-Za-z])\.\.([A-Za-z]))(?:\.\.(-?\d{1,18}))?")


def split_names(text: str) -> list[str]:
    """The names and patterns in `text`, "::" and braces worked out; ValueError if braces do not pair."""
    return [name for part in text.split("::") for name in expand_braces(part)]


def is_pattern(name: str) -> bool:
    """Whether a name has to be looked up, because it may stand for several."""
    return not _MAGIC.isdisjoint(name)


def expand_braces(text: str) -> list[str]:
    """All that a brace list names, in its order; ValueError if braces do not pair, or name too many."""
    try:
        return _expand(text)
    except RecursionError as error:
        raise ValueError(f"{text[:60]!r}… has too many braces") from error


def _expand(text: str) -> list[str]:
    start = text.find("{")
    if "}" in (text if start < 0 else text[:start]):
        raise ValueError(f"{text!r} has a '}}' without its '{{'")
    if start < 0:
        return [text]
    stop = _closing(text, start)
    head, inner = text[:start], text[start + 1 : stop]
    tails = _expand(text[stop + 1 :])
    middles = _alternatives(inner)
    if len(middles) * len(tails) > MAX_NAMES:
        raise ValueError(f"{text!r} names more than {MAX_NAMES:,} files")
    return [head + middle + tail for middle in middles for tail in tails]


def _closing(text: str, start: int) -> int:
    depth = 0
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return at
    raise ValueError(f"{text!r} has a '{{' without its '}}'")


def _alternatives(inner: str) -> list[str]:
    found = _RANGE.fullmatch(inner)
    if found:
        return _range(found)
    parts, depth, start = [], 0, 0
    for at, character in enumerate(inner):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and not depth:
            parts.append(inner[start:at])
            start = at + 1
    parts.append(inner[start:])
    if len(parts) == 1:  # no list: bash leaves the braces where they are
        return [f"{{{name}}}" for name in _expand(inner)]
    return [name for part in parts for name in _expand(part)]


def _range(found: re.Match[str]) -> list[str]:
    low, high = found[1] or found[3], found[2] or found[4]
    numbers = found[1] is not None
    first, last = (int(low), int(high)) if numbers else (ord(low), ord(high))
    step = abs(int(found[5] or 1)) or 1
    if abs(last - first) // step >= MAX_NAMES:
        raise ValueError(f"{{{found[0]}}} names more than {MAX_NAMES:,} files")
    values = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    if not numbers:
        return [chr(value) for value in values]
    padded = any(end.lstrip("-").startswith("0") and len(end.lstrip("-")) > 1 for end in (low, high))
    width = max(len(low), len(high)) if padded else 0
    return [f"{value:0{width}d}" for value in values]


def fixed_folder(name: str) -> str:
    """The folder of a name, or the one above everything that its pattern may match ("" if there is none)."""
    parts = name.split("/")
    count = next((i for i, part in enumerate(parts) if is_pattern(part)), len(parts) - 1)
    return "/".join(parts[: min(count, len(parts) - 1)])


def common_folder(folders: Sequence[str]) -> str:
    """The deepest folder that all `folders` are, or lie in."""
    split = [folder.split("/") for folder in folders]
    shared = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "/".join(shared)


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern stands for `name`, folder by folder."""
    return _matches(name.split("/"), pattern.split("/"))


def _matches(name: list[str], pattern: list[str]) -> bool:
    if not pattern or not name:
        return not pattern and not name
    if pattern[0] == "**":
        return any(_matches(name[i:], pattern[1:]) for i in range(len(name)))
    return fnmatchcase(name[0], pattern[0]) and _matches(name[1:], pattern[1:])
