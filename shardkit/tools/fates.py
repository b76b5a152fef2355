"""Finds the outcome of documents: kept, dropped by a filter, removed as a duplicate, or unreadable.

A build accounts for every document of its inputs: `provenance/` lists the documents in the dataset,
`dropped/` and `duplicates/` the removed documents (formats/dropped_table.py), and `quarantine.jsonl` the
unreadable records. `find_fates` looks in all of them; `find_dropped` lists the documents that a rule dropped.
"""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shardkit.datasets.opened import OpenDataset
from shardkit.datasets.provenance.answers import Tracer
from shardkit.datasets.provenance.duplicates import Duplicates
from shardkit.datasets.provenance.folder import ParquetFolder
from shardkit.datasets.provenance.outputs import document_ids
from shardkit.datasets.provenance.search import Selection
from shardkit.datasets.provenance.table import Piece, pieces_of
from shardkit.errors import ShardkitError
from shardkit.files import load_json
from shardkit.formats.dropped_table import DROPPED_FOLDER, DROPPED_SCHEMA
from shardkit.publish.contents import head_if_any
from shardkit.settings import ANNOTATIONS_FOLDER

_OF_DOCUMENT = ("document_id", "source", "file", "record")
_QUARANTINE = "quarantine.jsonl"


def find_fates(tracer: Tracer, selection: Selection, *, limit: int = 20) -> dict[str, Any]:
    """Count the documents that match `selection` by outcome, and describe the first `limit` of each outcome.

    A `limit` of 0 means all. The answer can be written as JSON. Raises ShardkitError if no table contains a
    matching document.
    """
    dataset = tracer.dataset
    dropped = ParquetFolder(dataset, DROPPED_FOLDER, DROPPED_SCHEMA)
    duplicates = Duplicates(dataset)
    fates = {
        "kept": _kept(tracer, selection, limit),
        "dropped": _lines(tracer, dropped, selection, limit),
        "duplicate": _lines(tracer, duplicates.folder, selection, limit),
        "unreadable": _unreadable(dataset, selection, limit),
    }
    counts = {name: count for name, (count, _) in fates.items()}
    if not any(counts.values()):
        hint = "check the spelling, or search by --file and --record"
        if not dropped.names and not duplicates.folder.names:
            hint = "it has no tables of removed documents; build it again to write them"
        raise ShardkitError(f"{dataset.location}: no such document is known; {hint}")
    _add_survivors(tracer, duplicates, fates["duplicate"][1])
    shown = [{"outcome": name, **facts} for name, (_, found) in fates.items() for facts in found]
    _add_values(dataset, shown)
    unmatched = [] if selection.urls is None else selection.urls.unmatched
    return {"counts": counts, "documents": shown, "unmatched": unmatched, "no_text": tracer.no_text}


def _kept(tracer: Tracer, selection: Selection, limit: int) -> tuple[int, list[dict[str, Any]]]:
    """Return how many documents in the dataset match, and the first `limit` of them with their rows."""
    if tracer.table is None:
        return 0, []
    ids = [np.empty(0, "S16")]
    pieces: dict[bytes, list[Piece]] = {}
    for table in tracer.table.search(selection):
        ids.append(np.unique(document_ids(table)))
        for document in table.column("document_id").to_pylist():
            if len(pieces) < (limit or len(pieces) + 1):
                pieces.setdefault(document, [])
        shown = pc.is_in(table.column("document_id"), value_set=pa.array(pieces, pa.binary(16)))
        for piece in pieces_of(table.filter(shown)):
            pieces[piece.document_id].append(piece)
    return len(np.unique(np.concatenate(ids))), [_with_rows(tracer, found) for found in pieces.values()]


def _with_rows(tracer: Tracer, pieces: list[Piece]) -> dict[str, Any]:
    [facts] = tracer.pieces([min(pieces, key=lambda piece: piece.document_start)])
    rows = sorted({piece.sample_id for piece in pieces})
    names = ("document_id", "source", "file", "record", "id", "url", "copies", "text")
    return {name: facts[name] for name in names} | {"rows": rows}


def _lines(
    tracer: Tracer, folder: ParquetFolder, selection: Selection, limit: int
) -> tuple[int, list[dict[str, Any]]]:
    """Return how many lines of a table of removed documents match, and the first `limit` of them."""
    count, shown = 0, list[dict[str, Any]]()
    for table in folder.search(selection) if folder.names else ():
        count += table.num_rows
        some = table.slice(0, limit - len(shown)) if limit else table
        shown += [_plain(tracer, line) for line in some.to_pylist()]
    return count, shown


