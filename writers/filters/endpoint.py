"""A client of an OpenAI-compatible endpoint: sends chat completions, several at a time, with retries.

Each of `concurrency` workers has one connection, which it keeps alive, and one request in flight. httptools
parses HTTP/1.1; asyncio does the rest, so a request costs tens of microseconds of CPU. Redirects are not
followed, and proxies are not used, so the key goes only to the host of `url`.

A request is sent again, at most `retries` times, if the connection breaks, no whole answer arrives within
`timeout_seconds`, the answer is not JSON of a completion, or the status is 408, 409, 425, 429 or 5xx. The
waits grow exponentially with jitter, or are as long as Retry-After says, up to five minutes. Other statuses
fail at once: 401, 403, 404 and redirects stop the build, others (such as 400) are failures of a document.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from shardkit.errors import MissingExtraError
from shardkit.writers.execution.resources import UnavailableError
from shardkit.writers.filters.answers import Answer, Answers, Failure, Meter

if TYPE_CHECKING:
    from types import ModuleType

_AGAIN = frozenset({408, 409, 425, 429})
_OF_THE_BUILD = frozenset({401, 403, 404, 405, 407})
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.5, 60.0
_LONGEST_RETRY_AFTER_SECONDS = 300.0
_SYNC_SECONDS = 1.0
_ELSEWHERE_SECONDS = 0.05  # between looks for an answer that another process waits for
_MOST_BYTES = 64 << 20  # of a response
_IN_A_ROW = 50  # failures of documents without one answer in between, after which the build stops
_SHOWN = 300  # characters of a response in a message


class EndpointError(UnavailableError):
    """The endpoint cannot be used as the recipe says, whatever the document."""


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """The place of requests, and how often they are tried. `stops`: no request begins after a failure."""

    url: str
    concurrency: int
    timeout_seconds: float
    retries: int
    stops: bool = False


class _BrokenReplyError(Exception):
    """A reply ended early, is too long or is not HTTP."""


class _ClosedError(_BrokenReplyError):
    """A connection that had been used before was closed before a byte of the reply."""


@dataclass(slots=True)
class _Reply:
    status: int
    headers: dict[bytes, bytes]
    body: bytes


class _Connection(asyncio.Protocol):
    """One HTTP/1.1 connection with at most one request in flight; httptools calls the `on_` methods."""

    def __init__(self, parser: ModuleType) -> None:
        self._httptools = parser
        self._parser: Any = None
        self._transport: asyncio.Transport | None = None
        self._reply: asyncio.Future[_Reply] | None = None
        self._headers: dict[bytes, bytes] = {}
        self._pieces: list[bytes] = []
        self._size = 0
        self._begun = self._whole = False
        self.used = 0

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def send(self, request: bytes, seconds: float) -> _Reply:
        """Send a request and return the reply to it. Raises TimeoutError if it is not whole in time."""
        assert self._transport is not None
        self._parser = self._httptools.HttpResponseParser(self)
        self._headers, self._pieces, self._size, self._begun, self._whole = {}, [], 0, False, False
        loop = asyncio.get_running_loop()
        self._reply = loop.create_future()
        timer = loop.call_later(seconds, self._fail, TimeoutError())  # costs half of asyncio.timeout
        self._transport.write(request)
        try:
            reply = await self._reply
        finally:
            timer.cancel()
        self.used += 1
        return reply

    def close(self) -> None:
        """Close the connection; what is in flight on it is lost."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._reply is None or self._reply.done():
            self.close()  # bytes that nobody asked for
            return
        self._begun = True
        try:
            self._parser.feed_data(data)
        except self._httptools.HttpParserError as error:
            self._fail(_BrokenReplyError(f"the reply is not HTTP: {error}"))
        if self._size > _MOST_BYTES:
            self._fail(_BrokenReplyError(f"the reply has more than {_MOST_BYTES:,} bytes"))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._size += len(piece)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # 100 Continue, 103 Early Hints: the reply follows
            self._headers, self._pieces = {}, []
            return
        if not self._parser.should_keep_alive():
            self.close()
        self._give(status)

    def _give(self, status: int) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(_Reply(status, self._headers, b"".join(self._pieces)))

    def connection_lost(self, error: Exception | None) -> None:
        if self._reply is None or self._reply.done():
            return
        framed = self._headers.keys() & {b"content-length", b"transfer-encoding"}
        if error is None and self._begun and self._headers and not framed:
            self._give(self._parser.get_status_code())  # HTTP/1.0: the body ends with the connection
        elif self.used and not self._begun:
            self._fail(_ClosedError("the connection was closed"))
        else:
            self._fail(_BrokenReplyError(f"the connection broke: {error or 'closed early'}"))

    def _fail(self, error: Exception) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error)
        self.close()


