"""Proves the demo's claims about the datasets that it just built, with tools that users have.

`verify`, `audit` and `trace` check the claims; `shardkit audit` and `shardkit trace` run as commands, so that
users can repeat the checks. Resume is proved by killing a real training run with SIGKILL between two
checkpoints and starting it again. Every step must be equal to the same step of an uninterrupted run,
including the steps that are repeated after the checkpoint.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np

from shardkit.datasets.dataset import open_dataset
from shardkit.datasets.verify import verify
from shardkit.errors import ShardkitError
from shardkit.units import format_bytes

NO_TORCH = "torch is missing: pip install 'shardkit[torch]' and run the demo again"
TRACED_ROWS = 200
WORLD_SIZES = "1,2,3"
GLOBAL_BATCH = "12"  # samples per step over all ranks, divisible by 1, 2 and 3 ranks
CHECKPOINT_EVERY = 5
KILL_AFTER_STEP = 2 * CHECKPOINT_EVERY + 2  # two steps past the second checkpoint
MORE_STEPS = 10  # number of steps that both runs train after the last step of the killed run
FAR_STEPS = 1_000_000  # number of steps of the run that is killed: too many to finish before the kill
RUN_SECONDS = 300  # timeout of a run, which normally takes a few seconds
POLL_SECONDS = 0.005
LOADING_SECONDS = 0.5
COPY_BYTES = 64 << 20  # size of the copied array, much larger than any CPU cache


@dataclass(frozen=True, slots=True)
class Proof:
    """A claim and its evidence; if it could not be checked, `passed` is None and `evidence` is the reason."""

    name: str
    passed: bool | None
    evidence: str
    figures: Mapping[str, object] = field(default_factory=dict)


def prove_same_rows(paths: Sequence[Path]) -> Proof:
    """Check that all datasets hold the same tokens in the same order, independent of their format."""
    digests = {}
    rows = tokens = 0
    for path in paths:
        state = hashlib.blake2b(digest_size=16)
        with open_dataset(path) as dataset:
            for number in range(len(dataset.manifest.shards)):
                block = dataset.shard(number).fixed_rows(dataset.token_column or "")
                assert block is not None, "packed rows have a constant stride"
                state.update(np.ascontiguousarray(block).tobytes())
            rows, tokens = len(dataset), len(dataset) * (dataset.sequence_length or 0)
        digests[path.name] = state.hexdigest()
    name = f"{' and '.join(digests)} hold the same rows"
    figures = {"rows": rows, "tokens": tokens, "digests": digests}
    if len(set(digests.values())) > 1:
        return Proof(name, False, f"digests differ: {digests}", figures)
    digest = next(iter(digests.values()))
    return Proof(name, True, f"{rows:,} rows, {tokens:,} tokens, blake2b {digest[:12]} from each", figures)


def prove_intact(paths: Sequence[Path]) -> Proof:
    """Check that all shards match the hashes in their index, and that all counts agree."""
    reports = [verify(path) for path in paths]
    shards, size = sum(report.hashed for report in reports), sum(report.bytes for report in reports)
    problems = [f"{problem.file}: {problem.problem}" for report in reports for problem in report.problems]
    evidence = "; ".join(problems[:3]) or f"hashes and structure of {shards} shards, {format_bytes(size)}"
    figures = {"shards": shards, "bytes": size, "problems": problems}
    return Proof("every shard matches its index", not problems, evidence, figures)


def prove_provenance(path: Path, inputs: Path, tokenizer: Path) -> Proof:
    """Check that the decoded documents of some rows are in the source records that provenance names."""
    with open_dataset(path) as dataset:
        rows = np.unique(np.linspace(0, len(dataset) - 1, TRACED_ROWS).astype(int)).tolist()
    questions = [word for row in rows for word in ("--row", str(row))]
    # No text of a document in a row is longer than this excerpt limit, so texts are never truncated.
    answer = _shardkit("trace", path, *questions, "--tokenizer", tokenizer, "--excerpt", 1_000_000)
    sources: dict[str, list[str]] = {}
    documents = [(row["row"], document) for row in answer["rows"] for document in row["documents"]]
    wrong = []
    for row, document in documents:
        file = document["file"]
        if file not in sources:
            sources[file] = [_one_line(text) for text in _read_texts(inputs / file)]
        if document["text"] not in sources[file][document["record"]]:
            wrong.append(f"row {row}, tokens {document['tokens']}")
    name = "every token leads back to its source record"
    figures = {"rows": len(rows), "pieces": len(documents), "wrong": wrong[:10]}
    if wrong or not documents:
        return Proof(name, False, f"{len(wrong)} of {len(documents)} pieces differ: {wrong[:3]}", figures)
    evidence = (
        f"{len(documents):,} pieces of {len(rows)} rows were decoded, and each was found in its source record"
    )
    return Proof(name, True, evidence, figures)


def prove_exactly_once(path: Path) -> Proof:
    """Check that two epochs deliver each sample once per epoch, in the same steps for any number of ranks."""
    name = "every sample exactly once, on 1, 2 or 3 ranks"
    if importlib.util.find_spec("torch") is None:
        return Proof(name, None, NO_TORCH)
    sizes = ("--world-sizes", WORLD_SIZES, "--global-batch", GLOBAL_BATCH)
    report = _shardkit("audit", path, *sizes, "--tail", "pad")
    walks = {walk["name"]: walk["samples"] for walk in report["walks"]}
    figures = {"walks": walks, "problems": report["counts"]}
    if not report["ok"]:
        return Proof(name, False, f"`shardkit audit` found {report['counts']}", figures)
    evidence = f"{sum(walks.values()):,} deliveries walked by `shardkit audit`; the same steps every time"
    return Proof(name, True, evidence, figures)


def measure_loader(path: Path) -> dict[str, float] | None:
    """Measure tokens per second of the loader by dtype, and of a memory copy; return None without torch."""
    if importlib.util.find_spec("torch") is None:
        return None
    with open_dataset(path) as dataset:
        assert dataset.token_dtype is not None
        token_bytes = dataset.token_dtype.itemsize
    rates = {}
    for dtype in ("stored", "int64"):
        _loading_rate(path, dtype)  # not measured: reads the files into the page cache
        rates[f"{dtype}_tokens_per_second"] = median(_loading_rate(path, dtype) for _ in range(3))
    rates["copy_tokens_per_second"] = _copy_rate() / token_bytes
    return rates


def _loading_rate(path: Path, dtype: Literal["stored", "int64"]) -> float:
    """Return the tokens per second that a loader delivers in half a second."""
    from shardkit.loaders.loader import StreamingLoader

    tokens, start = 0, time.perf_counter()
    with StreamingLoader(path, batch_size=8, dtype=dtype, rank=0, world_size=1, endless=True) as loader:
        for batch in loader:
            tokens += batch["tokens"].numel()
            if (seconds := time.perf_counter() - start) > LOADING_SECONDS:
                break
    return tokens / seconds


def _copy_rate() -> float:
    """Return the bytes per second that one thread copies in memory: the best of three attempts."""
    source, target = np.ones(COPY_BYTES, np.uint8), np.zeros(COPY_BYTES, np.uint8)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - start)
    return COPY_BYTES / min(seconds)


def prove_resume(data: Path, folder: Path, vocabulary: int) -> Proof:
    """Train, kill, resume, and compare with an uninterrupted run; both write their files under `folder`."""
    name = "resume after SIGKILL is exact"
    if importlib.util.find_spec("torch") is None:
        return Proof(name, None, NO_TORCH)
    killed, whole = folder / "killed", folder / "uninterrupted"
    for run_folder in (killed, whole):
        run_folder.mkdir(parents=True)
    runs = [_start(data, killed, vocabulary, FAR_STEPS)]
    try:
        _kill_later(runs[0], killed)
        kill_step = max(record["step"] for record in _records(killed))
        last_step = kill_step + MORE_STEPS
        runs = [_start(data, run_folder, vocabulary, last_step) for run_folder in (killed, whole)]
        for run in runs:
            _, errors = run.communicate(timeout=RUN_SECONDS)
            if run.returncode != 0:
                raise ShardkitError(f"the training run failed, exit code {run.returncode}:\n{errors[-2000:]}")
    except subprocess.TimeoutExpired as error:
        raise ShardkitError(f"the training run took more than {RUN_SECONDS} seconds") from error
    finally:
        for run in runs:
            run.kill()
            run.wait()
    return compare_runs(name, _records(killed), _records(whole), kill_step, last_step)


def compare_runs(
    name: str, interrupted: list[dict[str, Any]], whole: list[dict[str, Any]], kill_step: int, last_step: int
) -> Proof:
    """Compare the logs of both runs; `interrupted` has the steps logged before the kill, then after it."""
    expected = {record["step"]: record for record in whole}
    different = sorted({r["step"] for r in interrupted if r != expected.get(r["step"])})
    complete = sorted({r["step"] for r in interrupted}) == sorted(expected) == list(range(1, last_step + 1))
    resumed = interrupted[kill_step:]  # the entries before are of the killed run, one per step
    figures = {
        "killed_after_step": kill_step,
        "resumed_from_step": resumed[0]["step"] - 1 if resumed else None,
        "last_step": last_step,
        "different_steps": different,
        "first_loss": whole[0]["loss"],
        "last_loss": whole[-1]["loss"],
    }
    if different or not complete:
        evidence = f"steps that differ from the uninterrupted run: {different or 'some are missing'}"
        return Proof(name, False, evidence, figures)
    evidence = (
        f"killed after step {kill_step}, resumed from step {figures['resumed_from_step']}: {len(resumed)} "
        f"steps, same sample ids, same losses bit by bit ({whole[0]['loss']:.2f} to {whole[-1]['loss']:.2f})"
    )
    return Proof(name, True, evidence, figures)


def _shardkit(verb: str, path: Path, *options: object) -> dict[str, Any]:
    """Run `shardkit VERB PATH OPTIONS --json`; return its output, or raise ShardkitError if it has none."""
    command = [sys.executable, "-m", "shardkit", verb, str(path), *map(str, options), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise ShardkitError(f"shardkit {verb} failed: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _one_line(text: str) -> str:
    """Join the lines of a text, as `shardkit trace` does in excerpts."""
    return " ".join(text.split())


def _read_texts(file: Path) -> list[str]:
    """Return the texts of an input file, read independently of the build."""
    if file.suffix == ".parquet":
        import pyarrow.parquet as pq

        texts: list[str] = pq.read_table(file, columns=["text"]).column("text").to_pylist()
        return texts
    with gzip.open(file, "rt", encoding="utf-8", newline="\n") as lines:
        return [json.loads(line)["text"] for line in lines]


def _start(data: Path, folder: Path, vocabulary: int, steps: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "shardkit.tools.demo.train", str(data), "--folder", str(folder)]
    command += ["--vocabulary", str(vocabulary), "--steps", str(steps), "--every", str(CHECKPOINT_EVERY)]
    # One thread makes sums reproducible. With its own cache folder, torch writes to no folder of the system.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch")}
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    )


def _kill_later(run: subprocess.Popen[str], folder: Path) -> None:
    """Send SIGKILL to `run` as soon as its log has KILL_AFTER_STEP steps."""
    deadline = time.monotonic() + RUN_SECONDS
    while len(_records(folder)) < KILL_AFTER_STEP:
        if run.poll() is not None or time.monotonic() > deadline:
            run.kill()
            errors = run.communicate()[1][-2000:]
            raise ShardkitError(f"the training run did not reach step {KILL_AFTER_STEP}:\n{errors}")
        time.sleep(POLL_SECONDS)
    run.send_signal(signal.SIGKILL)
    run.communicate()


def _records(folder: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a run's log so far."""
    log = folder / "log.jsonl"
    text = log.read_text() if log.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
