"""The order by docs/spec, in plain Python: permutation, order, mixture, placement; nothing of shardkit."""

from __future__ import annotations

import hashlib
import json
import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from math import gcd
from typing import Any

WORD = (1 << 64) - 1
G = 0x9E3779B97F4A7C15
Json = Any

# Notation (README.md)


def mix64(x: int) -> int:
    x &= WORD
    x = (x ^ x >> 33) * 0xFF51AFD7ED558CCD & WORD
    x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53 & WORD
    return x ^ x >> 33


def blake2b(data: str | bytes, size: int, person: str) -> bytes:
    data = data.encode() if isinstance(data, str) else data
    return hashlib.blake2b(data, digest_size=size, person=person.encode()).digest()


def le64(digest: bytes) -> int:
    return int.from_bytes(digest, "little")


def digest(data: Json) -> str:
    return blake2b(json.dumps(data, sort_keys=True, separators=(",", ":")), 16, "").hex()


# Permutation (permutation.md)


def key_word(key: int | bytes) -> int:
    data = key.to_bytes(8, "little") if isinstance(key, int) else key
    return le64(blake2b(data, 8, "shardkit.perm.1"))


@lru_cache(maxsize=4096)
def ranks(n: int, word: int) -> tuple[int, ...]:
    """The elements of a permutation of 64 or fewer by the hash of each."""
    return tuple(sorted(range(n), key=lambda y: mix64(word + G * (y + 1))))


def permute(x: int, n: int, word: int) -> int:
    if n <= 64:
        return ranks(n, word).index(x)
    h = (n - 1).bit_length() // 2
    rows = (n + (1 << h) - 1) >> h
    while True:
        left, right = x >> h, x & ((1 << h) - 1)
        for i in (1, 3, 5, 7):
            left = (left + ((mix64(right + word + G * i) >> 32) * rows >> 32)) % rows
            right ^= mix64(left + word + G * (i + 1)) >> (64 - h)
        x = left << h | right
        if x < n:
            return x


def unpermute(x: int, n: int, word: int) -> int:
    if n <= 64:
        return ranks(n, word)[x]
    h = (n - 1).bit_length() // 2
    rows = (n + (1 << h) - 1) >> h
    while True:
        left, right = x >> h, x & ((1 << h) - 1)
        for i in (7, 5, 3, 1):
            right ^= mix64(left + word + G * (i + 1)) >> (64 - h)
            left = (left - ((mix64(right + word + G * i) >> 32) * rows >> 32)) % rows
        x = left << h | right
        if x < n:
            return x


# Order (order.md)

Ranges = Sequence[tuple[int, int]]


def merged(ranges: Ranges) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def exclusion_digest(ranges: Ranges) -> str:
    ends = [edge for pair in merged(ranges) for edge in pair]
    return blake2b(struct.pack(f"<{len(ends)}q", *ends), 16, "shardkit.excl.1").hex()


def select(kept_id: int, ranges: Ranges) -> int:
    """The sample id of a kept id."""
    removed = 0
    for begin, end in merged(ranges):
        if begin - removed > kept_id:
            break
        removed += end - begin
    return kept_id + removed


def default_lanes(shards: int, compressed: bool) -> int:
    lanes = shards // 128 if compressed else max(shards // 128, min(shards // 32, 2048))
    return min(1 << max(0, lanes.bit_length() - 1), 1 << 16)


