"""A part of a recipe's input, as files of their own: which, and how they are cut.

The part is a function of file names and sizes: of each source its share of the bytes, of at most eight of its
files in an order that is hashed, of each file its beginning. Files of lines are cut behind one, Parquet
behind some rows; others are taken whole. With `cut_anywhere`, for builds that may quarantine any part, CSV
and WARC files end in the midst of a record.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from shardkit.writers.inputs.decompress import ContainerError, decompressed
from shardkit.writers.inputs.files import open_input
from shardkit.writers.inputs.scan import Split
from shardkit.writers.recipe import InputConfig, Recipe

__all__ = ["Piece", "choose_pieces", "copy_start", "put_pieces"]

_FILES = 8  # of a source, if they are large: the beginning of one file may be unlike all else
_LEAST_PIECE_BYTES = 1 << 20
_BATCH_ROWS = 256


@dataclass(frozen=True, slots=True)
class Piece:
    """The first `bytes` stored bytes of a file, or all of it."""

    split: Split
    bytes: int


def choose_pieces(splits: Sequence[Split], wanted: int) -> list[Piece]:
    """About `wanted` stored bytes, of every source in proportion."""
    whole = max(1, sum(split.bytes for split in splits))
    pieces = []
    for source in sorted({split.source for split in splits}):
        files: dict[str, Split] = {}
        for split in splits:
            if split.source == source:
                files.setdefault(split.path, split)
        by_hash = sorted(files.values(), key=lambda s: hashlib.blake2b(s.file.encode()).digest())
        left = max(1, wanted * sum(split.input.bytes for split in by_hash) // whole)
        for number, split in enumerate(by_hash):
            others = max(0, min(_FILES, len(by_hash)) - number - 1)
            size = min(split.input.bytes, left, max(-(-left // (1 + others)), _LEAST_PIECE_BYTES))
            if size:
                pieces.append(Piece(split, size))
                left -= size
    return pieces


def put_pieces(
    recipe: Recipe, pieces: Sequence[Piece], folder: Path, *, cut_anywhere: bool = False
) -> tuple[list[InputConfig], dict[int, int]]:
    """Put pieces into `folder`; inputs that read them, and the stored bytes they stand for by source.

    Both are of the sources that have any, in the same order.
    """
    stored: dict[int, int] = {}
    places: dict[int, Path] = {}
    for number, piece in enumerate(pieces):
        source = piece.split.source
        place = places.setdefault(source, folder / str(source))
        place.mkdir(parents=True, exist_ok=True)
        lines = recipe.inputs[source].lines
        taken = _put(piece, place, number, lines=lines, cut_anywhere=cut_anywhere)
        stored[source] = stored.get(source, 0) + taken
    inputs = [recipe.inputs[source].as_sample(f"{place}/*") for source, place in places.items()]
    return inputs, stored


def _put(piece: Piece, folder: Path, number: int, *, lines: bool, cut_anywhere: bool) -> int:
    """Put a piece where the sample's recipe finds it; the stored bytes that it stands for."""
    split = piece.split
    name = f"{number:05d}-{PurePosixPath(split.input.path.partition('?')[0]).name}"
    if piece.bytes < split.input.bytes:
        if split.format == "jsonl" or (split.format == "text" and lines):
            stem = name if split.compression is None else PurePosixPath(name).stem
            if taken := copy_start(piece, folder / stem, whole_lines=True):
                return taken
        elif split.format == "parquet":
            return _copy_rows(piece, folder / name)
        elif cut_anywhere and split.format in ("csv", "warc"):
            stem = name if split.compression is None else PurePosixPath(name).stem
            if taken := copy_start(piece, folder / stem):
                return taken
    if split.input.is_remote:
        with open_input(split.input) as source, (folder / name).open("wb") as target:
            shutil.copyfileobj(source, target)
    else:
        (folder / name).symlink_to(Path(split.input.path).absolute())
    return split.input.bytes


def copy_start(piece: Piece, target: Path, *, whole_lines: bool = False) -> int:
    """A file's beginning, decompressed; 0 if there is damage, which the build must see."""
    split = piece.split
    with open_input(split.input) as source, target.open("wb") as lines:
        taken = 0
        try:
            for data in decompressed(source, split.compression, split.input.bytes):
                taken = source.tell()
                if taken < piece.bytes:
                    lines.write(data)
                    continue
                end = data.rfind(b"\n") + 1 if whole_lines else len(data)
                lines.write(data[:end])
                if end:
                    return taken
        except ContainerError:
            target.unlink()
            return 0
    return split.input.bytes


def _copy_rows(piece: Piece, target: Path) -> int:
    """The first rows of a Parquet file."""
    import pyarrow.parquet as pq

    with open_input(piece.split.input) as source:
        file = pq.ParquetFile(source)
        size, rows, copied = piece.split.input.bytes, max(1, int(file.metadata.num_rows)), 0
        with pq.ParquetWriter(target, file.schema_arrow) as writer:
            for batch in file.iter_batches(_BATCH_ROWS):
                writer.write_batch(batch)
                copied += len(batch)
                if copied * size >= piece.bytes * rows:
                    break
    return copied * size // rows
