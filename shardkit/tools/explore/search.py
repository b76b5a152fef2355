"""Searches by URL, id or text; each part has a time limit and can continue from where it stopped.

kept, dropped, duplicates   lines by URL, id or document id; for removed documents, also lines whose stored
                            text contains the words
rows                        of tokens: rows that contain the tokens of the words; only candidate rows are
                            decoded. The search is case-sensitive. Words may span several tokens, but a row
                            in which the words are tokenized differently may be missed.
                            of texts: rows whose text contains the words

A scan stops in time, and takes no more CPU than DuckDB does for the same table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from shardkit.datasets.provenance.folder import ParquetFolder
from shardkit.datasets.provenance.search import Selection, UrlPatterns
from shardkit.datasets.provenance.text import Decoder
from shardkit.errors import ShardkitError
from shardkit.tools.explore.explored import Explored, PageNotFoundError, Params, number_param
from shardkit.tools.explore.scan import AnyOf, Place, Wanted, scan

_HITS = 10  # maximum number of hits per part and request
_SECONDS = 0.6  # time limit of a search; a part leaves what it does not need to the parts behind it
_AROUND = 48  # number of tokens decoded before and after the words that were found
_AROUND_CHARACTERS = 160  # shown before and after the words that were found in a text
_ROWS_AT_ONCE = 64  # rows of texts read between two looks at the clock
_MOST_WORDS = 500  # maximum length of a search text, in characters
_PARTS = ("kept", "dropped", "duplicates", "rows")


@dataclass(frozen=True, slots=True)
class Hit:
    """A search result and its page; `around` is the text before the words, the words, and the text after."""

    title: str
    detail: str
    page: str
    params: dict[str, object]
    around: tuple[str, str, str] | None = None


@dataclass(frozen=True, slots=True)
class Section:
    """The result of one part of a search; `next` is where to continue, None if the search is complete."""

    part: str
    hits: list[Hit]
    next: str | None
    said: str = ""
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class _HasWords:
    """Matches lines whose URL, id or document id equals the search text, or whose text contains it."""

    words: str
    ids: AnyOf
    names: tuple[str, ...] = field(default=("text",))

    @property
    def columns(self) -> Sequence[str]:
        return [*self.ids.columns, *self.names]

    def match(self, table: pa.Table) -> npt.NDArray[np.bool_]:
        mask = self.ids.match(table)
        for name in self.names:
            found = pc.match_substring(table.column(name), self.words, ignore_case=True)
            mask |= pc.fill_null(found, False).to_numpy()
        return mask

    def may_be_within(self, limits: Any) -> bool:
        return True


def show_search(explored: Explored, params: Params) -> dict[str, object]:
    """Return the facts for the search page: the results of each part."""
    words = params.get("q", "").strip()
    page: dict[str, object] = {"q": words, "sections": [], "looks": _what_there_is(explored)}
    if not words:
        return page
    if len(words) > _MOST_WORDS:
        raise ShardkitError(f"the search text has {len(words):,} characters; the limit is {_MOST_WORDS}")
    part = params.get("part")
    if part is not None and part not in _PARTS:
        raise PageNotFoundError(f"a search has no part {part[:40]!r}; its parts are {', '.join(_PARTS)}")
    sections, end = [], monotonic() + _SECONDS
    asked = _PARTS if part is None else (part,)
    for number, name in enumerate(asked):
        seconds = (end - monotonic()) / (len(asked) - number)
        if name == "rows":
            first = number_param(params, "at", 0, most=len(explored.dataset)) if part else 0
            sections.append(_search_rows(explored, words, first, seconds))
            continue
        start = Place.parse(params["at"]) if part is not None and "at" in params else None
        folder = {
            "kept": explored.provenance, "dropped": explored.dropped, "duplicates": explored.duplicates,
        }[name]  # fmt: skip
        if folder.names:
            sections.append(_search_table(explored, folder, name, words, start, seconds))
    return page | {"sections": sections}


def _what_there_is(explored: Explored) -> list[str]:
    looked = [("provenance", explored.provenance), ("dropped", explored.dropped)]
    looked += [("duplicates", explored.duplicates)]
    return [name for name, folder in looked if folder.names]


def _wanted(words: str, *, has_text: bool) -> Wanted:
    if "*" in words and " " not in words:
        return Selection(urls=UrlPatterns([words]))
    values: dict[str, object] = {"url": words, "id": words}
    if len(words) == 32 and all(digit in "0123456789abcdefABCDEF" for digit in words):
        values["document_id"] = bytes.fromhex(words)
    ids = AnyOf(values)
    is_name = "://" in words or "document_id" in values
    return _HasWords(words, ids) if has_text and not is_name else ids


def _search_table(
    explored: Explored, folder: ParquetFolder, part: str, words: str, start: Place | None, seconds: float
) -> Section:
    wanted = _wanted(words, has_text=part != "kept")
    found = scan(folder, wanted, start=start, limit=_HITS, seconds=seconds)
    hits: list[Hit] = []
    seen: set[object] = set()
    for line in found.lines:
        if part == "kept" and line["document_id"] in seen:
            continue  # the line is another piece of a document that is already in the results
        seen.add(line["document_id"])
        title = str(line["url"] or line["id"] or line["file"])
        detail = f"{explored.source(line['source'])}: {line['file']} record {line['record']:,}"
        if part == "kept":
            assert isinstance(line["document_id"], bytes)
            hits.append(Hit(title, detail, "document", {"id": line["document_id"].hex()}))
        else:
            detail += f", {line['rule'] if part == 'dropped' else line['reason']}"
            around = _context(line["text"], words) if isinstance(line["text"], str) else None
            hits.append(Hit(title, detail, "removed", {"table": part, "at": line["at"]}, around))
    return Section(
        part, hits, None if found.next is None else str(found.next), f"{found.lines_read:,} lines read"
    )


def _context(text: str, words: str) -> tuple[str, str, str] | None:
    """Return the text before the words, whatever their case, the words, and the text after; None without."""
    found = re.search(re.escape(words), text, re.IGNORECASE)
    if found is None:
        return None
    start, after = found.span()
    before = text[max(0, start - _AROUND_CHARACTERS) : start]
    return before, found[0], text[after : after + _AROUND_CHARACTERS]


def _search_rows(explored: Explored, words: str, first: int, seconds: float) -> Section:
    """Search the dataset's rows for the words from row `first` on, until `seconds` or _HITS are reached."""
    dataset, end = explored.dataset, monotonic() + seconds
    if dataset.shards is not None:
        return Section("rows", [], None, problem="Text in rows can be searched in local datasets only.")
    if dataset.token_column is not None:
        return _search_tokens(explored, words, first, end)
    if any(column.name == "text" for column in dataset.columns):
        return _search_texts(explored, words, first, end)
    return Section("rows", [], None, problem="The rows of this dataset have no text.")


