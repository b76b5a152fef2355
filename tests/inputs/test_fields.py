"""A field that the recipe names must be in every file that has records: a misspelt name is no null column."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from shardkit.errors import RecipeError
from shardkit.writers import build
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.input_sample import Piece, put_pieces
from shardkit.writers.inputs.fields import check_named_fields
from shardkit.writers.inputs.scan import scan_inputs
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.stages.clean import CleanSettings, clean_split
from support import read_inputs
from support.small_build import make_corpus

pytestmark = pytest.mark.usefixtures("inline_builds")

ROWS = [{"text": f"some words of document {n}", "link": "u", "id": n} for n in range(40)]
JSONL = b"".join(orjson.dumps(row) + b"\n" for row in ROWS)


def recipe(folder: Path, path: str, **fields: Any) -> Recipe:
    settings = {"max_bad_fraction": 1, "pack": {"sequence_length": 64}}
    return read_inputs.recipe(folder, {"path": path, **fields}, **settings)


def check(built: Recipe, folder: Path, split_bytes: int = 1 << 26) -> None:
    """Clean every split as a build does and compare what they saw."""
    splits = scan_inputs(built, split_bytes=split_bytes)
    found: list[Mapping[str, Any]] = []
    for number, split in enumerate(splits):
        task = folder / f"task-{split_bytes}-{number}"
        task.mkdir()
        settings = CleanSettings.of(built, split.source)
        found += clean_split(task, split, settings, {}, Artifact(folder)).fields
    check_named_fields(splits, found)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"url": "lnk"}, "inputs[0].url: no record of a.jsonl has a field 'lnk'; its fields: id, link, text"),
        ({"id": "doc"}, "inputs[0].id: no record of a.jsonl has a field 'doc'"),
        (
            {"metadata": ["link", "meta.lang"]},
            "inputs[0].metadata[1]: no record of a.jsonl has a field 'meta.lang'",
        ),
    ],
)
@pytest.mark.parametrize("split_bytes", [100, 1 << 26])
def test_a_field_that_no_record_has_is_an_error_however_the_file_is_cut(
    tmp_path: Path, fields: dict[str, Any], words: str, split_bytes: int
) -> None:
    (tmp_path / "a.jsonl").write_bytes(JSONL)
    with pytest.raises(RecipeError) as caught:
        check(recipe(tmp_path, "a.jsonl", **fields), tmp_path, split_bytes)
    assert words in str(caught.value)


def test_one_record_with_the_field_is_enough_even_if_it_is_null(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(JSONL + b'{"text": "last", "lnk": null}\n')
    for split_bytes in (100, 1 << 26):
        check(recipe(tmp_path, "a.jsonl", url="lnk"), tmp_path, split_bytes)


def test_fields_that_the_recipe_does_not_name_may_be_missing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "alone"}\n')
    check(recipe(tmp_path, "a.jsonl"), tmp_path)


def test_every_file_with_records_needs_the_field(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(JSONL)
    (tmp_path / "b.jsonl").write_bytes(b"")
    (tmp_path / "c.jsonl").write_bytes(b"not JSON\n")
    check(recipe(tmp_path, "*.jsonl", url="link"), tmp_path)
    (tmp_path / "d.jsonl").write_bytes(b'{"text": "alone", "uri": "u"}\n')
    with pytest.raises(
        RecipeError, match=r"url: no record of d.jsonl has a field 'link'; its fields: text, uri"
    ):
        check(recipe(tmp_path, "*.jsonl", url="link"), tmp_path, 1 << 20)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.csv"])
def test_of_a_table_the_first_record_tells(tmp_path: Path, name: str) -> None:
    table = pa.table({"text": ["a b", "c d"], "link": ["u", "v"]})
    if name == "a.parquet":
        pq.write_table(table, tmp_path / name)
    elif name == "a.arrow":
        pyarrow.feather.write_feather(table, str(tmp_path / name))
    else:
        (tmp_path / name).write_text("text,link\na b,u\nc d,v\n")
    check(recipe(tmp_path, name, url="link"), tmp_path)
    built = recipe(tmp_path, name, url="lnk")
    (split,) = scan_inputs(built)
    (tmp_path / "task").mkdir()
    with pytest.raises(RecipeError, match=rf"inputs\[0\].url: no record of {name} has a field 'lnk'.*text"):
        clean_split(tmp_path / "task", split, CleanSettings.of(built, 0), {}, Artifact(tmp_path))


def test_a_sample_of_the_input_may_lack_a_rare_field(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(JSONL + b'{"text": "last", "rare": 1}\n')
    built = recipe(tmp_path, "a.jsonl", url="rare")
    pieces = [Piece(split, 100) for split in scan_inputs(built)]
    inputs, _ = put_pieces(built, pieces, tmp_path / "sample")
    sample = built.model_copy(update={"inputs": tuple(inputs)}).in_folder(tmp_path)
    check(pickle.loads(pickle.dumps(sample)), tmp_path)


def test_a_build_stops_and_names_the_field(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(JSONL)
    make_corpus(tmp_path, 20)  # for its tokenizer
    with pytest.raises(RecipeError, match=r"inputs\[0\].url: no record of a.jsonl has a field 'lnk'"):
        build(recipe(tmp_path, "a.jsonl", url="lnk"), workers=1, progress=False)
    assert build(recipe(tmp_path, "a.jsonl", url="link"), workers=1, progress=False).samples
