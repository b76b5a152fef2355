"""An index in a store: the same index as in a folder, read by checked ranges, and never half there."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from shardkit.errors import BuildError
from shardkit.hashing import hash_file
from shardkit.storage.memory import MemoryStore
from shardkit.storage.store import Store
from shardkit.writers.dedup.config import MinHashConfig, NearDedupConfig
from shardkit.writers.dedup.exact import KEYS
from shardkit.writers.dedup.index import (
    INDEX_FILE,
    DedupIndex,
    index_settings,
    open_index,
)
from shardkit.writers.dedup.near import find_near_duplicates
from shardkit.writers.dedup.outcomes import Removed
from shardkit.writers.dedup.population import DOCUMENT, DOCUMENTS_FILE
from shardkit.writers.dedup.signatures import sign_documents
from shardkit.writers.dedup.tables import Rows
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.index_build import IndexPart, StoreTarget, index_part, publish_index, publish_to_store
from support.documents import write_documents
from support.stores import fresh_memory
from support.task_folders import read_run

CONFIG = NearDedupConfig(minhash=MinHashConfig(permutations=16), bands=8, rows=2)
FROZEN = Path(__file__).parent.parent / "golden" / "dedup_index_format_1"
FROZEN_DIGEST = "4163e6431bb4c13d2e3cb27aaafebae0"


def texts_of(first: int, count: int) -> list[str]:
    return [
        f"text {at} " + " ".join(f"word{at * 7 + n}" for n in range(40)) for at in range(first, first + count)
    ]


def make_parts(folder: Path, count: int = 2, first: int = 0) -> list[tuple[Path, IndexPart]]:
    """The folder of each part, and what `index_part` returned."""
    parts = []
    for number in range(count):
        signed, made = folder / f"signed-{number}", folder / f"made-{number}"
        signed.mkdir(parents=True)
        made.mkdir()
        texts = texts_of(first + 10 * number, 10)
        records = range(first + 10 * number, first + 10 * number + 10)
        documents = Artifact(write_documents(folder / f"{number}.arrow", texts, records=records))
        sign_documents(documents, Removed(), CONFIG.minhash, "global", signed)
        counts = index_part(documents, Artifact(signed), np.zeros(0, np.int64), CONFIG.minhash, 64, made)
        parts.append((made, counts))
    return parts


def put_index(parts: list[tuple[Path, IndexPart]], url: str, *, replace: bool = False) -> DedupIndex:
    """As tasks put the parts, and the build publishes them."""
    target = StoreTarget(url)
    named = {f"part-{number + len(parts):032x}": part for number, (_, part) in enumerate(parts)}
    for name, (folder, part) in zip(named, parts, strict=True):
        shutil.copytree(folder, folder.with_name(f"{folder.name}-sent"), dirs_exist_ok=True)
        target.put(name, folder.with_name(f"{folder.name}-sent"), part.files)
        assert not list(folder.with_name(f"{folder.name}-sent").iterdir())
    return publish_to_store(named, target, {}, index_settings(CONFIG), sketch=64, replace=replace)


@pytest.fixture
def store() -> Store:
    return fresh_memory()


def test_a_dump_loses_to_an_index_in_a_store_what_it_loses_to_the_same_in_a_folder(
    tmp_path: Path, store: Store
) -> None:
    parts = make_parts(tmp_path / "parts")
    folder = publish_index(parts, tmp_path / "index", {}, index_settings(CONFIG), sketch=64)
    stored = put_index(parts, store.url)
    assert stored.digest == folder.digest
    stored.verify()
    dump = write_documents(tmp_path / "dump.arrow", [f"{text} more" for text in texts_of(5, 20)])
    removed = []
    for name, index in (("folder", folder), ("store", stored)):
        found = find_near_duplicates([dump], CONFIG, folder=tmp_path / name, indexes=[index])
        removed.append((found.losers.tolist(), found.winners.tolist(), found.result.counts))
    assert len(removed[0][0]) == 15
    assert removed[0] == removed[1]
    assert not (tmp_path / "store" / "part").exists()


def test_a_part_goes_to_workers_as_plain_data_and_its_ranges_are_compared_with_their_hashes(
    tmp_path: Path, store: Store
) -> None:
    index = put_index(make_parts(tmp_path / "parts"), store.url)
    part = pickle.loads(pickle.dumps(index.parts[1])).folder
    assert len(Rows(part / DOCUMENTS_FILE, DOCUMENT)) == 10
    with (part / DOCUMENTS_FILE).borrowed() as copy:
        whole = copy.read_bytes()
    assert bytes((part / DOCUMENTS_FILE).read_range(3, 600, lambda data: True)) == whole[3:600]
    key = f"{index.record.parts[0].folder}/{DOCUMENTS_FILE}"
    damaged = store.get(key)
    store.put(key, damaged[:-1] + bytes([damaged[-1] ^ 1]))
    with pytest.raises(
        BuildError, match=f"{DOCUMENTS_FILE}: is missing or differs from its hashes; make the index"
    ):
        (index.parts[0].folder / DOCUMENTS_FILE).read_bytes()


def test_an_index_appears_last_and_is_replaced_only_on_request(tmp_path: Path, store: Store) -> None:
    parts = make_parts(tmp_path / "parts")
    with pytest.raises(BuildError, match=f"{INDEX_FILE}: does not exist"):
        open_index(store.url)
    first = put_index(parts, store.url)
    assert put_index(parts, store.url).record == first.record
    other = make_parts(tmp_path / "other", count=3, first=100)
    with pytest.raises(BuildError, match="holds another index; use --replace"):
        put_index(other, store.url)
    assert open_index(store.url).record == first.record
    second = put_index(other, store.url, replace=True)
    assert second.documents == 30
    assert {info.key.partition("/")[0] for info in store.list()} == {
        INDEX_FILE,
        *(part.folder for part in second.record.parts),
    }


def test_missing_parts_foreign_objects_and_other_sizes_are_named(tmp_path: Path, store: Store) -> None:
    parts = make_parts(tmp_path / "parts")
    index = put_index(parts, store.url)
    key = f"{index.record.parts[0].folder}/{DOCUMENTS_FILE}"
    data = store.get(key)
    store.put(key, data[:-1])
    with pytest.raises(
        BuildError, match=rf"{DOCUMENTS_FILE}: is {len(data) - 1} bytes long, expected {len(data)} bytes"
    ):
        open_index(store.url)
    store.delete(key)
    with pytest.raises(BuildError, match=f"{DOCUMENTS_FILE}: is missing"):
        open_index(store.url)
    other = MemoryStore("memory://index-beside-others")
    other.put("notes.txt", b"mine")
    with pytest.raises(BuildError, match=r"holds objects that are not part of an index \(first: notes.txt\)"):
        put_index(parts, other.url)


def in_format_1(index: DedupIndex, folder: Path) -> DedupIndex:
    """The same index as version 0.1 stored it."""
    shutil.copytree(index.location, folder)
    record = json.loads((folder / INDEX_FILE).read_text())
    for listed in record["parts"]:
        part = folder / listed["folder"]
        keys = read_run(part / KEYS.file, KEYS)
        stored = np.zeros(len(keys), np.load(FROZEN / "part-00000" / "keys.npy").dtype)
        stored["high"], stored["low"], stored["place"] = keys["key"], keys["low"], keys["row"]
        stored["id"] = keys["id"].astype(">u8").view(np.uint8).reshape(-1, 16)
        stored["bytes"], stored["source"] = keys["bytes"], keys["source"]
        np.save(part / "keys.npy", stored)
        for name in ("bands.bin", "bands.npy"):
            (part / name).write_bytes(b"")
        listed["files"] = {
            path.name: {"bytes": path.stat().st_size, "xxh3_128": hash_file(path, ["xxh3_128"])["xxh3_128"]}
            for path in part.iterdir()
            if path.name not in (KEYS.file, "blocks.json")
        }
    (folder / INDEX_FILE).write_text(json.dumps(record | {"format": 1}))
    return open_index(folder)


def test_an_index_of_format_1_removes_what_the_same_of_format_2_removes(tmp_path: Path) -> None:
    folder = publish_index(
        make_parts(tmp_path / "parts"), tmp_path / "index", {}, index_settings(CONFIG), sketch=64
    )
    older = in_format_1(folder, tmp_path / "older")
    dump = write_documents(tmp_path / "dump.arrow", [*texts_of(5, 9), *texts_of(6, 3)], file="new.jsonl")
    found = [
        find_near_duplicates([dump], CONFIG, folder=tmp_path / f"work-{number}", indexes=indexes)
        for number, indexes in enumerate([[folder], [older], [older, folder]])
    ]
    assert len(found[0].losers) == 12
    assert found[0].losers.tolist() == found[1].losers.tolist() == found[2].losers.tolist()


def test_an_index_of_format_1_opens_from_a_folder_only(store: Store) -> None:
    index = open_index(FROZEN)
    index.verify()
    assert (index.documents, index.digest) == (6, FROZEN_DIGEST)
    assert [part.documents for part in index.parts] == [3, 3]
    store.put(INDEX_FILE, FROZEN / INDEX_FILE)
    with pytest.raises(BuildError, match="format 1 can only be read from a local folder"):
        open_index(store.url)
