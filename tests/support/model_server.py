"""A real HTTP server that answers chat completions as vLLM does, in its own process, and fails on request.

    with ModelServer(faults=0.3) as server:
        recipe = {..., "ask": {"url": server.url, ...}}
        server.counts()

The answer to a prompt depends on the prompt alone: see `answer_to`. Each request meets a fault with the
probability `faults`, drawn from its key and how often it came: 429 with Retry-After, 500, a reset connection,
half a body, invalid JSON, a page of HTML, a body of the wrong shape, a pause. Without a fault, bodies come
with their length, in chunks, or end with the connection.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar, Self

FAULTS = ("429", "500", "503", "reset", "half", "json", "html", "shape", "slow")


class ModelServer:
    """The process of a server, as a context manager.

    `faults`: share of requests that meet one; `seconds`: how long an answer takes; `status`: what every
    request gets instead of an answer, with a `header`, and with its own key in the message.
    """

    def __init__(
        self,
        *,
        faults: float = 0.0,
        seconds: float = 0.0,
        status: int = 200,
        kinds: tuple[str, ...] = FAULTS,
        plain: bool = False,
        header: str = "location: http://other.test/v1",
    ) -> None:
        options: dict[str, Any] = {
            "faults": faults,
            "seconds": seconds,
            "status": status,
            "kinds": kinds,
            "plain": plain,
        }
        options |= {"header": header}
        self._command = [sys.executable, __file__, json.dumps(options)]

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}/v1"
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def counts(self) -> dict[str, Any]:
        """Return what the server saw since the last call: `requests` and whole `answers`, by digest of the
        body, the `faults` by kind, and the `keys` (Authorization) that came.
        """
        with urllib.request.urlopen(f"{self.url}/counts", timeout=30) as reply:
            found: dict[str, Any] = json.loads(reply.read())
        return found


def answer_to(prompt: str) -> str:
    """A justification with a score of 0 to 5; REFUSE, EMPTY, NOSCORE and LONG in a prompt steer it."""
    if "EMPTY" in prompt or "REFUSE" in prompt:
        return ""
    if "NOSCORE" in prompt:
        return "I cannot say."
    if "Rewrite" in prompt:
        return f"A summary of {len(prompt)} characters: {prompt[-40:].upper()}"
    return f"It has {len(prompt)} characters. Educational score: {score_of(prompt)}"


def score_of(prompt: str) -> int:
    """The score that the server gives a prompt."""
    return hashlib.blake2b(prompt.encode(), digest_size=1).digest()[0] % 6


def completion(body: dict[str, Any]) -> bytes:
    """A chat completion for a request."""
    prompt = body["messages"][-1]["content"]
    finish = "length" if "LONG" in prompt else "stop"
    refusal = "I will not." if "REFUSE" in prompt else None
    message = {"role": "assistant", "content": answer_to(prompt), "refusal": refusal}
    usage = {
        "prompt_tokens": len(prompt) // 4,
        "completion_tokens": 12,
        "total_tokens": len(prompt) // 4 + 12,
    }
    return json.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": finish}],
            "usage": usage,
        }
    ).encode()


class _Server(asyncio.Protocol):
    options: ClassVar[dict[str, Any]]
    requests: ClassVar[Counter[str]] = Counter()
    answers: ClassVar[Counter[str]] = Counter()
    faults: ClassVar[Counter[str]] = Counter()
    seen: ClassVar[Counter[str]] = Counter()
    keys: ClassVar[set[str]] = set()

    def connection_made(self, transport: Any) -> None:
        self.transport, self.data = transport, b""

    def data_received(self, data: bytes) -> None:
        self.data += data
        while (end := self.data.find(b"\r\n\r\n")) >= 0:
            lines = self.data[:end].decode("latin-1").split("\r\n")
            headers = {
                name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines[1:])
            }
            size = int(headers.get("content-length", 0))
            if len(self.data) < end + 4 + size:
                return
            body, self.data = self.data[end + 4 : end + 4 + size], self.data[end + 4 + size :]
            if lines[0].startswith("GET /v1/counts"):
                self.tell()
            elif self.options["plain"]:
                self.write(200, completion(json.loads(body)))
            else:
                self.keys.add(headers.get("authorization", ""))
                self.answer(lines[0], headers, body)

    def tell(self) -> None:
        names = ("requests", "answers", "faults")
        found: dict[str, Any] = {name: dict(getattr(self, name)) for name in names}
        self.write(200, json.dumps(found | {"keys": sorted(self.keys)}).encode())
        for name in names:
            getattr(self, name).clear()
        self.keys.clear()

    def answer(self, line: str, headers: dict[str, str], body: bytes) -> None:
        key = hashlib.sha256(b"1\0" + body).hexdigest()[:32]
        self.requests[key] += 1
        self.seen[key] += 1
        draw = random.Random(f"{key} {self.seen[key]}")
        options = self.options
        if not line.startswith("POST /v1/chat/completions "):
            self.write(404, b"no such path")
        elif options["status"] != 200:
            self.faults[str(options["status"])] += 1
            message = f"no, {headers.get('authorization')}"
            told = json.dumps({"error": {"message": message}}).encode()
            self.write(options["status"], told, f"{options['header']}\r\n")
        elif draw.random() < options["faults"]:
            kind = draw.choice(options["kinds"])
            self.faults[kind] += 1
            self.fail(kind, key, body)
        elif options["seconds"]:
            asyncio.get_running_loop().call_later(options["seconds"], self.give, key, body)
        else:
            self.give(key, body)

    def fail(self, kind: str, key: str, body: bytes) -> None:
        whole = completion(json.loads(body))
        if kind == "429":
            self.write(429, b'{"error": {"message": "slow down"}}', "retry-after: 0.02\r\n")
        elif kind in ("500", "503"):
            self.write(int(kind), b"<html>oops</html>")
        elif kind == "reset":
            self.transport.abort()
        elif kind == "half":
            head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(whole)}\r\n\r\n".encode()
            self.transport.write(head + whole[: len(whole) // 2])
            self.transport.close()
        elif kind == "json":
            self.write(200, whole[:-3])
        elif kind == "html":
            self.write(200, b"<html>Log in</html>", "content-type: text/html\r\n")
        elif kind == "shape":
            self.write(200, b'{"choices": []}')
        else:
            asyncio.get_running_loop().call_later(0.3, self.give, key, body)

    def give(self, key: str, body: bytes) -> None:
        if self.transport.is_closing():
            return
        self.answers[key] += 1
        whole = completion(json.loads(body))
        kind = int(key[:2], 16) % 4
        if kind == 0:  # in chunks
            pieces = (whole[:50], whole[50:], b"")
            chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
            self.transport.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks)
        elif kind == 1:  # HTTP/1.0: the body ends with the connection
            self.transport.write(b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n" + whole)
            self.transport.close()
        else:
            self.write(200, whole)

    def write(self, status: int, body: bytes, more: str = "") -> None:
        head = f"HTTP/1.1 {status} X\r\n{more}content-length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)


async def _serve(options: dict[str, Any]) -> None:
    _Server.options = options
    server = await asyncio.get_running_loop().create_server(_Server, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)  # noqa: T201
    await server.serve_forever()


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).resolve().parent))
    asyncio.run(_serve(json.loads(sys.argv[1])))
