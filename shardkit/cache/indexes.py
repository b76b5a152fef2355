"""Indexes of remote datasets in the cache folder: one process of a node fetches them, the others read them.

    FOLDER/shardkit-cache-1/indexes/DIGEST-OF-URL/index.json, dataset.json, ...   as they are in the store
                                                  index.bin    of a large index.json: opens at once
                                                  checked      when they were fetched, their hashes, what
                                                               was missing
                                                  lock         flocked by the process that fetches

The process that gets the lock first is the leader; nobody else asks the store. Processes of one node that
start together trust what a leader fetched within `trust_seconds`, unless a file was damaged since; a process
alone trusts nothing and fetches always, so a dataset that was replaced is seen. If the leader dies, the lock
is free and the next one leads.

index.bin is mapped: however many processes of the node read it, it lies in memory once. The leader has
looked at all that it says; the others compare checksums.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from os import PathLike
from pathlib import Path

from shardkit.cache.protocol import CacheFolderError
from shardkit.cache.subfolder import NO_ROOM, SUBFOLDER, explain_errors, make_subfolders
from shardkit.errors import ShardError
from shardkit.files import load_json, publish_bytes
from shardkit.formats.mds.index import TABLE_NAME, parse_index, read_table, table_bytes
from shardkit.hashing import hash_bytes, hash_file
from shardkit.locks import FileLock
from shardkit.manifest import Manifest

__all__ = ["TRUST_SECONDS", "NodeIndexes"]

_STATE_NAME = "checked"
_HASHES = ("xxh3_128",)
TRUST_SECONDS = 60.0  # processes of a job start within this time of each other


class NodeIndexes:
    """The indexes in one cache folder."""

    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        trust_seconds: float,
        wait_seconds: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`wait_seconds`: how long to wait for a leader before fetching without one."""
        self._root = Path(folder).absolute()
        self._trust_seconds, self._wait_seconds, self._clock = trust_seconds, wait_seconds, clock

    def objects(
        self, url: str, names: Sequence[str], fetch: Callable[[], Mapping[str, bytes | None]]
    ) -> Mapping[str, bytes | Path | None]:
        """The files with the objects called `names` of the dataset at `url`, None for those that are missing.

        `fetch` gets them from the store; it is called by one process at a time, its errors are raised here.
        Where the disk has no room for files, this gives what was fetched.
        """
        fetch_once = cache(fetch)
        try:
            return self._objects(url, names, fetch_once)
        except CacheFolderError as error:
            if not (isinstance(error.__cause__, OSError) and error.__cause__.errno in NO_ROOM):
                raise
            return fetch_once()

    def _objects(
        self, url: str, names: Sequence[str], fetch: Callable[[], Mapping[str, bytes | None]]
    ) -> Mapping[str, Path | None]:
        with explain_errors(self._root):
            folder = self._folder(url)
            if (known := self._trusted(folder, names)) is not None:
                return known
            lock = FileLock(folder / "lock", keep=True)
            lock.acquire(self._wait_seconds)
        try:
            with explain_errors(self._root):
                if (known := self._trusted(folder, names)) is not None:
                    return known
            found = fetch()
            with explain_errors(self._root):
                return self._keep(folder, found)
        finally:
            lock.release()

    def index(self, file: Path, where: str) -> Manifest:
        """The manifest in an index.json that `objects` gave, from the index.bin beside it, which is made."""
        with explain_errors(self._root):
            if (table := read_table(file, is_proved=True)) is not None:
                return Manifest("mds", table, blocks=table.blocks)
            text = file.read_bytes()
            try:
                manifest = parse_index(where, text)
            except ShardError:
                # It may have been damaged on its way: the next process asks the store again.
                (file.parent / _STATE_NAME).unlink(missing_ok=True)
                raise
            if (made := table_bytes(manifest.shards, text, manifest.blocks)) is not None:
                try:
                    publish_bytes(file.with_name(TABLE_NAME), made)
                except OSError as error:
                    if error.errno not in NO_ROOM:
                        raise
                    return manifest
                manifest = replace(manifest, shards=read_table(file, is_proved=True) or manifest.shards)
            return manifest

    def _folder(self, url: str) -> Path:
        make_subfolders(self._root, ["indexes"])
        digest = hashlib.blake2b(url.encode(errors="surrogatepass"), digest_size=16).hexdigest()
        folder = self._root / SUBFOLDER / "indexes" / digest
        folder.mkdir(exist_ok=True)
        return folder

    def _trusted(self, folder: Path, names: Sequence[str]) -> Mapping[str, Path | None] | None:
        """What a leader has fetched lately; None if that is not all of `names`."""
        try:
            checked = load_json((folder / _STATE_NAME).read_bytes())
            age = self._clock() - checked["seconds"]
            there, missing = checked["there"], checked["missing"]
            if not 0 <= age < self._trust_seconds or not {*names} <= {*there, *missing}:
                return None
            found = {name: folder / name if name in there else None for name in names}
            is_whole = all(
                file is None or hash_file(file, _HASHES) == there[name] for name, file in found.items()
            )
            return found if is_whole else None
        except (FileNotFoundError, ShardError, ValueError, LookupError, TypeError, OverflowError):
            return None

    def _keep(self, folder: Path, found: Mapping[str, bytes | None]) -> Mapping[str, Path | None]:
        there = {name: hash_bytes(text, _HASHES) for name, text in found.items() if text is not None}
        for name, text in found.items():
            if text is not None:
                publish_bytes(folder / name, text)
        missing = [name for name in found if name not in there]
        state = {"seconds": self._clock(), "there": there, "missing": missing}
        publish_bytes(folder / _STATE_NAME, json.dumps(state).encode())
        return {name: folder / name if name in there else None for name in found}
