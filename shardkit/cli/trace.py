"""`shardkit trace`: find the documents and steps of a row, the rows of a document, or why it has no row."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit.cli.common import (
    OF_FILES,
    add_json_argument,
    add_loader_arguments,
    add_storage_arguments,
    add_tokenizer_argument,
    count,
    file_options,
    file_path,
    loader_options,
    natural,
    print_json,
    storage_options,
)
from shardkit.cli.declared import add_keys, given, settings

if TYPE_CHECKING:
    from shardkit.datasets.dataset import Dataset
    from shardkit.datasets.provenance.answers import Tracer
    from shardkit.datasets.provenance.run import Run
    from shardkit.datasets.provenance.search import Selection
    from shardkit.tools.rewind.checkpoints import SavedRun


_SEARCH = ("document", "url", "url_list", "id", "source", "file")
_OF_ROWS = ("export", "text", "exclude", "mask", "no_duplicates")  # options valid only if rows are searched
_OF_ORDER = ("seed", "shuffle", "tail", "batch_size")
_IDS = ("eos_id", "bos_id", "pad_id")
_SPIKES = "shardkit.tools.rewind.losses:SpikeOptions"


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "trace",
        help="find the documents in a row or a training step, the rows of a document, or why it has no row",
        description="Trace a row to its documents (source file, record, URL, tokens, text) and to the steps "
        "and ranks that receive it; a training step to its rows and documents; a document, URL or domain to "
        "its rows, which can be exported or excluded from training. With --losses, find the spikes in a log "
        "of the loss, rank the documents of their steps, and say how to continue without them. With --why, "
        "show the outcome of a document: kept; dropped by a rule, with its value and the rule's bound; "
        "removed as a duplicate of another document; or unreadable.",
        allow_abbrev=False,
    )
    parser.add_argument("path", metavar="PATH", help="folder, index file, tar, pattern or URL of a dataset")
    _add_questions(parser)
    _add_search(parser)
    _add_dropped(parser)
    add_tokenizer_argument(parser)
    parser.add_argument(
        "--excerpt",
        type=natural,
        default=160,
        metavar="N",
        help="characters of text to print per document; 0: no text (default: 160)",
    )
    parser.add_argument(
        "--limit",
        type=natural,
        default=20,
        metavar="N",
        help="number of rows of a step, pieces of a search, suspects, or documents of each outcome to print; "
        "0: all (default: 20); totals and files always include all",
    )
    add_json_argument(parser)
    _add_run(parser)
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
        "--step",
        type=count,
        metavar="S",
        help="show the rows of this step; steps are counted from 1, as training loops print them "
        "(default: none)",
    )
    where.add_argument(
        "--position",
        type=natural,
        metavar="P",
        help="show the rows of the step that starts at this position (number of samples delivered before "
        "it), for runs whose batch size has changed (default: none)",
    )
    where.add_argument("--rank", type=natural, metavar="R", help="show only rows of this rank (default: all)")
    where.add_argument(
        "--losses",
        metavar="FILE",
        help="log of the run's losses, as JSON lines or CSV; - for stdin: find the steps at which the loss "
        "jumped, and rank their documents, for --mask or --exclude (default: none)",
    )
    spikes = list(settings(_SPIKES))
    add_keys(where, "--spikes", "how --losses finds spikes, such as before=5", _SPIKES, spikes)


def _add_search(parser: argparse.ArgumentParser) -> None:
    search = parser.add_argument_group("search for documents by id, URL, source or file")
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
        "--id", action="append", default=[], help="id of a document in the input (default: any)"
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
        "--record",
        action="append",
        default=[],
        type=natural,
        metavar="N",
        help="number of the record in --file, counted from 0 (default: all)",
    )
    _add_search_output(search)


def _add_search_output(search: argparse._ArgumentGroup) -> None:
    search.add_argument(
        "--why",
        action="store_true",
        help="show the outcome of these documents instead of their rows (default: show rows)",
    )
    search.add_argument(
        "--export",
        type=file_path,
        metavar="FILE",
        help="write all pieces found to FILE.parquet, .jsonl or .csv, with sources and ids as text; without "
        "a search, those of all documents (default: none)",
    )
    search.add_argument("--text", action="store_true", help="export the whole text, too (default: no)")
    search.add_argument(
        "--no-duplicates",
        action="store_true",
        help="for documents removed as duplicates, do not find the kept documents with the same text "
        "(default: find them)",
    )
    search.add_argument(
        "--exclude",
        type=file_path,
        metavar="FILE",
        help="write the rows of the documents, found or suspected, as a list for Stream(exclude=FILE) "
        "(default: none)",
    )
    search.add_argument(
        "--mask",
        type=file_path,
        metavar="FILE",
        help="write the token spans of the documents, found or suspected, as a list for Stream(mask=FILE), "
        "which sets their labels to -100; other documents in the same rows are not affected (default: none)",
    )


def _add_dropped(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("documents that a filter rule dropped, for judging the rule")
    group.add_argument(
        "--dropped",
        nargs="?",
        const="",
        metavar="RULE",
        help="list documents that a rule such as length/too_few_words dropped, with values, bound and texts; "
        "without RULE, list the rules (default: none)",
    )
    group.add_argument(
        "--nearest",
        action="store_true",
        help="list the documents nearest to the bound (default: a random sample)",
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the training run, to see when a row is delivered")
    group.add_argument(
        "--state",
        action="append",
        default=[],
        metavar="PATH",
        help="loader state as JSON, or a torch checkpoint that contains one: a file, or a folder or pattern "
        "of them; sets all options except batch size and world size, which a folder of usage logs sets, too; "
        "may be repeated (default: the options below)",
    )
    group.add_argument(
        "--stream",
        action="append",
        default=[],
        metavar="PATH",
        help="another dataset of the mixture in --state; may be repeated (default: none)",
    )
    group.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="FILE",
        help="exclusion list of the run; may be repeated for several streams (default: none)",
    )
    group.add_argument(
        "--batch-size", type=count, metavar="N", help="sequences per rank and step (default: no steps shown)"
    )
    group.add_argument("--world-size", type=count, default=1, metavar="N", help="ranks (default: 1)")
    group.add_argument(
        "--accumulate",
        type=count,
        default=1,
        metavar="N",
        help="batches of each rank per step, if gradients are accumulated (default: 1)",
    )
    add_loader_arguments(group, *OF_FILES)
    group.add_argument(
        "--epochs",
        type=count,
        metavar="N",
        help="number of epochs to search, from the first (default: all that the state has begun, or 1)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Answer the question and print the answer."""
    from shardkit.cli.trace_show import show
    from shardkit.datasets.dataset import open_dataset
    from shardkit.datasets.provenance.answers import parse_row, trace_rows, trace_step
    from shardkit.tools.fates import find_dropped, find_fates
    from shardkit.tools.rewind.checkpoints import read_run

    kind = _kind(arguments)
    with ExitStack() as opened:
        options = {"storage": storage_options(arguments)} | file_options(arguments)
        dataset = opened.enter_context(open_dataset(arguments.path, **options))
        saved = read_run(arguments.state) if arguments.state else None
        traced = find_run(arguments, dataset, saved, opened)
        if kind in ("step", "losses") and (traced is None or traced.plan is None):
            arguments.misuse(
                "the rows of a step depend on the batch size: give --batch-size and --world-size"
            )
        tracer = _tracer(arguments, dataset)
        if kind == "search":
            answer = _search(arguments, tracer, traced)
        elif kind == "why":
            answer = find_fates(tracer, _selection(arguments, tracer), limit=arguments.limit)
        elif kind == "dropped":
            rule = arguments.dropped or None
            answer = find_dropped(tracer, rule, limit=arguments.limit, nearest=arguments.nearest)
        elif kind == "losses":
            assert traced is not None
            answer = _rewind(arguments, tracer, traced, saved)
        elif kind == "row":
            rows = [parse_row(dataset, text) for text in arguments.row]
            answer = trace_rows(tracer, rows, traced, arguments.epochs)
        else:
            assert traced is not None
            options = {name: getattr(arguments, name) for name in ("position", "rank", "limit")}
            answer = trace_step(tracer, traced, arguments.step, **options)
        known = {"path": arguments.path, "fingerprint": dataset.fingerprint}
    answer = {**known, "run": None if traced is None else traced.to_dict(), **answer}
    if arguments.json:
        print_json(answer)
    else:
        show(kind, answer)
    return 0


