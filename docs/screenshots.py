"""Take the pictures of the explorer in these pages, with Chromium.

python docs/screenshots.py DATASET                               # its funnel: explore-light.png and -dark.png
python docs/screenshots.py out tutorial-duplicates=/clusters     # of the tutorial's dataset, in its folder
"""

from __future__ import annotations

import secrets
import shutil
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urljoin

from playwright.sync_api import ViewportSize, sync_playwright

from shardkit.datasets.dataset import open_dataset
from shardkit.tools.explore.explored import Explored
from shardkit.tools.explore.server import bind, first_address, make_server
from shardkit.tools.explore.site import Site

FIGURES = Path(__file__).resolve().parent / "figures"
SIZE: ViewportSize = {"width": 1100, "height": 760}


def take(location: str, pictures: Mapping[str, str]) -> None:
    """Take pages of a dataset, light and dark: {name of the picture: path of the page}."""
    with open_dataset(location) as dataset, bind(0) as listening, sync_playwright() as driver:
        token = secrets.token_urlsafe()
        server = make_server(Site(Explored(dataset)), token)
        threading.Thread(target=server.run, args=([listening],), daemon=True).start()
        address = first_address(listening, token)
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport=SIZE, color_scheme=scheme)
            page.goto(address)  # its token opens the other pages
            for name, path in pictures.items():
                page.goto(urljoin(address, path))
                page.screenshot(path=FIGURES / f"{name}-{scheme}.png")
        browser.close()


if __name__ == "__main__":
    given = dict(picture.split("=", 1) for picture in sys.argv[2:])
    take(sys.argv[1], given or {"explore": "/"})
