"""A second reader of shardkit's formats, by docs/spec alone; nothing of shardkit is imported.

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
from io import BytesIO
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import xxhash
import zstandard

from spec.arithmetic import (
    WORD,
    Combined,
    Mixture,
    Order,
    Ranges,
    blake2b,
    digest,
    exclusion_digest,
    le64,
    stream_seed,
)

Json = Any

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


TARS = {
    ".tar.gz": "gz",
    ".tgz": "gz",
    ".tar.bz2": "bz2",
    ".tbz2": "bz2",
    ".tar.zst": "zstd",
    ".tar.zstd": "zstd",
}
TEXTS = {".jsonl.zst": "zstd", ".jsonl.gz": "gz"}


def _named(stored: File, raw_bytes: int, samples: int, compressed: Mapping[str, str]) -> Shard:
    """A shard whose compression follows from its name."""
    for suffix, algorithm in compressed.items():
        if stored.name.lower().endswith(suffix):
            name = stored.name[: -len(suffix)] + (".tar" if compressed is TARS else ".jsonl")
            return Shard(File(name, raw_bytes, {}), stored, samples, {}, algorithm)
    return Shard(stored, stored, samples, {})


def _tar_shard(entry: Json) -> Shard:
    hashes = ({"md5": entry["md5sum"]} if "md5sum" in entry else {}) | entry.get("hashes", {})
    stored = File(entry["url"], entry.get("filesize", -1), hashes)
    return _named(stored, entry.get("raw_bytes", -1), entry["nsamples"], TARS)


def _unlisted(file: Path) -> Shard:
    data = file.read_bytes()
    stored = File(file.name, len(data), {})
    return Shard(stored, stored, len(list(tar_samples(data))), {})


def _text_shard(entry: Json) -> Shard:
    stored = File(entry["name"], entry["bytes"], entry["hashes"])
    return _named(stored, entry.get("raw_bytes", -1), 1 if "tokens" in entry else entry["documents"], TEXTS)


def decompressed(algorithm: str, data: bytes) -> bytes:
    if algorithm == "zstd":
        stream = zstandard.ZstdDecompressor().stream_reader(BytesIO(data), read_across_frames=True)
        return bytes(stream.read())
    return {"gz": gzip.decompress, "bz2": bz2.decompress}[algorithm](data) if algorithm else data


class Dataset:
    """A dataset in a folder. A sample is {column: bytes}, as they are stored; of JSON lines {"": line}."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        lists = {"index.json": "shards", "shards.json": "shardlist", "documents.json": "files"}
        self.list = next((name for name in lists if (folder / name).exists()), "")
        read = {"index.json": _mds_shard, "shards.json": _tar_shard, "documents.json": _text_shard}
        if self.list:
            self.shards = list(map(read[self.list], _json(folder / self.list)[lists[self.list]]))
        else:
            self.shards = [_unlisted(file) for file in sorted(folder.glob("*.tar"))]
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

    def files(self) -> dict[str, File]:
        """The files beside the shards (card.md), those that files.json lists among them."""
        listed = dict(self.card.get("files", {}))
        if "files.json" in listed:
            _compare(_side_file("files.json", listed), (self.folder / "files.json").read_bytes())
            listed |= _json(self.folder / "files.json")
        return {name: _side_file(name, listed) for name in listed}

    def samples_of(self, number: int) -> list[dict[str, bytes]]:
        """All samples of a shard, whose sizes and hashes are compared with the index."""
        shard = self.shards[number]
        data = (self.folder / shard.stored.name).read_bytes()
        _compare(shard.stored, data)
        raw = decompressed(shard.compression, data)
        _compare(shard.raw, raw)
        if self.list == "documents.json" and "tokens" in _json(self.folder / self.list)["columns"]:
            kind = _json(self.folder / self.list)["format"]
            found = [{"tokens": raw[1024 if kind == "llmc" else 0 :]}]
        elif self.list == "documents.json":
            found = [{"": line} for line in raw.split(b"\n")[:-1]]
        else:
            is_mds = self.list == "index.json"
            found = list(mds_samples(raw, shard.columns) if is_mds else tar_samples(raw))
        if len(found) != shard.samples:
            raise ValueError(f"{shard.stored.name}: {len(found)} samples")
        return found


