"""Trainers that are not installed here are stood in for by their recorded interfaces, in interfaces/."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.loader_data import make_rows

INTERFACES = Path(__file__).resolve().parent / "interfaces"
sys.path.append(str(INTERFACES))  # behind the packages that are installed


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The folder of a dataset of 150 rows of 65 tokens."""
    return make_rows(tmp_path / "data", 150, 65)
