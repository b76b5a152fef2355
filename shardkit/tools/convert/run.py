"""Converts a dataset of another format to MDS or tar shards, checks it, and publishes it when it is complete.

The source is read forward once, a few megabytes at a time (`shuffle` spools its rows to disk). Shards are
written to `DST/.shardkit-converting` (on the target's file system, so publishing renames files and copies
nothing), read back by the readers that training uses, and compared by a digest of all values. Then they are
moved into place, the index last. The target is locked during the conversion. A killed conversion leaves no
index; the next one removes its files.

The card depends only on the source, its path as given, and the options: it holds no times and no other
absolute paths. The same command therefore writes the same bytes.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.card import CARD_NAME
from shardkit.datasets.dataset import open_dataset
from shardkit.display import Described, Facts, listed
from shardkit.errors import ShardError
from shardkit.files import move_durably, not_for_everyone, publish_bytes
from shardkit.formats.mds.encodings import encoding_of
from shardkit.formats.mds.index import TABLE_NAME
from shardkit.hints import answers_keywords
from shardkit.manifest import Manifest
from shardkit.progress import TransferListener, TransferProgress, make_listener
from shardkit.publish.api import publish_files
from shardkit.publish.contents import INDEX_NAMES, make_contents
from shardkit.publish.publication import RefusedError, Settings
from shardkit.publish.transports import LocalFiles, holds_dataset, locked_folder
from shardkit.storage.store import StorageOptions
from shardkit.storage.url import is_remote, local_path
from shardkit.synonyms import TRANSFER, WRITER
from shardkit.tools.convert.columns import KEY, npy_bytes, unchanged
from shardkit.tools.convert.cut import TokenCounts, choose_dtype, cut_rows, documents, equal_rows
from shardkit.tools.convert.detect import AnySource, Kind, open_source
from shardkit.tools.convert.read_dataset import DatasetRows, DatasetSamples, DatasetSource
from shardkit.tools.convert.shuffle import ShuffledRowWriter, ShuffledSampleWriter
from shardkit.tools.convert.source import (
    CutOptions,
    OutputOptions,
    Sample,
    SampleSource,
    Source,
    TokenBlock,
    TokenSource,
)
from shardkit.tools.convert.write import (
    CONTENT_HASH,
    MdsSampleWriter,
    RowWriter,
    SampleDigest,
    SampleWriter,
    TarSampleWriter,
    content_hasher,
)
from shardkit.units import format_bytes
from shardkit.version import __version__

STAGING_NAME = ".shardkit-converting"
CARD_VERSION = 1
TOKENS = "tokens"
_REPORT_BYTES = 1 << 22  # number of source bytes that are read between two progress reports
_THREADS = 8  # number of threads that publish files


@dataclass(frozen=True, slots=True, repr=False)
class ConvertResult(Described):
    """The result of a finished conversion; `counts` has the fields of `TokenCounts` if tokens were read."""

    source: str
    source_format: str
    target: str
    format: str
    fingerprint: str
    content_digest: str
    shards: int
    rows: int
    bytes: int
    stored_bytes: int
    columns: Mapping[str, str]
    left_out: Sequence[str]
    sequence_length: int | None
    counts: Mapping[str, int]
    verified: bool
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data for JSON."""
        return asdict(self) | {"seconds": round(self.seconds, 3)}

    def describe(self) -> tuple[str, Facts]:
        """Return a title and facts about the source and the dataset written."""
        facts = [
            ("from", f"{self.source} ({self.source_format})"),
            ("shards", f"{self.shards:,}, {self.format}, {format_bytes(self.stored_bytes)}"),
            ("rows", f"{self.rows:,}"),
            ("columns", listed([f"{name} ({encoding})" for name, encoding in self.columns.items()])),
        ]
        facts += [(name.replace("_", " "), f"{count:,}") for name, count in self.counts.items()]
        if self.left_out:
            facts.append(("left out", listed(list(self.left_out))))
        if self.verified:
            facts.append(("verified", "read back and equal to the source"))
        return f"Dataset {self.target}", [*facts, ("fingerprint", self.fingerprint)]


