"""`shardkit init`: write a recipe for existing data."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from shardkit.cli.common import (
    add_json_argument,
    add_storage_arguments,
    file_path,
    print_columns,
    print_json,
    stdout_console,
    storage_options,
)
from shardkit.errors import RecipeError
from shardkit.units import format_bytes

if TYPE_CHECKING:
    from shardkit.writers.init_recipe import Draft


_DEFAULT_TOKENIZER = "gpt2"
_SHOWN = 5


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "init",
        help="write a commented recipe for text files",
        description="Inspect files (formats, sizes, the first records) and write a commented recipe that "
        "builds a dataset from them. The fields of text, id and URL are detected by their contents.",
        allow_abbrev=False,
    )
    parser.add_argument("data", metavar="DATA", nargs="+", help="file, folder, glob or URL of text")
    parser.add_argument(
        "--output",
        type=file_path,
        default=Path("recipe.yaml"),
        metavar="FILE",
        help="the recipe to write; an existing file is never overwritten (default: recipe.yaml)",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="tokenizer.json, a folder that has one, or the name of a model on the Hugging Face Hub "
        "(default: a tokenizer.json next to the recipe or the data, else gpt2)",
    )
    add_json_argument(parser)
    add_storage_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the recipe, and print what was found."""
    from shardkit.writers.recipe.plain import is_recipe

    for place in arguments.data:
        if is_recipe(place):
            raise RecipeError(
                f"{place}: is a recipe already: `shardkit build {shlex.quote(place)}` builds it"
            )
    output: Path = arguments.output
    if output.exists():
        raise RecipeError(f"{output} exists; remove it, or name another file with --output")
    from shardkit.writers.init_recipe import draft_recipe

    folder = output.absolute().parent
    tokenizer, eos, bos, missing = _tokenizer(arguments, folder)
    draft = draft_recipe(
        arguments.data, folder, tokenizer=tokenizer, eos=eos, bos=bos, storage=storage_options(arguments)
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with output.open("x", encoding="utf-8") as file:
            file.write(draft.text)
    except OSError as error:
        raise RecipeError(f"{output} cannot be written: {error.strerror or error}") from error
    if arguments.json:
        inputs = [
            {"path": entry.path, "files": entry.files, "bytes": entry.bytes, "exclude": list(entry.exclude)}
            for entry in draft.inputs
        ]
        print_json({"recipe": str(output), "inputs": inputs, "left_out": dict(draft.left_out)})
    else:
        _show(draft, output, missing)
    return 0


def _tokenizer(arguments: argparse.Namespace, folder: Path) -> tuple[str, str, str | None, str | None]:
    """Return (tokenizer path for the recipe, eos, bos or None, reason why it is not usable yet or None)."""
    from shardkit.writers.init_recipe import DEFAULT_EOS, tokenizer_keys

    given = arguments.tokenizer
    if given is None:
        near = [
            folder,
            *(Path(place) if Path(place).is_dir() else Path(place).parent for place in arguments.data),
        ]
        found = [place / "tokenizer.json" for place in near if (place / "tokenizer.json").is_file()]
        given = str(found[0]) if found else _DEFAULT_TOKENIZER
    try:
        keys = tokenizer_keys(given, folder)
    except RecipeError as error:
        if arguments.tokenizer is not None:
            raise
        return given, DEFAULT_EOS, None, str(error)
    return keys["path"], keys["eos"], keys.get("bos"), None


def _show(draft: Draft, output: Path, missing: str | None) -> None:
    console = stdout_console()
    rows = [
        (
            entry.path,
            f"{entry.files:,}",
            format_bytes(entry.bytes),
            " ".join(entry.endings),
            entry.fields.named if entry.fields.beginning or entry.fields.messages else "",
            entry.fields.beginning,
        )
        for entry in draft.inputs
    ]
    print_columns(
        "", ("input", "files", "size", "formats", "text field", "first text"), rows, left=(0, 3, 4, 5)
    )
    for entry in draft.inputs:
        if entry.seems_html:
            console.print(f"{entry.path}: has texts that begin with markup: see `extract` in {output}")
    for name, why in list(draft.left_out.items())[:_SHOWN]:
        console.print(f"left out: {name}: {why}")
    if len(draft.left_out) > _SHOWN:
        console.print(f"left out: {len(draft.left_out) - _SHOWN:,} more files")
    if missing is not None:
        console.print(f"needed before the build: {missing.removeprefix('tokenizer.path: ')}")
    console.print(f"\nwrote {output}; read it, then try it on a few records of each input:")
    console.print(f"  shardkit build {output} --limit 1000")
