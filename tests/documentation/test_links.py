"""Every link of every document leads to a file of the repository, and to a heading in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.pages import DOCUMENTS, ROOT

GENERATED = {ROOT / "docs" / "changelog.md"}  # by the site, from CHANGELOG.md
LINK = re.compile(r"\]\(([^)\s]*)\)|(?:src|srcset|href)=\"([^\"]+)\"")


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as both GitHub and the site form them."""
    text = re.sub(r"^ *```.*?^ *```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for found in LINK.finditer(document.read_text()):
        link = (found[1] or found[2]).removesuffix("#only-light").removesuffix("#only-dark")
        target, _, anchor = link.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        file = (document.parent / target).resolve() if target else document
        assert file.exists() or file in GENERATED, f"{document}: {link}"
        if anchor:
            assert anchor in anchors(file), f"{document}: {link} names no heading of {file.name}"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert str(page.relative_to(ROOT / "docs")) in navigation, page
