"""Tables of row costs: counted as `cu_seqlens` counts documents, found beside any dataset, never mistaken."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.datasets.dataset import open_dataset
from shardkit.datasets.row_costs import (
    count_row_costs,
    find_row_costs,
    open_row_costs,
    table_name,
    write_row_costs,
)
from shardkit.errors import ShardError
from shardkit.formats import mds
from shardkit.loaders import StreamingLoader
from shardkit.loaders.agreement import RankAgreement
from shardkit.loaders.config import Layout, grouped
from shardkit.order.balance import DocumentIds
from shardkit.order.order import Order, OrderSpec
from shardkit.order.residency import lanes_of_ranks, shard_uses
from shardkit.storage.url import open_store
from shardkit.tools.row_costs import make_row_costs
from support.loader_data import EOS, make_dataset, token_rows, write_card
from support.remote_harness import QUICK, fresh_url, put_folder
from support.uneven_data import ids_of_ranks, make_uneven, uneven_rows, work_of

IDS = DocumentIds(eos_id=EOS)
OPTIONS: dict[str, Any] = {"lanes": 4, "window": 16, "balance": "attention"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_uneven(tmp_path_factory.mktemp("data") / "mds")


def counted(folder: Path) -> list[int]:
    with open_dataset(folder) as dataset:
        found: list[int] = count_row_costs(dataset, IDS, progress=False).squares.tolist()
        return found


@pytest.mark.parametrize("kind", ["mds", "mds_zstd", "tar", "foreign_tar", "columns"])
def test_rows_of_every_kind_are_counted(tmp_path: Path, kind: str) -> None:
    folder = make_dataset(tmp_path / kind, kind)
    assert counted(folder) == work_of(token_rows(53)).tolist()


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from([EOS, 7]), min_size=9, max_size=9), min_size=1, max_size=8))
def test_a_row_costs_the_squares_of_the_documents_that_a_batch_has(rows: list[list[int]]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        info = mds.write_rows_shard(Path(folder), "shard.00000.mds", np.array(rows, dtype=np.uint16))
        mds.write_index(Path(folder), [info])
        write_card(Path(folder))
        found = counted(Path(folder))
        assert found == work_of(np.array(rows)).tolist()
        with StreamingLoader(
            folder, batch_size=len(rows), shuffle="none", layout=Layout(seq_lengths=True)
        ) as loader:
            lengths = next(iter(loader))["seq_lengths"]
    assert found == [sum(n * n for n in row) for row in lengths]


def test_long_rows_have_wide_sums(tmp_path: Path) -> None:
    rows = np.full((2, 1 << 16), 7, dtype=np.uint16)
    mds.write_index(tmp_path, [mds.write_rows_shard(tmp_path, "shard.00000.mds", rows)])
    assert counted(tmp_path) == [1 << 32] * 2


def test_a_table_that_was_written_is_found_and_is_no_other_datasets(path: Path, tmp_path: Path) -> None:
    folder = make_uneven(tmp_path / "own")
    with open_dataset(folder) as dataset:
        assert find_row_costs(dataset, IDS) is None
        name = write_row_costs(dataset, IDS, count_row_costs(dataset, IDS, progress=False))
        found = find_row_costs(dataset, IDS)
        assert found is not None
        assert found.squares.tolist() == work_of(uneven_rows(300)).tolist()
        assert np.load(folder / name).tolist() == found.squares.tolist(), "NumPy reads it"
        assert find_row_costs(dataset, DocumentIds(eos_id=1)) is None
        assert find_row_costs(dataset, DocumentIds(bos_id=EOS)) is None
        assert find_row_costs(dataset, DocumentIds(eos_id=EOS, pad_id=3)) is None
    with open_dataset(make_uneven(tmp_path / "other", seed=9)) as other:
        (other.path / name).write_bytes((folder / name).read_bytes())
        assert find_row_costs(other, IDS) is None


@pytest.mark.parametrize("place", [3, 200, -20, -1])
def test_a_table_that_is_damaged_anywhere_is_refused(tmp_path: Path, place: int) -> None:
    with open_dataset(make_uneven(tmp_path / "own", samples=40, shards=2)) as dataset:
        file = dataset.path / write_row_costs(dataset, IDS, count_row_costs(dataset, IDS, progress=False))
        data = bytearray(file.read_bytes())
        data[place] ^= 1
        file.write_bytes(data)
        with pytest.raises(ShardError, match="remove it and call make_row_costs"):
            find_row_costs(dataset, IDS)
        file.write_bytes(data[:-1])
        with pytest.raises(ShardError, match="is not a table of 40 rows"):
            open_row_costs(dataset, IDS)


def test_a_large_dataset_is_not_counted_at_a_start(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardkit.datasets.row_costs.COUNTED_BYTES", 1000)
    with pytest.raises(ShardError, match=re.escape(f"make_row_costs({str(path)!r}, eos_id=0)")):
        StreamingLoader(path, batch_size=2, rank=0, world_size=2, **grouped(OPTIONS))


def test_copies_of_an_open_dataset_do_not_count_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_dataset(path) as dataset:
        first = open_row_costs(dataset, IDS)
        monkeypatch.setattr("shardkit.datasets.row_costs.count_row_costs", None)
        assert open_row_costs(dataset, IDS) is first


@pytest.fixture
def url(path: Path) -> str:
    url = fresh_url()
    put_folder(path, open_store(url))
    return url


def test_a_remote_dataset_without_a_table_is_refused_with_the_command_that_makes_it(url: str) -> None:
    with pytest.raises(ShardError, match=re.escape(f"make_row_costs({url!r}, eos_id=0)")):
        StreamingLoader(url, batch_size=2, rank=0, world_size=2, **grouped(OPTIONS))


@pytest.mark.parametrize("cache", [True, False])
def test_a_remote_run_places_rows_as_a_local_one(path: Path, url: str, tmp_path: Path, cache: bool) -> None:
    make_row_costs(url, progress=False)
    options: dict[str, Any] = OPTIONS | ({"cache_dir": tmp_path / "cache"} if cache else {})
    remote = ids_of_ranks(url, 3, 4, 25, **options)
    assert (remote == ids_of_ranks(path, 3, 4, 25, **OPTIONS)).all()


@pytest.mark.parametrize("kind", ["mds", "tar", "mds_zstd"])
def test_rows_of_other_machines_lanes_are_fetched_one_by_one_where_that_is_possible(
    tmp_path: Path, kind: str
) -> None:
    """A machine of its own for each rank: none fetches a shard for a row or two that were moved to it."""
    folder, url = make_uneven(tmp_path / kind, kind, samples=2400, shards=48), fresh_url()
    put_folder(folder, open_store(url))
    make_row_costs(url, progress=False)
    options: dict[str, Any] = dict(QUICK) | {
        "lanes": 4,
        "window": 60,
        "batch_size": 8,
        "rank": 1,
        "world_size": 4,
    }
    options |= {"balance": "attention", "prefetch_batches": 0}
    ids = []
    with (
        StreamingLoader(url, cache_dir=tmp_path / "cache", **grouped(options)) as loader,
        StreamingLoader(folder, **grouped(options)) as local,
    ):
        for _, got, expected in zip(range(30), loader, local, strict=False):
            assert got["tokens"].equal(expected["tokens"])
            ids += got["sample_id"].tolist()
        shards, starts = loader.dataset.shards, loader.dataset.manifest.shard_starts
        assert shards is not None
        order = Order(loader.dataset.manifest.shard_samples, OrderSpec(17, 4, 60))
        lanes = lanes_of_ranks(order.spec, 32, [1], 4)
        own = {shard for epoch in (0, 1) for shard in shard_uses(order, epoch, lanes).shard.tolist()}
        read = set((np.searchsorted(starts, ids, side="right") - 1).tolist())
        assert read - own, "some rows came from lanes of other ranks"
        if kind == "mds_zstd":
            assert read <= shards._fetched, (
                "without rows of their own, whole shards are planned for and fetched"
            )
        else:
            assert shards._fetched <= own
            assert shards.rows.count >= len(read - own)


def test_rows_are_counted_once_for_all_copies(path: Path, url: str, tmp_path: Path) -> None:
    folder = make_uneven(tmp_path / "own")
    written = make_row_costs(folder, copies=[url, folder], progress=False)
    with open_dataset(folder) as dataset, open_dataset(url) as remote:
        name = table_name(dataset, IDS)
        assert written == [f"{url}/{name}", f"{folder}/{name}"]
        found = [find_row_costs(each, IDS) for each in (dataset, remote)]
    assert found[0] is not None
    assert [None if each is None else each.digest for each in found] == [found[0].digest] * 2
    assert found[0].squares.tolist() == work_of(uneven_rows(300)).tolist()
    assert make_row_costs(folder, progress=False) == [], "the table was there"


def test_what_cannot_be_counted_is_refused(path: Path, tmp_path: Path) -> None:
    other = make_uneven(tmp_path / "other", seed=5)
    with pytest.raises(ShardError, match="is not a copy"):
        make_row_costs(path, copies=[other], progress=False)
    (other / "dataset.json").unlink()
    with pytest.raises(ShardError, match="give eos_id or bos_id"):
        make_row_costs(other)
    with pytest.raises(ValueError, match="one of the two"):
        make_row_costs(other, eos_id=0, bos_id=1)


def test_ranks_with_other_tables_or_other_balance_are_told(path: Path) -> None:
    """What ranks compare names the model and the table: a rank that differs is refused."""
    seen: list[Any] = []
    for balance in (None, "attention"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RankAgreement, "check", lambda _, settings, **_options: seen.append(settings))
            options: dict[str, Any] = OPTIONS | {"balance": balance}
            with StreamingLoader(path, batch_size=2, rank=0, world_size=2, **grouped(options)) as loader:
                next(iter(loader))
    with open_dataset(path) as dataset:
        digest = count_row_costs(dataset, IDS, progress=False).digest
    assert [each["balance"] for each in seen] == [None, f"CostModel(linear=0, quadratic=1) {digest}"]
