"""Hostile variants of a JSON value: every node replaced, removed, doubled or renamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

__all__ = ["HOSTILE", "variants"]

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 255, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, 1 << 64, 10**400),
    *(0.5, -0.0, 1e308, float("inf"), float("nan")),
    *("", "0", "a", "/", "..", "../x", "a\0b", "\ud800", "x" * 5000, "9" * 5000, "\u0130", "٣"),
    *([], {}, [None], [[]], [0], ["a"], {"": None}, {"a": 1}, {"\ud800": "\udfff"}),
    json.loads("[" * 200 + "]" * 200),
)


def variants(value: Any) -> Iterator[Any]:
    """Copies of `value`, each with one node changed."""
    yield from HOSTILE
    if isinstance(value, dict):
        for name, inner in value.items():
            rest = {key: each for key, each in value.items() if key != name}
            yield rest
            yield {**rest, "\ud800": inner}
            yield {**rest, "../../x": inner}
            for changed in variants(inner):
                yield {**value, name: changed}
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield [*value[:number], *value[number + 1 :]]
            yield [*value[:number], inner, *value[number:]]
            for changed in variants(inner):
                yield [*value[:number], changed, *value[number + 1 :]]
