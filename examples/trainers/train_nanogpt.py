"""Train with nanoGPT's own train.py, changed in the lines that docs/trainers/nanogpt.md shows.

    git clone https://github.com/karpathy/nanoGPT
    export NANOGPT=nanoGPT
    torchrun --nproc-per-node 2 examples/trainers/train_nanogpt.py --data DATASET --steps 40

Kill it at any moment and run it again, on another number of ranks if you like: it continues after its last
checkpoint with the next sample.
"""

import argparse
import os
import sys
from pathlib import Path

from loss_log import LossLog

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
option = parser.add_argument
option("--data", required=True, help="dataset of rows of 65 tokens")
option("--folder", type=Path, default="nanogpt-run", help="for checkpoints and logs")
option("--steps", type=int, default=40, help="train until this step")
option("--global-batch", type=int, default=12, help="sequences a step, over all ranks")
option("--checkpoint-every", type=int, default=5, help="steps between checkpoints")
args = parser.parse_args()
repository = Path(os.environ["NANOGPT"])
folder, dataset = args.folder.resolve(), Path(args.data).resolve()

# A line of train.py, and what stands in its place. Without `lanes`, a new run's order would follow from its
# micro-batches over all ranks, and runs on one and two ranks could not be compared.
DATA = {
    "# init these up here, can override if init_from='resume' (i.e. from a checkpoint)": f"""
from shardkit.loaders import Order
from shardkit.loaders.integrations.nanogpt import NanoGPTData
data = NanoGPTData({str(dataset)!r}, {str(dataset)!r}, batch_size=batch_size, block_size=block_size,
                   device=device, order=Order(lanes=4), usage_log={str(folder / "usage")!r})
get_batch = data.get_batch""",
    "        for k in range(eval_iters):": (
        "        for k, (X, Y) in enumerate(data.evaluation(split, eval_iters)):"
    ),
    "            X, Y = get_batch(split)": "",
    "    best_val_loss = checkpoint['best_val_loss']": """    best_val_loss = checkpoint['best_val_loss']
    data.load_state_dict(checkpoint['data'])""",
    "                    'iter_num': iter_num,": """                    'iter_num': iter_num,
                    'data': data.state_dict(),""",
}
CPU = {
    "    device = f'cuda:{ddp_local_rank}'": "    device = 'cpu'",
    "    torch.cuda.set_device(device)": "",
    "    model = DDP(model, device_ids=[ddp_local_rank])": "    model = DDP(model)",
    "        loss = loss / gradient_accumulation_steps": (
        "        loss_log.add(loss)\n        loss = loss / gradient_accumulation_steps"
    ),
}
SETTINGS = {
    "out_dir": str(folder),
    "init_from": "resume" if (folder / "ckpt.pt").exists() else "scratch",
    "max_iters": args.steps - 1,
    "batch_size": args.global_batch // 2,
    "gradient_accumulation_steps": 2,
    "eval_interval": args.checkpoint_every,
    "eval_iters": 3,
    "always_save_checkpoint": True,
    "block_size": 64,
    "n_layer": 1,
    "n_head": 2,
    "n_embd": 32,
    "learning_rate": 1e-3,
    "decay_lr": False,
    "device": "cpu",
    "dtype": "float32",
    "backend": "gloo",
    "compile": False,
}

source = (repository / "train.py").read_text()
for line, instead in (DATA | CPU).items():
    assert source.count(line) == 1, f"another train.py: it has {source.count(line)} times {line!r}"
    source = source.replace(line, instead)
sys.argv = ["train.py", *(f"--{name}={value}" for name, value in SETTINGS.items())]
sys.path.insert(0, str(repository))
os.chdir(repository)  # train.py runs configurator.py, which is beside it
loss_log = LossLog(folder / "losses.jsonl")
exec(compile(source, "train.py", "exec"), {"__name__": "__main__", "loss_log": loss_log})
