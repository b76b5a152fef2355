"""Two datasets mixed by weights that change in mid-run, and a resume between the decision and the change.

    python examples/mixture_reweighted.py

Shares are exact, not on average: of every 4 samples 3 are web and 1 is code, and from step 21 on 1 is web and
3 are code. The datasets would be two builds with the same tokenizer and sequence length (recipes/README.md).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

from shardkit.formats.mds import MdsWriter
from shardkit.loaders import Stream, StreamingLoader

BATCH, CHANGE, STOP, END = 8, 20, 15, 40  # sequences a step; steps


def make_dataset(folder: Path, rows: int) -> None:
    with MdsWriter(folder, columns={"tokens": "ndarray:uint16:16"}, shard_bytes="2KiB") as writer:
        writer.write_rows(np.arange(rows * 16, dtype=np.uint16).reshape(rows, 16))


def mixture(folder: Path) -> StreamingLoader:
    """What every start of the run makes: the weights that it begins with, not those of later."""
    streams = [Stream(folder / "web", weight=3), Stream(folder / "code", weight=1)]
    return StreamingLoader(streams, batch_size=BATCH, endless=True, return_ids=True)


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_dataset(folder / "web", 300)
        make_dataset(folder / "code", 100)

        shares: dict[int, Counter[int]] = {}
        with mixture(folder) as loader:
            for step, batch in zip(range(1, STOP + 1), loader, strict=False):
                shares[step] = Counter(batch["stream_id"].tolist())
                if step == 10:  # all ranks decide the same; positions count samples over all ranks
                    loader.set_weights({"web": 1, "code": 3}, at_position=CHANGE * BATCH)
            state = json.dumps(loader.state_dict())  # holds the schedule, with what is still ahead
        with mixture(folder) as loader:
            loader.load_state_dict(json.loads(state))
            for step, batch in zip(range(STOP + 1, END + 1), loader, strict=False):
                shares[step] = Counter(batch["stream_id"].tolist())
            counts = loader.stream_samples()

    for first, last in ((1, CHANGE), (CHANGE + 1, END)):
        kinds = {(shares[step][0], shares[step][1]) for step in range(first, last + 1)}
        assert len(kinds) == 1, kinds
        web, code = kinds.pop()
        print(f"steps {first} to {last}: each batch of {BATCH} had {web} of web and {code} of code")
    half = CHANGE * BATCH // 4
    assert counts == {"web": half * 3 + half, "code": half + half * 3}
    print(f"stopped after step {STOP} and resumed; delivered in all: {counts}")


if __name__ == "__main__":
    main()