@dataclass(slots=True)
class _Written:
    """Facts about the shards that a conversion has written to the staging folder."""

    manifest: Manifest
    digest: str
    columns: dict[str, str]
    column: str | None = None
    has_keys: bool = False
    counts: TokenCounts | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    left_out: Sequence[str] = ()

    @property
    def bytes(self) -> int:
        return sum(shard.raw.bytes for shard in self.manifest.shards)

    @property
    def stored_bytes(self) -> int:
        return sum(shard.stored.bytes for shard in self.manifest.shards)

    @property
    def sequence_length(self) -> int | None:
        """The number of tokens per row; None unless all rows are one-axis integer arrays of one length."""
        if self.column is None:
            return None
        _, dtype, shape = next(iter(self.columns.values())).split(":")
        return int(shape) if shape.isdecimal() and np.dtype(dtype).kind in "ui" else None


def _path_or_url(source: str | os.PathLike[str]) -> str:
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            f"source must be a path or URL, not a {type(source).__name__}; `sk.MdsWriter` "
            "writes records in memory, and `build(recipe, documents=…)` texts"
        )
    return os.fspath(source)


_GROUPED = {
    one.name: f"`{argument}={kind.__name__}({one.name}=…)`"
    for argument, kind in (("output", OutputOptions), ("cut", CutOptions))
    for one in fields(kind)
}


@answers_keywords({**TRANSFER, **WRITER, **_GROUPED})
@not_for_everyone()
def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    source_format: Kind | None = None,
    output: OutputOptions | None = None,
    cut: CutOptions | None = None,
    columns: Sequence[str] | None = None,
    verify: bool = True,
    replace: bool = False,
    storage: StorageOptions | None = None,
    progress: bool | TransferListener = True,
) -> ConvertResult:
    """Write the dataset at `source` into the folder `target` as MDS or tar shards.

    Sources: datasets that `open_dataset` opens (also URLs); litdata chunk folders; Megatron .bin/.idx pairs;
    .bin files of nanoGPT and llm.c; Hugging Face `save_to_disk` folders, .arrow and .parquet files; TFRecord
    files. Rows of one length are copied; `cut` defines how documents and streams become rows. `columns`
    selects columns of the source. `verify` reads the result back before it is published. Raises ShardError at
    damage, RefusedError if `target` has other content (`replace` permits a dataset), ValueError at conflicts.
    """
    start = time.monotonic()
    output, cut = output or OutputOptions(), cut or CutOptions()
    if is_remote(target):
        raise ShardError(target, "is a URL: convert into a local folder, then `shardkit upload` it")
    name, folder = _path_or_url(source), local_path(target)
    if not is_remote(name) and folder.exists() and folder.resolve() == local_path(name).resolve():
        raise ShardError(folder, "is both source and target; choose another target")
    if holds_dataset(folder) and not replace:
        raise RefusedError(str(folder), "already holds a dataset; use --replace to replace it")
    opening = open_source(name, source_format, output, cut, columns, storage)
    with make_listener(progress) as listener, opening as opened, _staging(folder) as work:
        with ThreadPoolExecutor(1) as background:
            conversion = _Conversion(opened, name, work, output, cut, background, listener)
            written = conversion.write()
        if not written.manifest.samples:
            raise ShardError(name, "has no rows: there is nothing to convert")
        write_card(work, name, opened, output, cut, written)
        if verify:
            conversion.report("verify")
            _check(work, written)
        publish_staged(work, folder, replace=replace)
    return ConvertResult(
        source=name,
        source_format=opened.kind,
        target=str(folder),
        format=output.format,
        fingerprint=written.manifest.fingerprint,
        content_digest=written.digest,
        shards=len(written.manifest.shards),
        rows=written.manifest.samples,
        bytes=written.bytes,
        stored_bytes=written.stored_bytes,
        columns=written.columns,
        left_out=tuple(written.left_out),
        sequence_length=written.sequence_length,
        counts={} if written.counts is None else asdict(written.counts),
        verified=verify,
        seconds=time.monotonic() - start,
    )


