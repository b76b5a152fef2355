"""Reads pages from MediaWiki's XML exports, such as Wikipedia's dumps (pages-articles.xml.bz2).

Every <page> is a record, whose number counts the pages of the file. Its document is the last revision's
wikitext as plain text (wikitext.py). Pages without a document are dropped: those of namespaces that the
recipe does not name (`mediawiki/namespace`), redirects (`mediawiki/redirect`), contents other than wikitext,
such as JSON and Lua (`mediawiki/not_wikitext`), pages without text (`mediawiki/no_text`), and wikitext
that is too irregular to be parsed in bounded time (`mediawiki/unreadable`). `mediawiki/markup` counts the
bytes of wikitext that are not in the text.

The XML is parsed as a stream by expat, so memory is a piece of the file and one page. A file that ends inside
a page, or is no well-formed XML from some byte on, loses everything after its last whole page. Declarations
of a document type are refused, because exports have none and their entities can grow without bound.

Fields: `id` (page id), `url` (from the wiki's address in <siteinfo>), `title`, `namespace`, `revision`,
`timestamp` and `wiki` (the database name, such as enwiki).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import quote
from xml.parsers import expat

from shardkit.writers.inputs.decompress import ContainerError
from shardkit.writers.inputs.files import open_input
from shardkit.writers.inputs.records import RecordSink
from shardkit.writers.inputs.wikitext import text_of
from shardkit.writers.recipe.inputs import InputConfig

_MAX_DEPTH = 16  # exports have 5 levels
_TAG_BYTES = 1 << 20  # maximum size of one tag or comment, which expat holds until its end
_FIELD_CHARACTERS = 1 << 12  # maximum length of values other than the text; a title has up to 255 bytes
_MAX_NAMESPACES = 1 << 12
_LEFT_OUT = {-2: "media", 6: "file", 14: "category"}  # namespaces whose links are not text
_WIKITEXT = frozenset({"", "wikitext"})
_PAGE_FIELDS = {"title", "ns", "id"}
_REVISION_FIELDS = {"id", "timestamp", "model", "format"}
# MediaWiki leaves these characters as they are in the addresses of pages.
_PLAIN_IN_URL = ";@$!*(),/~:"


@dataclass
class _Page:
    """A page as it is read; `text` has the parts of the last revision's wikitext."""

    offset: int
    fields: dict[str, str] = field(default_factory=dict)
    is_redirect: bool = False
    text: list[str] = field(default_factory=list)
    size: int = 0  # length of the text in bytes, also of parts that were not kept
    end: int = 0


class _RefusedError(Exception):
    """The XML is well-formed so far, but is none that MediaWiki exports."""


def read_mediawiki(sink: RecordSink, config: InputConfig) -> Iterator[None]:
    """Read an XML export: pass all of its pages to the sink."""
    sink.offset = 0
    with open_input(sink.split.input) as file:
        export, pieces = _Export(sink.max_record_bytes), sink.pieces(file)
        try:
            for piece in pieces:
                export.feed(piece)
                for page in export.taken():
                    _take_page(sink, config, export, page)
                    yield
            export.close()
        except (expat.ExpatError, _RefusedError) as error:
            for page in export.taken():
                _take_page(sink, config, export, page)
                yield
            problem = f"not readable XML: {error}"
            if isinstance(error, expat.ExpatError) and export.is_closed:
                problem = "truncated: the file ends before </mediawiki>"
            with suppress(ContainerError):
                for _ in pieces:
                    pass  # count the bytes that are lost
            sink.damaged(problem, bytes=sink.position - (sink.offset or 0))


def _take_page(sink: RecordSink, config: InputConfig, export: _Export, page: _Page) -> None:
    """Pass a page to the sink, and set the sink's position to the end of the page."""
    sink.offset = page.offset
    _book(sink, config, export, page)
    sink.record, sink.offset = sink.record + 1, page.end


def _book(sink: RecordSink, config: InputConfig, export: _Export, page: _Page) -> None:
    fields, size = page.fields, page.size
    namespace = fields.get("ns", "0")
    if page.size > sink.max_record_bytes:
        sink.too_long(size, head="".join(page.text)[:_FIELD_CHARACTERS].encode())
    elif namespace not in map(str, config.namespaces):
        sink.drop("mediawiki/namespace", bytes=size)
    elif page.is_redirect:
        sink.drop("mediawiki/redirect", bytes=size)
    elif fields.get("model", "") not in _WIKITEXT:
        sink.drop("mediawiki/not_wikitext", bytes=size)
    elif (text := text_of("".join(page.text), export.left_out)) is None:
        sink.drop("mediawiki/unreadable", bytes=size)
    elif not text:
        sink.drop("mediawiki/no_text", bytes=size)
    else:
        title = fields.get("title", "")
        found = {
            "id": fields.get("id"),
            "url": export.url_of(title),
            "title": title,
            "namespace": int(namespace),
            "revision": fields.get("revision"),
            "timestamp": fields.get("timestamp"),
            "wiki": export.site.get("dbname"),
        }
        sink.add(text, found, bytes=size, markup=False)
        sink.drop_bytes("mediawiki/markup", max(size - len(text.encode()), 0))


