"""The order of training samples: which sample is at which position, by arithmetic on a few integers.

    epoch e, g = divmod(position, N)                       N samples in the dataset
    shards of the epoch: Permutation(K, key(seed, e, "shards")), and the prefix sums of their sizes
    row r, lane l = divmod(g, L)                           L lanes
    window of the lane -> Permutation(size, key(seed, e, lane, window)) -> span -> (shard, row)

Lanes. A global batch draws evenly on all lanes; lane l has N // L samples, one more when l < N % L. Lanes lie
one after another in the epoch's span (its shards, in that epoch's order). A lane is cut into windows of W
samples that are shuffled inside: a lane reads only the shards under its current window. The first window of
lane l is shorter, W - W * l // L samples, so that lanes enter their next windows, and new shards, one after
another and not all at once. `shuffle`: "window" as above; "global" is one lane and one window over all shards
in manifest order; "none" is dataset order.

Batches. A global batch is a set of consecutive positions, sorted by `lane_keys`: the lane's 16 bits in
reverse order (positions that tie ascend). Ranks take equal consecutive parts of it, so that its set never
depends on their number. Reversed bits spread every run of consecutive lanes evenly over all keys (van der
Corput), so a rank's part covers the same keys, and with them the same lanes, in every batch: exactly if batch
and ranks are powers of two, and up to a few lanes at its edges for any other batch, of fewer samples than
lanes or of more. Version 1 of the order, which saved states may have, sorts by the lane itself: there, ranks
keep to their lanes only if batches are multiples of the lanes.

Guarantees. Every epoch holds each sample exactly once. The order is a function of the shards' sizes and the
`OrderSpec` alone: not of batch size, world size, tail, machine, library version or what was asked before. It
is invertible (`positions_of`). Everything is exact in 64 bits: N <= 2**60, L <= 2**16, W <= 2**44. Golden
vectors and a plain-Python reference in the tests pin all of it.

Costs. O(K) memory: 8 bytes a shard and 12 for each epoch kept (two at most): 14 MB for 450,000 shards. A new
epoch costs about 70 ns a shard; a position costs 100-150 ns in calls for thousands, at any number of samples
(tests/benchmarks/bench_order.py). Threads and forked processes may share an `Order`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from shardkit.arrays import Ints
from shardkit.errors import StateError
from shardkit.order.permutation import CHUNK, GOLDEN, ONE, Domains, Permutation, mix64, permute, unpermute
from shardkit.units import whole_number

MAX_POSITION = 1 << 62  # a position plus an epoch stays below 2**63
MAX_SAMPLES = 1 << 60  # what is added to a place in an epoch cannot overflow int64
MAX_SHARDS = (1 << 31) - 1  # shard numbers fit int32
MAX_LANES = 1 << 16  # lane numbers fit uint16, which NumPy sorts by radix
MAX_WINDOW = 1 << 44  # window * lane stays below 2**60

VERSION = 2  # of the arithmetic; it is part of the state, so that a run continues in the version it began in
_VERSIONS = (1, VERSION)
_EPOCHS_KEPT = 2  # a batch may cross from one epoch into the next

_MANY_STARTS, _MANY_PLACES = 1 << 15, 1 << 10  # beyond a core's second-level cache; worth sorting
_NODES = 2048  # that are to have lanes of their own as soon as a dataset has shards enough
_SHARDS_OF_LANE = 32  # at least: the two at its ends are fetched by two nodes
_SHARDS_OF_LONG_LANES = 128
_SHARDS_OF_WINDOW = 2
_SHARDS_OF_WINDOWS = 64  # of all lanes: 4 GiB in shards of 64 MiB

Shuffle = Literal["window", "global", "none"]
LaneNumbers = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@dataclass(frozen=True)
class Lanes:
    """The lanes of an epoch of `samples`; `window` 0 means one window over a whole lane."""

    samples: int
    lanes: int
    window: int

    @cached_property
    def lengths(self) -> Ints:
        """int64[L]: samples of each lane."""
        length, longer = divmod(self.samples, self.lanes)
        return length + (np.arange(self.lanes) < longer).astype(np.int64)

    @cached_property
    def starts(self) -> Ints:
        """int64[L]: where each lane's span begins in the epoch's."""
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def shifts(self) -> Ints:
        """int64[L]: by how much each lane's first window is shortened."""
        return np.arange(self.lanes, dtype=np.int64) * self._window // self.lanes

    @cached_property
    def _window(self) -> int:
        return self.window or max(1, self.samples)

    def windows(self, lanes: LaneNumbers, rows: Ints) -> Ints:
        """The number of the window that holds each row of a lane."""
        numbers: Ints = np.floor_divide(rows + self.shifts[lanes], self._window, dtype=np.int64)
        return numbers

    def bounds(self, lanes: LaneNumbers, windows: Ints) -> tuple[Ints, Ints]:
        """(first row, size) of windows of lanes; the size is <= 0 where a lane has no such window."""
        nominal = windows * self._window - self.shifts[lanes]
        first = np.maximum(nominal, 0)
        return first, np.minimum(nominal + self._window, self.lengths[lanes]) - first

    def find(self, places: Ints) -> tuple[npt.NDArray[np.int32], Ints]:
        """(lane, row in lane) of places in the epoch's span: the inverse of starts[lane] + row."""
        length, longer = divmod(self.samples, self.lanes)
        edge = longer * (length + 1)
        # With fewer samples than lanes, length is 0 and no place lies behind the edge.
        lanes = np.where(
            places < edge, places // (length + 1), longer + (places - edge) // max(length, 1)
        ).astype(np.int32)
        return lanes, places - self.starts[lanes]


