"""A `Stream` prints as it was written, and says what a mistyped or MosaicML's name means."""

from __future__ import annotations

import pickle
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardkit as sk
from support.loader_data import make_dataset


def test_a_stream_prints_its_path_and_what_is_not_the_default(tmp_path: Path) -> None:
    stream = sk.Stream("s3://bucket/web", weight=3, exclude=[1, (4, 9)])
    assert repr(stream) == "Stream('s3://bucket/web', weight=3, exclude=[1, (4, 9)])"
    assert eval(repr(stream), {"Stream": sk.Stream}) == stream
    folder = make_dataset(tmp_path / "code", "mds")
    assert repr(sk.Stream(sk.open(folder))) == f"Stream('{folder}')"
    for copy in (pickle.loads(pickle.dumps(stream)), deepcopy(stream), replace(stream)):
        assert copy == stream


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("proportion", "in shardkit: `weight`"),
        ("remote", "in shardkit: the path or URL"),
        ("wieght", "did you mean weight?"),
        ("xyz", "the arguments are path, weight, name, repeat, choose, exclude, mask"),
    ],
)
def test_an_unknown_name_is_refused_with_the_one_that_is_meant(given: str, hint: str) -> None:
    values: dict[str, Any] = {given: 1}
    with pytest.raises(TypeError) as caught:
        sk.Stream("data", **values)
    assert str(caught.value) == f"Stream() got an unexpected keyword argument '{given}'; {hint}"
