"""The main text of a web page, by a library made for that: resiliparse, or trafilatura as FineWeb used it.

A page's bytes are decoded by its byte order mark, the charset of its HTTP header, its own <meta> element, or
else by what the bytes look like, in this order; what cannot be decoded becomes U+FFFD. Results depend on the
page alone.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from functools import partial

from shardkit.errors import MissingExtraError

__all__ = ["decode_page", "main_text_by"]

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


def main_text_by(extractor: str) -> Callable[[str], str | None]:
    """A function from a page to its main text: "" if there is none, None if the library cannot read the page.

    MissingExtraError without the package.
    """
    extract = _trafilatura() if extractor == "trafilatura" else _resiliparse()

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


def _resiliparse() -> Callable[[str], str | None]:
    try:
        from resiliparse.extract.html2text import extract_plain_text
    except ImportError:
        raise MissingExtraError("resiliparse", "html", "extract: resiliparse") from None
    return partial(extract_plain_text, main_content=True, alt_texts=False, comments=False)


def _trafilatura() -> Callable[[str], str | None]:
    try:
        import trafilatura
    except ImportError:
        raise MissingExtraError("trafilatura", "html", "extract: trafilatura") from None
    # Its deduplication remembers other pages: what it gave would depend on the order of reading.
    return partial(trafilatura.extract, favor_precision=True, include_comments=False, deduplicate=False)
