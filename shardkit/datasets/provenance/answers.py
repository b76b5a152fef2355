"""Compute the answers of `shardkit trace` as plain data: for rows, a step of a run, or a search.

All values are numbers, strings or null, so that they can be printed as JSON. A row's `documents` are null if
the dataset has no provenance; a document's `text` is null without a decoder. If a run is given, `runs` has an
entry for each of its streams that reads this dataset, with the stream's deliveries of the row.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.datasets.opened import OpenDataset
from shardkit.datasets.provenance.duplicates import NOTHING_FOLLOWED, Duplicates
from shardkit.datasets.provenance.in_place import is_in_place, pieces_in_place
from shardkit.datasets.provenance.outputs import (
    Exporter,
    Ranges,
    document_ids,
    measure,
    write_exclusions,
    write_mask,
)
from shardkit.datasets.provenance.run import Run
from shardkit.datasets.provenance.search import Selection
from shardkit.datasets.provenance.table import NoProvenanceError, Piece, ProvenanceTable, pieces_of
from shardkit.datasets.provenance.text import Decoder, read_rows
from shardkit.errors import ShardkitError
from shardkit.order.token_mask import TokenMask
from shardkit.progress import counting

_COUNTED = ("token_start", "token_end", "document_id", "source")

_T = TypeVar("_T")


class Tracer:
    """Looks up the documents in the rows of one dataset.

    Without a `decoder`, there is no text. `characters` is the maximum length of an excerpt; 0 omits excerpts.
    """

    def __init__(self, dataset: OpenDataset, decoder: Decoder | None = None, characters: int = 160) -> None:
        self.dataset = dataset
        self.labels = [] if dataset.card is None else dataset.card.source_labels
        self.is_in_place = is_in_place(dataset)
        self.problem: str | None = None
        """The reason why documents are unknown; None if they are known."""
        self.table: ProvenanceTable | None = None
        if self.is_in_place:
            self.labels = [dataset.location]
        else:
            try:
                self.table = ProvenanceTable(dataset)
            except NoProvenanceError as error:
                self.problem = str(error)
        self.decoder, self.characters = decoder, characters

    @property
    def no_text(self) -> str | None:
        """A message on why answers have no text and how to get it; None if they have it or do not need it."""
        if self.decoder is not None or self.problem is not None or not self.characters:
            return None
        if self.is_in_place and self.dataset.token_column is None:
            return None
        return self.how_to_see_text()

    def how_to_see_text(self) -> str:
        """Return a message that explains which option makes text visible."""
        named = ""
        if self.dataset.card is not None and (stated := self.dataset.card.tokenizer).file:
            named = f" of the dataset, {stated.file} (digest {stated.digest}),"
        return f"no text is shown: give --tokenizer with the tokenizer.json{named} to see it"

    def known(self) -> ProvenanceTable:
        """Return the provenance tables. Raises NoProvenanceError if there are none."""
        if self.table is None:
            in_place = "has no tables to search, as its rows are read in place; ask for a row or a step"
            raise NoProvenanceError(self.problem or f"{self.dataset.location}: {in_place}")
        return self.table

    def check_rows(self) -> None:
        """Raise NoProvenanceError if the documents in rows are not known."""
        if not self.is_in_place:
            self.known()

    def rows(self, sample_ids: Sequence[int], *, excerpts: bool = True) -> list[dict[str, Any]]:
        """Describe rows and their documents, in the given order. Raises ShardkitError for a missing row."""
        found = self.pieces_of_rows(sample_ids)
        texts = self._texts([piece for pieces in found.values() for piece in pieces] if excerpts else [])
        length = self.dataset.sequence_length
        answers = []
        for row in sample_ids:
            pieces = found.get(row)
            answers.append(self.place(row) | {"sequence_length": length})
            if pieces is None:
                answers[-1] |= {"padding": None, "documents": None}
                continue
            used = max(piece.token_end for piece in pieces)
            answers[-1]["padding"] = None if length is None else length - used
            answers[-1]["documents"] = [self._facts(piece, texts.get(_key(piece))) for piece in pieces]
        return answers

    def counted(self, sample_ids: Sequence[int]) -> list[dict[str, Any]]:
        """Describe rows briefly: their numbers, and the source, id and tokens of their documents.

        Reads the columns that have these, and no text.
        """
        if self.table is None:
            return self.rows(sample_ids, excerpts=False)
        found: dict[int, list[dict[str, Any]]] = {row: [] for row in sample_ids}
        for line in self.table.of_rows(sample_ids, _COUNTED).to_pylist():
            found[line["sample_id"]].append(
                {
                    "source": self._source(line["source"]),
                    "document_id": line["document_id"].hex(),
                    "tokens": [line["token_start"], line["token_end"]],
                }
            )
        return [{"row": row, "documents": self._checked(row, found[row])} for row in sample_ids]

    def pieces_of_rows(self, sample_ids: Sequence[int]) -> dict[int, list[Piece]]:
        """Return the pieces of each row; {} if documents are unknown.

        Raises ShardkitError for a row that no table has.
        """
        found: dict[int, list[Piece]] = {}
        if self.is_in_place:
            for piece in pieces_in_place(self.dataset, sample_ids):
                found.setdefault(piece.sample_id, []).append(piece)
        if self.table is not None:
            for piece in pieces_of(self.table.of_rows(sample_ids)):
                found.setdefault(piece.sample_id, []).append(piece)
            for row in sample_ids:
                self._checked(row, found.get(row, ()))
        return found

    def pieces(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Describe pieces, each with the location of its row and an excerpt of its text."""
        texts = self._texts(pieces)
        return [self.place(each.sample_id) | self._facts(each, texts.get(_key(each))) for each in pieces]

    def place(self, row: int) -> dict[str, Any]:
        """Return the location of a row: number and file of its shard, and its number within the shard."""
        starts = self.dataset.manifest.shard_starts
        shard = int(np.searchsorted(starts, row, side="right")) - 1
        name = self.dataset.manifest.shards[shard].stored.basename
        return {"row": row, "shard": shard, "shard_file": name, "row_in_shard": row - int(starts[shard])}

    def whole_texts(self, pieces: Sequence[Piece]) -> list[str]:
        """Return the whole text of each piece; requires a decoder."""
        assert self.decoder is not None
        rows = dict(read_rows(self.dataset, (piece.sample_id for piece in pieces)))
        return [self.decoder.text(rows[p.sample_id][p.token_start : p.token_end]) for p in pieces]

    def _texts(self, pieces: Sequence[Piece]) -> dict[tuple[int, int], str]:
        if self.decoder is None or not self.characters or not pieces:
            return {}
        wanted: dict[int, list[Piece]] = {}
        for piece in pieces:
            wanted.setdefault(piece.sample_id, []).append(piece)
        return {
            _key(piece): self.decoder.excerpt(tokens[piece.token_start : piece.token_end], self.characters)
            for row, tokens in read_rows(self.dataset, wanted)
            for piece in wanted[row]
        }

    def _checked(self, row: int, documents: Sequence[_T]) -> Sequence[_T]:
        """Return the documents of a row; raises ShardkitError if there are none."""
        if not documents:
            raise ShardkitError(
                f"{self.dataset.location}: row {row:,} is in no provenance table: a table file is missing; "
                "run shardkit verify"
            )
        return documents

    def _source(self, number: int) -> str:
        return self.labels[number] if number < len(self.labels) else str(number)

    def _facts(self, piece: Piece, text: str | None) -> dict[str, Any]:
        count = piece.token_end - piece.token_start
        return {
            "tokens": [piece.token_start, piece.token_end],
            "document_id": piece.document_id.hex(),
            "document_tokens": [piece.document_start, piece.document_start + count],
            "copies": piece.copies,
            "source": self._source(piece.source),
            "file": piece.file,
            "record": piece.record,
            "id": piece.id,
            "url": piece.url,
            "metadata": piece.metadata,
            "text": text,
        }


