"""Select documents by document id, user id or URL, limited to sources, files and records.

A document is selected if it has one of the given ids or URLs, one of the given sources, one of the given
files and one of the given records; a criterion that is not given selects all. Documents in `always` are
selected in any case. `UrlPatterns` are

    https://example.org/page    this exact URL
    https://example.org/blog/*  all URLs with this prefix
    example.org/page            this URL with any scheme; example.org/blog/* works likewise
    example.org/*               all URLs of this host, with any scheme and port
    *.example.org               all URLs of this host and of its subdomains

Hosts are compared in lower case and in IDNA, the rest of a URL exactly. Patterns that have matched are
recorded, so that patterns without a match can be reported. Matching a million URLs takes 20 ms for exact
URLs, another 20 ms for each distinct length of the prefixes, and 0.4 s if there are patterns of hosts.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cached_property, reduce
from operator import and_, or_
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from shardkit.errors import ShardkitError
from shardkit.formats.provenance import HashRange
from shardkit.hashing import keyed_hashes

_Mask = npt.NDArray[np.bool_]

_FEW = 32  # up to this number of domains, comparing all with each host is faster than looking up its parents


class UrlPatterns:
    """A set of URL patterns; see the module docstring. Raises ShardkitError for a malformed pattern."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = sorted(set(patterns))
        self.found: set[str] = set()
        """Patterns that have matched at least one URL so far."""
        self._whole, self._rest = _Strings(), _Strings()
        self._hosts: dict[str, str] = {}
        self._domains: dict[str, str] = {}
        for pattern in self.patterns:
            self._add(pattern)

    def match(self, urls: pa.Array) -> _Mask:
        """Return bool[n], true for URLs that match any pattern; null matches none."""
        mask = np.zeros(len(urls), np.bool_)
        data = pc.fill_null(urls, "").cast(pa.binary())
        self._whole.match(data, mask, self.found)
        if self._rest:
            bare = pc.replace_substring_regex(pc.fill_null(urls, ""), r"^[A-Za-z][A-Za-z0-9+.\-]*://", "")
            self._rest.match(bare.cast(pa.binary()), mask, self.found)
        if self._hosts or self._domains:
            mask |= self._match_hosts(urls)
        mask &= urls.is_valid().to_numpy(zero_copy_only=False)
        return mask

    @property
    def unmatched(self) -> list[str]:
        """Patterns that have matched no URL so far."""
        return [pattern for pattern in self.patterns if pattern not in self.found]

    def _add(self, pattern: str) -> None:
        text = pattern.removesuffix("*")
        if pattern.startswith("*.") and "/" not in pattern and len(pattern) > 2:
            self._domains[_plain_host(pattern[2:])] = pattern
        elif "*" in text or not text:
            raise ShardkitError(f"{pattern!r} is not a URL pattern: use * at the end, or as in *.example.org")
        elif pattern.endswith("/*") and "/" not in pattern[:-2]:
            self._hosts[_plain_host(pattern[:-2])] = pattern
        else:
            (self._whole if "://" in pattern else self._rest).add(text, pattern)

    def _match_hosts(self, urls: pa.Array) -> _Mask:
        mask = np.zeros(len(urls), np.bool_)
        where = np.flatnonzero(_flags(pc.fill_null(pc.match_substring(urls, "://"), False)))
        authority = pc.list_element(pc.split_pattern(urls.take(pa.array(where)), "/", max_splits=3), 2)
        hosts = authority.dictionary_encode()
        names = pc.ascii_lower(hosts.dictionary)
        # Arrow compares plain host names; the few that match, or are not plain, are then compared in Python.
        candidates = self._below(names) | _flags(pc.match_substring_regex(names, r"[^a-z0-9_.\-]|^\.|\.$"))
        by_host = np.zeros(len(names), np.bool_)
        for number in np.flatnonzero(candidates).tolist():
            found = self._patterns_of(names[number].as_py())
            self.found |= found
            by_host[number] = bool(found)
        if len(names):
            mask[where] = by_host[hosts.indices.to_numpy(zero_copy_only=False)]
        return mask

    def _below(self, names: pa.Array) -> _Mask:
        """Return bool[n], true for host names that equal a selected host or domain or are its subdomains."""
        listed, domains = self._listed
        mask = _flags(pc.is_in(names, value_set=listed))
        if len(domains) <= _FEW:
            for domain in domains:
                mask |= _flags(pc.ends_with(names, "." + domain.as_py()))
            return mask
        where = np.arange(len(names))
        while len(where):
            has_parent = _flags(pc.match_substring(names, "."))
            where, names = where[has_parent], names.filter(pa.array(has_parent))
            names = pc.replace_substring_regex(names, r"^[^.]*\.", "")
            mask[where] |= _flags(pc.is_in(names, value_set=domains))
        return mask

    @cached_property
    def _listed(self) -> tuple[pa.Array, pa.Array]:
        """The selected names as Arrow arrays: (hosts and domains, domains only)."""
        domains = pa.array([*self._domains], pa.string())
        return pa.array([*self._hosts, *self._domains], pa.string()), domains

    def _patterns_of(self, authority: str) -> set[str]:
        """Return the host and domain patterns that match the authority (user@host:port) of a URL."""
        host = _plain_host(authority)
        labels = host.split(".")
        parents = (".".join(labels[first:]) for first in range(len(labels)))
        found = {self._domains[name] for name in parents if name in self._domains}
        if host in self._hosts:
            found.add(self._hosts[host])
        return found


