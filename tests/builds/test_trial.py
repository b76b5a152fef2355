"""A trial reads few records of each input, always the same ones, and is never taken for the whole dataset."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardkit import open_dataset
from shardkit.cli.main import main
from shardkit.errors import BuildError
from shardkit.writers import build, load_recipe
from shardkit.writers.inputs.scan import scan_inputs
from support.read_inputs import read, recipe
from support.small_build import make_corpus, tree

pytestmark = pytest.mark.usefixtures("inline_builds")


def provenance_ids(folder: Path) -> set[bytes]:
    return set(pq.read_table(folder / "provenance", columns=["document_id"])["document_id"].to_pylist())


def test_a_trial_reads_the_first_records_of_each_input_and_is_built_beside_the_whole(tmp_path: Path) -> None:
    path = make_corpus(tmp_path)
    path.write_text(path.read_text().replace("dedup: {exact: {}}\n", ""))  # other copies stay in a trial
    whole = build(path, progress=False)
    assert main(["build", str(path), "--limit", "40", "--quiet"]) == 0
    trial = tmp_path / "out-limit-40"
    card = json.loads((trial / "dataset.json").read_text())
    assert [entry["funnel"]["read"]["documents"] for entry in card["inputs"]] == [40, 40, 40]
    assert card["recipe"]["limit"] == 40
    assert provenance_ids(trial) <= provenance_ids(whole.output)
    with open_dataset(whole.output) as dataset:
        assert dataset.card is not None
        assert "limit" not in dataset.card.data["recipe"]
    again = build(load_recipe(path).as_trial(40), output=tmp_path / "again", workers=1, progress=False)
    assert tree(again.output) == tree(trial)
    with pytest.raises(BuildError, match="made by another recipe"):
        build(path, output=trial, progress=False)


@pytest.mark.parametrize("kind", ["jsonl", "gzip", "parquet", "csv", "lines"])
def test_no_format_gives_more_records_than_the_limit(kind: str, tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(3000)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    config: dict[str, Any] = {}
    if kind == "jsonl":
        (tmp_path / "a.jsonl").write_text(lines)
    elif kind == "gzip":
        (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    elif kind == "parquet":
        pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=500)
    elif kind == "csv":
        (tmp_path / "a.csv").write_text("text\n" + "\n".join(texts))
    else:
        (tmp_path / "a.txt").write_text("\n".join(texts))
        config = {"lines": True}
    [split] = scan_inputs(recipe(tmp_path, {"path": "a*", **config}, limit=17))
    assert split.limit == 17
    table, bad, ledger = read(tmp_path, "a*", records=17, **config)
    assert table["text"].to_pylist() == texts[:17]
    assert (bad, ledger.read.documents) == ([], 17)


@pytest.mark.parametrize(("limit", "read_of_each"), [(3, [1, 1, 1]), (20, [2] * 10), (4000, [200] * 20)])
def test_the_splits_of_a_trial_are_spread_over_the_input(
    limit: int, read_of_each: list[int], tmp_path: Path
) -> None:
    line = json.dumps({"text": "x" * 4000}) + "\n"
    for number in range(20):
        (tmp_path / f"{number:02}.jsonl").write_text(line * 2)
    splits = scan_inputs(recipe(tmp_path, "*.jsonl", limit=limit))
    assert [split.limit for split in splits] == read_of_each
    assert [split.index for split in splits] == list(range(len(splits)))
    names = [int(split.file[:2]) for split in splits]
    assert names == [number * 20 // len(splits) for number in range(len(splits))]
