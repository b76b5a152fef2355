"""A user's function over Arrow batches: what it sees, what it may answer, and errors that name it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pyarrow as pa
import pytest
from pydantic import ValidationError

from shardkit.errors import BuildError, RecipeError
from shardkit.writers.execution.resources import Resources
from shardkit.writers.filters.chain import FilterChain
from shardkit.writers.filters.pii import PiiEditor
from shardkit.writers.filters.user import PythonConfig
from shardkit.writers.recipe.recipe import recipe_from_mapping
from shardkit.writers.rows.documents import with_metadata
from shardkit.writers.rows.filtered import Filtered
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
    assert {name: count.documents for name, count in result.dropped.items()} == {"python/long": 2}


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
        ("fails", {}, "mine:fails: KeyError: 'no such thing'.* begins 'first'.* in line [0-9]+ of .*mine.py"),
        ("short", {}, "mine:short: the function returned 1 values for 2 documents"),
        ("numbers", {}, "mine:numbers: the function returned 1 for .*; expected true or false"),
        ("nothing", {}, "mine:nothing: the function did not return an array"),
        ("labels", {}, "expected true or false"),
        (
            "labels",
            {"reasons": ["even"]},
            "the function returned 'odd' for .*; expected null, or one of `reasons`: even",
        ),
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
        (
            {"function": "mine:long", "file": "mine.py", "parameters": {"most": 1}},
            "mine:long: missing a required argument: 'least'",
        ),
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


CONTRACT = """
import asyncio
import dataclasses
import os

from shardkit.writers.filters.base import Rule
from datatrove.data import Document
from datatrove.pipeline.filters import LambdaFilter, RegexFilter
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.formatters import PIIFormatter

async def later(document, least=2):
    await asyncio.sleep(0.001 * len(document.text))
    return len(document.text) >= least, "short"

def keep(document):
    return "bad" not in document.text

def text_only(text):
    return text != "b"

def topics(document):
    document.metadata["topic"] = "long" if len(document.text) > 2 else None
    document.metadata["letters"] = len(document.text)
    document.text = document.text.upper()
    return True

def columns(batch, **more):
    texts = batch.column("text").to_pylist()
    return {"keep": [text != "b" for text in texts], "text": [text + "!" for text in texts],
            "topic": [text[:1] for text in texts], "letters": [len(text) for text in texts]} | more

async def batch_later(batch):
    await asyncio.sleep(0)
    return [text != "b" for text in batch.column("text").to_pylist()]

def reason(document):
    return "odd" if len(document.text) % 2 else None

def none(document):
    document.text = None
    return True

def half(document):
    document.text = chr(0xD800)
    return True

def odd_field(document):
    document.metadata["topic"] = object()
    return True

async def raises(document):
    if document.text == "b":
        raise ValueError("no")
    await asyncio.sleep(30)
    return True

def silent(document):
    pass

@dataclasses.dataclass
class Model:
    model: str
    least: "int" = 1
    setups = 0

    def setup(self):
        with open(self.model) as file:
            self.words = file.read().split()
        Model.setups += 1

    def __call__(self, document):
        return document.text in self.words, "unknown"

class OurContract:
    reasons = ("first", "second")

    def judge(self, batch):
        is_a = [text == "a" for text in batch.texts.to_pylist()]
        import numpy as np
        return [Rule("first", np.array(is_a)), Rule("second", None)]

def page_words(page):
    return page.text > ""

class Batches(BaseFilter):
    name = "batches"

    def __init__(self):
        super().__init__(batch_size=2)

    def filter(self, doc):
        raise NotImplementedError

    def filter_batch(self, batch):
        assert len(batch) <= 2
        return [(len(doc.text) > 1, "tiny") for doc in batch]

class Broken:
    def setup(self):
        raise OSError("no disk")

class Peer(BaseFilter):
    name = "peer"

    def __init__(self, least=2):
        super().__init__()
        self.least = least

    def filter(self, doc):
        assert isinstance(doc, Document)
        doc.metadata["topic"] = doc.metadata.get("url", doc.id)
        return (True, None) if len(doc.text) >= self.least else (False, "peer_short")

