"""Documents that a first build had rewritten, and their originals, stay together in a second build."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from shardkit.writers import build
from support.model_server import ModelServer, answer_to
from support.small_build import EOS, train_bpe

QUESTION = "which of the seven bridges did the old mathematician cross twice on his way to church that day"
WORDS = [f"word{n}" for n in range(500)]
EVALUATIONS = {"decontamination": {"evaluations": [{"path": "eval.jsonl"}]}}
Row = dict[str, Any]


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer() as found:
        yield found


@pytest.fixture(scope="module")
def folder(server: ModelServer, inline_builds: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 originals, of which 10 occur twice and 8 hold a question of an evaluation, and their rewritings."""
    folder = tmp_path_factory.mktemp("rewritten")
    draw = random.Random(5)
    texts = [" ".join(draw.choices(WORDS, k=40)) for _ in range(132)]
    texts += [f"{' '.join(draw.choices(WORDS, k=20))} {QUESTION} {n}" for n in range(8)] + texts[:10]
    draw.shuffle(texts)
    (folder / "raw").mkdir()
    for file in range(3):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[file::3]]
        (folder / "raw" / f"{file}.jsonl").write_text("".join(lines))
    (folder / "eval.jsonl").write_text(json.dumps({"text": QUESTION}) + "\n")
    train_bpe(texts, special=(EOS,)).save(str(folder / "tokenizer.json"))
    rewrite(folder, server, EVALUATIONS, "rewritten")
    assert sum(server.counts()["requests"].values()) == 132
    return folder


def made(folder: Path, **recipe: Any) -> Any:
    (folder / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    return build(folder / "recipe.yaml", workers=1, progress=False)


def rewrite(folder: Path, server: ModelServer, decontamination: Row, output: str) -> None:
    """Build the dataset of rewritings."""
    ask = {"url": server.url, "model": "m", "prompt": "Rewrite: {text}", "rewrite": True}
    made(
        folder,
        inputs=[{"path": "raw/*.jsonl", "source": "web"}],
        steps=["exact", decontamination, {"ask": ask}],
        output={"path": output, "format": "parquet", "shard_bytes": "4KiB"},
    )


def rows_of(folder: Path) -> list[Row]:
    return [row for file in sorted(folder.glob("text-*.parquet")) for row in pq.read_table(file).to_pylist()]


def both(folder: Path, output: Any, by: str | None) -> Any:
    """Build the dataset of originals and rewritings."""
    return made(
        folder,
        inputs=[
            {"path": "raw/*.jsonl", "source": "web"},
            {"path": "rewritten/text-*.parquet", "source": "rewritten", "metadata": ["document_id"]},
        ],
        steps=["exact", EVALUATIONS],
        split={"parts": {"validation": 20, "test": 20}, "by": by},
        tokenizer={"path": "tokenizer.json", "eos": EOS},
        pack={"sequence_length": 256},
        outputs=output,
    )


def parents(rows: list[Row]) -> dict[str, str]:
    """{document id of a rewritten row: document id of its parent}."""
    rewritten = [row for row in rows if row["source"] == "rewritten"]
    return {row["document_id"]: json.loads(row["metadata"])["document_id"] for row in rewritten}


@pytest.mark.parametrize("by", ["document_id", None])
def test_a_rewritten_document_is_in_the_part_of_its_parent(
    folder: Path, tmp_path: Path, inline_builds: None, by: str | None
) -> None:
    both(folder, [{"path": str(tmp_path / "out"), "format": "parquet"}], by)
    parts = {part: rows_of(tmp_path / "out" / part) for part in ("train", "validation", "test")}
    rows = [row for found in parts.values() for row in found]
    places = {row["document_id"]: part for part, found in parts.items() for row in found}
    assert Counter(row["source"] for row in rows) == {"web": 132, "rewritten": 132}
    assert not [row for row in rows if QUESTION in row["text"].lower()]
    texts = {row["document_id"]: row["text"] for row in rows}
    pairs = parents(rows)
    assert len({*pairs.values()}) == 132
    for child, parent in pairs.items():
        assert texts[child] == answer_to(f"Rewrite: {texts[parent]}")
    torn = [child for child, parent in pairs.items() if places[child] != places[parent]]
    assert not torn if by else torn  # without `by`, a part has a document whose rewriting is in train
    assert Counter(places.values()) == {"train": 224, "validation": 20, "test": 20}
    sources = Counter(row["source"] for row in parts["validation"])
    assert sources == {"web": 10, "rewritten": 10} or not by


def test_what_was_made_of_a_document_goes_with_it_when_an_evaluation_set_is_added(
    folder: Path, server: ModelServer, tmp_path: Path, inline_builds: None
) -> None:
    rows = rows_of(folder / "rewritten")
    lines = [json.loads(line) for file in sorted(folder.glob("raw/*")) for line in file.open()]
    [gone, *_] = [line["text"] for line in lines if QUESTION not in line["text"]]
    (tmp_path / "more.jsonl").write_text(json.dumps({"text": gone}) + "\n")
    sets = [{"path": "eval.jsonl"}, {"path": str(tmp_path / "more.jsonl")}]
    again = {"decontamination": {"evaluations": sets}}
    rewrite(folder, server, again, str(tmp_path / "again"))
    assert server.counts()["requests"] == {}
    left = {row["text"] for row in rows_of(tmp_path / "again")}
    assert {row["text"] for row in rows} - left == {answer_to(f"Rewrite: {gone}")}


def test_provenance_leads_from_each_rewritten_row_of_tokens_to_its_parent(
    folder: Path, tmp_path: Path, inline_builds: None
) -> None:
    result = both(folder, [{"path": str(tmp_path / "out")}], "document_id")
    places: dict[str, str] = {}
    found = 0
    first = {f"rewritten/{file.name}": pq.read_table(file) for file in (folder / "rewritten").glob("text-*")}
    pieces = []
    for one in (result, *result.others):
        dataset = one.open()
        for row in range(len(dataset)):
            pieces += [(dataset.path.name, piece) for piece in dataset.documents(row)]
    for part, piece in pieces:
        assert places.setdefault(piece.document_id, part) == part
    for part, piece in pieces:
        if piece.source != "rewritten":
            continue
        found += 1
        assert piece.metadata is not None
        parent = json.loads(piece.metadata)["document_id"]
        assert places[parent] == part
        [row] = first[piece.file].slice(piece.record, 1).to_pylist()  # of the first build
        assert row["document_id"] == parent
        line = (folder / row["file"]).read_text().splitlines()[row["record"]]
        assert answer_to(f"Rewrite: {json.loads(line)['text']}") == row["text"]
    assert found >= 132
