"""The card of a converted dataset: what it holds, and what it was made from.

A function of the source, as it was named, and the options: no times, no absolute paths that were not given,
so the same command gives the same bytes.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shardkit
from shardkit.convert.options import CutOptions, OutputOptions
from shardkit.convert.source import Source
from shardkit.convert.write_rows import CONTENT_HASH
from shardkit.files import publish_bytes
from shardkit.locate import CARD_NAME

if TYPE_CHECKING:
    from shardkit.convert.run import Written

__all__ = ["write_card"]

CARD_VERSION = 1


def write_card(
    work: Path,
    path: str,
    source: Source,
    output: OutputOptions,
    cut: CutOptions,
    written: Written,
    length: int | None,
) -> None:
    """Put dataset.json beside the shards."""
    manifest = written.manifest
    card: dict[str, Any] = {
        "card_version": CARD_VERSION,
        "shardkit_version": shardkit.__version__,
        "fingerprint": manifest.fingerprint,
        "format": manifest.format,
        "shards": len(manifest.shards),
        "samples": manifest.samples,
        "bytes": sum(shard.raw.bytes for shard in manifest.shards),
        "stored_bytes": sum(shard.stored.bytes for shard in manifest.shards),
        "content_digest": {CONTENT_HASH: written.digest},
    }
    if length is not None:
        [encoding] = written.columns.values()
        card |= {"sequence_length": length, "dtype": encoding.split(":")[1]}
    if written.counts is not None:
        counts = written.counts
        if length is not None:
            card |= {"tokens": manifest.samples * length - counts.padding, "padding": counts.padding}
        card["conversion"] = asdict(counts)
    if written.names and output.format == "mds" and source.facts.get("format") == "tar":
        card["members"] = dict(written.names)
    if written.names and output.format == "wds":
        # What `to_values` needs to give columns their names and encodings again.
        card["columns"] = {
            extension: {"column": name, "encoding": written.columns[extension]}
            for extension, name in written.names.items()
        }
    card["converted_from"] = {
        "path": path,
        "source_format": source.kind,
        **source.facts,
        "files": [{"name": f.basename, "bytes": f.bytes, **f.hashes} for f in source.digests],
        "left_out": list(written.left_out),
        "options": {key: value for key, value in asdict(cut).items() if value not in (None, False)},
    }
    publish_bytes(work / CARD_NAME, json.dumps(card, indent=2).encode() + b"\n")
