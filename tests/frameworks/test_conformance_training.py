"""What the peers' own tests ask of training runs, as strict claims about ours, beside what the peers do.

Scenarios of mosaicml-streaming's tests (partitions, sampling, streams) and of webdataset's and litdata's
(uneven shards, fewer samples than workers, drop_last): every one is checked by the rows that were delivered,
over all ranks. Elastic determinism is in tests/loaders/test_resume.py, caches far below the dataset are in
test_loader_remote.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit.errors import StreamExhaustedError
from shardkit.formats import mds
from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.config import grouped
from shardkit.loaders.pytorch import StreamingDataLoader, StreamingDataset
from support import peers
from support.default_cases import cases
from support.loader_data import make_dataset, token_rows
from support.resume import batches, run_ranks

WORLDS = cases([1, 2, 3, 4, 6, 8], [1, 3, 8])
LENGTH = 4
SIZES = (1, 30, 0, 7, 111, 2, 49)
"""Samples of the uneven shards: one of them is empty, two hold a batch each."""


def write_shards(folder: Path, sizes: tuple[int, ...], first: int = 0) -> Path:
    """MDS shards of rows that begin with their number, counted from `first`."""
    folder.mkdir(parents=True)
    rows = np.zeros((sum(sizes), LENGTH), np.uint16)
    rows[:, 0] = np.arange(first, first + len(rows))
    ends = np.cumsum(sizes).tolist()
    infos = [
        mds.write_rows_shard(folder, f"shard.{number:05d}.mds", rows[end - size : end], hashes=["xxh64"])
        for number, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    mds.write_index(folder, infos)
    return folder


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 samples in shards of very different sizes."""
    return write_shards(tmp_path_factory.mktemp("uneven") / "data", SIZES)


def loader_of(data: Any, rank: int = 0, world_size: int = 1, **options: Any) -> StreamingLoader:
    settings = {"prefetch_batches": 0, "window": 40, "seed": 9, **options}
    return StreamingLoader(data, rank=rank, world_size=world_size, **grouped(settings))


def numbers(batch: dict[str, Any]) -> list[int]:
    """The rows of a batch, by their content; -1 for padding."""
    padding = batch.get("is_padding", [False] * len(batch["tokens"]))
    return [
        -1 if is_padding else int(row[0]) for row, is_padding in zip(batch["tokens"], padding, strict=True)
    ]


def global_batches(data: Any, world_size: int, steps: int | None = None, **options: Any) -> list[list[int]]:
    """All ranks' rows in each of the next steps, or of one epoch; they have equally many and one state."""

    def make(rank: int, world_size: int) -> StreamingLoader:
        return loader_of(data, rank, world_size, **options)

    return [rows for rows, _ in run_ranks(make, world_size, steps, samples=numbers)]


