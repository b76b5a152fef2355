"""Files and documents become a dataset without a recipe; a dict is checked as a file is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pytest
import yaml

import shardkit as sk
from shardkit.errors import RecipeError
from support.small_build import EOS, make_corpus, text_of, tree

RUN: dict[str, Any] = {"workers": 1, "progress": False}
DOCUMENTS = [{"text": text_of(number), "id": f"n{number}"} for number in range(40)]
SHORT: dict[str, Any] = {"sequence_length": 512, "tokenizer": "tokenizer.json"}


@pytest.fixture
def corpus(tmp_path: Path, inline_builds: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with inputs and a tokenizer."""
    folder = make_corpus(tmp_path / "corpus", 40).parent
    monkeypatch.chdir(folder)
    return folder


def documents_of(location: str) -> list[str]:
    """The texts of the documents of a dataset, which were packed in some order."""
    with sk.open(location) as dataset:
        text = "".join(dataset.text(row) + EOS for row in range(len(dataset)))
    return sorted(part for part in text.split(EOS) if part)


def test_a_dict_is_checked_without_a_build_as_a_file_is(corpus: Path) -> None:
    data = yaml.safe_load((corpus / "recipe.yaml").read_text())
    assert sk.load_recipe(data).content() == sk.load_recipe("recipe.yaml").content()
    assert sk.load_recipe(data).folder == corpus
    assert sk.load_recipe(data, ["seed=5"]).seed == 5
    assert "seed" not in data, "the dict is left as it is"
    recipe = sk.load_recipe(data)
    assert sk.load_recipe(recipe) is recipe
    changed = sk.load_recipe(sk.load_recipe(corpus / "recipe.yaml"), ["pack.sequence_length=32"])
    assert (changed.pack.sequence_length, changed.folder) == (32, corpus)
    with pytest.raises(RecipeError, match="seq_length: unknown key; in shardkit: `sequence_length`"):
        sk.load_recipe(data | {"pack": {"seq_length": 64}})
    for wrong in ([data], 5, None):
        with pytest.raises(RecipeError, match="a recipe is the path of a YAML file, a mapping or a"):
            sk.load_recipe(wrong)  # type: ignore[arg-type]


FILES: dict[str, Callable[[Path], Any]] = {
    "glob": lambda folder: "plain-*.jsonl",
    "list": lambda folder: ["plain-0.jsonl", Path("plain-1.jsonl")],
    "absolute": lambda folder: [str(path) for path in sorted(folder.glob("plain-*.jsonl"))],
    "iterator": lambda folder: folder.glob("plain-*.jsonl"),
}


@pytest.mark.parametrize("kind", FILES)
def test_files_are_built_as_the_recipe_that_init_writes_without_its_steps(corpus: Path, kind: str) -> None:
    from shardkit.writers.init_recipe import draft_recipe

    result = sk.build(FILES[kind](corpus), output="out", **SHORT, **RUN)
    recipe = yaml.safe_load(draft_recipe(["plain-*.jsonl"], corpus, tokenizer="tokenizer.json", eos=EOS).text)
    del recipe["steps"]
    expected = sk.build(recipe | {"pack": {"sequence_length": 512}}, output="expected", **RUN)
    assert documents_of("out") == documents_of("expected") == sorted(text_of(number) for number in range(20))
    if kind in ("glob", "iterator"):
        assert result.fingerprint == expected.fingerprint
    assert sk.build(FILES[kind](corpus), output="out", **SHORT, **RUN).up_to_date


MEMORY: dict[str, Callable[[], Any]] = {
    "list": lambda: DOCUMENTS,
    "generator": lambda: (document for document in DOCUMENTS),
    "frame": lambda: pandas.DataFrame(DOCUMENTS),
    "table": lambda: pa.Table.from_pylist(DOCUMENTS),
}


