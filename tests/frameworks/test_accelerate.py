"""Accelerate on two ranks: each gets its own batches, exactly, or an error that says what to do.

As a script: both ranks, forked from one process that has imported everything; what they saw goes to a file.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest
from torch.utils.data import DataLoader

from shardkit.loaders import StreamingLoader
from shardkit.loaders.pytorch import StreamingDataLoader, StreamingDataset, unchanged

SAMPLES, SIZE = 53, 4  # per rank: epochs of 7 and 6 batches with tail="carry"


def loader(path: Path, workers: int = 0, **more: Any) -> StreamingDataLoader:
    dataset = StreamingDataset(path, batch_size=SIZE, return_ids=True, window=9, **more)
    context = "fork" if workers else None
    return StreamingDataLoader(dataset, num_workers=workers, multiprocessing_context=context)


def ids(batches: Any) -> list[list[int]]:
    return [batch["sample_id"].tolist() for batch in batches]


def refusal(prepared: Any) -> str:
    try:
        next(iter(prepared))
    except TypeError as error:
        return str(error)
    return "no error"


def seen_by_rank(rank: int, path: Path, folder: Path) -> None:
    """What this rank gets in each of the ways to use a loader with Accelerate."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    from accelerate import Accelerator, skip_first_batches
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    saw: dict[str, Any] = {}
    for workers in (0, 1):
        prepared = accelerator.prepare(loader(path, workers))
        saw[f"epochs {workers}"] = [ids(prepared), ids(prepared)]
    saver = Accelerator(cpu=True)
    first = ids(islice(saver.prepare(loader(path)), 3))
    saver.save_state(str(folder / "state"))
    saver.wait_for_everyone()
    goes_on = Accelerator(cpu=True)
    other = goes_on.prepare(loader(path))
    goes_on.load_state(str(folder / "state"))
    saw["saved"] = [first + ids(other), ids(other)]
    for tail in ("drop", "pad"):
        whole = loader(path, tail=tail)
        saw[f"{tail} whole"] = [ids(whole) for _ in range(3)]
        resumed = accelerator.prepare(loader(path, tail=tail))
        resumed.set_epoch(1)
        rest = ids(skip_first_batches(resumed, 2))
        resumed.set_epoch(2)
        saw[f"{tail} skipped"] = [rest, ids(resumed)]
    skipped = loader(path)
    rest = ids(skip_first_batches(skipped, 4))
    saw["skipped"] = [[*first, [], *rest], ids(skipped)]
    for name, config in (("", {}), ("not dispatched", {"dispatch_batches": False})):
        each = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
        for workers in (0, 1):
            dataset = StreamingDataset(path, batch_size=SIZE)
            context = "fork" if workers else None
            plain = DataLoader(
                dataset,
                batch_size=None,
                num_workers=workers,
                collate_fn=cast(Any, unchanged),
                multiprocessing_context=context,
            )
            saw[f"plain {workers} {name}"] = refusal(each.prepare(plain))
    (folder / f"rank{rank}.json").write_text(json.dumps(saw))
    accelerator.wait_for_everyone()


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_two_ranks_get_their_own_batches_or_an_error(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "data", "mds", samples=SAMPLES)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    run = [sys.executable, __file__, str(path), str(tmp_path)]
    subprocess.run(run, env=environment, check=True, timeout=100)
    for rank in range(2):
        saw = json.loads((tmp_path / f"rank{rank}.json").read_text())
        arguments: dict[str, Any] = {"batch_size": SIZE, "return_ids": True, "window": 9}
        with StreamingLoader(path, rank=rank, world_size=2, **arguments) as plain:
            expected = [ids(plain), ids(plain)]
        assert [len(epoch) for epoch in expected] == [7, 7]
        assert saw["epochs 0"] == saw["epochs 1"] == saw["saved"] == expected
        assert saw["skipped"] == [[*expected[0][:3], [], *expected[0][4:]], expected[1]]
        for tail in ("drop", "pad"):
            whole = saw[f"{tail} whole"]
            assert saw[f"{tail} skipped"] == [whole[1][2:], whole[2]]
        for name, message in saw.items():
            if name.startswith("plain"):
                assert "give accelerator.prepare a StreamingDataLoader" in message, name


def main() -> None:
    path, folder = map(Path, sys.argv[1:])
    import accelerate  # noqa: F401

    if (child := os.fork()) == 0:
        seen_by_rank(1, path, folder)
        os._exit(0)
    seen_by_rank(0, path, folder)
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
else:
    from support.loader_data import make_dataset
