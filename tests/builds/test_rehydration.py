"""Documents routed by how many they stand for, and repeated by that: a mixture of the parts."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import shardkit
from shardkit.errors import RecipeError
from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.config import Order
from shardkit.writers import build
from shardkit.writers.token_store import pack_store
from support.small_build import train_bpe, tree

pytestmark = pytest.mark.usefixtures("inline_builds")

TIMES = {"once": 1, "some": 2, "often": 5}
"""How often the documents of an output are in an epoch."""

RANGES: dict[str, object] = {"once": "1", "some": {"min": 2, "max": 4}, "often": {"min": 5}}


def copies_of(number: int) -> int:
    """1, 2 or 5."""
    return 1 if number < 20 else 2 if number < 32 else 5


def text_of(number: int) -> str:
    rng = random.Random(number)
    return " ".join(f"w{rng.randrange(5000)}" for _ in range(60))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """40 texts: 20 once, 12 twice, 8 three times and twice more with another last word."""
    folder = tmp_path_factory.mktemp("rehydration")
    texts = [text_of(number) for number in range(40) for _ in range(min(copies_of(number), 3))]
    texts += [f"{text_of(number)} {word}" for number in range(32, 40) for word in ("also", "again")]
    random.Random(1).shuffle(texts)
    lines = [json.dumps({"text": text, "number": n}) for n, text in enumerate(texts)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    train_bpe(texts[:20]).save(str(folder / "tokenizer.json"))
    return {
        "inputs": [{"path": str(folder / "a.jsonl"), "base": str(folder), "metadata": ["number"]}],
        "dedup": {"exact": True, "near": 0.8},
        "tokenizer": {"path": str(folder / "tokenizer.json"), "eos": "<|endoftext|>"},
        "pack": {"sequence_length": 128},
    }


@pytest.fixture(scope="module")
def parts(recipe: dict[str, Any], inline_builds: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    outputs: list[dict[str, Any]] = [
        {"path": str(folder / name), "where": {"copies": where}} for name, where in RANGES.items()
    ]
    outputs.append({"path": str(folder / "text"), "format": "parquet", "where": {"copies": {"min": 2}}})
    build(recipe | {"outputs": outputs}, workers=1, progress=False)
    return folder


def documents_in(folder: Path) -> dict[bytes, int]:
    """Copies of the documents of a dataset, by id."""
    rows = pq.read_table(sorted((folder / "provenance").iterdir())).to_pylist()
    return {row["document_id"]: row["copies"] for row in rows}


@pytest.mark.extended
def test_copies_are_those_of_exact_and_near_duplicates_together_and_route_documents(parts: Path) -> None:
    found = {name: Counter(documents_in(parts / name).values()) for name in RANGES}
    assert found == {"once": {1: 20}, "some": {2: 12}, "often": {5: 8}}
    text = pq.read_table(sorted((parts / "text").glob("text-*.parquet")))
    assert Counter(text.column("copies").to_pylist()) == {2: 12, 5: 8}
    for name, documents in found.items():
        funnel = shardkit.open_dataset(parts / name).card
        assert funnel is not None
        assert funnel.funnel.kept.documents == sum(documents.values())
        assert funnel.funnel.dropped["output/elsewhere"].documents == 40 - sum(documents.values())


@pytest.mark.extended
def test_a_mixture_of_the_parts_repeats_each_document_as_often_as_its_part_says(parts: Path) -> None:
    samples = {name: len(shardkit.open_dataset(parts / name)) for name in TIMES}
    streams = [
        Stream(str(parts / name), weight=samples[name] * times, repeat=times) for name, times in TIMES.items()
    ]
    epoch = sum(samples[name] * times for name, times in TIMES.items())
    seen: Counter[tuple[int, int]] = Counter()
    with StreamingLoader(streams, batch_size=1, return_ids=True, order=Order(epoch_samples=epoch)) as loader:
        for batch in loader:
            seen.update(zip(batch["stream_id"].tolist(), batch["sample_id"].tolist(), strict=True))
    for number, (name, times) in enumerate(TIMES.items()):
        assert {sample: seen[number, sample] for sample in range(samples[name])} == dict.fromkeys(
            range(samples[name]), times
        )
    assert seen.total() == epoch


@pytest.mark.extended
def test_a_field_of_the_inputs_is_compared_as_a_number(recipe: dict[str, Any], tmp_path: Path) -> None:
    where = {"number": {"min": 10, "max": 30.5}}
    build(
        recipe
        | {"dedup": None, "output": {"path": str(tmp_path / "out"), "format": "jsonl", "where": where}},
        workers=1,
        progress=False,
    )
    lines = [json.loads(line) for file in (tmp_path / "out").glob("text-*") for line in file.open()]
    assert [line["metadata"]["number"] for line in lines] == list(range(10, 31))


@pytest.mark.extended
def test_copies_of_an_earlier_build_are_a_field_like_any_other(
    recipe: dict[str, Any], parts: Path, tmp_path: Path
) -> None:
    again = {key: recipe[key] for key in ("tokenizer", "pack")} | {
        "inputs": [{"path": str(parts / "text" / "*.parquet"), "metadata": ["copies"]}],
        "output": {"path": str(tmp_path / "out"), "where": {"copies": {"min": 5}}},
    }
    assert build(again, workers=1, progress=False).funnel.kept.documents == 8


@pytest.mark.extended
def test_packing_a_store_of_some_documents_gives_the_bytes_of_a_build_of_these(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    where = {"where": {"copies": {"min": 2}}}
    outputs = [
        {"path": str(tmp_path / "rows"), **where},
        {"path": str(tmp_path / "store"), "format": "tokens", **where},
    ]
    build(recipe | {"outputs": outputs}, workers=1, progress=False)
    overrides = ["pack.sequence_length=128"]
    pack_store(tmp_path / "store", tmp_path / "packed", overrides=overrides, workers=1, progress=False)
    assert tree(tmp_path / "packed") == tree(tmp_path / "rows")


@pytest.mark.extended
@pytest.mark.parametrize(
    ("where", "problem"),
    [
        ({"source": {"min": 2}}, "output.where: source is not a number; give a list of values"),
        ({"copies": {"min": 3, "max": 2}}, "min 3 is more than max 2"),
        ({"copies": {"least": 3}}, "unknown key"),
    ],
)
def test_ranges_that_cannot_be_meant_are_refused(
    recipe: dict[str, Any], where: dict[str, Any], problem: str
) -> None:
    with pytest.raises(RecipeError, match=problem):
        build(recipe | {"output": {"path": "o", "where": where}}, workers=1, progress=False)
