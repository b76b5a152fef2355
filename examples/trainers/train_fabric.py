"""A tiny bigram model with Lightning Fabric, resumed at the exact next sample on any number of devices.

    torchrun --nproc-per-node 2 examples/trainers/train_fabric.py --data out --folder run --steps 40

Fabric takes DataLoaders only, so it is given a StreamingDataLoader, whose state is part of Fabric's.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn

from shardkit.loaders.pytorch import StreamingDataLoader, StreamingDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="dataset made by `shardkit build`")
    parser.add_argument("--folder", type=Path, required=True, help="checkpoint and logs of the run")
    parser.add_argument("--steps", type=int, default=40, help="train until this step")
    parser.add_argument("--global-batch", type=int, default=12, help="sequences per step over all ranks")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps between checkpoints")
    options = parser.parse_args()

    fabric = Fabric(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )
    fabric.launch()
    torch.manual_seed(17)
    logits = nn.Embedding(256, 256)
    model, optimizer = fabric.setup(logits, torch.optim.AdamW(logits.parameters(), lr=1e-2))
    dataset = StreamingDataset(
        options.data,
        batch_size=options.global_batch // fabric.world_size,
        labels="shifted",
        endless=True,
        usage_log=options.folder / "usage",
    )
    loader = fabric.setup_dataloaders(StreamingDataLoader(dataset))

    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader, "step": 0}
    checkpoint = options.folder / "last.ckpt"
    if checkpoint.exists():
        fabric.load(checkpoint, state)

    for step, batch in zip(range(state["step"] + 1, options.steps + 1), loader, strict=False):
        loss = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] = step
        mean: Any = fabric.all_reduce(loss.detach(), reduce_op="mean")
        if fabric.is_global_zero:
            with (options.folder / "losses.jsonl").open("a") as log:
                log.write(json.dumps({"step": step, "loss": mean.item()}) + "\n")
        if step % options.checkpoint_every == 0 or step == options.steps:
            unfinished = checkpoint.with_suffix(".unfinished")
            fabric.save(unfinished, state)
            if fabric.is_global_zero:
                unfinished.replace(checkpoint)  # a kill leaves the former one whole


if __name__ == "__main__":
    main()
