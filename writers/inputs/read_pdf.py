"""Reads PDF files with a text layer: a file is a document, read by PDFium.

The text is that of all pages, with an empty line between pages. A word that a hyphen divides at the end of a
line is joined. A PDF whose pages have no text, such as a scanned one, is dropped (`pdf/needs_ocr`), and so is
one that needs a password (`pdf/encrypted`). A damaged file is quarantined, and so are one whose text is
longer than `max_record_bytes` and one that itself is larger than `MAX_FILE_BYTES` or has too many pages.

PDFium decodes at most 1 GB of a stream; if the worker may not use so much memory, PDFium ends the process,
which counts as a split that breaks its reader (`max_failed_splits`).

Fields: `title`, `author`, `created` (as the file says) and `pages`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from shardkit.errors import MissingExtraError
from shardkit.writers.inputs.files import open_input
from shardkit.writers.inputs.records import RecordSink
from shardkit.writers.recipe.inputs import InputConfig

try:
    import pypdfium2
    from pypdfium2 import raw
except ImportError:
    raise MissingExtraError("pypdfium2", "pdf", "reading PDF files") from None

MAX_FILE_BYTES = 1 << 28
_MAX_PAGES = 100_000
_HYPHEN = re.compile("[\x02\ufffe](?:\r?\n)?")  # how PDFium marks a hyphen that a line break adds
_LINE_END = re.compile(r"[ \t]*\r?\n")
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
_FIELD_CHARACTERS = 1 << 12


class _TooLongError(Exception):
    """The text has more than `max_record_bytes`."""


def read_pdf(sink: RecordSink, config: InputConfig) -> Iterator[None]:
    """Read a PDF file: pass its text to the sink as one document."""
    with open_input(sink.split.input) as file:
        data = sink.whole(file, MAX_FILE_BYTES)
    size = sink.position
    if size > MAX_FILE_BYTES:
        problem = f"the file has {size:,} bytes; PDF files may have {MAX_FILE_BYTES:,}; leave it out"
        sink.bad("too_long", problem, bytes=size)
        return
    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if error.err_code == raw.FPDF_ERR_PASSWORD:
            sink.drop("pdf/encrypted", bytes=size)
        else:
            sink.bad("damaged_file", f"PDFium cannot read it: {error}", bytes=size)
        return
    try:
        _take(sink, document, size)
    finally:
        document.close()
    yield


def _take(sink: RecordSink, document: pypdfium2.PdfDocument, size: int) -> None:
    pages = len(document)
    if not 0 < pages <= _MAX_PAGES:
        sink.bad("damaged_file", f"it has {pages:,} pages; 1 to {_MAX_PAGES:,} are read", bytes=size)
        return
    try:
        text = _text(document, sink.max_record_bytes)
        info = {key: value[:_FIELD_CHARACTERS] for key, value in document.get_metadata_dict().items()}
    except _TooLongError:
        problem = f"its text has more bytes than max_record_bytes {sink.max_record_bytes:,}; raise it"
        sink.bad("too_long", problem, bytes=size)
        return
    except pypdfium2.PdfiumError as error:
        sink.bad("damaged_file", f"PDFium cannot read its pages: {error}", bytes=size)
        return
    if not text:
        sink.drop("pdf/needs_ocr", bytes=size)
        return
    clean = {key: _CONTROLS.sub("", value).strip() or None for key, value in info.items()}
    fields = {
        "title": clean.get("Title"),
        "author": clean.get("Author"),
        "created": clean.get("CreationDate"),
        "pages": pages,
    }
    sink.add(text, fields, bytes=size, markup=False)


def _text(document: pypdfium2.PdfDocument, max_bytes: int) -> str:
    """Return the text of all pages; raise PdfiumError if one of them cannot be read."""
    texts: list[str] = []
    length = 0
    for page in document:
        try:
            layer = page.get_textpage()
            try:
                length += layer.count_chars()
                if length > max_bytes:
                    raise _TooLongError
                text = _clean(layer.get_text_range())
            finally:
                layer.close()
        finally:
            page.close()
        if text:
            texts.append(text)
    text = "\n\n".join(texts)
    if len(text.encode()) > max_bytes:
        raise _TooLongError
    return text


def _clean(text: str) -> str:
    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return _CONTROLS.sub("", _LINE_END.sub("\n", _HYPHEN.sub("", text))).strip()
