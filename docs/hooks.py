"""What the site adds to the pages: links to files outside of docs/, and the changelog.

A link such as `../../examples/train_ddp.py` works on a checkout and on GitHub. The site has only docs/, so it
gets the address of that file in the repository.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(\]\()([^)#\s:]+)(#[^)]*)?\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    files.append(File.generated(config, "changelog.md", content=(ROOT / "CHANGELOG.md").read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    folder = (ROOT / "docs" / page.file.src_uri).parent
    return _LINK.sub(lambda link: _in_the_repository(link, folder, config.extra["repository"]), markdown)


def _in_the_repository(link: re.Match[str], folder: Path, repository: str) -> str:
    target = Path(os.path.normpath(folder / link[2]))
    if target.is_relative_to(ROOT / "docs") or not target.exists():
        return link[0]  # a page of the site, or a mistake, which mkdocs reports
    kind = "tree" if target.is_dir() else "blob"
    return f"{link[1]}{repository.rstrip('/')}/{kind}/main/{target.relative_to(ROOT)}{link[3] or ''})"
