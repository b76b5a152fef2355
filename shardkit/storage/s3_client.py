"""The botocore client of an S3 store, without retries, and the translation of its errors.

The client is created at the first request, once per process; a forked child creates its own. Credentials are
botocore's business (environment, files, processes, roles). If a server refuses them, they are looked up
again, and the request is repeated once if they have changed: a run outlives the session credentials that it
was started with, if something renews them.
"""

from __future__ import annotations

import functools
import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from http.client import HTTPException
from typing import Any, Literal

from shardkit.errors import MissingExtraError
from shardkit.storage.store import (
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageOptions,
    StoreError,
    ThrottledError,
    TransientError,
    without_password,
)
from shardkit.storage.threads import remake_after_fork

__all__ = ["Purpose", "S3Client", "error_in_body", "request_errors", "translated", "version_of"]

# A look-up can mean a process or a request, and refused requests may come in hundreds.
RENEWAL_SECONDS = 3.0
# New keys may reach a machine some time after the old ones are refused.
GRACE_SECONDS = 60.0
_DEFAULT_REGION = "us-east-1"  # for which S3-compatible servers expect requests to be signed

Purpose = Literal["read", "write"]

_NOT_FOUND = {"404", "NoSuchKey", "NoSuchBucket", "NotFound"}
_THROTTLED = {
    "BandwidthLimitExceeded", "RequestLimitExceeded", "RequestThrottled", "ServiceUnavailable", "SlowDown",
    "ThrottledException", "Throttling", "ThrottlingException", "TooManyRequests",
}  # fmt: skip
# Some of these also come in the body of a 200, without a status of their own.
_TRANSIENT = {
    "BadDigest", "ConditionalRequestConflict", "IncompleteBody", "InternalError", "OperationAborted",
    "RequestTimeout",
}  # fmt: skip
_PRECONDITION = {"PreconditionFailed", "412"}
_STALE = {
    "400", "401", "403",  # a HEAD's
    "AccessDenied", "ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidToken",
    "RequestExpired", "SignatureDoesNotMatch", "TokenRefreshRequired",
}  # fmt: skip
# Of these, what speaks of the keys alone; the others may be about one object.
_REFUSED_KEYS = _STALE - {"400", "401", "403", "AccessDenied"}
_ADVICE = {
    "AccessDenied": "check the policies of the credentials and of the bucket; without s3:ListBucket, S3 also "
    "says this of an object that does not exist; where requesters pay or writes must be encrypted, say so: "
    "--requester-pays, --encryption aws:kms",
    "AuthorizationHeaderMalformed": "the bucket is in another region: set --region or AWS_REGION",
    "EntityTooLarge": "the server refuses objects of this size",
    "ExpiredToken": "the session credentials have expired: renew them at their source "
    "(environment, file, process); they are then read again",
    "InvalidAccessKeyId": "the server does not know this access key: check the credentials and the endpoint",
    "InvalidObjectState": "the object is archived: restore it first",
    "InvalidRange": "the range begins beyond the object's end",
    "RequestTimeTooSkewed": "the clocks of this machine and the server differ too much: set the clock (NTP)",
    "SignatureDoesNotMatch": "check the secret key, and that no proxy changes requests",
}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_REGION_HEADER = "x-amz-bucket-region"
_REGION = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_ERROR_BODY = re.compile(
    rb"\A\s*(?:<\?xml[^>]*>\s*)?<Error[ >].*?<Code>(?P<code>[^<]{1,100})</Code>"
    rb"(?:.*?<Message>(?P<message>[^<]*)</Message>)?",
    re.DOTALL,
)
_ADVICE["403"] = _ADVICE["AccessDenied"]
_ADVICE["416"] = _ADVICE["InvalidRange"]
_ADVICE["400"] = "expired credentials, wrong region or wrong clock: the answer to a HEAD does not say which"
_ADVICE["InvalidToken"] = _ADVICE["ExpiredToken"]


