"""A training loop on a GPU: what it waits for its data, and whether its batches stay exact. One command.

    python tests/benchmarks/bench_gpu.py [--device cuda] [--parts input runs mask] [--json]

input  A small GPT trained on batches through `CudaPrefetcher`, on those of a pinned double buffer written by
       hand over the same loader, and on one batch that stays on the device. The three take turns. For each:
       tokens a second, what `next` takes in the training thread (median, p99, share of the time of all steps:
       the goal is below 0.1 %), and how often a step synchronizes with the device, in a profiler's trace.
runs   FSDP2 runs, eager and compiled, killed with SIGKILL and resumed on another number of processes from
       `torch.distributed.checkpoint`. Every row of every step, as it was on the device, is compared with the
       rows of an uninterrupted loader. Two processes share one device: by nccl if it allows that, else by
       gloo, with the model on the CPU if gloo refuses too; `backend` says which.
mask   FlexAttention's block mask as the loader makes it, on the device, beside `create_block_mask`: equal,
       and the milliseconds of each a batch.

Without a GPU, --device cpu does all of it at a smaller size: the copies and the model share the cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from gpt import GPT, GPTConfig, next_token_loss

from figures import benchmark_parser, in_turns, print_figures, write_tokens
from shardkit.loaders import StreamingLoader
from shardkit.loaders.batch import Batch
from shardkit.loaders.config import grouped
from shardkit.loaders.cuda import CudaPrefetcher

VOCABULARY = 50_304
EOS = 7  # of the random rows: each id comes about once in 50,000 tokens, so some rows have several documents
PARTS = ("input", "runs", "mask")
SYNCHRONIZING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")

RUN_STEPS, CHECKPOINT_EVERY, KILL_AT = 12, 4, 6  # the kill comes between two checkpoints
RUN_GLOBAL_BATCH, RUN_LENGTH = 4, 32
RUN_SECONDS = 240.0  # of one run: the first compilation takes most of it
RUNS = {"eager 1 to 2": (False, 1, 2), "eager 2 to 1": (False, 2, 1), "compiled 1 to 1": (True, 1, 1)}


def finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def make_step(arguments: argparse.Namespace) -> Callable[[Batch], None]:
    config = GPTConfig(VOCABULARY, arguments.layers, arguments.width // 64, arguments.width)
    model = GPT(config).to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=arguments.device == "cuda")
    precise = torch.bfloat16 if arguments.device == "cuda" else torch.float32

    def step(batch: Batch) -> None:
        with torch.autocast(arguments.device, precise, enabled=arguments.device == "cuda"):
            loss = next_token_loss(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        optimizer.step()

    return step


def double_buffer(loader: Iterable[Batch], device: str) -> Iterator[Batch]:
    """What one writes by hand: two pinned buffers, and the next batch copied while this one is trained on."""
    on_gpu = device == "cuda"
    stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]
    buffers: list[torch.Tensor] = []
    copied: list[Any] = [None, None]
    following: torch.Tensor | None = None
    event: Any = None
    for number, batch in enumerate(loader):
        tokens = batch["tokens"]
        if len(buffers) < 2:
            buffers.append(torch.empty_like(tokens, pin_memory=on_gpu))
        buffer, place = buffers[number % 2], number % 2
        if copied[place] is not None:
            copied[place].synchronize()  # done long ago: the copy before the last
        buffer.copy_(tokens)
        ready, ready_event = following, event
        if stream is None:
            following = buffer.clone()
        else:
            with torch.cuda.stream(stream):
                following = buffer.to(device, non_blocking=True)
                event = copied[place] = stream.record_event()
        if ready is not None:
            if ready_event is not None:
                torch.cuda.current_stream().wait_event(ready_event)
                ready.record_stream(torch.cuda.current_stream())
            yield {"tokens": ready}


def kept(loader: Iterable[Batch], device: str) -> Iterator[Batch]:
    """One batch for ever: what the model does alone."""
    batch = {"tokens": next(iter(loader))["tokens"].to(device)}
    while True:
        yield batch


def ahead(loader: Iterable[Batch], device: str) -> Iterator[Batch]:
    return iter(CudaPrefetcher(loader, device))


SIDES: dict[str, Callable[[Iterable[Batch], str], Iterator[Batch]]] = {
    "prefetcher": ahead,
    "by_hand": double_buffer,
    "one_kept": kept,
}


def measure_input(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Each side's figures over all rounds; a round trains `steps` steps with each, in turn."""
    write_rows(folder, arguments.batch_size * 64, arguments.length)
    step = make_step(arguments)
    waits: dict[str, list[float]] = {name: [] for name in SIDES}
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    figures: dict[str, Any] = {}
    open_loader = partial(
        StreamingLoader, folder, batch_size=arguments.batch_size, endless=True, rank=0, world_size=1
    )
    for number in range(arguments.rounds):
        for name in in_turns(list(SIDES), number):
            with open_loader() as loader:
                batches = SIDES[name](loader, arguments.device)
                for _ in range(arguments.warm_up):
                    step(next(batches))
                finish(arguments.device)
                start = time.perf_counter()
                for _ in range(arguments.steps):
                    asked = time.perf_counter()
                    batch = next(batches)
                    waits[name].append(time.perf_counter() - asked)
                    step(batch)
                finish(arguments.device)
                seconds[name].append(time.perf_counter() - start)
                if number == 0:
                    figures[f"{name}: synchronizations a step"] = synchronizations(arguments, batches, step)
                del batches
    tokens = arguments.steps * arguments.batch_size * arguments.length
    for name in SIDES:
        figures[f"{name}: tokens/s"] = tokens / statistics.median(seconds[name])
        figures[f"{name}: wait, median µs"] = 1e6 * statistics.median(waits[name])
        figures[f"{name}: wait, p99 µs"] = 1e6 * float(np.quantile(waits[name], 0.99))
        figures[f"{name}: wait, % of step time"] = 100 * sum(waits[name]) / sum(seconds[name])
    return figures


