"""Where a dataset is and what describes it: the index, the list of tars, or the tars themselves.

Local paths may name a folder, an index, a tar or tars by pattern; remote URLs a folder or an index. Reads the
index and the card, no shard (except to count the samples of tars that no list names).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from shardkit.errors import ShardError
from shardkit.index import Manifest
from shardkit.storage.errors import ObjectNotFoundError, StoreError
from shardkit.storage.store import Store

__all__ = ["CARD_NAME", "Found", "find_local", "find_remote", "is_index_name"]

MAX_CARD_BYTES = 16 << 20
CARD_NAME = "dataset.json"
_INDEX_NAMES = ("index.json", "shards.json")
_MAGIC = frozenset("*?[")
_FORBIDDEN = 403


@dataclass(frozen=True, slots=True)
class Found:
    """A dataset: the folder that shards' names are relative to (None: remote), its manifest and card."""

    folder: Path | None
    manifest: Manifest
    card: dict[str, object] | None


def find_local(path: Path) -> Found:
    """The dataset at a local path; ShardError says what is wrong with it, or what was looked for."""
    folder, manifest = _find(path)
    whole = path.is_dir() or path.suffix == ".json"  # a card speaks of a whole dataset, not of some tars
    return Found(folder, manifest, _read_card(folder / CARD_NAME) if whole else None)


def is_index_name(name: str) -> bool:
    """Whether the last part of a URL names an index rather than a folder."""
    return name.endswith(".json")


def find_remote(store: Store, index_name: str | None = None) -> Found:
    """The dataset in a store, by one round of requests side by side; `index_name` if the user named one."""
    names = [index_name] if index_name else [*_INDEX_NAMES]
    keys = [*names, CARD_NAME]
    with ThreadPoolExecutor(3, thread_name_prefix="shardkit-open") as pool:
        answers = dict(zip(keys, pool.map(lambda key: _get(store, key), keys), strict=True))
    there = {name: text for name in names if isinstance(text := answers[name], bytes)}
    if not there:
        raise _nothing_found(store, names, answers, is_named=index_name is not None)
    if len(there) > 1:
        raise ShardError(store.url, f"has both {' and '.join(there)}; open the one that is meant")
    [(name, text)] = there.items()
    where = f"{store.url}/{name}"
    if name == "index.json":
        from shardkit import mds

        manifest = mds.parse_index(where, text)
    else:
        from shardkit import tar

        manifest = tar.parse_shard_list(where, text)
    card = answers[CARD_NAME]
    return Found(
        None, manifest, _parse_card(f"{store.url}/{CARD_NAME}", card) if isinstance(card, bytes) else None
    )


def _get(store: Store, key: str) -> bytes | StoreError:
    """The object, or why it is not to be had: S3 refuses what is missing to whoever may not list (403)."""
    try:
        return store.get(key)
    except StoreError as error:
        if isinstance(error, ObjectNotFoundError) or error.status == _FORBIDDEN:
            return error
        raise


def _nothing_found(
    store: Store, names: list[str], answers: Mapping[str, bytes | StoreError], *, is_named: bool
) -> Exception:
    for name in names:
        error = answers[name]
        if isinstance(error, StoreError) and not isinstance(error, ObjectNotFoundError):
            return error
    if is_named:
        return ShardError(store.url, f"holds no {names[0]}")
    if isinstance(answers[CARD_NAME], bytes):
        problem = "is unfinished: it has a card but no index; run the upload or the build again"
        return ShardError(store.url, problem)
    problem = f"holds no dataset: looked for {' and '.join(names)}"
    return ShardError(store.url, f"{problem} (tars without a list: write one beside them, see shardkit.tar)")


def _find(path: Path) -> tuple[Path, Manifest]:
    """The folder that shards' names are relative to, and the manifest."""
    from shardkit import tar
    from shardkit.tar.compressed import is_tar_name

    if path.is_dir():
        return path, _find_in_folder(path)
    if path.is_file():
        if is_tar_name(path.name):
            return path.parent, Manifest("tar", tar.scan_folder(path.parent, [path.name]))
        if path.name == "index.json":
            from shardkit import mds

            return path.parent, mds.read_index(path)
        if path.suffix == ".json":
            return path.parent, tar.read_shard_list(path)
        raise ShardError(path, "is neither a folder, an index (.json) nor a tar")
    if _MAGIC.isdisjoint(str(path)):
        raise ShardError(path, "there is no such file or folder")
    parts = path.parts
    fixed = next(i for i, part in enumerate(parts) if not _MAGIC.isdisjoint(part))
    folder = Path(*parts[:fixed])
    names = sorted(
        p.relative_to(folder).as_posix() for p in folder.glob("/".join(parts[fixed:])) if p.is_file()
    )
    if not names or not all(map(is_tar_name, names)):
        other = next((n for n in names if not is_tar_name(n)), None)
        found = "no file matches" if other is None else f"it matches {other}, which is no tar"
        raise ShardError(path, f"a pattern must name .tar files: {found}")
    return folder, Manifest("tar", tar.scan_folder(folder, names))


def _find_in_folder(folder: Path) -> Manifest:
    from shardkit import tar
    from shardkit.tar.shard_list import LIST_NAME, tar_files

    is_mds, is_list = (folder / "index.json").is_file(), (folder / LIST_NAME).is_file()
    if is_mds and is_list:
        raise ShardError(folder, f"has both index.json and {LIST_NAME}; open the one that is meant")
    if is_mds:
        from shardkit import mds

        return mds.read_index(folder)
    if is_list:
        return tar.read_shard_list(folder)
    if (folder / CARD_NAME).exists() or (folder / "provenance").is_dir():
        problem = (
            f"is an unfinished build: neither index.json nor {LIST_NAME} is there yet; run the build again"
        )
        raise ShardError(folder, problem)
    names = tar_files(folder)
    if not names:
        raise ShardError(
            folder, f"holds no dataset: looked for index.json (MDS), {LIST_NAME} and *.tar files"
        )
    return Manifest("tar", tar.scan_folder(folder, names))


def _read_card(file: Path) -> dict[str, object] | None:
    if not file.is_file():
        return None
    if file.stat().st_size > MAX_CARD_BYTES:
        raise ShardError(file, f"a dataset's card is larger than {MAX_CARD_BYTES:,} bytes")
    try:
        text = file.read_bytes()
    except OSError as error:
        raise ShardError(file, f"cannot be read: {error}") from error
    return _parse_card(str(file), text)


def _parse_card(where: str, text: bytes) -> dict[str, object]:
    if len(text) > MAX_CARD_BYTES:
        raise ShardError(where, f"a dataset's card is larger than {MAX_CARD_BYTES:,} bytes")
    try:
        card = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ShardError(where, f"cannot be read: {error}") from error
    if not isinstance(card, dict):
        raise ShardError(where, "a dataset's card must be a JSON object")
    return card
