"""The sides of bench_images, one a process: `python image_sides.py SIDE JSON` prints its figures.

All read the same photos, crop and flip them by torchvision's transforms, and give batches of uint8. Peers
read with two DataLoader workers, as their guides advise, and decode as they do by default: with Pillow.
litdata would use torchvision's decoder, which a torch without CUDA lacks: its samples are bytes of files.
A tuned ImageFolder decodes with simplejpeg, too: what is left is the loaders' own difference.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torchvision.transforms import v2

WORKERS = 2
Settings = dict[str, Any]


def crops(size: int, *, of_pillow: bool) -> Any:
    """A random crop of an image and perhaps its mirror, as a tensor."""
    steps: list[Any] = [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()]
    return v2.Compose([*steps, v2.PILToTensor()] if of_pillow else steps)


def transformed(function: Any, sample: dict[str, Any]) -> dict[str, Any]:
    return {"image": function(sample["jpg"]), "label": sample["cls"]}


def drawn(size: int, sample: dict[str, Any], rng: Any) -> dict[str, Any]:
    """The same crop, drawn from `rng`."""
    image = sample["jpg"]
    height, width = image.shape[1:]
    area, ratio = rng.uniform(0.08, 1) * height * width, rng.uniform(3 / 4, 4 / 3)
    high, wide = min(height, int((area / ratio) ** 0.5)), min(width, int((area * ratio) ** 0.5))
    box = int(rng.integers(height - high + 1)), int(rng.integers(width - wide + 1)), high, wide
    image = v2.functional.resized_crop(image, *box, [size, size], antialias=True)
    image = v2.functional.horizontal_flip(image) if rng.random() < 0.5 else image
    return {"image": image, "label": sample["cls"]}


def shardkit_workers(settings: Settings, decode: str) -> Iterable[Any]:
    from shardkit.loaders.pytorch import StreamingDataLoader, StreamingDataset

    function = crops(settings["size"], of_pillow=decode == "pil")
    dataset = StreamingDataset(
        settings["tars"],
        batch_size=settings["batch"],
        decode=decode,
        transform=partial(transformed, function),
        endless=True,
    )
    return StreamingDataLoader(dataset, num_workers=WORKERS)


def shardkit_threads(settings: Settings) -> Iterable[Any]:
    from shardkit.loaders import StreamingLoader
    from shardkit.loaders.config import Run

    return StreamingLoader(
        settings["tars"],
        batch_size=settings["batch"],
        decode="torchrgb8",
        transform=partial(drawn, settings["size"]),
        endless=True,
        run=Run(threads=WORKERS),
    )


def from_file(path: str) -> torch.Tensor:
    """An image as decode="torchrgb8" gives it."""
    import simplejpeg

    return torch.from_numpy(simplejpeg.decode_jpeg(Path(path).read_bytes())).permute(2, 0, 1)


def image_folder(settings: Settings, *, is_tuned: bool = False) -> Iterable[Any]:
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    function = crops(settings["size"], of_pillow=not is_tuned)
    options: dict[str, Any] = {"loader": from_file} if is_tuned else {}
    dataset = ImageFolder(settings["photos"], function, **options)
    return DataLoader(
        dataset, batch_size=settings["batch"], shuffle=True, num_workers=WORKERS, drop_last=True
    )


def webdataset(settings: Settings) -> Iterable[Any]:
    import webdataset as tool

    shards = sorted(map(str, Path(settings["tars"]).glob("*.tar")))
    function = crops(settings["size"], of_pillow=True)
    samples = tool.WebDataset(shards, shardshuffle=len(shards), seed=0).shuffle(1000).decode("pil")
    batches = (
        samples.to_tuple("jpg", "cls").map_tuple(function, int).batched(settings["batch"], partial=False)
    )
    loader: Iterable[Any] = tool.WebLoader(batches, batch_size=None, num_workers=WORKERS)
    return loader


def streaming(settings: Settings) -> Iterable[Any]:
    from torch.utils.data import DataLoader

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from support.peers import import_streaming

    tool = import_streaming()
    tool.base.util.clean_stale_shared_memory()
    function = crops(settings["size"], of_pillow=True)

    class Photos(tool.StreamingDataset):  # type: ignore[misc, name-defined]
        def __getitem__(self, at: int) -> Any:
            sample = super().__getitem__(at)
            return function(sample["jpg"]), sample["cls"]

    dataset = Photos(local=settings["mds"], shuffle=True, batch_size=settings["batch"])
    return DataLoader(dataset, batch_size=settings["batch"], num_workers=WORKERS)


def litdata(settings: Settings) -> Iterable[Any]:
    import litdata as tool
    from PIL import Image

    function = crops(settings["size"], of_pillow=True)

    class Photos(tool.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: Any) -> Any:
            sample = super().__getitem__(at)
            return function(Image.open(io.BytesIO(sample["jpg"])).convert("RGB")), sample["cls"]

    batches: Iterable[Any] = tool.StreamingDataLoader(
        Photos(settings["litdata"], shuffle=True), batch_size=settings["batch"], num_workers=WORKERS
    )
    return batches


SIDES: dict[str, Callable[[Settings], Iterable[Any]]] = {
    "shardkit": partial(shardkit_workers, decode="torchrgb8"),
    "shardkit, threads": shardkit_threads,
    "shardkit, Pillow": partial(shardkit_workers, decode="pil"),
    "ImageFolder": image_folder,
    "ImageFolder, simplejpeg": partial(image_folder, is_tuned=True),
    "webdataset": webdataset,
    "streaming": streaming,
    "litdata": litdata,
}


def write_litdata(photos: str, output: str) -> None:
    """Photos as litdata's own `optimize` stores them: the bytes of JPEG files."""
    import litdata as tool

    files = [str(file) for file in sorted(Path(photos).rglob("*.jpg"))]
    tool.optimize(fn=_litdata_sample, inputs=files, output_dir=output, num_workers=1, chunk_bytes="16MB")


