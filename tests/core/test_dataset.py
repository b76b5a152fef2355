"""One call opens any dataset; its samples are the shards' samples, whatever the threads and the bounds."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import webdataset

import shardkit
from shardkit.datasets import opened as opened_module
from shardkit.errors import ShardError
from shardkit.formats import tar

SIZES = [5, 0, 9, 1]
ROWS = np.random.default_rng(3).integers(0, 60_000, (sum(SIZES), 16)).astype(np.uint16)


def parts_of(rows: npt.NDArray[np.uint16]) -> list[npt.NDArray[np.uint16]]:
    return np.split(rows, np.cumsum(SIZES)[:-1])


PARTS = parts_of(ROWS)


def write_tars(folder: Path, rows: npt.NDArray[np.uint16] = ROWS, *, listed: bool = True) -> Path:
    folder.mkdir(exist_ok=True)
    shards = [
        tar.write_rows_shard(folder, f"shard-{i:05d}.tar", part, key_start=i * 10**8, hashes=["xxh64"])
        for i, part in enumerate(parts_of(rows))
    ]
    if listed:
        tar.write_shard_list(folder, shards)
    return folder


def write_mds(
    folder: Path,
    rows: npt.NDArray[np.uint16] = ROWS,
    *,
    compression: str | None = None,
    hashes: tuple[str, ...] = ("xxh64",),
) -> Path:
    from shardkit.formats import mds

    folder.mkdir(exist_ok=True)
    parts = [part for part in parts_of(rows) if len(part)]
    shards = [
        mds.write_rows_shard(folder, f"shard.{i:05d}.mds", part, compression=compression, hashes=hashes)
        for i, part in enumerate(parts)
    ]
    mds.write_index(folder, shards)
    return folder


def tokens(sample: dict[str, object]) -> npt.NDArray[np.generic]:
    value = sample["tokens"] if "tokens" in sample else sample["tokens.npy"]
    assert isinstance(value, np.ndarray)
    return value


MAKE = {
    "mds": lambda folder, rows=ROWS: write_mds(folder, rows),
    "mds.zstd": lambda folder, rows=ROWS: write_mds(folder, rows, compression="zstd"),
    "shards.json": lambda folder, rows=ROWS: write_tars(folder, rows),
    "tars": lambda folder, rows=ROWS: write_tars(folder, rows, listed=False),
}
parametrize_kinds = pytest.mark.parametrize("kind", MAKE)


@parametrize_kinds
def test_samples_have_one_number_each_over_all_shards(tmp_path: Path, kind: str) -> None:
    dataset = shardkit.open_dataset(MAKE[kind](tmp_path))
    assert len(dataset) == len(ROWS)
    for number in (*range(len(ROWS)), -1, -len(ROWS), np.int64(3)):
        np.testing.assert_array_equal(tokens(dataset[number]), ROWS[number])
    np.testing.assert_array_equal([tokens(s) for s in dataset], ROWS)
    for number in (len(ROWS), -len(ROWS) - 1):
        with pytest.raises(IndexError, match=f"no sample {number}; the dataset has {len(ROWS)}"):
            dataset[number]
    with pytest.raises(TypeError):
        dataset["tokens"]  # type: ignore[index]


@parametrize_kinds
def test_packed_datasets_say_what_their_tokens_are(tmp_path: Path, kind: str) -> None:
    dataset = shardkit.open_dataset(str(MAKE[kind](tmp_path)))
    assert dataset.token_column == "tokens"
    assert (dataset.sequence_length, dataset.token_dtype) == (16, np.dtype("uint16"))
    assert [c.name for c in dataset.columns] == [dataset.token_column]
    view = dataset.shard(0).fixed_rows(dataset.token_column)
    np.testing.assert_array_equal(view, PARTS[0])
    assert dataset.fingerprint == dataset.manifest.fingerprint


@parametrize_kinds
def test_views_outlive_the_shard_and_its_file(tmp_path: Path, kind: str) -> None:
    with shardkit.open_dataset(MAKE[kind](tmp_path)) as dataset:
        shard, column = dataset.shard(0), dataset.token_column
        assert column is not None
        view = shard.fixed_rows(column)
        shard.close()
    for file in tmp_path.iterdir():
        file.unlink()
    np.testing.assert_array_equal(view, PARTS[0])


@parametrize_kinds
def test_a_relative_path_means_the_folder_that_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A namesake of the same shape in the new working directory must never be read in its place."""
    for name, rows in (("here", ROWS), ("elsewhere", ROWS + 1)):
        (tmp_path / name).mkdir()
        MAKE[kind](tmp_path / name / "data", rows)
    monkeypatch.chdir(tmp_path / "here")
    dataset = shardkit.open_dataset("data")
    monkeypatch.chdir(tmp_path / "elsewhere")
    np.testing.assert_array_equal([tokens(sample) for sample in dataset], ROWS)
    assert Path(dataset.location) == dataset.path == tmp_path / "here" / "data"
    np.testing.assert_array_equal([tokens(sample) for sample in pickle.loads(pickle.dumps(dataset))], ROWS)


