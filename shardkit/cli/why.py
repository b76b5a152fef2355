"""`shardkit why` and `shardkit dropped`: what became of documents that are not in a dataset, and why."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from shardkit.cli.common import (
    add_json_argument,
    add_storage_arguments,
    file_path,
    natural,
    print_columns,
    print_json,
    stderr_console,
    stdout_console,
    storage_options,
)

__all__ = ["add_parser", "run_dropped", "run_why"]

_PATH_HELP = "folder or URL of a dataset that `shardkit build` made"
_CHARACTERS = 300  # of a text, on a terminal


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register both verbs."""
    why, dropped = _why_parser(verbs), _dropped_parser(verbs)
    for parser, what, run in ((why, "of each outcome", run_why), (dropped, "in all", run_dropped)):
        parser.add_argument(
            "--limit",
            type=natural,
            default=20,
            metavar="N",
            help=f"number of documents {what} to show, or all if 0 (default: 20)",
        )
        add_json_argument(parser)
        add_storage_arguments(parser)
        parser.set_defaults(run=run, misuse=parser.error)


def _why_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    why = verbs.add_parser(
        "why",
        help="what became of a document: kept, dropped by which rule, or a duplicate of which document",
        description="Say what became of documents of the inputs: in which rows they are; which rule dropped "
        "them, with the value that it judged and its bound; which document stays for a removed duplicate, "
        "and in which rows; or why a record could not be read.",
        allow_abbrev=False,
    )
    why.add_argument("path", metavar="PATH", help=_PATH_HELP)
    why.add_argument(
        "--url",
        action="append",
        default=[],
        metavar="URL",
        help="exact URL, or 'https://a.org/b*' (a prefix), 'a.org/*' (a host), '*.a.org' (a domain) "
        "(default: any)",
    )
    why.add_argument(
        "--id", action="append", default=[], help="the id that the input gives it (default: any)"
    )
    why.add_argument(
        "--document", action="append", default=[], metavar="ID", help="document id in hex (default: any)"
    )
    why.add_argument(
        "--file",
        action="append",
        default=[],
        metavar="NAME",
        help="raw file: its name, the end of it, or a pattern with * and ? (default: all)",
    )
    why.add_argument(
        "--record",
        action="append",
        default=[],
        type=natural,
        metavar="N",
        help="number of the record in --file, counted from 0 (default: all)",
    )
    why.add_argument(
        "--tokenizer",
        type=file_path,
        metavar="FILE",
        help="tokenizer.json to decode text with (default: the file that the card names, if it exists)",
    )
    return why


def _dropped_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    dropped = verbs.add_parser(
        "dropped",
        help="documents that a filter rule dropped, to read and to judge the rule by",
        description="List documents that a filter rule dropped, with the value that the rule judged, its "
        "bound, and the text of those that are in the sample. Without --rule, list the rules.",
        allow_abbrev=False,
    )
    dropped.add_argument("path", metavar="PATH", help=_PATH_HELP)
    dropped.add_argument(
        "--rule", metavar="RULE", help="such as length/too_few_words (default: list the rules)"
    )
    dropped.add_argument(
        "--nearest", action="store_true", help="those nearest to the bound (default: a random sample)"
    )
    return dropped


def run_why(arguments: argparse.Namespace) -> int:
    """Print what became of the documents; exit status 1 if none is known."""
    from shardkit.datasets.dataset import open_dataset
    from shardkit.datasets.provenance.answers import Tracer
    from shardkit.datasets.provenance.search import Selection, UrlPatterns, parse_document_id
    from shardkit.datasets.provenance.text import Decoder, find_tokenizer
    from shardkit.tools.fates import find_fates

    asked = arguments.url or arguments.id or arguments.document or arguments.file
    if not asked:
        arguments.misuse("there is no document to look for: give --url, --id, --document or --file")
    if arguments.record and not arguments.file:
        arguments.misuse("--record is the number of a record in a file: give --file")
    selection = Selection(
        documents=[parse_document_id(text) for text in arguments.document],
        urls=UrlPatterns(arguments.url) if arguments.url else None,
        ids=arguments.id,
        files=arguments.file,
        records=arguments.record,
    )
    with open_dataset(arguments.path, storage=storage_options(arguments)) as dataset:
        path = arguments.tokenizer or find_tokenizer(dataset)
        decoder = None if path is None else Decoder(path, dataset.card)
        tracer = Tracer(dataset, decoder, _CHARACTERS)
        answer = find_fates(tracer, selection, limit=arguments.limit)
    if arguments.json:
        print_json({"path": arguments.path, **answer})
        return 0
    for facts in answer["documents"]:
        _show(facts)
    shown = len(answer["documents"])
    if shown < (count := sum(answer["counts"].values())):
        stderr_console().print(f"… and {count - shown:,} more documents: --limit 0 shows all")
    for pattern in answer["unmatched"]:
        stderr_console().print(f"not found: {pattern}")
    return 0


