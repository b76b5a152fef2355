"""Reads pages from web archives, by warcio's parsers: WARC responses, WET conversions, and ARC.

Every record of the file has a number and is accounted for. A valid record that is not a page is dropped:
records other than responses and conversions (`warc/not_a_response`), HTTP statuses other than 200
(`warc/http_status`), other kinds of content (`warc/not_html`), bodies that cannot be decoded
(`warc/bad_body`), and pages whose text encoding is unknown (`warc/unknown_encoding`). A record with an
unusable header or length is one quarantine entry, after which reading continues at the next line that looks
like the beginning of a record. So is a record that is followed by bytes that begin no record: its length is
wrong, so its text is truncated or contains parts of its neighbors. A file that ends inside a record is
damaged. gzip files need not have one member per record; if they do, a damaged member is one quarantine entry
for the stored bytes up to the next member that begins with a record, and a member is used only if its
checksum confirms it. Memory is one record; long records that are not pages are skipped.

For a page or text that is used, the digest in the record's header is verified (`bad_digest`):
WARC-Block-Digest, which covers the bytes as stored, or otherwise WARC-Payload-Digest. Writers disagree
whether the latter covers the body as stored or without its transfer and content encoding, so one of these
must match. Digests of truncated records, which may cover the whole original, payload digests of segmented
records, and digests in an unknown algorithm or notation are ignored.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO

from shardkit.errors import MissingExtraError
from shardkit.writers.inputs.decompress import ContainerError
from shardkit.writers.inputs.files import open_input
from shardkit.writers.inputs.lines import PieceReader
from shardkit.writers.inputs.pages import BodyError, decode_body, decode_page, join_chunks
from shardkit.writers.inputs.records import RecordSink
from shardkit.writers.recipe.inputs import InputConfig

try:
    from warcio.limitreader import LimitReader
    from warcio.recordloader import ARCHeadersParser, ArcWarcRecordLoader
    from warcio.statusandheaders import StatusAndHeadersParser, StatusAndHeadersParserException
except ImportError:
    raise MissingExtraError("warcio", "warc", "reading WARC, WET and ARC files") from None


_WARC_LINE = re.compile(rb"WARC/\d")
_WARC_VERSIONS = tuple(version.encode() for version in ArcWarcRecordLoader.WARC_TYPES)
_HEADER_END = b"\r\n\r\n"
_ARC_LINE = re.compile(rb"\S[^\r\n]* \S+ \d{8,20} \S+ -?\w+\r?\n?$")
_ARC_HEADER = b"filedesc://"
_HTML_TYPES = frozenset({"text/html", "application/xhtml+xml"})
_CHARSET = re.compile(r"charset\s*=\s*[\"']?([\w.:-]+)", re.IGNORECASE)
_SNIFFED = re.compile(rb"\s*(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html|head|body)\b", re.I | re.S)
_SNIFF_BYTES = 1024
_DIGEST_BYTES = {"md5": 16, "sha1": 20, "sha256": 32, "sha512": 64}
_URL_SAFE = str.maketrans("+/", "-_")
_SHOWN_DIGEST = 80
_Booking = Callable[[], None]  # passes the outcome of one record to the sink


def read_warc(sink: RecordSink, config: InputConfig) -> Iterator[None]:
    """Read a web archive: pass all of its records to the sink."""
    with open_input(sink.split.input) as file:
        archive = _Archive(sink, file, config.encoding)
        while archive.read_next():
            yield


class _RecordError(Exception):
    """A record cannot be read; `reason` is its quarantine reason, and `problem` describes the problem."""

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(problem)
        self.reason, self.problem = reason, problem


class _Archive:
    """Reads the records of a web archive one by one and passes them to the sink."""

    def __init__(self, sink: RecordSink, file: BinaryIO, encoding: str | None) -> None:
        self._encoding = encoding  # encoding in the recipe, for pages whose header has none
        pieces = sink.confirmed_pieces(file, lambda line: bool(self._begins(line)))
        self._sink, self._stream = sink, WarcStream(pieces)
        self._parsers = {
            "warc": StatusAndHeadersParser(ArcWarcRecordLoader.WARC_TYPES),
            "arc": ARCHeadersParser(),
        }
        self._http = StatusAndHeadersParser([], verify=False)
        self._format = ""
        self._line = b""  # the first line of the next record, if it has been read
        self._line_start = 0  # offset of `_line` in the content
        self._begin(0)

    def _begin(self, start: int) -> None:
        """Set the offset of the current record, also in the sink."""
        self._start = self._sink.offset = start

    def read_next(self) -> bool:
        """Read one record, or bytes that are not a record, into the sink; return False at the end."""
        try:
            return self._read_next()
        except ContainerError as damage:
            self._sink.cut_short(damage, bytes=self._stream.tell() - self._start)
            self._sink.record += 1
            self._line = b""
            self._begin(self._stream.tell())
            return damage.resumes

    def _read_next(self) -> bool:
        line, self._line = self._line or self._next_line(), b""
        self._begin(self._stream.tell() - len(line))
        if not line:
            return False
        try:
            known = self._begins(line)
            if not known:
                raise _RecordError("bad_record", "these bytes do not begin a record")
            self._book_if_followed(*self._read(line, known))
        except HeaderTooLongError:
            self._quarantine(_RecordError("bad_record", "the header is longer than one megabyte"), line)
        except _RecordError as error:
            self._quarantine(error, line)
        self._sink.record += 1
        self._begin(self._stream.tell() - len(self._line))
        return True

    def _next_line(self) -> bytes:
        """Return the first line after the current record; b"" at the end of the file."""
        stream = self._stream
        self._line_start = stream.tell()
        while (byte := stream.peek()) and byte in b"\r\n":
            stream.skip(1)
            self._line_start += 1
        stream.header_begins()
        return stream.readline()

    def _book_if_followed(self, book: _Booking, size: int) -> None:
        """Call `book` if a record or the file's end follows; else raise _RecordError, as `size` is wrong."""
        try:
            self._line = self._next_line()
        except ContainerError:  # the damage is after this record, which is valid
            book()
            self._sink.record += 1
            self._begin(self._line_start)
            raise
        if self._line and not self._begins(self._line):
            problem = f"its header says {size:,} bytes, but no record begins after them"
            raise _RecordError("bad_record", problem)
        book()

    def _begins(self, line: bytes) -> str:
        """Return the kind of record that begins here, "warc", "arc" or ""; a file has only one kind."""
        if self._format != "arc" and _WARC_LINE.match(line):
            return "warc"
        if self._format != "warc" and (line.startswith(_ARC_HEADER) or _ARC_LINE.match(line)):
            return "arc"
        return ""

    def _read(self, line: bytes, known: str) -> tuple[_Booking, int]:
        """Read the record that begins with `line`; return its `_Booking` and the length of its content."""
        stream = self._stream
        stream.last_line = line
        block = stream.header_block() if known == "warc" else b""
        headers, length = _plain_headers(line, block), len(line)
        if headers is not None:
            stream.take(block)
        else:
            try:
                found = self._parsers[known].parse(stream, line)
            except StatusAndHeadersParserException as error:
                raise _RecordError("bad_record", f"unreadable header: {str(error)[:200]}") from None
            headers = {name.lower(): value for name, value in found.headers if value is not None}
            length = found.total_len
        self._format = known
        ended = stream.last_line.endswith(b"\n") and (known == "arc" or not stream.last_line.strip(b"\r\n"))
        if not ended:
            raise _RecordError("damaged_file", "the file ends inside a record's header")
        stated = headers.get("length" if known == "arc" else "content-length", "")
        if not (stated.isascii() and stated.isdigit()):
            raise _RecordError("bad_record", f"its header has the length {stated[:40]!r}, not a number")
        size, kind = int(stated), headers.get("warc-type", "")
        if known == "arc":
            header = line.startswith(_ARC_HEADER)
            size, kind = (max(size - length, 0), "") if header else (size, "response")
        return self._read_content(kind, headers, size), size

    def _read_content(self, kind: str, headers: dict[str, str], size: int) -> _Booking:
        if kind == "conversion":
            content = self._content(size)
            if (problem := _digest_problem(headers, b"", content)) is not None:
                return partial(self._sink.bad, "bad_digest", problem, head=content, bytes=size)
            try:
                text = self._sink.decode(content)
            except UnicodeDecodeError as error:
                raise _RecordError("bad_utf8", f"byte {error.start:,} of the text is not UTF-8") from None
            return partial(self._sink.add, text, _fields(headers), bytes=size, markup=False)
        if kind != "response":
            return self._dropped("not_a_response", size, size)
        if not _url_of(headers).lower().startswith(("http:", "https:")):
            return self._dropped("not_html", size, size)
        limited = _HeldHeader(self._stream, size)
        self._stream.header_begins()
        try:
            http = self._http.parse(limited)
        except EOFError:
            return self._dropped("http_status", size, limited.limit)
        if http.get_statuscode() != "200":
            return self._dropped("http_status", size, limited.limit)
        return self._read_page(headers, http, b"".join(limited.lines), limited.limit, size)

    def _read_page(
        self, headers: dict[str, str], http: Any, http_header: bytes, left: int, size: int
    ) -> _Booking:
        declared = http.get_header("content-type") or headers.get("warc-identified-payload-type") or ""
        kind = declared.split(";")[0].strip().lower()
        if kind and kind not in _HTML_TYPES:
            return self._dropped("not_html", size, left)
        body = self._content(left)
        encodings = http.get_header("transfer-encoding") or "", http.get_header("content-encoding") or ""
        page = None
        with suppress(BodyError):
            page = decode_body(body, *encodings, self._sink.max_record_bytes)
        forms = [body, *([join_chunks(body)] if encodings[0] else []), *([] if page is None else [page])]
        if (problem := _digest_problem(headers, http_header, *forms)) is not None:
            return partial(self._sink.bad, "bad_digest", problem, head=body, bytes=size)
        if page is None:
            return self._dropped("bad_body", size, 0)
        if not kind and not _SNIFFED.match(page[:_SNIFF_BYTES]):
            return self._dropped("not_html", size, 0)
        charset = _CHARSET.search(declared)
        text = decode_page(page, charset[1] if charset else None, self._encoding)
        if text is None:
            return self._dropped("unknown_encoding", size, 0)
        fields = _fields(headers) | {"status": 200, "content_type": declared}
        return partial(self._sink.add, text, fields, bytes=len(page))

    def _content(self, size: int) -> bytes:
        """Return the next `size` bytes; raise _RecordError if they are too many, or the file ends."""
        if size > self._sink.max_record_bytes:
            if self._stream.skip(size) < size:
                raise _RecordError("damaged_file", "truncated: the file ends inside the record")
            limit = self._sink.max_record_bytes
            raise _RecordError("too_long", f"{size:,} bytes, more than max_record_bytes {limit:,}; raise it")
        data = self._stream.read(size)
        if len(data) < size:
            missing = size - len(data)
            raise _RecordError("damaged_file", f"truncated: {missing:,} of {size:,} bytes are missing")
        return data

    def _dropped(self, reason: str, size: int, left: int) -> _Booking:
        """Skip the `left` unread bytes of a record's content; return the `_Booking` that drops the record."""
        missing = left - self._stream.skip(left)
        if missing:
            raise _RecordError("damaged_file", f"truncated: {missing:,} of {size:,} bytes are missing")
        return partial(self._sink.drop, f"warc/{reason}", bytes=size)

    def _quarantine(self, error: _RecordError, head: bytes) -> None:
        """Quarantine an unreadable record; if its end is unknown, include all bytes up to the next record."""
        if error.reason == "damaged_file":
            self._sink.damaged(error.problem, bytes=self._stream.tell() - self._start)
            return
        if error.reason == "bad_record":
            self._skip_to_record()
        size = self._stream.tell() - len(self._line) - self._start
        self._sink.bad(error.reason, error.problem, head=head, bytes=size)

    def _skip_to_record(self) -> None:
        while True:
            self._stream.header_begins()
            line = self._stream.readline()
            if not line or self._begins(line):
                self._line = line
                return


