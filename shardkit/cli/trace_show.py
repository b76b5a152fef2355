"""Prints the answers of `shardkit trace` as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from shardkit.cli.common import print_columns, stderr_console, stdout_console
from shardkit.cli.trace_fates import show_dropped, show_fates
from shardkit.cli.trace_losses import show_losses

_UNMATCHED_SHOWN = 10


def show(kind: str, answer: Mapping[str, Any]) -> None:
    """Print the answer to a question of kind "row", "step", "losses", "search", "why" or "dropped"."""
    if answer.get("problem"):
        stderr_console().print(answer["problem"])
    if (run := answer["run"]) is not None:
        stdout_console().print(_run(run), style="dim")
    shows: dict[str, Callable[[Mapping[str, Any]], None]]
    shows = {"row": _show_rows, "step": _show_step, "search": _show_search}
    shows |= {"why": show_fates, "dropped": show_dropped}
    shows["losses"] = partial(show_losses, describe=lambda one: [*_identity(one), _part(one)])
    shows[kind](answer)
    if answer.get("no_text"):
        stderr_console().print(answer["no_text"])


def _run(run: Mapping[str, Any]) -> str:
    """Return a line with the settings that determine which rows each step of a run receives."""
    text = f"run: seed {run['seed']}, shuffle {run['shuffle']}"
    if run["shuffle"] == "window":
        text += f" ({run['lanes']:,} lanes, window {run['window']:,})"
    text += f", tail {run['tail']}"
    if run["batch_size"] is not None:
        text += f", batches of {run['batch_size']:,} on {_many(run['world_size'], 'rank')}"
        text += f", {run['accumulate']:,} batches per step" if run["accumulate"] > 1 else ""
    return text if run["position"] is None else f"{text}, at position {run['position']:,}"


def _show_rows(answer: Mapping[str, Any]) -> None:
    console = stdout_console()
    for row in answer["rows"]:
        console.print(_title(row), style="bold")
        _show_documents(row["documents"])
        for line in _seen(row["runs"]):
            console.print(f"  {line}")


def _show_step(answer: Mapping[str, Any]) -> None:
    console = stdout_console()
    first, end = answer["positions"]
    rank = "" if answer["rank"] is None else f", rank {answer['rank']}"
    name = "step" if answer["step"] is None else f"step {answer['step']:,} (counted from 1)"
    console.print(
        f"{name}{rank}: positions {first:,} to {end - 1:,}, {_many(answer['row_count'], 'row')}", style="bold"
    )
    if answer["sources"]:
        names = ("rows", "documents", "tokens")
        rows = [(entry["source"], *(f"{entry[name]:,}" for name in names)) for entry in answer["sources"]]
        print_columns("", ("source", *names), rows)
    datasets = {row["dataset"] for row in answer["rows"]}
    accumulates = answer["run"]["accumulate"] > 1
    for row in answer["rows"]:
        batch = f"batch {row['batch']}, " if accumulates else ""
        where = f" of {row['dataset']}" if len(datasets) > 1 else ""
        console.print(
            f"{batch}rank {row['rank']}, sample {row['index']}: {_title(row)}{where}, epoch {row['epoch']}",
            style="bold",
        )
        _show_documents(row["documents"])
    _more(len(answer["rows"]), answer["row_count"], "rows")


def _show_search(answer: Mapping[str, Any]) -> None:
    console = stdout_console()
    copies = answer["copies"] - answer["documents"]
    also = f" (and for {copies:,} duplicates of them)" if copies else ""
    console.print(
        f"{_many(answer['documents'], 'document')}{also} in {_many(answer['pieces'], 'piece')}, "
        f"{_many(answer['tokens'], 'token')}, of {_many(answer['rows'], 'row')}",
        style="bold",
    )
    if answer["duplicates"]:
        console.print(
            f"{_many(answer['duplicates'], 'document')} that you searched for had been removed as "
            "duplicates; the result includes the documents kept instead"
        )
    by_document: dict[str, list[Mapping[str, Any]]] = {}
    for piece in answer["shown"]:
        by_document.setdefault(piece["document_id"], []).append(piece)
    for pieces in by_document.values():
        for line in _identity(pieces[0]):
            console.print(line)
        if pieces[0]["stays_for_duplicate"]:
            console.print("  kept instead of a removed duplicate", style="dim")
        for piece in sorted(pieces, key=lambda piece: piece["document_tokens"]):
            console.print(f"  {_place(piece)}, tokens {_span(piece['tokens'])}: {_part(piece)}")
            for line in _seen(piece.get("runs")):
                console.print(f"    {line}")
    _more(len(answer["shown"]), answer["pieces"], "pieces")
    if export := answer["export"]:
        console.print(f"{export['file']}: {_many(export['lines'], 'piece')}")
    if report := answer["exclusions"]:
        _show_exclusions(report)
    if masked := answer["mask"]:
        console.print(
            f"{masked['file']}: {_many(masked['tokens'], 'token')} of {_many(masked['rows'], 'row')} masked"
        )
    if unmatched := answer["unmatched"]:
        stderr_console().print(f"{len(unmatched):,} not found (--why shows the outcome of a document):")
        for one in unmatched[:_UNMATCHED_SHOWN]:
            stderr_console().print(f"  {one}")
        if len(unmatched) > _UNMATCHED_SHOWN:
            stderr_console().print(f"  … and {len(unmatched) - _UNMATCHED_SHOWN:,} more (--json lists all)")


def _show_exclusions(report: Mapping[str, Any]) -> None:
    console = stdout_console()
    share = 100 * report["rows"] / max(1, report["dataset_rows"])
    console.print(
        f"{report['file']}: {_many(report['rows'], 'row')} of {report['dataset_rows']:,} ({share:.3g}%) in "
        f"{_many(report['ranges'], 'range')}"
    )
    rows = [
        ("documents searched for", f"{report['removed_tokens']:,}", f"{report['removed_documents']:,}"),
        ("others in the same rows", f"{report['other_tokens']:,}", f"{report['other_documents']:,}"),
        ("padding", f"{report['padding']:,}", ""),
    ]
    print_columns("", ("excluded tokens", "tokens", "documents"), rows)


def _place(row: Mapping[str, Any]) -> str:
    return f"row {row['row']:,} = {row['shard_file']} row {row['row_in_shard']:,}"


def _title(row: Mapping[str, Any]) -> str:
    if row["documents"] is None:
        return _place(row)
    text = f"{_place(row)}: {_many(len(row['documents']), 'document')}"
    return text + (f", {row['padding']:,} tokens of padding" if row["padding"] else "")


def _show_documents(documents: Sequence[Mapping[str, Any]] | None) -> None:
    """Print each document after its tokens. Lines are not folded, so that URLs can be copied."""
    spans = [_span(document["tokens"]) for document in documents or ()]
    width = max(map(len, spans), default=0)
    for span, document in zip(spans, documents or (), strict=True):
        for number, line in enumerate([*_identity(document), _part(document)]):
            stdout_console().print(f"  {span if not number else '':<{width}}  {line}")


def _identity(document: Mapping[str, Any]) -> list[str]:
    """Return the lines that identify a document."""
    copies = f", {document['copies']:,} copies" if document["copies"] > 1 else ""
    line = f"{document['source']}: {document['file']} record {document['record']:,}"
    names = [str(document["url"] or document["id"])] if document["url"] or document["id"] else []
    return [f"{line}, document {document['document_id']}{copies}", *names]


def _part(document: Mapping[str, Any]) -> str:
    """Return the range of the document's tokens that are in a piece, and their text."""
    first, end = document["document_tokens"]
    text = "" if document["text"] is None else f" “{'…' if first else ''}{document['text']}”"
    return f"its {first:,}–{end - 1:,}{text}"


def _seen(runs: Iterable[Mapping[str, Any]] | None) -> list[str]:
    lines = []
    for run in runs or ():
        if run["excluded"]:
            lines.append("never delivered: this row is on the run's exclusion list")
        for each in run["seen"]:
            text = f"epoch {each['epoch']}: position {each['position']:,}"
            if each["is_dropped"]:
                text += ", dropped at the end of the epoch"
            elif each["step"] is not None:
                text += f", step {each['step']:,}, rank {each['rank']}, sample {each['index']} of its batch"
            if each["is_delivered"] is False and not each["is_dropped"]:
                text += " (not delivered yet)"
            lines.append(text)
    return lines


def _span(tokens: list[int]) -> str:
    return f"{tokens[0]:,}–{tokens[1] - 1:,}"


def _many(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _more(shown: int, count: int, what: str) -> None:
    if shown < count:
        stderr_console().print(f"… and {count - shown:,} more {what}: --limit 0 shows all")
