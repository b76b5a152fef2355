"""Train with nanochat's own scripts/base_train.py, changed in the lines that docs/trainers/nanogpt.md shows.

    git clone https://github.com/karpathy/nanochat
    export NANOCHAT=nanochat
    torchrun --nproc-per-node 2 examples/trainers/train_nanochat.py --data DATASET --steps 40

Kill it at any moment and run it again: it continues after its last checkpoint with the next sample, here also
on fewer ranks. On GPUs nanochat shards its optimizer over the ranks, and needs as many again to load it.
"""

import argparse
import os
import sys
from pathlib import Path
from types import SimpleNamespace

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
option = parser.add_argument
option("--data", required=True, help="dataset of rows of 65 tokens")
option("--folder", type=Path, default="nanochat-run", help="for checkpoints and logs")
option("--steps", type=int, default=40, help="train until this step")
option("--global-batch", type=int, default=12, help="sequences a step, over all ranks")
option("--checkpoint-every", type=int, default=5, help="steps between checkpoints")
args = parser.parse_args()
repository, folder = Path(os.environ["NANOCHAT"]), args.folder.resolve()
sys.path.insert(0, str(repository))
os.environ |= {
    "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than these steps
    "NANOCHAT_BASE_DIR": str(folder),
}

# ruff: noqa: E402
import nanochat.optim
import torch
import torch.distributed as dist
from loss_log import LossLog
from nanochat.tokenizer import RustBPETokenizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

# nanochat runs several ranks on GPUs only. On CPUs each has the whole optimizer, and they average gradients.
ranks = int(os.environ.get("WORLD_SIZE", "1"))


def average_gradients(optimizer: torch.optim.Optimizer, arguments: object, options: object) -> None:
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks


if ranks > 1:
    dist.init_process_group("gloo")
    nanochat.optim.dist = SimpleNamespace(is_available=lambda: False)
    register_optimizer_step_pre_hook(average_gradients)

# What its tokenizer's training leaves behind.
if not (folder / "tokenizer").exists() and os.environ.get("RANK", "0") == "0":
    RustBPETokenizer.train_from_iterator(iter(["some text"]), 265).save(str(folder / "tokenizer"))
    torch.save(torch.ones(265, dtype=torch.int32), folder / "tokenizer" / "token_bytes.pt")
if ranks > 1:
    dist.barrier()

# A line of base_train.py, and what stands in its place.
TRAIN = "train_loader = tokenizing_distributed_data_loader_with_state_bos_bestfit("
VAL = "build_val_loader = lambda: tokenizing_distributed_data_loader_bos_bestfit("
MODEL = "tokenizer, args.device_batch_size, args.max_seq_len, "
CHANGES = {
    TRAIN + MODEL + 'split="train", device=device, resume_state_dict=dataloader_resume_state_dict)': f"""
from shardkit.loaders.integrations.nanogpt import data_loader, data_loader_with_state
train_loader = data_loader_with_state({args.data!r}, args.device_batch_size, args.max_seq_len, device=device,
    resume_state_dict=dataloader_resume_state_dict, usage_log={str(folder / "usage")!r})""",
    VAL + MODEL + 'split="val", device=device)': f"""
build_val_loader = lambda: data_loader(
    {args.data!r}, args.device_batch_size, args.max_seq_len, device=device)""",
    """ pq: {dataloader_state_dict['pq_idx']} rg: {dataloader_state_dict['rg_idx']}\"""": '"',
    "        train_loss = loss.detach() # for logging": (
        "        train_loss = loss.detach() # for logging\n        loss_log.add(loss)"
    ),
}

saved = sorted(int(file.stem.split("_")[1]) for file in folder.glob("base_checkpoints/*/meta_*.json"))
SETTINGS = {
    "device-type": "cpu",
    "depth": 1,
    "head-dim": 32,
    "window-pattern": "L",
    "max-seq-len": 64,
    "device-batch-size": args.global_batch // ranks,
    "total-batch-size": args.global_batch * 64,
    "num-iterations": args.steps,
    "embedding-lr": 1,  # scaled down for small batches
    "unembedding-lr": 0.1,
    "matrix-lr": 0,  # these amplify the rounding in which one and two ranks differ
    "scalar-lr": 0,
    "weight-decay": 0,  # this and the learning rate would depend on --steps
    "warmup-steps": 1,
    "warmdown-ratio": 0,
    "eval-every": args.checkpoint_every,
    "eval-tokens": 2 * args.global_batch * 64,
    "core-metric-every": -1,
    "sample-every": -1,
    "save-every": args.checkpoint_every,
    "resume-from-step": saved[-1] if saved else -1,
}

source = (repository / "scripts" / "base_train.py").read_text()
for line, instead in CHANGES.items():
    assert source.count(line) == 1, f"another base_train.py: it has {source.count(line)} times {line!r}"
    source = source.replace(line, instead)
sys.argv = ["base_train.py", *(f"--{name}={value}" for name, value in SETTINGS.items())]
loss_log = LossLog(folder / "losses.jsonl")
exec(compile(source, "base_train.py", "exec"), {"__name__": "__main__", "loss_log": loss_log})
