"""torchtitan's Trainer on a shardkit dataset: a Llama of one layer on CPUs, with DCP checkpoints.

    torchrun --nproc-per-node 2 examples/trainers/train_torchtitan.py --data DATASET --folder RUN --steps 100

Start it again with more or fewer ranks: it continues with the next sample. Only `dataloader=` is shardkit's;
the first part stands in for an accelerator, which torchtitan expects.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils as titan_utils
from torch import nn
from torch.distributed.fsdp import FSDPModule

titan_utils.device_type = "cpu"
titan_utils.device_module = SimpleNamespace(
    set_device=torch.cpu.set_device,
    current_device=lambda: 0,
    synchronize=torch.cpu.synchronize,
    get_device_name=lambda device: "cpu",
    get_device_properties=lambda device: SimpleNamespace(total_memory=1),
    memory_stats=lambda device: {},
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
)
if not hasattr(dist, "set_timeout"):  # torchtitan 0.3 calls it; torch 2.13 does not have it
    dist.set_timeout = lambda timeout, group: None  # type: ignore[attr-defined]

# ruff: noqa: E402
from tokenizers import Tokenizer, models
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry, parallelize_llama
from torchtitan.trainer import Trainer

from shardkit.loaders.integrations.torchtitan_loader import ShardkitDataLoader

SEQ_LEN = 64  # of the model: one token less than the dataset's rows have


class LossLog(MetricsProcessor):
    """Appends the loss of each step to losses.jsonl."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        file: Path

    def log(self, step: int, global_avg_loss: float, *args: Any, **kwargs: Any) -> None:
        super().log(step, global_avg_loss, *args, **kwargs)
        if dist.get_rank() == 0:
            with self.config.file.open("a") as file:
                file.write(json.dumps({"step": step, "loss": global_avg_loss}) + "\n")


def parallelize_on_cpu(model: nn.Module, **options: Any) -> nn.Module:
    """As for GPUs, but with sums alone: Gloo cannot scale while it reduces."""
    model = parallelize_llama(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def make_config(args: argparse.Namespace) -> Trainer.Config:
    ranks = int(os.environ["WORLD_SIZE"])
    spec = model_registry("debugmodel")
    spec.parallelize_fn = parallelize_on_cpu
    spec.model.layers = spec.model.layers[:1]
    spec.model.layers[0].attention.inner_attention = ScaledDotProductAttention.Config()
    Tokenizer(models.BPE()).save(
        str(args.folder / "tokenizer.json")
    )  # torchtitan asks for one; the data has ids
    return Trainer.Config(
        dataloader=ShardkitDataLoader.Config(
            dataset_path=args.data, options={"usage_log": args.folder / "usage"}
        ),
        model_spec=spec,
        hf_assets_path=str(args.folder),
        dump_folder=str(args.folder),
        loss=CrossEntropyLoss.Config(),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=1000),
        training=TrainingConfig(
            local_batch_size=args.global_batch // ranks,
            seq_len=SEQ_LEN,
            steps=args.steps,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        # Replicas, not shards: on CPUs, what torch initializes in shards depends on their number.
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=ranks,
            data_parallel_shard_degree=1,
            spmd_backend="partial_dtensor",
        ),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=args.checkpoint_every, last_save_model_only=False
        ),
        metrics=LossLog.Config(log_freq=1, file=args.folder / "losses.jsonl"),
        activation_checkpoint=None,
        debug=DebugConfig(seed=17),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", required=True, help=f"dataset with rows of {SEQ_LEN + 1} tokens")
    add("--folder", type=Path, required=True, help="for checkpoints and logs; a run there is continued")
    add("--steps", type=int, default=100, help="train until this step")
    add("--global-batch", type=int, default=12, help="sequences of a step, over all ranks")
    add("--checkpoint-every", type=int, default=5, help="steps between checkpoints")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(make_config(args))
    trainer.train()
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
