"""Tars of any members, and tars of images, JSON and classes as webdataset writes them, with their samples."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import webdataset
from PIL import Image

from shardkit.formats.tar.members import TarIndex
from shardkit.storage import open_store
from support.remote_harness import fresh_url

__all__ = [
    "PARTS",
    "assert_same_index",
    "make_tar",
    "npy",
    "put_tars",
    "sample",
    "samples",
    "tar_bytes",
    "tars",
]

PARTS = ((0, 7), (7, 8), (8, 8), (8, 19), (19, 23))
"""First and last + 1 of the samples in each tar; one of them is empty."""


def make_tar(
    members: Iterable[tuple[str, bytes]],
    form: int = tarfile.USTAR_FORMAT,
    *,
    times: Sequence[float] = (0,),
    user: str = "",
) -> bytes:
    """A tar of these members; `times` are theirs in turn."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as archive:
        for number, (name, data) in enumerate(members):
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.uname = len(data), times[number % len(times)], user
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def npy(array: object, *, allow_pickle: bool = False) -> bytes:
    """The .npy file of an array."""
    stream = io.BytesIO()
    np.save(stream, np.asarray(array), allow_pickle=allow_pickle)
    return stream.getvalue()


def sample(number: int) -> dict[str, Any]:
    """Make a sample; every fourth one has a caption, too, and the keys are nested."""
    image = Image.new("RGB", (3 + number % 2, 2), (number, 255 - number, 7))
    label = Image.new("P", image.size, number % 4)
    label.putpalette(bytes(range(12)))
    members = {"png": image, "seg.png": label, "json": {"number": number}, "cls": number % 10}
    caption = {"txt": f"größe {number}"} if number % 4 == 0 else {}
    return {"__key__": f"part/{number:05d}", **members, **caption}


@cache
def tar_bytes(first: int, last: int) -> bytes:
    """A tar of samples `first` to `last` - 1."""
    stream = io.BytesIO()
    with webdataset.TarWriter(stream, mtime=1) as writer:
        for number in range(first, last):
            writer.write({name: _encoded(value) for name, value in sample(number).items()})
    return stream.getvalue()


def _encoded(value: Any) -> Any:
    """Files of images: webdataset's writer would make RGB of every mode."""
    if not isinstance(value, Image.Image):
        return value
    stream = io.BytesIO()
    value.save(stream, format="PNG")
    return stream.getvalue()


def tars(parts: Sequence[tuple[int, int]] = PARTS) -> dict[str, bytes]:
    """{"part-000.tar": its bytes, …}"""
    return {f"part-{i:03d}.tar": tar_bytes(*part) for i, part in enumerate(parts)}


def put_tars(files: Mapping[str, bytes] | None = None) -> str:
    """The URL of a new store that holds these tars; by default `tars()`."""
    url = fresh_url()
    for name, data in (tars() if files is None else files).items():
        open_store(url).put(name, data)
    return url


def samples(dataset: Any) -> list[int]:
    """The numbers of a dataset's samples, in its order, each sample checked against what was written."""
    numbers = []
    for found in dataset:
        number = found["json"]["number"]
        expected = sample(number)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if name.endswith("png"):
                assert (found[name].mode, found[name].tobytes()) == (value.mode, value.tobytes())
            else:
                assert found[name] == value
        numbers.append(number)
    return numbers


def assert_same_index(found: TarIndex, expected: TarIndex) -> None:
    assert list(found.keys) == found.keys[:] == list(expected.keys)
    assert found.extensions == expected.extensions
    for name in ("starts", "offsets", "sizes", "kinds"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