def default_window(samples: int, shards: int, lanes: int, is_shuffled: bool = True) -> int:
    if not is_shuffled:
        spanned = min(max((shards << 18) // max(samples, 1), 768), 1024)
        if 4 * spanned >= 3 * shards:
            return max(1, min(samples, 1 << 44))
        return max(1, min(-(-samples * max(2 * lanes, spanned) // (shards * lanes)), 1 << 44))
    return max(1, min(-(-samples * max(2 * lanes, 64) // (max(1, shards) * lanes)), 1 << 44))


def lane_key(lane: int, lanes: int, version: int) -> int:
    return (lane << 16) // lanes if version == 1 else int(f"{lane:016b}"[::-1], 2)


@dataclass(frozen=True)
class Located:
    epoch: int
    lane: int
    shard: int
    row: int
    sample_id: int


@dataclass
class Order:
    """The order of one dataset. `sizes`: samples of its shards; `excluded`: ranges of its sample ids."""

    sizes: Sequence[int]
    seed: int
    shuffle: str = "window"
    lanes: int = 1
    window: int = 0
    version: int = 3
    excluded: Ranges = ()
    _epochs: dict[int, tuple[list[int], list[int], int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.starts = [0, *accumulate(self.sizes)]
        gone = [
            sum(max(0, min(end, high) - max(begin, low)) for begin, end in merged(self.excluded))
            for low, high in pairwise(self.starts)
        ]
        self.kept_starts = [0, *accumulate(size - less for size, less in zip(self.sizes, gone, strict=True))]
        self.samples = self.kept_starts[-1]

    def key(self, epoch: int, purpose: str) -> bytes:
        return blake2b(f"{self.seed}:{epoch}:{purpose}", 8, "shardkit.order.1")

    def epoch(self, number: int) -> tuple[list[int], list[int], int]:
        """(shards in the epoch's order, where each begins, key of its windows)."""
        if number not in self._epochs:
            shards = list(range(len(self.sizes)))
            if self.shuffle == "window":
                word = key_word(self.key(number, "shards"))
                shards = [permute(j, len(shards), word) for j in shards]
                if self.version >= 3 and self.lanes > 1 and self.samples:
                    lanes = self._lanes_of_strata(le64(self.key(number, "strata")) % self.lanes)
                    shards.sort(key=lambda shard: lanes[self._stratum(shard)])
            kept = [self.kept_starts[shard + 1] - self.kept_starts[shard] for shard in shards]
            self._epochs[number] = shards, [0, *accumulate(kept)], le64(self.key(number, "windows"))
        return self._epochs[number]

    def _stratum(self, shard: int) -> int:
        """The lane that would hold the middle of a shard if the shards were in the order of the index."""
        begin, end = self.kept_starts[shard], self.kept_starts[shard + 1]
        middle = min(begin + (end - begin) // 2, self.samples - 1)
        length, longer = divmod(self.samples, self.lanes)
        edge = longer * (length + 1)
        return middle // (length + 1) if middle < edge else longer + (middle - edge) // length

    def _lanes_of_strata(self, turn: int) -> dict[int, int]:
        step = max(1, self.lanes * 40503 >> 16)
        while gcd(step, self.lanes) > 1:
            step += 1
        return {(lane * step + turn) % self.lanes: lane for lane in range(self.lanes)}

    def locate(self, position: int) -> Located:
        epoch, place = divmod(position, self.samples)
        shards, starts, windows_key = self.epoch(epoch)
        lane = 0
        if self.shuffle != "none":
            row, lane = divmod(place, self.lanes)
            place = self._in_window(lane, row, windows_key)
        slot = bisect_right(starts, place) - 1
        shard = shards[slot]
        sample_id = select(self.kept_starts[shard] + place - starts[slot], self.excluded)
        return Located(epoch, lane, shard, sample_id - self.starts[shard], sample_id)

    def _in_window(self, lane: int, row: int, windows_key: int) -> int:
        length, longer = divmod(self.samples, self.lanes)
        rows = length + (lane < longer)
        begin = lane * length + min(lane, longer)
        window = self.window or max(1, -(-self.samples // self.lanes))
        shift = lane * window // self.lanes
        number = (row + shift) // window
        first, last = max(0, number * window - shift), min((number + 1) * window - shift, rows)
        word = mix64(mix64(windows_key + G * (lane + 1)) + G * (number + 1))
        return begin + first + permute(row - first, last - first, word)

    def key_at(self, index: int) -> int:
        """What a global batch is sorted by."""
        return lane_key(index % self.samples % self.lanes, self.lanes, self.version)


# Mixture (mixture.md)

Schedule = Sequence[tuple[int, Sequence[int]]]


def stream_seed(seed: int, number: int) -> int:
    return le64(blake2b(f"{seed}:stream:{number}", 8, "shardkit.mix.1"))


class Mixture:
    def __init__(self, seed: int, schedule: Schedule, version: int = 3) -> None:
        self.version = version
        self.key = le64(blake2b(f"{seed}:mixture", 8, "shardkit.mix.1"))
        self.segments: list[tuple[int, list[int]]] = []
        for start, weights in schedule:
            reduced = [weight // gcd(*weights) for weight in weights]
            if not self.segments or self.segments[-1][1] != reduced:
                self.segments.append((start, reduced))
        self._blocks: dict[tuple[int, int, int], tuple[int, list[int], list[int]]] = {}
        self._spreads: dict[int, Spread] = {}
        self.before = [[0] * len(schedule[0][1])]  # what each stream has when a segment starts
        for number, (end, _) in enumerate(self.segments[1:]):
            self.before.append(self._counts(number, end))

    def locate(self, position: int) -> tuple[int, int]:
        """(stream, index)."""
        number = bisect_right([start for start, _ in self.segments], position) - 1
        if self.version >= 3:
            stream, index = self._spread(number).locate(position - self.segments[number][0])
            return stream, self.before[number][stream] + index
        begin, slots, counts = self._block(number, position)
        at = position - begin
        return slots[at], counts[slots[at]] + slots[:at].count(slots[at])

    def _counts(self, number: int, end: int) -> list[int]:
        """What each stream has before position `end`, which is in a segment or at its end."""
        if self.version >= 3:
            found = self._spread(number).counts(end - self.segments[number][0])
            return [a + b for a, b in zip(self.before[number], found, strict=True)]
        begin, slots, counts = self._block(number, end)
        return [count + slots[: end - begin].count(stream) for stream, count in enumerate(counts)]

    def _spread(self, number: int) -> Spread:
        if number not in self._spreads:
            start, weights = self.segments[number]
            self._spreads[number] = Spread(mix64(self.key + G * (start + 1)), weights)
        return self._spreads[number]

    def _block(self, number: int, position: int) -> tuple[int, list[int], list[int]]:
        """(where the block of a position begins, its slots' streams, what each stream has before it)."""
        start, weights = self.segments[number]
        whole, blocks = sum(weights), -(-sum(weights) // 1024)

        def edge(block: int) -> int:
            return block // blocks * whole + block % blocks * whole // blocks

        block = (position - start) * blocks // whole
        while edge(block + 1) <= position - start:
            block += 1
        while edge(block) > position - start:
            block -= 1
        place = number, edge(block), edge(block + 1)
        if place not in self._blocks:
            self._blocks[place] = self._dealt(*place)
        return self._blocks[place]

    def _dealt(self, number: int, low: int, high: int) -> tuple[int, list[int], list[int]]:
        start, weights = self.segments[number]
        first, last = shares(weights, low), shares(weights, high)
        key = mix64(self.key + G * (start + low + 1))
        order = sorted(range(high - low), key=lambda i: mix64(key + G * (i + 1)) >> 10 << 10 | i)
        slots = [0] * len(order)
        dealt = (stream for stream in range(len(weights)) for _ in range(last[stream] - first[stream]))
        for slot, stream in zip(order, dealt, strict=True):
            slots[slot] = stream
        counts = [before + share for before, share in zip(self.before[number], first, strict=True)]
        return start + low, slots, counts


class Spread:
    """The places of a segment in version 3; streams of weight 0 have none."""

    def __init__(self, key: int, weights: Sequence[int]) -> None:
        self.key, self.weights, self.period = key, weights, sum(weights)
        self.streams = [stream for stream, weight in enumerate(weights) if weight]
        if self.period <= 4096:
            self.pattern = self._pattern()
        else:
            self._plant()

    def locate(self, place: int) -> tuple[int, int]:
        """(stream, number of the place among the stream's)."""
        number, place = divmod(place, self.period)
        if self.period > 4096:
            stream, index = self._descend(number, place)
            return stream, number * self.weights[stream] + index
        slots = self._slots(number)
        return slots[place], number * self.weights[slots[place]] + slots[:place].count(slots[place])

    def counts(self, places: int) -> list[int]:
        number, rest = divmod(places, self.period)
        found = [number * weight for weight in self.weights]
        if self.period > 4096:
            self._share_out(number, 0, rest, found)
        else:
            for stream in self._slots(number)[:rest]:
                found[stream] += 1
        return found

    def _period_key(self, number: int) -> int:
        return mix64(self.key + G * (number + 1))

    def _slots(self, number: int) -> list[int]:
        return self.pattern[::-1] if self._period_key(number) >> 63 else self.pattern

    def _pattern(self) -> list[int]:
        whole, counts, slots = self.period, [0] * len(self.weights), []
        ties = {stream: mix64(self.key + G * (n + 1)) for n, stream in enumerate(self.streams)}
        for place in range(whole):
            due = [
                (-(-(counts[s] + 1) * whole // self.weights[s]), ties[s], s)
                for s in self.streams
                if counts[s] < self.weights[s] and counts[s] * whole // self.weights[s] <= place
            ]
            slots.append(min(due)[2])
            counts[slots[-1]] += 1
        return slots

    def _plant(self) -> None:
        """Nodes as [weight, children or None, stream], by levels from the root."""
        made: list[tuple[int, tuple[int, int] | None, int]] = [
            (self.weights[s], None, s) for s in self.streams
        ]
        loose = [(weight, node) for node, (weight, _, _) in enumerate(made)]
        while len(loose) > 1:
            (one, first), (other, second) = sorted(loose)[:2]
            loose = [*(pair for pair in loose if pair[1] not in (first, second)), (one + other, len(made))]
            made.append((one + other, (first, second), -1))
        order = [loose[0][1]]
        for node in order:
            order += made[node][1] or ()
        numbers = {node: number for number, node in enumerate(order)}
        self.nodes = [
            (weight, pair and (numbers[pair[0]], numbers[pair[1]]), stream)
            for weight, pair, stream in (made[node] for node in order)
        ]
        sums = []
        above = {child: number for number, (_, pair, _) in enumerate(self.nodes) for child in pair or ()}
        for number, (weight, pair, _) in enumerate(self.nodes):
            node, total = number, 0
            while node:
                total += -(-(weight << 16) // self.nodes[node][0])
                node = above[node]
            sums.append(0 if pair else total)
        self.parts = min(1 << 16, max(1 << 15, (1 << 32) // max(1, *sums)))

    def _lefts(self, number: int, node: int, place: int) -> int:
        """How many of the node's first places in the period are its left child's."""
        weight, pair, _ = self.nodes[node]
        assert pair is not None
        high = min(weight - 1, weight * self.parts >> 16)
        low = weight - 1 - high
        offset = low + mix64(self._period_key(number) + G * (node + 1)) % (high - low + 1)
        return (place * self.nodes[pair[0]][0] + offset) // weight

    def _descend(self, number: int, place: int) -> tuple[int, int]:
        node = 0
        while pair := self.nodes[node][1]:
            lefts = self._lefts(number, node, place)
            is_left = self._lefts(number, node, place + 1) > lefts
            node, place = (pair[0], lefts) if is_left else (pair[1], place - lefts)
        return self.nodes[node][2], place

    def _share_out(self, number: int, node: int, places: int, found: list[int]) -> None:
        _, pair, stream = self.nodes[node]
        if pair is None:
            found[stream] += places
        else:
            lefts = self._lefts(number, node, places)
            self._share_out(number, pair[0], lefts, found)
            self._share_out(number, pair[1], places - lefts, found)


def shares(weights: Sequence[int], n: int) -> list[int]:
    """How many of the first n positions of a segment each stream has; n is at the edge of a block."""
    streams = [stream for stream, weight in enumerate(weights) if weight]
    sums = list(accumulate(weights[stream] for stream in streams))
    found, (periods, upper) = [0] * len(weights), divmod(n, sums[-1])
    for j in range(len(streams) - 1, -1, -1):
        lower = upper * sums[j - 1] // sums[j] if j else 0
        found[streams[j]] = periods * weights[streams[j]] + upper - lower
        upper = lower
    return found


class Combined:
    """The order of one stream, or of several in a mixture, whose shards and samples are numbered through."""

    def __init__(self, orders: Sequence[Order], mixture: Mixture | None) -> None:
        self.orders, self.mixture = orders, mixture
        self.first_shards = [0, *accumulate(len(order.sizes) for order in orders)]
        self.first_samples = [0, *accumulate(order.starts[-1] for order in orders)]

    def stream_at(self, position: int) -> tuple[int, int]:
        """(stream, index)."""
        return self.mixture.locate(position) if self.mixture else (0, position)

    def locate(self, position: int) -> Located:
        stream, index = self.stream_at(position)
        found = self.orders[stream].locate(index)
        shard, sample_id = (
            found.shard + self.first_shards[stream],
            found.sample_id + self.first_samples[stream],
        )
        return Located(found.epoch, found.lane, shard, found.row, sample_id)

    def global_batch(self, first: int, count: int) -> list[int]:
        """The positions from `first` on, sorted."""

        def key(position: int) -> int:
            stream, index = self.stream_at(position)
            return self.orders[stream].key_at(index)

        return sorted(range(first, first + count), key=key)


# Balanced placement (balance.md)


def squares(tokens: Sequence[int], eos: int) -> int:
    """The sum of the squared lengths of a row's documents."""
    lengths = [0]
    for place, token in enumerate(tokens):
        after_eos = place > 0 and tokens[place - 1] == eos
        in_padding = place > 1 and after_eos and tokens[place - 2] == eos
        if after_eos and (token != eos or not in_padding):
            lengths.append(0)
        lengths[-1] += 1
    return sum(length * length for length in lengths)


def level(costs: Sequence[Sequence[int]], before: Sequence[int]) -> list[list[int]]:
    """Numbers of the rows in each rank's places."""
    ranks, n = len(costs), len(costs[0])
    flat = [cost for rank in costs for cost in rank]
    places = [list(range(rank * n, rank * n + n)) for rank in range(ranks)]
    mean = (sum(flat) + sum(before)) // ranks
    dear, half = mean + mean // 32, ranks // 2
    cheaper, stride = ranks - half, half // 32 + 1
    idle, dearest = 0, 1 << 64
    for number in range(32):
        work = [before[rank] + sum(flat[row] for row in places[rank]) for rank in range(ranks)]
        idle = 0 if max(work) < dearest else idle + 1
        dearest = max(work)
        if ranks == 1 or dearest <= dear or idle >= -(-cheaper // stride):
            break
        by_work = sorted(range(ranks), key=work.__getitem__)
        for i in range(half):
            a, b = by_work[ranks - 1 - i], by_work[(i + number * stride) % cheaper]
            if work[a] <= dear:
                continue
            best = (work[a] - work[b], -1, -1)
            for x in _candidates([flat[row] for row in places[a]]):
                for y in _candidates([flat[row] for row in places[b]]):
                    left = abs(work[a] - work[b] - 2 * (flat[places[a][x]] - flat[places[b][y]]))
                    best = (left, x, y) if left < best[0] else best
            if best[1] >= 0:
                places[a][best[1]], places[b][best[2]] = places[b][best[2]], places[a][best[1]]
    return places


def _candidates(costs: Sequence[int]) -> Sequence[int]:
    n = len(costs)
    by_cost = sorted(range(n), key=costs.__getitem__)
    return range(n) if n <= 16 else [by_cost[i * (n - 1) // 15] for i in range(16)]
