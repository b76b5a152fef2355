"""A small training whose data have documents of garbage at known places, and the log of its losses."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardkit as sk
from shardkit.datasets.provenance.run import Run
from shardkit.loaders import Stream, StreamingLoader
from shardkit.writers import build
from support.small_build import train_bpe

__all__ = ["BATCH", "FIRST_STEP", "VOCABULARY", "Planted", "Table", "make_planted", "train"]

RECIPE = """\
inputs: [{path: crawl.jsonl, source: crawl}]
tokenizer: {path: tokenizer.json, eos: "<|endoftext|>"}
pack: {sequence_length: 128}
output: {path: out}
"""
BATCH = 2
FIRST_STEP = 150  # no document is planted before: the loss falls too steeply there
VOCABULARY = 320


@dataclass(frozen=True)
class Planted:
    """A dataset, the seed of its order, and the step (from 1) of each planted record."""

    out: Path
    seed: int
    steps: dict[int, int]
    """{record: step}"""


class Table(nn.Module):
    """A bigram model: the logits of the next token are a row of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Embedding(VOCABULARY, VOCABULARY)
        nn.init.zeros_(self.logits.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.logits(tokens)
        return logits


def garbage(place: int, chance: random.Random) -> str:
    """Random bytes as text, another script, or a letter again and again; each of a script of its own."""
    if place % 3 == 0:
        printable = [chr(code) for code in range(33, 256) if chr(code).isprintable()]
        return "".join(chance.choices(printable, k=60))
    letters = [chr(0x0400 + 0x0140 * place + chance.randrange(60)) for _ in range(40)]
    return "".join(letters if place % 3 == 1 else letters[:1] * 40)


def make_planted(folder: Path, documents: int, planted: int, *, salt: int = 0) -> Planted:
    """Build a dataset of small documents, `planted` of which are garbage, each in one row.

    The seed of the order is the first one with which no garbage comes before FIRST_STEP.
    """
    folder.mkdir(parents=True)
    chance = random.Random(salt)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(2, 7))) for _ in range(40)]
    weights = [1 / rank for rank in range(1, 41)]
    texts = [" ".join(chance.choices(words, weights, k=chance.randint(5, 20))) for _ in range(documents)]
    train_bpe(texts[:500], vocabulary=VOCABULARY).save(str(folder / "tokenizer.json"))
    urls = [f"https://host{n % 40}.org/{n}" for n in range(documents)]
    for place, record in enumerate(chance.sample(range(documents), planted)):
        texts[record], urls[record] = garbage(place, chance), f"https://planted.org/{record}"
    records = ({"text": text, "url": url} for text, url in zip(texts, urls, strict=True))
    (folder / "crawl.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "recipe.yaml").write_text(RECIPE)
    out = Path(build(folder / "recipe.yaml", workers=1, progress=False).location)
    with sk.open(out) as dataset:
        if not planted:
            return Planted(out, 0, {})
        found = dataset.trace(url="planted.org/*", limit=0).facts["shown"]
        rows = {piece["record"]: piece["row"] for piece in found}
        assert len(rows) == len(found) == planted, "each document is in one row"
        for seed in range(1000):
            run = Run.from_options(dataset, batch_size=BATCH, seed=seed)
            steps = {record: run.sightings(row, epochs=1)[0].step or 0 for record, row in rows.items()}
            if min(steps.values()) > FIRST_STEP:
                return Planted(out, seed, steps)
    raise AssertionError("no seed puts all documents behind the first steps")


def train(
    planted: Planted,
    folder: Path,
    model: nn.Module | None = None,
    *,
    mask: Path | None = None,
    exclude: Path | None = None,
    learning_rate: float = 0.05,
) -> list[float]:
    """Train a `Table`, or `model`, for an epoch, with the stream's `mask` or `exclude`; return the losses.

    Writes losses.jsonl, the usage log in usage/, and the loader's state every 50 steps in states/.
    """
    torch.manual_seed(17)
    torch.set_num_threads(1)  # more only slow down a model this small
    model = Table() if model is None else model
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    losses = []
    (folder / "states").mkdir()
    stream = Stream(planted.out, mask=mask, exclude=exclude)
    loader = StreamingLoader(
        [stream], batch_size=BATCH, seed=planted.seed, labels="shifted", usage_log=folder / "usage"
    )
    with (folder / "losses.jsonl").open("w") as file, loader:
        for step, batch in enumerate(loader, 1):
            logits, labels = model(batch["tokens"].long()), batch["labels"].long()
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
            file.write(json.dumps({"step": step, "loss": losses[-1]}) + "\n")
            if step % 50 == 0:
                state = {"step": step, "loader": loader.state_dict()}
                (folder / "states" / f"step-{step:05d}.json").write_text(json.dumps(state))
    return losses
