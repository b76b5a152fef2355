"""Dataset repositories of the Hugging Face Hub as a store: hf://datasets/ORG/NAME[@REVISION][/folder].

A key is a path in the repository, at the commit to which its branch (by default main), tag or commit id
points. A version is the hash that the Hub stores for a file's content: the SHA-256 if the content is stored
outside of git (LFS, Xet), otherwise git's blob hash. So a file keeps its version in all commits that do not
change it, and reading a version that a branch no longer has raises ObjectChangedError. `HubStore.pinned`
returns the store at the branch's current commit: code that reads several objects calls it once, and later
commits do not affect it.

    read   by HTTP ranges on the file's address, which redirects to the host that stores its bytes
    write  by `huggingface_hub`: contents are uploaded first, then one commit adds them. Content that the Hub
           already has is not sent again, no matter who sent it. `put` is a commit of one file; `commit`
           writes any number of files

With `if_absent`, a commit names its parent commit, which was checked not to have the file. If another commit
came first, the Hub refuses this one, and the store checks again. Metadata is not kept. Requests are made
once: `ResilientStore` retries, and stops waiting for requests of `huggingface_hub`, which have no timeouts.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from shardkit.hashing import hash_bytes, hash_file
from shardkit.storage.http import CONTENT_RANGE, HttpBody
from shardkit.storage.hub_client import HubAnswer, HubClient
from shardkit.storage.hub_commit import OtherCommitError, make_commit
from shardkit.storage.memory import MemoryBody
from shardkit.storage.store import (
    BaseStore,
    ObjectChangedError,
    ObjectExistsError,
    ObjectInfo,
    ObjectNotFoundError,
    StorageOptions,
    StoreError,
    ThrottledError,
    TransientError,
    checked_key,
    checked_range,
)

_FORM = "expected hf://datasets/ORG/NAME, hf://datasets/ORG/NAME@REVISION, or a folder of one of these"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MOST_PAGES = 10_000  # maximum number of pages of a listing
_MOST_FILES = 1_000_000  # maximum number of files of a listing; ten times what the Hub recommends
_PATHS_AT_ONCE = 500  # files per request for sizes and versions
_MOST_RACES = 64  # attempts of a write with `if_absent`; one fails only if another commit came first
_MOST_SKIPPED = 16 << 20  # maximum bytes to discard if a server ignores a range and sends the file's start
_SHA256_DIGITS = 64
_ADDRESS_SECONDS = 300.0  # time for which to reuse a signed address, which is valid for an hour
_MOST_ADDRESSES = 4096  # above this number, all remembered addresses are dropped


@dataclass(frozen=True, slots=True)
class HubPlace:
    """A parsed hf:// URL. `revision`: a branch, tag or commit, None for main; `path`: "" for the root."""

    repository: str
    revision: str | None
    path: str

    @classmethod
    def parse(cls, url: str) -> HubPlace:
        """Parse the URL of a dataset repository or a folder in one. Raises StoreError for other URLs.

        A "/" in the revision must be written %2F, except in refs/pr/… and refs/convert/….
        """
        scheme, _, rest = url.partition("://")
        kind, *parts = rest.rstrip("/").split("/")
        if scheme.lower() != "hf" or kind != "datasets" or len(parts) < 2:
            other = "is the URL of a model, a space or a bucket; " if kind != "datasets" and parts else ""
            raise StoreError(url, f"{other}{_FORM}")
        name, at, revision = parts[1].partition("@")
        path = parts[2:]
        if revision == "refs" and len(path) >= 2 and path[0] in ("convert", "pr"):
            revision, path = "/".join(["refs", *path[:2]]), path[2:]
        if not (_NAME.fullmatch(parts[0]) and _NAME.fullmatch(name)) or (at and not revision):
            raise StoreError(url, f"is not the URL of a dataset repository; {_FORM}")
        return cls(f"{parts[0]}/{name}", unquote(revision) if at else None, "/".join(path))

    @property
    def root(self) -> str:
        """The URL of the repository, with the revision if one is set."""
        if self.revision is None:
            return f"hf://datasets/{self.repository}"
        is_ref = re.fullmatch(r"refs/(convert|pr)/[^/]+", self.revision)
        return f"hf://datasets/{self.repository}@{self.revision if is_ref else quote(self.revision, safe='')}"


