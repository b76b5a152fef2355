"""Reads EPUB books: a file is a document, the text of its chapters in the order of reading.

A book is a zip of XHTML pages; its package (.opf) has their order. Their bodies are joined to one page, of
which resiliparse makes the text unless the recipe sets `extract`. A book whose chapters are encrypted (DRM)
is dropped (`epub/encrypted`); encrypted fonts do not matter. A book that is damaged, lacks a chapter, or
whose chapters have more than `max_record_bytes` together once decompressed is quarantined; no more than that
is decompressed.

Fields: `title`, `author`, `language`, `identifier` (such as an ISBN) and `chapters` (their number).
"""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from posixpath import dirname, join, normpath
from urllib.parse import unquote
from xml.etree import ElementTree

from shardkit.writers.inputs.files import open_input
from shardkit.writers.inputs.pages import decode_page
from shardkit.writers.inputs.records import RecordSink
from shardkit.writers.recipe.inputs import InputConfig

MAX_FILE_BYTES = 1 << 28
_PACKAGE_BYTES = 1 << 24  # maximum size of the files that describe a book
_CONTAINER, _ENCRYPTION = "META-INF/container.xml", "META-INF/encryption.xml"
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # those that EPUB allows
_IS_ENCRYPTED = 1  # flag of a file in a zip
_BODY = re.compile(r"<body\b[^>]*>(.*?)(?:</body\s*>|\Z)", re.DOTALL | re.IGNORECASE)
_DUBLIN_CORE = {"title": "title", "creator": "author", "language": "language", "identifier": "identifier"}
_FIELD_CHARACTERS = 1 << 12


class _BookError(Exception):
    """A book cannot be read; `reason` is its quarantine reason."""

    def __init__(self, problem: str, reason: str = "damaged_file") -> None:
        super().__init__(problem)
        self.reason = reason


class _EncryptedError(Exception):
    """The chapters of a book are encrypted."""


@dataclass
class _Package:
    """What a book's package says: the names of its chapters in order, and its metadata."""

    chapters: list[str]
    fields: dict[str, object] = field(default_factory=dict)


def read_epub(sink: RecordSink, config: InputConfig) -> Iterator[None]:
    """Read an EPUB book: pass its text to the sink as one document."""
    with open_input(sink.split.input) as file:
        data = sink.whole(file, MAX_FILE_BYTES)
    size = sink.position
    try:
        if size > MAX_FILE_BYTES:
            raise _BookError(f"the file has {size:,} bytes; books may have {MAX_FILE_BYTES:,}", "too_long")
        page, fields = _read(data, sink.max_record_bytes, config)
    except _EncryptedError:
        sink.drop("epub/encrypted", bytes=size)
    except _BookError as error:
        sink.bad(error.reason, str(error), bytes=size)
    else:
        sink.add(page, fields, bytes=len(page))
    yield


def _read(data: bytes, limit: int, config: InputConfig) -> tuple[str, dict[str, object]]:
    """Return a page with all chapters, and the fields of the book."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as book:
            package = _package(book)
            hidden = _encrypted_names(book)
            bodies, left = [], limit
            for name in package.chapters:
                if name in hidden:
                    raise _EncryptedError
                chapter = _content(book, name, left, "max_record_bytes")
                left -= len(chapter)
                text = decode_page(chapter, None, config.encoding)
                if text is None:
                    raise _BookError(f"{name[:80]}: its encoding is unknown", "bad_utf8")
                body = _BODY.search(text)
                bodies.append(text if body is None else body[1])
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError) as error:
        raise _BookError(f"it is no readable zip: {str(error)[:200]}") from None
    joined = "\n".join(bodies)
    return f"<html><body>{joined}</body></html>", package.fields


def _content(book: zipfile.ZipFile, name: str, limit: int, limited_by: str = "") -> bytes:
    """Return the content of a file in a book; raise _BookError if it is missing or longer than `limit`."""
    try:
        info = book.getinfo(name)
    except KeyError:
        raise _BookError(f"{name[:80]} is missing") from None
    if info.flag_bits & _IS_ENCRYPTED:
        raise _EncryptedError
    if info.compress_type not in _METHODS:
        raise _BookError(
            f"{name[:80]} is compressed by method {info.compress_type}, which EPUB does not allow"
        )
    with book.open(info) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        if limited_by:
            raise _BookError(f"its chapters have more bytes than {limited_by}; raise it", "too_long")
        raise _BookError(f"{name[:80]} has more than {limit:,} bytes")
    return data


def _xml(book: zipfile.ZipFile, name: str) -> ElementTree.Element:
    data = _content(book, name, _PACKAGE_BYTES)
    if b"<!ENTITY" in data:
        raise _BookError(f"{name[:80]} declares entities, which can grow without bound")
    try:
        return ElementTree.fromstring(data)
    except (ElementTree.ParseError, LookupError) as error:
        raise _BookError(f"{name[:80]} is not readable XML: {error}") from None


def _package(book: zipfile.ZipFile) -> _Package:
    root = _xml(book, _CONTAINER).find(".//{*}rootfile")
    place = "" if root is None else root.get("full-path", "")
    if not place:
        raise _BookError(f"{_CONTAINER} names no package")
    package = _xml(book, place)
    folder = dirname(place)
    names = {
        item.get("id"): normpath(join(folder, unquote(item.get("href", "").partition("#")[0])))
        for item in package.iterfind("./{*}manifest/{*}item")
    }
    order = [ref.get("idref") for ref in package.iterfind("./{*}spine/{*}itemref")]
    if not order or not all(one in names for one in order):
        raise _BookError(f"{place[:80]} has no order of chapters, or names one that it does not list")
    fields: dict[str, object] = {"chapters": len(order)}
    for element in package.iterfind("./{*}metadata/*"):
        key = _DUBLIN_CORE.get(element.tag.rpartition("}")[2])
        if key is not None and element.text and key not in fields:
            fields[key] = element.text.strip()[:_FIELD_CHARACTERS]
    return _Package([names[one] for one in order], fields)


def _encrypted_names(book: zipfile.ZipFile) -> set[str]:
    """Return the names of the files in a book that are encrypted."""
    if _ENCRYPTION not in book.namelist():
        return set()
    found = _xml(book, _ENCRYPTION).iterfind(".//{*}CipherReference")
    return {normpath(unquote(one.get("URI", ""))) for one in found}
