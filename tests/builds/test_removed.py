"""Every record of the inputs is in one table: kept, dropped by a filter, a duplicate, or unreadable."""

from __future__ import annotations

import json
import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from reference.near import reference_shingles
from shardkit.formats.dropped_table import TEXT_CHARACTERS
from shardkit.writers import build, build_dedup_index, index_build, pipeline
from shardkit.writers.dedup import duplicates as of_duplicates
from shardkit.writers.dedup.config import MinHashConfig
from shardkit.writers.dedup.urls import canonical_url
from shardkit.writers.inputs import scan
from shardkit.writers.rows import dropped_file
from support.small_build import make_corpus, tree

RECIPE = """\
inputs:
  - {path: "first-*.jsonl", source: first, id: id, url: url}
  - {path: "second-*.jsonl", source: second, id: id, url: url}
max_bad_fraction: 0.1
annotate: true
filters:
  - length: {min_words: 12, max_words: 5000}
  - ratios: {max_digit_ratio: 0.5}
dedup:
  exact: {}
  near: {small_shingles: 0}
tokenizer: {path: tokenizer.json, eos: "<|endoftext|>"}
pack: {sequence_length: 64}
output: {path: out, shard_bytes: 8KiB}
"""
LINES = RECIPE.replace("  near:", "  lines: {min_characters: 20}\n  near:")
URLS = LINES.replace("  exact:", "  url: {keep: longest}\n  exact:")
BOILERPLATE = "This very line stands at the end of many documents of both sources."


def words_of(number: int, count: int = 60) -> list[str]:
    rng = random.Random(number)
    return ["".join(rng.choices("abcdefghijklmnop", k=rng.randrange(3, 9))) for _ in range(count)]


def make_texts() -> dict[str, list[str]]:
    """By file: originals, exact copies, near-duplicates of both, short texts, digits, mere boilerplate."""
    texts: dict[str, list[str]] = {}
    for at, name in enumerate(("first-0", "first-1", "second-0", "second-1")):
        some: list[str] = []
        for number in range(12 * at, 12 * at + 12):
            words = words_of(number)
            text = " ".join(words) + (f"\n{BOILERPLATE}" if number % 3 == 0 else "")
            some.append(text)
            if number % 2:
                some.append(" ".join([*words[:30], "changed", *words[31:]]))
            if number % 4 == 0:
                some += [text, some[0]]
            some.append(" ".join(words[: number % 12]))
            some.append(" ".join(str(10**9 + digit) for digit in range(number % 5 * 10)))
            some.append(" ".join(words_of(number - 12)))
        some += [f"{BOILERPLATE}\n{BOILERPLATE}", f"{BOILERPLATE}\n{BOILERPLATE}\n"] * 2
        some.append(" ".join(words_of(1000 + at, 900)))  # longer than the text that is kept of it
        some.append(" ".join([*words_of(1000 + at, 900), "and one more"]))
        texts[f"{name}.jsonl"] = some
    return texts


def url_of(name: str, row: int) -> str:
    """Every seventh page is that of the row before, and every eleventh that of the same row in first-0."""
    if row % 7 == 5:
        return f"HTTP://www.A.org:80/{name}/{row - 1}/?utm_source=feed#top"
    return f"https://a.org/{'first-0.jsonl' if row % 11 == 6 else name}/{row}"


def make(folder: Path, recipe: str) -> Path:
    path = make_corpus(folder, documents=4, recipe=recipe)
    for name, some in make_texts().items():
        rows = [
            {"text": text, "id": f"{name} {row}", "url": url_of(name, row)} for row, text in enumerate(some)
        ]
        lines = [json.dumps(row) for row in rows]
        lines[3] = "{not JSON"
        (folder / name).write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(autouse=True)
def _many_splits(monkeypatch: pytest.MonkeyPatch, inline_builds: None) -> None:
    for module in (pipeline, index_build):
        monkeypatch.setattr(module.scan, "scan_inputs", partial(scan.scan_inputs, split_bytes=9000))


def table(output: Path, folder: str) -> list[dict[str, Any]]:
    files = sorted(output.glob(f"{folder}/*.parquet"))
    return [row for path in files for row in pq.read_table(path).to_pylist()]


