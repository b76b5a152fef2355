"""Train a small GPT with Lightning, and resume in the middle of an epoch at the exact next sample.

    python examples/train_lightning.py --data shardkit-demo/mds --steps 200

`ShardDataModule` keeps the place in the data in Lightning's checkpoints. Kill the script at any time and run
it again; with another `--devices`, too, if `--batch-size` changes so that their product stays the same.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import lightning
import torch
from gpt import GPT, GPTConfig, next_token_loss
from lightning.pytorch.callbacks import ModelCheckpoint

from shardkit.loaders import Layout
from shardkit.loaders.lightning_module import DataMonitor, ShardDataModule


class LightningGPT(lightning.LightningModule):
    """The model, its loss and its optimizer; rank 0 logs each step's loss and sample ids."""

    def __init__(self, config: GPTConfig, learning_rate: float, log: Path) -> None:
        super().__init__()
        self.model = GPT(config)
        self.learning_rate, self.log_file = learning_rate, log

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        return next_token_loss(self.model, batch)

    def on_train_batch_end(self, outputs: Any, batch: dict[str, Any], batch_idx: int) -> None:
        loss = self.trainer.strategy.all_gather(outputs["loss"]).mean()
        sample_ids = self.trainer.strategy.all_gather(batch["sample_id"]).flatten()
        record = {"step": self.global_step, "loss": loss.item(), "sample_ids": sample_ids.tolist()}
        if self.global_rank == 0:
            with self.log_file.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT with Lightning.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", required=True, help="dataset folder made by `shardkit build`")
    parser.add_argument("--steps", type=int, default=200, help="train until this step")
    parser.add_argument("--checkpoint", default="last.ckpt", help="file to write and to resume from")
    parser.add_argument("--checkpoint-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--log-file", default="log.jsonl", help="JSON lines: step, loss, sample ids")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per step and device")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="AdamW's, constant")
    parser.add_argument("--seed", type=int, default=17, help="of the data's order and the model's weights")
    parser.add_argument("--vocabulary", type=int, default=65_536, help="number of token ids")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--inside-documents", action="store_true", help="keep attention inside documents")
    parser.add_argument("--devices", type=int, default=1, help="GPUs, or processes on the CPU")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    lightning.seed_everything(args.seed, verbose=False)
    checkpoint = Path(args.checkpoint).absolute()
    trainer = lightning.Trainer(
        devices=args.devices,
        max_steps=args.steps,
        deterministic=not torch.cuda.is_available(),
        logger=False,
        callbacks=[
            DataMonitor(),  # says, and with a logger records, whether training waits for data
            ModelCheckpoint(
                dirpath=checkpoint.parent,
                filename=checkpoint.stem,
                every_n_train_steps=args.checkpoint_every,
                enable_version_counter=False,  # one file, replaced as a whole each time
            ),
        ],
    )
    config = GPTConfig(args.vocabulary, args.layers, args.heads, args.width)
    model = LightningGPT(config, args.learning_rate, Path(args.log_file))
    data = ShardDataModule(
        args.data,
        batch_size=args.batch_size,
        seed=args.seed,
        endless=True,
        return_ids=True,
        labels=args.inside_documents,
        layout=Layout(position_ids=args.inside_documents, document_ids=args.inside_documents),
    )
    trainer.fit(model, data, ckpt_path=checkpoint if checkpoint.exists() else None)
    trainer.save_checkpoint(checkpoint)


if __name__ == "__main__":
    main()
