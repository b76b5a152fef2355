"""`shardkit init` looks at data and writes a recipe that builds it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from shardkit.cli.main import main
from shardkit.formats.mds import MdsWriter
from shardkit.writers import load_recipe
from support.foreign_tars import make_tar
from support.small_build import make_corpus, text_of, train_bpe

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:"

pytestmark = pytest.mark.usefixtures("inline_builds")


def write_lines(path: Path, records: list[Mapping[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def record(number: int) -> dict[str, object]:
    return {
        "doc_id": f"d{number}",
        "lang": "en",
        "link": f"https://a.example/{number}",
        "title": f"title {number}",
        "body": f"{text_of(number)} and it goes on for a while, so that there are enough words to stay",
    }


def test_the_recipe_that_init_writes_builds_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_corpus(tmp_path / "old")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old/tokenizer.json").rename(tmp_path / "tokenizer.json")
    write_lines(tmp_path / "data/a/one.jsonl", [record(n) for n in range(30)])
    write_lines(tmp_path / "data/two.jsonl.gz", [record(n) for n in range(30, 60)])
    pq.write_table(
        pa.table({"text": [text_of(n) * 9 for n in range(60, 90)]}), tmp_path / "data/three.parquet"
    )
    (tmp_path / "data/MANIFEST.json").write_text(json.dumps({"files": 3}, indent=2))
    (tmp_path / "data/README.md").write_text("# Data")
    assert main(["init", "data"]) == 0
    shown = capsys.readouterr().out
    assert "left out: data/MANIFEST.json: has no field with text" in shown
    assert "shardkit build recipe.yaml --limit 1000" in shown
    recipe = load_recipe("recipe.yaml")
    lines, table = recipe.inputs
    assert (lines.path, lines.text, lines.id, lines.url) == ("data", "body", "doc_id", "link")
    assert lines.exclude == ("*.json", "*.md", "*.parquet")
    assert (table.text, table.id, table.url) == ("text", None, None)
    assert set(table.exclude) == {"*.json", "*.md", "*.jsonl", "*.jsonl.gz"}
    assert recipe.tokenizer is not None
    assert recipe.tokenizer.eos == "<|endoftext|>"
    assert main(["build", "recipe.yaml", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["funnel"]["read"]["documents"] == 90


def test_a_recipe_that_exists_is_never_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(tmp_path / "a.jsonl", [record(1)])
    (tmp_path / "mine.yaml").write_text("mine")
    assert main(["init", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "mine.yaml")]) == 2
    assert "mine.yaml exists; remove it, or name another file" in capsys.readouterr().err
    assert (tmp_path / "mine.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("records", "text", "id", "url"),
    [
        ([{"text": "short", "content": "x" * 500}], "content", None, None),
        ([{"text": "long enough " * 9, "summary": "y" * 200}], "text", None, None),
        ([{"page": {"body": "some words " * 5, "uri": "http://a/b"}}], "page.body", None, "page.uri"),
        ([{"text": "a b", "url": "not one", "link": "https://a/"}], "text", None, None),
        ([{"text": "a b", "uuid": n % 2} for n in range(4)], "text", None, None),
        ([{"text": "a b", "sha256": f"{n:064}", "n": n} for n in range(4)], "text", "sha256", None),
        ([{"text": "a b", "link": None}, {"text": "c d", "link": "https://a"}], "text", None, "link"),
    ],
)
def test_fields_are_found_by_their_contents(
    records: list[Mapping[str, object]], text: str, id: str | None, url: str | None, tmp_path: Path
) -> None:
    write_lines(tmp_path / "a.jsonl", records)
    assert main(["init", str(tmp_path), "--output", str(tmp_path / "recipe.yaml"), "--json"]) == 0
    [found] = load_recipe(tmp_path / "recipe.yaml").inputs
    assert (found.text, found.id, found.url) == (text, id, url)


@pytest.mark.parametrize(
    ("texts", "extract", "comment"),
    [
        (["<!-- a license -->\n<html><p>one</p></html>", "<?xml version='1.0'?><!DOCTYPE html><p>two"],
         {"extract": "resiliparse"}, ""),
        (["<!-- a license -->\n<script>1</script><p>one", "<table><tr><td>two", "<div>three"],
         {}, "# extract: resiliparse  # main text, if all texts are HTML: 100% of a sample begin with"),
        (["plain text", "a < b is no markup", "<- nor is this"], {}, ""),
    ],
)  # fmt: skip
def test_texts_that_are_html_or_look_like_it_are_noticed(
    texts: list[str],
    extract: Mapping[str, str],
    comment: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    assert main(["init", str(tmp_path), "--output", str(tmp_path / "recipe.yaml")]) == 0
    draft = (tmp_path / "recipe.yaml").read_text()
    [entry] = yaml.safe_load(draft)["inputs"]
    assert {key: entry[key] for key in entry if key == "extract"} == extract
    assert comment in draft
    assert ("# extract:" in draft) == bool(comment)
    assert ("begin with markup: see `extract`" in capsys.readouterr().out) == bool(comment)


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.txt", b"A first line\nand a second\n", "  # The first text begins: A first line\n"),
        (
            "a.wet",
            b"WARC/1.0\r\n",
            "    # extract: trafilatura  # main text of pages; by default resiliparse\n",
        ),
    ],
)
def test_a_draft_shows_the_first_line_of_plain_text_and_what_reads_pages(
    name: str, content: bytes, line: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    assert main(["init", str(tmp_path / name), "--output", str(tmp_path / "recipe.yaml")]) == 0
    assert line in (tmp_path / "recipe.yaml").read_text()


def test_an_input_of_pages_and_records_shows_the_text_and_the_fields_of_the_records(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text("<html><p>a page</p></html>")
    write_lines(tmp_path / "b.jsonl", [{"text": "A first text", "lang": "en"}])
    assert main(["init", str(tmp_path), "--output", str(tmp_path / "recipe.yaml")]) == 0
    draft = (tmp_path / "recipe.yaml").read_text()
    assert "  # The first text begins: A first text\n" in draft
    assert "    # metadata: [lang]  #" in draft


def test_texts_and_names_of_others_cannot_break_the_recipe(tmp_path: Path) -> None:
    hostile = "a\u2028b\x85c\nfilters: [x] \x1b[2J #\"' {"
    write_lines(tmp_path / "da ta: #1" / "a.jsonl", [{hostile: hostile * 9, "x: y\n- z": 3, "id: #": "v"}])
    assert main(["init", str(tmp_path / "da ta: #1"), "--output", str(tmp_path / "recipe.yaml")]) == 0
    text = (tmp_path / "recipe.yaml").read_text()
    assert "\x1b" not in text
    assert load_recipe(tmp_path / "recipe.yaml").inputs[0].text == hostile
    assert set(yaml.safe_load(text)) == {"inputs", "steps", "tokenizer", "pack", "output"}


def test_files_that_a_shell_listed_are_one_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "abc":
        write_lines(tmp_path / f"data/{name}.jsonl", [record(1)])
    assert main(["init", "data/a.jsonl", "data/b.jsonl", "data/c.jsonl", "--output", "all.yaml"]) == 0
    assert main(["init", "data/a.jsonl", "data/b.jsonl", "--output", "some.yaml"]) == 0
    assert [entry.path for entry in load_recipe("all.yaml").inputs] == ["data/*.jsonl"]
    assert [entry.path for entry in load_recipe("some.yaml").inputs] == ["data/a.jsonl", "data/b.jsonl"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.ps", "%!PS-Adobe-3.0\n", "a.ps: PostScript"),
        ("a.jsonl", '{"n": 1}\n', "a.jsonl: has no field with text"),
        ("a.json", '[{"n": 1}]', "a.json: has no field with text"),
        (
            "a.jsonl",
            '{"conversations": [{"from": "human", "value": "hi"}]}',
            "has conversations of ShareGPT in co",
        ),
        (
            "a.txt",
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1\n",
            "git lfs pull",
        ),
    ],
)
def test_data_without_documents_is_refused(
    name: str, content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(content)
    assert main(["init", str(tmp_path), "--output", str(tmp_path / "recipe.yaml")]) == 2
    error = capsys.readouterr().err
    assert "no file has documents" in error
    assert message in error
    assert not (tmp_path / "recipe.yaml").exists()


def test_datasets_are_drafted_with_the_column_or_member_that_holds_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_corpus(tmp_path / "old")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old/tokenizer.json").rename(tmp_path / "tokenizer.json")
    with MdsWriter("mds", columns={"body": "str", "link": "str", "n": "int"}) as writer:
        for n in range(30):
            writer.write({"body": text_of(n) * 9, "link": f"https://a.example/{n}", "n": n})
    members = [(f"{n}.json", json.dumps({"content": text_of(n) * 9}).encode()) for n in range(30)]
    (tmp_path / "tars").mkdir()
    (tmp_path / "tars/a.tar").write_bytes(make_tar(members))
    assert main(["init", "mds", "tars", "--output", "r.yaml"]) == 0
    mds, tars = load_recipe("r.yaml").inputs
    assert (mds.path, mds.text, mds.url) == ("mds", "body", "link")
    assert (tars.path, tars.text) == ("tars", "json.content")


TEXT = "A sentence of ordinary text, which is long enough for the filter of lengths. " * 3
CHAT = [{"role": "user", "content": f"a question {TEXT}"}, {"role": "assistant", "content": f"answer {TEXT}"}]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
WARC = (
    b"WARC/1.0\r\nWARC-Type: conversion\r\nWARC-Record-ID: <urn:uuid:00000000-0000-4000-8000-000000000001>"
    b"\r\nWARC-Target-URI: http://a.test/\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n%s\r\n\r\n"
)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("files", "drafted", "documents"),
    [
        ({"a.json": json.dumps([{"content": TEXT}] * 2)}, {"format": "json", "text": "content"}, 1),
        ({"a.json": json.dumps([{"content": TEXT}] * 2, indent=2)}, {"format": "json", "text": "content"}, 1),
        ({"a.json": json.dumps({"body": TEXT}, indent=2)}, {"format": "json", "text": "body"}, 1),
        ({"a.json": json.dumps([{"text": TEXT}]), "b.jsonl": json.dumps({"text": f"b {TEXT}"})},
         {"format": "json"}, 2),
        ({"a.json": json.dumps([{"text": TEXT}]), "b.json": json.dumps({"text": f"b {TEXT}"})},
         {"format": "json"}, 2),
        ({"a.jsonl": json.dumps({"messages": CHAT})}, {"messages": "messages"}, 1),
        ({"a.jsonl": json.dumps({"conversations": CHAT})}, {"messages": "conversations"}, 1),
        ({"a.json": json.dumps([{"messages": CHAT}])}, {"format": "json", "messages": "messages"}, 1),
        ({"a.jsonl": json.dumps({"prompt": TEXT, "completion": f"b {TEXT}"})},
         {"prompt": "prompt", "completion": "completion"}, 1),
        ({"a.jsonl": json.dumps({"instruction": TEXT, "input": "", "output": f"b {TEXT}"})},
         {"prompt": "instruction", "completion": "output"}, 1),
        ({"a.jsonl": json.dumps({"text": TEXT})[:-1] + ', "prompt": "x"}'}, {"text": "text"}, 1),
        ({"a.md": f"# Title\n{TEXT}", "b.md": f"# Other\n{TEXT}"}, {"format": "text"}, 2),
        ({"a.py": f"text = {TEXT!r}\n"}, {"format": "text"}, 1),
        ({"a.wet": WARC % (len(TEXT), TEXT.encode())}, {"format": None}, 1),
        ({"_b.jsonl": json.dumps({"text": TEXT}), "a.jsonl": json.dumps({"text": TEXT})},
         {"text": "text"}, 1),
        ({"train-0.jsonl": json.dumps({"text": TEXT}), "test-0.jsonl": json.dumps({"text": f"t {TEXT}"})},
         {"exclude": ("test-*.jsonl",)}, 1),
        ({"train/0.jsonl": json.dumps({"text": TEXT}), "test/0.jsonl": json.dumps({"text": f"t {TEXT}"})},
         {"exclude": ("test",)}, 1),
        ({"README.md": "---\nconfigs:\n- {data_files: [{split: train, path: a*}, {split: x, path: b*}]}\n"
          "---\n",
          "a.jsonl": json.dumps({"text": TEXT}), "b.jsonl": json.dumps({"text": f"b {TEXT}"})},
         {"text": "text"}, 1),
    ],
)  # fmt: skip
def test_every_draft_builds(
    files: Mapping[str, str | bytes],
    drafted: Mapping[str, object],
    documents: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_corpus(tmp_path / "old")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old/tokenizer.json").rename(tmp_path / "tokenizer.json")
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    for name, data in files.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    assert main(["init", "in"]) == 0
    first = load_recipe("recipe.yaml").inputs[0]
    assert {key: getattr(first, key) for key in drafted} == drafted
    capsys.readouterr()
    assert main(["build", "recipe.yaml", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["funnel"]["kept"]["documents"] == documents


def test_a_compressed_table_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "a")
    (tmp_path / "a.parquet").write_bytes(gzip.compress((tmp_path / "a").read_bytes()))
    (tmp_path / "a").unlink()
    assert main(["init", str(tmp_path), "--output", str(tmp_path / "recipe.yaml")]) == 2
    assert "a.parquet: it is compressed by gzip" in capsys.readouterr().err


def test_files_that_are_left_out_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path / "in/train.jsonl", [record(1)])
    write_lines(tmp_path / "in/test.jsonl", [record(2)])
    write_lines(tmp_path / "in/_more.jsonl", [record(3)])
    assert main(["init", str(tmp_path / "in"), "--output", str(tmp_path / "r.yaml")]) == 0
    shown = capsys.readouterr().out
    assert "in/test.jsonl: its name is that of a split not meant for training" in shown
    assert "in/_more.jsonl: its name, or that of its folder, begins with . or _" in shown


@pytest.mark.parametrize(
    ("beside", "eos", "bos"),
    [
        ({}, "<|endoftext|>", None),
        ({"tokenizer_config.json": {"eos_token": "<stop>"}}, "<stop>", None),
        ({"tokenizer_config.json": {"eos_token": {"content": "<stop>"}, "bos_token": "<go>"}},
         "<stop>", None),
        ({"tokenizer_config.json": {"eos_token": "<stop>", "bos_token": "<go>", "add_bos_token": True}},
         "<stop>", "<go>"),
        ({"special_tokens_map.json": {"eos_token": {"content": "<stop>"}}}, "<stop>", None),
        ({"special_tokens_map.json": {"eos_token": "<go>"}, "tokenizer_config.json": {"eos_token": "<stop>"}},
         "<stop>", None),
        ({"tokenizer_config.json": {"eos_token": "<unknown>"}}, "<|endoftext|>", None),
        ({"tokenizer_config.json": [1]}, "<|endoftext|>", None),
        ({"tokenizer_config.json": {"eos_token": None, "add_bos_token": True}}, "<|endoftext|>", None),
    ],
)  # fmt: skip
def test_the_tokens_that_end_and_begin_documents_are_those_of_the_files_beside_the_tokenizer(
    beside: Mapping[str, object], eos: str, bos: str | None, tmp_path: Path
) -> None:
    write_lines(tmp_path / "a.jsonl", [record(1)])
    train_bpe(["a text"], special=["<go>", "<stop>", "<|endoftext|>"]).save(str(tmp_path / "tokenizer.json"))
    for name, data in beside.items():
        (tmp_path / name).write_text(json.dumps(data))
    assert main(["init", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "r.yaml")]) == 0
    made = load_recipe(tmp_path / "r.yaml").tokenizer
    assert made is not None
    assert (made.eos, made.bos) == (eos, bos)
