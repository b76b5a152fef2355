"""Train a small image classifier on tars of JPEG files, with random augmentation that resumes exactly.

    torchrun --nproc-per-node 2 examples/train_images.py --data pictures --steps 200

`--data` holds tars as webdataset writes them, `000017.jpg` beside `000017.cls`; a folder that does not exist
is filled with drawn pictures. Worker processes decode, crop and flip. Kill any rank and run the same command
again, or another `--nproc-per-node`: every later step trains on the same crops of the same images. Needs
torchvision.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from common import end_distributed, gathered, start_distributed
from pictures import SHAPES, draw_pictures
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.transforms import v2
from train_ddp import save_atomically

from shardkit.loaders import Layout
from shardkit.loaders.pytorch import StreamingDataLoader, StreamingDataset


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small image classifier with DistributedDataParallel (torchrun).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--data", default="pictures", help="folder or URL of tars; made if it is a folder that does not exist"
    )
    add("--steps", type=int, default=200, help="train until this step")
    add("--checkpoint", default="checkpoint.pt", help="where to write and to resume from")
    add("--checkpoint-every", type=int, default=50, help="steps between checkpoints")
    add("--log-file", default="log.jsonl", help="JSON lines: step, loss, sample ids, sums of pixels")
    add("--global-batch-size", type=int, default=16, help="images per step on all ranks")
    add("--crop", type=int, default=64, help="width and height of the crops that are trained on")
    add("--workers", type=int, default=2, help="processes of a rank that decode, crop and flip")
    add("--seed", type=int, default=17, help="of order, augmentation and weights")
    return parser.parse_args()


def open_loader(args: argparse.Namespace) -> StreamingDataLoader:
    """Batches of {"image": uint8[batch, 3, crop, crop], "label", "sample_id"}."""
    augment = v2.Compose([v2.RandomResizedCrop(args.crop, antialias=True), v2.RandomHorizontalFlip()])
    dataset = StreamingDataset(
        args.data,
        batch_size=args.global_batch_size // dist.get_world_size(),
        columns=["jpg", "cls"],
        decode="torchrgb8",
        transform=augment,  # takes the sample as it is: {"jpg": uint8[3, height, width], "cls": int}
        layout=Layout(rename={"jpg": "image", "cls": "label"}),
        seed=args.seed,
        endless=True,
        return_ids=True,
    )
    return StreamingDataLoader(dataset, num_workers=args.workers)


def classifier() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(2), Mean(), nn.Linear(64, len(SHAPES)))


class Mean(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values.mean(-1)


def main() -> None:
    args = parse_arguments()
    device = start_distributed()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0 and "://" not in args.data and not Path(args.data).exists():
        draw_pictures(Path(args.data))
    dist.barrier()
    loader = open_loader(args)
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(classifier().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    checkpoint, trained = Path(args.checkpoint), 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        trained = state["step"]
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])  # the same on every rank, for any number of ranks and workers
    log = Path(args.log_file).open("a", buffering=1) if rank == 0 else None  # noqa: SIM115

    for step, batch in zip(range(trained + 1, args.steps + 1), loader, strict=False):
        images = batch["image"].to(device).float() / 255  # here, because uint8 is a quarter to send
        loss = nn.functional.cross_entropy(model(images), batch["label"].to(device))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

        losses, sample_ids = gathered(loss.detach()[None]), gathered(batch["sample_id"])
        pixels = gathered(batch["image"].sum(dim=(1, 2, 3)))  # another crop would have another sum
        if log is None:
            continue
        record = {"step": step, "loss": sum(losses) / world_size, "sample_ids": sample_ids, "pixels": pixels}
        log.write(json.dumps(record) + "\n")
        saves = step % args.checkpoint_every == 0 or step == args.steps
        if saves or step <= trained + 20:  # each step, while they are few
            print(f"step {step}: loss {record['loss']:.4f}", flush=True)
        if saves:
            state = {
                "step": step,
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "loader": loader.state_dict(),
            }
            save_atomically(state, checkpoint)
    loader.close()
    end_distributed()


if __name__ == "__main__":
    main()
