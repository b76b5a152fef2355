"""Datasets whose rows cost different amounts of work: documents of very different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.formats import mds, tar
from shardkit.formats.block_checksums import write_blocks
from shardkit.loaders import StreamingLoader
from shardkit.loaders.config import grouped
from support.loader_data import EOS, parts, write_card

LENGTH = 64


def uneven_rows(samples: int, length: int = LENGTH, seed: int = 3) -> npt.NDArray[Any]:
    """Row i has documents of about the same length, which is drawn for each row; some have padding."""
    random = np.random.default_rng(seed)
    rows = random.integers(1, 500, (samples, length)).astype(np.uint16)
    for row in rows:
        row[random.random(length) < random.choice([0.0, 0.02, 0.1, 0.5])] = EOS
        row[-1] = EOS
    return rows


def work_of(rows: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """int64[rows]: sums of squared document lengths, token by token; padding at the end is a document."""
    found = []
    for row in rows.tolist():
        lengths: list[int] = []
        current, is_padding = 0, False
        for place, token in enumerate(row):
            ends = place > 0 and row[place - 1] == EOS and not is_padding
            starts_padding = ends and token == EOS
            if ends and (token != EOS or starts_padding):
                lengths.append(current)
                current = 0
                is_padding = starts_padding
            elif is_padding and token != EOS:
                lengths.append(current)
                current, is_padding = 0, False
            current += 1
        lengths.append(current)
        found.append(sum(n * n for n in lengths))
    return np.array(found)


def make_uneven(
    folder: Path, kind: str = "mds", *, samples: int = 300, shards: int = 6, seed: int = 3
) -> Path:
    """A dataset of `uneven_rows` with a card."""
    folder.mkdir(parents=True)
    rows = uneven_rows(samples, seed=seed)
    infos = []
    for number, (low, high) in enumerate(parts(samples, shards)):
        if kind == "tar":
            name = f"shard-{number:05d}.tar"
            infos.append(tar.write_rows_shard(folder, name, rows[low:high], key_start=low, hashes=["xxh64"]))
        else:
            compression = "zstd" if kind == "mds_zstd" else None
            name = f"shard.{number:05d}.mds"
            infos.append(
                mds.write_rows_shard(folder, name, rows[low:high], compression=compression, hashes=["xxh64"])
            )
    (tar.write_shard_list if kind == "tar" else mds.write_index)(folder, infos, write_blocks(folder, infos))
    write_card(folder)
    return folder


def ids_of_ranks(
    dataset: Any,
    world_size: int,
    batch_size: int,
    steps: int,
    *,
    state: dict[str, Any] | None = None,
    states: list[dict[str, Any]] | None = None,
    ranks: Sequence[int] | None = None,
    **options: Any,
) -> npt.NDArray[np.int64]:
    """int64[steps, ranks, batch]: samples of each rank, numbered over all streams; `states`: after each."""
    found = []
    for rank in range(world_size) if ranks is None else ranks:
        place: dict[str, Any] = {"rank": rank, "world_size": world_size, "batch_size": batch_size}
        with StreamingLoader(
            dataset, endless=True, return_ids=True, **grouped({**place, **options})
        ) as loader:
            if state is not None:
                loader.load_state_dict(state)
            firsts = [loader._opened.streams.first_sample(n) for n in range(len(loader.datasets))]
            batches, kept = iter(loader), []
            for _ in range(steps):
                batch = next(batches)
                ids = batch["sample_id"].numpy()
                if "stream_id" in batch:
                    ids = ids + np.array(firsts)[batch["stream_id"].numpy()]
                kept.append(ids)
                if states is not None and rank == 0:
                    states.append(loader.state_dict())
            found.append(kept)
    return np.array(found).transpose(1, 0, 2)
