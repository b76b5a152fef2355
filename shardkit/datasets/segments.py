"""Find the documents in rows of tokens by the ids at their bounds, and compute tensors from the bounds.

A packed row is a sequence of documents, each with the eos id at its end. (`bos_id` is for data whose
documents begin with an id instead, `pad_id` for a separate padding id.) The tensors are masked labels,
position ids, document ids and lengths of documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shardkit.datasets.opened import OpenDataset
from shardkit.errors import warn_user
from shardkit.order.balance import DocumentIds

IGNORED_LABEL = -100  # torch.nn.CrossEntropyLoss ignores it by default
_SAMPLED_SHARDS, _SAMPLED_ROWS = 8, 16  # number of shards, and of rows per shard, that are searched for an id

_Array = npt.NDArray[np.generic]
_Ints = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]
_Number = TypeVar("_Number", bound=np.generic)


def find_segments(
    tokens: _Array,
    eos_id: int | None = None,
    is_padding_row: _Bools | None = None,
    *,
    bos_id: int | None = None,
    pad_id: int | None = None,
) -> Segments:
    """Find the documents in rows of tokens (rows, length) by the id that ends or begins each document.

    Without either id, a row is one document. Padding inside a row is an eos that follows an eos, and every
    `pad_id`. Each id is found in one pass over the tokens; all later steps take time per document only.
    """
    rows, length = tokens.shape
    inner = padding = np.empty(0, dtype=np.int64)
    if bos_id is not None:
        inner = np.flatnonzero(tokens.reshape(-1) == bos_id)
    elif eos_id is not None:
        ends = np.flatnonzero(tokens.reshape(-1) == eos_id)
        follows_end = np.zeros(len(ends) + 1, dtype=np.bool_)
        np.equal(ends[1:], ends[:-1] + 1, out=follows_end[1:-1])
        is_padding = follows_end[:-1] & (ends % length != 0)
        padding = ends[is_padding]
        inner = ends[~(is_padding & follows_end[1:])] + 1
    if pad_id is not None:
        pads = np.flatnonzero(tokens.reshape(-1) == pad_id)
        first = np.diff(pads, prepend=-2) != 1
        behind = pads[np.append(first[1:], True)] + 1 if len(pads) else pads
        padding = np.sort(np.concatenate([padding, pads]))
        inner = np.unique(np.concatenate([inner, pads[first], behind]))
    inner = inner[inner % length != 0]
    if is_padding_row is not None:
        inner = inner[~is_padding_row[inner // length]]
    starts = np.concatenate([np.arange(rows) * length, inner])
    starts.sort(kind="stable")
    return Segments((rows, length), starts, padding, is_padding_row)


@dataclass(frozen=True)
class Segments:
    """The starts of documents in rows of tokens; padding at a row's end counts as one more document."""

    shape: tuple[int, int]  # (rows, length)
    starts: _Ints  # index of each document's first token in the flattened rows
    padding: _Ints  # indices of all padding tokens inside rows, in the flattened rows
    is_padding_row: _Bools | None = None

    @cached_property
    def lengths(self) -> _Ints:
        """Length of each document in tokens."""
        rows, length = self.shape
        lengths: _Ints = np.diff(self.starts, append=rows * length)
        return lengths

    @cached_property
    def rows(self) -> _Ints:
        """Row index of each document."""
        rows: _Ints = self.starts // self.shape[1]
        return rows

    @cached_property
    def counts(self) -> _Ints:
        """Number of documents of each row."""
        counts: _Ints = np.diff(self._firsts)
        return counts

    @cached_property
    def numbers(self) -> _Ints:
        """Number of each document in its row, from 0."""
        numbers: _Ints = np.arange(len(self.starts)) - self._firsts[self.rows]
        return numbers

    @cached_property
    def _firsts(self) -> _Ints:
        return self.first_of_rows()

    def first_of_rows(self, every: int = 1) -> _Ints:
        """Return the indices of the first documents of rows 0, `every`, …; last, the number of documents."""
        rows, length = self.shape
        first: _Ints = np.searchsorted(self.starts, np.arange(0, rows + 1, every) * length)
        return first

    def without_last_tokens(self) -> Segments:
        """Return the documents of the rows after removing the last token of each row."""
        rows, length = self.shape
        starts, padding = (
            places[(places + 1) % length != 0] - places[(places + 1) % length != 0] // length
            for places in (self.starts, self.padding)
        )
        return Segments((rows, length - 1), starts, padding, self.is_padding_row)

    def mask(self, labels: npt.NDArray[np.int64], *, shift: int, mask_starts: bool) -> None:
        """Set the labels of padding to -100; with `mask_starts`, also those of each document's first token.

        Label i of a row is token i + `shift`. Models that shift labels predict label i + 1 from token i, so
        the label of a document's first token would be predicted from the end of another document. This also
        applies to the first token of a row, which follows another row when a batch is flattened.
        """
        for places in (self.padding, self.starts) if mask_starts else (self.padding,):
            self.ignore(labels, places, shift=shift)
        if self.is_padding_row is not None:
            labels[self.is_padding_row] = IGNORED_LABEL

    def ignore(self, labels: npt.NDArray[np.int64], places: _Ints, *, shift: int) -> None:
        """Set the labels of tokens to -100; `places` are the tokens' indices in the flattened rows."""
        row, column = np.divmod(places, self.shape[1])
        has_label = column >= shift
        labels.reshape(-1)[(row * labels.shape[1] + column - shift)[has_label]] = IGNORED_LABEL

    def position_ids(self, out: npt.NDArray[np.int64]) -> None:
        """Write each token's distance from the start of its document to `out` (rows, length)."""
        columns = (self.starts % self.shape[1]).astype(np.int32)
        np.subtract(np.arange(self.shape[1]), np.repeat(columns, self.lengths).reshape(self.shape), out=out)

    def document_ids(self) -> npt.NDArray[np.int32]:
        """Return the index of each token's document, counted from 0 in each row, as int32[rows, length]."""
        return np.repeat(self.numbers.astype(np.int32), self.lengths).reshape(self.shape)

    def cu_seqlens(self, batch_size: int) -> list[tuple[npt.NDArray[np.int32], int]]:
        """Return (int32[documents + 1] bounds, length of the longest document) for each flattened batch."""
        size = batch_size * self.shape[1]
        first = self.first_of_rows(batch_size)
        longest = np.maximum.reduceat(self.lengths, first[:-1]).tolist()
        result = []
        for number, (low, high) in enumerate(pairwise(first.tolist())):
            bounds = np.empty(high - low + 1, dtype=np.int32)
            bounds[:-1] = self.starts[low:high] - number * size
            bounds[-1] = size
            result.append((bounds, longest[number]))
        return result

    def padded_cu_seqlens(self, batch_size: int, length: int) -> npt.NDArray[np.int32]:
        """Return int32[batches, length], the document bounds in each flattened batch.

        Each batch is padded with its last bound. Raises ValueError if `length` is too small.
        """
        first = self.first_of_rows(batch_size)
        if (most := int(np.diff(first).max(initial=0))) >= length:
            raise ValueError(
                f"cu_seqlens={length} has room for {length - 1} documents, and a batch has {most} (padding "
                "at a row's end counts as one): give a larger number, or True for bounds of any length"
            )
        size = batch_size * self.shape[1]
        bounds = np.full((len(first) - 1, length), size, dtype=np.int32)
        batch = self.rows // batch_size
        bounds[batch, np.arange(len(self.starts)) - first[batch]] = self.starts - batch * size
        return bounds

    def doc_lens(self, batch_size: int) -> list[tuple[npt.NDArray[np.int32], list[int]]]:
        """Return (int32[rows, n] document lengths, longest document per row) for each batch.

        n is the largest number of documents in a row of the batch; rows with fewer are padded with zeros.
        """
        counts = self.counts
        table = np.zeros((self.shape[0], counts.max(initial=0)), dtype=np.int32)
        table[self.rows, self.numbers] = self.lengths
        longest = table.max(axis=1, initial=0).tolist()
        cuts = batch_cuts(counts, batch_size)
        tables = cut_table(table, cuts)
        return [(own, longest[low:high]) for own, (low, high, _) in zip(tables, cuts, strict=True)]

    def seq_lengths(self) -> list[list[int]]:
        """Return the lengths of the documents of each row."""
        lengths = self.lengths.tolist()
        return [lengths[low:high] for low, high in pairwise(self.first_of_rows().tolist())]


