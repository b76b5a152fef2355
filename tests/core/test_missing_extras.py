"""Without an optional package, every command and public import names the extra that brings it."""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest

from shardkit import errors
from shardkit.cli.main import VERBS
from shardkit.errors import MissingExtraError, naming_extras
from support.script_server import ScriptServer
from support.small_build import make_corpus
from support.small_dataset import make_dataset

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 120
BLOCK = """
import importlib.abc, sys
missing = set(sys.argv[1].split(","))
assert not missing & sys.modules.keys(), "imported before it was hidden"
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
"""
COMMAND = "from shardkit.cli.main import main\nsys.exit(main(sys.argv[2:]))"
# What shardkit always needs: imported once, by the process that all others are forks of.
NEEDED = ["numpy", "pydantic", "rich.console", "xxhash", "yaml", "zstandard"]
ALL = ",".join(errors._EXTRAS)
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


class Ended(NamedTuple):
    code: int
    output: str


class Bare:
    """Runs code in new processes, in which some packages cannot be imported."""

    def __init__(self, server: ScriptServer, folder: Path) -> None:
        self._server, self._folder, self._numbers = server, folder, count()

    def run(self, missing: str, code: str, *arguments: str) -> Ended:
        stem = self._folder / str(next(self._numbers))
        script, output = stem.with_suffix(".py"), stem.with_suffix(".out")
        script.write_text(BLOCK + code)
        process = self._server.start([str(script), missing, *arguments], cwd=self._folder, output=output)
        return Ended(process.wait(TIMEOUT), output.read_text())


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bare]:
    folder = tmp_path_factory.mktemp("scripts")
    with ScriptServer(NEEDED, path=folder, environment={}) as server:
        yield Bare(server, folder)


def in_extra(extra: str) -> set[str]:
    """Distributions that an extra installs, and what these bring that we import."""
    listed = PYPROJECT["optional-dependencies"][extra]
    return {re.split(r"[\[<>=\s]", line)[0].lower() for line in listed}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("missing")
    recipe = make_corpus(folder / "corpus", 40)
    make_dataset(folder / "dataset")
    records = [json.dumps({"text": f"word {n}", "label": "ab"[n % 2]}) for n in range(200)]
    (folder / "labelled.jsonl").write_text("\n".join(records))
    names = {"recipe": recipe, "dataset": folder / "dataset", "labelled": folder / "labelled.jsonl"}
    names |= {"table": folder / "corpus" / "tables", "new": folder / "new"}
    return {name: str(path) for name, path in names.items()}


# With nothing installed but what shardkit itself needs: the package and extra to name, or None if it works.
COMMANDS: list[tuple[str, tuple[str, str] | None]] = [
    ("audit {dataset} --batch-size 4 --world-sizes 1", None),
    ("build {recipe}", ("", "write")),
    ("clean {recipe}", ("", "write")),
    ("convert {table} {new}", ("pyarrow", "write")),
    ("convert {dataset} {new}-tar --format wds", None),
    ("dedup-index {recipe} {new}", ("", "write")),
    ("demo --output {new}", ("", "write")),
    ("download s3://bucket/a {new}", ("boto3", "s3")),
    ("download gs://bucket/a {new}", ("fsspec", "fsspec")),
    ("download hf://datasets/team/a {new}", ("urllib3", "hub")),
    ("info {dataset}", None),
    ("init {labelled} --output {new}.yaml", ("", "write")),
    ("info s3://bucket/a", ("boto3", "s3")),
    ("pack {dataset} {new}", ("pyarrow", "write")),
    ("plan build {recipe}", ("", "write")),
    ("plan train --tokens 10M --days 1 --gpus 8", None),
    ("trace {dataset} --row 1", ("pyarrow", "write")),
    ("upload {dataset} s3://bucket/a", ("boto3", "s3")),
    ("verify {dataset}", None),
    ("view {dataset}", ("uvicorn", "view")),
    ("trace {dataset} --why --url https://a.org", ("pyarrow", "write")),
]


