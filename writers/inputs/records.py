"""The sink of all readers: it puts each record into a batch, or counts it as dropped or quarantined.

Every record goes through exactly one of the sink's `add`, `drop`, `bad`, `no_column` and `damaged`, so that
read = kept + dropped + quarantined holds for every file. The reader sets the current record (`record`, and
`offset` in a file of bytes), so that every quarantine entry has its place in the file.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import pyarrow as pa

from shardkit.encodings import GUESS, REPLACEMENT, encoding_of, to_utf8
from shardkit.kernels.text_arrays import text_offsets
from shardkit.tokens.chat import ChatError
from shardkit.writers.inputs.decompress import (
    ConfirmedMembers,
    ContainerError,
    decompressed,
    plain_range,
    with_head,
)
from shardkit.writers.inputs.fields import MISSING, NamedFields, field_at, field_text
from shardkit.writers.inputs.files import fields_of_path
from shardkit.writers.inputs.first_bytes import HEAD_BYTES, compression_in, look, raise_if_pointer
from shardkit.writers.inputs.masking import Masking
from shardkit.writers.inputs.pages import decode_page, main_text_by
from shardkit.writers.inputs.scan import Split
from shardkit.writers.recipe.inputs import ExtractConfig, InputConfig, ResiliparseOptions
from shardkit.writers.rows.documents import (
    BATCH_DOCUMENTS,
    BATCH_TEXT_BYTES,
    DOCUMENT_SCHEMA,
    MARKED_SCHEMA,
    document_ids,
)
from shardkit.writers.rows.ledger import BadRecord, Count, Ledger, Quarantine, snippet_of

_HEAD_BYTES = 256
_SURROGATE = re.compile("[\ud800-\udfff]")
_SURROGATE_BYTES = 3  # length that a surrogate would have in UTF-8
_OWN_ID = re.compile("[0-9a-f]{32}")
_WHOLE = ExtractConfig(resiliparse=ResiliparseOptions(main_content=False))
# What extracts the text of formats that hold HTML; posts of Stack Exchange and books are all main content.
_EXTRACTS: dict[str, str | ExtractConfig] = {
    "warc": "resiliparse",
    "html": "resiliparse",
    "stackexchange": _WHOLE,
    "epub": _WHOLE,
}


class SuspectDataError(Exception):
    """Records were read from a member of a compressed file that turned out to be damaged or truncated.

    No checksum confirms these records, so the split has to be read again up to the start of the member.
    `sound_bytes` is the size of the content before it, `lost_bytes` the size of the member and of all bytes
    after it, and `records` the number of all records that were read.
    """

    def __init__(self, problem: str, sound_bytes: int, lost_bytes: int, records: int) -> None:
        super().__init__(problem)
        self.problem, self.sound_bytes = problem, sound_bytes
        self.lost_bytes, self.records = lost_bytes, records


class OtherFormatError(Exception):
    """A file does not have the format that its name or the recipe says."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem


class LimitReachedError(Exception):
    """The number of records that a trial build reads from a split has been reached."""


