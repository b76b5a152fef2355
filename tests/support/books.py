"""Small PDF files and EPUB books."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Sequence

__all__ = ["epub", "page_of", "pdf"]


def page_of(*lines: str, compress: bool = False) -> bytes:
    """The content stream of a page with lines of text."""
    shown = " T* ".join(f"({line}) Tj" for line in lines)
    return stream_of(f"BT /F1 12 Tf 72 720 Td 14 TL {shown} ET".encode(), compress=compress)


def stream_of(data: bytes, *, compress: bool = False) -> bytes:
    """A stream object."""
    kept = zlib.compress(data, 9) if compress else data
    filtered = b" /Filter /FlateDecode" if compress else b""
    return b"<< /Length %d%b >>\nstream\n%b\nendstream" % (len(kept), filtered, kept)


def pdf(contents: Sequence[bytes], *, title: str = "A title", trailer: bytes = b"") -> bytes:
    """A PDF file with a page for each content stream; `trailer` is added to the trailer's dictionary."""
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"",
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
        f"<< /Title ({title}) /Author (Somebody) >>".encode(),
    ]
    kids: list[bytes] = []
    for content in contents:
        number = len(objects) + 1
        kids.append(b"%d 0 R" % number)
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] "
            b"/Resources << /Font << /F1 3 0 R >> >> /Contents %d 0 R >>" % (number + 1)
        )
        objects.append(content)
    objects[1] = b"<< /Type /Pages /Count %d /Kids [%b] >>" % (len(kids), b" ".join(kids))
    out, offsets = b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n", []
    for number, one in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%b\nendobj\n" % (number, one)
    start = len(out)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    size = len(objects) + 1
    out += b"xref\n0 %d\n0000000000 65535 f \n%b" % (size, table)
    root = b"<< /Size %d /Root 1 0 R /Info 4 0 R %b >>" % (size, trailer)
    return out + b"trailer\n%b\nstartxref\n%d\n%%%%EOF\n" % (root, start)


_CONTAINER = """\
<?xml version="1.0"?><container xmlns="urn:oasis:names:tc:opendocument:xmlns:container" version="1.0">
<rootfiles><rootfile full-path="OEBPS/content.opf" media-type="application/oebps-package+xml"/></rootfiles>
</container>"""


def epub(chapters: dict[str, str], order: Sequence[str], more: dict[str, bytes] | None = None) -> bytes:
    """An EPUB book of {file name: XHTML}, read in `order`; `more` adds or replaces files."""
    items = "".join(
        f'<item id="i{n}" href="{name.replace(" ", "%20")}" media-type="application/xhtml+xml"/>'
        for n, name in enumerate(chapters)
    )
    spine = "".join(f'<itemref idref="i{[*chapters].index(name)}"/>' for name in order)
    package = (
        '<?xml version="1.0"?><package xmlns="http://www.idpf.org/2007/opf" version="3.0">'
        '<metadata xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>A book</dc:title>'
        "<dc:creator>Somebody</dc:creator><dc:language>en</dc:language>"
        "<dc:identifier>urn:isbn:123</dc:identifier></metadata>"
        f"<manifest>{items}</manifest><spine>{spine}</spine></package>"
    )
    files: dict[str, bytes] = {
        "META-INF/container.xml": _CONTAINER.encode(),
        "OEBPS/content.opf": package.encode(),
        **{f"OEBPS/{name}": text.encode() for name, text in chapters.items()},
        **(more or {}),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as book:
        book.writestr(zipfile.ZipInfo("mimetype"), "application/epub+zip")
        for name, data in files.items():
            book.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
