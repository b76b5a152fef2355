"""Web pages: the body of an HTTP response decoded to a page, and the main text of a page.

Bodies are decoded as browsers and crawlers do it: chunks joined, gzip, deflate, br and zstd undone. A body
that says it is chunked or compressed and is not is taken as it is (many crawlers undo both and leave the
header), and one that was cut short gives what there is of it. Damaged data and a page over the limit raise
BodyError.

A page's bytes are decoded by its byte order mark, the charset of its HTTP header, its own <meta> element, or
else by what the bytes look like, in this order; what cannot be decoded becomes U+FFFD. Main text is found by
a library made for that: resiliparse, or trafilatura as FineWeb used it. Results depend on the page alone.
"""

from __future__ import annotations

import codecs
import re
import zlib
from collections.abc import Callable
from functools import partial

import zstandard

from shardkit.errors import MissingExtraError
from shardkit.writers.input_config import ExtractConfig, ResiliparseOptions, TrafilaturaOptions

__all__ = ["BodyError", "decode_body", "decode_page", "join_chunks", "main_text_by"]

_CHUNK = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]*(?:;[^\r\n]*)?\r\n")
_CUT_CHUNK = re.compile(rb"[0-9a-fA-F]{1,8}[ \t]*(?:;[^\r\n]*)?\r?")  # a head that the body ends in
_MAX_ENCODINGS = 4
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


class BodyError(Exception):
    """A body cannot be decoded; the message says why."""


def decode_body(body: bytes, transfer_encoding: str, content_encoding: str, limit: int) -> bytes:
    """The content of a body with these headers ("" where there is none), at most `limit` bytes."""
    if "chunked" in transfer_encoding.lower():
        body = join_chunks(body)
    encodings = [name.strip().lower() for name in content_encoding.split(",") if name.strip()]
    if len(encodings) > _MAX_ENCODINGS:
        raise BodyError(f"{len(encodings)} content encodings")
    for name in reversed(encodings):
        body = _undo(body, name, limit)
        if len(body) > limit:
            raise BodyError(f"more than {limit:,} bytes when decoded")
    return body


def join_chunks(body: bytes) -> bytes:
    """What the chunks hold; from where no chunk begins on, the bytes as they are."""
    parts: list[bytes] = []
    at = 0
    while at < len(body):
        head = _CHUNK.match(body, at)
        if head is None:
            if not (parts and _CUT_CHUNK.fullmatch(body, at)):
                parts.append(body[at:])
            break
        size = int(head[1], 16)
        if not size:
            break
        start = head.end()
        parts.append(body[start : start + size])
        at = start + size
        if body.startswith(b"\r\n", at):
            at += 2
    return b"".join(parts)


def _undo(body: bytes, encoding: str, limit: int) -> bytes:
    if encoding in ("gzip", "x-gzip"):
        return _inflate(body, 31, limit) if body.startswith(b"\x1f\x8b") else body
    if encoding == "deflate":
        wrapped = len(body) > 1 and body[0] & 15 == 8 and (body[0] << 8 | body[1]) % 31 == 0
        return _inflate(body, 15 if wrapped else -15, limit)
    if encoding == "br":
        return _unbrotli(body, limit)
    if encoding == "zstd":
        return _unzstd(body, limit) if body.startswith(_ZSTD_MAGIC) else body
    if encoding in ("identity", "none", "utf-8", "utf8"):
        return body
    raise BodyError(f"content encoding {encoding[:40]!r} is not known")


def _inflate(body: bytes, wbits: int, limit: int) -> bytes:
    try:
        return zlib.decompressobj(wbits).decompress(body, limit + 1)
    except zlib.error as error:
        raise BodyError(str(error)) from None


def _unbrotli(body: bytes, limit: int) -> bytes:
    try:
        import brotli
    except ImportError:
        raise BodyError("content encoding br needs Brotli: pip install 'shardkit[warc]'") from None
    decoder = brotli.Decompressor()
    try:
        return bytes(decoder.process(body, output_buffer_limit=limit + 1))
    except brotli.error as error:
        raise BodyError(str(error)) from None