class RecordSink:
    """Collects the records of a reader: documents in the next batch, unreadable records in quarantine.

    The reader sets `record`, the number of the current record, and `offset`, where it begins in the
    decompressed file (None in tables).
    """

    def __init__(
        self,
        split: Split,
        config: InputConfig,
        ledger: Ledger,
        quarantine: Quarantine,
        max_record_bytes: int,
        fields: NamedFields,
        suspect: SuspectDataError | None = None,
        masking: Masking | None = None,
    ) -> None:
        self.split, self._config = split, config
        self._masking = masking
        self._ledger, self._quarantine = ledger, quarantine
        self.max_record_bytes, self._suspect = max_record_bytes, suspect
        self._named = fields
        self.columns: Sequence[str] | None = None  # fields of all records, if the file is a table
        extract: str | ExtractConfig = config.extract or _EXTRACTS.get(split.format, "none")
        self._extract = None if extract == "none" else main_text_by(extract)
        self.text_path, self.is_masked = config.text, config.is_masked
        self.extracts = self._extract is not None
        self.content = look(b"")  # kind of the file; set by `look_at` and `pieces`
        self.compression = split.compression
        self.charset = "UTF-8"  # encoding of the text, for messages
        self.replaces = config.on_bad_text == "replace"
        self._replaced = 0  # bytes of the current record that were replaced
        self._of_path = fields_of_path(config, split.file)
        own_id = () if config.document_id is None else (config.document_id,)
        self.carried = (config.id or "id", config.url or "url", *config.metadata, *own_id)  # carried fields
        self.window_bytes = 1 << 27  # limit for the window of zstd
        self.record = split.first_record
        self.offset: int | None = None
        self.position = split.start  # offset in the decompressed file after the last of `pieces`
        self.records = 0  # number of records read from this split so far, good or bad
        self._bytes = 0
        self._rows: list[tuple[int, str, str | None, str | None, str | None, bytes | None, bytes | None]] = []

    def _begin_record(self) -> None:
        if self.records == self.split.limit:
            raise LimitReachedError
        self.records += 1
        self._replaced = 0

    def decode(self, data: builtins.bytes) -> str:
        """Decode UTF-8 text of a record; raise UnicodeDecodeError unless the recipe replaces bad bytes."""
        try:
            return data.decode()
        except UnicodeDecodeError:
            if not self.replaces:
                raise
        self._replaced += len(data) - len(data.decode("utf-8", "ignore").encode())
        return data.decode("utf-8", "replace")

    def check_text(self, text: str) -> str:
        """Replace surrogate halves in the text; raise UnicodeEncodeError if the recipe does not allow it."""
        try:
            text.encode()
        except UnicodeEncodeError:
            if not self.replaces:
                raise
            text, count = _SURROGATE.subn("\ufffd", text)
            self._replaced += count * _SURROGATE_BYTES
        return text

    def check_value(self, value: Any) -> Any:
        """Apply `check_text` to all strings in a JSON value; raise RecursionError if nested too deeply."""
        if isinstance(value, str):
            return self.check_text(value)
        if isinstance(value, dict):
            return {self.check_text(name): self.check_value(inner) for name, inner in value.items()}
        return [self.check_value(inner) for inner in value] if isinstance(value, list) else value

    def add(
        self,
        text: str,
        fields: Mapping[str, object],
        *,
        bytes: int,
        markup: bool = True,
        marks: builtins.bytes | None = None,
    ) -> None:
        """Add a document to the batch; `bytes` is its size as read, which decides when a batch is full.

        `marks` say which parts are trained on (shardkit.tokens.chat). If the recipe sets `extract`,
        text that is `markup` is replaced by the main text of the page.
        """
        replaced = self._replaced
        self._begin_record()
        self._named.look(fields)
        if self.columns is not None:
            self._named.check_columns(self.split, self.columns)
        if markup and self._extract is not None:
            main, size = self._extract(text), len(text.encode())
            if not main:
                self._drop("html/unreadable" if main is None else "html/no_text", bytes=size)
                return
            text = main
            self._ledger.read += Count(0, size - len(text.encode()))
            self._ledger.drop("html/markup", 0, size - len(text.encode()))
        config, own_id = self._config, None
        if config.document_id is not None and (own_id := _own_id(fields, config.document_id)) is None:
            problem = f"field {config.document_id!r} is not 32 hexadecimal digits; see inputs[].document_id"
            self._book(1, len(text.encode()), "bad_document_id", problem, text[:_HEAD_BYTES])
            return
        if replaced:
            self._ledger.read += Count(0, replaced)
            self._ledger.drop("text/replaced", 0, replaced)
        self._bytes += bytes
        id, url = field_text(field_at(fields, self.carried[0])), field_text(field_at(fields, self.carried[1]))
        metadata = None
        if config.metadata or self._of_path:
            found = {path: field_at(fields, path) for path in config.metadata}
            own = {path: value for path, value in found.items() if value is not MISSING}
            metadata = field_text(self._of_path | own)
        self._rows.append((self.record, text, id, url, metadata, own_id, marks))

    def add_masked(self, fields: Mapping[str, Any], *, bytes: int, head: builtins.bytes = b"") -> None:
        """Render and add a conversation, or a prompt and completion; quarantine entries show `head`."""
        assert self._masking is not None
        try:
            rendered = self._masking.render(self._config, fields)
        except ChatError as error:
            self.bad(error.reason, str(error), bytes=bytes, head=head)
            return
        except RecursionError:
            self.bad("bad_messages", "values are nested too deeply", bytes=bytes, head=head)
            return
        if not rendered.trained_bytes:
            self.drop("chat/nothing_to_train", bytes=len(rendered.text.encode()))
            return
        self.add(rendered.text, fields, bytes=bytes, markup=False, marks=rendered.marks)

    def drop(self, reason: str, *, bytes: int) -> None:
        """Count a valid record that has no document as dropped, such as an error page."""
        self._begin_record()
        self._drop(reason, bytes=bytes)

    def _drop(self, reason: str, *, bytes: int) -> None:
        self._ledger.read += Count(1, bytes)
        self._ledger.drop(reason, 1, bytes)

    def drop_lines(self, reason: str, count: int) -> None:
        """Count `count` lines inside another record as dropped; their bytes are counted with that record."""
        self._ledger.read += Count(count, 0)
        self._ledger.drop(reason, count, 0)

    def drop_bytes(self, reason: str, bytes: int) -> None:
        """Count `bytes` of the last document's record, which are not in its text, as dropped."""
        self._ledger.read += Count(0, bytes)
        self._ledger.drop(reason, 0, bytes)

    def note(self, message: str) -> None:
        """Add a warning about a file that was read nevertheless."""
        self._named.notes.append(message)

    def other_format(self, problem: str) -> None:
        """Quarantine a whole file that does not have the format that its name or the recipe says."""
        self.offset = None
        self._book(1, self.split.bytes, "other_format", problem)

    def too_long(self, length: int, *, head: bytes = b"") -> None:
        """Quarantine a record longer than `max_record_bytes`."""
        limit = f"more than max_record_bytes {self.max_record_bytes:,}"
        error = f"{length:,} bytes, {limit}; raise max_record_bytes, or leave the record out"
        self.bad("too_long", error, bytes=length, head=head)

    def bad(self, reason: str, error: str, *, head: bytes = b"", bytes: int | None = None) -> None:
        """Quarantine one unreadable record of `bytes` bytes; `head` is its beginning, or all of it."""
        self._begin_record()
        self._book(1, len(head) if bytes is None else bytes, reason, error, snippet_of(head))

    def damaged(self, error: str, *, bytes: int, records: int = 1) -> None:
        """Quarantine the unreadable rest of a file; `records` is its number of records, 1 if unknown."""
        error = f"{error}; {self.records:,} records were read before that"
        if self._suspect is not None and self._suspect.records > self.records:
            records = self._suspect.records - self.records
            error += f"; {records:,} records from the damaged part are not trusted"
        self._book(max(records, 1), bytes, "damaged_file", error)

    def cut_short(self, damage: ContainerError, *, bytes: int, records: int = 1) -> None:
        """Quarantine the rest of a damaged compressed file, including `bytes` of an incomplete record.

        With `salvage`, the rest is dropped with a note instead.
        """
        bytes += damage.rest_bytes
        if not self._config.salvage or self.compression is None:
            self.damaged(damage.problem, bytes=bytes, records=records)
            return
        records = max(records, 1)
        self._ledger.read += Count(records, bytes)
        self._ledger.drop("salvage/lost", records, bytes)
        self.note(
            f"{damage.problem}; salvage keeps the {self.records:,} records that were read before that, and "
            f"{bytes:,} bytes are lost"
        )

    def no_column(self, problem: str, *, bytes: int, records: int = 1) -> None:
        """Quarantine a whole file that lacks the text column."""
        problem += f"; set inputs[{self.split.source}].text to the column that holds the text"
        self._book(max(records, 1), bytes, "no_column", problem)

    def _book(self, records: int, bytes: int, reason: str, error: str, snippet: str = "") -> None:
        self._ledger.read += Count(records, bytes)
        self._ledger.quarantine(reason, records, bytes)
        self._quarantine.add(BadRecord(self.split.file, self.record, self.offset, reason, error, snippet))

    @property
    def is_page(self) -> bool:
        """Whether a whole file is one page, which may declare its own encoding."""
        whole = self.split.format == "html" or (self.split.format == "text" and not self._config.lines)
        return whole and self.extracts

    def text_of(self, data: builtins.bytes) -> str:
        """Decode bytes that may be a page to text; raise UnicodeDecodeError if that is impossible."""
        if not self.extracts:
            return self.decode(data)
        page = decode_page(data, None, self._config.encoding)
        if page is None:
            key = f"inputs[{self.split.source}].encoding"
            self.charset = f"UTF-8, and the page does not declare its encoding; set {key}, if only to {GUESS}"
            raise UnicodeDecodeError(REPLACEMENT, data, 0, 1, "the page declares no encoding")
        return page

    def look_at(self, file: BinaryIO) -> None:
        """Set `content` and `compression` by the first stored bytes; raise BuildError at an LFS pointer."""
        split = self.split
        file.seek(0)
        head = file.read(HEAD_BYTES)
        file.seek(0)
        self.content = look(head)
        raise_if_pointer(self.content, split.path)
        if split.format != "mds":  # MDS begins with a number, which may look like any signature
            self.compression = compression_in(head, split.compression)
        if split.compression is not None and not split.input.bytes:
            raise ContainerError(f"the file is empty: 0 bytes are not a {split.compression} file", 0)

    def refuse_others(self) -> None:
        """Raise OtherFormatError if `content` is not of the split's format."""
        chosen = self._config.format is not None or self.is_page
        key = f"inputs[{self.split.source}]"
        if problem := self.content.problem(self.split.format, key, is_chosen=chosen):
            raise OtherFormatError(problem)

    def whole(self, file: BinaryIO, most: int) -> builtins.bytes:
        """Return the split's content, of `position` bytes; only a beginning if it has more than `most`."""
        self.offset = 0
        return b"".join([piece for piece in self.pieces(file) if self.position <= most])

    def pieces(self, file: BinaryIO) -> Iterator[bytes]:
        """Return an iterator over the split's content in pieces, with text converted to UTF-8.

        The iterator raises ContainerError after the last good piece, or SuspectDataError if pieces were not
        confirmed by a checksum and the build continues after bad records. If the content is of another
        format, OtherFormatError is raised at once.
        """
        split = self.split
        if split.start:
            return self._counted(self._trusted(plain_range(file, split.start, split.end)))
        self.look_at(file)
        stored = plain_range(file, split.start, split.end)
        if self.compression is not None:
            size = split.input.bytes
            stored = decompressed(file, self.compression, size, window_bytes=self.window_bytes)
        if split.format == "mds":
            return self._counted(self._trusted(stored))
        head, stored = with_head(stored)
        self.content = look(head)
        raise_if_pointer(self.content, split.path)
        if (split.format, self.content.kind) != ("jsonl", "json"):  # that reader reads JSON arrays, too
            self.refuse_others()
        trusted = self._trusted(stored)
        encoding = self._encoding()
        if encoding != "utf-8":
            self.charset = encoding
            trusted = to_utf8(_without(self.content.mark, trusted), encoding)
        return self._counted(trusted)

    def _encoding(self) -> str:
        """Return the encoding of the content; raise OtherFormatError if the recipe sets a wrong one."""
        if self.is_page or self.split.format in ("warc", "epub", "tfrecord"):
            return "utf-8"  # no conversion here: each page is decoded by its own encoding; records are binary
        found, said = self.content, encoding_of(self._config.encoding or "utf-8") or "utf-8"
        if found.mark:
            return found.encoding
        if found.lacks_mark and found.encoding != said:
            remedy = f"set inputs[{self.split.source}].encoding: {found.encoding}"
            if found.encoding.startswith("utf-32"):
                remedy = "convert it to UTF-8"
            raise OtherFormatError(f"it is {found.encoding.upper()} without a byte order mark; {remedy}")
        return said

    def _counted(self, pieces: Iterator[builtins.bytes]) -> Iterator[builtins.bytes]:
        for piece in pieces:
            self.position += len(piece)
            yield piece

    def _trusted(self, stored: Iterator[builtins.bytes]) -> Iterator[builtins.bytes]:
        """Yield the content up to damage; raise SuspectDataError if yielded bytes are not confirmed."""
        suspect, taken = self._suspect, self.split.start
        try:
            for piece in stored:
                if suspect is not None and taken + len(piece) >= suspect.sound_bytes:
                    yield piece[: suspect.sound_bytes - taken]
                    raise ContainerError(suspect.problem, suspect.lost_bytes)
                taken += len(piece)
                yield piece
        except ContainerError as damage:
            trusted = self._config.salvage or self._quarantine.allows_none
            if suspect is not None or not damage.suspect_bytes or trusted:
                raise
            sound = taken - damage.suspect_bytes
            lost = damage.suspect_bytes + damage.rest_bytes
            raise SuspectDataError(damage.problem, sound, lost, self.records) from None

    def confirmed_pieces(self, file: BinaryIO, begins: Callable[[bytes], bool]) -> Iterator[bytes]:
        """Yield, like `pieces`, the content of a file in which every gzip member starts with a record.

        A gzip member is yielded only once its checksum is verified (see `ConfirmedMembers`). `begins` tests
        whether a line starts a record. After a ContainerError whose `resumes` is true, the caller may keep
        iterating and gets the next intact member.
        """
        self.look_at(file)
        if self.compression != "gzip":
            return self.pieces(file)
        return ConfirmedMembers(file, self.split.input.bytes, begins)

    @property
    def full(self) -> bool:
        """Whether the batch should be flushed now."""
        return self._bytes >= BATCH_TEXT_BYTES or len(self._rows) >= BATCH_DOCUMENTS

    def flush(self) -> Iterator[pa.RecordBatch]:
        """Yield the batch of the documents added so far, if there are any."""
        if not self._rows:
            return
        records, texts, ids, urls, metadata, own_ids, marks = zip(*self._rows, strict=True)
        count = len(records)
        self._rows, self._bytes = [], 0
        text = pa.array(texts, pa.large_string())
        if self._config.document_id is None:
            own_ids = tuple(document_ids(self.split.file, records))
        self._ledger.read += Count(count, int(text_offsets(text)[-1]))
        columns = [
            pa.array(own_ids, pa.binary(16)),
            pa.array([self.split.source] * count, pa.int32()),
            pa.array([self.split.file] * count, pa.string()),
            pa.array(records, pa.int64()),
            text,
            pa.array(ids, pa.string()),
            pa.array(urls, pa.string()),
            pa.array(metadata, pa.string()),
        ]
        if self._masking is None:
            yield pa.RecordBatch.from_arrays(columns, schema=DOCUMENT_SCHEMA)
        else:
            yield pa.RecordBatch.from_arrays([*columns, pa.array(marks, pa.binary())], schema=MARKED_SCHEMA)


def _without(mark: bytes, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the pieces without the byte order mark that they begin with."""
    left = len(mark)
    for piece in pieces:
        yield piece[left:]
        left = max(left - len(piece), 0)


def _own_id(fields: Mapping[str, object], path: str) -> bytes | None:
    """Return the 16 bytes of a document id in a field; None unless it has 32 hexadecimal digits."""
    value = field_at(fields, path)
    value = value.hex() if isinstance(value, bytes) else value
    if not isinstance(value, str) or _OWN_ID.fullmatch(value) is None:
        return None
    return bytes.fromhex(value)
