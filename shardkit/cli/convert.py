"""`shardkit convert`: convert datasets of other formats to MDS or WebDataset shards."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from shardkit.cli.common import (
    add_json_argument,
    add_storage_arguments,
    count,
    print_json,
    progress_of,
    stdout_console,
    storage_options,
)
from shardkit.cli.declared import add_options, given, settings
from shardkit.display import counted
from shardkit.units import format_bytes

if TYPE_CHECKING:
    from shardkit.tools.convert import ConvertResult


_CUT, _OUTPUT = "shardkit.tools.convert.source:CutOptions", "shardkit.tools.convert.source:OutputOptions"


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "convert",
        help="convert MDS, tars, litdata, Megatron, nanoGPT, Hugging Face, TFRecord files",
        description="Write a dataset of another format as MDS or WebDataset shards, with the same rows in "
        "the same order, or shuffled. The result is read back and compared before the index is written. "
        "Sources: MDS folders, tars and folders of images; litdata chunk folders; Megatron .bin/.idx; .bin "
        "files of nanoGPT and llm.c; Hugging Face folders, .arrow and .parquet files; TFRecord files. Rows "
        "of one length are copied; documents and token streams need --sequence-length or --keep-lengths. An "
        "interrupted conversion leaves no index: run it again.",
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="SRC", help="folder, file, pattern in quotes, or URL of a dataset")
    parser.add_argument("target", metavar="DST", help="folder for the dataset; new or empty")
    add_options(parser, _OUTPUT, "format")
    parser.add_argument(
        "--from",
        dest="source_format",
        choices=["dataset", "huggingface", "litdata", "megatron", "nanogpt", "tfrecord"],
        help="format of SRC (default: detected)",
    )
    parser.add_argument(
        "--columns", metavar="A,B", help="columns to convert (default: all; of Arrow and Parquet the tokens)"
    )
    _add_cut_arguments(parser)
    _add_output_arguments(parser)
    add_storage_arguments(parser)
    parser.set_defaults(run=run, misuse=parser.error)


def _add_cut_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("rows of documents and streams")
    add_options(group, _CUT, "sequence_length", "keep_lengths", number=count)
    add_options(group, _CUT, "eos", "pad", number=_token)
    add_options(group, _CUT, "drop_tail", "drop_empty", "per_file", "dtype", "source_dtype")


def _add_output_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, _OUTPUT, "shard_bytes", "compression")
    parser.add_argument(
        "--shuffle",
        nargs="?",
        type=int,
        const=17,
        metavar="SEED",
        help="shuffle all rows with this seed (17 if none is given); takes the rows' size on disk once more",
    )
    parser.add_argument(
        "--hashes", default="xxh64", metavar="A,B", help="hashes in the index; '' for none (default: xxh64)"
    )
    add_options(
        parser,
        "shardkit.tools.convert.run:convert",
        verify="read the result back and compare it with the source before writing the index",
        replace="replace an existing dataset at DST",
    )
    add_json_argument(parser)


def _token(text: str) -> int:
    """Parse an argparse value as a token id."""
    if not text.isdecimal() or int(text) >= 1 << 32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a token id: give a number from 0 to 4,294,967,295")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Convert, and print the result."""
    from shardkit.tools.convert import CutOptions, OutputOptions, convert

    try:
        cut = CutOptions(**given(arguments, *settings(_CUT)))
        written = given(arguments, "format", "shard_bytes", "compression")
        output = OutputOptions(hashes=tuple(_split(arguments.hashes)), shuffle=arguments.shuffle, **written)
    except ValueError as error:
        arguments.misuse(str(error))
    result = convert(
        arguments.source,
        arguments.target,
        source_format=arguments.source_format,
        output=output,
        cut=cut,
        columns=_split(arguments.columns) if arguments.columns else None,
        storage=storage_options(arguments, is_job=True),
        progress=progress_of(arguments),
        **given(arguments, "verify", "replace"),
    )
    if arguments.json:
        print_json(result.to_dict())
    else:
        _show(result)
    return 0


def _split(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _show(result: ConvertResult) -> None:
    console = stdout_console()
    columns = ", ".join(f"{name} ({encoding})" for name, encoding in result.columns.items())
    rate = format_bytes(result.bytes / result.seconds) if result.seconds > 0 else "?"
    console.print(
        f"{result.target}: {counted(result.rows, 'row')} in {result.shards:,} {result.format} shards, "
        f"{format_bytes(result.stored_bytes)}, from {result.source_format}; {result.seconds:.1f} s, {rate}/s"
    )
    console.print(f"columns: {columns}")
    counts = result.counts
    if counts:
        parts = [counted(counts["documents"], "document")] if counts["documents"] else []
        parts.append(f"{counted(counts['tokens_read'], 'token')} read")
        for name, words in (
            ("eos_added", "eos tokens added"),
            ("padding", "tokens of padding in last rows"),
            ("tokens_dropped", "tokens dropped at the end"),
            ("documents_dropped", "empty documents dropped"),
        ):
            parts += [f"{counts[name]:,} {words}"] if counts[name] else []
        console.print(", ".join(parts))
    if result.left_out:
        console.print(f"columns left out: {', '.join(result.left_out)}")
    if result.verified:
        console.print(f"verified: read back and equal to the source; digest {result.content_digest}")
    console.print(f"fingerprint {result.fingerprint}")