class S3Client:
    """Makes requests; pickles as its options."""

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
        self._refused_since: float | None = None  # while requests with keys that have worked are refused

    def request(
        self, operation: str, where: str, purpose: Purpose = "read", **parameters: Any
    ) -> dict[str, Any]:
        """Call `operation`, a method of botocore's client; StoreErrors name `where`.

        Keys that have worked and are refused now may be about to be replaced: TransientError for a while.
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
        if not (self._has_worked and error_code(error) in _REFUSED_KEYS and may_be_stale_credentials(error)):
            return False
        now = self._clock()
        self._refused_since = now if self._refused_since is None else self._refused_since
        return now - self._refused_since < GRACE_SECONDS

    def botocore_client(self) -> Any:
        """Return the client of this process."""
        if self._client is None:
            with self._lock:
                if self._client is None:
                    session = _new_session(self._url, self._options)
                    self._credentials = None if self._options.anonymous else _credentials(session)
                    self._client = _new_client(self._url, self._options, session)
        return self._client

    def close(self) -> None:
        """Close idle connections."""
        with self._lock:
            if self._client is not None:
                self._client.close()

    def _renew(self, refused: Any) -> bool:
        """Replace the `refused` client if there are other credentials now; return whether there are."""
        with self._lock:
            if self._client is not refused:
                return True  # another thread was quicker
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
    """Return the ETag without its quotes."""
    return str(answer.get("ETag", "")).strip('"')


def _new_session(url: str, options: StorageOptions) -> Any:
    """Create a session, which reads the configuration when asked."""
    try:
        from botocore.session import Session
    except ImportError as error:
        raise MissingExtraError("boto3", "s3", url) from error
    session = Session(profile=options.profile)
    session.register_component("data_loader", _loader())
    return session


@functools.cache
def _loader() -> Any:
    """Return the reader of S3's description, which is most of the work of making a client, and is shared."""
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
        except ValueError as error:  # an endpoint that is no URL, and may have a password in it
            raise StoreError(url, f"{error}; check --endpoint-url and AWS_ENDPOINT_URL") from None
        plain = without_password(made.meta.endpoint_url)  # of the environment or the configuration
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
    """Return MosaicML's variable for an endpoint, where none of AWS's is set, which botocore reads itself."""
    if os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        return None
    return os.environ.get("S3_ENDPOINT_URL") or None


def _with_demands(options: StorageOptions, params: dict[str, Any], model: Any, **_: Any) -> dict[str, Any]:
    """Add to any request what the bucket demands: who pays, and of writes how they are encrypted."""
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
    """Keep botocore from following redirects of whatever is no S3, such as a proxy with a login page.

    It takes anything in the place of a region's name for one, and where there is none asks for the bucket's,
    by a request that is redirected in turn, a few hundred times.
    """
    redirect = request_dict.get("context", {}).get("s3_redirect")
    if operation.name == "HeadBucket" and isinstance(redirect, dict):
        redirect["redirected"] = True
    if response is not None:
        parsed = response[1]
        for named, key in (
            (parsed.get("ResponseMetadata", {}).get("HTTPHeaders", {}), _REGION_HEADER),
            (parsed.get("Error", {}), "Region"),
        ):
            if not _REGION.fullmatch(str(named.get(key, "a"))):
                del named[key]


def _sign_md5_alone(request: Any, **_: Any) -> None:
    """Sign only the MD5 of a body, not also its SHA-256: over HTTP as botocore does over HTTPS.

    Not if the AWS configuration has `payload_signing_enabled`. A second hash costs as much as sending.
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
    """Return the settings of servers other than AWS's, if neither options nor AWS configuration set them."""
    defaults: dict[str, Any] = {}
    stated = settings.get("s3")
    if options.path_style is None and not (isinstance(stated, dict) and "addressing_style" in stated):
        defaults["s3"] = {"addressing_style": "path"}
    for name in ("request_checksum_calculation", "response_checksum_validation"):
        if options.checksums is None and name not in settings and f"AWS_{name.upper()}" not in os.environ:
            defaults[name] = "when_required"
    return defaults


def request_errors() -> tuple[type[Exception], ...]:
    """Return everything that a request or a body can raise, for `except request_errors() as error`."""
    try:
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError
        from urllib3.exceptions import HTTPError
    except ImportError:
        return (OSError,)  # the caller is about to raise MissingExtraError
    return (ClientError, BotoCoreError, ResponseParserError, HTTPError, HTTPException, OSError)


def error_code(error: BaseException) -> str:
    """Return S3's error code, or "" if there is none; for a HEAD, which has no body, the status as text."""
    response: Any = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def error_status(error: BaseException) -> int | None:
    """Return the HTTP status that came with an error."""
    response: Any = getattr(error, "response", None)
    if not isinstance(response, dict):
        return None
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status if isinstance(status, int) else None


def may_be_stale_credentials(error: BaseException) -> bool:
    """Return whether other credentials might have been accepted."""
    return error_code(error) in _STALE and error_status(error) in (400, 401, 403)


def translated(where: str, error: Exception, purpose: Purpose = "read") -> StoreError:
    """Translate one of `request_errors` of a request about `where`.

    What may go away by itself (timeouts, broken connections, 5xx, a metadata service that does not answer) is
    a TransientError, a request for fewer requests a ThrottledError; other messages say what to check. An
    unknown failure becomes a StoreError with its own words, so nothing of botocore's leaves a store.
    """
    if isinstance(error, StoreError):
        return error
    if isinstance(getattr(error, "response", None), dict):
        return _of_response(where, error, purpose)
    return _of_connection(where, error)


