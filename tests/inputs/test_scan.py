from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import RecipeError
from shardkit.writers.inputs import cuts
from shardkit.writers.inputs.cuts import KeptCuts
from shardkit.writers.inputs.files import InputFile, open_input
from shardkit.writers.inputs.scan import scan_inputs
from support.read_inputs import recipe


def put(folder: Path, name: str, data: bytes = b"{}\n") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def files(folder: Path, *inputs: str | dict[str, Any]) -> list[str]:
    return [split.file for split in scan_inputs(recipe(folder, *inputs))]


def test_files_come_in_the_order_of_inputs_then_names_with_their_formats(tmp_path: Path) -> None:
    for name in ("d/b.jsonl", "d/a.ndjson.gz", "d/sub/c.JSON.zst", "d/z.parquet", "t.txt"):
        put(tmp_path, name)
    splits = scan_inputs(recipe(tmp_path, "t.txt", "d"))
    assert [(s.index, s.source, s.file, s.format, s.compression) for s in splits] == [
        (0, 0, "t.txt", "text", None),
        (1, 1, "d/a.ndjson.gz", "jsonl", "gzip"),
        (2, 1, "d/b.jsonl", "jsonl", None),
        (3, 1, "d/sub/c.JSON.zst", "jsonl", "zstd"),
        (4, 1, "d/z.parquet", "parquet", None),
    ]


def test_names_do_not_depend_on_where_the_folder_lies_nor_on_how_it_was_named(tmp_path: Path) -> None:
    for place in ("one", "two/deep"):
        put(tmp_path, f"{place}/recipes/data/a.jsonl")
        put(tmp_path, f"{place}/raw/b.jsonl")
    one = files(tmp_path / "one/recipes", "data", "../raw/*.jsonl")
    assert one == files(tmp_path / "two/deep/recipes", "./data/", "../raw/b.jsonl")
    assert one == ["data/a.jsonl", "../raw/b.jsonl"]
    absolute = str(tmp_path / "one/recipes/data/a.jsonl")
    assert files(tmp_path / "one/recipes", absolute) == ["data/a.jsonl"]
    assert files(tmp_path / "two/deep/recipes", absolute) == [absolute]


def test_with_a_base_names_are_the_same_wherever_the_files_lie(tmp_path: Path) -> None:
    for place in ("one/data", "two/deep/er"):
        put(tmp_path, f"{place}/a.jsonl")
        put(tmp_path, f"{place}/sub/b.jsonl")
    (tmp_path / "recipes").mkdir()
    names = [
        files(
            tmp_path / "recipes", {"path": str(tmp_path / "one/data"), "base": str(tmp_path / "one/data/")}
        ),
        files(tmp_path / "recipes", {"path": "../two/deep/er/**", "base": "../two/deep/er"}),
        files(tmp_path / "one", {"path": "data", "base": "./data"}),
    ]
    assert names == [["a.jsonl", "sub/b.jsonl"]] * 3
    assert files(tmp_path / "one", {"path": "data/sub", "base": "."}) == ["data/sub/b.jsonl"]
    for base in ("data/sub", str(tmp_path / "two")):
        with pytest.raises(RecipeError, match=r"inputs\[0\].base: .*a.jsonl is not below"):
            files(tmp_path / "one", {"path": "data", "base": base})


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.jsonl", ["a.jsonl"]),
        ("**/*.jsonl", ["a.jsonl", "x/b.jsonl", "x/y/c.jsonl"]),
        ("x/**", ["x/b.jsonl", "x/y/c.jsonl"]),
        ("?/y/[ab-d].jsonl", ["x/y/c.jsonl"]),
        ("[1].jsonl", ["[1].jsonl"]),
        ("_*/*.jsonl", ["_tmp/d.jsonl"]),
        ("x/.*.jsonl", ["x/.hidden.jsonl"]),
        (".", ["[1].jsonl", "a.jsonl", "x/b.jsonl", "x/y/c.jsonl"]),
    ],
)
def test_globs_and_folders_name_these_files(tmp_path: Path, pattern: str, expected: list[str]) -> None:
    for name in ("a.jsonl", "[1].jsonl", "x/b.jsonl", "x/y/c.jsonl", "x/.hidden.jsonl", "_tmp/d.jsonl"):
        put(tmp_path, name)
    if pattern == "*.jsonl":
        expected = ["[1].jsonl", *expected]
    if pattern == "**/*.jsonl":
        expected = ["[1].jsonl", *expected]
    assert files(tmp_path, pattern) == expected