class _Strings:
    """A set of exact strings and prefixes, as bytes, each with the URL pattern from which it comes."""

    def __init__(self) -> None:
        self._exact: dict[bytes, str] = {}
        self._prefixes: defaultdict[int, dict[bytes, str]] = defaultdict(dict)

    def __bool__(self) -> bool:
        return bool(self._exact or self._prefixes)

    def add(self, text: str, pattern: str) -> None:
        data = text.encode()
        if pattern.endswith("*"):
            self._prefixes[len(data)][data] = pattern
        else:
            self._exact[data] = pattern

    def match(self, data: pa.Array, mask: _Mask, found: set[str]) -> None:
        """Set `mask` to true for strings that match, and add their patterns to `found`."""
        for length, texts, patterns in self._sets:
            start = data if length is None else pc.binary_slice(data, 0, length)
            hits = pc.is_in(start, value_set=texts)
            if pc.any(hits).as_py():
                mask |= hits.to_numpy(zero_copy_only=False)
                found.update(patterns[text] for text in pc.unique(start.filter(hits)).to_pylist())

    @cached_property
    def _sets(self) -> list[tuple[int | None, pa.Array, dict[bytes, str]]]:
        """List of (length of prefixes, prefixes, {prefix: pattern}); the length is None for exact strings."""
        sets: list[tuple[int | None, dict[bytes, str]]] = [(None, self._exact)] if self._exact else []
        sets += sorted(self._prefixes.items())
        return [(length, pa.array(list(texts), pa.binary()), texts) for length, texts in sets]


