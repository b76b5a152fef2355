"""Stack Exchange's Posts.xml: questions and answers become documents, and groups join their threads."""

from __future__ import annotations

import bz2
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders

from shardkit.datasets.dataset import open_dataset
from shardkit.errors import BuildError
from shardkit.writers import build
from shardkit.writers.init_recipe import draft_recipe
from support.dumps import export, page, posts
from support.read_inputs import put, read
from support.small_build import train_bpe, tree

QUESTION: dict[str, object] = {
    "Id": 4,
    "PostTypeId": 1,
    "CreationDate": "2008-07-31T21:42:52.667",
    "Score": 700,
    "Body": "<p>When I write</p>\n<pre><code>if a &lt; b:\n    return\n</code></pre>\n<p>why?</p>\n",
    "Title": "Is a < b & c?",
    "Tags": "<c#><floating-point>",
    "ContentLicense": "CC BY-SA 4.0",
}
ROWS = [
    QUESTION,
    {"Id": 7, "PostTypeId": 2, "ParentId": 4, "Score": 9, "Body": "<p>low</p>", "Tags": "|a|b|"},
    {"Id": 8, "PostTypeId": 5, "Body": "<p>describes a tag</p>"},
    {"Id": 9, "PostTypeId": 2, "ParentId": 4, "Score": 10, "Body": "<p>high</p>"},
    {"Id": 10, "PostTypeId": 2, "ParentId": 4, "Score": -3, "Body": "<p>lowest</p>"},
    {"Id": 11, "PostTypeId": 2, "ParentId": 99, "Score": 1, "Body": ""},
]
FIELDS = ["type", "thread", "rank", "score", "tags", "title", "site", "license"]


def site(folder: Path, data: bytes, name: str = "Posts.xml") -> str:
    (folder / "ai.stackexchange.com").mkdir(exist_ok=True)
    return put(folder, f"ai.stackexchange.com/{name}", data)


def test_questions_and_answers_are_documents(tmp_path: Path) -> None:
    for name, data in (("Posts.xml", posts(ROWS)), ("Posts.xml.bz2", bz2.compress(posts(ROWS)))):
        table, bad, ledger = read(tmp_path, site(tmp_path, data, name), metadata=FIELDS, allowed=0)
        code = "if a < b:\n    return"
        assert table["text"].to_pylist() == [
            f"Is a < b & c?\n\nWhen I write\n\n{code}\n\nwhy?",
            "low",
            "high",
            "lowest",
        ]
        assert table["record"].to_pylist() == [2, 3, 5, 6]
        assert table["id"].to_pylist() == ["4", "7", "9", "10"]
        assert table["url"].to_pylist()[:2] == [
            "https://ai.stackexchange.com/questions/4",
            "https://ai.stackexchange.com/a/7",
        ]
        found = [json.loads(row) for row in table["metadata"].to_pylist()]
        assert found[0] == {
            "type": "question",
            "thread": "ai.stackexchange.com/4",
            "rank": "04",
            "score": 700,
            "tags": ["c#", "floating-point"],
            "title": "Is a < b & c?",
            "site": "ai.stackexchange.com",
            "license": "CC BY-SA 4.0",
        }
        assert {row["thread"] for row in found} == {"ai.stackexchange.com/4"}
        assert found[1]["tags"] == ["a", "b"]
        assert [row["score"] for row in sorted(found, key=lambda row: str(row["rank"]))] == [700, 10, 9, -3]
        assert not bad
        assert ledger.dropped["stackexchange/other_post"].documents == 1
        assert ledger.dropped["html/no_text"].documents == 1


def test_attributes_are_fields_and_html_can_be_kept(tmp_path: Path) -> None:
    table, _, _ = read(tmp_path, site(tmp_path, posts(ROWS)), metadata=["ParentId"], extract="none")
    assert table["text"][1].as_py() == "<p>low</p>"
    assert table["metadata"].to_pylist()[:2] == ["{}", '{"ParentId":"4"}']


def test_documents_do_not_depend_on_the_splits(tmp_path: Path) -> None:
    name = site(tmp_path, posts(ROWS * 40))
    whole, _, _ = read(tmp_path, name)
    parts, bad, _ = read(tmp_path, name, split_bytes=700)
    assert not bad
    assert parts.num_rows == whole.num_rows == 160
    assert parts.sort_by("record").equals(whole.combine_chunks())


BAD: dict[bytes, tuple[str, str]] = {
    b'<row Id="1" PostTypeId="1" Body="a" Body="b" />': ("bad_record", "duplicate"),
    b'<row Id="1" PostTypeId="1" Body="a"': ("bad_record", "not readable XML"),
    b'<row Id="1" PostTypeId="1" Body="a&b;" />': ("bad_record", "entity"),
    b'<row Id="1" PostTypeId="1" Body="&#0;" />': ("bad_record", "not readable XML"),
    b'<row Id="1" PostTypeId="1" Body="\xff" />': ("bad_utf8", "byte 33"),
    b'<row Id="1" PostTypeId="1" Bod="x" />': ("no_text", "its attributes: Bod, Id, PostTypeId"),
    b"<users>": ("bad_record", "a line of its own"),
    b'<posts><row Id="1" /><row Id="2" /></posts>': ("bad_record", "a line of its own"),
    b'<!DOCTYPE a [<!ENTITY b "c">]><row Id="&b;" />': ("bad_record", "a line of its own"),
    b'<row Id="1" PostTypeId="1" Body="' + b"x" * 5_000 + b'" />': ("too_long", "more than max_record_bytes"),
    b"<row " + b"<a>" * 1_000: ("bad_record", "not readable XML"),
}


