"""Flat files of tokens are the rows that a plain cut of their ids gives, in place, and nothing else is."""

from __future__ import annotations

import io
import os
import pickle
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardkit.datasets.dataset import open_dataset
from shardkit.datasets.range_store import RangeStore
from shardkit.datasets.token_rows import RowCut, find_token_rows
from shardkit.errors import ShardError
from shardkit.formats.tokens import Piece, name_of, pieces_of
from shardkit.storage import open_store
from shardkit.storage.memory import MemoryStore
from shardkit.storage.resilient import ResilientStore
from shardkit.storage.store import ObjectChangedError, StoreError
from shardkit.tools.convert import CutOptions, convert
from support.remote_harness import fresh_url, put_folder, quick_policy
from support.stores import Fault, FaultRule, FaultyStore

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "convert"
IGNORE_TAIL = pytest.mark.filterwarnings("ignore:.*fill no row of.*:RuntimeWarning")

pytestmark = IGNORE_TAIL


def write_bare(folder: Path, counts: Sequence[int], dtype: str = "uint16", suffix: str = ".npy") -> list[Any]:
    """Files of so many ids each; returns the ids of each."""
    ids = np.random.default_rng(3).integers(0, 60_000, sum(counts)).astype(np.dtype(dtype).newbyteorder("<"))
    parts = np.split(ids, np.cumsum(counts)[:-1])
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(parts):
        part.tofile(folder / f"part-{number:03d}{suffix}")
    return parts


def cut(parts: Sequence[Any], length: int, *, per_file: bool) -> list[list[int]]:
    """The rows, the plain way."""
    streams = [part.tolist() for part in parts]
    if not per_file:
        streams = [[token for stream in streams for token in stream]]
    return [
        stream[at : at + length] for stream in streams for at in range(0, len(stream) - length + 1, length)
    ]


def rows_of(path: Path | str, **options: Any) -> list[list[int]]:
    with open_dataset(path, **options) as dataset:
        return [np.asarray(sample["tokens"]).tolist() for sample in dataset]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counts=st.lists(st.integers(0, 23), min_size=1, max_size=6),
    length=st.integers(1, 9),
    per_file=st.booleans(),
    dtype=st.sampled_from(["uint16", "uint32", "int32", "int64"]),
)
def test_rows_of_files_are_those_of_a_plain_cut(
    counts: list[int], length: int, per_file: bool, dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("files")
    expected = cut(write_bare(folder, counts, dtype), length, per_file=per_file)
    options: dict[str, Any] = {"sequence_length": length, "token_dtype": dtype, "per_file": per_file}
    if not expected:
        with pytest.raises(ShardError, match=f"has {sum(counts)} tokens, which fill no row of {length}"):
            open_dataset(folder, **options)
        return
    assert rows_of(folder, **options) == expected


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
            st.integers(0, 1 << 50),
            st.integers(0, 1 << 50),
        ),
        min_size=1,
    )
)
def test_the_name_of_a_shard_says_where_its_pieces_are(parts: list[tuple[str, int, int]]) -> None:
    pieces = [Piece(*part) for part in parts]
    assert pieces_of(name_of(pieces)) == pieces


@settings(deadline=None)
@given(count=st.integers(8, 200), shard_bytes=st.integers(1, 100))
def test_shards_are_ranges_of_whole_rows_that_cover_the_file(count: int, shard_bytes: int) -> None:
    store = MemoryStore(fresh_url())
    store.put("ids.npy", bytes(2 * count))
    found = find_token_rows(
        f"{store.url}/ids.npy", RowCut(sequence_length=4, token_dtype="uint16"), shard_bytes=shard_bytes
    )
    pieces = [piece for info in found.manifest.shards for piece in pieces_of(info.raw.basename)]
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
    assert pieces[-1].stop == count // 4 * 8
    sizes = [piece.bytes for piece in pieces]
    assert all(size % 8 == 0 and 8 <= size <= max(8, shard_bytes) for size in sizes)
    assert [info.samples for info in found.manifest.shards] == [size // 8 for size in sizes]


def write_megatron(prefix: Path, documents: Sequence[Sequence[int]], code: int = 8) -> None:
    sizes = [len(document) for document in documents]
    ids = np.concatenate([np.array(document, "<u2") for document in documents])
    pointers = np.cumsum([0, *sizes[:-1]]) * 2
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sizes), len(sizes) + 1)
    index = np.array(sizes, "<i4").tobytes() + pointers.astype("<i8").tobytes()
    prefix.with_suffix(".bin").write_bytes(ids.tobytes())
    prefix.with_suffix(".idx").write_bytes(head + index + np.arange(len(sizes) + 1, dtype="<i8").tobytes())


