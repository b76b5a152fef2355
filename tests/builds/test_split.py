"""Parts such as a validation set: what is drawn, that nothing leaks, and that every document is in one."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import shardkit
from reference.split import alike, text_ngrams
from shardkit.errors import RecipeError
from shardkit.writers import build
from support.small_build import tree

WORDS = [f"word{n}" for n in range(400)]
SOURCES = ("web", "books")


def varied(text: str, draw: random.Random, changed: float) -> str:
    return " ".join(draw.choice(WORDS) if draw.random() < changed else word for word in text.split())


def texts_of(source: str, count: int) -> list[str]:
    """Texts of 30 to 90 words; one in four is a variation, an excerpt or an extension of an earlier one."""
    draw = random.Random(source)
    texts: list[str] = []
    for number in range(count):
        kind = number % 16
        earlier = draw.choice(texts) if texts else ""
        if kind == 1 and texts:
            texts.append(varied(earlier, draw, 0.02))
        elif kind == 5 and texts:
            words = earlier.split()
            texts.append(" ".join(words[: max(8, len(words) // 2)]))
        elif kind == 9 and texts:
            texts.append(f"{earlier} {' '.join(draw.choices(WORDS, k=80))}")
        elif kind == 13 and texts:
            texts.append(varied(earlier, draw, 0.3))
        else:
            texts.append(" ".join(draw.choices(WORDS, k=draw.randint(30, 90))))
    return texts


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("split")
    for source in SOURCES:
        lines = [json.dumps({"text": text}) for text in texts_of(source, 600)]
        for part in range(3):
            (folder / f"{source}-{part}.jsonl").write_text("\n".join(lines[part::3]) + "\n")
    base = {"base": str(folder)}
    return [{"path": str(folder / f"{source}-*.jsonl"), "source": source} | base for source in SOURCES]


def recipe_of(inputs: list[dict[str, str]], folder: Path, split: Any) -> dict[str, Any]:
    return {
        "inputs": inputs,
        "split": split,
        "dedup": {"exact": True},
        "output": {"path": str(folder), "format": "parquet"},
    }


def documents(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(sorted(folder.glob("text-*.parquet"))).to_pylist()
    return rows


def test_no_document_of_a_part_is_like_any_other_and_every_document_is_in_one(
    inputs: list[dict[str, str]], tmp_path: Path, inline_builds: None
) -> None:
    recipe = recipe_of(inputs, tmp_path / "out", {"validation": "10%", "test": 0.05})
    made = build(recipe, workers=1, progress=False)
    parts = {part: documents(tmp_path / "out" / part) for part in ("train", "validation", "test")}
    unsplit = {**recipe, "split": None, "output": {**recipe["output"], "path": str(tmp_path / "all")}}
    whole = build(unsplit, workers=1, progress=False)
    everything = documents(tmp_path / "all")
    assert Counter(row["document_id"] for rows in parts.values() for row in rows) == Counter(
        row["document_id"] for row in everything
    )
    assert whole.samples == made.samples + sum(other.samples for other in made.others)
    ngrams = {row["document_id"]: text_ngrams(row["text"], 5) for row in everything}
    held = {row["document_id"] for part in ("validation", "test") for row in parts[part]}
    assert len(held) > 60
    holders = defaultdict(set)
    for other, found in ngrams.items():
        for ngram in found:
            holders[ngram].add(other)
    for one in held:  # what shares no n-gram is not alike
        others = set().union(*(holders[ngram] for ngram in ngrams[one])) - {one}
        likes = [other for other in others if alike(ngrams[one], ngrams[other], 0.8)]
        assert not likes
    facts = json.loads((tmp_path / "out" / "train" / "dataset.json").read_text())["split"]
    assert facts["documents"] == {part: len(parts[part]) for part in ("validation", "test")}
    for part in ("validation", "test"):
        assert facts["proposed"][part] >= facts["documents"][part] + facts["alike"][part]
        assert facts["alike"][part] > 0


def test_the_counts_of_parts_add_up_in_cards_and_reports(
    inputs: list[dict[str, str]], tmp_path: Path, inline_builds: None
) -> None:
    build(recipe_of(inputs, tmp_path, {"validation": 0.1}), workers=1, progress=False)
    funnels = {}
    for part, other in (("train", "validation"), ("validation", "train")):
        card = json.loads((tmp_path / part / "dataset.json").read_text())
        funnels[part] = card["funnel"]
        assert card["samples"] == card["funnel"]["kept"]["documents"]
        assert (tmp_path / part / "dropped").exists() is False
        assert (tmp_path / part / "duplicates").exists() == (part == "train")
        assert b"<h2>Split</h2>" in (tmp_path / part / "report.html").read_bytes()
        assert shardkit.verify(tmp_path / part).ok
        assert f"split/{other}" in card["funnel"]["dropped"]
    for part, other in (("train", "validation"), ("validation", "train")):
        assert funnels[part]["dropped"][f"split/{other}"] == funnels[other]["kept"]


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ({"validation": 40}, {"validation": 40}),
        ({"validation": {"books": 25}}, {"validation": {"books": 25}}),
        pytest.param(
            {"validation": {"web": 10, "books": 30}, "test": 20},
            {"validation": {"web": 10, "books": 30}, "test": 20},
            marks=pytest.mark.extended,
        ),
    ],
)
def test_a_number_of_documents_is_met_exactly(
    inputs: list[dict[str, str]], tmp_path: Path, split: Any, expected: dict[str, Any], inline_builds: None
) -> None:
    build(recipe_of(inputs, tmp_path, split), workers=1, progress=False)
    for part, wanted in expected.items():
        sources = Counter(row["source"] for row in documents(tmp_path / part))
        assert (sum(sources.values()) if isinstance(wanted, int) else dict(sources)) == wanted


@pytest.mark.parametrize("share", ["5%", {"web": "5%", "books": 0.01}])
def test_a_share_is_filled_like_a_number_however_many_documents_are_like_others(
    tmp_path: Path, share: Any, inline_builds: None
) -> None:
    """Three in five documents are versions of each other, of which no one is drawn."""
    for source in SOURCES:
        draw = random.Random(source)
        texts = [" ".join(draw.choices(WORDS, k=60)) for _ in range(300)]
        texts += [f"{text} and {number}" for number in range(2) for text in texts[:100]]
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (tmp_path / f"{source}-0.jsonl").write_text("".join(lines))
    inputs = [{"path": str(tmp_path / f"{source}-*.jsonl"), "source": source} for source in SOURCES]
    split = {"validation": 30, "test": share}
    build(recipe_of(inputs, tmp_path / "out", split), workers=1, progress=False)
    found = Counter(row["source"] for row in documents(tmp_path / "out" / "test"))
    if isinstance(share, str):
        assert found.total() == 50
    else:
        assert found == {"web": 25, "books": 5}
    assert len(documents(tmp_path / "out" / "validation")) == 30


@pytest.mark.extended
def test_parts_do_not_depend_on_workers_files_or_the_memory_of_a_task(
    inputs: list[dict[str, str]], tmp_path: Path
) -> None:
    recipe = recipe_of(inputs, tmp_path / "one", {"validation": "10%"})
    build(recipe, workers=1, progress=False)
    recipe["output"]["path"] = str(tmp_path / "two")
    build({**recipe, "memory": "256MiB"}, workers=2, progress=False)
    for part in ("train", "validation"):
        one, two = tree(tmp_path / "one" / part), tree(tmp_path / "two" / part)
        for name in ("dataset.json", "report.html"):  # which state the memory
            assert one.pop(name) != two.pop(name)
        assert one == two


@pytest.mark.extended
def test_a_part_does_not_depend_on_parts_after_it(inputs: list[dict[str, str]], tmp_path: Path) -> None:
    for name, split in (("a", {"validation": 0.1}), ("b", {"validation": 0.1, "test": 0.1})):
        build(recipe_of(inputs, tmp_path / name, split), workers=1, progress=False)
    first, second = ({r["document_id"] for r in documents(tmp_path / n / "validation")} for n in ("a", "b"))
    assert first == second


@pytest.mark.parametrize(
    ("split", "problem"),
    [
        ({"train": 0.1}, "'train' cannot be a part"),
        ({"a": 0.5, "b": 0.5}, "the shares of the parts add up to 1 or more"),
        ({"validation": 2.0}, "write a share such as 0.1% or 0.001, or a number of documents, not 2.0"),
        ({"validation": "all"}, "write a share such as 0.1%"),
        ({"validation": {"wiki": 0.1}}, "there is no source 'wiki'; there are web, books"),
        ({"validation": 5000}, "5,000 documents are wanted for a part, but only"),
        ({"Validation": 0.1}, "split"),
    ],
)
def test_splits_that_cannot_be_meant_are_refused(
    inputs: list[dict[str, str]], tmp_path: Path, split: Any, problem: str, inline_builds: None
) -> None:
    with pytest.raises(RecipeError, match=problem):
        build(recipe_of(inputs, tmp_path, split), workers=1, progress=False)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "parts",
    [
        {"validation": 15, "test": 15},
        {"validation": 29, "test": 1},
        {"validation": 1, "test": 39},
        {"a": 8, "b": 8, "c": 8, "d": 8, "e": 8},
        {"validation": "2.5%", "test": "2.5%", "other": 0.05},
        {"validation": 20, "test": {"web": 9, "books": 9}},
        {"test": {"web": 3}, "validation": 30, "other": {"books": 5}},
    ],
)
def test_all_parts_are_full_where_nine_in_ten_documents_are_alike(
    tmp_path: Path, inline_builds: None, parts: dict[str, Any], recwarn: pytest.WarningsRecorder
) -> None:
    draw, inputs = random.Random(7), []
    for source in SOURCES:
        alone = [" ".join(draw.choices(WORDS, k=60)) for _ in range(20)]
        doubled = [" ".join(draw.choices(WORDS, k=60)) for _ in range(90)]
        lines = [*alone, *doubled, *(f"{text} again" for text in doubled)]
        file = tmp_path / f"{source}.jsonl"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
        inputs.append({"path": str(file), "source": source, "base": str(tmp_path)})
    made = build(recipe_of(inputs, tmp_path / "out", parts), workers=1, progress=False)
    assert made.samples
    assert not [warning for warning in recwarn if "are wanted" in str(warning.message)]
    seen: set[str] = set()
    for part, asked in parts.items():
        rows = documents(tmp_path / "out" / part)
        texts = {row["text"] for row in rows}
        assert not texts & seen
        seen |= texts
        assert not [text for text in texts if text.endswith(" again")]
        of_sources = Counter(row["source"] for row in rows)
        if isinstance(asked, dict):
            assert of_sources == asked
        else:
            share = float(str(asked).rstrip("%")) / 100 if "%" in str(asked) else asked
            assert len(rows) == (asked if isinstance(asked, int) else round(share * 400))
