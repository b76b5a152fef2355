"""Reads questions and answers from Posts.xml of Stack Exchange's dumps.

Such a file has one post per line: `<row Id="4" PostTypeId="1" Score="7" Body="&lt;p&gt;…" … />`. Each line is
parsed by itself, so a bad row costs itself only, and large plain files are cut into splits at line ends.
Record numbers are line numbers. Questions and answers are documents; other posts, such as descriptions of
tags, are dropped (`stackexchange/other_post`). The text is the body as HTML, preceded by the title of a
question; without `extract`, resiliparse makes plain text of it, with code as it is.

Fields: every attribute by its name (`Id`, `Score`, `OwnerUserId`, …), and
- `id`: the post's number, and `type`: question or answer
- `site`: the folder of the file, which the archive of a site is unpacked to (cooking.stackexchange.com)
- `thread`: site and number of the question, which its answers share
- `rank`: text by which posts of a thread are sorted: the question, then answers by falling score
- `score` (a number), `tags` (a list), `title`, `date` and `license`
- `url`, if the site is a host name
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from pathlib import PurePosixPath
from xml.etree import ElementTree

from shardkit.writers.inputs.files import open_input
from shardkit.writers.inputs.lines import Lines
from shardkit.writers.inputs.records import RecordSink
from shardkit.writers.recipe.inputs import InputConfig

_TYPES = {"1": "question", "2": "answer"}
_NOT_ROWS = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:<\?xml[^<>]*\?>\s*)?(?:<posts>|</posts>)?\s*")
_END = b"</posts>"
_TAGS = re.compile(r"[^<>|]+")  # <a><b>, or in later dumps |a|b|
_HOST = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)+")
_HIGHEST = 10**9  # above all scores; the highest is about 30,000
_INTEGER = re.compile(r"-?[0-9]{1,9}")


def read_stackexchange(sink: RecordSink, config: InputConfig) -> Iterator[None]:
    """Read Posts.xml: pass all of its posts to the sink."""
    split = sink.split
    site = PurePosixPath(split.file).parent.name
    with open_input(split.input) as file:
        lines = Lines(sink.pieces(file), offset=split.start, max_line_bytes=sink.max_record_bytes)
        last = b""
        sink.offset = split.start
        for offset, length, line, whole in lines:
            sink.offset = offset
            last = line if line and not line.isspace() else last
            if not whole:
                sink.too_long(length, head=line)
            elif not _NOT_ROWS.fullmatch(line):
                _take_row(sink, site, line)
            sink.record, sink.offset = sink.record + 1, lines.offset
            yield
    is_last = sink.compression is not None or split.end == split.input.bytes
    is_whole = not last or last.rstrip().endswith(b">")  # a line that is cut is an entry already
    if is_last and is_whole and not last.rstrip().endswith(_END):
        sink.damaged("truncated: the file ends before </posts>", bytes=0)


def _take_row(sink: RecordSink, site: str, line: bytes) -> None:
    if not line.lstrip().startswith(b"<row "):
        problem = "the line is not <row … />; each post must have a line of its own, as in the dumps"
        sink.bad("bad_record", problem, head=line)
        return
    try:
        text = sink.decode(line)
        row = ElementTree.fromstring(text)
    except UnicodeDecodeError as error:
        sink.bad("bad_utf8", f"byte {error.start:,} of the line is not UTF-8", head=line)
        return
    except (ElementTree.ParseError, ValueError) as error:
        sink.bad("bad_record", f"the row is not readable XML: {error}", head=line)
        return
    post = dict(row.attrib)
    kind = _TYPES.get(post.get("PostTypeId", ""))
    if kind is None:
        sink.drop("stackexchange/other_post", bytes=len(line))
    elif "Body" not in post:
        known = ", ".join(sorted(name[:40] for name in post)[:20])
        sink.bad("no_text", f"the row has no Body; its attributes: {known or 'none'}", head=line)
    else:
        title = post.get("Title", "") if kind == "question" else ""
        head = f"<p>{escape(title, quote=False)}</p>\n" if title else ""
        sink.add(head + post["Body"], _fields(post, kind, site), bytes=len(line))


def _fields(post: dict[str, str], kind: str, site: str) -> dict[str, object]:
    number = post.get("Id", "")
    question = number if kind == "question" else post.get("ParentId", "")
    score = _number(post.get("Score"))
    is_host = _HOST.fullmatch(site) is not None and number.isdigit()
    rank = f"0{number}" if kind == "question" else f"1{_HIGHEST - (score or 0):010d}"
    return post | {
        "id": number or None,
        "type": kind,
        "site": site or None,
        "thread": (f"{site}/{question}" if site else question) if question else None,
        "rank": rank,
        "score": score,
        "tags": _TAGS.findall(post.get("Tags", "")),
        "title": post.get("Title"),
        "date": post.get("CreationDate"),
        "license": post.get("ContentLicense"),
        "url": f"https://{site}/{'questions' if kind == 'question' else 'a'}/{number}" if is_host else None,
    }


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and _INTEGER.fullmatch(text) else None
