"""Members become samples exactly as webdataset groups them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from webdataset.tariterators import base_plus_ext

from shardkit.errors import ShardError
from shardkit.formats.tar.members import Member, group_members, split_name


def members(*names: str) -> list[Member]:
    return [Member(1024 * i, 1024 * i, 1024 * i + 512, 1, name) for i, name in enumerate(names)]


def samples(*names: str) -> list[tuple[str, list[str]]]:
    index = group_members(members(*names), "x.tar")
    kinds = [index.extensions[k] for k in index.kinds]
    return [(key, kinds[index.starts[i] : index.starts[i + 1]]) for i, key in enumerate(index.keys)]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a.txt", ("a", "txt")),
        ("a/b.c/d.seg.PNG", ("a/b.c/d", "seg.png")),
        ("../../etc/a.txt", ("../../etc/a", "txt")),
        ("/abs/a.txt", ("/abs/a", "txt")),
        ("a.", ("a", "")),
        ("noext", None),
        ("a.b/noext", None),
        (".hidden.txt", None),
        ("dir/.hidden.txt", ("dir/", "hidden.txt")),
        ("di.r/.hidden.txt", None),
        ("__meta__", None),
        ("__meta__/a.txt", None),
        ("__meta__.json", ("__meta__", "json")),
        ("x/__meta__/a.txt", ("x/__meta__/a", "txt")),
    ],
)
def test_keys_end_at_the_first_dot_of_the_last_part(name: str, parts: tuple[str, str] | None) -> None:
    assert split_name(name) == parts


@given(st.text("ab./_A", max_size=12))
def test_names_are_split_as_webdataset_splits_them(name: str) -> None:
    skipped = re.match(r"__[^/]*__($|/)", name)
    key, extension = base_plus_ext(name)
    expected = None if skipped or key is None else (key, extension.lower())
    assert split_name(name) == expected


def test_only_consecutive_members_are_one_sample() -> None:
    assert samples("a.txt", "a.cls", "b.txt", "a.txt") == [
        ("a", ["txt", "cls"]),
        ("b", ["txt"]),
        ("a", ["txt"]),
    ]
    assert samples("a.txt", "noext", "__m__/x.y", "a.cls") == [("a", ["txt", "cls"])]
    assert samples() == []


@pytest.mark.parametrize("names", [("a.txt", "a.txt"), ("a.txt", "a.cls", "a.TXT"), ("a.__key__",)])
def test_a_repeated_extension_is_an_error_with_its_offset(names: tuple[str, ...]) -> None:
    with pytest.raises(ShardError, match="already has") as caught:
        group_members(members(*names), "x.tar")
    assert caught.value.offset == 1024 * (len(names) - 1)


def test_a_column_exists_only_where_every_sample_has_it() -> None:
    index = group_members(members("a.txt", "a.cls", "b.txt", "c.txt"), "x.tar")
    found = index.members_of("txt")
    assert found is not None
    assert found.tolist() == [0, 2, 3]
    assert index.members_of("cls") is None
    assert index.members_of("json") is None
