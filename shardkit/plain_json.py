"""JSON from outside: what cannot be read is a ValueError, also where it nests too deeply for Python."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["load_json"]


def load_json(text: str | bytes) -> Any:
    """`json.loads`, whose RecursionError callers would have to know of."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("brackets nest too deeply") from None
