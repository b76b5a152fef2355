"""A node's network as a fluid: all transfers flow at one rate, what is there divided by their number.

Since the rate is the same for all, one running total (bytes that a flow present since the beginning would
have had) says when each ends: a flow that joins at total V with b bytes ends at V + b. Each event costs
O(log flows).
"""

from __future__ import annotations

import heapq

__all__ = ["Link"]


class Link:
    """Time goes forward only, by `advance`."""

    def __init__(self, total_bytes_per_second: float, flow_bytes_per_second: float) -> None:
        self._total, self._each = total_bytes_per_second, flow_bytes_per_second
        self._now = 0.0
        self._flowed = 0.0
        self.moved = 0.0
        """Bytes of all flows so far."""
        self._flows: list[tuple[float, int]] = []  # a heap of (total at its end, its number)

    def __len__(self) -> int:
        return len(self._flows)

    @property
    def rate(self) -> float:
        """Bytes a second of each flow."""
        return min(self._each, self._total / max(1, len(self._flows)))

    def advance(self, now: float) -> None:
        assert now >= self._now - 1e-9
        if self._flows:
            each = self.rate * max(0.0, now - self._now)
            self._flowed += each
            self.moved += each * len(self._flows)
        self._now = max(now, self._now)

    def add(self, number: int, count: float) -> None:
        """A transfer of `count` bytes begins now."""
        heapq.heappush(self._flows, (self._flowed + count, number))

    def next_end(self) -> float:
        """When the next one ends if none joins; infinity if there is none."""
        if not self._flows:
            return float("inf")
        return self._now + max(0.0, self._flows[0][0] - self._flowed) / self.rate

    def pop(self) -> int:
        """Take out the one that ends next, which must be now."""
        end, number = heapq.heappop(self._flows)
        self._flowed = max(self._flowed, end)
        return number