def write_llmc(file: Path, ids: Any, magic: int, version: int) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids)
    file.write_bytes(header.tobytes() + ids.tobytes())


@pytest.mark.parametrize("kind", ["megatron", "nanogpt", "llmc", "llmc32", "golden", "per_file"])
def test_rows_are_those_that_convert_writes_of_the_same_files(kind: str, tmp_path: Path) -> None:
    source, ids = tmp_path / "in", np.arange(1, 1000, dtype="<u2")
    options: dict[str, Any] = {}
    source.mkdir()
    if kind == "megatron":
        write_megatron(source / "m", [[i] * (i % 7) for i in range(1, 90)])
    elif kind == "golden":
        source = GOLDEN / "megatron"
    elif kind in ("nanogpt", "per_file"):
        write_bare(source, [100, 3, 51], suffix=".bin")
        options = {"token_dtype": "uint16", "per_file": kind == "per_file"}
    elif kind == "llmc":
        write_llmc(source / "a.bin", ids, 20240520, 1)
        write_llmc(source / "b.bin", ids[:13], 20240520, 1)
    else:
        write_llmc(source / "a.bin", ids.astype("<u4") + 70_000, 20240801, 7)
    cutting = CutOptions(sequence_length=7, drop_tail=True, per_file=kind == "per_file")
    convert(source, tmp_path / "out", cut=cutting, progress=False)
    with open_dataset(tmp_path / "out") as copied, open_dataset(source, sequence_length=7, **options) as read:
        assert copied.token_dtype == read.token_dtype
        mine = [np.asarray(sample["tokens"]).tobytes() for sample in read]
        assert mine == [np.asarray(sample["tokens"]).tobytes() for sample in copied]


@pytest.mark.parametrize("name", ["m", "m.idx", "m.bin"])
def test_a_megatron_pair_is_found_by_each_of_its_names(name: str, tmp_path: Path) -> None:
    write_megatron(tmp_path / "m", [[1, 2, 3], [4, 5, 6, 7]])
    write_megatron(tmp_path / "other", [[9, 9, 9]])
    assert rows_of(tmp_path / name, sequence_length=3) == [[1, 2, 3], [4, 5, 6]]
    with pytest.raises(ShardError, match=r"has 2 Megatron indexes \(m.idx, other.idx\): name one"):
        open_dataset(tmp_path, sequence_length=3)


def test_a_pattern_names_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    parts = write_bare(tmp_path / "deep", [5, 6, 7])
    write_bare(tmp_path / "deep" / "more", [50])
    expected = cut(parts[1:], 4, per_file=False)
    options: dict[str, Any] = {"sequence_length": 4, "token_dtype": "uint16"}
    assert rows_of(f"{tmp_path}/*/part-00[12].npy", **options) == expected
    store = MemoryStore(fresh_url())
    put_folder(tmp_path, store)
    assert rows_of(f"{store.url}/*/part-00[12].npy", **options) == expected
    assert rows_of(f"{store.url}/deep", **options) == cut(parts, 4, per_file=False)


def test_a_file_may_be_called_like_a_pattern(tmp_path: Path) -> None:
    np.arange(8, dtype="<u2").tofile(tmp_path / "a[1].npy")
    options: dict[str, Any] = {"sequence_length": 4, "token_dtype": "uint16"}
    assert rows_of(tmp_path / "a[1].npy", **options) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_what_fills_no_row_is_reported(tmp_path: Path) -> None:
    write_bare(tmp_path, [10, 13])
    with pytest.warns(RuntimeWarning, match="3 of 23 tokens, at its end, fill no row of 4 and are left out"):
        open_dataset(tmp_path, sequence_length=4, token_dtype="uint16")
    with pytest.warns(RuntimeWarning, match="3 of 23 tokens, at the ends of its files"):
        open_dataset(tmp_path, sequence_length=4, token_dtype="uint16", per_file=True)


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


ZEROS = np.zeros(64, "<u2")
LLMC = np.array([20240520, 1, 64, *[0] * 253], "<i4").tobytes()


