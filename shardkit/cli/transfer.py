"""`shardkit upload` and `shardkit download`: copy a dataset to or from a store, the index last.

With --cache-dir, a download fills the cache of a training run instead of a folder with a copy.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit.cli.common import (
    add_json_argument,
    add_loader_arguments,
    add_storage_arguments,
    count,
    file_path,
    loader_options,
    print_json,
    progress_of,
    stdout_console,
    storage_options,
    whole,
)
from shardkit.cli.declared import add_options, argument, given
from shardkit.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from shardkit.publish import TransferReport


_API = "shardkit.publish.api:"


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register both verbs."""
    upload = verbs.add_parser(
        "upload",
        help="upload a dataset's folder to S3 or the Hugging Face Hub: only missing files, the index last",
        description="Send a dataset to s3://bucket/prefix, hf://datasets/org/name, another folder, or any "
        "URL that fsspec supports. Every file is checked against the index while it is read, files that the "
        "target has are not sent again, and the index comes last, so that readers never see an incomplete "
        "dataset. To continue after an interruption, run the same command again. Other files at the target "
        "are not changed. For tars without an index, an index is written at the target.",
        allow_abbrev=False,
    )
    upload.add_argument("source", metavar="SRC", help="folder of the dataset")
    upload.add_argument("target", metavar="URL", help="destination, such as s3://bucket/prefix")
    add_options(upload, _API + "upload", verify="read all files back before writing the index")
    download = verbs.add_parser(
        "download",
        help="download a dataset from S3 or the Hugging Face Hub into a folder: only missing files",
        description="Fetch a dataset from s3://bucket/prefix, hf://datasets/org/name, another folder, or "
        "any URL that fsspec supports. Every file is checked while it is received, existing files are not "
        "fetched again, and the index comes last. To continue after an interruption, run the same command "
        "again. Training needs no download: the loader reads s3:// and hf:// itself. With --cache-dir "
        "instead of DST, the shards that a training run on this node reads first are fetched into its cache.",
        allow_abbrev=False,
    )
    download.add_argument("source", metavar="URL", help="the dataset, such as s3://bucket/prefix")
    download.add_argument(
        "target", metavar="DST", nargs="?", help="folder for the dataset; created if missing"
    )
    _add_cache_arguments(download)
    for parser, moved in ((upload, "sent"), (download, "fetched")):
        add_options(
            parser,
            _API + "upload",
            number=whole(1, 256),
            threads=f"number of files {moved} at a time, at most 256",
            replace="replace another dataset at the target",
            dry_run="print what would be done, without doing it",
        )
        add_json_argument(parser)
        add_storage_arguments(parser)
        parser.set_defaults(run=run, moved=moved)


def _add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("filling the cache of a training run, instead of DST")
    group.add_argument(
        "--cache-dir", metavar="DIR", type=file_path, help="cache folder of the run's loaders (default: none)"
    )
    group.add_argument(
        "--batch-size", type=count, metavar="B", help="sequences per rank and step (default: 8)"
    )
    group.add_argument("--world-size", type=count, metavar="N", help="data-parallel ranks (default: 1)")
    group.add_argument(
        "--ranks",
        type=argument(_ranks),
        metavar="R-R,…",
        help="ranks of this node, such as 8-15 (default: all)",
    )
    group.add_argument(
        "--state",
        metavar="STEP|FILE",
        help="where the run begins: a step, or a loader state as JSON or in a torch checkpoint, which sets "
        "--seed, --shuffle and --tail, too (default: 0)",
    )
    group.add_argument(
        "--most-bytes",
        type=argument(parse_bytes),
        metavar="BYTES",
        help="size of the shards to have in the cache (default: as many as fit)",
    )
    add_loader_arguments(group, "epoch_samples", "cache_bytes")


def _ranks(text: str) -> list[int]:
    """Parse ranks and ranges of ranks, such as "0-7,12"."""
    ranks: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            raise ValueError(f"{text!r} must be ranks or ranges such as 0-7 or 0,4")
        ranks.extend(range(int(first), int(last or first) + 1))
    return ranks


_OF_RUN = ("batch_size", "world_size", "ranks", "state", "most_bytes", "seed", "shuffle", "tail", "loader")


