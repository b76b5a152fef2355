"""A web server in a thread that serves files from memory as good and as badly as servers do.

    with web_server({"a/b.txt": b"..."}) as web:
        web.without.add("ranges")        # from now on; also "head", "length", "etag", "modified"
        web.faults["/a/b.txt"] = [Fault(status=503, headers={"Retry-After": "0"}), Fault(cut_at=100)]

A fault is the answer to one request of that path, the first one first; `repeat` keeps it for all.
"""

from __future__ import annotations

import hashlib
import socket
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

__all__ = ["Fault", "WebServer", "web_server"]


@dataclass(frozen=True, slots=True)
class Fault:
    """A status in place of the file, or the file's answer that breaks off after `cut_at` bytes."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    cut_at: int | None = None
    resets: bool = False  # break off by a reset, not by a plain end
    method: str = "GET"
    repeat: bool = False


@dataclass
class WebServer:
    files: dict[str, bytes]
    port: int = 0
    without: set[str] = field(default_factory=set)
    weak: bool = False  # ETags are weak
    packs: bool = False  # compresses everything in transit, in chunks
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    delay_seconds: float = 0.0  # before each answer
    busiest: int = 0  # most requests in progress at a time
    in_progress: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            waiting = self.faults.get(path, [])
            if not waiting or waiting[0].method not in ("*", method):
                return None
            return waiting[0] if waiting[0].repeat else waiting.pop(0)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    web: WebServer

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        web = self.web
        with web.lock:
            web.requests.append(f"{self.command} {self.path}")
            web.ranges.append(self.headers.get("Range", ""))
            web.in_progress += 1
            web.busiest = max(web.busiest, web.in_progress)
        try:
            if web.delay_seconds:
                threading.Event().wait(web.delay_seconds)
            self._send()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            with web.lock:
                web.in_progress -= 1

    def _send(self) -> None:
        web, path = self.web, self.path.partition("?")[0]
        fault = web.fault(self.command, path)
        data = web.files.get(unquote(path).lstrip("/"))
        if fault is not None and fault.status:
            self._status(fault.status, fault.headers)
            return
        if data is None:
            self._status(404, {})
            return
        if self.command == "HEAD" and "head" in web.without:
            self._status(405, {})
            return
        headers = {}
        if "etag" not in web.without:
            headers["ETag"] = f'{"W/" if web.weak else ""}"{hashlib.md5(data).hexdigest()}"'
        if "modified" not in web.without:
            headers["Last-Modified"] = "Mon, 02 Mar 2026 10:00:00 GMT"
        if web.packs:
            self._packed(data, headers)
            return
        start, stop, status = 0, len(data), 200
        wanted = self.headers.get("Range", "")
        if wanted and "ranges" not in web.without:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(len(data), int(last or len(data)) + 1)
            if start >= len(data):
                self._status(416, {"Content-Range": f"bytes */{len(data)}"})
                return
            status = 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        if "length" in web.without:
            headers["Connection"] = "close"
            self.close_connection = True
        else:
            headers["Content-Length"] = str(stop - start)
        self._head(status, headers)
        if self.command == "GET":
            self._body(data[start:stop], fault)

    def _body(self, data: bytes, fault: Fault | None) -> None:
        if fault is None or fault.cut_at is None:
            self.wfile.write(data)
            return
        self.wfile.write(data[: fault.cut_at])
        self.wfile.flush()
        if fault.resets:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def _packed(self, data: bytes, headers: dict[str, str]) -> None:
        packed = zlib.compress(data, wbits=31)
        self._head(200, headers | {"Content-Encoding": "gzip", "Transfer-Encoding": "chunked"})
        if self.command == "GET":
            self.wfile.write(f"{len(packed):x}\r\n".encode() + packed + b"\r\n0\r\n\r\n")

    def _status(self, status: int, headers: Mapping[str, str]) -> None:
        body = b"" if self.command == "HEAD" else b"<html>not a file</html>"
        self._head(status, {"Content-Length": str(len(body)), **headers})
        self.wfile.write(body)

    def _head(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients that hang up are part of the tests."""


@contextmanager
def web_server(files: Mapping[str, bytes]) -> Iterator[WebServer]:
    web = WebServer(dict(files))
    handler = type("Handler", (_Handler,), {"web": web})
    with _Server(("127.0.0.1", 0), handler) as server:
        web.port = server.server_port
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield web
        finally:
            server.shutdown()
