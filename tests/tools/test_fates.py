"""What became of a document is known for every record of the inputs, by URL, id, or place in a raw file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shardkit.cli.main import main
from shardkit.order.exclusions import Exclusions
from shardkit.writers import build
from support.small_build import make_corpus

RECIPE = """\
inputs:
  - {path: "a.jsonl", source: first, id: id, url: url}
  - {path: "b.jsonl", source: second, id: id, url: url}
max_bad_fraction: 0.2
filters:
  - length: {min_words: 5}
  - ratios: {max_digit_ratio: 0.5}
dedup: {exact: {}, near: {small_shingles: 0}}
tokenizer: {path: tokenizer.json, eos: "<|endoftext|>"}
pack: {sequence_length: 64}
output: {path: out, shard_bytes: 8KiB}
"""

WORDS = [
    f"{a}{b}" for a in ("red", "green", "blue", "dark", "pale") for b in ("stone", "river", "house", "tree")
]


def text_of(number: int, changed: int | None = None) -> str:
    words = [f"{WORDS[(number * 7 + at * at) % 20]}{chr(97 + (number + at) % 26)}" for at in range(50)]
    if changed is not None:
        words[changed] = "changed"
    return " ".join(words)


TEXTS: dict[str, list[str | None]] = {  # document n is at https://site<n>.org/<name>
    "a.jsonl": [text_of(0), text_of(1), "too short", "1234567890 " * 6, text_of(2), None],
    "b.jsonl": [
        text_of(0),
        text_of(1, 20),
        text_of(1, 20),
        "one two three four",
        "three words here",
        text_of(3),
    ],
}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, inline_builds: None) -> Path:
    return make(tmp_path_factory.mktemp("fates"), RECIPE + "annotate: true\n")


def make(folder: Path, recipe: str) -> Path:
    path = make_corpus(folder / "corpus", documents=4, recipe=recipe)
    for name, texts in TEXTS.items():
        lines = [
            "{broken"
            if text is None
            else json.dumps({"text": text, "id": f"{name}-{n}", "url": f"https://site{n}.org/{name}"})
            for n, text in enumerate(texts)
        ]
        (path.parent / name).write_text("\n".join(lines) + "\n")
    return Path(build(path, progress=False).output)


def ask(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    status = main([*map(str, words), "--json"])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    answer: dict[str, Any] = json.loads(captured.out)
    return answer


def one(capsys: pytest.CaptureFixture[str], out: Path, *words: object) -> dict[str, Any]:
    [facts] = ask(capsys, "trace", out, "--why", *words)["documents"]
    return dict(facts)


def test_each_outcome_is_told_with_its_reason(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = one(capsys, out, "--url", "https://site4.org/a.jsonl")
    assert (kept["outcome"], kept["copies"], kept["id"]) == ("kept", 1, "a.jsonl-4")
    assert kept["text"].startswith(text_of(2)[:60])
    [row] = ask(capsys, "trace", out, "--row", kept["rows"][0])["rows"]
    assert kept["document_id"] in [document["document_id"] for document in row["documents"]]
    short = one(capsys, out, "--id", "a.jsonl-2")
    assert (short["outcome"], short["rule"], short["value"], short["bound"]) == (
        "dropped",
        "length/too_few_words",
        2,
        5,
    )
    assert short["text"] == "too short"
    digits = one(capsys, out, "--file", "a.jsonl", "--record", 3)
    assert (digits["rule"], digits["failed"]) == ("ratios/too_many_digits", ["ratios/too_many_digits"])
    assert digits["values"]["length/too_few_words"] == 6
    bad = one(capsys, out, "--file", "a.jsonl", "--record", 5)
    assert (bad["outcome"], bad["record"]) == ("unreadable", 5)


def test_a_duplicate_leads_to_the_rows_that_have_its_text(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exact = one(capsys, out, "--id", "b.jsonl-0")
    assert (exact["outcome"], exact["reason"], exact["similarity"]) == ("duplicate", "exact_duplicate", 1)
    assert (exact["kept_id"], exact["stays"]["id"]) == ("a.jsonl-0", "a.jsonl-0")
    assert exact["stays"]["rows"] == one(capsys, out, "--id", "a.jsonl-0")["rows"]
    near, also = (one(capsys, out, "--id", f"b.jsonl-{n}") for n in (1, 2))
    assert {near["reason"], also["reason"]} == {"near_duplicate", "exact_duplicate"}
    first, second = (near, also) if near["reason"] == "near_duplicate" else (also, near)
    assert second["kept_id"] == first["id"]
    assert first["kept_id"] == "a.jsonl-1"
    assert 0.8 <= first["similarity"] < 1
    assert first["stays"] == second["stays"]
    assert second["stays"]["id"] == "a.jsonl-1"


def test_a_request_for_a_removed_duplicate_finds_and_excludes_the_rows_with_its_text(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone.txt"
    found = ask(capsys, "trace", out, "--url", "https://site2.org/b.jsonl", "--exclude", gone)
    rows = one(capsys, out, "--id", "a.jsonl-1")["rows"]
    assert [row for a, b in Exclusions.read(gone).to_list() for row in range(a, b)] == rows
    assert (found["duplicates"], found["documents"], found["unmatched"]) == (1, 1, [])
    assert found["shown"][0]["stays_for_duplicate"] is True
    document = one(capsys, out, "--id", "b.jsonl-2")["document_id"]
    assert ask(capsys, "trace", out, "--document", document)["rows"] == len(rows)
    assert main(["trace", str(out), "--url", "https://site2.org/b.jsonl", "--no-duplicates"]) == 1
    assert "shardkit trace --why" in capsys.readouterr().err
    whole = ask(capsys, "trace", out, "--source", "second")
    assert {piece["source"] for piece in whole["shown"]} == {"second"}


def test_what_a_rule_dropped_is_listed_nearest_to_the_bound_first(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = ask(capsys, "trace", out, "--dropped")["rules"]
    assert rules == {"length/too_few_words": 3, "ratios/too_many_digits": 1}
    nearest = ask(capsys, "trace", out, "--dropped", "length/too_few_words", "--nearest", "--limit", 2)
    assert [facts["value"] for facts in nearest["documents"]] == [4, 3]
    every = ask(capsys, "trace", out, "--dropped", "length/too_few_words", "--limit", 0)
    assert sorted(facts["value"] for facts in every["documents"]) == [2, 3, 4]


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--dropped", "too_few_words"], 1, "did you mean length/too_few_words?"),
        (["--dropped", "length/too_few_wrods"], 1, "did you mean length/too_few_words?"),
        (["--dropped", "--nearest"], 2, "give --dropped RULE"),
        (["--why"], 2, "give --url, --id, --document or --file"),
        (["--why", "--url", "https://b.org", "--record", "3"], 2, "give --file"),
        (["--why", "--url", "https://nowhere.org"], 1, "no such document is known"),
        (["--why", "--document", "12"], 1, "is not a document id"),
    ],
)
def test_what_cannot_be_answered_is_said_in_one_line(
    out: Path, capsys: pytest.CaptureFixture[str], words: Sequence[str], status: int, message: str
) -> None:
    try:
        found = main(["trace", str(out), *words])
    except SystemExit as ended:
        found = int(str(ended.code))
    assert found == status
    assert message in capsys.readouterr().err


def test_the_answers_are_readable_in_a_terminal(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(out), "--why", "--file", "*.jsonl"]) == 0
    printed = capsys.readouterr().out
    for line in (
        "first: a.jsonl record 2  https://site2.org/a.jsonl  a.jsonl-2",
        "dropped by length/too_few_words: 2, bound 5",
        "removed as exact_duplicate",
        "of a.jsonl record 0  https://site0.org/a.jsonl",
        "could not be read: ",
        "kept: in row",
    ):
        assert line in printed
    assert main(["trace", str(out), "--dropped", "length/too_few_words"]) == 0
    assert "“one two three four”" in capsys.readouterr().out


def test_a_page_that_lost_to_another_of_its_url_leads_to_what_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_corpus(tmp_path, documents=4, recipe=RECIPE.replace("exact: {}", "url: true"))
    urls = ["https://a.org/page", "http://www.a.org/page/?utm_id=7"]
    for name in TEXTS:
        rows = [{"text": text_of(n), "id": f"{name}-{n}", "url": url} for n, url in enumerate(urls)]
        rows.append({"text": text_of(len(name) + ord(name[0])), "id": f"{name}-2", "url": "N/A"})
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = Path(build(path, progress=False).output)
    pages = [row for url in urls for row in ask(capsys, "trace", out, "--why", "--url", url)["documents"]]
    [kept] = [row for row in pages if row["outcome"] == "kept"]
    lost = [row for row in pages if row["outcome"] != "kept"]
    assert (kept["copies"], len(lost)) == (4, 3)
    for row in lost:
        assert (row["outcome"], row["reason"], row["similarity"]) == ("duplicate", "url_duplicate", None)
        assert row["stays"]["document_id"] == kept["document_id"]
    for url in urls:  # what is asked to be taken down is found by either spelling
        assert {one["row"] for one in ask(capsys, "trace", out, "--url", url)["shown"]} == {*kept["rows"]}
    assert main(["trace", str(out), "--why", "--id", lost[0]["id"]]) == 0
    assert "another text of its URL is in row" in capsys.readouterr().out


def test_a_dataset_without_the_tables_says_so(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in out.iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    (copy / "provenance").symlink_to(out / "provenance")
    assert main(["trace", str(copy), "--why", "--id", "a.jsonl-2"]) == 1
    assert "has no tables of removed documents; build it again" in capsys.readouterr().err
    assert one(capsys, copy, "--id", "a.jsonl-4")["outcome"] == "kept"
    assert main(["trace", str(copy), "--dropped", "length/too_few_words"]) == 1
    assert "dropped/*.parquet: build it again" in capsys.readouterr().err
