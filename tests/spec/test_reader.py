"""The second reader agrees with shardkit: on golden sets, and on datasets and runs that hypothesis draws."""

from __future__ import annotations

import gzip
import json
import tempfile
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.card import DatasetCard, listed_files
from shardkit.datasets.row_costs import table_bytes, table_of
from shardkit.formats import mds, tar
from shardkit.formats.mds import index as mds_index
from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.config import Layout, grouped
from shardkit.order.balance import level
from shardkit.order.exclusions import Exclusions
from shardkit.order.order import Order, OrderSpec
from spec import arithmetic, reader
from support.loader_data import make_dataset, token_rows
from support.orders import SIZES, order_specs
from support.uneven_data import ids_of_ranks, make_uneven

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
TAILS = ("carry", "drop", "pad")


def golden(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text())


# Golden sets


def test_golden_permutations_agree() -> None:
    for case in golden("order_permutation.json"):
        key = int(case["key"]) if "key" in case else bytes.fromhex(case["key_bytes"])
        word = arithmetic.key_word(key)
        assert [arithmetic.permute(x, case["size"], word) for x in case["indices"]] == case["images"]
        assert [arithmetic.unpermute(x, case["size"], word) for x in case["images"]] == case["indices"]


def test_golden_orders_agree() -> None:
    for case in golden("order_locations.json"):
        order = arithmetic.Order(case["shard_samples"] * case["repeat_shards"], **case["spec"])
        located = [order.locate(position) for position in case["positions"]]
        for name in ("epoch", "shard", "row", "lane", "sample_id"):
            assert [getattr(each, name) for each in located] == case[name]
        for start, size, positions in case["batches"]:
            assert sorted(range(start, start + size), key=order.key_at) == positions


def test_golden_mixtures_agree() -> None:
    for case in golden("mixture_locations.json"):
        mixture = arithmetic.Mixture(case["seed"], case["schedule"], case.get("version", 2))
        for start, streams, indices in case["locations"]:
            expected = list(zip(streams, indices, strict=True))
            assert [mixture.locate(start + n) for n in range(len(streams))] == expected


def test_golden_mixed_orders_agree() -> None:
    for case in golden("mixed_order_locations.json"):
        mixture = arithmetic.Mixture(case["seed"], case["schedule"], case.get("version", 1))
        orders = [
            arithmetic.Order(
                stream["shard_samples"], arithmetic.stream_seed(case["seed"], number), "window",
                stream["lanes"], stream["window"], case.get("version", 1), stream["exclusions"],
            )
            for number, stream in enumerate(case["streams"])
        ]  # fmt: skip
        mixed = arithmetic.Combined(orders, mixture)
        for start, expected in case["locations"]:
            located = [mixed.locate(start + n) for n in range(len(expected["shard"]))]
            for name in ("epoch", "shard", "row", "lane", "sample_id"):
                assert [getattr(each, name) for each in located] == expected[name]
        for start, size, positions in case["batches"]:
            assert mixed.global_batch(start, size) == positions


def test_golden_states_of_all_versions_mean_the_same() -> None:
    states = [reader.current_state(state) for state in golden("loader_states.json")]
    keys = states[0].keys()
    assert all(state.keys() == keys and state["version"] == 4 for state in states)
    assert states[0] == states[1]
    assert states[2]["streams"] == states[3]["streams"]
    assert states[2]["schedule"] == states[3]["schedule"]


# Arithmetic


