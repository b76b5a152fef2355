"""Datasets of many shards within the usual limits of a process: descriptors and memory maps."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit.datasets import opened as opened_module
from shardkit.datasets.dataset import open_dataset
from shardkit.files import open_maps
from shardkit.formats import mds, tar
from shardkit.loaders import StreamingLoader
from shardkit.loaders import producer as groups
from shardkit.loaders.config import grouped
from shardkit.manifest import ShardInfo
from shardkit.storage.s3 import S3Store
from shardkit.storage.store import StorageOptions
from support.remote_harness import put_folder
from support.s3_moto import s3_server

DESCRIPTORS = 256
ROWS = 2  # of a shard

_READ = """
import gc, json, resource, sys
from pathlib import Path

resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
from shardkit.loaders import Stream, StreamingLoader


def mapped():
    return Path("/proc/self/maps").read_text().count("shard")


urls, options = json.loads(sys.argv[1])
streams = [Stream(url, 1, name=url) for url in urls]
loader = StreamingLoader(streams, rank=0, world_size=1, return_ids=True, **options)
gc.disable()
seen = 0
for batch in loader:
    seen += len(batch["tokens"])
    most = mapped()
    if seen >= len(loader) * options["batch_size"]:
        break
loader.close()
print(seen, most > 0, mapped())
""".replace("DESCRIPTORS", str(DESCRIPTORS))


def make(folder: Path, kind: str, shards: int) -> Path:
    """A dataset of many shards: the same file by many names, which costs no disk."""
    folder.mkdir()
    rows = np.arange(ROWS * 8, dtype=np.uint16).reshape(ROWS, 8)
    info: ShardInfo
    if kind == "mds":
        info = mds.write_rows_shard(folder, "shard.mds", rows)
    else:
        info = tar.write_rows_shard(folder, "shard.tar", rows, key_start=0)
    infos = []
    for number in range(shards):
        name = f"shard-{number:05d}.{kind}"
        (folder / name).hardlink_to(folder / info.raw.basename)
        infos.append(replace(info, raw=replace(info.raw, basename=name)))
    (folder / info.raw.basename).unlink()
    (mds.write_index if kind == "mds" else tar.write_shard_list)(folder, infos)
    return folder


def read(urls: list[Path] | list[str], **options: object) -> list[str]:
    """What another process with few descriptors says: samples of an epoch, if maps were open, maps left."""
    request = json.dumps([list(map(str, urls)), {"batch_size": 64, "seed": 3} | options])
    done = subprocess.run(
        [sys.executable, "-c", _READ, request], capture_output=True, text=True, timeout=300, check=False
    )
    assert not done.returncode, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("kind", "shards"),
    [
        ("mds", 1536),
        pytest.param("mds", 5024, marks=pytest.mark.extended),
        pytest.param("tar", 1536, marks=pytest.mark.extended),
    ],
)
def test_far_more_shards_than_descriptors_are_read_and_unmapped_by_close(
    tmp_path: Path, kind: str, shards: int
) -> None:
    assert read([make(tmp_path / "data", kind, shards)]) == [str(shards * ROWS), "True", "0"]


@pytest.mark.extended
def test_a_mixture_of_many_datasets_is_read_with_few_descriptors(tmp_path: Path) -> None:
    urls = [make(tmp_path / f"stream{number}", "mds", 256) for number in range(20)]
    assert read(urls) == [str(20 * 256 * ROWS), "True", "0"]


@pytest.mark.extended
def test_shards_of_a_cache_folder_hold_no_descriptors(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 9999, (512, ROWS, 8)).astype(np.uint16)
    infos = [mds.write_rows_shard(tmp_path, f"shard-{n:05d}.mds", some) for n, some in enumerate(rows)]
    mds.write_index(tmp_path, infos)
    with s3_server() as server:
        url = f"s3://{server.new_bucket()}/data"
        put_folder(tmp_path, S3Store(url, StorageOptions()))
        cache = tmp_path / "cache"
        assert read([url], cache_dir=str(cache)) == [str(512 * ROWS), "True", "0"]


def test_all_datasets_of_a_process_hold_its_bound_on_maps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened_module, "MAX_MAPS", open_maps() + 6)
    with ExitStack() as stack:
        datasets = [stack.enter_context(open_dataset(make(tmp_path / f"{n}", "mds", 4))) for n in range(4)]
        held = datasets[0].shard(0)
        for number in range(4):
            for dataset in datasets:
                dataset.shard(number)
                assert open_maps() <= opened_module.MAX_MAPS
        assert "tokens" in held.sample(0)  # forgotten, yet whole for who holds it
    del held
    assert not [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]


def test_plans_of_datasets_of_very_many_shards_are_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "data", "mds", 64)
    options: dict[str, Any] = {"batch_size": 4, "seed": 3, "rank": 0, "world_size": 1, "return_ids": True}
    with StreamingLoader(folder, **grouped(options)) as loader:
        expected = [batch["sample_id"].tolist() for batch in loader]
    monkeypatch.setattr(groups, "MAX_PLAN_SHARDS", 8)
    before = open_maps()
    monkeypatch.setattr(opened_module, "MAX_MAPS", 0)  # nothing stays open but by the plans
    with StreamingLoader(folder, **grouped(options)) as loader:
        for batch, ids in zip(loader, expected, strict=True):
            assert batch["sample_id"].tolist() == ids
            assert open_maps() - before <= 2 * 8
    assert open_maps() == before
