"""Small datasets of every kind that a loader reads, whose samples say which they are."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.formats import mds, tar

LENGTH = 8
EOS = 0
KINDS = ["mds", "mds_zstd", "tar", "foreign_tar", "columns"]


def token_rows(samples: int, length: int = LENGTH, dtype: str = "uint16") -> npt.NDArray[Any]:
    """Row i starts with i + 1 and has documents and padding behind it."""
    rows = np.random.default_rng(5).integers(1, 500, (samples, length)).astype(dtype)
    rows[:, 0] = np.arange(1, samples + 1)
    rows[:, 3] = EOS
    rows[::2, -2:] = EOS
    rows[:, -1] = EOS
    return rows


def parts(samples: int, shards: int) -> list[tuple[int, int]]:
    """Unequal shards: (first, last + 1) of each."""
    cuts = np.linspace(0, samples, shards + 1).astype(int)
    cuts[1:-1] += np.arange(shards - 1) % 2
    return [(int(a), int(b)) for a, b in pairwise(cuts)]


def make_dataset(
    folder: Path,
    kind: str,
    *,
    samples: int = 53,
    shards: int = 5,
    dtype: str = "uint16",
    sizes: Sequence[int] | None = None,
) -> Path:
    """A dataset of `kind`; all but "columns" hold `token_rows(samples)`. `sizes`: samples of each shard."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = token_rows(samples, dtype=dtype)
    edges = parts(samples, shards) if sizes is None else list(pairwise([0, *accumulate(sizes)]))
    pieces = [(f"{number:05d}", rows[low:high], low) for number, (low, high) in enumerate(edges)]
    if kind in ("mds", "mds_zstd"):
        compression = "zstd" if kind == "mds_zstd" else None
        infos = [
            mds.write_rows_shard(folder, f"shard.{name}.mds", piece, compression=compression)
            for name, piece, _ in pieces
        ]
        mds.write_index(folder, infos)
    elif kind == "tar":
        infos = [
            tar.write_rows_shard(folder, f"shard-{name}.tar", piece, key_start=low)
            for name, piece, low in pieces
        ]
        tar.write_shard_list(folder, infos)
    elif kind == "foreign_tar":
        import webdataset

        for name, piece, low in pieces:
            with webdataset.TarWriter(str(folder / f"part-{name}.tar")) as writer:
                for number, row in enumerate(piece, low):
                    writer.write({"__key__": f"{number:06d}", "tokens.npy": row})
    else:
        make_columns_dataset(folder, samples)
    return folder


def columns_sample(number: int) -> dict[str, Any]:
    """A sample with a column of every kind that batches treat differently."""
    rng = np.random.default_rng(number)
    return {
        "image": rng.integers(0, 255, (2, 3)).astype(np.uint8),
        "label": number % 7,
        "score": float(number) / 2,
        "text": f"text {number} é",
        "tokens": token_rows(number + 1)[number],
        "varied": np.arange(1 + number % 4, dtype=np.int32),
    }


COLUMNS = {
    "image": "ndarray:uint8:2,3",
    "label": "int",
    "score": "float32",
    "text": "str",
    "tokens": f"ndarray:uint16:{LENGTH}",
    "varied": "ndarray:int32",
}


def make_columns_dataset(folder: Path, samples: int) -> None:
    with mds.MdsWriter(folder, columns=COLUMNS, shard_bytes=900) as writer:
        for number in range(samples):
            writer.write(columns_sample(number))


def write_card(folder: Path, eos_id: int = EOS) -> None:
    (folder / "dataset.json").write_text(json.dumps({"tokenizer": {"eos_id": eos_id}}))


def saved_bytes(value: object) -> int:
    """How many bytes torch.save makes of a value."""
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.tell()


def make_rows(folder: Path, samples: int, length: int) -> Path:
    """An MDS dataset of `token_rows` of any length in three shards, with a card."""
    folder.mkdir(parents=True)
    rows = token_rows(samples, length)
    shards = [
        mds.write_rows_shard(folder, f"shard.{number:05d}.mds", rows[low:high], hashes=("xxh64",))
        for number, (low, high) in enumerate(parts(samples, 3))
    ]
    mds.write_index(folder, shards)
    write_card(folder)
    return folder