instance = LambdaFilter(lambda doc: doc.text != "b")
"""


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CONTRACT)
    (tmp_path / "words.txt").write_text("a bb")
    return tmp_path


def run(folder: Path, name: str, texts: list[str], **more: object) -> Filtered:
    return FilterChain([("python", config(name, **more))], folder).apply(documents(texts))


def kept(result: Filtered) -> list[str]:
    texts: list[str] = result.kept.column("text").to_pylist()
    return texts


def fields(result: Filtered) -> list[object]:
    return [None if one is None else json.loads(one) for one in result.kept.column("metadata").to_pylist()]


@pytest.mark.parametrize(
    ("name", "left"),
    [("later", ["bb", "ccc"]), ("keep", ["a", "bb", "ccc", "b"]), ("text_only", ["a", "bb", "ccc"])],
)
@pytest.mark.parametrize("size", [1, 2, 4096])
def test_a_function_gets_what_its_first_parameter_names(
    steps: Path, name: str, left: list[str], size: int
) -> None:
    assert kept(run(steps, name, ["a", "bb", "ccc", "b"], batch_documents=size)) == left
    assert kept(run(steps, "batch_later", ["a", "b"], batch_documents=size)) == ["a"]


def test_an_async_step_runs_in_a_notebook_too(steps: Path) -> None:
    async def cell() -> list[str]:
        return kept(run(steps, "later", ["a", "bb"]))

    assert asyncio.run(cell()) == ["bb"]
    assert kept(run(steps, "later", ["a", "bb"])) == ["bb"]


def test_a_reason_that_the_recipe_does_not_list_becomes_a_label(steps: Path) -> None:
    [dropped] = run(steps, "later", ["a", "bb"]).removed
    assert dropped.rule == "python/later"
    assert dropped.labels is not None
    assert dropped.labels.tolist() == ["short"]
    assert list(run(steps, "later", ["a", "bb"], reasons=["short"]).dropped) == ["python/short"]
    assert kept(run(steps, "reason", ["a", "bb"], reasons=["odd"])) == ["bb"]


def test_a_step_may_add_fields_and_edit_texts(steps: Path) -> None:
    result = run(steps, "topics", ["a", "ccc"], edits=True, columns=["topic", "letters"])
    assert kept(result) == ["A", "CCC"]
    assert fields(result) == [{"topic": None, "letters": 1}, {"topic": "long", "letters": 3}]
    assert result.cut == {"python/text": 0}
    result = run(steps, "columns", ["a", "b", "cc"], edits=True, columns=["topic", "letters"])
    assert kept(result) == ["a!", "cc!"]
    assert result.cut == {"python/text": -3}
    assert fields(result) == [{"topic": "a", "letters": 1}, {"topic": "c", "letters": 2}]


def test_fields_are_added_to_those_that_inputs_keep() -> None:
    batch = documents(["a", "b", "c", "d"])
    metadata = pa.array(
        ['{"x":12345678901234567890123,"y":"é"}', "{}", None, '{"topic":0,"x":1}'], pa.string()
    )
    batch = batch.set_column(batch.schema.get_field_index("metadata"), "metadata", metadata)
    added = ['{"topic":"é"}', '{"topic":1}', '{"topic":null}', '{"topic":2}']
    assert with_metadata(batch, ["topic"], added).column("metadata").to_pylist() == [
        '{"x":12345678901234567890123,"y":"é","topic":"é"}',
        '{"topic":1}',
        '{"topic":null}',
        '{"topic":2,"x":1}',
    ]
    assert with_metadata(batch, ["topic"], [None] * 4).column("metadata").equals(metadata)


def test_a_class_is_made_once_per_process_with_its_files(steps: Path) -> None:
    settings = {"data": {"model": "words.txt"}, "parameters": {"least": 2}}
    assert kept(run(steps, "Model", ["a", "b", "bb"], **settings)) == ["a", "bb"]
    chain = FilterChain([("python", config("Model", **settings))], steps)
    assert [type(step.work._call.args[0]).setups for step in chain._steps] == [1]  # type: ignore[union-attr]
    assert config("Model", **settings).files() == ("mine.py", "words.txt")
    (steps / "words.txt").write_text("changed")
    assert kept(run(steps, "Model", ["a", "changed"], **settings)) == ["changed"]


def test_a_class_may_implement_our_own_contract(steps: Path) -> None:
    chain = FilterChain([("python", config("OurContract"))], steps)
    assert chain.reasons == ("python/first", "python/second")
    assert kept(chain.apply(documents(["a", "b"]))) == ["b"]


def test_filters_and_formatters_of_datatrove_run_as_they_are(steps: Path) -> None:
    result = run(steps, "Peer", ["a", "bb"], columns=["topic"])
    assert kept(result) == ["bb"]
    assert result.removed[0].labels is not None
    assert result.removed[0].labels[0] == "peer_short"
    assert list(run(steps, "Peer", ["a"], parameters={"least": 3}, reasons=["peer_short"]).dropped) == [
        "python/peer_short"
    ]
    assert kept(run(steps, "instance", ["a", "b"])) == ["a"]
    assert kept(run(steps, "Batches", ["a", "bb", "c", "d", "ee"])) == ["bb", "ee"]
    assert kept(run(steps, "RegexFilter", ["a1", "b"], parameters={"regex_exp": "[0-9]"})) == ["b"]
    edited = run(steps, "PIIFormatter", ["write to ada@lovelace.org"], edits=True)
    assert "ada" not in kept(edited)[0]


@pytest.mark.parametrize(
    ("name", "more", "problem"),
    [
        ("topics", {"columns": ["topic", "letters"]}, "it changed a text; set `edits: true`"),
        ("topics", {"edits": True, "columns": ["topic"]}, "it added a field 'letters'; list it in `columns`"),
        ("page_words", {}, "to get one document at a time, call the first parameter `document`"),
        ("columns", {"edits": True}, "it returned a field 'letters'; list it in `columns`"),
        ("columns", {"edits": True, "columns": ["topic", "letters", "more"]}, "no field 'more'"),
        (
            "columns",
            {"edits": True, "columns": ["topic", "letters"], "parameters": {"topic": [1]}},
            "1 values for 2 documents .topic.",
        ),
        ("none", {"edits": True}, "it returned None as a text"),
        ("half", {"edits": True}, "a text that is not valid"),
        ("odd_field", {"columns": ["topic"]}, "a field has a value that is not JSON"),
        ("raises", {}, "mine:raises: ValueError: no .*record 1, which begins 'b'"),
        (
            "silent",
            {},
            "returned None for f, record 0, which begins 'a'; expected true or false, or .whether",
        ),
        (
            "keep",
            {"reasons": ["x"]},
            "returned True for f, record 0.*; expected null, or one of `reasons`: x",
        ),
        ("later", {"reasons": ["x"]}, "returned .False, 'short'. for f, record 0.*one of `reasons`: x"),
    ],
)
@pytest.mark.timeout(20)
def test_what_a_step_must_not_do_is_named(
    steps: Path, name: str, more: dict[str, object], problem: str
) -> None:
    with pytest.raises(BuildError, match=problem):
        run(steps, name, ["a", "b"], **more)


@pytest.mark.parametrize(
    ("name", "more", "problem"),
    [
        ("Broken", {}, "mine:Broken: OSError: no disk"),
        ("Model", {}, "mine:Model: TypeError: .*missing 1 required"),
        ("Document", {"parameters": {"text": "", "id": ""}}, "neither called nor has it a method `filter`"),
        ("Model", {"data": {"model": "gone.txt"}}, "gone.txt: No such file"),
        ("later", {"parameters": {"leats": 1}}, "mine:later: got an unexpected keyword argument 'leats'"),
    ],
)
def test_a_class_that_cannot_be_made_is_named(
    steps: Path, name: str, more: dict[str, object], problem: str
) -> None:
    with pytest.raises(RecipeError, match=problem):
        run(steps, name, ["a"], **more)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"columns": ["text"]}, "'text' has another meaning"),
        ({"columns": ["a", "a"]}, "a column is listed twice: a, a"),
        ({"gpus": 1.5}, "gpus: 1.5: give a whole number"),
        ({"data": {"x": "f"}, "parameters": {"x": 1}}, "x is in both"),
        ({"batch_documents": 5000}, "less than or equal to 4096"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(more: dict[str, object], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        config("keep", **more)


def test_resources_do_not_belong_to_the_identity_of_a_build() -> None:
    plain, placed = config("keep"), config("keep", gpus=0.5, cpus=4, memory="8GiB")
    assert plain.content() == placed.content()
    assert plain.content() == {"function": "mine:keep", "file": "mine.py", "parameters": {}, "reasons": []}
    assert placed.resources == Resources(4, 0.5, 8 << 30)
    assert placed.is_costly
    assert not plain.is_costly