def trace_rows(
    tracer: Tracer, rows: Sequence[int], run: Run | None = None, epochs: int | None = None
) -> dict[str, Any]:
    """Describe rows, their documents, and their deliveries in the first `epochs` epochs of `run`."""
    answers = tracer.rows(rows)
    for answer in answers:
        answer["runs"] = None if run is None else _deliveries(run, tracer.dataset, answer["row"], epochs)
    return {"rows": answers, "problem": tracer.problem, "no_text": tracer.no_text}


def trace_step(
    tracer: Tracer,
    run: Run,
    step: int | None = None,
    *,
    position: int | None = None,
    rank: int | None = None,
    limit: int = 0,
) -> dict[str, Any]:
    """Describe the rows of step `step`, or of the step that starts at `position`, with their documents.

    `rank` restricts them to one rank. `limit` is the maximum number of listed rows (0: all); the totals
    include all rows.
    """
    if position is None:
        assert step is not None
        batch = run.batch(step)
    else:
        batch = run.batch_at(position)
    wanted = [each for each in batch if rank in (None, each.rank)]
    count = min(limit or len(wanted), len(wanted))
    tracers = {id(tracer.dataset): tracer}
    streams = sorted({each.stream for each in wanted})
    for stream in streams:
        if id(dataset := run.datasets[stream]) not in tracers:
            tracers[id(dataset)] = Tracer(dataset, tracer.decoder, tracer.characters)
    of_stream = {stream: tracers[id(run.datasets[stream])] for stream in streams}
    asked = list(of_stream.values()) or [tracer]  # in an epoch's last step, a rank may have no rows
    rows: list[dict[str, Any]] = []
    for part, is_listed in ((wanted[:count], True), (wanted[count:], False)):
        known: dict[tuple[int, int], dict[str, Any]] = {}
        for stream in sorted({each.stream for each in part}):
            numbers = [each.row for each in part if each.stream == stream]
            found = of_stream[stream].rows(numbers) if is_listed else of_stream[stream].counted(numbers)
            known |= {(stream, row["row"]): row for row in found}
        rows += [asdict(each) | known[each.stream, each.row] for each in part]
    positions = [each.position for each in batch]
    return {
        "step": step,
        "rank": rank,
        "positions": [min(positions), max(positions) + 1],
        "row_count": len(rows),
        "sources": _by_source(rows),
        "rows": rows[:count],
        "problem": next((each.problem for each in asked if each.problem), None),
        "no_text": asked[0].no_text,
    }


