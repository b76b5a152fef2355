"""From the columns of many samples to batches: documents inside rows, padding, tensors.

Every document in a packed row ends with the eos id, and no document is empty, so an eos directly after an eos
is padding and nothing else is needed to know where documents begin and end. All of it is worked out for many
batches at once. With eos = 0 a row 5 6 0 7 0 0 0 gives

    labels        5 6 0 7 0 -100 -100      padding counts as one last segment of its own
                  -100 6 0 -100 0 -100 -100   with document starts masked
    position_ids  0 1 2 0 1 0 1
    document_ids  0 0 0 1 1 2 2
    cu_seqlens    0 3 5 7, max_seqlen 3    rows of a batch follow one another; a row always starts a segment
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardkit.loaders.config import LoaderConfig
from shardkit.loaders.streams import Columns

__all__ = ["IGNORED_LABEL", "Batch", "BatchMaker", "Segments"]

Batch = dict[str, Any]
IGNORED_LABEL = -100  # torch.nn.CrossEntropyLoss ignores it by default

_Array = npt.NDArray[np.generic]
_Ints = npt.NDArray[np.int64]
SplitIds = Callable[[_Ints], tuple[_Ints, _Ints]]
"""Gives (stream, row number in its dataset) of samples that are numbered through all streams."""
_Bools = npt.NDArray[np.bool_]


class Segments:
    """Where documents begin in rows of tokens (rows, length)."""

    def __init__(self, tokens: _Array, eos_id: int, is_padding_row: _Bools | None = None) -> None:
        ends = tokens == eos_id
        self.shape = tokens.shape
        self.padding: _Bools = np.zeros(tokens.shape, dtype=np.bool_)
        np.logical_and(ends[:, 1:], ends[:, :-1], out=self.padding[:, 1:])
        if is_padding_row is not None:
            self.padding[is_padding_row] = True
        begins = np.ones(tokens.shape, dtype=np.bool_)
        begins[:, 1:] = np.where(self.padding[:, 1:], ~self.padding[:, :-1], ends[:, :-1])
        self.starts: npt.NDArray[np.int64] = np.flatnonzero(begins)  # in the flattened rows
        self.lengths = np.diff(self.starts, append=tokens.size)

    def labels(self, tokens: _Array, *, mask_starts: bool) -> npt.NDArray[np.int64]:
        """Return the tokens with padding, and on request each document's first token, as -100.

        Models that shift labels predict label i + 1 from token i, so the label of a document's first token
        would be predicted from the end of another document. This includes the first token of a row, which
        follows another row when a batch is flattened.
        """
        labels = tokens.astype(np.int64, order="C")
        labels[self.padding] = IGNORED_LABEL
        if mask_starts:
            labels.reshape(-1)[self.starts] = IGNORED_LABEL
        return labels

    def position_ids(self) -> npt.NDArray[np.int64]:
        """Each token's distance from the start of its document."""
        flat = np.arange(self.padding.size, dtype=np.int64)
        flat -= np.repeat(self.starts, self.lengths)
        return flat.reshape(self.shape)

    def document_ids(self) -> npt.NDArray[np.int32]:
        """Each token's document, counted from 0 in each row."""
        rows = self.starts // self.shape[1]
        first = np.searchsorted(self.starts, rows * self.shape[1])
        numbers = (np.arange(len(self.starts)) - first).astype(np.int32)
        return np.repeat(numbers, self.lengths).reshape(self.shape)

    def cu_seqlens(self, batch_size: int) -> list[tuple[npt.NDArray[np.int32], int]]:
        """(bounds of the documents in each flattened batch of `batch_size` rows, the longest document)."""
        size = batch_size * self.shape[1]
        edges = np.searchsorted(self.starts, np.arange(0, self.padding.size + 1, size))
        result = []
        for number, (low, high) in enumerate(pairwise(edges)):
            bounds = np.empty(high - low + 1, dtype=np.int32)
            bounds[:-1] = self.starts[low:high] - number * size
            bounds[-1] = size
            result.append((bounds, int(self.lengths[low:high].max())))
        return result


