"""The order of training samples: which sample is at which position, by arithmetic on a few integers.

    epoch e, g = divmod(position, N)                       N samples in the dataset
    shards of the epoch: Permutation(K, key(seed, e, "shards")), sorted by lane; prefix sums of their sizes
    row r, lane l = divmod(g, L)                           L lanes
    window of the lane -> Permutation(size, key(seed, e, lane, window)) -> span -> (shard, row)

Lanes. The span of an epoch is its shards in that epoch's order; lanes are consecutive parts of it. A lane has
the shards of one stratum, a part of the dataset, so that data sorted by source has all of its parts in every
batch; which stratum changes from epoch to epoch. Versions 1 and 2 do not sort shards by lane. Lane l has
N // L samples, one more when l < N % L, and a global batch takes samples evenly from all lanes. A lane is cut
into windows of W samples, each shuffled inside: a lane reads only the shards under its current window. The
first window of lane l is shorter, W - W * l // L samples, so that lanes enter their next windows, and new
shards, one after another and not all at once. `shuffle`: "window" as above; "global" is one lane and one
window over all shards in manifest order; "none" is dataset order.

Batches. A global batch is a set of consecutive positions, sorted by `lane_keys`: the lane's 16 bits in
reverse order (positions with equal keys ascend). Ranks take equal consecutive parts of the sorted batch, so
the set of its samples never depends on the number of ranks. Reversed bits spread every run of consecutive
lanes evenly over all keys (van der Corput). A rank's part therefore covers the same keys, and the same lanes,
in every batch: exactly if batch size and ranks are powers of two; otherwise, for batches smaller or larger
than the number of lanes, up to a few lanes at its edges. Version 1 of the order, which saved states may have,
sorts by the lane itself: there, ranks keep to their lanes only if batches are multiples of the lanes.

Guarantees. Every epoch holds each sample exactly once. The order is a function of the shards' sizes and the
`OrderSpec` alone: not of batch size, world size, tail, machine, library version or earlier calls. It is
invertible (`positions_of`). Everything is exact in 64 bits: N <= 2**60, L <= 2**16, W <= 2**44. Golden
vectors and a plain-Python reference in the tests pin all of it.

Costs. O(K) memory: 12 bytes per shard, and 16 more per shard for each epoch kept (at most two): 20 MB for
450,000 shards. A new epoch costs about 80 ns per shard; a position costs 100-150 ns in calls for thousands,
at any number of samples (tests/benchmarks/bench_order.py). Threads and forked processes may share an `Order`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from math import gcd
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from shardkit.arrays import Ints
from shardkit.errors import StateError
from shardkit.order.permutation import CHUNK, GOLDEN, ONE, Domains, Permutation, mix64, permute, unpermute
from shardkit.units import whole_number

MAX_POSITION = 1 << 62  # so that a position plus an epoch of samples stays below 2**63
MAX_SAMPLES = 1 << 60  # per epoch: sums of offsets in an epoch cannot overflow int64
MAX_SHARDS = (1 << 31) - 1  # shard numbers fit int32
MAX_LANES = 1 << 16  # lane numbers fit uint16, which NumPy sorts by radix
MAX_WINDOW = 1 << 44  # window * lane stays below 2**60

VERSION = 3  # version of the arithmetic; saved in the state, so that a run keeps the version it began with
_VERSIONS = (1, 2, VERSION)
_EPOCHS_KEPT = 2  # number of epochs kept in memory: a batch may cross into the next epoch

_MANY_STARTS, _MANY_PLACES = 1 << 15, 1 << 10  # if both reach this, `_find` sorts to avoid L2 misses
_GOLDEN_16 = 40503  # 2**16 times the golden ratio's fraction
_NODES = 2048  # number of nodes that can each have a lane of their own, if the dataset has enough shards
_SHARDS_OF_LANE = 32  # minimum number of shards per lane; a shard on the border of two lanes is fetched twice
_SHARDS_OF_LONG_LANES = 128
_SHARDS_OF_WINDOW = 2
_UNSORTED_SAMPLES = 1 << 18  # samples under all windows of data that was never shuffled, within these limits
_FEWEST_UNSORTED, _MOST_UNSORTED = 768, 1024  # shards
_SHARDS_OF_WINDOWS = 64  # minimum number of shards under all lanes' windows: 4 GiB in shards of 64 MiB

Shuffle = Literal["window", "global", "none"]
LaneNumbers = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@dataclass(frozen=True)
class Lanes:
    """The division of an epoch of `samples` into lanes; `window` 0 means one window over a whole lane."""

    samples: int
    lanes: int
    window: int

    @cached_property
    def lengths(self) -> Ints:
        """The number of samples in each lane, int64[L]."""
        length, longer = divmod(self.samples, self.lanes)
        return length + (np.arange(self.lanes) < longer).astype(np.int64)

    @cached_property
    def starts(self) -> Ints:
        """The offset in the epoch's span at which each lane begins, int64[L]."""
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def shifts(self) -> Ints:
        """The number of samples by which each lane's first window is shortened, int64[L]."""
        return np.arange(self.lanes, dtype=np.int64) * self._window // self.lanes

    @cached_property
    def _window(self) -> int:
        return self.window or max(1, self.samples)

    def windows(self, lanes: LaneNumbers, rows: Ints) -> Ints:
        """Return the number of the window that holds row `rows[i]` of lane `lanes[i]`, for each i."""
        numbers: Ints = np.floor_divide(rows + self.shifts[lanes], self._window, dtype=np.int64)
        return numbers

    def bounds(self, lanes: LaneNumbers, windows: Ints) -> tuple[Ints, Ints]:
        """Return (first rows, sizes) of windows `windows[i]` of lanes `lanes[i]`; size <= 0: no window."""
        nominal = windows * self._window - self.shifts[lanes]
        first = np.maximum(nominal, 0)
        return first, np.minimum(nominal + self._window, self.lengths[lanes]) - first

    def find(self, places: Ints) -> tuple[npt.NDArray[np.int32], Ints]:
        """Return the lane and the row in it at each offset in an epoch: inverts starts[lane] + row."""
        length, longer = divmod(self.samples, self.lanes)
        edge = longer * (length + 1)
        # With fewer samples than lanes, length is 0 and no offset is past the edge.
        lanes = np.where(
            places < edge, places // (length + 1), longer + (places - edge) // max(length, 1)
        ).astype(np.int32)
        return lanes, places - self.starts[lanes]


