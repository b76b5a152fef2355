"""The Python blocks of each trainer's page run, in their order and in one namespace.

They run in a folder with the datasets "data" and "val" of rows of 65 tokens, and with the real trainer or,
where it is not installed, with its recorded interface.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.loader_data import make_rows

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "trainers"
SLOW = {"hugging_face", "ray"}  # the former imports TRL and trains, the latter starts a cluster
PAGES = [
    pytest.param(page, id=page.stem, marks=[pytest.mark.extended] * (page.stem in SLOW))
    for page in sorted(FOLDER.glob("*.md"))
    if page.stem != "README"
]


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("forgotten_modules")
@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if page.stem == "ray":
        request.getfixturevalue("ray_workers")
    make_rows(tmp_path / "data", 150, 65)
    make_rows(tmp_path / "val", 40, 65)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert blocks
    space: dict[str, object] = {"__name__": page.stem}
    for block in blocks:
        exec(compile(block, str(page), "exec"), space)
