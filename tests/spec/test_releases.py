"""What each release wrote opens with this version, and its runs continue at the exact sample.

tests/golden/release-* hold datasets, states, usage logs and dedup indexes as that release wrote them
(`tests/spec/freeze.py`). Both shardkit and the second reader are held to what was delivered then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import shardkit
from shardkit.datasets.dataset import open_dataset
from shardkit.errors import BuildError
from shardkit.formats.mds.index import parse_index, read_table
from shardkit.tools.audit.logs import audit_logs
from shardkit.writers.dedup.index import FORMAT, open_index
from shardkit.writers.token_store import pack_store
from spec import reader
from spec.freeze import GOLDEN, cases, deliver, digest_of_rows
from support.pages import ROOT
from support.small_dataset import files_of

RELEASES = sorted(GOLDEN.glob("release-*"))


def release_key(release: Path) -> tuple[int, ...]:
    """The numbers of a folder's name, which order releases."""
    return tuple(map(int, release.name.removeprefix("release-").split(".")[:3]))


@lru_cache
def expected_of(release: Path) -> Any:
    return json.loads((release / "expected.json").read_text())


def per_release(section: str) -> pytest.MarkDecorator:
    """(release, name) for each entry of a section of expected.json."""
    found = [(release, name) for release in RELEASES for name in expected_of(release)[section]]
    return pytest.mark.parametrize(
        ("release", "name"), found, ids=[f"{release.name}-{name}" for release, name in found]
    )


def with_part(part: str) -> pytest.MarkDecorator:
    """The releases that have a dataset of this name."""
    return pytest.mark.parametrize(
        "release", [each for each in RELEASES if (each / "data" / part).is_dir()], ids=lambda each: each.name
    )


def test_there_are_frozen_releases_and_none_is_large() -> None:
    assert {release.name for release in RELEASES} >= {"release-0.1.0", "release-0.2.0"}
    for release in RELEASES:
        assert sum(map(len, files_of(release).values())) < 300_000


@per_release("datasets")
def test_datasets_verify_and_hold_the_rows_they_held(release: Path, name: str) -> None:
    path, expected = release / "data" / name, expected_of(release)["datasets"][name]
    before = files_of(path)
    report = shardkit.verify(path)
    assert report.ok, report
    dataset = open_dataset(path)
    assert (dataset.fingerprint, len(dataset)) == (expected["fingerprint"], expected["samples"])
    assert digest_of_rows(dataset) == expected["content"]
    assert files_of(path) == before


@per_release("datasets")
def test_datasets_are_what_the_specification_says(release: Path, name: str) -> None:
    path, expected = release / "data" / name, expected_of(release)["datasets"][name]
    plain, dataset = reader.Dataset(path), open_dataset(path)
    assert (plain.fingerprint, plain.starts[-1]) == (expected["fingerprint"], expected["samples"])
    for row in range(len(dataset)):
        found: Any = dataset[row]
        if plain.list == "documents.json":
            assert json.loads(plain[row][""]) == found
        elif plain.list == "shards.json":
            assert reader.tokens(plain[row], "uint16") == found["tokens"].tolist()
        for name, (encoding, _) in plain.shards[0].columns.items():
            if encoding == "str":
                assert plain[row][name].decode() == found[name]
            elif encoding.startswith("ndarray"):
                expected = found[name].dtype.name, found[name].shape, found[name].tobytes()
                assert reader.array(plain[row][name], encoding) == expected


@with_part("built")
def test_cards_list_the_files_beside_the_shards(release: Path) -> None:
    for path in (release / "data").iterdir():
        dataset = reader.Dataset(path)
        for name, file in dataset.files().items():
            data = (path / name).read_bytes()
            assert file.bytes == len(data)
            assert file.hashes == {kind: reader.hash_of(kind, data) for kind in file.hashes}
        if "blocks.bin" in dataset.files():
            for shard, checksums in zip(dataset.shards, reader.blocks_bin(dataset), strict=True):
                assert reader.are_proved(checksums, 0, (path / shard.stored.name).read_bytes())
        if path.name == "built":
            assert {
                "report.html",
                "quarantine.jsonl",
                "provenance/part-00000.parquet",
            } <= dataset.files().keys()


