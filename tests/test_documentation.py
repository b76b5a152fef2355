"""The documents say what the code does: every command, recipe key and link exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from shardkit.cli.main import VERBS, main
from shardkit.writers import recipe
from shardkit.writers.dedup import config as dedup
from shardkit.writers.filters.config import FilterEntry

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    file for file in ROOT.glob("**/*.md") if not {".venv", "build", "node_modules"} & set(file.parts)
)


MODELS: list[type[BaseModel]] = [
    recipe.Recipe,
    recipe.InputConfig,
    recipe.TokenizerConfig,
    recipe.PackConfig,
    dedup.DedupConfig,
    dedup.ExactDedupConfig,
    dedup.LinesDedupConfig,
    dedup.NearDedupConfig,
    dedup.MinHashConfig,
    dedup.MeasureConfig,
]


@pytest.mark.parametrize("model", [*MODELS, recipe.OutputConfig, FilterEntry])
def test_every_recipe_key_is_documented(model: type[BaseModel]) -> None:
    text = (ROOT / "writers" / "README.md").read_text()
    documented = {
        word for key in re.findall(r"`([a-z0-9_.\[\]:]+)", text) for word in re.split(r"[.:\[\]]+", key)
    }
    assert set(model.model_fields) <= documented


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_lead_to_files_of_the_repository(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document}: {target}"


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_is_in_the_readme_and_explains_its_options(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"shardkit {verb}" in (ROOT / "README.md").read_text()
    with pytest.raises(SystemExit) as done:
        main([verb, "--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    assert "--json" in text
    assert "default" in text


def test_the_recipe_in_the_readme_is_valid(tmp_path: Path) -> None:
    [text] = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "recipe.yaml").write_text(text)
    assert recipe.load_recipe(tmp_path / "recipe.yaml").pack.sequence_length == 2048
