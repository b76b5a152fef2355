"""Looks up the values of the documents in the rows of a batch: `Layout(document_values=…)`.

A batch has an array [rows, n] for each field, of the form of `doc_lens`: entry k of a row is that of the k-th
document as `document_ids` counts them, and n is the largest number of documents in a row. What has no
document (padding, and entries past a row's last document) is missing: NaN or -1.

Values are found by the number of a row, so they depend on neither order, ranks nor workers. Those of a whole
shard are read when one of its rows is first needed, and kept in memory up to `MAX_BYTES`: 8 bytes for a row,
and 4 bytes and its values for a document. They lie one after the other in arrays that all shards share, so
one call of NumPy looks up rows of any shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardkit.datasets.opened import OpenDataset
from shardkit.datasets.segments import Segments, batch_cuts, cut_table
from shardkit.datasets.text_rows import TextRows
from shardkit.errors import naming_extras, warn_user
from shardkit.loaders.streams import Streams
from shardkit.units import format_bytes

if TYPE_CHECKING:
    from shardkit.datasets.document_values import ShardValues, ValueReader, ValueType

_MEMORY = "memory"
MAX_BYTES = 1 << 30  # memory of the values that are kept; the least recently used half goes first

_Ints = npt.NDArray[np.int64]
_Values = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class RowValues:
    """The values of the documents in some rows: of row i, the entries `firsts[i]` to `after[i]` (inclusive).

    Entry `after[i]` is that of the tokens behind the last document, which end at `ends[i]`. The arrays are
    not changed later, whatever other rows are opened.
    """

    firsts: _Ints
    after: _Ints
    ends: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]
    values: Mapping[str, _Values]
    joins_documents: bool
    """Whether a document of a row, as its tokens tell, may be several of the values."""

    def __getitem__(self, rows: slice) -> RowValues:
        own = self.firsts[rows], self.after[rows], self.ends[rows]
        return RowValues(*own, self.starts, self.values, self.joins_documents)

    def by_batch(
        self, batch_size: int, length: int, segments: Segments | None = None
    ) -> dict[str, list[_Values]]:
        """Return the values in rows of `length` tokens, an array [rows, n] for each field and batch.

        `segments`: the documents that other fields of the batch describe; None: those that the values are of,
        and padding counts as one more.
        """
        counts = self.after - self.firsts + (self.ends < length)
        if (is_cut := self.ends > length).any():  # shifted labels leave out the last token of a row
            counts[is_cut] -= self.starts[self.after[is_cut] - 1] >= length
        if segments is not None and not np.array_equal(counts, segments.counts):
            entries, counts = self._searched(segments), segments.counts
        else:
            numbers = np.arange(counts.max(initial=0))
            is_there = numbers < counts[:, None]
            entries = np.where(is_there, self.firsts[:, None] + numbers, self.after[:, None])
        cuts = batch_cuts(counts, batch_size)
        return {name: cut_table(values[entries], cuts) for name, values in self.values.items()}

    def _searched(self, segments: Segments) -> _Ints:
        """Return the entry of each document, found by its first token, as a table [rows, n].

        Needed if rows have other documents than the values, such as several that a build joined to one text.
        """
        rows, length = segments.shape
        counts = self.after + 1 - self.firsts
        ends = np.cumsum(counts)
        every = np.arange(ends[-1] if rows else 0) + np.repeat(self.firsts - (ends - counts), counts)
        # Entries that begin at or behind the end of a row are those of no token.
        starts = np.minimum(self.starts[every], length) + np.repeat(np.arange(rows) * length, counts)
        entries = np.repeat(self.after[:, None], segments.counts.max(initial=0), axis=1)
        found = np.searchsorted(starts, segments.starts, side="right") - 1
        entries[segments.rows, segments.numbers] = every[found]
        return entries


class DocumentValues:
    """The values of the documents of one loader's streams."""

    def __init__(
        self,
        streams: Streams,
        wanted: Sequence[str] | Mapping[str, ValueType],
        *,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """`wanted`: names of fields, or their types by name.

        Raises ValueError for a field that the documents of no stream have, and for one that is a number in
        one stream and a text in another. Documents of streams that lack a field have a missing value.
        """
        with naming_extras("document_values", pyarrow="parquet"):
            import shardkit.datasets.document_values as values

        once = streams.once
        self._streams, self._max_bytes = streams, max_bytes
        labels = source_labels(streams)
        opened = [_open_reader(dataset, labels) for dataset in once.datasets]
        self._readers = [reader for reader, _ in opened]
        self.types = _types(once, opened, wanted)
        """The type of each field, by name."""
        self._missing = {name: values.missing(1, kind) for name, kind in self.types.items()}
        self._shifts = np.zeros(len(streams), np.int64)
        for number, who in enumerate(streams.sharing):
            for stream in who:
                self._shifts[stream] = once.first_sample(number) - streams.first_sample(stream)
        self._first_samples = np.array([streams.first_sample(n) for n in range(len(streams))])
        self._shard_starts = np.concatenate(
            [
                once.first_sample(n) + one.manifest.shard_starts[:-1].astype(np.int64)
                for n, one in enumerate(once.datasets)
            ]
        )
        self._used = np.zeros(len(self._shard_starts), np.int64)  # when a shard's values were last needed
        self._now = 0
        self._warned: set[str] = set()
        self._lock = Lock()  # after a change of weights, the thread of an earlier plan may still be reading
        self._joins = any(_joins(dataset) for dataset in once.datasets)
        self._forget()

    def open_rows(self, sample_ids: _Ints) -> RowValues:
        """Return the values of the documents in rows; reads those of shards that are not there.

        Samples are numbered over all streams; -1 is padding. Raises ShardError or StoreError if values cannot
        be read.
        """
        with self._lock:
            places = self._places(sample_ids)
            firsts, starts = self._firsts.array[places], self._starts.array
            after = self._firsts.array[places + 1] - 1
            values = {name: pool.array for name, pool in self._values.items()}
        return RowValues(firsts, after, starts[after], starts, values, self._joins)

    def _places(self, sample_ids: _Ints) -> _Ints:
        """Return the place of each row in `_firsts`; reads the values of shards that are not there."""
        number = sample_ids
        if len(self._shifts) > 1:
            stream = np.searchsorted(self._first_samples, sample_ids, side="right") - 1
            number = sample_ids + self._shifts[stream]
        shard = np.searchsorted(self._shard_starts, number, side="right") - 1
        is_padding = sample_ids < 0 if sample_ids.min(initial=0) < 0 else None
        needed = shard if is_padding is None else shard[~is_padding]
        self._now += 1
        self._used[needed] = self._now
        if self._bases[needed].min(initial=0) < 0:
            self._load(np.unique(needed[self._bases[needed] < 0]))
        places: _Ints = self._bases[shard] + number - self._shard_starts[shard]
        if is_padding is not None:
            places[is_padding] = 0  # a row that has only a missing value
        return places

    def _load(self, shards: _Ints) -> None:
        if self._bytes > self._max_bytes:
            self._keep_recent()
        once = self._streams.once
        of_dataset = (
            np.searchsorted([once.first_shard(n) for n in range(len(once))], shards, side="right") - 1
        )
        for number in np.unique(of_dataset).tolist():
            some, first = shards[of_dataset == number], once.first_shard(number)
            if (reader := self._readers[number]) is None:
                rows = once.shard_samples[some].tolist()
                found = (_without_documents(count, self._missing) for count in rows)
            else:
                found = reader.read((some - first).tolist(), self.types)
            for shard, values in zip(some.tolist(), found, strict=True):
                self._add(shard, values)
                self._warn(once.datasets[number], values.wrong)

    def _add(self, shard: int, values: ShardValues) -> None:
        base = len(self._firsts.array)
        self._firsts.add(values.firsts + len(self._starts.array))
        self._starts.add(values.starts)
        for name, pool in self._values.items():
            pool.add(values.values[name])
        self._bases[shard] = base

    @property
    def _bytes(self) -> int:
        return sum(pool.array.nbytes for pool in (self._firsts, self._starts, *self._values.values()))

    def _forget(self) -> None:
        """Begin with one row that has no document, for padding."""
        self._bases = np.full(len(self._shard_starts), -1, np.int64)
        """The place of each shard's first row in `_firsts`; -1: its values are not there."""
        self._firsts, self._starts = _Pool(np.array([0, 1])), _Pool(np.zeros(1, np.int32))
        self._values = {name: _Pool(value) for name, value in self._missing.items()}

    def _keep_recent(self) -> None:
        """Keep the values of the shards in use now, and of those used last up to half of `max_bytes`."""
        bases, firsts, starts, values = self._bases, self._firsts, self._starts, self._values
        self._forget()
        held = np.flatnonzero(bases >= 0)
        rows = self._streams.once.shard_samples
        for shard in held[np.argsort(-self._used[held], kind="stable")].tolist():
            if self._bytes > self._max_bytes // 2 and self._used[shard] < self._now:
                break
            base = int(bases[shard])
            own = firsts.array[base : base + int(rows[shard]) + 1]
            low, high = int(own[0]), int(own[-1])
            self._bases[shard] = len(self._firsts.array)
            self._firsts.add(own - low + len(self._starts.array))
            self._starts.add(starts.array[low:high])
            for name, pool in self._values.items():
                pool.add(values[name].array[low:high])
        if self._bytes > self._max_bytes and _MEMORY not in self._warned:
            self._warned.add(_MEMORY)
            warn_user(
                f"document_values take {format_bytes(self._bytes)} of memory in this process, because the "
                'rows of a plan are in many shards: shuffle="window" with fewer lanes reads fewer at a time'
            )

    def _warn(self, dataset: OpenDataset, wrong: Mapping[str, int]) -> None:
        for name, count in wrong.items():
            if name not in self._warned:
                self._warned.add(name)
                warn_user(
                    f"{dataset.location}: {count:,} documents of a shard have a {name!r} that is not "
                    f"{self.types[name]}, which counts as missing"
                )


class _Pool:
    """An array that grows at its end."""

    def __init__(self, first: _Values) -> None:
        self._memory = first.copy()
        self.array = self._memory
        """The values that were added."""

    def add(self, values: _Values) -> None:
        size = len(self.array)
        if (wanted := size + len(values)) > len(self._memory):
            grown = np.empty(max(wanted, 2 * len(self._memory)), self._memory.dtype)
            grown[:size] = self.array
            self._memory = grown
        self._memory[size:wanted] = values
        self.array = self._memory[:wanted]


def source_labels(streams: Streams) -> list[str]:
    """Return the labels of all inputs of built datasets, each once; `source` is an index in this list."""
    cards = [dataset.card for dataset in streams.datasets]
    return list(dict.fromkeys(label for card in cards if card is not None for label in card.source_labels))


def document_values(
    streams: Streams, wanted: Sequence[str] | Mapping[str, ValueType] | None
) -> DocumentValues | None:
    """Return the `DocumentValues` of a loader; None if it wants none."""
    return DocumentValues(streams, wanted) if wanted else None


def _open_reader(dataset: OpenDataset, sources: Sequence[str]) -> tuple[ValueReader | None, str]:
    """Return the reader of a dataset's values, or None and the reason why there is none."""
    if isinstance(dataset.in_place, TextRows):
        from shardkit.datasets.text_values import TextValues

        return TextValues(dataset.in_place), ""
    from shardkit.datasets.provenance.table import NoProvenanceError
    from shardkit.datasets.provenance.values import ProvenanceValues

    try:
        return ProvenanceValues(dataset, sources), ""
    except NoProvenanceError as error:
        return None, str(error)


def _joins(dataset: OpenDataset) -> bool:
    """Return whether a build joined documents to texts."""
    recipe = {} if dataset.card is None else dataset.card.data.get("recipe", {})
    return not isinstance(recipe, Mapping) or recipe.get("group") is not None


def _types(
    once: Streams,
    opened: Sequence[tuple[ValueReader | None, str]],
    wanted: Sequence[str] | Mapping[str, ValueType],
) -> dict[str, ValueType]:
    """Return the type of each wanted field: the given one, or that of the first values."""
    types: dict[str, ValueType] = dict(wanted) if isinstance(wanted, Mapping) else {}
    names = [name for name in dict.fromkeys(wanted) if name not in types]
    found: dict[str, tuple[ValueType, str]] = {}
    for stream, (reader, _) in zip(once.names, opened, strict=True):
        for name, kind in ({} if reader is None or not names else reader.types(names)).items():
            known, other = found.setdefault(name, (kind, stream))
            if known != kind:
                raise ValueError(
                    f"document_values: {name!r} is {known} in stream {other!r} and {kind} in {stream!r}: "
                    f"give its type, document_values={{{name!r}: {kind!r}}}"
                )
    if all(reader is None for reader, _ in opened):
        raise ValueError(f"document_values: {opened[0][1]}")
    if lacking := [name for name in names if name not in found]:
        raise ValueError(
            f"document_values: no document among those looked at has {lacking[0]!r}; fields are those that "
            "the recipe keeps in metadata, and source, copies, record, document_start, document_id, file, id "
            f"and url; in files of texts, their columns. If few have it: {{{lacking[0]!r}: 'float32'}}"
        )
    return {name: types.get(name) or found[name][0] for name in dict.fromkeys(wanted)}


def _without_documents(rows: int, missing: Mapping[str, _Values]) -> ShardValues:
    from shardkit.datasets.document_values import ShardValues

    values = {name: np.repeat(value, rows) for name, value in missing.items()}
    return ShardValues(np.arange(rows + 1), np.zeros(rows, np.int32), values)
