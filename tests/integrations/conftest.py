"""Trainers that are not installed here are stood in for by their recorded interfaces, in interfaces/."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.loader_data import make_rows
from support.ray_cluster import RAY_ENVIRONMENT

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


@pytest.fixture
def ray_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Ray cluster of this process with room for two workers, which can import the tests' modules."""
    import ray

    tests = INTERFACES.parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tests.parent), str(tests)]))
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")
    for name, value in RAY_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    # "local": a cluster of another test, which Ray would find by a file in /tmp, is not this one.
    ray.init(
        "local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80_000_000
    )
    yield
    ray.shutdown()
