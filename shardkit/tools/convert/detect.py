"""Detects the format of a path from its files, and opens the source that reads it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import Literal, get_args

from shardkit.datasets.dataset import open_dataset
from shardkit.errors import ShardError
from shardkit.formats.tar.shard_list import is_pattern
from shardkit.formats.tfrecord import is_tfrecord_name
from shardkit.formats.tokens import refuse_two_kinds
from shardkit.formats.trainers import TRAINER_FORMATS
from shardkit.storage.store import StorageOptions
from shardkit.storage.url import is_remote, local_path
from shardkit.tools.convert.read_arrow import ArrowSource, saved_files
from shardkit.tools.convert.read_dataset import DatasetRows, DatasetSamples, DatasetTokens, dataset_source
from shardkit.tools.convert.read_litdata import LitdataSamples, LitdataTokens, is_litdata, litdata_source
from shardkit.tools.convert.read_tfrecord import TFRecordSamples, TFRecordTokens, tfrecord_files
from shardkit.tools.convert.read_tokens import MegatronSource, NanogptSource, megatron_files
from shardkit.tools.convert.source import CutOptions, OutputOptions

Kind = Literal["dataset", "huggingface", "litdata", "megatron", "nanogpt", "tfrecord"]

AnySource = (
    DatasetRows | DatasetTokens | DatasetSamples | ArrowSource | LitdataSamples | LitdataTokens
    | MegatronSource | NanogptSource | TFRecordSamples | TFRecordTokens
)  # fmt: skip
_ARROW = (".arrow", ".parquet")


def find_kind(path: str) -> Kind:
    """Return the format at a path, pattern or URL; "dataset" if unknown: `open_dataset` reports the error."""
    if is_remote(path):
        return "dataset"
    place = local_path(path)
    if place.is_dir():
        return _kind_of_folder(place)
    files = _files(path) if place.is_file() or is_pattern(path) else [place]
    if files and all(is_tfrecord_name(file.name) for file in files):
        return "tfrecord"
    suffixes = {file.suffix for file in files}
    if suffixes and suffixes <= {*_ARROW}:
        return "huggingface"
    if megatron_files(place) is not None and not is_pattern(path):
        return "megatron"
    return "nanogpt" if suffixes == {".bin"} else "dataset"


def _kind_of_folder(folder: Path) -> Kind:
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        return "huggingface"
    if is_litdata(folder):
        return "litdata"
    if (folder / "index.json").is_file() or (folder / "shards.json").is_file():
        return "dataset"
    suffixes = {file.suffix for file in folder.iterdir() if file.is_file()}
    if ".tar" not in suffixes and suffixes & {*_ARROW}:
        return "huggingface"
    if ".tar" not in suffixes and any(
        file.is_file() and is_tfrecord_name(file.name) for file in folder.iterdir()
    ):
        return "tfrecord"
    if ".idx" in suffixes and ".bin" in suffixes:
        return "megatron"
    return "nanogpt" if ".bin" in suffixes and ".tar" not in suffixes else "dataset"


@contextmanager
def open_source(
    path: str,
    kind: Kind | None,
    output: OutputOptions,
    cut: CutOptions,
    columns: Sequence[str] | None,
    storage: StorageOptions | None,
) -> Iterator[AnySource]:
    """Open the source at `path` for a `with` block; raises ShardError if it is damaged or not supported."""
    kind = kind or find_kind(path)
    if kind not in get_args(Kind):
        raise ValueError(f"the source format must be one of {', '.join(get_args(Kind))}, not {kind!r}")
    if kind == "dataset":
        # `allow_pickle` opens datasets that also have columns of pickles; no pickle is decoded or converted.
        with open_dataset(path, allow_pickle=True, decode=False, storage=storage) as dataset:
            if dataset.manifest.format in TRAINER_FORMATS:
                trainer = TRAINER_FORMATS[dataset.manifest.format].trainer
                raise ShardError(
                    path,
                    f"holds documents for {trainer}, without rows: a loader cuts rows in place with "
                    "sequence_length=2048, and shardkit pack makes them from a token store",
                )
            if dataset.manifest.format == "row_files":
                problem = (
                    "holds row files, which are converted from one local folder of Parquet or Arrow only"
                )
                raise ShardError(path, f"{problem}; a loader reads them in place, from here too")
            yield dataset_source(dataset, output.format, columns, cut)
        return
    if is_remote(path):
        raise ShardError(path, f"{kind} files can only be read from a local path: download them first")
    yield _open_files(path, kind, output, cut, columns)


def _open_files(
    path: str, kind: Kind, output: OutputOptions, cut: CutOptions, columns: Sequence[str] | None
) -> AnySource:
    place = local_path(path)
    if kind == "litdata":
        _refuse_columns(path, kind, columns)
        return litdata_source(place, output.format)
    if kind == "huggingface":
        saved = place.is_dir() and any((place / n).is_file() for n in ("state.json", "dataset_dict.json"))
        return ArrowSource(saved_files(place) if saved else _named(path, _ARROW), columns)
    if kind == "tfrecord":
        return _tfrecords(path, output, cut, columns)
    _refuse_columns(path, kind, columns)
    if kind == "megatron":
        return MegatronSource(*_megatron_pair(place))
    return NanogptSource(_nanogpt_files(path), cut.source_dtype)


def _tfrecords(
    path: str, output: OutputOptions, cut: CutOptions, columns: Sequence[str] | None
) -> TFRecordSamples | TFRecordTokens:
    place = local_path(path)
    files = tfrecord_files(place) if place.is_dir() else _files(path)
    if not files:
        raise ShardError(path, "matches no TFRecord files")
    if cut.changes_rows or cut.dtype is not None:
        return TFRecordTokens(files, columns)
    return TFRecordSamples(files, output.format, columns)


def _refuse_columns(path: str, kind: str, columns: Sequence[str] | None) -> None:
    if columns is not None:
        raise ShardError(path, f"--columns cannot be used with {kind} files: all tokens are converted")


def _files(path: str) -> list[Path]:
    """Return the file at `path`, or the files that match if `path` is a pattern, sorted."""
    if os.path.exists(path) or not is_pattern(path):  # noqa: PTH110  a file may be called "a[1].bin"
        return [local_path(path)]
    return [Path(name) for name in sorted(glob(path, recursive=True)) if Path(name).is_file()]  # noqa: PTH207


def _named(path: str, suffixes: Sequence[str]) -> list[Path]:
    """Return the file at `path`, a folder's files that end in `suffixes`, or all files matching a pattern."""
    place = local_path(path)
    if place.is_dir():
        files = sorted(file for file in place.iterdir() if file.suffix in suffixes)
    else:
        files = _files(path)
    if not files:
        raise ShardError(path, f"matches no {' or '.join(suffixes)} files")
    return files


def _nanogpt_files(path: str) -> list[Path]:
    files = _named(path, (".bin",))
    refuse_two_kinds(path, [file.name for file in files])
    return files


def _megatron_pair(place: Path) -> tuple[Path, Path]:
    if place.is_dir():
        indexes = sorted(place.glob("*.idx"))
        if len(indexes) != 1:
            names = ", ".join(index.stem for index in indexes[:5])
            raise ShardError(place, f"has {len(indexes)} Megatron indexes ({names}): give the path of one")
        place = indexes[0]
    pair = megatron_files(place)
    if pair is None:
        raise ShardError(place, "has no .idx file next to it, which a Megatron dataset needs")
    return pair
