"""The calculator on the page of funnels computes what `shardkit plan build` computes, in a browser."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from shardkit.cli.main import main as run_command
from support.pages import ROOT

PAGE = (ROOT / "docs" / "guides" / "funnel.md").read_text()
CHROMIUM = shutil.which("chromium")
PRESETS = {"many": "many filters", "few": "few filters", "all": "keep everything"}
pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: run tests/servers/install_chromium.sh"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A page with the calculator alone."""
    playwright: Any = pytest.importorskip("playwright.sync_api", reason="part of shardkit[dev]")
    [calculator] = re.findall(r'<div id="funnel".*?</script>', PAGE, re.DOTALL)
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = opened.new_page()
        page.set_content(calculator)
        yield page
        opened.close()


def check(page: Any, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Compare the calculator with what its own command prints; return its outputs as texts."""
    places = {place.get_attribute("data-output"): place for place in page.query_selector_all("[data-output]")}
    texts = {name: place.text_content() for name, place in places.items()}
    assert run_command([*shlex.split(texts["command"])[1:], "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    expected = {
        "raw": plan["raw_bytes"],
        "share": plan["retention"],
        "cores": plan["cores"],
        "core_hours": plan["core_seconds"] / 3600,
        "dollars": plan["costs"]["cores"],
    }
    found = {name: float(places[name].get_attribute("data-value")) for name in expected}
    assert found == pytest.approx(expected)
    assert run_command([*shlex.split(texts["command"])[1:]]) == 0
    printed = capsys.readouterr().out
    assert texts["raw"] in printed
    return texts


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_gives_the_plans_figures_and_those_of_the_table(
    browser: Any, preset: str, capsys: pytest.CaptureFixture[str]
) -> None:
    browser.click(f'[data-preset="{preset}"]')
    texts = check(browser, capsys)
    [row] = re.findall(rf"^\| {PRESETS[preset]} \| .*? ?\| (.*) \|$", PAGE, re.MULTILINE)
    assert row.split(" | ") == [texts[name] for name in ("share", "raw", "cores", "core_hours")]


def test_changed_numbers_give_the_plans_figures(browser: Any, capsys: pytest.CaptureFixture[str]) -> None:
    browser.click('[data-preset="few"]')
    changes = {"tokens": "0.3", "per_token": "4.4", "speed": "5.5", "days": "2.5", "price": "0.04"}
    for name, value in changes.items():
        browser.fill(f'[data-input="{name}"]', value)
    browser.fill(".funnel-stage input >> nth=1", "12.5")
    texts = check(browser, capsys)
    assert "--retention language=12.5%" in texts["command"]
    browser.fill('[data-input="days"]', "")  # nothing is computed from an empty field
    assert browser.text_content('[data-output="cores"]') == texts["cores"]
