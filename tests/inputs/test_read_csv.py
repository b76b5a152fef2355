from __future__ import annotations

import csv
import gzip
import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import BuildError, RecipeError
from shardkit.writers.rows.ledger import Count
from support.read_inputs import put, read


def written(rows: list[list[str]], delimiter: str = ",") -> bytes:
    file = io.StringIO(newline="")
    csv.writer(file, delimiter=delimiter).writerows(rows)
    return file.getvalue().encode()


ROWS = [[str(i), f'text "{i}", of\r\nseveral\nlines\n' if i % 3 else f"plain {i} é", "u"] for i in range(60)]
NAMES = ["id", "text", "url"]


def test_rows_are_documents_with_quotes_and_newlines_undone(tmp_path: Path) -> None:
    data = b"\xef\xbb\xbf" + written([NAMES, *ROWS])
    for name, content in {"a.csv": data, "a.csv.gz": gzip.compress(data)}.items():
        table, bad, _ = read(tmp_path, put(tmp_path, name, content), metadata=["url"])
        assert not bad
        assert table["text"].to_pylist() == [row[1] for row in ROWS]
        assert table["id"].to_pylist() == [row[0] for row in ROWS]
        assert table["record"].to_pylist() == list(range(60))
        assert set(table["metadata"].to_pylist()) == {'{"url":"u"}'}


def test_delimiter_quote_and_names_can_be_given(tmp_path: Path) -> None:
    table, _, _ = read(tmp_path, put(tmp_path, "a.tsv", written([NAMES, *ROWS], "\t")), quote='"')
    assert table["text"].to_pylist() == [row[1] for row in ROWS]
    name = put(tmp_path, "b.csv", written(ROWS, ";"))
    table, _, _ = read(tmp_path, name, delimiter=";", columns=NAMES)
    assert table["text"].to_pylist() == [row[1] for row in ROWS]


def test_a_bad_row_costs_itself_and_is_named_with_its_place(tmp_path: Path) -> None:
    lines = {
        b"1,too,many,fields": ("bad_row", "4 fields where there are 3 columns"),
        b"2,few": ("bad_row", "2 fields"),
        b"3,\xff,u": ("bad_utf8", "not UTF-8"),
        b'4,"a"b,u': ("bad_row", "misplaced quote"),
        b"5,a\rb,u": ("bad_row", "carriage return"),
    }
    good = b'0,"go""od\n\n",u\n\n'
    data = b"id,text,url\n" + b"".join(good + line + b"\r\n" for line in lines) + good
    table, bad, _ = read(tmp_path, put(tmp_path, "a.csv", data))
    assert table["text"].to_pylist() == ['go"od\n\n'] * 6
    assert [entry["record"] for entry in bad] == [1, 3, 5, 7, 9]
    for entry, line, (reason, words) in zip(bad, lines, lines.values(), strict=True):
        assert entry["reason"] == reason
        assert words in entry["error"]
        assert data[entry["byte_offset"] :].startswith(line)
    with pytest.raises(BuildError, match=r"a.csv: record 1 \(byte 28\): bad_row: 4 fields"):
        read(tmp_path, "a.csv", allowed=0)


@pytest.mark.parametrize(
    ("data", "kept", "words"),
    [
        (b'text\na\n"open\nb\n', 1, "begins at byte 7 cannot be split: a quote is never closed"),
        (b'text\na\n"two\nlines"x\nb\n', 1, "begins at byte 7 cannot be split"),
        (b"text\na\n" + b"x" * 3000 + b"\nb\n", 1, "a row is longer than max_record_bytes 2,000"),
        (b'text\na\n"' + b"x\n" * 3000, 1, "or a quote is never closed"),
        (b"text,text\na,b\n", 0, "a column name occurs twice; its columns: text, text"),
        (gzip.compress(b"text\na\nb\nc", mtime=0)[:-8], 0, "truncated"),
    ],
)
def test_where_the_next_row_would_be_a_guess_the_rest_is_booked_as_damaged(
    tmp_path: Path, data: bytes, kept: int, words: str
) -> None:
    name = put(tmp_path, "a.csv.gz" if data.startswith(b"\x1f") else "a.csv", data)
    table, bad, ledger = read(tmp_path, name, limit=2000)
    assert table.num_rows == kept
    (entry,) = bad
    assert entry["reason"] == "damaged_file"
    assert words in entry["error"]
    assert ledger.quarantined["damaged_file"].bytes > 0


