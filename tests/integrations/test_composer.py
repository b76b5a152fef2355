"""Composer trains on our batches, and resumes with the next one at every step, by its own calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from composer import Evaluator, Trainer

from shardkit.loaders import StreamingLoader
from shardkit.loaders.config import Layout, grouped
from shardkit.loaders.integrations.composer_dataset import build_data_spec, build_dataloader


def trained(
    data: Path, folder: Path, duration: str = "3ep", load: Path | None = None, **options: Any
) -> list[Any]:
    """(epoch, batch in it, rows) of each step; 150 rows make epochs of three or four batches of 40."""
    trainer = Trainer(
        model=None,
        train_dataloader=build_data_spec(data, batch_size=40, return_ids=True, **grouped(options)),
        max_duration=duration,
        save_folder=str(folder),
        save_interval="1ba",
        load_path=None if load is None else str(load),
    )
    trainer.fit()
    trainer.loader.close()
    return [(epoch, number, batch["sample_id"].tolist()) for epoch, number, batch in trainer.seen]


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.extended)])
def test_a_run_resumes_exactly_at_every_step_also_at_the_end_of_an_epoch(
    data: Path, tmp_path: Path, num_workers: int
) -> None:
    whole = trained(data, tmp_path / "whole", num_workers=num_workers)
    assert [epoch for epoch, *_ in whole] == [0] * 4 + [1] * 4 + [2] * 4
    for step in range(1, len(whole)):
        rest = trained(
            data, tmp_path / "rest", load=tmp_path / "whole" / f"ba{step}.json", num_workers=num_workers
        )
        assert rest == whole[step:], f"resumed after step {step}"


def test_the_state_of_composer_continues_in_any_loader_and_back(data: Path, tmp_path: Path) -> None:
    whole = trained(data, tmp_path / "whole")
    trainer = Trainer(model=None, train_dataloader=build_data_spec(data, batch_size=40), max_duration="3ba")
    trainer.fit()
    state = trainer.loader.state_dict()
    with StreamingLoader(data, batch_size=20, rank=1, world_size=2, return_ids=True) as loader:
        loader.load_state_dict(state)
        ids = next(iter(loader))["sample_id"].tolist()
        assert ids == whole[3][2][20:]
        trainer.loader.dataset.load_state_dict(loader.state_dict())
    assert trainer.loader.state_dict()["position"] == 160
    trainer.loader.close()


def test_batches_are_what_language_models_take_and_are_cut_by_rows(data: Path) -> None:
    spec = build_data_spec(data, batch_size=8, layout=Layout(document_ids=True, position_ids=True))
    trainer = Trainer(model=None, train_dataloader=spec, max_duration="1ba", device_train_microbatch_size=4)
    trainer.fit()
    [(_, _, batch)] = trainer.seen
    assert batch.keys() == {"input_ids", "labels", "sequence_id", "position_ids"}
    assert [len(part["input_ids"]) for part in trainer.microbatches[0]] == [4, 4]
    assert (spec.num_samples, spec.dataloader.batch_size) == (150, 8)
    spec.dataloader.close()


def test_each_evaluation_has_every_sample_once(data: Path) -> None:
    evaluation = build_data_spec(
        data, batch_size=40, shuffle="none", tail="pad", restart=True, return_ids=True
    )
    train = build_data_spec(data, batch_size=40)
    evaluator = Evaluator(label="eval", dataloader=evaluation)
    trainer = Trainer(model=None, train_dataloader=train, eval_dataloader=evaluator, max_duration="2ep")
    trainer.fit()
    for batches in trainer.evaluated:
        ids = [number for batch in batches for number in batch["sample_id"].tolist() if number >= 0]
        assert ids == list(range(150))
    assert len(trainer.evaluated) == 2
    for spec in (train, evaluation):
        spec.dataloader.close()


@pytest.mark.parametrize("option", [{"flat": True}, {"cu_seqlens": 64}, {"endless": True}])
def test_what_composer_cannot_cut_or_count_is_refused(data: Path, option: Any) -> None:
    with pytest.raises(ValueError, match=f"leave out {next(iter(option))}"):
        build_data_spec(data, batch_size=8, **grouped(option))


def test_llm_foundrys_yaml_names_a_dataset_or_streams(data: Path) -> None:
    one = build_dataloader(tokenizer=None, device_batch_size=8, dataset={"path": data, "max_seq_len": 65})
    streams = {"web": {"path": data, "weight": 3}, "code": {"path": data}}
    two = build_dataloader(tokenizer=None, device_batch_size=8, dataset={"streams": streams, "seed": 5})
    assert (one.num_samples, two.num_samples) == (150, 300)
    one.dataloader.close()
    two.dataloader.close()
    whole = build_dataloader(tokenizer=None, device_batch_size=8, dataset={"path": data}, drop_last=True)
    assert len(list(whole.dataloader)) == 150 // 8
    whole.dataloader.close()
    with pytest.raises(ValueError, match="drop_last and tail='pad' contradict each other"):
        build_dataloader(
            tokenizer=None, device_batch_size=8, dataset={"path": data, "tail": "pad"}, drop_last=True
        )
    for wrong, message in (
        ({"path": data, "max_seq_len": 64}, "max_seq_len is 64, but rows have 65 tokens"),
        ({"seed": 5}, "give either path or streams"),
        ({"path": data, "shufle": True}, "unexpected keyword argument .shufle."),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            build_dataloader(tokenizer=None, device_batch_size=8, dataset=wrong)