class _Export:
    """Takes the bytes of an export, and gives its pages; `site` has the values of <siteinfo>."""

    def __init__(self, max_text_bytes: int) -> None:
        self._limit = max_text_bytes
        self.site: dict[str, str] = {}
        self.left_out = frozenset({"file", "image", "media", "category"})
        self.is_closed = False
        self._fed = 0
        self._path: list[str] = []
        self._pages: list[_Page] = []
        self._page: _Page | None = None
        self._value: list[str] = []
        self._value_size = 0
        self._key = ""  # number of the namespace that is named
        self._namespaces = 0
        parser = self._parser = expat.ParserCreate("utf-8")
        parser.buffer_text, parser.buffer_size = True, 1 << 16
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._characters
        parser.StartDoctypeDeclHandler = self._refuse_doctype

    def feed(self, piece: bytes) -> None:
        """Parse a piece; raise ExpatError or _RefusedError if it is no export."""
        self._parser.Parse(piece, False)
        self._fed += len(piece)
        if self._fed - self._parser.CurrentByteIndex > _TAG_BYTES + len(piece):
            raise _RefusedError(f"a tag is longer than {_TAG_BYTES:,} bytes")

    def close(self) -> None:
        """End the file; raise ExpatError if elements are open."""
        self.is_closed = True
        self._parser.Parse(b"", True)

    def taken(self) -> Iterator[_Page]:
        """Yield the pages that have been read since the last call."""
        while self._pages:
            yield self._pages.pop(0)

    def url_of(self, title: str) -> str | None:
        """Return a page's address: that of the main page with another title; None if it is unknown."""
        above, slash, _ = self.site.get("base", "").rpartition("/")
        return f"{above}/{quote(title.replace(' ', '_'), safe=_PLAIN_IN_URL)}" if slash else None

    def _refuse_doctype(self, *_: object) -> None:
        raise _RefusedError("it declares a document type, which no export does")

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        path = self._path
        if not path and name != "mediawiki":
            raise _RefusedError(f"its first element is <{name[:40]}>, not <mediawiki>")
        if len(path) >= _MAX_DEPTH:
            raise _RefusedError("its elements are nested too deeply")
        path.append(name)
        self._value, self._value_size = [], 0
        if path[1:] == ["page"]:
            self._page = _Page(self._parser.CurrentByteIndex)
        elif path[1:] == ["siteinfo", "namespaces", "namespace"]:
            self._key = attributes.get("key", "")
        elif self._page is not None:
            if path[2:] == ["redirect"]:
                self._page.is_redirect = True
            elif path[2:] == ["revision"]:  # of several revisions the last one counts
                self._page.text, self._page.size = [], 0
                for key in ("model", "revision", "timestamp"):
                    self._page.fields.pop(key, None)

    def _characters(self, data: str) -> None:
        page = self._page
        if page is not None and self._path[2:] == ["revision", "text"]:
            page.size += len(data) if data.isascii() else len(data.encode("utf-8", "replace"))
            if page.size <= self._limit or not page.text:
                page.text.append(data)
        elif self._value_size <= _FIELD_CHARACTERS:
            self._value.append(data)
            self._value_size += len(data)

    def _end(self, name: str) -> None:
        path, page = self._path, self._page
        value = "".join(self._value)[:_FIELD_CHARACTERS].strip()
        self._value, self._value_size = [], 0
        if page is not None:
            if len(path) == 2:
                page.end = self._parser.CurrentByteIndex + len(b"</page>")
                self._pages.append(page)
                self._page = None
            elif len(path) == 3 and name in _PAGE_FIELDS:
                page.fields[name] = value
            elif path[2:3] == ["revision"] and len(path) == 4 and name in _REVISION_FIELDS:
                page.fields["revision" if name == "id" else name] = value
        elif path[1:2] == ["siteinfo"]:
            if len(path) == 3:
                self.site[name[:_FIELD_CHARACTERS]] = value
            elif len(path) == 4 and name == "namespace":
                self._add_namespace(value)
        path.pop()

    def _add_namespace(self, name: str) -> None:
        """Note how this wiki calls files and categories, in its own language."""
        self._namespaces += 1
        if self._namespaces > _MAX_NAMESPACES:
            raise _RefusedError(f"it has more than {_MAX_NAMESPACES:,} namespaces")
        if self._key in map(str, _LEFT_OUT) and name:
            self.left_out |= {name.lower().replace("_", " ")}
