"""nanotron trains on our micro-batches, and resumes with the next one at any data-parallel size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nanotron.config import LlamaConfig, Qwen2Config
from nanotron.parallel.pipeline_parallel.tensor_pointer import TensorPointer
from nanotron.trainer import DistributedTrainer

from shardkit.loaders import Layout, StreamingLoader
from shardkit.loaders.integrations.nanotron import stage_batches

LENGTH, GLOBAL_BATCH, MICRO_BATCH = 64, 12, 3


def trained(
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    steps: int = 1,
    consumed: int = 0,
    model: object = None,
    **places: str,
) -> list[dict[str, Any]]:
    """Return the micro-batches of a rank, placed by its "rank/size" in dp, pp and cp."""
    for name in ("dp", "pp", "cp"):
        monkeypatch.setenv(name.upper(), places.get(name, "0/1"))
    trainer = DistributedTrainer(
        {
            "model": model or LlamaConfig(),
            "micro_batch_size": MICRO_BATCH,
            "sequence_length": LENGTH,
            "global_batch_size": GLOBAL_BATCH,
        }
    )
    batches = stage_batches(trainer, data, consumed, seed=17)
    trainer.train({"stage": batches}, steps=steps)
    assert trainer.consumed_train_samples == steps * GLOBAL_BATCH
    if close := getattr(batches, "close", None):
        close()
    seen: list[dict[str, Any]] = trainer.seen
    return seen


def rows_of(*ranks: list[dict[str, Any]]) -> list[str]:
    return sorted(str(row) for seen in ranks for batch in seen for row in batch["input_ids"].tolist())


def test_a_run_resumes_exactly_at_another_data_parallel_size(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained(data, monkeypatch, steps=20)  # 240 samples of epochs of 150
    first = [trained(data, monkeypatch, steps=7, dp=f"{rank}/2") for rank in range(2)]
    more = [
        trained(data, monkeypatch, steps=13, consumed=7 * GLOBAL_BATCH, dp=f"{rank}/4") for rank in range(4)
    ]
    assert rows_of(*first) == rows_of(whole[: 7 * 4])
    assert rows_of(*more) == rows_of(whole[7 * 4 :])


def test_fields_are_those_of_nanotrons_collators(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, inner = (
        next(iter(StreamingLoader(data, batch_size=MICRO_BATCH, labels="shifted", layout=layout)))
        for layout in (Layout(), Layout(position_ids=True))
    )
    [plain, *_] = trained(data, monkeypatch)
    assert list(plain) == ["input_ids", "input_mask", "label_ids", "label_mask"]
    torch.testing.assert_close(plain["input_ids"], expected["tokens"])
    assert plain["input_mask"].all()
    torch.testing.assert_close(plain["label_ids"], expected["labels"].clamp(min=0))
    torch.testing.assert_close(plain["label_mask"], expected["labels"] != -100)

    [whole, *_] = trained(data, monkeypatch, model=Qwen2Config())
    assert list(whole) == ["input_ids", "position_ids", "label_ids", "label_mask"]
    assert whole["position_ids"].tolist() == [list(range(LENGTH))] * MICRO_BATCH
    torch.testing.assert_close(whole["label_mask"], plain["label_mask"])

    [inside, *_] = trained(data, monkeypatch, model=Qwen2Config(_use_doc_masking=True))
    torch.testing.assert_close(inside["position_ids"], inner["position_ids"])
    torch.testing.assert_close(inside["label_mask"], inner["labels"] != -100)
    assert inside["label_mask"].sum() < plain["label_mask"].sum()


def test_ranks_of_context_parallelism_have_their_part_of_each_sequence(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Qwen2Config(_use_doc_masking=True)
    [whole, *_] = trained(data, monkeypatch, model=model)
    parts = [trained(data, monkeypatch, model=model, cp=f"{rank}/2")[0] for rank in range(2)]
    for name in ("input_ids", "label_ids", "label_mask"):
        torch.testing.assert_close(torch.cat([part[name] for part in parts], 1), whole[name])
    for part in parts:
        torch.testing.assert_close(part["position_ids"], whole["position_ids"])


def test_each_pipeline_stage_has_what_it_needs_and_points_to_the_rest(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [whole, *_] = trained(data, monkeypatch)
    for rank, own in enumerate((["input_ids", "input_mask"], [], ["label_ids", "label_mask"])):
        [batch, *_] = trained(data, monkeypatch, pp=f"{rank}/3")
        assert batch.keys() == whole.keys()
        for name, value in batch.items():
            if name in own:
                torch.testing.assert_close(value, whole[name])
            else:
                assert value == TensorPointer(group_rank=0 if name.startswith("input") else 2)


def test_what_does_not_fit_is_refused(data: Path) -> None:
    trainer = DistributedTrainer(
        {"model": LlamaConfig(), "micro_batch_size": 3, "sequence_length": 65, "global_batch_size": 12}
    )
    with pytest.raises(ValueError, match="rows of 65 tokens, but sequences of 65 need 66"):
        stage_batches(trainer, data, 0)
    with pytest.raises(ValueError, match="determines position_ids: leave it out"):
        stage_batches(trainer, data, 0, layout=Layout(position_ids=True))
    [batch, *_] = zip(
        range(1), stage_batches(trainer, data, 0, layout=Layout(keep_length=True)), strict=False
    )
    assert batch[1]["label_mask"][:, -1].tolist() == [False] * 3
