"""One rank of the lab's training run: torch's gloo, a small model, a loader that streams through a cache.

    RANK=0 WORLD_SIZE=16 MASTER_ADDR=… python -m cluster.rank --data s3://lab/out --cache /mnt/nvme/cache …

For each step, each rank prints a line of JSON with what its loader has counted so far. Rank 0 prints another
one with the step and a hash of all ranks' rows in rank order, so that runs of any number of ranks can be
compared, and puts checkpoints of model and loader into the store.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardkit.loaders import StreamingLoader
from shardkit.storage.resilient import ResilientStore
from shardkit.storage.store import ObjectNotFoundError
from shardkit.storage.url import open_store

_WIDTH = 8  # of the model: its gradients are what ranks exchange at each step


def say(**facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def gathered(values: Tensor) -> list[Any]:
    """Return the values of all ranks, in rank order."""
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values)
    return torch.cat(parts).tolist()


def row_hashes(tokens: Tensor) -> Tensor:
    """Return a hash of 63 bits of each row."""
    digests = [hashlib.sha256(row.numpy().tobytes()).digest()[:8] for row in tokens]
    return torch.tensor([int.from_bytes(digest, "big") >> 1 for digest in digests])


class Checkpoints:
    """The latest checkpoint in a store, written by rank 0 and read by all; outages are waited out."""

    def __init__(self, url: str) -> None:
        place, _, self._key = url.rpartition("/")
        self._store = ResilientStore(open_store(place))

    def load(self) -> dict[str, Any] | None:
        try:
            data = self._store.get(self._key)
        except ObjectNotFoundError:
            return None
        state: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
        return state

    def save(self, state: dict[str, Any]) -> None:
        data = io.BytesIO()
        torch.save(state, data)
        self._store.put(self._key, data.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank of the lab's training run.")
    parser.add_argument("--data", required=True, help="URL of the dataset")
    parser.add_argument("--cache", required=True, help="folder, which the ranks of a machine share")
    parser.add_argument("--checkpoint", required=True, help="s3://BUCKET/KEY")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--global-batch", type=int, default=112)
    parser.add_argument("--step-seconds", type=float, default=0.1, help="a step takes so long at least")
    parser.add_argument("--peer-seconds", type=float, default=30.0, help="wait for other ranks")
    args = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.peer_seconds))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    loader = StreamingLoader(
        args.data,
        batch_size=args.global_batch // ranks,
        endless=True,
        return_ids=True,
        cache_dir=args.cache,
        cache_bytes="1GB",
    )
    torch.manual_seed(17)
    model = torch.nn.Sequential(torch.nn.Embedding(2000, _WIDTH), torch.nn.Linear(_WIDTH, 2000))
    checkpoints, done = Checkpoints(args.checkpoint), 0
    if (state := checkpoints.load()) is not None:
        done = state["step"]
        model.load_state_dict(state["model"])
        loader.load_state_dict(state["loader"])
    for step, batch in zip(range(done + 1, args.steps + 1), loader, strict=False):
        started = time.monotonic()
        tokens = batch["tokens"]
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :8]).flatten(0, 1), tokens[:, 1:9].flatten())
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.data -= 0.1 / ranks * parameter.grad
        ids, hashes = gathered(batch["sample_id"]), gathered(row_hashes(tokens))
        if rank == 0:
            rows = hashlib.sha256(json.dumps([ids, hashes]).encode()).hexdigest()
            say(step=step, rows=rows)
            if step % args.every == 0 or step == args.steps:
                checkpoints.save({"step": step, "model": model.state_dict(), "loader": loader.state_dict()})
        stats = loader.stats()
        assert stats.cache is not None
        say(first=stats.first_wait_seconds, fetched=stats.cache.fetched_bytes)
        time.sleep(max(0.0, args.step_seconds - (time.monotonic() - started)))
    dist.barrier()
    time.sleep(0.2)  # gloo's threads may still hold tensors, and end before the group does
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
