"""Reads a split as batches of documents, with every record accounted for; has the readers of plain text.

Each record of the split ends up in a batch or in quarantine, and is counted in the ledger either way. One bad
record costs itself only. A damaged member of a compressed file costs all its records, because a checksum
confirms a member as a whole, and everything after it. Memory is bounded by one batch plus one record. Record
numbers are line numbers or row numbers within the file, from 0. Blank lines count as lines but are not
records.

The reader of a format passes records to the sink, in order, and yields between them (in tables: between
batches of rows); there, a full batch may be flushed. Small files that are read together share batches.
"""

from __future__ import annotations

import resource
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa

from shardkit.errors import BuildError, RecipeError
from shardkit.writers.inputs.decompress import ContainerError
from shardkit.writers.inputs.fields import NamedFields
from shardkit.writers.inputs.files import open_input
from shardkit.writers.inputs.lines import Lines
from shardkit.writers.inputs.masking import Masking
from shardkit.writers.inputs.read_by_function import UserReader, read_by_function
from shardkit.writers.inputs.read_columnar import read_arrow, read_parquet
from shardkit.writers.inputs.read_csv import read_csv
from shardkit.writers.inputs.read_epub import read_epub
from shardkit.writers.inputs.read_json import read_json, read_values, take_json
from shardkit.writers.inputs.read_shards import read_mds, read_wds
from shardkit.writers.inputs.read_stackexchange import read_stackexchange
from shardkit.writers.inputs.read_tfrecord import read_tfrecord
from shardkit.writers.inputs.records import LimitReachedError, OtherFormatError, RecordSink, SuspectDataError
from shardkit.writers.inputs.scan import Split
from shardkit.writers.recipe.inputs import READER, InputConfig
from shardkit.writers.rows.documents import joined_batches
from shardkit.writers.rows.ledger import Ledger, Quarantine, check_bad_fraction

__all__ = ["SuspectDataError", "SuspectFilesError", "read_parts", "read_split", "within_memory"]

Reader = Callable[[RecordSink, InputConfig], Iterator[None]]
_READERS: dict[str, Reader] = {
    "parquet": read_parquet,
    "arrow": read_arrow,
    "csv": read_csv,
    "json": read_json,
    "mds": read_mds,
    "wds": read_wds,
    "stackexchange": read_stackexchange,
    "epub": read_epub,
    "tfrecord": read_tfrecord,
}
_RECORD_COPIES = 8  # copies of a large record in memory while it is decoded, parsed and put into a batch
_HEAD_BYTES = 256  # bytes of a paragraph that are kept for the quarantine
_MAX_WINDOW_BYTES = 1 << 31  # largest window of zstd on 64-bit machines
_BOM = b"\xef\xbb\xbf"


class SuspectFilesError(Exception):
    """A split has untrusted data in the files `suspects`: discard all of the split, and read it again."""

    def __init__(self, suspects: Mapping[str, SuspectDataError]) -> None:
        super().__init__(", ".join(suspects))
        self.suspects = suspects