def run_dropped(arguments: argparse.Namespace) -> int:
    """Print documents that a rule dropped, or the rules."""
    from shardkit.datasets.dataset import open_dataset
    from shardkit.datasets.provenance.answers import Tracer
    from shardkit.tools.fates import find_dropped

    if arguments.nearest and not arguments.rule:
        arguments.misuse("--nearest is of one rule: give --rule")
    with open_dataset(arguments.path, storage=storage_options(arguments)) as dataset:
        answer = find_dropped(
            Tracer(dataset), arguments.rule, limit=arguments.limit, nearest=arguments.nearest
        )
    if arguments.json:
        print_json({"path": arguments.path, **answer})
    elif arguments.rule is None:
        rows = [(name, f"{count:,}") for name, count in answer["rules"].items()]
        print_columns("", ("rule", "documents dropped"), rows)
    else:
        for facts in answer["documents"]:
            _show(facts | {"outcome": "dropped"})
        shown, count = len(answer["documents"]), answer["rules"][arguments.rule]
        if shown < count:
            stderr_console().print(f"… and {count - shown:,} more documents: --limit 0 shows all")
    return 0


def _show(facts: Mapping[str, Any]) -> None:
    """Print one document. Lines are not folded, so that URLs can be copied."""
    console = stdout_console()
    if facts["outcome"] == "unreadable":
        console.print(f"{facts['file']} record {facts['record']:,}", style="bold")
        console.print(f"  could not be read: {facts['reason']}: {facts['error']}")
        return
    console.print(_title(facts), style="bold")
    for line in _outcome(facts):
        console.print(f"  {line}")
    for rule in (facts.get("failed") or ())[1:]:
        console.print(f"  it also fails {rule}: {_number((facts['values'] or {}).get(rule))}")
    if facts.get("text"):
        console.print(f"  “{' '.join(facts['text'].split())[:_CHARACTERS]}”", style="dim")


def _title(facts: Mapping[str, Any]) -> str:
    names = [str(facts[name]) for name in ("url", "id") if facts[name]]
    return "  ".join([f"{facts['source']}: {facts['file']} record {facts['record']:,}", *names])


def _outcome(facts: Mapping[str, Any]) -> list[str]:
    outcome = facts["outcome"]
    if outcome == "kept":
        copies = f", also for {facts['copies'] - 1:,} duplicates" if facts["copies"] > 1 else ""
        return [f"kept: in {_rows(facts['rows'])}{copies}"]
    if outcome == "dropped":
        values = [] if facts["value"] is None and facts["label"] is not None else [_number(facts["value"])]
        judged = " of ".join([*values, *([facts["label"]] if facts["label"] is not None else [])])
        bound = "" if facts["bound"] is None else f", bound {_number(facts['bound'])}"
        return [f"dropped by {facts['rule']}: {judged}{bound}"]
    if facts["reason"] in ("duplicate_lines", "empty"):
        left = "all that it has is in other documents" if facts["reason"] == "duplicate_lines" else "no token"
        return [f"dropped as {facts['reason']}: {left}"]
    likeness = f" (similarity {facts['similarity']:.3f})" if facts["reason"] == "near_duplicate" else ""
    kept = facts["kept_url"] or facts["kept_id"]
    lines = [f"removed as {facts['reason']}{likeness}"]
    if facts["kept_file"] is None:
        return [*lines, "of a document in an index of another corpus"]
    lines.append(f"of {facts['kept_file']} record {facts['kept_record']:,}{f'  {kept}' if kept else ''}")
    if (stays := facts["stays"]) is not None:
        text = "another text of its URL" if facts["reason"] == "url_duplicate" else "its text"
        lines.append(f"{text} is in {_rows(stays['rows'])}, as {_title(stays)}")
    return lines


def _rows(rows: list[int]) -> str:
    some = ", ".join(f"{row:,}" for row in rows[:10]) + (", …" if len(rows) > 10 else "")
    return f"row{'s' if len(rows) > 1 else ''} {some}"


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
