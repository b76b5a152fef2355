"""The report's section on duplicates: every number is shown, every text escaped, and no script is needed."""

from __future__ import annotations

import json
from copy import deepcopy
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest

from shardkit.writers.dedup.bands import probability
from shardkit.writers.dedup.measure import BAND_EDGES, binomial_interval
from shardkit.writers.report.dedup import render_dedup
from shardkit.writers.report.html import STYLE

PAIRS = 285


def recall() -> dict[str, Any]:
    bands: list[dict[str, Any]] = []
    for low, high in pairwise(BAND_EDGES[1:]):
        expected = PAIRS * probability((low + high) / 2, 14, 8)
        found = round(expected) - (3 if low < 0.8 else 0)
        interval = list(binomial_interval(found, PAIRS))
        bands.append(
            {
                "low": low,
                "high": high,
                "pairs": PAIRS,
                "candidates": found,
                "verified": found if low >= 0.8 else 0,
                "expected": round(expected, 3),
                "interval": interval,
            }
        )
    return {"bands": bands, "left_out": 17}


DEDUP: dict[str, Any] = {
    "near": {
        "similarity": 0.8,
        "containment": 0.95,
        "unit": "words",
        "ngram": 5,
        "permutations": 112,
        "bands": 14,
        "rows": 8,
        "scope": "global",
        "against": ["<last year>"],
        "counts": {"hubs": 3, "largest_bucket": 20_123, "bounded": 4_567},
    },
    "stages": [
        {"stage": "exact_duplicate", "documents": 81_234, "bytes": 345_000_000},
        {"stage": "near_duplicate", "documents": 40_321, "bytes": 212_345_678},
    ],
    "sources": [
        {
            "source": "<b>&amp;",
            "documents": 654_321,
            "bytes": 2_800_000_000,
            "removed": {
                "exact_duplicate": {"documents": 81_234, "bytes": 345_000_000},
                "near_duplicate": {"documents": 40_000, "bytes": 212_000_000},
            },
        },
        {
            "source": "web",
            "documents": 22_222,
            "bytes": 90_000_000,
            "removed": {"near_duplicate": {"documents": 321, "bytes": 345_678}},
        },
    ],
    "groups": [
        {"copies": "1", "groups": 500_000},
        {"copies": "2", "groups": 42_424},
        {"copies": "3-10", "groups": 8_123},
        {"copies": "11-100", "groups": 77},
    ],
    "largest_group": 98,
    "recall": recall(),
    "precision": {
        "checked": 480,
        "left_out": 20,
        "similar": 470,
        "contained": 10,
        "wrong": 0,
        "least": 0.8003,
        "excerpts": [
            {
                "similarity": 0.80031,
                "removed": "<script>alert('x')</script> \x00\x1b[31m The terms of use of this site",
                "kept": "The terms of use of this site, changed in May & since then in force.",
            },
            {
                "similarity": 0.97,
                "removed": "שלום עולם, זה טקסט לדוגמה",
                "kept": "שלום עולם, זה טקסט אחר לדוגמה",
            },
        ],
    },
}


class Page(HTMLParser):
    """Open and closing tags match; collects tags and the text of cells."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.append((tag, dict(attrs)))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def changed(**fields: Any) -> dict[str, Any]:
    return deepcopy(DEDUP) | fields


def test_every_count_of_the_card_is_on_the_page() -> None:
    page = Page(render_dedup(DEDUP))
    text = " | ".join(page.words)
    for shown in (
        "676,543",  # documents of both sources
        "81,234",
        "40,321",
        "321 (1.44 %)",
        "0 (0.00 %)",
        "near duplicate",
        "<b>&amp;",
        "<last year>",
        "One document stands for 98 at most",
        "8,123",
        "112 permutations, 14 bands of 8 rows",
        "3, the largest of 20,123 documents",
        "4,567 times",
        "at least 0.8, or containment at least 0.95",
        "0.85 to 0.90",
        "17 more were planted",
        "480 (100.00 %) are rightly removed, 10 of them as contained in it",
        "similar is 0.8003",
        "20 more lost to an index",
        "שלום עולם, זה טקסט לדוגמה",
    ):
        assert shown in text, shown
    band = DEDUP["recall"]["bands"][3]
    assert f"{100 * band['candidates'] / PAIRS:.2f} %" in text
    assert f"{100 * band['expected'] / PAIRS:.2f} %" in text


def test_texts_are_escaped_and_the_page_needs_nothing_else() -> None:
    html = render_dedup(DEDUP)
    page = Page(html)
    assert not {tag for tag, _ in page.tags} & {"script", "img", "link", "style", "b", "iframe"}
    assert not any(name in ("href", "src", "onload") for _, attributes in page.tags for name in attributes)
    assert "url(" not in html + STYLE
    assert not [c for c in html if ord(c) < 32 and c != "\n"]


def test_the_picture_shows_curve_and_measure_at_the_same_scale() -> None:
    page = Page(render_dedup(changed(recall=recall())))
    [curve] = [attributes["points"] for tag, attributes in page.tags if tag == "polyline"]
    assert curve is not None
    points = [tuple(map(float, point.split(","))) for point in curve.split()]
    assert points[0][0] == 60.0
    assert points[-1] == (620.0, 20.0)  # similarity 1 is always found
    assert points[60][1] == pytest.approx(20 + 240 * (1 - probability(0.8, 14, 8)), abs=0.06)
    bands = DEDUP["recall"]["bands"]
    marks = [a for tag, a in page.tags if tag == "circle" and a["class"] == "measured"][: len(bands)]
    for mark, band in zip(marks, bands, strict=True):
        assert float(mark["cx"] or 0) == pytest.approx(
            60 + 1120 * ((band["low"] + band["high"]) / 2 - 0.5), abs=0.06
        )
        assert float(mark["cy"] or 0) == pytest.approx(260 - 240 * band["candidates"] / PAIRS, abs=0.06)


def test_what_was_not_done_is_not_told() -> None:
    exact = render_dedup(changed(near=None, recall=None, precision=None))
    assert "Near-duplicates" not in exact
    assert "<svg" not in exact
    unmeasured = render_dedup(changed(recall=None, precision=None))
    assert "Removed if" in unmeasured
    assert "Recall" not in unmeasured
    assert "Precision" not in unmeasured
    nothing: dict[str, Any] = {
        "checked": 0,
        "left_out": 0,
        "similar": 0,
        "contained": 0,
        "wrong": 0,
        "least": None,
        "excerpts": [],
    }
    page = Page(
        render_dedup(changed(recall={"bands": [], "left_out": 0}, precision=nothing, groups=[], sources=[]))
    )
    assert "No removed document was compared again." in page.words


def test_a_wrong_removal_stands_out() -> None:
    precision = DEDUP["precision"] | {"similar": 468, "wrong": 2}
    html = render_dedup(changed(precision=precision))
    assert '<p class="wrong">2 were wrongly removed.</p>' in html
    assert "478 (99.58 %)" in html
    assert "wrongly" not in render_dedup(DEDUP)


def test_the_same_card_gives_the_same_bytes_after_a_round_through_json() -> None:
    assert render_dedup(json.loads(json.dumps(DEDUP, sort_keys=True))) == render_dedup(DEDUP)
