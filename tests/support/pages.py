"""README and pages of the documentation, their code blocks, and the scripts that generate parts of them."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

__all__ = ["DOCUMENTS", "PAGES", "ROOT", "Block", "blocks", "script"]

ROOT = Path(__file__).resolve().parents[2]
_SKIPPED = {".venv", "build", "node_modules", ".pytest_cache"}
# All documents of the repository, and those that a user reads.
DOCUMENTS = sorted(file for file in ROOT.rglob("*.md") if not _SKIPPED & set(file.parts))
PAGES = [ROOT / "README.md", *(file for file in DOCUMENTS if file.is_relative_to(ROOT / "docs"))]

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page; `is_run` is false behind the comment `<!-- not run -->`."""

    page: Path
    line: int
    language: str
    text: str
    is_run: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path, *languages: str) -> Iterator[Block]:
    """The blocks of a page in some languages, in their order."""
    text = page.read_text()
    for found in _FENCE.finditer(text):
        if found[2] in languages:
            before = text[: found.start()]
            is_run = not before.rstrip().endswith("<!-- not run -->")
            yield Block(page, before.count("\n") + 2, found[2], found[3], is_run)


def script(name: str) -> ModuleType:
    """The script docs/NAME.py, imported."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module
