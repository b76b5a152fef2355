"""A tiny bigram model with Accelerate, resumed at the exact next sample on any number of processes.

    accelerate launch --num-processes 2 examples/trainers/train_accelerate.py --data out --folder run

`prepare` is for model and optimizer: a StreamingLoader reads its part of each batch by itself.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

from shardkit.loaders import StreamingLoader
from shardkit.loaders.integrations.hugging_face import placement


def newest_checkpoint(folder: Path) -> Path | None:
    return max(folder.glob("step-*"), key=lambda path: int(path.name.partition("-")[2]), default=None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="dataset made by `shardkit build`")
    parser.add_argument("--folder", type=Path, required=True, help="checkpoints and logs of the run")
    parser.add_argument("--steps", type=int, default=40, help="train until this step")
    parser.add_argument("--global-batch", type=int, default=12, help="sequences per step over all ranks")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps between checkpoints")
    options = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(17)
    logits = nn.Embedding(256, 256)
    model, optimizer = accelerator.prepare(logits, torch.optim.AdamW(logits.parameters(), lr=1e-2))
    loader = StreamingLoader(
        options.data,
        batch_size=options.global_batch // accelerator.num_processes,
        labels="shifted",
        endless=True,
        usage_log=options.folder / "usage",
        **placement(accelerator),
    )
    accelerator.register_for_checkpointing(loader)
    first = 1
    if (checkpoint := newest_checkpoint(options.folder)) is not None:
        accelerator.load_state(str(checkpoint))
        first += int(checkpoint.name.partition("-")[2])

    for step, batch in zip(range(first, options.steps + 1), loader, strict=False):
        tokens, labels = batch["tokens"].to(accelerator.device), batch["labels"].to(accelerator.device)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), reduction="mean")
        if accelerator.is_main_process:
            with (options.folder / "losses.jsonl").open("a") as log:
                log.write(json.dumps({"step": step, "loss": mean.item()}) + "\n")
        if step % options.checkpoint_every == 0 or step == options.steps:
            accelerator.save_state(str(options.folder / "unfinished"))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                (options.folder / "unfinished").rename(options.folder / f"step-{step}")
    loader.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
