"""`shardkit simulate`: a dataset's index or none, sweeps, pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardkit.cli.main import main
from support.small_dataset import make_dataset

SMALL = ["simulate", "--samples", "4000", "--shards", "50", "--sample-bytes", "1KB", "--steps", "8"]


def test_a_run_is_reported_in_a_table_and_as_json(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--nodes", "17"]) == 0
    out, err = capfd.readouterr()
    for word in ("first batch", "stalled steps", "hit rate", "read / used", "17 nodes x 8 ranks"):
        assert word in out
    assert "note: 8 of 17 nodes were simulated" in err
    assert main([*SMALL, "--nodes", "17", "--sample-nodes", "17", "--json"]) == 0
    out, err = capfd.readouterr()
    figures = json.loads(out)
    assert (figures["steps"], figures["nodes_simulated"]) == (8, 17)
    assert figures["used_bytes_per_node"] > 8 * 63 * 1000
    assert "nodes were simulated" not in err


def test_only_the_index_of_a_dataset_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = make_dataset(tmp_path / "data", shards=6)
    for shard in (tmp_path / "data").glob("*.mds"):
        shard.unlink()
    command = ["simulate", str(tmp_path / "data"), "--gpus-per-node", "1", "--batch-size", "4"]
    assert main([*command, "--steps", "30", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["cached_bytes_per_node"] >= int(manifest.raw_bytes.sum())


def test_a_sweep_runs_every_combination(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "sweep.png"
    command = [*SMALL, "--sweep", "lanes=4,16", "cache=20KB,1GB", "--plot", str(picture), "--json"]
    assert main(command) == 0
    swept = json.loads(capsys.readouterr().out)
    assert swept["swept"] == ["lanes", "cache"]
    assert [(run["lanes"], run["cache"]) for run in swept["runs"]] == [
        ("4", "20 KB"), ("4", "1 GB"), ("16", "20 KB"), ("16", "1 GB"),
    ]  # fmt: skip
    assert swept["runs"][0]["hit_rate"] < swept["runs"][1]["hit_rate"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([*SMALL, "--sweep", "lanes=4,16"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_picture_of_one_run_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main([*SMALL, "--plot", str(tmp_path / "run.svg"), "--quiet"]) == 0
    assert (
        "wait of a step (ms)" in (tmp_path / "run.svg").read_text() or (tmp_path / "run.svg").stat().st_size
    )
    assert "first batch" in capsys.readouterr().out
