"""From the columns of many samples to batches: documents inside rows, labels, padding, layout, tensors.

Every document in a packed row ends with the eos id, and no document is empty, so an eos directly after an eos
is padding and nothing else is needed to know where documents begin and end. (Data whose documents begin with
an id instead: `bos_id`.) All of it is worked out for many batches at once. With eos = 0 a row 5 6 0 7 0 0 0
gives

    labels        5 6 0 7 0 -100 -100      padding counts as one last segment of its own
                  -100 6 0 -100 0 -100 -100   with document starts masked
    position_ids  0 1 2 0 1 0 1
    document_ids  0 0 0 1 1 2 2
    cu_seqlens    0 3 5 7, max_seqlen 3    rows of a batch follow one another; a row always starts a segment
    doc_lens      3 2 2
    shifted       tokens 5 6 0 7 0 0, labels 6 0 7 0 -100 -100, all other fields those of these tokens

A layout never changes which samples a batch holds, nor the state. Fields are views of one block of memory
for a group of batches; no two fields share memory, except tokens and shifted labels that have nothing to
mask, which are views of the same rows, one token apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.errors import naming_extras
from shardkit.loaders.config import LoaderConfig
from shardkit.loaders.streams import Columns

__all__ = ["IGNORED_LABEL", "Batch", "BatchMaker", "Segments", "find_segments"]

Batch = dict[str, Any]
IGNORED_LABEL = -100  # torch.nn.CrossEntropyLoss ignores it by default

_Array = npt.NDArray[np.generic]
_Ints = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]
SplitIds = Callable[[_Ints], tuple[_Ints, _Ints]]
"""Gives (stream, row number in its dataset) of samples that are numbered through all streams."""


def find_segments(
    tokens: _Array,
    eos_id: int | None = None,
    is_padding_row: _Bools | None = None,
    *,
    bos_id: int | None = None,
) -> Segments:
    """The documents in rows of tokens (rows, length), by the id that ends or begins each of them.

    With neither id, a row is one document. Only the eos id tells padding inside a row.
    """
    padding: _Bools = np.zeros(tokens.shape, dtype=np.bool_)
    starts: _Bools = np.ones(tokens.shape, dtype=np.bool_)
    if bos_id is not None:
        np.equal(tokens[:, 1:], bos_id, out=starts[:, 1:])
    elif eos_id is not None:
        ends = tokens == eos_id
        np.logical_and(ends[:, 1:], ends[:, :-1], out=padding[:, 1:])
        starts[:, 1:] = np.where(padding[:, 1:], ~padding[:, :-1], ends[:, :-1])
    else:
        starts[:, 1:] = False
    if is_padding_row is not None:
        padding[is_padding_row] = True
        starts[is_padding_row, 1:] = False
    return Segments(padding, starts)


@dataclass(frozen=True)
class Segments:
    """Where documents begin in rows of tokens; padding at a row's end counts as one more document."""

    is_padding: _Bools  # (rows, length)
    is_start: _Bools  # (rows, length); true for the first token of each row

    @cached_property
    def starts(self) -> _Ints:
        """Where each document begins in the flattened rows."""
        starts: _Ints = np.flatnonzero(self.is_start)
        return starts

    @cached_property
    def lengths(self) -> _Ints:
        """Of each document."""
        lengths: _Ints = np.diff(self.starts, append=self.is_start.size)
        return lengths

    @cached_property
    def rows(self) -> _Ints:
        """The row of each document."""
        rows: _Ints = self.starts // self.is_start.shape[1]
        return rows

    def first_of_rows(self, every: int = 1) -> _Ints:
        """The number of the first document in each `every`-th row, and behind the last the number of all."""
        edges = np.arange(0, len(self.is_start) + 1, every)
        first: _Ints = np.searchsorted(self.starts, edges * self.is_start.shape[1])
        return first

    def without_last_tokens(self) -> Segments:
        """The documents of the rows without the last token of each."""
        return Segments(self.is_padding[:, :-1], self.is_start[:, :-1])

    def labels(self, tokens: _Array, *, mask_starts: bool) -> npt.NDArray[np.int64]:
        """Return the tokens with padding, and on request each document's first token, as -100.

        Models that shift labels predict label i + 1 from token i, so the label of a document's first token
        would be predicted from the end of another document. This includes the first token of a row, which
        follows another row when a batch is flattened.
        """
        labels = tokens.astype(np.int64, order="C")
        labels[self.is_padding] = IGNORED_LABEL
        if mask_starts:
            labels.reshape(-1)[self.starts] = IGNORED_LABEL
        return labels

    def position_ids(self) -> npt.NDArray[np.int64]:
        """Each token's distance from the start of its document."""
        flat = np.arange(self.is_start.size, dtype=np.int64)
        flat -= np.repeat(self.starts, self.lengths)
        return flat.reshape(self.is_start.shape)

    def document_ids(self) -> npt.NDArray[np.int32]:
        """Each token's document, counted from 0 in each row."""
        numbers = np.arange(len(self.starts)) - self.first_of_rows()[self.rows]
        return np.repeat(numbers.astype(np.int32), self.lengths).reshape(self.is_start.shape)

    def cu_seqlens(self, batch_size: int) -> list[tuple[npt.NDArray[np.int32], int]]:
        """(bounds of the documents in each flattened batch of `batch_size` rows, the longest document)."""
        size = batch_size * self.is_start.shape[1]
        result = []
        for number, (low, high) in enumerate(pairwise(self.first_of_rows(batch_size).tolist())):
            bounds = np.empty(high - low + 1, dtype=np.int32)
            bounds[:-1] = self.starts[low:high] - number * size
            bounds[-1] = size
            result.append((bounds, int(self.lengths[low:high].max())))
        return result

    def padded_cu_seqlens(self, batch_size: int, length: int) -> npt.NDArray[np.int32]:
        """(batches, length) bounds of the documents in each flattened batch, padded with the last bound."""
        first = self.first_of_rows(batch_size)
        if (most := int(np.diff(first).max(initial=0))) >= length:
            raise ValueError(
                f"cu_seqlens={length} has room for {length - 1} documents, and a batch has {most} (padding "
                "at a row's end counts as one): give a larger number, or True for bounds of varying length"
            )
        size = batch_size * self.is_start.shape[1]
        bounds = np.full((len(first) - 1, length), size, dtype=np.int32)
        batch = self.rows // batch_size
        bounds[batch, np.arange(len(self.starts)) - first[batch]] = self.starts - batch * size
        return bounds

    def doc_lens(self, batch_size: int) -> list[tuple[npt.NDArray[np.int32], list[int]]]:
        """For each batch (lengths of each row's documents, 0 behind the last; the longest of each row)."""
        first = self.first_of_rows()
        table = np.zeros((len(self.is_start), np.diff(first).max(initial=0)), dtype=np.int32)
        table[self.rows, np.arange(len(self.starts)) - first[self.rows]] = self.lengths
        longest = table.max(axis=1, initial=0).tolist()
        result = []
        for low in range(0, len(table), batch_size):
            high = low + batch_size
            most = int((first[low + 1 : high + 1] - first[low:high]).max())
            result.append((np.ascontiguousarray(table[low:high, :most]), longest[low:high]))
        return result

    def seq_lengths(self) -> list[list[int]]:
        """For each row the lengths of its documents."""
        lengths = self.lengths.tolist()
        return [lengths[low:high] for low, high in pairwise(self.first_of_rows().tolist())]