@given(sizes=SIZES, spec=order_specs(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_orders_with_exclusions_agree(sizes: list[int], spec: OrderSpec, data: st.DataObject) -> None:
    total = sum(sizes)
    gone = data.draw(st.lists(st.integers(0, total - 1), max_size=total - 1, unique=True))
    excluded = Exclusions.of(gone)
    kept = excluded.kept_of_shards(sizes)
    if not kept.sum():
        return
    real = Order(kept, spec)
    plain = arithmetic.Order(sizes, **spec.to_dict(), excluded=[(row, row + 1) for row in gone])  # type: ignore[arg-type]
    first = data.draw(st.integers(0, 2**40))
    found = [plain.locate(first + n).sample_id for n in range(30)]
    assert found == excluded.select(real.locate((first, 30)).sample_id).tolist()
    assert sorted(range(first, first + 30), key=plain.key_at) == real.global_batch(first, 30).tolist()


@given(ranks=st.integers(1, 9), rows=st.integers(1, 20), data=st.data())
@settings(max_examples=60, deadline=None)
def test_placements_agree(ranks: int, rows: int, data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(0, 3000), min_size=ranks * rows, max_size=ranks * rows))
    before = data.draw(st.lists(st.integers(0, 5000), min_size=ranks, max_size=ranks))
    table = np.array(costs).reshape(ranks, rows)
    assert arithmetic.level(table.tolist(), before) == level(table[None], np.array([before]))[0].tolist()


# Datasets


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["mds", "mds_zstd", "tar", "tar.gz", "foreign", "unlisted"])
def test_every_row_of_a_dataset_agrees(kind: str, tmp_path: Path) -> None:
    """`foreign`: PAX members as webdataset writes them, in tars that the list describes no further."""
    made = {"foreign": "foreign_tar", "unlisted": "foreign_tar", "tar.gz": "tar"}.get(kind, kind)
    folder = make_dataset(tmp_path / "data", made)
    if kind in ("tar.gz", "foreign"):
        entries: list[dict[str, Any]] = []
        for number, file in enumerate(sorted(folder.glob("*.tar"))):
            samples = len(list(reader.tar_samples(file.read_bytes())))
            if kind == "tar.gz":
                packed = file.with_suffix(".tgz" if number == 2 else ".tar.gz")
                packed.write_bytes(gzip.compress(file.read_bytes(), mtime=0))
                file.unlink()
                file = packed
            entries.append({"url": file.name, "nsamples": samples})
            if number % 2:
                digest = reader.hash_of("md5", file.read_bytes())
                entries[-1] |= {"filesize": file.stat().st_size, "md5sum": digest}
        (folder / "shards.json").write_text(json.dumps({"wids_version": 1, "shardlist": entries}))
    plain = reader.Dataset(folder)
    assert [reader.tokens(plain[row], "uint16") for row in range(53)] == token_rows(53).tolist()
    with StreamingLoader(
        folder, batch_size=5, layout=Layout(tensors="numpy"), return_ids=True, rank=0, world_size=1
    ) as loader:
        assert loader.dataset.fingerprint == plain.fingerprint
        for batch in loader:
            rows = zip(batch["sample_id"].tolist(), batch["tokens"].tolist(), strict=True)
            assert all(reader.tokens(plain[row], "uint16") == values for row, values in rows)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_index_bin_says_what_index_json_says(
    compression: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mds_index, "TABLE_SHARDS", 3)
    hashes = ["sha256", "xxh64"]
    infos = [
        mds.write_rows_shard(tmp_path, f"shard.{n:05d}.mds", rows, compression=compression, hashes=hashes)
        for n, rows in enumerate(np.split(token_rows(60), 5))
    ]
    mds.write_index(tmp_path, infos)
    dataset = reader.Dataset(tmp_path)
    fingerprint, shards = reader.index_bin(tmp_path)
    assert (fingerprint, shards) == (dataset.fingerprint, dataset.shards)
    (tmp_path / "index.json").write_bytes((tmp_path / "index.json").read_bytes() + b" ")
    with pytest.raises(ValueError, match="another index"):
        reader.index_bin(tmp_path)


def test_a_card_that_leaves_its_files_to_files_json_is_read(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "data", "mds")
    files = {f"provenance/part-{n:05d}.parquet": {"bytes": n, "xxh3_128": f"{n:032x}"} for n in range(1001)}
    listed, table = listed_files(files)
    assert table is not None
    (folder / "files.json").write_bytes(table)
    (folder / "dataset.json").write_bytes(DatasetCard({"files": listed, "é": 1}).to_bytes())
    found = reader.Dataset(folder).files()
    assert {name: {"bytes": file.bytes, **file.hashes} for name, file in found.items()} == {**listed, **files}
    (folder / "files.json").write_bytes(table.replace(b'"bytes": 7,', b'"bytes": 8,'))
    with pytest.raises(ValueError, match=r"files\.json"):
        reader.Dataset(folder).files()


