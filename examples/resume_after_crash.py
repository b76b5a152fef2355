"""A run that is killed by SIGKILL between two checkpoints, and goes on elsewhere with the very same samples.

    python examples/resume_after_crash.py

The first process kills itself in mid-run; the second one resumes, on two ranks in the place of one. Together
they must have trained on what a run that was never stopped trains on, step by step.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from shardkit.formats.mds import MdsWriter
from shardkit.loaders import StreamingLoader

STEPS, GLOBAL_BATCH, CHECKPOINT_EVERY = 40, 8, 5


def make_dataset(folder: Path) -> None:
    """200 rows of 16 tokens: an epoch is 25 steps."""
    with MdsWriter(folder, columns={"tokens": "ndarray:uint16:16"}, shard_bytes="2KiB") as writer:
        writer.write_rows(np.arange(200 * 16, dtype=np.uint16).reshape(200, 16))


def train(folder: Path, log: Path, checkpoint: Path, ranks: int, kill_after: int = 0) -> None:
    """All ranks of a training job in one process; `kill_after`: the step after which it dies, 0 for never."""
    with ExitStack() as opened, log.open("a", buffering=1) as lines:
        loaders = [
            StreamingLoader(
                folder,
                batch_size=GLOBAL_BATCH // ranks,
                rank=rank,
                world_size=ranks,
                endless=True,
                return_ids=True,
            )
            for rank in range(ranks)
        ]
        done = 0
        if checkpoint.exists():
            saved = json.loads(checkpoint.read_text())
            done = saved["step"]
            for loader in loaders:
                opened.enter_context(loader).load_state_dict(saved["loader"])
        for step, *batches in zip(range(done + 1, STEPS + 1), *loaders, strict=False):
            ids = [row for batch in batches for row in batch["sample_id"].tolist()]  # in rank order
            lines.write(json.dumps({"step": step, "rows": ids}) + "\n")
            if step % CHECKPOINT_EVERY == 0:  # in a real run beside the model's weights
                new = checkpoint.with_suffix(".new")
                new.write_text(json.dumps({"step": step, "loader": loaders[0].state_dict()}))
                new.replace(checkpoint)  # a crash leaves the old one or the new one
            if step == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)


def run(*arguments: object) -> int:
    """The exit code of `train` in a process of its own."""
    process = multiprocessing.get_context("fork").Process(target=train, args=arguments)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def rows_by_step(log: Path) -> dict[int, list[int]]:
    """What each step trained on; of a step that ran twice the second time counts."""
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return {record["step"]: record["rows"] for record in records}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--kill-after",
        type=int,
        default=33,
        choices=range(1, STEPS),
        metavar="STEP",
        help="step of the crash, 1 to 39 (default: 33)",
    )
    kill_after = parser.parse_args().kill_after
    with tempfile.TemporaryDirectory() as name:
        data, log, checkpoint = Path(name, "data"), Path(name, "log"), Path(name, "state.json")
        make_dataset(data)
        assert run(data, log, checkpoint, 1, kill_after) == -signal.SIGKILL
        saved = json.loads(checkpoint.read_text())["step"] if checkpoint.exists() else 0
        print(f"killed by SIGKILL after step {kill_after}; the last checkpoint is that of step {saved}")
        assert run(data, log, checkpoint, 2) == 0
        print(f"resumed on 2 ranks from step {saved + 1} to {STEPS}")
        assert run(data, Path(name, "whole"), Path(name, "unused.json"), 1) == 0
        seen, whole = rows_by_step(log), rows_by_step(Path(name, "whole"))
        assert seen == whole
        first_epoch = sorted(row for step in range(1, 26) for row in seen[step])
        assert first_epoch == list(range(200))
        print(f"all {STEPS} steps trained on the rows of a run that was never killed, in its order;")
        print("the first epoch had each of the 200 rows once")


if __name__ == "__main__":
    main()
