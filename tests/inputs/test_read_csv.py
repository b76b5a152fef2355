from __future__ import annotations

import csv
import gzip
import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import BuildError
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


def test_delimiter_and_names_can_be_given(tmp_path: Path) -> None:
    table, _, _ = read(tmp_path, put(tmp_path, "a.tsv", written([NAMES, *ROWS], "\t")))
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
        (b'text\na\n"open\nb\n', 1, "begins at byte 7 cannot be taken apart: unexpected end of data"),
        (b'text\na\n"two\nlines"x\nb\n', 1, "begins at byte 7 cannot be taken apart"),
        (b"text\na\n" + b"x" * 3000 + b"\nb\n", 1, "a row over max_record_bytes 2,000"),
        (b'text\na\n"' + b"x\n" * 3000, 1, "or a quote that nothing closes"),
        (b"text,text\na,b\n", 0, "a name twice; its columns: text, text"),
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