def _plain(tracer: Tracer, line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a table's line with ids in hexadecimal, and labels in place of source numbers."""
    plain = dict(line)
    for name, value in line.items():
        if name.endswith("document_id"):
            plain[name] = None if value is None else value.hex()
        elif name.endswith("source") and value is not None:
            plain[name] = tracer.labels[value] if value < len(tracer.labels) else str(value)
    return plain


def _unreadable(dataset: OpenDataset, selection: Selection, limit: int) -> tuple[int, list[dict[str, Any]]]:
    """Return how many quarantined records match by file and record, and the first `limit` of them."""
    if not selection.files or head_if_any(dataset.store, _QUARANTINE) is None:
        return 0, []
    lines = [load_json(line) for line in dataset.store.get(_QUARANTINE).splitlines()]
    files, records = (pa.array([line[name] for line in lines]) for name in ("file", "record"))
    table = pa.table({"file": files, "record": records})
    wanted = Selection(files=selection.files, records=selection.records).match(table)
    found = [line for line, is_wanted in zip(lines, wanted.tolist(), strict=True) if is_wanted]
    return len(found), found[: limit or None]


def _add_survivors(tracer: Tracer, duplicates: Duplicates, shown: list[dict[str, Any]]) -> None:
    """Add to each duplicate, as `stays`, the document that was finally kept in its place: rows and text."""
    if not shown:
        return
    ids = [bytes.fromhex(facts["document_id"]) for facts in shown]
    followed = duplicates.follow(Selection(documents=ids))
    ends = {document: chain[-1] for document in ids if (chain := followed.chain(document))}
    kept: dict[bytes, dict[str, Any]] = {}
    if ends and tracer.table is not None:
        _, found = _kept(tracer, Selection(documents=list(ends.values())), len(ends))
        kept = {bytes.fromhex(facts["document_id"]): facts for facts in found}
    for document, facts in zip(ids, shown, strict=True):
        facts["stays"] = kept.get(ends.get(document, b""))


def _add_values(dataset: OpenDataset, shown: list[dict[str, Any]]) -> None:
    """Add to each document the value that every rule computed for it, if the dataset has annotations.

    The values of a pass that the document did not reach, such as a duplicate, are None.
    """
    of_document = pa.schema([DROPPED_SCHEMA.field(name) for name in _OF_DOCUMENT])
    folder = ParquetFolder(dataset, ANNOTATIONS_FOLDER, of_document)
    ids = [bytes.fromhex(facts["document_id"]) for facts in shown if "document_id" in facts]
    values: dict[str, dict[str, Any]] = {}
    if folder.names and ids:
        for table in folder.search(Selection(documents=ids)):
            for line in table.to_pylist():
                rules = {name: value for name, value in line.items() if "/" in name}
                values[line["document_id"].hex()] = {"failed": line["failed"], "values": rules}
    for facts in shown:
        facts |= values.get(facts.get("document_id", ""), {"failed": None, "values": None})


def find_dropped(
    tracer: Tracer, rule: str | None = None, *, limit: int = 20, nearest: bool = False
) -> dict[str, Any]:
    """Return the first `limit` documents that a rule dropped, documents with stored text first.

    `nearest` orders them by distance to the rule's bound instead. Without a rule, only the number of dropped
    documents per rule is returned. Raises ShardkitError if the rule dropped nothing.
    """
    dataset = tracer.dataset
    folder = ParquetFolder(dataset, DROPPED_FOLDER, DROPPED_SCHEMA)
    dropped = {} if dataset.card is None else dataset.card.funnel.dropped
    rules = {name: count.documents for name, count in dropped.items() if "/" in name and count.documents}
    if rule is None:
        return {"rules": rules, "rule": None, "documents": []}
    if rule not in rules:
        whole = [name for name in rules if name.endswith(f"/{rule}")]
        near = whole or difflib.get_close_matches(rule, rules, n=3, cutoff=0.5)
        hint = (
            f"did you mean {' or '.join(near)}?" if near else f"rules that did: {', '.join(rules) or 'none'}"
        )
        raise ShardkitError(f"{dataset.location}: no rule {rule!r} dropped anything; {hint}")
    if not folder.names:
        raise ShardkitError(
            f"{dataset.location}: has no {DROPPED_FOLDER}/*.parquet: build it again to write them"
        )
    best = heapq.nsmallest(limit or rules[rule], _ranked(folder, rule, nearest))
    return {"rules": rules, "rule": rule, "documents": [_plain(tracer, line) for _, _, line in best]}


def _ranked(folder: ParquetFolder, rule: str, nearest: bool) -> Iterable[tuple[float, int, dict[str, Any]]]:
    """Yield (rank, running number, line) of each document that a rule dropped; low ranks come first."""
    number = 0
    for file, group in folder.groups():
        with folder.open(file) as opened:
            names = opened.read_row_group(group, columns=["rule"]).column("rule")
            mask = pc.equal(names, rule)
            if not pc.any(mask).as_py():
                continue
            table = opened.read_row_group(group).filter(mask)
        ranks = np.where(table.column("text").is_valid().to_numpy(), 0.0, 1.0)
        if nearest:
            distance = pc.abs(pc.subtract(table.column("value"), table.column("bound")))
            ranks = pc.fill_null(distance, np.inf).to_numpy()
        order = np.argsort(ranks, kind="stable")
        for at in islice(order.tolist(), table.num_rows):
            yield float(ranks[at]), number + at, table.slice(at, 1).to_pylist()[0]
        number += table.num_rows