def rank_slice(size: int, rank: int, world_size: int) -> slice:
    """Return the slice of a global batch of `size` that `rank` takes, one of `world_size` equal parts."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in range(world_size={world_size})")
    if size % world_size:
        raise ValueError(
            f"a global batch of {size:,} does not divide into {world_size:,} equal parts: "
            f"use a batch size that is a multiple of the world size"
        )
    part = size // world_size
    return slice(rank * part, (rank + 1) * part)


def default_lanes(shards: int, *, compressed: bool = False) -> int:
    """Return the number of lanes for a dataset with `shards` non-empty shards: a power of two.

    One lane per 32 shards, up to 2,048 lanes (so that 2,048 nodes read lanes of their own); in larger
    datasets, one lane per 128 shards. A lane begins and ends inside shards that its neighbors read too, so an
    epoch fetches a share of lanes / shards of the dataset twice, at most 3 %. The shards that lanes have in
    use, about three per lane, are 5 to 10 % of a small dataset and 1 to 2 % of the largest. Compressed shards
    that are read in place are held in memory, so they get one lane per 128 shards at any size.
    """
    if shards < 0:
        raise ValueError(f"shards must not be negative: {shards}")
    lanes = shards // _SHARDS_OF_LONG_LANES
    if not compressed:
        lanes = max(lanes, min(shards // _SHARDS_OF_LANE, _NODES))
    return min(1 << max(0, lanes.bit_length() - 1), MAX_LANES)


def default_window(samples: int, shards: int, lanes: int, *, is_shuffled: bool = True) -> int:
    """Return the number of samples per window: the samples of two average shards.

    If the windows of all lanes would then span less than 64 shards, windows are larger: small datasets have
    few lanes. The smallest datasets fit in one window. In data that was never shuffled, a shard may hold
    samples of one kind only. There, the windows span 2**18 samples, but 768 to 1,024 shards, so that the
    share of a kind in a batch of 256 varies hardly more than in random batches, however shards are sorted.
    If these are at least half of the shards, a window has all of its lane.
    """
    if lanes < 1 or shards < 0 or samples < 0:
        raise ValueError(
            f"samples and shards must be at least 0, and lanes at least 1, not {samples}, {shards}, {lanes}"
        )
    spanned = max(_SHARDS_OF_WINDOW * lanes, _SHARDS_OF_WINDOWS)
    if not is_shuffled:
        unsorted = min(max(_UNSORTED_SAMPLES * shards // max(1, samples), _FEWEST_UNSORTED), _MOST_UNSORTED)
        if 4 * unsorted >= 3 * shards:
            return max(1, min(samples, MAX_WINDOW))
        spanned = max(spanned, unsorted)
    return max(1, min(-(-samples * spanned // (max(1, shards) * lanes)), MAX_WINDOW))


@lru_cache(maxsize=64)
def lane_keys(lanes: int, version: int = VERSION) -> npt.NDArray[np.uint16]:
    """Return the sort key of each lane, uint16[lanes], by which the samples of a global batch are sorted."""
    keys = np.arange(lanes, dtype=np.int64)
    if version == 1:
        keys = (keys << 16) // lanes
    else:
        for shift, mask in ((1, 0x5555), (2, 0x3333), (4, 0x0F0F), (8, 0x00FF)):
            keys = (keys >> shift & mask) | (keys & mask) << shift
    found = keys.astype(np.uint16)
    found.flags.writeable = False
    return found


def lanes_of_strata(lanes: int, turn: int) -> npt.NDArray[np.uint16]:
    """Return the lane of each stratum, uint16[lanes]: lane l has stratum (l * g + turn) % lanes.

    g, about 0.618 * lanes and coprime to it, spreads every run of consecutive lanes, such as a batch smaller
    than the number of lanes, over the dataset, and also the lanes of a rank, which have their low bits alike.
    """
    step = max(1, lanes * _GOLDEN_16 >> 16)
    while gcd(step, lanes) > 1:
        step += 1
    found = np.empty(lanes, dtype=np.uint16)
    found[(np.arange(lanes) * step + turn) % lanes] = np.arange(lanes, dtype=np.uint16)
    return found


@dataclass(frozen=True, slots=True)
class OrderSpec:
    """Everything that an order depends on, except the sizes of the shards.

    `lanes` and `window` (in samples) apply to shuffle "window" only. For the other values of `shuffle` they
    are set to 1 and 0, so that specs of the same order compare equal.
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
                advice = (
                    "; ranks and resumed runs need the same seed: give a number" if name == "seed" else ""
                )
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
        """Return the spec as plain data for a state; `from_dict` reads it back."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, data: object) -> OrderSpec:
        """Build a spec from what `to_dict` returns; raises StateError for any other data."""
        names = {field.name for field in fields(cls)}
        if not isinstance(data, dict) or data.keys() != names:
            raise StateError(f"an order must have the keys {', '.join(sorted(names))}; got {data!r:.200}")
        if isinstance(data["version"], bool) or data["version"] not in _VERSIONS:
            raise StateError(
                f"the order has version {data['version']!r}, but this shardkit reads versions up to "
                f"{VERSION}: continue with the version of shardkit that began the run"
            )
        try:
            return cls(**data)
        except ValueError as error:
            raise StateError(f"not a valid order: {error}") from error


@dataclass(frozen=True, slots=True)
class Located:
    """The locations of samples, as arrays of one shape. `sample_id` is the row number in dataset order."""

    position: Ints
    epoch: Ints
    shard: npt.NDArray[np.int32]
    row: Ints
    lane: npt.NDArray[np.int32]
    sample_id: Ints

    def reshape(self, *shape: int) -> Located:
        """Return the same entries in another shape."""
        return Located(*(getattr(self, field.name).reshape(shape) for field in fields(self)))

    def take(self, which: slice | npt.NDArray[np.intp]) -> Located:
        """Return the entries `which` along the first axis; for a slice they are views."""
        return Located(*(getattr(self, field.name)[which] for field in fields(self)))


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """The shard order of one epoch, and the key that shuffles its windows."""

    shards: npt.NDArray[np.int32] | None
    """Shard numbers in the epoch's order, int32[shards]; None means manifest order."""
    slots: npt.NDArray[np.int32] | None
    """The index of each shard in `shards`, int32[shards]."""
    starts: Ints
    """The offset in the epoch's span at which each shard of `shards` begins, int64[shards + 1]."""
    window_key: np.uint64


