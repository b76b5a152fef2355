"""The Hugging Face Trainer on a `TrainerDataset`: exact in every epoch, also with other batch sizes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import ParallelismConfig
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from shardkit.errors import StateError
from shardkit.loaders import StreamingLoader
from shardkit.loaders.config import Layout, grouped
from shardkit.loaders.integrations.hugging_face import StreamingTrainer, TrainerDataset, placement
from shardkit.loaders.pytorch import MapDataset
from support.loader_data import EOS, make_dataset

SAMPLES = 53  # with a global batch of 4: epochs of 14 steps
STEPS = 32  # into the third epoch
SEED = 42  # TrainingArguments' default


class Model(torch.nn.Module):
    """Remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.batches: list[dict[str, torch.Tensor]] = []

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, **more: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        if self.training:
            self.batches.append({"input_ids": input_ids, "labels": labels, **more})
        return {"loss": self.layer(input_ids.float() / 500).square().mean()}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data"), "mds", samples=SAMPLES)


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    return TrainingArguments(
        str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        **{"max_steps": STEPS, "save_steps": 9, "per_device_train_batch_size": 4, **more},
    )


def train(data: Path, folder: Path, *, resume: int | None = None, **more: Any) -> list[int]:
    """The sample ids that a run trains on, from a checkpoint on or from the start."""
    options: dict[str, Any] = {"eos_id": EOS, "return_ids": True, "position_ids": True}
    model = Model()
    trainer = StreamingTrainer(
        model=model, args=arguments(folder, **more), train_dataset=TrainerDataset(data, **grouped(options))
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(folder / f"checkpoint-{resume}"))
    assert trainer.state.global_step == trainer.args.max_steps
    assert {"position_ids", "sample_id"} <= set(model.batches[0])
    return [int(i) for batch in model.batches for i in batch["sample_id"]]


def expected_ids(data: Path, batch_size: int, batches: int, state: Any = None) -> list[int]:
    with StreamingLoader(
        data, batch_size=batch_size, seed=SEED, endless=True, return_ids=True, eos_id=EOS
    ) as loader:
        if state is not None:
            loader.load_state_dict(state)
        return [int(i) for batch in islice(loader, batches) for i in batch["sample_id"]]