def _litdata_sample(file: str) -> dict[str, Any]:
    return {"jpg": Path(file).read_bytes(), "cls": int(Path(file).parent.name)}


def again(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from batches


def of_processes(file: str) -> Iterator[str]:
    """What /proc says of this process and of its children."""
    for process in [os.getpid(), *(child.pid for child in multiprocessing.active_children())]:
        with suppress(OSError):  # it has ended
            yield Path(f"/proc/{process}/{file}").read_text()


def pss_bytes() -> int:
    """The memory of all processes, with a share of what several of them share."""
    return sum(int(text.split("Pss:")[1].split()[0]) * 1024 for text in of_processes("smaps_rollup"))


def cpu_seconds() -> float:
    """The processor time that all processes have used."""
    ticks = [text.rpartition(")")[2].split()[11:13] for text in of_processes("stat")]
    return sum(int(user) + int(system) for user, system in ticks) / os.sysconf("SC_CLK_TCK")


def read(batches: Iterable[Any], settings: Settings) -> dict[str, float]:
    """Images a second over some batches, after a first quarter that is not counted."""
    began, count, source = time.perf_counter(), settings["batches"], again(batches)
    next(source)
    first = time.perf_counter()
    for _ in range(count // 4):
        next(source)
    start, used = time.perf_counter(), cpu_seconds()
    for _ in range(count):
        next(source)
    seconds, used = time.perf_counter() - start, cpu_seconds() - used
    images = count * settings["batch"]
    return {
        "images_per_s": images / seconds,
        "cpu_ms": 1000 * used / images,
        "first_batch_s": first - began,
        "pss_mib": pss_bytes() / (1 << 20),
    }


def main() -> None:
    side, settings = sys.argv[1], json.loads(sys.argv[2])
    if side == "write litdata":
        write_litdata(settings["photos"], settings["litdata"])
        return
    torch.set_num_threads(1)
    print(json.dumps(read(SIDES[side](settings), settings)), flush=True)
    os._exit(0)  # threads and workers of some peers would not end


if __name__ == "__main__":
    main()
