"""A second reader of shardkit's formats, written from docs/spec alone; nothing of shardkit is imported.

It opens MDS and tar datasets, finds the samples of any batch of any rank, continues from saved states, and
reads usage logs and provenance tables. It is slow and short, and refuses little: where the pages define what
a sound file means, this is what it means. Parquet is read by pyarrow, as it is no format of ours.
"""

from __future__ import annotations

import ast
import bz2
import gzip
import hashlib
import json
import re
import struct
import tarfile
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from io import BytesIO
from itertools import accumulate, pairwise
from math import gcd
from pathlib import Path
from typing import Any

import xxhash
import zstandard

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


def default_window(samples: int, shards: int, lanes: int) -> int:
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
    version: int = 2
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
            kept = [self.kept_starts[shard + 1] - self.kept_starts[shard] for shard in shards]
            self._epochs[number] = shards, [0, *accumulate(kept)], le64(self.key(number, "windows"))
        return self._epochs[number]

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
    def __init__(self, seed: int, schedule: Schedule) -> None:
        self.key = le64(blake2b(f"{seed}:mixture", 8, "shardkit.mix.1"))
        self.segments: list[tuple[int, list[int]]] = []
        for start, weights in schedule:
            reduced = [weight // gcd(*weights) for weight in weights]
            if not self.segments or self.segments[-1][1] != reduced:
                self.segments.append((start, reduced))
        self._blocks: dict[tuple[int, int, int], tuple[int, list[int], list[int]]] = {}
        self.before = [[0] * len(schedule[0][1])]  # what each stream has when a segment starts
        for number, (end, _) in enumerate(self.segments[1:]):
            self.before.append(self._counts(number, end))

    def locate(self, position: int) -> tuple[int, int]:
        """(stream, index)."""
        number = bisect_right([start for start, _ in self.segments], position) - 1
        begin, slots, counts = self._block(number, position)
        at = position - begin
        return slots[at], counts[slots[at]] + slots[:at].count(slots[at])

    def _counts(self, number: int, end: int) -> list[int]:
        """What each stream has before position `end`, which is in a segment or at its end."""
        begin, slots, counts = self._block(number, end)
        return [count + slots[: end - begin].count(stream) for stream, count in enumerate(counts)]

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


# Datasets (index-files.md, index-bin.md)


@dataclass(frozen=True)
class File:
    name: str
    bytes: int
    hashes: Mapping[str, str]


@dataclass(frozen=True)
class Shard:
    raw: File
    stored: File
    samples: int
    columns: Mapping[str, tuple[str, int | None]]
    compression: str = ""


def fingerprint(shards: Sequence[Shard]) -> str:
    lines = []
    for shard in shards:
        hashes = shard.raw.hashes or shard.stored.hashes
        name = min(hashes, default="")
        stated = f"{name}:{hashes[name]}" if hashes else ""
        lines.append(f"{shard.raw.name}\0{shard.raw.bytes}\0{shard.samples}\0{stated}\n")
    return blake2b("".join(lines), 16, "shardkit-fp-v1").hex()


def hash_of(name: str, data: bytes) -> str:
    known = {"xxh128": xxhash.xxh3_128, "xxh3_128": xxhash.xxh3_128, "xxh3_64": xxhash.xxh3_64,
             "xxh32": xxhash.xxh32, "xxh64": xxhash.xxh64}  # fmt: skip
    return known[name](data).hexdigest() if name in known else hashlib.new(name, data).hexdigest()


def _mds_file(entry: Json) -> File:
    return File(entry["basename"], entry["bytes"], entry["hashes"])


def _mds_shard(entry: Json) -> Shard:
    raw = _mds_file(entry["raw_data"])
    stored = _mds_file(entry["zip_data"]) if entry["zip_data"] else raw
    kinds = zip(entry["column_encodings"], entry["column_sizes"], strict=True)
    columns = dict(zip(entry["column_names"], kinds, strict=True))
    compression = entry["compression"].partition(":")[0] if entry["zip_data"] else ""
    return Shard(raw, stored, entry["samples"], columns, compression)


def _tar_shard(entry: Json) -> Shard:
    hashes = entry.get("hashes", {}) or ({"md5": entry["md5sum"]} if "md5sum" in entry else {})
    stored = File(entry["url"], entry.get("filesize", -1), hashes)
    columns = {name: (encoding, None) for name, encoding in entry.get("columns", {}).items()}
    for suffix, algorithm in ((".gz", "gz"), (".bz2", "bz2"), (".zst", "zstd"), (".zstd", "zstd")):
        if stored.name.endswith(f".tar{suffix}"):
            raw = File(stored.name.removesuffix(suffix), entry.get("raw_bytes", -1), {})
            return Shard(raw, stored, entry["nsamples"], columns, algorithm)
    return Shard(stored, stored, entry["nsamples"], columns)


def decompressed(algorithm: str, data: bytes) -> bytes:
    if algorithm == "zstd":
        stream = zstandard.ZstdDecompressor().stream_reader(BytesIO(data), read_across_frames=True)
        return bytes(stream.read())
    return {"gz": gzip.decompress, "bz2": bz2.decompress}[algorithm](data) if algorithm else data


class Dataset:
    """An MDS or tar dataset in a folder. A sample is {column: bytes}, as they are stored."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.is_tar = folder, (folder / "shards.json").exists()
        if self.is_tar:
            self.shards = [_tar_shard(entry) for entry in _json(folder / "shards.json")["shardlist"]]
        else:
            self.shards = [_mds_shard(entry) for entry in _json(folder / "index.json")["shards"]]
        self.fingerprint = fingerprint(self.shards)
        self.sizes = [shard.samples for shard in self.shards]
        self.starts = [0, *accumulate(self.sizes)]
        card = folder / "dataset.json"
        self.card: dict[str, Json] = _json(card) if card.exists() else {}
        if self.card.get("fingerprint", self.fingerprint) != self.fingerprint:
            raise ValueError(f"{card} is the card of other shards")
        self._read: dict[int, list[dict[str, bytes]]] = {}

    def __getitem__(self, sample_id: int) -> dict[str, bytes]:
        number = bisect_right(self.starts, sample_id) - 1
        if number not in self._read:
            self._read[number] = self.samples_of(number)
        return self._read[number][sample_id - self.starts[number]]

    def samples_of(self, number: int) -> list[dict[str, bytes]]:
        """All samples of a shard, whose sizes and hashes are compared with the index."""
        shard = self.shards[number]
        data = (self.folder / shard.stored.name).read_bytes()
        _compare(shard.stored, data)
        raw = decompressed(shard.compression, data)
        _compare(shard.raw, raw)
        found = list(tar_samples(raw) if self.is_tar else mds_samples(raw, shard.columns))
        if len(found) != shard.samples:
            raise ValueError(f"{shard.stored.name}: {len(found)} samples")
        return found


def _json(file: Path) -> Json:
    return json.loads(file.read_bytes())


def _compare(file: File, data: bytes) -> None:
    wrong = [name for name, stated in file.hashes.items() if hash_of(name, data) != stated]
    if wrong or file.bytes not in (-1, len(data)):
        raise ValueError(f"{file.name} is not what the index says: {len(data)} bytes, {wrong}")


def mds_samples(data: bytes, columns: Mapping[str, tuple[str, int | None]]) -> Iterator[dict[str, bytes]]:
    count = struct.unpack_from("<I", data)[0]
    offsets = struct.unpack_from(f"<{count + 1}I", data, 4)
    if offsets[-1] != len(data):
        raise ValueError("the last offset is not the end")
    for begin, end in pairwise(offsets):
        varying = sum(size is None for _, size in columns.values())
        words = iter(struct.unpack_from(f"<{varying}I", data, begin))
        at, sample = begin + 4 * varying, {}
        for name, (_, fixed) in columns.items():
            size = next(words) if fixed is None else fixed
            sample[name], at = data[at : at + size], at + size
        if at != end:
            raise ValueError("values do not fill their sample")
        yield sample


def tar_name(name: str) -> tuple[str, str] | None:
    """(key, extension) of a member that belongs to a sample."""
    folder, slash, last = name.rpartition("/")
    stem, dot, extension = last.partition(".")
    first = name.partition("/")[0]
    if not dot or (len(first) >= 4 and first.startswith("__") and first.endswith("__")):
        return None
    if not stem and (not folder or "." in folder.rpartition("/")[2]):
        return None
    return folder + slash + stem, extension.lower()


def tar_samples(data: bytes) -> Iterator[dict[str, bytes]]:
    key, sample = "", dict[str, bytes]()
    with tarfile.open(fileobj=BytesIO(data)) as archive:
        for member in archive:
            name = tar_name(member.name) if member.isfile() else None
            if name is None:
                continue
            payload = archive.extractfile(member)
            assert payload is not None
            if sample and name[0] != key:
                yield sample
                sample = {}
            key = name[0]
            if name[1] in sample:
                raise ValueError(f"{member.name}: twice in a sample")
            sample[name[1]] = payload.read()
    if sample:
        yield sample


def npy(data: bytes) -> tuple[Json, bytes]:
    """(header, values) of a .npy file of version 1.0."""
    size = struct.unpack_from("<H", data, 8)[0]
    return ast.literal_eval(data[10 : 10 + size].decode("latin-1")), data[10 + size :]


def tokens(sample: Mapping[str, bytes], dtype: str) -> list[int]:
    """The tokens of a row, of either format."""
    values = sample["tokens"] if "tokens" in sample else npy(sample["tokens.npy"])[1]
    width, code = {"uint16": (2, "H"), "uint32": (4, "I")}[dtype]
    return list(struct.unpack(f"<{len(values) // width}{code}", values))


def index_bin(folder: Path) -> tuple[str, list[Shard]]:
    """(fingerprint, shards) by index.bin; ValueError if it belongs to another index.json."""
    with zipfile.ZipFile(folder / "index.bin") as members:  # compares the checksums, too
        arrays = {name.removesuffix(".npy"): npy(members.read(name)) for name in members.namelist()}
    header, index = json.loads(arrays["header"][1]), (folder / "index.json").read_bytes()
    belongs = header["index_bytes"], header["index_xxh3_128"]
    if header["version"] != 1 or belongs != (len(index), hash_of("xxh3_128", index)):
        raise ValueError("index.bin belongs to another index")
    count = arrays["samples"][0]["shape"][0]
    kind = struct.unpack(f"<{count}i", arrays["kind"][1])
    samples = struct.unpack(f"<{count}q", arrays["samples"][1])
    files: dict[str, list[File]] = {}
    for which, names in header["hashes"].items():
        listed = arrays[f"{which}_names"][1].decode("ascii").splitlines()
        sizes = struct.unpack(f"<{count}q", arrays[f"{which}_sizes"][1])
        hashes: list[dict[str, str]] = [{} for _ in range(count)]
        for name in names:
            shape, values = arrays[f"{which}_{name}"][0]["shape"], arrays[f"{which}_{name}"][1]
            for k in range(count):
                hashes[k][name] = values[k * shape[1] : (k + 1) * shape[1]].hex()
        files[which] = [File(*facts) for facts in zip(listed, sizes, hashes, strict=True)]
    stored = files.get("zip", files["raw"])
    kinds = [_mds_shard(entry) for entry in header["kinds"]]
    return header["fingerprint"], [
        Shard(files["raw"][k], stored[k], samples[k], kinds[kind[k]].columns, kinds[kind[k]].compression)
        for k in range(count)
    ]


# State (state.md) and runs (order.md)


def current_state(saved: Mapping[str, Json]) -> dict[str, Json]:
    """A state of any version as version 4 has it."""
    state = dict(saved)
    if state["version"] <= 2:
        mixture = state.pop("mixture", None)
        names = ("fingerprint", "samples", "name", "excluded")
        listed = [{"name": "", "excluded": "", **stream} for stream in state["streams"]]
        state["streams"] = {name: [stream[name] for stream in listed] for name in names}
        state |= mixture or {"schedule": None, "epoch_samples": listed[0]["samples"]}
        state["global_batch"] = None
    if state["version"] <= 3:
        none = [0] * len(state["streams"]["name"])
        state["streams"] = {**state["streams"], "lanes": none, "window": none}
    state["version"] = 4
    return state


class Run:
    """A run over datasets, from a state: which samples, numbered over all streams, each batch has."""

    def __init__(self, state: Json, datasets: Sequence[Dataset], excluded: Sequence[Ranges]) -> None:
        state = current_state(state)
        self.datasets, streams, seed = datasets, state["streams"], state["seed"]
        self.position, self.tail, self.epoch_samples = (
            state["position"],
            state["tail"],
            state["epoch_samples"],
        )
        mixture = Mixture(seed, state["schedule"]) if state["schedule"] else None
        orders = []
        for number, (dataset, ranges) in enumerate(zip(datasets, excluded, strict=True)):
            own = stream_seed(seed, number) if mixture else seed
            lanes, window = (streams[name][number] or state[name] for name in ("lanes", "window"))
            order = Order(dataset.sizes, own, state["shuffle"], lanes, window, state["order_version"], ranges)
            found = dataset.fingerprint, order.samples, exclusion_digest(ranges) if ranges else ""
            if found != tuple(streams[name][number] for name in ("fingerprint", "samples", "excluded")):
                raise ValueError(f"the state is not of this dataset: {found}")
            orders.append(order)
        self.order = Combined(orders, mixture)

    def sample(self, number: int) -> dict[str, bytes]:
        stream = bisect_right(self.order.first_samples, number) - 1
        return self.datasets[stream][number - self.order.first_samples[stream]]

    def batch(self, position: int, rank: int, world_size: int, batch_size: int) -> tuple[list[int], int]:
        """(samples of the rank's next batch in a run at `position`, -1 for padding; the position after)."""
        size, left = batch_size * world_size, self.epoch_samples - position % self.epoch_samples
        if self.tail == "drop" and left < size:
            position += left
            left = self.epoch_samples
        if self.tail == "pad" and left < size:
            whole = self.order.global_batch(position, left)
            part = whole[left * rank // world_size : left * (rank + 1) // world_size]
            found = [self.order.locate(each).sample_id for each in part]
            return found + [-1] * (batch_size - len(found)), position + left
        part = self.order.global_batch(position, size)[rank * batch_size : (rank + 1) * batch_size]
        after = position + size
        rest = self.epoch_samples - after % self.epoch_samples
        if self.tail == "drop" and rest < size:
            after += rest
        return [self.order.locate(each).sample_id for each in part], after

    def batch_of_epoch(
        self, epoch: int, number: int, rank: int, world_size: int, batch_size: int
    ) -> list[int]:
        """Batch `number` of an epoch in a run from position 0."""
        size, first = batch_size * world_size, epoch * self.epoch_samples
        first = -(-first // size) * size if self.tail == "carry" else first
        return self.batch(first + number * size, rank, world_size, batch_size)[0]


# Usage logs (usage-log.md), provenance (provenance.md), work folders (work-folder.md)


@dataclass
class Section:
    head: Json
    steps: list[tuple[int, list[int]]] = field(default_factory=list)
    end: int | None = None


def usage_log(data: bytes) -> list[Section]:
    """What a log says, up to a record that was cut off."""
    if data[:8] != b"SKUSAGE1"[: len(data)]:
        raise ValueError("not a usage log")
    found: list[Section] = []
    at = 8
    while at + 8 <= len(data):
        size, checksum = struct.unpack_from("<II", data, at)
        payload = data[at + 8 : at + 8 + size]
        if not size or len(payload) < size or zlib.crc32(payload) != checksum:
            if size and at + 8 + size < len(data):
                raise ValueError(f"damaged at byte {at}")
            break
        at += 8 + size
        if payload[:1] == b"R":
            found.append(Section(json.loads(payload[1:])))
            continue
        position = struct.unpack_from("<Q", payload, 1)[0]
        if payload[:1] == b"E":
            found[-1].end = position
        else:
            width = found[-1].head["id_bytes"]
            code, none = ("I", (1 << 32) - 1) if width == 4 else ("Q", WORD)
            ids = struct.unpack_from(f"<{(size - 9) // width}{code}", payload, 9)
            found[-1].steps.append((position, [-1 if each == none else each for each in ids]))
    return found


def document_id(file: str, record: int) -> bytes:
    seed = blake2b(file, 16, "shardkit-doc-v1")
    return xxhash.xxh3_128(seed + struct.pack("<q", record)).digest()


def shuffle_hash(document: bytes, seed: int) -> int:
    return xxhash.xxh3_64(document, le64(blake2b(f"{seed}\0shuffle", 8, ""))).intdigest()


def provenance(folder: Path) -> Iterator[tuple[dict[bytes, bytes], list[dict[str, Json]]]]:
    """(schema metadata, records) of each table of a dataset."""
    import pyarrow.parquet as parquet

    for file in sorted((folder / "provenance").glob("[!.]*.parquet")):
        table = parquet.read_table(file)
        yield table.schema.metadata or {}, table.to_pylist()


def task_record(data: bytes) -> Json:
    """The record of a finished task; ValueError if its seal or digest is wrong."""
    found = re.fullmatch(rb'(.*),\n "seal": "(\w{32})"\n\}\n', data, re.DOTALL)
    if found is None or hash_of("xxh3_128", found[1] + b"\n}") != found[2].decode():
        raise ValueError("the seal does not hold")
    record = json.loads(data)
    parts = [record[name] for name in ("stage", "name", "config", "inputs", "code")]
    if digest(parts) != record["digest"]:
        raise ValueError("the digest is not the task's")
    return record
