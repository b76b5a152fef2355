"""The digest of the code covers every module and library that a task can run, or says why it need not."""

from __future__ import annotations

import ast
import importlib.metadata
import sys
from pathlib import Path

import pytest

from shardkit.writers.execution import code_version as module
from shardkit.writers.execution.code_version import (
    DECIDES_NO_BYTE,
    LIBRARIES,
    OUTSIDE_TASKS,
    code_version,
    covered_sources,
    is_left_out,
)
from support.reached_code import Definition, Reached, Sources

OTHER_LIBRARIES = {
    "_typeshed": "for type checkers only",
    "pydantic": "validates recipes, whose values are in the tasks' digests",
    "pydantic_core": "the same",
    "yaml": "reads recipes",
    "PIL": "encodes columns of images, which no build writes",
    "simplejpeg": "decodes images, which no build reads",
    "torch": "holds decoded images, as above",
    "botocore": "moves objects",
    "urllib3": "moves objects",
    "fsspec": "moves objects",
    "huggingface_hub": "moves objects",
    "httptools": "moves answers, which decide",
    "google_crc32c": "tells damaged records of TFRecord files, by a fixed formula",
}


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources()


def task_functions(sources: Sources) -> list[Definition]:
    found = []
    for name, call in sources.calls_of("Stage"):
        if not name.startswith("shardkit.writers.") or name.startswith("shardkit.writers.execution."):
            continue  # those of execution are steps of a stage, and a mark
        assert len(call.args) == 3, f"{name}:{call.lineno}: give the stage its name, title and function"
        function = call.args[2]
        assert isinstance(function, ast.Name), f"{name}:{call.lineno}: name the function in the call"
        found += sources.find(name, function.id)
    return found


@pytest.fixture(scope="module")
def reached(sources: Sources) -> Reached:
    functions = task_functions(sources)
    assert len(functions) >= 20
    return sources.reached_from(*functions)


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def test_every_module_that_a_task_runs_is_covered_or_left_out_for_a_reason(reached: Reached) -> None:
    missing = {
        name
        for name in reached.modules - covered_sources().keys()
        if not any(is_within(name, package) for package in DECIDES_NO_BYTE)
    }
    assert not missing, "tasks run these: take them out of OUTSIDE_TASKS"
    assert all(DECIDES_NO_BYTE.values())


@pytest.mark.parametrize(
    "package",
    [
        *(
            "shardkit.writers.inputs.readers",
            "shardkit.writers.inputs.read_warc",
            "shardkit.formats.compression",
        ),
        *(
            "shardkit.writers.filters.perplexity",
            "shardkit.writers.dedup.signatures",
            "shardkit.formats.mds.writer",
        ),
        *(
            "shardkit.writers.filters.user_code",
            "shardkit.writers.inputs.pages",
            "shardkit.formats.tar.writer",
        ),
    ],
)
def test_the_walk_follows_imports_in_functions_and_by_name(package: str, reached: Reached) -> None:
    assert package in reached.modules
    assert package in covered_sources()


def test_every_module_is_covered_unless_it_is_named(sources: Sources) -> None:
    assert {name for name in sources.modules if not is_left_out(name)} == covered_sources().keys()


def test_nothing_is_left_out_that_does_not_exist_or_for_no_use(sources: Sources, reached: Reached) -> None:
    named = [*OUTSIDE_TASKS, *DECIDES_NO_BYTE]
    unknown = [name for name in named if not any(is_within(found, name) for found in sources.modules)]
    assert not unknown
    unused = [
        name for name in DECIDES_NO_BYTE if not any(is_within(found, name) for found in reached.modules)
    ]
    assert not unused, "no task runs these: they belong into OUTSIDE_TASKS"
    assert len(set(named)) == len(named)


def test_every_library_that_a_task_imports_is_covered_or_decides_nothing(reached: Reached) -> None:
    distributions = importlib.metadata.packages_distributions()
    covered = {name.lower() for name in LIBRARIES}
    for package in reached.packages - set(sys.stdlib_module_names) - OTHER_LIBRARIES.keys():
        names = distributions.get(package, [package])
        assert {name.lower() for name in names} & covered, f"{package} is not in LIBRARIES"


def test_a_changed_reader_or_library_is_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = code_version.__wrapped__()
    sources = covered_sources()
    changed = tmp_path / "readers.py"
    changed.write_bytes(sources["shardkit.writers.inputs.readers"].read_bytes() + b"\n")
    with monkeypatch.context() as patched:
        edited = sources | {"shardkit.writers.inputs.readers": changed}
        patched.setattr(module, "covered_sources", lambda: edited)
        assert code_version.__wrapped__() != before
    plain = importlib.metadata.version
    for library in ("isal", "spacy", "Brotli", "lz4", "numpy"):
        with monkeypatch.context() as patched:
            patched.setattr(
                importlib.metadata, "version", lambda name, of=library: "9.9.9" if name == of else plain(name)
            )
            assert code_version.__wrapped__() != before, library
    assert code_version.__wrapped__() == before


def test_the_walk_finds_what_a_definition_reaches_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "shardkit"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text(
        "from typing import TYPE_CHECKING\nfrom shardkit import b\nfrom shardkit.c import other, used\n"
        "if TYPE_CHECKING:\n    from shardkit.d import Typed\n"
        "def start(value: 'int', typed: Typed):\n    return [b.called() for _ in used]\n"
        "def beside():\n    return other()\n"
    )
    (package / "b.py").write_text(
        "import numpy as np\ndef called():\n    from shardkit import e\n    e.late()\n"
    )
    (package / "c.py").write_text(
        "from shardkit.f import far\nused = [far]\ndef other():\n    import kenlm\n"
    )
    (package / "d.py").write_text("class Typed:\n    def method(self):\n        import orjson\n")
    (package / "e.py").write_text("def late():\n    return 1\ndef not_reached():\n    import isal\n")
    (package / "f.py").write_text("def far():\n    return other_name\nother_name = 1\n")
    monkeypatch.setattr("support.reached_code.FOLDERS", {"shardkit": package})
    reached = Sources().reached_from(("shardkit.a", "start"))
    names = {(module, name) for module, name in reached.definitions if name}
    assert names == {
        *(("shardkit.a", "start"), ("shardkit.b", "called"), ("shardkit.c", "used"), ("shardkit.d", "Typed")),
        *(("shardkit.e", "late"), ("shardkit.f", "far"), ("shardkit.f", "other_name")),
    }
    assert reached.packages == {"orjson"}
