"""Batches of each layout against plain rows of the same dataset, int64, by the same loader.

    python tests/benchmarks/bench_layouts.py [--runs 9] [--megabytes 64] [--length 4096] [--batch 8]

Each run of a layout comes directly after one of plain rows, and the cost is the median of the runs' ratios.
Rows have `--length` + 1 tokens, stored as uint16, of documents of 500 tokens on average. "unmasked": the card
says that no row is padded, so that shifted labels have nothing to mask. One core works, as in the background
thread of a loader that trains. With --masks instead: microseconds for the tables of a block mask, and for
PyTorch's `create_block_mask` of the same mask on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from figures import Heads, benchmark_parser, give, in_turns, read_once, timed
from shardkit.formats import mds
from shardkit.formats.provenance import PROVENANCE_SCHEMA, ROW_GROUP_PIECES, provenance_name
from shardkit.loaders import StreamingLoader
from shardkit.loaders.block_mask import DEFAULT_BLOCK, block_mask_of, block_tables
from shardkit.loaders.config import grouped

EOS = 0
SOURCES = ["web", "code", "books"]
DOCUMENT = 500  # tokens, on average
HEADS: Heads = {
    "side": ("layout", ""),
    "rows_per_s": ("rows/s", ",d"),
    "plain_rows_per_s": ("plain rows/s", ",d"),
    "cost": ("cost", "+.1%"),
}
SHIFTED: dict[str, Any] = {"labels": "shifted"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "rows again": {},
    "rename": {"rename": {"tokens": "input_ids"}},
    "flat": {"flat": True},
    "numpy": {"tensors": "numpy"},
    "shifted, unmasked": SHIFTED,
    "shifted, keep_length, unmasked": SHIFTED | {"keep_length": True},
    "shifted, flat, unmasked": SHIFTED | {"flat": True},
    "shifted": SHIFTED,
    "shifted, keep_length": SHIFTED | {"keep_length": True},
    "shifted, flat": SHIFTED | {"flat": True},
    "labels": {"labels": True},
    "position_ids": {"position_ids": True},
    "document_ids": {"document_ids": True},
    "cu_seqlens": {"cu_seqlens": True},
    "cu_seqlens of 256": {"cu_seqlens": 256},
    "doc_lens": {"doc_lens": True},
    "seq_lengths": {"seq_lengths": True},
    "document_values": {"document_values": ["score"]},
    "document_values, three": {"document_values": ["score", "source", "url"]},
    "document_ids, document_values": {"document_ids": True, "document_values": ["score"]},
    "block_mask": {"block_mask": True},
    "block_mask, flat": {"block_mask": True, "flat": True},
}
MASKS = ((8, 4096), (1, 32_768))  # sequences, tokens of each


def write_dataset(folder: Path, megabytes: int, length: int) -> None:
    """Rows of random tokens in which each token ends its document with the same chance."""
    rng = np.random.default_rng(0)
    count = (megabytes << 20) // (2 * length)
    rows = rng.integers(1, 50_000, (count, length), dtype=np.uint16)
    is_end = rng.random(rows.shape) < 1 / DOCUMENT
    is_end[:, 1:] &= ~is_end[:, :-1]  # no eos follows another, which would be padding
    rows[is_end] = EOS
    mds.write_index(folder, [mds.write_rows_shard(folder, "shard.00000.mds", rows, size_limit=None)])
    read_once(folder / "shard.00000.mds")
    is_end[:, -1] = True
    write_provenance(folder, is_end)


def write_provenance(folder: Path, is_end: npt.NDArray[np.bool_]) -> None:
    """The table of a build whose documents end where `is_end` (rows, tokens) says."""
    row, last = np.nonzero(is_end)
    start = np.where(np.diff(row, prepend=-1) > 0, 0, np.append(0, last[:-1] + 1))
    scores = np.random.default_rng(1).random(len(row)).tolist()
    ones = [1] * len(row)
    columns: dict[str, Any] = dict.fromkeys(PROVENANCE_SCHEMA.names, ones) | {
        "shard": np.zeros(len(row), np.int32),
        "row": row.astype(np.int32),
        "token_start": start.astype(np.int32),
        "token_end": (last + 1).astype(np.int32),
        "document_id": [number.to_bytes(16, "big") for number in range(len(row))],
        "source": np.arange(len(row), dtype=np.int32) % len(SOURCES),
        "file": ["a.jsonl"] * len(row),
        "id": [None] * len(row),
        "url": [f"https://example.org/{number}" for number in range(len(row))],
        "metadata": [json.dumps({"score": score, "language": "en"}) for score in scores],
    }
    file = folder / provenance_name(0)
    file.parent.mkdir()
    table = pa.table(columns, PROVENANCE_SCHEMA)
    pq.write_table(table, file, row_group_size=ROW_GROUP_PIECES, compression="zstd")


def say_padding(folder: Path, *, padded: bool) -> None:
    """Let the card say whether rows are padded; an open dataset keeps what it has read."""
    card: dict[str, Any] = {"tokenizer": {"eos_id": EOS}, "padding": int(padded)}
    card["inputs"] = [{"source": source} for source in SOURCES]
    (folder / "dataset.json").write_text(json.dumps(card))


class Side:
    """One loader, iterated over one epoch again and again."""

    def __init__(self, folder: Path, batch: int, options: dict[str, Any]) -> None:
        self._loader = StreamingLoader(folder, batch_size=batch, rank=0, world_size=1, **grouped(options))
        self._start = self._loader.state_dict()

    def seconds(self) -> float:
        """Of one epoch."""
        self._loader.load_state_dict(self._start)
        gc.collect()
        start = time.perf_counter()
        for _ in self._loader:
            pass
        return time.perf_counter() - start


def measure(folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    sides = {}
    for name in arguments.layouts or LAYOUTS:
        say_padding(folder, padded="unmasked" not in name)
        sides[name] = Side(folder, arguments.batch, LAYOUTS[name])
    plain = Side(folder, arguments.batch, {})
    rows = len(plain._loader) * arguments.batch
    for side in (plain, *sides.values()):
        side.seconds()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for run in range(arguments.runs):
        for name in in_turns(list(sides), run):
            times[name].append((plain.seconds(), sides[name].seconds()))
    return [
        {
            "side": name,
            "rows_per_s": round(rows / statistics.median(ours for _, ours in pairs)),
            "plain_rows_per_s": round(rows / statistics.median(base for base, _ in pairs)),
            "cost": statistics.median(ours / base for base, ours in pairs) - 1,
            "runs": [ours / base for base, ours in pairs],
        }
        for name, pairs in times.items()
    ]


def measure_masks(runs: int) -> list[dict[str, Any]]:
    """Microseconds of one batch's block mask, by the loader's tables and by evaluating the mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    rows = []
    for sequences, length in MASKS:
        is_start = np.random.default_rng(0).random((sequences, length)) < 1 / DOCUMENT
        is_start[:, 0] = True
        starts = np.flatnonzero(is_start)
        made = block_tables(starts, sequences, length, DEFAULT_BLOCK)
        batch = {name: torch.from_numpy(table) for name, table in made.items()}
        mask = block_mask_of(batch | {"block_size": DEFAULT_BLOCK})
        tables = partial(block_tables, starts, sequences, length, DEFAULT_BLOCK)
        create = partial(create_block_mask, mask.mask_mod, sequences, None, length, length, "cpu")
        # Not in turns: a loader makes tables one after another, in memory that is in use.
        times = timed({"tables_us": tables}, 50 * runs) | timed({"create_us": create}, runs)
        row = {name: statistics.median(seconds) * 1e6 for name, seconds in times.items()}
        rows.append({"side": f"{sequences} x {length}"} | row | {"runs": times["tables_us"]})
    return rows


def main() -> None:
    parser = benchmark_parser(__doc__, runs=9)
    parser.add_argument("--megabytes", type=int, default=64, help="of stored tokens (default: %(default)s)")
    parser.add_argument("--length", type=int, default=4096, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=8, help="rows of a batch (default: %(default)s)")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, help="default: all")
    parser.add_argument("--masks", action="store_true", help="block masks against create_block_mask")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.masks:
        heads = {"side": ("sequences", ""), "tables_us": ("tables us", ",.0f")}
        give(
            arguments, measure_masks(arguments.runs), heads | {"create_us": ("create_block_mask us", ",.0f")}
        )
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_dataset(folder, arguments.megabytes, arguments.length + 1)
        title = f"batches of {arguments.batch} rows of {arguments.length} tokens"
        give(arguments, measure(folder, arguments), HEADS, title=title, unit="time against plain rows")


if __name__ == "__main__":
    main()
