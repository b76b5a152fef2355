"""What bench reports agrees with what the loader delivered."""

from __future__ import annotations

import json
import sys
import uuid
from pathlib import Path

import pytest

from shardkit.storage.memory import MemoryStore
from support.remote_harness import put_folder
from support.small_dataset import make_dataset

sys.path.insert(0, str(Path(__file__).resolve().parent / "benchmarks"))

from bench_dataset import main, measure_speed


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speed") / "data"
    make_dataset(folder)
    return folder


@pytest.mark.extended
def test_rates_agree_with_each_other(dataset: Path) -> None:
    heard: list[tuple[str, int]] = []
    speed = measure_speed(
        dataset, batch_size=4, seconds=0.05, runs=2, progress=lambda name, run: heard.append((name, run))
    )
    [files] = speed.passes
    assert (files.name, files.runs, speed.samples) == ("files", 2, 40)
    assert heard == [("files", 0), ("files", 1), ("files", 2)]  # the first warms
    assert files.tokens_per_second == pytest.approx(4 * files.samples_per_second)  # rows of 4 tokens
    assert files.bytes_per_second == pytest.approx(8 * (files.tokens_per_second or 0))  # int64
    assert files.copy_ratio == pytest.approx(files.bytes_per_second / speed.copy_bytes_per_second)
    assert 0 < files.wait_p50_seconds <= files.wait_p99_seconds
    assert files.fetched_bytes == 0
    assert (files.cpu_seconds_per_token or 0) > 0


@pytest.mark.extended
def test_a_remote_dataset_is_fetched_once_and_then_read_from_the_cache(dataset: Path, tmp_path: Path) -> None:
    url = f"memory://speed-{uuid.uuid4().hex}/data"
    put_folder(dataset, MemoryStore(url))
    speed = measure_speed(url, batch_size=8, seconds=2.0, runs=1, dtype="stored", cache_dir=tmp_path)
    cold, warm = speed.passes
    assert [cold.name, warm.name] == ["no cache", "from cache"]
    stored = sum(path.stat().st_size for path in dataset.glob("*.mds"))
    assert cold.fetched_bytes - warm.fetched_bytes >= stored  # both read the index
    assert cold.batches == 5, "one epoch"
    assert list(tmp_path.iterdir()) == [], "the cache is gone"


def test_the_program_prints_a_table_or_json(
    dataset: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["bench_dataset.py", str(dataset), "--runs", "1", "--seconds", "0.02", "--batch-size", "2"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--json"])
    main()
    [files] = json.loads(capsys.readouterr().out)
    assert files["tokens_per_second"] > 0
    monkeypatch.setattr(sys, "argv", arguments)
    main()
    assert "tokens/s" in capsys.readouterr().out


def test_impossible_settings_are_refused(dataset: Path) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        measure_speed(dataset, runs=0)