class Lane:
    """The connection that one worker uses, if it has one."""

    def __init__(self) -> None:
        self.connection: _Connection | None = None

    def close(self) -> None:
        """Close the connection; what is in flight on it is lost."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None


class Endpoint:
    """Sends requests to one endpoint. `counts` has requests, failures and so on since it was made."""

    def __init__(
        self, settings: EndpointSettings, key: str | None, keep: Callable[[bytes, Answer, str], None]
    ) -> None:
        """`keep(request key, answer, model)` makes an answer durable; it is called before anything else."""
        try:
            import httptools
        except ModuleNotFoundError:
            raise MissingExtraError("httptools", "ask", "the filter ask") from None
        self._httptools, self.settings, self.keep = httptools, settings, keep
        self._secret = key
        parts = urlsplit(settings.url)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        assert parts.hostname is not None
        self._address = parts.hostname, parts.port or (443 if self._tls else 80)
        authorization = "" if key is None else f"authorization: Bearer {key}\r\n"
        path = f"{parts.path.rstrip('/')}/chat/completions"
        self._head = (
            f"POST {path} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
            f"accept: application/json\r\n{authorization}content-length: "
        ).encode()
        self.counts: Counter[str] = Counter()
        self._failed_in_a_row = 0

    def ask(
        self, requests: Mapping[bytes, bytes], answers: Answers, meter: Meter | None
    ) -> dict[bytes, Answer | Failure]:
        """Send requests (bodies by key) and return their answers, or why there is none.

        Raises BudgetSpentError or EndpointError once the requests in flight have ended.
        """
        found: dict[bytes, Answer | Failure] = _run_async(_Asking(self, requests, answers, meter).run)
        return found

    async def complete(self, lane: Lane, body: bytes, meter: Meter | None) -> tuple[Answer | Failure, str]:
        """Send a request until it has an answer; return that or a failure, and the server's model."""
        estimate, problem = 0 if meter is None else _tokens(body), ""
        for attempt in range(self.settings.retries + 1):
            if meter is not None:
                await _reserve(meter, estimate)
            self.counts["requests"] += 1
            wait, refund = 0.0, False
            try:
                reply = await self._exchange(lane, body)
                if reply.status == 200:
                    return self._received(reply, meter, estimate)
                problem, refund = self._problem(reply), True
                if not (reply.status in _AGAIN or reply.status >= 500):
                    self._check_status(reply, problem)
                    self.counts["failed_requests"] += 1
                    break
                wait = _retry_after(reply.headers.get(b"retry-after"), f"{self.settings.url}: {problem}")
            except TimeoutError:
                problem = f"no answer in {self.settings.timeout_seconds:g} s"
                lane.close()
            except _ConnectError as error:
                problem, refund = str(error), True
            except (OSError, _BrokenReplyError) as error:
                problem = str(error) or type(error).__name__
                lane.close()
            finally:
                if refund and meter is not None:
                    meter.settle(-1, -estimate)
            self.counts["failed_requests"] += 1
            if attempt < self.settings.retries:
                backoff = min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2**attempt)
                jitter = random.uniform(0.0, 0.1 * wait)
                await asyncio.sleep(max(wait, backoff * random.uniform(0.5, 1.0)) + jitter)
            else:
                problem = f"{problem} (after {attempt + 1} attempts)"
        self.counts["failures"] += 1
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= _IN_A_ROW:
            raise EndpointError(
                f"ask: {self.settings.url}: {_IN_A_ROW} requests failed in a row; the last: {problem}"
            )
        return Failure(problem), ""

    def _received(self, reply: _Reply, meter: Meter | None, estimate: int) -> tuple[Answer, str]:
        answer, model = parse_completion(reply.body)
        if meter is not None:
            meter.settle(0, answer.tokens_in + answer.tokens_out - estimate)
        self.counts["tokens_in"] += answer.tokens_in
        self.counts["tokens_out"] += answer.tokens_out
        self._failed_in_a_row = 0
        return answer, model

    async def _exchange(self, lane: Lane, body: bytes) -> _Reply:
        request = b"%s%d\r\n\r\n%s" % (self._head, len(body), body)
        if lane.connection is not None and lane.connection.is_open:
            with suppress(_ClosedError):  # the server closed an idle connection: use a new one
                return await lane.connection.send(request, self.settings.timeout_seconds)
        lane.close()
        async with asyncio.timeout(self.settings.timeout_seconds):
            lane.connection = await self._connect()
        return await lane.connection.send(request, self.settings.timeout_seconds)

    async def _connect(self) -> _Connection:
        host, port = self._address
        tls: dict[str, Any] = {} if self._tls is None else {"ssl": self._tls, "server_hostname": host}
        try:
            _, made = await asyncio.get_running_loop().create_connection(
                lambda: _Connection(self._httptools), host, port, **tls
            )
        except OSError as error:  # ssl.SSLError is one
            raise _ConnectError(f"cannot connect to {host}:{port}: {error}") from None
        return made

    def _problem(self, reply: _Reply) -> str:
        """Describe a reply that is not an answer, without the key, should the server repeat it."""
        if reply.status in (401, 403):
            return f"status {reply.status}"
        shown = reply.body[: 4 * _SHOWN].decode(errors="replace")
        if self._secret:
            shown = shown.replace(self._secret, "***")
        shown = " ".join(shown.split())[:_SHOWN]
        return f"status {reply.status}{': ' if shown else ''}{shown}"

    def _check_status(self, reply: _Reply, problem: str) -> None:
        """Raise EndpointError for a status that every document would get."""
        where = f"ask: {self.settings.url}: {problem}"
        if reply.status in (401, 403):
            raise EndpointError(
                f"{where}: the key is missing, wrong or not for this model; see `api_key_env`"
            )
        if 300 <= reply.status < 400:
            raise EndpointError(f"{where}: redirects are not followed; set `url` to where it leads")
        if reply.status in _OF_THE_BUILD:
            raise EndpointError(f"{where}; check `url`, to which /chat/completions is added, and `model`")