@pytest.mark.sampled(7)
@per_release("runs")
def test_runs_continue_with_the_samples_that_followed_then(release: Path, name: str) -> None:
    case = expected_of(release)["runs"][name]
    begin = case["state"] | {"position": 0, "epoch_batches": 0}
    for state, run in [(begin, case["first"]), *((case["state"], again) for again in case["after"])]:
        steps = len(run["ids"][0])
        found, _ = deliver(release, case, state, run["ranks"], run["batch_size"], steps)
        assert found == run


@per_release("runs")
def test_the_second_reader_continues_runs_with_the_same_samples(release: Path, name: str) -> None:
    case = expected_of(release)["runs"][name]
    datasets = [reader.Dataset(release / "data" / stream["path"]) for stream in case["streams"]]
    excluded = [stream.get("exclude", []) for stream in case["streams"]]
    for position, given in [(0, case["first"]), *((case["state"]["position"], run) for run in case["after"])]:
        run = reader.Run(case["state"] | {"position": position}, datasets, excluded)
        at = run.position
        for step in range(len(given["ids"][0])):
            batches = [
                run.batch(at, rank, given["ranks"], given["batch_size"]) for rank in range(given["ranks"])
            ]
            assert [ids for ids, _ in batches] == [ids[step] for ids in given["ids"]]
            at = batches[0][1]
        if given is case["first"]:
            assert at == case["state"]["position"]


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
def test_usage_logs_pass_the_audit_and_say_what_the_specification_says(release: Path) -> None:
    report = audit_logs(release / "logs", [open_dataset(release / "data" / "rows")], [None], progress=False)
    assert report.ok, report
    plain = reader.Dataset(release / "data" / "rows")
    files = sorted((release / "logs").glob("*.usage"))
    assert len(files) == 5
    for file in files:
        [section] = reader.usage_log(file.read_bytes())
        head = section.head
        run = reader.Run(reader.state_of(head), [plain], [()])
        at = run.position
        for position, ids in section.steps:
            assert position == at
            expected, at = run.batch(at, head["rank"], head["world_size"], head["batch_size"])
            assert ids == expected
        assert section.end == at


@with_part("index_bin")
def test_index_bin_opens_and_says_what_index_json_says(release: Path) -> None:
    path = release / "data" / "index_bin"
    index = path / "index.json"
    table = read_table(index)
    assert table is not None
    listed = parse_index(index, index.read_bytes())
    assert list(table) == list(listed.shards)
    assert reader.index_bin(path) == (listed.fingerprint, reader.Dataset(path).shards)


@pytest.mark.sampled(2)
@with_part("built")
def test_provenance_covers_every_token_and_names_the_documents(release: Path) -> None:
    path = release / "data" / "built"
    plain, dataset = reader.Dataset(path), open_dataset(path)
    seed, eos = plain.card["recipe"]["seed"], plain.card["tokenizer"]["eos_id"]
    covered = [[False] * 32 for _ in range(plain.starts[-1])]
    for metadata, records in reader.provenance(path):
        assert int(metadata[b"shardkit.seed"]) == seed
        first, last = (int(metadata[f"shardkit.{end}_hash".encode()]) for end in ("first", "last"))
        places = [(one["shard"], one["row"], one["token_start"]) for one in records]
        assert places == sorted(places)
        for one in records:
            assert one["document_id"] == reader.document_id(one["file"], one["record"])
            assert first <= reader.shuffle_hash(one["document_id"], seed) <= last
            row = plain.starts[one["shard"]] + one["row"]
            for token in range(one["token_start"], one["token_end"]):
                assert not covered[row][token]
                covered[row][token] = True
    for row, marks in enumerate(covered):
        tokens = reader.tokens(plain[row], plain.card["dtype"])
        assert all(mark or token == eos for mark, token in zip(marks, tokens, strict=True))
        assert {one.file for one in dataset.documents(row)} <= {"web.jsonl", "code.jsonl.gz", "pairs.jsonl"}
    assert sum(map(sum, covered)) == plain.card["tokens"]


