"""`StreamingLoader` as a training script uses it."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from shardkit.errors import ShardError
from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.config import (
    BUSY_SECONDS,
    GROUPS,
    FurtherOptions,
    LoaderConfig,
    LoaderOptions,
    Order,
    grouped,
)
from support.loader_data import EOS, LENGTH, make_dataset, saved_bytes, token_rows, write_card

SAMPLES = 53
ROWS = token_rows(SAMPLES)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_dataset(tmp_path_factory.mktemp("data") / "mds", "mds")
    write_card(folder)
    return folder


def loader_of(data: Path, **arguments: Any) -> StreamingLoader:
    # One batch a group, as batches of real size have it: the thread then has a part in these small runs.
    options = {"batch_size": 4, "rank": 0, "world_size": 1, "prefetch_bytes": 1}
    return StreamingLoader(data, **grouped(options | arguments))


def ids_of(loader: StreamingLoader) -> list[int]:
    return [i for batch in loader for i in batch["sample_id"].tolist()]


def test_tokens_are_int64_rows_of_the_dataset(data: Path) -> None:
    for batch in loader_of(data, return_ids=True):
        assert batch.keys() == {"tokens", "sample_id"}
        assert batch["tokens"].dtype == batch["sample_id"].dtype == torch.int64
        assert batch["tokens"].shape == (4, LENGTH)
        assert np.array_equal(batch["tokens"].numpy(), ROWS[batch["sample_id"].numpy()])


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        (torch.int32, torch.int32),
        (torch.uint16, torch.uint16),
        ("int64", torch.int64),
        (np.uint32, torch.uint32),
        (None, torch.uint16),
        ("stored", torch.uint16),
    ],
)
def test_tokens_come_in_the_type_asked_for(data: Path, asked: Any, given: torch.dtype) -> None:
    batch = next(iter(loader_of(data, dtype=asked, return_ids=True)))
    assert batch["tokens"].dtype == given
    assert np.array_equal(batch["tokens"].numpy(), ROWS[batch["sample_id"].numpy()])


@pytest.mark.parametrize("asked", [torch.int16, torch.uint8, torch.float32, "words", np.float16])
def test_a_type_that_cannot_hold_the_tokens_is_refused(data: Path, asked: Any) -> None:
    with pytest.raises(ValueError, match="dtype"):
        loader_of(data, dtype=asked)


def test_stored_uint32_may_become_int32(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path, "mds", dtype="uint32")
    batch = next(iter(loader_of(folder, dtype=torch.int32, return_ids=True)))
    assert np.array_equal(batch["tokens"].numpy(), ROWS[batch["sample_id"].numpy()])


@pytest.mark.parametrize(
    ("tail", "batches", "delivered"), [("carry", 14, 56), ("drop", 13, 52), ("pad", 14, 56)]
)
def test_one_for_is_one_epoch_and_len_says_how_long(
    data: Path, tail: Any, batches: int, delivered: int
) -> None:
    loader = loader_of(data, tail=tail, return_ids=True)
    assert len(loader) == batches
    ids = ids_of(loader)
    assert len(ids) == delivered
    if tail == "pad":
        assert sorted(ids) == [-1, -1, -1, *range(SAMPLES)]
    assert loader.epoch == 1
    assert len(loader) == (13 if tail != "pad" else 14)
    assert ids_of(loader) != ids, "the next epoch has another order"


def test_carried_epochs_join_without_gap_or_repeat(data: Path) -> None:
    loader = loader_of(data, return_ids=True)
    ids = [i for _ in range(4) for i in ids_of(loader)]
    assert len(ids) == loader.position == 4 * SAMPLES
    assert np.bincount(ids).tolist() == [4] * SAMPLES


def test_len_counts_the_whole_epoch_also_in_its_middle_and_after_a_resume(data: Path) -> None:
    loader = loader_of(data)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    assert len(loader) == 14
    other = loader_of(data)
    other.load_state_dict(loader.state_dict())
    assert len(other) == 14
    assert sum(1 for _ in other) == 9
    assert len(other) == 13


def test_leaving_a_for_and_starting_another_goes_on_with_the_next_batch(data: Path) -> None:
    whole = ids_of(loader_of(data, return_ids=True))
    loader, found = loader_of(data, return_ids=True), []
    for stop in (1, 3, 100):
        for number, batch in enumerate(loader, 1):
            found += batch["sample_id"].tolist()
            if number == stop:
                break
    assert found == whole


def test_leaving_after_the_last_batch_is_the_end_of_the_epoch(data: Path) -> None:
    loader = loader_of(data, tail="pad")
    for number, _ in enumerate(loader, 1):
        if number == len(loader):
            break
    assert loader.epoch == 1
    assert sum(1 for _ in loader) == 14


def test_an_endless_loader_goes_on_and_has_no_length(data: Path) -> None:
    expected = loader_of(data, return_ids=True)
    ids = [i for _ in range(3) for i in ids_of(expected)]
    loader, found = loader_of(data, return_ids=True, endless=True), []
    for batch in loader:
        found += batch["sample_id"].tolist()
        if len(found) >= len(ids):
            break
    assert found == ids
    with pytest.raises(TypeError, match="endless"):
        len(loader)


def test_the_position_moves_when_a_batch_is_handed_over_not_when_it_is_read(data: Path) -> None:
    loader = loader_of(data)
    for number, _ in enumerate(loader, 1):
        time.sleep(2 * BUSY_SECONDS)  # so that the thread runs ahead
        assert loader.position == loader.state_dict()["position"] == 4 * number


@pytest.mark.parametrize(
    "change",
    [
        lambda loader: loader.load_state_dict(loader.state_dict()),
        lambda loader: loader.seek(8),
        lambda loader: loader.set_epoch(1),
        iter,
        StreamingLoader.close,
    ],
)
@pytest.mark.parametrize("started", [False, True])
def test_an_iterator_whose_loader_was_moved_raises_whether_it_had_started_or_not(
    data: Path, change: Callable[[StreamingLoader], object], started: bool
) -> None:
    loader = loader_of(data)
    iterator = iter(loader)
    if started:
        next(iterator)
    kept = change(loader)
    with pytest.raises(RuntimeError, match="stale iterator"):
        next(iterator)
    del kept


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy, copy.copy])
def test_a_loader_is_not_copied_but_says_what_to_do(data: Path, copied: Callable[[object], object]) -> None:
    loader = loader_of(data)
    next(iter(loader))
    with pytest.raises(TypeError, match=r"cannot be pickled or copied, .* state_dict"):
        copied(loader)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": None},
        {"batch_size": 2, "shuffle": True},
        *(pytest.param({"num_workers": workers}, marks=pytest.mark.extended) for workers in (1, 2)),
    ],
)
def test_a_dataloader_around_a_loader_is_refused_with_what_to_do(data: Path, options: dict[str, Any]) -> None:
    loader: Any = loader_of(data)
    with pytest.raises(
        TypeError, match=r"give the DataLoader a shardkit\.loaders\.pytorch\.StreamingDataset"
    ):
        next(iter(DataLoader(loader, **options)))


@pytest.mark.parametrize("stop", [0, 1, 8, None])
def test_a_loader_that_is_dropped_without_close_is_freed_at_once(data: Path, stop: int | None) -> None:
    loader = loader_of(data)
    gc.collect()
    gc.disable()
    try:
        parts = [weakref.ref(part) for part in (loader, loader.dataset, loader.dataset.shard(0))]
        batches = islice(iter(loader), stop)
        for _ in batches:
            time.sleep(2 * BUSY_SECONDS)
        del loader, batches
        assert [part() for part in parts] == [None, None, None]
    finally:
        gc.enable()


def test_a_state_held_by_someone_else_never_changes(data: Path) -> None:
    loader = loader_of(data)
    next(iter(loader))
    state = loader.state_dict()
    kept = copy.deepcopy(state)
    for _ in loader:
        pass
    assert state == kept
    state["streams"]["samples"][0] = 0  # type: ignore[index]
    assert loader.state_dict()["streams"] == kept["streams"]


def test_batches_belong_to_the_user_and_are_never_written_again(data: Path) -> None:
    loader = loader_of(data, return_ids=True)
    held = []
    for _ in range(6):
        for batch in loader:
            assert np.array_equal(batch["tokens"].numpy(), ROWS[batch["sample_id"].numpy()])
            held.append((batch, batch["tokens"].clone()))
            if len(held) % 5 == 0:
                batch["tokens"].fill_(-7)  # must not show anywhere else
                held.pop()
                held.append((batch, torch.full_like(batch["tokens"], -7)))
    assert len(held) > 60
    assert all(torch.equal(batch["tokens"], copied) for batch, copied in held)


def test_a_batch_has_memory_of_its_own_so_that_saving_it_saves_nothing_else(data: Path) -> None:
    batch = next(iter(loader_of(data)))
    assert batch["tokens"].untyped_storage().nbytes() == 4 * LENGTH * 8
    assert saved_bytes(batch["tokens"]) < 3000


def test_batches_outlive_their_loader_and_their_files(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path, "mds")
    with loader_of(folder, dtype="stored", return_ids=True) as loader:
        batches = list(loader)
    for file in folder.iterdir():
        file.unlink()
    gc.collect()
    assert all(np.array_equal(b["tokens"].numpy(), ROWS[b["sample_id"].numpy()]) for b in batches)


def test_a_loader_goes_on_reading_shards_that_are_unlinked_or_closed_meanwhile(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path, "mds")
    loader = loader_of(folder, return_ids=True)
    ids = []
    for number, batch in enumerate(loader):
        if number == 3:
            for file in folder.glob("*.mds"):
                file.unlink()
            loader.dataset.close()
            gc.collect()
        assert np.array_equal(batch["tokens"].numpy(), ROWS[batch["sample_id"].numpy()])
        ids += batch["sample_id"].tolist()
        if number == 7:
            break
    assert len(set(ids)) == 32


def test_document_extras_come_from_the_cards_eos_id(data: Path) -> None:
    loader = loader_of(data, labels=True, position_ids=True, document_ids=True, cu_seqlens=True)
    for batch in loader:
        tokens = batch["tokens"]
        padding = torch.zeros_like(tokens, dtype=torch.bool)
        padding[:, 1:] = (tokens[:, 1:] == EOS) & (tokens[:, :-1] == EOS)
        starts = batch["position_ids"] == 0
        assert torch.equal(batch["labels"], tokens.masked_fill(padding | starts, -100))
        assert (batch["position_ids"][:, 4] == 0).all()  # column 3 is an eos in every row
        assert batch["cu_seqlens"][-1] == tokens.numel()
        lengths = batch["cu_seqlens"].diff()
        assert lengths.max() == batch["max_seqlen"]
        assert (batch["position_ids"].flatten() == 0).sum() == len(lengths)


def test_the_eos_id_may_be_given_and_its_absence_is_explained(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path, "mds")
    with pytest.raises(ValueError, match="give eos_id"):
        loader_of(folder, labels=True)
    assert "labels" in next(iter(loader_of(folder, labels=True, eos_id=EOS)))


def test_padding_rows_are_flagged(data: Path) -> None:
    *_, last = loader_of(data, tail="pad", return_ids=True, labels=True)
    assert last["is_padding"].tolist() == [False, True, True, True]
    assert last["sample_id"].tolist()[1:] == [-1, -1, -1]
    assert (last["labels"][1:] == -100).all()


def test_a_stream_in_a_list_is_the_dataset(data: Path) -> None:
    streams = [Stream(data, weight=3)]
    assert sum(1 for _ in StreamingLoader(streams, batch_size=4, rank=0, world_size=1)) == 14
    with pytest.raises(TypeError, match="path, a Dataset or a list of Stream"):
        StreamingLoader([str(data)], batch_size=4)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="only stream has weight 0"):
        StreamingLoader([Stream(data, weight=0)], batch_size=4)
    with pytest.raises(ValueError, match="schedule needs a mixture"):
        StreamingLoader(streams, batch_size=4, order=Order(schedule=[(0, [1])]))


def test_cache_arguments_are_accepted_and_leave_a_local_dataset_alone(data: Path, tmp_path: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in data.iterdir()}
    loader = loader_of(data, cache_dir=tmp_path / "cache", cache_bytes="1KB")
    assert sum(1 for _ in loader) == 14
    assert not (tmp_path / "cache").exists()
    assert {file: file.stat().st_mtime_ns for file in data.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"label": True}, TypeError, "did you mean labels"),
        ({"exclude": "rows.txt"}, TypeError, r"did you mean Stream\(path, exclude=…\)"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"shuffle": "some"}, ValueError, "shuffle must be one of"),
        ({"tail": "keep"}, ValueError, "tail must be one of"),
        ({"seed": -1}, ValueError, "seed"),
        ({"lanes": -1}, ValueError, "lanes"),
        ({"rank": 2}, ValueError, "rank must be between 0 and 0"),
        ({"columns": "tokens"}, ValueError, "columns"),
        ({"columns": ["token"]}, ValueError, "no column 'token'; it has tokens"),
        ({"cache_bytes": "many"}, ValueError, "not a size"),
        ({"prefetch_batches": -1}, ValueError, "prefetch_batches"),
        ({"timeout_seconds": 0}, ValueError, "timeout_seconds"),
        ({"tail": "drop", "batch_size": 54}, ValueError, "would deliver nothing"),
    ],
)
def test_bad_arguments_say_what_is_wrong(data: Path, arguments: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        loader_of(data, **arguments)


def test_the_defaults_of_lanes_and_window_stay_those_of_the_first_run(data: Path) -> None:
    """Whatever they are today: those of earlier versions were others."""
    first = loader_of(data, batch_size=2, world_size=3, lanes=6, window=5)
    second = loader_of(data, batch_size=5)
    assert (second.state_dict()["lanes"], second.state_dict()["order_version"]) == (1, 3)
    second.load_state_dict(first.state_dict() | {"order_version": 1})
    state = second.state_dict()
    assert (state["lanes"], state["window"], state["order_version"]) == (6, 5, 1)


def test_a_former_iterator_fails_loudly_when_the_loader_has_moved_on(data: Path) -> None:
    loader = loader_of(data)
    former = iter(loader)
    next(former)
    next(iter(loader))
    with pytest.raises(RuntimeError, match="stale iterator"):
        next(former)
    former = iter(loader)
    next(former)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(RuntimeError, match="stale iterator"):
        next(former)


def test_a_damaged_shard_stops_the_loop_and_names_the_file(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path, "mds", samples=200)
    shard = folder / "shard.00002.mds"
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(ShardError, match=r"shard\.00002\.mds"):
        for _ in loader_of(folder):
            pass


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("shardkit")]


@pytest.mark.extended
def test_200_loaders_begun_and_abandoned_leave_no_threads(data: Path) -> None:
    kept = []
    for number in range(200):
        loader = loader_of(data)
        iterator = iter(loader)
        for _ in range(4 if number % 10 == 0 else 1):
            next(iterator)
            if number % 10 == 0:
                time.sleep(2 * BUSY_SECONDS)
        if number % 50 == 0:
            kept.append(loader)
    del loader, iterator, kept
    gc.collect()
    deadline = time.monotonic() + 10
    while prefetch_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not prefetch_threads()


ENDINGS = ["raise SystemExit(0)", "del loader, iterator", "loader.close()"]


@pytest.mark.parametrize("ending", ["pass", *(pytest.param(x, marks=pytest.mark.extended) for x in ENDINGS)])
def test_the_interpreter_ends_at_once_with_a_loader_in_use(data: Path, ending: str) -> None:
    code = f"""
