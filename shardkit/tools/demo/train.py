"""Runs the demo's training: a tiny model, checkpoints with the loader's state, one log line per step.

Run as `python -m shardkit.tools.demo.train`, so that it can be killed like any training job. The model
predicts the next token from the last token and the mean of all tokens so far: enough for a falling loss.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardkit.loaders import StreamingLoader

SEED = 17

TRAINED_TOKENS = 128  # number of tokens trained on per row, enough to show that the loss falls


class TinyModel(nn.Module):
    """A language model that maps tokens [B, L] to logits [B, L, vocabulary]."""

    def __init__(self, vocabulary: int, width: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.mix = nn.Linear(2 * width, width)
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        last = self.embedding(tokens)
        mean = last.cumsum(dim=1) / torch.arange(1, tokens.shape[1] + 1)[:, None]
        return F.linear(F.gelu(self.mix(torch.cat((last, mean), dim=-1))), self.embedding.weight)


def train(data: str, *, vocabulary: int, steps: int, every: int, folder: Path) -> None:
    """Train up to step `steps`, from `folder`/checkpoint.pt if it exists; log steps to `folder`/log.jsonl."""
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # sums are then always added in the same order, so losses are equal bit by bit
    torch.use_deterministic_algorithms(True)
    loader = StreamingLoader(data, batch_size=4, seed=SEED, endless=True, return_ids=True)
    model = TinyModel(vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    checkpoint, trained = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        trained = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
    with (folder / "log.jsonl").open("a", buffering=1) as log:
        for step, batch in zip(range(trained + 1, steps + 1), loader, strict=False):
            tokens = batch["tokens"][:, :TRAINED_TOKENS]
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            record = {"step": step, "loss": loss.item(), "sample_ids": batch["sample_id"].tolist()}
            log.write(json.dumps(record) + "\n")
            if step % every == 0:
                state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                temporary = checkpoint.with_suffix(".tmp")
                torch.save(state | {"loader": loader.state_dict()}, temporary)
                os.replace(temporary, checkpoint)  # noqa: PTH105


def main() -> None:
    """Parse the command line of the subprocess and train."""
    parser = argparse.ArgumentParser(description="The demo's training run.")
    parser.add_argument("data")
    parser.add_argument("--folder", type=Path, required=True)
    for option in ("--vocabulary", "--steps", "--every"):
        parser.add_argument(option, type=int, required=True)
    train(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