@pytest.mark.parametrize("dtype", ["uint32", "uint64"])
def test_tables_of_row_costs_are_read(dtype: str, tmp_path: Path) -> None:
    squares: Any = np.arange(1, 9).astype(dtype) ** 4
    costs = table_of(squares, 8)
    (tmp_path / "table.npy").write_bytes(table_bytes(costs))
    assert reader.row_costs(tmp_path / "table.npy") == [n**4 for n in range(1, 9)]


# Runs


def write_drawn(folder: Path, kind: str, sizes: list[int]) -> Path:
    """Rows that say which they are, in shards of these sizes; tars have no empty ones."""
    folder.mkdir()
    rows, infos = token_rows(sum(sizes)), []
    for number, (low, high) in enumerate(pairwise([0, *accumulate(sizes)])):
        if kind == "tar":
            name = f"shard-{number:05d}.tar"
            infos.append(tar.write_rows_shard(folder, name, rows[low:high], key_start=low, hashes=["xxh64"]))
        else:
            name = f"shard.{number:05d}.mds"
            infos.append(mds.write_rows_shard(folder, name, rows[low:high], hashes=["xxh64"]))
    (tar.write_shard_list if kind == "tar" else mds.write_index)(folder, infos)
    return folder


def batches_of(
    streams: list[Stream], state: Any, ranks: int, batch_size: int, steps: int, logs: Path, **options: Any
) -> tuple[list[list[list[int]]], list[list[Any]], Any]:
    """(ids of each rank's steps, numbered over all streams; their tokens; the state after the last step)."""
    ids: list[list[list[int]]] = []
    rows: list[list[Any]] = []
    for rank in range(ranks):
        place: dict[str, Any] = {"rank": rank, "world_size": ranks, "batch_size": batch_size}
        arguments = grouped({"tensors": "numpy", "prefetch_batches": 0, **place, **options})
        with StreamingLoader(streams, endless=True, return_ids=True, usage_log=logs, **arguments) as loader:
            if state is not None:
                loader.load_state_dict(state)
            firsts = [0, *accumulate(len(dataset) for dataset in loader.datasets)]
            ids.append([])
            rows.append([])
            for batch in islice(loader, steps):
                found = batch["sample_id"]
                if "stream_id" in batch:
                    found = np.where(found < 0, -1, found + np.array(firsts)[batch["stream_id"]])
                ids[-1].append(found.tolist())
                rows[-1].append(batch["tokens"].tolist())
            after = json.loads(json.dumps(loader.state_dict()))
    return ids, rows, after


def expected_batches(
    run: reader.Run, ranks: int, batch_size: int, steps: int
) -> tuple[list[list[list[int]]], int]:
    """(ids of each rank's steps, the position after them) by the second reader."""
    position = run.position
    found: list[list[list[int]]] = [[] for _ in range(ranks)]
    for _ in range(steps):
        made = [run.batch(position, rank, ranks, batch_size) for rank in range(ranks)]
        for rank, (batch, _) in enumerate(made):
            found[rank].append(batch)
        position = made[0][1]
    return found, position


@st.composite
def drawn_runs(draw: st.DrawFn, *, lanes: int, weight: int, ranks: int) -> dict[str, Any]:
    """A run of up to three streams and its restart; the largest lanes, weight and number of ranks."""
    count = draw(st.sampled_from([1, 1, 2, 3]))
    sizes = [draw(st.lists(st.integers(1, 9), min_size=1, max_size=5)) for _ in range(count)]
    excluded = [draw(st.sets(st.integers(0, sum(one) - 1), max_size=sum(one) - 1)) for one in sizes]
    weights = draw(st.lists(st.integers(1, weight), min_size=count, max_size=count))
    later = draw(st.lists(st.integers(0, 5), min_size=count, max_size=count).filter(any))
    change = draw(st.integers(1, 40))
    total = sum(sum(one) - len(gone) for one, gone in zip(sizes, excluded, strict=True))
    return {
        "kinds": [draw(st.sampled_from(["mds", "tar"])) for _ in sizes],
        "sizes": sizes,
        "excluded": excluded,
        "weights": weights,
        "schedule": [(0, weights), (change, later)] if count > 1 and draw(st.booleans()) else None,
        "version": draw(st.sampled_from([1, 2, 2])),
        "options": {
            "seed": draw(st.integers(0, 2**64 - 1)),
            "shuffle": draw(st.sampled_from(["window", "window", "global", "none"])),
            "lanes": draw(st.integers(1, lanes)),
            "window": draw(st.integers(1, 20)),
            "tail": draw(st.sampled_from(TAILS)),
            "epoch_samples": draw(st.none() | st.integers(12, 60)),
        },
        "first": (draw(st.integers(1, ranks)), draw(st.integers(1, ranks + 1)), draw(st.integers(1, 6))),
        "second": (draw(st.integers(1, ranks)), draw(st.integers(1, ranks + 1)), draw(st.integers(1, 6))),
        "total": total,
    }  # fmt: skip