def replace_by_rename(folder: Path, make: Callable[[Path], Path]) -> None:
    folder.rename(folder.with_name("old"))
    make(folder)


def rewrite_in_place(folder: Path, make: Callable[[Path], Path]) -> None:
    """Every file keeps its inode and size."""
    made = make(folder.with_name("made"))
    for file in made.iterdir():
        with (folder / file.name).open("r+b") as target:
            target.write(file.read_bytes())


def replace_shards_only(folder: Path, make: Callable[[Path], Path]) -> None:
    made = make(folder.with_name("made"))
    for file in made.glob("shard*[!n]"):
        file.rename(folder / file.name)


@pytest.mark.parametrize("how", [replace_by_rename, rewrite_in_place, replace_shards_only])
@parametrize_kinds
def test_rows_of_a_dataset_that_is_replaced_are_never_mixed_with_those_opened(
    tmp_path: Path, kind: str, how: Callable[[Path, Callable[[Path], Path]], None]
) -> None:
    """Every row that is delivered is of the dataset that was opened, or an error says what happened."""
    dataset = shardkit.open_dataset(MAKE[kind](tmp_path / "data"))
    first = dataset[0]
    dataset.close()  # forgets the shard, as a loader over many shards does
    how(tmp_path / "data", lambda folder: MAKE[kind](folder, ROWS + 1))
    with pytest.raises(ShardError, match=r"was replaced after .* open the dataset again, with a new loader"):
        dataset[0]
    np.testing.assert_array_equal(tokens(first), ROWS[0])
    if how is not replace_shards_only:  # nothing can show that of a shard that was never opened before
        with pytest.raises(ShardError, match="was replaced"):
            dataset[-1]


def test_what_is_no_path_or_no_number_is_answered_in_words(tmp_path: Path) -> None:
    wrong: Any = None
    with pytest.raises(TypeError, match=r"^path must be a path, a URL or a list of these, not None$"):
        shardkit.open_dataset(wrong)
    wrong = 1.5
    with pytest.raises(TypeError, match=r"^select rows by number, slice or list of numbers, not by 1.5$"):
        shardkit.open_dataset(write_mds(tmp_path))[wrong]


def test_a_dataset_whose_index_is_gone_opens_no_more_shards(tmp_path: Path) -> None:
    """So a publication that replaces it begins."""
    dataset = shardkit.open_dataset(write_mds(tmp_path))
    (tmp_path / "index.json").unlink()
    with pytest.raises(ShardError, match=r"index\.json: was removed after"):
        dataset[0]


def test_an_index_that_is_written_again_must_prove_its_shards(tmp_path: Path) -> None:
    dataset = shardkit.open_dataset(write_mds(tmp_path))
    os.utime(tmp_path / "index.json", ns=(1, 1))
    np.testing.assert_array_equal([tokens(sample) for sample in dataset], ROWS)

    dataset = shardkit.open_dataset(write_mds(tmp_path, hashes=()))
    os.utime(tmp_path / "index.json", ns=(1, 1))
    with pytest.raises(ShardError, match=r"does not prove that shard\.00000\.mds is the same"):
        dataset[0]


def test_hashes_are_compared_when_a_shard_is_first_opened(tmp_path: Path) -> None:
    write_mds(tmp_path)
    dataset = shardkit.open_dataset(tmp_path, verify=True)
    assert len(list(dataset)) == len(ROWS)
    data = bytearray((tmp_path / "shard.00001.mds").read_bytes())
    data[-1] ^= 1
    (tmp_path / "shard.00001.mds").write_bytes(data)
    assert len(list(shardkit.open_dataset(tmp_path))) == len(ROWS), "only what is asked for is verified"
    with pytest.raises(ShardError, match=r"shard\.00001\.mds: xxh64"):
        list(shardkit.open_dataset(tmp_path, verify=True))


def test_datasets_of_other_columns_have_no_token_column(tmp_path: Path) -> None:
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for i in range(12):
            arrays = {"a.npy": np.full(4, i), "b.npy": np.full(4, -i)}
            writer.write({"__key__": f"{i:04d}", "json": {"i": i}, **arrays})
    dataset = shardkit.open_dataset(tmp_path)
    assert (dataset.token_column, dataset.sequence_length, dataset.token_dtype) == (None, None, None)
    assert dataset[7]["json"] == {"i": 7}
    assert shardkit.open_dataset(tmp_path, decode=False)[7]["json"] == b'{"i": 7}'


