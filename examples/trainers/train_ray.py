"""A tiny bigram model in Ray Train's TorchTrainer, resumed at the exact next sample on any number of workers.

    python examples/trainers/train_ray.py --data out --folder run --steps 40 --workers 2

If a worker dies, Ray starts all of them again from the last checkpoint (`max_failures`). If the script dies,
start it again, with more or fewer workers: a run of the same name and storage path continues from there, too.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from torch import nn

from shardkit.loaders import StreamingLoader


def train_loop(options: dict[str, Any]) -> None:
    """Train in one worker: rank and world size are those of the process group that Ray made."""
    torch.manual_seed(17)
    folder, ranks = Path(options["folder"]), dist.get_world_size()
    model = nn.Embedding(
        256, 256
    )  # what is saved: its wrapper is another, or none, on other numbers of workers
    wrapped = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = StreamingLoader(
        options["data"],
        batch_size=options["global_batch"] // ranks,  # the steps stay the same on other numbers of workers
        labels="shifted",
        endless=True,
        usage_log=folder / "usage",
    )
    first_step = 1
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as path:
            saved = torch.load(Path(path) / "state.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        first_step = saved["step"] + 1

    for step, batch in zip(count(first_step), loader, strict=False):
        loss = F.cross_entropy(wrapped(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            with (folder / "losses.jsonl").open("a") as log:
                log.write(json.dumps({"step": step, "loss": mean.item() / ranks}) + "\n")
        if step % options["checkpoint_every"] == 0 or step == options["steps"]:
            with tempfile.TemporaryDirectory() as path:
                states: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
                saved = {name: each.state_dict() for name, each in states.items()}
                torch.save(saved | {"step": step}, Path(path) / "state.pt")
                is_first = dist.get_rank() == 0  # all states are the same on all ranks
                ray.train.report({"step": step}, Checkpoint.from_directory(path) if is_first else None)
        if step >= options["steps"]:
            break
    loader.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="dataset made by `shardkit build`")
    parser.add_argument("--folder", type=Path, required=True, help="checkpoints and logs of the run")
    parser.add_argument("--steps", type=int, default=40, help="train until this step")
    parser.add_argument("--global-batch", type=int, default=12, help="sequences per step over all workers")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--workers", type=int, default=2, help="processes that train")
    options = parser.parse_args()

    # Absolute paths: workers have other working directories.
    folder, data = options.folder.resolve(), str(Path(options.data).resolve())
    settings = vars(options) | {"folder": str(folder), "data": data}
    ray.init(num_cpus=options.workers, include_dashboard=False)
    ray.train.torch.TorchTrainer(
        train_loop,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=options.workers),
        run_config=RunConfig(
            name="run", storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=3)
        ),
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
