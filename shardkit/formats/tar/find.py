"""Find tars by name: resolve brace lists, patterns, folders, and lists of them, to files or objects.

The tars are in the order of the given names; the tars of one folder or pattern are sorted. All tars of a
dataset are below one folder, or in one bucket; their names are relative to their deepest common folder. A tar
that is named twice is an error, because its samples would be delivered twice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from shardkit.errors import ShardError, ShardNotFoundError
from shardkit.formats.tar.shard_list import (
    common_folder,
    describe_tar,
    expand_braces,
    fixed_folder,
    is_pattern,
    is_tar_name,
    matches,
    tar_files,
)
from shardkit.hints import near_path
from shardkit.manifest import Manifest
from shardkit.storage.resilient import ResilientStore, connect
from shardkit.storage.store import ObjectInfo, ObjectNotFoundError, StorageOptions, Store, StoreError
from shardkit.storage.url import is_remote, local_path, split_url

MAX_LISTED = 1 << 20  # maximum number of objects to list in search of tars; a whole bucket may hold more

_MAX_HEADS = 64  # for more objects, a listing, with 1,000 keys per request, is cheaper than HEAD requests

_THREADS = 16

_FORBIDDEN = 403

_OTHER_DATASET = "is itself an MDS dataset; pass several datasets as streams: [Stream(…), Stream(…)]"


def expand(names: Sequence[str], is_there: Callable[[str], bool] = lambda _: False) -> list[str]:
    """Split `names` at "::" and expand brace lists, except in a name that exists according to `is_there`.

    Raises ShardError if no name or an empty name results, or if braces are unbalanced.
    """
    try:
        # ARNs may contain "::". They are not split, so that the store's error message quotes them as given.
        parts = [part for text in names for part in ([text] if _is_arn(text) else text.split("::"))]
        found = [
            name
            for part in parts
            for name in ([part] if "{" in part and is_there(part) else expand_braces(part))
        ]
    except ValueError as error:
        raise ShardError(names[0], f"names no tars: {error}") from error
    if not found or not all(found):
        raise ShardError("::".join(names), "names no tars: a name is empty")
    return found


def is_there(name: str, storage: StorageOptions | None = None) -> bool:
    """Return whether a path, or the object at a tar's URL, exists. Raises StoreError if the store fails."""
    if not is_remote(name):
        return local_path(name).exists()
    folder, key = split_url(name)
    if not is_tar_name(key):
        return False
    try:
        connect(folder, storage, shares_limit=True).pinned().head(key)
    except StoreError as error:
        if error.status != _FORBIDDEN and not isinstance(error, ObjectNotFoundError):
            raise
        return False
    return True


def _is_arn(text: str) -> bool:
    return text[:9].lower() == "s3://arn:"


def unscanned(objects: Sequence[ObjectInfo]) -> Manifest:
    """Return a manifest of tars whose samples and columns are not known yet: it has names and sizes only."""
    return Manifest("tar", tuple(describe_tar(info.key, stored_bytes=info.bytes) for info in objects))


def local_tars(names: Sequence[str]) -> tuple[Path, list[ObjectInfo]]:
    """Return (common folder, tars below it) for local paths. Raises ShardError if a path has no tars."""
    paths = [Path(name) for name in names]
    if len({path.is_absolute() for path in paths}) > 1 or any(".." in path.parts for path in paths):
        paths = [Path(os.path.normpath(path.absolute())) for path in paths]
    found = [_local_files(path) for path in paths]
    folder = Path(os.path.commonpath([top for top, _ in found]))
    files = [file for _, some in found for file in some]
    return folder, local_objects(folder, [file.relative_to(folder).as_posix() for file in files])


def local_objects(folder: Path, names: Sequence[str]) -> list[ObjectInfo]:
    """Return name, size and version of files in `folder`. Raises ShardError if one is missing or repeated."""
    _refuse_repeated(str(folder), names)
    objects = []
    for name in names:
        try:
            status = (folder / name).stat()
        except OSError as error:
            raise ShardError(folder / name, f"cannot be opened: {error.strerror or error}") from error
        version = f"{status.st_mtime_ns}-{status.st_ino}-{status.st_size}"
        objects.append(ObjectInfo(name, status.st_size, version))
    return objects


def _local_files(path: Path) -> tuple[Path, list[Path]]:
    """Return (folder that contains all tars, tars) for a path that names a tar, a folder or a pattern."""
    if path.is_dir():
        files = [path / name for name in tar_files(path)]
        if (path / "index.json").is_file():
            raise ShardError(path, _OTHER_DATASET)
        if not files:
            raise ShardError(path, "contains no tars")
        return path, files
    if path.exists() or not is_pattern(str(path)):
        if not path.is_file():
            raise ShardNotFoundError(path, f"there is no such file or folder; {near_path(path)}")
        if not is_tar_name(path.name):
            raise ShardError(path, "is not a tar (.tar, .tar.gz, .tgz, .tar.bz2, .tar.zst)")
        return path.parent, [path]
    folder = Path(fixed_folder(path.as_posix()) or ("/" if path.is_absolute() else "."))
    pattern = path.relative_to(folder).as_posix()
    found = [file for file in folder.glob(pattern) if file.is_file()]
    files = sorted(file for file in found if matches(file.relative_to(folder).as_posix(), pattern))
    files.sort(key=lambda file: file.as_posix())
    _refuse_others(str(path), [file.name for file in files])
    return folder, files


