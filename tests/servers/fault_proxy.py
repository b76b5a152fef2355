"""An HTTP/1.1 proxy that breaks what it is told to, to put between a client and an S3 server in tests.

    python tests/servers/fault_proxy.py --upstream HOST:PORT [--port PORT] [--seed SEED]

`FaultProxy` runs it in a process of its own, which ends when its standard input closes. Rules, their hits and
a log of requests are exchanged at `/__faults` of the same port (PUT a JSON list of rules, GET the report).
A request that no rule concerns is relayed as it is, Host header and framing untouched, so that signatures
stay valid. Each client connection has one connection upstream, which ends with it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

if __name__ == "__main__":  # as a program, its own folder is on the path, not the tests'
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from servers.faults import Fault, Rule, RuleBook
from servers.wire import BrokenOffError, EndedError, Headers, Pacer, Wire, parse_head, relay_body

__all__ = ["Fault", "FaultProxy", "Request", "Rule"]

CONTROL_PATH = "/__faults"
_CONNECT_SECONDS = 5.0
_CONTROL_SECONDS = 10.0
_BACKLOG = 1024


class Outlet:
    """The way of a response to the client, with the rule that the request met."""

    def __init__(self, client: Wire, rule: Rule | None) -> None:
        self._client, self._rule = client, rule
        self._fault = None if rule is None else rule.fault
        self._after = 0 if rule is None or rule.after_bytes is None else rule.after_bytes
        self._cut = rule is not None and rule.after_bytes is not None
        self._pacer = None
        if rule is not None and self._fault in ("throttle", "trickle"):
            self._pacer = Pacer(rule.bytes_per_second)
        self.sent = 0

    async def head(self, data: bytes) -> None:
        if self._fault == "lost_acknowledgement":
            return
        if self._fault == "hang" and not self._cut:
            await self._hang()
        await self._client.send(data)

    async def write(self, data: memoryview, is_body: bool) -> None:
        if self._fault == "lost_acknowledgement":
            return
        if self._fault is None or not is_body:
            await self._client.send(data)
        elif self._fault == "corrupt":
            self._corrupt(data)
            await self._client.send(data)
        elif self._fault == "throttle":
            await self._paced(data)
        elif self._fault in ("reset", "truncate", "hang", "trickle"):
            await self._write_across(data)
        else:
            await self._client.send(data)
        self.sent += len(data) if is_body else 0

    async def _write_across(self, data: memoryview) -> None:
        """Up to `after_bytes` as it is; what happens there; and then the rest."""
        before = max(0, min(len(data), self._after - self.sent))
        await self._client.send(data[:before])
        if before == len(data):
            return
        if self._fault == "trickle":
            await self._paced(data[before:], step_bytes=1)
            return
        if self._fault != "hang":
            self.sent += before
            raise BrokenOffError(reset=self._fault == "reset")
        if self._cut:
            await self._hang()
        await self._client.send(data[before:])

    async def _hang(self) -> None:
        assert self._rule is not None
        self._cut = False  # once
        await self._client.wait_closed(self._rule.hang_seconds)

    async def _paced(self, data: memoryview, step_bytes: int | None = None) -> None:
        assert self._pacer is not None
        step = step_bytes or self._pacer.step_bytes
        for start in range(0, len(data), step):
            piece = data[start : start + step]
            await self._client.send(piece)
            await self._pacer.wait(len(piece))

    def _corrupt(self, data: memoryview) -> None:
        assert self._rule is not None
        first = max(self._after, self.sent)
        for offset in range(first, min(self._after + self._rule.length, self.sent + len(data))):
            data[offset - self.sent] ^= 0xFF


class Relay:
    """One client connection: its requests in turn, over one connection upstream."""

    def __init__(self, client: Wire, upstream: tuple[str, int], book: RuleBook) -> None:
        self._client, self._address, self._book = client, upstream, book
        self._upstream: Wire | None = None

    async def run(self) -> None:
        reset = False
        try:
            while head := await self._client.read_until(b"\r\n\r\n"):
                if not await self._exchange(head):
                    break
        except BrokenOffError as broken:
            reset = broken.reset
        except EndedError:
            reset = True  # a server that breaks off does it with a reset more often than not
        finally:
            await self._client.close(reset=reset)
            if self._upstream is not None:
                await self._upstream.close()

    async def _exchange(self, head: bytes) -> bool:
        """One request and its response; whether the connection can serve another."""
        (method, target, *_), headers = parse_head(head)
        if target == CONTROL_PATH:
            return await self._control(method, headers)
        rule = self._book.pick(method, target, headers)
        entry = {"method": method, "target": target, "range": headers.get("range"), "time": time.time()}
        entry |= {"fault": None if rule is None else rule.fault, "status": None, "bytes": 0}
        self._book.log.append(entry)
        if rule is not None:
            await asyncio.sleep(rule.delay_seconds)
            if rule.fault == "refuse":
                raise BrokenOffError(reset=True)
            if rule.fault == "status":
                entry["status"] = rule.status
                return await self._answer_status(method, headers, rule)
        outlet = Outlet(self._client, rule)
        try:
            return await self._forward(head, headers, outlet, rule, entry)
        finally:
            entry["bytes"] = outlet.sent

    async def _forward(
        self, head: bytes, headers: Headers, outlet: Outlet, rule: Rule | None, entry: dict[str, Any]
    ) -> bool:
        upstream = await self._connected()
        await upstream.send(head)
        pump = asyncio.create_task(self._pump(upstream, headers, rule))
        answer = asyncio.create_task(self._relay_response(upstream, outlet, entry))
        try:
            await asyncio.wait({pump, answer}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
            reusable = await answer
            # An answer before the end of the request, as after "Expect: 100-continue", ends the connection.
            reusable = reusable and pump.done()
        finally:
            for task in (pump, answer):
                task.cancel()
            await asyncio.gather(pump, answer, return_exceptions=True)
        if rule is not None and rule.fault == "lost_acknowledgement":
            raise BrokenOffError(reset=True)
        return reusable

    async def _connected(self) -> Wire:
        if self._upstream is not None and self._upstream.is_stale():
            await self._upstream.close()
            self._upstream = None
        if self._upstream is None:
            sock = socket.socket()
            sock.setblocking(False)
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    await asyncio.get_running_loop().sock_connect(sock, self._address)
            except OSError as error:
                sock.close()
                raise EndedError from error
            self._upstream = Wire(sock)
        return self._upstream

    async def _pump(self, upstream: Wire, headers: Headers, rule: Rule | None) -> None:
        """The request's body; what a server that has stopped listening does not take is dropped."""
        pacer = Pacer(rule.bytes_per_second) if rule is not None and rule.fault == "throttle" else None
        deaf = False

        async def sink(data: memoryview, is_body: bool) -> None:
            nonlocal deaf
            if pacer is not None:
                await pacer.wait(len(data))
            if not deaf:
                try:
                    await upstream.send(data)
                except EndedError:
                    deaf = True

        await relay_body(self._client, headers, sink, until_end=False)

    async def _relay_response(self, upstream: Wire, outlet: Outlet, entry: dict[str, Any]) -> bool:
        """Interim responses and the final one; whether upstream keeps the connection."""
        while True:
            head = await upstream.read_until(b"\r\n\r\n")
            if not head:
                raise EndedError
            (version, status, *_), headers = parse_head(head)
            if not status.startswith("1"):
                break
            await self._client.send(head)
        await outlet.head(head)
        entry["status"] = int(status)
        empty = entry["method"] == "HEAD" or status in ("204", "304")
        framed = "content-length" in headers or "chunked" in headers.get("transfer-encoding", "").lower()
        if not empty:
            await relay_body(upstream, headers, outlet.write, until_end=True)
        closes = headers.get("connection", "").lower() == "close"
        return version == "HTTP/1.1" and (empty or framed) and not closes

    async def _answer_status(self, method: str, headers: Headers, rule: Rule) -> bool:
        """An error in S3's form."""
        waits = "100-continue" in headers.get("expect", "").lower()
        if not waits:

            async def drop(data: memoryview, is_body: bool) -> None:
                return None

            await relay_body(self._client, headers, drop, until_end=False)
        message = "by a rule of the fault proxy"
        text = f"<Error><Code>{rule.code}</Code><Message>{message}</Message></Error>"
        body = b"" if method == "HEAD" else f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode()
        await self._answer(rule.status, "application/xml", body, close=waits)
        return not waits

    async def _control(self, method: str, headers: Headers) -> bool:
        status, body = 200, b"{}"
        if method == "PUT":
            sent = bytearray()

            async def collect(data: memoryview, is_body: bool) -> None:
                sent.extend(data)

            await relay_body(self._client, headers, collect, until_end=False)
            try:
                self._book.replace([Rule(**rule) for rule in json.loads(sent)])
            except (TypeError, ValueError) as error:
                status, body = 400, json.dumps({"error": str(error)}).encode()
        else:
            body = self._book.report()
        await self._answer(status, "application/json", body, close=False)
        return True

    async def _answer(self, status: int, content_type: str, body: bytes, *, close: bool) -> None:
        reason = http.client.responses.get(status, "Status")
        head = (
            f"HTTP/1.1 {status} {reason}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        )
        head += "Connection: close\r\n\r\n" if close else "\r\n"
        await self._client.send(head.encode() + body)


async def serve(listener: socket.socket, upstream: tuple[str, int], seed: int) -> None:
    """Relays until cancelled."""
    loop = asyncio.get_running_loop()
    book = RuleBook(seed)
    tasks: set[asyncio.Task[None]] = set()
    while True:
        sock, _ = await loop.sock_accept(listener)
        task = asyncio.create_task(Relay(Wire(sock), upstream, book).run())
        tasks.add(task)
        task.add_done_callback(tasks.discard)


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the proxy saw it: `status` as answered (None: not), `bytes` of body sent to the client."""

    method: str
    target: str
    range: str | None
    fault: Fault | None
    status: int | None
    bytes: int
    time: float


class FaultProxy:
    """A proxy in a process of its own, as a context manager; `start` and `stop` do it by hand."""

    def __init__(self, upstream: str, *, seed: int = 0) -> None:
        """`upstream` is "host:port", or an http:// URL of it."""
        self._upstream, self._seed = upstream.removeprefix("http://"), seed
        self._process: subprocess.Popen[str] | None = None
        self.port = 0

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def set_rules(self, *rules: Rule) -> None:
        """In place of the ones before; hits and log begin anew. Responses under way keep their rule."""
        self._control("PUT", json.dumps([asdict(rule) for rule in rules]))

    def hits(self) -> list[int]:
        """How often each rule was met."""
        return [int(hits) for hits in self._control("GET")["hits"]]

    def log(self) -> list[Request]:
        """The requests since the rules were set."""
        return [Request(**entry) for entry in self._control("GET")["log"]]

    def start(self) -> None:
        """Listen; after a `stop`, at the same port as before."""
        self._process = subprocess.Popen(
            [
                sys.executable, __file__, "--upstream", self._upstream, "--seed", str(self._seed),
                "--port", str(self.port), "--leash",
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        ready = wait([self._process.stdout.fileno()], _CONTROL_SECONDS)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            self.stop()
            raise RuntimeError("the fault proxy did not start; its messages are on standard error")
        self.port = int(line.rpartition(":")[2])

    def stop(self) -> None:
        """End it, and every connection through it; may be called again."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()

    def _control(self, method: str, body: str | None = None) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_CONTROL_SECONDS)
        with contextlib.closing(connection):
            connection.request(method, CONTROL_PATH, body)
            response = connection.getresponse()
            answer: dict[str, Any] = json.loads(response.read())
        if response.status != 200:
            raise ValueError(answer["error"])
        return answer

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description="An HTTP proxy that injects faults by rules.")
    parser.add_argument("--upstream", required=True, help="HOST:PORT of the server behind it")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("--seed", type=int, default=0, help="of the rules' chance; default: %(default)s")
    parser.add_argument("--leash", action="store_true", help="end when standard input does")
    options = parser.parse_args()
    host, _, port = options.upstream.rpartition(":")
    listener = socket.create_server(("127.0.0.1", options.port), backlog=_BACKLOG)
    listener.setblocking(False)
    sys.stdout.write(f"http://127.0.0.1:{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    if options.leash:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(listener, (host, int(port)), options.seed))


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
