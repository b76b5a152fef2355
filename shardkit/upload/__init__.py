"""Whole datasets from a folder to a store and back: checked, resumable, and never half visible.

`contents` says what belongs to a dataset, `publication` puts that into a store with the index last, `send`
and `receive` move the files of an upload and of a download, `parallel` runs many at a time, `progress`
and `report` tell what is and was done.
"""

from __future__ import annotations

from shardkit.upload.progress import TransferProgress
from shardkit.upload.publication import TransferError
from shardkit.upload.receive import download
from shardkit.upload.report import TransferReport
from shardkit.upload.send import upload

__all__ = ["TransferError", "TransferProgress", "TransferReport", "download", "upload"]
