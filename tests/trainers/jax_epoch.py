"""An epoch through JAX without torch: killed with SIGKILL, resumed on two ranks, every sample once.

    python tests/trainers/jax_epoch.py [--python PATH] [--rows 20000] [--json]

The batches are NumPy arrays (`tensors="numpy"`) that go to `jax.device_put` and a compiled step. A first
process trains alone, writes its loader's state and samples after each step, and is killed in the middle of
the epoch. Two processes continue it as ranks 0 and 1 of 2 with half the batch size. The samples of all three
must be the dataset's, each once, and torch must be importable in none of them. Then one process measures an
epoch of larger rows. Without --python, JAX and what shardkit itself needs are installed into a virtual
environment under ~/.cache, once.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("jax", "numpy", "zstandard", "xxhash", "pydantic", "PyYAML", "rich")
BATCH = 8
KILL_AFTER = 20  # steps
SAMPLES, LENGTH = 600, 65  # a whole number of batches: none goes on into the next epoch
SECONDS = 300.0


def train(options: argparse.Namespace) -> None:
    """One rank, in an environment without torch."""
    import jax

    from shardkit.loaders import StreamingLoader

    if importlib.util.find_spec("torch") is not None:
        raise SystemExit("torch is installed here: this trial is about an environment without it")

    def step(total: Any, tokens: Any, labels: Any) -> Any:
        return total + jax.numpy.sum(tokens) + jax.numpy.sum(labels)

    compiled = jax.jit(step)
    loader = StreamingLoader(
        options.data,
        batch_size=BATCH // options.world_size,
        tensors="numpy",
        labels="shifted",
        dtype="int32",
        return_ids=True,
        rank=options.rank,
        world_size=options.world_size,
    )
    if options.state.exists():
        loader.load_state_dict(json.loads(options.state.read_text())["loader"])
    total, seen, began = jax.numpy.zeros((), "int32"), [], time.perf_counter()
    for batch in loader:
        total = compiled(total, jax.device_put(batch["tokens"]), jax.device_put(batch["labels"]))
        seen += batch["sample_id"].tolist()
        if options.save:
            text = json.dumps({"loader": loader.state_dict(), "seen": seen})
            temporary = options.state.with_suffix(".new")
            temporary.write_text(text)
            temporary.rename(options.state)
            time.sleep(0.01)  # so that the kill comes in the middle
    total.block_until_ready()
    seconds = time.perf_counter() - began
    print(json.dumps({"seen": seen, "rows_per_s": len(seen) / seconds, "jax": jax.__version__}))


def make_data(folder: Path, rows: int, length: int) -> Path:
    from shardkit.formats import mds

    tokens = np.random.default_rng(0).integers(1, 50_000, (rows, length), dtype=np.uint16)
    folder.mkdir()
    mds.write_index(folder, [mds.write_rows_shard(folder, "shard.00000.mds", tokens)])
    return folder


def start(python: str, data: Path, state: Path, *words: str) -> subprocess.Popen[str]:
    command = [python, __file__, "--data", str(data), "--state", str(state), *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate(timeout=SECONDS)
    if process.returncode:
        raise SystemExit(f"a rank ended with code {process.returncode}")
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def trial(python: str, folder: Path, rows: int) -> dict[str, Any]:
    data, state = make_data(folder / "data", SAMPLES, LENGTH), folder / "state.json"
    victim = start(python, data, state, "--save")
    deadline = time.monotonic() + SECONDS
    while not state.exists() or len(json.loads(state.read_text())["seen"]) < BATCH * KILL_AFTER:
        if victim.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the process to be killed ended, or did not get far enough")
        time.sleep(0.005)
    victim.kill()
    victim.wait()
    before = json.loads(state.read_text())["seen"]
    ranks = [start(python, data, state, "--rank", str(rank), "--world-size", "2") for rank in range(2)]
    after = [sample for process in ranks for sample in result(process)["seen"]]
    assert len(before) < SAMPLES, "killed too late"
    seen = before + after
    exactly_once = sorted(seen) == list(range(SAMPLES))
    large = make_data(folder / "large", rows, 4097)
    measured = [result(start(python, large, folder / "none")) for _ in range(5)]
    rate = sorted(each["rows_per_s"] for each in measured)[2]
    return {
        "jax": measured[0]["jax"],
        "killed_after": len(before),
        "resumed_on_ranks": 2,
        "samples": len(seen),
        "exactly_once": exactly_once,
        "rows_per_s": round(rate),
    }


def environment() -> str:
    folder = Path.home() / ".cache" / "shardkit-trainers" / "jax"
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=True)
    return str(python)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", help="of an environment with JAX and without torch")
    parser.add_argument("--rows", type=int, default=20_000, help="of the measured epoch (default: 20000)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    for name, kind in (("--data", str), ("--state", Path), ("--rank", int), ("--world-size", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(rank=0, world_size=1)
    options = parser.parse_args()
    if options.data:
        train(options)
        return
    with tempfile.TemporaryDirectory() as name:
        found = trial(options.python or environment(), Path(name), options.rows)
    print(json.dumps(found) if options.json else "\n".join(f"{key}: {value}" for key, value in found.items()))
    if not found["exactly_once"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
