"""The site builds without a warning and without a network, and the notebooks run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from support.pages import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


CHROMIUM = shutil.which("chromium")


@contextmanager
def files_served(folder: Path) -> Iterator[str]:
    """The address of a server of a folder's files, on this machine."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning of mkdocs fails the build."""
    pytest.importorskip("mkdocs", reason="pip install 'shardkit[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    # A proxy that nobody answers at: what would be fetched while building fails.
    environment = dict.fromkeys(("http_proxy", "https_proxy", "HTTPS_PROXY"), "http://127.0.0.1:9")
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.extended
@pytest.mark.slow
def test_the_site_builds_and_names_no_other_host(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert "<h1" in text, page
        # The last one asks GitHub for the stars of a repository.
        tags = (
            '<script src="http',
            '<link rel="stylesheet" href="http',
            '<img src="http',
            'component="source"',
        )
        for tag in tags:
            assert tag not in text, f"{page}: {tag}"


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: run tests/servers/install_chromium.sh")
def test_a_browser_asks_no_other_host_for_anything_and_finds_every_file(site: Path) -> None:
    pytest.importorskip("playwright", reason="drives the browser; part of shardkit[dev]")
    from playwright.sync_api import sync_playwright

    with files_served(site) as base, sync_playwright() as driver:
        # Chromium's sandbox needs rights that containers lack; the pages come from this test.
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 844})
        requested: list[str] = []
        broken: list[str] = []
        page.on("request", lambda request: requested.append(request.url))
        page.on("response", lambda found: broken.append(found.url) if found.status >= 400 else None)
        page.on("pageerror", lambda error: broken.append(str(error)))
        for index in sorted(site.rglob("index.html")):
            page.goto(f"{base}/{index.relative_to(site)}")
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= 390, f"{index}: wider than a phone"
        browser.close()
    assert len(requested) > 40
    assert not [url for url in requested if not url.startswith((base, "data:", "blob:"))]
    assert not broken


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs_and_was_saved_with_its_outputs(notebook: Path, tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    book: Any = nbformat.read(notebook, as_version=4)
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells), (
        "run: jupyter execute --inplace docs/notebooks/*.ipynb"
    )
    assert any(cell.outputs for cell in cells)
    nbclient.NotebookClient(
        book, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
