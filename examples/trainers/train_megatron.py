"""Megatron Core on a shardkit dataset: a GPT of one layer on CPUs, with micro-batches and DDP.

    torchrun --nproc-per-node 2 examples/trainers/train_megatron.py --data DATASET --folder RUN --steps 99

Model, DDP, schedule, optimizer and `RerunDataIterator` are Megatron's. Its training script asks for GPUs, so
that the loop around them is below, and what lets Megatron Core run without one. The checkpoint has no state
of the loader but `consumed_train_samples`. Start it again with more or fewer ranks: it continues with the
next sample.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardkit.loaders.integrations.megatron import MegatronDataIterator

SEQ_LENGTH = 64  # one token less than the dataset's rows have
MICRO_BATCH_SIZE = 2


class OnCPU(TorchFunctionMode):
    """Gives Megatron Core CPU tensors where it asks for CUDA's."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        if "cuda" in str(options.get("device")):
            options["device"] = "cpu"
        return func(*args, **options)


def loss_function(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    total, tokens = (losses * loss_mask).sum(), loss_mask.sum()
    return total, tokens.int(), {"loss": torch.stack([total.detach(), tokens])}


def forward_step(batches: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    batch = next(batches)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(loss_function, batch["loss_mask"])


def train(args: argparse.Namespace) -> None:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
    )
    layers = get_gpt_layer_local_spec()
    gpt = GPTModel(config, layers, vocab_size=256, max_sequence_length=SEQ_LENGTH)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=0.0), [model])

    checkpoint, step, consumed_train_samples = args.folder / "checkpoint.pt", 0, 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, consumed_train_samples = saved["step"], saved["consumed_train_samples"]

    data_parallel_size = mpu.get_data_parallel_world_size()
    batches = RerunDataIterator(
        MegatronDataIterator(
            args.data,
            seq_length=SEQ_LENGTH,
            micro_batch_size=MICRO_BATCH_SIZE,
            global_batch_size=args.global_batch,
            data_parallel_rank=mpu.get_data_parallel_rank(),
            data_parallel_size=data_parallel_size,
            consumed_samples=consumed_train_samples,
            usage_log=args.folder / "usage",
        )
    )
    while step < args.steps:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches,
            model=[model],
            num_microbatches=args.global_batch // (MICRO_BATCH_SIZE * data_parallel_size),
            seq_length=SEQ_LENGTH,
            micro_batch_size=MICRO_BATCH_SIZE,
            forward_only=False,
        )
        optimizer.step()
        batches.advance()
        step += 1
        consumed_train_samples += args.global_batch
        sums = torch.stack([each["loss"] for each in losses]).sum(0)
        dist.all_reduce(sums, group=mpu.get_data_parallel_group())
        if dist.get_rank() > 0:
            continue
        with (args.folder / "losses.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "loss": float(sums[0] / sums[1])}) + "\n")
        if step % args.checkpoint_every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"step": step, "consumed_train_samples": consumed_train_samples}
            torch.save(state, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)
    batches.iterable.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", required=True, help=f"dataset with rows of {SEQ_LENGTH + 1} tokens")
    add("--folder", type=Path, required=True, help="for checkpoints and logs; a run there is continued")
    add("--steps", type=int, default=100, help="train until this step")
    add("--global-batch", type=int, default=12, help="sequences of a step, over all ranks")
    add("--checkpoint-every", type=int, default=5, help="steps between checkpoints")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    with OnCPU():
        mpu.initialize_model_parallel()
        tensor_parallel.random.initialize_rng_tracker()  # Megatron's is for CUDA's random numbers
        tensor_parallel.random.get_cuda_rng_tracker().fork = lambda name=None: contextlib.nullcontext()
        torch.manual_seed(17)
        train(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
