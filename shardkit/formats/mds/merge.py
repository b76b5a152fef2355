"""Merge MDS datasets in the sub-folders of a folder, its parts, into one dataset, without copying a shard.

    data/part-0/index.json, shard.00000.mds, …      written by a process, a machine or on a day each
    data/part-1/index.json, shard.00000.mds, …
    data/index.json, blocks.bin                     written by `merge`: part-0/shard.00000.mds, …

This is how rows are appended to a dataset: write them into a new part, and merge again. Readers see the old
dataset or the new one, because the index is replaced at once. Shards of the folder itself come first, so a
dataset that was written without parts can get some. MosaicML's `merge_index` makes the same kind of index.

Block checksums are kept if all shards have them: each shard's part of blocks.bin is copied, and its seal is
compared. The index of a part may have changed since, for parts are datasets of their own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from shardkit.card import CARD_NAME
from shardkit.errors import ShardError
from shardkit.files import fsync_path, local_path, map_path, replaced
from shardkit.formats.block_checksums import BlockFile, write_parts
from shardkit.formats.mds.index import INDEX_NAME, read_index, write_index
from shardkit.manifest import BLOCKS_NAME, FileInfo, Manifest, ShardInfo


def merge(folder: str | os.PathLike[str], *, parts: Sequence[str] | None = None) -> Manifest:
    """Merge the MDS datasets in sub-folders of `folder` into one, by writing `folder`/index.json.

    `parts`: names of the sub-folders, in the order of their rows; default: all that have an index.json, by
    name, numbers in names by value. Shards directly in `folder` come first. No shard is copied or moved, and
    the merged dataset has no card: give `eos_id` to loaders that need it. Returns the manifest. Raises
    ShardError if parts have other columns, or if one is incomplete.
    """
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError("merge() takes the folder that holds the parts: merge('data', parts=['part-0', …])")
    place = local_path(folder)
    if not place.is_dir():
        raise ShardError(place, "there is no such folder; merge takes the folder that holds the parts")
    if (place / CARD_NAME).exists():
        raise ShardError(
            place,
            f"has a card, {CARD_NAME}, which describes its own shards only: move all its files into a "
            "sub-folder, such as part-0, and merge again",
        )
    sources = [*_own(place), *_found(place, parts)]
    if not sources:
        raise ShardError(
            place, f"has no sub-folder with an {INDEX_NAME}: write each part by MdsWriter into one"
        )
    _check_columns(sources)
    shards = [shard for source in sources for shard in source.shards]
    blocks = _merge_blocks(place, sources)
    write_index(place, shards, blocks)
    return Manifest("mds", shards, blocks=blocks)


class _Source:
    """The shards of one part, or those of the folder itself, whose `part` is ""."""

    def __init__(self, folder: Path, part: str, manifest: Manifest, numbers: Sequence[int]) -> None:
        """`numbers`: those of the shards in the manifest that belong to the source."""
        self.folder, self.part, self._manifest, self._numbers = folder / part, part, manifest, numbers
        prefix = f"{part}/" if part else ""
        self.shards = [_within(manifest.shards[number], prefix) for number in numbers]

    @property
    def has_blocks(self) -> bool:
        return not self.shards or self._manifest.blocks is not None

    def blocks(self) -> Iterator[bytes]:
        """Yield the parts of blocks.bin for the shards. Raises ShardError if one is not that of its shard."""
        stated, file = self._manifest.blocks, self.folder / BLOCKS_NAME
        if stated is None:
            return
        blocks = BlockFile(str(file), self._manifest, stated)
        try:
            data = map_path(file)
        except OSError as error:
            raise ShardError(file, f"cannot be read: {error.strerror or error}") from error
        for number in self._numbers:
            start, stop = blocks.range(number)
            part = data[start:stop].tobytes()
            if blocks.checksums(number, part) is None:
                name = self._manifest.shards[number].stored.basename
                raise ShardError(file, f"is damaged: the checksums of {name} are wrong; write the part again")
            yield part


def _own(folder: Path) -> list[_Source]:
    """Return the shards of `folder` that are in no sub-folder, as a list of one source, or of none."""
    if not (folder / INDEX_NAME).is_file():
        return []
    manifest = read_index(folder)
    numbers = [n for n, shard in enumerate(manifest.shards) if "/" not in shard.raw.basename]
    return [_Source(folder, "", manifest, numbers)] if numbers else []


def _found(folder: Path, parts: Sequence[str] | None) -> list[_Source]:
    if parts is None:
        names = [path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != "."]
        parts = [name for name in sorted(names, key=_by_number) if _is_part(folder / name)]
    elif isinstance(parts, str):
        raise TypeError(f"parts must be a list of names: parts=[{parts!r}]")
    elif wrong := [name for name in parts if "/" in name or name in ("", ".", "..")]:
        raise ValueError(f"parts are names of sub-folders of {folder}, not {wrong[0]!r}")
    elif len(set(parts)) < len(parts):
        raise ValueError(f"parts name a sub-folder twice: {', '.join(parts)}")
    manifests = [read_index(folder / name) for name in parts]
    return [
        _Source(folder, name, manifest, range(len(manifest.shards)))
        for name, manifest in zip(parts, manifests, strict=True)
    ]


def _by_number(name: str) -> tuple[list[tuple[str, int]], str]:
    """Return the key that sorts part-2 before part-10."""
    pieces = re.findall(r"(\D*)(\d*)", name)
    return [(text, int(digits or -1)) for text, digits in pieces], name


def _is_part(folder: Path) -> bool:
    """Return whether a sub-folder has an index; raise ShardError if it has shards, but no index."""
    if (folder / INDEX_NAME).is_file():
        return True
    if any(".mds" in path.suffixes for path in folder.iterdir()):
        raise ShardError(
            folder,
            f"has shards but no {INDEX_NAME}: its writer still runs or has failed; let it finish, or remove "
            "the folder",
        )
    return False


def _check_columns(sources: Sequence[_Source]) -> None:
    first = next((source for source in sources if source.shards), None)
    for source in sources:
        for shard in source.shards:
            assert first is not None
            expected = first.shards[0].columns
            if shard.columns != expected:
                theirs, ours = (
                    ", ".join(f"{c.name} ({c.encoding})" for c in columns)
                    for columns in (shard.columns, expected)
                )
                raise ShardError(source.folder, f"has the columns {theirs}; {first.folder} has {ours}")


def _within(shard: ShardInfo, prefix: str) -> ShardInfo:
    """Return a shard of a part as a shard of the merged dataset."""

    def moved(file: FileInfo) -> FileInfo:
        return replace(file, basename=prefix + file.basename)

    return replace(shard, raw=moved(shard.raw), zip=None if shard.zip is None else moved(shard.zip))


def _merge_blocks(folder: Path, sources: Sequence[_Source]) -> FileInfo | None:
    """Write the block checksums of all shards, and return their entry; None if some have none."""
    if not all(source.has_blocks for source in sources):
        return None
    with replaced(folder / BLOCKS_NAME) as temporary:
        entry = write_parts(temporary, (part for source in sources for part in source.blocks()))
    fsync_path(folder)
    return entry
