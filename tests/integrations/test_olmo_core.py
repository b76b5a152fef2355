"""OLMo-core trains on our batches, and resumes with the next one on any number of ranks, by its own calls."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from olmo_core.train import Duration, Trainer, TrainerConfig
from olmo_core.train.train_module import TrainModule

from shardkit.loaders import StreamingLoader
from shardkit.loaders.config import Layout
from shardkit.loaders.integrations.olmo_core_loader import ShardkitDataLoader

LENGTH = 65


def opened(
    data: Path, *, batch: int = 12, rank: int = 0, ranks: int = 1, **options: Any
) -> ShardkitDataLoader:
    return ShardkitDataLoader(
        data,
        sequence_length=LENGTH,
        global_batch_size=batch * LENGTH,
        work_dir=data.parent / "work",
        dp_world_size=ranks,
        dp_rank=rank,
        fs_local_rank=rank,
        **options,
    )


def trained(
    loader: ShardkitDataLoader,
    duration: Duration,
    *,
    state: dict[str, Any] | None = None,
    batch_sizes: Mapping[int, int] | None = None,
) -> Trainer:
    trainer = TrainerConfig(save_folder="unused", max_duration=duration).build(TrainModule(), loader)
    trainer.batch_sizes = batch_sizes or {}
    if state is not None:
        trainer.load_state_dict(copy.deepcopy(state))
    trainer.fit()
    loader.close()
    return trainer


def steps_of(*trainers: Trainer) -> list[tuple[int, list[int]]]:
    """(epoch, sorted rows) of each step, over the ranks."""
    return [
        (together[0][0], sorted(row for _, batch in together for row in batch["index"].tolist()))
        for together in zip(*(trainer.seen for trainer in trainers), strict=True)
    ]


@pytest.mark.parametrize(
    "tail",
    [
        "carry",
        pytest.param("drop", marks=pytest.mark.extended),
        pytest.param("pad", marks=pytest.mark.extended),
    ],
)
def test_a_run_resumes_exactly_at_every_step_also_on_other_ranks(data: Path, tail: Any) -> None:
    whole = trained(opened(data, tail=tail), Duration.epochs(3))  # 150 rows by 12
    steps = steps_of(whole)
    assert [epoch for epoch, _ in steps] == sorted(epoch for epoch, _ in steps)
    assert whole.max_steps == len(steps)
    for step, state in whole.states.items():
        again = [
            trained(opened(data, tail=tail, rank=rank, ranks=2), Duration.epochs(3), state=state)
            for rank in range(2)
        ]
        assert steps_of(*again) == steps[step:], f"resumed after step {step}"


def test_the_length_of_a_run_in_epochs_is_known_at_every_step(data: Path) -> None:
    whole = trained(opened(data), Duration.epochs(3))
    for state in whole.states.values():
        loader = opened(data)
        trainer = TrainerConfig(save_folder="unused", max_duration=Duration.epochs(3)).build(
            TrainModule(), loader
        )
        trainer.load_state_dict(copy.deepcopy(state))
        assert trainer.max_steps == 38  # 450 rows by 12
        loader.close()


def test_samples_go_on_where_the_batch_size_changes(data: Path) -> None:
    sizes = {4: 24 * LENGTH, 6: 12 * LENGTH}
    whole = trained(opened(data), Duration.steps(9), batch_sizes=sizes)
    lengths = [len(rows) for _, rows in steps_of(whole)]
    assert lengths == [12] * 4 + [24] * 2 + [12] * 3
    with StreamingLoader(data, batch_size=12, return_ids=True) as loader:
        expected = sorted(
            row for _, batch in zip(range(11), loader, strict=False) for row in batch["sample_id"].tolist()
        )
    assert sorted(row for _, rows in steps_of(whole) for row in rows) == expected
    for step, size in ((5, 24), (7, 12)):
        again = trained(
            opened(data, batch=size), Duration.steps(9), state=whole.states[step], batch_sizes=sizes
        )
        assert steps_of(again) == steps_of(whole)[step:], f"resumed after step {step}"


def test_batches_have_shifted_labels_and_documents(data: Path) -> None:
    loader = opened(data, layout=Layout(doc_lens=True))
    [(_, batch)] = trained(loader, Duration.steps(1)).seen
    assert batch.keys() == {"input_ids", "labels", "index", "doc_lens", "max_doc_lens"}
    with StreamingLoader(data, batch_size=12, labels=True, layout=Layout(document_ids=True)) as plain:
        expected = next(iter(plain))
    torch.testing.assert_close(batch["input_ids"], expected["tokens"])
    torch.testing.assert_close(batch["labels"][:, :-1], expected["labels"][:, 1:])
    assert batch["labels"][:, -1].tolist() == [-100] * 12
    assert batch["doc_lens"].sum(1).tolist() == [LENGTH] * 12
    assert batch["max_doc_lens"] == batch["doc_lens"].amax(1).tolist()
    mock = loader.get_mock_batch()
    assert {
        name: value.shape for name, value in mock.items() if name not in ("doc_lens", "max_doc_lens")
    } == {name: batch[name].shape for name in ("input_ids", "labels", "index")}


def test_lengths_that_do_not_fit_are_refused(data: Path) -> None:
    with pytest.raises(ValueError, match="rows of 65 tokens: give sequence_length=65"):
        ShardkitDataLoader(data, sequence_length=64, global_batch_size=640, work_dir=data.parent)
    with pytest.raises(ValueError, match="must be a multiple of sequence_length=65 times 2"):
        opened(data, batch=3, ranks=2)
    loader = ShardkitDataLoader(
        data,
        sequence_length=64,
        global_batch_size=640,
        work_dir=data.parent,
        layout=Layout(keep_length=False),
    )
    assert next(iter(loader.loader))["labels"].shape == (10, 64)
    loader.close()
