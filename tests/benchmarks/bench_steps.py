"""What the order of steps costs: an expensive filter in front of duplicate removal, and behind it.

    python tests/benchmarks/bench_steps.py [--documents 100000] [--cpu-ms 1.0] [--runs 5] [--json]

Documents are made up. Half of them are exact copies, and half of the rest are near copies of others (3 of 200
words replaced). The filter is a `python` function that computes for --cpu-ms per document, as a classifier
does, and judges a text by its first word, so that copies are judged alike. `first` has it in `filters`,
`behind` lists it last in `steps`; each build is a process of its own. Sides take turns; figures are medians.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import yaml

from figures import Heads, benchmark_parser, give, in_turns
from shardkit.writers import build
from support.small_build import EOS, train_bpe

FILTER = """
import time, zlib
def keep(batch, seconds):
    kept = []
    for text in batch.column("text").to_pylist():
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass
        kept.append(zlib.crc32(text.split(None, 1)[0].encode()) % 10 > 2)
    return kept
"""
SIDES = ("first", "behind")
HEADS: Heads = {
    "side": ("the filter", ""),
    "judged": ("documents judged", ","),
    "kept": ("documents kept", ","),
    "cpu_s": ("CPU s", ".1f"),
    "x": ("x", ".2f"),
}


def write_corpus(folder: Path, documents: int) -> None:
    rng = random.Random(7)
    words = [f"word{number}" for number in range(5000)]
    base = [" ".join(rng.choices(words, k=200)) for _ in range(documents // 4)]
    near = []
    for text in base:
        changed = text.split(" ")
        for place in rng.sample(range(1, 200), 3):
            changed[place] = rng.choice(words)
        near.append(" ".join(changed))
    texts = [*base, *near]
    texts += rng.choices(texts, k=documents - len(texts))
    rng.shuffle(texts)
    for part in range(4):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[part::4]]
        (folder / f"part-{part}.jsonl").write_text("".join(lines))
    (folder / "filters.py").write_text(FILTER)
    train_bpe(base[:50]).save(str(folder / "tokenizer.json"))


def write_recipe(folder: Path, side: str, seconds: float) -> Path:
    filter_ = {"python": {"file": "filters.py", "function": "keep", "parameters": {"seconds": seconds}}}
    steps: dict[str, Any] = {"steps": ["exact", "near", filter_]}
    if side == "first":
        steps = {"filters": [filter_], "dedup": {"exact": True, "near": True}}
    recipe = {
        "inputs": "part-*.jsonl",
        **steps,
        "tokenizer": {"path": "tokenizer.json", "eos": EOS},
        "output": f"out-{side}",
    }
    path = folder / f"{side}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def run(recipe: Path) -> dict[str, Any]:
    """Build in a process of its own."""
    command = [sys.executable, __file__, "--one", str(recipe)]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def build_one(recipe: Path) -> None:
    result = build(recipe, progress=False, replace=True)
    removed = sum(
        count.documents for reason, count in result.funnel.dropped.items() if not reason.startswith("python")
    )
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    judged = result.funnel.read.documents - (removed if recipe.stem == "behind" else 0)
    cpu = sum(use.ru_utime + use.ru_stime for use in uses)
    print(json.dumps({"cpu_s": cpu, "judged": judged, "kept": result.funnel.kept.documents}))


def main() -> None:
    parser = benchmark_parser(__doc__, runs=5)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--cpu-ms", type=float, default=1.0, help="of the filter, a document")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        build_one(arguments.one)
        return
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_corpus(folder, arguments.documents)
        recipes = {side: write_recipe(folder, side, arguments.cpu_ms / 1000) for side in SIDES}
        run(write_recipe(folder, "behind", 0.0))  # compiles the kernels
        recipes["behind"] = write_recipe(folder, "behind", arguments.cpu_ms / 1000)
        for number in range(arguments.runs):
            for side in in_turns(SIDES, number):
                found[side].append(run(recipes[side]))
    first = statistics.median(one["cpu_s"] for one in found["first"])
    rows = []
    for side, runs in found.items():
        cpu = [one["cpu_s"] for one in runs]
        median = statistics.median(cpu)
        rows.append(
            {
                "side": side,
                "judged": runs[0]["judged"],
                "kept": runs[0]["kept"],
                "cpu_s": median,
                "x": median / first,
                "runs": [round(one, 2) for one in cpu],
            }
        )
    give(arguments, rows, HEADS, title="An expensive filter before and behind duplicates", unit="CPU s")


if __name__ == "__main__":
    main()
