"""Headers are read as tarfile reads them, samples grouped as webdataset groups them; hostile tars refused."""

from __future__ import annotations

import io
import re
import tarfile
import warnings
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from webdataset.tariterators import base_plus_ext

from shardkit.errors import ShardError
from shardkit.formats.tar.members import (
    MAX_EXTENSION_HEADERS,
    Member,
    group_members,
    split_name,
    walk_members,
)
from shardkit.formats.tar.shard import shard_from_raw
from shardkit.formats.tar.shard_list import describe_tar
from support.foreign_tars import make_tar

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def header(name: bytes, size: int | bytes, kind: bytes = b"0", magic: bytes = b"ustar\x0000") -> bytes:
    """One header block, made by hand, with a right checksum."""
    size_field = b"%011o\0" % size if isinstance(size, int) else size
    block = bytearray(512)
    block[:100] = name.ljust(100, b"\0")
    block[100:124] = b"0000644\0" * 3
    block[124:136] = size_field
    block[136:148] = b"%011o\0" % 0
    block[148:156] = b" " * 8
    block[156:157] = kind
    block[257 : 257 + len(magic)] = magic
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def member(name: bytes, data: bytes, kind: bytes = b"0", **more: bytes) -> bytes:
    return header(name, len(data), kind, **more) + data.ljust(-(-len(data) // 512) * 512, b"\0")


END = bytes(1024)


def walk(data: bytes) -> list[Member]:
    return list(walk_members(memoryview(data), "x.tar"))


def contents(data: bytes) -> list[tuple[str, bytes]]:
    return [(m.name, data[m.offset : m.offset + m.size]) for m in walk(data)]


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1, max_size=30).filter(
    lambda name: name.strip(" ") == name
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(NAMES, min_size=1, max_size=8).map("/".join), st.binary(max_size=1500)), max_size=8
    ),
    st.sampled_from(["gnu", "pax"]),
    st.sampled_from([0, 1700000000.25]),
)
def test_members_are_those_that_tarfile_reads(
    members: list[tuple[str, bytes]], form: str, mtime: float
) -> None:
    data = make_tar(members, FORMATS[form], times=[mtime])
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        expected = [(m.name, m.offset_data, m.size) for m in tar.getmembers() if m.isreg()]
    assert [(m.name, m.offset, m.size) for m in walk(data)] == expected


def test_ustar_prefixes_and_old_headers_are_read() -> None:
    long = "/".join(["d" * 50] * 3) + "/" + "f" * 90
    assert contents(make_tar([(long, b"1")]))[0] == (long, b"1")
    old = member(b"a.txt", b"old", kind=b"\0", magic=b"") + member(b"folder/", b"", kind=b"\0", magic=b"")
    assert contents(old + END) == [("a.txt", b"old")]
    assert contents(member(b"a.txt", b"contiguous", kind=b"7") + END) == [("a.txt", b"contiguous")]


def test_folders_links_devices_and_unknown_kinds_are_passed_over() -> None:
    data = b"".join(header(b"x" + kind, 1000, kind) for kind in (b"1", b"2", b"3", b"4", b"5", b"6"))
    data += member(b"volume", b"label" * 200, b"V") + member(b"a.txt", b"a") + END
    assert contents(data) == [("a.txt", b"a")]


def test_base_256_sizes_are_read() -> None:
    size = b"\x80" + (3).to_bytes(11, "big")
    assert contents(header(b"a.txt", size) + b"abc".ljust(512, b"\0") + END) == [("a.txt", b"abc")]


def test_checksums_summed_with_signs_are_accepted_as_tarfile_does() -> None:
    block = bytearray(member("é.txt".encode(), b"a"))
    signed = sum(c - 256 * (c > 127) for c in block[:148] + block[156:512]) + 8 * 32
    block[148:156] = b"%06o\0 " % signed
    assert contents(bytes(block) + END) == [("é.txt", b"a")]


@pytest.mark.parametrize("filled", [0, 200, 500])
@pytest.mark.parametrize("wrong_by", [1, -1, 256, 65_521, -65_521])
def test_no_other_checksum_passes_however_full_the_header_is(filled: int, wrong_by: int) -> None:
    block = bytearray(member(b"a.txt", b""))
    for at in [*range(6, 100), *range(157, 257), *range(265, 512)][:filled]:
        block[at] = 0x7F if at < 345 else 0x61
    block[:100] = b"a.txt".ljust(100, b"\0")
    right = sum(block[:148] + block[156:]) + 8 * 32
    block[148:156] = b"%06o\0 " % right
    assert walk(bytes(block) + END)[0].header == 0
    if right + wrong_by >= 0:
        block[148:156] = b"%06o\0 " % (right + wrong_by)
        with pytest.raises(ShardError, match="checksum"):
            walk(bytes(block) + END)