def rank_slice(size: int, rank: int, world_size: int) -> slice:
    """The part of a global batch of `size` that `rank` takes: the rank-th of `world_size` equal parts."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in range(world_size={world_size})")
    if size % world_size:
        raise ValueError(
            f"a global batch of {size:,} does not divide into {world_size:,} equal parts: "
            f"use a multiple of the world size"
        )
    part = size // world_size
    return slice(rank * part, (rank + 1) * part)


def default_lanes(shards: int, *, compressed: bool = False) -> int:
    """Lanes for a dataset of so many shards that have samples: a power of two that nothing else decides.

    One for 32 shards, up to 2,048 of them (2,048 nodes then read lanes of their own); beyond, one for 128. A
    lane begins and ends inside of shards that its neighbors read too, so an epoch fetches lanes / shards of
    the dataset twice, 3 % at most. What lanes have in use, about three shards each, is 5 to 10 % of a small
    dataset, and 1 to 2 % of the largest. Compressed shards that are read in place are held in memory: one
    lane for 128 of them at any size.
    """
    if shards < 0:
        raise ValueError(f"shards must not be negative: {shards}")
    lanes = shards // _SHARDS_OF_LONG_LANES
    if not compressed:
        lanes = max(lanes, min(shards // _SHARDS_OF_LANE, _NODES))
    return min(1 << max(0, lanes.bit_length() - 1), MAX_LANES)


def default_window(samples: int, shards: int, lanes: int) -> int:
    """Samples per window: what two average shards hold, or as much as lets all windows span 64 shards.

    The first keeps batches diverse of data that was never shuffled: they draw on two or three shards of each
    lane. The second does so for small datasets, which have few lanes. One window holds all of the smallest.
    """
    if lanes < 1 or shards < 0 or samples < 0:
        raise ValueError(f"no dataset has {samples} samples in {shards} shards and {lanes} lanes")
    spanned = max(_SHARDS_OF_WINDOW * lanes, _SHARDS_OF_WINDOWS)
    return max(1, min(-(-samples * spanned // (max(1, shards) * lanes)), MAX_WINDOW))


@lru_cache(maxsize=64)
def lane_keys(lanes: int, version: int = VERSION) -> npt.NDArray[np.uint16]:
    """uint16[lanes]: what a global batch is sorted by; a lane's place in [0, 2**16), whatever the lanes."""
    keys = np.arange(lanes, dtype=np.int64)
    if version == 1:
        keys = (keys << 16) // lanes
    else:
        for shift, mask in ((1, 0x5555), (2, 0x3333), (4, 0x0F0F), (8, 0x00FF)):
            keys = (keys >> shift & mask) | (keys & mask) << shift
    found = keys.astype(np.uint16)
    found.flags.writeable = False
    return found


