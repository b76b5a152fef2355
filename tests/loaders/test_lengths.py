"""Batches of one length each: shares, schedules, exactly once, and exact resume on any number of ranks."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit.cli.main import main
from shardkit.errors import StateError
from shardkit.formats import mds
from shardkit.loaders import LengthLoader, Stream
from shardkit.loaders.config import grouped
from shardkit.storage.memory import MemoryStore
from support.remote_harness import fresh_url, put_folder
from support.resume import assert_equal, assert_exact_resume, run, run_ranks

ROWS = {"a8": 64, "b16": 40, "c32": 30}  # 512, 640 and 960 tokens: 16, 20 and 30 steps of 32
STEPS = 66
OPTIONS: dict[str, Any] = {"tokens_per_batch": 32, "rank": 0, "world_size": 1, "return_ids": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("lengths")
    made = []
    for name, rows in ROWS.items():
        folder, length = root / name, int(name[1:])
        folder.mkdir()
        ids = np.arange(rows * length, dtype=np.uint16).reshape(rows, length)
        third = rows // 3
        infos = [
            mds.write_rows_shard(folder, f"shard.{i:05d}.mds", ids[low:high], hashes=["xxh64"])
            for i, (low, high) in enumerate([(0, third), (third, 2 * third), (2 * third, rows)])
        ]
        mds.write_index(folder, infos)
        made.append(folder)
    return made


def make(folders: list[Path], **options: Any) -> LengthLoader:
    return LengthLoader(folders, **grouped(OPTIONS | {"window": 9} | options))


def test_an_epoch_has_every_row_of_every_length_once_and_each_step_one_length(folders: list[Path]) -> None:
    seen: Counter[tuple[int, int]] = Counter()
    with make(folders) as loader:
        assert len(loader) == STEPS
        for step, batch in enumerate(loader):
            rows, length = batch["tokens"].shape
            stream = loader.lengths.index(length)
            assert rows * length == 32
            assert loader.names[stream] == loader.stream_at(step)
            assert batch["stream_id"].tolist() == [stream] * rows
            firsts = batch["sample_id"] * length
            assert batch["tokens"][:, 0].tolist() == firsts.tolist()
            seen.update((stream, row) for row in batch["sample_id"].tolist())
        assert loader.stream_samples() == ROWS
        assert loader.step == STEPS
    assert seen == Counter({(s, row): 1 for s, n in enumerate(ROWS.values()) for row in range(n)})


def test_any_prefix_has_its_shares_and_no_length_is_far_behind(folders: list[Path]) -> None:
    with make(folders) as loader:
        order = [loader.stream_at(step) for step in range(3 * STEPS)]
    for epoch in range(3):
        part = Counter(order[epoch * STEPS : (epoch + 1) * STEPS])
        assert part == {"a8": 16, "b16": 20, "c32": 30}
    assert len(set(order[:12])) == 3, "lengths alternate, they do not follow each other"


def test_a_schedule_says_the_length_of_each_step(folders: list[Path]) -> None:
    schedule = [(0, "a8"), (5, {"a8": 1, "b16": Fraction(1)}), (9, "c32")]
    with make(folders, length_schedule=schedule, endless=True) as loader:
        lengths = [batch["tokens"].shape[1] for batch, _ in run(loader, 14)]
    assert lengths[:5] == [8] * 5
    assert sorted(lengths[5:9]) == [8, 8, 16, 16]
    assert lengths[9:] == [32] * 5


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(None, marks=pytest.mark.extended),
        [(0, "a8"), (4, {"b16": 2, "c32": 1}), (11, "c32")],
    ],
)
def test_a_run_resumes_at_the_exact_next_batch_at_every_step(folders: list[Path], schedule: Any) -> None:
    assert_exact_resume(lambda: make(folders, length_schedule=schedule), steps=15, tail_steps=4)


def test_a_restart_on_other_ranks_has_the_same_rows_in_each_step(folders: list[Path]) -> None:
    def make_rank(rank: int, ranks: int) -> LengthLoader:
        return make(folders, rank=rank, world_size=ranks, tokens_per_batch=128 // ranks)

    reference = run_ranks(make_rank, 1, 30, samples=rows_of)
    state = reference[11][1]
    for ranks in (2, 4):
        found = run_ranks(make_rank, ranks, 18, state, samples=rows_of)
        for (rows, after), (expected, wanted) in zip(found, reference[12:], strict=True):
            assert sorted(rows) == sorted(expected)
            assert after == wanted


def rows_of(batch: Any) -> list[tuple[int, int]]:
    return list(zip(batch["stream_id"].tolist(), batch["sample_id"].tolist(), strict=True))


def test_a_step_far_away_is_sought_as_quickly_as_the_next(folders: list[Path]) -> None:
    with make(folders, endless=True) as loader, make(folders, endless=True) as other:
        for step in (1, STEPS - 1, STEPS, 5 * STEPS + 7, 1 << 36):
            loader.seek(step)
            other.load_state_dict(loader.state_dict())
            expected = other.stream_at(step)
            (got, _), (same, _) = run(loader, 1)[0], run(other, 1)[0]
            assert_equal(got, same, f"step {step}")
            assert loader.lengths[loader.names.index(expected)] == got["tokens"].shape[1]
            assert loader.step == step + 1
        with pytest.raises(ValueError, match="from 0 to"):
            loader.seek(-1)


def test_leaving_a_for_and_beginning_another_goes_on(folders: list[Path]) -> None:
    with make(folders) as loader, make(folders) as other:
        reference = run(other, STEPS + 10)
        found: list[Any] = []
        while len(found) < STEPS + 10:
            for batch in loader:
                found.append(batch)
                if len(found) in (19, 38, STEPS + 10):
                    break
        first = iter(loader)
        iter(loader)
        with pytest.raises(RuntimeError, match="stale iterator"):
            next(first)
    for got, (expected, _) in zip(found, reference, strict=True):
        assert_equal(got, expected, "after a break")


def test_remote_streams_share_one_cache_and_give_what_local_ones_give(
    folders: list[Path], tmp_path: Path
) -> None:
    urls = []
    for folder in folders:
        store = MemoryStore(fresh_url())
        put_folder(folder, store)
        urls.append(Stream(store.url, name=folder.name))
    with (
        LengthLoader(urls, cache_dir=tmp_path, **grouped({"window": 9, **OPTIONS})) as remote,
        make(folders) as local,
    ):
        for (got, _), (expected, _) in zip(run(remote, 40), run(local, 40), strict=True):
            assert_equal(got, expected, "remote")
        assert len({id(loader.dataset.shards.fetcher) for loader in remote._loaders}) == 1  # type: ignore[union-attr]


def test_shifted_labels_count_what_the_model_reads(tmp_path: Path) -> None:
    for length in (9, 17):
        (tmp_path / str(length)).mkdir()
        ids = np.arange(20 * length, dtype=np.uint16).reshape(20, length)
        mds.write_index(
            tmp_path / str(length),
            [mds.write_rows_shard(tmp_path / str(length), "shard.00000.mds", ids)],
        )
    streams = [tmp_path / "9", tmp_path / "17"]
    with LengthLoader(streams, tokens_per_batch=16, labels="shifted", rank=0, world_size=1) as loader:
        shapes = {tuple(batch["tokens"].shape) for batch in loader}
        assert loader.lengths == (8, 16)
    assert shapes == {(2, 8), (1, 16)}


def test_each_stream_has_a_log_of_its_own_that_an_audit_proves(folders: list[Path], tmp_path: Path) -> None:
    with make(folders, usage_log=tmp_path) as loader:
        for _ in range(2):
            list(loader)
    for folder in folders:
        assert main(["audit", str(folder), "--logs", str(tmp_path / folder.name)]) == 0


def test_what_cannot_be_is_refused_with_a_reason(folders: list[Path], tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tokens_per_batch": 48}, "not a multiple of 32, the length of stream 'c32'"),
        ({"tail": "drop"}, "needs tail='carry'"),
        ({"epoch_samples": 3}, "epoch_samples is not an option of LengthLoader"),
        ({"length_schedule": [(1, "a8")]}, "must begin at step 0"),
        ({"length_schedule": [(0, "x")]}, "no stream is called 'x'"),
    ]
    for options, problem in cases:
        with pytest.raises(ValueError, match=problem):
            make(folders, **options)
    for name, digest in (("one", "aa"), ("two", "bb")):
        shutil.copytree(folders[0], tmp_path / name)
        card = {"tokenizer": {"eos_id": 0, "digest": digest}}
        (tmp_path / name / "dataset.json").write_text(json.dumps(card))
    with pytest.raises(ValueError, match="'one' and 'two' were made by different tokenizers"):
        make([tmp_path / "one", tmp_path / "two"])
    with pytest.raises(TypeError, match="a list of paths or Stream"):
        LengthLoader(str(folders[0]), tokens_per_batch=32)


def test_a_state_of_another_run_is_refused_and_changes_nothing(folders: list[Path]) -> None:
    schedule = [(0, "a8"), (8, "c32")]
    with make(folders, length_schedule=schedule) as loader:
        state = run(loader, 6)[-1][1]
    refused: list[tuple[dict[str, Any], str]] = [
        ({"tokens_per_batch": 64}, "tokens_per_step is 32 in the state, 64 here"),
        ({"seed": 18}, "stream 'a8'"),
        ({"length_schedule": [(0, "a8"), (4, "b16")]}, "differs from the saved one before step 6"),
    ]
    for options, problem in refused:
        with make(folders, **({"length_schedule": schedule} | options)) as loader:
            loader.seek(3)
            before = loader.state_dict()
            with pytest.raises(StateError, match=problem):
                loader.load_state_dict(state)
            assert loader.state_dict() == before
    with make(folders, length_schedule=[(0, "a8"), (7, "b16")]) as loader:  # changed behind the state
        loader.load_state_dict(state)
        assert [batch["tokens"].shape[1] for batch, _ in run(loader, 3)] == [8, 16, 16]
    with make(folders) as loader:
        loader.load_state_dict(state)  # none given: the saved one
        assert [loader.stream_at(step) for step in (7, 8)] == ["a8", "c32"]
        for wrong in ({}, {"loader": state}, state | {"version": 2}):
            with pytest.raises(StateError, match="not a state of a LengthLoader"):
                loader.load_state_dict(wrong)