def _kind(arguments: argparse.Namespace) -> str:
    """Return the kind of question: "row", "step", "losses", "search", "why" or "dropped"."""
    asked = {
        "row": bool(arguments.row),
        "step": arguments.step is not None,
        "position": arguments.position is not None,
        "search": any(getattr(arguments, name) for name in _SEARCH),
        "dropped": arguments.dropped is not None,
        "losses": arguments.losses is not None,
    }
    if arguments.why and not asked["search"]:
        arguments.misuse("--why needs documents to look for: give --url, --id, --document or --file")
    if arguments.record and not arguments.file:
        arguments.misuse("--record is the number of a record in a file: give --file, too")
    if arguments.nearest and not arguments.dropped:
        arguments.misuse("--nearest needs a rule: give --dropped RULE")
    found = [name for name, is_asked in asked.items() if is_asked]
    if not found and arguments.export is not None:
        return "search"  # of all documents
    if len(found) != 1:
        which = "there is no question" if not found else f"{' and '.join(found)} are different questions"
        arguments.misuse(
            f"{which}: give --row, --step, --position, --losses, --dropped, or what to search for (--url, "
            "…); --export alone writes all documents"
        )
    for name in _OF_ROWS:
        option = name.replace("_", "-")
        if found == ["losses"] and name in ("exclude", "mask"):
            continue
        if getattr(arguments, name) and found != ["search"]:
            arguments.misuse(f"--{option} needs a search: give --url, --document, --source or --file")
        if getattr(arguments, name) and arguments.why:
            arguments.misuse(f"--{option} applies to rows, which --why does not show: leave out one of them")
    if found[0] in ("step", "position", "losses") and arguments.batch_size is None and not arguments.state:
        arguments.misuse("the rows of a step depend on the batch size: give --batch-size and --world-size")
    if arguments.spikes and found != ["losses"]:
        arguments.misuse("--spikes says how spikes of a log are found: give --losses FILE")
    if found == ["losses"] and arguments.exclude and arguments.mask:
        arguments.misuse("give --mask or --exclude, not both: a run goes on with one of them")
    if arguments.rank is not None and not arguments.rank < arguments.world_size:
        arguments.misuse(f"--rank {arguments.rank} must be below --world-size {arguments.world_size}")
    if arguments.why:
        return "why"
    return "step" if found == ["position"] else found[0]


