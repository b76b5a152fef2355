"""Reads Hugging Face datasets of tokens: `save_to_disk` folders, .arrow files (stream or file), Parquet.

Tokens are in a column of integer lists: `input_ids` or `tokens`, or the only such column. Each row is one
document. Other columns are left out, and the result names them. Nulls, nested lists, and folders of several
dataset splits are refused with file and row. Files are read batch by batch, and hashed after the last one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from shardkit.errors import MissingExtraError, ShardError
from shardkit.formats.parquet_limits import Footer
from shardkit.hashing import hash_file
from shardkit.manifest import FileInfo, checked_basename
from shardkit.tools.convert.source import BLOCK_BYTES, SOURCE_HASH, TOKEN_COLUMNS, TokenBlock, read_json

if TYPE_CHECKING:
    import pyarrow as pa


_MAX_STATE_BYTES = 64 << 20

_ARROW_FILE_MAGIC = b"ARROW1"

_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"

_MAX_BATCH_ROWS = 1 << 16


def saved_files(folder: Path) -> list[Path]:
    """Return the .arrow files of a `save_to_disk` folder; raises ShardError if it holds several splits."""
    if (folder / "dataset_dict.json").is_file():
        splits = read_json(folder / "dataset_dict.json", _MAX_STATE_BYTES).get("splits", [])
        names = ", ".join(map(str, splits))[:200] if isinstance(splits, list) else ""
        raise ShardError(folder, f"has splits ({names}): give the path of one, such as {folder}/train")
    state = read_json(folder / "state.json", _MAX_STATE_BYTES)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        problem = "stores its order in an indices file: call flatten_indices() and save_to_disk() first"
        raise ShardError(folder / "state.json", problem)
    entries = state.get("_data_files")
    if not isinstance(entries, list) or not entries:
        raise ShardError(folder / "state.json", "lists no data files: it was not written by save_to_disk")
    found = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    return [folder / checked_basename(name, folder / "state.json") for name in found]


class ArrowSource:
    """Reads one column of integer lists from Arrow or Parquet files."""

    kind: ClassVar[str] = "huggingface"
    has_documents = True

    def __init__(self, paths: Sequence[Path], columns: Sequence[str] | None = None) -> None:
        """Open the files; `columns` has the name of the column to read (None: find it).

        Raises ShardError unless every file has this column, with lists of integers.
        """
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise MissingExtraError("pyarrow", "write", "reading Arrow and Parquet files") from error
        self._paths = list(paths)
        self.digests: list[FileInfo] = []
        opened = [_open(path) for path in self._paths]
        self.column = _choose_column(self._paths[0], opened[0].schema, columns)
        types = []
        for path, file in zip(self._paths, opened, strict=True):
            types.append(_token_type(path, file.schema, self.column))
        self.dtype: np.dtype[Any] = np.dtype(np.result_type(*types)) if len(set(types)) > 1 else types[0]
        if self.dtype.kind == "f":  # for uint64 and a signed type, NumPy's common dtype is float64
            raise ShardError(
                self._paths[0], f"has another type of {self.column!r} than other files: uint64 and signed"
            )
        self.left_out = sorted({n for file in opened for n in file.schema.names} - {self.column})
        limits = [file.max_token(self.column) for file in opened]
        self.max_token = None if None in limits else max(m for m in limits if m is not None)
        self.bytes = sum(path.stat().st_size for path in self._paths)
        self.files = len(self._paths)
        self.files_done = 0

    @property
    def facts(self) -> Mapping[str, object]:
        return {"column": self.column, "dtype": self.dtype.name}

    def blocks(self) -> Iterator[TokenBlock]:
        """Yield all rows in order, one block per Arrow record batch."""
        document = 0
        for path in self._paths:
            first, size, seen = document, path.stat().st_size, 0
            opened = _open(path)
            held: TokenBlock | None = None  # yielded after the next block is read: the last sets ends_file
            for array in _located(path, opened.arrays(self.column)):
                if held is not None:
                    yield held
                held = _block(path, array, document, document - first)
                seen += held.source_bytes
                document += len(array)
            if held is not None:
                rest = max(0, size - seen)
                yield TokenBlock(
                    held.tokens, held.ends, held.file, held.document, 0, held.source_bytes + rest, True
                )
            self.digests.append(FileInfo(path.name, size, hash_file(path, [SOURCE_HASH])))
            self.files_done += 1


def _block(path: Path, array: Any, document: int, row: int) -> TokenBlock:
    """Convert integer lists to a block, without a copy if possible; raises ShardError if a value is null.

    `document` is the first list's number in the source, `row` its number in the file.
    """
    import pyarrow as pa

    if array.null_count:
        at = row + int(array.is_null().to_numpy(zero_copy_only=False).argmax())
        raise ShardError(path, f"row {at:,} is null; drop null rows first")
    if pa.types.is_fixed_size_list(array.type):
        width = array.type.list_size
        ends = np.arange(1, len(array) + 1, dtype=np.int64) * width
        values = array.values.slice(array.offset * width, len(array) * width)
    else:
        offsets = array.offsets.to_numpy().astype(np.int64)
        ends = offsets[1:] - offsets[0]
        values = array.values.slice(int(offsets[0]), int(ends[-1]) if len(ends) else 0)
    if values.null_count:
        token = int(values.is_null().to_numpy(zero_copy_only=False).argmax())
        at = row + int(np.searchsorted(ends, token, side="right"))
        raise ShardError(path, f"row {at:,} has a null token; drop rows with null tokens first")
    return TokenBlock(values.to_numpy(), ends, str(path), document, 0, values.nbytes)


def _located(path: Path, arrays: Iterator[Any]) -> Iterator[Any]:
    """Yield each array after Arrow has validated it; an error of Arrow becomes a ShardError about `path`."""
    import pyarrow as pa

    try:
        for array in arrays:
            array.validate(full=True)
            yield array
    except (pa.ArrowException, OSError) as error:
        raise ShardError(path, f"is damaged or truncated: {error}") from error


class _Stream:
    """An .arrow file, in Arrow's stream format (which `datasets` writes) or in Arrow's file format."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self._path = path
        with path.open("rb") as handle:
            self._is_file = handle.read(6) == _ARROW_FILE_MAGIC
            if not self._is_file:
                # Check the end mark: Arrow reports no error if a stream is truncated between two batches.
                handle.seek(-min(len(_END_OF_STREAM), handle.seek(0, os.SEEK_END)), os.SEEK_END)
                if handle.read() != _END_OF_STREAM:
                    raise ShardError(path, "has no end-of-stream mark: it is truncated, or not an Arrow file")
        with pa.OSFile(str(path)) as source:
            self.schema: pa.Schema = self._reader(source).schema

    def max_token(self, column: str) -> int | None:
        return None

    def arrays(self, column: str) -> Iterator[Any]:
        import pyarrow as pa

        with pa.OSFile(str(self._path)) as source:
            reader = self._reader(source)
            number = reader.schema.get_field_index(column)
            if self._is_file:
                for batch in range(reader.num_record_batches):
                    yield reader.get_batch(batch).column(number)
            else:
                for record_batch in reader:
                    yield record_batch.column(number)

    def _reader(self, source: Any) -> Any:
        import pyarrow as pa

        return pa.ipc.open_file(source) if self._is_file else pa.ipc.open_stream(source)


