"""`shardkit demo` proves what it prints, leaves nothing outside its folder, and its proofs can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from shardkit.errors import ShardkitError
from shardkit.formats import mds
from shardkit.tools.demo import corpus, proofs
from shardkit.tools.demo.run import OWN_NAMES, clean_demo, run_demo
from shardkit.writers.execution.digest_cache import worker_variable


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    for name in ("cwd", "home", "tmp"):
        (folder / name).mkdir()
    return folder


@pytest.fixture(scope="module")
def demo(home: Path) -> dict[str, Any]:
    """The demo's JSON, run once as a user would: from the command line, in an empty folder."""
    done = subprocess.run(
        [sys.executable, "-m", "shardkit", "demo", "--megabytes", "2", "--json"],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=home / "cwd",
        env=os.environ
        | worker_variable()  # kept for all builds of the machine, like compiled kernels (conftest.py)
        | {"HOME": str(home / "home"), "TMPDIR": str(home / "tmp"), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.extended  # the demo itself is the first command of CI
def test_every_claim_is_proved_on_a_small_corpus(demo: dict[str, Any]) -> None:
    assert demo["passed"] is True
    assert [proof["passed"] for proof in demo["proofs"]] == [True] * 5
    same, intact, past, once, exact = (proof["figures"] for proof in demo["proofs"])
    assert len(set(same["digests"].values())) == 1
    assert set(same["digests"]) == {"mds", "tar"}
    rows = demo["builds"]["mds"]["samples"]
    assert same["rows"] == rows > 100
    assert intact["problems"] == []
    assert intact["shards"] == sum(build["shards"] for build in demo["builds"].values())
    assert once["problems"] == {}
    assert list(once["walks"].values()) == [2 * rows] * 3
    assert past["pieces"] >= past["rows"] > 50
    assert exact["different_steps"] == []
    assert exact["last_step"] > exact["killed_after_step"] > exact["resumed_from_step"] > 0
    assert exact["last_loss"] < exact["first_loss"]


@pytest.mark.extended  # the demo itself is the first command of CI
def test_the_figures_add_up(demo: dict[str, Any]) -> None:
    funnel = demo["funnel"]
    out = [funnel["kept"], *funnel["dropped"].values(), *funnel["quarantined"].values()]
    for unit in ("documents", "bytes"):
        assert funnel["read"][unit] == sum(count[unit] for count in out)
    assert funnel["read"]["documents"] == demo["corpus"]["documents"]
    assert funnel["read"]["bytes"] == demo["corpus"]["text_bytes"] <= 2_000_000
    assert demo["loader"]["stored_tokens_per_second"] > 0
    assert demo["loader"]["copy_tokens_per_second"] > 0


@pytest.mark.extended  # the demo itself is the first command of CI
def test_nothing_is_left_outside_the_folder_and_no_process_behind(demo: dict[str, Any], home: Path) -> None:
    output = home / "cwd" / "shardkit-demo"
    assert Path(demo["output"]) == output
    assert [path.name for path in (home / "cwd").iterdir()] == ["shardkit-demo"]
    assert list((home / "tmp").rglob("*")) == []
    assert list((home / "home").rglob("*")) == []
    assert {path.name for path in output.iterdir()} <= set(OWN_NAMES)
    commands = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(home) in command]
    clean_demo(output)
    assert not output.exists()


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ShardkitError, match="contains files of something else"):
        run_demo(tmp_path, 1, lambda text: None)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_cleaning_removes_only_what_the_demo_wrote(tmp_path: Path) -> None:
    (tmp_path / "mds").mkdir()
    (tmp_path / "mds" / "index.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    clean_demo(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_the_corpus_is_the_same_each_time_and_no_larger_than_asked(tmp_path: Path) -> None:
    first, documents = corpus.write_corpus(tmp_path / "a", 1_000_000)
    second, _ = corpus.write_corpus(tmp_path / "b", 1_000_000)
    assert first == second
    assert 900_000 < first.text_bytes <= 1_000_000
    assert len({document.id for document in documents}) == len(documents) == first.documents
    for name in (*first.source_files, *first.documentation_files):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def write_dataset(folder: Path, rows: np.ndarray[Any, np.dtype[np.uint16]]) -> Path:
    folder.mkdir()
    mds.write_index(folder, [mds.write_rows_shard(folder, "shard.00000.mds", rows, hashes=("xxh64",))])
    return folder


def test_one_changed_token_fails_the_proof_of_same_rows(tmp_path: Path) -> None:
    rows = np.arange(40, dtype=np.uint16).reshape(10, 4)
    changed = rows.copy()
    changed[7, 2] += 1
    paths = [write_dataset(tmp_path / name, rows) for name in ("a", "b")]
    assert proofs.prove_same_rows(paths).passed is True
    paths.append(write_dataset(tmp_path / "c", changed))
    assert proofs.prove_same_rows(paths).passed is False


def test_one_changed_byte_fails_the_proof_that_shards_are_intact(tmp_path: Path) -> None:
    path = write_dataset(tmp_path / "a", np.arange(120, dtype=np.uint16).reshape(30, 4))
    assert proofs.prove_intact([path]).passed is True
    shard = path / "shard.00000.mds"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    proof = proofs.prove_intact([path])
    assert proof.passed is False
    assert "shard.00000.mds" in proof.evidence


def test_every_world_size_is_walked_by_the_proof_of_exactly_once(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = write_dataset(tmp_path / "a", np.arange(120, dtype=np.uint16).reshape(30, 4))
    proof = proofs.prove_exactly_once(path)
    assert proof.passed is True
    assert proof.figures["walks"] == {"1 x 12": 60, "2 x 6": 60, "3 x 4": 60}


@pytest.mark.parametrize("change", [{"loss": 2.0}, {"sample_ids": [4, 3]}])
def test_one_different_step_fails_the_proof_of_resume(change: dict[str, object]) -> None:
    whole = [{"step": step, "loss": 1.0 / step, "sample_ids": [step, step + 1]} for step in range(1, 9)]
    interrupted = [*whole[:6], *whole[4:]]  # killed after step 6, resumed from step 4
    assert proofs.compare_runs("resume", interrupted, whole, 6, 8).passed is True
    worse = [*interrupted[:-1], interrupted[-1] | change]
    assert proofs.compare_runs("resume", worse, whole, 6, 8).passed is False
    assert proofs.compare_runs("resume", interrupted[:-1], whole, 6, 8).passed is False


def test_without_torch_the_training_is_skipped_with_a_line_on_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_dataset(tmp_path / "a", np.arange(120, dtype=np.uint16).reshape(30, 4))
    monkeypatch.setitem(sys.modules, "torch", None)
    for proof in (proofs.prove_exactly_once(path), proofs.prove_resume(path, tmp_path / "runs", 120)):
        assert proof.passed is None
        assert "pip install 'shardkit[torch]'" in proof.evidence
    assert proofs.measure_loader(path) is None
