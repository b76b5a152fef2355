"""Where a trainer is installed, its recorded interface has its signatures: run by the trainer's Python."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

import pytest

INTERFACES = Path(__file__).resolve().parent / "interfaces"
RECORDED = {  # module: classes and methods
    "composer": ["Trainer.__init__"],
    "composer.core": ["DataSpec.__init__", "Evaluator.__init__"],
    "litgpt.data": ["DataModule.connect", "DataModule.setup"],
}


def recorded_module(name: str) -> ModuleType:
    """The stand-in under another name, so that what it imports is the real package."""
    file = INTERFACES / Path(*name.split("."))
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    spec = importlib.util.spec_from_file_location(f"recorded_{name.replace('.', '_')}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.extended
@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_interface_has_the_signatures_of_the_real_package(name: str) -> None:
    package = importlib.util.find_spec(name.partition(".")[0])
    assert package is not None
    assert package.origin is not None
    if INTERFACES in Path(package.origin).parents:
        pytest.skip(f"{package.name} is not installed here")
    real, recorded = importlib.import_module(name), recorded_module(name)
    for entry in RECORDED[name]:
        kind, method = entry.split(".")
        theirs = inspect.signature(getattr(getattr(real, kind), method)).parameters
        ours = inspect.signature(getattr(getattr(recorded, kind), method)).parameters
        for parameter in ours.values():
            assert parameter.name in theirs, f"{name}.{kind}.{method}"
            assert parameter.default == theirs[parameter.name].default, f"{name}.{kind}.{method}: {parameter}"
            assert parameter.kind == theirs[parameter.name].kind, f"{name}.{kind}.{method}: {parameter}"
