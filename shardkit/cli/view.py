"""`shardkit view`: show a dataset as web pages on this machine, or export them as a static site."""

from __future__ import annotations

import argparse
import importlib
import secrets
import sys
import threading
import webbrowser
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shardkit.cli.common import (
    add_json_argument,
    add_storage_arguments,
    add_tokenizer_argument,
    file_path,
    print_json,
    stdout_console,
    storage_options,
    whole,
)

if TYPE_CHECKING:
    from shardkit.tools.explore.explored import Explored


_LARGEST_PORT = 65_535
_BROWSER_SECONDS = 0.5  # delay before opening the browser, so that the server has started


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "view",
        help="explore a dataset in the browser: the funnel, dropped documents, duplicates, rows, steps",
        description="Explore a dataset in the browser: what each step of the build dropped, with the "
        "documents near the bounds of its rules; clusters of duplicates; rows as the model sees them; the "
        "rows of a training step; search by URL, id or text. Read-only; reachable from this machine only.",
        allow_abbrev=False,
    )
    parser.add_argument("path", metavar="PATH", help="folder, index file, tar, pattern or URL of a dataset")
    parser.add_argument(
        "--compare", metavar="PATH", help="another build to compare with the first PATH (default: none)"
    )
    parser.add_argument(
        "--port",
        type=whole(0, _LARGEST_PORT),
        default=0,
        metavar="N",
        help="port of the server on 127.0.0.1 (default: 0, any free port)",
    )
    parser.add_argument(
        "--no-browser", action="store_true", help="do not open a browser (default: open the first page)"
    )
    parser.add_argument(
        "--export",
        type=file_path,
        metavar="DIR",
        help="write a static site with the funnel and samples of all other pages to DIR, which must be empty "
        "or not exist (default: serve)",
    )
    parser.add_argument(
        "--state",
        type=file_path,
        metavar="FILE",
        help="loader state as JSON, or a torch checkpoint that contains one: the run whose steps are shown "
        "(default: a run with default settings)",
    )
    add_tokenizer_argument(parser)
    parser.add_argument(
        "--inputs",
        type=Path,
        metavar="FOLDER",
        help="folder that input names are relative to, usually that of the recipe; texts of removed "
        "documents that the build did not keep are read from there only (default: not read)",
    )
    parser.add_argument(
        "--timings",
        type=file_path,
        metavar="FILE",
        help="JSON that `shardkit build --timings FILE` wrote for PATH, to show the CPU seconds of each step "
        "(default: not shown; the dataset itself stores no times)",
    )
    add_json_argument(parser)
    add_storage_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve the pages until interrupted, or export them."""
    importlib.import_module("uvicorn")  # first: if it is missing, the error names the extra for all pages
    from shardkit.datasets.provenance.run import read_state
    from shardkit.tools.explore.export import export_site
    from shardkit.tools.explore.server import bind, first_address, make_server
    from shardkit.tools.explore.site import Site

    state = None if arguments.state is None else read_state(arguments.state)
    with ExitStack() as opened:
        explored = _open(arguments, arguments.path, opened, arguments.timings)
        other = None if arguments.compare is None else _open(arguments, arguments.compare, opened)
        site = Site(explored, other, state)
        if arguments.export is not None:
            pages = export_site(site, arguments.export)
            front = str(arguments.export / "index.html")
            _tell(arguments, {"file": front, "pages": pages}, f"{front}: the first of {pages:,} pages")
            return 0
        with bind(arguments.port) as listening:
            token = secrets.token_urlsafe()
            address = first_address(listening, token)
            _tell(arguments, {"address": address}, f"{address}  (press Ctrl+C to stop)")
            if not arguments.no_browser:
                threading.Timer(_BROWSER_SECONDS, webbrowser.open, [address]).start()
            with suppress(KeyboardInterrupt):  # the user stops the server with Ctrl-C
                make_server(site, token).run(sockets=[listening])
    return 0


def _tell(arguments: argparse.Namespace, facts: Mapping[str, object], line: str) -> None:
    if arguments.json:
        print_json(facts)
    else:
        stdout_console().print(line)
    sys.stdout.flush()


def _open(
    arguments: argparse.Namespace, path: str, opened: ExitStack, timings: Path | None = None
) -> Explored:
    from shardkit.datasets.dataset import open_dataset
    from shardkit.datasets.provenance.text import Decoder, find_tokenizer
    from shardkit.tools.explore.explored import Explored
    from shardkit.tools.explore.overview import read_costs

    dataset = opened.enter_context(open_dataset(path, storage=storage_options(arguments)))
    decoder = None
    if dataset.token_column is not None:
        tokenizer = arguments.tokenizer or find_tokenizer(dataset)
        decoder = None if tokenizer is None else Decoder(tokenizer, dataset.card)
    inputs = None if arguments.export is not None else arguments.inputs
    costs = [] if timings is None else read_costs(timings, dataset.fingerprint)
    return Explored(dataset, decoder, inputs=inputs, costs=costs)