class HubStore(BaseStore):
    """A store of the files below a folder of a dataset repository, at a branch, a tag or a commit."""

    has_commits = True

    def __init__(self, url: str, options: StorageOptions | None = None) -> None:
        self._place = HubPlace.parse(url)
        self._prefix = f"{checked_key(url, self._place.path)}/" if self._place.path else ""
        self._revision = self._place.revision or "main"
        self._options = options or StorageOptions()
        self._client = HubClient(self._options)
        self._addresses = _Addresses()

    @property
    def url(self) -> str:
        return f"{self._place.root}/{self._prefix}".rstrip("/")

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which does not change and cannot be written."""
        return _COMMIT.fullmatch(self._revision) is not None

    def pinned(self) -> HubStore:
        """Return the store at the commit to which the branch or tag points now; makes one request."""
        if self.is_pinned:
            return self
        root = f"hf://datasets/{self._place.repository}@{self._commit_now()}"
        return HubStore(f"{root}/{self._prefix}", self._options)

    def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        found = self._described(self._revision, [path])
        if path not in found:
            raise ObjectNotFoundError(self.where(key), "there is no such file", status=404)
        return found[path]

    def open(
        self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None
    ) -> HttpBody | MemoryBody:
        if start < 0 or (stop is not None and stop <= start):
            return self._open_nothing(key, start, stop, version)
        where = self.where(key)
        revision, path = quote(self._revision, safe=""), quote(self._path(key))
        address = f"/datasets/{self._place.repository}/resolve/{revision}/{path}"
        is_ranged = start > 0 or stop is not None
        headers = {"Range": f"bytes={start}-{'' if stop is None else stop - 1}"} if is_ranged else {}
        try:
            answer = self._answer_of_known(path, where, headers)
            if answer is None:
                answer = self._client.request("GET", address, where, headers=headers)
                self._addresses.add(path, answer)
        except StoreError as error:
            if error.status == 416 and start == 0:  # the file is empty, so any range is refused
                return self._open_nothing(key, 0, 0, version)
            raise
        try:
            return self._body(key, answer, start, stop, version)
        except BaseException:
            answer.response.close()
            raise

    def put(
        self,
        key: str,
        data: bytes | Path,
        *,
        if_absent: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        if not if_absent:
            return self.commit({key: data})[key]
        where, path = self.where(key), self._path(key)
        self._check_writable()
        for _ in range(_MOST_RACES):
            parent = self._commit_now()
            if self._described(parent, [path]):
                raise ObjectExistsError(where, "already exists", status=412)
            try:
                made = self._make_commit({path: data}, [], where, parent)
            except OtherCommitError:
                continue
            return self._described(made, [path])[path]
        raise TransientError(where, f"{_MOST_RACES} attempts failed, because other commits came first")

    def commit(
        self, files: Mapping[str, bytes | Path], deleted: Collection[str] = ()
    ) -> dict[str, ObjectInfo]:
        """Write and delete files in one atomic commit. Return {key: object} of the written files."""
        self._check_writable()
        paths = {self._path(key): data for key, data in files.items()}
        gone = [self._path(key) for key in deleted]
        there = self._described(self._revision, gone)
        gone = [path for path in gone if path in there]
        if not paths and not gone:
            return {}
        where = self.where(next(iter(files))) if len(files) == 1 and not gone else self.url
        made = self._make_commit(paths, gone, where, None)
        return {info.key: info for info in self._described(made, [*paths]).values()}

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        if prefix.startswith("/") or {"", ".", ".."} & set(prefix.split("/")[:-1]):
            return  # no valid key has such a prefix
        whole = self._prefix + prefix
        folder = quote(whole.rpartition("/")[0], safe="")
        where = f"{self.url}/{prefix}"
        tree = f"{self._api('tree', self._commit_now())}/{folder}".rstrip("/")
        first = f"{tree}?recursive=true&expand=false"
        page: str | None = first
        found: dict[str, ObjectInfo] = {}
        seen: set[str] = set()
        while page is not None:
            if page in seen or len(seen) == _MOST_PAGES or len(found) > _MOST_FILES:
                raise StoreError(
                    where, f"the server's listing does not end: {len(seen):,} pages, {len(found):,} files"
                )
            seen.add(page)
            try:
                entries, page = self._client.json("GET", page, where)
            except ObjectNotFoundError as error:
                if folder and page == first:
                    return  # the folder does not exist
                raise StoreError(where, f"cannot be listed: {error.problem}", status=404) from error
            for entry in _entries(entries, where):
                if entry.get("type") == "file" and str(entry.get("path")).startswith(whole):
                    info = self._info(entry)
                    found[info.key] = info
        for key in sorted(found):
            yield found[key]

    def delete(self, key: str) -> None:
        self.commit({}, [key])

    def close(self) -> None:
        self._client.close()

    def __getstate__(self) -> tuple[str, StorageOptions]:
        return self.url, self._options

    def __setstate__(self, state: tuple[str, StorageOptions]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def _commit_now(self) -> str:
        """Return the hash of the commit to which the revision points."""
        if self.is_pinned:
            return self._revision
        found, _ = self._client.json("GET", f"{self._api('revision', self._revision)}?expand=sha", self.url)
        commit = found.get("sha") if isinstance(found, dict) else None
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise StoreError(self.url, "the server did not name the branch's commit: check HF_ENDPOINT")
        return commit

    def _described(self, revision: str, paths: Sequence[str]) -> dict[str, ObjectInfo]:
        """Return {path: ObjectInfo} for all of `paths` that are files at the given revision."""
        found: dict[str, ObjectInfo] = {}
        for start in range(0, len(paths), _PATHS_AT_ONCE):
            some = paths[start : start + _PATHS_AT_ONCE]
            where = f"{self._place.root}/{some[0]}"
            body = {"paths": list(some), "expand": False}
            entries, _ = self._client.json("POST", self._api("paths-info", revision), where, body)
            for entry in _entries(entries, where):
                if entry.get("type") == "file" and entry.get("path") in some:
                    found[entry["path"]] = self._info(entry)
        return found

    def _info(self, entry: Mapping[str, Any]) -> ObjectInfo:
        """Return the object that an entry of one of the Hub's listings describes."""
        key = str(entry["path"])[len(self._prefix) :]
        lfs = entry.get("lfs")
        size, version = entry.get("size"), (lfs if isinstance(lfs, dict) else entry).get("oid")
        if not isinstance(size, int) or not isinstance(version, str):
            raise StoreError(self.where(key), "the server's listing has no size or hash of the file")
        return ObjectInfo(key, size, version)

    def _body(
        self, key: str, answer: HubAnswer, start: int, stop: int | None, version: str | None
    ) -> HttpBody:
        """Return the body of an answer, after checking that it has the requested range and version."""
        where, response = self.where(key), answer.response
        if not answer.etag:
            raise StoreError(where, "the server sends no ETag, so versions cannot be compared")
        if version not in (None, answer.etag):
            raise ObjectChangedError(where, f"has version {answer.etag}, not {version}")
        stated = response.headers.get("Content-Length", "")
        if not stated.isdigit():
            raise StoreError(where, "the server sends no Content-Length")
        first, size = 0, int(stated)
        if response.status == 206:
            found = CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if not found:
                raise StoreError(where, "the server sends a partial answer without a Content-Range")
            first, size = int(found[1]), int(found[3])
        if answer.linked_bytes not in (None, str(size)):
            raise StoreError(
                where, f"the server sends {size:,} bytes instead of {answer.linked_bytes}: read it again"
            )
        end = size if stop is None else min(stop, size)
        if first > start or first + int(stated) < end or start - first > _MOST_SKIPPED:
            raise StoreError(
                where,
                f"requested bytes {start:,} to {end:,}, but the server sends {stated} bytes from {first:,}: "
                "the server or a proxy does not support ranges",
            )
        info = ObjectInfo(key, size, answer.etag)
        if first < start:
            checked_range(where, info, start, stop, None)
        return HttpBody(where, info, response, skipped=start - first, left=end - start)

    def _answer_of_known(self, path: str, where: str, headers: Mapping[str, str]) -> HubAnswer | None:
        """Request a file from its remembered address; return None if that is unknown or has expired."""
        found = self._addresses.find(path) if self.is_pinned else None
        if found is None:
            return None
        try:
            return self._client.request("GET", found.address, where, headers=headers, facts=found.facts)
        except StoreError as error:
            if error.status == 416:
                raise
            self._addresses.forget(path)
            if error.status is None or isinstance(error, ThrottledError):
                raise
            return None  # the address has expired

    def _open_nothing(self, key: str, start: int, stop: int | None, version: str | None) -> MemoryBody:
        info = self.head(key)
        checked_range(self.where(key), info, start, stop, version)
        return MemoryBody(info, memoryview(b""))

    def _check_writable(self) -> None:
        if self.is_pinned:
            raise StoreError(self.url, "is a commit, which cannot be changed: use a branch, such as @main")

    def _make_commit(
        self, files: Mapping[str, bytes | Path], deleted: Sequence[str], where: str, parent: str | None
    ) -> str:
        return make_commit(
            self._place.repository,
            self._revision,
            files,
            deleted,
            self._subject(files, deleted),
            where,
            parent,
        )

    def _subject(self, files: Collection[str], deleted: Sequence[str]) -> str:
        """Return the first line of a commit's message."""
        if len(files) == 1 and not deleted:
            return f"Add {next(iter(files)).removeprefix(self._prefix)}"
        counts = [(verb, n) for verb, n in (("add", len(files)), ("delete", len(deleted))) if n]
        return ", ".join(f"{verb} {n:,} {'file' if n == 1 else 'files'}" for verb, n in counts).capitalize()

    def _path(self, key: str) -> str:
        path = self._prefix + checked_key(self.url, key)
        try:
            path.encode()
        except UnicodeEncodeError as error:
            raise StoreError(self.url, f"key {key!r:.200} is not Unicode, as the Hub requires") from error
        return path

    def _api(self, what: str, revision: str) -> str:
        return f"/api/datasets/{self._place.repository}/{what}/{quote(revision, safe='')}"


