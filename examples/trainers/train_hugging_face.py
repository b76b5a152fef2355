"""A tiny Llama with the Hugging Face Trainer, resumed at the exact next sample on any number of ranks.

    torchrun --nproc-per-node 2 examples/trainers/train_hugging_face.py --data out --folder run --steps 40

Kill it and start it again, with more or fewer ranks: the global batch stays, and the Trainer continues from
its newest whole checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from shardkit.loaders import Layout
from shardkit.loaders.integrations.hugging_face import StreamingTrainer, TrainerDataset


class LossLog(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Writes the loss of each step, over all ranks, to RUN/losses.jsonl."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        loss = kwargs["logs"].get("loss")
        if state.is_world_process_zero and loss is not None:
            with self.file.open("a") as log:
                log.write(json.dumps({"step": state.global_step, "loss": loss}) + "\n")


def newest_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that was written to its end: trainer_state.json comes last."""
    whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json") if path.stat().st_size]
    return str(max(whole, key=lambda path: int(path.name.partition("-")[2]))) if whole else None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="dataset made by `shardkit build`")
    parser.add_argument("--folder", type=Path, required=True, help="checkpoints and logs of the run")
    parser.add_argument("--steps", type=int, default=40, help="train until this step")
    parser.add_argument("--global-batch", type=int, default=12, help="sequences per step over all ranks")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps between checkpoints")
    return parser.parse_args()


def training_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """For TrainingArguments; the global batch stays when the number of ranks changes."""
    return {
        "output_dir": str(options.folder),
        "max_steps": options.steps,
        "per_device_train_batch_size": options.global_batch // int(os.environ.get("WORLD_SIZE", "1")),
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "save_steps": options.checkpoint_every,
        "logging_steps": 1,
        "use_cpu": not torch.cuda.is_available(),
        "report_to": [],
        "disable_tqdm": True,
    }


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(17)
    config = LlamaConfig(  # type: ignore[no-untyped-call, unused-ignore]
        vocab_size=256, num_hidden_layers=1, num_attention_heads=2, hidden_size=32, intermediate_size=64
    )
    return LlamaForCausalLM(config)  # type: ignore[no-untyped-call, unused-ignore]


def main() -> None:
    options = parse_arguments()
    trainer = StreamingTrainer(
        model=make_model(),
        args=TrainingArguments(**training_arguments(options)),
        train_dataset=TrainerDataset(
            options.data, layout=Layout(position_ids=True), usage_log=options.folder / "usage"
        ),
        callbacks=[LossLog(options.folder / "losses.jsonl")],
    )
    trainer.train(resume_from_checkpoint=newest_checkpoint(options.folder))


if __name__ == "__main__":
    main()
