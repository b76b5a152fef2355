"""Train a small GPT on several processes with DistributedDataParallel, and resume on any number of them.

    torchrun --nproc-per-node 2 examples/train_ddp.py --data shardkit-demo/mds --steps 200

`--global-batch-size` fixes what a step trains on; each rank takes its equal share. Kill any rank and run the
same command again, or another `--nproc-per-node`: the samples of every later step stay the same.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig, next_token_loss
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from shardkit.loaders import StreamingLoader


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on several processes (start it with torchrun).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", required=True, help="dataset folder made by `shardkit build`")
    parser.add_argument("--steps", type=int, default=200, help="train until this step")
    parser.add_argument("--checkpoint", default="checkpoint.pt", help="file to write and to resume from")
    parser.add_argument("--checkpoint-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--log-file", default="log.jsonl", help="JSON lines: step, loss, sample ids")
    parser.add_argument("--global-batch-size", type=int, default=16, help="sequences per step on all ranks")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="AdamW's, constant")
    parser.add_argument("--seed", type=int, default=17, help="of the data's order and the model's weights")
    parser.add_argument("--vocabulary", type=int, default=65_536, help="number of token ids")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--inside-documents", action="store_true", help="keep attention inside documents")
    return parser.parse_args()


def start_distributed() -> torch.device:
    """Join the group that torchrun describes; this rank's device."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
        return device
    dist.init_process_group("gloo")
    torch.use_deterministic_algorithms(True)
    return torch.device("cpu")


def gathered(values: Tensor) -> list[Any]:
    """The values of all ranks, in rank order."""
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values)
    return [value for part in parts for value in part.tolist()]


def save_atomically(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint so that a crash leaves the old one or the new one, never half of one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def main() -> None:
    args = parse_arguments()
    device = start_distributed()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if args.global_batch_size % world_size:
        raise SystemExit(
            f"--global-batch-size {args.global_batch_size} does not divide by {world_size} ranks"
        )

    # The loader finds rank and world size in torch.distributed.
    batch_size = args.global_batch_size // world_size
    loader = StreamingLoader(
        args.data,
        batch_size=batch_size,
        seed=args.seed,
        endless=True,
        return_ids=True,
        labels=args.inside_documents,
        position_ids=args.inside_documents,
        document_ids=args.inside_documents,
    )
    torch.manual_seed(args.seed)
    config = GPTConfig(args.vocabulary, args.layers, args.heads, args.width)
    model = DistributedDataParallel(GPT(config).to(device))
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
        loss = next_token_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

        losses, sample_ids = gathered(loss.detach()[None]), gathered(batch["sample_id"])
        if log is None:
            continue
        record = {"step": step, "loss": sum(losses) / world_size, "sample_ids": sample_ids}
        log.write(json.dumps(record) + "\n")
        if step % args.checkpoint_every == 0 or step == args.steps:
            state = {
                "step": step,
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "loader": loader.state_dict(),
            }
            save_atomically(state, checkpoint)
            print(f"step {step}: loss {record['loss']:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