def test_documents_in_memory_are_built_from_any_source_to_the_same_bytes(corpus: Path) -> None:
    trees = []
    for kind, make in MEMORY.items():
        result = sk.build(make(), output=corpus / kind, **SHORT, **RUN)
        trees.append({name: digest for name, digest in tree(corpus / kind).items() if "shard." in name})
        assert documents_of(result.location) == sorted(document["text"] for document in DOCUMENTS)
    assert trees[0]
    assert all(other == trees[0] for other in trees)


def test_the_rows_have_the_length_that_init_would_write_and_the_field_that_is_named(corpus: Path) -> None:
    documents = [{"body": text_of(number), "text": "not this"} for number in range(30)]
    sk.build(documents, output="memory", tokenizer=corpus / "tokenizer.json", text="body", **RUN)
    (corpus / "named.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    sk.build(
        ["named.jsonl"], output="files", tokenizer={"path": "tokenizer.json", "eos": EOS}, text="body", **RUN
    )
    for name in ("memory", "files"):
        assert sk.open(name).sequence_length == 2049
        assert documents_of(name) == sorted(text_of(number) for number in range(30))
    sk.build(
        "named.jsonl", output="changed", overrides=["dedup.exact=true", "inputs[0].text=text"], **SHORT, **RUN
    )
    assert documents_of("changed") == ["not this"]


def test_a_folder_is_built_whole(corpus: Path) -> None:
    sk.build("tables", "out", **SHORT, **RUN)
    [table] = (corpus / "tables").iterdir()
    assert documents_of("out") == sorted(pandas.read_parquet(table)["text"])


def test_a_file_that_is_left_out_is_named(corpus: Path) -> None:
    (corpus / "plain-list.jsonl").write_text("[1, 2]\n")
    with pytest.warns(RuntimeWarning, match=r"plain-list\.jsonl is not read: its first line is not a JSON"):
        sk.build("plain-*.jsonl", output="out", **SHORT, **RUN)


def rows() -> Iterator[dict[str, Any]]:
    yield from DOCUMENTS


WRONG: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "nothing": (
        lambda: DOCUMENTS,
        {},
        r'output: is missing; .*output="out" and tokenizer="tokenizer.json" \(or',
    ),
    "no tokenizer": (
        lambda: "plain-*.jsonl",
        {"output": "out"},
        "^tokenizer: is missing; a build",
    ),
    "no output": (rows, {"tokenizer": "tokenizer.json"}, r'^output: is missing; .* needs output="out"$'),
    "no such tokenizer": (rows, {"output": "out", "tokenizer": "gpt-none"}, "the Hugging Face cache has no"),
    "no files": (list, {"output": "out", **SHORT}, "there are no files and no documents"),
    "no match": (lambda: "gone-*.jsonl", {"output": "out", **SHORT}, "gone-"),
    "mixed": (lambda: ["plain-0.jsonl", {"text": "x"}], {"output": "out", **SHORT}, "a dict is no path"),
    "texts": (
        lambda: ["a text\nof lines"],
        {"output": "out", **SHORT},
        r"give texts as dicts: \{'text': …\}",
    ),
    "words": (lambda: ["hello world"], {"output": "out", **SHORT}, "'hello world' is no file; give texts as"),
    "number": (lambda: 5, {"output": "out", **SHORT}, "^recipe: 5 is neither a recipe nor data"),
    "no field": (rows, {"output": "out", **SHORT, "text": "body"}, "no document has a field 'body'"),
    "recipe": (lambda: "recipe.yaml", SHORT, r"sequence_length|tokenizer: is for data without a recipe"),
    "dict": (lambda: {"output": "out"}, {"sequence_length": 5}, r"set pack\.sequence_length in the rec"),
    "both": (
        lambda: DOCUMENTS,
        {"output": "out", **SHORT, "documents": rows()},
        "first argument is data, too",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_missing_or_given_twice_is_said(corpus: Path, kind: str) -> None:
    data, given, message = WRONG[kind]
    with pytest.raises(RecipeError, match=message):
        sk.build(data(), **given, **RUN)
    assert not (corpus / "out").exists()
