"""The sides of bench_utilization, one a process: `python utilization_sides.py SIDE JSON` prints its figures.

Tools are imported by their own sides only, because some run in environments of their own. Peers read with two
DataLoader workers, as their guides advise; shardkit reads with its thread.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

WORKERS = 2
Settings = dict[str, Any]


def shardkit(settings: Settings, disk: str) -> Iterable[Any]:
    from shardkit.loaders import Stream, StreamingLoader
    from shardkit.loaders.config import Run
    from shardkit.storage import StorageOptions

    given: dict[str, Any] = {}
    if settings["case"] == "raw text":
        given = {"tokenizer": settings["tokenizer"], "sequence_length": settings["length"]}
    elif settings["case"] == "images":
        given = {"decode": "torchrgb8", "transform": cropped, "run": Run(threads=WORKERS)}
    return StreamingLoader(
        [Stream(url, weight=weight) for url, weight in settings["mds"].items()],
        batch_size=settings["batch"],
        endless=True,
        cache_dir=disk,
        storage=StorageOptions(endpoint_url=settings["endpoint"], path_style=True),
        rank=0,
        world_size=1,
        **given,
    )


def cropped(sample: dict[str, Any], rng: Any) -> dict[str, Any]:
    """A random square of 256 pixels of a photo."""
    image = sample["jpg"]
    y, x = (int(rng.integers(side - 256 + 1)) for side in image.shape[1:])
    return {"image": image[:, y : y + 256, x : x + 256], "label": sample["cls"]}


def streaming(settings: Settings, disk: str) -> Iterable[Any]:
    from torch.utils.data import DataLoader

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from support.peers import import_streaming

    os.environ["S3_ENDPOINT_URL"] = settings["endpoint"]
    tool = import_streaming()
    tool.base.util.clean_stale_shared_memory()
    total = sum(settings["mds"].values())
    streams = [
        tool.Stream(remote=url, local=f"{disk}/{number}", proportion=weight / total)
        for number, (url, weight) in enumerate(settings["mds"].items())
    ]
    dataset = tool.StreamingDataset(streams=streams, shuffle=True, batch_size=settings["batch"])
    if settings["case"] == "images":
        return DataLoader(
            dataset, batch_size=settings["batch"], num_workers=WORKERS, collate_fn=collated, drop_last=True
        )
    return DataLoader(dataset, batch_size=settings["batch"], num_workers=WORKERS)


def collated(samples: list[dict[str, Any]]) -> Any:
    """A batch of random squares of photos that Pillow decoded."""
    import numpy as np
    import torch

    rng, images = np.random.default_rng(), []
    for sample in samples:
        image = torch.from_numpy(np.asarray(sample["jpg"].convert("RGB")).copy()).permute(2, 0, 1)
        images.append(cropped({"jpg": image, "cls": 0}, rng)["image"])
    return torch.stack(images)


def webdataset(settings: Settings, disk: str) -> Iterable[Any]:
    import webdataset as tool

    shards = [f"pipe:curl -sf '{url}'" for url in settings["tars"]]
    samples = tool.WebDataset(shards, shardshuffle=len(shards), seed=0).shuffle(1000)
    if settings["case"] == "images":
        photos = samples.decode("pil").to_tuple("jpg").map(lambda one: {"jpg": one[0]})
        batches = photos.batched(settings["batch"], partial=False, collation_fn=collated)
        return tool.WebLoader(batches, batch_size=None, num_workers=WORKERS)  # type: ignore[no-any-return]
    samples = samples.decode()
    batches = samples.to_tuple("tokens.npy").batched(settings["batch"], partial=False)
    loader: Iterable[Any] = tool.WebLoader(batches, batch_size=None, num_workers=WORKERS)
    return loader


def litdata(settings: Settings, disk: str) -> Iterable[Any]:
    import litdata as tool
    from litdata.streaming import downloader

    # Its Rust client refuses http://, which no option of its own allows; the server here has no TLS.
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
    loader = tool.TokensLoader(block_size=settings["length"])
    dataset = tool.StreamingDataset(
        settings["litdata"],
        item_loader=loader,
        shuffle=True,
        cache_dir=disk,
        storage_options={"endpoint_url": settings["endpoint"]},
    )
    batch: int = settings["batch"]
    batches: Iterable[Any] = tool.StreamingDataLoader(dataset, batch_size=batch, num_workers=WORKERS)
    return batches


SIDES: dict[str, Callable[[Settings, str], Iterable[Any]]] = {
    "shardkit": shardkit,
    "streaming": streaming,
    "webdataset": webdataset,
    "litdata": litdata,
}


def train(batches: Iterable[Any], steps: int, step_seconds: float) -> dict[str, float]:
    """Sleep with each batch; the share of the time that was slept, with the first wait and without it."""
    slept, count, began = 0.0, 0, time.perf_counter()
    first = began
    for _ in batches:
        at = time.perf_counter()
        if count == 0:
            first = at
        time.sleep(step_seconds)
        slept += time.perf_counter() - at
        count += 1
        if count == steps:
            break
    ended = time.perf_counter()
    return {
        "steps": count,
        "first_batch_s": first - began,
        "utilization": 100 * slept / (ended - first),
        "with_start": 100 * slept / (ended - began),
    }


def main() -> None:
    side, settings = sys.argv[1], json.loads(sys.argv[2])
    with tempfile.TemporaryDirectory() as disk:
        batches = SIDES[side](settings, disk)
        figures = train(batches, settings["steps"], settings["step_seconds"])
        if side == "shardkit":
            from shardkit.loaders.step_report import Accelerators

            report = Accelerators().report(batches.stats())  # type: ignore[attr-defined]
            figures["reported"] = 100 * (1 - report.lost_share)
        print(json.dumps(figures), flush=True)
    os._exit(0)  # threads and workers of some peers would not end


if __name__ == "__main__":
    main()
