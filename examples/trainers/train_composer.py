"""Train a tiny GPT with Composer's Trainer, and survive any interruption.

    torchrun --nproc-per-node 2 examples/trainers/train_composer.py --data DATASET --folder run --steps 40

Kill it at any moment and run it again, on another number of ranks if you like: it continues after its last
checkpoint with the next sample.
"""

import argparse
import json
import os
from pathlib import Path

import torch
from composer import Callback, ComposerModel, Logger, State, Trainer
from composer.utils import dist
from torch import Tensor, nn

from shardkit.loaders.integrations.composer_dataset import build_data_spec

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
option = parser.add_argument
option("--data", required=True, help="dataset made by `shardkit build`")
option("--folder", type=Path, default="composer-run", help="for checkpoints and logs")
option("--steps", type=int, default=40, help="train until this step")
option("--global-batch", type=int, default=12, help="sequences a step, over all ranks")
option("--checkpoint-every", type=int, default=5, help="steps between checkpoints")
args = parser.parse_args()


class TinyModel(ComposerModel):
    """An embedding and a projection: the labels are the tokens, and the model shifts them."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 256))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        logits: Tensor = self.network(batch["input_ids"])
        return logits

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(outputs[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


class LossLog(Callback):
    def batch_end(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == 0:
            record = {"step": int(state.timestamp.batch), "loss": state.total_loss_dict["loss/train/total"]}
            with (args.folder / "losses.jsonl").open("a") as log:
                log.write(json.dumps(record) + "\n")


os.environ.setdefault("NODE_RANK", os.environ.get("GROUP_RANK", "0"))  # torchrun's name for it
dist.initialize_dist("cpu")
torch.manual_seed(17)
train = build_data_spec(
    args.data,
    batch_size=args.global_batch // dist.get_world_size(),
    usage_log=args.folder / "usage",
)
model = TinyModel()
trainer = Trainer(
    model=model,
    train_dataloader=train,
    optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
    max_duration=f"{args.steps}ba",
    device="cpu",
    callbacks=[LossLog()],
    run_name="tiny",
    save_folder=str(args.folder / "checkpoints"),
    save_interval=f"{args.checkpoint_every}ba",
    autoresume=True,
    progress_bar=False,
)
trainer.fit()
