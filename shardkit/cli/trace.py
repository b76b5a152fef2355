"""`shardkit trace`: from a row to its documents and training steps, from a document to its rows."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit.cli.common import (
    add_json_argument,
    add_storage_arguments,
    natural,
    print_json,
    stderr_console,
    storage_options,
)
from shardkit.cli.trace_run import add_run_arguments, find_run

if TYPE_CHECKING:
    from shardkit.cli.trace_run import TracedRun
    from shardkit.datasets.dataset import Dataset
    from shardkit.tools.trace.answers import Tracer
    from shardkit.tools.trace.text import Decoder

__all__ = ["add_parser", "run"]

_SEARCH = ("document", "url", "url_list", "source", "file")


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "trace",
        help="the documents in a row or a training step, and the rows and steps with a document",
        description="Trace a row to its documents (source file, record, URL, tokens, text) and to the steps "
        "and ranks that receive it; a training step to its rows and documents; a document, URL or domain to "
        "its rows, which can be exported, and excluded from training.",
        allow_abbrev=False,
    )
    parser.add_argument("path", metavar="PATH", help="folder, index file, tar, pattern or URL of a dataset")
    _add_questions(parser)
    _add_search(parser)
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="tokenizer.json to decode text with (default: the file that the card names, if it exists)",
    )
    parser.add_argument(
        "--excerpt",
        type=natural,
        default=160,
        metavar="N",
        help="characters of text to print per document, or none if 0 (default: 160)",
    )
    parser.add_argument(
        "--limit",
        type=natural,
        default=20,
        metavar="N",
        help="number of rows of a step, or pieces of a search, to print, or all if 0 (default: 20); totals "
        "and files include all",
    )
    add_json_argument(parser)
    add_run_arguments(parser)
    add_storage_arguments(parser)
    parser.set_defaults(run=run, misuse=parser.error)


def _add_questions(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("rows and steps")
    where.add_argument(
        "--row",
        action="append",
        default=[],
        metavar="N",
        help="row number, or SHARD:ROW; may be repeated (default: none)",
    )
    where.add_argument(
        "--step", type=natural, metavar="S", help="the rows of this step, counted from 0 (default: none)"
    )
    where.add_argument(
        "--position",
        type=natural,
        metavar="P",
        help="the rows of the step that starts at this position (samples delivered before it), for runs "
        "whose batch size has changed (default: none)",
    )
    where.add_argument("--rank", type=natural, metavar="R", help="only rows of this rank (default: all)")


def _add_search(parser: argparse.ArgumentParser) -> None:
    search = parser.add_argument_group("search: documents with these ids or URLs, in these sources and files")
    search.add_argument(
        "--document", action="append", default=[], metavar="ID", help="document id in hex (default: any)"
    )
    search.add_argument(
        "--url",
        action="append",
        default=[],
        metavar="URL",
        help="exact URL, or 'https://a.org/b*' (a prefix), 'a.org/*' (a host), '*.a.org' (a domain) "
        "(default: any)",
    )
    search.add_argument(
        "--url-list", metavar="FILE", help="file with such patterns, one per line (default: none)"
    )
    search.add_argument(
        "--source",
        action="append",
        default=[],
        metavar="LABEL",
        help="label of an input in the recipe (default: all)",
    )
    search.add_argument(
        "--file",
        action="append",
        default=[],
        metavar="NAME",
        help="raw file: its name, the end of it, or a pattern with * and ? (default: all)",
    )
    search.add_argument(
        "--export",
        type=Path,
        metavar="FILE",
        help="write all pieces found to FILE.parquet, .jsonl or .csv (default: none)",
    )
    search.add_argument("--text", action="store_true", help="export the whole text, too (default: no)")
    search.add_argument(
        "--exclude",
        type=Path,
        metavar="FILE",
        help="write their rows as a list for Stream(exclude=FILE) (default: none)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Answer the question and print the answer."""
    from shardkit.cli import trace_show
    from shardkit.datasets.dataset import open_dataset
    from shardkit.tools.trace.answers import facts_of

    kind = _kind(arguments)
    with ExitStack() as opened:
        dataset = opened.enter_context(open_dataset(arguments.path, storage=storage_options(arguments)))
        traced = find_run(arguments, dataset, opened)
        decoder = _decoder(arguments, dataset)
        if kind == "search":
            from shardkit.cli.trace_search import search

            answer = search(arguments, dataset, decoder, traced)
        elif kind == "row":
            answer = _rows(arguments, _tracer(arguments, dataset, decoder), traced)
        else:
            assert traced is not None
            answer = _step(arguments, decoder, traced)
        known = {"path": arguments.path, "fingerprint": dataset.fingerprint}
        answer = {**known, "run": None if traced is None else facts_of(traced.run), **answer}
    if arguments.json:
        print_json(answer)
    else:
        trace_show.show(kind, answer)
    if not arguments.json and kind != "search" and answer.get("no_text"):
        stderr_console().print(answer["no_text"])
    return 0


