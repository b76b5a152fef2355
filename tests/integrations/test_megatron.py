"""Megatron-LM and Megatron-Bridge train on our micro-batches from `consumed_train_samples` on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.bridge.data.base import DatasetBuildContext
from megatron.bridge.training.callbacks import CallbackContext
from megatron.bridge.training.checkpointing import maybe_load_dataloader_state, maybe_save_dataloader_state
from megatron.core import mpu
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.training.global_vars import set_args
from megatron.training.training import build_train_valid_test_data_iterators
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardkit.loaders import StreamingLoader
from shardkit.loaders.config import Layout, Run, RunOptions
from shardkit.loaders.integrations.megatron import MegatronDataIterator, MegatronDataset, external_iterators
from shardkit.loaders.integrations.megatron_bridge import SeekToConsumedSamples, ShardkitProvider

SEQ_LENGTH = 64
GLOBAL_BATCH = 12
STEPS = 16  # 192 samples of epochs of 150
Batch = dict[str, torch.Tensor]


def arguments(consumed: int, **changed: Any) -> SimpleNamespace:
    """What Megatron-LM's argument parser gives."""
    numbers = {
        "micro_batch_size": 3,
        "global_batch_size": GLOBAL_BATCH,
        "eval_micro_batch_size": 3,
        "eval_global_batch_size": GLOBAL_BATCH,
        "seq_length": SEQ_LENGTH,
        "train_iters": STEPS,
        "num_workers": 0,
        "consumed_train_samples": consumed,
        "consumed_valid_samples": 24,
        "dataloader_type": "external",
        "reset_position_ids": False,
        "dataloader_inter_document_masking": False,
    }
    return SimpleNamespace(**(numbers | changed))


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make this process a rank of a run."""

    def set_place(rank: int, world_size: int, tensor_parallel: int = 1) -> None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        mpu.initialize_model_parallel(tensor_parallel)

    yield set_place
    mpu.initialize_model_parallel()


def steps_of(iterators: list[Any], steps: int, micro_batch_size: int = 3) -> list[list[list[int]]]:
    """Sorted rows of tokens of each step, over data-parallel ranks and their micro-batches."""
    count = GLOBAL_BATCH // micro_batch_size // len(iterators)
    return [
        sorted(row for each in iterators for _ in range(count) for row in next(each)["tokens"].tolist())
        for _ in range(steps)
    ]


def built(data: Path, place: Any, ranks: int, args: SimpleNamespace) -> list[Any]:
    """The training iterators of all ranks, as Megatron-LM's training script makes them."""

    def provider(numbers: tuple[int, int, int]) -> Any:
        if args.dataloader_type == "external":
            return external_iterators(data)
        return MegatronDataset(data, numbers[0], seq_length=args.seq_length), None, None

    set_args(args)
    found = []
    for rank in range(ranks):
        place(rank, ranks)
        found.append(build_train_valid_test_data_iterators(provider)[0])
    return found


@pytest.mark.parametrize("kind", ["external", "single"])
def test_consumed_samples_are_all_of_the_state_at_any_size(data: Path, place: Any, kind: str) -> None:
    whole = steps_of(built(data, place, 1, arguments(0, dataloader_type=kind)), STEPS)
    for step, ranks, micro in ((1, 2, 3), (5, 4, 3), (13, 2, 2), (15, 1, 6)):
        args = arguments(step * GLOBAL_BATCH, dataloader_type=kind, micro_batch_size=micro)
        resumed = steps_of(built(data, place, ranks, args), STEPS - step, micro)
        assert resumed == whole[step:], f"from step {step} on {ranks} ranks"


def test_tensor_parallel_ranks_leave_reading_to_the_first(data: Path, place: Any) -> None:
    set_args(arguments(0))
    place(3, 4, tensor_parallel=2)
    assert external_iterators(data) == (None, None, None)
    place(2, 4, tensor_parallel=2)
    train, valid, test = external_iterators(data, valid=data, test=data)
    assert train is not None
    assert valid is not None
    assert test is not None
    assert (train.loader.rank, train.loader.world_size, train.loader.position) == (1, 2, 0)
    assert (valid.loader.position, test.loader.position) == (24, 0)


