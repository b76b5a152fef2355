"""Answers of `shardkit trace` as plain data: rows with their documents and where they are seen.

Everything is numbers, text and null, so that it prints as JSON as it is. A row's `documents` are null where
the dataset has no provenance; a document's `text` is null where nothing decodes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import asdict
from typing import Any

import numpy as np

from shardkit.datasets.dataset import Dataset
from shardkit.errors import ShardkitError
from shardkit.tools.trace.run import Run
from shardkit.tools.trace.table import NoProvenanceError, Piece, ProvenanceTable, pieces_of
from shardkit.tools.trace.text import Decoder, read_rows

__all__ = ["Tracer", "by_source", "facts_of", "parse_row", "seen_in", "source_labels"]


class Tracer:
    """What is known of the rows of one dataset.

    `decoder` None: no text. `characters`: of an excerpt at most.
    """

    def __init__(self, dataset: Dataset, decoder: Decoder | None = None, characters: int = 160) -> None:
        self.dataset = dataset
        self.labels = source_labels(dataset)
        self.problem: str | None = None
        """Why documents are not known, None if they are."""
        self.table: ProvenanceTable | None = None
        try:
            self.table = ProvenanceTable(dataset)
        except NoProvenanceError as error:
            self.problem = str(error)
        self._decoder, self._characters = decoder, characters

    @property
    def has_text(self) -> bool:
        """Whether text is decoded."""
        return self._decoder is not None

    def no_text(self) -> str:
        """What to do to see text."""
        stated = (self.dataset.card or {}).get("tokenizer")
        named = ""
        if isinstance(stated, dict) and stated.get("file"):
            named = f" {stated['file']} (digest {stated.get('digest')}), which the dataset was made with,"
        return f"no text is shown: give --tokenizer with the tokenizer.json{named} to see it"

    def without_text(self) -> Tracer:
        """The same, which shows no excerpts."""
        other = copy(self)
        other._characters = 0
        return other

    def known(self) -> ProvenanceTable:
        """The tables; NoProvenanceError if there are none."""
        if self.table is None:
            raise NoProvenanceError(self.problem)
        return self.table

    def rows(self, sample_ids: Sequence[int]) -> list[dict[str, Any]]:
        """Rows, in the order given, each with its documents; ShardError where the tables leave a row out."""
        found: dict[int, list[Piece]] = {}
        if self.table is not None:
            for piece in pieces_of(self.table.of_rows(sample_ids)):
                found.setdefault(piece.sample_id, []).append(piece)
            if missing := [row for row in sample_ids if row not in found]:
                raise ShardkitError(
                    f"{self.dataset.location}: row {missing[0]:,} is in no provenance table: a file of them "
                    "is missing; run shardkit verify"
                )
        texts = self._texts([piece for pieces in found.values() for piece in pieces])
        length = self.dataset.sequence_length
        answers = []
        for row in sample_ids:
            pieces = found.get(row)
            answers.append(self.place(row) | {"sequence_length": length})
            if pieces is None:
                answers[-1] |= {"padding": None, "documents": None}
                continue
            used = sum(piece.token_end - piece.token_start for piece in pieces)
            answers[-1]["padding"] = None if length is None else length - used
            answers[-1]["documents"] = [self._facts(piece, texts.get(_key(piece))) for piece in pieces]
        return answers

    def pieces(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Pieces, each with the place of its row."""
        texts = self._texts(pieces)
        return [self.place(each.sample_id) | self._facts(each, texts.get(_key(each))) for each in pieces]

    def place(self, row: int) -> dict[str, Any]:
        """Where a row is."""
        starts = self.dataset.manifest.shard_starts
        shard = int(np.searchsorted(starts, row, side="right")) - 1
        name = self.dataset.manifest.shards[shard].stored.basename
        return {"row": row, "shard": shard, "shard_file": name, "row_in_shard": row - int(starts[shard])}

    def whole_texts(self, pieces: Sequence[Piece]) -> list[str]:
        """The whole text of each piece; a decoder is needed."""
        assert self._decoder is not None
        rows = dict(read_rows(self.dataset, (piece.sample_id for piece in pieces)))
        return [self._decoder.text(rows[p.sample_id][p.token_start : p.token_end]) for p in pieces]

    def _texts(self, pieces: Sequence[Piece]) -> dict[tuple[int, int], str]:
        if self._decoder is None or not self._characters or not pieces:
            return {}
        wanted: dict[int, list[Piece]] = {}
        for piece in pieces:
            wanted.setdefault(piece.sample_id, []).append(piece)
        return {
            _key(piece): self._decoder.excerpt(tokens[piece.token_start : piece.token_end], self._characters)
            for row, tokens in read_rows(self.dataset, wanted)
            for piece in wanted[row]
        }

    def _facts(self, piece: Piece, text: str | None) -> dict[str, Any]:
        count = piece.token_end - piece.token_start
        known = piece.source < len(self.labels)
        return {
            "tokens": [piece.token_start, piece.token_end],
            "document_id": piece.document_id.hex(),
            "document_tokens": [piece.document_start, piece.document_start + count],
            "copies": piece.copies,
            "source": self.labels[piece.source] if known else str(piece.source),
            "file": piece.file,
            "record": piece.record,
            "id": piece.id,
            "url": piece.url,
            "metadata": piece.metadata,
            "text": text,
        }