@with_part("built")
def test_traces_find_every_document_and_the_rows_of_a_step(release: Path) -> None:
    path, run = release / "data" / "built", expected_of(release)["runs"]["built"]
    starts = reader.Dataset(path).starts
    records = [one for _, records in reader.provenance(path) for one in records]
    ids = sorted({one["document_id"].hex() for one in records})
    found = shardkit.trace(path, document=ids, limit=0).documents
    assert sorted((one.document_id, one.row, one.start) for one in found) == sorted(
        (one["document_id"].hex(), starts[one["shard"]] + one["row"], one["token_start"]) for one in records
    )
    first = run["first"]
    for step in range(len(first["ids"][0])):
        sizes = {"batch_size": first["batch_size"], "world_size": first["ranks"]}
        seen = shardkit.trace(path, step=step + 1, state=run["state"], limit=0, **sizes).documents
        assert {one.row for one in seen} == {row for ids in first["ids"] for row in ids[step]}


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
def test_dedup_indexes_open_whole_or_are_to_be_made_again(release: Path) -> None:
    folder = release / "dedup-index"
    if json.loads((folder / "dedup-index.json").read_bytes())["format"] < FORMAT:
        with pytest.raises(BuildError, match=r"reads format 4; make the index again$"):
            open_index(folder)
        return
    index = open_index(folder)
    index.verify()
    assert {"documents": index.documents, "digest": index.digest} == expected_of(release)["dedup_index"]


@pytest.mark.extended
@with_part("token_store")
def test_token_stores_are_packed_into_rows(release: Path, tmp_path: Path, inline_builds: None) -> None:
    store = release / "data" / "token_store"
    length = ["pack.sequence_length=24"]
    pack_store(store, tmp_path / "rows", overrides=length, workers=1, progress=False)
    card = json.loads((tmp_path / "rows" / "dataset.json").read_bytes())
    assert card["tokens"] == json.loads((store / "dataset.json").read_bytes())["tokens"]
    assert shardkit.verify(tmp_path / "rows").ok


def test_what_the_next_release_will_freeze_is_what_the_newest_folder_has() -> None:
    """So that a case that is added to `freeze.py` is not forgotten in the folder of the version in work."""
    newest = expected_of(max(RELEASES, key=release_key))
    assert newest["runs"].keys() == cases().keys()


def keys_written(release: Path) -> Iterator[tuple[str, str]]:
    """(page, key) of all that a release wrote at the top of its files."""
    data = release / "data"
    for path in data.glob("*/dataset.json"):
        card = json.loads(path.read_bytes())
        yield from (
            ("card", key) for key in [*card, *card.get("tokenizer", ()), *card.get("inputs", [{}])[0]]
        )
    for path in data.glob("*/index.json"):
        yield from (("index-files", key) for key in json.loads(path.read_bytes())["shards"][0])
    for name, entries in (("shards.json", "shardlist"), ("documents.json", "files")):
        for path in data.glob(f"*/{name}"):
            listed = json.loads(path.read_bytes())
            yield from (("index-files", key) for key in [*listed, *listed[entries][0]])
    for run in expected_of(release)["runs"].values():
        yield from (("state", key) for key in [*run["state"], *run["state"]["streams"]])
    for path in (release / "logs").iterdir():
        [section] = reader.usage_log(path.read_bytes())
        yield from (("usage-log", key) for key in [*section.head, *section.head["settings"]])
    for folder in ("provenance", "dropped", "duplicates"):
        names = pq.read_schema(data / "built" / folder / "part-00000.parquet").names
        yield from (("provenance", key) for key in names)


def test_pages_of_the_specification_name_every_key_that_is_written() -> None:
    written = set(keys_written(max(RELEASES, key=release_key)))
    assert len(written) > 80
    pages = {page: (ROOT / "docs" / "spec" / f"{page}.md").read_text() for page, _ in written}
    assert [(page, key) for page, key in sorted(written) if f"`{key}`" not in pages[page]
            and f'"{key}"' not in pages[page]] == []  # fmt: skip