def error_in_body(where: str, text: bytes, status: int) -> StoreError | None:
    """Return the error that a server sent in place of an object, with the status of a success, if it is one.

    Errors that a server has begun to answer so are its own: they are transient unless their code says that
    repeating the request does not help.
    """
    found = _ERROR_BODY.search(text)
    if found is None:
        return None
    code = found["code"].decode(errors="replace")
    message = found["message"].decode(errors="replace") if found["message"] else "no message"
    problem = f"{code}: {message:.200}; the server sent this error in place of the object"
    if code in _THROTTLED:
        return ThrottledError(where, problem, status=status)
    if code in _NOT_FOUND:
        return ObjectNotFoundError(where, problem, status=status)
    if code in _ADVICE:
        return StoreError(where, f"{problem}; {_ADVICE[code]}", status=status)
    return TransientError(where, problem, status=status)


def _of_response(where: str, error: Exception, purpose: Purpose) -> StoreError:
    code, status = error_code(error), error_status(error)
    if code == "NoSuchBucket":
        return ObjectNotFoundError(where, "there is no such bucket", status=status)
    if code == "NoSuchUpload":
        return TransientError(where, "the server has lost this upload: upload it again", status=status)
    if code in _NOT_FOUND or status == 404:
        return ObjectNotFoundError(where, "there is no such object", status=status)
    if code in _PRECONDITION or status == 412:
        if purpose == "write":
            return ObjectExistsError(where, "already exists", status=status)
        return ObjectChangedError(where, "no longer has the requested version", status=status)
    if code in _THROTTLED or status in (429, 503):
        return ThrottledError(
            where, f"{code or 'SlowDown'}: the server asks for fewer requests", status=status
        )
    response = error.response  # type: ignore[attr-defined]
    if status in _REDIRECTS:
        return StoreError(where, _redirected(response["ResponseMetadata"]["HTTPHeaders"]), status=status)
    message = str(response.get("Error", {}).get("Message") or "no message")
    if code in _ADVICE and status in (200, 500):  # botocore makes a 500 of an error in a 200
        return StoreError(where, f"{code}: {message:.200}; {_ADVICE[code]}", status=status)
    if code in _TRANSIENT or status == 409 or (status or 0) >= 500:
        return TransientError(where, f"{code}: {message:.200}", status=status)
    advice = _ADVICE.get(code) or (_ADVICE["AccessDenied"] if status == 403 else "")
    return StoreError(where, f"{code}: {message:.200}" + (f"; {advice}" if advice else ""), status=status)


def _redirected(headers: Mapping[str, str]) -> str:
    """Return what an answer means that names another place."""
    if region := headers.get(_REGION_HEADER):
        return f"the bucket is in region {region}: set --region or AWS_REGION"
    place = headers.get("location", "an address that it does not name").partition("?")[0]  # no signatures
    advice = "check the endpoint, and whether a proxy or a login page answers in its place"
    return f"the server redirects to {place:.200}: {advice}"


def _of_connection(where: str, error: Exception) -> StoreError:
    from botocore import exceptions as core

    text = f"{error}"[:300] or type(error).__name__
    if isinstance(error, core.NoCredentialsError | core.PartialCredentialsError):
        return StoreError(
            where,
            f"no complete credentials found ({text}): set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "or a profile (AWS_PROFILE) of ~/.aws/credentials, or run on a machine with a role; a public "
            "bucket is read without any by --anonymous or StorageOptions(anonymous=True)",
        )
    if isinstance(error, core.ProfileNotFound):
        return StoreError(where, f"{text}: check --profile, AWS_PROFILE and ~/.aws/config")
    if isinstance(error, core.SSOError | core.UnauthorizedSSOTokenError):
        return StoreError(where, f"{text}: run `aws sso login` again")
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return StoreError(where, f"{text}: set AWS_CA_BUNDLE to the certificates to trust")
    broken = (
        core.ConnectionError | core.HTTPClientError | core.IncompleteReadError | core.FlexibleChecksumError
    )
    if isinstance(error, broken):
        return TransientError(where, text)
    if isinstance(error, core.MetadataRetrievalError | core.CredentialRetrievalError):
        return TransientError(where, f"credentials could not be fetched: {text}")
    if isinstance(error, core.BotoCoreError):
        return StoreError(where, text)
    return TransientError(where, f"{type(error).__name__}: {text}")