def _find(starts: Ints, places: Ints, lanes: LaneNumbers | int) -> Ints:
    """Return, for each offset in the epoch's span, the index in `starts` of the shard that holds it."""
    if isinstance(lanes, int) or len(starts) < _MANY_STARTS or len(places) < _MANY_PLACES:
        return np.searchsorted(starts, places, side="right") - 1
    # Search in the order of lanes: batches are sorted by other keys, and random access would miss the cache.
    by_lane = np.argsort(lanes.astype(np.uint16), kind="stable")
    slots = np.empty_like(places)
    slots[by_lane] = np.searchsorted(starts, places[by_lane], side="right") - 1
    return slots


@dataclass(frozen=True, slots=True)
class _Windows:
    """First rows and permutations of windows `low` to `high` of all lanes, grouped by window."""

    epoch: EpochOrder
    low: int
    high: int
    firsts: Ints
    domains: Domains


class Order:
    """The order of all samples of a dataset, given the samples of each shard; see the module docstring."""

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
            raise ValueError(f"the dataset has more than {MAX_SAMPLES:,} samples: the index is damaged")
        self.spec = spec
        self.shard_starts: Ints = np.zeros(len(sizes) + 1, dtype=np.int64)
        """The sample id at which each shard begins, in dataset order, int64[shards + 1]."""
        np.cumsum(sizes, out=self.shard_starts[1:])
        self._samples = int(self.shard_starts[-1])
        self.geometry = Lanes(self._samples, spec.lanes, spec.window)
        """The division of an epoch into lanes and windows."""
        self._epochs: dict[int, EpochOrder] = {}
        self._known: _Windows | None = None  # replaced, never changed: threads may share an order

    @property
    def samples(self) -> int:
        """The number of samples in an epoch."""
        return self._samples

    @property
    def shards(self) -> int:
        """The number of shards, including empty ones."""
        return len(self.shard_starts) - 1

    def locate(self, positions: Ints | tuple[int, int]) -> Located:
        """Locate the samples at `positions`, an array or (start, count) for consecutive positions.

        Positions may be in any order, repeat, and be in any epochs; the result has their shape.
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
        """Return the position of each sample in `epoch`, in an array of the same shape; inverts `locate`."""
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
        """Return the `size` positions from `position` on, sorted by `lane_keys`, then by position."""
        batch: Ints = self._batches(position, size, 1)[0]
        return batch

    def global_batches(
        self, position: int, size: int, count: int, *, part: slice = slice(None), every: int = 1
    ) -> Located:
        """Locate `count` global batches of `size` samples; the result's arrays have shape (count, size).

        Row i is `global_batch(position + i * every * size, size)`. `part` (a `rank_slice`) selects from each
        row before the samples are located, so that a rank computes only its own samples.
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
            # Inside an epoch, batches that begin in the same lane have the same sort order.
            lanes, alike = np.unique(begins % self.spec.lanes, return_inverse=True)
            batch_keys = keys[(lanes[:, None] + within) % self.spec.lanes]
        else:
            alike = np.arange(count)
            batch_keys = keys[(starts[:, None] + within) % self._samples % self.spec.lanes]
        # The keys are uint16, which NumPy sorts stably by radix, in linear time.
        by_lane = np.argsort(batch_keys, axis=1, kind="stable")[:, part]
        batches: Ints = starts[:, None] + by_lane[alike]
        return batches

    def _locate_within(self, number: int, piece: Located, which: slice | npt.NDArray[np.intp]) -> None:
        # Fills the entries `which` of `piece`, which all belong to epoch `number`.
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
        if epoch.slots is None:
            places = sample_ids
        else:
            shards = np.searchsorted(self.shard_starts, sample_ids, side="right") - 1
            places = epoch.starts[epoch.slots[shards]] + sample_ids - self.shard_starts[shards]
        if self.spec.shuffle == "none":
            return places
        lanes, rows = self.geometry.find(places)
        firsts, domains = self._windows(epoch, lanes, self.geometry.windows(lanes, rows))
        rows -= firsts
        back = unpermute(rows.view(np.uint64), domains).view(np.int64)
        return (firsts + back) * self.spec.lanes + lanes

    def _windows(self, epoch: EpochOrder, lanes: LaneNumbers, windows: Ints) -> tuple[Ints, Domains]:
        """Return the first row and the permutation of window `windows[i]` of lane `lanes[i]`, for each i."""
        low, high = int(windows.min()), int(windows.max())
        known = self._known
        if known is None or known.epoch is not epoch or not known.low <= low <= high <= known.high:
            count = self.spec.lanes * (high - low + 1)
            if count > len(lanes):
                return self._window_domains(epoch, lanes, windows)
            # Consecutive positions share a few windows, also across calls: compute these windows once.
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
        # Where a lane has no such window, the size is never used, but must not break the arithmetic.
        return firsts, Domains.of(np.maximum(sizes, 1).view(np.uint64), keys)

    def epoch(self, number: int) -> EpochOrder:
        """Return the shard order of epoch `number`; the last two epochs are cached."""
        # No lock, so that an order can be forked and pickled: the dict is replaced, never modified, and two
        # threads that miss at the same time compute equal epochs.
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
        if self.spec.version >= 3 and self.spec.lanes > 1 and self._samples:
            turn = int.from_bytes(self._key(number, "strata"), "little") % self.spec.lanes
            lanes = lanes_of_strata(self.spec.lanes, turn)[self._strata]
            shards = shards[np.argsort(lanes[shards], kind="stable")]
        slots = np.empty_like(shards)
        slots[shards] = np.arange(self.shards, dtype=np.int32)
        starts = np.zeros(self.shards + 1, dtype=np.int64)
        np.cumsum(np.diff(self.shard_starts)[shards], out=starts[1:])
        return EpochOrder(shards, slots, starts, window_key)

    @cached_property
    def _strata(self) -> npt.NDArray[np.int32]:
        """The stratum of each shard: the lane that would hold its middle if shards were in dataset order."""
        middles = self.shard_starts[:-1] + np.diff(self.shard_starts) // 2
        return self.geometry.find(np.minimum(middles, self._samples - 1))[0]

    def _key(self, epoch: int, purpose: str) -> bytes:
        text = f"{self.spec.seed}:{epoch}:{purpose}"
        return hashlib.blake2b(text.encode(), digest_size=8, person=b"shardkit.order.1").digest()

    def _check_range(self, start: int, count: int) -> None:
        check_positions(start, count)
        if count and not self._samples:
            raise ValueError("the dataset has no samples, so it has no positions")


def as_int64(values: npt.ArrayLike, what: str) -> Ints:
    """Return the values as an int64 array; raises TypeError unless they are integers."""
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
    """Yield (value, indices of its entries) for each distinct value, in ascending order."""
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
    """Return the first position of each of `count` global batches, and the number of positions they span.

    Batch i begins at position + i * every * size. Raises ValueError for invalid arguments.
    """
    if size < 0 or count < 0 or every < 1:
        raise ValueError(f"size and count must be at least 0, and every at least 1: {size}, {count}, {every}")
    span = size * ((count - 1) * every + 1) if count else 0
    check_positions(position, span)
    return position + np.arange(count, dtype=np.int64) * (size * every), span


def check_positions(start: int, count: int) -> None:
    """Raise ValueError unless the `count` positions from `start` on are all in [0, 2**62)."""
    if count < 0 or start < 0 or start + count > MAX_POSITION:
        raise ValueError(f"{count:,} positions from {start:,} are out of range: positions go from 0 to 2**62")
