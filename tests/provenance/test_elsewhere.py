"""DuckDB and pandas read which document each token is from: an export needs nothing else of the dataset."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pytest

from shardkit.cli.main import main
from shardkit.datasets.dataset import open_dataset
from support.explored_build import make_explored

BY_SOURCE = """
    SELECT source, count(DISTINCT document_id), sum(token_end - token_start)
    FROM '{}' GROUP BY source ORDER BY source
"""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, inline_builds: None) -> Path:
    return make_explored(tmp_path_factory.mktemp("elsewhere") / "corpus")


def rows_of(query: str) -> list[tuple[Any, ...]]:
    found = duckdb.sql(query)
    assert found is not None
    return found.fetchall()


def exported(out: Path, file: Path) -> Path:
    assert main(["trace", str(out), "--export", str(file), "--excerpt", "0"]) == 0
    return file


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "csv"])
def test_sources_and_ids_are_text_in_an_export_of_all_documents(
    out: Path, tmp_path: Path, ending: str
) -> None:
    file = exported(out, tmp_path / f"all.{ending}")
    with open_dataset(out) as dataset:
        assert dataset.card is not None
        known = [(one.source, one.funnel.kept.documents, one.tokens) for one in dataset.card.inputs]
    assert rows_of(BY_SOURCE.format(file)) == sorted(known)
    read = {
        "parquet": pd.read_parquet,
        "csv": pd.read_csv,
        "jsonl": lambda name: pd.read_json(name, lines=True),
    }[ending]
    table = read(file)
    table["tokens"] = table.token_end - table.token_start
    found = table.groupby("source").agg({"document_id": "nunique", "tokens": "sum"})
    assert list(found.itertuples(name=None)) == sorted(known)
    assert table.document_id.str.fullmatch("[0-9a-f]{32}").all()


def test_an_export_has_the_documents_of_the_tables_in_their_order(out: Path, tmp_path: Path) -> None:
    file = exported(out, tmp_path / "all.parquet")
    columns = "lower(hex(document_id)), shard, row, token_start, token_end, file, record, id, url"
    stored = rows_of(f"SELECT {columns} FROM '{out}/provenance/*.parquet'")
    plain = columns.replace("lower(hex(document_id))", "document_id")
    assert rows_of(f"SELECT {plain} FROM '{file}'") == stored
    names = rows_of(f"SELECT DISTINCT shard, shard_file FROM '{file}' ORDER BY shard")
    assert names == [(n, f"shard.{n:05d}.mds") for n in range(len(names))]
    assert len(names) > 1


def test_without_a_card_sources_are_numbers(out: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    (copy / "dataset.json").unlink()
    table = pd.read_parquet(exported(copy, tmp_path / "all.parquet"))
    assert set(table.source) == {"0", "1"}
