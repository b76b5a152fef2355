"""Small whole datasets with a card and files beside the shards, made without a build."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from shardkit.formats import mds
from shardkit.manifest import Manifest
from shardkit.writers.card import card_bytes, describe_file
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.publish import CARD_NAME, REPORT_NAME, global_shards, publish
from shardkit.writers.stages.provenance import PROVENANCE_NAME, renumber

__all__ = ["make_dataset"]


def make_dataset(
    output: Path, *, shards: int = 5, first: int = 0, compression: str | None = None
) -> Manifest:
    """A dataset of MDS shards of 8 rows, whose tokens count up from `first`, in the folder `output`."""
    work = output.with_name(output.name + ".made")
    work.mkdir(parents=True)
    rows = (first + np.arange(shards * 8 * 4, dtype=np.uint16)).reshape(-1, 4)
    parts = [
        mds.write_rows_shard(
            work,
            f"part-00000.{n:05d}.mds",
            rows[n * 8 : n * 8 + 8],
            hashes=["xxh64"],
            compression=compression,
        )
        for n in range(shards)
    ]
    named = global_shards([(Artifact(work), parts)])
    manifest = Manifest("mds", [shard for _, shard in named])
    links = {shard.stored.basename: file for file, shard in named}
    table, name = f"table of {first}".encode(), "provenance/part-00000.parquet"
    (work / "table").write_bytes(table)
    report = f"report of {first}".encode()
    card = {
        "fingerprint": manifest.fingerprint,
        "samples": manifest.samples,
        "files": {name: describe_file(table), REPORT_NAME: describe_file(report)},
    }
    texts = {REPORT_NAME: report, CARD_NAME: card_bytes(card)}
    publish(output, manifest, links | {name: Artifact(work / "table")}, texts, replace=False)
    return manifest


def renumbered(source: Path, target: Path, first_shard: int) -> None:
    """The provenance table `source` with other shard numbers, in the file `target`."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        renumber(Path(folder), Artifact(source), first_shard)
        (Path(folder) / PROVENANCE_NAME).rename(target)