def texts_by_id() -> dict[str, str]:
    return {f"{name} {row}": text for name, some in make_texts().items() for row, text in enumerate(some)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recipe", [RECIPE, LINES, URLS], ids=["plain", "lines", "urls"])
def test_every_record_is_in_one_table_and_every_duplicate_leads_to_a_document_that_stays(
    tmp_path: Path, recipe: str
) -> None:
    result = build(make(tmp_path, recipe), progress=False)
    output, texts = Path(result.output), texts_by_id()
    kept = {row["document_id"]: row for row in table(output, "provenance")}
    dropped, duplicates = table(output, "dropped"), table(output, "duplicates")
    gone = {row["document_id"]: row for row in duplicates}
    ids = [row["id"] for row in (*kept.values(), *dropped, *duplicates)]
    bad = {f"{name} 3" for name in make_texts()}
    assert sorted(ids) == sorted(texts.keys() - bad)
    counts = Counter(row["reason"] for row in duplicates) + Counter(row["rule"] for row in dropped)
    assert counts == {
        reason: lost.documents for reason, lost in result.funnel.dropped.items() if lost.documents
    }
    lines = recipe != RECIPE
    assert len(counts) == {RECIPE: 4, LINES: 5, URLS: 6}[recipe]
    assert ("duplicate_lines" in counts) == lines
    config, copies = MinHashConfig(), Counter[bytes]()
    for row in duplicates:
        assert row["url"] == url_of(row["file"], row["record"])
        if row["reason"] == "duplicate_lines":
            assert row["kept_document_id"] is None
            assert row["similarity"] is None
            continue
        stays = kept.get(row["kept_document_id"]) or gone[row["kept_document_id"]]
        assert {f"kept_{name}": stays[name] for name in ("file", "record", "id", "url", "source")} == {
            name: row[name] for name in ("kept_file", "kept_record", "kept_id", "kept_url", "kept_source")
        }
        ours, theirs = texts[row["id"]], texts[stays["id"]]
        if row["reason"] == "url_duplicate":
            assert row["similarity"] is None
            assert canonical_url(row["url"]) == canonical_url(stays["url"])
            assert len(ours.encode()) <= len(theirs.encode())
        elif row["reason"] == "exact_duplicate":
            assert (ours, row["similarity"]) == (theirs, 1)
            assert row["document_id"] != stays["document_id"]
        elif not lines:
            a, b = (reference_shingles(text, config) for text in (ours, theirs))
            assert row["similarity"] == pytest.approx(len(a & b) / len(a | b), abs=1e-6)
        last = row["kept_document_id"]
        while last in gone:
            last = gone[last]["kept_document_id"]
        copies.update([last] if last is not None else [])  # all lines of what stayed for it were cut
    assert {id: row["copies"] - 1 for id, row in kept.items() if row["copies"] > 1} == dict(copies)


def test_what_was_dropped_has_its_rule_value_bound_and_text(tmp_path: Path) -> None:
    output, texts = Path(build(make(tmp_path, RECIPE), progress=False).output), texts_by_id()
    annotations = {row["document_id"]: row for row in table(output, "annotations")}
    dropped = table(output, "dropped")
    bounds = {"length/too_few_words": 12, "ratios/too_many_digits": 0.5}
    for row in dropped:
        text, noted = texts[row["id"]], annotations[row["document_id"]]
        assert (row["rule"], row["value"]) == (noted["dropped"], noted[row["rule"]])
        assert (row["bound"], row["label"]) == (bounds[row["rule"]], None)
        assert row["bytes"] == len(text.encode())
        assert row["text"] == text[:TEXT_CHARACTERS]  # so few that the sample is all of them
    assert {row["rule"] for row in dropped} == set(bounds)


def test_texts_are_a_sample_of_all_and_of_the_nearest_to_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dropped_file, "_TEXTS_OF_RULE", 2)
    monkeypatch.setattr(of_duplicates, "TEXTS_OF_SPLIT", 1)
    monkeypatch.setattr(dropped_file, "ROW_GROUP_DOCUMENTS", 7)
    output = Path(build(make(tmp_path, RECIPE), progress=False).output)
    files = sorted(output.glob("dropped/*.parquet"))
    assert len(files) > 4
    for path in files:
        groups = pq.read_metadata(path)
        sizes = [groups.row_group(number).num_rows for number in range(groups.num_row_groups)]
        assert set(sizes[:-1]) <= {7}
        rows = pq.read_table(path).to_pylist()
        for rule in {row["rule"] for row in rows}:
            mine = [row for row in rows if row["rule"] == rule]
            shown = [row for row in mine if row["text"] is not None]
            assert len(shown) == min(len(mine), 4)
            distances = sorted(abs(row["value"] - row["bound"]) for row in mine)
            assert sum(abs(row["value"] - row["bound"]) <= distances[:4][-1] for row in shown) >= min(
                len(mine), 2
            )
    duplicates = table(output, "duplicates")
    shown = [row for row in duplicates if row["text"] is not None]
    assert 0 < len(shown) < len(duplicates)
    assert all(texts_by_id()[row["id"]].startswith(row["text"]) for row in shown)


@pytest.mark.extended
def test_a_duplicate_of_another_corpus_leads_nowhere(tmp_path: Path) -> None:
    old = make(tmp_path / "old", RECIPE.replace("annotate: true\n", ""))
    build_dedup_index(old, tmp_path / "old.index", progress=False)
    against = "  near: {small_shingles: 0, against: [../old.index]}\n"
    new = make(tmp_path / "new", RECIPE.replace("  near: {small_shingles: 0}\n", against))
    with (tmp_path / "new" / "first-0.jsonl").open("a") as file:
        file.write(
            json.dumps({"text": " ".join(words_of(77_777)), "id": "new", "url": "https://b.org"}) + "\n"
        )
    output = Path(build(new, progress=False).output)
    assert {row["id"] for row in table(output, "provenance")} == {"new"}
    near = [row for row in table(output, "duplicates") if row["reason"] == "near_duplicate"]
    assert near
    for row in near:
        assert row["kept_document_id"] is None
        assert row["similarity"] >= 0.8


@pytest.mark.extended
@pytest.mark.parametrize("recipe", [RECIPE, LINES], ids=["plain", "lines"])
def test_memory_and_the_number_of_files_change_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    first = build(make(tmp_path / "first", recipe), progress=False)
    monkeypatch.setattr("shardkit.writers.stages.flow.task_memory", lambda memory: 20_000)
    less = build(make(tmp_path / "less", recipe), progress=False)
    assert tree(Path(first.output)) == tree(Path(less.output))
    monkeypatch.setattr(of_duplicates, "DUPLICATES_OF_FILE", 5)
    many = build(make(tmp_path / "many", recipe), progress=False)
    assert len(list(Path(many.output).glob("duplicates/*"))) > 3
    assert table(Path(many.output), "duplicates") == table(Path(first.output), "duplicates")
