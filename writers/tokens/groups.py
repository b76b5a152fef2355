"""Groups: documents with the same value of a field, such as a repository's files, are joined to one text.

A model learns from groups how files of a repository depend on each other. They are written as in StarCoder2
(Lozhkov et al. 2024, arXiv 2402.19173, section 5.1), with the header that the recipe sets:

    <repo_name>NAME<file_sep>PATH\\nTEXT<file_sep>PATH\\nTEXT...<|endoftext|>

Filters and duplicate removal see single documents. `encode_grouped` writes each document with a header, as if
it were the first of its group, and with an eos. All documents of a group get the same place in the order of
training (`order_hashes`), so they are in one partition. There, `join_groups` puts them together and removes
the header up to the separator from all but the first document, and the eos from all but the last. All text
between two special tokens, such as a title and its text, is tokenized together, so the ids are the
tokenizer's for the text shown above. A special token spelled in a document's text stays text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from shardkit.hashing import keyed_hashes
from shardkit.kernels.numba_support import Bools, Int64s, UInt64s, kernel
from shardkit.tokens.tokenizer import Encoder, EncodingError, Tokens
from shardkit.writers.recipe.inputs import GroupConfig
from shardkit.writers.rows.documents import metadata_values

_WHOLE = float(1 << 64)
Encode = Callable[[pa.RecordBatch, Sequence[str]], tuple[Tokens, npt.NDArray[np.int64]]]
"""Encodes documents, each after a given text. Returns all ids and the number of ids per document."""


@dataclass(frozen=True, slots=True)
class Groups:
    """How tokenized documents are joined: the id of the separator token, and whether documents have a bos."""

    config: GroupConfig
    separator_id: int | None
    has_bos: bool


@dataclass(frozen=True, slots=True)
class Joined:
    """Documents ordered so that all documents of a group are adjacent; arrays have this order.

    `order` has the row of each document in the table. `starts` and `lengths` locate its tokens that are kept;
    `left_out` is the total number of tokens removed. `firsts` has the positions of documents that begin a
    group or are in no group.
    """

    order: Int64s
    starts: Int64s
    lengths: Int64s
    skipped: Int64s  # number of tokens removed at the beginning of each document
    firsts: Int64s
    left_out: int


def metadata_field(metadata: pa.Array | pa.ChunkedArray, name: str | None) -> list[str | None]:
    """Return the field `name` of each document's metadata as text, or None if a document does not have it."""
    if name is None:
        return [None] * len(metadata)
    found = metadata_values(metadata, name)
    return [one if one is None or isinstance(one, str) else orjson.dumps(one).decode() for one in found]


def _keys(values: Sequence[str]) -> list[bytes]:
    return [b"group\0" + value.encode() for value in values]


def order_hashes(
    documents: pa.RecordBatch, group: GroupConfig | None, seed: int, purpose: str = "shuffle"
) -> UInt64s:
    """Return uint64[n], the hash of each document that training order sorts by, or a hash for `purpose`.

    It is the hash of the document's group value if it has one, else of its id.
    """
    placed = keyed_hashes(documents.column("document_id").to_pylist(), seed, purpose)
    if group is None:
        return placed
    values = metadata_field(documents.column("metadata"), group.by)
    is_in = np.array([value is not None for value in values], np.bool_)
    placed[is_in] = keyed_hashes(_keys([value for value in values if value is not None]), seed, purpose)
    return placed


