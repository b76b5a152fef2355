"""`shardkit init` drafts what `build` recognizes: encodings, compressions and kinds of CSV."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import zstandard

from shardkit.errors import RecipeError
from shardkit.writers import build, load_recipe
from shardkit.writers.init_recipe import draft_recipe
from support.small_build import make_corpus, text_of

pytestmark = pytest.mark.usefixtures("inline_builds")

NUMBERS = range(12)
LINES = "".join(json.dumps({"body": text_of(n), "nr": n}) + "\n" for n in NUMBERS)


def table(delimiter: str, *, head: str = "", quote: str = '"', end: str = "\n") -> str:
    rows = [f"nr{delimiter}body", *(f"{n}{delimiter}{quote}{text_of(n)}, so{quote}" for n in NUMBERS)]
    return head + end.join(rows) + end


PRETTY = json.dumps([{"body": text_of(n), "nr": n} for n in NUMBERS], indent=1)
CASES = {
    "UTF-16 with a mark": ("a.jsonl", LINES.encode("utf-16"), None),
    "UTF-16BE with a mark": ("a.jsonl", b"\xfe\xff" + LINES.encode("utf-16-be"), None),
    "UTF-8 with a mark": ("a.jsonl", LINES.encode("utf-8-sig"), None),
    "UTF-32 with a mark": ("a.jsonl", LINES.encode("utf-32"), None),
    "UTF-16 without": ("a.jsonl", LINES.encode("utf-16-le"), "utf-16le"),
    "UTF-16BE without": ("a.jsonl", LINES.encode("utf-16-be"), "utf-16be"),
    "compressed UTF-16": ("a.jsonl.gz", gzip.compress(LINES.encode("utf-16-le")), "utf-16le"),
    "gzip under a plain name": ("a.jsonl", gzip.compress(LINES.encode()), None),
    "zstd under the name of gzip": ("a.jsonl.gz", zstandard.compress(LINES.encode()), None),
    "text under the name of gzip": ("a.jsonl.gz", LINES.encode(), None),
    "array in UTF-16": ("a.json", PRETTY.encode("utf-16-le"), "utf-16le"),
    "; in CSV": ("a.csv", table(";").encode(), None),
    "| in CSV": ("a.csv", table("|").encode(), None),
    "tabs in CSV": ("a.csv", table("\t").encode(), None),
    "sep=": ("a.csv", table("#", head="sep=#\n").encode(), None),
    "sep= of Excel": ("a.csv", table(";", head="sep=;\r\n", end="\r\n").encode("utf-16"), None),
    "TSV without quotes": ("a.tsv", table("\t", quote='"" ').encode(), None),
    "TSV with commas": ("a.tsv", table(",").encode(), None),
    "CSV of old Macs": ("a.csv", table(",", end="\r").encode(), None),
    "CSV in UTF-16": ("a.csv", table(";").encode("utf-16-le"), "utf-16le"),
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
def test_what_build_recognizes_is_drafted_and_built(tmp_path: Path, case: str) -> None:
    name, data, encoding = CASES[case]
    make_corpus(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_bytes(data)
    draft = draft_recipe([str(tmp_path / "data")], tmp_path, tokenizer="tokenizer.json", eos="<|endoftext|>")
    assert not draft.left_out
    (tmp_path / "drafted.yaml").write_text(draft.text)
    recipe = load_recipe(tmp_path / "drafted.yaml")
    [entry] = recipe.inputs
    assert (entry.text, entry.encoding) == ("body", encoding)
    report = build(tmp_path / "drafted.yaml")
    assert report.funnel.read.documents == len(NUMBERS)
    assert not any(report.funnel.quarantined.values())


def test_files_of_other_encodings_are_inputs_of_their_own(tmp_path: Path) -> None:
    make_corpus(tmp_path)
    for name, encoding in (("a", "utf-8"), ("b", "utf-16-le"), ("c", "utf-16"), ("d", "utf-16-be")):
        (tmp_path / f"{name}.txt").write_bytes((text_of(3) * 9).encode(encoding))
    draft = draft_recipe([f"{tmp_path}/*.txt"], tmp_path, tokenizer="t", eos="e")
    assert {one.fields.encoding: one.files for one in draft.inputs} == {None: 2, "utf-16le": 1, "utf-16be": 1}


def test_pages_say_their_own_encoding(tmp_path: Path) -> None:
    page = f"<html><head><title>x</title></head><body><p>{text_of(1)}</p></body></html>"
    (tmp_path / "a.html").write_bytes(page.encode("utf-16-le"))
    [entry] = draft_recipe([str(tmp_path)], tmp_path, tokenizer="t", eos="e").inputs
    assert entry.fields.encoding is None


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt", "a.unknown"])
def test_what_build_does_not_decode_is_left_out_by_name(tmp_path: Path, name: str) -> None:
    text = LINES if name == "a.jsonl" else text_of(2) * 9
    (tmp_path / name).write_bytes(text.encode("utf-32-le"))
    with pytest.raises(RecipeError, match=r"UTF-32LE without a byte order mark; convert|no known format"):
        draft_recipe([str(tmp_path)], tmp_path, tokenizer="t", eos="e")


def test_texts_without_a_known_ending_are_drafted_with_their_encoding(tmp_path: Path) -> None:
    (tmp_path / "a.unknown").write_bytes((text_of(1) * 5).encode("utf-16-be"))
    [entry] = draft_recipe([str(tmp_path)], tmp_path, tokenizer="t", eos="e").inputs
    assert (entry.fields.format, entry.fields.encoding) == ("text", "utf-16be")
