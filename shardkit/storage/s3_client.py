"""The botocore client behind an S3 store: made when it is first needed, once per process, with no retries.

After a fork the child makes its own. Credentials are botocore's business (environment, files, processes,
roles); when a server refuses them, they are looked up afresh, and the request is made once more if they have
changed: a run outlives the session credentials that it was started with, if something renews them.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from shardkit.errors import MissingExtraError
from shardkit.storage.errors import StoreError
from shardkit.storage.options import StorageOptions
from shardkit.storage.s3_errors import Purpose, may_be_stale_credentials, request_errors, translated

__all__ = ["S3Client"]

# Looking credentials up can mean a process or a request each; refused requests may come in hundreds.
RENEWAL_SECONDS = 3.0
_DEFAULT_REGION = "us-east-1"  # what S3-compatible servers take requests to be signed for


class S3Client:
    """Makes requests; pickles as its options."""

    def __init__(self, url: str, options: StorageOptions) -> None:
        self._url = url
        self._options = options
        self._connection = _Connection(url, options)

    def request(
        self, operation: str, where: str, purpose: Purpose = "read", **parameters: Any
    ) -> dict[str, Any]:
        """What `operation` (a method of botocore's client) answers; StoreErrors that name `where`."""
        connection = self._current()
        try:
            client = connection.client()
            try:
                answer: dict[str, Any] = getattr(client, operation)(**parameters)
            except request_errors() as error:
                if not may_be_stale_credentials(error) or not connection.renew(client):
                    raise
                answer = getattr(connection.client(), operation)(**parameters)
        except request_errors() as error:
            raise translated(where, error, purpose) from error
        return answer

    def close(self) -> None:
        """Close idle connections."""
        self._current().close()

    def _current(self) -> _Connection:
        if self._connection.process != os.getpid():
            # Two threads of a child may both do this; the later one's stays, the other's serves one request.
            self._connection = _Connection(self._url, self._options)
        return self._connection

    def __getstate__(self) -> tuple[str, StorageOptions]:
        return self._url, self._options

    def __setstate__(self, state: tuple[str, StorageOptions]) -> None:
        self.__init__(*state)  # type: ignore[misc]


class _Connection:
    """One process's client."""

    def __init__(self, url: str, options: StorageOptions) -> None:
        self.process = os.getpid()
        self._url = url
        self._options = options
        self._lock = threading.Lock()
        self._client: Any = None
        self._credentials: Any = None
        self._looked_up: float | None = None

    def client(self) -> Any:
        if self._client is None:
            with self._lock:
                if self._client is None:
                    session = _new_session(self._url, self._options)
                    self._credentials = _credentials(session)
                    self._client = _new_client(self._url, self._options, session)
        return self._client

    def renew(self, refused: Any) -> bool:
        """Whether there is now a client with other credentials than those of the `refused` client."""
        with self._lock:
            if self._client is not refused:
                return True  # another thread was quicker
            now = time.monotonic()
            if self._looked_up is not None and now - self._looked_up < RENEWAL_SECONDS:
                return False
            self._looked_up = now
            session = _new_session(self._url, self._options)
            credentials = _credentials(session)
            if credentials == self._credentials:
                return False
            self._client, self._credentials = _new_client(self._url, self._options, session), credentials
            return True

    def close(self) -> None:
        with self._lock:
            if self._client is not None:
                self._client.close()


def _new_session(url: str, options: StorageOptions) -> Any:
    """A session that has read nothing yet."""
    try:
        from botocore.session import Session
    except ImportError as error:
        raise MissingExtraError("boto3", "s3", url) from error
    session = Session(profile=options.profile)
    session.register_component("data_loader", _loader())
    return session


@functools.cache
def _loader() -> Any:
    """Reads the description of S3, once per process: that is most of the work of making a client."""
    from botocore.loaders import create_loader

    return create_loader(os.environ.get("AWS_DATA_PATH"))


def _credentials(session: Any) -> Any:
    """What can be compared of the credentials that the session finds."""
    from botocore.exceptions import NoCredentialsError

    found = session.get_credentials()
    if found is None:
        raise NoCredentialsError
    return found.get_frozen_credentials()


def _new_client(url: str, options: StorageOptions, session: Any) -> Any:
    from botocore.config import Config

    config: dict[str, Any] = {
        "connect_timeout": options.connect_timeout_seconds,
        "read_timeout": options.read_timeout_seconds,
        "max_pool_connections": options.connections,
        "retries": {"total_max_attempts": 1, "mode": "standard"},
    }
    if options.path_style is not None:
        config["s3"] = {"addressing_style": "path" if options.path_style else "virtual"}
    if options.checksums is not None:
        config["request_checksum_calculation"] = options.checksums
        config["response_checksum_validation"] = options.checksums

    def client(default_region: str | None = None, **defaults: Any) -> Any:
        try:
            made = session.create_client(
                "s3",
                endpoint_url=options.endpoint_url,
                region_name=options.region or session.get_config_variable("region") or default_region,
                config=Config(**config, **defaults),
            )
        except ValueError as error:  # an endpoint that is no URL
            raise StoreError(url, f"{error}; check --endpoint-url and AWS_ENDPOINT_URL") from error
        for operation in ("PutObject", "UploadPart"):
            made.meta.events.register(f"before-sign.s3.{operation}", _sign_md5_alone)
        return made

    if options.endpoint_url is None:
        made = client()
        if _is_aws(made.meta.endpoint_url):
            return made
    return client(_DEFAULT_REGION, **_for_compatible_servers(options, session.get_scoped_config()))


def _sign_md5_alone(request: Any, **_: Any) -> None:
    """Sign the MD5 that a body carries, not its SHA-256 as well: over HTTP as botocore does over HTTPS.

    Unless the AWS configuration has `payload_signing_enabled`. A second hash costs as much as sending.
    """
    from botocore.config import Config

    config = request.context.get("client_config")
    settings = (config.s3 if config else None) or {}
    if "Content-MD5" in request.headers and settings.get("payload_signing_enabled") is None:
        unsigned = Config(s3={**settings, "payload_signing_enabled": False})
        request.context["client_config"] = config.merge(unsigned) if config else unsigned


def _is_aws(endpoint_url: str) -> bool:
    """Whether botocore found the endpoint itself, rather than in the environment or a file."""
    host = endpoint_url.partition("://")[2].partition("/")[0].partition(":")[0]
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn", ".api.aws"))


def _for_compatible_servers(options: StorageOptions, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What other servers than AWS's need, where neither options nor AWS configuration say otherwise."""
    defaults: dict[str, Any] = {}
    stated = settings.get("s3")
    if options.path_style is None and not (isinstance(stated, dict) and "addressing_style" in stated):
        defaults["s3"] = {"addressing_style": "path"}
    for name in ("request_checksum_calculation", "response_checksum_validation"):
        if options.checksums is None and name not in settings and f"AWS_{name.upper()}" not in os.environ:
            defaults[name] = "when_required"
    return defaults
