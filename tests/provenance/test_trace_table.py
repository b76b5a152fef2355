"""Look-ups in provenance tables of many files: the same lines as the files, and no more read than needed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardkit.datasets.dataset import Dataset, open_dataset
from shardkit.datasets.provenance.outputs import Ranges, measure
from shardkit.datasets.provenance.search import Selection, UrlPatterns
from shardkit.datasets.provenance.table import COLUMNS, NoProvenanceError, ProvenanceTable
from shardkit.errors import ShardError
from shardkit.formats import mds
from shardkit.hashing import keyed_hashes
from shardkit.order.exclusions import Exclusions
from shardkit.tokens.packing import pack_best_fit
from shardkit.writers.rows.documents import document_ids
from shardkit.writers.stages import provenance
from shardkit.writers.stages.provenance import write_provenance
from shardkit.writers.stages.tokenize import SPILL_SCHEMA
from support.small_dataset import renumbered

LENGTH, SEED = 16, 5
PARTS = (90, 0, 60, 0, 0, 75)  # documents of each partition: some have none


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset whose partitions have three shards each, with tables in row groups of 16 lines."""
    folder = tmp_path_factory.mktemp("tables")
    (folder / "provenance").mkdir()
    infos: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "ROW_GROUP_PIECES", 16)
        for part, count in enumerate(PARTS):
            placement, starts, documents = packed(part, count)
            write_provenance(folder / "made", placement, starts, documents, seed=SEED)
            renumbered(folder / "made", folder / "provenance" / f"part-{part:05d}.parquet", len(infos))
            for low, high in pairwise(starts.tolist()):
                rows = np.zeros((high - low, LENGTH), np.uint16)
                infos.append(mds.write_rows_shard(folder, f"shard.{len(infos):05d}.mds", rows))
    (folder / "made").unlink()
    mds.write_index(folder, infos)
    return folder


