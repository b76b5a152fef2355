"""An S3 server inside the test process: moto, with the conditional writes that moto leaves out or races.

`s3_server()` is a context manager; tests make a fixture of it (one per module or session) and take a fresh
bucket from it for each test. It points the AWS environment of this process at itself. The server holds what
is put in memory; it checks no signatures. A test may put a WSGI function in front of it: `server.intercept`.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

__all__ = ["AWS_VARIABLES", "S3Server", "aws_environment", "s3_server"]

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
Intercept = Callable[[dict[str, Any], Callable[..., Any], App], Iterable[bytes]]
AWS_VARIABLES = (
    "AWS_CA_BUNDLE",
    "AWS_CONFIG_FILE",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_DEFAULT_PROFILE",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_PROFILE",
    "AWS_REGION",
    "AWS_REQUEST_CHECKSUM_CALCULATION",
    "AWS_RESPONSE_CHECKSUM_VALIDATION",
    "AWS_SESSION_TOKEN",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "HTTP_PROXY",
    "http_proxy",
)
_numbers = itertools.count()


@dataclass
class S3Server:
    """A running server."""

    endpoint_url: str
    intercept: Intercept | None = None
    requests: list[str] = field(default_factory=list)
    """Method and path of each request since the test cleared the list."""
    _client: Any = None

    def client(self) -> Any:
        """boto3's own client, to look from outside."""
        if self._client is None:
            import boto3

            keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing"}
            made = boto3.Session(**keys).client("s3", endpoint_url=self.endpoint_url, region_name="us-east-1")
            self._client = made
        return self._client

    def new_bucket(self) -> str:
        """The name of a bucket that is empty."""
        name = f"bucket-{os.getpid()}-{next(_numbers)}"
        self.client().create_bucket(Bucket=name)
        return name


def aws_environment(patch: pytest.MonkeyPatch, endpoint_url: str | None) -> None:
    """Credentials that any server without a check takes, and nothing else of this machine's AWS settings."""
    for name in AWS_VARIABLES:
        patch.delenv(name, raising=False)
    patch.setenv("AWS_ACCESS_KEY_ID", "testing")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        patch.setenv(name, str(Path(os.devnull)))
    patch.setenv("NO_PROXY", "127.0.0.1")
    if endpoint_url is not None:
        patch.setenv("AWS_ENDPOINT_URL", endpoint_url)


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """A server on a free port, the AWS environment pointed at it, both gone at the end."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"  # keeps connections

        def log(self, type: str, message: str, *arguments: Any) -> None:
            pass

    server = S3Server("")
    app = _ConditionalWrites(DomainDispatcherApplication(create_backend_app))

    def front(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        server.requests.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}")
        if server.intercept is not None:
            return server.intercept(environ, start_response, app)
        return app(environ, start_response)

    http = make_server("127.0.0.1", 0, front, threaded=True, request_handler=Quiet)
    http.daemon_threads = True  # type: ignore[attr-defined]
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    server.endpoint_url = f"http://127.0.0.1:{http.server_port}"
    with pytest.MonkeyPatch.context() as patch:
        aws_environment(patch, server.endpoint_url)
        try:
            yield server
        finally:
            http.shutdown()
            http.server_close()
            thread.join(10)


class _ConditionalWrites:
    """Writes one at a time, so that If-None-Match is atomic; adds it to CompleteMultipartUpload."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            return self._app(environ, start_response)
        with self._lock:
            if environ["REQUEST_METHOD"] == "POST" and environ.get("HTTP_IF_NONE_MATCH") == "*":
                refusal = self._refusal(environ, start_response)
                if refusal is not None:
                    return refusal
            return list(self._app(environ, start_response))

    def _refusal(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes] | None:
        answers: list[str] = []
        look = {name: value for name, value in environ.items() if name != "HTTP_IF_NONE_MATCH"}
        look.update(REQUEST_METHOD="HEAD", QUERY_STRING="", CONTENT_LENGTH="0")
        list(self._app(look, lambda status, headers, info=None: answers.append(status)))
        if not answers[0].startswith("200"):
            return None
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        body = b"<Error><Code>PreconditionFailed</Code><Message>It is there.</Message></Error>"
        start_response("412 Precondition Failed", [("Content-Length", str(len(body)))])
        return [body]
