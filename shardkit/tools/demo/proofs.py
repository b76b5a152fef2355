"""The demo's claims about a finished dataset, each computed from the files that were just built.

Rows are compared by a digest of all tokens in dataset order. Exactly-once is counted: every sample id of an
epoch, as each of R ranks receives it. The past of a token is followed back: provenance names a source
record, and that record's text must hold the decoded tokens.

One claim of the demo, whether it held, and the figures that say so.

How fast the loader is, against a plain copy of the same bytes in the same run.

Each figure is the best of a few rounds, taken in turns, so that a neighbour's burst of work hits all alike.
The loader gathers single rows in shuffled order into new batches; the copy moves all rows in one piece.

Proof that a killed training run continues exactly: same samples, same losses, bit by bit.

One run is killed with SIGKILL between two checkpoints and started again; another is never interrupted. Each
logs every step. The steps that the killed run repeats after its checkpoint must come out equal, too.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.datasets.dataset import Dataset, open_dataset
from shardkit.datasets.verify import verify
from shardkit.errors import ShardkitError
from shardkit.units import format_bytes

__all__ = [
    "NO_TORCH",
    "Proof",
    "compare_runs",
    "measure_loader",
    "prove_exactly_once",
    "prove_intact",
    "prove_provenance",
    "prove_resume",
    "prove_same_rows",
]

NO_TORCH = "torch is missing: pip install 'shardkit[torch]' and run the demo again"


@dataclass(frozen=True, slots=True)
class Proof:
    """`passed` is None when the claim could not be tried; `evidence` then says what is missing."""

    name: str
    passed: bool | None
    evidence: str
    figures: Mapping[str, object] = field(default_factory=dict)


GLOBAL_BATCH = 12  # divides by 1, 2 and 3 ranks

SEED = 17


def prove_same_rows(paths: Sequence[Path]) -> Proof:
    """All datasets hold the same rows of tokens in the same order, whatever their formats."""
    digests = {}
    rows = tokens = 0
    for path in paths:
        with open_dataset(path) as dataset:
            digests[path.name] = rows_digest(dataset)
            rows, tokens = len(dataset), len(dataset) * (dataset.sequence_length or 0)
    same = len(set(digests.values())) == 1
    evidence = f"{rows:,} rows, {tokens:,} tokens, blake2b {next(iter(digests.values()))[:12]} from each"
    if not same:
        evidence = "digests differ: " + ", ".join(f"{name} {digest[:12]}" for name, digest in digests.items())
    name = f"{' and '.join(digests)} hold the same rows"
    return Proof(name, same, evidence, {"rows": rows, "tokens": tokens, "digests": digests})


def rows_digest(dataset: Dataset) -> str:
    """Hex blake2b-128 of all tokens, row after row in dataset order."""
    state = hashlib.blake2b(digest_size=16)
    column = dataset.token_column
    assert column is not None, "the demo builds packed rows"
    for number in range(len(dataset.manifest.shards)):
        rows = dataset.shard(number).fixed_rows(column)
        assert rows is not None, "packed rows have a constant stride"
        state.update(np.ascontiguousarray(rows).tobytes())
    return state.hexdigest()


def prove_intact(paths: Sequence[Path]) -> Proof:
    """All shards match the hashes in their index, and all counts agree, as `shardkit verify` checks."""
    reports = [verify(path) for path in paths]
    shards, size = sum(report.hashed for report in reports), sum(report.bytes for report in reports)
    problems = [f"{problem.file}: {problem.problem}" for report in reports for problem in report.problems]
    evidence = f"hashes and structure of {shards} shards, {format_bytes(size)}"
    name = "every shard is what its index says"
    figures = {"shards": shards, "bytes": size, "problems": problems}
    return Proof(name, not problems, "; ".join(problems[:3]) or evidence, figures)


def prove_exactly_once(path: Path, samples: int, world_sizes: Sequence[int] = (1, 2, 3)) -> Proof:
    """One epoch delivers each sample once, and the same global batches, for every number of ranks."""
    name = f"every sample exactly once, on {', '.join(map(str, world_sizes[:-1]))} or {world_sizes[-1]} ranks"
    if importlib.util.find_spec("torch") is None:
        return Proof(name, None, NO_TORCH)
    counts, batches = {}, set()
    for world_size in world_sizes:
        ranks = [_epoch_ids(path, rank, world_size) for rank in range(world_size)]
        steps = [np.sort(np.concatenate(parts)) for parts in zip(*ranks, strict=True)]
        seen = np.bincount(np.concatenate(steps), minlength=samples)
        counts[world_size] = {
            "samples": int(seen.sum()),
            "missing": int((seen == 0).sum()),
            "repeated": int((seen > 1).sum()),
            "unknown": len(seen) - samples,
        }
        batches.add(hashlib.blake2b(b"|".join(step.tobytes() for step in steps)).hexdigest())
    expected = {"samples": samples, "missing": 0, "repeated": 0, "unknown": 0}
    passed = len(batches) == 1 and all(count == expected for count in counts.values())
    evidence = f"{samples:,} ids counted for each; the same global batches every time"
    if not passed:
        evidence = f"counts by ranks: {counts}; global batches {'equal' if len(batches) == 1 else 'differ'}"
    return Proof(name, passed, evidence, {"world_sizes": counts})


def _epoch_ids(path: Path, rank: int, world_size: int) -> list[npt.NDArray[np.int64]]:
    """Sample ids of each of a rank's batches of one epoch, without the padding that fills the last one."""
    from shardkit.loaders import StreamingLoader

    loader = StreamingLoader(
        path,
        batch_size=GLOBAL_BATCH // world_size,
        seed=SEED,
        tail="pad",
        rank=rank,
        world_size=world_size,
        return_ids=True,
    )
    return [batch["sample_id"][~batch["is_padding"]].numpy() for batch in loader]


