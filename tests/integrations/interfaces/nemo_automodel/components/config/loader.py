"""The configuration of a recipe, as YAML says it."""

from __future__ import annotations

from typing import Any

__all__ = ["ConfigNode"]


class ConfigNode:
    def __init__(self, d: dict[str, Any]) -> None:
        self._values = {
            name: ConfigNode(value) if isinstance(value, dict) else value for name, value in d.items()
        }

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_") or key not in self._values:
            raise AttributeError(key)
        return self._values[key]