def test_a_bad_row_costs_itself(tmp_path: Path) -> None:
    good = b'<row Id="1" PostTypeId="2" ParentId="0" Body="good" />\r\n'
    data = b"<posts>\n" + b"".join(good + line + b"\n" for line in BAD) + good + b"</posts>\n"
    table, bad, _ = read(tmp_path, put(tmp_path, "Posts.xml", data), limit=4_000)
    assert table.num_rows == len(BAD) + 1
    assert [entry["record"] for entry in bad] == list(range(2, 2 * len(BAD) + 2, 2))
    for entry, (line, (reason, words)) in zip(bad, BAD.items(), strict=True):
        assert (entry["reason"], words in entry["error"]) == (reason, True), entry
        assert data[entry["byte_offset"] :].startswith(line)


def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    data = posts(ROWS)
    for cut in (data.rindex(b"</posts>"), data.rindex(b"<row") + 30, len(data) - 1):
        table, (entry,), _ = read(tmp_path, put(tmp_path, "Posts.xml", data[:cut]))
        assert table.num_rows == 4
        assert entry["reason"] in ("damaged_file", "bad_record")
    with pytest.raises(BuildError, match="ends before </posts>"):
        read(tmp_path, put(tmp_path, "Posts.xml", data[: data.rindex(b"</posts>")]), allowed=0)


def test_other_tables_of_the_dump_are_refused_by_name(tmp_path: Path) -> None:
    data = b'<?xml version="1.0" encoding="utf-8"?>\r\n<users>\r\n  <row Id="1" />\r\n</users>'
    for name in ("Users.xml", "Posts.xml"):
        _, (entry,), _ = read(tmp_path, put(tmp_path, name, data))
        assert entry["reason"] == "other_format"
        assert "the texts are in Posts.xml" in entry["error"]


def test_flipped_bits_never_raise_anything_else(tmp_path: Path) -> None:
    rng, whole = random.Random(0), posts(ROWS)
    for _ in range(200):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        read(tmp_path, put(tmp_path, "Posts.xml", bytes(data)))


RECIPE = """\
inputs:
  - {path: "*.stackexchange.com/Posts.xml", metadata: [thread, rank, type]}
  - {path: "*.xml.bz2", metadata: [title, revision]}
tokenizer: {path: tokenizer.json, eos: "<|endoftext|>"}
group: {by: thread, order: rank, separator: "<|file_sep|>"}
pack: {sequence_length: 512}
output: {path: out}
"""


def corpus(folder: Path) -> Path:
    """Two sites, whose threads have the same numbers, and a wiki; returns the recipe."""
    others: list[dict[str, object]] = [
        {"Id": n, "PostTypeId": 1, "Title": f"Q{n}", "Body": f"<p>another question {n}</p>", "Score": n}
        for n in range(100, 140)
    ]
    for host in ("ai", "math"):
        (folder / f"{host}.stackexchange.com").mkdir(parents=True)
        rows = [ROWS[1], ROWS[4], *others, ROWS[3], QUESTION]
        marked = [row | {"Body": f"<p>{host}</p>{row['Body']}"} for row in rows]
        (folder / f"{host}.stackexchange.com" / "Posts.xml").write_bytes(posts(marked))
    pages = [page(n, f"T{n}", f"article {n} of a [[wiki]]") for n in range(50)]
    (folder / "wiki.xml.bz2").write_bytes(bz2.compress(export(*pages)))
    train_bpe(["some text"], special=SPECIAL).save(str(folder / "tokenizer.json"))
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder / "recipe.yaml"


SPECIAL = ("<|endoftext|>", "<|file_sep|>")


@pytest.mark.usefixtures("inline_builds")
def test_groups_join_a_thread_whose_posts_are_far_apart(tmp_path: Path) -> None:
    """The question, then the answers by falling score; a thread of another site has the same number."""
    result = build(corpus(tmp_path), progress=False)
    with open_dataset(result.output) as dataset:
        written: list[Any] = [dataset[number]["tokens"] for number in range(len(dataset))]
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.decoder = decoders.ByteLevel()
    tokens = [int(one) for row in written for one in row]
    texts = tokenizer.decode(tokens, skip_special_tokens=False).split("<|endoftext|>")
    for host in ("ai", "math"):
        [thread] = [text for text in texts if host in text and "high" in text]
        parts = [part.split("\n\n")[-1] for part in thread.split("<|file_sep|>") if part]
        assert parts == ["why?", "high", "low", "lowest"]
        assert thread.count(host) == 4
    assert sum("of a wiki" in text for text in texts) == 50


@pytest.mark.extended
def test_a_build_from_dumps_has_the_same_bytes_for_any_workers(tmp_path: Path) -> None:
    results = [build(corpus(tmp_path / str(n)), workers=n, progress=False) for n in (1, 2)]
    assert tree(results[0].output) == tree(results[1].output)


def test_a_folder_of_dumps_is_drafted(tmp_path: Path) -> None:
    corpus(tmp_path / "data")
    (tmp_path / "data" / "ai.stackexchange.com" / "Users.xml").write_bytes(
        b"<users>\n<row Id='1' />\n</users>"
    )
    (tmp_path / "data" / "questions.xml").write_bytes(posts(ROWS))
    draft = draft_recipe([str(tmp_path / "data")], tmp_path, tokenizer="x", eos="y")
    found = {
        tuple(one.endings): (one.files, one.fields.format) for one in draft.inputs if one.endings != [".json"]
    }
    assert found == {(".xml",): (3, "stackexchange"), (".xml.bz2",): (1, "mediawiki")}
    assert "the texts are in Posts.xml" in draft.left_out["data/ai.stackexchange.com/Users.xml"]
    assert "metadata: [thread, rank" in draft.text
