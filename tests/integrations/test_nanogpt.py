"""The generators of nanoGPT, nanochat and modded-nanogpt, called as their training scripts call them."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shardkit.loaders import StreamingLoader
from shardkit.loaders.config import Layout, grouped
from shardkit.loaders.integrations.nanogpt import (
    DistributedDataGenerator,
    NanoGPTData,
    data_loader,
    data_loader_with_state,
)
from shardkit.loaders.peers import watch
from shardkit.storage import open_store
from support.loader_data import EOS, token_rows
from support.remote_harness import fresh_url, put_folder

ROWS = token_rows(150, 65).astype(np.int64)


def rows_of(inputs: Tensor) -> list[int]:
    """Which rows these are: row i begins with i + 1."""
    return [int(first) - 1 for first in inputs[:, 0]]


def expected_targets(inputs: Tensor) -> Tensor:
    """The token after each, and -1 where that is an eos behind an eos."""
    rows = ROWS[rows_of(inputs)]
    targets = rows[:, 1:].copy()
    targets[(rows[:, 1:] == EOS) & (rows[:, :-1] == EOS)] = -1
    return torch.from_numpy(targets)


def nanogpt(data: Path | str, **options: Any) -> NanoGPTData:
    return NanoGPTData(data, data, batch_size=4, block_size=64, **grouped(options))


def test_nanogpt_gets_inputs_and_the_tokens_after_them(data: Path) -> None:
    run, ignored = nanogpt(data), 0
    for _ in range(40):
        inputs, targets = run.get_batch("train")
        assert (inputs.dtype, targets.dtype, inputs.shape) == (torch.int64, torch.int64, (4, 64))
        assert inputs.is_contiguous()
        assert targets.is_contiguous(), "nanoGPT calls view(-1)"
        assert torch.equal(targets, expected_targets(inputs))
        ignored += int((targets == -1).sum())
    assert ignored


def test_nanogpts_checkpoint_holds_the_batch_that_is_not_trained_on_yet(data: Path) -> None:
    run = nanogpt(data)
    whole = [rows_of(run.get_batch("train")[0]) for _ in range(60)]  # across an epoch's end
    for step in (0, 1, 36, 37, 38):
        run, trained = nanogpt(data), []
        batch = run.get_batch("train")  # as train.py: fetched before the loop, and again while a step runs
        for _ in range(step):
            trained.append(rows_of(batch[0]))
            batch = run.get_batch("train")
        state = json.loads(json.dumps(run.state_dict()))
        resumed = nanogpt(data)
        resumed.load_state_dict(state)
        rest = [rows_of(resumed.get_batch("train")[0]) for _ in range(5)]
        assert trained + rest == whole[: step + 5]


def test_nanogpt_resumes_on_other_ranks_with_the_same_rows_in_each_step(data: Path) -> None:
    def steps(run: list[NanoGPTData], count: int) -> list[set[int]]:
        """Of twelve rows, in micro-batches of four on each rank."""
        accumulate = 3 // len(run)
        return [
            {row for data in run for _ in range(accumulate) for row in rows_of(data.get_batch()[0])}
            for _ in range(count)
        ]

    one = [nanogpt(data, rank=0, world_size=1)]
    first = steps(one, 4)
    one[0].get_batch()  # the one that is fetched ahead
    state = one[0].state_dict()
    three = [nanogpt(data, rank=rank, world_size=3) for rank in range(3)]
    for each in three:
        each.load_state_dict(state)
    again = nanogpt(data, rank=0, world_size=1)
    assert first + steps(three, 5) == steps([again], 9)


def test_an_evaluation_of_nanogpt_is_always_the_same_and_moves_nothing(data: Path) -> None:
    run, reference = nanogpt(data), nanogpt(data)
    found = []
    for _ in range(2):
        assert torch.equal(run.get_batch()[0], reference.get_batch()[0])
        found.append(
            [rows_of(inputs) for split in ("train", "val") for inputs, _ in run.evaluation(split, 3)]
        )
    assert found[0] == found[1]
    assert found[0][:3] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    with pytest.raises(ValueError, match="evaluation"):
        run.get_batch("val")


def test_an_evaluation_reads_remote_data_through_the_cache_of_training(data: Path, tmp_path: Path) -> None:
    url = fresh_url()
    put_folder(data, open_store(url))
    run = nanogpt(url, cache_dir=tmp_path / "cache", usage_log=tmp_path / "usage")
    for _ in range(20):  # its first batches are read by ranges, and may be all that it needs
        list(run.evaluation("val", 3))
        if shards := list((tmp_path / "cache").rglob("*-xxh64-*")):
            break
    assert shards
    assert not (tmp_path / "usage").exists(), "only training is logged"


def test_nanochats_state_names_the_batch_that_comes_with_it(data: Path) -> None:
    batches = list(islice(data_loader_with_state(data, 4, 64, device="cpu"), 45))
    assert [state["epoch"] for *_, state in batches] == [1] * 38 + [2] * 7
    for inputs, targets, _ in batches:
        assert torch.equal(targets, expected_targets(inputs))
    for step in (0, 1, 37, 38):
        state = json.loads(json.dumps(batches[step][2]))
        resumed = data_loader_with_state(data, 4, 64, device="cpu", resume_state_dict=state)
        for (inputs, *_), (expected, *_) in zip(islice(resumed, 5), batches[step:], strict=False):
            assert torch.equal(inputs, expected)
    again = [inputs for inputs, _ in islice(data_loader(data, 4, 64, device="cpu"), 45)]
    assert all(torch.equal(inputs, expected) for inputs, (expected, *_) in zip(again, batches, strict=True))


def test_a_model_of_another_length_is_refused(data: Path) -> None:
    message = "takes 128 tokens, so rows must have 129, but the dataset has rows of 65"
    with pytest.raises(ValueError, match=message):
        next(data_loader(data, 4, 128, device="cpu"))


def test_a_generator_that_is_dropped_stops_no_other_rank(
    data: Path, process_groups: Callable[[int, int], None]
) -> None:
    """nanochat drops the generator of each evaluation."""
    process_groups(0, 2)
    before = threading.active_count()
    with watch() as training:
        evaluation = data_loader(data, 4, 64, device="cpu")
        next(evaluation)
        del evaluation
        gc.collect()
        time.sleep(0.1)
        training.check()
        with StreamingLoader(data, batch_size=4) as loader:
            next(iter(loader))
    assert threading.active_count() <= before


def modded(data: Path, tokens: int, longest: int, steps: int = 1, **options: Any) -> DistributedDataGenerator:
    return DistributedDataGenerator(data, tokens, longest, steps, device="cpu", **grouped(options))


def test_modded_nanogpt_gets_flat_rows_with_the_bounds_of_documents(data: Path) -> None:
    loader = modded(data, 64 * 8, -1, 2, max_num_docs=64)
    inputs, targets, bounds = next(loader)
    assert [(each.dtype, tuple(each.shape)) for each in (inputs, targets, bounds)] == [
        (torch.int32, (256,)),
        (torch.int64, (256,)),
        (torch.int32, (64,)),
    ]
    rows = ROWS[rows_of(inputs.reshape(4, 64))]
    assert targets.tolist() == rows[:, 1:].reshape(-1).tolist(), "nothing is ignored"
    with StreamingLoader(data, batch_size=4, labels="shifted", layout=Layout(cu_seqlens=64)) as plain:
        assert bounds.tolist() == next(iter(plain))["cu_seqlens"].tolist()
    loader.close()


def test_sequences_are_cut_at_the_longest_length(data: Path) -> None:
    loader = modded(data, 64 * 4, 10, max_num_docs=128)
    _, _, bounds = next(loader)
    with StreamingLoader(data, batch_size=4, labels="shifted", layout=Layout(cu_seqlens=True)) as plain:
        documents = next(iter(plain))["cu_seqlens"].tolist()
    expected = [place for low, high in pairwise(documents) for place in range(low, high, 10)]
    assert bounds.tolist() == expected + [256] * (128 - len(expected))
    loader.close()


def test_sending_new_sizes_continues_with_the_next_rows(data: Path) -> None:
    whole = modded(data, 64 * 2, -1)
    expected = torch.cat([next(whole)[0] for _ in range(80)])
    ramp = modded(data, 64 * 2, -1)
    found = [
        ramp.send(params)[0] for params in (None, (64 * 4, 32, 1), None, (64 * 12, 64, 2), None, (64, -1, 1))
    ]
    assert [len(inputs) // 64 for inputs in found] == [2, 4, 4, 6, 6, 1]
    assert ramp.state_dict()["position"] == 23
    first = expected[: 23 * 64].reshape(-1, 64)
    assert sorted(rows_of(torch.cat(found).reshape(-1, 64))) == sorted(rows_of(first))
    resumed = modded(data, 64, -1)
    resumed.load_state_dict(ramp.state_dict())
    both = torch.cat([*found, *(next(resumed)[0] for _ in range(127))]).reshape(-1, 64)
    assert sorted(rows_of(both)) == list(range(150)), "one epoch has each row once"
    for loader in (whole, ramp, resumed):
        loader.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((100, -1), "multiple of 64"),
        ((64 * 3, -1, 2), r"multiple of 128 \(64 tokens per row \* 1 ranks \* 2 micro-batches\)"),
        ((64, 0), "max_seq_len must be at least 1"),
    ],
)
def test_sizes_that_rows_cannot_have_are_refused(data: Path, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        modded(data, *arguments)


def test_more_sequences_than_there_is_room_for_are_refused(data: Path) -> None:
    loader = modded(data, 64 * 4, -1, max_num_docs=8)
    with pytest.raises(ValueError, match="raise max_num_docs"):
        next(loader)
    loader.close()
