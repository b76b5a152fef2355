"""Check what a reader sees of a dataset at one moment: no index, or one whose files are all complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash

__all__ = ["look"]

INDEX, LIST, CARD = "index.json", "documents.json", "dataset.json"


def look(output: Path) -> tuple[bool, str | None]:
    """Whether there is an index, and what is wrong with its files. Does not use the package's own reader.

    If the index disappears during the check, nothing follows about its files.
    """
    for name in (INDEX, LIST):
        if (before := _identity(output / name)) is not None:
            problem = _problem(output, name)
            return True, problem if problem and _identity(output / name) == before else None
    return False, None


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _problem(output: Path, name: str) -> str | None:
    try:
        index = json.loads((output / name).read_bytes())
        if name == INDEX:
            stored = [shard["zip_data"] or shard["raw_data"] for shard in index["shards"]]
        else:
            stored = [file | {"basename": file["name"]} for file in index["files"]]
        for stated in stored:
            if problem := _wrong(output, stated):
                return problem
        card: dict[str, Any] = json.loads((output / CARD).read_bytes())
        if card["shards"] != len(stored):
            return f"{CARD}: is of another dataset"
        for name, file in card["files"].items():
            stated = {"basename": name, "bytes": file["bytes"], "hashes": {"xxh3_128": file["xxh3_128"]}}
            if problem := _wrong(output, stated):
                return problem
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _wrong(output: Path, file: dict[str, Any]) -> str | None:
    data = (output / file["basename"]).read_bytes()
    if len(data) != file["bytes"]:
        return f"{file['basename']}: {len(data):,} bytes, not {file['bytes']:,}"
    [(name, digest)] = file["hashes"].items()
    if xxhash.__dict__[f"{name}_hexdigest"](data) != digest:
        return f"{file['basename']}: other bytes"
    return None
