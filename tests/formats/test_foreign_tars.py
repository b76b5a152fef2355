"""Tars that no list describes are found by name, scanned once, and read like any dataset, local or remote."""

from __future__ import annotations

import gzip
import os
import pickle
import shutil
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit.cache import CacheOptions
from shardkit.cache.folder import SUBFOLDER
from shardkit.cache.indexes import TarIndexes
from shardkit.datasets.dataset import Dataset, open_dataset
from shardkit.datasets.tar_scan import scan_tars
from shardkit.errors import ShardError, ShardkitError
from shardkit.formats import tar
from shardkit.formats.tar.find import unscanned
from shardkit.formats.tar.members import Scanned
from shardkit.formats.tar.shard_list import describe_tar
from shardkit.manifest import Column
from shardkit.storage import open_store
from shardkit.storage.store import ObjectChangedError, ObjectInfo
from support.foreign_tars import PARTS, assert_same_index, put_tars, samples, tar_bytes, tars
from support.loader_data import make_dataset
from support.remote_harness import fresh_url, put_folder

ALL = list(range(23))


@pytest.fixture(params=["local", "remote"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder or a URL that holds the tars, and a file that is none."""
    url = str(tmp_path / "data") if request.param == "local" else fresh_url()
    store = open_store(url)
    for name, data in tars().items():
        store.put(name, data)
    store.put("below/part-900.tar", tar_bytes(0, 1))
    store.put("notes.txt", b"no tar")
    return url


def opened(path: Any, cache: Path | None = None, **options: Any) -> Dataset:
    return open_dataset(path, cache=CacheOptions(folder=cache, connections=4), **options)


NAMES: dict[str, tuple[Callable[[str], Any], list[int]]] = {
    "folder": (lambda url: url, ALL),
    "folder/": (lambda url: f"{url}/", ALL),
    "pattern": (lambda url: f"{url}/part-*.tar", ALL),
    "pattern of one": (lambda url: f"{url}/part-00[3].tar", [*range(8, 19)]),
    "brace list": (lambda url: f"{url}/part-{{000..004}}.tar", ALL),
    "brace list, backwards": (lambda url: f"{url}/part-{{001..000}}.tar", [7, *range(7)]),
    "braces and patterns": (lambda url: f"{url}/{{part-00[12],below/part-9*}}.tar", [7, 0]),
    "one tar": (lambda url: f"{url}/part-001.tar", [7]),
    "webdataset's ::": (lambda url: f"{url}/part-004.tar::{url}/part-001.tar", [19, 20, 21, 22, 7]),
    "list": (lambda url: [f"{url}/part-003.tar", f"{url}/part-001.tar"], [*range(8, 19), 7]),
    "list of a folder and a tar": (lambda url: [f"{url}/below", f"{url}/part-001.tar"], [0, 7]),
    "any folder": (lambda url: f"{url}/**/part-9*.tar", [0]),
}


@pytest.mark.parametrize("name", NAMES)
def test_tars_are_found_by_any_name_and_keep_their_order(place: str, name: str, tmp_path: Path) -> None:
    path, expected = NAMES[name]
    with opened(path(place), tmp_path / "cache") as dataset:
        assert samples(dataset) == expected
        assert len(dataset) == len(expected)
    with opened(path(place), tmp_path / "cache") as again:
        assert samples(again) == expected
        assert again.fingerprint == dataset.fingerprint


def test_paths_may_be_relative_mixed_and_lead_upwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, data in tars().items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert samples(opened("../part-{000..001}.tar")) == list(range(8))
    assert samples(opened([Path("../part-001.tar"), tmp_path / "part-000.tar"])) == [7, *range(7)]
    monkeypatch.chdir(tmp_path)
    assert samples(opened("part-001.tar")) == [7]
    assert samples(opened(f"file://{tmp_path}/part-*.tar")) == ALL
    (tmp_path / "a{0..1}.tar").write_bytes(tar_bytes(7, 8))  # a file that is really called so
    assert samples(opened("a{0..1}.tar")) == [7]
    assert opened(".").manifest.shards[0].stored.basename == "a{0..1}.tar"


def test_local_and_remote_tars_are_the_same_dataset(tmp_path: Path) -> None:
    url = put_tars()
    for name, data in tars().items():
        (tmp_path / name).write_bytes(data)
    local, remote = opened(tmp_path), opened(url)
    assert local.manifest == remote.manifest
    assert local.manifest.shards == tuple(tar.scan_folder(tmp_path))
    assert [c.name for c in local.columns] == ["cls", "json", "png", "seg.png", "txt"]
    assert opened(f"{url}/part-*.tar").fingerprint == local.fingerprint


@pytest.mark.parametrize("suffix", [".tar.gz", ".tgz"])
def test_compressed_tars_are_scanned_like_others(tmp_path: Path, suffix: str) -> None:
    url = put_tars({f"a{suffix}": gzip.compress(tar_bytes(0, 7))})
    for _ in range(2):
        with opened(f"{url}/*{suffix}", tmp_path) as dataset:
            assert samples(dataset) == list(range(7))
            assert dataset.manifest.shards[0].raw.bytes == len(tar_bytes(0, 7))


def read_bytes(dataset: Dataset) -> int:
    assert dataset.shards is not None
    return dataset.shards.store.metrics.snapshot().bytes_read


def test_a_later_opening_reads_no_tar(tmp_path: Path) -> None:
    url, cache = put_tars(), tmp_path / "cache"
    with opened(url, cache) as dataset:
        assert read_bytes(dataset) == sum(len(data) for data in tars().values())
        assert samples(dataset) == ALL
        assert read_bytes(dataset) == sum(len(data) for data in tars().values()), "the scan filled the cache"
    shutil.rmtree(cache / SUBFOLDER / "shards")
    with opened(url, cache) as dataset:
        assert len(dataset) == 23
        assert read_bytes(dataset) == 0
        assert samples(dataset) == ALL
    open_store(url).put("part-001.tar", tar_bytes(3, 5))
    with opened(url, cache) as dataset:
        assert len(dataset) == 24
        assert read_bytes(dataset) == len(tar_bytes(3, 5)), "only what has changed is scanned again"
        assert samples(dataset) == [*range(7), 3, 4, *range(8, 23)]


def test_a_shard_is_opened_by_what_the_scan_has_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.tar").write_bytes(tar_bytes(0, 7))
    opened(tmp_path, tmp_path / "cache")
    monkeypatch.setattr("shardkit.formats.tar.shard.walk_members", lambda *_: pytest.fail("walked again"))
    assert samples(opened(tmp_path, tmp_path / "cache")) == list(range(7))


def test_a_local_tar_that_changed_is_scanned_again(tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    file.write_bytes(tar_bytes(0, 7))
    assert len(opened(tmp_path, tmp_path / "cache")) == 7
    file.write_bytes(tar_bytes(8, 19))
    assert len(opened(tmp_path, tmp_path / "cache")) == 11


def test_an_object_replaced_after_it_was_scanned_is_not_read(tmp_path: Path) -> None:
    url = put_tars({"a.tar": tar_bytes(0, 7)})
    dataset = opened(url, tmp_path)
    copy = pickle.loads(pickle.dumps(dataset))
    open_store(url).put("a.tar", tar_bytes(8, 15))
    shutil.rmtree(tmp_path / SUBFOLDER / "shards")
    for one in (dataset, copy):
        with one, pytest.raises(ObjectChangedError, match=r"a\.tar"):
            one[0]


def test_without_a_cache_folder_every_opening_scans(tmp_path: Path) -> None:
    url = put_tars({"a.tar": tar_bytes(0, 7)})
    for _ in range(2):
        with opened(url) as dataset:
            assert samples(dataset) == list(range(7))
            assert read_bytes(dataset) == len(tar_bytes(0, 7))


def test_scans_that_are_not_kept_are_warned_of_where_they_are_long(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkit.datasets.dataset._UNREMEMBERED_BYTES", 1000)
    with pytest.warns(RuntimeWarning, match=r"133 KB of tars without a list .* give cache_dir") as caught:
        opened(place)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened(place, tmp_path / "cache")


# What is kept of a scan.


def index_of(path: Path, origin: str = "s3://bucket/a.tar") -> tuple[TarIndexes, tar.TarShard]:
    shard = tar.shard_from_raw("a.tar", describe_tar("a.tar"), np.frombuffer(tar_bytes(0, 7), dtype=np.uint8))
    return TarIndexes.in_cache(path, [(origin, "v1")]), shard


def keep(indexes: TarIndexes, shard: tar.TarShard) -> Scanned:
    scanned = Scanned(len(shard), shard.info.raw.bytes, shard.columns)
    indexes.keep(0, scanned, shard.index)
    return scanned


def test_what_is_kept_is_what_was_found(tmp_path: Path) -> None:
    indexes, shard = index_of(tmp_path)
    assert (indexes.scanned(0), indexes.index(0)) == (None, None)
    scanned = keep(indexes, shard)
    for one in (indexes, pickle.loads(pickle.dumps(indexes)), TarIndexes(indexes.folder, indexes.origins)):
        assert one.scanned(0) == scanned
        index = one.index(0)
        assert index is not None
        assert_same_index(index, shard.index)
    for origin in (("s3://bucket/a.tar", "v2"), ("s3://bucket/b.tar", "v1")):
        other = TarIndexes.in_cache(tmp_path, [origin])
        assert (other.scanned(0), other.index(0)) == (None, None)
        [file] = (tmp_path / SUBFOLDER / "tars").iterdir()
        other_file = other._file(0)
        assert other_file is not None
        shutil.copy(file, other_file)
        assert (other.scanned(0), other.index(0)) == (None, None), "a file that is another's is not believed"
        other_file.unlink()


@pytest.mark.parametrize("harm", ["flip", "cut", "extend", "folder"])
def test_what_is_damaged_is_recognised_and_made_anew(tmp_path: Path, harm: str) -> None:
    indexes, shard = index_of(tmp_path)
    scanned = keep(indexes, shard)
    file = indexes._file(0)
    assert file is not None
    good = file.read_bytes()
    rng = np.random.default_rng(7)
    for at in (0, 9, *rng.integers(0, len(good), 40).tolist(), len(good) - 1):
        bad = bytearray(good)
        bad[at] ^= 1 << int(rng.integers(8))
        data = {"flip": bytes(bad), "cut": good[:at], "extend": good + good[: at + 1], "folder": b""}[harm]
        if harm == "folder":
            file.unlink()
            file.mkdir()
        else:
            file.write_bytes(data)
        assert indexes.scanned(0) in (None, scanned)
        assert indexes.index(0) is None
        if harm == "folder":
            keep(indexes, shard)
            assert indexes.index(0) is None, "a scan is lost, not the run"
            return
    keep(indexes, shard)
    assert file.read_bytes() == good


def test_damaged_indexes_do_not_show_in_the_samples(tmp_path: Path) -> None:
    url = put_tars()
    opened(url, tmp_path).close()
    files = sorted((tmp_path / SUBFOLDER / "tars").iterdir())
    assert len(files) == len(PARTS)
    for number, file in enumerate(files):
        damaged = bytearray(file.read_bytes())
        damaged[(10, -30)[number % 2]] ^= 1
        file.write_bytes(damaged)
    with opened(url, tmp_path) as dataset:
        assert samples(dataset) == ALL


def test_an_index_of_other_bytes_is_not_used() -> None:
    data = np.frombuffer(tar_bytes(0, 7), dtype=np.uint8)
    longer = tar.shard_from_raw("b", describe_tar("b.tar"), np.frombuffer(tar_bytes(8, 19), np.uint8))
    shard = tar.shard_from_raw("a", describe_tar("a.tar"), data, index=longer.index)
    assert len(shard) == 7


def test_indexes_that_were_not_used_for_long_give_way(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.tar").write_bytes(tar_bytes(0, 7))
        opened(tmp_path / f"{number}.tar", tmp_path / "cache")
    files = sorted((tmp_path / "cache" / SUBFOLDER / "tars").iterdir(), key=lambda f: f.stat().st_mtime_ns)
    size = files[0].stat().st_size
    os.utime(files[0])
    (tmp_path / "5.tar").write_bytes(tar_bytes(7, 8))
    opened(tmp_path / "5.tar", tmp_path / "cache")
    TarIndexes.in_cache(tmp_path / "cache", []).trim(4 * size)
    assert [file.exists() for file in files] == [True, False, True, True]


def test_a_cache_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_bytes(0, 7))
    with pytest.raises(ShardkitError, match=r"a\.tar: the cache folder cannot be used"):
        opened(tmp_path, tmp_path / "a.tar")


# Several at once.


def scan_all(folder: Path, loaded: Counter[int], claim_seconds: float = 30.0) -> int:
    contents = [*tars().values()]
    manifest = unscanned([ObjectInfo(name, len(data), "v") for name, data in tars().items()])
    indexes = TarIndexes.in_cache(folder, [(name, "v") for name in tars()])

    def load(number: int) -> Any:
        loaded[number] += 1
        return np.frombuffer(contents[number], dtype=np.uint8)

    return scan_tars(manifest, load, str, indexes, threads=2, claim_seconds=claim_seconds).samples


def test_processes_that_open_at_once_scan_each_tar_once(tmp_path: Path) -> None:
    """Locks are taken per open file, so threads stand for processes here."""
    loaded: Counter[int] = Counter()
    barrier = threading.Barrier(4)
    found: list[int] = []

    def run() -> None:
        barrier.wait()
        found.append(scan_all(tmp_path, loaded))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [23] * 4
    assert loaded == dict.fromkeys(range(len(PARTS)), 1)
    assert not [file for file in tmp_path.rglob("*") if file.suffix in (".lock", ".tmp")]


def test_a_scanner_that_hangs_is_waited_for_in_bounded_time(tmp_path: Path) -> None:
    indexes = TarIndexes.in_cache(tmp_path, [(name, "v") for name in tars()])
    claim = indexes.claim(3, 0.0)
    assert claim is not None
    loaded: Counter[int] = Counter()
    assert scan_all(tmp_path, loaded, claim_seconds=0.05) == 23
    assert loaded == dict.fromkeys(range(len(PARTS)), 1)
    claim.release()


def test_an_error_in_one_tar_ends_the_scan_and_keeps_what_was_found(tmp_path: Path) -> None:
    url, cache = put_tars(tars() | {"part-004.tar": tar_bytes(19, 23)[:2000]}), tmp_path / "cache"
    with pytest.raises(ShardError, match=r"data/part-004\.tar: byte .*cut short"):
        opened(url, cache)
    open_store(url).put("part-004.tar", tar_bytes(19, 23))
    with opened(url, cache) as dataset:
        assert samples(dataset) == ALL


def test_a_long_scan_tells_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shardkit.progress.QUIET_SECONDS", 0.0)
    monkeypatch.setattr("shardkit.progress.LINE_SECONDS", 0.0)
    monkeypatch.setenv("LOCAL_RANK", "0")
    scan_all(tmp_path / "a", Counter())
    out, err = capfd.readouterr()
    assert out == ""
    assert f"scan tars: {len(PARTS)} of {len(PARTS)} files" in err
    monkeypatch.setenv("LOCAL_RANK", "1")
    scan_all(tmp_path / "b", Counter())
    scan_all(tmp_path / "a", Counter())
    assert capfd.readouterr() == ("", "")


# What names no tars.


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("{url}/part-{{0..1.tar", "names no tars: .* has a '{' without its '}'"),
        ("{url}/part-0}}.tar", "has a '}' without its '{'"),
        ("{url}/part-{{0..99999999}}.tar", "names more than"),
        ("{url}/part-000.tar::", "names no tars: a name is empty"),
        ("{url}/part-777.tar", "part-777.tar: there is no such"),
        ("{url}/part-{{000..777}}.tar", "part-005.tar: there is no such"),
        ("{url}/absent-*.tar", "a pattern must match only .tar files: no file matches"),
        ("{url}/*", "it matches notes.txt, which is not a tar"),
        ("{url}/{{part-000,part-000}}.tar", r"part-000\.tar: is named twice"),
        ("{url}/part-*.tar::{url}/part-001.tar", r"part-001\.tar: is named twice"),
    ],
)
def test_names_that_mean_nothing_are_explained(place: str, path: str, words: str) -> None:
    with pytest.raises(ShardError, match=words):
        opened(path.format(url=place))


def test_lists_that_cannot_be_one_dataset_are_explained(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_bytes(0, 7))
    for paths, words in (
        ([], "names no tars"),
        ([tmp_path / "a.tar", "memory://x/a.tar"], "is local but others are remote"),
        (["memory://x/a.tar", "memory://y/a.tar"], "are in different stores"),
        (["s3://x/a.tar", "memory://x/a.tar"], "are in different stores"),
        ([tmp_path / "notes.txt"], "there is no such file or folder; .* holds a.tar$"),
        ([tmp_path / "q" / "b.tar"], "there is no such file or folder; .* holds a.tar$"),
        ([tmp_path / "atar"], "there is no such file or folder; did you mean .*a.tar?"),
    ):
        with pytest.raises(ShardError, match=words):
            opened(paths)
    url = put_tars({"below/a.tar": tar_bytes(0, 7)})
    with pytest.raises(ShardError, match=r"in sub-folders only: open .*/data/\*\*/\*\.tar"):
        opened(url)
    assert samples(opened(f"{url}/**/*.tar")) == list(range(7))


def test_tars_whose_members_vary_have_all_columns(tmp_path: Path) -> None:
    for name, array in (("a", np.zeros(3, "u2")), ("b", np.zeros(4, "u2"))):
        tar.write_rows_shard(tmp_path, f"{name}.tar", np.stack([array] * 9), key_start=0)
    (tmp_path / "c.tar").write_bytes(tar_bytes(0, 1))
    columns = opened(tmp_path).columns
    assert columns[0] == Column("tokens.npy", "ndarray")
    assert [column.name for column in columns[1:]] == ["cls", "json", "png", "seg.png", "txt"]


def test_folders_that_hold_datasets_of_their_own_are_named(tmp_path: Path) -> None:
    for name in ("web", "code"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.json").write_text('{"version": 2, "shards": []}')
    with pytest.raises(ShardError, match=r"but its sub-folders do \(code, web, …\): give each as a Stream"):
        opened(tmp_path)
    with pytest.raises(ShardError, match=r"web: is itself an MDS dataset; pass several datasets as streams"):
        opened([tmp_path / "web", tmp_path / "code"])


def test_an_error_does_not_wait_for_the_tars_that_still_load(tmp_path: Path) -> None:
    may_go_on = threading.Event()

    def load(number: int) -> Any:
        if number == 1:
            raise KeyboardInterrupt
        assert may_go_on.wait(30)
        return np.frombuffer(tar_bytes(0, 7), dtype=np.uint8)

    manifest = unscanned([ObjectInfo(name, 0, "v") for name in tars()])
    indexes = TarIndexes.in_cache(tmp_path, [(name, "v") for name in tars()])
    with pytest.raises(KeyboardInterrupt):
        scan_tars(manifest, load, str, indexes, threads=2)
    assert not may_go_on.is_set()
    may_go_on.set()


def test_hidden_files_beside_tars_match_no_pattern(place: str) -> None:
    store = open_store(place)
    for name in ("._part-000.tar", ".part-000.tar.x.tar", "below/._part-900.tar", ".below/part-901.tar"):
        store.put(name, b"\0\5\x16\7" + bytes(100))
    for pattern in ("", "/*.tar", "/**/part-*.tar", "/?*.tar"):
        with opened(place + pattern) as dataset:
            assert len(dataset) == len(ALL) + pattern.startswith("/**")
    with pytest.raises(ShardError, match="cut short"):  # whoever names one gets it
        opened(f"{place}/.part*.tar")


@pytest.mark.parametrize("name", ["br[1]", "star*x", "quest?x", "brace{1,2}", "open{", "x[", "**"])
@pytest.mark.parametrize("kind", ["tars", "mds"])
def test_a_folder_whose_name_looks_like_a_pattern_is_opened_by_its_name(
    place: str, tmp_path: Path, name: str, kind: str
) -> None:
    url = f"{place}/{name}"
    if kind == "tars":
        open_store(url).put("part-000.tar", tar_bytes(0, 3))
    else:
        put_folder(make_dataset(tmp_path / "mds", "mds", samples=3, shards=1), open_store(url))
    with opened(url) as dataset:
        assert len(dataset) == 3


@pytest.mark.parametrize("name", ["br[1].tar", "star*x.tar", "quest?x.tar"])
def test_a_tar_whose_name_looks_like_a_pattern_is_opened_by_its_name(place: str, name: str) -> None:
    open_store(place).put(name, tar_bytes(0, 2))
    with opened(f"{place}/{name}") as dataset:
        assert len(dataset) == 2


def test_shards_without_an_index_say_that_their_writer_did_not_finish(place: str, tmp_path: Path) -> None:
    url = f"{place}/unfinished"
    put_folder(make_dataset(tmp_path / "mds", "mds_zstd"), open_store(url))
    open_store(url).delete("index.json")
    with pytest.raises(ShardError, match=r"shard\.00000\.mds\.zstd\) but no index\.json.* did not finish"):
        opened(url)


@pytest.mark.parametrize(
    "name", ["a{1,2}.tar", "a{0..9}.tar", "a{.tar", "b[1].tar", "c{x}[y]*.tar", "d}{.tar"]
)
def test_a_tar_whose_literal_name_is_that_of_a_list_or_pattern_is_that_tar(place: str, name: str) -> None:
    store = open_store(place)
    store.put(f"odd/{name}", tar_bytes(0, 3))
    store.put("odd/a1.tar", tar_bytes(3, 4))
    store.put("odd/a2.tar", tar_bytes(4, 5))
    for path, samples_there in (
        (f"{place}/odd/{name}", 3),
        ([f"{place}/odd/{name}", f"{place}/odd/a1.tar"], 4),
        (f"{place}/odd/{name}::{place}/odd/a2.tar", 4),
        (f"{place}/odd/a{{1,2}}.tar", 3 if name == "a{1,2}.tar" else 2),
    ):
        with opened(path) as dataset:
            assert len(dataset) == samples_there


def test_an_empty_tar_says_that_its_writer_did_not_finish(place: str) -> None:
    open_store(place).put("part-777.tar", b"")
    with pytest.raises(ShardError, match=r"part-777\.tar: is empty.* its writer did not finish"):
        opened(place)
