"""Whether spikes of the loss lead to planted documents: trainings on data with 20 pieces of garbage.

    python tests/benchmarks/bench_rewind.py [--planted 20] [--documents 10000] [--runs 3]

Each run is another corpus and another order. A model is trained for an epoch of some 1,000 steps on small
documents, of which 20 are random bytes, another script, or a letter again and again; on the same corpus
without these; with the mask that `shardkit trace --losses` wrote; and without the rows that it listed. A mask
leaves garbage in front of the documents that follow it in a row, which a GPT reads. The models are a bigram
table and a GPT of one layer. `rank` is the worst place of a planted document in the list; `unplanted` counts
spikes at whose steps nothing was planted, and other documents that stand out.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from gpt import GPT, GPTConfig

from figures import Heads, benchmark_parser, give
from shardkit.cli.main import main as shardkit
from support.planted_spikes import BATCH, VOCABULARY, Planted, Table, make_planted, train

FIRST_SEED = 20  # the defaults were chosen on corpora of smaller ones
HEADS: Heads = {
    "model": ("model", ""),
    "seed": ("corpus", ""),
    "steps": ("steps", ",.0f"),
    "planted": ("planted", ".0f"),
    "found": ("found", ".0f"),
    "rank": ("worst rank", ".0f"),
    "candidates": ("of candidates", ",.0f"),
    "unplanted_spikes": ("unplanted spikes", ".0f"),
    "unplanted_documents": ("unplanted documents", ".0f"),
    "clean": ("spikes without garbage", ".0f"),
    "clean_steps": ("in steps", ",.0f"),
    "masked": ("spikes with the mask", ".0f"),
    "excluded": ("spikes without the rows", ".0f"),
}


def asked(planted: Planted, folder: Path, *words: str) -> dict[str, Any]:
    """The answer of `shardkit trace --losses` to the log in a folder."""
    command = ["trace", str(planted.out), "--losses", str(folder / "losses.jsonl"), "--limit", "0", "--json"]
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert shardkit([*command, "--batch-size", str(BATCH), "--seed", str(planted.seed), *words]) == 0
    answer: dict[str, Any] = json.loads(printed.getvalue())
    return answer


def model_of(name: str) -> tuple[nn.Module, float]:
    """A model, and its learning rate."""
    if name == "bigram":
        return Table(), 0.05
    torch.manual_seed(17)
    return GPT(GPTConfig(VOCABULARY, layers=1, heads=2, width=32)), 3e-3


def measured(name: str, seed: int, place: Path, planted: Planted, clean: Planted) -> dict[str, Any]:
    """Train three times, and compare the answers with what was planted."""

    def trained(folder: str, data: Planted, **options: Any) -> tuple[Path, int]:
        model, rate = model_of(name)
        (place / folder).mkdir()
        return place / folder, len(train(data, place / folder, model, learning_rate=rate, **options))

    mask, exclude = place / f"{name}-mask.txt", place / f"{name}-rows.txt"
    folder, steps = trained(f"{name}-planted", planted)
    answer = asked(planted, folder, "--mask", str(mask))
    ranks = {one["record"]: place for place, one in reversed([*enumerate(answer["documents"], 1)])}
    high = {step for spike in answer["spikes"] for step in spike["steps"]}
    chosen = {one["record"] for one in answer["documents"] if one["chosen"]}
    found = {record for record, step in planted.steps.items() if step in high and record in chosen}
    calm, calm_steps = trained(f"{name}-clean", clean)
    masked, _ = trained(f"{name}-masked", planted, mask=mask)
    asked(planted, folder, "--exclude", str(exclude))
    excluded, _ = trained(f"{name}-excluded", planted, exclude=exclude)
    return {
        "model": name,
        "seed": seed,
        "steps": steps,
        "planted": len(planted.steps),
        "found": len(found),
        "rank": max(ranks.get(record, answer["document_count"]) for record in planted.steps),
        "candidates": answer["document_count"],
        "unplanted_spikes": sum(
            not {*spike["steps"]} & {*planted.steps.values()} for spike in answer["spikes"]
        ),
        "unplanted_documents": len(chosen - {*planted.steps}),
        "clean": asked(clean, calm)["spike_count"],
        "clean_steps": calm_steps,
        "masked": asked(planted, masked)["spike_count"],
        "excluded": asked(planted, excluded, "--without", str(exclude))["spike_count"],
    }


def main() -> None:
    """Build, train, ask, print."""
    parser = benchmark_parser(__doc__, runs=3)
    parser.add_argument("--planted", type=int, default=20)
    parser.add_argument("--documents", type=int, default=10_000)
    arguments = parser.parse_args()
    rows = []
    for seed in range(FIRST_SEED, FIRST_SEED + arguments.runs):
        with tempfile.TemporaryDirectory() as name:
            place = Path(name)
            planted = make_planted(place / "planted", arguments.documents, arguments.planted, salt=seed)
            clean = make_planted(place / "clean", arguments.documents, 0, salt=seed)
            rows += [measured(model, seed, place, planted, clean) for model in ("bigram", "gpt")]
    give(arguments, rows, HEADS)


if __name__ == "__main__":
    main()