def run(arguments: argparse.Namespace) -> int:
    """Upload or download, and print a report."""
    if arguments.verb == "download":
        into_cache = arguments.cache_dir is not None
        if into_cache == (arguments.target is not None):
            arguments.parser.error("give either DST, a folder for a copy, or --cache-dir")
        others = ("threads", "replace", "dry_run") if into_cache else _OF_RUN
        if unfit := given(arguments, *others):
            needed = "leave out --cache-dir" if into_cache else "give --cache-dir"
            arguments.parser.error(f"--{next(iter(unfit)).replace('_', '-')}: {needed}, or leave this out")
        if into_cache:
            return _warm(arguments)
    return _transfer(arguments)


def _warm(arguments: argparse.Namespace) -> int:
    from shardkit.datasets.provenance.run import read_state
    from shardkit.loaders.config import grouped
    from shardkit.tools.warm import warm

    start: dict[str, Any] = {}
    if (state := arguments.state) is not None:
        start = {"step": int(state)} if state.isdecimal() else {"state": read_state(Path(state)).to_dict()}
    options = {"batch_size": 8, **given(arguments, *_OF_RUN[:3], *_OF_RUN[4:-1]), **start}
    try:
        report = warm(
            arguments.source,
            cache_dir=arguments.cache_dir,
            storage=storage_options(arguments, is_job=True),
            progress=not (arguments.quiet or arguments.json),
            **options,
            **grouped(loader_options(arguments) | {"stop_together": False}),
        )
    except ValueError as error:
        arguments.parser.error(str(error))
    if arguments.json:
        print_json(report.to_dict())
        return 0
    until = "all that is planned" if report.covers is None else f"position {report.covers:,}"
    stdout_console().print(
        f"{arguments.cache_dir}: {report.shards:,} shards, {format_bytes(report.bytes)}, {report.fetched:,} "
        f"fetched; from position {report.position:,} up to {until} the ranks need no other"
    )
    return 0


def _transfer(arguments: argparse.Namespace) -> int:
    from shardkit.publish import download, upload

    options: dict[str, Any] = {
        "storage": storage_options(arguments, is_job=True),
        "progress": progress_of(arguments),
        **given(arguments, "threads", "replace", "dry_run"),
    }
    if arguments.verb == "upload":
        report = upload(arguments.source, arguments.target, **options, **given(arguments, "verify"))
    else:
        report = download(arguments.source, arguments.target, **options)
    _show(report, arguments.moved, json=arguments.json)
    return 0


def _show(report: TransferReport, moved: str, *, json: bool) -> None:
    if json:
        print_json(report.to_dict())
        return
    console = stdout_console()
    if report.dry_run:
        for verb, names in ((moved, report.sent), ("deleted", report.deleted)):
            for name in names:
                console.print(f"would be {verb}: {name}")
    for line in _lines(report, moved):
        console.print(line)


def _lines(report: TransferReport, verb: str) -> list[str]:
    whole = f"{report.files:,} files, {format_bytes(report.bytes)}"
    lines = []
    if report.up_to_date:
        lines.append(f"{report.target} is up to date: {whole}; nothing to do")
    else:
        size = format_bytes(report.sent_bytes)
        moved = f"{len(report.sent):,} {verb} ({size}), {report.skipped:,} already present"
        deleted = f", {len(report.deleted):,} of an earlier dataset deleted" if report.deleted else ""
        rate = "" if report.dry_run else f"; {report.seconds:.1f} s"
        if report.sent_bytes and report.seconds > 0 and not report.dry_run:
            rate += f", {format_bytes(report.sent_bytes / report.seconds)}/s"
        start = "nothing was written; it would be " if report.dry_run else ""
        lines.append(f"{report.target}: {start}{whole}: {moved}{deleted}{rate}")
    if report.verified:
        lines.append("every file was read back and has the right hash")
    if report.left_count:
        lines.append(
            f"{report.left_count:,} files in {report.source} are not named by the dataset and stay there "
            f"(first: {report.left[0]})"
        )
    if report.foreign:
        lines.append(f"{report.foreign:,} files at {report.target} are not named by the dataset")
    lines.append(f"fingerprint {report.fingerprint}")
    return lines
