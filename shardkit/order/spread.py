"""Spreads the samples of a mixture's streams evenly: which stream each place of a segment draws on.

    place n of a segment: period q, r = divmod(n, W)       W = sum of the weights
    W <= 4,096: every period has one `Pattern`, forwards or backwards by a bit of hash(seed, segment, q).
    Sample k of a stream of weight w is due between places k * W // w and ceil((k + 1) * W / w); each place
    takes, of the samples that are due, the one that must come first. Ties go by hash(seed, segment, stream).
    W > 4,096: the streams are the leaves of a Huffman `Tree`: the two lightest nodes are joined until one is
    left. In a node of weight w whose left child weighs a, (r * a + u) // w of the first r places in a period
    are the left child's, and the others are the right child's. The offset u is drawn anew in every period,
    from hash(seed, segment, q, node).

Guarantees. In each period a stream has exactly as many places as its weight. At any place in between, its
count differs from its exact share, n * w / W, by less than 1 in a pattern: every sample comes while it is due
(earliest deadline first meets all of these deadlines on one machine). In a tree, it differs by less than
b * T: T is the sum of w / weight over the nodes from the stream's leaf up to a child of the root; offsets lie
within the middle 2 * b - 1 of the node's weight, b = 1 / (largest T), but at least 1/2 and at most 1. That is
less than 1 where no T exceeds 2, as with two or three streams and with equal weights; the worst weights for a
Huffman tree, powers of the golden ratio, have T < 3.4, a bound of 1.7 samples. Everything is a function of
the seed and the segment, invertible, and exact in 64 bits (W <= 2**31).

Costs. A pattern takes about a microsecond per place to make, and a lookup per position. A tree takes a
division and a few lookups per position and level; that of S equal weights has log2(S) levels.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardkit.arrays import Ints
from shardkit.order.permutation import GOLDEN, ONE, mix64

_LONGEST = 4096  # places in the period of a pattern: making one takes milliseconds
_HIGHEST = np.uint64(63)
_PARTS = 1 << 16  # b is a multiple of 1 / 65,536

_Words = npt.NDArray[np.uint64]
_Nodes = npt.NDArray[np.int32]


def spread_of(key: np.uint64, weights: list[int]) -> Pattern | Tree:
    """Spread streams with these weights, all positive; `key` is a hash of the seed and the segment."""
    return (Pattern if sum(weights) <= _LONGEST else Tree).of(key, weights)


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """The streams of the places in a period, and the number of each place among its stream's."""

    key: np.uint64
    weights: Ints
    columns: _Nodes
    ranks: Ints

    @classmethod
    def of(cls, key: np.uint64, weights: list[int]) -> Pattern:
        """Make the pattern by earliest deadline first; the arguments are those of `spread_of`."""
        total, streams = sum(weights), range(len(weights))
        ties = mix64(key + GOLDEN * (np.arange(len(weights), dtype=np.uint64) + ONE)).tolist()
        due: list[list[int]] = [list(streams), *([] for _ in range(total))]
        ready: list[tuple[int, int, int]] = []
        columns, ranks, counts = [], [], [0] * len(weights)
        for place in range(total):
            for stream in due[place]:
                deadline = -(-(counts[stream] + 1) * total // weights[stream])
                heapq.heappush(ready, (deadline, ties[stream], stream))
            deadline, _, stream = heapq.heappop(ready)
            assert deadline > place
            columns.append(stream)
            ranks.append(counts[stream])
            counts[stream] += 1
            if counts[stream] < weights[stream]:
                due[max(place + 1, counts[stream] * total // weights[stream])].append(stream)
        return cls(key, np.array(weights), np.array(columns, dtype=np.int32), np.array(ranks))

    def locate(self, places: Ints) -> tuple[_Nodes, Ints]:
        """Return the stream, as an index of the weights, and the number of its sample, at each place."""
        total = len(self.columns)
        periods = places // total
        within = places - periods * total
        backwards = self._is_backwards(periods)
        within = np.where(backwards, total - 1 - within, within)
        columns, ranks = self.columns[within], self.ranks[within]
        weights = self.weights[columns]
        return columns, periods * weights + np.where(backwards, weights - 1 - ranks, ranks)

    def counts(self, places: int) -> list[int]:
        """Return how many of the first `places` places each stream has."""
        period, rest = divmod(places, len(self.columns))
        columns, _ = self.locate(np.arange(places - rest, places))
        found: list[int] = (
            period * self.weights + np.bincount(columns, minlength=len(self.weights))
        ).tolist()
        return found

    def place_of(self, column: int, index: int) -> int:
        """Return the place of sample `index` of a stream: the inverse of `locate`."""
        weight, total = int(self.weights[column]), len(self.columns)
        period, rank = divmod(index, weight)
        backwards = bool(self._is_backwards(np.array([period]))[0])
        within = int(np.flatnonzero(self.columns == column)[weight - 1 - rank if backwards else rank])
        return period * total + (total - 1 - within if backwards else within)

    def _is_backwards(self, periods: Ints) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = _period_keys(self.key, periods) >> _HIGHEST != 0
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """A Huffman tree over the streams of a segment. Nodes are numbered from the root, 0, by levels.

    The arrays have an entry per node. `left` and `right` of a leaf are the leaf itself.
    """

    key: np.uint64
    weights: Ints
    left: _Nodes
    right: _Nodes
    parent: list[int]
    column: _Nodes
    """The index of the stream whose leaf a node is; -1 for inner nodes."""
    leaves: list[int]
    """The leaf of each stream."""
    depth: int
    lows: Ints
    """The smallest offset of each node."""
    spans: _Words
    """The number of offsets of each node; 1 for leaves."""

    @classmethod
    def of(cls, key: np.uint64, weights: list[int]) -> Tree:
        """Make the tree; the arguments are those of `spread_of`."""
        children: list[tuple[int, int] | None] = [None] * len(weights)
        made = list(weights)
        heap = [(weight, number) for number, weight in enumerate(weights)]
        heapq.heapify(heap)
        while len(heap) > 1:
            (one, first), (other, second) = heapq.heappop(heap), heapq.heappop(heap)
            heapq.heappush(heap, (one + other, len(made)))
            made.append(one + other)
            children.append((first, second))
        order, parent, depths, sums = [heap[0][1]], [0], [0], [0]
        left, right = [], []
        # `order` grows while it is walked: the nodes level by level, as numbers of `made`.
        for number, node in enumerate(order):
            pair = children[node]
            left.append(len(order) if pair else number)
            right.append(len(order) + 1 if pair else number)
            for child in pair or ():
                order.append(child)
                parent.append(number)
                depths.append(depths[number] + 1)
        own = [made[node] for node in order]
        for number in range(1, len(order)):
            if left[number] == number:
                sums.append(_path_sum(number, parent, own))
        half = min(_PARTS, max(_PARTS // 2, _PARTS * _PARTS // max(1, *sums)))
        sizes = np.array(own, dtype=np.int64)
        is_leaf = np.arange(len(own)) == left
        highs = np.minimum(sizes - 1, sizes * half // _PARTS)
        lows = np.where(is_leaf, 0, sizes - 1 - highs)
        spans = np.where(is_leaf, 1, highs - lows + 1).astype(np.uint64)
        column = np.where(is_leaf, order, -1).astype(np.int32)
        leaves = np.argsort(np.where(is_leaf, column, len(own)), kind="stable")[: len(weights)].tolist()
        return cls(
            key,
            sizes,
            np.array(left, dtype=np.int32),
            np.array(right, dtype=np.int32),
            parent,
            column,
            leaves,
            max(depths),
            lows,
            spans,
        )

    def locate(self, places: Ints) -> tuple[_Nodes, Ints]:
        """Return the stream, as an index of the weights, and the number of its sample, at each place."""
        total = int(self.weights[0])
        periods = places // total
        within = places - periods * total
        offset_of = self._offsets(periods)
        weights, shares = self.weights.astype(np.uint64), self.weights[self.left].astype(np.uint64)
        place = within.astype(np.uint64)
        node = np.zeros(len(places), dtype=np.int32)
        for _ in range(self.depth):
            weight, share = weights[node], shares[node]
            product = place * share + offset_of(node).astype(np.uint64)
            lefts = product // weight
            is_left = product - lefts * weight >= weight - share
            node = np.where(is_left, self.left[node], self.right[node])
            place = np.where(is_left, lefts, place - lefts)
        return self.column[node], periods * self.weights[node] + place.astype(np.int64)

    def counts(self, places: int) -> list[int]:
        """Return how many of the first `places` places each stream has."""
        period, rest = divmod(places, int(self.weights[0]))
        numbers = np.arange(len(self.weights), dtype=np.int32)
        offsets = self._drawn(_period_keys(self.key, np.full(len(numbers), period)), numbers).tolist()
        weights, found = self.weights.tolist(), [rest] * len(numbers)
        for number, (left, right) in enumerate(zip(self.left.tolist(), self.right.tolist(), strict=True)):
            if left != number:
                found[left] = (found[number] * weights[left] + offsets[number]) // weights[number]
                found[right] = found[number] - found[left]
        return [period * weights[leaf] + found[leaf] for leaf in self.leaves]

    def place_of(self, column: int, index: int) -> int:
        """Return the place of sample `index` of a stream: the inverse of `locate`."""
        node = self.leaves[column]
        period, place = divmod(index, int(self.weights[node]))
        key = _period_keys(self.key, np.array([period]))
        while node:
            above = self.parent[node]
            weight, share = int(self.weights[above]), int(self.weights[node])
            offset = int(self._drawn(key, np.array([above], dtype=np.int32))[0])
            if node != self.left[above]:
                offset = weight - 1 - offset  # the right child's places, seen as a left child's
            place = -((offset - (place + 1) * weight) // share) - 1
            node = above
        return period * int(self.weights[0]) + place

    def _offsets(self, periods: Ints) -> Callable[[_Nodes], Ints]:
        """Return a function from the node of each place to its offset in the place's period."""
        nodes = len(self.weights)
        first, last = (int(periods.min()), int(periods.max())) if len(periods) else (0, 0)
        if (last - first) * nodes > 4 * len(periods):
            keys = _period_keys(self.key, periods)
            return lambda node: self._drawn(keys, node)
        # Consecutive places share a few periods: draw all offsets of these once.
        of_periods = _period_keys(self.key, np.arange(first, last + 1))
        table = self._drawn(of_periods[:, None], np.arange(nodes, dtype=np.int32)).ravel()
        rows = (periods - first) * nodes
        return lambda node: table[rows + node]

    def _drawn(self, keys: _Words, nodes: _Nodes) -> Ints:
        """Return the offset of each node in the period of its key."""
        hashes = mix64(keys + GOLDEN * (nodes.astype(np.uint64) + ONE))
        offsets: Ints = self.lows[nodes] + (hashes % self.spans[nodes]).astype(np.int64)
        return offsets


def _period_keys(key: np.uint64, periods: Ints) -> _Words:
    return mix64(key + GOLDEN * (periods.astype(np.uint64) + ONE))


def _path_sum(node: int, parent: list[int], weights: list[int]) -> int:
    """Return T of a leaf in parts of 1 / 65,536, each term rounded up; see the module docstring."""
    scaled, total = weights[node] * _PARTS, 0
    while node:
        total += -(-scaled // weights[node])
        node = parent[node]
    return total