def test_a_glob_that_matches_folders_reads_the_files_in_them(tmp_path: Path) -> None:
    names = ("d/one.jsonl", "d/two.jsonl/p.jsonl", "d/two.jsonl/deep/q.jsonl", "d/three/part.jsonl")
    others = ("d/two.jsonl/_SUCCESS", "d/two.jsonl/.p.jsonl.crc", "d/two.jsonl/_temporary/p.jsonl")
    for name in (*names, *others):
        put(tmp_path, name)
    assert files(tmp_path, "d/*.jsonl") == ["d/one.jsonl", "d/two.jsonl/deep/q.jsonl", "d/two.jsonl/p.jsonl"]
    assert files(tmp_path, "d/t*.jsonl") == ["d/two.jsonl/deep/q.jsonl", "d/two.jsonl/p.jsonl"]
    assert files(tmp_path, "d/*") == files(tmp_path, "d") == sorted(names)
    assert files(tmp_path, "*/three") == ["d/three/part.jsonl"]
    (tmp_path / "d/loop.jsonl").symlink_to(tmp_path, target_is_directory=True)
    assert files(tmp_path, "d/*.jsonl") == ["d/one.jsonl", "d/two.jsonl/deep/q.jsonl", "d/two.jsonl/p.jsonl"]


def test_a_loop_of_links_ends(tmp_path: Path) -> None:
    put(tmp_path, "d/e/a.jsonl")
    (tmp_path / "d/e/up").symlink_to(tmp_path / "d", target_is_directory=True)
    (tmp_path / "d/self").symlink_to(".", target_is_directory=True)
    assert files(tmp_path, "d") == ["d/e/a.jsonl"]
    assert files(tmp_path, "**/*.jsonl") == ["d/e/a.jsonl"]


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (["none/*.jsonl"], "inputs[0].path: none/*.jsonl matches no file"),
        (["missing.jsonl"], "inputs[0].path: missing.jsonl matches no file"),
        (["empty"], "inputs[0].path: empty matches no file"),
        (["a.jsonl", "*.jsonl"], "inputs[1].path: a.jsonl is the same file as a.jsonl of inputs[0]"),
        (["links"], "links/two.jsonl is the same file as links/one.jsonl"),
        (["notes.md"], "the name notes.md does not tell its format"),
        (["data.jsonl.zip"], ".zip files cannot be read; compress with .gz .zst .zstd .bz2"),
        (["table.parquet.gz"], "a compressed parquet file cannot be read"),
        (["broken.jsonl"], "No such file"),
        (["pipe.jsonl"], "is not a regular file"),
    ],
)
def test_what_cannot_be_read_as_meant_is_refused(tmp_path: Path, inputs: list[str], words: str) -> None:
    for name in ("a.jsonl", "links/one.jsonl", "notes.md", "data.jsonl.zip", "table.parquet.gz"):
        put(tmp_path, name)
    (tmp_path / "empty").mkdir()
    (tmp_path / "links/two.jsonl").symlink_to("one.jsonl")
    if inputs == ["broken.jsonl"]:
        (tmp_path / "broken.jsonl").symlink_to("gone")
    if inputs == ["pipe.jsonl"]:
        os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(RecipeError) as caught:
        files(tmp_path, *inputs)
    assert words in str(caught.value)


@pytest.mark.parametrize("wrong", ["text/*.jsonl", "text"])
def test_inputs_whose_folder_is_misspelled_are_answered_with_the_folder(tmp_path: Path, wrong: str) -> None:
    put(tmp_path, "texts/a.jsonl")
    with pytest.raises(RecipeError, match=r"matches no file .*; did you mean .*/texts\?$"):
        files(tmp_path, wrong)


def test_a_format_given_in_the_recipe_overrides_the_name(tmp_path: Path) -> None:
    put(tmp_path, "notes.md.gz", gzip.compress(b"# x"))
    (split,) = scan_inputs(recipe(tmp_path, {"path": "notes.md.gz", "format": "text"}))
    assert (split.format, split.compression) == ("text", "gzip")


def test_empty_files_are_one_empty_split(tmp_path: Path) -> None:
    put(tmp_path, "a.jsonl", b"")
    (split,) = scan_inputs(recipe(tmp_path, "a.jsonl"))
    assert (split.start, split.end, split.first_record, split.bytes) == (0, 0, 0, 0)


