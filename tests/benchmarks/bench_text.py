"""Text while loading: zstd Parquet files, tokenized and packed by the loader, on one core.

    python tests/benchmarks/bench_text.py --tokenizer tokenizer.json [--eos TOKEN] [--corpus FOLDER]
                                          [--megabytes 64] [--runs 5] [--json] [--save PREFIX]

Each side is a process of its own, pinned to one core, and reads the same files. CPU time is that of all
threads, without the imports. MB are of UTF-8 text. `loader` reads an epoch of shuffled rows of 2,049 tokens
(best fit, batches of 8) from a kept index; `index` makes that index at the first start; `plain` is what one
writes by hand: `iter_batches` of pyarrow, `encode_batch` of tokenizers, joined documents cut into rows.
`again` is the same work a second time in that process, when the tokenizer knows the words.

In the end a build with `pack.order: source` makes the same rows, and all are compared.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import shardkit as sk
from figures import Heads, benchmark_parser, give, in_turns
from texts import documents, put_tokenizer

LENGTH, BATCH, FILES = 2049, 8, 4
HEADS: Heads = {
    "side": ("side", ""),
    "cpu_s": ("CPU s", ".2f"),
    "MB_s": ("MB / CPU s", ".1f"),
    "Mtokens_s": ("M tokens / CPU s", ".2f"),
    "ratio": ("x plain", ".1f"),
    "again": ("again, M tokens / CPU s", ".2f"),
}
Tokenizer = dict[str, str]


def write(folder: Path, texts: list[str]) -> int:
    """Write the texts as zstd Parquet files with row groups of 1,000; return their bytes."""
    folder.mkdir()
    for number in range(FILES):
        table = pa.table({"text": texts[number::FILES]})
        name = folder / f"part-{number}.parquet"
        pq.write_table(table, name, row_group_size=1000, compression="zstd")
    return sum(len(text.encode()) for text in texts)


def index(data: Path, tokenizer: Tokenizer) -> int:
    """Return the tokens of all rows that a first start counts."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        return _count(data, tokenizer)


def _count(data: Path, tokenizer: Tokenizer) -> int:
    return len(sk.open(data, tokenizer=tokenizer, sequence_length=LENGTH)) * LENGTH


def loader(data: Path, tokenizer: Tokenizer) -> int:
    """Return the tokens of an epoch of batches."""
    made = sk.StreamingLoader(
        str(data),
        batch_size=BATCH,
        rank=0,
        world_size=1,
        tail="drop",
        tokenizer=tokenizer,
        sequence_length=LENGTH,
    )
    with made:
        return sum(batch["tokens"].numel() for batch in made)


def plain(data: Path, tokenizer: Tokenizer) -> int:
    """Return the tokens of rows made by hand from the files in their order."""
    from tokenizers import Tokenizer as Made

    made = Made.from_file(tokenizer["path"])
    eos, left, rows = made.token_to_id(tokenizer["eos"]), np.empty(0, np.int64), 0
    for file in sorted(data.iterdir()):
        for batch in pq.ParquetFile(file).iter_batches(64, columns=["text"]):
            encoded = made.encode_batch_fast(batch.column(0).to_pylist())
            left = np.concatenate([left, *(np.array([*one.ids, eos]) for one in encoded)])
            whole = len(left) // LENGTH
            rows, left = rows + len(left[: whole * LENGTH].reshape(-1, LENGTH)), left[whole * LENGTH :]
    return rows * LENGTH


SIDES: dict[str, Callable[[Path, Tokenizer], int]] = {"index": index, "loader": loader, "plain": plain}


def run(side: str, folder: Path) -> dict[str, Any]:
    """Return the answer of a side in a process of its own."""
    command = [sys.executable, __file__, "--side", side, str(folder)]
    given = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=given)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def answer(side: str, folder: Path) -> None:
    """Print CPU seconds and tokens of one side."""
    import torch

    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    work, given = SIDES[side], json.loads((folder / "tokenizer-options.json").read_text())
    work(folder / "warm", given)  # imports, compiled kernels, the tokenizer
    seconds = []
    for _ in range(2):
        start = time.process_time()
        tokens = work(folder / "data", given)
        seconds.append(time.process_time() - start)
    print(json.dumps({"first_s": seconds[0], "again_s": seconds[1], "tokens": tokens}))


def equal_rows(folder: Path, tokenizer: Tokenizer) -> bool:
    """Return whether a build in the order of its inputs makes exactly the rows of the loader."""
    recipe = {
        "inputs": str(folder / "data" / "*.parquet"),
        "steps": [],
        "tokenizer": tokenizer,
        "pack": {"sequence_length": LENGTH, "order": "source"},
        "output": str(folder / "out"),
    }
    sk.build(recipe, progress=False)
    built = sk.open(folder / "out")
    read = sk.open(folder / "data", tokenizer=tokenizer, sequence_length=LENGTH)
    return len(built) == len(read) and all(
        np.array_equal(np.asarray(one["tokens"]), np.asarray(other["tokens"]))
        for one, other in zip(built, read, strict=True)
    )


def main() -> None:
    parser = benchmark_parser(__doc__, runs=5)
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json (default: a small one made here)")
    parser.add_argument("--eos", default="<|endoftext|>", help="its eos token (default: %(default)s)")
    parser.add_argument("--corpus", type=Path, help="folder of JSONL (.gz, .zst) and Parquet files")
    parser.add_argument("--megabytes", type=float, default=64)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        put_tokenizer(folder, arguments.tokenizer)
        tokenizer = {"path": str(folder / "tokenizer.json"), "eos": arguments.eos}
        (folder / "tokenizer-options.json").write_text(json.dumps(tokenizer))
        texts = documents(arguments.corpus, arguments.megabytes)
        size = write(folder / "data", texts)
        write(folder / "warm", texts[:200])
        found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        run("loader", folder)  # makes the index that is kept
        for number in range(arguments.runs):
            for side in in_turns(list(SIDES), number):
                found[side].append(run(side, folder))
        is_equal = equal_rows(folder, tokenizer)
    rows = []
    for side, answers in found.items():
        first, again = (statistics.median(one[key] for one in answers) for key in ("first_s", "again_s"))
        rates = {"MB_s": size / 1e6 / first, "Mtokens_s": answers[0]["tokens"] / 1e6 / first}
        rates["again"] = answers[0]["tokens"] / 1e6 / again
        rows.append({"side": side, "runs": answers, "cpu_s": first, **rates})
    for row in rows:
        row["ratio"] = row["MB_s"] / rows[-1]["MB_s"]
    title = f"{size / 1e6:.0f} MB of text; rows equal to those of a build: {is_equal}"
    give(arguments, rows, HEADS, title=title)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        answer(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
