"""The site as files, for any web server or to open from a folder: the same pages, as far as links lead.

Pages are written from the first one on, as links lead to them, up to `_MOST` of each kind: links to what is
not exported become plain text. What needs a server (search, forms) is left out, and no text is read from
input files. Names of files are numbers by kind, so no name comes from a corpus.
"""

from __future__ import annotations

from collections import Counter, deque
from pathlib import Path

from shardkit.errors import ShardkitError
from shardkit.tools.explore.site import FRONT, STYLE, Site

_MOST = {
    "funnel": 1, "compare": 1, "rule": 300, "removed": 0, "kept": 100, "clusters": 2, "cluster": 100,
    "document": 200, "row": 100, "step": 1,
}  # fmt: skip

_Key = tuple[str, tuple[tuple[str, str], ...]]


def export_site(site: Site, folder: Path) -> int:
    """Write the site; returns the number of pages. ShardkitError if the folder is not empty."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ShardkitError(f"{folder}: is not empty; name a new folder, or empty this one")
        return _Export(site, folder).write()
    except OSError as error:
        raise ShardkitError(f"{folder}: cannot be written: {error.strerror or error}") from error


class _Export:
    """Pages that have a file, and those of them that are still to be written."""

    def __init__(self, site: Site, folder: Path) -> None:
        self._site, self._folder = site, folder
        self._files: dict[_Key, str] = {}
        self._waiting: deque[_Key] = deque()
        self._counts: Counter[str] = Counter()

    def write(self) -> int:
        self._site.finish_counting()
        self._link(FRONT)
        pages = 0
        while self._waiting:
            page, params = key = self._waiting.popleft()
            html = self._site.render(page, dict(params), self._link)
            (self._folder / self._files[key]).write_text(html, encoding="utf-8", errors="replace")
            pages += 1
        (self._folder / STYLE).write_bytes(self._site.style())
        return pages

    def _link(self, page: str, **params: object) -> str | None:
        """The file of a page; None where it is not exported."""
        given = sorted((name, str(value)) for name, value in params.items() if value is not None)
        if any(value == "random" for _, value in given):
            return None
        key = page, tuple(given)
        if key not in self._files:
            if page not in self._site.pages or self._counts[page] >= _MOST.get(page, 0):
                return None
            self._counts[page] += 1
            name = "index" if page == FRONT else f"{page}-{self._counts[page]:03d}"
            self._files[key] = f"{name}.html"
            self._waiting.append(key)
        return self._files[key]
