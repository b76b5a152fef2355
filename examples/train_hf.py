"""Train a small Llama with the Hugging Face Trainer, and resume at the exact next step.

    python examples/train_hf.py --data shardkit-demo/mds --steps 200
    torchrun --nproc-per-node 2 examples/train_hf.py --data shardkit-demo/mds --steps 200

The Trainer wants samples by number: `MapDataset` gives them, and the Trainer's own sampler shuffles. Order
and resuming are then Hugging Face's: each epoch is a permutation of all samples by `--seed`, without those
that do not fill its last global batch, and a killed run goes on after the last checkpoint that is whole, on
as many ranks as before. In our order, and on any number of ranks: examples/trainers/train_hugging_face.py.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from shardkit.loaders import Layout
from shardkit.loaders.pytorch import MapDataset


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small Llama with the Hugging Face Trainer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", required=True, help="dataset made by `shardkit build`")
    add("--steps", type=int, default=200, help="train until this step")
    add("--checkpoint", default="checkpoints", help="folder to write to and to resume from")
    add("--checkpoint-every", type=int, default=50, help="steps between checkpoints")
    add("--log-file", default="log.jsonl", help="JSON lines: step, loss, sample ids")
    add("--global-batch-size", type=int, default=16, help="sequences per step on all ranks")
    add("--learning-rate", type=float, default=1e-3, help="AdamW's, constant")
    add("--seed", type=int, default=17, help="of the data's order and the model's weights")
    add("--vocabulary", type=int, default=65_536, help="number of token ids")
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--width", type=int, default=256)
    return parser.parse_args()


class LoggingTrainer(Trainer):  # type: ignore[misc, unused-ignore]
    """A Trainer that writes each step's loss and sample ids, of all ranks, to a file."""

    def __init__(self, *, log_file: Path, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.log_file = log_file

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        sample_ids = inputs.pop("sample_id")
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        record = {
            "step": self.state.global_step + 1,
            "loss": self.accelerator.gather(loss.detach()[None]).mean().item(),
            "sample_ids": self.accelerator.gather(sample_ids).tolist(),
        }
        if self.is_world_process_zero():
            with self.log_file.open("a") as log:
                log.write(json.dumps(record) + "\n")
        return loss


def last_whole_checkpoint(folder: Path, batch_size: int) -> str | None:
    """The newest checkpoint that was written to its end; the Trainer writes its own state last."""
    states = [path for path in folder.glob("checkpoint-*/trainer_state.json") if path.stat().st_size]
    if not states:
        return None
    newest = max(states, key=lambda path: int(path.parent.name.rpartition("-")[2]))
    saved = json.loads(newest.read_text())["train_batch_size"]
    if saved != batch_size:
        raise SystemExit(
            f"{newest.parent} was made with {saved} sequences a rank, now {batch_size}: the Trainer "
            "would go on with the former, and so with another global batch; start as many ranks as before"
        )
    return str(newest.parent)


def main() -> None:
    args = parse_arguments()
    batch_size, rest = divmod(args.global_batch_size, int(os.environ.get("WORLD_SIZE", "1")))
    if rest:
        raise SystemExit(f"--global-batch-size {args.global_batch_size} does not divide by the ranks")
    data = MapDataset(args.data, labels=True, return_ids=True, layout=Layout(rename={"tokens": "input_ids"}))
    torch.manual_seed(args.seed)
    config = LlamaConfig(  # type: ignore[no-untyped-call, unused-ignore]
        vocab_size=args.vocabulary,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        hidden_size=args.width,
        intermediate_size=4 * args.width,
        max_position_embeddings=len(data[0]["input_ids"]),
    )
    arguments = TrainingArguments(
        args.checkpoint,
        max_steps=args.steps,
        per_device_train_batch_size=batch_size,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        seed=args.seed,
        save_steps=args.checkpoint_every,
        save_total_limit=2,
        dataloader_drop_last=True,  # else some samples would come twice, to fill an epoch's last batch
        remove_unused_columns=False,  # sample_id
        use_cpu=not torch.cuda.is_available(),
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call, unused-ignore]
    trainer = LoggingTrainer(model=model, args=arguments, train_dataset=data, log_file=Path(args.log_file))
    trainer.train(resume_from_checkpoint=last_whole_checkpoint(Path(args.checkpoint), batch_size))


if __name__ == "__main__":
    main()
