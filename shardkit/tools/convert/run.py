"""`convert`: any dataset that a reader knows into MDS or tar shards, checked, and seen only when it is whole.

Read forward once, a few megabytes at a time; written into a folder inside the target; read back and compared;
then published, the index last. The same source and options give the same bytes. A conversion that is killed
leaves no index, and the same command begins anew.

The card of a converted dataset: what it holds, and what it was made from.

A function of the source, as it was named, and the options: no times, no absolute paths that were not given,
so the same command gives the same bytes.

A converted dataset read back: the digest of all its values must be that of what was read from the source.

Whole arrays are hashed as they lie in the shards, samples value by value, by the readers that training uses.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import shardkit
from shardkit.datasets.dataset import Dataset, open_dataset
from shardkit.datasets.locate import CARD_NAME
from shardkit.errors import ShardError
from shardkit.files import publish_bytes
from shardkit.formats.mds.encodings import encoding_of
from shardkit.formats.mds.shard import MdsShard
from shardkit.formats.tar.shard import TarShard
from shardkit.manifest import Manifest
from shardkit.progress import TransferListener, TransferProgress, make_listener
from shardkit.storage.store import StorageOptions
from shardkit.storage.url import is_remote, local_path
from shardkit.tools.convert.columns import KEY, npy_bytes
from shardkit.tools.convert.cut import TokenCounts, choose_dtype, copy_rows, cut_rows, documents
from shardkit.tools.convert.detect import AnySource, Kind, open_source
from shardkit.tools.convert.source import (
    BLOCK_BYTES,
    CutOptions,
    OutputOptions,
    RowSource,
    Sample,
    SampleSource,
    Source,
    TokenSource,
)
from shardkit.tools.convert.staging import publish_staged, refuse_target, staging
from shardkit.tools.convert.write import (
    CONTENT_HASH,
    MdsSampleWriter,
    RowWriter,
    SampleDigest,
    SampleWriter,
    TarSampleWriter,
    content_hasher,
)

if TYPE_CHECKING:
    pass  # MERGED

__all__ = ["ConvertResult", "check_rows", "check_samples", "convert", "write_card"]

CARD_VERSION = 1


def write_card(
    work: Path,
    path: str,
    source: Source,
    output: OutputOptions,
    cut: CutOptions,
    written: Written,
    length: int | None,
) -> None:
    """Put dataset.json beside the shards."""
    manifest = written.manifest
    card: dict[str, Any] = {
        "card_version": CARD_VERSION,
        "shardkit_version": shardkit.__version__,
        "fingerprint": manifest.fingerprint,
        "format": manifest.format,
        "shards": len(manifest.shards),
        "samples": manifest.samples,
        "bytes": sum(shard.raw.bytes for shard in manifest.shards),
        "stored_bytes": sum(shard.stored.bytes for shard in manifest.shards),
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
        # What `to_values` needs to give columns their names and encodings again.
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
    publish_bytes(work / CARD_NAME, json.dumps(card, indent=2).encode() + b"\n")


def check_rows(folder: Path, column: str, expected: str) -> None:
    """ShardError unless the rows of `column` have the digest `expected`."""
    digest = content_hasher()
    with open_dataset(folder) as dataset:
        for number in range(len(dataset.manifest.shards)):
            rows = dataset.shard(number).fixed_rows(column)
            if rows is None:
                raise ShardError(dataset.where(number), "holds other rows than were written")
            step = max(1, BLOCK_BYTES // max(1, rows[:1].nbytes))
            for start in range(0, len(rows), step):
                digest.update(np.ascontiguousarray(rows[start : start + step]).view(np.uint8).data)
            dataset.keep_only(())
        _compare(dataset, digest.hexdigest(), expected)


def check_samples(folder: Path, expected: str, *, has_keys: bool) -> None:
    """ShardError unless all values of all samples have the digest `expected`."""
    digest = SampleDigest()
    with open_dataset(folder, decode=False) as dataset:
        for number in range(len(dataset.manifest.shards)):
            shard = dataset.shard(number)
            for row in range(len(shard)):
                digest.add(_payloads(shard, row, has_keys=has_keys))
            dataset.keep_only(())
        _compare(dataset, digest.hexdigest(), expected)


def _payloads(shard: object, row: int, *, has_keys: bool) -> dict[str, bytes | memoryview]:
    if isinstance(shard, MdsShard):
        return dict(shard.payloads(row))
    assert isinstance(shard, TarShard)
    payloads: dict[str, bytes | memoryview] = {}
    for name, value in shard.sample(row).items():
        if name == KEY:
            if has_keys:
                payloads[KEY] = str(value).encode("utf-8", "surrogateescape")
        else:
            assert isinstance(value, bytes)
            payloads[name] = value
    return payloads


def _compare(dataset: Dataset, digest: str, expected: str) -> None:
    if digest != expected:
        raise ShardError(
            dataset.location,
            f"holds other rows than were read from the source (digest {digest}, expected {expected}): the "
            "disk or the memory is not to be trusted; nothing was published",
        )


TOKENS = "tokens"

_REPORT_BYTES = 1 << 22  # of the source between two reports


@dataclass(frozen=True, slots=True)
class ConvertResult:
    """What was made. `tokens` counts those of the source, `rows` what was written."""

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
        """Plain data for JSON."""
        return asdict(self) | {"seconds": round(self.seconds, 3)}


@dataclass(frozen=True, slots=True)
class Place:
    """Where and how to write."""

    work: Path
    output: OutputOptions
    background: Executor

    def rows(self, column: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> RowWriter:
        """A writer of one fixed column."""
        return RowWriter(self.work, self.output, self.background, column=column, dtype=dtype, shape=shape)

    def samples(self, columns: Mapping[str, str]) -> SampleWriter:
        """A writer of samples of `columns`."""
        if self.output.format == "mds":
            return MdsSampleWriter(self.work, self.output, columns)
        return TarSampleWriter(self.work, self.output)


class Meter:
    """Counts bytes of a source, called `where` in messages, and reports now and then."""

    def __init__(self, listener: TransferListener, source: Source, where: str) -> None:
        self._listener, self._source, self.where = listener, source, where
        self._start = time.monotonic()
        self._done = self._reported = 0

    def add(self, size: int) -> None:
        """`size` more bytes of the source are converted."""
        self._done += size
        if self._done - self._reported >= _REPORT_BYTES:
            self._report("convert")

    def step(self, name: str) -> None:
        """The next step begins."""
        self._done = self._source.bytes
        self._report(name)

    def _report(self, step: str) -> None:
        self._reported, source = self._done, self._source
        seconds = time.monotonic() - self._start
        done = min(self._done, source.bytes)
        self._listener(
            TransferProgress(step, source.files_done, source.files, done, source.bytes, done, seconds)
        )


@dataclass(slots=True)
class Written:
    """What lies in the staging folder."""

    manifest: Manifest
    digest: str
    columns: dict[str, str]
    column: str | None = None
    has_keys: bool = False
    counts: TokenCounts | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    left_out: Sequence[str] = ()


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

    Sources: whatever `open_dataset` opens (also URLs); litdata's chunk folders; Megatron's .bin/.idx; .bin
    files of nanoGPT and llm.c; Hugging Face `save_to_disk` folders, .arrow and .parquet files. Rows of one
    length are copied; `cut` says how documents and streams become rows. `columns` chooses, where there are
    several. `verify` reads the result back before it is published. ShardError names file and place of what is
    damaged, RefusedError what is at the target; ValueError is for options that contradict themselves.
    """
    start = time.monotonic()
    output, cut = output or OutputOptions(), cut or CutOptions()
    name, folder = os.fspath(source), local_path(target)
    if is_remote(target):
        raise ShardError(target, "is not on this machine: convert into a folder, then `shardkit upload` it")
    if not is_remote(name) and folder.exists() and folder.resolve() == local_path(name).resolve():
        raise ShardError(folder, "is source and target at once; choose another target")
    refuse_target(folder, replace=replace)
    opening = open_source(name, source_format, output, cut, columns, storage)
    with make_listener(progress) as listener, opening as opened, staging(folder) as work:
        meter = Meter(listener, opened, name)
        with ThreadPoolExecutor(1) as background:
            written = _write(opened, Place(work, output, background), cut, meter)
        if not written.manifest.samples:
            raise ShardError(name, "gives no row: there is nothing to convert")
        length = _sequence_length(written)
        write_card(work, name, opened, output, cut, written, length)
        if verify:
            meter.step("verify")
            _read_back(work, written)
        publish_staged(work, folder, replace=replace)
        kind = opened.kind
    return _result(name, kind, folder, output, written, length, verify, time.monotonic() - start)


