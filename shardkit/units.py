"""Conversion of numbers that users write: sizes such as "64MiB", counts such as "10B", checks of integers."""

from __future__ import annotations

import operator
import re
from decimal import Decimal
from typing import SupportsIndex

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}B": 1000**i for i, p in enumerate("KMGTP", 1)}
_UNITS |= {f"{p}iB": 1024**i for i, p in enumerate("KMGTP", 1)}
_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_SIZE = re.compile(r"\s*([0-9]{1,25}(?:\.[0-9]{1,25})?)\s*([A-Za-z]*)\s*")
_MAX_SIZE = 1 << 63  # sizes must be below this, the limit of files and memory on 64-bit systems


def parse_bytes(size: int | str) -> int:
    """Return bytes from an int or from text such as "64MiB" (MiB: 2**20) or "2GB" (GB: 10**9), in any case.

    Raises ValueError on anything else and on negative sizes.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise ValueError("a size cannot be negative")
        return _checked(size)
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    units = {name.lower(): factor for name, factor in _UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise ValueError(f"not a size: {size!r:.80} (bytes, or a number with KB, MB, GB, TB, KiB, …)")
    factor = units[match[2].lower()]
    return _checked(int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor)


def _checked(size: int) -> int:
    if size >= _MAX_SIZE:
        raise ValueError("a size must be less than 2**63 bytes")
    return size


def parse_count(value: object) -> int:
    """Return a count from an int or from text such as "10B" or "1.5M" (K, M, B and T: 10**3 to 10**12).

    Raises ValueError on anything else, and on counts below 1 or above 2**62.
    """
    if isinstance(value, str) and (match := _SIZE.fullmatch(value.replace(",", "").replace("_", ""))):
        factor = _COUNTS.get(match[2].upper())
        value = value if factor is None else round(Decimal(match[1]) * factor)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 62:
        raise ValueError(
            f"write a number of at least 1, or text such as 10B, 1.5M or 200K, not {value!r:.80}"
        )
    return value


def whole_number(value: SupportsIndex, name: str) -> int:
    """Return `value`, which may have a NumPy type, as an int. Raises ValueError unless it is an integer."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise ValueError(f"{name} must be a whole number, not {value!r}")
    return operator.index(value)


def format_bytes(count: float) -> str:
    """Format a number of bytes in decimal units with three digits: "1.23 GB"."""
    value, unit = float(count), "B"
    for unit in ("B", "KB", "MB", "GB", "TB", "PB"):
        if abs(value) < 999.5 or unit == "PB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
