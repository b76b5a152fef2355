"""What follows from files and versions alone, kept for the next build on this machine.

Workers find the folder in a variable of their environment, which `worker_variable` sets: it is below
`user_cache_folder`, holds some kilobytes for each tokenizer, and may be deleted at any time. Where the
variable is not set, nothing is kept. A key must be a digest of everything that the facts follow from.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardkit.files import load_json, publish_bytes, user_cache_folder
from shardkit.hashing import digest_of

_VARIABLE = "SHARDKIT_FACTS_DIR"


def worker_variable() -> dict[str, str]:
    """Return the environment variable for workers; {} if the user has set it, or nothing can be kept."""
    if _VARIABLE in os.environ or (folder := user_cache_folder()) is None:
        return {}
    return {_VARIABLE: str(folder / "facts")}


def remembered(key: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Plain data that follows from `key`: what an earlier process of this machine computed, or it is now.

    A damaged file counts as none.
    """
    folder = os.environ.get(_VARIABLE)
    if not folder:
        return compute()
    path = Path(folder) / f"{key}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = load_json(path.read_bytes())
        if kept["seal"] == digest_of([key, kept["facts"]]):
            return dict(kept["facts"])
    facts = compute()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        publish_bytes(path, json.dumps({"facts": facts, "seal": digest_of([key, facts])}).encode())
    return facts