@settings(max_examples=150, deadline=None)
@given(
    lines=st.lists(st.binary(max_size=40).map(lambda b: b.replace(b"\n", b"")), max_size=60),
    newline_at_end=st.booleans(),
    split_bytes=st.integers(1, 120),
)
def test_splits_of_a_plain_file_tile_it_at_line_ends_and_know_their_line_numbers(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], newline_at_end: bool, split_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("scan")
    lines = [b'{"text": "so that the file looks like plain lines"}', *lines]
    data = b"\n".join(lines) + b"\n" * newline_at_end
    put(folder, "a.jsonl", data)
    splits = scan_inputs(recipe(folder, "a.jsonl"), split_bytes=split_bytes)
    assert [s.start for s in splits] == [0, *(s.end for s in splits[:-1])]
    assert splits[-1].end == len(data)
    assert sum(s.bytes for s in splits) == len(data)
    for split in splits:
        assert split.first_record == data[: split.start].count(b"\n")
        assert split.start == 0 or data[split.start - 1 : split.start] == b"\n"
        assert split.start < split.end or not data
        assert split is splits[-1] or split.bytes >= split_bytes
        # No split could have ended earlier and still have split_bytes.
        assert b"\n" not in data[split.start + split_bytes - 1 : split.end - 1]


def test_a_cut_found_beyond_the_read_buffer_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "a.jsonl", b"".join(b"%d" % i * (i % 37) + b"\n" for i in range(500)))
    expected = scan_inputs(recipe(tmp_path, "a.jsonl"), split_bytes=700)
    assert len(expected) > 10
    for size in (1, 3, 64, 701):
        monkeypatch.setattr("shardkit.writers.inputs.cuts._READ_BYTES", size)
        assert scan_inputs(recipe(tmp_path, "a.jsonl"), split_bytes=700) == expected


def test_parquet_is_cut_between_row_groups(tmp_path: Path) -> None:
    table = pa.table({"text": [f"document {i} " * 50 for i in range(100)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    splits = scan_inputs(recipe(tmp_path, "a.parquet"), split_bytes=2000)
    assert len(splits) > 2
    assert [s.start for s in splits] == [0, *(s.end for s in splits[:-1])]
    assert splits[-1].end == 10
    assert [s.first_record for s in splits] == [10 * s.start for s in splits]


def test_a_parquet_file_without_a_footer_is_one_split_for_the_reader_to_judge(tmp_path: Path) -> None:
    put(tmp_path, "a.parquet", b"PAR1 nothing")
    (split,) = scan_inputs(recipe(tmp_path, "a.parquet"))
    assert split.bytes == 12


def test_kept_cuts_spare_reading_a_file_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"text": [f"document {i} " * 50 for i in range(100)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    put(tmp_path, "b.jsonl", b'{"text": "x"}\n' * 500)
    put(tmp_path, "c.parquet", b"PAR1 nothing")
    made, kept = recipe(tmp_path, "*"), KeptCuts()
    expected = scan_inputs(made, split_bytes=2000, kept=kept)
    assert kept.changed
    again = KeptCuts(kept.to_bytes())
    opened: list[str] = []

    def note(file: InputFile) -> BinaryIO:
        opened.append(file.name)
        return open_input(file)

    monkeypatch.setattr(cuts, "open_input", note)
    assert scan_inputs(made, split_bytes=2000, kept=again) == expected
    assert not again.changed
    assert opened == ["c.parquet"], "it has no cuts that could be kept"
    assert scan_inputs(made, split_bytes=2500, kept=again) != expected, "cut to another size"
    put(tmp_path, "b.jsonl", b'{"text": "y"}\n' * 500)
    changed = scan_inputs(made, split_bytes=2000, kept=KeptCuts(kept.to_bytes()))
    assert [(s.file, s.start) for s in changed] == [(s.file, s.start) for s in expected]
    assert changed != expected, "the version of the file"


@pytest.mark.parametrize("data", [b"", b"nothing", KeptCuts().to_bytes()[:-3]])
def test_kept_cuts_that_cannot_be_read_are_found_again(tmp_path: Path, data: bytes) -> None:
    put(tmp_path, "b.jsonl", b'{"text": "x"}\n' * 500)
    kept = KeptCuts(data)
    assert scan_inputs(recipe(tmp_path, "*"), split_bytes=2000, kept=kept)
    assert kept.changed
