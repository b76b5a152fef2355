"""The quick index is the walk's index or none at all."""

from __future__ import annotations

import tarfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import ShardError
from shardkit.formats.tar.members import TarIndex, group_members, walk_members
from shardkit.formats.tar.stride import index_constant_stride
from support.foreign_tars import assert_same_index, make_tar


def tar_of(
    samples: int = 20,
    *,
    form: int = tarfile.USTAR_FORMAT,
    times: bool = False,
    extensions: tuple[str, ...] = ("tokens.npy", "cls"),
    key: str = "{:06d}",
) -> bytearray:
    members = [(f"{key.format(i)}.{e}", bytes([i % 256]) * 600) for i in range(samples) for e in extensions]
    spread = [1700000000 + i + (i % 7) / 16 for i in range(samples) for _ in extensions]
    return bytearray(make_tar(members, form, times=spread if times else [0], user="bigdata"))


def quick(data: bytes | bytearray) -> TarIndex | None:
    return index_constant_stride(np.frombuffer(bytes(data), dtype=np.uint8), "x.tar")


def walked(data: bytes | bytearray) -> TarIndex:
    return group_members(walk_members(memoryview(bytes(data)), "x.tar"), "x.tar")


ALIKE: dict[str, bytes | bytearray] = {
    "ustar": tar_of(),
    "one member": tar_of(extensions=("tokens.npy",)),
    "gnu": tar_of(form=tarfile.GNU_FORMAT),
    "pax with whole times": tar_of(form=tarfile.PAX_FORMAT),
    "pax with fractional times, as webdataset writes": tar_of(form=tarfile.PAX_FORMAT, times=True),
    "in a folder with a dot": tar_of(key="train.v1/a{:04d}"),
    "without an end marker": tar_of()[: 20 * 2 * 1536],
    "with a long end": tar_of() + bytes(3_000_000),
}


@pytest.mark.parametrize("name", ALIKE)
def test_equal_samples_are_indexed_without_a_walk(name: str) -> None:
    found = quick(ALIKE[name])
    assert found is not None
    assert_same_index(found, walked(ALIKE[name]))


def with_folder() -> bytes:
    """A folder after each sample: inside the stride, but no part of it that the checks know."""
    plain = tar_of(extensions=("cls",))
    folder = tarfile.TarInfo("d")
    folder.type = tarfile.DIRTYPE
    return b"".join(bytes(plain[i : i + 1536]) + folder.tobuf() for i in range(0, 20 * 1536, 1536)) + bytes(
        1024
    )


DIFFERENT: dict[str, bytes | bytearray] = {
    "keys of growing length": tar_of(key="{:d}"),
    "few samples": tar_of(3),
    "one key for all": tar_of(key="same"),
    "non-ASCII keys": tar_of(key="ключ{:04d}", form=tarfile.GNU_FORMAT),
    "long names": tar_of(key="k" * 100 + "{:04d}", form=tarfile.PAX_FORMAT),
    "prefixed names": tar_of(key="p" * 80 + "/" + "k" * 60 + "{:04d}"),
    "metadata": tar_of(key="__m{:04d}__/a"),
    "no extension": tar_of(key="k{:04d}/", extensions=("a",)),
    "folders between": with_folder(),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_anything_less_plain_is_left_to_the_walk(name: str) -> None:
    assert quick(DIFFERENT[name]) is None


def rewrite(data: bytearray, at: int, text: bytes) -> None:
    """Change bytes of the header block that holds `at`, and make its checksum right again."""
    data[at : at + len(text)] = text
    block = at // 512 * 512
    data[block + 148 : block + 156] = b" " * 8
    data[block + 148 : block + 156] = b"%06o\0 " % sum(data[block : block + 512])


LAST = 15 * 2 * 1536  # the start of sample 15 of tar_of()
PAX_LAST = 15 * 2 * 2560


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (LAST, b"000014"),  # the key of the sample before
        (LAST, b"0000.5"),  # a dot in the key
        (LAST, b"00/015"),  # another folder
        (LAST + 7, b"TOKENS.npy"),  # another spelling
        (LAST + 7, b"tokens.npz"),
        (LAST + 124, b"00000001131\0"),  # 601 bytes: as many blocks
        (LAST + 156, b"5"),  # a folder
        (LAST + 345, b"prefix"),
        (LAST + 1536, b"000016"),  # the second member belongs to another sample
    ],
)
def test_a_single_header_that_differs_is_seen(at: int, text: bytes) -> None:
    data = tar_of()
    rewrite(data, at, text)
    assert quick(data) is None


def test_a_wrong_checksum_is_seen_and_worded_by_the_walk() -> None:
    data = tar_of()
    data[LAST + 3] = ord("9")
    assert quick(data) is None
    with pytest.raises(ShardError, match="checksum") as caught:
        walked(data)
    assert caught.value.offset == LAST


@pytest.mark.parametrize("record", [b"28 path=a.tokens.npy,,,,,,,\n", b"28 size=1111111111.000000000\n"[:28]])
def test_a_pax_record_that_overrides_is_seen(record: bytes) -> None:
    data = tar_of(form=tarfile.PAX_FORMAT, times=True)
    assert quick(data) is not None
    size = int(bytes(data[PAX_LAST + 124 : PAX_LAST + 135]), 8)
    text = (b"%d " % size + record[3:]).ljust(size - 1, b"0")[: size - 1] + b"\n"
    data[PAX_LAST + 512 : PAX_LAST + 512 + size] = text
    assert quick(data) is None


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_flipped_bytes_never_make_it_differ_from_the_walk(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from([tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT]))
    raw = tar_of(12, form=form, times=True, extensions=("npy",))
    stride = 2560 if form == tarfile.PAX_FORMAT else 1536
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, 11)) * stride + data.draw(st.integers(0, stride - 513))
        if data.draw(st.booleans()):
            raw[at] = data.draw(st.sampled_from(list(b"\0 019./_xLg")))
        else:
            rewrite(raw, at, bytes([data.draw(st.sampled_from(list(b"\0 019./_xLg")))]))
    try:
        found = quick(raw)
    except ShardError:
        found = None
    if found is not None:
        assert_same_index(found, walked(raw))