class _HeldHeader(LimitReader):  # type: ignore[misc]
    """Keeps the lines of an HTTP header that a parser reads, to verify the block digest."""

    def __init__(self, stream: Any, limit: int) -> None:
        super().__init__(stream, limit)
        self.lines: list[bytes] = []

    def readline(self, length: int | None = None) -> bytes:
        line: bytes = super().readline(length)
        self.lines.append(line)
        return line


def _digest_problem(headers: Mapping[str, str], http_header: bytes, *bodies: bytes) -> str | None:
    """Return which digest in a record's header its content does not match; None if all match or are ignored.

    `bodies` are the body as stored, and then with its encodings undone.
    """
    if "warc-truncated" in headers:
        return None
    block, payload = _stated(headers, "block"), _stated(headers, "payload")
    if block is not None:
        algorithm, wanted = block
        state = hashlib.new(algorithm, http_header, usedforsecurity=False)
        state.update(bodies[0])
        if state.digest() != wanted:
            return (
                f"WARC-Block-Digest {headers['warc-block-digest'][:_SHOWN_DIGEST]} does not match the block"
            )
    elif payload is not None and "warc-segment-number" not in headers:
        algorithm, wanted = payload
        if all(hashlib.new(algorithm, body, usedforsecurity=False).digest() != wanted for body in bodies):
            stated = headers["warc-payload-digest"][:_SHOWN_DIGEST]
            return f"WARC-Payload-Digest {stated} does not match the body, stored or decoded"
    return None


