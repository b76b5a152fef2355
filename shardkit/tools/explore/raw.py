"""Reads the text of a removed document from its input file, in a folder that the user has given.

The dataset contains the name of the file, and the dataset may come from an untrusted source. Without
`--inputs FOLDER` no file is read, and with it no file outside FOLDER, even if names contain `..` or links.
Files are read with the readers of a build, so all its formats are supported; code that a card names is never
run.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from time import monotonic
from typing import Any

from shardkit.errors import ShardkitError
from shardkit.tools.explore.explored import Explored
from shardkit.writers.inputs.cuts import UNCOUNTED
from shardkit.writers.inputs.readers import SuspectDataError, read_split
from shardkit.writers.inputs.scan import scan_inputs
from shardkit.writers.recipe.recipe import recipe_from_mapping
from shardkit.writers.rows.ledger import Ledger, Quarantine

_SECONDS = 3.0
_MOST_CHARACTERS = 50_000


def read_raw(explored: Explored, source: int, file: str, record: int) -> tuple[str | None, str]:
    """Return the text of a record and "", or None and the reason why there is no text."""
    card = explored.card
    inputs = card.recipe.get("inputs", []) if card is not None and card.has("recipe") else []
    if not isinstance(inputs, list) or not 0 <= source < len(inputs) or not isinstance(inputs[source], dict):
        return None, "No text was kept of this document, and the card does not contain its input."
    if explored.inputs is None:
        remedy = "give the folder of the input files with `shardkit view --inputs FOLDER`"
        return None, f"No text was kept of this document of {file}; {remedy}."
    if inputs[source].get("reader") is not None:
        return None, f"No text was kept of this document; the recipe's own `reader` reads {file}."
    path = _find(explored.inputs, file)
    if path is None:
        return None, f"No text was kept of this document, and {file} is not a file in {explored.inputs}."
    try:
        text = _read(inputs[source], path, record)
    except (ShardkitError, SuspectDataError, OSError, ValueError) as error:
        return None, f"No text was kept of this document, and {path} cannot be read: {error}"
    if text is None:
        late = f"record {record:,} of {path} was not found within {_SECONDS:g} s"
        return None, f"No text was kept of this document, and {late}."
    return text[:_MOST_CHARACTERS] + ("…" if len(text) > _MOST_CHARACTERS else ""), ""


def _find(folder: Path, file: str) -> Path | None:
    """Return the path of the file `file` if it is inside `folder` after following links, else None."""
    name = PurePath(file)
    if name.is_absolute():  # from a recipe with absolute paths; the file must be in the folder all the same
        name = name.relative_to(folder) if name.is_relative_to(folder) else PurePath("..")
    if ".." in name.parts:
        return None
    try:
        path = (folder / name).resolve(strict=True)
        return path if path.is_relative_to(folder.resolve()) and path.is_file() else None
    except (OSError, ValueError, RuntimeError):  # missing file, null character in the name, loop of links
        return None


def _read(config: Mapping[str, Any], path: Path, record: int) -> str | None:
    # Read exactly this file: its name is escaped, because a name may look like a pattern, and the recipe's
    # other settings that select files are cleared.
    entry = {**config, "path": glob.escape(str(path)), "base": None, "exclude": [], "path_fields": None}
    recipe = recipe_from_mapping(
        {"inputs": [entry], "tokenizer": {"path": "-", "eos": "-"}, "output": "-"}, folder=path.parent
    )
    splits = [split for split in scan_inputs(recipe) if split.first_record in range(record + 1)]
    if not splits or splits[-1].first_record == UNCOUNTED:
        return None
    end = monotonic() + _SECONDS
    quarantine = Quarantine(max_bad_fraction=1.0)
    for batch in _batches(read_split(splits[-1], recipe.inputs[0], Ledger(), quarantine), end):
        numbers = batch.column("record").to_pylist()
        if record in numbers:
            text: str = batch.column("text")[numbers.index(record)].as_py()
            return text
        if numbers and numbers[-1] > record:
            break
    return None


def _batches(batches: Iterator[Any], end: float) -> Iterator[Any]:
    for batch in batches:
        yield batch
        if monotonic() > end:
            return
