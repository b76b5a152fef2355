"""Transfer of whole datasets into a store or folder: checked, resumable, and never partly visible.

`contents` determines which files make a dataset; `publication` is the protocol that writes them, index last;
`transports` move the files (to a store, from a store, by links or renames on this machine); `api` has
`upload`, `download`, and the function with which builds and conversions publish.
"""

from __future__ import annotations

from shardkit.progress import TransferProgress
from shardkit.publish.api import TransferReport, download, upload
from shardkit.publish.publication import RefusedError, TransferError

__all__ = ["RefusedError", "TransferError", "TransferProgress", "TransferReport", "download", "upload"]
