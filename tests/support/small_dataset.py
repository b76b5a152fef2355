"""Small whole datasets with a card and files beside the shards, made without a build."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from shardkit.card import CARD_NAME, FILES_NAME, DatasetCard, listed_files
from shardkit.formats import mds, tar
from shardkit.manifest import Manifest
from shardkit.writers.card import describe_file
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.stages.provenance import PROVENANCE_NAME, renumber
from shardkit.writers.stages.publish import REPORT_NAME, RemoteOutput, global_shards, publish
from support.small_build import tree

__all__ = ["Built", "files_of", "make_dataset", "renumbered"]


class Built:
    """What a build hands to its publication: shards of 8 rows and side files in a work folder, and the card.

    The tokens count up from `first`; `sides` are {name: content}.
    """

    def __init__(
        self,
        work: Path,
        kind: str,
        shards: int,
        first: int,
        sides: Mapping[str, bytes],
        *,
        compression: str | None = None,
    ) -> None:
        work.mkdir(parents=True)
        rows = (first + np.arange(shards * 32, dtype=np.uint16)).reshape(shards, 8, 4)
        made, hashes = [], ["xxh64"]
        for n, part in enumerate(rows):
            name = f"part-00000.{n:05d}.{kind}"
            if kind == "mds":
                made.append(mds.write_rows_shard(work, name, part, hashes=hashes, compression=compression))
            else:
                made.append(tar.write_rows_shard(work, name, part, key_start=8 * n, hashes=hashes))
        named = global_shards([(Artifact(work), made)])
        self.work = work
        self.manifest = Manifest("mds" if kind == "mds" else "tar", [shard for _, shard in named])
        self.links = {shard.stored.basename: file for file, shard in named}
        for number, (name, data) in enumerate(sides.items()):
            (work / f"side-{number}").write_bytes(data)
            self.links[name] = Artifact(work / f"side-{number}")
        listed, table = listed_files({name: describe_file(data) for name, data in sides.items()})
        card = {
            "fingerprint": self.manifest.fingerprint,
            "samples": self.manifest.samples,
            "files": listed,
        }
        self.texts = {CARD_NAME: DatasetCard(card).to_bytes()}
        self.texts |= {} if table is None else {FILES_NAME: table}

    def publish(self, output: Path | RemoteOutput, *, replace: bool = False) -> None:
        publish(output, self.manifest, self.links, self.texts, replace=replace)


def make_dataset(
    output: Path, *, shards: int = 5, first: int = 0, compression: str | None = None
) -> Manifest:
    """A dataset of MDS shards in the folder `output`, with a report and a file in a folder of its own."""
    sides = {
        "provenance/part-00000.parquet": f"table of {first}".encode(),
        REPORT_NAME: f"report of {first}".encode(),
    }
    work = output.with_name(output.name + ".made")
    built = Built(work, "mds", shards, first, sides, compression=compression)
    built.publish(output)
    return built.manifest


def files_of(folder: Path) -> dict[str, bytes]:
    """{name: content} of all files in a folder, as `stores.objects` of a store."""
    return {name: (folder / name).read_bytes() for name in tree(folder)}


def renumbered(source: Path, target: Path, first_shard: int) -> None:
    """The provenance table `source` with other shard numbers, in the file `target`."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        renumber(Path(folder), Artifact(source), first_shard)
        (Path(folder) / PROVENANCE_NAME).rename(target)
