"""From a row back to its raw documents, from a document to its rows, and to the steps that saw them.

`table` reads the provenance tables beside the shards, by row or by a `selection` of documents (`urls` are its
patterns); `text` decodes what rows say; `steps` and `run` tell where a training run delivers a row, and which
rows a step had; `export` and `removal` write what was found, for people and for loaders.
"""

from __future__ import annotations

__all__: list[str] = []