def prove_provenance(path: Path, recipe_folder: Path, tokenizer_file: Path, rows: int = 200) -> Proof:
    """Rows spread over the dataset decode to the text of the source records that provenance names."""
    from tokenizers import Tokenizer

    from shardkit.tools.trace.table import ProvenanceTable, pieces_of

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    sources: dict[str, list[str]] = {}
    pieces = 0
    wrong = []
    with open_dataset(path) as dataset:
        samples = np.unique(np.linspace(0, len(dataset) - 1, rows).astype(int)).tolist()
        for piece in pieces_of(ProvenanceTable(dataset).of_rows(samples)):
            tokens = np.asarray(dataset[piece.sample_id][dataset.token_column or ""])
            if piece.file not in sources:
                sources[piece.file] = read_records(recipe_folder / piece.file)
            ids = tokens[piece.token_start : piece.token_end].tolist()
            # A document longer than a row may be cut inside a character: that part decodes to U+FFFD.
            text = tokenizer.decode(ids, skip_special_tokens=True).strip("\ufffd")
            pieces += 1
            if text not in sources[piece.file][piece.record]:
                wrong.append(f"sample {piece.sample_id}, tokens {piece.token_start}:{piece.token_end}")
    name = "every token leads back to its source record"
    figures = {"rows": len(samples), "pieces": pieces, "wrong": wrong[:10]}
    if wrong or not pieces:
        return Proof(name, False, f"{len(wrong)} of {pieces} pieces differ: {'; '.join(wrong[:3])}", figures)
    evidence = f"{pieces:,} pieces of {len(samples)} rows decoded, each found in the record that is named"
    return Proof(name, True, evidence, figures)


def read_records(file: Path) -> list[str]:
    """The texts of one of the demo's input files, read apart from the build."""
    if file.suffix == ".parquet":
        import pyarrow.parquet as pq

        texts: list[str] = pq.read_table(file, columns=["text"]).column("text").to_pylist()
        return texts
    with gzip.open(file, "rt", encoding="utf-8", newline="\n") as lines:
        return [json.loads(line)["text"] for line in lines]


ROUNDS = 5

ROUND_TOKENS = 40_000_000

BATCH_SIZE = 8

MAX_COPY_BYTES = 1 << 28


