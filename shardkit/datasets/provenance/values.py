"""Read the values of documents from a dataset's provenance tables, for the batches of loaders.

A field is a column of the tables that describes documents (`source`, `copies`, `record`, `document_start`,
`document_id`, `file`, `id`, `url`) or a key of the JSON objects in `metadata`, where builds keep the fields
that the recipe names and what steps add, such as scores. "metadata.source" is the key "source".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from shardkit.arrays import Ints
from shardkit.datasets.document_values import ShardValues, ValueType, arrow_values, json_values, type_of
from shardkit.datasets.opened import OpenDataset
from shardkit.datasets.provenance.table import ProvenanceTable
from shardkit.errors import ShardError
from shardkit.files import load_json

_NUMBERS = ("source", "copies", "record", "document_start")
_TEXTS = ("document_id", "file", "id", "url")
_METADATA = "metadata"
_END = "token_end"
_READ_ROWS = 1 << 17  # rows whose pieces are read at a time; their texts take about 100 MB
_SAMPLES, _SAMPLED_ROWS = 16, 1024  # places all over a dataset where unknown fields are looked for


class ProvenanceValues:
    """Reads values from provenance tables. Raises NoProvenanceError if the dataset has none."""

    def __init__(self, dataset: OpenDataset, sources: Sequence[str]) -> None:
        """`sources`: the labels that `source` numbers; it must have all labels of this dataset."""
        self._dataset, self._table = dataset, ProvenanceTable(dataset)
        self._starts = dataset.manifest.shard_starts
        self._labels = [] if dataset.card is None else dataset.card.source_labels
        self._numbers = np.array([sources.index(label) for label in self._labels], np.int64)

    def types(self, names: Sequence[str]) -> dict[str, ValueType]:
        """Return the default types: see `ValueReader.types`."""
        found: dict[str, ValueType] = {}
        found |= {name: "int64" for name in names if name in _NUMBERS}
        found |= {name: "hash" for name in names if name in _TEXTS}
        rows = np.linspace(0, len(self._dataset), _SAMPLES, endpoint=False).astype(np.int64)
        for first in np.unique(rows).tolist():
            if not (left := [name for name in names if name not in found]):
                break
            sampled = np.arange(first, min(first + _SAMPLED_ROWS, len(self._dataset)))
            texts = self._table.of_rows(sampled, [_METADATA]).column(_METADATA).to_pylist()
            for text in dict.fromkeys(filter(None, texts)):
                left = self._note(found, left, text)
                if not left:
                    break
        return found

    def _note(self, found: dict[str, ValueType], left: Sequence[str], text: str) -> list[str]:
        """Add to `found` the types of fields that a JSON object has; return those of `left` not found."""
        try:
            fields = load_json(text)
        except ValueError as error:
            raise ShardError(self._dataset.location, f"provenance: metadata is no JSON ({error})") from error
        for name in left:
            if (value := fields.get(_key(name)) if isinstance(fields, dict) else None) is not None:
                if (kind := type_of(value)) is None:
                    what = f"the documents of {self._dataset.location} have {value!r:.80} in {name!r}"
                    raise ValueError(f"document_values takes numbers and texts, but {what}")
                found[name] = kind
        return [name for name in left if name not in found]

    def read(self, shards: Sequence[int], types: Mapping[str, ValueType]) -> Iterator[ShardValues]:
        """Yield the values of shards: see `ValueReader.read`."""
        columns = [name for name in types if name in (*_NUMBERS, *_TEXTS)]
        columns += [_METADATA] if len(columns) < len(types) else []
        for some in self._together(shards):
            rows = np.concatenate([np.arange(self._starts[n], self._starts[n + 1]) for n in some])
            table = self._table.of_rows(rows, [_END, *columns]).combine_chunks()
            ids = table.column("sample_id").to_numpy()
            for number in some:
                first, stop = int(self._starts[number]), int(self._starts[number + 1])
                low, high = np.searchsorted(ids, (first, stop)).tolist()
                part = table.slice(low, high - low)
                yield self._values(stop - first, ids[low:high] - first, part, types, first)

    def _together(self, shards: Sequence[int]) -> Iterator[list[int]]:
        """Divide shards into lists of at most `_READ_ROWS` rows, or of one shard."""
        some: list[int] = []
        size = 0
        for number in shards:
            more = int(self._starts[number + 1] - self._starts[number])
            if some and size + more > _READ_ROWS:
                yield some
                some, size = [], 0
            some.append(number)
            size += more
        if some:
            yield some

    def _values(
        self, rows: int, row: Ints, pieces: pa.Table, types: Mapping[str, ValueType], first: int
    ) -> ShardValues:
        if (np.diff(row) < 0).any():
            raise ShardError(self._dataset.location, "provenance: is not sorted by row; run shardkit verify")
        if (lacking := np.flatnonzero(np.bincount(row, minlength=rows) == 0)).size:
            problem = f"row {first + int(lacking[0]):,} is in no provenance table: a file is missing"
            raise ShardError(self._dataset.location, f"{problem}; run shardkit verify")
        keys = {name: (_key(name), kind) for name, kind in types.items() if name not in (*_NUMBERS, *_TEXTS)}
        values = {}
        if keys:
            try:
                values = json_values(pieces.column(_METADATA).combine_chunks(), keys)
            except ValueError as error:
                raise ShardError(
                    self._dataset.location, f"provenance: metadata is no JSON ({error})"
                ) from error
        for name in types.keys() - keys.keys():
            values[name] = arrow_values(self._column(pieces, name, types[name]), types[name])
        return ShardValues.of(rows, row, pieces.column(_END).to_numpy(), values, types)

    def _column(self, pieces: pa.Table, name: str, kind: ValueType) -> pa.Array:
        found = pieces.column(name).combine_chunks()
        if name == "document_id":
            return pa.array([one.hex() for one in found.to_pylist()], pa.string())
        if name != "source":
            return found
        numbers = found.to_numpy()
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(self._labels):
            problem = f"has source {numbers.max()}, but the card lists {len(self._labels)} inputs"
            raise ShardError(self._dataset.location, f"provenance: {problem}; run shardkit verify")
        if kind == "hash":
            return pa.array(self._labels, pa.string()).take(found)
        return pa.array(self._numbers[numbers])


def _key(name: str) -> str:
    return name.removeprefix(f"{_METADATA}.")
