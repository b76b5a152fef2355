"""The documents say what the code does: every command, recipe key and link exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from shardkit.writers import recipe
from shardkit.writers.filters.config import FilterEntry

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    file for file in ROOT.glob("**/*.md") if not {".venv", "build", "node_modules"} & set(file.parts)
)


MODELS = [recipe.Recipe, recipe.InputConfig, recipe.DedupConfig, recipe.TokenizerConfig, recipe.PackConfig]


@pytest.mark.parametrize("model", [*MODELS, recipe.OutputConfig, FilterEntry])
def test_every_recipe_key_is_documented(model: type[BaseModel]) -> None:
    text = (ROOT / "writers" / "README.md").read_text()
    documented = {
        word for key in re.findall(r"`([a-z_.\[\]:]+)", text) for word in re.split(r"[.:\[\]]+", key)
    }
    assert set(model.model_fields) <= documented


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_lead_to_files_of_the_repository(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document}: {target}"