import time
from shardkit.loaders import StreamingLoader
loader = StreamingLoader({str(data)!r}, batch_size=1, endless=True)
iterator = iter(loader)
for _ in range(300):
    next(iterator)
    time.sleep(0.001)
print(loader._running._thread.is_alive(), flush=True)
{ending}
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "True", "")


def test_several_dataloader_workers_are_refused_instead_of_repeating_samples(data: Path) -> None:
    class Wrapped(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(loader_of(data))

    batches = iter(torch.utils.data.DataLoader(Wrapped(), batch_size=None, num_workers=2))
    with pytest.raises(RuntimeError, match="2 DataLoader workers"):
        next(batches)
    batches._shutdown_workers()  # type: ignore[attr-defined]  # left to the collector, it waits for seconds
    found = list(torch.utils.data.DataLoader(Wrapped(), batch_size=None, num_workers=1))
    assert len(found) == 14


def test_planning_and_counting_need_no_torch() -> None:
    modules = "shardkit.order.batches, shardkit.order.state"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"


def test_keyword_options_and_config_are_the_same_names_and_types() -> None:
    options = {name: kind.__forward_arg__ for name, kind in LoaderOptions.__annotations__.items()}
    written = {
        name: argument
        for name, argument in inspect.signature(StreamingLoader).parameters.items()
        if name in options
    }
    assert {*written} == options.keys() - FurtherOptions.__annotations__.keys()
    assert {name: argument.annotation for name, argument in written.items()}.items() <= options.items()
    config = LoaderConfig.of({})
    for name, argument in written.items():
        assert argument.default == (GROUPS[name]() if name in GROUPS else getattr(config, name))
    groups = {name: kind.__name__ for name, kind in GROUPS.items()}
    in_groups = {field.name for kind in GROUPS.values() for field in fields(kind)}  # type: ignore[arg-type]
    alone = {field.name: field.type for field in fields(LoaderConfig) if field.name not in in_groups}
    assert options == alone | groups