def _search_texts(explored: Explored, words: str, first: int, end: float) -> Section:
    """Search rows of texts from row `first` on."""
    dataset, hits = explored.dataset, list[Hit]()
    starts, rows = dataset.manifest.shard_starts.tolist(), len(dataset)
    row = first
    for shard in range(int(np.searchsorted(starts, first, side="right")) - 1, len(starts) - 1):
        opened = dataset.shard(shard)
        while row < starts[shard + 1]:
            if len(hits) == _HITS or (row % _ROWS_AT_ONCE == 0 and row > first and monotonic() > end):
                return Section("rows", hits, str(row), f"{row - first:,} of {rows:,} rows read")
            text = opened.sample(row - starts[shard], ("text",))["text"]
            if (around := _context(str(text), words)) is not None:
                hits.append(Hit(f"row {row:,}", "", "row", {"row": row}, around))
            row += 1
    return Section("rows", hits, None, f"{rows - first:,} of {rows:,} rows read")


def _search_tokens(explored: Explored, words: str, first_row: int, end: float) -> Section:
    """Search rows of tokens, from the shard of a row on."""
    dataset, decoder = explored.dataset, explored.decoder
    assert dataset.token_column is not None
    if decoder is None:
        return Section("rows", [], None, problem="Searching for text in rows needs a tokenizer.")
    hits: list[Hit] = []
    shards = len(dataset.manifest.shards)
    keys = _keys(decoder, words)
    first = int(np.searchsorted(dataset.manifest.shard_starts, first_row, side="right")) - 1
    for shard in range(first, shards):
        rows = dataset.shard(shard).fixed_rows(dataset.token_column)
        if rows is None:
            return Section("rows", [], None, problem="Text in rows can be searched in MDS datasets only.")
        starts = int(dataset.manifest.shard_starts[shard])
        found = _rows_with(decoder, rows, keys, words, end)
        for row, around in islice(found, _HITS - len(hits)):
            hits.append(Hit(f"row {starts + row:,}", "", "row", {"row": starts + row}, around))
        if len(hits) >= _HITS or monotonic() > end:
            after = int(dataset.manifest.shard_starts[shard + 1]) if shard + 1 < shards else None
            said = f"{shard + 1:,} of {shards:,} shards read"
            return Section("rows", hits, None if after is None else str(after), said)
    return Section("rows", hits, None, f"{shards:,} of {shards:,} shards read")


def _keys(decoder: Decoder, words: str) -> list[list[int]]:
    """Return the token sequences to search for: of the words, with and without a space before them.

    The first and last token are left out, because in a row they may merge with neighboring text.
    """
    keys: list[list[int]] = []
    for text in (f" {words}", words):
        ids = decoder.encode(text)
        inner = ids[1:-1] if len(ids) >= 4 else ids[:-1] if len(ids) == 3 else ids
        if inner and inner not in keys:
            keys.append(inner)
    return keys


def _rows_with(
    decoder: Decoder, rows: npt.NDArray[np.generic], keys: list[list[int]], words: str, end: float
) -> Iterator[tuple[int, tuple[str, str, str]]]:
    """Yield (row, (text before, words, text after)) for rows that contain the words, until the time `end`."""
    length = rows.shape[1]
    seen: set[int] = set()
    block = max(1, (1 << 22) // length)
    for first in range(0, len(rows), block):
        flat = np.asarray(rows[first : first + block]).reshape(-1)
        for key in keys:
            places = np.flatnonzero(flat[: len(flat) - len(key) + 1] == key[0])
            for offset, token in enumerate(key[1:], 1):
                places = places[flat[places + offset] == token]
            for place in places.tolist():
                row = first + place // length
                if row in seen:
                    continue
                around = _around(decoder, flat, place, length, words)
                if around is not None:
                    seen.add(row)
                    yield row, around
        if monotonic() > end:
            return


def _around(
    decoder: Decoder, flat: npt.NDArray[np.generic], place: int, length: int, words: str
) -> tuple[str, str, str] | None:
    """Return the text before the words, the words, and the text after; None if the row lacks the words."""
    start = place - place % length
    low = max(start, place - _AROUND)
    # A token nearly always has at least one character, so `len(words)` tokens cover the words.
    high = min(start + length, place + len(words) + _AROUND)
    text = decoder.text(flat[low:high])
    at = text.find(words)
    if at < 0:
        return None
    after = at + len(words)
    return text[max(0, at - 200) : at], text[at:after], text[after : after + 200]
