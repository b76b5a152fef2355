"""A user's function over Arrow batches: what it sees, what it may answer, and errors that name it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardkit.errors import BuildError, RecipeError
from shardkit.writers.filters.chain import FilterChain
from shardkit.writers.filters.pii import PiiEditor
from shardkit.writers.filters.user import PythonConfig
from shardkit.writers.recipe.recipe import recipe_from_mapping
from shardkit.writers.stages.inputs import filter_files
from support.filter_runs import documents

SOURCE = """
import numpy as np
import pyarrow.compute as pc

def long(batch, least):
    assert batch.schema.names[0] == "document_id"
    return pc.greater_equal(pc.utf8_length(batch.column("text")), least)

def labels(batch):
    return ["odd" if len(text) % 2 else None for text in batch.column("text").to_pylist()]

def seen(batch):
    assert "@b.de" not in str(batch.column("text")), "not edited"
    return np.array(["shout" in text for text in batch.column("text").to_pylist()])

def fails(batch):
    raise KeyError("no such thing")

def short(batch):
    return [True]

def numbers(batch):
    return [1] * batch.num_rows

def nothing(batch):
    return None
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(SOURCE)
    return tmp_path


def config(name: str, **more: object) -> PythonConfig:
    return PythonConfig.model_validate({"function": f"mine:{name}", "file": "mine.py"} | more)


def test_a_mask_tells_what_stays(folder: Path) -> None:
    chain = FilterChain([("python", config("long", parameters={"least": 3}))], folder)
    result = chain.apply(documents(["ab", "abc", "", "é中\n\u2028"]))
    assert result.kept.column("text").to_pylist() == ["abc", "é中\n\u2028"]
    assert {name: count.documents for name, count in result.dropped.items()} == {"python/rejected": 2}


def test_reasons_are_told_apart(folder: Path) -> None:
    chain = FilterChain([("python", config("labels", reasons=["odd", "never"]))], folder)
    assert chain.reasons == ("python/odd", "python/never")
    result = chain.apply(documents(["ab", "abc", ""]))
    assert result.kept.column("text").to_pylist() == ["ab", ""]
    assert list(result.dropped) == ["python/odd"]


def test_it_sees_edited_texts_of_the_documents_that_are_left_and_no_empty_batch(folder: Path) -> None:
    first = ("python", config("seen"))
    chain = FilterChain([("pii", PiiEditor()), first, ("python", config("short"))], folder)
    assert chain.apply(documents(["a@b.de shout", "b@b.de"])).kept.num_rows == 1
    assert chain.apply(documents(["quiet"])).kept.num_rows == 0


@pytest.mark.parametrize(
    ("name", "more", "problem"),
    [
        ("fails", {}, "mine:fails: KeyError: 'no such thing'.* begins 'first'"),
        ("short", {}, "mine:short: the function returned 1 values for 2 documents"),
        ("numbers", {}, "mine:numbers: the function returned 1; expected true or false"),
        ("nothing", {}, "mine:nothing: the function did not return an array"),
        ("labels", {}, "expected true or false"),
        ("labels", {"reasons": ["even"]}, "the function returned 'odd'; expected one of even or null"),
        ("long", {"parameters": {"most": 1}}, "mine:long: TypeError"),
    ],
)
def test_errors_name_the_function(folder: Path, name: str, more: dict[str, object], problem: str) -> None:
    chain = FilterChain([("python", config(name, **more))], folder)
    with pytest.raises(BuildError, match=problem):
        chain.apply(documents(["first", "second"]))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"function": "mine:long", "file": "gone.py"}, "gone.py"),
        ({"function": "no_such_module_at_all:long"}, "no_such_module_at_all"),
    ],
)
def test_what_cannot_be_imported_is_named(folder: Path, settings: dict[str, str], problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        FilterChain([("python", PythonConfig.model_validate(settings))], folder)


def test_a_changed_source_is_another_build(folder: Path) -> None:
    entry = {"python": {"function": "json.encoder:JSONEncoder"}}
    own = {"python": {"function": "mine:long", "file": "mine.py", "parameters": {"least": 1}}}
    data = {
        "inputs": [{"path": "x"}],
        "filters": [entry, own],
        "tokenizer": {"path": "t", "eos": "e"},
        "output": {"path": "o"},
    }
    recipe = recipe_from_mapping(data, folder=folder)
    before = filter_files(recipe)
    assert set(before) == {json.encoder.__file__, "mine.py"}
    (folder / "mine.py").write_text(SOURCE + "\n")
    after = filter_files(recipe)
    assert [name for name in before if before[name] != after[name]] == ["mine.py"]
    missing = {"filters": [{"python": {"function": "no_such_module_at_all:f"}}]}
    with pytest.raises(RecipeError, match="no_such_module_at_all:f: no module"):
        filter_files(recipe_from_mapping(data | missing, folder=folder))
