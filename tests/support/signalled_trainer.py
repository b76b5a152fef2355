"""A trainer that saves when it gets a signal: `python signalled_trainer.py DATA METHOD KIND SIGNAL`.

It prints "ready" after some steps, then its step numbers; "saved POSITION" and its workers when it was told.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, cast

import torch.utils.data

from shardkit.loaders.pytorch import StreamingDataLoader, StreamingDataset, unchanged


def collate(batch: Any) -> Any:
    return dict(batch)


def workers_of_loader() -> list[int]:
    """Processes of this session that are DataLoader workers."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_worker = any(
                task.read_text().strip() == "pt_data_worker" for task in folder.glob("task/*/comm")
            )
            if is_worker and os.getsid(int(folder.name)) == os.getsid(0):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def main() -> None:
    data, method, kind, number = sys.argv[1:]
    told: list[int] = []
    signal.signal(int(number), lambda *_: told.append(1))
    dataset = StreamingDataset(data, batch_size=2, endless=True)
    context: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": method}
    loader: torch.utils.data.DataLoader[object]
    if kind == "plain":
        loader = torch.utils.data.DataLoader(
            dataset, batch_size=None, collate_fn=cast(Any, unchanged), **context
        )
    else:
        options: dict[str, Any] = {"convert_fn": collate} if kind == "collate" else {}
        loader = StreamingDataLoader(dataset, persistent_workers=kind == "persistent", **context, **options)
    for step, _ in enumerate(loader):
        if step == 20:
            sys.stdout.write(f"ready {' '.join(map(str, workers_of_loader()))}\n")
            sys.stdout.flush()
        time.sleep(0.02)
        if told:
            saved = loader.state_dict()["position"] if isinstance(loader, StreamingDataLoader) else step
            sys.stdout.write(f"saved {saved} {' '.join(map(str, workers_of_loader()))}\n")
            return


if __name__ == "__main__":
    main()