def synchronizations(
    arguments: argparse.Namespace, batches: Iterator[Batch], step: Callable[[Batch], None]
) -> float:
    """How often a step waits for the device, in a profiler's trace of a few; the last wait is ours."""
    count = min(10, arguments.steps)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if arguments.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(count):
            step(next(batches))
        finish(arguments.device)
    found = sum(event.name in SYNCHRONIZING for event in profile.events() or ())
    return float(max(0, found - (arguments.device == "cuda")) / count)


def write_rows(folder: Path, rows: int, length: int) -> None:
    """One dataset of random rows; few enough that it stays in the page cache."""
    folder.mkdir()
    write_tokens(folder, shards=4, rows=-(-rows // 4), length=length)


def measure_runs(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Whether each run's rows are those of an uninterrupted loader, and by which backend it ran."""
    folder.mkdir()
    data = folder / "data"
    write_rows(data, 5 * RUN_GLOBAL_BATCH, RUN_LENGTH)  # the second epoch begins inside of a run
    with StreamingLoader(data, batch_size=RUN_GLOBAL_BATCH, endless=True, rank=0, world_size=1) as loader:
        expected = {n: row_hashes(batch) for n, batch in zip(range(1, RUN_STEPS + 1), loader, strict=False)}
    figures: dict[str, Any] = {}
    for name, (compiled, before, after) in RUNS.items():
        run = folder / name.replace(" ", "-")
        run.mkdir()
        killed, _ = start_run(arguments, run, data, before, compiled=compiled, kill=True)
        backend, graphs = start_run(arguments, run, data, after, compiled=compiled, kill=False)
        first, rest = recorded(run, "killed", before), recorded(run, "resumed", after)
        figures[f"{name}: backend"] = f"{killed}, then {backend}"
        figures[f"{name}: resumed at step"] = min(rest)
        figures[f"{name}: rows bit-equal"] = (
            set(first) >= set(range(1, KILL_AT + 1))
            and set(rest) == set(range(min(rest), RUN_STEPS + 1))
            and all(rows == expected[step] for steps in (first, rest) for step, rows in steps.items())
        )
        if compiled:
            figures[f"{name}: graphs compiled after the first step"] = graphs
    return figures


def start_run(
    arguments: argparse.Namespace, run: Path, data: Path, ranks: int, *, compiled: bool, kill: bool
) -> tuple[str, int]:
    """Train on `ranks` processes; (the first backend that works, graphs compiled behind the first step)."""
    ways = ["gloo cpu"] if arguments.device == "cpu" else ["nccl cuda", "gloo cuda", "gloo cpu"]
    phase = "killed" if kill else "resumed"
    errors: list[str] = []
    for way in ways:
        for old in run.glob(f"{phase}-*"):
            old.unlink()  # of a backend that did not work
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment |= {"WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--device", arguments.device]
        command += ["--train", json.dumps([way, str(run), phase, str(data), compiled])]
        processes = []
        for rank in range(ranks):
            place = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with (run / f"{phase}-{rank}.err").open("w") as err:
                processes.append(subprocess.Popen(command, env=place, stderr=err))
        if wait_for(processes, run / f"{phase}-0.jsonl", kill=kill):
            graphs = [json.loads(line)["graphs"] for line in (run / f"{phase}-0.jsonl").open()]
            return way, graphs[-1] - graphs[0]
        errors.append(f"{way}: {(run / f'{phase}-0.err').read_text()[-500:]}")
    raise SystemExit("no backend works:\n" + "\n".join(errors))


def wait_for(processes: list[subprocess.Popen[bytes]], log: Path, *, kill: bool) -> bool:
    """Whether all processes did what they should, or came to the step at which they are killed."""
    deadline = time.monotonic() + RUN_SECONDS
    try:
        while time.monotonic() < deadline:
            if kill and log.exists() and len(log.read_text().splitlines()) >= KILL_AT:
                return True
            codes = [process.poll() for process in processes]
            if any(codes):
                return False
            if all(code == 0 for code in codes):
                return not kill
            time.sleep(0.02)
        return False
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()


def recorded(run: Path, phase: str, ranks: int) -> dict[int, list[str]]:
    """The rows of each step that all ranks came to, those of rank 0 first."""
    logs = [(run / f"{phase}-{rank}.jsonl").read_text().splitlines() for rank in range(ranks)]
    steps: dict[int, list[str]] = {}
    for entries in zip(*(map(json.loads, log) for log in logs), strict=False):
        steps[entries[0]["step"]] = [row for entry in entries for row in entry["rows"]]
    return steps


def row_hashes(batch: Batch) -> list[str]:
    return [hashlib.sha256(row.tobytes()).hexdigest() for row in batch["tokens"].cpu().numpy()]


def train(way: str, run: Path, phase: str, data: Path, *, compiled: bool, device: str) -> None:
    """One rank of a run: from its newest checkpoint, if there is one, to the last step."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    backend, on = way.split()
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
    dist.init_process_group(backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(on, (ranks,), mesh_dim_names=("dp_shard",))
    torch.manual_seed(17)
    model = GPT(GPTConfig(VOCABULARY, 2, 2, 64)).to(on)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss_of = torch.compile(next_token_loss, backend="inductor" if on == "cuda" else "aot_eager")
    optimizer = torch.optim.AdamW(model.parameters())
    with StreamingLoader(data, batch_size=RUN_GLOBAL_BATCH // ranks, endless=True, mesh=mesh) as loader:
        batches = CudaPrefetcher(loader, device)
        newest = max(
            (int(path.name) for path in run.glob("[0-9]*") if (path / ".metadata").exists()), default=0
        )
        if newest:
            weights, moments = get_state_dict(model, optimizer)
            state: dict[str, Any] = {"model": weights, "optimizer": moments, "loader": batches}
            dcp.load(state, checkpoint_id=run / str(newest))  # type: ignore[attr-defined]
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        with (run / f"{phase}-{rank}.jsonl").open("w", buffering=1) as log:
            for step, batch in zip(range(newest + 1, RUN_STEPS + 1), batches, strict=False):
                rows = row_hashes(batch)
                moved = {"tokens": batch["tokens"].to(on)}
                loss = (loss_of if compiled else next_token_loss)(model, moved)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
                optimizer.step()
                if step % CHECKPOINT_EVERY == 0:
                    weights, moments = get_state_dict(model, optimizer)
                    state = {"model": weights, "optimizer": moments, "loader": batches}
                    dcp.save(state, checkpoint_id=run / str(step))  # type: ignore[attr-defined]
                graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
                log.write(json.dumps({"step": step, "rows": rows, "graphs": graphs}) + "\n")
        batches.close()
    dist.barrier()
    dist.destroy_process_group()


def measure_mask(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The loader's block masks beside create_block_mask's, which gets the documents on the device."""
    from torch.nn.attention.flex_attention import create_block_mask

    from shardkit.loaders.block_mask import block_mask_of

    length = arguments.length
    write_rows(folder, arguments.batch_size * 8, length)
    options: dict[str, Any] = {"batch_size": arguments.batch_size, "rank": 0, "world_size": 1}
    options |= {"eos_id": EOS, "document_ids": True, "block_mask": True}
    equal, ours, theirs = True, [], []
    with StreamingLoader(folder, **grouped(options)) as loader:
        for batch in CudaPrefetcher(loader, arguments.device):
            finish(arguments.device)
            start = time.perf_counter()
            mask = block_mask_of(batch)
            finish(arguments.device)
            ours.append(time.perf_counter() - start)
            documents = batch["document_ids"]

            def same_document(b: Any, h: Any, q: Any, k: Any, documents: Any = documents) -> Any:
                return (q >= k) & (documents[b, q] == documents[b, k])

            start = time.perf_counter()
            theirs_mask = create_block_mask(
                same_document, arguments.batch_size, None, length, length, device=arguments.device
            )
            finish(arguments.device)
            theirs.append(time.perf_counter() - start)
            equal = equal and torch.equal(mask.to_dense(), theirs_mask.to_dense())
    return {
        "mask: equal to create_block_mask": equal,
        "mask: ours, ms in the loop": 1e3 * statistics.median(ours),
        "mask: create_block_mask, ms": 1e3 * statistics.median(theirs),
    }


MEASURES = {"input": measure_input, "runs": measure_runs, "mask": measure_mask}


def main() -> None:
    parser = benchmark_parser(__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    gpu = default == "cuda"
    parser.add_argument("--rounds", type=int, default=5 if gpu else 2)
    parser.add_argument("--steps", type=int, default=25 if gpu else 5)
    parser.add_argument("--warm-up", type=int, default=5 if gpu else 1)
    parser.add_argument("--batch-size", type=int, default=16 if gpu else 2)
    parser.add_argument("--length", type=int, default=2048 if gpu else 128)
    parser.add_argument("--layers", type=int, default=12 if gpu else 1)
    parser.add_argument("--width", type=int, default=768 if gpu else 64)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        way, run, phase, data, compiled = json.loads(arguments.train)
        train(way, Path(run), phase, Path(data), compiled=compiled, device=arguments.device)
        return
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    }
    with tempfile.TemporaryDirectory() as scratch:
        for part in arguments.parts:
            figures |= MEASURES[part](arguments, Path(scratch) / part)
    print_figures(arguments, figures)


if __name__ == "__main__":
    main()
