"""Takes a sample of a build's input: pieces of its files, a function of their names and sizes.

Each source has its share of the bytes, from the beginnings of at most eight of its files in a hashed order.
Files of lines are cut at the end of a line, Parquet after some rows; others are taken whole. With
`cut_anywhere`, for builds that may quarantine any part, CSV and WARC files end in the middle of a record.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from shardkit.writers.inputs.decompress import ContainerError, decompressed, with_head
from shardkit.writers.inputs.files import open_input
from shardkit.writers.inputs.first_bytes import compression_of, look
from shardkit.writers.inputs.readers import within_memory
from shardkit.writers.inputs.scan import Split, parts_of
from shardkit.writers.recipe.inputs import InputConfig
from shardkit.writers.recipe.recipe import Recipe

_FILES = 8  # number of files to sample per source: the beginning of a single file may not be representative

_LEAST_PIECE_BYTES = 1 << 20

_BATCH_ROWS = 256


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of the sample: the first `bytes` stored bytes of a file, or the whole file."""

    split: Split
    bytes: int


def choose_pieces(splits: Sequence[Split], wanted: int) -> list[Piece]:
    """Choose pieces of about `wanted` stored bytes in total, from each source in proportion to its size."""
    whole = max(1, sum(split.bytes for split in splits))
    pieces = []
    for source in sorted({split.source for split in splits}):
        files: dict[str, Split] = {}
        for split in parts_of(splits):
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
    """Put pieces into `folder`; return inputs that read them, and the stored bytes of the pieces by source.

    Both results have only the sources with a piece, in the same order.
    """
    stored: dict[int, int] = {}
    places: dict[int, Path] = {}
    names: dict[int, dict[str, str]] = {}
    for number, piece in enumerate(pieces):
        source = piece.split.source
        place = places.setdefault(source, folder / str(source))
        place.mkdir(parents=True, exist_ok=True)
        lines = recipe.inputs[source].lines
        names.setdefault(source, {})[_name_of(piece, number)] = piece.split.file
        taken = _put(piece, place, number, lines=lines, cut_anywhere=cut_anywhere)
        stored[source] = stored.get(source, 0) + taken
    inputs = [
        recipe.inputs[source].as_sample(f"{place}/*", recipe.sources[source], names[source])
        for source, place in places.items()
    ]
    return inputs, stored


def _name_of(piece: Piece, number: int) -> str:
    return f"{number:05d}-{PurePosixPath(piece.split.input.path.partition('?')[0]).name}"


def _put(piece: Piece, folder: Path, number: int, *, lines: bool | str, cut_anywhere: bool) -> int:
    """Put a piece into `folder`, cut or as a whole file; return its stored bytes in the source."""
    split = piece.split
    name = _name_of(piece, number)
    if piece.bytes < split.input.bytes:
        if split.format == "jsonl" or (split.format == "text" and lines):
            stem = name if split.compression is None else PurePosixPath(name).stem
            if taken := copy_start(piece, folder / stem, whole_lines=True):
                return taken
        elif split.format == "parquet":
            if taken := _copy_rows(piece, folder / name):
                return taken
        elif cut_anywhere and split.format in ("csv", "warc", "tfrecord"):
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
    """Write the decompressed beginning of a file to `target`; return the stored bytes that it was read from.

    Returns 0 and leaves no file if the source is damaged or expands too much; the build itself reports that.
    """
    split = piece.split
    with open_input(split.input) as source, target.open("wb") as lines:
        taken = 0
        try:
            compression = compression_of(source, split.compression)
            head, pieces = with_head(decompressed(source, compression, split.input.bytes))
            is_cut = not whole_lines or look(head).has_lines(split.format)
            for data in pieces if is_cut else ():
                taken = source.tell()
                if taken < piece.bytes:
                    lines.write(data)
                    if lines.tell() > _MOST_TEXT * piece.bytes + _SMALL_BYTES:
                        break  # do not let a decompression bomb fill the disk
                    continue
                end = data.rfind(b"\n") + 1 if whole_lines else len(data)
                lines.write(data[:end])
                if end:
                    return taken
            else:
                if is_cut:
                    return split.input.bytes
        except ContainerError:
            pass
    target.unlink()
    return 0


def _copy_rows(piece: Piece, target: Path) -> int:
    """Copy the first rows of a Parquet file. Return their estimated stored bytes, or 0 if it is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_input(piece.split.input) as source:
            file = pq.ParquetFile(source)
            size, rows, copied = piece.split.input.bytes, max(1, int(file.metadata.num_rows)), 0
            with pq.ParquetWriter(target, file.schema_arrow) as writer:
                for batch in within_memory(file.iter_batches(_BATCH_ROWS, use_threads=False), _COPIED_BYTES):
                    writer.write_batch(batch)
                    copied += len(batch)
                    if copied * size >= piece.bytes * rows:
                        break
        return copied * size // rows
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        if getattr(error, "errno", None) is not None:  # an error of the disk, not of the file
            raise
        target.unlink(missing_ok=True)
        return 0


_MOST_TEXT = 64  # a file that expands by more than this ratio is no text, but a decompression bomb
_SMALL_BYTES = 1 << 24  # bytes of decompressed text for which that ratio is not checked
_COPIED_BYTES = 1 << 30  # maximum memory for a batch of rows