class _Conversion:
    """Writes the shards of one source into the staging folder `work`."""

    def __init__(
        self,
        source: AnySource,
        name: str,
        work: Path,
        output: OutputOptions,
        cut: CutOptions,
        background: Executor,
        listener: TransferListener,
    ) -> None:
        self._source, self._name, self._cut = source, name, cut
        self._work, self._output, self._background = work, output, background
        self._listener, self._start = listener, time.monotonic()
        self._done = self._reported = 0

    def write(self) -> _Written:
        """Write the shards and the index of the dataset."""
        source = self._source
        if isinstance(source, TokenSource):
            return self._write_tokens(source)
        if self._cut != CutOptions():
            raise ShardError(
                self._name,
                "is not a source of tokens: its rows cannot be cut, padded or changed to another type",
            )
        if isinstance(source, DatasetRows):
            writer = self._row_writer(source.column, source.dtype, source.shape)
            for rows, size in source.rows():
                writer.append(rows.reshape(-1))
                self._count(size)
            return self._finish_rows(writer, source.column, None)
        assert isinstance(source, SampleSource)
        return self._write_samples(source)

    def _write_tokens(self, source: TokenSource) -> _Written:
        cut, dtype, counts = self._cut, choose_dtype(source, self._cut), TokenCounts()
        if not source.has_documents and cut.sequence_length is None:
            raise ShardError(self._name, "does not record where documents end: give --sequence-length")
        if not source.has_documents and cut.eos is not None:
            problem = "does not record where documents end, so --eos cannot be used; --pad fills the last row"
            raise ShardError(self._name, problem)
        if cut.keep_lengths:
            return self._write_documents(source, dtype)
        blocks = self._counted(source.blocks())
        writer: RowWriter | None = None
        if cut.sequence_length is not None:
            writer = self._row_writer(TOKENS, dtype, (cut.sequence_length,))
            cut_rows(blocks, writer, cut, counts)
        else:
            for length, tokens in equal_rows(blocks, dtype, counts):
                writer = writer or self._row_writer(TOKENS, dtype, (length,))
                writer.append(tokens)
        if writer is None:
            raise ShardError(self._name, "has no rows")
        written = self._finish_rows(writer, TOKENS, counts, source.left_out)
        counts.check(written.manifest.samples * writer.row_values)
        return written

    def _write_documents(self, source: TokenSource, dtype: np.dtype[Any]) -> _Written:
        """Write each document as a row of its own length."""
        counts, encoding, cells = TokenCounts(), f"ndarray:{dtype.name}", 0
        is_mds = self._output.format == "mds"
        name = TOKENS if is_mds else f"{TOKENS}.npy"
        writer = self._sample_writer({TOKENS: encoding})
        encode = encoding_of(encoding).encode if is_mds else npy_bytes
        for where, tokens in documents(self._counted(source.blocks()), dtype, self._cut, counts):
            writer.write(Sample({name: encode(tokens)}, None, where, 0))
            cells += len(tokens)
        counts.check(cells)
        manifest, digest = writer.finish()
        return _Written(manifest, digest, {TOKENS: encoding}, counts=counts, left_out=source.left_out)

    def _write_samples(self, source: SampleSource) -> _Written:
        keys = {KEY: "str"} if source.has_keys and self._output.format == "mds" else {}
        columns = {**source.columns, **keys}
        writer = self._sample_writer(columns)
        for sample in source.samples():
            writer.write(sample)
            self._count(sample.source_bytes)
        manifest, digest = writer.finish()
        return _Written(manifest, digest, columns, has_keys=source.has_keys, names=source.names)

    def _row_writer(self, column: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> RowWriter:
        args, seed = (self._work, self._output, self._background), self._output.shuffle
        if seed is None:
            return RowWriter(*args, column=column, dtype=dtype, shape=shape)
        size = self._source.bytes
        return ShuffledRowWriter(*args, column=column, dtype=dtype, shape=shape, seed=seed, source_bytes=size)

    def _sample_writer(self, columns: Mapping[str, str]) -> SampleWriter:
        writer: SampleWriter
        if self._output.format == "mds":
            writer = MdsSampleWriter(self._work, self._output, columns)
        else:
            writer = TarSampleWriter(self._work, self._output)
        seed = self._output.shuffle
        return writer if seed is None else ShuffledSampleWriter(writer, self._work, seed, self._source.bytes)

    def _finish_rows(
        self, writer: RowWriter, column: str, counts: TokenCounts | None, left_out: Sequence[str] = ()
    ) -> _Written:
        manifest, digest = writer.finish()
        columns = dict.fromkeys([column], manifest.shards[0].columns[0].encoding) if manifest.shards else {}
        return _Written(manifest, digest, columns, column=column, counts=counts, left_out=left_out)

    def _counted(self, blocks: Iterable[TokenBlock]) -> Iterator[TokenBlock]:
        for block in blocks:
            yield block
            self._count(block.source_bytes)

    def _count(self, size: int) -> None:
        """Add `size` bytes of the source to the progress."""
        self._done += size
        if self._done - self._reported >= _REPORT_BYTES:
            self.report("convert")

    def report(self, step: str) -> None:
        """Report the progress of `step` ("convert" or "verify") to the listener."""
        self._reported, source = self._done, self._source
        done = source.bytes if step == "verify" else min(self._done, source.bytes)
        seconds = time.monotonic() - self._start
        self._listener(
            TransferProgress(step, source.files_done, source.files, done, source.bytes, done, seconds)
        )


def write_card(
    work: Path,
    path: str,
    source: Source,
    output: OutputOptions,
    cut: CutOptions,
    written: _Written,
) -> None:
    """Write the card, dataset.json, of a converted dataset to `work`."""
    manifest, length = written.manifest, written.sequence_length
    card: dict[str, Any] = {
        "card_version": CARD_VERSION,
        "shardkit_version": __version__,
        "fingerprint": manifest.fingerprint,
        "format": manifest.format,
        "shards": len(manifest.shards),
        "samples": manifest.samples,
        "bytes": written.bytes,
        "stored_bytes": written.stored_bytes,
        "content_digest": {CONTENT_HASH: written.digest},
    }
    if length is not None:
        [encoding] = written.columns.values()
        card |= {"sequence_length": length, "dtype": encoding.split(":")[1]}
    if written.counts is not None:
        counts = written.counts
        if length is not None:
            card |= {"tokens": manifest.samples * length - counts.padding, "padding": counts.padding}
        card["conversion"] = asdict(counts)
    if written.names and output.format == "mds" and source.facts.get("format") == "tar":
        card["members"] = dict(written.names)
    if written.names and output.format == "wds":
        # A conversion back to MDS restores names and encodings from this entry (`columns.to_values`).
        card["columns"] = {
            extension: {"column": name, "encoding": written.columns[extension]}
            for extension, name in written.names.items()
        }
    card["converted_from"] = {
        "path": path,
        "source_format": source.kind,
        **source.facts,
        "files": [{"name": f.basename, "bytes": f.bytes, **f.hashes} for f in source.digests],
        "left_out": list(written.left_out),
        "options": {key: value for key, value in asdict(cut).items() if value not in (None, False)},
    }
    if output.shuffle is not None:
        card["shuffled"] = True
        card["converted_from"]["options"]["shuffle"] = output.shuffle
    elif isinstance(source, DatasetSource) and source.is_shuffled:
        card["shuffled"] = True
    if (blocks := manifest.blocks) is not None:
        card["files"] = {blocks.basename: {"bytes": blocks.bytes, **blocks.hashes}}
    publish_bytes(work / CARD_NAME, json.dumps(card, indent=2).encode() + b"\n")


def _check(folder: Path, written: _Written) -> None:
    """Read the written shards; raise ShardError unless their digest is the digest of the source's values."""
    with open_dataset(folder, decode=False) as dataset:
        if written.column is not None:
            rows_digest = content_hasher()
            for rows, _ in DatasetRows(dataset, dataset.columns[0], written.column).rows():
                rows_digest.update(rows.reshape(-1).view(np.uint8).data)
            digest = rows_digest.hexdigest()
        else:
            samples = DatasetSamples(dataset, unchanged(dataset.columns), has_keys=written.has_keys)
            sample_digest = SampleDigest()
            for sample in samples.samples():
                sample_digest.add(sample)
            digest = sample_digest.hexdigest()
        if digest != written.digest:
            raise ShardError(
                dataset.location,
                f"has digest {digest} when read back, but the source has {written.digest}: the disk or the "
                "memory is faulty; nothing was published",
            )


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """Lock the folder `target`, and yield an empty staging folder in it that is always removed at the end."""
    with locked_folder(target):
        work = target / STAGING_NAME
        try:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
        except OSError as error:
            raise ShardError(target, f"cannot be written: {error.strerror or error}") from error
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


def publish_staged(work: Path, target: Path, *, replace: bool) -> None:
    """Move the dataset in `work` into the folder `target`, the index last."""
    name = next(name for name in INDEX_NAMES if (work / name).exists())
    index, card = (work / name).read_bytes(), (work / CARD_NAME).read_bytes()
    table = (work / TABLE_NAME).read_bytes() if (work / TABLE_NAME).exists() else None
    contents = make_contents(str(target), name, index, card, table)
    files = LocalFiles({file.basename: work / file.basename for file in contents.files})
    publish_files(target, contents, files, Settings(_THREADS, replace=replace), place=move_durably)