class BatchMaker:
    """Makes batches of `batch_size` from columns of many samples."""

    def __init__(
        self,
        batch_size: int,
        config: LoaderConfig,
        token_key: str | None,
        eos_id: int | None,
        *,
        return_ids: bool = False,
        mark_padding: bool = False,
        split_ids: SplitIds | None = None,
    ) -> None:
        self.batch_size = batch_size
        self.config = config
        self.token_key = token_key
        self.eos_id = eos_id
        self.return_ids = return_ids
        self.mark_padding = mark_padding
        self.split_ids = split_ids
        self._only_columns = not (return_ids or mark_padding or config.document_extras)

    def make(self, columns: Columns, sample_ids: npt.NDArray[np.int64]) -> tuple[list[Batch], int]:
        """(batches, their bytes) from the columns of the real samples among `sample_ids` (-1: padding)."""
        count = len(sample_ids) // self.batch_size
        if self._only_columns and len(columns) == 1:
            ((name, values),) = columns.items()
            if isinstance(values, np.ndarray):
                return [{name: tensor} for tensor in _tensors(values, count)], values.nbytes
        padding = sample_ids < 0 if self.mark_padding else None
        if padding is not None and padding.any():
            columns = {name: self._filled(name, values, padding) for name, values in columns.items()}
        segments = self._segments(columns, padding)
        extras = self._extras(columns, segments, sample_ids, padding)
        named = extras.keys() | ({"cu_seqlens", "max_seqlen"} if self.config.cu_seqlens else set())
        if both := columns.keys() & named:
            raise ValueError(
                f"the dataset has a column {min(both)!r}, which an option of the loader would replace: leave "
                f"the option out, or select other columns"
            )
        parts: dict[str, list[Any]] = {}
        size = 0
        for name, values in (columns | extras).items():
            if isinstance(values, np.ndarray):
                size += values.nbytes
                parts[name] = _tensors(values, count)
            else:
                parts[name] = [values[i * self.batch_size : (i + 1) * self.batch_size] for i in range(count)]
        if self.config.cu_seqlens and segments is not None:
            bounds = segments.cu_seqlens(self.batch_size)
            parts["cu_seqlens"] = [torch.from_numpy(array) for array, _ in bounds]
            parts["max_seqlen"] = [longest for _, longest in bounds]
        names = list(parts)
        return [dict(zip(names, values, strict=True)) for values in zip(*parts.values(), strict=True)], size

    def _segments(self, columns: Columns, padding: _Bools | None) -> Segments | None:
        """The documents in all rows, if an option needs them."""
        if not self.config.document_extras:
            return None
        assert self.eos_id is not None
        return Segments(self._tokens(columns), self.eos_id, padding)

    def _extras(
        self,
        columns: Columns,
        segments: Segments | None,
        sample_ids: npt.NDArray[np.int64],
        padding: _Bools | None,
    ) -> Columns:
        extras: Columns = {}
        if segments is not None:
            if self.config.labels:
                masked = self.config.masks_document_starts
                extras["labels"] = segments.labels(self._tokens(columns), mask_starts=masked)
            if self.config.position_ids:
                extras["position_ids"] = segments.position_ids()
            if self.config.document_ids:
                extras["document_ids"] = segments.document_ids()
        if self.return_ids:
            extras["sample_id"] = sample_ids
            if self.split_ids is not None:
                extras["stream_id"], extras["sample_id"] = self.split_ids(sample_ids)
        if padding is not None:
            extras["is_padding"] = padding
        return extras

    def _tokens(self, columns: Columns) -> _Array:
        assert self.token_key is not None
        tokens = columns[self.token_key]
        assert isinstance(tokens, np.ndarray)
        return tokens

    def _filled(self, name: str, values: _Array | list[object], padding: _Bools) -> _Array | list[object]:
        """`values` with padding samples put in: eos (or 0) in arrays, None in lists."""
        if isinstance(values, list):
            real = iter(values)
            return [None if padded else next(real) for padded in padding.tolist()]
        fill = self.eos_id if name == self.token_key and self.eos_id is not None else 0
        filled = np.full((len(padding), *values.shape[1:]), fill, dtype=values.dtype)
        filled[~padding] = values
        return filled


def _tensors(values: _Array, count: int) -> list[torch.Tensor]:
    # One storage per batch, so that saving or sending a batch does not drag its neighbours along.
    return list(map(torch.from_numpy, values.reshape(count, -1, *values.shape[1:])))
