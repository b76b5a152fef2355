"""Train a small GPT on several processes with FSDP2 and torch.distributed.checkpoint, on any number of them.

    torchrun --nproc-per-node 2 examples/train_fsdp.py --data shardkit-demo/mds --steps 200

Every rank holds, and writes, its part of the weights and of the optimizer's state; the loader is one more
entry of the checkpoint, equal on all ranks. A checkpoint is a folder, and `last` points to the newest whole
one: what a kill left half-written is never read. Start again with as many ranks, or with more or fewer.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import (
    end_distributed,
    gathered,
    gathered_ids,
    model_config,
    open_loader,
    parse_arguments,
    start_distributed,
)
from gpt import GPT, next_token_labels, next_token_loss
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

KEPT = 2  # checkpoints: the last one, and one more to go back to


class Trained:
    """Step, model and optimizer, as torch.distributed.checkpoint stores them for any number of ranks."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.step, self.model, self.optimizer = 0, model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"step": self.step, "model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def save(state: dict[str, Any], folder: Path, step: int) -> None:
    """Write the checkpoint of a step, all ranks together, and point to it once it is whole."""
    name = f"step-{step:08d}"
    if dist.get_rank() == 0:
        shutil.rmtree(folder / name, ignore_errors=True)  # what a killed run left, perhaps of more ranks
    # Returns when the files of every rank are on disk.
    dcp.save(state, checkpoint_id=folder / name)  # type: ignore[attr-defined]
    if dist.get_rank() > 0:
        return
    pointer = folder / "last.tmp"
    pointer.unlink(missing_ok=True)
    pointer.symlink_to(name)
    pointer.replace(folder / "last")
    older = sorted(old for old in folder.glob("step-*") if old.name <= name)
    for old in older[:-KEPT]:
        shutil.rmtree(old)


def main() -> None:
    args = parse_arguments("Train a small GPT with FSDP2 (start it with torchrun).", "checkpoints")
    device = start_distributed()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    loader = open_loader(args)
    torch.manual_seed(args.seed)
    model = GPT(model_config(args)).to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    trained = Trained(model, torch.optim.AdamW(model.parameters(), lr=args.learning_rate))

    folder = Path(args.checkpoint)
    state = {"trained": trained, "loader": loader}  # each has state_dict and load_state_dict
    if (folder / "last").exists():
        dcp.load(state, checkpoint_id=folder / "last")  # type: ignore[attr-defined]
    log = Path(args.log_file).open("a", buffering=1) if rank == 0 else None  # noqa: SIM115

    first = trained.step + 1
    # The range comes first: `zip` must not take a batch that no step will train on.
    for step, batch in zip(range(first, args.steps + 1), loader, strict=False):
        torch.manual_seed(hash((args.seed, step, rank)))  # dropout, should you add it: nothing to store
        batch = {name: value.to(device) for name, value in batch.items()}
        scored = (next_token_labels(batch) != -100).sum()
        dist.all_reduce(scored)
        loss = next_token_loss(model, batch, scored / world_size)
        trained.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        trained.optimizer.step()
        trained.step = step

        losses, sample_ids = gathered(loss.detach()[None]), gathered_ids(batch)
        saves = step % args.checkpoint_every == 0 or step == args.steps
        if log is not None:
            record = {"step": step, "loss": sum(losses) / world_size, "sample_ids": sample_ids}
            log.write(json.dumps(record) + "\n")
            if saves or step < first + 20:  # each step, while they are few
                print(f"step {step}: loss {record['loss']:.4f}", flush=True)
        if saves:
            save(state, folder, step)
    end_distributed()


if __name__ == "__main__":
    main()