class _ConnectError(Exception):
    """No connection could be made: nothing was sent."""


class _Asking:
    """Sends some requests by several workers."""

    def __init__(
        self, endpoint: Endpoint, requests: Mapping[bytes, bytes], answers: Answers, meter: Meter | None
    ) -> None:
        self._endpoint, self._answers, self._meter = endpoint, answers, meter
        self._requests = requests
        self._waiting = deque(requests)
        self._elsewhere: deque[bytes] = deque()  # requests that other processes have in flight
        self._found: dict[bytes, Answer | Failure] = {}
        self._error: UnavailableError | None = None
        self._is_over = False
        self._synced = time.monotonic()
        settings = endpoint.settings
        # After this, a request that another process claims is sent all the same: it may be stopped.
        self._patience = self._synced + 60.0 + 2 * (settings.retries + 1) * settings.timeout_seconds

    async def run(self) -> dict[bytes, Answer | Failure]:
        """Return an answer or a failure for each request; for some only, if one failed and that `stops`."""
        workers = min(self._endpoint.settings.concurrency, len(self._requests))
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(self._work())
        self._answers.sync()
        if self._error is not None:
            raise self._error
        return self._found

    async def _work(self) -> None:
        lane = Lane()
        try:
            while not self._is_over and (self._waiting or self._elsewhere):
                await self._next(lane)
        except UnavailableError as error:  # let the other workers receive what is paid for
            self._error, self._is_over = self._error or error, True
        finally:
            lane.close()

    async def _next(self, lane: Lane) -> None:
        """Find the answer to the next request, unless another process has it in flight."""
        late = False
        if self._waiting:
            key = self._waiting.popleft()
        else:
            key, late = self._elsewhere.popleft(), time.monotonic() > self._patience
            await asyncio.sleep(_ELSEWHERE_SECONDS)
        is_ours = self._answers.claim(key)
        if not (is_ours or late):
            self._elsewhere.append(key)
            return
        try:
            await self._ask(lane, key)
        finally:
            if is_ours:
                self._answers.release(key)

    async def _ask(self, lane: Lane, key: bytes) -> None:
        self._answers.refresh()
        if (kept := self._answers.find(key)) is not None:
            self._found[key] = kept
            return
        found, model = await self._endpoint.complete(lane, self._requests[key], self._meter)
        self._found[key] = found
        if isinstance(found, Failure):
            self._is_over |= self._endpoint.settings.stops
            return
        self._endpoint.keep(key, found, model)
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            self._synced = time.monotonic()
            await asyncio.get_running_loop().run_in_executor(None, self._answers.sync)


def parse_completion(body: bytes) -> tuple[Answer, str]:
    """Return the answer in the body of a completion, and the model that the server names.

    Raises _BrokenReplyError if the body is not a completion.
    """
    import orjson

    try:
        made = orjson.loads(body)
        choice, usage = made["choices"][0], made.get("usage") or {}
        message = choice["message"]
        text, refusal = message.get("content"), message.get("refusal")
        if not isinstance(text, str | None):
            raise TypeError("content is not text")
        finish = str(choice.get("finish_reason") or "stop")
        tokens = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
        raise _BrokenReplyError(
            f"the reply is not a chat completion ({type(error).__name__}: {error})"
        ) from None
    refused = bool(refusal) or finish == "content_filter"
    return Answer(text or "", finish, refused, *tokens), str(made.get("model", ""))


def _retry_after(value: bytes | None, problem: str) -> float:
    """Return the seconds that a Retry-After header asks for; raise EndpointError if they are too many."""
    if value is None:
        return 0.0
    text = value.decode("latin-1").strip()
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return 0.0
    if seconds > _LONGEST_RETRY_AFTER_SECONDS:
        raise EndpointError(
            f"ask: {problem}: the server asks to wait {seconds:,.0f} s; all answers are kept: run the same "
            "command again after that"
        )
    return max(0.0, seconds) if seconds == seconds else 0.0


async def _reserve(meter: Meter, tokens: int) -> None:
    """Wait until the meter has room for a request."""
    while wait := meter.reserve(tokens):
        await asyncio.sleep(min(wait, 5.0))


def _tokens(body: bytes) -> int:
    """Estimate the tokens of a request and its answer: four bytes a token, and `max_tokens`."""
    import orjson

    asked = orjson.loads(body)
    return len(body) // 4 + int(asked.get("max_tokens") or asked.get("max_completion_tokens") or 0)


def _run_async(run: Callable[[], Any]) -> Any:
    """Run a coroutine to its end, in a thread of its own if this one has a running event loop (notebooks)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(run())
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(run())).result()
