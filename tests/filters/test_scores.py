"""Scores that were computed elsewhere, joined by the id of the document."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkit
from shardkit.errors import BuildError, RecipeError
from shardkit.progress import make_listener
from shardkit.writers import build
from shardkit.writers.dedup.tables import RowsWriter
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.work import Work
from shardkit.writers.executors import Execution, open_runner
from shardkit.writers.inputs.scan import scan_inputs
from shardkit.writers.recipe.recipe import recipe_from_mapping
from shardkit.writers.stages.flow import Build, Documents
from shardkit.writers.stages.id_tables import INDEX_FILE, TABLE_FILE, IdTable, block_rows, row_dtype
from shardkit.writers.stages.inputs import BuildInputs
from shardkit.writers.stages.scores import sort_scores
from support.s3_moto import s3_server
from support.small_build import tree

COUNT = 60
SCORE = row_dtype("<f8", 1)
BLOCK = block_rows(SCORE)


def score_of(number: int) -> float:
    return (number * 37 % COUNT) / 10


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Documents with ids of their own; scores of theirs in any order, some in Parquet and some in lines."""
    records = [{"text": f"document {n} has words", "id": n} for n in range(COUNT)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    (tmp_path / "scores").mkdir()
    order = sorted(range(COUNT), key=lambda n: n * 7919 % 61)
    half = {"doc": order[:30], "edu": [score_of(n) for n in order[:30]], "other": ["x"] * 30}
    pq.write_table(pa.table(half), tmp_path / "scores" / "a.parquet", row_group_size=7)
    lines = [json.dumps({"doc": str(n), "edu": score_of(n)}) + "\n" for n in order[30:]]
    (tmp_path / "scores" / "b.jsonl").write_text("".join(lines))
    return tmp_path


def recipe_in(folder: Path, **scores: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "path": [str(folder / "scores" / "*.parquet"), str(folder / "scores" / "*.jsonl")]
    }
    given |= {"key": "doc", "document": "id", "columns": {"edu": {"min": 2.0}}}
    return {
        "inputs": [{"path": str(folder / "a.jsonl"), "base": str(folder)}],
        "filters": [{"scores": given | scores}],
        "output": {"path": str(folder / "out"), "format": "parquet"},
        "annotate": True,
    }


def run(recipe: dict[str, Any]) -> shardkit.BuildResult:
    return build(recipe, workers=1, progress=False)


def kept_in(folder: Path) -> dict[int, float]:
    rows = pq.read_table(sorted((folder / "out").glob("text-*.parquet"))).to_pylist()
    return {int(row["id"]): row["filters"]["scores/edu"] for row in rows}


def test_documents_stay_by_their_scores_wherever_these_are(folder: Path, inline_builds: None) -> None:
    made = run(recipe_in(folder))
    assert kept_in(folder) == {n: score_of(n) for n in range(COUNT) if score_of(n) >= 2.0}
    lost = sum(score_of(n) < 2.0 for n in range(COUNT))
    assert made.funnel.dropped["scores/edu"].documents == lost
    assert run(recipe_in(folder)).up_to_date


def test_another_score_makes_another_build(folder: Path, inline_builds: None) -> None:
    first = run(recipe_in(folder))
    path = folder / "scores" / "b.jsonl"
    path.write_text(path.read_text().replace('"edu": 0.', '"edu": 5.'))
    with pytest.raises(BuildError, match="made with other lists, models or code of its filters"):
        run(recipe_in(folder))
    again = build(recipe_in(folder), workers=1, progress=False, replace=True)
    assert again.fingerprint != first.fingerprint
    assert again.funnel.kept.documents > first.funnel.kept.documents


def test_a_document_without_scores_is_refused_dropped_or_kept_as_asked(
    folder: Path, inline_builds: None
) -> None:
    path = folder / "scores" / "b.jsonl"
    lines = path.read_text().splitlines()
    gone, null = (json.loads(line) for line in lines[:2])
    path.write_text("\n".join([json.dumps(null | {"edu": None}), *lines[2:]]))
    missing = {int(gone["doc"]), int(null["doc"])}
    with pytest.raises(
        BuildError, match=rf"a.jsonl: record {min(missing)}: filters: scores: no row of .*its id"
    ):
        run(recipe_in(folder))
    made = run(recipe_in(folder, missing="drop"))
    assert made.funnel.dropped["scores/missing"].documents == 2
    assert not missing & kept_in(folder).keys()
    made = build(recipe_in(folder, missing="keep"), workers=1, progress=False, replace=True)
    assert "scores/missing" not in made.funnel.dropped
    kept = kept_in(folder)
    assert all(np.isnan(kept[number]) for number in missing)
    assert {n for n in kept if n not in missing} == {
        n for n in range(COUNT) if score_of(n) >= 2.0 and n not in missing
    }


def test_a_document_that_an_earlier_filter_drops_needs_no_score(folder: Path, inline_builds: None) -> None:
    with (folder / "a.jsonl").open("a") as file:
        file.write(json.dumps({"text": "short", "id": "none"}) + "\n")
    recipe = recipe_in(folder)
    recipe["filters"].insert(0, {"length": {"min_words": 2}})
    assert run(recipe).funnel.dropped["length/too_few_words"].documents == 1


def test_the_scores_of_a_text_output_are_joined_by_its_document_ids(
    folder: Path, inline_builds: None
) -> None:
    recipe = recipe_in(folder)
    text = recipe | {
        "filters": [],
        "annotate": False,
        "output": {"path": str(folder / "first"), "format": "parquet"},
    }
    run(text)
    rows = pq.read_table(sorted((folder / "first").glob("text-*.parquet")))
    scores = [score_of(int(one)) for one in rows.column("id").to_pylist()]
    table = pa.table({"document_id": rows.column("document_id"), "edu": scores})
    pq.write_table(table, folder / "scores" / "c.parquet")
    files = str(folder / "scores" / "c.parquet")
    run(recipe_in(folder, path=files, key="document_id", document="document_id"))
    assert kept_in(folder).keys() == {n for n in range(COUNT) if score_of(n) >= 2.0}


@pytest.mark.extended
def test_score_files_and_work_in_a_bucket_give_the_same_dataset(folder: Path) -> None:
    """The table of scores is fetched from there."""
    buckets = {"buckets": {"scores": {"column": "edu"}, "bins": 4}}
    recipe = recipe_in(folder)
    recipe["filters"].append(buckets)
    build(recipe, workers=2, progress=False)
    with s3_server() as server:
        client = server.client()
        client.create_bucket(Bucket="bucket")
        for file in (folder / "scores").iterdir():
            client.put_object(Bucket="bucket", Key=f"scores/{file.name}", Body=file.read_bytes())
        remote = recipe_in(folder, path=["s3://bucket/scores/*.parquet", "s3://bucket/scores/*.jsonl"])
        remote["filters"].append(buckets)
        places = {"work": "s3://bucket/work", "scratch": str(folder / "scratch")}
        remote |= places | {"output": recipe["output"] | {"path": str(folder / "second")}}
        build(remote, workers=2, progress=False)
    stated = {"dataset.json", "report.html"}  # of the places of score files
    first, second = (tree(folder / name) for name in ("out", "second"))
    assert {k: v for k, v in first.items() if k not in stated} == {
        k: v for k, v in second.items() if k not in stated
    }


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ({"doc": [1, 1], "edu": [1.0, 2.0]}, "an id has two rows with different values"),
        ({"doc": [1, None], "edu": [1.0, 2.0]}, "'doc' is null in 1 rows"),
        ({"doc": [1.5], "edu": [1.0]}, "'doc' is double; ids must be text or integers"),
        ({"doc": [1], "edu": ["high"]}, "'edu' is string; scores must be numbers"),
        ({"doc": [1], "score": [1.0]}, "has no column 'edu'; it has doc, score"),
    ],
)
def test_score_files_that_cannot_be_meant_are_refused(
    folder: Path, rows: dict[str, list[Any]], problem: str, inline_builds: None
) -> None:
    pq.write_table(pa.table(rows), folder / "scores" / "bad.parquet")
    with pytest.raises(BuildError, match=problem):
        run(recipe_in(folder, path=str(folder / "scores" / "bad.parquet")))


