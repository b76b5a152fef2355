"""Folders that are datasets: which of the files below them hold documents.

    index.json    MDS: the shards that it lists, each raw or, if only that is there, compressed
    state.json    Hugging Face `save_to_disk`: the Arrow files that it lists
    shards.json   tars as shardkit writes them: those that it lists
    documents.json   text as shardkit writes it: the Parquet or JSON lines that it lists

Of such a folder only the files that its list names are read, because others are no documents (notes, reports,
`cache-*.arrow` of `map`). A file that the list names and that is not there, or has another size than the list
states, is an error, because documents would be missing in silence. A folder is one of these only if it has
both the list and a file of the kind, and the input has that format or none; a glob of shards names files and
needs no list.

A folder with splits (dataset_splits.py) is read by the same rule: those of the split to train on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from shardkit.errors import RecipeError, ShardError
from shardkit.files import load_json
from shardkit.formats.mds import parse_index
from shardkit.formats.tar import parse_shard_list
from shardkit.formats.text import TEXT_INDEX_NAME, parse_text_index
from shardkit.manifest import UNKNOWN, checked_basename
from shardkit.writers.inputs.dataset_splits import CACHE_INFO, README, Splits, of_cache, of_folders, of_readme

MAX_LIST_BYTES = 1 << 31  # what an index of MDS may have
_SPLITS = "dataset_dict.json"  # of a save_to_disk folder whose subfolders are datasets
Listed = Sequence[tuple[str, int]]
"""Name and bytes (-1: not stated) of one file in a list, raw before compressed: the first that is there."""


class Chosen(NamedTuple):
    """Which files of an input hold documents."""

    kept: set[str]
    left_out: dict[str, str]  # files of other splits: why, by name
    of_splits: set[str]  # those kept files of which a dataset says that they are to train on


class _Kind(NamedTuple):
    """A kind of dataset folder."""

    format: str  # of the input
    list_name: str  # name of the file that lists the others
    part: str  # of the names of these
    names: Callable[
        [str, bytes], list[Listed] | None
    ]  # reads a list; None if it is data with the name of one


def data_files(
    sizes: Mapping[str, int],
    format: str | None,
    key: str,
    read: Callable[[str], bytes],
    is_excluded: Callable[[str], bool],
) -> Chosen:
    """Choose the files that hold documents, by names and sizes; `format` is that of the input (None: any).

    `read` gives a file's content, `is_excluded` says whether the recipe leaves out a file that was not found.
    RecipeErrors, which begin with `key`: a list that is damaged, or names a file that is not there or has
    another size.
    """
    listed: set[str] = set()
    folders: set[str] = set()
    lists = sorted(name for name in sizes if _last(name) in _LIST_NAMES)
    splits = _of_splits(sizes, lists, format, key, read)
    unread = {name for _, found in splits for name in found.left_out}
    for kind in _KINDS:
        if not lists or format not in (None, kind.format):
            continue
        holding = _folders_above(name for name in sizes if kind.part in _last(name))
        for name in lists:
            last = _last(name)
            folder = name.removesuffix(last)
            if folder not in holding or name in unread:
                continue
            if last == kind.list_name:
                try:
                    parts = kind.names(name, read(name))
                except ShardError as error:
                    raise RecipeError(f"{key}: {error}") from error
                if parts is not None:
                    listed |= _present(parts, name, sizes, key, is_excluded)
                    folders.add(folder)
    kept = {name for name in sizes if name in listed or folders.isdisjoint(_folders_above([name]))}
    left_out: dict[str, str] = {}
    of_splits: set[str] = set()
    for folder, found in splits:
        kept -= {name for name in kept if name.startswith(folder) and name not in found.read}
        left_out |= found.left_out
        of_splits |= kept & found.read
    return Chosen(kept, left_out, of_splits)


def _of_splits(
    sizes: Mapping[str, int],
    lists: Iterable[str],
    format: str | None,
    key: str,
    read: Callable[[str], bytes],
) -> list[tuple[str, Splits]]:
    """[(folder, its splits)] of the folders that state splits, with whole names."""
    made = []
    for name in lists:
        last = _last(name)
        folder = name.removesuffix(last)
        inside = [other.removeprefix(folder) for other in sizes if other.startswith(folder)]
        try:
            if last == README:
                found = of_readme(read(name), inside)
            elif format not in (None, "arrow"):
                continue
            elif last == CACHE_INFO and "state.json" not in inside:
                found = of_cache(read(name), [other for other in inside if "/" not in other])
            elif last == _SPLITS and any(other.endswith(".arrow") for other in inside):
                found = of_folders(_saved_splits(inside))
            else:
                continue
        except ValueError as error:
            raise RecipeError(f"{key}: {name}: {error}") from None
        if found is not None:
            left_out = {folder + other: why for other, why in found.left_out.items()}
            made.append((folder, Splits({folder + other for other in found.read}, left_out)))
    return made


def _saved_splits(names: Iterable[str]) -> dict[str, set[str]]:
    """{split: its data files} of a folder of `DatasetDict.save_to_disk`."""
    splits: dict[str, set[str]] = {}
    for name in names:
        if "/" in name and name.endswith(".arrow"):
            splits.setdefault(name.split("/")[0], set()).add(name)
    return splits


def _last(name: str) -> str:
    return name[name.rfind("/") + 1 :]


def _folders_above(names: Iterable[str]) -> set[str]:
    """All folders that the files lie in, each with a slash at its end; "" is the topmost."""
    folders: set[str] = set()
    for name in names:
        folder = name[: name.rfind("/") + 1]
        while folder not in folders:
            folders.add(folder)
            folder = folder[: folder.rfind("/", 0, -1) + 1]
    return folders


def _present(
    parts: Iterable[Listed],
    list_name: str,
    sizes: Mapping[str, int],
    key: str,
    is_excluded: Callable[[str], bool],
) -> set[str]:
    """Which of the listed files are there."""
    folder, present = list_name[: list_name.rfind("/") + 1], set()
    for part in parts:
        there = next(((name, size) for name, size in part if folder + name in sizes), None)
        if there is None:
            if any(is_excluded(folder + name) for name, _ in part):
                continue
            problem = f"lists {part[-1][0]}, which is not there"
        else:
            name, stated = there
            present.add(folder + name)
            if stated in (UNKNOWN, sizes[folder + name]):
                continue
            problem = f"states {stated:,} bytes for {name}, which has {sizes[folder + name]:,}"
        advice = "fetch the dataset again, or leave the file out with exclude"
        raise RecipeError(f"{key}: {list_name} {problem}; {advice}")
    return present


def _mds_names(file: str, data: bytes) -> list[Listed]:
    shards = parse_index(file, data).shards
    return [[(file.basename, file.bytes) for file in (info.raw, info.stored)] for info in shards]


def _tar_names(file: str, data: bytes) -> list[Listed]:
    return [[(info.stored.basename, info.stored.bytes)] for info in parse_shard_list(file, data).shards]


def _arrow_names(file: str, data: bytes) -> list[Listed]:
    try:
        state: Any = load_json(data)
    except (ValueError, RecursionError) as error:
        raise ShardError(file, f"not JSON: {error}") from error
    entries = state.get("_data_files") if isinstance(state, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise ShardError(file, "names no data files: it is no dataset of save_to_disk")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise ShardError(
            file, "keeps its order in an indices file: flatten_indices() and save_to_disk() first"
        )
    found = [entry.get("filename") if isinstance(entry, Mapping) else None for entry in entries]
    return [[(checked_basename(name, file), UNKNOWN)] for name in found]


def _text_names(file: str, data: bytes) -> list[Listed] | None:
    with suppress(ValueError, RecursionError):
        facts: Any = load_json(data)
        if isinstance(facts, Mapping) and facts.keys() >= {"version", "files"}:
            shards = parse_text_index(file, data).shards
            return [[(info.stored.basename, info.stored.bytes)] for info in shards]
    return None


_KINDS = (
    _Kind("mds", "index.json", ".mds", _mds_names),
    _Kind("arrow", "state.json", ".arrow", _arrow_names),
    _Kind("wds", "shards.json", ".tar", _tar_names),
    _Kind("parquet", TEXT_INDEX_NAME, ".parquet", _text_names),
    _Kind("jsonl", TEXT_INDEX_NAME, ".jsonl", _text_names),
)
_LIST_NAMES = frozenset({_SPLITS, README, CACHE_INFO, *(kind.list_name for kind in _KINDS)})
