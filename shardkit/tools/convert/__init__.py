"""Converts datasets of other formats to MDS or WebDataset shards, and MDS and WebDataset into each other.

`run` is the entry point. `detect` selects the reader (one module per format, `read_…`), `cut` makes rows from
documents, `columns` maps columns between the two formats, `write` writes shards.
"""

from __future__ import annotations

from shardkit.tools.convert.run import ConvertResult, convert
from shardkit.tools.convert.source import CutOptions, OutputOptions

__all__ = ["ConvertResult", "CutOptions", "OutputOptions", "convert"]