def remote_tars(
    names: Sequence[str], storage: StorageOptions | None = None
) -> tuple[ResilientStore, list[ObjectInfo]]:
    """Return (store of the deepest common folder, tars in the store) for URLs of tars, folders or patterns.

    Raises ShardError if a URL has no tars, and StoreError if the store fails.
    """
    # A URL that neither names a tar nor is a pattern is taken for a folder.
    urls = [name if is_tar_name(name) or is_pattern(name) else f"{name.rstrip('/')}/*" for name in names]
    folder = common_folder([fixed_folder(url) for url in urls])
    if folder.count("/") < 2 or folder.endswith("://"):
        raise ShardError(names[0], f"and {names[-1]} are in different stores; open each as its own stream")
    store = connect(folder, storage, shares_limit=True).pinned()
    keys = [url[len(folder) + 1 :] for url in urls]
    listed = _listing(store, keys)
    objects: list[ObjectInfo] = []
    for name, key in zip(names, keys, strict=True):
        if key in listed:  # tested first: the name of an existing object may look like a pattern
            objects.append(listed[key])
        elif is_pattern(key):
            is_folder = is_pattern(key) and not is_pattern(name)
            some = [
                i for i in listed.values() if matches(i.key, key) and (not is_folder or is_tar_name(i.key))
            ]
            _refuse_others(name, [info.key for info in some])
            objects += some
        else:
            raise ShardNotFoundError(f"{store.url}/{key}", "there is no such object")
    _refuse_repeated(store.url, [info.key for info in objects])
    return store, objects


def folder_tars(store: Store) -> list[ObjectInfo]:
    """Return the tars directly in a store's folder, sorted. Raises ShardError if all are in sub-folders."""
    listed = _list(store, "")
    tars = [info for info in listed if is_tar_name(info.key) and matches(info.key, "**/*")]
    direct = [info for info in tars if "/" not in info.key]
    if not tars:
        refuse_unfinished(store.url, [info.key for info in listed])
    if tars and not direct:
        raise ShardError(
            store.url, f"has tars in sub-folders only: open {store.url}/**/*.tar to use them all"
        )
    return direct


def refuse_unfinished(where: str, names: Sequence[str]) -> None:
    """Raise ShardNotFoundError if `names`, the files below a folder without an index, include MDS shards."""
    shards = [name for name in names if _MDS_SHARD.search(name) and matches(name, "**/*")]
    if not shards:
        return
    if parts := sorted({name.rpartition("/")[0] for name in names if name.endswith("/index.json")}):
        some = ", ".join(parts[:3])
        problem = (
            f"holds no index.json, but its sub-folders do ({some}, …): give each as a Stream, or merge them"
        )
        raise ShardNotFoundError(where, f"{problem} (streaming.base.util.merge_index)")
    raise ShardNotFoundError(
        where,
        f"holds shards ({len(shards):,}, such as {shards[0]}) but no index.json, which an MDS writer writes "
        "last: the writer did not finish, or the index was not copied. Let the writer finish (MosaicML's by "
        "`with MDSWriter(…)` or `finish()`), or copy index.json to the folder of the shards",
    )


_MDS_SHARD = re.compile(r"\.mds(\.[a-z0-9]+)*$")


def _listing(store: Store, keys: Sequence[str]) -> dict[str, ObjectInfo]:
    """Return {key: object} of the objects that `keys` name or may match as patterns, in listing order."""
    plain = [key for key in keys if not is_pattern(key)]
    if len(plain) == len(keys) <= _MAX_HEADS:
        return _heads(store, plain)
    prefix = os.path.commonprefix([_fixed_prefix(key) for key in keys])  # noqa: RUF071 (of keys, not folders)
    try:
        return {info.key: info for info in _list(store, prefix)}
    except StoreError as error:
        if error.status != _FORBIDDEN or len(plain) < len(keys):
            raise
        return _heads(store, plain)  # the bucket's permissions may allow reading but not listing


def _heads(store: Store, keys: Sequence[str]) -> dict[str, ObjectInfo]:
    def head(key: str) -> ObjectInfo | None:
        try:
            return store.head(key)
        except ObjectNotFoundError:
            return None

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="shardkit-open") as pool:
        return {info.key: info for info in pool.map(head, keys) if info is not None}


def _list(store: Store, prefix: str) -> list[ObjectInfo]:
    objects = [*islice(store.list(prefix), MAX_LISTED + 1)]
    if len(objects) > MAX_LISTED:
        problem = f"holds more than {MAX_LISTED:,} objects; use a pattern with a longer prefix, or list tars"
        raise ShardError(f"{store.url}/{prefix}", problem)
    return objects


def _fixed_prefix(key: str) -> str:
    return key[: next((at for at, character in enumerate(key) if is_pattern(character)), len(key))]


def _refuse_others(where: str, names: Sequence[str]) -> None:
    """Raise ShardError unless a pattern matches at least one file and all matches are tars."""
    other = next((name for name in names if not is_tar_name(name)), None)
    if not names or other is not None:
        found = "no file matches" if other is None else f"it matches {other}, which is not a tar"
        raise ShardError(where, f"a pattern must match only .tar files: {found}")


def _refuse_repeated(where: str, names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ShardError(f"{where}/{name}", "is named twice: its samples would be delivered twice")
        seen.add(name)