def find_run(
    arguments: argparse.Namespace, dataset: Dataset, saved: SavedRun | None, opened: ExitStack
) -> Run | None:
    """Return the run that the options describe, or None; register its other datasets with `opened`."""
    from shardkit.datasets.dataset import open_dataset
    from shardkit.datasets.provenance.run import Run
    from shardkit.errors import ShardkitError
    from shardkit.order.balance import DocumentIds
    from shardkit.order.exclusions import Exclusions

    try:
        options = {k: v for k, v in loader_options(arguments).items() if k not in OF_FILES}
        ids = DocumentIds(**{name: options.pop(name) for name in _IDS if name in options})
    except ValueError as error:
        arguments.misuse(str(error))
    balance = {"balance": options.pop("balance", None), "ids": ids}
    order = given(arguments, *_OF_ORDER) | options
    if saved is None and arguments.stream:
        arguments.misuse("--stream needs --state, which has the weights and the order of the mixture")
    if saved is None and not order and arguments.step is None and arguments.position is None:
        if arguments.without:
            arguments.misuse("--without applies to a run: describe the run with --state or --batch-size")
        return None
    if saved is not None and (clashing := [name for name in order if name != "batch_size"]):
        option = "--loader " if clashing[0] in options else "--"
        arguments.misuse(f"{option}{clashing[0]} is defined by --state: leave it out")
    try:
        exclusions = [Exclusions.read(path) for path in arguments.without]
    except (OSError, ValueError) as error:
        raise ShardkitError(str(error)) from error
    if balance["balance"] is not None and arguments.batch_size is None:
        arguments.misuse(
            "balance decides which rank gets a row of a step: give --batch-size and --world-size"
        )
    if saved is not None:
        opening = file_options(arguments) | {"storage": storage_options(arguments)}
        others = [opened.enter_context(open_dataset(path, **opening)) for path in arguments.stream]
        sizes = {name: getattr(arguments, name) for name in ("batch_size", "world_size", "accumulate")}
        sizes |= saved.sizes if arguments.batch_size is None else {}
        return Run.from_state(saved.state, [dataset, *others], exclusions, **sizes, **balance)
    if len(exclusions) > 1:
        raise ShardkitError("a single dataset has only one exclusion list: give --without once")
    excluded = exclusions[0] if exclusions else None
    sizes = {name: getattr(arguments, name) for name in ("world_size", "accumulate")}
    return Run.from_options(dataset, excluded, **sizes, **balance, **order)


