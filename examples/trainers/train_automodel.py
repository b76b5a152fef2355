"""NeMo Automodel's recipe for next-token prediction on a shardkit dataset: a Llama of one layer on CPUs.

    torchrun --nproc-per-node 2 examples/trainers/train_automodel.py --data DATASET --folder RUN --steps 100

Start it again with more or fewer ranks: it continues with the next sample. `ShardkitData` and the line that
sets it are all that is shardkit's; the first part stands in for a GPU, which Automodel expects.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from nemo_automodel._transformers import auto_model
from nemo_automodel.components.config.loader import ConfigNode
from nemo_automodel.components.datasets.loader import DataloaderConfig
from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction

from shardkit.loaders import Layout, StreamingLoader


class OnCpu:
    """`torch` for a module that asks for a GPU by name: all devices are the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, *names: object) -> torch.device:
        return torch.device("cpu")


auto_model.torch = OnCpu()
cuda: Any = torch.cuda
cuda.current_device = lambda: torch.device("cpu")
cuda.max_memory_allocated = lambda device=None: 0
cuda.reset_peak_memory_stats = lambda device=None: None


class ShardkitData(DataloaderConfig):
    """Training data for a recipe."""

    path: str
    usage_log: Path

    def build(self, *, dp_rank: int, dp_world_size: int, **others: object) -> StreamingLoader:
        """Open the loader itself, whose state a checkpoint has in one file for all ranks."""
        return StreamingLoader(
            self.path,
            batch_size=self.batch_size,
            seed=self.seed,
            rank=dp_rank,
            world_size=dp_world_size,
            labels="shifted",
            endless=True,
            layout=Layout(rename={"tokens": "input_ids"}),
            usage_log=self.usage_log,
        )


class Recipe(TrainFinetuneRecipeForNextTokenPrediction):
    """Resumes on more ranks than before, too, and appends the loss of each step to losses.jsonl."""

    losses: Path

    def load_checkpoint(self, restore_from: str | None = None) -> None:
        self.untrack_state("rng")  # a checkpoint has a file of random states for each rank that there was
        super().load_checkpoint(restore_from)

    def log_train_metrics(self, log_data: Any) -> None:
        super().log_train_metrics(log_data)
        if self.dist_env.is_main:
            with self.losses.open("a") as file:
                file.write(
                    json.dumps({"step": log_data.step + 1, "loss": float(log_data.metrics["loss"])}) + "\n"
                )


def make_config(options: argparse.Namespace) -> ConfigNode:
    """Return what the recipe's YAML would say."""
    llama = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return ConfigNode(
        {
            "seed": 17,
            "dist_env": {"backend": "gloo"},
            "distributed": {"strategy": "ddp"},
            "step_scheduler": {
                "global_batch_size": options.global_batch,
                "local_batch_size": options.global_batch // int(os.environ["WORLD_SIZE"]),
                "ckpt_every_steps": options.checkpoint_every,
                "max_steps": options.steps,
            },
            "model": {
                "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_config",
                "config": {"_target_": "transformers.LlamaConfig", **llama, **heads},
                "torch_dtype": "float32",
            },
            "dataset": {"tokenizer": None},  # only its tokenizer is read
            "checkpoint": {"enabled": True, "checkpoint_dir": str(options.folder / "checkpoints")},
            "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
            "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-2},
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="dataset made by `shardkit build`")
    parser.add_argument("--folder", type=Path, required=True, help="checkpoints and logs of the run")
    parser.add_argument("--steps", type=int, default=40, help="train until this step")
    parser.add_argument("--global-batch", type=int, default=12, help="sequences per step over all ranks")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps between checkpoints")
    options = parser.parse_args()

    config = make_config(options)
    recipe = Recipe(config)
    recipe.losses = options.folder / "losses.jsonl"
    data = ShardkitData(
        dataset_config=None, batch_size=config.step_scheduler.local_batch_size, seed=config.seed
    )
    data.path, data.usage_log = options.data, options.folder / "usage"
    recipe.cfg.dataloader = data
    recipe.setup()
    recipe.run_train_validation_loop()


if __name__ == "__main__":
    main()
