"""Other libraries' files, as those libraries wrote them (tests/golden/convert), become the rows they read."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardkit import open_dataset
from shardkit.errors import ShardError
from shardkit.tools.convert import CutOptions, OutputOptions, convert
from shardkit.tools.convert.read_litdata import LitdataSamples, litdata_source
from shardkit.tools.convert.source import DTYPES

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "convert"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
KEEP = CutOptions(keep_lengths=True, drop_empty=True)


def rows(folder: Path) -> list[Any]:
    """The tokens of all rows, as lists."""
    return [np.asarray(sample["tokens"]).tolist() for sample in open_dataset(folder)]


def flat(documents: list[list[int]], eos: int | None = None) -> list[int]:
    ends = [] if eos is None else [eos]
    return [t for document in documents if document for t in document + (ends if document[-1] != eos else [])]


def test_documents_of_megatron_keep_their_lengths(tmp_path: Path) -> None:
    done = convert(GOLDEN / "megatron", tmp_path / "out", cut=KEEP, progress=False)
    assert rows(tmp_path / "out") == [document for document in EXPECTED["megatron"] if document]
    assert done.counts["documents"] == 6
    assert done.counts["documents_dropped"] == 1
    card = json.loads((tmp_path / "out" / "dataset.json").read_text())
    names = [file["name"] for file in card["converted_from"]["files"]]
    assert names == ["megatron.bin", "megatron.idx"]


@pytest.mark.parametrize("name", ["megatron", "megatron.bin", "megatron.idx"])
def test_documents_of_megatron_are_cut_with_an_end_each(name: str, tmp_path: Path) -> None:
    cut = CutOptions(sequence_length=7, eos=60_001)
    done = convert(GOLDEN / name, tmp_path / "out", cut=cut, progress=False)
    stream = flat(EXPECTED["megatron"], 60_001)
    padded = stream + [60_001] * (-len(stream) % 7)
    assert rows(tmp_path / "out") == np.reshape(padded, (-1, 7)).tolist()
    assert done.counts["eos_added"] == 5
    assert done.counts["padding"] == len(padded) - len(stream)
    assert dict(done.columns) == {"tokens": "ndarray:uint16:7"}


def test_an_empty_document_is_not_left_out_in_silence(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"megatron\.bin: document 1: is empty.*--drop-empty"):
        convert(GOLDEN / "megatron", tmp_path / "out", cut=CutOptions(keep_lengths=True), progress=False)
    assert not (tmp_path / "out").exists()


def _patched(tmp_path: Path, patch: Callable[[bytearray], None], suffix: str) -> Path:
    for ending in (".bin", ".idx"):
        shutil.copy(GOLDEN / f"megatron{ending}", tmp_path / f"m{ending}")
    file = tmp_path / f"m{suffix}"
    data = bytearray(file.read_bytes())
    patch(data)
    file.write_bytes(data)
    return tmp_path / "m"


def _put(offset: int, format: str, value: int) -> Callable[[bytearray], None]:
    return lambda data: struct.pack_into(format, data, offset, value)


def _cut(count: int) -> Callable[[bytearray], None]:
    def patch(data: bytearray) -> None:
        del data[-count:]

    return patch


SIZES, POINTERS, MARKS = 34, 34 + 4 * 7, 34 + 12 * 7


@pytest.mark.parametrize(
    ("suffix", "patch", "message"),
    [
        (".idx", _cut(1), r"m\.idx: has 173 bytes; 7 sequences and 7 document marks take 174"),
        (".idx", _cut(150), r"m\.idx: ends after 24 bytes, inside its header"),
        (".idx", _put(0, "<B", 0), r"m\.idx: byte 0: is not a Megatron index"),
        (".idx", _put(9, "<Q", 2), "has version 2"),
        (".idx", _put(17, "<B", 6), "states float64, not a dtype of tokens"),
        (".idx", _put(17, "<B", 77), "the unknown type 77"),
        (".idx", _put(18, "<Q", 1 << 60), r"m\.idx: has 174 bytes; 1,152,921,504,606,846,976 sequences"),
        (".idx", _put(SIZES + 4, "<i", -1), r"byte 38: sequence 1 has -1 tokens"),
        (".idx", _put(POINTERS + 16, "<q", 1 << 40), r"the pointer of sequence 2 is .*outside of the \.bin"),
        (".idx", _put(POINTERS + 16, "<q", -2), r"the pointer of sequence 2 is byte -2"),
        (".idx", _put(POINTERS + 16, "<q", 8), "the pointer of sequence 2 is byte 8 .*add up to 10"),
        (".idx", _put(MARKS, "<q", 1), "the first document begins at sequence 1"),
        (".idx", _put(MARKS + 16, "<q", 99), "document 2 begins at sequence 99, out of order or above 7"),
        (".idx", _put(MARKS + 16, "<q", 0), "document 2 begins at sequence 0, out of order"),
        (".idx", _put(MARKS + 48, "<q", 6), "the last document ends at sequence 6 of 7"),
        (".bin", _cut(2), r"m\.bin: has 82 bytes; the sizes in m\.idx add up to 84"),
    ],
)
def test_a_damaged_megatron_index_is_refused_with_its_place(
    suffix: str, patch: Callable[[bytearray], None], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ShardError, match=message):
        convert(_patched(tmp_path, patch, suffix), tmp_path / "out", cut=KEEP, progress=False)
    assert not (tmp_path / "out").exists()


def test_other_kinds_of_megatron_datasets_are_named(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"multimodal\.idx: .*a multimodal dataset holds more than tokens"):
        convert(GOLDEN / "multimodal", tmp_path / "out", progress=False)
    (tmp_path / "old.idx").write_bytes(b"TNTIDX\x00\x00" + bytes(100))
    (tmp_path / "old.bin").write_bytes(b"")
    with pytest.raises(ShardError, match="of the old cached or lazy kind"):
        convert(tmp_path / "old", tmp_path / "out", progress=False)


def test_litdata_items_are_documents(tmp_path: Path) -> None:
    convert(GOLDEN / "litdata_tokens", tmp_path / "out", cut=KEEP, progress=False)
    assert rows(tmp_path / "out") == EXPECTED["litdata_tokens"]["documents"]


@pytest.mark.parametrize("form", ["mds", "wds"])
def test_the_blocks_of_litdatas_loader_are_the_rows_of_each_chunk(form: Any, tmp_path: Path) -> None:
    cut = CutOptions(sequence_length=EXPECTED["litdata_tokens"]["block_size"], per_file=True, drop_tail=True)
    out = OutputOptions(format=form)
    done = convert(GOLDEN / "litdata_tokens", tmp_path / "out", cut=cut, output=out, progress=False)
    found = open_dataset(tmp_path / "out")
    name = found.token_column
    assert name is not None
    assert [np.asarray(s[name]).tolist() for s in found] == EXPECTED["litdata_tokens"]["blocks"]
    assert done.counts["tokens_dropped"] == done.counts["tokens_read"] - 16 * done.rows > 0


@pytest.mark.parametrize("form", ["mds", "wds"])
def test_litdata_leaves_become_columns(form: Any, tmp_path: Path) -> None:
    convert(GOLDEN / "litdata_items", tmp_path / "a", output=OutputOptions(format=form), progress=False)
    convert(tmp_path / "a", tmp_path / "mds", progress=False)
    found = []
    for sample in open_dataset(tmp_path / "mds"):
        plain = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in sample.items()}
        plain["blob"] = sample["blob"].hex()  # type: ignore[attr-defined]
        plain["flag"] = bool(plain["flag"])
        found.append(plain)
    assert found == EXPECTED["litdata_items"]


@pytest.mark.parametrize("level", ["zstd", "default", "batch", "sample"])
def test_litdata_chunks_may_be_compressed_as_a_whole_by_items_or_by_batches_of_them(
    level: str, tmp_path: Path
) -> None:
    convert(GOLDEN / f"litdata_{level}", tmp_path / "out", progress=False)
    found = [(s["number"], np.asarray(s["ids"]).tolist()) for s in open_dataset(tmp_path / "out")]
    assert found == [(n, list(range(n + 1))) for n in range(6)]


@pytest.mark.parametrize("level", ["default", "batch", "sample"])
def test_damage_of_a_compressed_litdata_chunk_is_an_error_or_gives_the_same_items(
    level: str, tmp_path: Path
) -> None:
    """Each byte of a chunk changed in turn, and the chunk cut anywhere."""
    source = tmp_path / "chunks"
    shutil.copytree(GOLDEN / f"litdata_{level}", source)
    file = source / "chunk-0-0.bin"
    whole = file.read_bytes()
    damaged = [whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :] for at in range(0, len(whole), 5)]
    for data in [*damaged, *(whole[:at] for at in range(0, len(whole), 29))]:
        file.write_bytes(data)
        found = litdata_source(source, "mds")
        assert isinstance(found, LitdataSamples)
        with suppress(ShardError):
            [*found.samples()]


def test_litdata_folders_that_cannot_be_converted_are_refused_by_name(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "litdata_batch", tmp_path / "litdata_other")
    index = tmp_path / "litdata_other" / "index.json"
    index.write_text(index.read_text().replace('"compression_level": "batch"', '"compression_level": "x"'))
    with pytest.raises(ShardError, match="compression_level 'x': only chunk, batch"):
        convert(tmp_path / "litdata_other", tmp_path / "other", progress=False)
    index.write_text(index.read_text().replace('"encryption": null', '"encryption": {"level": "chunk"}'))
    with pytest.raises(ShardError, match="encrypted chunks"):
        convert(tmp_path / "litdata_other", tmp_path / "other", progress=False)
    for name, message in (("litdata_ipc", "ipc_compression 'zstd'"), ("litdata_nested", "not flat dicts")):
        with pytest.raises(ShardError, match=message):
            convert(GOLDEN / name, tmp_path / name, progress=False)


@pytest.mark.parametrize(
    ("file", "patch", "message"),
    [
        ("chunk-0-0.bin", _cut(1), r"chunk-0-0\.bin: .*its offsets do not run from"),
        ("chunk-0-0.bin", _cut(10_000), r"chunk-0-0\.bin: has 0 bytes, too few for the offsets"),
        ("chunk-0-0.bin", _put(0, "<I", 9999), r"has 9,999 items, but the index records"),
        ("chunk-0-0.bin", _put(8, "<I", 1 << 31), "its offsets do not run from"),
        ("chunk-0-0.bin", _put(8, "<I", 41), "size is not a multiple of a uint16"),
        ("index.json", _cut(9), r"index\.json: is not JSON"),
    ],
)
def test_a_damaged_litdata_folder_is_refused_with_its_place(
    file: str, patch: Callable[[bytearray], None], message: str, tmp_path: Path
) -> None:
    shutil.copytree(GOLDEN / "litdata_tokens", tmp_path / "chunks")
    data = bytearray((tmp_path / "chunks" / file).read_bytes())
    patch(data)
    (tmp_path / "chunks" / file).write_bytes(data)
    with pytest.raises(ShardError, match=message):
        convert(tmp_path / "chunks", tmp_path / "out", cut=KEEP, progress=False)
    assert not (tmp_path / "out").exists()


def llm_c(path: Path, tokens: np.ndarray[Any, Any], magic: int = 20240520, version: int = 1) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    path.write_bytes(header.tobytes() + tokens.tobytes())


def test_streams_of_several_files_go_on_from_one_to_the_next(tmp_path: Path) -> None:
    tokens = np.arange(103, dtype=np.uint16)
    llm_c(tmp_path / "fine_train_000.bin", tokens[:50])
    llm_c(tmp_path / "fine_train_001.bin", tokens[50:])
    out, pattern = tmp_path / "out", str(tmp_path / "fine_train_*.bin")
    done = convert(pattern, out, cut=CutOptions(sequence_length=10, pad=65_535), progress=False)
    assert np.ravel(rows(out)).tolist() == [*range(103), *[65_535] * 7]
    assert done.counts["padding"] == 7
    cut = CutOptions(sequence_length=20, per_file=True, drop_tail=True)
    done = convert(pattern, out, cut=cut, replace=True, progress=False)
    assert np.ravel(rows(out)).tolist() == [*range(40), *range(50, 90)]
    assert done.counts["tokens_dropped"] == 23


def test_bare_and_wide_streams_are_known(tmp_path: Path) -> None:
    cut = CutOptions(sequence_length=4, drop_tail=True)
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "train.bin")
    convert(tmp_path / "train.bin", tmp_path / "bare", cut=cut, progress=False)
    assert rows(tmp_path / "bare") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    llm_c(tmp_path / "llama.bin", np.arange(100_000, 100_008, dtype=np.uint32), 20240801, 7)
    convert(tmp_path / "llama.bin", tmp_path / "wide", cut=cut, progress=False)
    assert rows(tmp_path / "wide") == [[*range(100_000, 100_004)], [*range(100_004, 100_008)]]
    np.arange(70_000, 70_008, dtype=np.uint32).tofile(tmp_path / "raw.bin")
    wide = CutOptions(sequence_length=4, drop_tail=True, source_dtype="uint32")
    convert(tmp_path / "raw.bin", tmp_path / "raw", cut=wide, progress=False)
    assert rows(tmp_path / "raw")[1] == [70_004, 70_005, 70_006, 70_007]


def test_streams_that_lie_are_refused(tmp_path: Path) -> None:
    cut = CutOptions(sequence_length=4, drop_tail=True)
    good = np.arange(8, dtype=np.uint16)
    llm_c(tmp_path / "long.bin", good)
    (tmp_path / "long.bin").write_bytes((tmp_path / "long.bin").read_bytes()[:-2])
    llm_c(tmp_path / "new.bin", good, version=3)
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "head.bin").write_bytes(struct.pack("<3i", 20240520, 1, 0))
    for name, message in (
        ("long", "states 8 tokens of uint16, but holds 7"),
        ("new", "has version 3"),
        ("odd", "has 3 bytes, not a whole number of uint16"),
        ("head", "ends after 12 bytes, inside its header"),
    ):
        with pytest.raises(ShardError, match=message):
            convert(tmp_path / f"{name}.bin", tmp_path / "out", cut=cut, progress=False)
    good.tofile(tmp_path / "train.bin")
    with pytest.raises(ShardError, match="does not record where documents end: give --sequence-length"):
        convert(tmp_path / "train.bin", tmp_path / "out", progress=False)
    (tmp_path / "both").mkdir()
    for name in ("train.bin", "val.bin"):
        good.tofile(tmp_path / "both" / name)
    with pytest.raises(ShardError, match="both training and validation files"):
        convert(tmp_path / "both", tmp_path / "out", cut=cut, progress=False)


def test_saved_datasets_are_read_in_their_order(tmp_path: Path) -> None:
    done = convert(GOLDEN / "saved", tmp_path / "out", progress=False)
    assert rows(tmp_path / "out") == EXPECTED["saved"]
    assert list(done.left_out) == ["attention_mask"]
    with pytest.raises(ShardError, match=r"has splits \(train\): give the path of one"):
        convert(GOLDEN / "splits", tmp_path / "no", progress=False)
    convert(GOLDEN / "splits" / "train", tmp_path / "ragged", cut=KEEP, progress=False)
    assert rows(tmp_path / "ragged") == EXPECTED["splits"]
    with pytest.raises(
        ShardError, match="document 1 has 1 tokens, but document 0 has 3: choose --sequence-length"
    ):
        convert(GOLDEN / "splits" / "train", tmp_path / "no", progress=False)


LISTS = {
    "list": pa.list_(pa.int32()),
    "large": pa.large_list(pa.uint16()),
    "fixed": pa.list_(pa.int64(), 4),
}


@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("suffix", ["parquet", "arrow", "stream.arrow"])
def test_lists_of_any_kind_are_read_from_any_file(kind: str, suffix: str, tmp_path: Path) -> None:
    values = np.arange(4 * 11).reshape(11, 4).tolist()
    # A slice, in batches of three: offsets do not begin at zero.
    table = pa.table({"ids": pa.array([[9] * 4, *values], LISTS[kind])}).slice(1)
    path = tmp_path / f"x.{suffix}"
    if suffix == "parquet":
        pq.write_table(table, path, row_group_size=3)
    else:
        new = pa.ipc.new_file if suffix == "arrow" else pa.ipc.new_stream
        with new(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    done = convert(path, tmp_path / "out", progress=False)
    assert rows(tmp_path / "out") == values
    # The statistics of Parquet prove that the ids are small.
    narrow = suffix == "parquet" or kind == "large"
    assert dict(done.columns) == {"tokens": f"ndarray:{DTYPES[not narrow]}:4"}


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([[1], None, [2]], pa.list_(pa.int32())), r"x\.parquet: row 1 is null"),
        (pa.array([[1], [2], [3, None]], pa.list_(pa.int32())), "row 2 has a null token"),
        (pa.array([[[1]]], pa.list_(pa.list_(pa.int32()))), "has no column of lists of integers"),
        (pa.array(["text"]), r"has no column of lists of integers: ids \(string\)"),
        (pa.array([[1], [-7]], pa.list_(pa.int32())), "document 1, token 0: -7 is not a token id"),
        (pa.array([[1], [1 << 40]], pa.list_(pa.int64())), "document 1, token 0: 1,099,511,627,776 does not"),
    ],
)
def test_what_is_no_list_of_tokens_is_refused_with_its_row(
    column: pa.Array, message: str, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"ids": column}), tmp_path / "x.parquet")
    with pytest.raises(ShardError, match=message):
        convert(tmp_path / "x.parquet", tmp_path / "out", cut=KEEP, progress=False)
    assert not (tmp_path / "out").exists()


def test_a_damaged_arrow_file_is_refused(tmp_path: Path) -> None:
    source = (GOLDEN / "saved" / "data-00000-of-00002.arrow").read_bytes()
    for damaged, message in (
        (source[:700], "has no end-of-stream mark"),
        (source[:-8], "has no end-of-stream mark"),
        (source[:700] + source[-8:], "is damaged or truncated"),
        (b"", "has no end-of-stream mark"),
    ):
        (tmp_path / "x.arrow").write_bytes(damaged)
        with pytest.raises(ShardError, match=rf"x\.arrow: {message}"):
            convert(tmp_path / "x.arrow", tmp_path / "out", progress=False)
    # Offsets of a list that go back.
    offsets = pa.py_buffer(np.array([0, 2, 1, 3], "<i4").tobytes())
    column = pa.Array.from_buffers(
        pa.list_(pa.int32()), 3, [None, offsets], children=[pa.array([1, 2, 3], pa.int32())]
    )
    table = pa.table({"ids": column})
    with pa.ipc.new_stream(str(tmp_path / "x.arrow"), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(ShardError, match=r"x\.arrow: is damaged or truncated"):
        convert(tmp_path / "x.arrow", tmp_path / "out", cut=KEEP, progress=False)
    table = pa.table({"ids": pa.array([[1 << 20, 2, 3]] * 50, pa.list_(pa.int32()))})
    pq.write_table(
        table, tmp_path / "x.parquet", write_page_checksum=True, compression="none", use_dictionary=False
    )
    data = (tmp_path / "x.parquet").read_bytes()
    (tmp_path / "x.parquet").write_bytes(data.replace(b"\2\0\0\0\3\0\0\0", b"\2\0\0\0\4\0\0\0", 1))
    with pytest.raises(ShardError, match=r"x\.parquet: is damaged .*CRC checksum verification failed"):
        convert(tmp_path / "x.parquet", tmp_path / "out", cut=KEEP, progress=False)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(ShardError, match=r"x\.parquet: cannot be read"):
        convert(tmp_path / "x.parquet", tmp_path / "out", progress=False)
