"""In a notebook, progress is one table that is updated in place, and results and datasets are tables."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from shardkit.progress import TABLE_SECONDS, TransferProgress, make_listener
from support.small_build import make_corpus

Shown = list[tuple[str, dict[str, str]]]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    """What the outputs of a notebook's cell are told, as ("display" or "update", content)."""
    calls: Shown = []

    class DisplayHandle:
        def display(self, content: dict[str, str], *, raw: bool) -> None:
            calls.append(("display", content))

        def update(self, content: dict[str, str], *, raw: bool) -> None:
            calls.append(("update", content))

    module, display = ModuleType("IPython"), ModuleType("IPython.display")
    monkeypatch.setattr(module, "get_ipython", lambda: SimpleNamespace(kernel=None), raising=False)
    monkeypatch.setattr(display, "DisplayHandle", DisplayHandle, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return calls


def report(step: str, done: int) -> TransferProgress:
    return TransferProgress(step, done, 10, done, 10, done, 1.0)


def test_a_table_is_updated_in_place_now_and_then_and_at_the_end(
    shown: Shown, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 50.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with make_listener(True) as hear:
        for done in range(4):
            hear(report("<i>", done))
        assert not shown, "what ends at once shows nothing"
        now += TABLE_SECONDS
        for done in range(4, 8):
            hear(report("files", done))
        now += TABLE_SECONDS
        hear(report("files", 8))
        hear(report("files", 10))
    assert [kind for kind, _ in shown] == ["display", "update", "update"]
    page, text = shown[-1][1]["text/html"], shown[-1][1]["text/plain"].splitlines()
    assert "&lt;i&gt;" in page
    assert "<i>" not in page
    assert [line.partition(",")[0] for line in text] == ["<i>: 3 of 10 files", "files: 10 of 10 files"]
    assert capsys.readouterr() == ("", "")


def test_what_ends_at_once_shows_nothing(shown: Shown) -> None:
    with make_listener(True) as hear:
        hear(report("files", 10))
    assert not shown


@pytest.mark.extended
def test_a_real_kernel_shows_a_build_and_its_dataset(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    recipe = make_corpus(tmp_path, 80)
    code = [
        f"import shardkit as sk\nresult = sk.build({str(recipe)!r}, workers=1)\nresult",
        "result.open()",
        "import pandas\nresult.open()[:3].to_pandas()",
    ]
    book: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in code])
    nbclient.NotebookClient(book, timeout=200, kernel_name="python3").execute()
    built, opened, frame = (
        [(out.output_type, out.get("data", {})) for out in cell.outputs] for cell in book.cells
    )
    assert [kind for kind, _ in built] == ["display_data", "execute_result"], "no stream of lines"
    assert "<progress" in built[0][1]["text/html"]
    assert "exact_duplicate" in built[1][1]["text/html"]
    assert "<caption" in opened[0][1]["text/html"]
    assert "tokens" in frame[0][1]["text/html"]
