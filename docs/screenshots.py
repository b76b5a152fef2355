"""Take the pictures of the explorer in these pages: `python docs/screenshots.py DATASET`, with Chromium."""

from __future__ import annotations

import secrets
import shutil
import sys
import threading
from pathlib import Path

from playwright.sync_api import ViewportSize, sync_playwright

from shardkit.datasets.dataset import open_dataset
from shardkit.tools.explore.explored import Explored
from shardkit.tools.explore.server import bind, first_address, make_server
from shardkit.tools.explore.site import Site

FIGURES = Path(__file__).resolve().parent / "figures"
SIZE: ViewportSize = {"width": 1100, "height": 760}


def take(location: str) -> None:
    """The funnel of a dataset, light and dark."""
    with open_dataset(location) as dataset, bind(0) as listening, sync_playwright() as driver:
        token = secrets.token_urlsafe()
        server = make_server(Site(Explored(dataset)), token)
        threading.Thread(target=server.run, args=([listening],), daemon=True).start()
        address = first_address(listening, token)
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport=SIZE, color_scheme=scheme)
            page.goto(address)
            page.screenshot(path=FIGURES / f"explore-{scheme}.png")
        browser.close()


if __name__ == "__main__":
    take(sys.argv[1])