def _unzstd(body: bytes, limit: int) -> bytes:
    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body) as reader:
            return bytes(reader.read(limit + 1))
    except zstandard.ZstdError as error:
        raise BodyError(str(error)) from None


_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
# A tree takes some thirty times its page, and finding the main content time as the square of its depth: 0.3 s
# for 2,000 elements inside each other, hours for a megabyte of <div>. Real pages are some 50 deep.
_MAX_PAGE_CHARACTERS = 1 << 24
_MAX_DEPTH = 2048
_TAG = re.compile(r"<(/?)([a-zA-Z][a-zA-Z0-9-]*)")
_NOT_NESTED = frozenset(  # elements that are empty, or end where the next of their kind begins
    re.split(" ", "area base br col embed hr img input link meta source track wbr p li dt dd tr td th option")
)


def decode_page(body: bytes, charset: str | None) -> str:
    """A page as text; `charset` is what the HTTP header says, if anything."""
    try:
        from resiliparse.parse.encoding import detect_encoding, map_encoding_to_html5
    except ImportError:
        raise MissingExtraError("resiliparse", "html", "reading web pages") from None
    for mark, encoding in _MARKS:
        if body.startswith(mark):
            return body[len(mark) :].decode(encoding, "replace")
    named = map_encoding_to_html5(charset, fallback_utf8=False) if charset else None
    found = named or detect_encoding(body, from_html_meta=True) or "utf-8"
    try:
        return body.decode(found, "replace")
    except LookupError:  # known to browsers, not to Python
        return body.decode("utf-8", "replace")


def main_text_by(extractor: str | ExtractConfig) -> Callable[[str], str | None]:
    """A function from a page to its main text: "" if there is none, None if the library cannot read the page.

    `extractor` is the name of a library, which stands for its default options, or has options.
    MissingExtraError without the package.
    """
    if isinstance(extractor, str):
        extractor = ExtractConfig.model_validate({extractor: {}})
    if extractor.trafilatura is not None:
        extract = _trafilatura(extractor.trafilatura)
    else:
        assert extractor.resiliparse is not None
        extract = _resiliparse(extractor.resiliparse)

    def main_text(page: str) -> str | None:
        if len(page) > _MAX_PAGE_CHARACTERS or _too_deep(page):
            return None
        try:
            text = extract(page)
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
            return None  # on hostile markup the libraries fail in many ways
        return (text or "").encode("utf-8", "replace").decode()

    return main_text


def _too_deep(page: str) -> bool:
    if page.count("<") <= _MAX_DEPTH:
        return False
    depth = 0
    for slash, name in _TAG.findall(page):
        if name.lower() not in _NOT_NESTED:
            depth = max(depth - 1, 0) if slash else depth + 1
            if depth > _MAX_DEPTH:
                return True
    return False


def _resiliparse(options: ResiliparseOptions) -> Callable[[str], str | None]:
    try:
        from resiliparse.extract.html2text import extract_plain_text
    except ImportError:
        raise MissingExtraError("resiliparse", "html", "extract: resiliparse") from None
    return partial(extract_plain_text, **options.model_dump())


def _trafilatura(options: TrafilaturaOptions) -> Callable[[str], str | None]:
    try:
        import trafilatura
    except ImportError:
        raise MissingExtraError("trafilatura", "html", "extract: trafilatura") from None
    return partial(
        trafilatura.extract,
        favor_precision=options.favor == "precision",
        favor_recall=options.favor == "recall",
        include_comments=options.comments,
        include_tables=options.tables,
        include_links=options.links,
        include_images=options.images,
        include_formatting=options.formatting,
        # It remembers other pages for this: what it gave would depend on the order of reading.
        deduplicate=False,
    )
