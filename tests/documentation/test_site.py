"""The site builds without a warning and without a network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.pages import ROOT


@pytest.mark.extended
@pytest.mark.slow
def test_the_site_builds_and_asks_no_other_host_for_anything(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="pip install 'shardkit[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    # A proxy that nobody answers at: what would be fetched while building fails.
    environment = dict.fromkeys(("http_proxy", "https_proxy", "HTTPS_PROXY"), "http://127.0.0.1:9")
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    for page in tmp_path.rglob("*.html"):
        text = page.read_text()
        assert "<h1" in text, page
        for tag in ('<script src="http', '<link rel="stylesheet" href="http', '<img src="http'):
            assert tag not in text, f"{page}: {tag}"
