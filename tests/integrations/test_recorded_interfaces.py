"""Recorded interfaces agree with the trainers: what they define exists there, with arguments of these names.

For environments that have a trainer, such as those of tests/trainers/trial.py; skipped elsewhere.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from contextlib import suppress
from pathlib import Path

import pytest

INTERFACES = Path(__file__).resolve().parent / "interfaces"
OURS = {
    "nanotron.trainer": {"DistributedTrainer.train", "Group"},
    "olmo_core.train": {"Trainer.__init__", "TrainerConfig.build"},
    "torchtitan.components.checkpoint": {"CheckpointManager.__init__"},
    "torchtitan.components.validate": {"Validator.__init__", "Validator.validate"},
}
"""What is simpler in the recorded interface than in the trainer, or only in the former."""


def definitions(file: Path) -> dict[str, list[str]]:
    """{qualified name: arguments} of all public classes, methods and functions of a module."""
    found: dict[str, list[str]] = {}

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                found[prefix + node.name] = []
                collect(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef) and (node.name == "__init__" or node.name[0] != "_"):
                names = [argument.arg for argument in node.args.args + node.args.kwonlyargs]
                found[prefix + node.name] = [name for name in names if name not in ("self", "cls")]

    collect(ast.parse(file.read_text()).body, "")
    return found


def modules() -> list[tuple[str, Path]]:
    files = sorted(INTERFACES.rglob("*.py"))
    names = [".".join(file.relative_to(INTERFACES).with_suffix("").parts) for file in files]
    return [(name.removesuffix(".__init__"), file) for name, file in zip(names, files, strict=True)]


@pytest.mark.extended
@pytest.mark.parametrize(("name", "file"), modules(), ids=[name for name, _ in modules()])
def test_what_is_recorded_is_in_the_trainer(name: str, file: Path) -> None:
    spec = None
    with suppress(ModuleNotFoundError):
        spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or Path(spec.origin).is_relative_to(INTERFACES):
        pytest.skip(f"{name} is not installed here")
    module = importlib.import_module(name)
    for qualified, arguments in definitions(file).items():
        if any(qualified == ours or qualified.startswith(f"{ours}.") for ours in OURS.get(name, ())):
            continue
        real: object = module
        for part in qualified.split("."):
            assert hasattr(real, part), f"{name} has no {qualified}"
            real = getattr(real, part)
        if arguments and callable(real):
            missing = set(arguments) - inspect.signature(real).parameters.keys()
            assert not missing, f"{name}.{qualified} takes no {missing}"