@pytest.mark.parametrize("documents", [False, True])
def test_micro_batches_are_what_gpt_datasets_give(data: Path, documents: bool) -> None:
    made = next(
        MegatronDataIterator(
            data,
            seq_length=SEQ_LENGTH,
            micro_batch_size=3,
            global_batch_size=3,
            data_parallel_rank=0,
            data_parallel_size=1,
            inter_document_masking=documents,
        )
    )
    with StreamingLoader(
        data, batch_size=3, labels="shifted", layout=Layout(position_ids=documents, doc_lens=documents)
    ) as loader:
        batch = next(iter(loader))
    counts = batch["labels"] != -100
    torch.testing.assert_close(made["tokens"], batch["tokens"])
    torch.testing.assert_close(made["labels"][counts], batch["labels"][counts])
    torch.testing.assert_close(made["loss_mask"], counts.float())
    assert int(made["labels"].min()) >= 0
    if not documents:
        assert made["position_ids"].tolist() == [list(range(SEQ_LENGTH))] * 3
        assert "cu_seqlens" not in made
        return
    torch.testing.assert_close(made["position_ids"], batch["position_ids"])
    for row, lengths in enumerate(batch["doc_lens"].tolist()):
        ends = [sum(lengths[: n + 1]) for n in range(len(lengths)) if lengths[n]]
        bounds = [0, *ends, *[SEQ_LENGTH] * (SEQ_LENGTH - len(ends))]
        assert made["cu_seqlens"][row].tolist() == bounds
        assert int(made["max_seqlen"][row]) == max(lengths)
    assert (made["cu_seqlens"].dtype, made["max_seqlen"].dtype) == (torch.int32, torch.int32)


def test_rows_of_another_length_are_refused(data: Path) -> None:
    with pytest.raises(ValueError, match="rows of 65 tokens, but sequences of 65 need 66"):
        MegatronDataset(data, 10, seq_length=65)
    assert (
        next(iter(MegatronDataset(data, 10, seq_length=65, layout=Layout(keep_length=True))))["loss_mask"][-1]
        == 0
    )


@contextmanager
def bridge(data: Path, rank: int, ranks: int) -> Iterator[tuple[ShardkitProvider, RerunDataIterator, Any]]:
    """A provider, its training iterator, and the process groups of a rank, with no real communication."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    options: RunOptions = {"run": Run(stop_together=False)}
    provider = ShardkitProvider(
        train=str(data),
        seq_length=SEQ_LENGTH,
        micro_batch_size=3,
        global_batch_size=GLOBAL_BATCH,
        options=options,
    )
    groups = SimpleNamespace(dp=dist.group.WORLD)
    train, _, _ = provider.build_datasets(DatasetBuildContext(GLOBAL_BATCH * STEPS, 0, 0, None, groups))
    assert train is not None
    yield provider, RerunDataIterator(train), groups
    train.close()
    dist.destroy_process_group()


def bridge_run(
    data: Path, folder: Path, ranks: int, steps: range, *, by_consumed_samples: bool = False
) -> list[list[list[int]]]:
    """Sorted rows of each step of all ranks; they load the state of the first and save that of the last."""
    rows: list[list[list[int]]] = [[] for _ in steps]
    for rank in range(ranks):
        with bridge(data, rank, ranks) as (provider, batches, groups):
            if by_consumed_samples:
                state = SimpleNamespace(consumed_train_samples=steps.start * GLOBAL_BATCH)
                context = CallbackContext(state=SimpleNamespace(train_state=state), model=[])
                SeekToConsumedSamples(provider).on_train_start(context)
            elif steps.start:
                maybe_load_dataloader_state(batches, steps.start, str(folder), pg_collection=groups)
            for step in rows:
                for _ in range(GLOBAL_BATCH // 3 // ranks):
                    step += next(batches)["tokens"].tolist()
                batches.advance()
            maybe_save_dataloader_state(None, batches, steps.stop, str(folder), pg_collection=groups)
    return [sorted(step) for step in rows]


def test_megatron_bridge_restores_at_another_data_parallel_size(data: Path, tmp_path: Path) -> None:
    whole = bridge_run(data, tmp_path / "whole", 1, range(STEPS))
    assert bridge_run(data, tmp_path / "run", 4, range(5)) == whole[:5]
    assert bridge_run(data, tmp_path / "run", 2, range(5, 9)) == whole[5:9]
    with pytest.raises(RuntimeError, match=r"train_dataloader_dprank002\.pt is missing"):
        bridge_run(data, tmp_path / "run", 4, range(9, STEPS))
    dist.destroy_process_group()
    assert bridge_run(data, tmp_path / "run", 4, range(9, STEPS), by_consumed_samples=True) == whole[9:]
