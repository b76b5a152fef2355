"""What a release says of itself is true: versions, supported Pythons, commands, links and names."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import shardkit as sk
from support.pages import script

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def block(file: str, language: str, number: int = 0) -> str:
    """Return a code block of a document in a language, by its number."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / file).read_text(), re.DOTALL | re.MULTILINE)
    return str(found[number])


def test_every_file_that_states_the_version_states_this_one() -> None:
    assert PROJECT["version"] == sk.__version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == sk.__version__


def test_every_python_that_is_declared_is_tested_and_no_other() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    tested = {str(version) for version in jobs["python"]["strategy"]["matrix"]["python-version"]}
    [setup] = [step["with"] for step in jobs["release"]["steps"] if "setup-python" in step.get("uses", "")]
    tested.add(setup["python-version"])
    declared = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)}
    assert declared == tested
    assert PROJECT["requires-python"] == f">={min(tested, key=lambda v: int(v.partition('.')[2]))}"
    assert {"run": "bash .ci/run"} in jobs["release"]["steps"]
    paths = " ".join(step.get("run", "") for step in jobs["macos"]["steps"])
    assert all((ROOT / path).exists() for path in re.findall(r"tests/\S+", paths))


def test_ci_runs_the_two_commands_of_the_readme() -> None:
    run = (ROOT / ".ci/run").read_text()
    [function] = re.findall(r"^first_block\(\) .*$", run, re.MULTILINE)
    command = ["bash", "-c", f"{function}\nfirst_block README.md"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert found == block("README.md", "bash")
    assert [line.partition("#")[0].strip() for line in found.splitlines()] == ["make demo", "make test"]
    assert run.count('bash -c "${readme[') == 2


@pytest.mark.parametrize(
    ("target", "document", "number"), [("demo", "README.md", 1), ("test", "CONTRIBUTING.md", 0)]
)
def test_what_make_runs_is_what_the_documents_show(target: str, document: str, number: int) -> None:
    shown = block(document, "bash", number)
    dry = ["make", "--dry-run", "--always-make", target, "VENV=nowhere"]
    made = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for line in shown.splitlines():
        assert line.partition("  #")[0] in made.replace("nowhere/bin/", ""), line


def test_all_installs_everything_but_what_it_must_not() -> None:
    extras: dict[str, list[str]] = PROJECT["optional-dependencies"]
    [everything] = extras["all"]
    listed = set(everything.removeprefix("shardkit[").removesuffix("]").split(","))
    # loader: only names others; ray: for clusters; docs: for the site
    assert extras.keys() - listed - {"all", "dev", "docs"} == {"loader", "ray"}


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line[0] != "#")


def test_constraints_pin_every_dependency_within_its_bounds() -> None:
    pins = constraints()
    assert list(pins) == sorted(pins)
    extras = PROJECT["optional-dependencies"]
    asked = [*PROJECT["dependencies"]]
    asked += [one for extra in extras.keys() - {"all", "dev", "docs", "ray"} for one in extras[extra]]
    for requirement in map(Requirement, asked):
        name = canonicalize_name(requirement.name)
        if name not in ("shardkit", "torch"):
            assert requirement.specifier.contains(pins[name]), requirement


def test_the_page_of_dependencies_has_every_one_with_its_extras_and_pin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dependencies = script("dependencies")
    pins = constraints()
    page = (ROOT / "docs/reference/dependencies.md").read_text()
    assert page.startswith(dependencies.HEAD)
    rows = [line.split(" | ") for line in page.removeprefix(dependencies.HEAD).splitlines()]
    found = {row[0].rpartition("/project/")[2].rstrip("/)"): row for row in rows}
    wanted = dependencies.dependencies()
    assert list(found) == list(wanted)
    for name, row in found.items():
        assert row[1] == ", ".join(wanted[name]), name
        assert row[3].startswith(f"{pins.get(name, '')}"), name
        assert row[6] == f"{dependencies.WITHOUT[name]} |", name


def test_what_agents_are_told_exists() -> None:
    text = (ROOT / "llms.txt").read_text()
    assert all((ROOT / link).exists() for link in re.findall(r"\]\(([^)]+)\)", text))
    used = {
        (node.value.id, node.attr)
        for node in ast.walk(ast.parse(block("llms.txt", "python")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    kinds = {"sk": sk, "ds": sk.Dataset, "loader": sk.StreamingLoader}
    assert {name for name, _ in used} == kinds.keys()
    assert all(hasattr(kinds[name], attribute) for name, attribute in used)
    for extra in re.findall(r"shardkit\[(\w+)\]", text):
        assert extra in PROJECT["optional-dependencies"]


# MPL binds changes of its own files only.
PERMISSIVE = re.compile(
    r"MIT|BSD|BSL|Apache|ISC|PSF|Python Software|CNRI|Universal Permissive|Zlib|CC0|MPL|Mozilla"
)


def installed_by(requirement: str) -> set[str]:
    """The distributions that a requirement brings in, of those that are installed here."""
    found: set[str] = set()
    waiting = [(requirement, "")]
    while waiting:
        text, extra = waiting.pop()
        parsed = Requirement(text)
        if parsed.marker is not None and not parsed.marker.evaluate({"extra": extra}):
            continue
        try:
            distribution = importlib.metadata.distribution(parsed.name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for other systems and Pythons, or an extra that is not installed here
        fresh = distribution.name not in found
        found.add(distribution.name)
        for asked in [*([""] if fresh else []), *parsed.extras]:
            waiting += [
                (line, asked) for line in distribution.requires or [] if asked or "extra ==" not in line
            ]
    return found


def license_of(name: str) -> str:
    """The expression in its metadata, or its classifiers, or the first line of its text."""
    about = importlib.metadata.metadata(name).json
    classifiers = [line.rpartition("::") for line in about.get("classifier", [])]
    stated = " AND ".join(last for first, _, last in classifiers if first.startswith("License"))
    return str(about.get("license_expression") or stated or about.get("license", "")).split("\n")[0]


def is_permissive(license: str) -> bool:
    """Whether each part that holds has an alternative that closed products may use."""
    parts = [part.strip("() ").split(" OR ") for part in license.split(" AND ")]
    return all(any(PERMISSIVE.search(one) and "GPL" not in one for one in part) for part in parts)


def test_every_package_that_an_extra_installs_may_be_used_in_closed_products() -> None:
    assert is_permissive("MPL-2.0 AND (GPL-2.0-only OR MIT)")
    assert not any(
        map(is_permissive, ("", "AGPL-3.0-only", "MIT AND LGPL-2.1-or-later", "Other/Proprietary"))
    )
    names = installed_by("shardkit[all]")
    assert {"numpy", "boto3", "pyarrow", "tokenizers"} <= names
    assert not {name: license_of(name) for name in names if not is_permissive(license_of(name))}
