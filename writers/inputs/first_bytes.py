"""Recognizes the kind of a file by its first bytes, independently of its name.

`look` is called with the first bytes of a file as stored and, if these are compressed, again with the first
bytes of the content. It recognizes compressions, containers (Parquet, Arrow, tar, zip, ...), documents of
other programs (PDF, Word), pointers of Git LFS, and kinds of text: the encoding by a byte order mark or by
NUL bytes, and JSON, HTML and XML. `FirstBytes.problem` then says why a reader cannot read the file and what
to do.

A binary format is recognized only by bytes with which no text begins: a signature of letters (PAR1, ORC) must
be followed by bytes that are not text, so a document that begins with these letters stays a document. A file
that is not recognized is treated as text, which its reader checks. Nothing is opened or read here.
"""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import dataclass
from typing import BinaryIO

from shardkit.errors import BuildError
from shardkit.formats.tfrecord import begins_tfrecord

HEAD_BYTES = 1 << 12
"""Number of first bytes to pass to `look`; pass the whole of a shorter file."""

_EXTRACT = "extract its text first, or leave the file out"
_READ_AS = "name it {ending} or set {key}.format: {format}"
_SET = "set {key}.format: {format}"


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    what: str  # completes the message "it is ..."
    starts: re.Pattern[bytes]  # matches the first bytes of such a file
    has_letters: bool = False  # text may begin with the signature, so bytes that are not text must follow
    remedy: str = _EXTRACT
    compression: str | None = None  # value of COMPRESSIONS for such files
    format: str | None = None  # value of InputConfig.format for such files
    ending: str = ""


def _starts(expression: bytes) -> re.Pattern[bytes]:
    return re.compile(expression, re.DOTALL | re.IGNORECASE)