_NOT_HERE = "none of the documents is in this dataset; `shardkit trace --why` shows what happened to each"


def trace_search(
    tracer: Tracer,
    selection: Selection,
    run: Run | None = None,
    epochs: int | None = None,
    *,
    limit: int = 0,
    export: Path | None = None,
    text: bool = False,
    exclude: Path | None = None,
    mask: Path | None = None,
    follow: bool = True,
) -> dict[str, Any]:
    """Find the selected pieces; return totals, the first `limit` pieces (0: all) and their deliveries.

    With `follow`, and if the selection has documents, URLs or ids, the documents kept in place of removed
    duplicates are found, too. Files to write: all pieces to `export`, with their whole text if `text`; the
    list of their rows to `exclude`; the spans of their tokens to `mask`. Raises ShardkitError if nothing is
    found.
    """
    dataset, table, found, shown = tracer.dataset, tracer.known(), _Totals(mask is not None), list[Piece]()
    if text and tracer.decoder is None:
        raise ShardkitError(f"--text: {tracer.how_to_see_text()}")
    follow = follow and bool(selection.documents or selection.urls or selection.ids)
    followed = Duplicates(dataset).follow(selection) if follow else NOTHING_FOLLOWED
    selection = selection.with_always(followed.stays)
    with ExitStack() as stack:
        exporter = None
        if export is not None:
            texts = (lambda some: tracer.whole_texts(pieces_of(some))) if text else None
            exporter = stack.enter_context(Exporter(export, dataset, tracer.labels, texts))
        advance = stack.enter_context(counting("search", table.lines(), "pieces"))
        for some in table.search(selection, advance):
            found.add(some)
            if not limit or len(shown) < limit:
                shown += pieces_of(some.slice(0, limit - len(shown) if limit else None))
            if exporter is not None:
                exporter.write(some)
        if not found.pieces:
            raise ShardkitError(f"{dataset.location}: {_NOT_HERE}")
    answers, stays = tracer.pieces(shown), {one.hex() for one in followed.stays}
    for answer in answers:
        answer["stays_for_duplicate"] = answer["document_id"] in stays
        if run is not None:
            answer["runs"] = _deliveries(run, dataset, answer["row"], epochs)
    unmatched = selection.unmatched(np.union1d(found.ids(), followed.asked))
    return {
        "pieces": found.pieces,
        "rows": found.rows.exclusions().count,
        "documents": len(found.ids()),
        "copies": found.copies(),
        "duplicates": len(followed.asked),
        "tokens": found.tokens,
        "shown": answers,
        "unmatched": unmatched,
        "export": None if exporter is None else {"file": str(export), "lines": exporter.lines},
        "exclusions": None if exclude is None else _exclude(exclude, tracer, found, len(unmatched)),
        "mask": None if mask is None else _mask(mask, dataset, found),
        "no_text": tracer.no_text,
    }


class _Totals:
    """Totals of a search. Takes 20 bytes of memory per document, and 24 per piece if it collects spans."""

    def __init__(self, has_spans: bool) -> None:
        self._has_spans, self.spans = has_spans, [np.empty((0, 3), np.int64)]
        self.pieces = self.tokens = 0
        self.rows = Ranges()
        self._ids: list[npt.NDArray[np.bytes_]] = []
        self._copies: list[npt.NDArray[np.int32]] = []

    def add(self, table: pa.Table) -> None:
        self.pieces += table.num_rows
        self.tokens += int(
            (table.column("token_end").to_numpy() - table.column("token_start").to_numpy()).sum()
        )
        self.rows.add(table.column("sample_id").to_numpy())
        if self._has_spans:
            names = ("sample_id", "token_start", "token_end")
            self.spans.append(np.stack([table.column(name).to_numpy() for name in names], axis=1))
        self._ids.append(document_ids(table))
        self._copies.append(table.column("copies").to_numpy())
        if len(self._ids) > 64:
            self._compact()

    def ids(self) -> npt.NDArray[np.bytes_]:
        """Return the sorted ids of all documents, S16[documents]."""
        self._compact()
        return self._ids[0]

    def copies(self) -> int:
        """Return the number of raw documents found, including removed duplicates."""
        self._compact()
        return int(self._copies[0].sum())

    def _compact(self) -> None:
        ids, first = np.unique(np.concatenate([np.empty(0, "S16"), *self._ids]), return_index=True)
        copies = np.concatenate([np.empty(0, np.int32), *self._copies])[first]
        self._ids, self._copies = [ids], [copies]


