"""Take the pictures of the explorer in these pages, with Chromium, in the folder of the dataset's tokenizer.

python docs/screenshots.py out                                   # its funnel: explore-light.png and -dark.png
python docs/screenshots.py out tutorial-duplicates=/clusters     # of the tutorial's dataset

A picture ends below the last row of a table that fits.
"""

from __future__ import annotations

import secrets
import shutil
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urljoin

from playwright.sync_api import FloatRect, ViewportSize, sync_playwright

from shardkit.datasets.dataset import open_dataset
from shardkit.datasets.provenance.text import Decoder, find_tokenizer
from shardkit.tools.explore.explored import Explored
from shardkit.tools.explore.server import bind, first_address, make_server
from shardkit.tools.explore.site import Site

FIGURES = Path(__file__).resolve().parent / "figures"
SIZE: ViewportSize = {"width": 1100, "height": 940}
LAST_ROW = """most => Math.max(...[...document.querySelectorAll("tr")]
    .map(row => row.getBoundingClientRect().bottom).filter(bottom => bottom <= most))"""


def take(location: str, pictures: Mapping[str, str]) -> None:
    """Take pages of a dataset, light and dark: {name of the picture: path of the page}."""
    with open_dataset(location) as dataset, bind(0) as listening, sync_playwright() as driver:
        token = secrets.token_urlsafe()
        tokenizer = find_tokenizer(dataset)
        decoder = None if tokenizer is None else Decoder(tokenizer, dataset.card)
        server = make_server(Site(Explored(dataset, decoder)), token)
        threading.Thread(target=server.run, args=([listening],), daemon=True).start()
        address = first_address(listening, token)
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport=SIZE, color_scheme=scheme)
            page.goto(address)  # its token opens the other pages
            for name, path in pictures.items():
                page.goto(urljoin(address, path))
                height = page.evaluate(LAST_ROW, SIZE["height"])
                clip: FloatRect = {"x": 0, "y": 0, "width": SIZE["width"], "height": height}
                page.screenshot(path=FIGURES / f"{name}-{scheme}.png", clip=clip)
        browser.close()


if __name__ == "__main__":
    given = dict(picture.split("=", 1) for picture in sys.argv[2:])
    take(sys.argv[1], given or {"explore": "/"})