def _side_file(name: str, listed: Json) -> File:
    hashes = {key: value for key, value in listed[name].items() if key != "bytes"}
    return File(name, listed[name]["bytes"], hashes)


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


DTYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32",
          34: "float32", 64: "uint64", 65: "int64", 66: "float64"}  # fmt: skip


def array(data: bytes, encoding: str) -> tuple[str, tuple[int, ...], bytes]:
    """(dtype, shape, values) of an MDS column of arrays."""
    _, dtype, shape = [*encoding.split(":"), "", ""][:3]
    if not dtype:
        dtype, data = DTYPES[data[0]], data[1:]
    if shape:
        return dtype, tuple(map(int, shape.split(","))), data
    axes, code = data[0] >> 2, "BHIQ"[data[0] & 3]
    dims = struct.Struct(f"<{axes}{code}")
    return dtype, dims.unpack_from(data, 1), data[1 + dims.size :]


def row_costs(file: Path) -> list[int]:
    """A table of squares (balance.md)."""
    data, stated = file.read_bytes()[:-16], file.read_bytes()[-16:]
    if hash_of("xxh3_128", data) != stated.hex():
        raise ValueError(f"{file} is damaged")
    header, values = npy(data)
    return list(struct.unpack(f"<{header['shape'][0]}{'I' if header['descr'] == '<u4' else 'Q'}", values))


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


# Block checksums (blocks.md)

BLOCK = 65536


def block_checksums(file: File, part: bytes) -> list[int]:
    """Of one shard's file, in its part of blocks.bin."""
    hashes = [f"{name}:{digest.lower()}" for name, digest in sorted(file.hashes.items())]
    stated = "\0".join([str(file.bytes), *hashes])
    checksums, seal = part[:-16], part[-16:]
    if xxhash.xxh3_128(stated.encode() + b"\n" + checksums).digest() != seal:
        raise ValueError("another shard's checksums, or damaged ones")
    return [value for (value,) in struct.iter_unpack("<Q", checksums)]


def are_proved(checksums: Sequence[int], start: int, data: bytes) -> bool:
    """Whether whole blocks from byte `start` on are those of the file."""
    found = [xxhash.xxh3_64(data[at : at + BLOCK]).intdigest() for at in range(0, len(data), BLOCK)]
    return found == list(checksums[start // BLOCK :][: len(found)])


def blocks_bin(dataset: Dataset) -> list[list[int]]:
    """The checksums of all shards."""
    data, found = (dataset.folder / "blocks.bin").read_bytes(), []
    for shard in dataset.shards:
        size = 8 * -(-shard.stored.bytes // BLOCK) + 16
        found.append(block_checksums(shard.stored, data[:size]))
        data = data[size:]
    if data:
        raise ValueError("more than the checksums of the shards")
    return found


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
        mixture = Mixture(seed, state["schedule"], state["order_version"]) if state["schedule"] else None
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


def state_of(head: Json) -> dict[str, Json]:
    """The state of a run when it wrote the head of a log."""
    settings = head["settings"]
    streams = [{"lanes": 0, "window": 0, **stream} for stream in settings["streams"]]
    return {
        "version": 4, "position": head["position"], "order_version": settings["order"]["version"],
        **{name: settings["order"][name] for name in ("seed", "shuffle", "lanes", "window")},
        **{name: settings[name] for name in ("tail", "schedule", "epoch_samples")},
        "streams": {name: [stream[name] for stream in streams] for name in streams[0]},
    }  # fmt: skip


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
    parts = [record[name] for name in ("stage", "name", "args", "code")]
    if digest(parts) != record["digest"]:
        raise ValueError("the digest is not the task's")
    return record