@dataclass(frozen=True, slots=True)
class _Address:
    """The address of a file's content, headers from the Hub, and its expiry time (`time.monotonic`)."""

    address: str
    facts: Mapping[str, str]
    until: float


class _Addresses:
    """Remembered addresses of contents, so that the next range of a file needs no new request to the Hub.

    Needs no lock, because each use is one atomic operation on a dict.
    """

    def __init__(self) -> None:
        self._found: dict[str, _Address] = {}

    def find(self, path: str) -> _Address | None:
        found = self._found.get(path)
        return found if found is not None and time.monotonic() < found.until else None

    def add(self, path: str, answer: HubAnswer) -> None:
        if len(self._found) >= _MOST_ADDRESSES:
            self._found.clear()
        if answer.address is not None:
            until = time.monotonic() + _ADDRESS_SECONDS
            self._found[path] = _Address(answer.address, answer.facts, until)

    def forget(self, path: str) -> None:
        self._found.pop(path, None)


def content_version(data: bytes | Path, digits: int) -> str:
    """Return the version of this content on the Hub: its SHA-256, or git's blob hash if `digits` is 40."""
    if digits == _SHA256_DIGITS:
        hashes = hash_bytes(data, ["sha256"]) if isinstance(data, bytes) else hash_file(data, ["sha256"])
        return hashes["sha256"]
    content = data if isinstance(data, bytes) else data.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _entries(answer: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(answer, list) or not all(isinstance(entry, dict) for entry in answer):
        raise StoreError(where, "the server's answer is not a list of files: check HF_ENDPOINT")
    if not all(isinstance(entry.get("path"), str) for entry in answer if entry.get("type") == "file"):
        raise StoreError(where, "the server lists files without a path: check HF_ENDPOINT")
    return answer
