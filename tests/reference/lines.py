"""Repeated lines, paragraphs and spans in plain Python: what the kernels of line dedup are tested against."""

from __future__ import annotations

import re
from collections.abc import Collection

from shardkit.writers.dedup.config import LinesDedupConfig
from shardkit.writers.filters.repeated_lines import RepeatedLinesEditor
from shardkit.writers.kernels.line_units import span_windows
from shardkit.writers.kernels.words import UNSPACED_CLASS

_MASK = (1 << 64) - 1
_FACTORS = (0x87C37B91114253D5, 0x4CF5AD432745937F)
_MIX = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
_ROLL = 0x9E3779B97F4A7C15
_WORD = re.compile(rf"(?!\s)[{UNSPACED_CLASS}]|[^\s{UNSPACED_CLASS}]+")


def reference_units(text: str, config: LinesDedupConfig) -> list[tuple[int, str]]:
    """(number of the unit, its text without white space at both ends) of all that are long enough."""
    units = enumerate(_reference_split(text, config)[1:])
    stripped = [(number, "\n".join(unit).strip()) for number, unit in units]
    return [(number, unit) for number, unit in stripped if len(unit) >= config.min_characters]


def reference_cut(text: str, units: Collection[int], config: LinesDedupConfig) -> str:
    """The text without these units."""
    head, *rest = _reference_split(text, config)
    kept = [unit for number, unit in enumerate(rest) if number not in units]
    return "\n".join(line for unit in [head, *kept] for line in unit)


def _reference_split(text: str, config: LinesDedupConfig) -> list[list[str]]:
    """Lists of lines: those before the first unit, then each unit with the blank lines after it."""
    lines = text.split("\n")
    if config.unit == "line":
        return [[], *([line] for line in lines)]
    units: list[list[str]] = [[]]
    before = True  # whether the line before was blank
    for line in lines:
        blank = not line.strip()
        if before and not blank:
            units.append([])
        units[-1].append(line)
        before = blank
    return units


def reference_words(text: str) -> list[str]:
    """Of which spans are made."""
    return _WORD.findall(text)


def reference_spans(text: str, words: int) -> list[tuple[int, int]]:
    """(its first word, its hash) of each window that is sampled."""
    size, spacing = span_windows(words)
    hashes = [reference_hash(word.encode()) for word in reference_words(text)]
    windows = [hashes[first : first + size] for first in range(len(hashes) - size + 1)]
    values = []
    for window in windows:
        rolling = 0
        for value in window:
            rolling = (rolling * _ROLL + (value >> 64)) & _MASK
        values.append(_finish(rolling))
    sampled: list[int] = []
    for last in range(spacing - 1, len(values)):
        seen = range(last - spacing + 1, last + 1)
        lowest = [at for at in seen if values[at] == min(values[at] for at in seen)]
        if not (sampled and sampled[-1] in lowest):
            sampled.append(lowest[-1])
    halves = (b"".join(half.to_bytes(8, "little") for value in windows[at] for half in divmod(value, 1 << 64))
              for at in sampled)  # fmt: skip
    return [(at, reference_hash(data)) for at, data in zip(sampled, halves, strict=True)]


def reference_cut_spans(text: str, first_words: Collection[int], words: int) -> str:
    """The text without the words of these windows."""
    size, _ = span_windows(words)
    gaps, found = _WORD.split(text), reference_words(text)
    cut = {word for first in first_words for word in range(first, first + size)}
    out, at = [], 0
    while at < len(found):
        last = at
        while last in cut:
            last += 1
        around = gaps[at : last + 1]  # one gap if this word stays
        at_edge = [gap for edge, gap in ((last == len(found), gaps[-1]), (at == 0, gaps[0])) if edge]
        out.append((at_edge or [max(around, key=lambda gap: gap.count("\n"))])[0])
        if last == len(found):
            return "".join(out)
        out.append(found[last])
        at = last + 1
    return "".join([*out, gaps[-1]])


def reference_hash(data: bytes) -> int:
    """MurmurHash3 x64 128, seed 0: the two halves as the kernel has them, high << 64 | low."""

    def rotate(value: int, by: int) -> int:
        return (value << by | value >> 64 - by) & _MASK

    one = two = 0
    first, second = _FACTORS
    padded = data + bytes(-len(data) % 16)
    for at in range(0, len(padded), 16):
        a, b = (int.from_bytes(padded[place : place + 8], "little") for place in (at, at + 8))
        one ^= rotate(a * first & _MASK, 31) * second & _MASK
        if at + 16 <= len(data):
            one = ((rotate(one, 27) + two) * 5 + 0x52DCE729) & _MASK
        two ^= rotate(b * second & _MASK, 33) * first & _MASK
        if at + 16 <= len(data):
            two = ((rotate(two, 31) + one) * 5 + 0x38495AB5) & _MASK
    one, two = one ^ len(data), two ^ len(data)
    one = (one + two) & _MASK
    two = (two + one) & _MASK
    one, two = _finish(one), _finish(two)
    one = (one + two) & _MASK
    return one << 64 | (two + one) & _MASK


def _finish(value: int) -> int:
    for factor in _MIX:
        value = (value ^ value >> 33) * factor & _MASK
    return value ^ value >> 33


def reference_repeated_lines(text: str, config: RepeatedLinesEditor) -> str:
    """The text without repeated units, in plain Python."""
    units = LinesDedupConfig(unit=config.unit, min_characters=config.min_characters)
    seen: set[str] = set()
    again = []
    for number, unit in reference_units(text, units):
        if unit in seen:
            again.append(number)
        seen.add(unit)
    return reference_cut(text, again, units)
