"""A small build whose every table has something to explore, and a server of its pages."""

from __future__ import annotations

import json
import threading
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

import pyarrow.parquet as pq

from shardkit.datasets.dataset import open_dataset
from shardkit.datasets.provenance.text import Decoder, find_tokenizer
from shardkit.tools.explore.explored import Explored
from shardkit.tools.explore.server import bind, make_server, page_address
from shardkit.tools.explore.site import Site
from shardkit.writers import build
from support.small_build import make_corpus

__all__ = [
    *("HOSTILE", "TOKEN", "Page", "cookie", "explore", "lines_of", "links_to", "make_explored"),
    *("served", "show", "text_of"),
]

RECIPE = """\
inputs:
  - {path: a.jsonl, source: "first <b>source</b>"}
  - {path: b.jsonl, source: second}
filters: [{length: {min_words: 5}}, {ratios: {max_digit_ratio: 0.5}}]
dedup: {exact: {}, near: {small_shingles: 0}}
tokenizer: {path: tokenizer.json, eos: "<|endoftext|>"}
pack: {sequence_length: 64}
output: {path: out, shard_bytes: 8KiB}
max_bad_fraction: 0.5
"""
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)> \u202eabc\u202c \x00 \x1b[31m red &amp; '\""
TOKEN = "of-a-test"
WORDS = [f"{a}{b}" for a in ("red", "green", "blue", "dark") for b in ("stone", "river", "house", "tree")]


def text_of(number: int, changed: int | None = None) -> str:
    words = [f"{WORDS[(number * 7 + at * at) % 16]}{chr(97 + (number + at) % 26)}" for at in range(50)]
    if changed is not None:
        words[changed] = "changedword"
    return " ".join(words)


def make_explored(folder: Path, *, min_words: int = 5) -> Path:
    """Build it in `folder`; returns the dataset. Line n of a file has the id "<file>-<n>"."""
    recipe = make_corpus(folder, 4, RECIPE.replace("min_words: 5", f"min_words: {min_words}"))
    first = [text_of(n) for n in range(30)]
    second = [text_of(0), *(text_of(n, 20 + n) for n in range(1, 4)), *(text_of(100 + n) for n in range(20))]
    second += [f"too {'short ' * (n % 4)}" for n in range(50)]
    second += ["1234567890 " * 6, "two words", HOSTILE + " and words enough to stay", HOSTILE[:60]]
    for name, texts in (("a.jsonl", first), ("b.jsonl", second)):
        lines = [
            json.dumps({"text": text, "id": f"{name}-{n}", "url": f"https://site{n}.org/{name}"})
            for n, text in enumerate(texts)
        ]
        (folder / name).write_text("\n".join([*lines, "{broken"]) + "\n")
    return Path(build(recipe, progress=False).output)


def explore(path: Path, inputs: Path | None = None) -> Explored:
    """Open a build as `shardkit view` does."""
    dataset = open_dataset(path)
    tokenizer = find_tokenizer(dataset)
    return Explored(dataset, None if tokenizer is None else Decoder(tokenizer, dataset.card), inputs=inputs)


def cookie(address: str) -> dict[str, str]:
    """The header that a browser sends after its first page."""
    return {"Cookie": f"shardkit-view-{address.rpartition(':')[2]}={TOKEN}"}


@contextmanager
def served(site: Site) -> Iterator[str]:
    """The address of a server of the site in a thread, for who has TOKEN."""
    with bind(0) as listening:
        server = make_server(site, TOKEN)
        server.config.timeout_keep_alive = 1  # seconds; a test waits for it
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield "http://{}:{}".format(*listening.getsockname())
        finally:
            server.should_exit = True
            thread.join()


class Page(HTMLParser):
    """A page whose tags match: its tags, links and words."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "br", "input", "wbr"):
            self.open.append(tag)
        self.tags.append((tag, dict(attrs)))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data

    @property
    def links(self) -> list[str]:
        """The addresses of links and forms."""
        return [str(each[name]) for _, each in self.tags for name in ("href", "action") if name in each]


def show(site: Site, page: str, **params: object) -> Page:
    return Page(site.render(page, {name: str(value) for name, value in params.items()}, page_address))


def links_to(page: Page, name: str) -> list[dict[str, str]]:
    """The parameters of the links to a page."""
    parts = [urllib.parse.urlsplit(link) for link in page.links]
    return [dict(urllib.parse.parse_qsl(part.query)) for part in parts if part.path == f"/{name}"]


def lines_of(out: Path, table: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = pq.read_table(out / table).to_pylist()
    return found
