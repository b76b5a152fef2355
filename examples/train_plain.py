"""Train a small GPT on one device with a plain PyTorch loop, and survive any interruption.

    python examples/train_plain.py --data shardkit-demo/mds --steps 200

Kill it at any moment and run the same command again: it continues after the last checkpoint with the next
sample it has not trained on, and every later loss is what it would have been.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, GPTConfig, next_token_loss

from shardkit.loaders import StreamingLoader


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on one device.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--data", required=True, help="dataset folder made by `shardkit build`")
    parser.add_argument("--steps", type=int, default=200, help="train until this step")
    parser.add_argument("--checkpoint", default="checkpoint.pt", help="file to write and to resume from")
    parser.add_argument("--checkpoint-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--log-file", default="log.jsonl", help="JSON lines: step, loss, sample ids")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per step")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="AdamW's, constant")
    parser.add_argument("--seed", type=int, default=17, help="of the data's order and the model's weights")
    parser.add_argument("--vocabulary", type=int, default=65_536, help="number of token ids")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--inside-documents", action="store_true", help="keep attention inside documents")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def save_atomically(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint so that a crash leaves the old one or the new one, never half of one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(args.device == "cpu")
    loader = StreamingLoader(
        args.data,
        batch_size=args.batch_size,
        seed=args.seed,
        endless=True,
        return_ids=True,
        labels=args.inside_documents,
        position_ids=args.inside_documents,
        document_ids=args.inside_documents,
    )
    config = GPTConfig(args.vocabulary, args.layers, args.heads, args.width)
    model = GPT(config).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)

    checkpoint, trained = Path(args.checkpoint), 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        trained = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
        torch.set_rng_state(state["rng"])  # matters once the model has dropout
        print(f"resumed after step {trained}")

    with Path(args.log_file).open("a", buffering=1) as log:
        # The range comes first: `zip` must not take a batch that no step will train on.
        for step, batch in zip(range(trained + 1, args.steps + 1), loader, strict=False):
            batch = {name: value.to(args.device) for name, value in batch.items()}
            loss = next_token_loss(model, batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            record = {"step": step, "loss": loss.item(), "sample_ids": batch["sample_id"].tolist()}
            log.write(json.dumps(record) + "\n")

            if step % args.checkpoint_every == 0 or step == args.steps:
                state = {
                    "step": step,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "loader": loader.state_dict(),
                    "rng": torch.get_rng_state(),
                }
                save_atomically(state, checkpoint)
                print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
