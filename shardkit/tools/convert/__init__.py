"""Datasets of other formats, and of the other of our two, into MDS or WebDataset shards.

`run` tells the whole story. `detect` finds the reader (one module each, `read_…`), `cut` makes rows of
documents, `columns` maps columns between the two formats, `write` writes shards.
"""

from __future__ import annotations

from shardkit.tools.convert.run import ConvertResult, convert
from shardkit.tools.convert.source import CutOptions, OutputOptions

__all__ = ["ConvertResult", "CutOptions", "OutputOptions", "convert"]