def packed(part: int, count: int) -> tuple[Any, Any, pa.Table]:
    """(placement, shard starts, documents) of a partition."""
    ids = np.array(document_ids(f"{part}.jsonl", range(count)), object)
    hashes = keyed_hashes(list(ids), SEED, "shuffle")
    order = np.argsort(hashes)
    lengths = np.random.default_rng(part).integers(2, 3 * LENGTH, count)
    columns: dict[str, Any] = {
        "hash": hashes[order],
        "document_id": pa.array(ids[order].tolist(), pa.binary(16)),
        "tokens": lengths,
        "copies": 1 + order.astype(np.int32) % 3,
        "source": [part] * count,
        "file": [f"in/{part}.jsonl"] * count,
        "record": order.astype(np.int64),
        "id": [f"id-{i}" for i in order],
        "url": [None if i % 5 == 0 else f"https://h{i % 3}.org/{part}/{i}" for i in order],
        "metadata": [None] * count,
    }
    placement = pack_best_fit(lengths, LENGTH)
    placement = placement.moved(np.random.default_rng(part).permutation(placement.rows))
    shards = 3 if count else 0
    starts = np.array([placement.rows * k // max(shards, 1) for k in range(shards + 1)])
    return placement, starts, pa.table(columns, schema=SPILL_SCHEMA)


@pytest.fixture
def dataset(folder: Path) -> Dataset:
    return open_dataset(folder)


@pytest.fixture
def lines(folder: Path, dataset: Dataset) -> list[dict[str, Any]]:
    """All lines of all files, with their rows' numbers."""
    found = [
        line for path in sorted((folder / "provenance").iterdir()) for line in pq.read_table(path).to_pylist()
    ]
    starts = dataset.manifest.shard_starts
    return [{"sample_id": int(starts[line["shard"]]) + line["row"], **line} for line in found]


def test_rows_lead_to_all_their_lines_in_order(dataset: Dataset, lines: list[dict[str, Any]]) -> None:
    table = ProvenanceTable(dataset)
    assert table.of_rows(range(len(dataset))).to_pylist() == lines
    rng = np.random.default_rng(1)
    for size in (1, 2, 7, 40):
        for _ in range(8):
            rows = rng.integers(0, len(dataset), size)
            expected = [line for line in lines if line["sample_id"] in set(rows.tolist())]
            assert table.of_rows(rows).to_pylist() == expected
    starts = dataset.manifest.shard_starts
    for row in [*starts[:-1].tolist(), *(starts[1:] - 1).tolist()]:  # files begin and end there
        assert ProvenanceTable(dataset).of_rows([row]).to_pylist() == [
            line for line in lines if line["sample_id"] == row
        ]
    assert table.of_rows([]).num_rows == 0
    assert table.of_rows([3], columns=("url",)).column_names == ["sample_id", "url"]
    with pytest.raises(IndexError, match="rows are 0 to"):
        table.of_rows([len(dataset)])


def test_searches_find_what_plain_filters_find(dataset: Dataset, lines: list[dict[str, Any]]) -> None:
    table = ProvenanceTable(dataset)
    ids = [line["document_id"] for line in lines[::37]]
    searches: list[tuple[Selection, Callable[[dict[str, Any]], bool]]] = [
        (Selection(documents=ids), lambda line: line["document_id"] in ids),
        (Selection(urls=UrlPatterns(["h1.org/2*"])), lambda line: "//h1.org/2" in str(line["url"])),
        (Selection(sources=[0, 5]), lambda line: line["source"] in (0, 5)),
        (Selection(files=["2.jsonl"]), lambda line: line["file"] == "in/2.jsonl"),
        (Selection(files=["in/*"]), lambda line: True),
        (
            Selection(documents=ids, urls=UrlPatterns(["*.h2.org"]), sources=[5], files=["*5.jsonl"]),
            lambda line: line["source"] == 5 and (line["document_id"] in ids or "//h2." in str(line["url"])),
        ),
        (Selection(), lambda line: True),
    ]  # fmt: skip
    for selection, is_wanted in searches:
        found = [line for some in table.search(selection) for line in some.to_pylist()]
        assert found == [line for line in lines if is_wanted(line)]
    looked_at: list[int] = []
    list(table.search(Selection(sources=[2]), looked_at.append))
    assert sum(looked_at) == table.lines() == len(lines)


def test_documents_at_the_edges_of_a_files_hashes_are_found(dataset: Dataset) -> None:
    table = ProvenanceTable(dataset)
    for part, count in enumerate(PARTS):
        if count:
            ids = packed(part, count)[2].column("document_id").to_pylist()  # sorted by hash
            for one in (ids[0], ids[-1]):
                assert sum(some.num_rows for some in table.search(Selection(documents=[one])))


def test_what_leaves_with_rows_is_counted_in_any_number_of_blocks(
    dataset: Dataset, lines: list[dict[str, Any]]
) -> None:
    gone = Exclusions([(1, 3), (9, 40), (41, 42), (60, 75)])
    rows = {row for begin, end in gone.to_list() for row in range(begin, end)}
    there = [line for line in lines if line["sample_id"] in rows]
    meant = sorted({line["document_id"] for line in there[::3]})
    report = measure(dataset, ProvenanceTable(dataset), gone, np.array(meant, "S16"), rows_at_once=7)
    for is_meant, tokens in ((True, report.removed_tokens), (False, report.other_tokens)):
        mine = [line for line in there if (line["document_id"] in meant) == is_meant]
        assert tokens == sum(line["token_end"] - line["token_start"] for line in mine)
    assert report.other_documents == len({line["document_id"] for line in there} - set(meant))
    assert (report.rows, report.ranges) == (len(rows), 4)


def test_no_more_is_read_than_may_hold_the_answer(
    dataset: Dataset, lines: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[tuple[int, tuple[str, ...]]] = []
    plain = pq.ParquetFile.read_row_group

    def counted(self: Any, group: int, columns: Any = None, **options: Any) -> Any:
        reads.append((group, tuple(columns)))
        return plain(self, group, columns=columns, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    table = ProvenanceTable(dataset)
    groups = -(-len(lines) // 16)
    table.of_rows([len(dataset) // 2])
    assert len(reads) <= 6 < groups
    reads.clear()
    list(table.search(Selection(documents=[lines[0]["document_id"]])))
    assert len({read for read in reads if read[1] == ("document_id",)}) <= -(-90 * 2 // 16)
    reads.clear()
    list(table.search(Selection(sources=[5])))
    assert {columns for _, columns in reads} == {("source",), ("shard", "row"), COLUMNS}
    assert len(reads) < 3 * groups / 2, "statistics pass over the row groups of other sources"


def test_tables_that_are_damaged_missing_or_of_another_dataset_are_named(
    folder: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.glob("*.*"):
        (copy / path.name).write_bytes(path.read_bytes())
    with pytest.raises(NoProvenanceError, match="has no provenance tables"):
        ProvenanceTable(open_dataset(copy))
    (copy / "provenance").mkdir()
    for path in (folder / "provenance").iterdir():
        (copy / "provenance" / path.name).write_bytes(path.read_bytes())
    last = copy / "provenance" / "part-00005.parquet"
    whole = last.read_bytes()
    for bad in (b"", b"PAR1", whole[:-1], whole[:-200] + bytes(8) + whole[-192:]):
        last.write_bytes(bad)
        with pytest.raises(ShardError, match=r"part-00005.parquet: cannot be read"):
            ProvenanceTable(open_dataset(copy)).lines()
    last.write_bytes(whole[:4] + bytes(len(whole) // 2) + whole[4 + len(whole) // 2 :])
    with pytest.raises(ShardError, match="cannot be read"):
        list(ProvenanceTable(open_dataset(copy)).search(Selection()))
    pq.write_table(pa.table({"shard": [1]}), last)
    with pytest.raises(ShardError, match="has no column 'row'"):
        ProvenanceTable(open_dataset(copy)).lines()
    renumbered(folder / "provenance" / "part-00005.parquet", last, 5)
    with pytest.raises(ShardError, match="it belongs to another dataset"):
        ProvenanceTable(open_dataset(copy)).lines()


@pytest.mark.parametrize(
    ("column", "value"),
    [("shard", 18), ("shard", -1), ("row", -1), ("row", 1 << 20), ("url", b"\xec\x28")],
)
def test_lines_that_no_build_writes_are_errors(folder: Path, tmp_path: Path, column: str, value: Any) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    last = tmp_path / "copy" / "provenance" / "part-00005.parquet"
    table = pq.read_table(last)
    at = table.schema.get_field_index(column)
    field = pa.field(column, pa.binary()) if column == "url" else table.schema.field(column)
    values = table.column(column).cast(field.type).to_pylist()
    values[3] = value
    changed = table.set_column(at, field, pa.array(values, field.type))
    pq.write_table(changed, last, row_group_size=16, write_statistics=False)
    searched = ProvenanceTable(open_dataset(tmp_path / "copy")).search(Selection())
    with pytest.raises(ShardError, match=r"another dataset|'url' is of type binary"):
        list(searched)


def test_ranges_are_those_of_the_rows_in_any_order() -> None:
    rng = np.random.default_rng(3)
    ranges, rows = Ranges(), set[int]()
    for _ in range(700):
        some = rng.integers(0, 5000, rng.integers(0, 9))
        ranges.add(some)
        rows |= set(some.tolist())
    assert ranges.exclusions() == Exclusions.of(sorted(rows))
    assert Ranges().exclusions().count == 0
