"""Train a small GPT on one device with a plain PyTorch loop, and survive any interruption.

    python examples/train_plain.py --data shardkit-demo/mds --steps 200

Kill it at any moment and run the same command again: it continues after the last checkpoint with the next
sample it has not trained on, and every later loss is what it would have been.
"""

import argparse
import json
import os
from pathlib import Path

import torch
from gpt import GPT, GPTConfig, next_token_loss

from shardkit.loaders import Layout, StreamingLoader

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
option = parser.add_argument
option("--data", required=True, help="dataset made by `shardkit build`")
option("--steps", type=int, default=200, help="train until this step")
option("--checkpoint", type=Path, default="checkpoint.pt", help="file to write and to resume from")
option("--checkpoint-every", type=int, default=50, help="steps between checkpoints")
option("--log-file", type=Path, default="log.jsonl", help="JSON lines: step, loss, sample ids")
option("--batch-size", type=int, default=8, help="sequences per step")
option("--learning-rate", type=float, default=1e-3, help="AdamW's, constant")
option("--seed", type=int, default=17, help="of the data's order and the model's weights")
option("--vocabulary", type=int, default=65_536, help="number of token ids")
option("--layers", type=int, default=4, help="number of transformer layers")
option("--heads", type=int, default=4)
option("--width", type=int, default=256)
option("--inside-documents", action="store_true", help="keep attention inside documents")
option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
args = parser.parse_args()

torch.manual_seed(args.seed)
torch.use_deterministic_algorithms(args.device == "cpu")
loader = StreamingLoader(
    args.data,
    batch_size=args.batch_size,
    seed=args.seed,
    endless=True,
    return_ids=True,
    labels=args.inside_documents,
    layout=Layout(position_ids=args.inside_documents, document_ids=args.inside_documents),
)
model = GPT(GPTConfig(args.vocabulary, args.layers, args.heads, args.width)).to(args.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)

trained = 0
if args.checkpoint.exists():
    state = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
    trained = state["step"]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    loader.load_state_dict(state["loader"])
    torch.set_rng_state(state["rng"])  # matters once the model has dropout
    print(f"resumed after step {trained}")

with args.log_file.open("a", buffering=1) as log:
    # The range comes first: `zip` must not take a batch that no step will train on.
    for step, batch in zip(range(trained + 1, args.steps + 1), loader, strict=False):
        loss = next_token_loss(model, {name: value.to(args.device) for name, value in batch.items()})
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        record = {"step": step, "loss": loss.item(), "sample_ids": batch["sample_id"].tolist()}
        log.write(json.dumps(record) + "\n")
        saves = step % args.checkpoint_every == 0 or step == args.steps
        if saves or step <= trained + 20:  # each step, while they are few
            print(f"step {step}: loss {record['loss']:.4f}", flush=True)

        if saves:
            state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"loader": loader.state_dict(), "rng": torch.get_rng_state()}
            temporary = args.checkpoint.with_name(args.checkpoint.name + ".tmp")
            with temporary.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(args.checkpoint)  # a crash leaves the old one or the new one, never half of one
