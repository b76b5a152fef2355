"""The site over HTTP, for browsers on this machine.

Bound to 127.0.0.1. Answers GET only, and only requests that name this machine as the host, so that no other
site's page can read it by a host name that resolves to 127.0.0.1. Pages have no scripts, and their
Content-Security-Policy allows none: whatever a text holds, the browser runs and fetches nothing.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from urllib.parse import urlencode

from shardkit.errors import ShardkitError, naming_extras
from shardkit.tools.explore.explored import PageNotFoundError
from shardkit.tools.explore.site import FRONT, STYLE, Site

with naming_extras("`shardkit view`"):
    import uvicorn
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, Response
    from starlette.routing import Route

__all__ = ["HOST", "bind", "make_app", "page_address", "serve"]

HOST = "127.0.0.1"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def page_address(page: str, **params: object) -> str:
    """The address of a page on this server."""
    given = {name: str(value) for name, value in params.items() if value is not None}
    path = "/" if page == FRONT else f"/{page}"
    return f"{path}?{urlencode(given, errors='replace')}" if given else path


def make_app(site: Site) -> Starlette:
    """The site as an ASGI application."""

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
    return Starlette(routes=routes, middleware=[hosts])


def bind(port: int) -> socket.socket:
    """A socket that listens on this machine only; ShardkitError if the port is taken. 0: a free one."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((HOST, port))
        listening.listen()
    except OSError as error:
        listening.close()
        raise ShardkitError(f"port {port} cannot be used: {error.strerror}; give another --port") from error
    return listening


def serve(site: Site, listening: socket.socket) -> None:
    """Answer until interrupted."""
    config = uvicorn.Config(make_app(site), log_level="warning", access_log=False, lifespan="off")
    with suppress(KeyboardInterrupt):  # how a user ends it
        uvicorn.Server(config).run(sockets=[listening])
