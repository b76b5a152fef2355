"""Canonical URLs: the documented rules one by one, and that a canonical form is its own."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.writers.dedup.exact import KEYS
from shardkit.writers.dedup.urls import TRACKING, Tracking, canonical_url, url_keys

RULES = {
    "http://example.org": [
        "http://example.org",
        "https://example.org/",
        "HTTPS://WWW.Example.ORG:443//",
        "http://example.org:80",
        "http://example.org:0080/#top",
        "//example.org",
        "example.org/?",
        " http://exam\nple.org\t",
        "http://me:secret@example.org.",
        "http://example.org\\",
        "http://%65xample.org/./a/..",
        "http://example.org?utm_source=a&UTM_Medium=b&fbclid=1&&gclid",
    ],
    "http://example.org/a/c": [
        "http://example.org/a/./b/../c",
        "http://example.org/../a/c/",
        "http://example.org/a/%2E/c",
        "http://example.org\\a\\c",
    ],
    "http://example.org/A%2F~b": ["http://example.org/A%2f%7Eb", "http://example.org/%41%2F~b"],
    "http://example.org/caf%C3%A9%20%5Bx%5D%25z": [
        "http://example.org/café [x]%z",
        "http://example.org/caf%c3%a9%20%5bx%5D%25z",
    ],
    "http://example.org/x?a=2&a=1&b=%20&utmost=3": [
        "https://example.org/x/?utmost=3&b= &a=2&a=1",
        "https://example.org/x?b=%20&a=2&utm_id=7&a=1&utmost=3#part",
    ],
    "http://xn--bcher-kva.example:8080": ["http://BÜCHER.example:8080", "http://xn--bcher-kva.example:8080/"],
    "http://[::1]:8080/x": ["http://[::1]:8080/x", "https://[::1]:8080/x/"],
    "http://[www.%C2%80]": ["http://[WWW.\x80]", "http://[www.%c2%80]"],
    "ftp://example.org/x": ["FTP://example.org:21/x"],
    "mailto:A@example.org": ["MAILTO:A@example.org#x"],
}
DIFFERENT = [
    "http://example.org/a",
    "http://example.org/A",
    "http://example.org//a",
    "http://m.example.org/a",
    "http://example.org/a/index.html",
    "http://example.org:8080/a",
    "http://example.org/a?x",
    "http://example.org/a?x=",
    "http://example.org/a?x=1&x=2",
    "http://example.org/a?x=2&x=1",
    "http://example.org/a?x=%26y",
    "http://example.org/a?x=&y",
    "http://example.org/a%2Fb",
    "http://example.org/a/b",
    "ftp://example.org/a",
    "http://www.org/a",
    "http://org.example/a",
]
PIECES = [*"aAwW.:/\\?#&=%2eE5 @[]é。\t-_~0", "www.", "http://", "https://", "utm_", "%C3", "℀", "ß"]


@pytest.mark.parametrize("form", RULES)
def test_urls_that_differ_in_what_the_rules_unify_are_one(form: str) -> None:
    assert {url: canonical_url(url) for url in [form, *RULES[form]]} == dict.fromkeys(
        [form, *RULES[form]], form
    )


def test_urls_that_may_be_of_different_pages_stay_apart() -> None:
    assert len({canonical_url(url) for url in DIFFERENT}) == len(DIFFERENT)


def test_values_that_are_no_urls_have_no_form() -> None:
    for value in (
        "",
        "N/A",
        "none",
        "-",
        "unknown",
        "http://",
        "https:///x",
        "//",
        "http://:80/",
        "http://./",
    ):
        assert canonical_url(value) is None, value


@settings(max_examples=600, deadline=None)
@given(
    st.sampled_from(["", "http://", "https://a.org/", "x.org?"]),
    st.lists(st.one_of(st.sampled_from(PIECES), st.characters(codec="utf-8")), max_size=40).map("".join),
)
def test_a_canonical_form_is_its_own_and_common_urls_have_that_of_the_whole_rule(
    start: str, rest: str
) -> None:
    url = start + rest
    form = canonical_url(url)
    assert form is None or canonical_url(form) == form
    assert "#" in url or canonical_url(url + "#") == form  # no shortcut is taken for these
    if form is not None and form.startswith("http://"):
        assert form.isascii()
        assert " " not in form


def test_parameters_that_a_recipe_names_are_dropped_too() -> None:
    tracking = Tracking.of(["SessionId", "ref_*"])
    assert canonical_url("http://a.org/?sessionid=1&REF_x=2&ref=3&gclid=4", tracking) == "http://a.org?ref=3"
    assert canonical_url("http://a.org/?sessionid=1") == "http://a.org?sessionid=1"
    assert all(
        canonical_url(f"http://a.org/?{name.replace('*', 'x')}=1") == "http://a.org" for name in TRACKING
    )


def test_documents_without_url_have_no_key_and_those_of_one_url_the_same() -> None:
    keys = np.zeros(6, KEYS.dtype)
    keys["row"], keys["bytes"] = np.arange(6), 7
    urls = pa.array(["https://www.a.org/", None, "a.org", "", "N/A", "http://b.org"])
    rows = url_keys(keys, urls)
    assert rows["row"].tolist() == [0, 2, 5]
    assert (rows["bytes"] == 7).all()
    digest = xxhash.xxh3_128_intdigest(b"http://a.org")
    for row, same in zip(rows, (True, True, False), strict=True):
        assert (int(row["key"]) << 64 | int(row["low"]) == digest) == same
    assert not len(url_keys(keys[:2], pa.array([None, "x"])))