def _kind(arguments: argparse.Namespace) -> str:
    """The kind of question: "row", "step" or "search"."""
    asked = {
        "row": bool(arguments.row),
        "step": arguments.step is not None,
        "position": arguments.position is not None,
        "search": any(getattr(arguments, name) for name in _SEARCH),
    }
    found = [name for name, is_asked in asked.items() if is_asked]
    if len(found) != 1:
        which = "nothing was asked" if not found else f"{' and '.join(found)} are different questions"
        arguments.misuse(f"{which}: give --row, --step, --position, or what to search for (--url, …)")
    for name in ("export", "exclude", "text"):
        if getattr(arguments, name) and found != ["search"]:
            arguments.misuse(f"--{name} belongs to a search: give --url, --document, --source or --file")
    if found[0] in ("step", "position") and arguments.batch_size is None:
        arguments.misuse("the rows of a step depend on the batch size: give --batch-size, --world-size")
    if arguments.rank is not None and not arguments.rank < arguments.world_size:
        arguments.misuse(f"rank {arguments.rank} of {arguments.world_size}: give --world-size")
    return "step" if found == ["position"] else found[0]


def _decoder(arguments: argparse.Namespace, dataset: Dataset) -> Decoder | None:
    from shardkit.tools.trace.text import Decoder, find_tokenizer

    if arguments.tokenizer is None and not (arguments.excerpt or arguments.text):
        return None
    path = arguments.tokenizer or find_tokenizer(dataset)
    return None if path is None or dataset.token_column is None else Decoder(path, dataset.card)


def _tracer(arguments: argparse.Namespace, dataset: Dataset, decoder: Decoder | None) -> Tracer:
    from shardkit.tools.trace.answers import Tracer

    return Tracer(dataset, decoder, arguments.excerpt)


def _rows(arguments: argparse.Namespace, tracer: Tracer, traced: TracedRun | None) -> dict[str, Any]:
    from shardkit.tools.trace.answers import parse_row, seen_in

    numbers = [parse_row(tracer.dataset, text) for text in arguments.row]
    rows = tracer.rows(numbers)
    for row in rows:
        row["runs"] = None
        if traced is not None:
            row["runs"] = [
                seen_in(traced.run, row["row"], stream, arguments.epochs) for stream in traced.streams
            ]
    return {"rows": rows, "problem": tracer.problem, "no_text": _no_text(arguments, tracer)}


def _step(arguments: argparse.Namespace, decoder: Decoder | None, traced: TracedRun) -> dict[str, Any]:
    from shardkit.tools.trace.answers import by_source

    run = traced.run
    batch = run.batch(arguments.step) if arguments.position is None else run.batch_at(arguments.position)
    wanted = [each for each in batch if arguments.rank in (None, each.rank)]
    shown = {id(each) for each in (wanted[: arguments.limit] if arguments.limit else wanted)}
    answers: dict[int, dict[str, Any]] = {}
    problems: list[str] = []
    tracers: dict[int, Tracer] = {}
    for stream in sorted({each.stream for each in wanted}):
        here = traced.datasets[stream]
        tracer = tracers.setdefault(id(here), _tracer(arguments, here, decoder))
        mine = [each for each in wanted if each.stream == stream]
        problems += [tracer.problem] if tracer.problem else []
        for part in ([e for e in mine if id(e) in shown], [e for e in mine if id(e) not in shown]):
            quiet = tracer if part and id(part[0]) in shown else tracer.without_text()
            found = quiet.rows([each.row for each in part])
            answers |= {id(each): row for each, row in zip(part, found, strict=True)}
    rows = [
        {
            "rank": each.rank,
            "index": each.index,
            "position": each.position,
            "epoch": each.epoch,
            "stream": each.stream,
            "dataset": run.names[each.stream],
            **answers[id(each)],
        }
        for each in wanted
    ]
    positions = [each.position for each in batch]
    return {
        "step": arguments.step,
        "rank": arguments.rank,
        "positions": [min(positions), max(positions) + 1],
        "row_count": len(rows),
        "sources": by_source(rows),
        "rows": rows[: len(shown)],
        "problem": problems[0] if problems else None,
        "no_text": _no_text(arguments, next(iter(tracers.values()))),
    }


def _no_text(arguments: argparse.Namespace, tracer: Tracer) -> str | None:
    """The reason why there is no text; None if there is text or none is wanted."""
    if tracer.has_text or tracer.problem or not arguments.excerpt:
        return None
    return tracer.no_text()
