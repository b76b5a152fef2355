"""The botocore client of an S3 store, without retries.

The client is created at the first request, once per process; a forked child creates its own. botocore finds
the credentials (environment, files, processes, roles). If a server refuses them, they are looked up again,
and the request is repeated once if they have changed: so a run can outlive the session credentials that it
was started with, if something renews them.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from shardkit.errors import MissingExtraError
from shardkit.storage.s3_errors import (
    REFUSED_KEYS,
    REGION,
    REGION_HEADER,
    Purpose,
    error_code,
    may_be_stale_credentials,
    request_errors,
    translated,
)
from shardkit.storage.store import (
    StorageOptions,
    StoreError,
    TransientError,
    without_password,
)
from shardkit.storage.threads import remake_after_fork

# Shortest time between two look-ups of credentials: each may start a process or send a request, and hundreds
# of requests may be refused at once.
RENEWAL_SECONDS = 3.0
# If access keys that have worked are refused, requests are retried for this time, until new keys arrive.
GRACE_SECONDS = 60.0
_DEFAULT_REGION = "us-east-1"  # the region that S3-compatible servers expect in signatures


class S3Client:
    """Sends requests to S3 by botocore, without retries; a pickled copy keeps only the options."""

    def __init__(
        self, url: str, options: StorageOptions, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._url, self._options, self._clock = url, options, clock
        self.after_fork()
        remake_after_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._client: Any = None
        self._credentials: Any = None
        self._looked_up = -math.inf
        self._has_worked = False
        self._refused_since: float | None = None  # first time at which keys that had worked were refused

    def request(
        self, operation: str, where: str, purpose: Purpose = "read", **parameters: Any
    ) -> dict[str, Any]:
        """Call `operation`, a method of botocore's client; StoreErrors name `where`.

        If access keys are refused that have worked before, new ones may arrive soon: raises TransientError
        for `GRACE_SECONDS`.
        """
        try:
            client = self.botocore_client()
            try:
                answer: dict[str, Any] = getattr(client, operation)(**parameters)
            except request_errors() as error:
                if not may_be_stale_credentials(error) or not self._renew(client):
                    raise
                answer = getattr(self.botocore_client(), operation)(**parameters)
        except request_errors() as error:
            found = translated(where, error, purpose)
            if self._is_in_grace(error):
                found = TransientError(found.where, found.problem, status=found.status)
            raise found from error
        self._has_worked, self._refused_since = True, None
        return answer

    def _is_in_grace(self, error: Exception) -> bool:
        if not (self._has_worked and error_code(error) in REFUSED_KEYS and may_be_stale_credentials(error)):
            return False
        now = self._clock()
        self._refused_since = now if self._refused_since is None else self._refused_since
        return now - self._refused_since < GRACE_SECONDS

    def botocore_client(self) -> Any:
        """Return this process's botocore client, creating it at the first call."""
        if self._client is None:
            with self._lock:
                if self._client is None:
                    session = _new_session(self._url, self._options)
                    self._credentials = None if self._options.anonymous else _credentials(session)
                    self._client = _new_client(self._url, self._options, session)
        return self._client

    @property
    def is_aws(self) -> bool:
        """Whether requests go to AWS itself."""
        return _is_aws(self.botocore_client().meta.endpoint_url)

    def close(self) -> None:
        """Close idle connections."""
        with self._lock:
            if self._client is not None:
                self._client.close()

    def _renew(self, refused: Any) -> bool:
        """Replace the `refused` client if the credentials have changed; return whether it was replaced."""
        with self._lock:
            if self._client is not refused:
                return True  # another thread has replaced it
            now = self._clock()
            if now - self._looked_up < RENEWAL_SECONDS:
                return False
            self._looked_up = now
            if self._options.anonymous:
                return False
            session = _new_session(self._url, self._options)
            credentials = _credentials(session)
            if credentials == self._credentials:
                return False
            self._client, self._credentials = _new_client(self._url, self._options, session), credentials
            return True

    def __getstate__(self) -> tuple[str, StorageOptions]:
        return self._url, self._options

    def __setstate__(self, state: tuple[str, StorageOptions]) -> None:
        self.__init__(*state)  # type: ignore[misc]


def version_of(answer: Mapping[str, Any]) -> str:
    """Return the ETag in an answer or in an entry of a listing, without its quotes; "" if it has none."""
    return str(answer.get("ETag", "")).strip('"')


def _new_session(url: str, options: StorageOptions) -> Any:
    """Create a botocore session, which reads the AWS configuration on first use."""
    try:
        from botocore.session import Session
    except ImportError as error:
        raise MissingExtraError("boto3", "s3", url) from error
    session = Session(profile=options.profile)
    session.register_component("data_loader", _loader())
    return session


@functools.cache
def _loader() -> Any:
    """Return botocore's loader of API descriptions, shared because loading dominates the cost of a client."""
    from botocore.loaders import create_loader

    return create_loader(os.environ.get("AWS_DATA_PATH"))


def _credentials(session: Any) -> Any:
    """Return the credentials that the session finds, in a form that can be compared."""
    from botocore.exceptions import NoCredentialsError

    found = session.get_credentials()
    if found is None:
        raise NoCredentialsError
    return found.get_frozen_credentials()