_COMPRESSED = tuple(
    _Kind(name, f"compressed by {name}", re.compile(magic, re.DOTALL), False, "decompress it", name)
    for name, magic in {
        "gzip": rb"\x1f\x8b\x08[\x00-\x1f]",
        "zstd": rb"\x28\xb5\x2f\xfd",
        "bz2": rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)",
        "xz": rb"\xfd7zXZ\0",
        "lz4": rb"\x04\x22\x4d\x18",
    }.items()
)
_BINARY = (
    _Kind("parquet", "Parquet", re.compile(rb"PAR1"), True, _READ_AS, None, "parquet", ".parquet"),
    _Kind("encrypted", "encrypted Parquet", re.compile(rb"PARE"), True, "decrypt it first"),
    _Kind("arrow", "an Arrow file", re.compile(rb"ARROW1"), True, _READ_AS, None, "arrow", ".arrow"),
    _Kind(
        "feather",
        "Feather of version 1",
        re.compile(rb"FEA1"),
        True,
        "convert it to version 2, which is read, by pyarrow.feather's write_feather(read_table(OLD), NEW)",
    ),
    _Kind("orc", "ORC", re.compile(rb"ORC"), True, "convert it to Parquet"),
    _Kind("avro", "Avro", re.compile(rb"Obj\x01"), False, "convert it to Parquet or JSON lines"),
    _Kind(
        "tar",
        "a tar archive",
        re.compile(rb".{257}ustar[\0 ]", re.DOTALL),
        False,
        "unpack it, or set {key}.format: wds if it is a WebDataset",
        None,
        "wds",
        ".tar",
    ),
    _Kind(
        "epub",
        "an EPUB book",
        re.compile(rb"PK\x03\x04.{26}mimetypeapplication/epub\+zip", re.DOTALL),
        False,
        _READ_AS,
        None,
        "epub",
        ".epub",
    ),
    _Kind(
        "zip",
        "a zip archive, as are files of Word and Excel and numpy's .npz",
        re.compile(rb"PK(?:\x03\x04|\x05\x06|\x07\x08)"),
        False,
        "unpack it, or extract its text first",
    ),
    _Kind("7z", "a 7z archive", re.compile(rb"7z\xbc\xaf\x27\x1c"), False, "unpack it with `7z x`"),
    _Kind("rar", "a RAR archive", re.compile(rb"Rar!\x1a\x07"), False, "unpack it"),
    _Kind("snappy", "framed Snappy", re.compile(rb"\xff\x06\x00\x00sNaPpY"), False, "decompress it"),
    _Kind(
        "pdf",
        "a PDF document",
        re.compile(rb"%PDF-\d\.\d\s*[\r\n]"),
        False,
        _READ_AS,
        None,
        "pdf",
        ".pdf",
    ),
    _Kind("postscript", "PostScript", re.compile(rb"%!PS-Adobe-\d")),
    _Kind("rtf", "a document in RTF", re.compile(rb"\{\\rtf\d")),
    _Kind(
        "ole",
        "a document of old Word, Excel or PowerPoint",
        re.compile(rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"),
    ),
    _Kind("djvu", "a DjVu document", re.compile(rb"AT&TFORM.{4}DJV", re.DOTALL)),
    _Kind(
        "sqlite",
        "an SQLite database",
        re.compile(rb"SQLite format 3\0"),
        False,
        "export its table to CSV or Parquet",
    ),
    _Kind("hdf5", "HDF5", re.compile(rb"\x89HDF\r\n\x1a\n"), False, "convert it to Parquet"),
    _Kind("numpy", "a numpy array", re.compile(rb"\x93NUMPY"), False, "convert it to text or Parquet"),
    _Kind(
        "pickle",
        "a Python pickle",
        re.compile(rb"\x80[\x02-\x05][\x95}\](cX\x8c]"),
        False,
        "convert it to JSON lines",
    ),
    _Kind("png", "a PNG image", re.compile(rb"\x89PNG\r\n\x1a\n")),
    _Kind("jpeg", "a JPEG image", re.compile(rb"\xff\xd8\xff")),
    _Kind("gif", "a GIF image", re.compile(rb"GIF8[79]a"), True),
    _Kind("riff", "a RIFF file (WebP, WAV, AVI)", re.compile(rb"RIFF.{4}(?:WEBP|WAVE|AVI )", re.DOTALL)),
    _Kind("ogg", "an Ogg file", re.compile(rb"OggS\0")),
    _Kind("video", "a video", re.compile(rb".{4}ftyp[a-zA-Z0-9]{3}|\x1a\x45\xdf\xa3", re.DOTALL)),
    _Kind("elf", "a program", re.compile(rb"\x7fELF|MZ.{58}.{2}\0\0", re.DOTALL), True),
)
_TFRECORD = _Kind(
    "tfrecord", "a TFRecord file", re.compile(rb""), False, _READ_AS, None, "tfrecord", ".tfrecord"
)
_LFS = _Kind(
    "lfs",
    "a pointer of Git LFS, not the file itself",
    re.compile(
        rb"version https?://(?:git-lfs\.github\.com|hawser\.github\.com|git-media\.io)/(?:spec/)?v\d\r?\n"
        rb"(?:ext-[^\n]*\n)*oid sha256:[0-9a-f]{64}\s"
    ),
    False,
    "run `git lfs pull` where the data was cloned",
)
_LISTED = (
    rb"[^\s{}\"<>|]+\.(?:jsonl|ndjson|parquet|arrow|mds|tar|warc|wet|arc)(?:\.(?:gz|zst|bz2|xz|lz4))?[ \t\r]*"
)
_LIST = _Kind(
    "paths",
    "a list of paths",
    # Two lines or more, of which the last may be cut.
    re.compile(rb"(?:" + _LISTED + rb"\n\s*)+" + _LISTED + rb"\s*(?:[^\s{}\"<>|]*\Z)", re.IGNORECASE),
    False,
    "set {key}.list: true to read the files that it names",
)
# The kinds of text. Before its first element, an HTML page may have an XML declaration and comments.
_TEXTUAL = (
    _LFS,
    _Kind("warc", "a web archive", re.compile(rb"WARC/\d\.\d\r?\n"), False, _READ_AS, None, "warc", ".warc"),
    _Kind(
        "arc",
        "a web archive",
        re.compile(rb"filedesc://\S+ \S+ \d{8}"),
        False,
        _READ_AS,
        None,
        "warc",
        ".arc",
    ),
    _Kind(
        "html",
        "HTML",
        _starts(rb"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html|head|body)[\s>]"),
        False,
        "if the input is web pages, name the files .html or set {key}.format: html; "
        "if not, for example because it is the error page of a server, leave the file out",
        None,
        "html",
        ".html",
    ),
    _Kind(
        "mediawiki",
        "an XML export of MediaWiki, as Wikipedia's dumps are",
        re.compile(rb"\s*(?:<\?xml[^>]*>\s*)?<mediawiki[\s>]"),
        False,
        _SET,
        None,
        "mediawiki",
        ".xml",
    ),
    _Kind(
        "stackexchange",
        "Posts.xml of a Stack Exchange dump",
        re.compile(rb"\s*(?:<\?xml[^>]*>\s*)?<posts>"),
        False,
        _SET,
        None,
        "stackexchange",
        ".xml",
    ),
    _Kind(
        "xml-table",
        "a table of a Stack Exchange dump without posts",
        _starts(
            rb"\s*(?:<\?xml[^>]*>\s*)?<(?:users|comments|votes|badges|tags|postlinks|posthistory)>\s*<row\s"
        ),
        False,
        "leave the file out: the texts are in Posts.xml",
    ),
    _Kind("xml", "XML", _starts(rb"\s*<\?xml\s+version\s*="), False, _EXTRACT),
    _Kind(
        "json",
        "an array of JSON",
        re.compile(rb"\s*\[\s*(?:\{\s*[\"}]|\Z)"),
        False,
        _READ_AS,
        None,
        "json",
        ".json",
    ),
    _LIST,
)
_JSON_LINES = _Kind(
    "jsonl",
    "JSON lines",
    re.compile(rb"\s*\{\s*\"[^\"\\\n]*\"\s*:"),
    False,
    _READ_AS,
    None,
    "jsonl",
    ".jsonl",
)
_PRETTY = _Kind("json", "JSON over several lines", re.compile(rb""), False, _READ_AS, None, "json", ".json")
_TEXT = _Kind("text", "text", re.compile(rb""))
# Kinds of text that are not read as plain text unless the recipe sets `format: text`.
_MARKUP = frozenset(
    {"html", "xml", "xml-table", "mediawiki", "stackexchange", "json", "jsonl", "warc", "arc", "paths"}
)
XML_FORMATS = frozenset({"mediawiki", "stackexchange"})
"""Formats whose files are called .xml, and that only their content tells apart."""
_PACKED = frozenset({"parquet", "arrow", "wds", "pdf", "epub"})
# (format, other kind that its reader can read)
_ALSO_READ = frozenset({("epub", "zip"), ("html", "xml"), ("json", "jsonl")})
# Matches an object whose first line is incomplete, and whose second line cannot begin a record.
_UNFINISHED = re.compile(rb"\s*\{[^\n]*(?<=[{\[,:])[ \t\r]*\n\s*?(?:[ \t]|[\"}\]])")

_MARKS = (
    (b"\xff\xfe\0\0", "utf-32le"),
    (b"\0\0\xfe\xff", "utf-32be"),
    (b"\xef\xbb\xbf", "utf-8"),
    (b"\xff\xfe", "utf-16le"),
    (b"\xfe\xff", "utf-16be"),
    (b"\x84\x31\x95\x33", "gb18030"),
)
# Control characters that do not occur in text; ESC does, in colored terminal output.
_CONTROLS = bytes({*range(32)} - {*b"\t\n\v\f\r\x1b"})
_LEAST_BYTES = 8
_LEAST_UNITS = 16  # minimum length of UTF-16 text that is recognized by its characters alone, in code units
_BLANKS = "\t\n\r \u3000\u3001\u3002\uff0c"


@dataclass(frozen=True, slots=True)
class FirstBytes:
    """The kind and encoding of a file, judged by its first bytes."""

    _kind: _Kind
    encoding: str = "utf-8"
    """The encoding of text, by its byte order mark or, without one, by the positions of NUL bytes."""
    mark: bytes = b""
    """The byte order mark."""

    @property
    def kind(self) -> str:
        """The kind: text, html, xml, json (an array, or over several lines), jsonl, warc, lfs, gzip, ..."""
        return self._kind.name

    @property
    def what(self) -> str:
        """The kind in words, for messages: "a PDF document"."""
        return self._kind.what

    @property
    def compression(self) -> str | None:
        """The value of COMPRESSIONS for the file; None if it is not compressed."""
        return self._kind.compression

    @property
    def format(self) -> str | None:
        """The value of `inputs[].format` for the file; None for plain text and unreadable kinds."""
        return self._kind.format

    @property
    def is_text(self) -> bool:
        """Whether the file may be read as text of any kind."""
        return self._kind in (*_TEXTUAL[1:], _JSON_LINES, _PRETTY, _TEXT)

    @property
    def lacks_mark(self) -> bool:
        """Whether the file is evidently UTF-16 or UTF-32 but has no byte order mark."""
        return self.encoding != "utf-8" and not self.mark

    def has_lines(self, format: str) -> bool:
        """Return whether the file is plain UTF-8 with one record per line, and can be cut at newlines."""
        is_json = format == "jsonl" and self.kind == "json"
        return self.compression is None and self.encoding == "utf-8" and not is_json

    def problem(self, format: str, key: str, *, is_chosen: bool = False) -> str | None:
        """Return why a reader of `format` cannot read the file and what to do, or None if it can.

        `key` is the input's key path in the recipe. With `is_chosen`, the recipe itself sets the format, so
        with `format: text` even JSON, HTML or XML is read as plain text.
        """
        kind = self._kind
        if kind is _TEXT or format == kind.format or (format, kind.name) in _ALSO_READ:
            return None
        if format == "text" and is_chosen and kind.name in _MARKUP:
            return None
        remedy = kind.remedy.format(key=key, ending=kind.ending, format=kind.format)
        if format == "text" and kind.name in _MARKUP:
            remedy += f"; or set {key}.format: text to read it as plain text"
        return f"it is {kind.what}; {remedy}"


def look(head: bytes) -> FirstBytes:
    """Recognize a file by `head`, its first `HEAD_BYTES` bytes or more, or all bytes of a shorter file."""
    if begins_tfrecord(head):  # first, because the length of a record may look like any signature
        return FirstBytes(_TFRECORD)
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            return FirstBytes(_kind_in(head[len(mark) :], encoding), encoding, mark)
    for kind in (*_COMPRESSED, *_BINARY):
        if kind.starts.match(head) and (_holds_no_text(head) or not kind.has_letters):
            return FirstBytes(kind)
    wide = _wide_encoding(head)
    return FirstBytes(_kind_of_text(head)) if wide is None else FirstBytes(_kind_in(head, wide), wide)


def compression_in(head: bytes, named: str | None) -> str | None:
    """Return the compression of a file that begins with `head`, or None; its name indicates `named`.

    The signature decides. If a file with the name of a compressed one has text, a server or browser has
    decompressed it in transit: return None. So for TFRecord. For any other content, return `named`: the
    decoder then reports what is wrong.
    """
    found = look(head)
    if found.compression is not None or named is None or found.kind == _TFRECORD.name:
        return found.compression
    return named if not head or found.format in _PACKED or _holds_no_text(head) else None


def compression_of(file: BinaryIO, named: str | None) -> str | None:
    """Return the compression of an open file, or None, by its first bytes; its name indicates `named`."""
    file.seek(0)
    head = file.read(HEAD_BYTES)
    file.seek(0)
    return compression_in(head, named)


def raise_if_pointer(found: FirstBytes, path: str) -> None:
    """Raise BuildError if a file is a pointer of Git LFS, because its data is not here."""
    if found.kind == "lfs":
        raise BuildError(f"{path}: the file is {_LFS.what}: {_LFS.remedy}")


_PYTHON = {"utf-16le": "utf-16-le", "utf-16be": "utf-16-be", "utf-32le": "utf-32-le", "utf-32be": "utf-32-be"}


def _kind_in(head: bytes, encoding: str) -> _Kind:
    return _kind_of_text(head.decode(_PYTHON.get(encoding, encoding), "ignore").encode("utf-8", "replace"))


def _kind_of_text(head: bytes) -> _Kind:
    for kind in _TEXTUAL:
        if kind.starts.match(head):
            return kind
    if not head.lstrip().startswith(b"{"):
        return _TEXT
    if _UNFINISHED.match(head) and not _is_json(head.lstrip().partition(b"\n")[0]):
        return _PRETTY
    return _JSON_LINES if _JSON_LINES.starts.match(head) else _TEXT


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _holds_no_text(head: bytes) -> bool:
    """Return whether `head` has control characters or is not UTF-8; its last character may be truncated."""
    if len(head.translate(None, _CONTROLS)) < len(head):
        return True
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.end < len(head) or error.reason != "unexpected end of data"
    return False


def _wide_encoding(head: bytes) -> str | None:
    """Return utf-16le, -16be, -32le or -32be if `head` is evidently such text without a byte order mark.

    Latin letters, digits and blanks have NUL bytes at a fixed position in each code unit. Other UTF-16 text
    is recognized by its characters: in a wrong encoding, bytes that are not UTF-8 would hardly ever decode to
    assigned characters only.
    """
    if len(head) < _LEAST_BYTES or not _holds_no_text(head):
        return None
    zeros = [head[place::4].count(0) * 4 / len(head) for place in range(4)]
    if min(zeros[2:]) > 0.9 and zeros[0] < 0.1 and _is_latin(head[::4]):
        return "utf-32le"
    if min(zeros[:2]) > 0.9 and zeros[3] < 0.1 and _is_latin(head[3::4]):
        return "utf-32be"
    for encoding, high in (("utf-16le", 1), ("utf-16be", 0)):
        if head[high::2].count(0) > 0.2 * len(head) and _is_latin(head[1 - high :: 2]):
            return encoding
    return next((name for name in ("utf-16le", "utf-16be") if _is_plausible(head, name)), None)


def _is_latin(low: bytes) -> bool:
    """Return whether none of the low bytes of UTF-16 or UTF-32 characters is a control character."""
    return len(low.translate(None, _CONTROLS)) == len(low)


def _is_plausible(head: bytes, encoding: str) -> bool:
    """Return whether `head` decodes to assigned characters of a few scripts, with blanks between them."""
    whole = head[: len(head) & ~1]
    try:
        text = whole.decode(_PYTHON[encoding])
    except UnicodeDecodeError as error:
        if error.start < len(whole) - 2:  # an error at the very end is a surrogate pair that `head` cuts
            return False
        text = whole[: error.start].decode(_PYTHON[encoding])
    blanks = sum(one in _BLANKS for one in text)
    rows = len({ord(one) >> 8 for one in text})  # in a wrong encoding, characters spread over all of Unicode
    return (
        len(text) >= _LEAST_UNITS
        and blanks > len(text) // 100
        and rows <= 2 + len(text) // 4
        and not any(unicodedata.category(one) in ("Cn", "Co", "Cc") for one in text if one not in _BLANKS)
    )
