"""Decodes web pages: the body of an HTTP response to the page's bytes, the bytes to text, text to main text.

Bodies are decoded as by browsers and crawlers: chunks are joined, and gzip, deflate, br and zstd are undone.
A body that is not chunked or compressed although its headers say so is used as it is (many crawlers undo both
and keep the header), and a truncated body is decoded as far as it goes. Damaged data and a page over the
limit raise BodyError.

A page's bytes are decoded according to the HTML standard (13.2.3), with the tables of the Encoding Standard:
by the byte order mark, the HTTP header, the page's <meta> element, or its XML declaration, in this order. If
none of them declares a usable encoding, bytes that are valid UTF-8 are decoded as UTF-8; only for other
bytes, a statistical detector may decide. Bytes that are invalid in the encoding become U+FFFD. A page is not
read if browsers refuse to decode its encoding, or if no guess fits. Main text is extracted by a library for
that purpose: resiliparse, or trafilatura as FineWeb used it. Results depend on the page alone.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from functools import partial

import zstandard

from shardkit.encodings import BAD, GUESS, REPLACEMENT, decode, encoding_of
from shardkit.errors import MissingExtraError
from shardkit.writers.inputs.first_bytes import HEAD_BYTES, look
from shardkit.writers.recipe.inputs import ExtractConfig, ResiliparseOptions, TrafilaturaOptions

_CHUNK = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]*(?:;[^\r\n]*)?\r\n")
_CUT_CHUNK = re.compile(rb"[0-9a-fA-F]{1,8}[ \t]*(?:;[^\r\n]*)?\r?")  # a truncated chunk head at the end
_MAX_ENCODINGS = 4
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


class BodyError(Exception):
    """The body of a response cannot be decoded; the message says why."""


def decode_body(body: bytes, transfer_encoding: str, content_encoding: str, limit: int) -> bytes:
    """Decode a body by its Transfer-Encoding and Content-Encoding headers ("" for none).

    Raises BodyError if it is damaged, or decodes to more than `limit` bytes.
    """
    if "chunked" in transfer_encoding.lower():
        body = join_chunks(body)
    encodings = [name.strip().lower() for name in content_encoding.split(",") if name.strip()]
    if len(encodings) > _MAX_ENCODINGS:
        raise BodyError(f"the body has {len(encodings)} content encodings; the limit is {_MAX_ENCODINGS}")
    for name in reversed(encodings):
        body = _undo(body, name, limit)
        if len(body) > limit:
            raise BodyError(f"the body decodes to more than {limit:,} bytes")
    return body


def join_chunks(body: bytes) -> bytes:
    """Join the contents of a body's chunks; from the first place where no chunk begins, keep all bytes."""
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
    raise BodyError(f"content encoding {encoding[:40]!r} is unknown")


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


_USER_DEFINED = "x-user-defined"
_ISO_2022_JP = re.compile(rb"\x1b\$[@B][^\x1b]*\x1b\([BJ]")
_PRESCANNED_BYTES = 1024
_ASCII = bytes(range(128))
_CONTROLS = bytes(set(range(32)) - set(b"\t\n\f\r"))
_MOST_CONTROLS = 1 / 64  # maximum fraction of control characters among the bytes of a text
_MOST_BAD = 0.1  # maximum ratio of U+FFFD to bytes that are not ASCII; above it, the guess is rejected
_HEAD_BYTES = 1 << 16
_HEAD_END = re.compile(rb"</head[\s>]|<body[\s>]", re.IGNORECASE)
_RAW_TEXT = re.compile(rb"<(script|style|title|textarea)\b", re.IGNORECASE)
_TAG_START = re.compile(rb"(?P<skipped><!--|<[!?]|</(?![a-zA-Z]))|</?(?P<name>[a-zA-Z][^\s/>]*)")
_VALUE = rb"(?:\"(?P<double>[^\"]*)\"|'(?P<single>[^']*)'|(?P<bare>[^\s%s\"'][^\s%s]*))"
_ATTRIBUTE = re.compile(
    rb"[\s/]*(?P<name>[^\s/>][^\s/>=]*)(?:\s*=\s*(?:%s|[\"'].*\Z|(?=>)))?" % _VALUE.replace(b"%s", b">"),
    re.DOTALL,
)
_META_CONTENT = re.compile(rb"charset\s*=\s*" + _VALUE.replace(b"%s", b";"), re.IGNORECASE)
_XML_ENCODING = re.compile(rb"<\?xml\s.*?encoding\s*=\s*([\"'])(?P<label>[^\x00-\x20\"']*)\1", re.DOTALL)
# A parsed tree takes about thirty times the memory of its page. Finding the main content takes time quadratic
# in its depth: 0.3 s for 2,000 nested elements, hours for a megabyte of <div>. Real pages are about 50 deep.
_MAX_PAGE_CHARACTERS = 1 << 24
_MAX_DEPTH = 2048
_TAG = re.compile(r"<(/?)([a-zA-Z][a-zA-Z0-9-]*)")
_NOT_NESTED = frozenset(  # elements that have no content, or end where the next one of their kind begins
    re.split(" ", "area base br col embed hr img input link meta source track wbr p li dt dd tr td th option")
)