def test_shards_that_differ_have_no_token_column(tmp_path: Path) -> None:
    for i, length in enumerate((8, 8, 9)):
        tar.write_rows_shard(tmp_path, f"{i}.tar", np.ones((9, length), np.uint16), key_start=0)
    assert shardkit.open_dataset(tmp_path).token_column is None
    (tmp_path / "2.tar").unlink()
    assert shardkit.open_dataset(tmp_path).token_column == "tokens"


def test_lists_without_columns_are_looked_into(tmp_path: Path) -> None:
    write_tars(tmp_path)
    listing = json.loads((tmp_path / "shards.json").read_text())
    for entry in listing["shardlist"]:
        del entry["columns"]
    (tmp_path / "shards.json").write_text(json.dumps(listing))
    assert shardkit.open_dataset(tmp_path).sequence_length == 16


def test_at_most_so_many_shards_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened_module, "MAX_OPEN_SHARDS", 2)
    dataset = shardkit.open_dataset(write_tars(tmp_path))
    first = dataset.shard(0)
    assert dataset.shard(0) is first
    dataset.shard(2)
    dataset.shard(0)
    dataset.shard(3)
    assert dataset.shard(0) is first  # used last, so it stayed
    dataset.shard(2)
    dataset.shard(3)
    assert dataset.shard(0) is not first
    np.testing.assert_array_equal(tokens(first.sample(4)), ROWS[4])  # forgotten, yet whole for who holds it


def test_decompressed_shards_are_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = shardkit.open_dataset(write_mds(tmp_path, compression="zstd"))
    monkeypatch.setattr(opened_module, "MAX_RESIDENT_BYTES", 1)
    first = dataset.shard(0)
    assert dataset.shard(0) is first
    dataset.shard(1)
    assert dataset.shard(0) is not first


def test_threads_share_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened_module, "MAX_OPEN_SHARDS", 1)
    dataset = shardkit.open_dataset(write_tars(tmp_path))
    numbers: list[int] = np.random.default_rng(0).integers(0, len(ROWS), 600).tolist()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: tokens(dataset[int(n)]), numbers))
    np.testing.assert_array_equal(found, ROWS[numbers])


def test_datasets_travel_to_other_processes_and_close_again(tmp_path: Path) -> None:
    with shardkit.open_dataset(write_tars(tmp_path)) as dataset:
        first = dataset.shard(0)
        copy = pickle.loads(pickle.dumps(dataset))
    np.testing.assert_array_equal(tokens(copy[0]), ROWS[0])
    assert copy.fingerprint == dataset.fingerprint
    assert dataset.shard(0) is not first


def test_the_card_is_read_and_with_verify_held_against_the_index(tmp_path: Path) -> None:
    folder = write_tars(tmp_path)
    assert shardkit.open_dataset(folder).card is None
    fingerprint = shardkit.open_dataset(folder).fingerprint
    (folder / "dataset.json").write_text(json.dumps({"fingerprint": fingerprint, "eos": 0}))
    card = shardkit.open_dataset(folder, verify=True).card
    assert card is not None
    assert card.data == {"fingerprint": fingerprint, "eos": 0}
    assert shardkit.open_dataset(folder / "shard-00000.tar").card is None
    (folder / "dataset.json").write_text('{"fingerprint": "other"}')
    with pytest.raises(ShardError, match="card of another dataset"):
        shardkit.open_dataset(folder, verify=True)


def test_damage_is_found_when_a_shard_is_opened_with_verify(tmp_path: Path) -> None:
    folder = write_tars(tmp_path)
    data = bytearray((folder / "shard-00000.tar").read_bytes())
    data[512 + 128] ^= 1
    (folder / "shard-00000.tar").write_bytes(data)
    assert len(shardkit.open_dataset(folder)[0]) == 2
    with pytest.raises(ShardError, match="xxh64"):
        shardkit.open_dataset(folder, verify=True)[0]


def test_folders_that_hold_no_dataset_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"looked for index\.json \(MDS\), shards\.json, \*\.tar"):
        shardkit.open_dataset(tmp_path)
    with pytest.raises(ShardError, match="no such file or folder"):
        shardkit.open_dataset(tmp_path / "absent")
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ShardError, match="neither a folder"):
        shardkit.open_dataset(tmp_path / "a.txt")


@pytest.mark.parametrize("trace", ["dataset.json", "provenance"])
def test_an_unfinished_build_is_not_taken_for_a_folder_of_tars(tmp_path: Path, trace: str) -> None:
    write_tars(tmp_path, listed=False)
    (tmp_path / trace).mkdir()
    with pytest.raises(ShardError, match="unfinished build"):
        shardkit.open_dataset(tmp_path)


def test_importing_shardkit_loads_nothing_until_it_is_used() -> None:
    code = "import sys, shardkit; assert 'numpy' not in sys.modules; shardkit.open_dataset; shardkit.nothing"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert "AttributeError: module 'shardkit' has no attribute 'nothing'" in done.stderr