@pytest.mark.parametrize("data", [b"body\na\n", b"body\xff\na\n"])
def test_a_file_without_the_column_is_refused_with_the_key_that_names_it(tmp_path: Path, data: bytes) -> None:
    table, (entry,), _ = read(tmp_path, put(tmp_path, "a.csv", data))
    assert (table.num_rows, entry["reason"]) == (0, "no_column")
    assert entry["error"].startswith("no column 'text'; its columns: body")
    with pytest.raises(BuildError, match=r"no_column: .*; set inputs\[0\].text to the column .* the text$"):
        read(tmp_path, "a.csv", allowed=0)


TO_BE = 'id\ttext\n1\t"To be or not\n2\tsecond\n3\tthird ends with quote"\n4\tfour\n'
SHAPES: list[tuple[str, str, dict[str, Any], list[str]]] = [
    # name, content, settings, texts
    ("a.tsv", TO_BE, {}, ['"To be or not', "second", 'third ends with quote"', "four"]),
    ("a.tsv", TO_BE, {"quote": '"'}, ["To be or not\n2\tsecond\n3\tthird ends with quote", "four"]),
    ("a.tsv", 'id\ttext\n1\t"unclosed\n2\tb\n', {}, ['"unclosed', "b"]),
    ("a.tsv", 'text\tid\nsay ""hi""\t1\n"a" b\t2\n', {}, ['say ""hi""', '"a" b']),
    ("a.tsv", '"id"\t"text"\n"1"\t"two\nlines"\n', {}, ["two\nlines"]),  # its names are quoted, so all is
    ("a.tsv", "text\r\na\r\n\r\nb\r\n", {}, ["a", "b"]),
    ("a.tsv", "id\ttext\n1\ta\rb\n", {}, ["a\rb"]),
    ("a.tsv", 'id,text\n1,"a,b"\n', {}, ["a,b"]),
    ("a.tsv.gz", 'id\ttext\n1\t"x\n', {}, ['"x']),
    ("a.csv", 'id;text\n1;semi\n2;"a;b"\n', {}, ["semi", "a;b"]),
    ("a.csv", "id|text\n1|pipe\n", {}, ["pipe"]),
    ("a.csv", 'id\ttext\n1\t"a\tb"\n', {}, ["a\tb"]),
    ("a.csv", "sep=;\nid;text\n1;excel\n", {}, ["excel"]),
    ("a.csv", "\ufeffsep=;\r\nid;text\r\n1;excel\r\n", {}, ["excel"]),
    ("a.csv", '"sep=^"\nid^text\n1^odd\n', {}, ["odd"]),
    ("a.csv", "sep=;\n1;no names\n", {"columns": ["id", "text"]}, ["no names"]),
    ("a.csv", "SEP=,\nid,text\n1,a\n", {}, ["a"]),
    ("a.csv", "id,text\r1,a\r2,b\r", {}, ["a", "b"]),
    ("a.csv", 'id,text\r1,"a\nb"\r2,b', {}, ["a\nb", "b"]),
    ("a.csv", "\r\n\r\nid,text\r\n1,a\r\n", {}, ["a"]),
    (
        "a.csv",
        "\ufefftext\r\nonly one column, with commas".replace(",", ""),
        {},
        ["only one column with commas"],
    ),
    ("a.csv", "\n\ntext\n\na\n\n\nb\n", {}, ["a", "b"]),
    ("a.csv", "id,text\n1,'a,b'\n", {"quote": "'"}, ["a,b"]),
    ("a.csv", "id,text\n1,'it''s'\n", {"quote": "'"}, ["it's"]),
    ("a.csv", 'id,text\n1,he said "no"\n', {}, ['he said "no"']),  # not in front of the field
    ("a.csv", 'id,text\n1,"he said ""no"""\n', {}, ['he said "no"']),
    ("a.csv", 'id,text\n1,""\n2,\n', {}, ["", ""]),
    ("a.csv", 'id,text\n1,"a\n2,b\n', {"quote": None}, ['"a', "b"]),
    ("a.csv", "text;id\na,b;1\n", {}, ["a,b"]),
    ("a.csv", '"id";"text"\n"1";"x"\n', {}, ["x"]),
    ("a.csv", "1,2;a\n", {"columns": ["id", "text"], "delimiter": ";"}, ["a"]),
    ("a.csv", "text", {}, []),
    ("a.csv", "", {}, []),
    ("a.csv", "sep=;", {}, []),
    ("a.txt", "id\ttext\n1\tb", {"format": "csv"}, ["b"]),
]


