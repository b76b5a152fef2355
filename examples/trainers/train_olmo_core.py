"""OLMo-core's Trainer on a shardkit dataset: a Transformer of two layers on CPUs.

    torchrun --nproc-per-node 2 examples/trainers/train_olmo_core.py --data DATASET --folder RUN --steps 100

Start it again with more or fewer ranks: it continues with the next sample. Only `data_loader` is shardkit's.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.distributed.utils import get_rank, get_world_size
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig
from olmo_core.train import (
    Duration,
    TrainerConfig,
    prepare_training_environment,
    teardown_training_environment,
)
from olmo_core.train.callbacks import Callback, CheckpointerCallback
from olmo_core.train.train_module import TransformerDataParallelConfig, TransformerTrainModuleConfig
from olmo_core.utils import seed_all

from shardkit.loaders.integrations.olmo_core_loader import ShardkitDataLoader

SEQUENCE_LENGTH = 64  # as the dataset's rows have


@dataclass
class LossLog(Callback):
    """Appends the loss of each step to a file, on rank 0."""

    file: Path

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        if get_rank() == 0 and "train/CE loss" in metrics:
            with self.file.open("a") as file:
                file.write(json.dumps({"step": step, "loss": metrics["train/CE loss"]}) + "\n")


def train(args: argparse.Namespace) -> None:
    seed_all(17)
    model = TransformerConfig.llama_like(
        d_model=32, vocab_size=256, n_layers=2, n_heads=2, fused_ops=False
    ).build(init_device="meta")
    train_module = TransformerTrainModuleConfig(
        rank_microbatch_size=SEQUENCE_LENGTH,
        max_sequence_length=SEQUENCE_LENGTH,
        optim=AdamWConfig(lr=1e-3),
        dp_config=TransformerDataParallelConfig(name=DataParallelType.ddp),
        max_grad_norm=1.0,
    ).build(model, device=torch.device("cpu"))
    data_loader = ShardkitDataLoader(
        args.data,
        sequence_length=SEQUENCE_LENGTH,
        global_batch_size=args.global_batch * SEQUENCE_LENGTH,
        work_dir=args.folder / "work",
        dp_world_size=get_world_size(train_module.dp_process_group),
        dp_rank=get_rank(train_module.dp_process_group),
        usage_log=args.folder / "usage",
    )
    checkpointer = CheckpointerCallback(
        save_interval=args.checkpoint_every, ephemeral_save_interval=None, save_async=False
    )
    trainer = (
        TrainerConfig(
            save_folder=str(args.folder / "checkpoints"),
            work_dir=str(args.folder / "work"),
            save_overwrite=True,
            metrics_collect_interval=1,
            async_bookkeeping=False,  # with Gloo alone, OLMo-core 3.0 can hang in the last reduction
            max_duration=Duration.steps(args.steps),
        )
        .with_callback("checkpointer", checkpointer)
        .with_callback("loss_log", LossLog(file=args.folder / "losses.jsonl"))
        .build(train_module, data_loader)
    )
    trainer.maybe_load_checkpoint()
    trainer.fit()
    data_loader.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", required=True, help=f"dataset with rows of {SEQUENCE_LENGTH} tokens")
    add("--folder", type=Path, required=True, help="for checkpoints and logs; a run there is continued")
    add("--steps", type=int, default=100, help="train until this step")
    add("--global-batch", type=int, default=12, help="sequences of a step, over all ranks")
    add("--checkpoint-every", type=int, default=5, help="steps between checkpoints")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    prepare_training_environment(backend="cpu:gloo")
    train(args)
    teardown_training_environment()


if __name__ == "__main__":
    main()
