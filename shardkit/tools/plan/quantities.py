"""Parses and formats the quantities of a plan ("14.8T", "25Gbit/s", "50ms", "40 %"), and defines prices.

Prices are assumptions: replace each with what you pay. The defaults are AWS's list prices in us-east-1 for S3
Standard and on-demand general-purpose machines as of 2025, first tier, in US dollars. Traffic from S3 to
machines in the same region is free; to the Internet it costs 0.09 per GB, to another region 0.02.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from decimal import Decimal
from fractions import Fraction

from shardkit.units import parse_bytes

_NUMBER = r"((?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?)"

_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12, "p": 10**15}

_SECONDS = {
    "": Fraction(1), "s": Fraction(1), "ms": Fraction(1, 1000), "us": Fraction(1, 10**6),
    "m": Fraction(60), "min": Fraction(60), "h": Fraction(3600), "d": Fraction(86400),
}  # fmt: skip

_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}


def parse_number(text: str) -> Fraction:
    """Parse an exact number of at least 0 from "4", "4.2", "1e-3" or "14.8T" (also K, M, B or G, P)."""
    match = re.fullmatch(rf"{_NUMBER}\s*([A-Za-z]?)", text.strip().replace(",", "").replace("_", ""))
    if match is None or match[2].lower() not in _COUNTS:
        raise ValueError(f"{text!r} is not a number such as 2048, 14.8e12 or 14.8T")
    return Fraction(Decimal(match[1])) * _COUNTS[match[2].lower()]


def parse_count(text: str) -> int:
    """Parse a whole number of at least 1, in the notation of `parse_number`."""
    number = parse_number(text)
    if number.denominator != 1 or number < 1:
        raise ValueError(f"{text!r} is not a whole number of at least 1")
    return int(number)


def parse_share(text: str) -> Fraction:
    """Parse a share of a whole, above 0 and at most 1, from "0.4" or "40%"."""
    stripped = text.strip()
    percent = stripped.endswith("%")
    share = parse_number(stripped.removesuffix("%")) / (100 if percent else 1)
    if not 0 < share <= 1:
        raise ValueError(f"a share must be above 0 and at most 1 (or 100%), not {text!r}")
    return share


def parse_rate(text: str) -> Fraction:
    """Parse a rate in bytes per second, above 0, from "10MB/s", "10MB/s/core" or "25Gbit/s"."""
    amount = re.sub(r"\s*(/\s*core)?$", "", text.strip())
    amount = re.sub(r"\s*(/\s*core)?(/\s*s|ps)$", "", amount)
    match = re.fullmatch(rf"{_NUMBER}\s*([A-Za-z]*)", amount)
    try:
        if match is None:
            raise ValueError
        if match[2].lower() in _BITS:
            rate = Fraction(Decimal(match[1])) * _BITS[match[2].lower()] / 8
        else:
            rate = Fraction(Decimal(match[1])) * parse_bytes(f"1{match[2]}")
    except ValueError:
        raise ValueError(f"{text!r} is not a rate such as 10MB/s, 80MiB/s or 25Gbit/s") from None
    if not rate:
        raise ValueError(f"a rate must be above 0, not {text!r}")
    return rate


def parse_seconds(text: str) -> Fraction:
    """Parse a duration of at least 0 in seconds, from "0.05", "50ms" or "2h"."""
    match = re.fullmatch(rf"{_NUMBER}\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].lower() not in _SECONDS:
        raise ValueError(f"{text!r} is not a time such as 0.05, 50ms, 30s, 2h or 14d")
    return Fraction(Decimal(match[1])) * _SECONDS[match[2].lower()]


def format_count(count: float | Fraction) -> str:
    """Format a count with three digits and a unit ("14.8 T", "3.17 M"), or as a whole number below 1000."""
    value = float(count)
    for unit in ("", "K", "M", "B", "T"):
        if abs(value) < 999.5 or unit == "T":
            break
        value /= 1000
    if not unit:
        return f"{value:.0f}" if value == int(value) or value >= 100 else f"{value:.3g}"
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"


def format_seconds(seconds: float | Fraction) -> str:
    """Format a duration with three digits and a unit: "850 ms", "3.2 s", "4.1 min" or "14 days"."""
    value = float(seconds)
    if value < 1:
        return f"{1000 * value:.3g} ms"
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (2 * 86400, "h", 3600)):
        if value < limit:
            return f"{value / size:.3g} {unit}"
    return f"{value / 86400:.3g} days"


SECONDS_A_MONTH = 30 * 86400


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices in dollars."""

    core_hour: Fraction = Fraction("0.05")
    """Price of one core for an hour: half the price of a two-vCPU machine; AWS list, on demand."""
    get_1000: Fraction = Fraction("0.0004")
    """Price of 1,000 reads; AWS list, S3 Standard."""
    put_1000: Fraction = Fraction("0.005")
    """Price of 1,000 writes, including the parts of large objects; AWS list, S3 Standard."""
    gb_month: Fraction = Fraction("0.023")
    """Price of storing a GB (10**9 bytes) for 30 days; AWS list, S3 Standard."""
    egress_gb: Fraction = Fraction(0)
    """Price of reading a GB: free inside a region, 0.02 to another AWS region, 0.09 to the Internet."""
    gpu_hour: Fraction = Fraction(0)
    """Price of one GPU for an hour; 0: GPUs are not counted."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 0:
                raise ValueError(f"price {field.name} must not be negative")

    def storing(self, count: Fraction, seconds: Fraction) -> Fraction:
        """Return the price of storing `count` bytes for `seconds`, in dollars."""
        return count / 10**9 * self.gb_month * seconds / SECONDS_A_MONTH

    def reading(self, requests: int, count: Fraction) -> Fraction:
        """Return the price of `requests` reads that transfer `count` bytes in total, in dollars."""
        return requests * self.get_1000 / 1000 + count / 10**9 * self.egress_gb

    def computing(self, gpus: int, seconds: Fraction) -> Fraction:
        """Return the price of `gpus` GPUs for `seconds`, in dollars."""
        return gpus * seconds / 3600 * self.gpu_hour

    def writing(self, requests: int) -> Fraction:
        """Return the price of `requests` writes, in dollars."""
        return requests * self.put_1000 / 1000