def _stated(headers: Mapping[str, str], kind: str) -> tuple[str, bytes] | None:
    """Return a digest in a record's header as (algorithm of hashlib, bytes); None if absent or unknown."""
    name, _, text = headers.get(f"warc-{kind}-digest", "").partition(":")
    algorithm = name.strip().lower().replace("-", "").replace("_", "")
    if algorithm not in _DIGEST_BYTES:
        return None
    size, text = _DIGEST_BYTES[algorithm], text.strip().rstrip("=")
    with suppress(ValueError):
        if len(text) == 2 * size:
            return algorithm, bytes.fromhex(text)
        if len(text) == -(-size * 8 // 5):
            return algorithm, base64.b32decode(text.upper() + "=" * (-len(text) % 8))
        if len(text) == -(-size * 8 // 6):
            return algorithm, base64.urlsafe_b64decode(text.translate(_URL_SAFE) + "=" * (-len(text) % 4))
    return None


def _plain_headers(line: bytes, block: bytes) -> dict[str, str] | None:
    """Return the headers in `block` by lower-case name, as warcio would read them, but faster.

    `block` ends with an empty line. Returns None if it needs warcio's parser: the first line is not WARC's, a
    line continues another one, or bytes are not UTF-8.
    """
    if not block or not line.startswith(_WARC_VERSIONS):
        return None
    try:
        lines = block.decode().split("\n")
    except UnicodeDecodeError:
        return None
    headers = {}
    for text in lines[:-2]:
        if not text or text[0].isspace():
            return None
        name, colon, value = text.partition(":")
        if colon:
            headers[name.rstrip(" \t").lower()] = value.strip()
    return headers


def _url_of(headers: dict[str, str]) -> str:
    """Return the page's URL without the <> that wget adds, and with spaces escaped."""
    url = headers.get("warc-target-uri") or headers.get("uri") or ""
    if url.startswith("<") and url.endswith(">"):
        url = url[1:-1]
    return url.replace(" ", "%20")


def _fields(headers: dict[str, str]) -> dict[str, object]:
    """Return the fields of a record: id, url, date, and every header by its lower-case name."""
    return headers | {
        "id": headers.get("warc-record-id"),
        "url": _url_of(headers) or None,
        "date": headers.get("warc-date") or headers.get("archive-date"),
    }


_LINE_BYTES = 1 << 16
_HEADER_BYTES = 1 << 20  # limit for a header; real ones have a few KB


class HeaderTooLongError(Exception):
    """A record's header is longer than a megabyte; real ones have a few KB."""


class WarcStream(PieceReader):
    """Reads pieces of bytes like a file with lines; limits the length of a header, see `header_begins`."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        super().__init__(pieces)
        self._header_start = 0
        self.last_line = b""

    def header_begins(self) -> None:
        """Mark the start of a header; `readline` limits the number of bytes from here on."""
        self._header_start = self.tell()

    def readline(self, size: int = _LINE_BYTES) -> bytes:
        """Return a line with its newline, at most `size` bytes; raise HeaderTooLongError after a megabyte."""
        parts: list[bytes] = []
        left = min(size, _LINE_BYTES)
        while left and self._fill():
            end = self._held.find(b"\n", self._at, self._at + left) + 1
            end = end or min(self._at + left, len(self._held))
            part = self._held[self._at : end]
            self._at = end
            left -= len(part)
            parts.append(part)
            if part.endswith(b"\n"):
                break
        if self.tell() - self._header_start > _HEADER_BYTES:
            raise HeaderTooLongError
        self.last_line = b"".join(parts)
        return self.last_line

    def header_block(self) -> bytes:
        """Return the header up to its empty line if it is buffered, else b""; `take` then consumes it."""
        end = self._held.find(_HEADER_END, self._at, self._at + _LINE_BYTES)
        return self._held[self._at : end + len(_HEADER_END)] if end >= 0 else b""

    def take(self, block: bytes) -> None:
        """Consume the bytes that `header_block` returned."""
        self._at += len(block)
        self.last_line = b"\r\n"

    def peek(self) -> bytes:
        """Return the next byte without consuming it; b"" at the end."""
        return self._held[self._at : self._at + 1] if self._fill() else b""
