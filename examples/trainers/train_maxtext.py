"""A tiny decoder in MaxText's own training loop, resumed at the exact next sample on any number of hosts.

    python examples/trainers/train_maxtext.py --data out --folder run --steps 40

MaxText is installed from its repository. Any of its settings may follow as KEY=VALUE.
"""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import jax
from maxtext.common import metric_logger
from maxtext.input_pipeline import input_pipeline_interface
from maxtext.trainers.pre_train import train

from shardkit.loaders.integrations.maxtext import make_train_iterator

SMALL = {
    "base_emb_dim": 32,
    "base_mlp_dim": 64,
    "base_num_decoder_layers": 1,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "attention": "dot_product",
    "dtype": "float32",
}


class LossLog(metric_logger.MetricLogger):  # type: ignore[misc, unused-ignore]
    """MaxText's metrics, and the loss of each step in RUN/losses.jsonl."""

    file = Path("losses.jsonl")

    def write_metrics(self, metrics: Any, step: int, metric_type: str = "train") -> None:
        super().write_metrics(metrics, step, metric_type)
        if jax.process_index() == 0 and metric_type == "train":
            loss = float(metrics["scalar"]["learning/loss"])
            with self.file.open("a") as log:
                log.write(json.dumps({"step": step + 1, "loss": loss}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="dataset made by `shardkit build`, of 65 tokens a row")
    parser.add_argument("--folder", type=Path, required=True, help="checkpoints and logs of the run")
    parser.add_argument("--steps", type=int, default=40, help="train until this step")
    parser.add_argument("--global-batch", type=int, default=12, help="sequences per step over all hosts")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps between checkpoints")
    options, settings = parser.parse_known_args()

    hosts = int(os.environ.get("WORLD_SIZE", "1"))
    os.environ |= {  # how MaxText finds its peers with hardware=cpu
        "JOB_INDEX": "0",
        "JOB_COMPLETION_INDEX": os.environ.get("RANK", "0"),
        "PROCESSES_IN_JOB": str(hosts),
        "JAX_PROCESS_COUNT": str(hosts),
        "JAX_COORDINATOR_ADDRESS": os.environ.get("MASTER_ADDR", "127.0.0.1"),
    }
    LossLog.file = options.folder / "losses.jsonl"
    metric_logger.MetricLogger = LossLog
    input_pipeline_interface.make_grain_train_iterator = partial(
        make_train_iterator, usage_log=options.folder / "usage"
    )
    chosen = SMALL | {
        "run_name": "run",
        "base_output_directory": options.folder,
        "hardware": "cpu",
        "dataset_type": "grain",
        "grain_train_files": options.data,
        "steps": options.steps,
        "per_device_batch_size": options.global_batch // hosts,
        "max_target_length": 64,
        "learning_rate_schedule_steps": 1000,
        "checkpoint_period": options.checkpoint_every,
        "async_checkpointing": False,
    }
    base = Path(train.__file__).parents[2] / "configs" / "base.yml"
    train.main(["", str(base), *(f"{key}={value}" for key, value in chosen.items()), *settings])


if __name__ == "__main__":
    main()
