"""Repeated lines and paragraphs in plain Python: what the kernels of line dedup are tested against."""

from __future__ import annotations

from collections.abc import Collection

from shardkit.writers.dedup.config import LinesDedupConfig
from shardkit.writers.filters.repeated_lines import RepeatedLinesEditor

_MASK = (1 << 64) - 1
_FACTORS = (0x87C37B91114253D5, 0x4CF5AD432745937F)
_MIX = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)


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


def reference_hash(data: bytes) -> int:
    """MurmurHash3 x64 128, seed 0: the two halves as the kernel has them, high << 64 | low."""

    def rotate(value: int, by: int) -> int:
        return (value << by | value >> 64 - by) & _MASK

    def finish(value: int) -> int:
        for factor in _MIX:
            value = (value ^ value >> 33) * factor & _MASK
        return value ^ value >> 33

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
    one, two = finish(one), finish(two)
    one = (one + two) & _MASK
    return one << 64 | (two + one) & _MASK


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