def _mask(path: Path, dataset: OpenDataset, found: _Totals) -> dict[str, Any]:
    mask = TokenMask(np.concatenate(found.spans))
    write_mask(path, dataset, mask, len(found.ids()))
    return {"file": str(path), "rows": mask.rows, "tokens": mask.tokens}


def _exclude(path: Path, tracer: Tracer, found: _Totals, unmatched: int) -> dict[str, Any]:
    excluded = found.rows.exclusions()
    report = measure(tracer.dataset, tracer.known(), excluded, found.ids())
    why = [
        f"tokens: {report.tokens:,}, including {report.removed_tokens:,} of the "
        f"{report.removed_documents:,} documents searched for and {report.other_tokens:,} of "
        f"{report.other_documents:,} others"
    ]
    if unmatched:
        why.append(f"searched for but not in this dataset: {unmatched:,}")
    write_exclusions(path, tracer.dataset, excluded, why)
    return {"file": str(path), **asdict(report)}


def _deliveries(run: Run, dataset: OpenDataset, row: int, epochs: int | None) -> list[dict[str, Any]]:
    """List, for each stream of `dataset`, the deliveries of a row in its first `epochs` (None: all begun)."""
    found = []
    for stream in run.streams_of(dataset):
        count = run.epochs(stream) if epochs is None else epochs
        seen = [asdict(sighting) for sighting in run.sightings(row, stream, epochs=count)]
        found.append({"excluded": run.is_excluded(row, stream), "epochs": count, "seen": seen})
    return found


def _by_source(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Count the rows, documents and tokens per source in `rows`; the source with most tokens is first."""
    numbers: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)
    documents: defaultdict[str, set[str]] = defaultdict(set)
    tokens: Counter[str] = Counter()
    for row in rows:
        for document in row["documents"] or ():
            source = document["source"]
            numbers[source].add((row["stream"], row["row"]))
            documents[source].add(document["document_id"])
            tokens[source] += document["tokens"][1] - document["tokens"][0]
    return [
        {"source": source, "rows": len(numbers[source]), "documents": len(documents[source]), "tokens": count}
        for source, count in sorted(tokens.items(), key=lambda entry: (-entry[1], entry[0]))
    ]


def source_numbers(dataset: OpenDataset, labels: Collection[str]) -> list[int]:
    """Return the numbers of the recipe's inputs with these labels. Raises ShardkitError for unknown ones."""
    known = [] if dataset.card is None else dataset.card.source_labels
    for label in labels:
        if label not in known:
            names = ", ".join(dict.fromkeys(known)) or "none that the card names"
            raise ShardkitError(f"{dataset.location}: has no source {label!r}; there are {names}")
    return [number for number, label in enumerate(known) if label in labels]


def parse_row(dataset: OpenDataset, text: str) -> int:
    """Parse "17" or "SHARD:ROW", where SHARD is a number or a file name, to a row number in the dataset.

    Raises ShardkitError if there is no such row.
    """
    starts, shards = dataset.manifest.shard_starts, dataset.manifest.shards
    shard_text, mark, row_text = text.rpartition(":")
    if not row_text.isdecimal():
        raise ShardkitError(f"{text!r} is not a row: give its number, or SHARD:ROW")
    row = int(row_text)
    if not mark:
        if row >= len(dataset):
            raise ShardkitError(
                f"{dataset.location}: no row {row:,}; it has {len(dataset):,} rows, numbered from 0"
            )
        return row
    if shard_text.isdecimal():
        shard = int(shard_text)
    else:
        names = [os.fspath(info.stored.basename) for info in shards]
        shard = names.index(shard_text) if shard_text in names else len(shards)
    if shard >= len(shards):
        raise ShardkitError(f"{dataset.location}: has no shard {shard_text}; there are {len(shards):,}")
    if row >= shards[shard].samples:
        raise ShardkitError(
            f"{dataset.where(shard)}: no row {row:,}; it has {shards[shard].samples:,} rows, numbered from 0"
        )
    return int(starts[shard]) + row


def _key(piece: Piece) -> tuple[int, int]:
    return piece.sample_id, piece.token_start