def pax(*records: bytes, kind: bytes = b"x") -> bytes:
    body = b""
    for record in records:
        length = len(record) + 2
        length = len(record) + 2 + len(str(length + len(str(length))))
        body += b"%d %s\n" % (length, record)
    return member(b"pax", body, kind)


def test_pax_records_override_name_and_size_for_one_member_or_for_all() -> None:
    one = pax(b"path=long.txt", b"size=3", b"comment=x") + header(b"short", 0) + b"abc".ljust(512, b"\0")
    assert contents(one + member(b"b.txt", b"b") + END) == [("long.txt", b"abc"), ("b.txt", b"b")]
    shared = pax(b"path=all.txt", kind=b"g") + member(b"a", b"1") + pax(b"path=") + member(b"b.txt", b"2")
    assert contents(shared + END) == [("all.txt", b"1"), ("b.txt", b"2")]
    assert contents(pax(b"comment=git archive", kind=b"g") + END) == []


def test_gnu_long_names_and_links_are_read() -> None:
    data = member(b"././@LongLink", b"target\0", b"K") + member(
        b"././@LongLink", b"n" * 300 + b".txt\0", b"L"
    )
    assert contents(data + member(b"nnn", b"1") + END) == [("n" * 300 + ".txt", b"1")]


def test_a_tar_may_end_without_a_marker_and_with_any_zeros() -> None:
    data = member(b"a.txt", b"a")
    for zeros in (0, 512, 1024, 100_000):
        assert contents(data + bytes(zeros)) == [("a.txt", b"a")]
    assert walk(END) == []


GOOD = member(b"a.txt", b"a" * 600) + member(b"b.txt", b"b")
HOSTILE = {
    "empty": (b"", "empty"),
    "no tar": (b"PK\x03\x04" * 200, "checksum"),
    "cut in a payload": (GOOD[:1000], "cut short"),
    "cut in padding": (GOOD[:-1], "cut short"),
    "cut in a header": (GOOD[: 1536 + 100], "cut short"),
    "damaged header in the middle": (GOOD[:1540] + b"?" + GOOD[1541:], "checksum"),
    "data after the end marker": (GOOD + END + GOOD, "after the end-of-archive"),
    "size beyond the end": (header(b"a.txt", 1 << 30) + END, "cut short"),
    "huge base-256 size": (header(b"a.txt", b"\x80" + b"\xff" * 11) + END, "cut short"),
    "negative base-256 size": (header(b"a.txt", b"\xff" * 11 + b"\xf0") + END, "negative"),
    "size that is no number": (header(b"a.txt", b"0x1_000-2 \0\0") + END, "size"),
    "size in decimal digits": (header(b"a.txt", b"00000000089\0") + END, "size"),
    "endless extensions": (pax(b"comment=x") * (MAX_EXTENSION_HEADERS + 2), "extension headers"),
    "endless global extensions": (pax(b"comment=x", kind=b"g") * 200 + GOOD, "extension headers"),
    "extension without a member": (member(b"L", b"name", b"L") + END, "without a member"),
    "long name beyond its limit": (member(b"L", b"n" * 70_000, b"L") + GOOD, "limit"),
    "PAX bomb": (header(b"x", (1 << 33) - 1, b"x") + END, "limit"),
    "extension beyond the end": (header(b"x", 5000, b"x") + END, "ends after the file"),
    "PAX length too long": (member(b"x", b"99 path=a\n", b"x") + GOOD, "PAX record"),
    "PAX length zero": (member(b"x", b"0 path=a\n", b"x") + GOOD, "PAX record"),
    "PAX length negative": (member(b"x", b"-5 path=a\n", b"x") + GOOD, "PAX record"),
    "PAX without a keyword": (member(b"x", b"6 =ab\n", b"x") + GOOD, "PAX record"),
    "PAX without an end of line": (member(b"x", b"9 path=ab", b"x") + GOOD, "PAX record"),
    "PAX size beyond the end": (pax(b"size=99999999999999999999") + GOOD, "cut short"),
    "PAX size negative": (pax(b"size=-1") + GOOD, "PAX size"),
    "PAX size endless": (pax(b"size=" + b"1" * 5000) + GOOD, "PAX size"),
    "PAX sparse file": (pax(b"GNU.sparse.major=1") + GOOD, "sparse"),
    "GNU sparse file": (member(b"a.txt", b"a", b"S") + END, "sparse"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_damaged_and_hostile_tars_are_refused_by_name(name: str) -> None:
    data, words = HOSTILE[name]
    with pytest.raises(ShardError, match=words) as caught:
        walk(data)
    assert "x.tar" in str(caught.value)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_flipped_and_cut_tars_give_sound_members_or_an_error(data: st.DataObject) -> None:
    members = [(f"{i:03d}.txt", bytes([i]) * (i * 400)) for i in range(4)]
    form = data.draw(st.sampled_from(list(FORMATS.values())))
    raw = bytearray(make_tar(members, form, times=[1700000000.5]))[:12_000]
    for _ in range(data.draw(st.integers(0, 4))):
        raw[data.draw(st.integers(0, 8000))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))]
    try:
        found = walk(bytes(raw))
    except ShardError:
        return
    assert all(0 <= m.offset <= m.offset + m.size <= len(raw) for m in found)
    assert all(a.offset + a.size <= b.start for a, b in pairwise(found))


