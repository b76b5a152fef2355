"""Which cases of a parametrized test the default run has; the others are left to `pytest -m extended`."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest

__all__ = ["cases"]


def cases(values: Iterable[Any], default: Container[Any]) -> list[Any]:
    """`values`, of which those that are not in `default` are marked extended."""
    marks = pytest.mark.extended
    return [value if value in default else pytest.param(value, marks=marks) for value in values]
