"""Brace lists mean what they mean to webdataset, patterns what they mean to pathlib; mistakes are refused."""

from __future__ import annotations

from pathlib import Path

import braceexpand
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from webdataset.shardlists import expand_urls

from shardkit.formats.tar.shard_list import (
    common_folder,
    expand_braces,
    fixed_folder,
    is_tar_name,
    matches,
    split_names,
    tar_compression,
)

LISTS = [
    "part-{000..012}.tar", "{a,b}{1..3}", "{10..1}", "{1..10..3}", "{a..e}", "{e..a..2}", "{a,{b,c}d,}x",
    "{01..3}", "{-01..02}", "{x}", "{1..-3}", "plain", "{-5..10..5}", "{a,b{1..2}}", "{}", "{{a,b}}",
    "{1..2}{x",
]  # fmt: skip


@pytest.mark.parametrize("text", LISTS)
def test_brace_lists_name_what_webdataset_takes_them_to_name(text: str) -> None:
    try:
        expected = list(braceexpand.braceexpand(text))
    except ValueError:
        with pytest.raises(ValueError, match="without its"):
            expand_braces(text)
        return
    assert expand_braces(text) == expected
    assert split_names(f"{text}::s3://b/{text}") == expand_urls(f"{text}::s3://b/{text}")


@settings(max_examples=100, deadline=None)
@given(st.text("ab1.,{}-0", max_size=14))
def test_any_text_is_a_list_or_an_error(text: str) -> None:
    try:
        expected = list(braceexpand.braceexpand(text))
    except (ValueError, MemoryError):
        expected = []
    depths = [text[: at + 1].count("{") - text[: at + 1].count("}") for at in range(len(text))]
    if not expected or min(depths, default=0) < 0:  # webdataset takes "}{" for a name
        with pytest.raises(ValueError, match=r"without its"):
            expand_braces(text)
    elif len(expected) < 1000:
        assert expand_braces(text) == expected


@pytest.mark.parametrize(
    "text",
    ["{0..9999999999}", "{0..99999}{0..99999}", "{a,b}" * 40, "{" * 5000, "{" * 500 + "}" * 500, "}{"],
)
def test_lists_that_name_too_much_or_nothing_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardkit.formats.tar.shard_list.MAX_NAMES", 200_000)
    with pytest.raises(ValueError, match=r"more than|without its|too many braces"):
        expand_braces(text)


def test_patterns_match_what_pathlib_matches(tmp_path: Path) -> None:
    names = ["a.tar", "b.tar", "b[1].tar", "d/a.tar", "d/e/a.tar", "d/e/b.txt", "ab/a.tar"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for pattern in (
        "*.tar",
        "*/a.tar",
        "**/a.tar",
        "d/**/*",
        "?.tar",
        "[ab].tar",
        "b[[]1].tar",
        "**/*.t?[rt]",
        "x*",
    ):
        found = sorted(f.relative_to(tmp_path).as_posix() for f in tmp_path.glob(pattern) if f.is_file())
        assert sorted(name for name in names if matches(name, pattern)) == found, pattern


def test_the_folder_that_names_share_ends_before_the_first_pattern() -> None:
    assert fixed_folder("s3://b/p/a*/c.tar") == "s3://b/p"
    assert fixed_folder("s3://b/p/a.tar") == "s3://b/p"
    assert fixed_folder("a.tar") == fixed_folder("*/a.tar") == ""
    assert common_folder(["s3://b/p/x", "s3://b/p/y/z", "s3://b/p/x"]) == "s3://b/p"
    assert common_folder(["s3://b/part-1", "s3://b/part-2"]) == "s3://b"
    assert common_folder(["s3://a/p", "s3://b/p"]) == "s3:/"


def test_names_say_how_a_tar_is_stored() -> None:
    assert tar_compression("a/b-000.tar") == ("", "a/b-000.tar")
    assert tar_compression("a/b.TGZ") == ("gz", "a/b.tar")
    assert tar_compression("b.tar.gz") == ("gz", "b.tar")
    assert tar_compression("b.tar.zst") == ("zstd", "b.tar")
    assert tar_compression("b.tbz2") == ("bz2", "b.tar")
    for name in ("b.zip", "tar", ".tar", "a/.tar.gz", "b.tar.gz.tmp", "b.tar.tmp", "b.gz"):
        assert not is_tar_name(name)
