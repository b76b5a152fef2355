"""Short Lightning runs over a small dataset, that say which samples each batch held and what came of them.

As a script: runs on two ranks, forked from one process that has imported everything; records go to a file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardkit.loaders.lightning_module import ShardDataModule

LENGTH = 8  # of a row, as tests/support/loader_data.py makes them


@dataclass(frozen=True)
class Trained:
    """One batch that was trained on."""

    sample_ids: tuple[int, ...]
    loss: float
    step: int  # optimizer steps before it


@dataclass
class Record:
    """What a run did; resuming makes a new one."""

    trained: list[Trained] = field(default_factory=list)
    validated: list[tuple[int, list[int]]] = field(default_factory=list)  # (batches trained on before, ids)
    weights: list[float] = field(default_factory=list)
    place: list[Any] = field(default_factory=list)  # of the training loader: rank, world size, from what


class Model(lightning.LightningModule):
    """One linear layer that learns a row's last tokens from its first."""

    def __init__(self, record: Record, *, fail: Callable[[str, int], None] | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(LENGTH // 2, LENGTH // 2)
        self.record = record
        self.fail = fail or (lambda where, number: None)

    def configure_model(self) -> None:
        if self.device_mesh is not None:  # of a ModelParallelStrategy
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        rows = batch["tokens"].float() / 500
        first, last = rows.chunk(2, dim=1)
        return torch.nn.functional.mse_loss(self.layer(first), last)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        self.fail("start", len(self.record.trained))
        return None

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.fail("step", len(self.record.trained))
        loss = self.loss(batch)
        ids = self.trainer.strategy.all_gather(batch["sample_id"]).flatten().tolist()
        mean = self.trainer.strategy.all_gather(loss.detach()).mean().item()
        self.record.trained.append(Trained(tuple(ids), mean, self.global_step))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.fail("end", len(self.record.trained) - 1)

    def on_train_start(self) -> None:
        trainer: Any = self.trainer
        place = trainer.datamodule.train_loader._place
        self.record.place = [place.rank, place.world_size, place.source]

    def on_validation_start(self) -> None:
        self.record.validated.append((len(self.record.trained), []))

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        real = self.trainer.strategy.all_gather(batch["sample_id"]).flatten()
        self.record.validated[-1][1].extend(real[real >= 0].tolist())
        self.log("val_loss", self.loss(batch), batch_size=len(batch["tokens"]), sync_dist=True)
        self.fail("validation", len(self.record.trained))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class EveryStep(ModelCheckpoint):
    """Keeps a checkpoint of every optimizer step."""

    def __init__(self, folder: Path) -> None:
        super().__init__(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Lightning's own also saves with the first batch after a resume, which may accumulate gradients.
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


def quick_trainer(**options: Any) -> lightning.Trainer:
    """A Trainer that says and writes nothing unless told to."""
    quiet: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False, "num_sanity_val_steps": 0}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False}
    quiet["enable_checkpointing"] = any(isinstance(c, Checkpoint) for c in options.get("callbacks", ()))
    return lightning.Trainer(**(quiet | options))


def fit(
    data: ShardDataModule,
    *,
    callbacks: Iterable[Callback] = (),
    resume: Path | None = None,
    fail: Callable[[str, int], None] | None = None,
    **trainer: Any,
) -> Record:
    """Train a new model on `data` with a new Trainer; what it did, even if `fail` has raised."""
    record = Record()
    runner = quick_trainer(callbacks=list(callbacks), **trainer)
    model = Model(record, fail=fail)
    with suppress(StopRun):
        runner.fit(model, data, ckpt_path=resume)
    for weights in model.parameters():
        whole = weights.full_tensor() if isinstance(weights, DTensor) else weights
        record.weights += whole.detach().flatten().tolist()
    return record


class StopRun(Exception):  # noqa: N818
    """Ends a run on purpose."""


def stop_at(where: str, number: int) -> Callable[[str, int], None]:
    """Fail at batch `number`: before it ("start"), in its "step", or after its optimizer step ("end")."""

    def fail(here: str, batch: int) -> None:
        if (here, batch) == (where, number):
            raise StopRun(f"{where} of batch {number}")

    return fail


def trained_batches(checkpoint: Path) -> int:
    """Batches that the model of a checkpoint was trained on."""
    loops = torch.load(checkpoint, weights_only=False)["loops"]["fit_loop"]
    return int(loops["epoch_loop.batch_progress"]["total"]["processed"])


def two_ranks(rank: int, train: Path, val: Path, folder: Path) -> None:
    """The runs of one of two ranks: each strategy from the beginning, and again from the fifth step."""
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    records = {}
    sharded = partial(ModelParallelStrategy, 2, 1, save_distributed_checkpoint=False)
    tensor_parallel = partial(ModelParallelStrategy, 1, 2, save_distributed_checkpoint=False)
    strategies: dict[str, Callable[[], Any]] = {
        "ddp": DDPStrategy,
        "sharded": sharded,
        "tensor_parallel": tensor_parallel,
    }
    for name, strategy in strategies.items():
        for run, resume in ((name, None), (f"{name}-resumed", folder / name / "step=5.ckpt")):
            common: dict[str, Any] = {"devices": 2, "strategy": strategy(), "max_epochs": 2}
            data = ShardDataModule(train, val=val, global_batch_size=8, val_batch_size=4, return_ids=True)
            keep = [EveryStep(folder / run)]
            records[run] = fit(data, callbacks=keep, resume=resume, **common)
    torch.distributed.destroy_process_group()
    if rank == 0:
        (folder / "records.json").write_text(json.dumps({run: asdict(r) for run, r in records.items()}))


def main() -> None:
    port, *paths = sys.argv[1:]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if (child := os.fork()) == 0:
        two_ranks(1, *map(Path, paths))
        os._exit(0)
    two_ranks(0, *map(Path, paths))
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
