"""Train a small GPT on several processes with DistributedDataParallel, and resume on any number of them.

    torchrun --nproc-per-node 2 examples/train_ddp.py --data shardkit-demo/mds --steps 200

`--global-batch-size` fixes what a step trains on; each rank takes its equal share. Kill any rank and run the
same command again, or another `--nproc-per-node`: the samples of every later step stay the same. With
`--max-restarts` torchrun starts killed ranks again by itself (README.md says what that needs).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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
from torch.nn.parallel import DistributedDataParallel


def save_atomically(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint so that a crash leaves the old one or the new one, never half of one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def main() -> None:
    args = parse_arguments("Train a small GPT with DistributedDataParallel (torchrun).", "checkpoint.pt")
    device = start_distributed()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    loader = open_loader(args)
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(GPT(model_config(args)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)

    checkpoint, trained = Path(args.checkpoint), 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        trained = state["step"]
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])  # the same on every rank, for any number of ranks
    log = Path(args.log_file).open("a", buffering=1) if rank == 0 else None  # noqa: SIM115

    # The range comes first: `zip` must not take a batch that no step will train on.
    for step, batch in zip(range(trained + 1, args.steps + 1), loader, strict=False):
        torch.manual_seed(hash((args.seed, step, rank)))  # dropout, should you add it: nothing to store
        batch = {name: value.to(device) for name, value in batch.items()}
        scored = (next_token_labels(batch) != -100).sum()
        dist.all_reduce(scored)
        loss = next_token_loss(model, batch, scored / world_size)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

        losses, sample_ids = gathered(loss.detach()[None]), gathered_ids(batch)
        if log is None:
            continue
        record = {"step": step, "loss": sum(losses) / world_size, "sample_ids": sample_ids}
        log.write(json.dumps(record) + "\n")
        saves = step % args.checkpoint_every == 0 or step == args.steps
        if saves or step <= trained + 20:  # each step, while they are few
            print(f"step {step}: loss {record['loss']:.4f}", flush=True)
        if saves:
            state = {
                "step": step,
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "loader": loader.state_dict(),
            }
            save_atomically(state, checkpoint)
    end_distributed()


if __name__ == "__main__":
    main()