@given(drawn=drawn_runs(lanes=6, weight=7, ranks=3))
@settings(max_examples=30, deadline=None)
def test_runs_and_restarts_agree(drawn: dict[str, Any]) -> None:
    check_run(drawn)


@pytest.mark.extended
@given(drawn=drawn_runs(lanes=70, weight=3000, ranks=6))
@settings(max_examples=200, deadline=None)
def test_larger_runs_and_restarts_agree(drawn: dict[str, Any]) -> None:
    check_run(drawn)


def check_run(drawn: dict[str, Any]) -> None:
    """Ids and tokens of all ranks, before and after a restart on other ranks, and their usage logs."""
    options = dict(drawn["options"])
    drawn["total"] = options["epoch_samples"] or drawn["total"]
    if (
        options["tail"] == "drop"
        and max(a * b for a, b, _ in (drawn["first"], drawn["second"])) > drawn["total"]
    ):
        options["tail"] = "pad"
    if drawn["schedule"] is not None:
        options["schedule"] = drawn["schedule"]
    with tempfile.TemporaryDirectory() as temporary:
        folders = [
            write_drawn(Path(temporary) / str(n), kind, sizes)
            for n, (kind, sizes) in enumerate(zip(drawn["kinds"], drawn["sizes"], strict=True))
        ]
        streams = [
            Stream(folder, weight=weight, exclude=gone or None)
            for folder, weight, gone in zip(folders, drawn["weights"], drawn["excluded"], strict=True)
        ]
        datasets = [reader.Dataset(folder) for folder in folders]
        excluded = [[(row, row + 1) for row in gone] for gone in drawn["excluded"]]
        with StreamingLoader(streams, batch_size=1, rank=0, world_size=1, **grouped(options)) as loader:
            state = json.loads(json.dumps(loader.state_dict())) | {"order_version": drawn["version"]}
        for number, (ranks, batch_size, steps) in enumerate((drawn["first"], drawn["second"])):
            logs = Path(temporary) / f"logs-{number}"
            ids, rows, after = batches_of(streams, state, ranks, batch_size, steps, logs, **options)
            run = reader.Run(state, datasets, excluded)
            expected, position = expected_batches(run, ranks, batch_size, steps)
            assert ids == expected
            assert after["position"] == position
            content = [
                reader.tokens(run.sample(one), "uint16")
                for steps_of_rank in expected for batch in steps_of_rank for one in batch if one >= 0
            ]  # fmt: skip
            flat = [row for steps_of_rank in rows for batch in steps_of_rank for row in batch]
            kept = [one >= 0 for steps_of_rank in ids for batch in steps_of_rank for one in batch]
            assert [row for row, is_kept in zip(flat, kept, strict=True) if is_kept] == content
            check_logs(logs, expected)
            state = after


def check_logs(logs: Path, expected: list[list[list[int]]]) -> None:
    found = {}
    for file in logs.glob("*.usage"):
        [section] = reader.usage_log(file.read_bytes())
        found[section.head["rank"]] = [ids for _, ids in section.steps]
        assert section.end is not None
    assert found == dict(enumerate(expected))


@pytest.mark.parametrize("tail", TAILS)
def test_any_batch_of_any_epoch_is_found_directly(tail: Any, tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "data", "mds")
    place: dict[str, Any] = {"rank": 1, "world_size": 2, "batch_size": 4}
    with StreamingLoader(
        folder, tail=tail, return_ids=True, **grouped({"lanes": 4, "window": 8, "tensors": "numpy", **place})
    ) as loader:
        run = reader.Run(loader.state_dict(), [reader.Dataset(folder)], [()])
        for epoch in range(3):
            for number, batch in enumerate(loader):
                assert run.batch_of_epoch(epoch, number, 1, 2, 4) == batch["sample_id"].tolist()