def batch_cuts(counts: _Ints, batch_size: int) -> list[tuple[int, int, int]]:
    """Return (first row, last + 1, largest number of documents in a row) of each batch."""
    most = counts.reshape(-1, batch_size).max(axis=1).tolist()
    return [(n * batch_size, (n + 1) * batch_size, width) for n, width in enumerate(most)]


def cut_table(
    table: npt.NDArray[_Number], cuts: Sequence[tuple[int, int, int]]
) -> list[npt.NDArray[_Number]]:
    """Return the rows of a table of documents [rows, n] by batch, each as wide as its rows need."""
    return [np.ascontiguousarray(table[low:high, :width]) for low, high, width in cuts]


def find_eos_id(
    datasets: Sequence[OpenDataset],
    names: Sequence[str],
    ids: DocumentIds,
    token_column: str | None,
    *,
    options: Sequence[str],
    needs_bounds: bool,
) -> int | None:
    """Return the id that ends documents, from `ids` or from the cards of the `datasets`.

    `options` names the loader options that need tokens, for messages. Raises ValueError if `needs_bounds` and
    no id is known, or if the streams have different tokenizers or eos ids.
    """
    tokenizers = [None if dataset.card is None else dataset.card.tokenizer for dataset in datasets]
    named = zip(tokenizers, names, strict=True)
    known = {each.digest: name for each, name in named if each is not None and each.digest is not None}
    if len(known) > 1:
        raise ValueError(
            f"streams {' and '.join(map(repr, known.values()))} were made by different tokenizers: the same "
            "ids would mean different text"
        )
    if options and token_column is None:
        columns = ", ".join(column.name for column in datasets[0].columns)
        raise ValueError(
            f"{' and '.join(options)} need a column of tokens of constant length: "
            f"{datasets[0].location} has none among {columns}; `shardkit convert SRC DST "
            "--sequence-length L --drop-tail` cuts arrays of varying length into rows of one length"
        )
    for dataset in datasets:
        _check_ids(dataset, ids, is_used=bool(options))
    stated: set[int] = set()
    for dataset, tokenizer in zip(datasets, tokenizers, strict=True):
        eos_id = ids.eos_id if ids.eos_id is not None else tokenizer and tokenizer.eos_id
        if type(eos_id) is int:
            stated.add(eos_id)
            if needs_bounds and ids.eos_id is None and ids.bos_id is None:
                _check_range(dataset, "the card's eos_id", eos_id)
        elif needs_bounds and ids.bos_id is None:
            raise ValueError(
                f"{' and '.join(options)} need the id that ends documents: {dataset.location} "
                "states none in dataset.json (tokenizer.eos_id); give eos_id=…, or bos_id=… if an id "
                "begins each document"
            )
    if len(stated) > 1:
        raise ValueError(f"streams end documents with different ids, {sorted(stated)}: give eos_id=…")
    if ids.pad_id is not None and ids.pad_id in stated:
        raise ValueError(
            "pad_id is the id that ends documents; omit it: padding with that id is found without it"
        )
    return next(iter(stated), None)


