"""Pretrain a tiny model with litgpt's own command, and survive any interruption.

    torchrun --nproc-per-node 2 examples/trainers/train_litgpt.py --data DATASET --folder run --steps 40

Kill it at any moment and run it again, on another number of ranks if you like: `--resume auto` continues
after the last checkpoint with the next sample.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling takes longer than these steps

import litgpt.pretrain as pretrain
from lightning.fabric.strategies.ddp import DDPStrategy
from litgpt.__main__ import main
from loss_log import LossLog
from torch import Tensor

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
option = parser.add_argument
option("--data", required=True, help="dataset of rows of 65 tokens")
option("--folder", type=Path, default="litgpt-run", help="for checkpoints and logs")
option("--steps", type=int, default=40, help="train until this step")
option("--global-batch", type=int, default=12, help="sequences a step, over all ranks")
option("--checkpoint-every", type=int, default=5, help="steps between checkpoints")
args = parser.parse_args()
ranks = int(os.environ.get("WORLD_SIZE", "1"))

losses = LossLog(args.folder / "losses.jsonl")
cross_entropy = pretrain.chunked_cross_entropy


def logged_cross_entropy(*arguments: Any, **options: Any) -> Tensor:
    loss: Tensor = cross_entropy(*arguments, **options)
    losses.add(loss)
    return loss


class OnCPU:
    """litgpt shards the model over GPUs; on the CPU each rank has all of it."""

    def __new__(cls, **_: object) -> DDPStrategy:  # type: ignore[misc]
        return DDPStrategy(process_group_backend="gloo")


pretrain.chunked_cross_entropy = logged_cross_entropy
pretrain.FSDPStrategy = OnCPU

# What a user types. The learning rate is constant here, so that it does not depend on --steps.
sys.argv = f"""litgpt pretrain tiny
    --model_config.block_size 64
    --model_config.padded_vocab_size 256
    --model_config.n_layer 1
    --model_config.n_head 2
    --model_config.n_embd 32
    --data shardkit.loaders.integrations.litgpt_data.ShardkitData
    --data.data_path {args.data}
    --data.val_data_path {args.data}
    --data.usage_log {args.folder / "usage"}
    --resume auto
    --out_dir {args.folder / "checkpoints"}
    --devices {ranks}
    --precision 32-true
    --logger_name csv
    --train.max_tokens {args.steps * args.global_batch * 64}
    --train.global_batch_size {args.global_batch}
    --train.micro_batch_size {args.global_batch // ranks}
    --train.save_interval {args.checkpoint_every}
    --train.lr_warmup_steps 0
    --train.min_lr 1e-3
    --eval.interval 7
    --eval.max_iters 2""".split()
main()
