"""Datasets that others wrote, read where they lie: MDS by mosaicml-streaming, image tars by webdataset.

    python examples/read_existing_data.py

Nothing is converted, indexed or copied. Both are written here by the libraries themselves, then shuffled,
batched and resumed by the same loader as datasets that shardkit built. Needs `pip install mosaicml-streaming
webdataset pillow`; without one of the first two its half is left out.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from shardkit import open_dataset
from shardkit.loaders import StreamingLoader

COUNT = 50


def image(number: int) -> Image.Image:
    return Image.fromarray(np.full((8, 8, 3), number, np.uint8))


def write_mds(folder: Path) -> None:
    """Numbers, texts and images, as a training team's own script would."""
    from streaming import MDSWriter

    columns = {"number": "int", "caption": "str", "image": "png"}
    with MDSWriter(out=str(folder), columns=columns, hashes=["sha1"], size_limit=4096) as writer:
        for number in range(COUNT):
            writer.write({"number": number, "caption": f"grey {number}", "image": image(number)})


def write_tars(folder: Path) -> None:
    """Five tars of images, captions and classes."""
    import webdataset

    folder.mkdir()
    with webdataset.ShardWriter(str(folder / "part-%03d.tar"), maxcount=10, verbose=0) as writer:
        for number in range(COUNT):
            members = {"png": image(number), "txt": f"grey {number}", "cls": number}
            writer.write({"__key__": f"{number:06d}", **members})


def read_twice(dataset: Any, columns: list[str], batch_size: int = 8) -> list[dict[str, Any]]:
    """An epoch of batches, the second half by a loader that resumed: through JSON, as in a checkpoint."""
    options: dict[str, Any] = {"batch_size": batch_size, "columns": columns, "tail": "pad", "seed": 17}
    with StreamingLoader(dataset, **options) as loader:
        first = [batch for _, batch in zip(range(3), loader, strict=False)]
        state = json.dumps(loader.state_dict())
    with StreamingLoader(dataset, **options) as loader:
        loader.load_state_dict(json.loads(state))
        return [*first, *loader]


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    with tempfile.TemporaryDirectory() as name:
        for kind, write, columns in (
            ("MDS", write_mds, ["number", "caption", "image"]),
            ("WebDataset", write_tars, ["cls", "txt", "png"]),
        ):
            folder = Path(name, kind)
            try:
                write(folder)
            except ImportError as error:
                print(f"{kind}: left out, {error}")
                continue
            found = {}
            with open_dataset(folder) as dataset:  # MDS columns and tar members come decoded
                for batch in read_twice(dataset, columns):
                    assert isinstance(batch[columns[0]], torch.Tensor)  # numbers; texts and images are lists
                    real = ~batch["is_padding"]  # the last batch repeats samples to be full
                    for values in zip(real, *(batch[column] for column in columns), strict=True):
                        if values[0]:
                            assert int(values[1]) not in found
                            found[int(values[1])] = values[2:]
            for number in range(COUNT):
                caption, picture = found.pop(number)
                assert caption == f"grey {number}"
                assert np.array_equal(np.asarray(picture), np.asarray(image(number)))
            assert not found
            print(f"{kind}: {COUNT} numbers, captions and images, each once in an epoch with a resume, equal")


if __name__ == "__main__":
    main()
