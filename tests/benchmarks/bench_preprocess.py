"""JSON lines to tokens, whole commands: `shardkit build` beside Megatron-LM's `preprocess_data_fast.py`.

    python tests/benchmarks/bench_preprocess.py --tokenizer FOLDER --megatron CHECKOUT
                                                --megatron-python PYTHON [--eos TOKEN] [--corpus FOLDER]
                                                [--documents N] [--runs 5] [--json] [--save PREFIX]

FOLDER has a tokenizer.json and its configuration, as Hugging Face writes them. Megatron-LM is a checkout of
its repository, and PYTHON one that runs it (torch, triton, transformers, gigatoken). Both sides encode with
gigatoken, and end each document in eos. Megatron writes token ids in the order of the file; `store` is our
nearest product, `rows` are documents in random order, packed into rows of 2,048 by best fit. Ours also check
gigatoken against `tokenizers`, write checksums, provenance, card and report, and survive kills. No side
removes duplicates, except `rows, exact`. The sides must agree on the number of tokens.

CPU is of all processes of a command. Sides take turns after a run that is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from figures import Heads, benchmark_parser, give, in_turns
from peer_processes import median_ratio
from texts import read_sources

HEADS: Heads = {
    "side": ("side", ""),
    "MB": ("MB", ",.0f"),
    "cpu_s": ("CPU s", ".1f"),
    "wall_s": ("wall s", ".1f"),
    "x": ("x Megatron's CPU", ".2f"),
    "x_wall": ("x Megatron's time", ".2f"),
    "tokens": ("tokens", ",d"),
}
MEGATRON = "Megatron preprocess_data_fast"
OURS: dict[str, dict[str, Any]] = {
    "shardkit, store": {"dedup": None, "output": {"format": "tokens"}},
    "shardkit, rows": {"dedup": None, "output": {"format": "mds"}},
    "shardkit, rows, exact": {"dedup": {"exact": True, "near": None}, "output": {"format": "mds"}},
}
DOCUMENT_COUNT = np.dtype("<u8"), 18  # of an .idx: behind magic, version and type of tokens


def run(command: list[str]) -> tuple[float, float]:
    """(CPU, wall) seconds of a command with all processes that it waited for; exits if it fails."""
    start = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            sys.exit(f"{' '.join(command)}\n{output.read().decode(errors='replace')[-2000:]}")
    return usage.ru_utime + usage.ru_stime, seconds


def write_input(file: Path, corpus: Path | None, documents: int | None, eos: str) -> int:
    """Bytes of the texts of a corpus, written as JSON lines.

    Texts that spell the eos are left out: Megatron encodes them as the token, and the counts would differ.
    """
    texts = [text for text in read_sources(corpus) if text.strip() and eos not in text][:documents]
    file.write_bytes(b"".join(orjson.dumps({"text": text}) + b"\n" for text in texts))
    return sum(len(text.encode()) for text in texts)


def commands(arguments: argparse.Namespace, file: Path, folder: Path) -> dict[str, list[str]]:
    """The command of each side, which writes to a folder of the side's own."""
    found = {}
    if arguments.megatron is not None:
        script = arguments.megatron / "tools" / "preprocess_data_fast.py"
        options = ["--tokenizer-type", "HuggingFaceTokenizer", "--use-gigatoken", "--append-eod"]
        options += ["--tokenizer-model", str(arguments.tokenizer.absolute()), "--input", str(file)]
        options += ["--output-prefix", str(folder / MEGATRON / "out")]
        found[MEGATRON] = [str(arguments.megatron_python), str(script), *options]
    tokenizer = {"path": str(arguments.tokenizer.absolute() / "tokenizer.json"), "eos": arguments.eos}
    for name, settings in OURS.items():
        output = settings["output"] | {"path": str(folder / name / "out")}
        recipe = {"inputs": [{"path": str(file)}], "tokenizer": tokenizer, **settings, "output": output}
        recipe["pack"] = {"sequence_length": 2048}
        path = folder / f"{name}.json"
        path.write_text(json.dumps(recipe))
        found[name] = [sys.executable, "-m", "shardkit", "build", str(path), "--workers", "2", "--quiet"]
    return found


def count_tokens(name: str, folder: Path) -> int:
    """Tokens that a side wrote, eos included, padding not."""
    if name != MEGATRON:
        card: dict[str, Any] = json.loads((folder / "out" / "dataset.json").read_text())
        return int(card["tokens"])
    [index] = folder.glob("*.idx")
    content = index.read_bytes()
    dtype, at = DOCUMENT_COUNT
    [sequences] = np.frombuffer(content, dtype, 1, at)
    return int(np.frombuffer(content, "<i4", int(sequences), at + 16).sum())


def main() -> None:
    parser = benchmark_parser(__doc__, runs=5)
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="FOLDER", help="of a tokenizer.json")
    parser.add_argument("--eos", default="<|endoftext|>", help="its eos token (default: %(default)s)")
    parser.add_argument("--megatron", type=Path, help="checkout of Megatron-LM; without it, ours alone")
    parser.add_argument("--megatron-python", type=Path, default=sys.executable, help="default: this one")
    parser.add_argument("--corpus", type=Path, help="folder of JSONL (.gz, .zst) and Parquet files")
    parser.add_argument("--documents", type=int, help="default: all")
    arguments = parser.parse_args()
    used: dict[str, list[tuple[float, float]]] = {}
    tokens = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        size = write_input(folder / "input.jsonl", arguments.corpus, arguments.documents, arguments.eos)
        sides = commands(arguments, folder / "input.jsonl", folder)
        for number in range(-1, arguments.runs):
            for name in in_turns(list(sides), number):
                shutil.rmtree(folder / name, ignore_errors=True)
                (folder / name).mkdir()
                seconds = run(sides[name])
                if number >= 0:
                    used.setdefault(name, []).append(seconds)
                tokens[name] = count_tokens(name, folder / name)
    counts = {count for name, count in tokens.items() if "exact" not in name}
    if len(counts) > 1:
        sys.exit(f"the sides disagree on tokens: {tokens}")
    base = used.get(MEGATRON, used["shardkit, store"])
    rows = [
        {
            "side": name,
            "MB": size / 1e6,
            "cpu_s": statistics.median(cpu for cpu, _ in runs),
            "cpu_runs": [round(cpu, 2) for cpu, _ in runs],
            "wall_s": statistics.median(wall for _, wall in runs),
            "wall_runs": [round(wall, 2) for _, wall in runs],
            "x": median_ratio([cpu for cpu, _ in runs], [cpu for cpu, _ in base]),
            "x_wall": median_ratio([wall for _, wall in runs], [wall for _, wall in base]),
            "tokens": tokens[name],
        }
        for name, runs in used.items()
    ]
    give(arguments, rows, HEADS, title="JSON lines to tokens", unit="CPU seconds", runs="cpu_runs")


if __name__ == "__main__":
    main()
