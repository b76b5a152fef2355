"""The files of a web server, read-only: http://host and https://host.

A key is the rest of a URL, with its query. A version is the ETag or, without one, a hash of size and time of
modification; a file without both is refused, because a replaced one could not be told from it. Bytes are the
stored ones: if a server compresses in transit, the reader sees that by the first bytes.

    head   HEAD; a GET of one byte where a server refuses HEAD or states no size
    open   a GET with a range. A server that ignores ranges sends the whole file: its body is kept when a
           range ends, and goes on when the next one begins there. So a file that is read from front to back
           is sent once, and only the start of a file can be read in any order

Requests go to the URL as written, by a proxy if the environment names one, and follow redirects, but not from
https to http. A user and password in the URL are sent to its host only.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import unquote, urljoin, urlsplit

from shardkit.storage.http import (
    CONTENT_RANGE,
    HttpBody,
    HttpPools,
    connection_error,
    discard,
    urllib3_for,
)
from shardkit.storage.memory import MemoryBody
from shardkit.storage.store import (
    BaseStore,
    ObjectChangedError,
    ObjectInfo,
    ObjectNotFoundError,
    StorageOptions,
    StoreError,
    ThrottledError,
    TransientError,
    checked_key,
    checked_range,
    without_password,
)
from shardkit.storage.threads import remake_after_fork

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

_MOST_REDIRECTS = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_NO_HEAD = frozenset({400, 403, 405, 501})  # how servers, and signed URLs, refuse HEAD
_MOST_SKIPPED = 256 << 20  # maximum bytes to discard of a file that is sent from its start; seconds
_MOST_KEPT = 8  # maximum number of bodies that are kept to go on with; each holds a connection


class HttpStore(BaseStore):
    """A store of the files below an http(s) URL."""

    def __init__(self, url: str, options: StorageOptions | None = None) -> None:
        self._url, self._options = url.rstrip("/"), options or StorageOptions()
        parts = urlsplit(url)
        user, at, self._host = parts.netloc.rpartition("@")
        self._start = self._url.replace(f"{user}{at}", "", 1)
        self._user = unquote(user)
        self._pools = HttpPools(self._options)
        self.after_fork()
        remake_after_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, _WholeBody] = {}

    @property
    def url(self) -> str:
        return without_password(self._url)

    def head(self, key: str) -> ObjectInfo:
        try:
            response = self._request("HEAD", key)
        except StoreError as error:
            if error.status not in _NO_HEAD:
                raise
        else:
            discard(response)
            if (size := _number(response.headers.get("Content-Length", ""))) is not None:
                return self._info(key, size, response.headers)
        with self._open(key, 0, 1, None) as body:
            return body.info

    def open(
        self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None
    ) -> HttpBody | MemoryBody:
        if start < 0 or (stop is not None and stop <= start):
            return self._open_nothing(key, start, stop, version)
        return self._open(key, start, stop, version)

    def put(
        self,
        key: str,
        data: bytes | Path,
        *,
        if_absent: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> NoReturn:
        raise StoreError(self.where(key), "a web server can only be read; write to a folder or bucket")

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        raise StoreError(f"{self.url}/{prefix}", "a web server lists no files; name them one by one")

    def delete(self, key: str) -> NoReturn:
        raise StoreError(self.where(key), "a web server can only be read")

    def close(self) -> None:
        with self._lock:
            kept, self._kept = [*self._kept.values()], {}
        for body in kept:
            body.abandon()
        self._pools.close()

    def __getstate__(self) -> tuple[str, StorageOptions]:
        return self._url, self._options

    def __setstate__(self, state: tuple[str, StorageOptions]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def keep(self, body: _WholeBody) -> None:
        """Keep a body whose range has ended, for a read that begins there; close the oldest one."""
        with self._lock:
            replaced = [self._kept.pop(body.info.key, None)]
            if len(self._kept) >= _MOST_KEPT:
                replaced.append(self._kept.pop(next(iter(self._kept))))
            self._kept[body.info.key] = body
        for one in replaced:
            if one is not None:
                one.abandon()

    def _open(self, key: str, start: int, stop: int | None, version: str | None) -> HttpBody | MemoryBody:
        if (kept := self._take(key, start, version)) is not None:
            return kept.going_on(stop)
        is_ranged = start > 0 or stop is not None
        headers = {"Range": f"bytes={start}-{'' if stop is None else stop - 1}"} if is_ranged else {}
        try:
            response = self._request("GET", key, headers)
        except StoreError as error:
            if error.status != 416:
                raise
            return self._open_nothing(key, start, stop, version)  # an empty file, or past the end
        try:
            return self._body(key, response, start, stop, version)
        except BaseException:
            response.close()
            raise

    def _take(self, key: str, start: int, version: str | None) -> _WholeBody | None:
        with self._lock:
            found = self._kept.get(key)
            if found is None or found.position != start or version not in (None, found.info.version):
                return None
            return self._kept.pop(key)

    def _body(
        self, key: str, response: BaseHTTPResponse, start: int, stop: int | None, version: str | None
    ) -> HttpBody:
        where, stated = self.where(key), _number(response.headers.get("Content-Length", ""))
        if response.status == 206:
            found = CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if found is None:
                raise StoreError(where, "the server sends a part of the file without saying which")
            first, last, size = map(int, found.groups())
        elif stated is not None:
            first, last, size = 0, stated - 1, stated
        else:
            encoding = response.headers.get("Content-Encoding", "")
            why = f", which it compresses in transit ({encoding})" if encoding else ""
            raise StoreError(where, f"the server does not state the size of the file{why}; download it first")
        info = self._info(key, size, response.headers)
        if version is not None and _plain(version) != _plain(info.version):
            raise ObjectChangedError(where, f"has version {info.version}, not {version}")
        start, end = checked_range(where, info, start, stop, None)
        if first > start or last + 1 < end or start - first > _MOST_SKIPPED:
            raise StoreError(
                where,
                f"the server sends bytes {first:,} to {last:,} instead of {start:,} to {end - 1:,}: it does "
                "not support ranges; download the file first",
            )
        if response.status == 206:
            return HttpBody(where, info, response, skipped=start - first, left=end - start)
        return _WholeBody(self, where, info, response, start, end)

    def _info(self, key: str, size: int, headers: Mapping[str, str]) -> ObjectInfo:
        etag, modified = headers.get("ETag"), headers.get("Last-Modified")
        if etag:
            return ObjectInfo(key, size, etag.strip('"'))
        if modified:
            facts = f"{size} {[modified]}"
            return ObjectInfo(key, size, hashlib.sha256(facts.encode()).hexdigest()[:32])
        raise StoreError(
            self.where(key),
            "the server sends neither an ETag nor Last-Modified, so a replaced file could not be noticed; "
            "download it first",
        )

    def _open_nothing(self, key: str, start: int, stop: int | None, version: str | None) -> MemoryBody:
        try:
            response = self._request("HEAD", key)
        except StoreError as error:
            if error.status not in _NO_HEAD:
                raise
            response = self._request("GET", key)
        discard(response)
        info = self._info(key, _number(response.headers.get("Content-Length", "")) or 0, response.headers)
        checked_range(self.where(key), info, start, stop, version)
        return MemoryBody(info, memoryview(b""))

    def _request(self, method: str, key: str, headers: Mapping[str, str] | None = None) -> BaseHTTPResponse:
        """Return the answer to a request, with its body unread; follow redirects, and raise StoreErrors."""
        where = self.where(key)
        urllib3 = urllib3_for(where, "http")
        # A file's URL has no fragment, so that # is a character of its name.
        url = f"{self._start}/{checked_key(self.url, key)}".replace("#", "%23")
        for _ in range(_MOST_REDIRECTS + 1):
            sent = {"User-Agent": "shardkit", "Accept-Encoding": "identity", **(headers or {})}
            if self._user and urlsplit(url).netloc == self._host:
                sent |= urllib3.make_headers(basic_auth=self._user)
            try:
                response: BaseHTTPResponse = self._pools.manager(url).request(
                    method, url, headers=sent, redirect=False, retries=False,
                    preload_content=False, decode_content=False,
                )  # fmt: skip
            except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
                raise connection_error(where, error) from error
            if response.status in (200, 206):
                return response
            location = response.headers.get("Location")
            discard(response)
            if response.status not in _REDIRECTS or location is None:
                raise _status_error(where, response.status, response.headers)
            target = urljoin(url, location)
            if url.startswith("https://") and not target.startswith("https://"):
                raise StoreError(where, f"refused to follow a redirect from https to {target[:200]}")
            url = target
        raise StoreError(where, f"the server redirected the request more than {_MOST_REDIRECTS} times")


class _WholeBody(HttpBody):
    """A part of an answer with the whole file; `going_on` is the next part of the same answer."""

    def __init__(
        self, store: HttpStore, where: str, info: ObjectInfo, response: Any, start: int, end: int
    ) -> None:
        super().__init__(where, info, response, skipped=start, left=end - start)
        self.position = end  # where the next part begins
        self._store = store
        self._is_closed = False

    def going_on(self, stop: int | None) -> _WholeBody:
        """Return the next part, up to `stop` or the end."""
        end = self.info.bytes if stop is None else min(stop, self.info.bytes)
        body = _WholeBody(self._store, self._where, self.info, self._response, self.position, end)
        body._skipped = 0
        return body

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self.left == 0 and self.position < self.info.bytes:
            self._store.keep(self)
        else:
            super().close()

    def abandon(self) -> None:
        """Close the answer, whose rest nobody reads."""
        self._left = 1  # so that the rest is not drained
        super().close()


def _number(stated: str) -> int | None:
    """Return the number in a header; None if there is none, or one with more than 18 digits."""
    return int(stated) if stated.isascii() and stated.isdigit() and len(stated) <= 18 else None


def _plain(version: str) -> str:
    """Return a version without the mark of a weak ETag, which proxies add to a strong one."""
    return version.removeprefix("W/").strip('"')


def _status_error(where: str, status: int, headers: Mapping[str, str]) -> StoreError:
    """Return the error for an answer without a file."""
    if status in (429, 503):
        error = ThrottledError(where, "the server asks for fewer requests", status=status)
        error.retry_after_seconds = _retry_after(headers.get("Retry-After", ""))
        return error
    if status in (408, 425) or status >= 500:
        return TransientError(where, f"the server answers {status}", status=status)
    if status in (404, 410):
        return ObjectNotFoundError(where, "there is no such file", status=status)
    problem = {
        401: "the server asks for a user and password",
        403: "the server refuses: the file is private or absent, or too many requests came from here",
        407: "the proxy asks for a user and password",
        416: "the file ends before the range that was asked for",
    }
    return StoreError(where, problem.get(status, f"the server answers {status}, not a file"), status=status)


def _retry_after(stated: str) -> float | None:
    """Return the seconds of a Retry-After, which is a number or a date; None for anything else."""
    if (seconds := _number(stated)) is not None:
        return float(seconds)
    try:
        until = parsedate_to_datetime(stated)
    except ValueError:
        return None
    until = until if until.tzinfo is not None else until.replace(tzinfo=UTC)
    return max(0.0, (until - datetime.now(UTC)).total_seconds())