def encode_grouped(
    encoder: Encoder, group: GroupConfig, seed: int, encode: Encode, documents: pa.RecordBatch
) -> tuple[Tokens, npt.NDArray[np.int64]]:
    """Encode documents with `encode` and add headers; return all ids and the number of ids per document.

    Documents without the field `group.by`, or whose text has no token, get no header. An EncodingError has
    the row of the document.
    """
    values, titles = (metadata_field(documents.column("metadata"), name) for name in (group.by, group.title))
    rows = [row for row, value in enumerate(values) if value is not None]
    named = [values[row] or "" for row in rows]
    shown = keyed_hashes(_keys(named), seed, "group-header") < group.header_rate * _WHOLE
    heads = [""] * len(values)  # text to put before each document, tokenized together with it
    names = {}
    for row, name, is_shown in zip(rows, named, shown.tolist(), strict=True):
        if is_shown and titles[row] is not None:
            heads[row] = f"{titles[row]}\n"
        if is_shown and group.begin is not None and name:
            names[row] = name
    ids, lengths = encode(documents, heads)
    parts = _split(ids, lengths)
    for row, alone in _encoded(encoder, {row: head for row, head in enumerate(heads) if head}).items():
        if np.array_equal(parts[row], alone):  # the text adds no token to the title: remove the title too
            parts[row] = parts[row][:0]
    none: Tokens = np.zeros(0, encoder.dtype)
    begin, separator = (
        none if token is None else np.array([encoder.special_id(token, "group")], encoder.dtype)
        for token in (group.begin, group.separator)
    )
    written = _encoded(encoder, names)
    for row, is_shown in zip(rows, shown.tolist(), strict=True):
        if len(parts[row]):
            first = begin if is_shown else none
            parts[row] = np.concatenate([first, written.get(row, none), separator, parts[row]])
    return np.concatenate([none, *parts]), np.fromiter(map(len, parts), np.int64, len(parts))


def _split(ids: Tokens, lengths: npt.NDArray[np.int64]) -> list[Tokens]:
    return np.split(ids, np.cumsum(lengths)[:-1]) if len(lengths) else []


def _encoded(encoder: Encoder, texts: Mapping[int, str]) -> dict[int, Tokens]:
    """Return the ids of each text, by the row of its document; an EncodingError has the row."""
    rows = list(texts)
    try:
        ids, lengths = encoder.encode(list(texts.values()))
    except EncodingError as error:
        raise type(error)(str(error), rows[error.row]) from error
    return dict(zip(rows, _split(ids, lengths), strict=True))


def join_groups(table: pa.Table, tokens: Tokens, starts: Int64s, lengths: Int64s, groups: Groups) -> Joined:
    """Join the documents of each group in `table` (SPILL_SCHEMA, sorted by hash and document id).

    Inside a group, documents are sorted by the metadata field `groups.config.order`, compared as text, then
    by document id.
    """
    hashes = table.column("hash").to_numpy()
    same = hashes[1:] == hashes[:-1]
    near = np.flatnonzero(
        np.append(same, False) | np.append(False, same)
    )  # rows that share their hash with a neighbor; all others have nothing to join
    metadata = table.column("metadata").take(pa.array(near))
    values, keys = metadata_field(metadata, groups.config.by), metadata_field(metadata, groups.config.order)
    of_value = [
        (int(hashes[row]), value is None, value or "") for row, value in zip(near, values, strict=True)
    ]
    by = sorted(range(len(near)), key=lambda at: (of_value[at], keys[at] is None, keys[at] or "", at))
    order, is_first = np.arange(len(hashes)), np.ones(len(hashes), np.bool_)
    order[near] = near[by]
    for before, at, row in zip(by, by[1:], near[1:].tolist(), strict=False):
        is_first[row] = of_value[before] != of_value[at] or values[at] is None
    is_last = np.append(is_first[1:], True)[: len(is_first)]
    starts, lengths = starts[order], lengths[order]
    if groups.separator_id is None:
        skipped = np.where(is_first, 0, int(groups.has_bos))
    else:
        skipped = _separators(tokens, starts, lengths, ~is_first, groups.separator_id)
    dropped = skipped + ~is_last
    left = lengths - dropped
    return Joined(order, starts + skipped, left, skipped, np.flatnonzero(is_first), int(dropped.sum()))


@kernel
def _separators(tokens: Tokens, starts: Int64s, lengths: Int64s, wanted: Bools, separator: int) -> Int64s:
    """Return the number of tokens before the first separator in each `wanted` document; 0 for the others."""
    found = np.zeros(len(starts), np.int64)
    for document in range(len(starts)):
        if wanted[document]:
            while found[document] < lengths[document]:
                if tokens[starts[document] + found[document]] == separator:
                    break
                found[document] += 1
    return found
