"""Renders pages by name as HTML; each page is a function from its URL parameters to facts for a template.

`Link` returns the address of a page, or None if the page is not available: the server answers all pages, an
export contains only some. Templates escape every value, and `shown` replaces control characters, characters
that reorder a line, and code points that are not characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

from shardkit.errors import ShardkitError, naming_extras
from shardkit.order.state import LoaderState
from shardkit.tools.explore.compare import Comparison
from shardkit.tools.explore.explored import Explored, PageNotFoundError, Params
from shardkit.tools.explore.kept import show_document, show_kept
from shardkit.tools.explore.kept_values import KeptRules
from shardkit.tools.explore.overview import show_funnel
from shardkit.tools.explore.removed import show_cluster, show_clusters, show_removed, show_rule
from shardkit.tools.explore.rows import show_row, show_step
from shardkit.tools.explore.search import show_search
from shardkit.tools.explore.topics import Topics, show_map, show_topic
from shardkit.units import format_bytes

with naming_extras("`shardkit view`"):
    import jinja2
    import markupsafe


FRONT = "funnel"
STYLE = "style.css"
_FOLDER = Path(__file__).parent / "pages"

_Page = Callable[[Explored, Params], Mapping[str, object]]

# Characters that a page replaces: control characters (C0) except tab and newline by Unicode control pictures;
# bidirectional marks and other invisible characters by their number; surrogates and noncharacters by U+FFFD.
_PICTURES = {code: chr(0x2400 + code) for code in range(32) if code not in (9, 10)} | {127: "␡"}
_INVISIBLE = re.compile(
    "[\x80-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e007f]"
)
_BREAK = re.compile("(?<=[/_.-])(?=[^/_.-])")
_NO_CHARACTER = re.compile("[\ud800-\udfff\ufffe\uffff]")


def shown(text: str) -> str:
    """Return `text` with every character made visible."""
    text = _NO_CHARACTER.sub("\ufffd", text.translate(_PICTURES))
    return _INVISIBLE.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text)


class Link(Protocol):
    """A function that returns the address of a page with parameters, or None if the page is not available."""

    def __call__(self, page: str, **params: object) -> str | None: ...


class Site:
    """The pages of a dataset, compared with the dataset `other`; `state` is a training run's loader state."""

    def __init__(
        self, explored: Explored, other: Explored | None = None, state: LoaderState | None = None
    ) -> None:
        self.explored, self.other = explored, other
        self._kept = KeptRules(explored)
        self._pages: dict[str, _Page] = {
            "funnel": show_funnel,
            "rule": partial(show_rule, kept=self._kept),
            "removed": show_removed,
            "kept": show_kept,
            "document": show_document,
            "clusters": show_clusters,
            "cluster": show_cluster,
            "row": show_row,
            "step": partial(show_step, state=state),
            "search": show_search,
        }
        self._topics = Topics(explored)
        if self._topics.exists:
            self._pages["map"] = partial(show_map, topics=self._topics)
            self._pages["topic"] = partial(show_topic, topics=self._topics)
        self._comparison = None if other is None else Comparison(explored, other)
        if self._comparison is not None:
            self._pages["compare"] = self._comparison.show
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(_FOLDER),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            finalize=lambda value: shown(value) if type(value) is str else value,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {
            "count": "{:,}".format, "bytes": format_bytes, "percent": _percent, "number": _number,
            "anchor": _anchor, "name": _name,
        }  # fmt: skip
        self._templates.globals |= {"name": explored.name, "fingerprint": explored.dataset.fingerprint}

    @property
    def pages(self) -> list[str]:
        """The names of the pages."""
        return list(self._pages)

    def render(self, page: str, params: Params, link: Link) -> str:
        """Render a page as HTML; raises PageNotFoundError if it is unknown, ShardkitError if it fails."""
        if page not in self._pages:
            raise PageNotFoundError(f"there is no page {page[:40]!r}")
        facts = self._pages[page](self.explored, params)
        return self._render("counting" if facts.keys() == {"share"} else page, link, page, facts)

    def finish_counting(self) -> None:
        """Wait until all background work is finished, so that no page shows progress instead of content."""
        self._kept.wait_seconds = None
        self.explored.counted_rules.wait(None)
        self.explored.counted_clusters.wait(None)
        if self._topics.field is not None:
            self._topics.work.wait(None)
        if self._comparison is not None:
            self._comparison.work.wait(None)

    def render_error(self, error: ShardkitError, link: Link) -> str:
        """Render an error as a page."""
        return self._render("error", link, "", {"problem": str(error)})

    def _render(self, template: str, link: Link, page: str, facts: Mapping[str, object]) -> str:
        common = {"link": link, "page": page, "missing": self.explored.missing, "pages": self.pages}
        return self._templates.get_template(f"{template}.html").render(**common, **facts)

    @staticmethod
    def style() -> bytes:
        """Return the stylesheet of all pages."""
        return (_FOLDER / STYLE).read_bytes()


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%" if share >= 0.001 else f"{100 * share:.2g}%"


def _name(name: str) -> markupsafe.Markup:
    """Return a name such as "filter/rule_of_it" as HTML; it may break after "/", "_", "." and "-"."""
    parts = [markupsafe.escape(part) for part in _BREAK.split(shown(name))]
    return markupsafe.Markup("<wbr>").join(parts)


def _anchor(place: float) -> str:
    """Return where a label is anchored to a place in percent, so that it is not cut off at an edge."""
    return "start" if place < 8 else "end" if place > 92 else "middle"


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.6g}"
    return "" if value is None else str(value)