def _new_client(url: str, options: StorageOptions, session: Any) -> Any:
    from botocore import UNSIGNED
    from botocore.config import Config

    given_url = options.endpoint_url or _endpoint_of_environment()
    config: dict[str, Any] = {
        "connect_timeout": options.connect_timeout_seconds,
        "read_timeout": options.read_timeout_seconds,
        "max_pool_connections": options.connections,
        "retries": {"total_max_attempts": 1, "mode": "standard"},
    }
    if options.anonymous:
        config["signature_version"] = UNSIGNED
    if options.path_style is not None:
        config["s3"] = {"addressing_style": "path" if options.path_style else "virtual"}
    if options.checksums is not None:
        config["request_checksum_calculation"] = options.checksums
        config["response_checksum_validation"] = options.checksums

    def client(default_region: str | None = None, endpoint_url: str | None = None, **defaults: Any) -> Any:
        try:
            made = session.create_client(
                "s3",
                endpoint_url=endpoint_url or given_url,
                region_name=options.region or session.get_config_variable("region") or default_region,
                config=Config(**config, **defaults),
            )
        except ValueError as error:  # not a URL; `from None`, because the endpoint may hold a password
            raise StoreError(url, f"{error}; check --endpoint-url and AWS_ENDPOINT_URL") from None
        plain = without_password(made.meta.endpoint_url)  # the environment's URL may have a password
        if plain != made.meta.endpoint_url:
            return client(default_region, plain, **defaults)
        made.meta.events.register_first("needs-retry.s3", _ignore_odd_redirects)
        made.meta.events.register("provide-client-params.s3", functools.partial(_with_demands, options))
        for operation in ("PutObject", "UploadPart"):
            made.meta.events.register(f"before-sign.s3.{operation}", _sign_md5_alone)
        return made

    if given_url is None:
        made = client()
        if _is_aws(made.meta.endpoint_url):
            return made
    return client(_DEFAULT_REGION, **_for_compatible_servers(options, session.get_scoped_config()))


def _endpoint_of_environment() -> str | None:
    """Return S3_ENDPOINT_URL (MosaicML's name); None if a variable of AWS is set, which botocore reads."""
    if os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        return None
    return os.environ.get("S3_ENDPOINT_URL") or None


def _with_demands(options: StorageOptions, params: dict[str, Any], model: Any, **_: Any) -> dict[str, Any]:
    """Add the parameters that a bucket may demand: requester pays, and encryption of writes."""
    known = model.input_shape.members
    demands = {"RequestPayer": "requester"} if options.requester_pays else {}
    if options.encryption is not None and model.name in ("PutObject", "CreateMultipartUpload", "CopyObject"):
        demands["ServerSideEncryption"] = options.encryption
        if options.kms_key_id is not None:
            demands["SSEKMSKeyId"] = options.kms_key_id
    return params | {name: value for name, value in demands.items() if name in known}


def _ignore_odd_redirects(
    response: tuple[Any, dict[str, Any]] | None, operation: Any, request_dict: dict[str, Any], **_: Any
) -> None:
    """Keep botocore from following redirects of servers other than S3, such as a proxy with a login page.

    botocore takes any text in a redirect's region field for a region's name. If the redirect has no region,
    botocore asks the server for it, and the answer to that is the next redirect, a few hundred times.
    """
    redirect = request_dict.get("context", {}).get("s3_redirect")
    if operation.name == "HeadBucket" and isinstance(redirect, dict):
        redirect["redirected"] = True
    if response is not None:
        parsed = response[1]
        for named, key in (
            (parsed.get("ResponseMetadata", {}).get("HTTPHeaders", {}), REGION_HEADER),
            (parsed.get("Error", {}), "Region"),
        ):
            if not REGION.fullmatch(str(named.get(key, "a"))):
                del named[key]


def _sign_md5_alone(request: Any, **_: Any) -> None:
    """Sign only a body's MD5 over HTTP, as botocore does over HTTPS, and not its SHA-256 as well.

    Does nothing if the AWS configuration sets `payload_signing_enabled`. The second hash would take as much
    CPU time as sending.
    """
    from botocore.config import Config

    config = request.context.get("client_config")
    settings = (config.s3 if config else None) or {}
    if "Content-MD5" in request.headers and settings.get("payload_signing_enabled") is None:
        unsigned = Config(s3={**settings, "payload_signing_enabled": False})
        request.context["client_config"] = config.merge(unsigned) if config else unsigned


def _is_aws(endpoint_url: str) -> bool:
    """Return whether the endpoint is one of AWS's own."""
    host = endpoint_url.partition("://")[2].partition("/")[0].partition(":")[0]
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn", ".api.aws"))


def _for_compatible_servers(options: StorageOptions, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults for servers other than AWS's, for settings that the user has not set."""
    defaults: dict[str, Any] = {}
    stated = settings.get("s3")
    if options.path_style is None and not (isinstance(stated, dict) and "addressing_style" in stated):
        defaults["s3"] = {"addressing_style": "path"}
    for name in ("request_checksum_calculation", "response_checksum_validation"):
        if options.checksums is None and name not in settings and f"AWS_{name.upper()}" not in os.environ:
            defaults[name] = "when_required"
    return defaults
