"""Ids that cannot occur are errors, ids that never occur and types that cannot be right are warnings."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit.formats import mds
from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.config import Layout, grouped
from shardkit.loaders.pytorch import MapDataset, StreamingDataset
from support.loader_data import write_card

LENGTH = 16


def make_mds(
    folder: Path, dtype: str = "uint16", *, low: int = 3, high: int = 50, eos: int | None = 3
) -> Path:
    rows = np.random.default_rng(0).integers(low + 1, high, (64, LENGTH)).astype(dtype)
    if eos is not None:
        rows[:, -1] = eos
    folder.mkdir(parents=True)
    mds.write_index(folder, [mds.write_rows_shard(folder, "shard.00000.mds", rows)])
    return folder


@pytest.mark.parametrize(
    ("dtype", "option", "value"),
    [
        *(("uint16", name, 128_001) for name in ("eos_id", "bos_id", "pad_id")),
        *(("uint16", name, value) for name in ("eos_id", "bos_id") for value in (65_536, -1, -100)),
        ("int16", "eos_id", 32_768),
        ("uint32", "eos_id", 1 << 32),
        ("int32", "pad_id", 1 << 31),
        ("int64", "eos_id", 1 << 63),
        ("uint16", "eos_id", True),
        ("uint16", "eos_id", 2.0),
        ("uint16", "bos_id", "2"),
    ],
)
def test_an_id_that_the_stored_type_cannot_hold_is_refused(
    tmp_path: Path, dtype: str, option: str, value: Any
) -> None:
    data = make_mds(tmp_path / "data", dtype)
    options: dict[str, Any] = {"eos_id": 3} if option == "pad_id" else {}
    makers: tuple[Callable[..., object], ...] = (StreamingLoader, StreamingDataset)
    for make in makers:
        with pytest.raises(
            ValueError, match=rf"{option}.*(cannot occur: ids stored as {dtype}|whole number)"
        ):
            make(data, batch_size=2, labels=True, **{**options, option: value})


def test_samples_by_number_and_one_stream_of_several_are_checked_too(tmp_path: Path) -> None:
    small, large = make_mds(tmp_path / "small"), make_mds(tmp_path / "large", "uint32", high=150_000)
    with pytest.raises(ValueError, match="small: eos_id=128001 cannot occur"):
        MapDataset(small, labels=True, eos_id=128_001)
    with pytest.raises(ValueError, match="small: eos_id=128001 cannot occur"):
        StreamingLoader([Stream(small), Stream(large)], batch_size=2, labels=True, eos_id=128_001)


def test_a_card_whose_eos_id_cannot_occur_is_refused_where_it_is_needed(tmp_path: Path) -> None:
    data = make_mds(tmp_path / "data")
    write_card(data, eos_id=128_001)
    with pytest.raises(ValueError, match="the card's eos_id=128001 cannot occur"):
        StreamingLoader(data, batch_size=2, layout=Layout(position_ids=True))
    with StreamingLoader(data, batch_size=2) as loader:
        assert len(loader) == 32


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({"eos_id": 2, "labels": True}, True),
        ({"bos_id": 60, "position_ids": True}, True),
        ({"eos_id": 3, "labels": True}, False),
        ({"eos_id": np.int64(3), "labels": True}, False),
        ({"bos_id": np.int64(3), "position_ids": True}, False),
        ({"eos_id": 3, "pad_id": 0, "labels": True}, False),  # rows need not be padded
        ({"eos_id": 2}, False),  # nothing asks for documents
    ],
)
def test_an_id_that_no_sampled_row_has_is_a_warning(
    tmp_path: Path, options: dict[str, Any], warns: bool
) -> None:
    data = make_mds(tmp_path / "data")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        StreamingLoader(data, batch_size=2, **grouped(options)).close()
    assert ["were sampled" in f"{each.message}" for each in caught] == [True] * warns


def ids_of(count: int, high: int, dtype: str) -> np.ndarray[Any, Any]:
    ids = np.random.default_rng(1).integers(3, high, count).astype(dtype)
    ids[::97] = 2
    return ids


@pytest.mark.parametrize(
    ("written", "read", "high", "says"),
    [
        ("uint32", "uint16", 150_000, r"upper halves.* uint16 2 0 .* or as uint32 2 "),
        ("uint32", "uint16", 50_000, r"upper halves"),
        ("int32", "uint16", 50_000, r"upper halves"),
        ("int64", "uint16", 150_000, r"upper halves"),
        ("int64", "uint32", 50_000, r"upper halves"),
        ("uint16", "uint32", 50_000, r"as high as .* or as uint16 2 "),
        ("uint16", "int32", 50_000, r"(as high as|as low as) .*or as "),
        ("uint16", "int64", 50_000, r"(as high as|as low as)"),
        ("uint32", "int64", 50_000, r"as high as"),
        ("uint16", "uint16", 50_000, None),
        ("uint16", "uint16", 8, None),
        ("uint32", "uint32", 150_000, None),
        ("int64", "int64", 150_000, None),
    ],
)
def test_a_wrong_type_of_flat_files_is_noticed_and_both_readings_are_shown(
    tmp_path: Path, written: str, read: str, high: int, says: str | None
) -> None:
    ids_of(20_000, high, written).tofile(tmp_path / "train.bin")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = StreamingLoader(tmp_path / "train.bin", batch_size=4, sequence_length=50, token_dtype=read)
        loader.close()
    messages = [f"{each.message}" for each in caught if "fill no row" not in f"{each.message}"]
    assert len(messages) == (says is not None), messages
    if says is not None:
        assert re.search(says, messages[0]), messages[0]


def test_negative_ids_of_a_file_that_states_its_type_are_a_warning(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.full(1000, -1, np.int64))
    with pytest.warns(RuntimeWarning, match="has ids as low as -1: the file states this dtype"):
        StreamingLoader(tmp_path / "ids.npy", batch_size=4, sequence_length=50).close()


@pytest.mark.parametrize("options", [{}, {"labels": True, "eos_id": 3}, {"return_ids": True}])
@pytest.mark.parametrize(
    ("stored", "dtype", "largest", "fits"),
    [
        ("uint32", "int32", (1 << 31) - 1, True),
        ("uint32", "int32", 1 << 31, False),
        ("uint32", "int32", (1 << 32) - 1, False),
        ("uint64", "int64", (1 << 63) - 1, True),
        ("uint64", "int64", 1 << 63, False),
        ("uint32", "int64", (1 << 32) - 1, True),
    ],
)
def test_an_id_that_wraps_around_is_an_error_of_the_batch(
    tmp_path: Path, stored: str, dtype: str, largest: int, fits: bool, options: dict[str, Any]
) -> None:
    data = make_mds(tmp_path / "data", stored)
    rows = np.full((8, LENGTH), 3, stored)
    rows[5, 7] = largest
    mds.write_index(data, [mds.write_rows_shard(data, "shard.00000.mds", rows)])
    loader = StreamingLoader(data, batch_size=8, dtype=dtype, shuffle="none", **grouped(options))
    if fits:
        assert next(iter(loader))["tokens"][5, 7] == largest
    else:
        with pytest.raises(ValueError, match=f"token id {largest:,} does not fit dtype {dtype}: give dtype="):
            next(iter(loader))
    loader.close()


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [("int64", "int32"), ("uint16", "int16"), ("int32", "uint32"), ("uint64", "uint32"), ("int16", "uint8")],
)
def test_types_that_cannot_hold_the_stored_ones_are_refused(tmp_path: Path, stored: str, dtype: str) -> None:
    data = make_mds(tmp_path / "data", stored)
    make: Callable[..., object] = StreamingLoader
    with pytest.raises(ValueError, match=f"dtype {dtype} cannot hold tokens stored as {stored}"):
        make(data, batch_size=2, dtype=dtype)