def test_a_log_that_was_cut_off_has_the_steps_before_and_damage_is_refused(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "data", "mds")
    with StreamingLoader(folder, batch_size=4, rank=0, world_size=1, usage_log=tmp_path / "logs") as loader:
        for _ in islice(loader, 3):
            pass
    [file] = (tmp_path / "logs").iterdir()
    data = file.read_bytes()
    [whole] = reader.usage_log(data)
    [cut] = reader.usage_log(data[:-20])
    assert (cut.steps, cut.end) == (whole.steps[:2], None)
    for zeros in (b"", bytes(500)):
        assert reader.usage_log(data + zeros)[0].steps == whole.steps
    with pytest.raises(ValueError, match="damaged"):
        reader.usage_log(data[:-60] + bytes([data[-60] ^ 1]) + data[-59:])


def placed_by_reader(
    run: reader.Run, squares: list[int], ranks: int, batch_size: int, steps: int, step_rows: int | None
) -> list[list[list[int]]]:
    """Ids of each rank's batches if rows are placed by squares; with `step_rows`, steps are level too."""
    size, done = ranks * batch_size, [0] * ranks
    found: list[list[list[int]]] = [[] for _ in range(ranks)]
    for start in range(run.position, run.position + steps * size, size):
        if step_rows is None or start % step_rows == 0:
            done = [0] * ranks
        batch = [run.order.locate(place).sample_id for place in run.order.global_batch(start, size)]
        costs = [squares[sample] for sample in batch]
        places = arithmetic.level(
            [costs[r * batch_size : (r + 1) * batch_size] for r in range(ranks)], [0] * ranks
        )
        if step_rows is not None:
            shares = [sum(costs[place] for place in rank) for rank in places]
            places = [places[one] for [one] in arithmetic.level([[share] for share in shares], done)]
            done = [had + sum(costs[place] for place in rank) for had, rank in zip(done, places, strict=True)]
        for rank, own in enumerate(places):
            found[rank].append([batch[place] for place in own])
    return found


@pytest.mark.parametrize("step_rows", [None, 32])
@pytest.mark.parametrize("shape", [(4, 8), (4, 2), (3, 20)])
def test_balanced_runs_agree(shape: tuple[int, int], step_rows: int | None, tmp_path: Path) -> None:
    (ranks, batch_size), steps = shape, 12
    if step_rows is not None and step_rows % (ranks * batch_size):
        step_rows = 2 * ranks * batch_size
    folder = make_uneven(tmp_path / "data", samples=200)
    plain = reader.Dataset(folder)
    squares = [arithmetic.squares(reader.tokens(plain[row], "uint16"), 0) for row in range(200)]
    options: dict[str, Any] = {"lanes": 4, "window": 40, "balance": "attention", "global_batch": step_rows}
    placed = ids_of_ranks(folder, ranks, batch_size, steps, **options)
    with StreamingLoader(
        folder, batch_size=1, rank=0, world_size=1, **grouped({"lanes": 4, "window": 40})
    ) as loader:
        run = reader.Run(loader.state_dict(), [plain], [()])
    assert (
        placed_by_reader(run, squares, ranks, batch_size, steps, step_rows)
        == placed.transpose(1, 0, 2).tolist()
    )


@pytest.mark.parametrize("kind", ["mds", "mds_zstd"])
@pytest.mark.parametrize("shards", [1, 80, 300])
def test_default_lanes_and_windows_agree(kind: str, shards: int, tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "data", kind, samples=3 * shards, shards=shards)
    with StreamingLoader(folder, batch_size=1, rank=0, world_size=1) as loader:
        state = loader.state_dict()
    dataset = reader.Dataset(folder)
    filled = sum(size > 0 for size in dataset.sizes)
    lanes = arithmetic.default_lanes(filled, any(shard.compression for shard in dataset.shards))
    window = arithmetic.default_window(3 * shards, filled, lanes, is_shuffled=kind == "mds_zstd")
    assert (state["lanes"], state["window"]) == (lanes, window)