def facts_of(run: Run) -> dict[str, int | str | None]:
    """A run's settings, sizes and progress as plain data."""
    order, plan = run.settings.order, run.plan
    return {
        "seed": order.seed,
        "shuffle": order.shuffle,
        "lanes": order.lanes,
        "window": order.window,
        "tail": run.settings.tail,
        "batch_size": plan.batch_size if plan else None,
        "world_size": plan.world_size if plan else None,
        "position": run.delivered,
    }


def seen_in(run: Run, row: int, stream: int, epochs: int | None) -> dict[str, Any]:
    """Where a run delivers a row, as plain data."""
    count = run.epochs(stream) if epochs is None else epochs
    return {
        "excluded": run.is_excluded(row, stream),
        "epochs": count,
        "seen": [asdict(sighting) for sighting in run.sightings(row, stream, epochs=count)],
    }


def by_source(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Documents, tokens and rows of each source among answers of `Tracer.rows`, most tokens first."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        for document in row["documents"] or ():
            entry = found.setdefault(
                document["source"], {"source": document["source"], "ids": set(), "tokens": 0, "rows": set()}
            )
            entry["ids"].add(document["document_id"])
            entry["tokens"] += document["tokens"][1] - document["tokens"][0]
            entry["rows"].add((row.get("stream", 0), row["row"]))
    entries = sorted(found.values(), key=lambda entry: (-entry["tokens"], entry["source"]))
    return [
        {
            "source": entry["source"],
            "rows": len(entry["rows"]),
            "documents": len(entry["ids"]),
            "tokens": entry["tokens"],
        }
        for entry in entries
    ]


def source_labels(dataset: Dataset) -> list[str]:
    """The recipe's labels of its inputs, by number; [] if the card does not say."""
    inputs = (dataset.card or {}).get("inputs")
    if not isinstance(inputs, list):
        return []
    return [
        str(entry.get("source", n)) if isinstance(entry, dict) else str(n) for n, entry in enumerate(inputs)
    ]


def parse_row(dataset: Dataset, text: str) -> int:
    """A row number from "17", or "SHARD:ROW" where SHARD is a number or a file's name; ShardkitError."""
    starts, shards = dataset.manifest.shard_starts, dataset.manifest.shards
    shard_text, mark, row_text = text.rpartition(":")
    if not row_text.isdecimal():
        raise ShardkitError(f"{text!r} is no row: give its number, or SHARD:ROW")
    row = int(row_text)
    if not mark:
        if row >= len(dataset):
            raise ShardkitError(f"{dataset.location}: row {row:,} of {len(dataset):,}: rows count from 0")
        return row
    if shard_text.isdecimal():
        shard = int(shard_text)
    else:
        names = [os.fspath(info.stored.basename) for info in shards]
        shard = names.index(shard_text) if shard_text in names else len(shards)
    if shard >= len(shards):
        raise ShardkitError(f"{dataset.location}: has no shard {shard_text}, but {len(shards):,} of them")
    if row >= shards[shard].samples:
        raise ShardkitError(
            f"{dataset.where(shard)}: row {row:,} of {shards[shard].samples:,}: rows count from 0"
        )
    return int(starts[shard]) + row


def _key(piece: Piece) -> tuple[int, int]:
    return piece.sample_id, piece.token_start