def measure_loader(path: Path) -> dict[str, float] | None:
    """Tokens per second of the loader as stored and as int64, and of a copy as stored; None without torch."""
    if importlib.util.find_spec("torch") is None:
        return None
    from shardkit.loaders import StreamingLoader

    with open_dataset(path) as dataset:
        rows = _rows_in_memory(dataset)
    length: int = rows.shape[1]
    copies = max(1, ROUND_TOKENS // rows.size)
    batches = max(1, copies * rows.size // (BATCH_SIZE * length))

    def load(dtype: str) -> Callable[[], int]:
        loader = StreamingLoader(path, batch_size=BATCH_SIZE, seed=17, endless=True, dtype=dtype)

        def run() -> int:
            for _ in zip(range(batches), loader, strict=False):
                pass
            return batches * BATCH_SIZE * length

        return run

    target = np.empty_like(rows)
    copied: int = copies * rows.size

    def copy() -> int:
        for _ in range(copies):
            np.copyto(target, rows)
        return copied

    best: dict[str, float] = {}
    for _ in range(ROUNDS):
        for name, run in (("stored", load("stored")), ("int64", load("int64")), ("copy", copy)):
            start = time.perf_counter()
            tokens = run()
            rate = tokens / (time.perf_counter() - start)
            best[name] = max(best.get(name, 0.0), rate)
    return {f"{name}_tokens_per_second": rate for name, rate in best.items()}


def _rows_in_memory(dataset: Dataset) -> npt.NDArray[np.generic]:
    """The dataset's rows as one array, of at most MAX_COPY_BYTES."""
    shards = []
    size = 0
    for number in range(len(dataset.manifest.shards)):
        rows = dataset.shard(number).fixed_rows(dataset.token_column or "")
        assert rows is not None, "packed rows have a constant stride"
        shards.append(rows)
        size += rows.nbytes
        if size > MAX_COPY_BYTES:
            break
    return np.concatenate(shards)


CHECKPOINT_EVERY = 5

KILL_AFTER_STEP = 2 * CHECKPOINT_EVERY + 2  # two steps past the second checkpoint

MORE_STEPS = 10  # that both runs train beyond the kill

FAR_STEPS = 1_000_000  # the killed run must not end by itself

RUN_SECONDS = 300  # each takes a few seconds; a hang must not last for ever

POLL_SECONDS = 0.005


def prove_resume(data: Path, folder: Path, vocabulary: int) -> Proof:
    """Train, kill, resume and compare with an uninterrupted run; both leave their files under `folder`."""
    name = "resume after SIGKILL is exact"
    if importlib.util.find_spec("torch") is None:
        return Proof(name, None, NO_TORCH)
    killed, whole = folder / "killed", folder / "uninterrupted"
    killed.mkdir(parents=True)
    whole.mkdir()
    _train_and_kill(data, killed, vocabulary)
    kill_step = max(record["step"] for record in _records(killed))
    last_step = kill_step + MORE_STEPS
    runs = [_start(data, run, vocabulary, last_step) for run in (killed, whole)]
    try:
        for run in runs:
            _wait(run)
    finally:
        _kill_all(runs)
    return compare_runs(name, _records(killed), _records(whole), kill_step, last_step)


def compare_runs(
    name: str, interrupted: list[dict[str, Any]], whole: list[dict[str, Any]], kill_step: int, last_step: int
) -> Proof:
    """The proof from both logs: `interrupted` holds what ran before the kill, then what ran after it."""
    expected = {record["step"]: record for record in whole}
    different = sorted({r["step"] for r in interrupted if r != expected.get(r["step"])})
    complete = sorted({r["step"] for r in interrupted}) == sorted(expected) == list(range(1, last_step + 1))
    resumed = interrupted[kill_step:]  # the first run logged each step up to the kill once
    figures = {
        "killed_after_step": kill_step,
        "resumed_from_step": resumed[0]["step"] - 1 if resumed else None,
        "last_step": last_step,
        "steps_compared": len(interrupted),
        "steps_repeated": len(interrupted) - len({r["step"] for r in interrupted}),
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


def _train_and_kill(data: Path, folder: Path, vocabulary: int) -> None:
    run = _start(data, folder, vocabulary, FAR_STEPS)
    deadline = time.monotonic() + RUN_SECONDS
    try:
        while len(_records(folder)) < KILL_AFTER_STEP:
            if run.poll() is not None or time.monotonic() > deadline:
                _kill_all([run])
                raise ShardkitError(f"the training run did not reach step {KILL_AFTER_STEP}:\n{_errors(run)}")
            time.sleep(POLL_SECONDS)
        run.send_signal(signal.SIGKILL)
        run.wait()
    finally:
        _kill_all([run])


def _start(data: Path, folder: Path, vocabulary: int, steps: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "shardkit.tools.demo.train", str(data), "--folder", str(folder)]
    command += ["--vocabulary", str(vocabulary), "--steps", str(steps), "--every", str(CHECKPOINT_EVERY)]
    # One thread sums in one order; and torch must not leave its cache folder in the system's.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch")}
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    )


def _wait(run: subprocess.Popen[str]) -> None:
    try:
        _, errors = run.communicate(timeout=RUN_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise ShardkitError(f"the training run took more than {RUN_SECONDS} seconds") from error
    if run.returncode != 0:
        raise ShardkitError(f"the training run failed with exit code {run.returncode}:\n{errors[-2000:]}")


def _kill_all(runs: list[subprocess.Popen[str]]) -> None:
    for run in runs:
        if run.poll() is None:
            run.kill()
            run.wait()


def _errors(run: subprocess.Popen[str]) -> str:
    assert run.stderr is not None
    return run.stderr.read()[-2000:]


def _records(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's log so far."""
    log = folder / "log.jsonl"
    text = log.read_text() if log.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