def read_parts(
    split: Split,
    config: InputConfig,
    ledger: Ledger,
    quarantine: Quarantine,
    *,
    max_record_bytes: int,
    max_bad_fraction: float,
    fields: Sequence[NamedFields],
    suspects: Mapping[str, SuspectDataError],
    masking: Masking | None = None,
    memory_bytes: int = sys.maxsize,
    function: UserReader | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the documents of all files of a split; each file is read by `read_split`.

    `fields` has one entry per file; `suspects` has the errors of an earlier reading by file name. Raises
    BuildError also if more than `max_bad_fraction` of a file is unreadable. Raises SuspectFilesError instead
    of SuspectDataError, after all other files have been read, so that one second reading is enough.
    Reading a batch takes at most `memory_bytes`, or eight times `max_record_bytes` if that is more. A record
    or page that needs more memory raises BuildError, which `max_failed_splits` may permit.
    """
    parts = split.parts
    memory_bytes = max(memory_bytes, _RECORD_COPIES * max_record_bytes)

    def read(number: int, ledger: Ledger, quarantine: Quarantine) -> Iterator[pa.RecordBatch]:
        return read_split(
            parts[number],
            config,
            ledger,
            quarantine,
            max_record_bytes=max_record_bytes,
            fields=fields[number],
            suspect=suspects.get(parts[number].file),
            masking=masking,
            memory_bytes=memory_bytes,
            function=function,
        )

    def read_all() -> Iterator[pa.RecordBatch]:
        found: dict[str, SuspectDataError] = {}
        for number, part in enumerate(parts):
            own = Ledger() if split.rest else ledger
            quarantine.first = None
            try:
                if not found:
                    yield from read(number, own, quarantine)
                    where = f"{part.file} (split {split.index})"
                    check_bad_fraction(where, own, max_bad_fraction, quarantine.first)
                else:
                    for _ in read(number, own, Quarantine(max_bad_fraction=1.0)):
                        pass
            except SuspectDataError as suspect:
                found[part.file] = suspect
            if own is not ledger:
                ledger.merge(own)
        if found:
            raise SuspectFilesError(found)

    yield from within_memory(joined_batches(read_all()) if split.rest else read_all(), memory_bytes)


def within_memory(batches: Iterator[pa.RecordBatch], memory_bytes: int) -> Iterator[pa.RecordBatch]:
    """Yield the batches; raise MemoryError if reading one would take more than `memory_bytes`.

    The kernel refuses further memory to the libraries, which otherwise allocate any size that a Parquet page,
    an Arrow buffer or an image declares. The limit applies to the whole process (RLIMIT_DATA, Linux only), so
    it is set only while a batch is read, and only if there are no other threads, as in build workers.
    """
    if sys.platform != "linux" or threading.active_count() > 1:
        yield from batches
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    while True:
        taken = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        limit = min(taken + memory_bytes, sys.maxsize if hard == resource.RLIM_INFINITY else hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
        try:
            batch = next(batches, None)
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        if batch is None:
            return
        yield batch


def read_split(
    split: Split,
    config: InputConfig,
    ledger: Ledger,
    quarantine: Quarantine,
    *,
    max_record_bytes: int = 1 << 26,
    fields: NamedFields | None = None,
    suspect: SuspectDataError | None = None,
    masking: Masking | None = None,
    memory_bytes: int = 2_000_000_000,
    function: UserReader | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield batches of documents in record order; count them in `ledger.read` and `ledger.quarantined`.

    The schema is DOCUMENT_SCHEMA or, with `masking` (for builds with a loss mask), MARKED_SCHEMA. `fields`
    tracks which named fields occur; `function` is the loaded `reader` of the input. The caller counts kept
    and dropped documents. Raises BuildError if the file cannot be opened, or at the first bad record if
    `quarantine` allows none. If it allows some and a member of a compressed file is damaged, raises
    SuspectDataError: then discard batches and counts, and read again with this error as `suspect`.
    """
    named = fields or NamedFields(config)
    sink = RecordSink(split, config, ledger, quarantine, max_record_bytes, named, suspect, masking)
    sink.window_bytes = max(sink.window_bytes, min(memory_bytes * 3 // 4, _MAX_WINDOW_BYTES))
    try:
        for _ in _reader(split, config, function)(sink, config):
            if sink.full:
                yield from sink.flush()
    except LimitReachedError:
        pass
    except OtherFormatError as other:
        sink.other_format(other.problem)
    except ContainerError as damage:
        sink.cut_short(damage, bytes=sink.position - (sink.offset or 0))
    except OSError as error:
        raise BuildError(f"{split.path}: cannot be read: {error.strerror or error}") from error
    except MemoryError as error:
        problem = "reading it needs more memory than the recipe allows; raise `memory`, or leave the file out"
        problem = str(error) if "window" in str(error) else problem
        raise BuildError(f"{split.path}: at record {sink.record:,}: {problem}") from error
    yield from sink.flush()


def _reader(split: Split, config: InputConfig, function: UserReader | None) -> Reader:
    if split.format == READER:
        assert function is not None, "the caller loads the function of an input with `reader`"
        return partial(read_by_function, function)
    if config.is_masked and split.format not in ("jsonl", "json", "parquet"):
        key = f"inputs[{split.source}].{'prompt' if config.messages is None else 'messages'}"
        raise RecipeError(f"{key}: {split.file} has format {split.format}; this key needs JSON or Parquet")
    if split.format in _READERS:
        return _READERS[split.format]
    if split.format == "warc":  # imported on demand, because the module needs the extra `warc`
        from shardkit.writers.inputs.read_warc import read_warc

        return read_warc
    if split.format == "mediawiki":  # needs the extra `wiki`
        from shardkit.writers.inputs.read_mediawiki import read_mediawiki

        return read_mediawiki
    if split.format == "pdf":  # needs the extra `pdf`
        from shardkit.writers.inputs.read_pdf import read_pdf

        return read_pdf
    if split.format == "text" and config.lines == "paragraphs":
        return _read_paragraphs
    lines = split.format == "jsonl" or config.lines
    return _read_lines if lines else _read_whole


def _read_lines(sink: RecordSink, config: InputConfig) -> Iterator[None]:
    split = sink.split
    take = take_json if split.format == "jsonl" else _take_text
    with open_input(split.input) as file:
        pieces = sink.pieces(file)
        if split.format == "jsonl" and sink.content.kind == "json":
            yield from read_values(sink, config, pieces)
            return
        lines = Lines(pieces, offset=split.start, max_line_bytes=sink.max_record_bytes)
        sink.offset = split.start
        for offset, length, line, whole in lines:
            sink.offset = offset
            if line.startswith(_BOM):  # concatenated files have byte order marks at later lines, too
                line, length = line[3:], length - 3
            if not whole:
                sink.too_long(length, head=line)
            elif line and not line.isspace():
                take(sink, config, line)
            sink.record, sink.offset = sink.record + 1, lines.offset
            yield


def _take_text(sink: RecordSink, config: InputConfig, line: bytes) -> None:
    try:
        text = sink.decode(line.removesuffix(b"\r"))
    except UnicodeDecodeError as error:
        sink.bad("bad_utf8", f"byte {error.start:,} of the record is not {sink.charset}", head=line)
        return
    sink.add(text, {}, bytes=len(line))


def _read_paragraphs(sink: RecordSink, config: InputConfig) -> Iterator[None]:
    """Pass each paragraph (lines between blank lines) to the sink; record numbers count paragraphs."""
    with open_input(sink.split.input) as file:
        lines = Lines(sink.pieces(file), max_line_bytes=sink.max_record_bytes)
        held: list[bytes] = []
        size = 0  # length of the paragraph, including lines that were not kept
        sink.offset = 0
        for offset, length, line, whole in lines:
            line = line.removeprefix(_BOM) if not offset else line
            if whole and (not line or line.isspace()):
                if size:
                    _take_paragraph(sink, config, held, size)
                    held, size = [], 0
                sink.offset = lines.offset
                yield
                continue
            size += length + (1 if size else 0)
            if size <= sink.max_record_bytes:
                held.append(line.removesuffix(b"\r"))
            elif not held:
                held = [line]
        if size:
            _take_paragraph(sink, config, held, size)
            yield


def _take_paragraph(sink: RecordSink, config: InputConfig, lines: list[bytes], size: int) -> None:
    text = b"\n".join(lines)
    if size > sink.max_record_bytes:
        sink.too_long(size, head=text[:_HEAD_BYTES])
    else:
        _take_text(sink, config, text)
    sink.record += 1


def _read_whole(sink: RecordSink, config: InputConfig) -> Iterator[None]:
    """Pass a whole text file to the sink as one document."""
    with open_input(sink.split.input) as file:
        data = sink.whole(file, sink.max_record_bytes)
    if sink.position > sink.max_record_bytes:
        sink.too_long(sink.position, head=data)
        return
    try:
        text = sink.text_of(data) if sink.is_page else sink.decode(data.removeprefix(_BOM))
    except UnicodeDecodeError as error:
        head = data[max(error.start - 40, 0) :]
        sink.bad("bad_utf8", f"byte {error.start:,} is not {sink.charset}", head=head, bytes=len(data))
        return
    sink.add(text, {}, bytes=len(data))
    yield
