"""URL deduplication: the canonical form of URLs, and the keys of documents with the same form.

Two URLs are equal if their canonical forms are equal. The form extends RFC 3986, section 6.2.2:

1. White space around the URL is removed, and tabs and line ends in it; `\\` before the query becomes `/`.
2. The scheme is in lower case; `https`, `//host` and a missing scheme become `http`.
3. User and password are removed. The host is in lower case, in IDNA if possible, without final dots and
   without `www.`, unless that leaves no dot. The ports 80 and 443 (ftp: 21) and leading zeros of a port are
   removed.
4. Bytes that are not allowed in a URL, such as non-ASCII ones, are percent-encoded in upper case; letters,
   digits and `-._~` never are. A `%` that encodes nothing becomes `%25`.
5. Segments `.` and `..` of the path are resolved; slashes at its end are removed.
6. Query parameters that only track visitors (TRACKING, in any case, and `drop_parameters`) and empty ones are
   removed; the others are sorted by name, those of one name in their original order.
7. The fragment is removed.

All other differences count: case of path and query, file names such as index.html, subdomains such as m.,
repeated slashes. The canonical form of a canonical form is itself. A value with neither a scheme nor a dot in
its host ("N/A"), or without a host, is not a URL. In `mailto:` and similar URLs only 1, 7 and the case of the
scheme are normalized. A URL takes 1 to 4 microseconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from shardkit.writers.dedup.exact import KEYS

URL_KEYS = replace(KEYS, file="url_keys.run")

TRACKING = (
    *("utm_*", "hsa_*", "_hsenc", "_hsmi", "_ga", "_gl", "mc_cid", "mc_eid", "mkt_tok", "_openstat"),
    *("gclid", "gclsrc", "dclid", "gbraid", "wbraid", "fbclid", "msclkid", "yclid", "ysclid", "twclid"),
    *("ttclid", "li_fat_id", "igsh", "igshid", "srsltid", "vero_id", "vero_conv", "oly_anon_id"),
    *("oly_enc_id", "wickedid", "rb_clickid", "s_kwcid", "ef_id", "epik", "__hssc", "__hstc", "__hsfp"),
)

_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")

# Most URLs match this pattern: `canonical_url` then only has to normalize path and query.
_SIMPLE = re.compile(
    r"https?://([a-z0-9](?:[a-z0-9.-]*[a-z0-9])?)"
    r"(/[A-Za-z0-9._~!$&'()*+,;=:@/%-]*)?(?:\?([A-Za-z0-9._~!$&'()*+,;=:@/?%-]*))?"
)
_ODD = re.compile(r"%(?:[0-9A-Fa-f]{2})?|[^A-Za-z0-9._~!$&'()*+,;=:@/?-]")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_OPAQUE = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?![0-9])")
_AUTHORITY = re.compile(r"(.*?)(?::([0-9]*))?", re.DOTALL)
_PLAIN_HOST = re.compile(r"[a-z0-9._-]+")
_REMOVED = str.maketrans("", "", "\t\r\n")
_BLANK = "".join(map(chr, range(33)))

_NAME = itemgetter(0)

_DEFAULT_PORTS = {"http": ("80", "443"), "ftp": ("21",)}


class Tracking(NamedTuple):
    """Query parameters to drop: their names in lower case, and the beginnings of further names."""

    names: frozenset[str]
    beginnings: tuple[str, ...]

    @classmethod
    def of(cls, more: Iterable[str] = ()) -> Tracking:
        """Return the parameters in TRACKING and `more`, where a final `*` matches any ending."""
        names = [_lower(name) for name in (*TRACKING, *more)]
        beginnings = tuple(name[:-1] for name in names if name.endswith("*"))
        return cls(frozenset(name for name in names if not name.endswith("*")), beginnings)


def canonical_url(url: str, tracking: Tracking | None = None) -> str | None:
    """Return the canonical form of a URL; None for a value without a host, such as "N/A"."""
    tracking = _TRACKING if tracking is None else tracking
    if simple := _SIMPLE.fullmatch(url):
        host, path, query = simple.groups()
        return f"http://{_without_www(host)}{_path(path)}{_query(query, tracking)}"
    url = url.translate(_REMOVED).partition("#")[0].strip(_BLANK)
    if found := _SCHEME.fullmatch(url):
        scheme, rest = found[1].lower(), found[2]
    elif found := _OPAQUE.match(url):
        return found[1].lower() + url[found.end(1) :]
    else:
        scheme, rest = "", url.removeprefix("//")
    rest, _, query = rest.partition("?")
    authority, slash, path = rest.replace("\\", "/").partition("/")
    parts = _AUTHORITY.fullmatch(authority.rpartition("@")[2])
    assert parts is not None, "_AUTHORITY matches any text"
    host, port = _host(parts[1]), (parts[2] or "").lstrip("0")
    if (not host and scheme != "file") or (not scheme and "." not in host):
        return None
    scheme = "http" if scheme in ("", "https") else scheme
    if port and port not in _DEFAULT_PORTS.get(scheme, ()):
        host = f"{host}:{port}"
    return f"{scheme}://{host}{_path(slash + path)}{_query(query, tracking)}"


def _without_www(host: str) -> str:
    while host.startswith("www.") and "." in host[4:].strip("."):
        host = host[4:].lstrip(".")
    return host


def _host(host: str) -> str:
    if host.startswith("[") and host.endswith("]"):  # an IPv6 address, or what is written like one
        return f"[{_folded(host[1:-1])}]"
    if not host.isascii():
        with suppress(UnicodeError):  # a name that is not valid in IDNA is percent-encoded below
            named = host.encode("idna").decode().lower()
            host = named if _PLAIN_HOST.fullmatch(named) else host
    return _without_www(_folded(host).replace(":", "%3A").strip("."))


def _folded(text: str) -> str:
    """Percent-encode what a URL may not have, and lower all letters but those of the encoding."""
    return _encoded(_lower(_encoded(text)))


def _lower(text: str) -> str:
    """Lower only ASCII letters, since the case of other letters depends on the Unicode version."""
    return text.lower() if text.isascii() else text.encode().lower().decode()


_TRACKING = Tracking.of()


def _encoded(text: str) -> str:
    return _ODD.sub(_encode, text) if _ODD.search(text) else text


def _encode(found: re.Match[str]) -> str:
    odd = found[0]
    if len(odd) == 3:
        decoded = chr(int(odd[1:], 16))
        return decoded if decoded in _UNRESERVED else odd.upper()
    return "".join(f"%{byte:02X}" for byte in odd.encode())


def _path(path: str | None) -> str:
    if not path:
        return ""
    path = _encoded(path)
    if "/." not in path:
        return path.rstrip("/")
    segments: list[str] = []
    for segment in path.split("/")[1:]:
        if segment == "..":
            del segments[-1:]
        elif segment != ".":
            segments.append(segment)
    return "".join(f"/{segment}" for segment in segments).rstrip("/")


def _query(query: str | None, tracking: Tracking) -> str:
    """Return "?" and the sorted query without tracking parameters; "" if no parameter is left."""
    if not query:
        return ""
    query = _encoded(query)
    kept = []
    for part in query.split("&"):
        name = part.partition("=")[0]
        lower = name.lower()
        if part and lower not in tracking.names and not lower.startswith(tracking.beginnings):
            kept.append((name, part))
    kept.sort(key=_NAME)
    return "?" + "&".join([part for _, part in kept]) if kept else ""


def url_keys(
    keys: npt.NDArray[np.void], urls: pa.StringArray, tracking: Tracking | None = None
) -> npt.NDArray[np.void]:
    """Return the rows of KEYS of documents that have a URL, keyed by xxh3-128 of its canonical form."""
    forms = [canonical_url(url, tracking) if url else None for url in urls.to_pylist()]
    some = np.array([row for row, form in enumerate(forms) if form is not None], np.int64)
    rows = keys[some]
    digests = b"".join(xxhash.xxh3_128_digest(form.encode()) for form in forms if form is not None)
    rows["key"], rows["low"] = np.frombuffer(digests, ">u8").reshape(-1, 2).T
    return rows
