"""A tiny bigram model with Lightning's Trainer, resumed at the exact next sample on any number of devices.

    torchrun --nproc-per-node 2 examples/trainers/train_lightning.py --data out --folder run --steps 40

Kill it and start it again, with more or fewer processes: `global_batch_size` keeps the batches as they were.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from shardkit.loaders.lightning_module import ShardDataModule


class Bigrams(lightning.LightningModule):
    """Predicts each token from the one before; logs each step's loss over all ranks."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.logits = nn.Embedding(256, 256)
        self.file = file

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.logits(batch["tokens"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = self.trainer.strategy.reduce(outputs["loss"], reduce_op="mean")
        if self.trainer.is_global_zero:
            with self.file.open("a") as log:
                log.write(json.dumps({"step": self.global_step, "loss": loss.item()}) + "\n")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="dataset made by `shardkit build`")
    parser.add_argument("--folder", type=Path, required=True, help="checkpoint and logs of the run")
    parser.add_argument("--steps", type=int, default=40, help="train until this step")
    parser.add_argument("--global-batch", type=int, default=12, help="sequences per step over all ranks")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps between checkpoints")
    options = parser.parse_args()

    torch.manual_seed(17)
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_steps=options.steps,
        logger=False,
        enable_progress_bar=False,
        callbacks=[
            ModelCheckpoint(
                dirpath=options.folder,
                filename="last",
                every_n_train_steps=options.checkpoint_every,
                enable_version_counter=False,  # one file, replaced as a whole each time
            )
        ],
    )
    data = ShardDataModule(
        options.data,
        global_batch_size=options.global_batch,
        labels="shifted",
        endless=True,
        usage_log=options.folder / "usage",
    )
    checkpoint = options.folder / "last.ckpt"
    model = Bigrams(options.folder / "losses.jsonl")
    trainer.fit(model, data, ckpt_path=checkpoint if checkpoint.exists() else None)


if __name__ == "__main__":
    main()
