"""What the examples for several processes share: their options, their data, and how ranks meet."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPTConfig
from torch import Tensor

from shardkit.loaders import Layout, Order, Stream, StreamingLoader

__all__ = [
    "end_distributed",
    "gathered",
    "gathered_ids",
    "model_config",
    "open_loader",
    "parse_arguments",
    "start_distributed",
]


def parse_arguments(description: str, checkpoint: str) -> argparse.Namespace:
    """The command line; `checkpoint`: where this script's checkpoints are if nothing else is said."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--data", nargs="+", required=True, help="dataset made by `shardkit build`, or several: PATH=WEIGHT")
    add("--schedule", nargs="+", default=[], help="other weights after a step: STEP=WEIGHT,WEIGHT,…")
    add("--steps", type=int, default=200, help="train until this step")
    add("--checkpoint", default=checkpoint, help="where to write and to resume from")
    add("--checkpoint-every", type=int, default=50, help="steps between checkpoints")
    add("--log-file", default="log.jsonl", help="JSON lines: step, loss, sample ids")
    add("--folder", type=Path, help="keep checkpoint, log and usage log in this folder instead")
    add("--global-batch-size", type=int, default=16, help="sequences per step on all ranks")
    add("--learning-rate", type=float, default=1e-3, help="AdamW's, constant")
    add("--seed", type=int, default=17, help="of the data's order and the model's weights")
    add("--vocabulary", type=int, default=65_536, help="number of token ids")
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--width", type=int, default=256)
    add("--inside-documents", action="store_true", help="keep attention inside documents")
    args = parser.parse_args()
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
        args.checkpoint, args.log_file = args.folder / checkpoint, args.folder / "losses.jsonl"
    return args


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


def end_distributed() -> None:
    """Leave the group once all ranks are done.

    Gloo's threads may still hold tensors of ours, which they release with Python's lock in their hands, and
    whoever ends the group holds that lock and waits for these threads: so let them finish first.
    """
    dist.barrier()
    time.sleep(0.2)
    dist.destroy_process_group()


def open_loader(args: argparse.Namespace) -> StreamingLoader:
    """Batches of this rank's part of the global batch; the loader finds rank and world size by itself."""
    batch_size, rest = divmod(args.global_batch_size, dist.get_world_size())
    if rest:
        ranks = dist.get_world_size()
        raise SystemExit(f"--global-batch-size {args.global_batch_size} does not divide by {ranks} ranks")
    streams = []
    for entry in args.data:
        path, _, weight = entry.partition("=")
        streams.append(Stream(path, float(weight or 1)))
    schedule = [(0, [stream.weight for stream in streams])]
    for entry in args.schedule:
        step, _, weights = entry.partition("=")
        position = int(step) * args.global_batch_size  # a loader counts samples, over all ranks
        schedule.append((position, [float(weight) for weight in weights.split(",")]))
    return StreamingLoader(
        streams if len(streams) > 1 else streams[0].path,
        batch_size=batch_size,
        seed=args.seed,
        endless=True,
        return_ids=True,
        order=Order(schedule=schedule if len(streams) > 1 else None),
        labels=args.inside_documents,
        layout=Layout(position_ids=args.inside_documents, document_ids=args.inside_documents),
        usage_log=args.folder and args.folder / "usage",
    )


def model_config(args: argparse.Namespace) -> GPTConfig:
    return GPTConfig(args.vocabulary, args.layers, args.heads, args.width)


def gathered(values: Tensor) -> list[Any]:
    """The values of all ranks, in rank order."""
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values)
    return [value for part in parts for value in part.tolist()]


def gathered_ids(batch: Mapping[str, Tensor]) -> list[Any]:
    """The sample ids of all ranks, in rank order; in a mixture "stream:row"."""
    rows = gathered(batch["sample_id"])
    if "stream_id" not in batch:
        return rows
    streams = gathered(batch["stream_id"])
    return [f"{stream}:{row}" for stream, row in zip(streams, rows, strict=True)]
