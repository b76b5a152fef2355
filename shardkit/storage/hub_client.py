"""HTTP requests to the Hugging Face Hub: endpoint, token, redirects to the hosts of contents, and errors.

Reads do not use `huggingface_hub`, which reads whole files into its own cache and retries by itself, whereas
a store needs ranges, one attempt at a time, timeouts, and the version of the content. Its major versions also
use different HTTP libraries; urllib3 is a dependency of all of them.

The token is sent only to the host of the endpoint: contents are stored behind signed addresses elsewhere. The
token is read again for each request (HF_TOKEN, otherwise the file that `hf auth login` writes), so a run can
outlive the token that it was started with. Clients are made once per process; a forked child makes its own.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from shardkit.files import load_json
from shardkit.storage.http import HttpPools, connection_error, discard, urllib3_for
from shardkit.storage.store import (
    ObjectNotFoundError,
    StorageOptions,
    StoreError,
    ThrottledError,
    TransientError,
)

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse


_DEFAULT_ENDPOINT = "https://huggingface.co"
_MOST_REDIRECTS = 5
_MOST_ANSWER_BYTES = 64 << 20  # maximum size of a JSON answer; a listing page has less than 1 MiB
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# Headers by which the Hub describes a file whose bytes another host sends.
_FACTS = ("X-Linked-Etag", "X-Linked-Size", "X-Repo-Commit")
_RESET_SECONDS = re.compile(r"\bt=(\d+)")


class HubAnswer:
    """An answer whose body has not been read, with headers of the redirects before it.

    `etag` is the file's ETag on the Hub, no matter which host sends its bytes.
    """

    def __init__(
        self, response: BaseHTTPResponse, facts: Mapping[str, str], address: str, *, from_hub: bool
    ) -> None:
        self.response = response
        self.headers = response.headers
        own = response.headers.get("ETag") if from_hub else None
        self.etag = (facts.get("X-Linked-Etag") or own or "").removeprefix("W/").strip('"')
        self.linked_bytes = facts.get("X-Linked-Size")
        self.facts = facts
        self.address = None if from_hub else address
        """The signed URL of the bytes on another host, valid for a while; None if the Hub sent them."""


class HubClient:
    """Sends HTTP requests to the Hub, without retries; a pickled copy keeps only the options."""

    def __init__(self, options: StorageOptions) -> None:
        self._options, self._pools = options, HttpPools(options)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._options,)

    def close(self) -> None:
        """Close idle connections."""
        self._pools.close()

    def json(self, method: str, path: str, where: str, body: object = None) -> tuple[Any, str | None]:
        """Return (the JSON answer as plain data, the URL of the next page or None).

        `path` is relative to the endpoint, or the URL of a next page from an earlier answer.
        """
        urllib3 = urllib3_for(where)
        headers = {"Accept": "application/json"}
        data = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            data = json.dumps(body).encode()
        answer = self.request(method, path, where, headers=headers, body=data)
        response = answer.response
        try:
            text = response.read(_MOST_ANSWER_BYTES + 1)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            response.close()
            raise connection_error(where, error, "HF_ENDPOINT and ") from error
        response.drain_conn()
        response.release_conn()
        try:
            found = load_json(text)
        except ValueError as error:
            problem = "the answer is not JSON: check HF_ENDPOINT, and whether a proxy or a login page answers"
            raise StoreError(where, problem, status=response.status) from error
        return found, _next_page(response.headers.get("Link", ""))

    def request(
        self,
        method: str,
        path: str,
        where: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> HubAnswer:
        """Send a request and follow redirects. The caller reads and closes the body. StoreErrors name
        `where`.

        `path` is relative to the endpoint, or the `address` of an earlier answer, passed with its `facts`.
        """
        urllib3 = urllib3_for(where)
        endpoint = hub_endpoint(where)
        url = path if "://" in path else endpoint + path
        known = dict(facts or {})
        for _ in range(_MOST_REDIRECTS):
            is_hub = _host(url) == _host(endpoint)
            sent = {"User-Agent": "shardkit", "Accept-Encoding": "identity", **(headers or {})}
            if is_hub and (token := hub_token()):
                sent["Authorization"] = f"Bearer {token}"
            try:
                response = self._pools.manager(url).request(
                    method, url, headers=sent, body=body, redirect=False, retries=False, preload_content=False
                )
            except (urllib3.exceptions.HTTPError, OSError) as error:
                raise connection_error(where, error, "HF_ENDPOINT and ") from error
            if is_hub:
                known |= {name: value for name in _FACTS if (value := response.headers.get(name))}
            if response.status < 300:
                return HubAnswer(response, known, url, from_hub=is_hub)
            location = response.headers.get("Location")
            discard(response)
            if response.status not in _REDIRECTS or location is None:
                raise status_error(where, response.status, response.headers, from_hub=is_hub)
            target = urljoin(url, location)
            if url.startswith("https://") and not target.startswith("https://"):
                raise StoreError(
                    where, f"refused to follow a redirect from https to plain http, to {_host(target)[1]}"
                )
            url = target
        raise StoreError(where, f"the server redirected the request more than {_MOST_REDIRECTS} times")


def hub_endpoint(where: str) -> str:
    """Return the URL of the Hub: HF_ENDPOINT or https://huggingface.co. StoreErrors name `where`."""
    endpoint = (os.environ.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT).rstrip("/")
    if not endpoint.startswith(("http://", "https://")):
        raise StoreError(where, f"HF_ENDPOINT is {endpoint!r}: it must begin with https:// or http://")
    return endpoint


