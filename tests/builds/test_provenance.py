"""From a token to its raw record and from a document to its rows, exactly, after publication too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardkit.errors import BuildError
from shardkit.formats.provenance import PROVENANCE_SCHEMA
from shardkit.hashing import keyed_hashes
from shardkit.tokens.packing import Placement, pack_best_fit
from shardkit.writers.rows.documents import document_ids
from shardkit.writers.stages import provenance as module
from shardkit.writers.stages.provenance import write_provenance
from shardkit.writers.stages.tokenize import SPILL_SCHEMA
from support.plain_provenance import documents_at, rows_of
from support.small_dataset import renumbered

LENGTH = 32
SEED = 5


def part(file: str, count: int, seed: int) -> tuple[Placement, npt.NDArray[np.int64], pa.Table]:
    """A packed partition of `count` documents: placement, shard starts, documents in shuffled order."""
    ids = np.array(document_ids(file, range(count)), object)
    hashes = keyed_hashes(list(ids), SEED, "shuffle")
    order = np.argsort(hashes)
    lengths = np.random.default_rng(seed).integers(2, 3 * LENGTH, count)
    columns: dict[str, Any] = {
        "hash": hashes[order],
        "document_id": pa.array(ids[order].tolist(), pa.binary(16)),
        "tokens": lengths,
        "copies": 1 + order.astype(np.int32) % 3,
        "source": [seed] * count,
        "file": [file] * count,
        "record": order.astype(np.int64),
        "id": [f"id-{i}" for i in order],
        "url": [None if i % 2 else f"https://example.org/{i}" for i in order],
        "metadata": [None] * count,
    }
    placement = pack_best_fit(lengths, LENGTH)
    placement = placement.moved(np.random.default_rng(seed).permutation(placement.rows))
    starts = np.array([placement.rows * k // 3 for k in range(4)])
    return placement, starts, pa.table(columns, schema=SPILL_SCHEMA)


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two partitions of three shards each, published, in row groups of 16 pieces."""
    monkeypatch.setattr(module, "ROW_GROUP_PIECES", 16)
    (tmp_path / "provenance").mkdir()
    for k in range(2):
        placement, starts, documents = part(f"{k}.jsonl", 80, k)
        write_provenance(tmp_path / f"{k}", placement, starts, documents, seed=SEED)
        renumbered(tmp_path / f"{k}", tmp_path / "provenance" / f"part-{k:05d}.parquet", 3 * k)
    return tmp_path


def test_every_token_leads_to_its_document_and_padding_to_none(dataset: Path) -> None:
    for k in range(2):
        placement, starts, documents = part(f"{k}.jsonl", 80, k)
        owner = np.full((placement.rows, LENGTH), -1)
        for d, n, r, c in zip(
            placement.document, placement.length, placement.row, placement.column, strict=True
        ):
            owner[r, c : c + n] = d
        for row in range(0, placement.rows, 7):
            shard = int(np.searchsorted(starts, row, side="right")) - 1
            place = (3 * k + shard, row - int(starts[shard]))
            pieces = documents_at(dataset, *place)
            assert [p.token_start for p in pieces] == sorted(p.token_start for p in pieces)
            for token in (0, 1, LENGTH // 2, LENGTH - 1):
                found = documents_at(dataset, *place, token)
                if owner[row, token] < 0:
                    assert found == []
                    continue
                [piece] = found
                line = documents.slice(int(owner[row, token]), 1).to_pylist()[0]
                assert (piece.shard, piece.row) == place
                for name in ("document_id", "source", "file", "record", "id", "url", "metadata"):
                    assert getattr(piece, name) == line[name]
                assert piece in pieces


def test_every_document_leads_to_all_its_tokens_in_order(dataset: Path) -> None:
    for k in range(2):
        _, _, documents = part(f"{k}.jsonl", 80, k)
        for line in documents.to_pylist()[::5]:
            pieces = rows_of(dataset, line["document_id"])
            done = 0
            for piece in pieces:
                assert piece.document_start == done
                assert piece in documents_at(dataset, piece.shard, piece.row)
                done += piece.token_end - piece.token_start
            assert done == line["tokens"]


def test_renumbering_changes_the_shard_and_nothing_else(tmp_path: Path) -> None:
    write_provenance(tmp_path / "a", *part("a.jsonl", 50, 1), seed=SEED)
    renumbered(tmp_path / "a", tmp_path / "b", 1000)
    before, after = pq.read_table(tmp_path / "a"), pq.read_table(tmp_path / "b")
    assert after.column("shard").to_pylist() == [s + 1000 for s in before.column("shard").to_pylist()]
    assert before.drop_columns("shard").equals(after.drop_columns("shard"), check_metadata=True)
    renumbered(tmp_path / "a", tmp_path / "same", 0)
    assert (tmp_path / "same").read_bytes() == (tmp_path / "a").read_bytes()


def test_lines_are_sorted_by_place_and_have_the_published_columns(tmp_path: Path) -> None:
    write_provenance(tmp_path / "a", *part("a.jsonl", 200, 1), seed=SEED)
    table = pq.read_table(tmp_path / "a")
    assert table.schema.equals(PROVENANCE_SCHEMA)
    places = list(zip(*(table.column(n).to_pylist() for n in ("shard", "row", "token_start")), strict=True))
    assert places == sorted(places)
    assert {shard for shard, _, _ in places} == {0, 1, 2}


def test_a_partition_without_documents_has_an_empty_table(tmp_path: Path) -> None:
    placement = pack_best_fit(np.zeros(0, np.int64), LENGTH)
    write_provenance(tmp_path / "a", placement, np.array([0]), SPILL_SCHEMA.empty_table(), seed=SEED)
    renumbered(tmp_path / "a", tmp_path / "b", 3)
    assert pq.read_table(tmp_path / "b").num_rows == 0


def test_a_foreign_table_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"shard": [1]}), tmp_path / "a")
    with pytest.raises(BuildError, match="a provenance table has"):
        renumbered(tmp_path / "a", tmp_path / "b", 1)
