"""A loop whose DataLoader workers get stuck: `python stuck_workers.py DATA CASE METHOD`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from functools import partial
from typing import Any

import torch

from shardkit.loaders.config import Run
from shardkit.loaders.pytorch import StreamingDataLoader, StreamingDataset, unchanged

TIMEOUT_SECONDS = {"fork": 1.5, "spawn": 8.0, "forkserver": 8.0}  # a new interpreter imports torch
STEP = 5
LARGE_NUMBERS = 1 << 20  # 4 MiB


def collate(case: str, batch: dict[str, Any]) -> dict[str, Any]:
    """Fail as `case` says."""
    if case == "hang":
        time.sleep(1000)
    if case == "full":
        return batch | {"large": torch.ones(LARGE_NUMBERS)}
    return batch | {"lock": threading.Lock()} if case == "unsendable" else batch


def main() -> None:
    data, case, method = sys.argv[1:]
    dataset = StreamingDataset(
        data, batch_size=4, run=Run(timeout_seconds=TIMEOUT_SECONDS[method]), endless=True
    )
    function: Any = partial(collate, case) if case in ("hang", "unsendable", "full") else unchanged
    loader = StreamingDataLoader(
        dataset,
        num_workers=2,
        multiprocessing_context=method,
        persistent_workers=case == "anew",
        convert_fn=function,
    )
    batches = iter(loader)
    try:
        for _ in range(STEP):
            next(batches)
        first = min(multiprocessing.active_children(), key=lambda process: process.pid or 0)
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL if case == "killed" else signal.SIGSTOP)
        if case == "anew":
            iter(loader)
        if case == "close":
            loader.close()
        elif case != "exit":
            for _ in batches:
                time.sleep(0.001)
    except Exception as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
    if case != "exit":
        sys.stdout.write(f"left {len(multiprocessing.active_children())}\n")


if __name__ == "__main__":
    main()