@dataclass(frozen=True, slots=True)
class OrderSpec:
    """All that an order depends on besides the shards' sizes.

    `lanes` and `window` (in samples) belong to shuffle "window"; for the others they become 1 and 0, so that
    specs which mean the same order are equal.
    """

    seed: int
    lanes: int
    window: int
    shuffle: Shuffle = "window"
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.version not in _VERSIONS:
            raise ValueError(f"version must be one of {_VERSIONS}, not {self.version!r}")
        for name in ("seed", "lanes", "window"):
            try:
                object.__setattr__(self, name, whole_number(getattr(self, name), name))
            except ValueError as error:
                advice = "; ranks and resumed runs need the same one: give a number" if name == "seed" else ""
                raise ValueError(f"{error}{advice}") from None
        if self.shuffle not in get_args(Shuffle):
            meant = {"True": 'give shuffle="window"', "False": 'give shuffle="none"'}.get(f"{self.shuffle}")
            problem = f"shuffle must be one of {', '.join(get_args(Shuffle))}, not {self.shuffle!r}"
            raise ValueError(problem if meant is None else f"{problem}: {meant}")
        if self.shuffle != "window":
            object.__setattr__(self, "lanes", 1)
            object.__setattr__(self, "window", 0)
            limits = {"seed": (0, (1 << 64) - 1)}
        else:
            limits = {"seed": (0, (1 << 64) - 1), "lanes": (1, MAX_LANES), "window": (1, MAX_WINDOW)}
        for name, (low, high) in limits.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} must be between {low} and {high:,}, not {getattr(self, name):,}")

    def to_dict(self) -> dict[str, int | str]:
        """Plain data for a state; `from_dict` reads it back."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, data: object) -> OrderSpec:
        """StateError when `data` is not what `to_dict` gives."""
        names = {field.name for field in fields(cls)}
        if not isinstance(data, dict) or data.keys() != names:
            raise StateError(f"an order has the keys {', '.join(sorted(names))}; this one: {data!r:.200}")
        if isinstance(data["version"], bool) or data["version"] not in _VERSIONS:
            raise StateError(
                f"this order is of version {data['version']!r}, this shardkit knows versions up to "
                f"{VERSION}: continue with the shardkit that began the run"
            )
        try:
            return cls(**data)
        except ValueError as error:
            raise StateError(f"not an order: {error}") from error


@dataclass(frozen=True, slots=True)
class Located:
    """Where samples are: arrays of one shape. `sample_id` is the row number in dataset order."""

    position: Ints
    epoch: Ints
    shard: npt.NDArray[np.int32]
    row: Ints
    lane: npt.NDArray[np.int32]
    sample_id: Ints

    def reshape(self, *shape: int) -> Located:
        """The same entries in another shape."""
        return Located(*(getattr(self, field.name).reshape(shape) for field in fields(self)))

    def take(self, which: slice | npt.NDArray[np.intp]) -> Located:
        """Some of the entries, along the first axis; for a slice they are views."""
        return Located(*(getattr(self, field.name)[which] for field in fields(self)))


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """The shard order of one epoch, and the key of its windows."""

    permutation: Permutation | None
    shards: npt.NDArray[np.int32] | None
    """int32[shards]: shard numbers in the epoch's order; None: manifest order."""
    starts: Ints
    """int64[shards + 1]: where each of them begins in the epoch's span."""
    window_key: np.uint64


def _find(starts: Ints, places: Ints, lanes: LaneNumbers | int) -> Ints:
    """In which of the shards that begin at `starts` each place is."""
    if isinstance(lanes, int) or len(starts) < _MANY_STARTS or len(places) < _MANY_PLACES:
        return np.searchsorted(starts, places, side="right") - 1
    # Lane after lane: batches are sorted by other keys, and a search that jumps about waits for memory.
    by_lane = np.argsort(lanes.astype(np.uint16), kind="stable")
    slots = np.empty_like(places)
    slots[by_lane] = np.searchsorted(starts, places[by_lane], side="right") - 1
    return slots


