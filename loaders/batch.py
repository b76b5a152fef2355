"""Makes batches from the columns of many samples: documents in rows, labels, padding, layout, tensors.

Every document in a packed row ends with the eos id, and no document is empty, so an eos directly after an eos
is padding, and the eos ids alone determine where documents begin and end. (`bos_id` is for data whose
documents begin with an id instead; `pad_id` is for padding with an id of its own.) Everything is computed for
many batches at once. With eos = 0 a row 5 6 0 7 0 0 0 gives

    labels        5 6 0 7 0 -100 -100      padding counts as one last segment of its own
                  -100 6 0 -100 0 -100 -100   with document starts masked
    position_ids  0 1 2 0 1 0 1
    document_ids  0 0 0 1 1 2 2
    cu_seqlens    0 3 5 7, max_seqlen 3    rows of a batch follow one another; a row always starts a segment
    doc_lens      3 2 2
    shifted       tokens 5 6 0 7 0 0, labels 6 0 7 0 -100 -100, all other fields describe these tokens

A layout changes neither the samples of a batch nor the state. Rows arrive in their stored type, are searched
for eos ids, and are converted once for each field, while they are in a core's cache. No two fields share
memory, except tokens and shifted labels if no label can be -100: both are views of the same rows, one token
apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.datasets.segments import IGNORED_LABEL, Segments, find_segments
from shardkit.errors import naming_extras
from shardkit.loaders.block_mask import BLOCK_MASK_FIELDS, DEFAULT_BLOCK, block_tables
from shardkit.loaders.config import LoaderConfig
from shardkit.loaders.document_values import DocumentValues, RowValues
from shardkit.loaders.gather import OutputMemory
from shardkit.loaders.streams import Columns
from shardkit.manifest import LOSS_MASK
from shardkit.order.token_mask import LONGEST_PERIOD, TokenMask

Batch = dict[str, Any]

_Array = npt.NDArray[np.generic]
_Ints = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]
Fields = dict[str, _Array | list[Any]]
"""Fields of many batches: for each field an array or list with one entry per batch."""

SplitIds = Callable[[_Ints], tuple[_Ints, _Ints]]
"""Maps sample ids, counted over all streams, to stream numbers and row numbers in the streams' datasets."""


