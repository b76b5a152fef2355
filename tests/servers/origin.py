"""A small HTTP server in a thread, to see what a proxy before it does. It remembers every request it got."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["Origin", "Seen", "content", "running_origin"]

_CHUNK_BYTES = 1000


def content(size: int) -> bytes:
    """`size` bytes in which every place can be told from its neighbours."""
    return (bytes(range(251)) * (size // 251 + 1))[:size]


@dataclass(frozen=True, slots=True)
class Seen:
    method: str
    path: str
    host: str | None
    body: bytes
    connection: int


@dataclass
class Origin:
    """`GET /12345` answers so many bytes, `/chunked/12345` in chunks, `/status/204` a status without a body.

    `PUT` takes any body, but `/refuse` answers 403 to its head.
    """

    address: str
    seen: list[Seen] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    origin: Origin

    def do_GET(self) -> None:
        kind, _, number = self.path.rpartition("/")
        self._note(b"")
        if kind == "/status":
            self.send_response_only(int(number))
            self.send_header("ETag", '"x"')
            self.end_headers()
            return
        body = content(int(number))
        self.send_response_only(200)
        if kind == "/chunked":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for start in range(0, len(body), _CHUNK_BYTES):
                piece = body[start : start + _CHUNK_BYTES]
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\nX-Trailer: 1\r\n\r\n")
            return
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815

    def do_PUT(self) -> None:
        self._note(self._body())
        self.send_response_only(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def handle_expect_100(self) -> bool:
        if self.path != "/refuse":
            return super().handle_expect_100()
        self._note(b"")
        self.send_response_only(403)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"no")
        return False

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _note(self, body: bytes) -> None:
        seen = Seen(self.command, self.path, self.headers["Host"], body, self.client_address[1])
        self.origin.seen.append(seen)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # faults break its connections; what the client saw is what counts


@contextmanager
def running_origin() -> Iterator[Origin]:
    handler = type("Handler", (_Handler,), {})
    with _Server(("127.0.0.1", 0), handler) as server:
        origin = Origin(f"127.0.0.1:{server.server_address[1]}")
        handler.origin = origin  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield origin
        finally:
            server.shutdown()
            thread.join(10)
