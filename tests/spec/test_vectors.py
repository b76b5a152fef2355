"""The test vectors in docs/spec are what shardkit gives, and what the second reader gives."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit.datasets.segments import find_segments
from shardkit.formats import mds
from shardkit.formats.block_checksums import shard_part
from shardkit.formats.tar.members import split_name
from shardkit.formats.usage_log import RunHead, end_record, step_record
from shardkit.hashing import digest_of, keyed_hashes
from shardkit.manifest import FileInfo, Manifest, ShardInfo
from shardkit.order.balance import level
from shardkit.order.exclusions import Exclusions
from shardkit.order.mixture import Mixture, Schedule
from shardkit.order.order import Order, OrderSpec, default_lanes, default_window
from shardkit.order.permutation import Permutation, mix64
from shardkit.order.state import LoaderState
from shardkit.order.streams import stream_seed
from shardkit.writers.execution import commit as commits
from shardkit.writers.execution import stage as stages
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.rows.documents import document_ids
from spec import arithmetic, reader
from support.pages import ROOT

VECTORS = {
    name: json.loads(text)
    for page in sorted((ROOT / "docs" / "spec").glob("*.md"))
    for name, text in re.findall(
        r'^```json title="vectors: (\w+)"\n(.*?)^```$', page.read_text(), re.MULTILINE | re.DOTALL
    )
} | json.loads((ROOT / "docs" / "spec" / "vectors.json").read_text())
Check = Callable[[Any], None]


def check_notation(case: Any) -> None:
    for word, image in case["mix64"]:
        assert hex(arithmetic.mix64(int(word, 16))) == image
        assert hex(int(mix64(np.uint64(int(word, 16))))) == image  # type: ignore[arg-type]
    data, size, person, found = case["blake2b"]
    assert arithmetic.blake2b(data, size, person).hex() == found
    assert hashlib.blake2b(data.encode(), digest_size=size, person=person.encode()).hexdigest() == found


def check_digest(case: Any) -> None:
    assert arithmetic.digest(case["data"]) == digest_of(case["data"]) == case["digest"]


def check_mds_shard(case: Any) -> None:
    offsets, config = case["offsets"], case["config"].encode()
    data = struct.pack(f"<I{len(offsets)}I", len(offsets) - 1, *offsets) + config
    data += bytes.fromhex(case["samples"])
    [info] = mds.parse_index(
        "the page", json.dumps({"version": 2, "shards": [case["entry"]]}).encode()
    ).shards
    shard = mds.shard_from_raw("the page", info, np.frombuffer(data, np.uint8))
    read = list(reader.mds_samples(data, {"text": ("str", None), "tokens": ("ndarray:uint16:3", 6)}))
    for row, value in enumerate(case["values"]):
        sample: dict[str, Any] = shard.sample(row)
        assert {"text": sample["text"], "tokens": sample["tokens"].tolist()} == value
        assert read[row]["text"].decode() == value["text"]
        assert reader.tokens(read[row], "uint16") == value["tokens"]
    stated = case["entry"]["raw_data"]
    assert (len(data), reader.hash_of("xxh64", data)) == (stated["bytes"], stated["hashes"]["xxh64"])
    assert json.loads(config) == {
        key: value for key, value in case["entry"].items() if key not in ("raw_data", "zip_data", "samples")
    }


def check_tar_names(cases: Any) -> None:
    for name, *parts in cases:
        expected = None if None in parts else tuple(parts)
        assert split_name(name) == reader.tar_name(name) == expected


def check_fingerprint(case: Any) -> None:
    infos, shards = [], []
    for entry in case["shards"]:
        raw, stored = FileInfo(*entry["raw"]), FileInfo(*entry["stored"])
        is_packed = raw != stored
        infos.append(ShardInfo(raw, entry["samples"], zip=stored if is_packed else None))
        files = reader.File(*entry["raw"]), reader.File(*entry["stored"])
        shards.append(reader.Shard(*files, entry["samples"], {}))
    assert reader.fingerprint(shards) == Manifest("mds", infos).fingerprint == case["fingerprint"]


def check_documents(case: Any) -> None:
    ids = document_ids(case["file"], case["records"])
    assert [each.hex() for each in ids] == case["ids"]
    assert [reader.document_id(case["file"], record).hex() for record in case["records"]] == case["ids"]
    hashes = [int(each) for each in case["shuffle_hashes"]]
    assert keyed_hashes(ids, case["seed"], "shuffle").tolist() == hashes
    assert [reader.shuffle_hash(each, case["seed"]) for each in ids] == hashes


def check_permutation(cases: Any) -> None:
    for case in cases:
        n, key = case["n"], int(case["key"])
        indices = case["indices"] if "indices" in case else list(range(n))
        word = arithmetic.key_word(key)
        assert Permutation(n, key)(indices).tolist() == case["images"]
        assert [arithmetic.permute(x, n, word) for x in indices] == case["images"]
        assert [arithmetic.unpermute(x, n, word) for x in case["images"]] == indices


def check_exclusions(case: Any) -> None:
    ranges = [(begin, end) for begin, end in case["ranges"]]
    excluded = Exclusions(ranges)
    assert [list(pair) for pair in excluded.to_list()] == case["merged"]
    assert [list(pair) for pair in arithmetic.merged(ranges)] == case["merged"]
    assert arithmetic.exclusion_digest(ranges) == excluded.digest == case["digest"]
    assert excluded.select(case["kept_ids"]).tolist() == case["sample_ids"]
    assert [arithmetic.select(kept, ranges) for kept in case["kept_ids"]] == case["sample_ids"]


def check_order(cases: Any) -> None:
    for case in cases:
        spec = {name: case[name] for name in ("lanes", "window", "shuffle", "version")}
        order = Order(case["samples"], OrderSpec(int(case["seed"]), **spec))
        plain = arithmetic.Order(case["samples"], int(case["seed"]), **spec)
        if ids := case.get("sample_ids"):
            first = case["epoch"] * len(ids)
            assert order.locate((first, len(ids))).sample_id.tolist() == ids
            assert [plain.locate(first + place).sample_id for place in range(len(ids))] == ids
        for start, size, positions in case["batches"]:
            assert order.global_batch(start, size).tolist() == positions
            assert sorted(range(start, start + size), key=plain.key_at) == positions


def check_defaults(cases: Any) -> None:
    for case in cases:
        shards, compressed = case["shards"], case["compressed"]
        assert default_lanes(shards, compressed=compressed) == case["lanes"]
        assert arithmetic.default_lanes(shards, compressed) == case["lanes"]
        is_shuffled, args = case["shuffled"], (case["samples"], shards, case["lanes"])
        assert default_window(*args, is_shuffled=is_shuffled) == case["window"]
        assert arithmetic.default_window(*args, is_shuffled) == case["window"]


def check_mixture(vectors: Any) -> None:
    for seed, number, found in vectors["stream_seeds"]:
        assert stream_seed(int(seed), number) == arithmetic.stream_seed(int(seed), number) == int(found)
    for case in vectors["cases"]:
        start, expected = case["start"], list(zip(case["streams"], case["indices"], strict=True))
        version = case["version"]
        mixture = Mixture(case["seed"], Schedule.from_list(case["schedule"]), version)
        found = mixture.locate(start, len(expected))
        assert [each.tolist() for each in found] == [case["streams"], case["indices"]]
        plain = arithmetic.Mixture(case["seed"], case["schedule"], version)
        assert [plain.locate(start + n) for n in range(len(expected))] == expected


def check_balance(vectors: Any) -> None:
    for case in vectors["squares"]:
        lengths = find_segments(np.array([case["tokens"]]), case["eos"]).lengths
        assert int((lengths * lengths).sum()) == case["squares"]
        assert arithmetic.squares(case["tokens"], case["eos"]) == case["squares"]
    for case in vectors["leveled"]:
        costs, before = case["costs"], case["before"]
        assert level(np.array([costs]), np.array([before]))[0].tolist() == case["places"]
        assert arithmetic.level(costs, before) == case["places"]


def check_blocks(case: Any) -> None:
    data = bytes(number % 251 for number in range(case["bytes"]))
    stated = FileInfo("shard.mds", case["bytes"], case["hashes"])
    assert shard_part(stated, np.frombuffer(data, np.uint8)).hex() == case["part"]
    part = bytes.fromhex(case["part"])
    checksums = reader.block_checksums(reader.File("shard.mds", case["bytes"], case["hashes"]), part)
    assert reader.are_proved(checksums, 65536, data[65536:])
    assert not reader.are_proved(checksums, 0, data[1:65537])
    with pytest.raises(ValueError):
        reader.block_checksums(reader.File("shard.mds", case["bytes"], {}), part)


def check_state(cases: Any) -> None:
    for case in cases:
        assert LoaderState.from_dict(case["saved"]).to_dict() == case["as_version_4"]
        assert reader.current_state(case["saved"]) == case["as_version_4"]


def check_usage_log(vectors: Any) -> None:
    head = json.dumps(vectors["head"]).encode()
    parsed = RunHead.parse(head)
    assert RunHead.parse(parsed.record()[9:]) == parsed
    records = b"".join(bytes.fromhex(case["record"]) for case in vectors["records"])
    [section] = reader.usage_log(b"SKUSAGE1" + parsed.record() + records)
    assert section.head == vectors["head"]
    step, end = vectors["records"]
    assert (section.steps, section.end) == ([(step["position"], step["ids"])], end["position"])
    ids = np.array(step["ids"]).astype("<u4").tobytes()
    assert step_record(step["position"], ids).hex() == step["record"]
    assert end_record(end["position"]).hex() == end["record"]


def check_task_record(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (commits, stages):
        monkeypatch.setattr(module, "code_version", lambda: case["code"])

    def work(folder: Path, keys: Artifact, order: str) -> None: ...

    keys, order = case["args"]["keys"]["content"], case["args"]["order"]
    task = stages.Stage(case["stage"], "", work).task(case["name"], 0, Artifact(Path(), content=keys), order)
    assert task.deciding() == case["args"]
    assert (task.digest, task.key) == (case["digest"], case["key"])
    outputs = {name: commits.Output(**output) for name, output in case["outputs"].items()}
    facts = commits.facts_of(case["result"], outputs)
    commit = commits.Commit(task.stage, task.name, Path(), task.digest, facts)
    record = commits.record_of(commit, task.deciding(), outputs)
    assert f'"seal": "{case["seal"]}"'.encode() in record
    assert reader.task_record(record)["outputs"] == case["outputs"]
    parsed = commits.parse_record(record, Path("work"))
    assert parsed is not None
    contents = {name: output["xxh3_128"] for name, output in case["outputs"].items()}
    assert parsed.commit.content == arithmetic.digest(contents) == case["content"]


CHECKS: dict[str, Callable[..., None]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}


@pytest.mark.parametrize("name", sorted(VECTORS.keys() | CHECKS.keys()))
def test_vectors_are_what_the_code_and_the_second_reader_give(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "task_record":
        check_task_record(VECTORS[name], monkeypatch)
    else:
        CHECKS[name](VECTORS[name])


def test_the_second_reader_imports_nothing_of_shardkit() -> None:
    for name in ("arithmetic", "reader"):
        text = (ROOT / "tests" / "spec" / f"{name}.py").read_text()
        imported = set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE))
        assert not imported & {"shardkit", "numpy", "torch", "support", "reference"}
