"""From what botocore, urllib3 and the S3 protocol call a failure to the kinds of `shardkit.storage.errors`.

Whatever may go away by itself (timeouts, broken connections, 5xx, a metadata service that does not answer) is
a TransientError, a request for fewer requests a ThrottledError; the rest says what to check. A failure that
is not known here becomes a StoreError with its own words: nothing of botocore's leaves a store.
"""

from __future__ import annotations

from http.client import HTTPException
from typing import Any, Literal

from shardkit.storage.errors import (
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    ThrottledError,
    TransientError,
)

__all__ = [
    "Purpose",
    "error_code",
    "error_status",
    "may_be_stale_credentials",
    "request_errors",
    "translated",
]

Purpose = Literal["read", "write"]

_NOT_FOUND = {"404", "NoSuchKey", "NoSuchBucket", "NotFound"}
_THROTTLED = {
    "BandwidthLimitExceeded",
    "RequestLimitExceeded",
    "RequestThrottled",
    "ServiceUnavailable",
    "SlowDown",
    "ThrottledException",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
}
# Also what a 200 can carry in its body, which has no status of its own.
_TRANSIENT = {"BadDigest", "IncompleteBody", "InternalError", "OperationAborted", "RequestTimeout"}
_CONFLICT = {"ConditionalRequestConflict", "OperationAborted"}
_PRECONDITION = {"PreconditionFailed", "412"}
_STALE = {"ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidToken", "RequestExpired"}
_STALE |= {"SignatureDoesNotMatch", "TokenRefreshRequired", "AccessDenied"}
_STALE |= {"400", "401", "403"}  # a HEAD's
_ADVICE = {
    "AccessDenied": "check the policies of the credentials and of the bucket; without s3:ListBucket, S3 says "
    "this of an object that is not there, too",
    "AuthorizationHeaderMalformed": "the bucket is in another region: set --region or AWS_REGION",
    "EntityTooLarge": "the server refuses objects of this size",
    "ExpiredToken": "the session credentials have expired: renew them where they came from "
    "(environment, file, process), and they are read again",
    "InvalidAccessKeyId": "the server does not know this access key: check the credentials and the endpoint",
    "InvalidObjectState": "the object is archived: restore it first",
    "InvalidRange": "the range begins beyond the object's end",
    "PermanentRedirect": "the bucket is in another region, or behind another endpoint: set AWS_REGION",
    "RequestTimeTooSkewed": "this machine's clock differs from the server's by too much: set the clock (NTP)",
    "SignatureDoesNotMatch": "check the secret key, and that no proxy changes requests",
}
_ADVICE["403"] = _ADVICE["AccessDenied"]
_ADVICE["416"] = _ADVICE["InvalidRange"]
_ADVICE["400"] = "expired credentials, a wrong region or a clock that is off: `head` does not say which"
_ADVICE["InvalidToken"] = _ADVICE["ExpiredToken"]


def request_errors() -> tuple[type[Exception], ...]:
    """`except request_errors() as error`: everything that a request or a body can raise."""
    try:
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError
        from urllib3.exceptions import HTTPError
    except ImportError:
        return (OSError,)  # a MissingExtraError is on its way
    return (ClientError, BotoCoreError, ResponseParserError, HTTPError, HTTPException, OSError)


def error_code(error: BaseException) -> str:
    """S3's error code ("" if it is none of S3's); of a HEAD, which has no body, its status as text."""
    response: Any = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def error_status(error: BaseException) -> int | None:
    """The HTTP status that came with an error."""
    response: Any = getattr(error, "response", None)
    if not isinstance(response, dict):
        return None
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status if isinstance(status, int) else None


def may_be_stale_credentials(error: BaseException) -> bool:
    """Whether other credentials might have been accepted."""
    return error_code(error) in _STALE and error_status(error) in (400, 401, 403)


def translated(where: str, error: Exception, purpose: Purpose = "read") -> StoreError:
    """The store's error for a request about `where` that failed with one of `ERRORS`."""
    if isinstance(error, StoreError):
        return error
    if isinstance(getattr(error, "response", None), dict):
        return _of_response(where, error, purpose)
    return _of_connection(where, error)


def _of_response(where: str, error: Exception, purpose: Purpose) -> StoreError:
    code, status = error_code(error), error_status(error)
    if code == "NoSuchBucket":
        return ObjectNotFoundError(where, "there is no such bucket", status=status)
    if code == "NoSuchUpload":
        return TransientError(where, "the server has lost this upload; upload it again", status=status)
    if code in _NOT_FOUND or status == 404:
        return ObjectNotFoundError(where, "there is no such object", status=status)
    if code in _PRECONDITION or status == 412:
        if purpose == "write":
            return ObjectExistsError(where, "is there already", status=status)
        return ObjectChangedError(where, "is no longer the version that was asked for", status=status)
    if code in _THROTTLED or status in (429, 503):
        return ThrottledError(
            where, f"{code or 'SlowDown'}: the server asks for fewer requests", status=status
        )
    message = str(error.response.get("Error", {}).get("Message", "")) or str(error)  # type: ignore[attr-defined]
    if code in _TRANSIENT or code in _CONFLICT or status == 409 or (status or 0) >= 500:
        return TransientError(where, f"{code}: {message:.200}", status=status)
    advice = _ADVICE.get(code) or (_ADVICE["AccessDenied"] if status == 403 else "")
    return StoreError(where, f"{code}: {message:.200}" + (f"; {advice}" if advice else ""), status=status)


def _of_connection(where: str, error: Exception) -> StoreError:
    from botocore import exceptions as core

    text = f"{error}"[:300] or type(error).__name__
    if isinstance(error, core.NoCredentialsError | core.PartialCredentialsError):
        return StoreError(
            where,
            f"no complete credentials were found ({text}): set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "or a profile (AWS_PROFILE) of ~/.aws/credentials, or run where the machine has a role",
        )
    if isinstance(error, core.ProfileNotFound):
        return StoreError(where, f"{text}: check --profile, AWS_PROFILE and ~/.aws/config")
    if isinstance(error, core.SSOError | core.UnauthorizedSSOTokenError):
        return StoreError(where, f"{text}: run `aws sso login` again")
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return StoreError(where, f"{text}: AWS_CA_BUNDLE names the certificates that are trusted")
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