@pytest.mark.parametrize(
    ("data", "name", "dtype", "problem"),
    [
        (npy(ZEROS.reshape(8, 8)), "a.npy", None, "expected one axis of little-endian integers"),
        (npy(ZEROS.astype("f4")), "a.npy", None, "expected one axis of little-endian integers"),
        (npy(ZEROS.astype(">u2")), "a.npy", None, "expected one axis of little-endian integers"),
        (npy(ZEROS)[:-2], "a.npy", None, "states 64 tokens of uint16, but has 126 bytes"),
        (npy(ZEROS)[:40], "a.npy", None, "header of .* its writer did not finish"),
        (b"", "a.npy", None, "is empty: its writer did not finish"),
        (npy(ZEROS), "a.npy", "uint32", "states uint16 ids, not uint32"),
        (b"\x93NUMPY\x01\x00\xff\xff" + bytes(200), "a.npy", None, "header of 65,535 bytes"),
        (ZEROS.tobytes(), "a.npy", None, "does not state the type of its ids: give token_dtype"),
        (ZEROS.tobytes() + b"x", "a.bin", "uint16", "129 bytes of tokens, not whole uint16 ids"),
        (LLMC + bytes(126), "a.bin", None, "states 64 tokens of uint16, but holds 63"),
        (LLMC[:500], "a.bin", None, "ends after 500 bytes, inside its header"),
        (LLMC[:4] + b"\2" + LLMC[5:] + bytes(128), "a.bin", None, "has version 2 of its format"),
        (b"MMIDIDX\0\0" + bytes(40), "a.idx", None, "has version 0"),
        (b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1 << 40, 2), "a.idx", None, "cut short or damaged"),
        (b"TNTIDX\0\0" + bytes(40), "a.idx", None, "of the old cached or lazy kind"),
    ],
)
def test_hostile_files_are_refused_with_what_is_wrong(
    data: bytes, name: str, dtype: str | None, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(128))
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ShardError, match=problem):
        open_dataset(tmp_path / name, sequence_length=4, token_dtype=dtype)


@pytest.mark.parametrize("suffix", ["bin", "npy"])
def test_an_empty_file_among_others_is_named(tmp_path: Path, suffix: str) -> None:
    for number in range(3):
        (tmp_path / f"{number}.{suffix}").write_bytes(ZEROS.tobytes() if number != 1 else b"")
    for path in (tmp_path, f"{tmp_path}/*.{suffix}"):
        with pytest.warns(RuntimeWarning, match=rf"1\.{suffix}: is empty .* its writer did not finish"):
            assert len(open_dataset(path, sequence_length=4, token_dtype="uint16")) == 32


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize("name", ["a[1].npy", "b*.npy", "c?d.npy", "below[2]/e[0-9].npy"])
def test_a_file_whose_literal_name_is_that_of_a_pattern_is_that_file(
    tmp_path: Path, name: str, is_local: bool
) -> None:
    url = str(tmp_path) if is_local else fresh_url()
    store = open_store(url)
    store.put(name, npy(ZEROS))
    store.put("a1.npy", npy(ZEROS[:32]))
    store.put("b1.npy", npy(ZEROS[:32]))
    with open_dataset(f"{url}/{name}", sequence_length=4) as dataset:
        assert len(dataset) == 16
    with open_dataset(f"{url}/[a]?.npy", sequence_length=4) as dataset:
        assert len(dataset) == 8


def test_misuse_is_explained(tmp_path: Path) -> None:
    write_bare(tmp_path / "a", [50])
    (tmp_path / "a" / "x.bin").write_bytes(bytes(8))
    with pytest.raises(ShardError, match=r"has token ids without rows: .*sequence_length=2048"):
        open_dataset(tmp_path / "a" / "part-000.npy")
    with pytest.raises(ShardError, match=r"has .bin and .npy files: name one kind"):
        open_dataset(tmp_path / "a", sequence_length=4)
    with pytest.raises(ShardError, match="holds no files of tokens"):
        open_dataset(tmp_path, sequence_length=4)
    convert(
        tmp_path / "a" / "x.bin",
        tmp_path / "mds",
        cut=CutOptions(sequence_length=2, drop_tail=True),
        progress=False,
    )
    with pytest.raises(ShardError, match="has rows of 2, not of 4 tokens"):
        open_dataset(tmp_path / "mds", sequence_length=4)
    for name in ("train.bin", "val.bin"):
        (tmp_path / name).write_bytes(bytes(64))
    with pytest.raises(ShardError, match="both training and validation"):
        open_dataset(tmp_path, sequence_length=4, token_dtype="uint16")
    with pytest.raises(ValueError, match="sequence_length must be from 1"):
        open_dataset(tmp_path, sequence_length=0)


def test_the_fingerprint_is_that_of_copies_and_not_of_other_data(tmp_path: Path) -> None:
    def fingerprint(where: Path | str, length: int = 4, dtype: str = "uint32") -> str:
        with open_dataset(where, sequence_length=length, token_dtype=dtype) as dataset:
            return dataset.fingerprint

    write_bare(tmp_path / "a", [30_000, 30_000], "uint32")
    store = MemoryStore(fresh_url())
    put_folder(tmp_path / "a", store)
    first = fingerprint(tmp_path / "a")
    assert fingerprint(store.url) == first
    os.utime(tmp_path / "a" / "part-000.npy", (1, 1))
    assert fingerprint(tmp_path / "a") == first
    others = {fingerprint(tmp_path / "a", 8), fingerprint(tmp_path / "a", 8, "uint16")}
    for place in (0, 100_000, 119_996):  # the head, one of the places between, the end
        data = bytearray((tmp_path / "a" / "part-001.npy").read_bytes())
        data[place] ^= 1
        (tmp_path / "a" / "part-001.npy").write_bytes(data)
        if place != 100_000:  # whether that is looked at is arithmetic, not a promise
            others.add(fingerprint(tmp_path / "a"))
    assert first not in others
    assert len(others) == 4


