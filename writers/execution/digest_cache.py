"""A cache on this machine for facts that depend only on files and versions, reused by later builds.

Workers find the cache folder in an environment variable, which `worker_variable` returns. The folder is below
`user_cache_folder`, contains some kilobytes per tokenizer, and may be deleted at any time. If the variable is
not set, nothing is cached. A key must be a digest of everything that the facts depend on.
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
    """Return {name: value} of the environment variable that tells workers the folder.

    Returns {} if the user has set the variable, or there is no cache folder.
    """
    if _VARIABLE in os.environ or (folder := user_cache_folder()) is None:
        return {}
    return {_VARIABLE: str(folder / "facts")}


def remembered(key: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the cached facts (plain data) for `key`; if missing or damaged, `compute` and cache them."""
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
