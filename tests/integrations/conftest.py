"""Trainers that are not installed here are stood in for by their recorded interfaces, in interfaces/."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.loader_data import make_rows

INTERFACES = Path(__file__).resolve().parent / "interfaces"
sys.path.append(str(INTERFACES))  # behind the packages that are installed


@pytest.fixture
def forgotten_modules() -> Iterator[None]:
    """Stand-ins for JAX and Grain are forgotten afterwards: other libraries look for them in sys.modules."""
    yield
    for name, module in list(sys.modules.items()):
        is_stand_in = str(INTERFACES) in str(getattr(module, "__file__", ""))
        if is_stand_in and name.partition(".")[0] in ("jax", "grain", "maxtext"):
            del sys.modules[name]
    sys.modules.pop("shardkit.loaders.integrations.maxtext", None)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The folder of a dataset of 150 rows of 65 tokens."""
    return make_rows(tmp_path / "data", 150, 65)
