"""`import shardkit as sk` costs milliseconds, and `sk.<Tab>` shows everything that it offers."""

from __future__ import annotations

import ast
import json
import pydoc
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

import shardkit as sk
from shardkit.errors import RecipeError
from support.small_build import make_corpus, tree

PACKAGES = ["shardkit", "shardkit.loaders", "shardkit.writers"]


@pytest.mark.parametrize("name", PACKAGES)
def test_dir_lists_exactly_the_public_names_and_each_of_them_is_there(name: str) -> None:
    package = import_module(name)
    assert dir(package) == sorted(package.__all__) == sorted(set(package.__all__))
    for public in package.__all__:
        assert getattr(package, public) is not None
    with pytest.raises(AttributeError, match=f"'{name}' has no attribute 'biuld'"):
        getattr(package, "biuld")  # noqa: B009


@pytest.mark.parametrize("name", PACKAGES)
def test_type_checkers_know_the_names_that_are_there_at_run_time(name: str) -> None:
    package = import_module(name)
    assert package.__file__ is not None
    known = {"__version__"} & set(package.__all__)
    for node in ast.parse(Path(package.__file__).read_text()).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for line in node.body:
                assert isinstance(line, ast.ImportFrom)
                assert line.module is not None
                for alias in line.names:
                    public = alias.asname or alias.name
                    assert getattr(package, public) is getattr(import_module(line.module), alias.name)
                    known.add(public)
    assert known == set(package.__all__)


def test_importing_costs_milliseconds_and_loads_nothing_that_is_heavy() -> None:
    code = (
        "import sys, time, json; began = time.process_time(); import shardkit, shardkit.loaders, "
        "shardkit.writers; taken = time.process_time() - began; dir(shardkit); "
        "print(json.dumps([taken, sorted({name.partition('.')[0] for name in sys.modules})]))"
    )
    runs = [
        json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
        for _ in range(5)
    ]
    assert min(taken for taken, _ in runs) < 0.03
    assert not {"numpy", "torch", "rich", "pydantic", "yaml", "pyarrow"} & set(runs[0][1])


def test_help_shows_what_to_type_and_every_name() -> None:
    text = pydoc.plain(pydoc.render_doc(sk))
    assert 'sk.build("recipe.yaml")' in text
    assert not [name for name in sk.__all__ if name not in text and name != "__version__"]


def test_a_dict_is_a_recipe_and_makes_the_same_dataset(
    tmp_path: Path, inline_builds: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make_corpus(tmp_path / "corpus", 40)
    recipe = yaml.safe_load(file.read_text())
    monkeypatch.chdir(file.parent)
    of_file = sk.build(file, workers=1, progress=False)
    of_dict = sk.build(recipe, output=tmp_path / "of dict", workers=1, progress=False)
    assert tree(Path(of_file.location)) == tree(Path(of_dict.location))
    paths = recipe | {"output": {**recipe["output"], "path": Path("out")}}
    assert sk.build(paths, workers=1, progress=False).up_to_date
    assert sk.build(sk.load_recipe(file), workers=1, progress=False).up_to_date
    with pytest.raises(RecipeError, match="seq_length: unknown key; in shardkit: `sequence_length`"):
        sk.build(recipe | {"pack": {"seq_length": 64}}, progress=False)
