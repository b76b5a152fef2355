"""Patterns of URLs mean what they say, against the same rules in plain Python."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.datasets.provenance.search import UrlPatterns, read_url_list
from shardkit.errors import ShardkitError

URLS = [
    f"{scheme}{host}{path}"
    for scheme in ("https://", "http://", "HTTP://", "")
    for host in ("a.org", "b.a.org", "A.org:8080", "me:pw@a.org", "xa.org", "[::1]:80", "größe.de", "a.org.x")
    for path in ("", "/", "/x", "/x/y?z=*", "?q=@b.org:1", "#f", "/xé")
]  # fmt: skip
PATTERNS = [
    "https://a.org/x", "a.org/x", "https://a.org/*", "http://b.a.org/x*", "a.org/x*", "a.org/*", "*.a.org",
    "*.org", "xn--gre-6ka8i.de/*", "*.größe.de", "[::1]/*", "me:pw@a.org/x", "nothing.here/*", "a.org",
]  # fmt: skip


def means(pattern: str, url: str) -> bool:
    """The rules as the module states them."""
    _, mark, rest = url.partition("://") if "://" in url else ("", "", url)
    host = urlsplit(url).hostname or "" if mark else ""
    host = f"[{host}]" if ":" in host else host.encode("idna").decode()
    if pattern.startswith("*."):
        return host == plain(pattern[2:]) or host.endswith("." + plain(pattern[2:]))
    if pattern.endswith("/*") and "/" not in pattern[:-2]:
        return host == plain(pattern[:-2])
    subject = url if "://" in pattern else rest
    return subject.startswith(pattern[:-1]) if pattern.endswith("*") else subject == pattern


def plain(host: str) -> str:
    return host if host.startswith("[") else host.encode("idna").decode()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_each_pattern_matches_what_it_means(pattern: str) -> None:
    patterns = UrlPatterns([pattern])
    found = patterns.match(pa.array([*URLS, None])).tolist()
    expected = [means(pattern, url) for url in URLS]
    assert found == [*expected, False]
    assert patterns.found == ({pattern} if any(expected) else set())


def test_many_domains_are_found_as_few_are() -> None:
    many = [f"*.d{n}.net" for n in range(100)] + ["*.a.org", "*.b.a.org", "h5.d7.net/*"]
    patterns = UrlPatterns(many)
    urls = [
        "https://x.y.d3.net/",
        "http://d4.net",
        "https://ad4.net/",
        "https://b.a.org/",
        "https://h5.d7.net",
    ]
    assert patterns.match(pa.array([*urls, "https://net/", "d4.net"])).tolist() == [
        True, True, False, True, True, False, False
    ]  # fmt: skip
    assert patterns.found == {"*.d3.net", "*.d4.net", "*.a.org", "*.b.a.org", "*.d7.net", "h5.d7.net/*"}


@given(patterns=st.lists(st.sampled_from(PATTERNS), min_size=1), urls=st.lists(st.sampled_from(URLS)))
def test_several_patterns_are_either_of_them_and_each_that_matches_is_known(
    patterns: list[str], urls: list[str]
) -> None:
    both = UrlPatterns(patterns)
    found = [*both.match(pa.array(urls[:5], pa.string())), *both.match(pa.array(urls[5:], pa.string()))]
    assert found == [any(means(pattern, url) for pattern in patterns) for url in urls]
    matched = {pattern for pattern in patterns if any(means(pattern, url) for url in urls)}
    assert both.found == matched
    assert both.unmatched == sorted(set(patterns) - matched)


@pytest.mark.parametrize("pattern", ["https://*.a.org", "a*b", "*", "*a.org", "a.*.org/*"])
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(ShardkitError, match=r"is not a URL pattern: use \* at the end"):
        UrlPatterns([pattern])


def test_a_list_is_read_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("\ufeff# these\n https://a.org/x \r\n\n*.b.org\n")
    assert read_url_list(tmp_path / "list") == ["https://a.org/x", "*.b.org"]
    (tmp_path / "list").write_text("# none\n")
    with pytest.raises(ShardkitError, match="has no URL"):
        read_url_list(tmp_path / "list")
    (tmp_path / "list").write_bytes(b"\xff\xfe")
    with pytest.raises(ShardkitError, match="cannot be read"):
        read_url_list(tmp_path / "list")