def _check_ids(dataset: OpenDataset, ids: DocumentIds, *, is_used: bool) -> None:
    """Raise ValueError for an id outside the tokens' dtype; warn about an id that is in no sampled row."""
    for name in ("eos_id", "bos_id", "pad_id"):
        if (value := getattr(ids, name)) is not None:
            _check_range(dataset, name, value)
    for name in ("eos_id", "bos_id"):  # not pad_id, as rows need not have padding
        value = getattr(ids, name)
        if value is not None and is_used and _never_occurs(dataset, value):
            warn_user(
                f"{dataset.location}: none of up to {_SAMPLED_SHARDS * _SAMPLED_ROWS} rows that were "
                f"sampled all over the dataset has {name}={value}: unless documents are far longer than "
                "rows, the id is from another tokenizer, and each row will count as one document"
            )


def _check_range(dataset: OpenDataset, name: str, value: object) -> None:
    if type(value) is not int:
        raise ValueError(f"{name} must be a whole number, not {value!r:.80}")
    stored = dataset.token_dtype
    most = (1 << 63) - 1 if stored is None or stored.kind not in "iu" else int(np.iinfo(stored.name).max)
    if not 0 <= value <= most:
        kind = "token ids" if stored is None else f"ids stored as {stored.name}"
        raise ValueError(
            f"{dataset.location}: {name}={value} cannot occur: {kind} are from 0 to {most:,}; give the id of "
            "the tokenizer that made this dataset"
        )


def _never_occurs(dataset: OpenDataset, value: int) -> bool:
    """Return whether no sampled row has the id; False if unknown, as for remote or compressed datasets."""
    column = dataset.token_column
    if dataset.shards is not None or dataset.verifies or column is None or not len(dataset):
        return False
    if any(kind.compression for kind in dataset.manifest.kinds):
        return False
    samples = dataset.manifest.shard_samples
    with_rows = np.flatnonzero(samples)
    chosen = np.unique(np.linspace(0, len(with_rows) - 1, _SAMPLED_SHARDS).astype(np.int64))
    for number in with_rows[chosen].tolist():
        rows = dataset.shard(number).fixed_rows(column)
        if rows is None:
            return False
        places = np.unique(np.linspace(0, len(rows) - 1, _SAMPLED_ROWS).astype(np.int64))
        if (rows[places] == value).any():
            return False
    return True
