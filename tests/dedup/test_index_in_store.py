"""An index in a store: the same index as in a folder, read by checked ranges, and never half there."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest

from shardkit.errors import BuildError
from shardkit.storage.memory import MemoryStore
from shardkit.storage.store import Store
from shardkit.writers.dedup.config import MinHashConfig, NearDedupConfig
from shardkit.writers.dedup.index import (
    INDEX_FILE,
    index_settings,
    open_index,
)
from shardkit.writers.dedup.near import find_near_duplicates
from shardkit.writers.dedup.outcomes import Removed
from shardkit.writers.dedup.population import DOCUMENTS_FILE, INDEXED
from shardkit.writers.dedup.signatures import sign_documents
from shardkit.writers.dedup.tables import Rows
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.index_build import publish_index
from support.dedup_indexes import NOTHING, Files, put_index, write_files
from support.documents import write_documents
from support.stores import fresh_memory

CONFIG = NearDedupConfig(minhash=MinHashConfig(permutations=16), bands=8, rows=2)
FROZEN = Path(__file__).parent.parent / "golden" / "dedup_index_format_1"


def texts_of(first: int, count: int) -> list[str]:
    return [
        f"text {at} " + " ".join(f"word{at * 7 + n}" for n in range(40)) for at in range(first, first + count)
    ]


def make_files(folder: Path, count: int = 2, first: int = 0) -> tuple[Files, Files]:
    """The folder of each part and table, and what its task returned."""
    splits = []
    for number in range(count):
        signed = folder / f"signed-{number}"
        signed.mkdir(parents=True)
        texts = texts_of(first + 10 * number, 10)
        records = range(first + 10 * number, first + 10 * number + 10)
        documents = write_documents(folder / f"{number}.arrow", texts, records=records)
        sign_documents(Artifact(documents), Removed(), CONFIG.minhash, (8, 2), "global", signed)
        splits.append((documents, signed, NOTHING))
    return write_files(folder, splits, CONFIG, 64)


@pytest.fixture
def store() -> Store:
    return fresh_memory()


def test_a_dump_loses_to_an_index_in_a_store_what_it_loses_to_the_same_in_a_folder(
    tmp_path: Path, store: Store
) -> None:
    files = make_files(tmp_path / "parts")
    folder = publish_index(*files, tmp_path / "index", {}, index_settings(CONFIG), sketch=64)
    stored = put_index(files, store.url, CONFIG)
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
    index = put_index(make_files(tmp_path / "parts"), store.url, CONFIG)
    part = pickle.loads(pickle.dumps(index.parts[1])).folder
    assert len(Rows(part / DOCUMENTS_FILE, INDEXED)) == 10
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
    parts = make_files(tmp_path / "parts")
    with pytest.raises(BuildError, match=f"{INDEX_FILE}: does not exist"):
        open_index(store.url)
    first = put_index(parts, store.url, CONFIG)
    assert put_index(parts, store.url, CONFIG).record == first.record
    other = make_files(tmp_path / "other", count=3, first=100)
    with pytest.raises(BuildError, match="holds another index; use --replace"):
        put_index(other, store.url, CONFIG)
    assert open_index(store.url).record == first.record
    second = put_index(other, store.url, CONFIG, replace=True)
    assert second.documents == 30
    assert {info.key.partition("/")[0] for info in store.list()} == {
        INDEX_FILE,
        *(one.folder for one in second.record.folders),
    }


def test_missing_parts_foreign_objects_and_other_sizes_are_named(tmp_path: Path, store: Store) -> None:
    parts = make_files(tmp_path / "parts")
    index = put_index(parts, store.url, CONFIG)
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
        put_index(parts, other.url, CONFIG)


@pytest.mark.parametrize("format", [1, 3])
def test_an_index_of_an_older_version_is_to_be_made_again(store: Store, tmp_path: Path, format: int) -> None:
    older = tmp_path / "older"
    shutil.copytree(FROZEN, older)
    record = json.loads((older / INDEX_FILE).read_text())
    (older / INDEX_FILE).write_text(json.dumps(record | {"format": format}))
    store.put(INDEX_FILE, older / INDEX_FILE)
    for place in (older, store.url):
        with pytest.raises(
            BuildError, match=rf"is format {format}, this shardkit reads format 4; make the index again$"
        ):
            open_index(place)
    files, settings = make_files(tmp_path / "parts"), index_settings(CONFIG)
    with pytest.raises(BuildError, match="make the index again, with --replace"):
        publish_index(*files, older, {}, settings, sketch=64)
    assert publish_index(*files, older, {}, settings, sketch=64, replace=True).documents == 20
