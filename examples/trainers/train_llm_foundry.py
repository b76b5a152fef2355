"""Train a tiny MPT by llm-foundry's own command on CPUs, and survive any interruption.

    torchrun --nproc-per-node 2 examples/trainers/train_llm_foundry.py --data DATASET --folder run --steps 40

Kill it at any moment and run it again, on another number of ranks if you like: it continues after its last
checkpoint with the next sample. In the configuration, only `train_loader` is shardkit's.
"""

import argparse
import json
import os
from pathlib import Path

from composer import Callback, Logger, State
from composer.utils import dist
from llmfoundry import registry
from llmfoundry.command_utils.train import train
from omegaconf import OmegaConf
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
option = parser.add_argument
option("--data", required=True, help="dataset made by `shardkit build`, with rows of 64 tokens")
option("--folder", type=Path, default="llm-foundry-run", help="for checkpoints and logs")
option("--steps", type=int, default=40, help="train until this step")
option("--global-batch", type=int, default=12, help="sequences a step, over all ranks")
option("--checkpoint-every", type=int, default=5, help="steps between checkpoints")
args = parser.parse_args()

CONFIG = f"""
max_seq_len: 64
seed: 17
global_train_batch_size: {args.global_batch}
device_train_microbatch_size: 2
train_loader:
  name: shardkit
  drop_last: true
  dataset: {{path: {args.data}, max_seq_len: 64, usage_log: {args.folder}/usage}}
model:
  name: mpt_causal_lm
  init_device: cpu
  d_model: 32
  n_heads: 2
  n_layers: 1
  expansion_ratio: 2
  max_seq_len: 64
  vocab_size: 256
  attn_config: {{attn_impl: torch}}
  loss_fn: torch_crossentropy
tokenizer: {{name: {args.folder}/tokenizer, kwargs: {{model_max_length: 64}}}}
optimizer: {{name: decoupled_adamw, lr: 1.0e-3, betas: [0.9, 0.95], eps: 1.0e-8, weight_decay: 0.0}}
scheduler: {{name: constant_with_warmup, t_warmup: 0ba}}
precision: fp32
max_duration: {args.steps}ba
eval_interval: 0
run_name: tiny
save_folder: {args.folder}/checkpoints
save_interval: {args.checkpoint_every}ba
autoresume: true
progress_bar: false
callbacks: {{loss_log: {{}}}}
"""


class LossLog(Callback):
    def batch_end(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == 0:
            record = {"step": int(state.timestamp.batch), "loss": state.total_loss_dict["loss/train/total"]}
            with (args.folder / "losses.jsonl").open("a") as log:
                log.write(json.dumps(record) + "\n")


registry.callbacks.register("loss_log", func=LossLog)
os.environ.setdefault("NODE_RANK", os.environ.get("GROUP_RANK", "0"))  # torchrun's name for it
if os.environ.get("RANK", "0") == "0":  # llm-foundry asks for a tokenizer; the data has ids
    vocabulary = {"<eos>": 0} | {f"t{number}": number for number in range(1, 256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call, unused-ignore]
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>"
    )
    wrapped.save_pretrained(args.folder / "tokenizer")
dist.initialize_dist("cpu")
dist.barrier()
train(OmegaConf.create(CONFIG))
