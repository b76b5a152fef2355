"""How long a training loop on a GPU waits for its data: a small GPT, batches through `CudaPrefetcher`.

    python tests/benchmarks/bench_gpu.py [--steps 200] [--device cuda] [--json]

Waits are what `next` takes in the training thread; step times are from one step's start to the next, the
device having been waited for at the end only. Says tokens a second, waits (median, p99, share of steps that
waited longer than 1 % of a step), and the same loop's rate on one batch that stays on the device: what the
data costs in all. Published for comparison: DeepSeek-V3's 1,550 tokens a second on each GPU.

Without a GPU, --device cpu runs the same loop: there the copies and the model share the cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from gpt import GPT, GPTConfig, next_token_loss

from figures import benchmark_parser, print_figures, write_tokens
from shardkit.loaders import StreamingLoader
from shardkit.loaders.cuda import CudaPrefetcher

VOCABULARY = 50_304
DEEPSEEK_TOKENS_PER_S = 1550


def make_step(arguments: argparse.Namespace) -> Callable[[dict[str, torch.Tensor]], None]:
    config = GPTConfig(VOCABULARY, arguments.layers, arguments.width // 64, arguments.width)
    model = GPT(config).to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=arguments.device == "cuda")
    precise = torch.bfloat16 if arguments.device == "cuda" else torch.float32

    def step(batch: dict[str, torch.Tensor]) -> None:
        with torch.autocast(arguments.device, precise, enabled=arguments.device == "cuda"):
            loss = next_token_loss(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        optimizer.step()

    return step


def finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    step = make_step(arguments)
    loader = StreamingLoader(folder, batch_size=arguments.batch_size, endless=True, rank=0, world_size=1)
    with loader:
        prefetcher = CudaPrefetcher(loader, arguments.device)
        batches = iter(prefetcher)
        for _ in range(arguments.warm_up):
            batch = next(batches)
            step(batch)
        finish(arguments.device)
        waits = []
        start = time.perf_counter()
        for _ in range(arguments.steps):
            asked = time.perf_counter()
            batch = next(batches)
            waits.append(time.perf_counter() - asked)
            step(batch)
        finish(arguments.device)
        fed = time.perf_counter() - start
        start = time.perf_counter()
        for _ in range(arguments.steps):
            step(batch)
        finish(arguments.device)
        alone = time.perf_counter() - start
    step_s = fed / arguments.steps
    tokens = arguments.steps * arguments.batch_size * arguments.length
    wait_s = statistics.median(waits)
    return {
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "tokens_per_s": tokens / fed,
        "x_deepseek_v3": tokens / fed / DEEPSEEK_TOKENS_PER_S,
        "rate_of_one_batch_kept": alone / fed,
        "step_ms": 1e3 * step_s,
        "wait_median_us": 1e6 * wait_s,
        "wait_p99_us": 1e6 * float(np.quantile(waits, 0.99)),
        "step_over_wait": step_s / wait_s,
        "steps_that_waited": sum(wait > 0.01 * step_s for wait in waits) / len(waits),
    }


def main() -> None:
    parser = benchmark_parser(__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--steps", type=int, default=200 if default == "cuda" else 20)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16 if default == "cuda" else 4)
    parser.add_argument("--length", type=int, default=2048 if default == "cuda" else 256)
    parser.add_argument("--layers", type=int, default=12 if default == "cuda" else 2)
    parser.add_argument("--width", type=int, default=768 if default == "cuda" else 256)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = arguments.batch_size * (arguments.steps + arguments.warm_up + 8)
        of_shard = min(rows, (64 << 20) // (2 * arguments.length))
        write_tokens(Path(scratch), shards=-(-rows // of_shard), rows=of_shard, length=arguments.length)
        print_figures(arguments, measure(arguments, Path(scratch)))


if __name__ == "__main__":
    main()
