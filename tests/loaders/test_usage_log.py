"""Usage logs: what the loop was given is in the file, whatever ends the process; damage is named."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from shardkit.datasets.dataset import open_dataset
from shardkit.errors import ShardError
from shardkit.formats.usage_log import MAGIC, scan
from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.config import grouped
from shardkit.loaders.pytorch import StreamingDataLoader, StreamingDataset
from shardkit.storage import open_store
from support.audit_runs import log_report
from support.loader_data import make_dataset
from support.remote_harness import fresh_url, put_folder


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "mds", "mds", samples=53)


def loader_of(path: Path, logs: Path, **options: Any) -> StreamingLoader:
    arguments: dict[str, Any] = {
        "batch_size": 5,
        "rank": 1,
        "world_size": 2,
        "usage_log": logs,
        "return_ids": True,
    } | options
    return StreamingLoader(str(path), **grouped(arguments))


def only_file(logs: Path) -> Path:
    [file] = logs.iterdir()
    return file


def test_the_log_holds_what_the_loop_was_given_at_the_moment_it_was(path: Path, tmp_path: Path) -> None:
    loader = loader_of(path, tmp_path / "logs", tail="pad")
    assert not (tmp_path / "logs").exists()  # nothing is written before the first step
    given, starts = [], []
    for epoch in range(2):
        for number, batch in enumerate(loader):
            given.append(batch["sample_id"].numpy())
            starts.append(epoch * 53 + number * 10)
            [section] = scan(only_file(tmp_path / "logs")).sections
            assert section.count == len(given)
    positions, ids = section.read(0, section.count)
    assert positions.tolist() == starts
    assert np.array_equal(ids, np.stack(given))
    assert (ids == -1).any()
    assert section.head.batch_size == 5
    assert (section.head.rank, section.head.world_size, section.head.position) == (1, 2, 0)
    assert not section.ended
    loader.close()
    assert scan(only_file(tmp_path / "logs")).sections[0].ended


def test_relative_paths_are_of_the_folder_in_which_the_loader_was_made(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("made", "moved"):
        (tmp_path / name).mkdir()
    url = fresh_url()
    put_folder(path, open_store(url))
    monkeypatch.chdir(tmp_path / "made")
    loader = StreamingLoader(url, batch_size=8, usage_log="logs", cache_dir="cache", cache_bytes="1MiB")
    monkeypatch.chdir(tmp_path / "moved")
    assert len(list(loader)) == len(loader)
    loader.close()
    assert {file.name for file in (tmp_path / "made").iterdir()} == {"logs", "cache"}
    assert not any((tmp_path / "moved").iterdir())


def test_loading_a_state_begins_a_section(path: Path, tmp_path: Path) -> None:
    loader = loader_of(path, tmp_path)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    next(iterator)
    loader.load_state_dict(state)
    next(iter(loader))
    sections = scan(only_file(tmp_path)).sections
    assert [(one.head.position, one.first, one.last, one.count) for one in sections] == [
        (0, 0, 30, 4),
        (30, 30, 30, 1),
    ]
    assert sections[0].head.settings == sections[1].head.settings


def test_a_log_cut_anywhere_keeps_the_whole_records_before(path: Path, tmp_path: Path) -> None:
    list(islice(loader_of(path, tmp_path), 4))
    file = only_file(tmp_path)
    whole = file.read_bytes()
    record = 8 + 9 + 5 * 4
    head = len(whole) - 4 * record
    for size in [*range(len(MAGIC) + 1), head - 1, head, *range(head + 1, len(whole) + 1)]:
        file.write_bytes(whole[:size])
        found = scan(file)
        kept = found.sections[0].count if found.sections else 0
        assert kept == max(0, size - head) // record
        assert found.damage is None
        at = len(MAGIC) if size < head and size > len(MAGIC) else 0 if size < head else head + kept * record
        assert found.cut == (size - at if size not in (0, len(MAGIC)) else 0)
    file.write_bytes(whole + bytes(500))  # as a file system may leave it after a crash of the machine
    found = scan(file)
    assert (found.cut, found.damage, found.sections[0].count) == (500, None, 4)


def test_damage_in_the_middle_is_named_and_never_read(path: Path, tmp_path: Path) -> None:
    list(islice(loader_of(path, tmp_path), 4))
    file = only_file(tmp_path)
    whole = file.read_bytes()
    record = 8 + 9 + 5 * 4
    damaged = len(whole) - 3 * record
    for offset in range(damaged, damaged + record):
        changed = bytearray(whole)
        changed[offset] ^= 0x10
        file.write_bytes(changed)
        found = scan(file)
        assert found.sections[0].count == 1
        assert found.damage or found.cut  # a length that points behind the end looks like a cut
        if offset >= damaged + 4:
            assert f"byte {damaged:,}: the checksum of a record is wrong" in (found.damage or "")
    file.write_bytes(whole[: -2 * record] + whole[-record:] + whole[-2 * record : -record])
    assert "does not follow" in (scan(file).damage or "")
    report = log_report(tmp_path, open_dataset(path))
    assert "log" in report.findings.counts
    file.write_bytes(b"something else")
    with pytest.raises(ShardError, match="is not a usage log"):
        scan(file)


def test_a_log_that_cannot_be_written_does_not_stop_training(path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    loader = loader_of(path, tmp_path / "file" / "logs")
    with pytest.warns(RuntimeWarning, match="cannot write the usage log") as caught:
        assert len(list(loader)) == 6
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.raises(ValueError, match=r"usage_log: .* give a path on this machine"):
        loader_of(path, "s3://bucket/logs")  # type: ignore[arg-type]


def test_a_disk_that_fills_up_leaves_whole_records(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = loader_of(path, tmp_path)
    batches = iter(loader)
    next(batches)
    written: list[int] = []

    def full(descriptor: int, data: bytes) -> int:
        if written:
            raise OSError(28, "No space left on device")
        written.append(real(descriptor, data[:7]))
        return written[0]

    real = os.write
    monkeypatch.setattr("shardkit.loaders.usage_log.os.write", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        next(batches)
    next(batches)
    found = scan(only_file(tmp_path))
    assert (found.sections[0].count, found.cut) == (1, 7)


def test_ids_of_large_datasets_take_eight_bytes() -> None:
    from shardkit.formats.usage_log import id_type

    assert [id_type(n).itemsize for n in (1, (1 << 32) - 2, (1 << 32) - 1, 1 << 40)] == [4, 4, 8, 8]


@pytest.mark.extended
@pytest.mark.parametrize("mixed", [False, True])
def test_what_a_loop_receives_of_workers_is_logged(path: Path, tmp_path: Path, mixed: bool) -> None:
    other = make_dataset(tmp_path / "other", "mds", samples=31)
    data: Any = [Stream(path, 2), Stream(other, 1)] if mixed else str(path)
    options: dict[str, Any] = {"batch_size": 4, "tail": "pad", "usage_log": tmp_path / "logs"}
    for rank in range(2):
        dataset = StreamingDataset(data, rank=rank, world_size=2, return_ids=False, **grouped(options))
        loader = StreamingDataLoader(dataset, num_workers=2)
        for number, batch in enumerate(loader):
            assert not {"sample_id", "stream_id"} & set(batch)
            if number == 3:
                break
        assert sum(1 for _ in loader) > 2  # the rest of the epoch, then a whole one
        assert sum(1 for _ in loader) > 5
        loader.close()
    report = log_report(tmp_path / "logs", *map(open_dataset, [path, other] if mixed else [path]))
    assert report.ok, [str(finding) for finding in report.findings.kept]
    assert report.walks[0].samples == 2 * (84 if mixed else 53)
    assert report.runs[0]["steps"] == 4
    plain = DataLoader(
        StreamingDataset(data, rank=0, world_size=1, **grouped(options)), batch_size=None, num_workers=1
    )
    with pytest.raises(ValueError, match="use StreamingDataLoader"):
        next(iter(plain))
