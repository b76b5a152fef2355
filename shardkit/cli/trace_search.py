"""The search of `shardkit trace`: pieces of documents, exported to a file or as an exclusion list."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardkit.cli.common import showing_steps
from shardkit.errors import ShardkitError

if TYPE_CHECKING:
    import pyarrow as pa

    from shardkit.cli.trace_run import TracedRun
    from shardkit.datasets.dataset import Dataset
    from shardkit.tools.trace.answers import Tracer
    from shardkit.tools.trace.search import Selection
    from shardkit.tools.trace.table import Piece
    from shardkit.tools.trace.text import Decoder

__all__ = ["search"]


def search(
    arguments: argparse.Namespace, dataset: Dataset, decoder: Decoder | None, traced: TracedRun | None
) -> dict[str, Any]:
    """Search, write the requested files, and return the answer as plain data."""
    from shardkit.tools.trace.answers import Tracer, seen_in
    from shardkit.tools.trace.outputs import Exporter
    from shardkit.tools.trace.table import pieces_of

    tracer = Tracer(dataset, decoder, arguments.excerpt)
    table = tracer.known()
    selection = _selection(arguments, tracer)
    if arguments.text and decoder is None:
        raise ShardkitError(f"--text: {tracer.no_text()}")
    found = _Found()
    shown: list[Piece] = []
    with ExitStack() as stack:
        exporter = None
        if arguments.export is not None:
            texts = (lambda some: tracer.whole_texts(pieces_of(some))) if arguments.text else None
            exporter = stack.enter_context(Exporter(arguments.export, dataset, tracer.labels, texts))
        report = stack.enter_context(showing_steps("search", table.lines(), "pieces"))
        for some in table.search(selection, report):
            found.add(some)
            if not arguments.limit or len(shown) < arguments.limit:
                room = arguments.limit - len(shown) if arguments.limit else some.num_rows
                shown += pieces_of(some.slice(0, room))
            if exporter is not None:
                exporter.write(some)
        if not found.pieces:
            raise ShardkitError(
                f"{dataset.location}: none of the documents is in this dataset; the text of one that was "
                "removed as a duplicate is here under the id and URL of the kept copy"
            )
    answers = tracer.pieces(shown)
    if traced is not None:
        for answer in answers:
            answer["runs"] = [
                seen_in(traced.run, answer["row"], stream, arguments.epochs) for stream in traced.streams
            ]
    unmatched = _unmatched(selection, found)
    return {
        "pieces": found.pieces,
        "rows": found.rows.exclusions().count,
        "documents": len(found.ids()),
        "copies": found.copies(),
        "tokens": found.tokens,
        "shown": answers,
        "unmatched": unmatched,
        "export": None if exporter is None else {"file": str(arguments.export), "lines": exporter.lines},
        "exclusions": _exclude(arguments, tracer, found, unmatched),
        "no_text": None if tracer.has_text or not arguments.excerpt else tracer.no_text(),
    }


class _Found:
    """Totals of a search; takes 20 bytes per document."""

    def __init__(self) -> None:
        from shardkit.tools.trace.outputs import Ranges

        self.pieces = self.tokens = 0
        self.rows = Ranges()
        self._ids: list[npt.NDArray[np.bytes_]] = []
        self._copies: list[npt.NDArray[np.int32]] = []

    def add(self, table: pa.Table) -> None:
        from shardkit.tools.trace.outputs import document_ids

        self.pieces += table.num_rows
        self.tokens += int(
            (table.column("token_end").to_numpy() - table.column("token_start").to_numpy()).sum()
        )
        self.rows.add(table.column("sample_id").to_numpy())
        self._ids.append(document_ids(table))
        self._copies.append(table.column("copies").to_numpy())
        if len(self._ids) > 64:
            self._compact()

    def ids(self) -> npt.NDArray[np.bytes_]:
        """S16[documents], sorted."""
        self._compact()
        return self._ids[0]

    def copies(self) -> int:
        """Raw documents, duplicates included."""
        self._compact()
        return int(self._copies[0].sum())

    def _compact(self) -> None:
        ids, first = np.unique(np.concatenate([np.empty(0, "S16"), *self._ids]), return_index=True)
        copies = np.concatenate([np.empty(0, np.int32), *self._copies])[first]
        self._ids, self._copies = [ids], [copies]


def _selection(arguments: argparse.Namespace, tracer: Tracer) -> Selection:
    from shardkit.tools.trace.search import Selection, UrlPatterns, parse_document_id, read_url_list

    patterns = [*arguments.url, *(read_url_list(arguments.url_list) if arguments.url_list else ())]
    sources = [number for number, label in enumerate(tracer.labels) if label in arguments.source]
    for label in arguments.source:
        if label not in tracer.labels:
            known = ", ".join(dict.fromkeys(tracer.labels)) or "none that the card names"
            raise ShardkitError(f"{tracer.dataset.location}: has no source {label!r}; there are {known}")
    return Selection(
        documents=[parse_document_id(text) for text in arguments.document],
        urls=UrlPatterns(patterns) if patterns else None,
        sources=sources,
        files=arguments.file,
    )


def _unmatched(selection: Selection, found: _Found) -> list[str]:
    """Ids and URLs that were not found."""
    asked = sorted(selection.documents)
    there = np.isin(np.frombuffer(b"".join(asked), "S16"), found.ids()).tolist()
    missing = [one.hex() for one, is_there in zip(asked, there, strict=True) if not is_there]
    return missing + (selection.urls.unmatched if selection.urls is not None else [])


def _exclude(
    arguments: argparse.Namespace, tracer: Tracer, found: _Found, unmatched: Sequence[str]
) -> dict[str, Any] | None:
    if arguments.exclude is None:
        return None
    from shardkit.tools.trace.outputs import measure, write_exclusions

    excluded = found.rows.exclusions()
    report = measure(tracer.dataset, tracer.known(), excluded, found.ids())
    why = [
        f"tokens: {report.tokens:,}, of which {report.removed_tokens:,} are of the "
        f"{report.removed_documents:,} documents searched for, {report.other_tokens:,} of "
        f"{report.other_documents:,} others"
    ]
    if unmatched:
        why.append(f"searched for and not in this dataset: {len(unmatched):,}")
    write_exclusions(arguments.exclude, tracer.dataset, excluded, why)
    return {"file": str(arguments.exclude), **report.to_dict()}