@pytest.mark.parametrize(("name", "content", "config", "texts"), SHAPES)
def test_the_shapes_in_which_programs_write_tables_are_read(
    tmp_path: Path, name: str, content: str, config: dict[str, Any], texts: list[str]
) -> None:
    data = content.encode()
    put(tmp_path, name, gzip.compress(data) if name.endswith(".gz") else data)
    table, bad, _ = read(tmp_path, name, **config)
    assert (table["text"].to_pylist(), bad) == (texts, [])


@pytest.mark.parametrize(
    ("name", "content", "config", "words"),
    [
        (
            "a.csv",
            'id,text\n1,a\n2,"open\n3,b\n',
            {},
            "if quotes are part of the text, set inputs[0].quote: null",
        ),
        ("a.csv", "1;a\n", {"columns": ["id", "text"]}, "if ';' is between fields, set inputs[0].delimiter"),
        ("a.tsv", 'id\ttext\n1\t"two\nlines"\n', {}, "set inputs[0].quote: '\"'"),
        ("a.csv", "id,text\n1,a\rb\n", {}, "a carriage return in a field that is not quoted"),
        ("a.csv", "id,text\n1,a,b\n", {}, "3 fields where there are 2 columns"),
        ("a.csv", "id,text\n1\n", {}, "1 fields where there are 2 columns"),
        ("a.csv", "id;body\n1;x\n", {}, "no column 'text'; its columns: id;body"),
    ],
)
def test_a_table_that_is_taken_apart_wrongly_names_the_key_to_set(
    tmp_path: Path, name: str, content: str, config: dict[str, Any], words: str
) -> None:
    put(tmp_path, name, content.encode())
    with pytest.raises(BuildError) as refused:
        read(tmp_path, name, allowed=0, **config)
    assert words in str(refused.value)
    assert "universal" not in str(refused.value)
    assert "newline=" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "content", "config", "count", "words"),
    [
        ("a.tsv", TO_BE, {"quote": '"'}, 2, "2 lines that would be rows by themselves"),
        (
            "a.csv",
            'id,text\n1,"a\n2,b"\n3,"c\n4,d"\n',
            {},
            2,
            "first in record 0 (byte 8); if quotes",
        ),
        ("a.csv", 'id,text\n1,"a\nb, c\nd"\n', {}, 0, ""),  # its last line is no row
        ("a.csv", 'text\n"a\nb"\n', {}, 0, ""),  # every line would be a row of one column
        ("a.tsv", 'id\ttext\n1\t"say ""hi"""\n', {}, 0, "1 fields are in quotes with doubled quotes inside"),
        ("a.tsv", 'id\ttext\n1\t"say ""hi"""\n', {"quote": None}, 0, ""),
        ("a.tsv", 'id\ttext\n1\t"Hello."\n', {}, 0, ""),
    ],
)
def test_rows_inside_quotes_and_quotes_that_are_read_as_text_are_counted_and_reported(
    tmp_path: Path, name: str, content: str, config: dict[str, Any], count: int, words: str
) -> None:
    notes: list[str] = []
    _, bad, ledger = read(tmp_path, put(tmp_path, name, content.encode()), notes=notes, **config)
    assert not bad
    assert ledger.dropped.get("csv/rows_in_quotes", Count()).documents == count
    assert words in "".join(notes)
    assert bool(notes) == bool(words)


@pytest.mark.parametrize("settings", [{"delimiter": "\n"}, {"quote": "\r"}, {"quote": ",", "delimiter": ","}])
def test_characters_that_cannot_take_rows_apart_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=r"cannot be a line end|are the same character"):
        read(tmp_path, put(tmp_path, "a.csv", b"text\na\n"), **settings)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.text(st.characters(codec="utf-8"), max_size=20), st.just("x")), max_size=20)
)
def test_whatever_the_csv_module_writes_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]
) -> None:
    folder = tmp_path_factory.mktemp("csv")
    table, bad, _ = read(folder, put(folder, "a.csv", written([["text", "id"], *map(list, rows)])))
    assert not bad
    assert table["text"].to_pylist() == [text for text, _ in rows]


def test_a_file_cut_anywhere_gives_the_rows_before_and_hides_nothing(tmp_path: Path) -> None:
    data = written([NAMES, *ROWS])
    texts = [row[1] for row in ROWS]
    for length in range(0, len(data), 41):
        table, bad, ledger = read(tmp_path, put(tmp_path, "a.csv", data[:length]))
        complete = max(table.num_rows - 1, 0)  # the last row may be cut within its last field
        assert table["text"].to_pylist()[:complete] == texts[:complete]
        assert len(bad) <= 1
        rest = length - len(written([NAMES, *ROWS[: table.num_rows]]))
        assert bad or rest <= 1, length  # a carriage return at most
        assert ledger.read.documents == table.num_rows + len(bad)