def hub_token() -> str | None:
    """Return the token in HF_TOKEN or in the file HF_TOKEN_PATH (default: $HF_HOME/token), or None."""
    if stated := os.environ.get("HF_TOKEN", "").strip():
        return stated
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    file = Path(os.environ.get("HF_TOKEN_PATH") or f"{home}/token").expanduser()
    try:
        return file.read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def status_error(
    where: str, status: int, headers: Mapping[str, str], *, from_hub: bool = True, writes: bool = False
) -> StoreError:
    """Return the error for an answer with this status; `writes`: the request was to change the repository.

    `from_hub`: the Hub itself answered, and not the host that stores a file, whose address may have expired.
    """
    code = headers.get("X-Error-Code", "")
    message = headers.get("X-Error-Message", "")[:200] or f"the server answers {status}"
    if token := hub_token():
        message = message.replace(token, "***")  # a server may echo the token
    if status in (429, 503):
        error = ThrottledError(where, "the Hub asks for fewer requests", status=status)
        error.retry_after_seconds = _reset_seconds(headers)
        return error
    if status in (408, 500, 502, 504) or status > 504:
        return TransientError(where, message, status=status)
    if status == 403 and not from_hub:
        problem = "the host of the content refuses: its address has expired, or a proxy forbids it"
        return TransientError(where, problem, status=status)
    if code == "GatedRepo":
        problem = "is gated: accept its conditions on its page, and set HF_TOKEN to a token of that account"
        return StoreError(where, problem, status=status)
    if code == "RepoNotFound" or status == 401:
        known = "the token that was sent may not read it" if hub_token() else "it is private: set HF_TOKEN"
        problem = f"there is no such dataset repository, or {known}; check the name, or create it on the Hub"
        return StoreError(where, problem, status=status)
    if code == "RevisionNotFound":
        return StoreError(where, "the repository has no such branch, tag or commit", status=status)
    if status == 404:
        return ObjectNotFoundError(where, "there is no such file", status=status)
    if status == 403:
        right = "a token with the right to write" if writes else "a token that may read it"
        return StoreError(where, f"{message}; set HF_TOKEN to {right}", status=status)
    if status in (409, 412):
        return TransientError(where, "another commit came first", status=status)
    return StoreError(where, message, status=status)


def _reset_seconds(headers: Mapping[str, str]) -> float | None:
    """Return the seconds after which the Hub accepts requests again, or None if no header tells."""
    stated = headers.get("Retry-After", "")
    if stated.isdigit():
        return float(stated)
    found = _RESET_SECONDS.search(headers.get("RateLimit", ""))
    return float(found[1]) if found else None


def _next_page(link: str) -> str | None:
    found = re.search(r'<([^>]+)>\s*;\s*rel="?next"?', link)
    return found[1] if found else None


def _host(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc.lower()
