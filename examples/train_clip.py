"""Train image and text encoders on pairs, as CLIP does: crops and captions resume exactly.

    python examples/train_clip.py --data pictures --steps 100

`--data` holds tars of `000017.jpg` and `000017.txt`; a folder that does not exist is filled with drawn
pictures. Kill it at any moment and run the same command again. Images are decoded and cropped, and captions
worded and tokenized, in threads, by one function that draws from the generator of the sample's position.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pictures import draw_pictures
from PIL import Image
from torch import Tensor, nn
from train_ddp import save_atomically

from shardkit.loaders import Run, StreamingLoader

TEMPLATES = ("{}", "a photo of {}", "{}, drawn by a computer")
LENGTH = 48  # of captions, in bytes
CROP = 48  # of images, in pixels


def prepare(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """{"jpg": uint8[height, width, 3], "txt": str} -> a random crop, and a random wording as bytes."""
    image = Image.fromarray(sample["jpg"])
    side = int(rng.integers(min(image.size) // 2, min(image.size) + 1))
    left, top = (int(rng.integers(0, most - side + 1)) for most in image.size)
    crop = image.resize((CROP, CROP), Image.Resampling.BILINEAR, (left, top, left + side, top + side))
    caption = TEMPLATES[rng.integers(len(TEMPLATES))].format(sample["txt"]).encode()[:LENGTH]
    tokens = np.zeros(LENGTH, np.int64)
    tokens[: len(caption)] = np.frombuffer(caption, np.uint8)
    return {"image": np.asarray(crop).transpose(2, 0, 1), "tokens": tokens}


class Clip(nn.Module):
    """Two small encoders whose outputs are compared by their angle."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(3, 32, 4, stride=4), nn.ReLU(), nn.Conv2d(32, width, 4, stride=4), nn.Flatten()
        )
        self.image_head = nn.LazyLinear(width)
        self.text = nn.EmbeddingBag(256, width, padding_idx=0)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: Tensor, tokens: Tensor) -> Tensor:
        """Return the contrastive loss of a batch: image i belongs to caption i."""
        seen = nn.functional.normalize(self.image_head(self.image(images)), dim=1)
        said = nn.functional.normalize(self.text(tokens), dim=1)
        scores, own = self.scale.exp() * seen @ said.T, torch.arange(len(images), device=images.device)
        return (nn.functional.cross_entropy(scores, own) + nn.functional.cross_entropy(scores.T, own)) / 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train image and text encoders on pairs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--data", default="pictures", help="folder or URL of tars; made if it is a folder that does not exist"
    )
    add("--steps", type=int, default=100, help="train until this step")
    add("--checkpoint", default="checkpoint.pt", help="where to write and to resume from")
    add("--checkpoint-every", type=int, default=20, help="steps between checkpoints")
    add(
        "--log-file",
        default="log.jsonl",
        help="JSON lines: step, loss, sample ids, sums of pixels and tokens",
    )
    add("--batch-size", type=int, default=16, help="pairs per step")
    add("--seed", type=int, default=17, help="of order, crops, captions and weights")
    args = parser.parse_args()
    if "://" not in args.data and not Path(args.data).exists():
        draw_pictures(Path(args.data))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = StreamingLoader(
        args.data,
        batch_size=args.batch_size,
        columns=["jpg", "txt"],
        decode="rgb8",
        transform=prepare,
        seed=args.seed,
        endless=True,
        return_ids=True,
        run=Run(threads=2),
    )
    torch.manual_seed(args.seed)
    model = Clip().to(device)
    model(
        torch.zeros(1, 3, CROP, CROP, device=device), torch.ones(1, LENGTH, dtype=torch.long, device=device)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoint, trained = Path(args.checkpoint), 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        trained = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
    with Path(args.log_file).open("a", buffering=1) as log, loader:
        for step, batch in zip(range(trained + 1, args.steps + 1), loader, strict=False):
            loss = model(batch["image"].to(device).float() / 255, batch["tokens"].to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums = [batch[name].flatten(1).sum(1).tolist() for name in ("image", "tokens")]
            record = {
                "step": step,
                "loss": loss.item(),
                "sample_ids": batch["sample_id"].tolist(),
                "sums": sums,
            }
            log.write(json.dumps(record) + "\n")
            saves = step % args.checkpoint_every == 0 or step == args.steps
            if saves or step <= trained + 20:  # each step, while they are few
                print(f"step {step}: loss {loss.item():.4f}", flush=True)
            if saves:
                state = {
                    "step": step,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "loader": loader.state_dict(),
                }
                save_atomically(state, checkpoint)


if __name__ == "__main__":
    main()
