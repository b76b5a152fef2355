"""The default run leaves cases of grids to the extended run; together they are the whole grid."""

from __future__ import annotations

from itertools import product

import pytest

from support.default_run import sample


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("letter", ["a", "b"])
def test_a_grid_is_sampled(request: pytest.FixtureRequest, number: int, letter: str) -> None:
    name = request.node.originalname
    run = [item for item in request.session.items if getattr(item, "originalname", None) == name]
    is_default = request.config.option.markexpr == "not extended"
    assert len(run) <= (3 if is_default else 6)
    if is_default and len(run) == 3:
        assert {item.callspec.params["number"] for item in run} == {1, 2, 3}  # type: ignore[attr-defined]
        assert {item.callspec.params["letter"] for item in run} == {"a", "b"}  # type: ignore[attr-defined]


@pytest.mark.parametrize("count", range(1, 30))
def test_a_sample_is_so_many_cases_with_as_many_values_as_fit(count: int) -> None:
    grid = [{"a": a, "b": b, "c": c} for a, b, c in product("12", "123", "1234")]
    found = sample(grid, count)
    assert len(set(found)) == len(found) == min(count, len(grid))
    for name, values in (("a", 2), ("b", 3), ("c", 4)):
        assert len({grid[index][name] for index in found}) == min(values, count)