def test_every_verb_is_tried() -> None:
    assert {command.split()[0] for command, _ in COMMANDS} == set(VERBS)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("command", "named"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_a_command_names_the_extra_that_it_lacks(
    command: str, named: tuple[str, str] | None, places: dict[str, str], bare: Bare
) -> None:
    done = bare.run(ALL, COMMAND, *(word.format(**places) for word in command.split()))
    if named is None:
        assert done.code == 0, done.output
        return
    package, extra = named
    assert done.code == 1, done.output
    last = done.output.splitlines()[-1]  # the demo says what it begins before
    found = re.fullmatch(r"shardkit: error: (.+) needs (\S+): pip install 'shardkit\[(\w+)\]'", last)
    assert found, done.output
    assert found[3] == extra
    assert found[2] == (package or found[2])
    assert found[2].lower() in in_extra(extra)


@pytest.mark.parametrize(
    ("missing", "command", "extra"),
    [
        ("numba", "build {recipe}", "write"),
        ("ray", "build {recipe} --engine ray", "ray"),
    ],
)
def test_a_single_missing_package_is_named_with_its_extra(
    missing: str, command: str, extra: str, places: dict[str, str], bare: Bare
) -> None:
    done = bare.run(missing, COMMAND, *(word.format(**places) for word in command.split()))
    assert done.code == 1
    assert f"needs {missing}: pip install 'shardkit[{extra}]'" in done.output
    assert "Traceback" not in done.output


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("statement", "missing", "extra"),
    [
        ("from shardkit.loaders import StreamingLoader", ALL, None),
        ("from shardkit.loaders.pytorch import StreamingDataset", "torch", "torch"),
        ("from shardkit.loaders.pytorch import state_of", "torch", "torch"),
        ("from shardkit.loaders.pytorch import MapDataset", "torch", "torch"),
        ("from shardkit.loaders.streaming_dataset import StreamingDataset", "torch", "torch"),
        ("from shardkit.loaders.lightning_module import ShardDataModule", "lightning", "lightning"),
        ("from shardkit.loaders.lightning_module import ShardDataModule", "torch,lightning", "lightning"),
        ("from shardkit.loaders import value_hash", ALL, None),
        ("from shardkit.loaders.document_values import DocumentValues as V; V(None, ['a'])", ALL, "parquet"),
        ("from shardkit.loaders import Stream, balanced_streams, weighted_streams", ALL, None),
        ("from shardkit import Stream, StreamingLoader, download, open, upload, verify", ALL, None),
        ("from shardkit import Dataset, Recipe, convert, load_recipe, trace", ALL, None),
        ("import shardkit as sk; sk.build", ALL, "write"),
        ("from shardkit.datasets.provenance.documents import trace_of", ALL, "write"),
        ("from shardkit.formats.rows.parquet import ParquetFooter as F; F('a', b'', 99)", ALL, "parquet"),
        (
            "from shardkit.formats.rows.json_lines import JsonLinesFormat as F; F().read('a', None, 0)",
            "orjson",
            "parquet",
        ),
        ("from shardkit.writers import build", ALL, "write"),
        ("from shardkit.writers import build", "numba", "write"),
        ("from shardkit.writers import build_dedup_index", "pyarrow", "write"),
        ("from shardkit.writers import Recipe, load_recipe", ALL, None),
        ("from shardkit.writers.rows.annotations import thresholds", ALL, "write"),
        (
            "from shardkit import open_dataset; import shardkit.formats.mds, shardkit.publish",
            ALL,
            None,
        ),
    ],
)
def test_a_public_import_names_the_extra_that_it_lacks(
    statement: str, missing: str, extra: str | None, bare: Bare
) -> None:
    done = bare.run(missing, statement)
    if extra is None:
        assert done.code == 0, done.output
        return
    last = done.output.splitlines()[-1]
    assert last.startswith("shardkit.errors.MissingExtraError: ")
    assert last.endswith(f": pip install 'shardkit[{extra}]'")


def test_a_module_that_no_extra_has_is_not_explained_away() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"), naming_extras("this"):
        importlib.import_module("no_such_module")
    message = r"this needs spacy: pip install 'shardkit\[spacy\]'"
    with pytest.raises(MissingExtraError, match=message), naming_extras("this"):
        raise ModuleNotFoundError("", name="spacy.part")
    message = "this needs ai2-olmo-core: pip install ai2-olmo-core"
    with pytest.raises(MissingExtraError, match=message), naming_extras("this"):
        raise ModuleNotFoundError("", name="olmo_core.data")


def test_each_extra_is_known_to_pyproject_and_each_optional_import_to_the_table() -> None:
    for distribution, extra in errors._EXTRAS.values():
        assert distribution.lower() in in_extra(extra), f"{distribution} is not in {extra}"
    core = {"numpy", "zstandard", "xxhash", "pydantic", "pydantic_core", "yaml", "rich"}
    known = core | {"shardkit", "_typeshed"} | set(sys.stdlib_module_names)
    known |= errors._EXTRAS.keys() | errors._WITHOUT_EXTRA.keys()
    for folder in ("shardkit", "writers", "loaders"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                unknown = {name.partition(".")[0] for name in names} - known
                assert not unknown, f"{file}: which extra has {unknown}? (shardkit.errors)"
