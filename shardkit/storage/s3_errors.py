"""Translation of S3 and connection errors into `StoreError`s that say what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any, Literal

from shardkit.storage.store import (
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    ThrottledError,
    TransientError,
)

Purpose = Literal["read", "write"]


_NOT_FOUND = {"404", "NoSuchKey", "NoSuchBucket", "NotFound"}


_THROTTLED = {
    "BandwidthLimitExceeded", "RequestLimitExceeded", "RequestThrottled", "ServiceUnavailable", "SlowDown",
    "ThrottledException", "Throttling", "ThrottlingException", "TooManyRequests",
}  # fmt: skip


# Some of these codes are also sent in the body of an answer with status 200.
_TRANSIENT = {
    "BadDigest", "ConditionalRequestConflict", "IncompleteBody", "InternalError", "OperationAborted",
    "RequestTimeout",
}  # fmt: skip


_PRECONDITION = {"PreconditionFailed", "412"}


_STALE = {
    "400", "401", "403",  # for HEAD, whose answers have no body, the status is the code
    "AccessDenied", "ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidToken",
    "RequestExpired", "SignatureDoesNotMatch", "TokenRefreshRequired",
}  # fmt: skip


# Codes with which a server refuses the access keys; the other codes in `_STALE` may concern a single object.
REFUSED_KEYS = _STALE - {"400", "401", "403", "AccessDenied"}


_ADVICE = {
    "AccessDenied": "check the policies of the credentials and of the bucket; without s3:ListBucket, S3 also "
    "says this of an object that does not exist; where requesters pay or writes must be encrypted, say so: "
    "--storage requester_pays=true, --storage encryption=aws:kms",
    "AuthorizationHeaderMalformed": "the bucket is in another region: set --storage region=… or AWS_REGION",
    "EntityTooLarge": "the server refuses objects of this size",
    "ExpiredToken": "the session credentials have expired: renew them at their source "
    "(environment, file, process); they are then read again",
    "InvalidAccessKeyId": "the server does not know this access key: check the credentials and the endpoint",
    "InvalidObjectState": "the object is archived: restore it first",
    "InvalidRange": "the range begins after the object's end",
    "RequestTimeTooSkewed": "the clocks of this machine and the server differ too much: set the clock (NTP)",
    "SignatureDoesNotMatch": "check the secret key, and that no proxy changes requests",
}


_REDIRECTS = frozenset({301, 302, 303, 307, 308})


REGION_HEADER = "x-amz-bucket-region"


REGION = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


_ERROR_BODY = re.compile(
    rb"\A\s*(?:<\?xml[^>]*>\s*)?<Error[ >].*?<Code>(?P<code>[^<]{1,100})</Code>"
    rb"(?:.*?<Message>(?P<message>[^<]*)</Message>)?",
    re.DOTALL,
)


_ADVICE["403"] = _ADVICE["AccessDenied"]


_ADVICE["416"] = _ADVICE["InvalidRange"]


_ADVICE["400"] = "check credentials, region and clock: the answer to a HEAD does not name the cause"


_ADVICE["InvalidToken"] = _ADVICE["ExpiredToken"]


def request_errors() -> tuple[type[Exception], ...]:
    """Return all exception types that requests and reads of bodies raise, for use in `except` clauses."""
    try:
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError
        from urllib3.exceptions import HTTPError
    except ImportError:
        return (OSError,)  # the caller is about to raise MissingExtraError
    return (ClientError, BotoCoreError, ResponseParserError, HTTPError, HTTPException, OSError)


def error_code(error: BaseException) -> str:
    """Return S3's error code, "" if there is none. For HEAD, whose answers have no body, it is the status."""
    response: Any = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def error_status(error: BaseException) -> int | None:
    """Return the HTTP status of an error, or None."""
    response: Any = getattr(error, "response", None)
    if not isinstance(response, dict):
        return None
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status if isinstance(status, int) else None


def may_be_stale_credentials(error: BaseException) -> bool:
    """Return whether a request was refused for a reason that new credentials may remove."""
    return error_code(error) in _STALE and error_status(error) in (400, 401, 403)


def translated(where: str, error: Exception, purpose: Purpose = "read") -> StoreError:
    """Translate one of `request_errors` into a StoreError about `where`.

    Errors that may pass (timeouts, broken connections, 5xx, a metadata service that does not answer) become
    TransientErrors. Answers that ask for fewer requests become ThrottledErrors. Other errors say what to
    check. An unknown failure becomes a StoreError with its own message, so no botocore exception leaves a
    store.
    """
    if isinstance(error, StoreError):
        return error
    if isinstance(getattr(error, "response", None), dict):
        return _of_response(where, error, purpose)
    return _of_connection(where, error)


def error_in_body(where: str, text: bytes, status: int) -> StoreError | None:
    """Return the error that a server sent in place of an object with a success status; None if there is none.

    Such an error occurred in the server after it began to answer: it is transient unless its code shows that
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
    if code in _ADVICE and status in (200, 500):  # botocore reports an error in a 200 answer as 500
        return StoreError(where, f"{code}: {message:.200}; {_ADVICE[code]}", status=status)
    if code in _TRANSIENT or status == 409 or (status or 0) >= 500:
        return TransientError(where, f"{code}: {message:.200}", status=status)
    advice = _ADVICE.get(code) or (_ADVICE["AccessDenied"] if status == 403 else "")
    return StoreError(where, f"{code}: {message:.200}" + (f"; {advice}" if advice else ""), status=status)


def _redirected(headers: Mapping[str, str]) -> str:
    """Describe a redirect, with advice: another region, or a server that is not S3."""
    if region := headers.get(REGION_HEADER):
        return f"the bucket is in region {region}: set --storage region={region} or AWS_REGION"
    place = headers.get("location", "an address that it does not name").partition("?")[0]  # hides signatures
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
            "bucket is read without any by --storage anonymous=true, inputs[].storage: {anonymous: true} or "
            "StorageOptions(anonymous=True)",
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