def read_url_list(path: str | os.PathLike[str]) -> list[str]:
    """Read URL patterns from a file, one per line; empty lines and lines that begin with # are skipped.

    Raises ShardkitError if the file cannot be read or has no pattern.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeError) as error:
        raise ShardkitError(f"{os.fspath(path)}: cannot be read: {error}") from error
    found = [text for line in lines if (text := line.strip()) and not text.startswith("#")]
    if not found:
        raise ShardkitError(f"{os.fspath(path)}: has no URL: write one per line")
    return found


def _plain_host(authority: str) -> str:
    """Return the host in an authority (user@host:port), in lower case and IDNA."""
    end = re.search(r"[?#\\]", authority)  # these end an authority that no path follows
    host = (authority[: end.start()] if end else authority).rpartition("@")[2].lower()
    host = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0].strip(".")
    if not host.isascii():
        with suppress(UnicodeError):  # a name that IDNA cannot encode is compared as it is
            host = host.encode("idna").decode()
    return host


def _flags(mask: pa.Array) -> _Mask:
    flags: _Mask = mask.to_numpy(zero_copy_only=False)
    return flags


class Selection:
    """The criteria of a search for documents; see the module docstring.

    `documents` are document ids, `ids` the user's ids, `sources` numbers of recipe inputs. `files` are paths,
    last parts of paths, or patterns. `always` are ids of documents that are selected in any case.
    """

    def __init__(
        self,
        *,
        documents: Collection[bytes] = (),
        urls: UrlPatterns | None = None,
        ids: Collection[str] = (),
        sources: Collection[int] = (),
        files: Collection[str] = (),
        records: Collection[int] = (),
        always: Collection[bytes] = (),
    ) -> None:
        self.documents, self.urls, self.ids = frozenset(documents), urls, frozenset(ids)
        self.sources, self.files, self.records = tuple(sources), tuple(files), frozenset(records)
        self.always = frozenset(always)
        self._document_ids = pa.array(sorted(self.documents), pa.binary(16))
        self._ids, self._always = pa.array(sorted(ids), pa.string()), pa.array(sorted(always), pa.binary(16))
        self._sources = pa.array(sorted(sources), pa.int32())
        self._records = pa.array(sorted(records), pa.int64())
        self._files: dict[str, bool] = {}

    def with_always(self, documents: Collection[bytes]) -> Selection:
        """Return a copy that also selects `documents` in any case; both have the same `urls` object."""
        return Selection(
            documents=self.documents,
            urls=self.urls,
            ids=self.ids,
            sources=self.sources,
            files=self.files,
            records=self.records,
            always=documents,
        )

    @property
    def columns(self) -> list[str]:
        """Names of the columns that `match` needs."""
        wanted = {
            "document_id": bool(self.documents or self.always),
            "url": self.urls is not None,
            "id": bool(self.ids),
            "source": bool(self.sources),
            "file": bool(self.files),
            "record": bool(self.records),
        }
        return [name for name, is_wanted in wanted.items() if is_wanted]

    def match(self, table: pa.Table) -> _Mask:
        """Return bool[n], true for the selected lines of a table, which must have at least `columns`."""
        which: list[_Mask] = []
        if self.documents:
            which.append(_flags(pc.is_in(_column(table, "document_id"), value_set=self._document_ids)))
        if self.urls is not None:
            which.append(self.urls.match(_column(table, "url")))
        if self.ids:
            which.append(_flags(pc.is_in(_column(table, "id"), value_set=self._ids)))
        limits = [reduce(or_, which)] if which else []
        if self.sources:
            limits.append(_flags(pc.is_in(_column(table, "source"), value_set=self._sources)))
        if self.files:
            limits.append(self._of_files(_column(table, "file")))
        if self.records:
            limits.append(_flags(pc.is_in(_column(table, "record"), value_set=self._records)))
        wanted = reduce(and_, limits) if limits else np.ones(table.num_rows, np.bool_)
        if self.always:
            wanted |= _flags(pc.is_in(_column(table, "document_id"), value_set=self._always))
        return wanted

    def unmatched(self, found: npt.NDArray[np.bytes_]) -> list[str]:
        """Return the wanted document ids that are not in `found` (sorted S16[n]), and unmatched patterns."""
        asked = sorted(self.documents)
        there = np.isin(np.frombuffer(b"".join(asked), "S16"), found).tolist()
        missing = [one.hex() for one, is_there in zip(asked, there, strict=True) if not is_there]
        return missing + (self.urls.unmatched if self.urls is not None else [])

    def may_be_in(self, hashes: HashRange | None) -> bool:
        """Return whether a table may have selected documents, by the range of their shuffle hashes."""
        if self.urls is not None or self.ids or not self.documents or hashes is None:
            return True
        found = keyed_hashes(self.documents | self.always, hashes.seed, "shuffle")
        return bool(((hashes.first <= found) & (found <= hashes.last)).any())

    def may_be_within(self, limits: Mapping[str, tuple[Any, Any]]) -> bool:
        """Return whether a row group may have selected lines, by its columns' (minimum, maximum) values."""
        if self.always:
            return True
        if self.sources and "source" in limits:
            low, high = limits["source"]
            if not any(low <= one <= high for one in self.sources):
                return False
        if self.files and "file" in limits:
            low, high = limits["file"]
            if low == high and not self._is_wanted(low):
                return False
        return True

    def _of_files(self, column: pa.Array) -> _Mask:
        names = column.dictionary_encode()
        wanted = np.array([self._is_wanted(name) for name in names.dictionary.to_pylist()], np.bool_)
        mask: _Mask = wanted[names.indices.to_numpy(zero_copy_only=False)] if len(wanted) else wanted
        return mask

    def _is_wanted(self, name: str) -> bool:
        if name not in self._files:
            self._files[name] = any(
                name == one or name.endswith("/" + one) or fnmatchcase(name, one) for one in self.files
            )
        return self._files[name]


def parse_document_id(text: str) -> bytes:
    """Parse a document id in hex into 16 bytes. Raises ShardkitError if it is malformed."""
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != 16:
        raise ShardkitError(
            f"{text!r:.80} is not a document id of 32 hexadecimal digits; `id` is for ids of your own"
        )
    return found


def _column(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
