"""Writes the site to files, for any web server or to open from a folder.

Pages are written in the order in which links reach them from the first page, up to `_MOST` of each kind.
Links to pages that are not exported become plain text. Features that need a server (search, forms) are left
out, and no text is read from input files. File names are numbers by kind of page, so no name comes from a
corpus.
"""

from __future__ import annotations

from collections import Counter, deque
from pathlib import Path

from shardkit.errors import ShardkitError
from shardkit.tools.explore.site import FRONT, STYLE, Site

_MOST = {
    "funnel": 1, "compare": 1, "rule": 300, "removed": 0, "kept": 100, "clusters": 2, "cluster": 100,
    "map": 1, "topic": 100,
    "document": 200, "row": 100, "step": 1,
}  # fmt: skip

_Key = tuple[str, tuple[tuple[str, str], ...]]


def export_site(site: Site, folder: Path) -> int:
    """Write the site and return the number of pages; raises ShardkitError if the folder is not empty."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ShardkitError(f"{folder}: is not empty; choose a new folder, or empty this one")
        return _Export(site, folder).write()
    except OSError as error:
        raise ShardkitError(f"{folder}: cannot be written: {error.strerror or error}") from error


class _Export:
    """Writes pages in the order in which links reach them; keeps their file names and the waiting pages."""

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
        """Return the file name of a page, and schedule the page for writing; None if it is not exported."""
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