def shifted_labels(
    tokens: _Array, segments: Segments | None, *, mask_starts: bool, keep_length: bool
) -> npt.NDArray[np.int64]:
    """For each token of a row the one that follows it; -100 for padding and, on request, document starts.

    The last token of a row has the label -100 if it is kept, else no label. `segments`: those of `tokens`;
    None: nothing is masked, and labels of int64 tokens are a view of them.
    """
    if segments is None and not keep_length:
        return tokens[:, 1:].astype(np.int64, copy=False)
    rows, length = tokens.shape
    labels = np.empty((rows, length if keep_length else length - 1), dtype=np.int64)
    labels[:, length - 1 :] = IGNORED_LABEL
    following = labels[:, : length - 1]
    following[:] = tokens[:, 1:]
    if segments is not None:
        following[segments.is_padding[:, 1:]] = IGNORED_LABEL
        if mask_starts:
            following[segments.is_start[:, 1:]] = IGNORED_LABEL
    return labels


class BatchMaker:
    """Makes batches of `batch_size` from columns of many samples."""

    def __init__(
        self,
        batch_size: int,
        config: LoaderConfig,
        columns: Sequence[str],
        token_key: str | None,
        eos_id: int | None,
        *,
        may_be_padded: bool = True,
        return_ids: bool = False,
        mark_padding: bool = False,
        split_ids: SplitIds | None = None,
    ) -> None:
        """`may_be_padded`: rows may hold padding; `mark_padding`: whole rows may be padding.

        ValueError for names of fields that are unknown or would come twice.
        """
        self.batch_size = batch_size
        self.config = config
        self.token_key = token_key
        self.eos_id = eos_id
        self.return_ids = return_ids
        self.mark_padding = mark_padding
        self.split_ids = split_ids
        self._names = _field_names(list(columns), self._added_fields(), dict(config.rename or {}))
        masks_padding = mark_padding or (may_be_padded and eos_id is not None and config.bos_id is None)
        self._masks_labels = config.labels is True or config.masks_document_starts or masks_padding
        self._only_columns = not (return_ids or mark_padding or config.labels or config.document_options)
        self._tensor: Callable[[_Array], object] = _unchanged
        if config.tensors == "torch":
            with naming_extras('a loader (without tensors="numpy")'):
                import torch
            self._tensor = torch.from_numpy

    def make(self, columns: Columns, sample_ids: npt.NDArray[np.int64]) -> tuple[list[Batch], int]:
        """(batches, their bytes) from the columns of the real samples among `sample_ids` (-1: padding)."""
        count = len(sample_ids) // self.batch_size
        if self._only_columns and len(columns) == 1:
            ((field, values),) = columns.items()
            if isinstance(values, np.ndarray):
                name = self._names[field]
                return [{name: tensor} for tensor in self._tensors(field, values, count)], values.nbytes
        padding = sample_ids < 0 if self.mark_padding else None
        if padding is not None and padding.any():
            columns = {name: self._filled(name, values, padding) for name, values in columns.items()}
        token_fields, of_batches = self._token_fields(columns, padding)
        of_rows = columns | token_fields | self._sample_fields(sample_ids, padding)
        parts: dict[str, list[Any]] = {}
        size = 0
        for field, values in of_rows.items():
            if isinstance(values, np.ndarray):
                size += values.nbytes
                parts[field] = self._tensors(field, values, count)
            else:
                parts[field] = [values[i * self.batch_size : (i + 1) * self.batch_size] for i in range(count)]
        parts |= of_batches
        names = [self._names[field] for field in parts]
        return [dict(zip(names, values, strict=True)) for values in zip(*parts.values(), strict=True)], size

    def _added_fields(self) -> list[str]:
        """The fields that a batch has besides the columns."""
        config = self.config
        fields = ["labels"] if config.labels else []
        fields += config.document_options
        fields += ["max_seqlen"] if config.cu_seqlens else []
        fields += ["max_doc_lens"] if config.doc_lens else []
        fields += ["sample_id"] if self.return_ids else []
        fields += ["stream_id"] if self.return_ids and self.split_ids is not None else []
        return fields + (["is_padding"] if self.mark_padding else [])

    def _token_fields(self, columns: Columns, padding: _Bools | None) -> tuple[Columns, dict[str, list[Any]]]:
        """What follows from the tokens: (fields of rows, fields of batches)."""
        config = self.config
        if not (config.labels or config.document_options):
            return {}, {}
        assert self.token_key is not None
        tokens = columns[self.token_key]
        assert isinstance(tokens, np.ndarray)
        mask_starts = config.masks_document_starts
        segments: Segments | None = None
        if config.document_options or self._masks_labels:
            segments = find_segments(tokens, self.eos_id, padding, bos_id=config.bos_id)
        rows: Columns = {}
        if config.labels == "shifted":
            masks = segments if self._masks_labels else None
            rows["labels"] = shifted_labels(
                tokens, masks, mask_starts=mask_starts, keep_length=config.keep_length
            )
            if not config.keep_length:
                rows[self.token_key] = tokens[:, :-1]
                segments = segments and segments.without_last_tokens()
        elif config.labels:
            assert segments is not None
            rows["labels"] = labels = segments.labels(tokens, mask_starts=mask_starts)
            if config.flat:
                labels[:, 0] = IGNORED_LABEL  # it follows another row's last token
        if segments is None or not config.document_options:
            return rows, {}
        documents, batches = self._document_fields(segments)
        return rows | documents, batches

    def _document_fields(self, segments: Segments) -> tuple[Columns, dict[str, list[Any]]]:
        """(fields of rows, fields of batches) that describe documents."""
        config, size = self.config, self.batch_size
        rows: Columns = {}
        batches: dict[str, list[Any]] = {}
        if config.position_ids:
            rows["position_ids"] = segments.position_ids()
        if config.document_ids:
            rows["document_ids"] = segments.document_ids()
        if config.seq_lengths:
            rows["seq_lengths"] = list(segments.seq_lengths())
        if config.doc_lens:
            lengths = segments.doc_lens(size)
            batches["doc_lens"] = [self._tensor(array) for array, _ in lengths]
            batches["max_doc_lens"] = [longest for _, longest in lengths]
        if config.cu_seqlens is True:
            bounds = segments.cu_seqlens(size)
            batches["cu_seqlens"] = [self._tensor(array) for array, _ in bounds]
            batches["max_seqlen"] = [longest for _, longest in bounds]
        elif config.cu_seqlens:
            padded = segments.padded_cu_seqlens(size, config.cu_seqlens)
            batches["cu_seqlens"] = list(map(self._tensor, padded))
            batches["max_seqlen"] = [segments.is_start.shape[1]] * len(padded)
        return rows, batches

    def _sample_fields(self, sample_ids: npt.NDArray[np.int64], padding: _Bools | None) -> Columns:
        """Which samples the rows are."""
        fields: Columns = {}
        if self.return_ids:
            fields["sample_id"] = sample_ids
            if self.split_ids is not None:
                fields["stream_id"], fields["sample_id"] = self.split_ids(sample_ids)
        if padding is not None:
            fields["is_padding"] = padding
        return fields

    def _filled(self, name: str, values: _Array | list[object], padding: _Bools) -> _Array | list[object]:
        """`values` with padding samples put in: eos (or 0) in arrays, None in lists."""
        if isinstance(values, list):
            real = iter(values)
            return [None if padded else next(real) for padded in padding.tolist()]
        fill = self.eos_id if name == self.token_key and self.eos_id is not None else 0
        filled = np.full((len(padding), *values.shape[1:]), fill, dtype=values.dtype)
        filled[~padding] = values
        return filled

    def _tensors(self, field: str, values: _Array, count: int) -> list[Any]:
        # One tensor per batch, so that saving or sending a batch does not drag its neighbours along.
        if self.config.flat and (field == self.token_key or field in _FLAT_FIELDS):
            return list(map(self._tensor, values.reshape(count, -1)))
        return list(map(self._tensor, values.reshape(count, -1, *values.shape[1:])))


_FLAT_FIELDS = {"labels", "position_ids", "document_ids"}


def _unchanged(values: _Array) -> _Array:
    return values


def _field_names(columns: list[str], added: list[str], rename: dict[str, str]) -> dict[str, str]:
    """The name in the batch of each of its fields; ValueError if one is unknown or comes twice."""
    if both := set(columns) & set(added):
        raise ValueError(
            f"the dataset has a column {min(both)!r}, which an option of the loader would replace: leave the "
            "option out, or select other columns"
        )
    fields = columns + added
    if unknown := [name for name in rename if name not in fields]:
        raise ValueError(f"rename has {unknown[0]!r}, but a batch has {', '.join(fields)}")
    names = {field: rename.get(field, field) for field in fields}
    if len(set(names.values())) < len(names):
        raise ValueError(f"rename would give two of {', '.join(fields)} one name: {rename}")
    return names
