"""Shows the documents in the dataset: as a list by source, and each with its rows and whole text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardkit.datasets.provenance.search import Selection, parse_document_id
from shardkit.datasets.provenance.table import Piece, pieces_of
from shardkit.errors import ShardkitError
from shardkit.tools.explore.explored import Explored, PageNotFoundError, Params
from shardkit.tools.explore.scan import Equal, Line, Place, scan

_ON_PAGE = 20
_MOST_PIECES = 200  # maximum number of pieces of a document that are shown
_MOST_CHARACTERS = 50_000


def show_kept(explored: Explored, params: Params) -> dict[str, object]:
    """Return the facts for the page that lists documents of one source or all, in the dataset's order."""
    labels = explored.tracer.labels
    source = params.get("source", "")
    if source and source not in labels:
        raise PageNotFoundError(f"there is no source {source[:100]!r}")
    page: dict[str, object] = {"source": source, "sources": labels, "documents": None, "next": None}
    card = explored.card
    if card is not None and explored.has_funnel:
        inputs = [each for each in card.inputs if not source or each.source == source]
        languages = {name: count for each in inputs for name, count in (each.languages or {}).items()}
        ranked = sorted(languages.items(), key=lambda item: -item[1].documents)
        page |= {"languages": ranked[:10], "count": sum(each.funnel.kept.documents for each in inputs)}
    if not explored.provenance.names:
        return page
    wanted = {"document_start": 0} | ({"source": labels.index(source)} if source else {})
    start = Place.parse(params["at"]) if "at" in params else None
    found = scan(explored.provenance, Equal(wanted), start=start, limit=_ON_PAGE)
    return page | {"documents": describe_lines(explored, found.lines), "next": found.next}


def describe_lines(explored: Explored, lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Describe lines of provenance: documents, each with its row and the beginning of its text."""
    starts = explored.dataset.manifest.shard_starts
    pieces = []
    for line in lines:
        facts: dict[str, Any] = {name: value for name, value in line.items() if name != "at"}
        pieces.append(Piece(sample_id=int(starts[facts["shard"]]) + facts["row"], **facts))
    return explored.tracer.pieces(pieces)


def show_document(explored: Explored, params: Params) -> dict[str, object]:
    """Return the facts for the page of one document, found by its id: its rows and its text."""
    document = parse_document_id(params.get("id", ""))
    table = explored.tracer.known()
    pieces: list[Piece] = []
    for lines in table.search(Selection(documents=[document])):
        pieces += pieces_of(lines.slice(0, _MOST_PIECES - len(pieces)))
        if len(pieces) == _MOST_PIECES:
            break
    if not pieces:
        raise PageNotFoundError(f"document {document.hex()} is not in this dataset")
    pieces.sort(key=lambda piece: piece.document_start)
    facts = explored.tracer.pieces(pieces)
    pieces = _one_copy(pieces)
    return {
        "document": facts[0],
        "pieces": facts,
        "tokens": sum(piece.token_end - piece.token_start for piece in pieces),
        "text": _text(explored, pieces),
    }


def _one_copy(pieces: list[Piece]) -> list[Piece]:
    """Return pieces that cover a document once; those of a repeated document cover it several times."""
    found, end = [], pieces[0].document_start
    for piece in pieces:
        if piece.document_start >= end:
            found.append(piece)
            end = piece.document_start + piece.token_end - piece.token_start
    return found


def _text(explored: Explored, pieces: list[Piece]) -> str | None:
    """Return the concatenated text of a document's pieces; None if it cannot be decoded or read."""
    if explored.decoder is None:
        return None
    try:
        text = "".join(explored.tracer.whole_texts(pieces))
    except ShardkitError:  # the rows cannot be read: the page shows the document without its text
        return None
    return text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + "…"
