"""The site builds without a warning and without a network, and the notebooks run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.pages import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


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
