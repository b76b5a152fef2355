"""MDS between mosaicml-streaming and us: whatever one side writes, the other reads equal.

The real MDSWriter and StreamingDataset, over every column encoding x compression x size limit x hashes. (Its
JSONWriter, CSVWriter, TSVWriter and XSVWriter make other formats, which shardkit does not read.)
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from shardkit.datasets.dataset import open_dataset
from shardkit.formats import mds
from shardkit.loaders import StreamingLoader
from shardkit.writers import build
from support import peers
from support.default_cases import cases
from support.mds_values import EXAMPLES, VALUES, Drawn, datasets, write_mds
from support.small_build import make_corpus

GENERATED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def read_here(folder: Path) -> list[Any]:
    """All samples as we read them, in a form that == compares."""
    with open_dataset(folder, allow_pickle=True) as dataset:
        return [peers.comparable(sample) for sample in dataset]


def read_there(folder: Path) -> list[Any]:
    """All samples as mosaicml-streaming reads them; as its StreamingDataset does, without shared memory."""
    streaming = peers.import_streaming()
    stream = streaming.Stream(local=str(folder), keep_zip=True)
    found = []
    for shard in stream.get_shards(streaming.base.world.World.detect(), allow_unsafe_types=True):
        stream.prepare_shard(shard)
        found += [peers.comparable(shard[row]) for row in range(len(shard))]
    return found


def settings_of(data: Drawn, limit: str) -> dict[str, Any]:
    return {"compression": data.compression, "hashes": data.hashes, limit: data.shard_bytes}


def write_here(folder: Path, data: Drawn, samples: Iterable[dict[str, Any]]) -> Path:
    write_mds(folder, data.columns, samples, **settings_of(data, "shard_bytes"))
    return folder


def write_there(folder: Path, data: Drawn, samples: Iterable[dict[str, Any]]) -> Path:
    return peers.write_with_streaming(folder, data.columns, iter(samples), **settings_of(data, "size_limit"))


def check_both_ways(folder: Path, data: Drawn) -> None:
    """Each side's files, read by each side: four readings of one content, equal to what was written."""
    theirs = write_there(folder / "theirs", data, data.samples)
    ours = write_here(folder / "ours", data, data.samples)
    found = read_here(theirs)
    given_back = [{name: sample[name] for name in data.lossless(sample)} for sample in found]
    assert given_back == [peers.comparable(data.lossless(sample)) for sample in data.samples]
    assert read_here(ours) == found
    assert read_there(theirs) == found
    assert read_there(ours) == found


def check_generated(tmp_path_factory: pytest.TempPathFactory, data: Drawn) -> None:
    folder = tmp_path_factory.mktemp("generated")
    try:
        check_both_ways(folder, data)
    finally:
        shutil.rmtree(folder)


@settings(GENERATED, max_examples=6, derandomize=True, phases=[Phase.generate])
@given(data=datasets())
def test_any_dataset_is_read_equal_both_ways(tmp_path_factory: pytest.TempPathFactory, data: Drawn) -> None:
    check_generated(tmp_path_factory, data)


@pytest.mark.extended
@settings(GENERATED, max_examples=150)
@given(data=datasets())
def test_many_datasets_are_read_equal_both_ways(
    tmp_path_factory: pytest.TempPathFactory, data: Drawn
) -> None:
    check_generated(tmp_path_factory, data)


def every_encoding(count: int) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """A column of each encoding; two of three samples are as small as columns allow, empty if they can be."""
    columns = {f"ü {encoding}": encoding for encoding in VALUES}
    return columns, [
        {name: EXAMPLES[encoding][row % 3 == 2] for name, encoding in columns.items()} for row in range(count)
    ]


@pytest.fixture(scope="module")
def all_columns() -> tuple[dict[str, str], list[dict[str, Any]]]:
    """With nothing left out of what mosaicml-streaming names."""
    peers.import_streaming()
    from streaming.base.format.mds.encodings import get_mds_encodings

    assert get_mds_encodings() <= VALUES.keys()
    return every_encoding(5)


@pytest.mark.parametrize(
    "stored",
    cases(
        product([None, "zstd:5", "br:1", "bz2", "gz", "snappy"], [2_000, 1 << 20, None]),
        [(None, 2_000), (None, None), ("zstd:5", 2_000), ("br:1", 1 << 20), ("bz2", 2_000), ("gz", None),
         ("snappy", 1 << 20)],
    ),
    ids=str,
)  # fmt: skip
def test_a_dataset_of_all_encodings_is_read_equal_both_ways(
    tmp_path: Path,
    all_columns: tuple[dict[str, str], list[dict[str, Any]]],
    stored: tuple[str | None, int | None],
) -> None:
    compression, shard_bytes = stored
    hashes = ["sha1", "xxh64"] if shard_bytes else []
    check_both_ways(tmp_path, Drawn(*all_columns, compression, hashes, shard_bytes))


def test_shards_without_samples_are_passed_over_by_both(tmp_path: Path) -> None:
    """MDSWriter begins with one where a limit is below its first sample."""
    data = Drawn({"a": "str"}, [{"a": "x" * count} for count in range(4)], None, [], 10)
    check_both_ways(tmp_path, data)
    assert [s.samples for s in mds.read_index(tmp_path / "theirs").shards] == [0, 1, 1, 1, 1]


