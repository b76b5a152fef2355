"""Datasets of other formats, and of the other of our two, into MDS or WebDataset shards.

`run` is the whole of it; `detect` finds the reader; one reader a file (`read_…`); `cut` makes rows of
documents; `columns` says what a column is in the other format; `write_rows` and `write_samples` write,
`read_back` compares, `staging` publishes, `card` says what it was made from.
"""

from __future__ import annotations

from shardkit.tools.convert.run import ConvertResult, convert
from shardkit.tools.convert.source import CutOptions, OutputOptions

__all__ = ["ConvertResult", "CutOptions", "OutputOptions", "convert"]