def _read_back(work: Path, written: Written) -> None:
    """ShardError unless the shards hold what was read from the source."""
    if written.column is not None:
        check_rows(work, written.column, written.digest)
    else:
        check_samples(work, written.digest, has_keys=written.has_keys)


def _write(source: AnySource, place: Place, cut: CutOptions, meter: Meter) -> Written:
    if isinstance(source, TokenSource):
        return _write_tokens(source, place, cut, meter)
    if cut != CutOptions():
        raise ShardError(
            meter.where, "has rows of its own, which cannot be cut, padded or given another type"
        )
    if isinstance(source, RowSource):
        return _write_rows(source, place, meter)
    assert isinstance(source, SampleSource)
    return _write_samples(source, place, meter)


def _write_rows(source: RowSource, place: Place, meter: Meter) -> Written:
    writer = place.rows(source.column, source.dtype, source.shape)
    for _, rows, size in source.rows():
        writer.append(np.ascontiguousarray(rows).reshape(-1))
        meter.add(size)
    return _rows_written(writer, source.column, None)


def _rows_written(
    writer: RowWriter, column: str, counts: TokenCounts | None, left_out: Sequence[str] = ()
) -> Written:
    manifest, digest = writer.finish()
    columns = {c.name: c.encoding for shard in manifest.shards[:1] for c in shard.columns}
    return Written(manifest, digest, columns, column=column, counts=counts, left_out=left_out)