def test_settings_that_cannot_be_meant_are_refused(folder: Path) -> None:
    for scores, problem in (
        ({"columns": {"edu": {"min": 2, "max": 1}}}, "min 2 is more than max 1"),
        ({"columns": {"missing": {}}}, "a column cannot be called 'missing'"),
        ({"columns": {"doc": {}}}, "'doc' is the id"),
        ({"columns": {}}, "columns"),
        ({"path": str(folder / "scores" / "*.csv")}, r"filters: scores.path\[0\]: .* matches no file"),
    ):
        with pytest.raises((RecipeError, BuildError), match=problem):
            run(recipe_in(folder, **scores))


@settings(max_examples=40, deadline=None)
@given(
    ids=st.sets(st.integers(1, 2**20), max_size=4 * BLOCK),
    parts=st.integers(1, 3),
    keys=st.integers(0, 5),
)
def test_every_row_of_a_table_is_found_and_nothing_else(
    ids: set[int], parts: int, keys: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With a number of `keys`, many ids have the same one, as if their hashes collided."""
    folder = tmp_path_factory.mktemp("table")
    rows = np.zeros(len(ids), SCORE)
    rows["low"] = rows["values"][:, 0] = list(ids)
    spread = rows["low"] * np.uint64(0x9E3779B97F4A7C15)
    rows["key"] = (spread >> np.uint64(40)) % np.uint64(keys) << np.uint64(61) if keys else spread
    rows = rows[np.lexsort((rows["low"], rows["key"]))]
    starts = [(part << 64) // parts for part in range(parts)]
    owners = np.searchsorted(np.array(starts, np.uint64), rows["key"], side="right") - 1
    for part in range(parts):
        mine = rows[owners == part]
        (folder / str(part)).mkdir()
        with RowsWriter(folder / str(part) / TABLE_FILE, rows.dtype) as file:
            file.write(mine)
        with RowsWriter(folder / str(part) / INDEX_FILE, "<u8") as index:
            index.write(np.ascontiguousarray(mine["key"][::BLOCK]))
    table = IdTable(tuple(Artifact(folder / str(part)) for part in range(parts)), tuple(starts), SCORE, "")
    found = table.open().find(rows["key"], rows["low"])
    assert np.array_equal(found, rows["values"])
    others = table.open().find(rows["key"], rows["low"] + np.uint64(1 << 21))
    assert np.isnan(others).all()


def test_tables_of_many_parts_give_what_a_dictionary_gives(tmp_path: Path, inline_builds: None) -> None:
    """Small limits: several runs are merged, and blocks cross batches."""
    rng = np.random.default_rng(3)
    scores = {f"d{n}": float(value) for n, value in enumerate(rng.random(20_000))}
    names = rng.permutation(list(scores))
    for part, some in enumerate(np.array_split(names, 5)):
        table = {"document_id": some.tolist(), "s": [scores[one] for one in some], "t": range(len(some))}
        pq.write_table(pa.table(table), tmp_path / f"{part}.parquet")
    (tmp_path / "a.jsonl").touch()
    filters = [{"scores": {"path": str(tmp_path / "*.parquet"), "columns": {"s": None}}}]
    recipe = recipe_from_mapping(
        {
            "inputs": [str(tmp_path / "a.jsonl")],
            "filters": filters,
            "output": {"path": "o", "format": "jsonl"},
        },
        folder=tmp_path,
    )
    limits = DEFAULT_LIMITS.divided(1000)
    with (
        make_listener(False) as listener,
        open_runner(recipe, Work.at(tmp_path / "work"), Execution(workers=1), listener) as runner,
    ):
        inputs = replace(BuildInputs.of(recipe, scan_inputs(recipe)), limits=limits)
        [made] = sort_scores(Documents(recipe, inputs.splits), Build(inputs, runner.run)).scores
    assert len(made.parts) > 3
    asked = [*names.tolist(), "none", None]
    found = made.open()(asked)[:, 0]
    assert found[:-2].tolist() == [scores[one] for one in names]
    assert np.isnan(found[-2:]).all()
