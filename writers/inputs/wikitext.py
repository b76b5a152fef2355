"""Converts MediaWiki's wikitext to plain text, parsed by mwparserfromhell.

The text is close to that of the dataset wikimedia/wikipedia, which has the same parser:
- removed: templates, tables, references, comments, galleries, images and other files, links to categories,
  and magic words such as __NOTOC__
- links and external links become their labels; an external link without a label in brackets is removed
- headings stay as lines, also those of sections that have no other text
- different: formulas (<math>) stay as TeX between dollar signs, because sentences without them are wrong;
  items of lists begin with "- "; a reference list's heading is kept

Templates are not expanded, because that needs the wiki's own Lua modules: what templates write, such as
converted units and some dates, is missing.

The parser looks for the end of every markup that begins, and of one that never ends up to the end of the
page, for hostile pages in quadratic or exponential time. `text_of` therefore refuses a page by the number of
openings without an end, times its length, and by its length. These limits do not depend on the machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from shardkit.errors import MissingExtraError
from shardkit.lazy import collector_paused

try:
    import mwparserfromhell
    from mwparserfromhell import nodes
    from mwparserfromhell.definitions import is_visible
    from mwparserfromhell.parser import ParserError
except ImportError:
    raise MissingExtraError("mwparserfromhell", "wiki", "reading wikitext") from None

MAX_CHARACTERS = 1 << 22  # MediaWiki's own limit is 2 MiB
_MAX_WORK = 20_000_000  # openings without an end, times the length of the page; takes a few seconds
_SINGLE = "br|wbr|hr|img|link|meta|input|area|base|col|li|dt|dd|th|td|tr|p"
_MARKS = re.compile(
    r"(?P<open>\{\{|\{\||\[\[|\[|<!--)|(?P<close>\}\}|\|\}|\]\]|\]|-->)"
    rf"|</(?P<end>\w+)|<(?!(?:{_SINGLE})\b)(?P<tag>\w+)(?![^<>]{{0,1000}}/>)",
    re.IGNORECASE,
)
_ENDS = {"{{": "}}", "{|": "|}", "[[": "]]", "[": "]", "<!--": "-->"}
_LITERAL = re.compile(
    r"<!--.*?-->|<(nowiki|pre|math|source|syntaxhighlight)\b[^<>]*(?<!/)>.*?</\1\s*>",
    re.IGNORECASE | re.DOTALL,
)
_MAGIC = re.compile(r"__[A-Z]{3,}__")
_BLANK_LINES = re.compile(r"\n[ \t]*(?:\n[ \t]*)+")
_SPACES = re.compile(r"[ \t]+(?=\n)")
_ITEM = re.compile(r"^-[ \t]+", re.MULTILINE)
_LEFT_OUT = frozenset({"ref", "references", "table"})
_FORMULAS = frozenset({"math", "chem", "ce"})
_ITEMS = {"*": "- ", "#": "- ", ":": "", ";": ""}
_CODE = frozenset({"pre", "source", "syntaxhighlight", "code", "nowiki", "poem"})


def text_of(wikitext: str, left_out: frozenset[str]) -> str | None:
    """Return the plain text of a page; None if the page is too large or too irregular to be parsed.

    Links to the namespaces `left_out`, in lower case, are removed: files and categories.
    """
    if len(wikitext) > MAX_CHARACTERS or _unclosed(wikitext) * len(wikitext) > _MAX_WORK:
        return None
    try:
        with collector_paused():  # saves a fifth of the time
            text = "".join(_parts(mwparserfromhell.parse(wikitext).nodes, left_out))
    except (ParserError, RecursionError):
        return None
    text = _ITEM.sub("- ", _SPACES.sub("", _MAGIC.sub("", text)).strip())
    return _BLANK_LINES.sub("\n\n", text).encode("utf-8", "replace").decode()


def _unclosed(wikitext: str) -> int:
    """Return how many markups begin but do not end, or end only after a markup around them has ended."""
    wikitext = _LITERAL.sub("", wikitext)
    angles = wikitext.count("<") - wikitext.count(">")
    open: list[str] = []
    lost = 0
    waiting: dict[str, int] = {}  # how often each end is expected
    for mark in _MARKS.finditer(wikitext):
        begun = mark["open"] or mark["tag"]
        if begun:
            end = _ENDS.get(begun) or begun.lower()
            open.append(end)
            waiting[end] = waiting.get(end, 0) + 1
            continue
        end = mark["close"] or mark["end"].lower()
        if waiting.get(end):
            while (last := open.pop()) != end:
                waiting[last] -= 1
                lost += 1
            waiting[end] -= 1
    return lost + len(open) + max(angles, 0)


def _parts(found: Sequence[Any], left_out: frozenset[str]) -> Iterator[str]:
    for at, node in enumerate(found):
        if isinstance(node, nodes.Text):
            yield node.value
        elif isinstance(node, nodes.Wikilink):
            yield from _of_link(node, left_out)
        elif isinstance(node, nodes.Tag):
            if node.wiki_markup in _ITEMS:  # a mark of a list, with the item behind it; ** is two of them
                deeper = found[at + 1] if at + 1 < len(found) else None
                yield "" if getattr(deeper, "wiki_markup", None) in _ITEMS else _ITEMS[node.wiki_markup]
            else:
                yield from _of_tag(node, left_out)
        elif isinstance(node, nodes.Heading):
            yield f"\n\n{''.join(_parts(node.title.nodes, left_out)).strip()}"
        elif isinstance(node, nodes.ExternalLink):
            if node.title is not None:
                yield from _parts(node.title.nodes, left_out)
            elif not node.brackets:
                yield str(node.url)
        elif isinstance(node, nodes.HTMLEntity):
            yield str(node.normalize())


def _of_link(node: Any, left_out: frozenset[str]) -> Iterator[str]:
    title = str(node.title)
    namespace = title.partition(":")[0].strip().lower().replace("_", " ") if ":" in title else ""
    if namespace in left_out:
        return
    if node.text is not None:
        yield from _parts(node.text.nodes, left_out)
    else:
        yield title.removeprefix(":")


def _of_tag(node: Any, left_out: frozenset[str]) -> Iterator[str]:
    name = str(node.tag).strip().lower()
    if name in _LEFT_OUT:
        return
    content = "" if node.contents is None else str(node.contents)
    if name in _FORMULAS:
        yield f"${content.strip()}$" if content.strip() else ""
    elif name in _CODE:
        yield content
    elif name in ("br", "hr"):
        yield "\n"
    elif is_visible(name) and node.contents is not None:
        yield from _parts(node.contents.nodes, left_out)
