"""Finds the files of a dataset folder that hold documents, by reading the file that lists them.

    index.json    MDS: the listed shards, each raw or, if only the compressed file exists, compressed
    state.json    Hugging Face `save_to_disk`: the listed Arrow files
    shards.json   tars written by shardkit: the listed tars
    documents.json   text written by shardkit: the listed files of Parquet or JSON lines

Only the listed files of such a folder are read, because other files are not documents (notes, reports,
`cache-*.arrow` of `map`). A listed file that does not exist, or whose size differs from the one in the list,
is an error, because documents would be missing silently. A folder is a dataset folder only if it has both the
list and a file of that kind, and the input has that format or none. A glob of shards names the files itself
and needs no list.

A dataset folder may have dataset splits, such as `train` (dataset_splits.py): then only the files of the
split to train on are read.
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

MAX_LIST_BYTES = 1 << 31  # maximum size of a list; an index of MDS may be this large
_SPLITS = "dataset_dict.json"  # file in a save_to_disk folder whose subfolders are dataset splits
Listed = Sequence[tuple[str, int]]
"""The names under which one listed file may exist, raw before compressed, each with its size in bytes.

A size that the list does not contain is -1. The first file that exists is read.
"""


class Chosen(NamedTuple):
    """The files of an input that hold documents, and the files of dataset splits that are not read."""

    kept: set[str]
    left_out: dict[str, str]  # for each file of another dataset split, the reason why it is not read
    of_splits: set[str]  # the kept files that a dataset declares as its split to train on


class _Kind(NamedTuple):
    """A kind of dataset folder."""

    format: str  # value of InputConfig.format
    list_name: str  # name of the file that lists the others
    part: str  # substring of the names of the listed files
    # Parses the list, from its name and content; returns None if the file is not a list, despite its name.
    names: Callable[[str, bytes], list[Listed] | None]


def data_files(
    sizes: Mapping[str, int],
    format: str | None,
    key: str,
    read: Callable[[str], bytes],
    is_excluded: Callable[[str], bool],
) -> Chosen:
    """Choose the files that hold documents, by their names and sizes.

    `format` is the format of the input, or None for any. `read` returns a file's content, and `is_excluded`
    whether the recipe excludes a name. Raises RecipeError, with a message that begins with `key`, if a list
    is damaged, or a listed file does not exist or has another size.
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
    """Return (folder, its splits) for each folder that declares dataset splits, with paths as in `sizes`."""
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
    """Return {split: its data files} for a folder of `DatasetDict.save_to_disk`."""
    splits: dict[str, set[str]] = {}
    for name in names:
        if "/" in name and name.endswith(".arrow"):
            splits.setdefault(name.split("/")[0], set()).add(name)
    return splits


def _last(name: str) -> str:
    return name[name.rfind("/") + 1 :]


def _folders_above(names: Iterable[str]) -> set[str]:
    """Return all folders above the files, each with a slash at its end; "" is the topmost folder."""
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
    """Return the listed files that exist.

    Raises RecipeError if a listed file does not exist and is not excluded, or has another size than listed.
    """
    folder, present = list_name[: list_name.rfind("/") + 1], set()
    for part in parts:
        there = next(((name, size) for name, size in part if folder + name in sizes), None)
        if there is None:
            if any(is_excluded(folder + name) for name, _ in part):
                continue
            problem = f"lists {part[-1][0]}, which does not exist"
        else:
            name, stated = there
            present.add(folder + name)
            if stated in (UNKNOWN, sizes[folder + name]):
                continue
            problem = f"lists {name} with {stated:,} bytes, but the file has {sizes[folder + name]:,}"
        advice = "download the dataset again, or leave the file out with exclude"
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
        raise ShardError(file, "names no data files, so the folder is not a dataset of save_to_disk")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise ShardError(
            file,
            "the dataset has an indices file, which is not read; call flatten_indices() and save_to_disk()",
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
