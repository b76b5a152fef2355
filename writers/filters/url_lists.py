"""Drop documents by their URL: datatrove's URLFilter with lists from files and no public-suffix list.

An entry of `domains` matches the host and all its subdomains, so "example.co.uk" matches "www.example.co.uk"
but not "example2.co.uk"; public suffixes have no special role. Hosts are compared in lower case and, unless
they are ASCII, in IDNA form. URLs are compared without scheme, fragment and trailing slash. Words are runs of
ASCII letters and digits, in lower case (datatrove keeps the case of words). Documents without a URL pass.

Hosts and URLs are stored as sorted 64-bit hashes, 8 bytes each: with n entries a host that is not listed
matches with probability n / 2^64.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import Field, model_validator

from shardkit.settings import FieldName, Listed
from shardkit.writers.filters.base import FilterSettings, Rule, load_list

if TYPE_CHECKING:
    from shardkit.writers.filters.batch import TextBatch


_WORDS = re.compile(r"[^a-z0-9]+")
_Files = Listed[FieldName]


class UrlListsConfig(FilterSettings):
    """Settings of `url_lists`: files with one entry per line, and how many soft words are too many."""

    domains: _Files = Field(default=(), description="Files of hosts to drop, with their subdomains.")
    hosts: _Files = Field(default=(), description="Files of hosts to drop, without their subdomains.")
    urls: _Files = Field(default=(), description="Files of URLs to drop.")
    banned_words: _Files = Field(default=(), description="Files of words that no URL may contain.")
    soft_banned_words: _Files = Field(
        default=(), description="Files of words; a URL may contain fewer than soft_word_threshold of them."
    )
    soft_word_threshold: int = Field(
        default=2, ge=1, description="Number of distinct soft words at which a document is dropped."
    )
    banned_subwords: _Files = Field(
        default=(), description="Files of substrings that no URL without its punctuation may contain."
    )

    @model_validator(mode="after")
    def _some(self) -> Self:
        if not self.files():
            raise ValueError("url_lists needs a file; set domains, hosts, urls, banned_words or another list")
        return self

    def build(self, folder: Path) -> UrlListsFilter:
        """See FilterSettings.build."""
        return UrlListsFilter(self, folder)

    def files(self) -> tuple[str, ...]:
        """See FilterSettings.files."""
        words = (*self.banned_words, *self.soft_banned_words, *self.banned_subwords)
        return (*self.domains, *self.hosts, *self.urls, *words)


class UrlListsFilter:
    """Drops documents whose host or URL is in a list, or whose URL contains listed words."""

    reasons = ("domain", "host", "url", "hard_blacklisted", "soft_blacklisted", "blacklisted_subword")

    def __init__(self, config: UrlListsConfig, folder: Path) -> None:
        self._config = config
        self._domains = load_list("url_lists.domains", folder, config.domains, _host_hashes)
        self._hosts = load_list("url_lists.hosts", folder, config.hosts, _host_hashes)
        self._urls = load_list("url_lists.urls", folder, config.urls, _url_hashes)
        self._words = load_list("url_lists.banned_words", folder, config.banned_words, _normalized)
        self._soft_words = load_list(
            "url_lists.soft_banned_words", folder, config.soft_banned_words, _normalized
        )
        subwords = sorted(load_list("url_lists.banned_subwords", folder, config.banned_subwords, _normalized))
        self._subwords = re.compile("|".join(subwords)) if subwords else None

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge. The value of "soft_blacklisted" is the number of distinct soft words."""
        values = np.zeros((len(self.reasons), len(batch)), np.int64)
        wanted = batch.wanted
        chosen = [n for n, url in enumerate(batch.column("url")) if url and wanted[n]]
        urls = [str(url) for url in batch.column("url")]
        hosts = [url_host(urls[number]) for number in chosen]
        for row, listed, keys in (
            (0, self._domains, [_parents(host) for host in hosts]),
            (1, self._hosts, [[host] for host in hosts]),
            (2, self._urls, [[plain_url(urls[number])] for number in chosen]),
        ):
            values[row, chosen] = _among(listed, keys)
        if self._words or self._soft_words or self._subwords:
            for number in chosen:
                words = set(_WORDS.split(urls[number].lower()))
                values[3, number] = not words.isdisjoint(self._words)
                values[4, number] = len(words & self._soft_words)
                joined = _WORDS.sub("", urls[number].lower())
                values[5, number] = self._subwords is not None and self._subwords.search(joined) is not None
        least = [1, 1, 1, 1, self._config.soft_word_threshold, 1]
        return [
            Rule(name, row >= bound, row)
            for name, row, bound in zip(self.reasons, values, least, strict=True)
        ]


def url_host(url: str) -> str:
    """Return the host of a URL, or of a list entry without scheme, in lower case and IDNA form."""
    rest = url.partition("://")[2] if "://" in url else url
    host = re.split(r"[/?#\\]", rest, maxsplit=1)[0].rpartition("@")[2].strip().lower()
    if not host.startswith("["):
        host = host.partition(":")[0]
    host = host.strip(".")
    if not host.isascii():
        with suppress(UnicodeError):  # a name that IDNA cannot encode is compared unchanged
            host = host.encode("idna").decode()
    return host


def plain_url(url: str) -> str:
    """Return the part of a URL that is compared: host, path and query."""
    rest = (url.partition("://")[2] if "://" in url else url).partition("#")[0].strip()
    end = re.search(r"[/?\\]", rest)
    return (url_host(url) + (rest[end.start() :] if end else "")).rstrip("/")


def _parents(host: str) -> list[str]:
    """Return a host and all its parent domains."""
    labels = host.split(".")
    return [".".join(labels[first:]) for first in range(len(labels))]


def _normalized(words: Iterable[str]) -> frozenset[str]:
    return frozenset(_WORDS.sub("", word.lower()) for word in words) - {""}


def _hash(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode())


def _host_hashes(entries: Iterable[str]) -> npt.NDArray[np.uint64]:
    return _hashes(map(url_host, entries))


def _url_hashes(entries: Iterable[str]) -> npt.NDArray[np.uint64]:
    return _hashes(map(plain_url, entries))


def _hashes(names: Iterable[str]) -> npt.NDArray[np.uint64]:
    """Return the sorted hashes of the names that are not empty."""
    return np.unique(np.fromiter((_hash(name) for name in names if name), np.uint64))


def _among(listed: npt.NDArray[np.uint64], keys: Sequence[Sequence[str]]) -> npt.NDArray[np.int64]:
    """Return int64[n]: 1 where the list contains any of keys[i], else 0."""
    found = np.zeros(len(keys), np.int64)
    if len(listed):
        hashes = np.fromiter((_hash(key) for some in keys for key in some), np.uint64)
        places = np.minimum(np.searchsorted(listed, hashes), len(listed) - 1)
        owners = np.repeat(np.arange(len(keys)), [len(some) for some in keys])
        found[owners[listed[places] == hashes]] = 1
    return found
