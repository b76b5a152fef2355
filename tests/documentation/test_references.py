"""The generated references are those of this code, and the README keeps to its length."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from shardkit.cli.main import VERBS, main
from shardkit.writers.filters.config import PROFILES, FilterEntry
from shardkit.writers.recipe.recipe import Recipe
from support.pages import ROOT, script

README_WORDS = 1000
RECIPE = ROOT / "docs" / "reference" / "recipe.md"
COMMANDS = ROOT / "docs" / "reference" / "cli.md"


def test_the_references_are_what_the_code_generates() -> None:
    generate = script("generate")
    for page, text in ((RECIPE, generate.recipe_reference()), (COMMANDS, generate.cli_reference())):
        assert page.read_text() == text, f"run: python docs/generate.py ({page.name} is not what it writes)"


def test_every_recipe_key_is_in_the_reference_and_has_a_meaning() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", RECIPE.read_text(), re.MULTILINE)
    meanings = dict(rows)
    schema = Recipe.model_json_schema()
    for model in [schema, *schema["$defs"].values()]:
        if model.get("title") != FilterEntry.__name__:
            for key in model.get("properties", ()):
                assert meanings.get(key, "").strip(), key
    headings = re.findall(r"^### (\w+)$", RECIPE.read_text(), re.MULTILINE)
    assert set(FilterEntry.model_fields) == set(headings)


@pytest.mark.parametrize("name", PROFILES)
def test_the_reference_lists_the_filters_of_a_profile_in_order(name: str) -> None:
    [row] = [line for line in RECIPE.read_text().splitlines() if line.startswith(f"| `profile: {name}` |")]
    places = [row.index(f"`{key}`") for entry in PROFILES[name] for key in entry]
    assert places == sorted(places)


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_is_in_the_reference_and_explains_its_options(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"\n## shardkit {verb}\n" in COMMANDS.read_text()
    with pytest.raises(SystemExit) as done:
        main([verb, "--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    assert "--json" in text
    assert "default" in text


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    prose = re.sub(
        r"<[^>]+>|\]\([^)]*\)", " ", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    )
    assert len(prose.split()) <= README_WORDS


def test_figures_are_what_their_script_draws() -> None:
    figures = script("figures")
    for name, figure in figures.FIGURES.items():
        for mode, palette in figures.PALETTES.items():
            file = figures.FOLDER / f"{name}-{mode}.svg"
            assert file.read_text() == figure(palette).svg(), f"run: python docs/figures.py ({file.name})"


def test_the_killed_run_in_the_figure_has_the_losses_of_the_uninterrupted_one() -> None:
    facts = json.loads((ROOT / "docs" / "figures" / "resume.json").read_text())
    assert len(facts["killed"]) >= 3
    for part in facts["killed"]:
        first = part["first"] - 1
        assert part["losses"] == facts["uninterrupted"][first : first + len(part["losses"])]


def defined(path: Path) -> set[str]:
    """Names that a module defines at its top, and those of its methods."""
    tree = ast.parse(path.read_text())
    kinds = ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef
    names = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
    targets = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    for node in targets:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            names |= {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}
    return names


def test_the_map_of_the_code_names_files_and_functions_that_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    places = re.findall(r"`((?:shardkit|writers|loaders|tests|docs)/[\w/.]*)(?:: (\w+))?`", text)
    assert len(places) > 40
    for file, name in places:
        path = ROOT / file
        assert path.exists(), file
        assert not name or name in defined(path), f"{file}: {name}"
