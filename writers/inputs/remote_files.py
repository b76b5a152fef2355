"""Finds objects in stores for the inputs of a recipe: those that a URL matches, and those that a list names.

The files of a long list are found concurrently, on at most `StorageOptions.connections` connections. In a
bucket, a folder with many of them is listed, which takes a thousandth of the requests; on a web server, each
file takes a request. A store slows these down by 503 or 429 (`shardkit.storage.limits`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import islice
from urllib.parse import urlsplit

from shardkit.progress import counting
from shardkit.storage.hub import HubPlace
from shardkit.storage.resilient import ResilientStore, connect
from shardkit.storage.store import ObjectInfo, ObjectNotFoundError, StorageOptions, Store, StoreError
from shardkit.writers.inputs.patterns import Match, alternatives, fixed_part, grade_of, is_glob

_STORES = 16  # maximum number of stores whose connections are kept
# The root of a URL, to which a connection is made: s3://bucket, gs://bucket, https://host, hdfs:///folder.
_ROOT = re.compile(r"([^:/]+://(?:[^/]+|/[^/]+))(?:/(.*))?", re.DOTALL)
_ASKED_AT_ONCE = 4096  # files per batch, so that a missing one is reported before all others are asked for
_LISTED_FROM = 32  # least number of wanted files of a folder to list it
_LISTED_PER_FILE = 16  # a folder with more objects per wanted file is not listed to its end
_SHOWN_FROM = 256  # number of files from which progress is shown


def expand_url(url: str, storage: StorageOptions | None) -> dict[str, tuple[str, ObjectInfo, Match]]:
    """Return {URL: (URL to read from, object, match)} for the objects that `url` matches (patterns.py).

    If an object has exactly this name, only that one matches. http(s) has no listings, so its only patterns
    are lists in braces. The URL to read from is the URL itself or, for a branch, the URL at its current
    commit. Raises StoreError, or FileNotFoundError with the first item of a list in braces that matches no
    object.
    """
    root, pattern = split_root(url)
    connected = connect_root(root, storage)
    store = connected.pinned()
    start = root if store is connected else store.url
    is_web = _is_web(url)
    if pattern and not pattern.endswith("/"):
        names = alternatives(pattern)
        try:
            return {url: (f"{start}/{pattern}", store.head(pattern), Match.YES)}
        except ObjectNotFoundError:
            if is_web and len(names) == 1:
                raise
        if is_web:
            return {f"{root}/{one}": (f"{start}/{one}", store.head(one), Match.YES) for one in names}
    elif is_web:
        raise StoreError(url, "names no file, and folders cannot be listed over http")
    found = _matching(store, pattern.rstrip("/"))
    return {f"{root}/{info.key}": (f"{start}/{info.key}", info, match) for info, match in found}


class MissingObjectError(Exception):
    """A wanted object cannot be found: `url`, because of `error`."""

    def __init__(self, url: str, error: StoreError) -> None:
        super().__init__(f"{url}: {error}")
        self.url, self.error = url, error


def look_up(
    urls: Sequence[str], storage: StorageOptions | None, *, progress: bool = False
) -> dict[str, tuple[str, ObjectInfo]]:
    """Return {URL: (URL to read from, object)}, as `expand_url` does, for the URLs of single objects.

    Raises MissingObjectError for the first that does not exist or cannot be reached.
    """
    by_root: dict[str, dict[str, str]] = {}
    for url in urls:
        try:
            root, name = split_root(url)
        except StoreError as error:
            raise MissingObjectError(url, error) from error
        by_root.setdefault(root, {})[name] = url
    found: dict[str, tuple[str, ObjectInfo]] = {}
    with counting("find files", len(urls), "files", progress=progress and len(urls) >= _SHOWN_FROM) as add:
        for root, names in by_root.items():
            connected = connect_root(root, storage)
            store = connected.pinned()
            start = root if store is connected else store.url
            threads = (storage or StorageOptions()).connections
            for name, info in _objects(store, names, threads, is_web=_is_web(root)):
                found[names[name]] = f"{start}/{name}", info
                add(1)
    return found


def _objects(
    store: Store, names: Mapping[str, str], threads: int, *, is_web: bool
) -> Iterator[tuple[str, ObjectInfo]]:
    """Yield (name, object) for all names, which are keys of the store with their URLs."""
    left = dict.fromkeys(names)
    for name, info in () if is_web else _listed(store, names):
        del left[name]
        yield name, info

    def ask(name: str) -> ObjectInfo | MissingObjectError:
        try:
            return store.head(name)
        except StoreError as error:
            return MissingObjectError(names[name], error)

    waiting = iter(left)
    with ThreadPoolExecutor(threads) as pool:
        while batch := [*islice(waiting, _ASKED_AT_ONCE)]:
            answers = pool.map(ask, batch)
            for name, answer in zip(batch, answers, strict=True):
                if isinstance(answer, MissingObjectError):
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise answer
                yield name, answer


def _listed(store: Store, names: Mapping[str, str]) -> Iterator[tuple[str, ObjectInfo]]:
    """Yield the objects that the listings of folders with many of the names contain; others are left out."""
    folders: dict[str, list[str]] = {}
    for name in names:
        folders.setdefault(name[: name.rfind("/") + 1], []).append(name)
    for folder, wanted in folders.items():
        if len(wanted) < _LISTED_FROM:
            continue
        left = {*wanted}
        try:
            for info in islice(store.list(folder), _LISTED_PER_FILE * len(wanted)):
                if info.key in left:
                    left.remove(info.key)
                    yield info.key, info
                if not left:
                    break
        except StoreError:
            return  # a bucket may be read but not listed; if it cannot be reached, asking for files says why


def _is_web(url: str) -> bool:
    return urlsplit(url).scheme.lower() in ("http", "https")


def _matching(store: Store, pattern: str) -> list[tuple[ObjectInfo, Match]]:
    """Return the objects that a pattern matches; braces are taken literally if that matches any name."""
    fixed = fixed_part(pattern)
    listed = list(store.list(f"{pattern}/" if pattern and fixed == pattern else fixed))
    graded = _graded([pattern or "**"], listed)[0]
    names = alternatives(pattern)
    if not graded and len(names) > 1:
        graded, unmatched = _graded(names, listed)
        if unmatched:
            raise FileNotFoundError(unmatched[0])
    return [(info, graded[info.key]) for info in listed if info.key in graded]


def _graded(patterns: Sequence[str], listed: Sequence[ObjectInfo]) -> tuple[dict[str, Match], list[str]]:
    """Return {key: match} for the listed objects that match, and the patterns that match nothing."""
    globs = [one for one in patterns if is_glob(one)]
    names = dict.fromkeys(one for one in patterns if not is_glob(one))
    graded: dict[str, Match] = {}
    used = set()
    for info in listed:
        above = [info.key, *(info.key[:at] for at, one in enumerate(info.key) if one == "/")]
        for one in (*(name for name in above if name in names), *globs):
            if match := grade_of(one, info.key):
                used.add(one)
                graded[info.key] = max(match, graded.get(info.key, Match.NO))
    return graded, [one for one in patterns if one not in used]


def split_root(url: str) -> tuple[str, str]:
    """Return (root URL at which to open a store, rest of the URL: the key of an object, or a pattern)."""
    if url.lower().startswith("hf://"):
        place = HubPlace.parse(url)
        return place.root, f"{place.path}/" if place.path and url.endswith("/") else place.path
    found = _ROOT.fullmatch(url)
    if found is None:
        raise StoreError(url, "is not the URL of a file, such as s3://bucket/folder/file.jsonl")
    return found[1], found[2] or ""


@lru_cache(maxsize=_STORES)
def connect_root(root: str, storage: StorageOptions | None, *, has_answered: bool = False) -> ResilientStore:
    """Connect to a store; reuse one client for all files of a bucket, because making one takes long."""
    return connect(root, storage, has_answered=has_answered)
