"""torchtitan trains on our batches, and resumes with the next one at any degree, by its own calls."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.validate import Validator
from torchtitan.config import TrainingConfig
from torchtitan.trainer import Trainer

from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.config import Layout
from shardkit.loaders.integrations.torchtitan_loader import ShardkitDataLoader

SEQ_LEN = 64
GLOBAL_BATCH = 12


def trained(
    data: Path,
    folder: Path,
    *,
    steps: int,
    monkeypatch: pytest.MonkeyPatch,
    rank: int = 0,
    degree: int = 1,
    validator: Validator.Config | None = None,
) -> Trainer:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(degree))
    trainer = Trainer(
        Trainer.Config(
            dump_folder=str(folder),
            dataloader=ShardkitDataLoader.Config(dataset_path=str(data)),
            training=TrainingConfig(
                local_batch_size=3, global_batch_size=GLOBAL_BATCH, seq_len=SEQ_LEN, steps=steps
            ),
            checkpoint=CheckpointManager.Config(enable=True, interval=4),
            validator=validator or Validator.Config(),
        )
    )
    trainer.train()
    trainer.dataloader.close()
    return trainer


def inputs_of(trainer: Trainer, first_step: int = 0) -> list[list[int]]:
    """Sorted rows of all microbatches from a step on."""
    skipped = first_step * trainer.gradient_accumulation_steps
    return sorted(row for inputs, _ in trainer.seen[skipped:] for row in inputs["input"].tolist())


def test_a_run_resumes_exactly_at_another_degree(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained(
        data, tmp_path / "whole", steps=20, monkeypatch=monkeypatch
    )  # 240 samples of epochs of 150
    for saved_at, degree in ((4, 2), (16, 4)):
        trained(data, tmp_path / f"saved-{degree}", steps=saved_at, monkeypatch=monkeypatch)
        found = []
        for rank in range(degree):
            folder = tmp_path / f"{rank}-of-{degree}"
            shutil.copytree(tmp_path / f"saved-{degree}", folder)
            resumed = trained(data, folder, steps=20, monkeypatch=monkeypatch, rank=rank, degree=degree)
            found += inputs_of(resumed)
        assert sorted(found) == inputs_of(whole, saved_at), f"from step {saved_at} on {degree} ranks"


def test_batches_are_a_loaders_shifted_rows_with_positions_in_documents(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trained(data, tmp_path, steps=2, monkeypatch=monkeypatch)
    with StreamingLoader(
        data, batch_size=3, rank=0, world_size=1, labels=True, layout=Layout(position_ids=True)
    ) as loader:
        for (inputs, labels), batch in zip(trainer.seen, loader, strict=False):
            assert inputs.keys() == {"input", "positions"}
            torch.testing.assert_close(inputs["input"], batch["tokens"][:, :-1])
            torch.testing.assert_close(inputs["positions"], batch["position_ids"][:, :-1])
            torch.testing.assert_close(labels, batch["labels"][:, 1:])


def test_later_development_gets_the_same_tokens_without_rows(data: Path) -> None:
    config = ShardkitDataLoader.Config(dataset_path=str(data))
    shape = {"dp_world_size": 2, "dp_rank": 1, "tokenizer": None}
    rows = config.build(**shape, seq_len=SEQ_LEN, local_batch_size=3)
    flat = config.build(**shape, max_context_length=SEQ_LEN, num_tokens_per_batch=3 * SEQ_LEN)
    for _, (expected, batch) in zip(range(5), zip(rows, flat, strict=True), strict=False):
        torch.testing.assert_close(batch[0]["input"], expected[0]["input"].flatten())
        torch.testing.assert_close(batch[0]["positions"], expected[0]["positions"].flatten())
        torch.testing.assert_close(batch[1], expected[1].flatten())
    with pytest.raises(ValueError, match="a batch of 100 tokens does not divide into rows"):
        config.build(**shape, max_context_length=SEQ_LEN, num_tokens_per_batch=100)
    rows.close()
    flat.close()


def test_each_validation_has_the_same_samples_and_all_of_them_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validator = Validator.Config(
        enable=True, freq=2, steps=-1, dataloader=ShardkitDataLoader.Config(dataset_path=str(data))
    )
    runs = [
        trained(
            data,
            tmp_path / str(rank),
            steps=4,
            monkeypatch=monkeypatch,
            rank=rank,
            degree=2,
            validator=validator,
        )
        for rank in range(2)
    ]
    with StreamingLoader(
        data, batch_size=10, rank=0, world_size=1, labels="shifted", layout=Layout(position_ids=True)
    ) as loader:
        every = sorted(row for batch in loader for row in batch["labels"].tolist())
    for validations in zip(*(run.validated for run in runs), strict=True):
        assert len(validations[0]) == len(validations[1])
        rows = [row for batches in validations for labels in batches for row in labels.tolist()]
        assert sorted(row for row in rows if max(row) >= 0) == every
    assert len(runs[0].validated) == 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "either dataset_path or streams"),
        ({"options": {"layout": Layout(flat=True)}, "dataset_path": "data"}, "torchtitan determines flat"),
        (
            {"options": {"layout": Layout(keep_length=True)}, "dataset_path": "data"},
            "rows of 65 tokens, but sequences of 64 need 64",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    data: Path, wrong: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data.parent)
    with pytest.raises(ValueError, match=message):
        ShardkitDataLoader.Config(**wrong).build(dp_world_size=1, dp_rank=0, seq_len=64, local_batch_size=3)


def test_a_mixture_and_a_checkpoint_without_data(data: Path) -> None:
    config = ShardkitDataLoader.Config(streams=[Stream(data, weight=2, name="a"), Stream(data, name="b")])
    loader = config.build(dp_world_size=1, dp_rank=0, seq_len=SEQ_LEN, local_batch_size=3)
    loader.load_state_dict({})
    next(iter(loader))
    assert loader.loader.stream_samples() == {"a": 2, "b": 1}
    loader.close()