def repetitive_rows(tokens: _Array, most: int, *, eos_id: int | None = None) -> _Bools:
    """Return bool[rows]: whether a row repeats the same 1 to 13 tokens over `most` times without a gap.

    `tokens` has shape (rows, length). Runs of `eos_id`, which are padding, do not count. Groeneveld et al.
    2024 (OLMo 2) mask the loss of rows with 32 repetitions or more.
    """
    found = np.zeros(len(tokens), np.bool_)
    for period in range(1, LONGEST_PERIOD + 1):
        least = period * most  # minimum number of consecutive tokens that equal the token one period before
        if period + least > tokens.shape[1]:
            break
        same = tokens[:, period:] == tokens[:, :-period]
        # A run of `least` such tokens covers a whole block of half that length, so check only rows that
        # have a block of such tokens.
        block = (least + 1) // 2
        blocks = same[:, : same.shape[1] // block * block].reshape(len(tokens), -1, block)
        for row in np.flatnonzero(blocks.all(axis=2).any(axis=1) & ~found).tolist():
            run = same[row] & (tokens[row, period:] != eos_id) if eos_id is not None else same[row]
            edges = np.flatnonzero(np.diff(run, prepend=False, append=False))
            found[row] = (edges[1::2] - edges[::2]).max(initial=0) >= least
    return found


@dataclass(frozen=True, slots=True)
class TokenColumn:
    """The column of tokens; `key` is None if the dataset has no such column.

    `dtype`: type of the delivered tokens; None keeps their type. `may_be_padded`: rows may hold padding.
    `mask`: tokens whose labels are -100. `may_overflow`: ids may be too large for `dtype`, so each batch is
    checked.
    """

    key: str | None
    eos_id: int | None = None
    dtype: np.dtype[np.generic] | None = None
    may_be_padded: bool = True
    mask: TokenMask | None = None
    may_overflow: bool = False


class BatchMaker:
    """Makes batches of `batch_size` from columns of many samples."""

    def __init__(
        self,
        batch_size: int,
        config: LoaderConfig,
        columns: Sequence[str],
        tokens: TokenColumn,
        *,
        output: OutputMemory | None = None,
        return_ids: bool = False,
        mark_padding: bool = False,
        split_ids: SplitIds | None = None,
        values: DocumentValues | None = None,
    ) -> None:
        """Raise ValueError if `rename` has an unknown field, or if two fields would get the same name.

        With a transform, whose fields are not known yet, `fields` raises these errors.

        `output`: memory that fields are written to. `mark_padding`: whole rows may be padding, so batches
        get the field `is_padding`. `values`: values of documents, of which each field gets its name.
        """
        if mark_padding and config.collate_fn is not None:
            raise ValueError("tail='pad' fills batches with padding, which is no sample for collate_fn")
        if values is not None and config.collate_fn is not None:
            raise ValueError(
                "document_values are fields of batches, which collate_fn makes: give one of them"
            )
        self.batch_size = batch_size
        self.config = config
        self.tokens = tokens
        self.return_ids = return_ids
        self.mark_padding = mark_padding
        self.split_ids = split_ids
        self.values = values
        self.memory = output or OutputMemory()
        self._transforms = config.transform is not None
        if not self._transforms:  # otherwise the columns are known when a sample has been transformed
            self._names = self._field_names(columns)
        has_padding = tokens.may_be_padded and tokens.eos_id is not None and config.bos_id is None
        has_padding |= config.pad_id is not None
        self._loss_mask = LOSS_MASK if LOSS_MASK in columns else None
        masks_tokens = mark_padding or has_padding or tokens.mask is not None or self._loss_mask is not None
        masks_tokens |= config.max_repetitions is not None
        self._masks_labels = config.labels is True or config.masks_document_starts or masks_tokens
        self._describes_documents = bool(config.document_options)
        self._only_columns = not (return_ids or mark_padding or config.reads_tokens or values)
        self.tensor = tensor_maker(config)

    def make(self, columns: Columns, sample_ids: npt.NDArray[np.int64]) -> tuple[list[Batch], int]:
        """Return batches and their size in bytes; `columns` have no rows for padding, whose id is -1."""
        values = None if self.values is None else self.values.open_rows(sample_ids)
        fields, size = self.fields(columns, sample_ids, values)
        return batches_of(fields, self.tensor), size

    def fields(
        self, columns: Columns, sample_ids: npt.NDArray[np.int64], documents: RowValues | None = None
    ) -> tuple[Fields, int]:
        """Return the fields of all batches, not yet divided into batches, and their size in bytes.

        `documents`: values of the documents in the rows, from `self.values`.
        """
        count = len(sample_ids) // self.batch_size
        names = self._field_names(list(columns)) if self._transforms else self._names
        if not self._transforms:
            self.check_overflow(columns)
        if self._only_columns and len(columns) == 1:
            ((field, values),) = columns.items()
            if isinstance(values, np.ndarray):
                return {names[field]: self._by_batch(field, values, count)}, values.nbytes
        padding = sample_ids < 0 if self.mark_padding else None
        if padding is not None and padding.any():
            columns = {name: self._filled(name, values, padding) for name, values in columns.items()}
        token_fields, of_batches = self._token_fields(columns, padding, sample_ids, documents)
        of_rows = columns | token_fields | self.sample_fields(sample_ids, padding)
        fields: Fields = {}
        size = 0
        for field, values in of_rows.items():
            if isinstance(values, np.ndarray):
                size += values.nbytes
                fields[field] = self._by_batch(field, values, count)
            else:
                size += held_bytes(values)
                cuts = range(0, count * self.batch_size, self.batch_size)
                fields[field] = [values[low : low + self.batch_size] for low in cuts]
        fields |= of_batches
        return {names[field]: values for field, values in fields.items()}, size

    def check_overflow(self, columns: Columns) -> None:
        """Raise ValueError if a token id does not fit the delivered dtype, or has wrapped around in it."""
        if not self.tokens.may_overflow or self.tokens.key not in columns:
            return
        tokens, dtype = columns[self.tokens.key], self.tokens.dtype
        assert dtype is not None
        if not isinstance(tokens, np.ndarray) or not tokens.size:
            return
        if (largest := int(tokens.view(f"u{tokens.itemsize}").max())) > np.iinfo(dtype.name).max:
            wider = "'int64'" if dtype.itemsize < 8 else "None"
            raise ValueError(f"token id {largest:,} does not fit dtype {dtype.name}: give dtype={wider}")

    def row_bytes(self, columns: int, tokens: int) -> int:
        """Return the approximate bytes of a row with all fields; `columns`: bytes read; `tokens`: length."""
        config, dtype = self.config, self.tokens.dtype
        of_token = 8 * (bool(config.labels) + config.position_ids) + 4 * config.document_ids
        if config.reads_tokens and dtype is not None:
            of_token += dtype.itemsize  # the converted copy; `columns` counts the stored tokens
        return max(1, columns + tokens * of_token)

    def delivered_length(self, stored: int | None) -> int | None:
        """Return the tokens of a delivered row that has `stored` tokens; None if rows differ in length."""
        if stored is None or self.config.mixed_lengths:
            return None
        return stored - (self.config.labels == "shifted" and not self.config.keep_length)

    def _added_fields(self) -> list[str]:
        """Return the names of the fields that options add to the columns."""
        config = self.config
        fields = ["labels"] if config.labels else []
        for option in config.document_options:
            fields += _FIELDS.get(option, (option,))
        fields += [] if self.values is None else [*self.values.types]
        fields += ["sample_id"] if self.return_ids else []
        fields += ["stream_id"] if self.return_ids and self.split_ids is not None else []
        return fields + (["is_padding"] if self.mark_padding else [])

    def _token_fields(
        self, columns: Columns, padding: _Bools | None, sample_ids: _Ints, documents: RowValues | None
    ) -> tuple[Columns, Fields]:
        """Return the fields computed from tokens: first those with an entry per row, then per batch."""
        if not self.config.reads_tokens and documents is None:
            return {}, {}
        column = self.tokens
        assert column.key is not None
        tokens = columns[column.key]
        assert isinstance(tokens, np.ndarray)
        segments: Segments | None = None
        has_joined = documents is not None and documents.joins_documents
        if self._describes_documents or has_joined or (self.config.labels and self._masks_labels):
            ids = {"bos_id": self.config.bos_id, "pad_id": self.config.pad_id}
            segments = find_segments(tokens, column.eos_id, padding, **ids)
        rows: Columns = {}
        delivered, labels = self._tokens_and_labels(tokens)
        rows[column.key], length = delivered, delivered.shape[1]
        if labels is not None:
            rows["labels"] = labels
            if self._masks_labels:
                assert segments is not None
                shift = int(self.config.labels == "shifted")
                segments.mask(labels, shift=shift, mask_starts=self.config.masks_document_starts)
                if self._loss_mask is not None:
                    trained = columns[self._loss_mask]
                    assert isinstance(trained, np.ndarray)
                    of_labels = trained[:, shift:]
                    labels[:, : of_labels.shape[1]][of_labels == 0] = IGNORED_LABEL
                if (most := self.config.max_repetitions) is not None:
                    labels[repetitive_rows(tokens, most, eos_id=column.eos_id)] = IGNORED_LABEL
                if column.mask is not None:
                    places = column.mask.places(sample_ids, tokens.shape[1])
                    segments.ignore(labels, places, shift=shift)
        batches: Fields = {}
        if segments is not None and (self._describes_documents or documents is not None):
            if self.config.labels == "shifted" and not self.config.keep_length:
                segments = segments.without_last_tokens()
            described, batches = self._document_fields(segments)
            rows |= described
        if documents is not None:
            batches |= documents.by_batch(self.batch_size, length, segments)
        return rows, batches

    def _tokens_and_labels(self, stored: _Array) -> tuple[_Array, npt.NDArray[np.int64] | None]:
        """Return tokens and labels in their delivered types, before labels are masked with -100."""
        config, dtype = self.config, self.tokens.dtype or stored.dtype
        shift, keep = int(config.labels == "shifted"), config.keep_length or config.labels != "shifted"
        rows, length = stored.shape
        if shift and dtype == np.int64 and not (keep or self._masks_labels or config.flat):
            whole = self.memory.converted(stored, np.dtype(np.int64)).view(np.int64)
            return whole[:, :-1], whole[:, 1:]
        kept = length if keep else length - 1
        tokens = self.memory.converted(stored[:, :kept], dtype)
        if not config.labels:
            return tokens, None
        labels = self.memory.lend((rows, kept), np.dtype(np.int64)).view(np.int64)
        labels[:, : length - shift] = stored[:, shift:]
        if shift and keep:
            labels[:, -1] = IGNORED_LABEL
        if config.flat and not shift:
            labels[:, 0] = IGNORED_LABEL  # else a flat batch would predict it from the previous row
        return tokens, labels

    def _document_fields(self, segments: Segments) -> tuple[Columns, Fields]:
        """Return the fields that describe documents: first those with an entry per row, then per batch."""
        config, size = self.config, self.batch_size
        rows: Columns = {}
        batches: Fields = {}
        if config.position_ids:
            rows["position_ids"] = positions = self.memory.lend(segments.shape, np.dtype(np.int64))
            segments.position_ids(positions.view(np.int64))
        if config.document_ids:
            rows["document_ids"] = segments.document_ids()
        if config.seq_lengths:
            rows["seq_lengths"] = list(segments.seq_lengths())
        if config.doc_lens:
            lengths = segments.doc_lens(size)
            batches["doc_lens"] = [array for array, _ in lengths]
            batches["max_doc_lens"] = [longest for _, longest in lengths]
        if config.cu_seqlens is True:
            bounds = segments.cu_seqlens(size)
            batches["cu_seqlens"] = [array for array, _ in bounds]
            batches["max_seqlen"] = [longest for _, longest in bounds]
        elif config.cu_seqlens:
            padded = segments.padded_cu_seqlens(size, config.cu_seqlens)
            batches["cu_seqlens"] = padded
            batches["max_seqlen"] = [segments.shape[1]] * len(padded)
        if config.block_mask:
            batches |= self._block_mask(segments)
        return rows, batches

    def _block_mask(self, segments: Segments) -> Fields:
        rows, length = segments.shape
        count, block = rows // self.batch_size, int(self.config.block_mask)
        if self.config.block_mask is True:
            block = DEFAULT_BLOCK
        joined = self.batch_size if self.config.flat else 1
        tables = block_tables(segments.starts, rows // joined, length * joined, block)
        fields: Fields = {name: self._by_batch(name, table, count) for name, table in tables.items()}
        return fields | {"block_size": [block] * count}

    def _field_names(self, columns: Sequence[str]) -> dict[str, str]:
        """Return the name of each field of a batch with these columns; see `_field_names`."""
        return _field_names(list(columns), self._added_fields(), dict(self.config.rename or {}))

    def sample_fields(self, sample_ids: npt.NDArray[np.int64], padding: _Bools | None = None) -> Columns:
        """Return the fields that identify samples and mark padding."""
        fields: Columns = {}
        if self.return_ids:
            fields["sample_id"] = sample_ids
            if self.split_ids is not None:
                fields["stream_id"], fields["sample_id"] = self.split_ids(sample_ids)
        if padding is not None:
            fields["is_padding"] = padding
        return fields

    def _filled(self, name: str, values: _Array | list[object], padding: _Bools) -> _Array | list[object]:
        """Return `values` with padding samples inserted: eos (or 0) in arrays, None in lists."""
        if isinstance(values, list):
            real = iter(values)
            return [None if padded else next(real) for padded in padding.tolist()]
        fill = self.tokens.eos_id if name == self.tokens.key and self.tokens.eos_id is not None else 0
        filled = np.full((len(padding), *values.shape[1:]), fill, dtype=values.dtype)
        filled[~padding] = values
        return filled

    def _by_batch(self, field: str, values: _Array, count: int) -> _Array:
        if self.config.flat and (field == self.tokens.key or field in _FLAT_FIELDS):
            return values.reshape(count, -1)
        return values.reshape(count, -1, *values.shape[1:])


def batches_of(fields: Fields, tensor: Callable[[_Array], object]) -> list[Batch]:
    """Return one dict per batch, with its arrays converted by `tensor`."""
    # One tensor per batch, so that saving or sending a batch does not include other batches' memory.
    parts = [
        list(map(tensor, values))
        if isinstance(values, np.ndarray)
        else [tensor(value) if isinstance(value, np.ndarray) else value for value in values]
        for values in fields.values()
    ]
    if len(parts) == 1:
        (name,) = fields
        return [{name: value} for value in parts[0]]
    names = list(fields)
    return [dict(zip(names, values, strict=True)) for values in zip(*parts, strict=True)]


def held_bytes(value: Any) -> int:
    """Return about how many bytes a value holds: its arrays, tensors, images of Pillow, bytes and strings."""
    if isinstance(value, dict):
        return sum(map(held_bytes, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(held_bytes, value))
    if isinstance(value, (bytes, str)):
        return len(value)
    if hasattr(value, "getbands"):
        return int(value.width * value.height * len(value.getbands()))
    size = getattr(value, "nbytes", 0)
    return size if isinstance(size, int) else 0


def tensor_maker(config: LoaderConfig) -> Callable[[_Array], object]:
    """Return the function that converts a batch's arrays: `torch.from_numpy`, or the identity for NumPy."""
    if config.tensors != "torch":
        return _unchanged
    with naming_extras('a loader (without Layout(tensors="numpy"))'):
        import torch
    return torch.from_numpy


_FIELDS = {
    "cu_seqlens": ("cu_seqlens", "max_seqlen"),
    "doc_lens": ("doc_lens", "max_doc_lens"),
    "block_mask": BLOCK_MASK_FIELDS,
}
"""For each option that adds several fields, the names of these fields; others add one of their own name."""

_FLAT_FIELDS = {"labels", "position_ids", "document_ids"}


def _unchanged(values: _Array) -> _Array:
    return values


def _field_names(columns: list[str], added: list[str], rename: dict[str, str]) -> dict[str, str]:
    """Return each field's name after `rename`; raise ValueError if a name is unknown or comes twice."""
    if both := set(columns) & set(added):
        raise ValueError(
            f"the dataset has a column {min(both)!r}, which an option of the loader would replace: drop the "
            "option, or select other columns"
        )
    fields = columns + added
    if unknown := [name for name in rename if name not in fields]:
        raise ValueError(f"rename has {unknown[0]!r}, but the fields of a batch are {', '.join(fields)}")
    names = {field: rename.get(field, field) for field in fields}
    if len(set(names.values())) < len(names):
        raise ValueError(f"rename gives two of the fields {', '.join(fields)} the same name: {rename}")
    return names