class _Parquet:
    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            self._footer = Footer(file)
        self._metadata = self._footer.metadata
        self.schema: pa.Schema = self._metadata.schema.to_arrow_schema()

    def max_token(self, column: str) -> int | None:
        """Return the largest token by the row groups' statistics; None if a row group has no statistics."""
        found = []
        for limits in self._footer.limits:
            greatest = [high for path, (_, high) in limits.items() if path.split(".")[0] == column]
            if len(greatest) != 1 or not isinstance(greatest[0], int):
                return None
            found += greatest
        return max(found, default=None)

    def arrays(self, column: str) -> Iterator[Any]:
        import pyarrow.parquet as pq

        rows = max(1, self._metadata.num_rows)
        size = sum(self._metadata.row_group(g).total_byte_size for g in range(self._metadata.num_row_groups))
        batch = max(1, min(_MAX_BATCH_ROWS, rows * BLOCK_BYTES // max(1, size)))
        options: dict[str, Any] = {"pre_buffer": False, "page_checksum_verification": True}
        with pq.ParquetFile(self._path, buffer_size=1 << 20, **options) as file:
            for record_batch in file.iter_batches(batch_size=batch, columns=[column], use_threads=False):
                yield record_batch.column(record_batch.schema.get_field_index(column))


def _open(path: Path) -> _Stream | _Parquet:
    import pyarrow as pa

    try:
        file = _Parquet(path) if path.suffix == ".parquet" else _Stream(path)
        _ = file.schema.names  # raises UnicodeDecodeError, a ValueError, if a name is not valid UTF-8
        return file
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ShardError(path, f"cannot be read as {path.suffix or 'Arrow'}: {error}") from error


def _choose_column(path: Path, schema: pa.Schema, columns: Sequence[str] | None) -> str:
    import pyarrow as pa

    if columns is not None:
        if len(columns) != 1:
            raise ShardError(path, f"only one column of tokens can be converted, got {', '.join(columns)}")
        return columns[0]
    lists = [
        field.name for field in schema if _is_list(field.type) and pa.types.is_integer(field.type.value_type)
    ]
    known = [name for name in TOKEN_COLUMNS if name in schema.names]
    if len(known) == 1 or (not known and len(lists) == 1):
        return (known or lists)[0]
    described = ", ".join(f"{field.name} ({field.type})" for field in schema)
    problem = "has several columns of lists of integers" if lists else "has no column of lists of integers"
    raise ShardError(path, f"{problem}: {described[:500]}; name the column of tokens with --columns")


def _is_list(kind: pa.DataType) -> bool:
    import pyarrow as pa

    is_list: bool = (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )
    return is_list


def _token_type(path: Path, schema: pa.Schema, column: str) -> np.dtype[Any]:
    import pyarrow as pa

    number = schema.get_field_index(column)
    if number < 0:
        raise ShardError(path, f"has no column {column!r}; its columns: {', '.join(schema.names)[:500]}")
    kind = schema.field(number).type
    if not _is_list(kind) or not pa.types.is_integer(kind.value_type):
        raise ShardError(path, f"column {column!r} is {kind}, not a list of integers per row")
    dtype: np.dtype[Any] = np.dtype(kind.value_type.to_pandas_dtype())
    return dtype
