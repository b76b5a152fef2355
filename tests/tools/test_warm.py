"""A cache that was filled before a run leaves nothing to fetch for the shards that the run reads first."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardkit as sk
from shardkit.cli.main import main
from shardkit.loaders import Run, Stream, StreamingLoader
from shardkit.storage.memory import MemoryBody, MemoryStore
from shardkit.storage.store import StoreError
from shardkit.storage.url import open_store
from support.loader_data import parts, token_rows
from support.remote_harness import Remote, fresh_url, put_folder, write_hashed
from support.s3_moto import S3Server, s3_server

ROWS, SHARDS, WORLD = 512, 32, 4
QUIET = Run(stop_together=False)


class Counted(MemoryStore):
    """A memory store that lists the objects whose bytes were requested, and may fail at one."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.requested: list[str] = []
        self.failing = ""

    def open(
        self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None
    ) -> MemoryBody:
        self.requested.append(key)
        if self.failing and self.failing in key:
            raise StoreError(self.url, "is broken", status=403)
        return super().open(key, start, stop, version=version)

    @property
    def shards(self) -> list[str]:
        return [key for key in self.requested if key.startswith(("shard", "data"))]


@pytest.fixture(scope="module", params=["mds", "mds_zstd", "mds_foreign"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("warm") / request.param
    write_hashed(path, request.param, token_rows(ROWS, 32), parts(ROWS, SHARDS))
    return path


@pytest.fixture
def store(folder: Path) -> Counted:
    store = Counted(fresh_url())
    put_folder(folder, store)
    store.requested.clear()
    return store


def opened(store: Counted, cache: Path, capacity: int | None = None) -> Any:
    from shardkit.cache.folder import CacheFolder

    dataset = Remote.open(store, CacheFolder(cache, capacity)).dataset
    store.requested.clear()
    return dataset


def test_a_node_that_was_warmed_makes_no_request_for_shards(store: Counted, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    report = sk.warm(
        opened(store, cache), batch_size=4, world_size=WORLD, cache_dir=cache, run=QUIET, progress=False
    )
    assert report.shards == report.fetched == SHARDS
    assert report.covers is None
    assert len(set(store.shards)) == SHARDS
    with StreamingLoader(opened(store, cache), batch_size=4, rank=1, world_size=WORLD, run=QUIET) as loader:
        assert sum(1 for _ in loader) == ROWS / 4 / WORLD
    assert store.shards == []
    again = sk.warm(
        opened(store, cache), batch_size=4, world_size=WORLD, cache_dir=cache, run=QUIET, progress=False
    )
    assert (again.fetched, again.fetched_bytes, again.shards) == (0, 0, SHARDS)
    assert store.shards == []


@pytest.mark.parametrize("step", [0, 9, 25])
@pytest.mark.parametrize("how", ["step", "state"])
def test_from_any_step_the_first_shards_of_the_nodes_ranks_are_there(
    store: Counted, tmp_path: Path, step: int, how: str
) -> None:
    """With room for a third of the shards, the steps before `covers` need no other."""
    cache, ranks = tmp_path / "cache", (2, 3)
    whole = sum(info.raw.bytes for info in opened(store, tmp_path / "other").manifest.shards)
    start: dict[str, Any] = {"step": step}
    if how == "state":
        with StreamingLoader(
            opened(store, tmp_path / "other"), batch_size=4, rank=0, world_size=WORLD, seed=5, run=QUIET
        ) as loader:
            loader.seek(step * 4 * WORLD)
            start = {"state": json.loads(json.dumps(loader.state_dict()))}
    if how == "step":
        start["seed"] = 5
    report = sk.warm(
        opened(store, cache), batch_size=4, world_size=WORLD, ranks=ranks, cache_dir=cache,
        most_bytes=whole // 3, run=QUIET, progress=False, **start,
    )  # fmt: skip
    assert 1 <= report.shards < SHARDS / 2
    assert report.bytes <= whole // 3
    assert report.position == step * 4 * WORLD
    assert report.covers is not None
    steps = (report.covers - report.position) // (4 * WORLD)
    wanted = opened(store, cache)
    for rank in ranks:
        with StreamingLoader(wanted, batch_size=4, rank=rank, world_size=WORLD, seed=5, run=QUIET) as loader:
            loader.seek(report.position)
            names = [wanted.manifest.shards[n].stored.basename for n in needed(loader, steps)]
            missing = [name for name in names if not wanted.shards.is_there(number_of(wanted, name))]
            assert missing == []


def needed(loader: StreamingLoader, steps: int) -> list[int]:
    """The shards of the next steps of a rank, by its order and not by its cache."""
    from shardkit.order.arrangement import Arrangement
    from shardkit.order.balance import planned_steps
    from shardkit.order.state import LoaderState

    if not steps:
        return []
    settings = LoaderState.from_dict(loader.state_dict()).settings
    arrangement = Arrangement(settings, [loader.dataset.stream_sizes("", None)])
    planned = planned_steps(loader.plan, None, arrangement.order, loader.position, steps)
    return sorted(set(planned.shard.ravel().tolist()))


def number_of(dataset: Any, name: str) -> int:
    return [info.stored.basename for info in dataset.manifest.shards].index(name)


def test_an_interrupted_warming_continues_and_an_error_names_the_object(
    store: Counted, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    arguments: dict[str, Any] = {"batch_size": 4, "cache_dir": cache, "run": QUIET, "progress": False}
    dataset = opened(store, cache)
    victim = dataset.manifest.shards[17].stored.basename
    store.failing = victim
    with pytest.raises(StoreError, match="is broken"):
        sk.warm(dataset, **arguments)
    store.failing = ""
    had = SHARDS - len(opened(store, cache).shards.cache.contents())
    report = sk.warm(opened(store, cache), **arguments)
    assert report.shards == SHARDS
    assert report.fetched == had


def test_room_is_made_for_the_run_and_never_more_than_the_cache_has(store: Counted, tmp_path: Path) -> None:
    """The cache has room for a quarter, and is full with shards that another order needed first."""
    cache = tmp_path / "cache"
    dataset = opened(store, cache)
    capacity = max(dataset.shards.known_size(n) for n in range(SHARDS)) * SHARDS // 4
    arguments: dict[str, Any] = {"batch_size": 4, "cache_dir": cache, "run": QUIET, "progress": False}
    arguments["shuffle"] = "none"
    first = sk.warm(opened(store, cache, capacity), **arguments)
    assert first.shards >= SHARDS // 8
    assert first.bytes <= capacity
    later = opened(store, cache, capacity)
    second = sk.warm(later, **arguments, step=96)
    assert second.fetched > 0
    assert second.bytes <= capacity
    assert all(
        later.shards.is_there(n) for n in range(96 * 4 // (ROWS // SHARDS), 96 * 4 // (ROWS // SHARDS) + 3)
    )


def test_the_streams_of_a_mixture_are_warmed_together(store: Counted, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    arguments: dict[str, Any] = {"batch_size": 4, "cache_dir": cache, "run": QUIET}

    def streams() -> list[Stream]:
        return [Stream(opened(store, cache), 3, name="a"), Stream(opened(store, cache), 1, name="b")]

    report = sk.warm(streams(), **arguments, progress=False)
    assert report.fetched >= 1
    store.requested.clear()
    mixed = streams()
    store.requested.clear()
    with StreamingLoader(mixed, **arguments) as loader:
        for _ in itertools.islice(loader, 30):
            pass
    assert store.shards == []


def test_what_cannot_be_warmed_is_refused(folder: Path, store: Counted, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is on this machine and needs no cache"):
        sk.warm(folder, batch_size=4, cache_dir=tmp_path / "c", run=QUIET)
    with pytest.raises(ValueError, match="give cache_dir"):
        sk.warm(folder, batch_size=4)
    with pytest.raises(ValueError, match="either step or state"):
        sk.warm(folder, batch_size=4, cache_dir=tmp_path, step=3, state={})
    for ranks in ([], [4], [-1]):
        with pytest.raises(ValueError, match="ranks must be from 0 to 3"):
            sk.warm(folder, batch_size=4, world_size=4, ranks=ranks, cache_dir=tmp_path)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    pytest.importorskip("moto")
    with s3_server() as running:
        yield running


def test_the_command_fills_the_cache_that_a_loader_then_reads(
    folder: Path, server: S3Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"s3://{server.new_bucket()}/data"
    put_folder(folder, open_store(url))
    cache = str(tmp_path / "cache")
    run = ["--cache-dir", cache, "--batch-size", "4", "--world-size", "4", "--ranks", "0-1,3", "--quiet"]
    assert main(["download", url, *run, "--state", "8", "--most-bytes", "3000"]) == 0
    assert "from position 128 up to position" in capsys.readouterr().out
    assert main(["download", url, *run, "--json", "--loader", "cache_bytes=1GiB"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["shards"], report["covers"]) == (SHARDS, None)
    assert 0 < report["fetched"] < SHARDS, "what the first command fetched is still there"
    server.requests.clear()
    with StreamingLoader(url, batch_size=4, rank=3, world_size=4, cache_dir=cache, run=QUIET) as loader:
        assert sum(1 for _ in loader) == ROWS / 16
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    assert not [line for line in server.requests if "shard" in line and ".json" not in line]
    assert main(["download", url, *run, "--state", str(tmp_path / "state.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["position"] == ROWS


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["u"], "give either DST"),
        (["u", "d", "--cache-dir", "c"], "give either DST"),
        (["u", "d", "--batch-size", "8"], "--batch-size: give --cache-dir"),
        (["u", "--cache-dir", "c", "--dry-run"], "--dry-run: leave out --cache-dir"),
        (["u", "--cache-dir", "c", "--ranks", "a-b"], "must be ranks or ranges"),
        (["u", "--cache-dir", "c", "--ranks", "3"], "ranks must be from 0 to 0"),
    ],
)
def test_options_that_do_not_fit_are_misuse(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["download", *words])
    assert caught.value.code == 2
    assert problem in capsys.readouterr().err
