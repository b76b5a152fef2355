"""Which URLs are in which list, and that hashes decide as sets of names do."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.writers.filters.url_lists import UrlListsConfig, plain_url, url_host
from support.filter_runs import decide, fails, judge, text_batch


@pytest.fixture
def lists(tmp_path: Path) -> Path:
    for name, entries in {
        "domains": "# bad\nbad.example\nco.uk.test\nBÜCHER.example\n203.0.113.9\n",
        "hosts": "only.this.host\n",
        "urls": "https://fine.test/page/\nother.test/a?b=c\n",
        "words": "Naughty\n",
        "soft": "one\ntwo\nthree\n",
        "subwords": "xx-yy\n",
    }.items():
        (tmp_path / name).write_text(entries)
    return tmp_path


EVERY_LIST = UrlListsConfig(
    domains=("domains",),
    hosts=("hosts",),
    urls=("urls",),
    banned_words=("words",),
    soft_banned_words=("soft",),
    banned_subwords=("subwords",),
)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (None, None),
        ("", None),
        ("not a url", None),
        ("https://bad.example/", "domain"),
        ("HTTP://user:bad@WWW.a.Bad.Example.:8080?x", "domain"),
        ("bad.example", "domain"),
        ("https://notbad.example/bad.example", None),
        ("https://example/", None),
        ("http://www.bücher.example/x", "domain"),
        ("http://xn--bcher-kva.example", "domain"),
        ("http://203.0.113.9/x", "domain"),
        ("https://only.this.host/a", "host"),
        ("https://not.only.this.host/a", None),
        ("http://fine.test/page#top", "url"),
        ("http://fine.test/page/2", None),
        ("http://other.test/a?b=c", "url"),
        ("http://x.test/some-naughty_page", "hard_blacklisted"),
        ("http://x.test/naughtyness", None),
        ("http://x.test/one/one", None),
        ("http://x.test/One+two", "soft_blacklisted"),
        ("http://x.test/aX-xyY", "blacklisted_subword"),
        ("http://[2001:db8::1]:80/", None),
    ],
)
def test_each_list_matches_what_it_says(lists: Path, url: str | None, expected: str | None) -> None:
    assert decide(EVERY_LIST, ["x"], [url], folder=lists) == [expected]


LABELS = st.lists(st.sampled_from(["a", "b", "www", "co"]), min_size=1, max_size=4).map(".".join)


@settings(max_examples=100, deadline=None)
@given(listed=st.sets(LABELS, max_size=4), hosts=st.lists(LABELS, max_size=6))
def test_a_domain_matches_itself_and_all_below(
    tmp_path_factory: pytest.TempPathFactory, listed: set[str], hosts: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("lists")
    (folder / "domains").write_text("\n".join(listed))
    urls = [f"https://{host}/x" for host in hosts]
    rule = judge(UrlListsConfig(domains=("domains",)), text_batch(urls, urls), folder)[0]
    expected = [any(host == name or host.endswith("." + name) for name in listed) for host in hosts]
    assert fails(rule) == expected


@settings(max_examples=100, deadline=None)
@given(
    st.text(
        st.one_of(st.sampled_from(":/?#@[]\\.x%é"), st.characters(exclude_categories=["Cs"])), max_size=30
    )
)
def test_no_text_is_too_odd_for_a_url(text: str) -> None:
    host = url_host(text)
    assert host == url_host(host)
    assert plain_url(text).startswith(host)
