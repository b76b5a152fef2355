"""Small dumps, as Wikipedia and Stack Exchange publish them."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape, quoteattr

__all__ = ["export", "page", "posts"]

_HEAD = """\
<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="de">
  <siteinfo>
    <sitename>Wikipedia</sitename>
    <dbname>dewiki</dbname>
    <base>https://de.wikipedia.org/wiki/Wikipedia:Hauptseite</base>
    <namespaces>
      <namespace key="0" case="first-letter" />
      <namespace key="1" case="first-letter">Diskussion</namespace>
      <namespace key="6" case="first-letter">Datei</namespace>
      <namespace key="14" case="first-letter">Kategorie</namespace>
    </namespaces>
  </siteinfo>
"""


def export(*pages: str) -> bytes:
    """An XML export of MediaWiki, of a German wiki."""
    return (_HEAD + "".join(pages) + "</mediawiki>\n").encode()


def page(
    number: int,
    title: str,
    *texts: str,
    namespace: int = 0,
    model: str = "wikitext",
    redirect: bool = False,
) -> str:
    """A page with a revision for each of the texts."""
    revisions = "".join(
        f"<revision><id>{number * 100 + at}</id><timestamp>2024-01-0{at + 1}T00:00:00Z</timestamp>"
        f"<contributor><username>somebody</username><id>7</id></contributor><model>{model}</model>"
        f'<format>text/x-wiki</format><text bytes="1" xml:space="preserve">{escape(text)}</text></revision>'
        for at, text in enumerate(texts)
    )
    target = '<redirect title="elsewhere" />' if redirect else ""
    return (
        f"  <page>\n    <title>{escape(title)}</title><ns>{namespace}</ns><id>{number}</id>{target}\n"
        f"    {revisions}\n  </page>\n"
    )


def posts(rows: Iterable[dict[str, object]]) -> bytes:
    """A file Posts.xml; newlines in values are written as character references, as in the real ones."""
    lines = [
        "  <row "
        + " ".join(f"{key}={quoteattr(str(value), {chr(10): '&#xA;'})}" for key, value in row.items())
        + " />\r\n"
        for row in rows
    ]
    head = '\ufeff<?xml version="1.0" encoding="utf-8"?>\r\n<posts>\r\n'
    return (head + "".join(lines) + "</posts>").encode()