@dataclass(frozen=True, slots=True)
class _Windows:
    """First rows and permutations of all lanes' windows from `low` to `high`, window after window."""

    epoch: EpochOrder
    low: int
    high: int
    firsts: Ints
    domains: Domains


class Order:
    """The order of all samples of shards with `shard_samples` samples each; see the module's docstring."""

    def __init__(self, shard_samples: npt.ArrayLike, spec: OrderSpec) -> None:
        sizes = np.asarray(shard_samples)
        if sizes.ndim != 1 or (sizes.size and sizes.dtype.kind not in "iu"):
            raise ValueError(
                f"shard_samples must be a list of integers, not {sizes.dtype}{list(sizes.shape)}"
            )
        if len(sizes) > MAX_SHARDS:
            raise ValueError(f"{len(sizes):,} shards are too many: at most {MAX_SHARDS:,}; use larger shards")
        if sizes.size and int(sizes.min()) < 0:
            raise ValueError(
                f"shard {int(sizes.argmin())} has {int(sizes.min())} samples: the index is damaged"
            )
        if float(sizes.sum(dtype=np.float64)) > MAX_SAMPLES:
            raise ValueError(f"more than {MAX_SAMPLES:,} samples: the index is damaged")
        self.spec = spec
        self.shard_starts: Ints = np.zeros(len(sizes) + 1, dtype=np.int64)
        """int64[shards + 1]: the sample id at which each shard begins, in dataset order."""
        np.cumsum(sizes, out=self.shard_starts[1:])
        self._samples = int(self.shard_starts[-1])
        self.geometry = Lanes(self._samples, spec.lanes, spec.window)
        """How an epoch is cut into lanes and windows."""
        self._epochs: dict[int, EpochOrder] = {}
        self._known: _Windows | None = None  # replaced, never changed: threads may share an order

    @property
    def samples(self) -> int:
        """Samples in an epoch."""
        return self._samples

    @property
    def shards(self) -> int:
        """Number of shards, empty ones included."""
        return len(self.shard_starts) - 1

    def locate(self, positions: Ints | tuple[int, int]) -> Located:
        """Locate the samples at `positions`. (start, count) stands for `count` positions from `start`.

        Positions may be in any order, repeat, and lie in any epochs; the result has their shape.
        """
        if isinstance(positions, tuple):
            start, count = positions
            self._check_range(start, count)
            array = np.arange(start, start + count, dtype=np.int64)
        else:
            array = as_int64(positions, "positions")
            if array.size:
                self._check_range(int(array.min()), int(array.max()) - int(array.min()) + 1)
        flat = array.flatten()  # a copy: the result must not change with the caller's array
        located = _empty_located(flat)
        for begin in range(0, len(flat), CHUNK):
            piece = located.take(slice(begin, begin + CHUNK))
            for number, which in groups(piece.position // self._samples):
                self._locate_within(number, piece, which)
        return located.reshape(*array.shape)

    def positions_of(self, sample_ids: npt.ArrayLike, epoch: int) -> Ints:
        """The positions at which `epoch` delivers these samples, in their shape: the inverse of `locate`."""
        self._check_range(epoch * max(self._samples, 1), self._samples)
        array = as_int64(sample_ids, "sample ids")
        if array.size and not 0 <= int(array.min()) <= int(array.max()) < self._samples:
            raise IndexError(
                f"sample ids go from 0 to {self._samples - 1:,}, not {array.min()} to {array.max()}"
            )
        flat = array.ravel()
        positions = np.empty_like(flat)
        for begin in range(0, len(flat), CHUNK):
            piece = slice(begin, begin + CHUNK)
            positions[piece] = self._find_within(self.epoch(epoch), flat[piece]) + epoch * self._samples
        return positions.reshape(array.shape)

    def global_batch(self, position: int, size: int) -> Ints:
        """int64[size]: the positions from `position` on, sorted by `lane_keys`; those that tie ascend."""
        batch: Ints = self._batches(position, size, 1)[0]
        return batch

    def global_batches(
        self, position: int, size: int, count: int, *, part: slice = slice(None), every: int = 1
    ) -> Located:
        """`count` global batches of `size`, located: arrays of shape (count, size).

        Row i is `global_batch(position + i * every * size, size)`. `part`, as `rank_slice` gives it, cuts
        each row before the samples are located, so that a rank pays for its own samples only.
        """
        return self.locate(self._batches(position, size, count, every, part))

    def _batches(
        self, position: int, size: int, count: int, every: int = 1, part: slice = slice(None)
    ) -> Ints:
        starts, span = batch_starts(position, size, count, every)
        self._check_range(position, span)
        within = np.arange(size, dtype=np.int64)
        if self.spec.lanes == 1 or not span:
            return starts[:, None] + within[part]
        keys = lane_keys(self.spec.lanes, self.spec.version)
        begins = starts % self._samples
        if bool((begins + size <= self._samples).all()):
            # Inside an epoch, batches that begin in the same lane are sorted alike.
            lanes, alike = np.unique(begins % self.spec.lanes, return_inverse=True)
            batch_keys = keys[(lanes[:, None] + within) % self.spec.lanes]
        else:
            alike = np.arange(count)
            batch_keys = keys[(starts[:, None] + within) % self._samples % self.spec.lanes]
        # uint16 is what NumPy sorts stably by radix, in linear time.
        by_lane = np.argsort(batch_keys, axis=1, kind="stable")[:, part]
        batches: Ints = starts[:, None] + by_lane[alike]
        return batches

    def _locate_within(self, number: int, piece: Located, which: slice | npt.NDArray[np.intp]) -> None:
        # Fills the entries `which` of `piece`, all of epoch `number`.
        epoch = self.epoch(number)
        places = piece.position[which] - number * self._samples
        lanes: LaneNumbers | int = 0
        if self.spec.shuffle != "none":
            rows, lanes = np.divmod(places, self.spec.lanes)
            firsts, domains = self._windows(epoch, lanes, self.geometry.windows(lanes, rows))
            rows -= firsts
            moved = permute(rows.view(np.uint64), domains).view(np.int64)
            places = self.geometry.starts[lanes] + firsts + moved
        slots = _find(epoch.starts, places, lanes)
        shards = slots if epoch.shards is None else epoch.shards[slots]
        rows = places - epoch.starts[slots]
        piece.epoch[which], piece.lane[which], piece.shard[which], piece.row[which] = (
            number,
            lanes,
            shards,
            rows,
        )
        piece.sample_id[which] = self.shard_starts[shards] + rows

    def _find_within(self, epoch: EpochOrder, sample_ids: Ints) -> Ints:
        if epoch.permutation is None:
            places = sample_ids
        else:
            shards = np.searchsorted(self.shard_starts, sample_ids, side="right") - 1
            places = epoch.starts[epoch.permutation.inverse(shards)] + sample_ids - self.shard_starts[shards]
        if self.spec.shuffle == "none":
            return places
        lanes, rows = self.geometry.find(places)
        firsts, domains = self._windows(epoch, lanes, self.geometry.windows(lanes, rows))
        rows -= firsts
        back = unpermute(rows.view(np.uint64), domains).view(np.int64)
        return (firsts + back) * self.spec.lanes + lanes

    def _windows(self, epoch: EpochOrder, lanes: LaneNumbers, windows: Ints) -> tuple[Ints, Domains]:
        """(first row, permutation) of the window of each entry."""
        low, high = int(windows.min()), int(windows.max())
        known = self._known
        if known is None or known.epoch is not epoch or not known.low <= low <= high <= known.high:
            count = self.spec.lanes * (high - low + 1)
            if count > len(lanes):
                return self._window_domains(epoch, lanes, windows)
            # Consecutive positions lie in few windows, those of later calls too: work these out once.
            all_lanes = np.tile(np.arange(self.spec.lanes), high - low + 1)
            all_windows = np.repeat(np.arange(low, high + 1), self.spec.lanes)
            known = _Windows(epoch, low, high, *self._window_domains(epoch, all_lanes, all_windows))
            self._known = known
        slots = (windows - known.low) * self.spec.lanes + lanes
        return known.firsts[slots], known.domains.take(slots)

    def _window_domains(self, epoch: EpochOrder, lanes: LaneNumbers, windows: Ints) -> tuple[Ints, Domains]:
        firsts, sizes = self.geometry.bounds(lanes, windows)
        lane_keys = mix64(epoch.window_key + GOLDEN * (lanes.astype(np.uint64) + ONE))
        keys = mix64(lane_keys + GOLDEN * (windows.view(np.uint64) + ONE))
        # A window that a lane does not have is never looked up; it only must not break the arithmetic.
        return firsts, Domains.of(np.maximum(sizes, 1).view(np.uint64), keys)

    def epoch(self, number: int) -> EpochOrder:
        """Return the shard order of epoch `number`, kept until two other epochs have been asked for."""
        # No lock, so that an order may be forked and pickled: the dict is replaced, never changed, and two
        # threads that miss at once make equal epochs.
        epochs = self._epochs
        if number not in epochs:
            kept = list(epochs.items())[1 - _EPOCHS_KEPT :]
            self._epochs = epochs = dict(kept) | {number: self._new_epoch(number)}
        return epochs[number]

    def _new_epoch(self, number: int) -> EpochOrder:
        window_key = np.uint64(int.from_bytes(self._key(number, "windows"), "little"))
        if self.spec.shuffle != "window":
            return EpochOrder(None, None, self.shard_starts, window_key)
        permutation = Permutation(self.shards, self._key(number, "shards"))
        shards = permutation(np.arange(self.shards)).astype(np.int32)
        starts = np.zeros(self.shards + 1, dtype=np.int64)
        np.cumsum(np.diff(self.shard_starts)[shards], out=starts[1:])
        return EpochOrder(permutation, shards, starts, window_key)

    def _key(self, epoch: int, purpose: str) -> bytes:
        text = f"{self.spec.seed}:{epoch}:{purpose}"
        return hashlib.blake2b(text.encode(), digest_size=8, person=b"shardkit.order.1").digest()

    def _check_range(self, start: int, count: int) -> None:
        check_positions(start, count)
        if count and not self._samples:
            raise ValueError("the dataset has no samples: there are no positions in it")


def as_int64(values: npt.ArrayLike, what: str) -> Ints:
    """The values as they are; TypeError unless they are integers."""
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{what} must be integers, not {array.dtype}")
    return array.astype(np.int64, copy=False)


def _empty_located(positions: Ints) -> Located:
    n = len(positions)
    return Located(
        position=positions,
        epoch=np.empty(n, dtype=np.int64),
        shard=np.empty(n, dtype=np.int32),
        row=np.empty(n, dtype=np.int64),
        lane=np.empty(n, dtype=np.int32),
        sample_id=np.empty(n, dtype=np.int64),
    )


def groups(values: npt.NDArray[np.signedinteger[Any]]) -> Iterator[tuple[int, slice | npt.NDArray[np.intp]]]:
    """(value, which entries have it), ascending."""
    if not values.size:
        return
    if int(values.min()) == int(values.max()):
        yield int(values[0]), slice(None)
        return
    by_value = np.argsort(values, kind="stable")
    edges = np.flatnonzero(np.diff(values[by_value])) + 1
    for which in np.split(by_value, edges):
        yield int(values[which[0]]), which


def batch_starts(position: int, size: int, count: int, every: int) -> tuple[Ints, int]:
    """(where each of `count` global batches begins, how many positions they span); ValueError."""
    if size < 0 or count < 0 or every < 1:
        raise ValueError(f"size and count must not be negative, nor every below 1: {size}, {count}, {every}")
    span = size * ((count - 1) * every + 1) if count else 0
    check_positions(position, span)
    return position + np.arange(count, dtype=np.int64) * (size * every), span


def check_positions(start: int, count: int) -> None:
    """ValueError unless all of these are positions."""
    if count < 0 or start < 0 or start + count > MAX_POSITION:
        raise ValueError(f"{count:,} positions from {start:,}: positions go from 0 to 2**62")
