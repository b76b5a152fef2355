"""Whole datasets into a store or folder: checked, resumable, and never half visible.

`contents` says which files make a dataset, `publication` is the one protocol that puts them somewhere, the
index last, `transports` move the files (to a store, from a store, by links or renames on this machine), `api`
has `upload`, `download`, and what builds and conversions publish with.
"""

from __future__ import annotations

from shardkit.progress import TransferProgress
from shardkit.publish.api import TransferReport, download, upload
from shardkit.publish.publication import RefusedError, TransferError

__all__ = ["RefusedError", "TransferError", "TransferProgress", "TransferReport", "download", "upload"]
