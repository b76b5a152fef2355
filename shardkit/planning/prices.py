"""What machines and an object store charge: assumptions, each to be replaced by what you pay.

The defaults are AWS's list prices of us-east-1 for S3 Standard and on-demand general-purpose machines as of
2025, first tier, in US dollars. Traffic from S3 to machines of the same region is free; out to the Internet
it is 0.09 a GB, to another region 0.02. Whoever trains pays less than list, or pays in machines owned.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from fractions import Fraction

__all__ = ["SECONDS_A_MONTH", "Prices"]

SECONDS_A_MONTH = 30 * 86400


@dataclass(frozen=True, slots=True)
class Prices:
    """In dollars."""

    core_hour: Fraction = Fraction("0.05")
    """A core (half of a two-vCPU machine of about $0.10 an hour) for an hour."""
    get_1000: Fraction = Fraction("0.0004")
    """1,000 reads from the store."""
    put_1000: Fraction = Fraction("0.005")
    """1,000 writes, the parts of large objects included."""
    gb_month: Fraction = Fraction("0.023")
    """A GB (10**9 bytes) stored for 30 days."""
    egress_gb: Fraction = Fraction(0)
    """A GB from the store to the machines: nothing inside a region."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 0:
                raise ValueError(f"price {field.name} must not be negative")

    def storing(self, count: Fraction, seconds: Fraction) -> Fraction:
        """Dollars for keeping `count` bytes so long."""
        return count / 10**9 * self.gb_month * seconds / SECONDS_A_MONTH

    def reading(self, requests: int, count: Fraction) -> Fraction:
        """Dollars for so many reads that transfer `count` bytes."""
        return requests * self.get_1000 / 1000 + count / 10**9 * self.egress_gb

    def writing(self, requests: int) -> Fraction:
        """Dollars for so many writes."""
        return requests * self.put_1000 / 1000
