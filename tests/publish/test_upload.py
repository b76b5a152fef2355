"""Uploads: whole datasets of any origin, checked on the way, never twice, and nothing that is not theirs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit import open_dataset
from shardkit.card import FILES_NAME, MOST_LISTED
from shardkit.datasets.verify import verify
from shardkit.errors import ShardError
from shardkit.formats import mds, tar
from shardkit.hashing import hash_bytes
from shardkit.publish import TransferError, TransferProgress, TransferReport, download, upload
from shardkit.publish.contents import MARKER_NAME
from shardkit.storage.memory import MemoryStore
from shardkit.storage.store import ObjectInfo, Store, StoreError
from shardkit.writers.stages.publish import RemoteOutput
from support.small_build import tree
from support.small_dataset import Built, files_of, make_dataset
from support.stores import FaultRule, FaultyStore, WatchedStore, fresh_memory, objects


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "out"
    make_dataset(folder)
    return folder


@pytest.fixture
def source(made: Path, tmp_path: Path) -> Path:
    """A dataset that a test may spoil."""
    return Path(shutil.copytree(made, tmp_path / "source"))


def send(
    source: Path,
    target: Store | str | Path,
    *,
    replace: bool = False,
    dry_run: bool = False,
    check: bool = False,
) -> TransferReport:
    return upload(source, target, threads=3, replace=replace, dry_run=dry_run, verify=check, progress=False)


def test_every_file_arrives_with_its_hash_and_the_report_says_so(made: Path) -> None:
    memory = fresh_memory()
    report = send(made, memory)
    expected = files_of(made)
    assert objects(memory) == expected
    for name in expected:
        stated = memory.head(name).metadata
        assert stated == {"shardkit-xxh3-128": hash_bytes(expected[name], ["xxh3_128"])["xxh3_128"]}
    assert set(report.sent) == expected.keys() - {"index.json"}
    assert report.files == 8
    assert report.sent_bytes == report.bytes == sum(map(len, expected.values())) - len(expected["index.json"])
    assert report.fingerprint == open_dataset(made).fingerprint
    assert json.loads(json.dumps(report.to_dict()))["up_to_date"] is False


def test_a_url_is_as_good_as_a_store(made: Path) -> None:
    memory = fresh_memory()
    assert send(made, memory.url).target == memory.url
    assert objects(memory) == files_of(made)


def test_a_second_upload_writes_nothing(made: Path) -> None:
    memory = fresh_memory()
    send(made, memory)
    again = WatchedStore(memory)
    report = send(made, again)
    assert again.puts == []
    assert report.up_to_date
    assert (report.skipped, report.skipped_bytes) == (report.files, report.bytes)


def test_a_folder_keeps_no_metadata_and_is_compared_by_its_bytes(made: Path, tmp_path: Path) -> None:
    target = tmp_path / "far" / "away"
    send(made, target)
    assert tree(target) == tree(made)
    assert send(made, target).up_to_date
    shard = target / "shard.00002.mds"
    shard.write_bytes(bytes(len(shard.read_bytes())))
    assert send(made, target).sent == ("shard.00002.mds",)
    assert tree(target) == tree(made)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_whatever_is_missing_or_wrong_at_the_target_is_sent_and_nothing_else(
    made: Path, data: st.DataObject
) -> None:
    memory = fresh_memory()
    send(made, memory)
    expected = files_of(made)
    states = st.sampled_from(["whole", "whole", "missing", "short", "changed", "plain"])
    spoilt = set()
    for name in sorted(expected.keys() - {"index.json"}):
        content = expected[name]
        match data.draw(states, label=name):
            case "missing":
                memory.delete(name)
            case "short":
                memory.put(name, content[:-1], metadata=memory.head(name).metadata)
            case "changed":
                memory.put(name, content[:-1] + bytes([content[-1] ^ 1]))
            case "plain":  # put by others, without our metadata: it is right all the same
                memory.put(name, content)
                continue
            case _:
                continue
        spoilt.add(name)
    report = send(made, memory)
    assert set(report.sent) == spoilt
    assert objects(memory) == expected


def test_a_damaged_shard_is_named_and_never_published(source: Path) -> None:
    shard = source / "shard.00001.mds"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    memory = fresh_memory()
    with pytest.raises(
        TransferError, match=r"shard\.00001\.mds: is damaged, and was not sent: xxh64"
    ) as caught:
        send(source, memory)
    assert [type(error) for error in caught.value.errors] == [ShardError]
    assert not {"index.json", "shard.00001.mds"} & objects(memory).keys()


def test_a_dataset_that_is_not_whole_is_refused_before_anything_is_sent(source: Path) -> None:
    (source / "shard.00000.mds").unlink()
    (source / "shard.00003.mds").write_bytes(b"short")
    (source / "report.html").unlink()
    memory = fresh_memory()
    expected = r"shard\.00000\.mds is missing; shard\.00003\.mds has 5 bytes.*; report\.html is missing; run"
    with pytest.raises(ShardError, match=expected):
        send(source, memory)
    assert objects(memory) == {}


def test_what_the_dataset_does_not_name_stays_where_it_is(source: Path) -> None:
    (source / "notes").mkdir()
    (source / "notes" / "mine.txt").write_text("mine")
    memory = fresh_memory()
    memory.put("theirs.txt", b"theirs")
    report = send(source, memory)
    assert report.left == ("notes/mine.txt",)
    assert (report.left_count, report.foreign) == (1, 1)
    assert "notes/mine.txt" not in objects(memory)
    assert objects(memory)["theirs.txt"] == b"theirs"


def test_a_replaced_dataset_leaves_no_file_behind_and_shared_files_are_kept(
    made: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    make_dataset(other, shards=7)  # its first shards are the same
    memory = fresh_memory()
    send(other, memory)
    with pytest.raises(StoreError, match="holds another dataset; use --replace"):
        send(made, memory)
    report = send(made, memory, replace=True)
    assert report.deleted == ("shard.00005.mds", "shard.00006.mds")
    assert report.skipped == 7  # five shards, table and report
    assert objects(memory) == files_of(made)


def test_another_card_on_the_same_shards_is_another_dataset(made: Path, source: Path) -> None:
    memory = fresh_memory()
    send(made, memory)
    card = json.loads((source / "dataset.json").read_text())
    (source / "dataset.json").write_text(json.dumps(card | {"license": "other"}))
    with pytest.raises(StoreError, match="holds another dataset"):
        send(source, memory)
    send(source, memory, replace=True)
    assert objects(memory) == files_of(source)


def test_a_dry_run_tells_all_and_writes_nothing(made: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_dataset(other, shards=6, first=100)
    memory = fresh_memory()
    send(other, memory)
    before = {info.key: info for info in memory.list()}
    told = WatchedStore(memory)
    planned = send(made, told, replace=True, dry_run=True)
    assert told.puts == []
    assert {info.key: info for info in memory.list()} == before
    done = send(made, memory, replace=True)
    assert (planned.sent, planned.skipped, planned.deleted) == (done.sent, done.skipped, done.deleted)
    assert planned.dry_run
    assert not done.dry_run


class LossyStore(MemoryStore):
    """Keeps another byte than it was given, and says nothing."""

    def put(
        self,
        key: str,
        data: bytes | Path,
        *,
        if_absent: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        content = data if isinstance(data, bytes) else data.read_bytes()
        if key == "shard.00004.mds":
            content = bytes([content[0] ^ 1]) + content[1:]
        return super().put(key, content, if_absent=if_absent, metadata=metadata)


def test_reading_back_finds_what_a_store_lost_before_the_index_is_put(made: Path) -> None:
    lossy = LossyStore(fresh_memory().url)
    with pytest.raises(TransferError, match=r"shard\.00004\.mds: has xxh3_128 .* was sent"):
        send(made, lossy, check=True)
    assert "index.json" not in objects(lossy)
    memory = fresh_memory()
    assert send(made, memory, check=True).verified


class SlowHand(WatchedStore):
    """Changes a file of the source while it is put."""

    victim: Path | None = None

    def put(
        self,
        key: str,
        data: bytes | Path,
        *,
        if_absent: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        if isinstance(data, Path) and data == self.victim:
            data.write_bytes(bytes(data.stat().st_size))
            os.utime(data, ns=(1, 1))
        return super().put(key, data, if_absent=if_absent, metadata=metadata)


def test_a_file_that_changes_while_it_is_sent_is_taken_back(source: Path) -> None:
    memory = fresh_memory()
    store = SlowHand(memory)
    store.victim = source / "shard.00002.mds"
    with pytest.raises(TransferError, match="changed while it was sent"):
        send(source, store)
    assert not {"index.json", "shard.00002.mds"} & objects(memory).keys()


def test_all_failures_are_told_and_the_same_call_goes_on(made: Path) -> None:
    memory = fresh_memory()
    broken = FaultyStore(memory, [FaultRule(fault="refuse", operation="put", key=r"\.mds$")])
    with pytest.raises(
        TransferError, match=r"5 of 8 files failed, .*injected\); 3 files were sent"
    ) as caught:
        send(made, broken)
    assert len(caught.value.errors) == 5
    assert MARKER_NAME in objects(memory)
    whole = WatchedStore(memory)
    send(made, whole)
    assert sorted(whole.puts) == sorted([*(f"shard.0000{n}.mds" for n in range(5)), "index.json"])


def test_progress_counts_every_file_and_byte_once(made: Path) -> None:
    heard: list[TransferProgress] = []
    upload(made, fresh_memory(), progress=heard.append)
    assert [report.files_done for report in heard] == list(range(1, 9))
    assert heard[-1].bytes_done == heard[-1].bytes == heard[-1].bytes_moved


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_datasets_of_others_have_no_card_and_may_lie_in_folders(
    tmp_path: Path, compression: str | None
) -> None:
    folder = tmp_path / "merged"
    rows = np.arange(64, dtype=np.uint16).reshape(-1, 4)
    shards = []
    for part in ("a", "b"):
        (folder / part).mkdir(parents=True)
        name = f"{part}/shard.00000.mds"
        shards.append(mds.write_rows_shard(folder, name, rows, hashes=["sha1"], compression=compression))
    mds.write_index(folder, shards)
    (folder / "a" / "index.json").write_text("of the part before it was merged")
    memory = fresh_memory()
    report = send(folder, memory)
    assert report.left == ("a/index.json",)
    assert set(objects(memory)) == {"index.json", *(shard.stored.basename for shard in shards)}
    assert send(folder, memory).up_to_date


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "bare"])
def test_tars_are_sent_with_a_list_even_if_they_had_none(tmp_path: Path, listed: bool) -> None:
    folder = tmp_path / "tars"
    folder.mkdir()
    rows = np.arange(192, dtype=np.uint16).reshape(3, -1, 4)
    shards = [
        tar.write_rows_shard(folder, f"some-{n}.tar", part, key_start=16 * n, hashes=["md5"])
        for n, part in enumerate(rows)
    ]
    if listed:
        tar.write_shard_list(folder, shards)
    before, target = tree(folder), tmp_path / "target"
    send(folder, target)
    assert tree(folder) == before
    assert verify(target).ok
    assert verify(target).hashed == 3
    assert len(open_dataset(target)) == 48
    assert {name: digest for name, digest in tree(target).items() if name.endswith(".tar")} == {
        name: digest for name, digest in before.items() if name.endswith(".tar")
    }
    assert send(folder, target).up_to_date


def test_files_behind_links_are_sent(source: Path, tmp_path: Path) -> None:
    (source / "provenance").rename(tmp_path / "elsewhere")
    (source / "provenance").symlink_to(tmp_path / "elsewhere")
    memory = fresh_memory()
    send(source, memory)
    assert "provenance/part-00000.parquet" in objects(memory)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("index.json", "{", r"index\.json"),
        ("index.json", None, "is an unfinished build"),
        ("dataset.json", "[]", "must be a JSON object"),
        ("dataset.json", "{", "cannot be read"),
        ("dataset.json", '{"fingerprint": "0"}', "is the card of another dataset"),
        ("dataset.json", '{"files": 7}', "must map names"),
        ("dataset.json", '{"files": {"../x": {}}}', "leaves the dataset's folder"),
        ("dataset.json", '{"files": {"x": {}}}', "a size in bytes"),
        ("dataset.json", '{"files": {"x": {"bytes": 1, "md5": 1}}}', "hashes must be strings"),
        ("dataset.json", '{"files": {"index.json": {"bytes": 1}}}', "named twice"),
    ],
)
def test_what_is_no_sound_dataset_is_refused(source: Path, name: str, text: str | None, message: str) -> None:
    if text is None:
        (source / name).unlink()
    else:
        (source / name).write_text(text)
    memory = fresh_memory()
    with pytest.raises(ShardError, match=message):
        send(source, memory)
    assert objects(memory) == {}


def test_a_folder_with_two_indexes_is_refused(source: Path) -> None:
    (source / "dataset.json").unlink()
    (source / "shards.json").write_text('{"shardlist": []}')
    with pytest.raises(ShardError, match=r"has both index\.json and shards\.json"):
        send(source, fresh_memory())


def test_a_remote_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="download it first"):
        upload("memory://somewhere", tmp_path)


@pytest.mark.parametrize("threads", [0, -1, 257])
def test_a_senseless_number_of_threads_is_refused(made: Path, threads: int) -> None:
    memory = fresh_memory()
    with pytest.raises(ValueError, match="threads must be from 1 to 256"):
        upload(made, memory, threads=threads)
    assert objects(memory) == {}


def test_a_file_system_of_fsspec_is_a_target_like_any_other(made: Path, tmp_path: Path) -> None:
    url = f"local://{tmp_path / 'far'}"
    send(made, url)
    assert tree(tmp_path / "far") == tree(made)
    assert send(made, url, check=True).up_to_date


def test_an_empty_folder_holds_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="holds no dataset"):
        send(tmp_path, fresh_memory())


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="there is no such folder"):
        send(tmp_path / "nowhere", fresh_memory())


@pytest.mark.extended
def test_files_that_the_card_leaves_to_a_list_are_part_of_the_dataset(tmp_path: Path) -> None:
    numbers = range(MOST_LISTED + 1)
    sides = {f"provenance/part-{number:05d}.parquet": b"table %d" % number for number in numbers}
    Built(tmp_path / "made", "mds", 2, 0, sides).publish(source := tmp_path / "source")
    whole = files_of(source)
    assert len(whole) == len(sides) + 5
    assert verify(source).ok
    memory = fresh_memory()
    assert len(upload(source, memory, progress=False).sent) == len(sides) + 4  # and the index
    assert objects(memory) == whole
    assert upload(source, memory, progress=False).up_to_date
    memory.delete("provenance/part-00007.parquet")
    assert upload(source, memory, progress=False).sent == ("provenance/part-00007.parquet",)
    download(memory, tmp_path / "back", progress=False)
    assert files_of(tmp_path / "back") == whole

    (source / "provenance/part-00007.parquet").write_bytes(b"table x")
    assert [problem.file for problem in verify(source).problems] == ["provenance/part-00007.parquet"]
    (source / FILES_NAME).write_bytes(b"{}")
    [damage] = verify(source).problems
    assert damage.file == FILES_NAME
    assert damage.problem.startswith("is damaged, or of another dataset")
    with pytest.raises(ShardError, match=r"files\.json: is damaged, or of another dataset"):
        upload(source, fresh_memory(), progress=False)
    (source / FILES_NAME).unlink()
    with pytest.raises(ShardError, match=r"files\.json: is missing, but the card refers to it"):
        upload(source, fresh_memory(), progress=False)
    other = Built(tmp_path / "other", "mds", 2, 100, {"report.html": b""})
    other.publish(RemoteOutput(memory.url), replace=True)
    assert set(objects(memory)) == {
        "index.json",
        "dataset.json",
        "report.html",
        "shard.00000.mds",
        "shard.00001.mds",
    }