def _write_tokens(source: TokenSource, place: Place, cut: CutOptions, meter: Meter) -> Written:
    dtype = choose_dtype(source, cut)
    if not source.has_documents:
        if cut.sequence_length is None:
            raise ShardError(meter.where, "does not say where documents end: choose a --sequence-length")
        if cut.eos is not None:
            problem = "does not say where documents end, so no eos can be added: --pad fills the last row"
            raise ShardError(meter.where, problem)
    if cut.keep_lengths:
        return _write_documents(source, place, cut, meter, dtype)
    if cut.sequence_length is not None:
        writer = place.rows(TOKENS, dtype, (cut.sequence_length,))
        counts = cut_rows(source.blocks(), writer, cut, meter.add)
    else:
        found, counts = copy_rows(
            source.blocks(), lambda length: place.rows(TOKENS, dtype, (length,)), dtype, meter.add
        )
        if found is None:
            raise ShardError(meter.where, "has no rows")
        writer = found
    written = _rows_written(writer, TOKENS, counts, source.left_out)
    counts.check(written.manifest.samples * writer.row_values)
    return written


def _write_documents(
    source: TokenSource, place: Place, cut: CutOptions, meter: Meter, dtype: np.dtype[Any]
) -> Written:
    """Each document a row of its own length."""
    counts, encoding, cells = TokenCounts(), f"ndarray:{dtype.name}", 0
    is_mds = place.output.format == "mds"
    name = TOKENS if is_mds else f"{TOKENS}.npy"
    writer = place.samples({TOKENS: encoding})
    encode = encoding_of(encoding).encode if is_mds else npy_bytes
    for where, tokens, size in documents(source.blocks(), dtype, cut, counts):
        writer.write(Sample({name: encode(tokens)}, None, where, size))
        cells += len(tokens)
        meter.add(size)
    counts.check(cells)
    manifest, digest = writer.finish()
    return Written(manifest, digest, {name: encoding}, counts=counts, left_out=source.left_out)


def _write_samples(source: SampleSource, place: Place, meter: Meter) -> Written:
    keys = {KEY: "str"} if source.has_keys and place.output.format == "mds" else {}
    columns = {**source.columns, **keys}
    writer = place.samples(columns)
    for sample in source.samples():
        writer.write(sample)
        meter.add(sample.source_bytes)
    manifest, digest = writer.finish()
    return Written(manifest, digest, columns, has_keys=source.has_keys, names=source.names)


def _sequence_length(written: Written) -> int | None:
    """Tokens of a row, if all rows are one axis of so many integers."""
    if written.column is None:
        return None
    _, dtype, shape = next(iter(written.columns.values())).split(":")
    return int(shape) if shape.isdecimal() and np.dtype(dtype).kind in "ui" else None


def _result(
    name: str,
    kind: str,
    target: Path,
    output: OutputOptions,
    written: Written,
    length: int | None,
    verified: bool,
    seconds: float,
) -> ConvertResult:
    manifest = written.manifest
    return ConvertResult(
        source=name,
        source_format=kind,
        target=str(target),
        format=output.format,
        fingerprint=manifest.fingerprint,
        content_digest=written.digest,
        shards=len(manifest.shards),
        rows=manifest.samples,
        bytes=sum(shard.raw.bytes for shard in manifest.shards),
        stored_bytes=sum(shard.stored.bytes for shard in manifest.shards),
        columns=written.columns,
        left_out=tuple(written.left_out),
        sequence_length=length,
        counts={} if written.counts is None else asdict(written.counts),
        verified=verified,
        seconds=seconds,
    )
