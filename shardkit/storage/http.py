"""What stores over HTTP share: pools of connections, bodies of answers, and errors of connections.

Requests are sent once, by urllib3: `ResilientStore` retries. Pools are made once per process; a forked child
makes its own.
"""

from __future__ import annotations

import contextlib
import re
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from shardkit.errors import MissingExtraError
from shardkit.storage.store import BaseBody, ObjectInfo, StorageOptions, StoreError, TransientError
from shardkit.storage.threads import remake_after_fork

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse, PoolManager

CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)


class HttpPools:
    """Pools of connections, one per proxy of the environment."""

    def __init__(self, options: StorageOptions) -> None:
        self._options = options
        self.after_fork()
        remake_after_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._managers: dict[str | None, PoolManager] = {}

    def manager(self, url: str) -> PoolManager:
        """Return the pool for `url`, which uses a proxy if the environment names one."""
        from urllib.request import getproxies, proxy_bypass

        parts = urlsplit(url)
        proxy = None if proxy_bypass(parts.netloc) else getproxies().get(parts.scheme)
        with self._lock:
            if proxy not in self._managers:
                self._managers[proxy] = self._new_manager(proxy)
            return self._managers[proxy]

    def close(self) -> None:
        """Close idle connections."""
        with self._lock:
            for manager in self._managers.values():
                manager.clear()

    def _new_manager(self, proxy: str | None) -> PoolManager:
        import urllib3

        options = self._options
        timeout = urllib3.Timeout(connect=options.connect_timeout_seconds, read=options.read_timeout_seconds)
        if proxy is None:
            return urllib3.PoolManager(maxsize=options.connections, timeout=timeout)
        user, _, _ = urlsplit(proxy).netloc.rpartition("@")
        headers = urllib3.make_headers(proxy_basic_auth=unquote(user)) if user else None
        return urllib3.ProxyManager(
            proxy, maxsize=options.connections, timeout=timeout, proxy_headers=headers
        )


class HttpBody(BaseBody):
    """A body that discards `skipped` bytes of an HTTP answer, and then reads the next `left` bytes.

    Reads return the bytes that have arrived. Another thread may call `close` to end a blocked read.
    """

    def __init__(self, where: str, info: ObjectInfo, response: Any, *, skipped: int, left: int) -> None:
        self.info = info
        self._where, self._response = where, response
        self._skipped, self._left, self._bytes = skipped, left, left
        self._is_whole = False  # whether the connection was returned to the pool after the last byte

    @property
    def left(self) -> int:
        return self._left

    def readinto(self, buffer: memoryview, /) -> int:
        if not self._left:
            return 0
        while self._skipped:
            self._skipped -= len(self._next(self._skipped))
        piece = self._next(min(len(buffer), self._left))
        buffer[: len(piece)] = piece
        self._left -= len(piece)
        return len(piece)

    def close(self) -> None:
        if self._left == 0 and not self._is_whole:
            self._is_whole = True
            with contextlib.suppress(Exception):  # all bytes have been read, so errors do not matter
                self._response.drain_conn()
                self._response.release_conn()
        elif not self._is_whole:
            with contextlib.suppress(Exception):  # ends a blocked read; if this fails, its timeout does
                self._response.shutdown()
            with contextlib.suppress(Exception):
                self._response.close()

    def _next(self, count: int) -> bytes:
        import urllib3

        try:
            piece: bytes = self._response.read1(count)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            found = connection_error(self._where, error)
            raise type(found)(self._where, f"{found.problem}, {self._progress}") from error
        except (ValueError, AttributeError) as error:  # another thread has closed the body
            raise TransientError(self._where, f"the body was closed {self._progress}") from error
        if not piece:
            raise TransientError(self._where, f"the body ended {self._progress}")
        return piece

    @property
    def _progress(self) -> str:
        return f"after {self._bytes - self._left:,} of {self._bytes:,} bytes"


def connection_error(where: str, error: Exception, settings: str = "") -> StoreError:
    """Return the error for a request without an answer, or for a body whose connection broke.

    `settings` names what else decides the address, such as "HF_ENDPOINT and ".
    """
    text = f"{error}"[:300] or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return StoreError(where, f"{text}: set SSL_CERT_FILE to the certificates to trust")
    if isinstance(error, ValueError):  # the URL or the proxy is not http:// or https://
        return StoreError(where, f"{text}: check {settings}the proxies of the environment")
    return TransientError(where, f"{type(error).__name__}: {text}")


def discard(response: BaseHTTPResponse) -> None:
    """Read a short answer, so that its connection can be reused; close the connection of a long one."""
    size = response.headers.get("Content-Length", "")
    if size.isdigit() and int(size) < 1 << 16:
        response.drain_conn()
        response.release_conn()
    else:
        response.close()


def urllib3_for(purpose: str, extra: str = "hub") -> Any:
    """Return urllib3; raise MissingExtraError, which says that `purpose` needs it, if it is not installed."""
    try:
        import urllib3
    except ImportError as error:
        raise MissingExtraError("urllib3", extra, purpose) from error
    return urllib3