def _rewind(
    arguments: argparse.Namespace, tracer: Tracer, traced: Run, saved: SavedRun | None
) -> dict[str, Any]:
    from shardkit.errors import ShardkitError
    from shardkit.tools.rewind.answer import rewind
    from shardkit.tools.rewind.losses import SpikeOptions

    try:
        options = SpikeOptions(**(arguments.spikes or {}))
    except ValueError as error:
        arguments.misuse(f"--spikes: {error}")
    lists = {name: getattr(arguments, name) for name in ("limit", "exclude", "mask")}
    lists["without"] = [Path(path) for path in arguments.without]
    if arguments.losses == "-":
        return rewind(tracer, traced, saved, sys.stdin.buffer, "stdin", options, **lists)
    try:
        file = Path(arguments.losses).open("rb")  # noqa: SIM115
    except OSError as error:
        raise ShardkitError(f"--losses {arguments.losses}: cannot be read: {error.strerror}") from error
    with file:
        return rewind(tracer, traced, saved, file, arguments.losses, options, **lists)


def _tracer(arguments: argparse.Namespace, dataset: Dataset) -> Tracer:
    from shardkit.datasets.provenance.answers import Tracer
    from shardkit.datasets.provenance.text import Decoder, find_tokenizer

    decoder = None
    if dataset.token_column is not None and (arguments.tokenizer or arguments.excerpt or arguments.text):
        path = arguments.tokenizer or find_tokenizer(dataset)
        decoder = None if path is None else Decoder(path, dataset.card)
    return Tracer(dataset, decoder, arguments.excerpt)


def _search(arguments: argparse.Namespace, tracer: Tracer, traced: Run | None) -> dict[str, Any]:
    from shardkit.datasets.provenance.answers import trace_search

    options = {name: getattr(arguments, name) for name in ("limit", "export", "text", "exclude", "mask")}
    options["follow"] = not arguments.no_duplicates
    return trace_search(tracer, _selection(arguments, tracer), traced, arguments.epochs, **options)


def _selection(arguments: argparse.Namespace, tracer: Tracer) -> Selection:
    from shardkit.datasets.provenance.answers import source_numbers
    from shardkit.datasets.provenance.search import Selection, UrlPatterns, parse_document_id, read_url_list

    patterns = [*arguments.url, *(read_url_list(arguments.url_list) if arguments.url_list else ())]
    return Selection(
        documents=[parse_document_id(text) for text in arguments.document],
        urls=UrlPatterns(patterns) if patterns else None,
        ids=arguments.id,
        sources=source_numbers(tracer.dataset, arguments.source),
        files=arguments.file,
        records=arguments.record,
    )