def sets(ids: list[int], size: int) -> list[list[int]]:
    return [sorted(ids[i : i + size]) for i in range(0, len(ids), size)]


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run, with checkpoints after 9, 18, 27 and 32 steps."""
    folder = tmp_path_factory.mktemp("run")
    assert train(data, folder) == expected_ids(data, 4, STEPS)
    return folder


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("step", "micro_batch", "accumulated"), [(9, 4, 1), (18, 4, 1), (18, 2, 2), (27, 1, 4), (32, 2, 2)]
)
def test_a_resumed_run_has_the_remaining_samples_in_any_epoch_and_micro_batches(
    data: Path, run: Path, step: int, micro_batch: int, accumulated: int
) -> None:
    rest = train(
        data,
        run,
        resume=step,
        max_steps=STEPS + 4,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulated,
        save_strategy="no",
    )
    assert sets(rest, 4) == sets(expected_ids(data, 4, STEPS + 4)[4 * step :], 4)


def test_another_global_batch_continues_at_the_position_of_the_checkpoint(data: Path, run: Path) -> None:
    saved = json.loads((run / "checkpoint-18" / "trainer_state.json").read_text())
    state = saved["stateful_callbacks"]["LoaderState"]["attributes"]["loader"]
    assert state["position"] == 18 * 4
    more: dict[str, Any] = {"max_steps": 24, "per_device_train_batch_size": 6, "save_strategy": "no"}
    assert train(data, run, resume=18, **more) == expected_ids(data, 6, 6, state)


@pytest.mark.extended
def test_checkpoints_that_would_lose_or_repeat_samples_are_refused(
    data: Path, run: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="ignore_data_skip=True would repeat samples"):
        train(data, run, resume=9, ignore_data_skip=True)
    with pytest.raises(StateError, match="seed: saved 42, loader has 3"):
        train(data, run, resume=9, data_seed=3)
    foreign = tmp_path / "checkpoint-9"
    shutil.copytree(run / "checkpoint-9", foreign)
    saved = json.loads((foreign / "trainer_state.json").read_text())
    del saved["stateful_callbacks"]["LoaderState"]
    (foreign / "trainer_state.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match="step 9 has no loader state"):
        train(data, tmp_path, resume=9)


def test_epochs_are_whole_steps_and_evaluation_takes_a_map_dataset(data: Path, tmp_path: Path) -> None:
    trainer = StreamingTrainer(
        model=Model(),
        args=arguments(
            tmp_path,
            max_steps=-1,
            num_train_epochs=2,
            gradient_accumulation_steps=3,
            eval_strategy="epoch",
            save_strategy="no",
        ),
        train_dataset=TrainerDataset(data, eos_id=EOS),
        eval_dataset=MapDataset(data, eos_id=EOS, labels=True, layout=Layout(rename={"tokens": "input_ids"})),
    )
    trainer.train()
    assert trainer.state.global_step == 2 * -(-SAMPLES // 12)
    evaluations = [each["epoch"] for each in trainer.state.log_history if "eval_loss" in each]
    assert evaluations == [1.0, 2.0]


def test_other_datasets_are_trained_on_as_without_the_mixin(data: Path, tmp_path: Path) -> None:
    rows = MapDataset(data, eos_id=EOS, labels=True, layout=Layout(rename={"tokens": "input_ids"}))
    model = Model()
    more: dict[str, Any] = {"max_steps": 2, "remove_unused_columns": False, "save_strategy": "no"}
    StreamingTrainer(model=model, args=arguments(tmp_path, **more), train_dataset=rows).train()
    assert len(model.batches) == 2


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """This process is rank 3 of 4 of a group that communicates with nobody."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(
    ("sizes", "dims"),
    [
        ({"dp_shard_size": 2, "tp_size": 2}, ("dp_shard", "tp")),
        ({"dp_replicate_size": 2, "dp_shard_size": 2}, ("dp_replicate", "dp_shard")),
        ({"tp_size": 4}, None),
    ],
)
def test_peers_of_tensor_parallelism_read_the_same_batches(
    sizes: dict[str, int], dims: tuple[str, ...] | None
) -> None:
    mesh = ParallelismConfig(**sizes).build_device_mesh("cpu")
    place = placement(cast(Any, SimpleNamespace(torch_device_mesh=mesh)))  # Accelerator refuses these on CPUs
    assert place == ({"rank": 0, "world_size": 1} if dims is None else {"mesh": mesh})
    assert dims is None or mesh.mesh_dim_names == dims


def test_without_a_mesh_the_loader_asks_torch_for_its_rank() -> None:
    assert placement(cast(Any, SimpleNamespace(torch_device_mesh=None))) == {}


def test_attention_stays_inside_of_documents(data: Path, tmp_path: Path) -> None:
    """transformers makes no masks of position_ids for a model that keeps a cache, as models do by default."""
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
    sizes |= {"intermediate_size": 32}
    config = LlamaConfig(vocab_size=512, **sizes)  # type: ignore[no-untyped-call, unused-ignore]
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call, unused-ignore]
    rows = TrainerDataset(data, eos_id=EOS, layout=Layout(position_ids=True))
    trainer = StreamingTrainer(model=model, args=arguments(tmp_path), train_dataset=rows)
    batch = next(iter(trainer.get_train_dataloader()))
    assert (batch["input_ids"][:, 3] == EOS).all()  # ends each row's first document
    batch["labels"][:, :4] = -100
    changed = batch | {"input_ids": batch["input_ids"].clone()}
    changed["input_ids"][:, :3] += 1
    losses = [trainer.compute_loss(model, dict(each)).item() for each in (batch, changed)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