def test_a_dataset_without_samples_is_empty_where_mosaicml_refuses_it(tmp_path: Path) -> None:
    for write in (write_here, write_there):
        folder = write(tmp_path / write.__name__, Drawn({"a": "int"}, [], None, [], None), [])
        assert read_here(folder) == []
        with pytest.raises(RuntimeError, match="no samples"):
            peers.read_with_streaming(folder)


# Indexes of sub-folders, put together by their merge_index.


@pytest.mark.parametrize("compression", cases([None, "zstd"], ["zstd"]))
def test_folders_of_both_writers_under_one_merged_index_are_read_equal(
    tmp_path: Path, compression: str | None
) -> None:
    columns = {"id": "int", "text": "str"}
    samples = [{"id": number, "text": "é" * (number % 9)} for number in range(60)]
    data = Drawn(columns, samples, compression, ["xxh64"], 400)
    for number, write in enumerate((write_here, write_there, write_here, write_there)):
        write(tmp_path / f"part_{number}", data, samples[15 * number : 15 * (number + 1)])
    peers.import_streaming().base.util.merge_index(str(tmp_path), keep_local=True)
    found = read_here(tmp_path)
    assert found == read_there(tmp_path)
    assert sorted(sample["id"][1] for sample in found) == list(range(60))


# Downloads with checked hashes.


def downloaded(remote: Path, local: Path, **options: Any) -> list[Any]:
    """All samples as the real StreamingDataset gives them from a remote folder."""
    with peers.streaming_datasets() as streaming:
        dataset = streaming.StreamingDataset(
            remote=str(remote), local=str(local), batch_size=1, shuffle=False, **options
        )
        found = [peers.comparable(dataset[number]) for number in range(len(dataset))]
        del dataset
    return found


@pytest.mark.parametrize("compression", [None, "zstd", "gz:1"])
@pytest.mark.parametrize(
    "algorithm", cases(["sha1", "xxh64", "md5", "xxh3_128", "blake2b", "sha3_256"], ["sha1", "xxh64"])
)
def test_mosaicml_downloads_ours_and_finds_its_hashes_right(
    tmp_path: Path, compression: str | None, algorithm: str
) -> None:
    samples = [{"n": number, "t": np.full(1 + number, number, np.int16)} for number in range(30)]
    data = Drawn({"n": "int", "t": "ndarray"}, samples, compression, [algorithm], 500)
    remote = write_here(tmp_path / "remote", data, samples)
    found = downloaded(remote, tmp_path / "local", validate_hash=algorithm)
    assert found == [peers.comparable(sample) for sample in samples]


def test_mosaicml_refuses_a_damaged_shard_of_ours_by_the_hash_that_we_wrote(tmp_path: Path) -> None:
    data = Drawn({"n": "int"}, [{"n": number} for number in range(30)], None, ["xxh64"], None)
    remote = write_here(tmp_path / "remote", data, data.samples)
    shard = remote / "shard.00000.mds"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    with pytest.raises(ValueError, match="Checksum failure"):
        downloaded(remote, tmp_path / "local", validate_hash="xxh64", download_retry=1)


# What our other writers make.


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "float32"])
def test_shards_made_of_whole_arrays_are_read_equal_by_mosaicml(
    tmp_path: Path, dtype: str, compression: str | None
) -> None:
    rows = np.random.default_rng(3).integers(0, 60_000, (57, 4, 3)).astype(dtype)
    folder = tmp_path / "rows"
    folder.mkdir()
    infos = [
        mds.write_rows_shard(
            folder, f"shard.{at:05d}.mds", rows[at : at + 10], compression=compression, hashes=["xxh64"]
        )
        for at in range(0, len(rows), 10)
    ]
    mds.write_index(folder, infos)
    expected = [peers.comparable({"tokens": row}) for row in rows]
    assert read_here(folder) == expected
    assert downloaded(folder, tmp_path / "local", validate_hash="xxh64") == expected


@pytest.fixture(scope="module", params=[None, pytest.param("zstd", marks=pytest.mark.extended)])
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, inline_builds: None
) -> Path:
    """A dataset of `shardkit build`."""
    recipe = make_corpus(tmp_path_factory.mktemp("build"), documents=120)
    if request.param:
        recipe.write_text(recipe.read_text().replace("8KiB}", f"8KiB, compression: {request.param}}}"))
    return build(recipe).output


def test_a_whole_build_is_read_equal_by_mosaicml(built: Path, tmp_path: Path) -> None:
    with open_dataset(built) as dataset:
        expected = [peers.comparable(sample) for sample in dataset]
        assert len(dataset.manifest.shards) > 1
        assert len(expected) > 50
    assert downloaded(built, tmp_path / "all", validate_hash="xxh64") == expected


def test_mosaicml_shuffles_a_whole_build_into_the_rows_that_our_loader_gives(
    built: Path, tmp_path: Path
) -> None:
    """Each its own order of the same rows, each row once."""
    with peers.streaming_datasets() as streaming:
        dataset = streaming.StreamingDataset(
            remote=str(built), local=str(tmp_path / "all"), batch_size=1, shuffle=True, cache_limit="50kb"
        )
        theirs = [sample["tokens"].tobytes() for sample in dataset]
        del dataset
    with StreamingLoader(
        built, batch_size=3, dtype="stored", rank=0, world_size=1, tail="pad", return_ids=True
    ) as loader:
        ours = [
            tokens.numpy().tobytes()
            for batch in loader
            for tokens, number in zip(batch["tokens"], batch["sample_id"].tolist(), strict=True)
            if number >= 0
        ]
    assert ours != theirs
    assert sorted(ours) == sorted(theirs)