def decode_page(body: bytes, charset: str | None, encoding: str | None = None) -> str | None:
    """Decode a page to text; return None if browsers refuse its encoding, or the encoding is unknown.

    `charset` is the one in the HTTP header, if any. `encoding` comes from the recipe and applies to pages
    whose header has none: the label of an encoding, or `GUESS` to guess if the page declares no encoding
    either and is not UTF-8. If `encoding` is None, such a page is refused, because guesses are often wrong:
    for half of the pages in GBK and Big5.
    """
    guesses = encoding == GUESS
    charset = charset or (None if guesses else encoding)
    found = look(body[:HEAD_BYTES])
    if found.mark:
        return _decoded(body[len(found.mark) :], found.encoding)
    declared = (charset and _usable(charset)) or _declared(body)
    if declared is not None:
        return _decoded(body, declared)
    if found.lacks_mark:
        return _decoded(body, found.encoding)
    if _ISO_2022_JP.search(body) and BAD not in (text := decode(body, "iso-2022-jp")):
        return text
    if len(body) - len(body.translate(None, _CONTROLS)) > _MOST_CONTROLS * len(body):
        return None  # may be UTF-16 of a script whose characters consist of two ASCII bytes, such as Thai
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":  # the body was cut short inside a character
            return body.decode("utf-8", "replace")
    if not guesses:
        return None
    guess = _decoded(body, _guessed(body))
    others = len(body.translate(None, _ASCII))
    return None if guess is None or guess.count("\ufffd") > _MOST_BAD * others else guess


def _decoded(body: bytes, encoding: str) -> str | None:
    if encoding == REPLACEMENT:
        return None
    return (
        body.decode("utf-8", "replace")
        if encoding == "utf-8"
        else decode(body, encoding).replace(BAD, "\ufffd")
    )


def _usable(label: str) -> str | None:
    """Return the encoding for a label; None for an unknown label or x-user-defined, which is not for text."""
    found = encoding_of(label)
    return None if found == _USER_DEFINED else found


def _guessed(body: bytes) -> str:
    """Guess the encoding of a page that declares none; return windows-1252 if no guess is usable."""
    try:
        from resiliparse.parse.encoding import detect_encoding
    except ImportError:
        raise MissingExtraError("resiliparse", "html", "reading web pages") from None
    guess = detect_encoding(body, from_html_meta=False) or ""  # a name as in Python, such as euc_jp
    return _usable(guess.replace("_", "-")) or "windows-1252"


def _declared(body: bytes) -> str | None:
    """Return the encoding that a page itself declares, or None if it declares no known one.

    The prescan of the HTML standard searches the first 1,024 bytes. Browsers switch to the encoding of a
    later <meta> element when they parse it, so the rest of the head is searched, too, except for scripts and
    titles.
    """
    for start, encoding in ((b"<\0?\0x\0", "utf-16le"), (b"\0<\0?\0x", "utf-16be")):
        if body.startswith(start):
            return encoding
    head = _HEAD_END.split(body[:_HEAD_BYTES], maxsplit=1)[0]
    found = _of_meta(body[:_PRESCANNED_BYTES]) or _of_xml(body[:_PRESCANNED_BYTES])
    if found is None and len(head) > _PRESCANNED_BYTES:
        found = _of_meta(_without_raw_text(head))
    return found


def _without_raw_text(head: bytes) -> bytes:
    """Return a head without elements such as <script>, in which tags are text."""
    parts, at = [], 0
    while (element := _RAW_TEXT.search(head, at)) is not None:
        parts.append(head[at : element.start()])
        end = re.compile(rb"</%s[\s>]" % element[1], re.IGNORECASE).search(head, element.end())
        at = end.end() if end else len(head)
    return b"".join([*parts, head[at:]])


def _of_meta(head: bytes) -> str | None:
    """Return the encoding of the first <meta> element that declares a known one."""
    at = 0
    while (tag := _TAG_START.search(head, at)) is not None:
        at = tag.end()
        if tag["skipped"] is not None:
            end = head.find(b"-->" if tag["skipped"] == b"<!--" else b">", tag.start() + 2)
            if end < 0:
                return None
            at = end
            continue
        attributes: dict[bytes, bytes] = {}
        while (one := _ATTRIBUTE.match(head, at)) is not None:
            at = one.end()
            value = one["double"] or one["single"] or one["bare"] or b""
            attributes.setdefault(one["name"].lower(), value)
        if at == len(head):  # the head ends inside the tag
            return None
        if tag["name"].lower() == b"meta" and (found := _of_attributes(attributes)) is not None:
            return found
    return None


def _of_attributes(attributes: Mapping[bytes, bytes]) -> str | None:
    """Return the encoding that a <meta> element with these attributes declares, or None."""
    label = attributes.get(b"charset")
    if label is None:
        if attributes.get(b"http-equiv", b"").lower() != b"content-type":
            return None
        content = _META_CONTENT.search(attributes.get(b"content", b""))
        label = content and (content["double"] or content["single"] or content["bare"])
    found = encoding_of(label.decode("latin-1")) if label else None
    return {"utf-16le": "utf-8", "utf-16be": "utf-8", _USER_DEFINED: "windows-1252"}.get(found or "", found)


def _of_xml(head: bytes) -> str | None:
    """Return the encoding in the XML declaration at the start of `head`, or None."""
    named = _XML_ENCODING.match(head.partition(b">")[0])
    found = encoding_of(named["label"].decode("latin-1")) if named else None
    return {"utf-16le": "utf-8", "utf-16be": "utf-8"}.get(found or "", found)


def main_text_by(extractor: str | ExtractConfig) -> Callable[[str], str | None]:
    """Return a function that extracts the main text of a page.

    It returns "" if a page has none, and None if the library cannot read the page. `extractor` is the name of
    a library, for its default options, or its settings. Raises MissingExtraError if the library is not
    installed.
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
            return None  # hostile markup makes the libraries fail in many ways
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
        # Deduplication remembers other pages, so the result would depend on the order of reading.
        deduplicate=False,
    )