# Samples.


def numbered(*names: str) -> list[Member]:
    return [Member(1024 * i, 1024 * i, 1024 * i + 512, 1, name) for i, name in enumerate(names)]


def samples(*names: str) -> list[tuple[str, list[str]]]:
    index = group_members(numbered(*names), "x.tar")
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
        ("dir/._0.txt", None),
        ("__MACOSX/dir/._0.txt", None),
        ("dir/.DS_Store", None),
        ("dir/0.DS_Store", ("dir/0", "ds_store")),
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
    skipped = re.match(r"__[^/]*__($|/)", name) or name.rpartition("/")[2].startswith("._")
    key, extension = base_plus_ext(name)
    expected = None if skipped or key is None else (key, extension.lower())
    assert split_name(name) == expected


def test_only_consecutive_members_are_one_sample() -> None:
    assert samples("a.txt", "a.cls", "b.txt") == [("a", ["txt", "cls"]), ("b", ["txt"])]
    assert samples("a.txt", "noext", "__m__/x.y", "a.cls") == [("a", ["txt", "cls"])]
    assert samples() == []


@pytest.mark.parametrize("names", [("a.txt", "a.txt"), ("a.txt", "a.cls", "a.TXT"), ("a.__key__",)])
def test_a_repeated_extension_is_an_error_with_its_offset(names: tuple[str, ...]) -> None:
    with pytest.raises(ShardError, match="already has") as caught:
        group_members(numbered(*names), "x.tar")
    assert caught.value.offset == 1024 * (len(names) - 1)


def test_a_column_exists_only_where_every_sample_has_it() -> None:
    index = group_members(numbered("a.txt", "a.cls", "b.txt", "c.txt"), "x.tar")
    found = index.members_of("txt")
    assert found is not None
    assert found.tolist() == [0, 2, 3]
    assert index.members_of("cls") is None
    assert index.members_of("json") is None


@pytest.mark.parametrize(
    "names",
    [
        ("a.txt", "b.txt", "a.cls"),  # a sample that fell apart
        ("a.txt", "b.txt", "a.txt"),  # tars put together
        tuple(f"{number % 10}.txt" for number in range(20)),  # the same, of equal samples
        ("x/a.txt", "x/b.txt", "y/a.txt", "x/a.json"),
        ("a.txt", "noext", "b.txt", "._c.txt", "a.txt"),
    ],
)
def test_a_key_that_comes_back_is_an_error_that_says_to_sort(names: tuple[str, ...]) -> None:
    data = make_tar([(name, b"1") for name in names])
    with pytest.raises(ShardError, match=r"has occurred before.*tar --sort=name") as caught:
        shard_from_raw("x.tar", describe_tar("x.tar"), np.frombuffer(data, np.uint8))
    assert caught.value.offset is not None


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("22.05.txt", "22.06.txt"), "22.05.txt and 22.06.txt are parts of the sample '22'"),
        (("d/v1.0.json", "d/v1.1.json"), "d/v1.0.json and d/v1.1.json are parts"),
        (("a-1.5", "a-1.6"), "a-1.5 and a-1.6 are parts of the sample 'a-1'"),
        (tuple(f"{number}.50.txt" for number in range(10, 30)), "10.50.txt and 11.50.txt are"),
        (("a.txt", "a.seg.png", "a.mp4", "a.7z", "a.3gp"), None),
        (("2024-01-01.txt", "2024-01-02.txt"), None),
    ],
)
def test_base_names_with_dots_are_named_once_for_a_dataset(names: tuple[str, ...], told: str | None) -> None:
    data = np.frombuffer(make_tar([(name, b"1") for name in names]), np.uint8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for tar in ("0.tar", "1.tar"):
            shard_from_raw(f"/dotted/{names[0]}/{tar}", describe_tar(tar), data)
    assert len(caught) == bool(told)
    assert all(told is not None and told in str(warning.message) for warning in caught)
