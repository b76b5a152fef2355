"""Every text of a figure lies inside its picture, in the fonts that a browser has."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from support.pages import ROOT

FIGURES = sorted((ROOT / "docs" / "figures").glob("*-light.svg"))
CHROMIUM = shutil.which("chromium")
OUTSIDE = """() => {
  const page = document.documentElement.viewBox.baseVal;
  return [...document.querySelectorAll("text")].filter(text => {
    const box = text.getBBox();
    return box.x < 4 || box.y < 0 || box.x + box.width > page.width - 4 || box.y + box.height > page.height;
  }).map(text => text.textContent);
}"""


@pytest.mark.extended
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: run tests/servers/install_chromium.sh")
def test_no_text_of_a_figure_is_cut_off() -> None:
    playwright: Any = pytest.importorskip("playwright.sync_api", reason="part of shardkit[dev]")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        cut: dict[Path, list[str]] = {}
        for figure in FIGURES:
            page.goto(figure.as_uri())
            if outside := page.evaluate(OUTSIDE):
                cut[figure] = outside
        browser.close()
    assert len(FIGURES) >= 7
    assert not cut
