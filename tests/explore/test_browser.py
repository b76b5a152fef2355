"""The explorer in a real browser: the way from the funnel to a text, in light and dark, and on a phone."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

pytest.importorskip("uvicorn", reason="the pages need shardkit[view]")
pytest.importorskip("playwright", reason="drives the browser; part of shardkit[dev]")

from playwright.sync_api import Browser, Page, Request, sync_playwright

from shardkit.tools.explore.export import export_site
from shardkit.tools.explore.site import Site
from support.explored_build import TOKEN, explore, make_explored, served, text_of

if TYPE_CHECKING:
    Open = Callable[..., Page]

CHROMIUM = shutil.which("chromium")
PAGE_SECONDS = 20
PAGES = [
    "/",
    "/rule?rule=length/too_few_words",
    "/kept",
    "/clusters",
    "/row",
    "/step",
    "/search?q=red",
    "/compare",
]
pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: run tests/servers/install_chromium.sh"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, inline_builds: None) -> Site:
    out = make_explored(tmp_path_factory.mktemp("browser") / "corpus")
    other = make_explored(tmp_path_factory.mktemp("other") / "corpus", min_words=3)
    return Site(explore(out), explore(other))


@pytest.fixture(scope="module")
def address(site: Site) -> Iterator[str]:
    with served(site) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as driver:
        # Chromium's sandbox needs rights that containers lack; the pages come from this test.
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


def failed(request: Request) -> list[str]:
    """The address of a request that failed, unless a click on a link had ended it."""
    return [] if request.failure == "net::ERR_ABORTED" else [request.url]


def with_token(address: str) -> str:
    """The first address of a server; of other pages as they are."""
    if not address.startswith("http://"):
        return address
    return f"{address}{'&' if '?' in address else '/?' if address.count('/') == 2 else '?'}token={TOKEN}"


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens a page; at the end, no page may have asked for anything else or logged an error."""
    complaints: list[str] = []
    pages: list[Page] = []

    def opened(address: str, **options: Any) -> Page:
        page = browser.new_page(**options)
        page.set_default_timeout(PAGE_SECONDS * 1000)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("dialog", lambda dialog: complaints.append(f"dialog {dialog.message}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("requestfailed", lambda request: complaints.extend(failed(request)))
        page.goto(with_token(address))
        pages.append(page)
        return page

    yield opened
    for page in pages:
        page.close()
    assert not complaints


def test_clicks_lead_from_the_funnel_to_the_text_of_a_dropped_document(open_page: Open, address: str) -> None:
    page = open_page(address)
    assert "of 110 documents are kept" in page.inner_text("h1")
    page.click("text=too_few_words")
    assert page.inner_text("h1") == "length/too_few_words"
    assert page.locator("svg.chart rect").count() >= 3
    first = page.locator("article .value").first.inner_text()
    assert first.startswith("4")
    page.click("text=far from the bound")
    assert page.locator("article .value").first.inner_text().startswith("1")
    page.click("nav >> text=Funnel")
    page.click("text=too_few_words")
    page.locator("article header a").first.click()
    assert "length/too_few_words" in page.inner_text("dl")
    assert "too short short short" in page.inner_text("pre")


def test_a_search_leads_to_a_document_and_its_row(open_page: Open, address: str) -> None:
    page = open_page(f"{address}/search")
    page.fill("input[name=q]", "https://site7.org/a.jsonl")
    page.click("button")
    page.click("article header a")
    assert text_of(7) in page.inner_text("pre")
    page.locator("dd a").first.click()
    assert re.match(r"Row \d+ of", page.inner_text("h1"))
    starts = page.locator("pre.row span.start")
    assert starts.count() >= 1
    assert "position id 0" in str(starts.first.get_attribute("title"))
    page.click("text=next")
    page.fill("input[name=row]", "0")
    page.click("button")
    assert page.inner_text("h1").startswith("Row 0 of")


def test_words_of_a_row_are_found_and_marked(open_page: Open, address: str) -> None:
    page = open_page(f"{address}/search")
    words = " ".join(text_of(7).split()[10:14])
    page.fill("input[name=q]", words)
    page.press("input[name=q]", "Enter")
    assert page.locator("mark").first.inner_text() == words


def test_a_cluster_shows_what_differs(open_page: Open, address: str) -> None:
    page = open_page(address)
    page.click("nav >> text=Duplicates")
    page.click("text=random")
    page.wait_for_url("**/clusters?order=drawn")
    for number in range(page.locator("tbody td.name a").count()):
        page.locator("tbody td.name a").nth(number).click()
        page.wait_for_url("**/cluster?*")
        if page.locator("del").count():
            assert page.locator("del").first.inner_text().strip() == "changedword"
            return
        page.go_back()
        page.wait_for_url("**/clusters?order=drawn")
    pytest.fail("no cluster shows a difference")


def test_hostile_texts_run_nothing(open_page: Open, address: str) -> None:
    page = open_page(f"{address}/search?q=<script>alert(1)</script>")
    assert page.input_value("input[name=q]") == "<script>alert(1)</script>"
    page.locator("article header a").first.click()
    assert "<script>alert(1)</script>" in page.inner_text("pre")


@pytest.mark.parametrize("path", PAGES)
def test_a_phone_needs_no_sideways_scrolling_and_dark_is_dark(
    open_page: Open, address: str, path: str
) -> None:
    for scheme in ("light", "dark"):
        page = open_page(address + path, color_scheme=scheme, viewport={"width": 390, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        colors = page.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
        paper, ink = (sum(map(int, re.findall(r"\d+", color)[:3])) for color in colors)
        assert (paper > ink) is (scheme == "light")
        assert abs(paper - ink) > 400


@pytest.mark.parametrize("width", [390, 1200])
def test_the_label_of_a_bound_stands_at_its_line(open_page: Open, address: str, width: int) -> None:
    page = open_page(f"{address}/rule?rule=length/too_few_words", viewport={"width": width, "height": 900})
    page.wait_for_selector("text=estimated from")
    line, label = (page.locator(f"svg.chart {tag}.bound").bounding_box() for tag in ("line", "text"))
    chart = page.locator("svg.chart").bounding_box()
    assert line is not None
    assert label is not None
    assert chart is not None
    assert label["x"] - 1 <= line["x"] <= label["x"] + label["width"] + 1
    assert chart["x"] - 1 <= label["x"]
    assert label["x"] + label["width"] <= chart["x"] + chart["width"] + 1
    assert label["y"] + label["height"] <= line["y"] + 4
    dropped, kept = (boxes(page, kind) for kind in ("dropped", "kept"))
    assert max(x + w for x, w in dropped) <= line["x"] + 2
    assert min(x for x, _ in kept) >= line["x"] - 2


def boxes(page: Page, kind: str) -> list[tuple[float, float]]:
    """The left edges and the widths of the bars of a kind in the picture of a rule."""
    found = [one.bounding_box() for one in page.locator(f"svg.chart rect.{kind}").all()]
    return [(box["x"], box["width"]) for box in found if box is not None]


@pytest.mark.parametrize(("media", "scheme"), [("screen", "light"), ("screen", "dark"), ("print", "dark")])
def test_documents_in_a_row_are_told_apart_without_a_pointer(
    open_page: Open,
    site: Site,
    address: str,
    media: Literal["screen", "print"],
    scheme: Literal["light", "dark"],
) -> None:
    tracer = site.explored.tracer
    row = next(n for n in range(len(tracer.dataset)) if len(tracer.rows([n])[0]["documents"]) > 1)
    page = open_page(f"{address}/row?row={row}", color_scheme=scheme)
    page.emulate_media(media=media, color_scheme=scheme)
    parts = page.locator("section.part:not(.padding)")
    assert parts.count() > 1
    colors = [part.evaluate("one => getComputedStyle(one).borderLeftColor") for part in parts.all()]
    assert all(one != other for one, other in pairwise(colors))
    for number, part in enumerate(parts.all(), 1):
        name = part.locator("h3")
        assert name.is_visible()
        assert re.match(rf"{number} .*: [ab]\.jsonl, record \d+", name.inner_text())
        assert part.locator("pre").is_visible()
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") is (scheme == "light" or media == "print")


def test_an_export_is_read_from_files(open_page: Open, site: Site, tmp_path: Path) -> None:
    export_site(site, tmp_path / "site")
    page = open_page(f"file://{tmp_path}/site/index.html")
    page.click("text=too_few_words")
    page.click("text=far from the bound")
    assert page.locator("article").count() > 3
    page.click("nav >> text=Kept documents")
    page.locator("article header a").first.click()
    assert page.locator("pre.whole").count() == 1
    assert page.evaluate("getComputedStyle(document.querySelector('header')).borderBottomWidth") == "1px"
