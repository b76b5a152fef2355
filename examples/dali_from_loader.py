"""Feed NVIDIA DALI from a loader: it decodes, crops and resizes, and every step resumes exactly.

    python examples/dali_from_loader.py [--data pictures] [--batch-size 8]

The loader gives the bytes of JPEG files, and draws each crop from the generator of its sample's position.
(DALI's own random operators are seeded by the pipeline, and so depend on ranks and restarts.) DALI fetches
batches ahead of the loop; `Feed` keeps the loader's state of each, so that `state_dict` is that of the batch
in use. Decodes on a GPU if there is one. Needs `pip install nvidia-dali-cuda120`, also without a GPU.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pictures import draw_pictures

from shardkit.loaders import Layout, StreamingLoader

AHEAD = 2  # batches that DALI prepares ahead of the loop


def crop(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """The file of an image with what to cut out of it, in parts of its width and height."""
    size = np.full(2, rng.uniform(0.3, 1), np.float32)
    return {
        "file": sample["jpg"],
        "anchor": (rng.random(2, np.float32) * (1 - size)).astype(np.float32),
        "size": size,
        "mirror": np.int32(rng.random() < 0.5),
        "label": np.int32(sample["cls"]),
    }


def open_loader(path: str | Path, batch_size: int) -> StreamingLoader:
    return StreamingLoader(
        path,
        batch_size=batch_size,
        columns=["jpg", "cls"],
        decode="basic",  # the bytes of image files
        transform=crop,
        layout=Layout(tensors="numpy"),
        endless=True,
    )


class Feed:
    """The batches of a loader as the source of a DALI pipeline; `state_dict` is that of the batch in use."""

    def __init__(self, loader: StreamingLoader) -> None:
        self._loader, self._batches = loader, iter(loader)
        self._states: deque[dict[str, object]] = deque()
        self._state = loader.state_dict()

    def __call__(self) -> tuple[list[Any], ...]:
        """Return the next batch; DALI calls this ahead of the loop."""
        batch = next(self._batches)
        self._states.append(self._loader.state_dict())
        files = [np.frombuffer(file, np.uint8) for file in batch["file"]]
        return files, *(list(batch[name]) for name in ("anchor", "size", "mirror", "label"))

    def used(self) -> None:
        """Note that the loop has received one more batch."""
        self._state = self._states.popleft()

    def state_dict(self) -> dict[str, object]:
        return self._state


def batches(feed: Feed, batch_size: int, pixels: int) -> Iterator[tuple[Any, Any]]:
    """Yield (images, labels) as DALI makes them of the feed."""
    from nvidia.dali import Pipeline, fn, types

    device = 0 if torch.cuda.is_available() else None
    running = Pipeline(
        batch_size, num_threads=2, device_id=device, prefetch_queue_depth=AHEAD, exec_dynamic=False
    )
    with running:
        files, anchor, size, mirror, label = fn.external_source(source=feed, num_outputs=5, batch=True)
        where = "cpu" if device is None else "mixed"
        images = fn.decoders.image_slice(files, anchor, size, device=where, output_type=types.RGB)
        images = fn.resize(images, resize_x=pixels, resize_y=pixels)
        running.set_outputs(fn.flip(images, horizontal=mirror), label)
    running.build()
    while True:
        images, labels = running.run()
        feed.used()
        yield images.as_cpu().as_array(), labels.as_array()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="folder or URL of tars of .jpg and .cls; default: drawn pictures")
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = args.data or Path(scratch) / "pictures"
        if args.data is None:
            draw_pictures(Path(path))
        with open_loader(path, args.batch_size) as loader:
            feed = Feed(loader)
            made = []
            for images, labels in islice(batches(feed, args.batch_size, 64), 10):
                made.append((images.copy(), labels.copy(), feed.state_dict()))
        print(f"10 batches of {made[0][0].shape} from DALI")

        with open_loader(path, args.batch_size) as loader:
            loader.load_state_dict(made[4][2])  # as if the run had been killed with the fifth batch in use
            feed = Feed(loader)
            for number, (images, labels) in enumerate(islice(batches(feed, args.batch_size, 64), 5), 5):
                assert np.array_equal(images, made[number][0])
                assert np.array_equal(labels, made[number][1])
        print("resumed after 5: batches 6 to 10 have the same pixels")


if __name__ == "__main__":
    main()