def test_a_file_that_is_replaced_while_it_is_open_is_noticed(tmp_path: Path) -> None:
    write_bare(tmp_path, [32, 32])
    store = MemoryStore(fresh_url())
    put_folder(tmp_path, store)
    options: dict[str, Any] = {"sequence_length": 4, "token_dtype": "uint16"}
    local, remote = open_dataset(tmp_path, **options), open_dataset(store.url, **options)
    assert local[0]["tokens"].tolist() == remote[0]["tokens"].tolist()  # type: ignore[attr-defined]
    data = bytes(reversed((tmp_path / "part-001.npy").read_bytes()))
    (tmp_path / "new").write_bytes(data)
    os.utime(tmp_path / "new", (1, 1))
    (tmp_path / "new").rename(tmp_path / "part-001.npy")
    store.put("part-001.npy", data)
    with pytest.raises(ShardError, match=r"part-001.npy: was replaced after its dataset was opened"):
        local[15]
    with pytest.raises(ObjectChangedError):
        remote[15]


def test_every_range_of_a_range_is_its_bytes(tmp_path: Path) -> None:
    below = MemoryStore(fresh_url())
    data = [bytes(range(10)), bytes(range(10, 13)), bytes(range(13, 33))]
    for number, content in enumerate(data):
        below.put(str(number), content)
    store = RangeStore(below)
    name = name_of([Piece("0", 7, 10), Piece("1", 0, 3), Piece("2", 0, 5)])
    whole = bytes(range(7, 18))
    info = store.head(name)
    assert (info.bytes, store.get(name)) == (len(whole), whole)
    for start in range(len(whole)):
        for stop in range(start + 1, len(whole) + 1):
            with store.open(name, start, stop, version=info.version) as body:
                assert (body.info, body.read()) == (info, whole[start:stop])
    below.put("1", b"xyz")
    for start, stop in ((0, 11), (4, 5)):
        with pytest.raises(ObjectChangedError):
            store.get(name, start, stop, version=info.version)
    with pytest.raises(StoreError, match="ends before this range does"):
        store.get(name_of([Piece("1", 0, 4)]))
    with pytest.raises(StoreError, match="read-only"):
        store.put(name, b"")


@pytest.mark.parametrize("fault", ["reset", "short", "error", "throttle"])
@pytest.mark.parametrize("after_bytes", [0, 1, 3])
def test_a_range_over_several_files_survives_broken_connections(fault: Fault, after_bytes: int) -> None:
    below = MemoryStore(fresh_url())
    for number in range(3):
        below.put(str(number), bytes(range(10 * number, 10 * number + 10)))
    rules = [FaultRule(fault=fault, operation="open", after_bytes=after_bytes, probability=0.5, count=9)]
    store = ResilientStore(RangeStore(FaultyStore(below, rules, seed=5)), quick_policy())
    whole = [*range(6, 10), *range(10, 20), *range(20, 25)]
    name = name_of([Piece("0", 6, 10), Piece("1", 0, 10), Piece("2", 0, 5)])
    for start, stop in ((0, 19), (2, 18), (5, 9), (12, 19)):
        assert [*store.get(name, start, stop)] == whole[start:stop]
    assert store.metrics.snapshot().retries or store.metrics.snapshot().resumed_bodies


def test_a_dataset_of_ranges_is_used_as_any_other(tmp_path: Path) -> None:
    expected = cut(write_bare(tmp_path, [41, 40]), 8, per_file=False)
    with open_dataset(tmp_path, sequence_length=8, token_dtype="uint16") as dataset:
        assert np.array_equal(dataset[:].to_numpy()["tokens"], expected)
        assert (len(dataset), dataset.sequence_length, str(dataset.token_dtype)) == (10, 8, "uint16")
        assert dataset.manifest.shard_samples.tolist() == [5, 1, 4]
        name = dataset.manifest.shards[1].raw.basename
        assert dataset.store.get(name) == np.array(expected[5], "<u2").tobytes()
    copy = pickle.loads(pickle.dumps(dataset))
    assert np.array_equal(copy[5]["tokens"], expected[5])