# Epoch sizes: where StreamingDataset repeats samples, and webdataset and litdata give ranks unequal counts.


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("samples", [1, 5, 23, 24, 25, 97])
@pytest.mark.parametrize("tail", ["carry", "pad"])
def test_an_epoch_has_each_sample_once_and_equal_steps_on_all_ranks(
    tmp_path: Path, samples: int, world_size: int, tail: str
) -> None:
    """Batches above the dataset and fewer samples than ranks among them."""
    folder = write_shards(tmp_path / "data", (samples,))
    found = global_batches(folder, world_size, batch_size=4, tail=tail)
    drawn = [number for rows in found for number in rows]
    steps = -(-samples // (4 * world_size))
    assert len(found) == steps
    assert len(drawn) == 4 * world_size * steps
    if tail == "pad":
        assert sorted(drawn) == [-1] * (len(drawn) - samples) + list(range(samples))
    else:  # the last batch goes on into the next epoch, so the counts differ by one at most
        counts = Counter(drawn)
        assert counts.keys() == set(range(samples))
        assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("world_size", WORLDS)
def test_dropped_tails_lose_less_than_one_global_batch_and_say_so_if_nothing_is_left(
    uneven: Path, world_size: int
) -> None:
    found = global_batches(uneven, world_size, batch_size=7, tail="drop")
    drawn = [number for rows in found for number in rows]
    assert len(set(drawn)) == len(drawn) == 200 // (7 * world_size) * 7 * world_size
    with pytest.raises(ValueError, match="would deliver nothing"):
        loader_of(uneven, 0, world_size, batch_size=201, tail="drop")


@pytest.mark.filterwarnings("ignore:Attempting to partition")  # theirs
@pytest.mark.parametrize(("samples", "ranks"), [(10, 4), (5, 8), (97, 6)])
def test_mosaicml_repeats_samples_where_ranks_do_not_divide_them_and_we_do_not(
    tmp_path: Path, samples: int, ranks: int
) -> None:
    peers.import_streaming()
    from streaming.base.partition import get_partitions

    theirs = get_partitions("relaxed", samples, 1, 1, ranks, 1, 2).ravel()
    repeated = Counter(theirs[theirs >= 0].tolist())
    assert sum(repeated.values()) > samples == len(repeated)
    folder = write_shards(tmp_path / "data", (samples,))
    for epoch in (None, 2 * -(-samples // (2 * ranks))):
        found = global_batches(folder, ranks, epoch, batch_size=2, tail="pad")
        counts = Counter(number for rows in found for number in rows if number >= 0)
        assert counts == dict.fromkeys(range(samples), 1 if epoch is None else 2)


def test_webdataset_gives_ranks_unequal_steps_where_ours_are_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shards go to ranks whole; five of them, on two ranks."""
    import webdataset as wds

    folder = make_dataset(tmp_path / "tars", "foreign_tar", samples=53, shards=5)
    shards = [str(file) for file in sorted(folder.glob("*.tar"))]
    steps = []
    for rank in range(2):
        for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("LOCAL_RANK", rank)):
            monkeypatch.setenv(name, str(value))
        theirs = wds.WebDataset(shards, shardshuffle=False, nodesplitter=wds.split_by_node)
        steps.append(len(list(theirs.decode().to_tuple("tokens.npy").batched(4, partial=False))))
    assert steps[0] != steps[1]
    found = global_batches(folder, 2, batch_size=4, tail="pad", columns=["tokens"])
    expected = sorted([-1] * 3 + token_rows(53)[:, 0].tolist())
    assert sorted(number for rows in found for number in rows) == expected


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores
@pytest.mark.parametrize("workers", [0, pytest.param(3, marks=pytest.mark.extended)])
def test_fewer_samples_than_ranks_and_workers_are_delivered_once(tmp_path: Path, workers: int) -> None:
    folder = write_shards(tmp_path / "data", (2, 3))
    seen: list[int] = []
    for rank in range(4):
        dataset = StreamingDataset(folder, batch_size=2, rank=rank, world_size=4, tail="pad")
        steps = [numbers(batch) for batch in StreamingDataLoader(dataset, num_workers=workers)]
        assert len(steps) == 1
        seen += steps[0]
    assert sorted(seen) == [-1, -1, -1, 0, 1, 2, 3, 4]


# Streams: mosaicml's proportion, repeat and choose.

STREAM_SIZES = (30, 50, 20)


@pytest.fixture(scope="module")
def stream_folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Rows of stream s begin with 1000 s and count up."""
    folder = tmp_path_factory.mktemp("streams")
    return [
        write_shards(folder / str(number), (size // 2, size - size // 2), first=1000 * number)
        for number, size in enumerate(STREAM_SIZES)
    ]


def draws_of_mosaicml(
    folders: list[Path], epochs: int, of_streams: list[dict[str, Any]]
) -> Iterator[list[int]]:
    """The rows of each epoch of a real StreamingDataset."""
    with peers.streaming_datasets() as streaming:
        streams = [
            streaming.Stream(local=str(folder), **settings)
            for folder, settings in zip(folders, of_streams, strict=True)
        ]
        dataset = streaming.StreamingDataset(streams=streams, batch_size=1, shuffle=True, shuffle_seed=4)
        drawn = [[int(sample["tokens"][0]) for sample in dataset] for _ in range(epochs)]
        del dataset
    yield from drawn


def per_stream(drawn: list[int]) -> list[int]:
    counts = Counter(number // 1000 for number in drawn)
    return [counts[number] for number in range(len(STREAM_SIZES))]


def draws(streams: list[Stream], samples: int, **options: Any) -> list[int]:
    """The first rows of ours, in batches of one."""
    with loader_of(streams, batch_size=1, **options) as loader:
        return [number for batch in islice(batches(loader), samples) for number in numbers(batch)]


@pytest.mark.parametrize("weights", [(1, 1, 2), (5, 3, 2), (1, 0, 3)])
def test_proportions_are_mosaicmls_counts_each_epoch_and_exact_in_every_block_too(
    stream_folders: list[Path], weights: tuple[int, ...]
) -> None:
    used = [(folder, weight) for folder, weight in zip(stream_folders, weights, strict=True) if weight]
    (theirs,) = draws_of_mosaicml([f for f, _ in used], 1, [{"proportion": w} for _, w in used])
    samples = len(theirs)
    ours = draws([Stream(folder, weight) for folder, weight in used], samples)
    assert samples == sum(size for size, weight in zip(STREAM_SIZES, weights, strict=True) if weight)
    exact = [samples * weight / sum(weights) for weight in weights]
    for found in (per_stream(theirs), per_stream(ours)):
        assert all(abs(count - share) < 1 for count, share in zip(found, exact, strict=True))
    block = sum(weights)
    for start in range(0, samples - block + 1, block):
        assert per_stream(ours[start : start + block]) == list(weights)


def test_repeat_is_mosaicmls_count_in_one_epoch_and_a_limit_that_holds(stream_folders: list[Path]) -> None:
    """Twice, once and half: 60, 50 and 10 samples; whole repeats are uniform on both sides."""
    repeats = (2, 1, 0.5)
    (theirs,) = draws_of_mosaicml(stream_folders, 1, [{"repeat": repeat} for repeat in repeats])
    streams = [
        Stream(folder, weight, repeat=repeat)
        for folder, weight, repeat in zip(stream_folders, (60, 50, 10), repeats, strict=True)
    ]
    ours = draws(streams, 120, epoch_samples=120)
    for found in (theirs, ours):
        assert per_stream(found) == [60, 50, 10]
        counts = Counter(found)
        assert all(counts[row] == 2 for row in range(30))
        assert all(counts[row] == 1 for row in range(1000, 1050))
        assert max(counts[row] for row in range(2000, 2020)) == 1
    with pytest.raises(StreamExhaustedError), pytest.warns(RuntimeWarning, match="exhausted at step 120"):
        draws(streams, 121, epoch_samples=121)


def test_choose_is_mosaicmls_count_in_one_epoch_without_repeating_a_row(stream_folders: list[Path]) -> None:
    chosen = (12, 50, 45)
    (theirs,) = draws_of_mosaicml(stream_folders, 1, [{"choose": count} for count in chosen])
    streams = [
        Stream(folder, count, choose=count) for folder, count in zip(stream_folders, chosen, strict=True)
    ]
    ours = draws(streams, sum(chosen), epoch_samples=sum(chosen))
    for found in (theirs, ours):
        assert per_stream(found) == list(chosen)
        counts = Counter(found)
        for first, size, count in zip((0, 1000, 2000), STREAM_SIZES, chosen, strict=True):
            times = [counts[row] for row in range(first, first + size)]
            assert max(times) - min(times) <= 1
            assert sum(times) == count


def test_a_fraction_of_a_stream_reaches_every_row_over_epochs_where_mosaicml_may_repeat_some(
    stream_folders: list[Path],
) -> None:
    """A quarter of each epoch for four epochs: ours go on where they were; theirs are drawn anew."""
    quarters = [{"choose": 30}, {"choose": 50}, {"choose": 5}]
    theirs = [row for epoch in draws_of_mosaicml(stream_folders, 4, quarters) for row in epoch if row >= 2000]
    ours = [
        row
        for row in draws(
            [Stream(f, c["choose"]) for f, c in zip(stream_folders, quarters, strict=True)], 4 * 85
        )
        if row >= 2000
    ]
    assert len(theirs) == len(ours) == 20
    assert sorted(ours) == list(range(2000, 2020))
    assert len(set(theirs)) < 20
