"""Serves the site over HTTP, for browsers on this machine.

The server binds to 127.0.0.1 and answers only GET requests whose Host header is this machine, so that the
page of another site cannot read it through a host name that resolves to 127.0.0.1. Other users of the machine
can reach the port, so each request must have the token of the first address, or the cookie that the first
page sets. The cookie is HttpOnly and SameSite=Strict. Pages have no scripts, and their
Content-Security-Policy allows none, so the browser neither runs nor fetches anything that a text contains. A
connection is closed if a request is not complete within REQUEST_SECONDS.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from urllib.parse import urlencode

from shardkit.errors import ShardkitError, naming_extras
from shardkit.tools.explore.explored import PageNotFoundError
from shardkit.tools.explore.site import FRONT, STYLE, Site

with naming_extras("`shardkit view`"):
    import h11
    import uvicorn
    from starlette.applications import Starlette
    from starlette.datastructures import MutableHeaders
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, PlainTextResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import H11Protocol


HOST = "127.0.0.1"
TOKEN_PARAM = "token"
REQUEST_SECONDS = 10.0  # time limit for receiving a request; a local browser needs milliseconds
_REFUSED = "403: open the address that `shardkit view` has printed; it contains the token of this server\n"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def page_address(page: str, **params: object) -> str:
    """Return the address of a page on this server."""
    given = {name: str(value) for name, value in params.items() if value is not None}
    path = "/" if page == FRONT else f"/{page}"
    return f"{path}?{urlencode(given, errors='replace')}" if given else path


def first_address(listening: socket.socket, token: str) -> str:
    """Return the address that the user opens first; it contains the token."""
    host, port = listening.getsockname()
    return f"http://{host}:{port}/?{urlencode({TOKEN_PARAM: token})}"


def make_app(site: Site, token: str) -> Starlette:
    """Return the site as an ASGI application that requires `token`."""

    def answer(request: Request) -> Response:
        page = request.path_params.get("page", FRONT)
        try:
            return HTMLResponse(site.render(page, request.query_params, page_address), headers=_HEADERS)
        except ShardkitError as error:
            status = 404 if isinstance(error, PageNotFoundError) else 400
            return HTMLResponse(site.render_error(error, page_address), status, _HEADERS)

    def style(request: Request) -> Response:
        return Response(site.style(), media_type="text/css", headers=_HEADERS)

    routes = [Route("/", answer), Route(f"/{STYLE}", style), Route("/{page}", answer)]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"], www_redirect=False)
    return Starlette(routes=routes, middleware=[hosts, Middleware(_TokenCheck, token=token)])


class _TokenCheck:
    """Middleware that refuses requests without the token in the address or in this port's cookie."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        # The name contains the port: browsers share cookies between ports, so two servers on this machine
        # would overwrite each other's cookie.
        name = f"shardkit-view-{scope['server'][1]}"
        is_first = self._is_right(request.query_params.get(TOKEN_PARAM, ""))
        if not (is_first or self._is_right(request.cookies.get(name, ""))):
            await PlainTextResponse(_REFUSED, 403, _HEADERS)(scope, receive, send)
            return

        async def send_cookie(message: Message) -> None:
            if is_first and message["type"] == "http.response.start":
                cookie = f"{name}={self._token}; Path=/; HttpOnly; SameSite=Strict"
                MutableHeaders(scope=message).append("Set-Cookie", cookie)
            await send(message)

        await self._app(scope, receive, send_cookie)

    def _is_right(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(errors="replace"), self._token.encode())


class _BoundedRequests(H11Protocol):
    """Closes a connection if a request is not complete in time; uvicorn alone would wait forever."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Run the timeout while a request is awaited or incomplete; stop it when the request is complete."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_watch()
        elif self._late is None:
            self._late = self.loop.call_later(REQUEST_SECONDS, self.transport.close)

    def _stop_watch(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def bind(port: int) -> socket.socket:
    """Listen on a port (0: any free port) of this machine only; raises ShardkitError if it cannot be used."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((HOST, port))
        listening.listen()
    except OSError as error:
        listening.close()
        raise ShardkitError(f"port {port} cannot be used: {error.strerror}; give another --port") from error
    return listening


def make_server(site: Site, token: str) -> uvicorn.Server:
    """Return a server for the site; its method `run(sockets=[…])` serves until interrupted."""
    return uvicorn.Server(
        uvicorn.Config(
            make_app(site, token),
            http=_BoundedRequests,
            ws="none",
            log_level="warning",
            access_log=False,
            lifespan="off",
        )
    )
