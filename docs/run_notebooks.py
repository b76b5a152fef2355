"""Run the notebooks, each in an empty folder, and save them with their outputs.

    python docs/run_notebooks.py

A test runs them too, and refuses those that were saved without outputs.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import nbclient
import nbformat

FOLDER = Path(__file__).resolve().parent / "notebooks"
SHOWN = "/home/you/shardkit"  # in outputs, in place of the folder that a notebook ran in


def run(file: Path) -> None:
    """Run one notebook and save it."""
    book = nbformat.read(file, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        nbclient.NotebookClient(book, timeout=300, kernel_name="python3", resources=resources).execute()
        for cell in book.cells:
            cell.metadata.pop("execution", None)  # times
        text = nbformat.writes(book).replace(folder, SHOWN)
    file.write_text(text.rstrip("\n") + "\n")


if __name__ == "__main__":
    for notebook in sorted(FOLDER.glob("*.ipynb")):
        run(notebook)
