"""Records of tasks are sealed against damage; crafted ones, seal and all, are no commits or usable ones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import xxhash

from shardkit.errors import BuildError
from shardkit.writers.execution.commit import (
    BLOCK_BYTES,
    Commit,
    Output,
    Record,
    block_hashes,
    facts_of,
    parse_record,
    record_of,
)
from shardkit.writers.execution.stage import Stage
from support.json_trees import variants

SEAL_BYTES = len(b',\n "seal": "' + b"0" * 32 + b'"\n}\n')


def example() -> bytes:
    size = 3 * BLOCK_BYTES - 1
    outputs = {"tokens.run": Output(7, "0" * 32), "sub/keys": Output(size, "a" * 32, "A" * 32)}
    facts = facts_of({"ledger": {"read": {"documents": 1, "bytes": 2}}, "lines": 3}, outputs)
    commit = Commit("pack", "a", Path(), "0" * 32, facts)
    return record_of(commit, {"seed": 1, "b": ["c"]}, outputs)


def sealed(record: object) -> bytes:
    body = json.dumps(record, indent=1, sort_keys=True).encode()
    seal = xxhash.xxh3_128_hexdigest(body).encode()
    return body[:-2] + b',\n "seal": "%s"\n}\n' % seal


def use(record: Record) -> None:
    commit = record.commit
    json.dumps(commit.result)
    assert len(commit.content) == 32
    assert commit.bytes >= 0
    assert commit.key.startswith(f"{commit.stage}/{commit.name}.")
    for name, output in record.outputs.items():
        assert (commit.folder / name).is_relative_to(commit.folder)
        assert ".." not in name
        assert len(block_hashes(output)) in (0, -(-output.bytes // BLOCK_BYTES))
        (commit.folder / name).exists()


def test_the_example_is_a_record() -> None:
    record = parse_record(example(), Path("work/pack/a"))
    assert record is not None
    use(record)
    assert len(record.outputs) == 2


def test_crafted_records_are_no_commits_or_usable_ones(tmp_path: Path) -> None:
    body = example()[:-SEAL_BYTES] + b"\n}"
    read = refused = 0
    for crafted in variants(json.loads(body)):
        try:
            data = sealed(crafted)
        except (ValueError, TypeError):
            continue
        record = parse_record(data, tmp_path)
        read += record is not None
        refused += record is None
        if record is not None:
            use(record)
    assert read > 100
    assert refused > 500


@dataclass
class Lines:
    lines: int


def count(folder: Path) -> Lines:
    return Lines(1)


@pytest.mark.parametrize("facts", [{"result": {"rows": 1}}, {"result": {"lines": "many"}}, {}])
def test_the_result_of_another_stage_is_an_error_that_names_the_folder(
    tmp_path: Path, facts: dict[str, object]
) -> None:
    commit = Commit("lines", "a", tmp_path / "lines" / "a", "0" * 32, facts_of(facts, {}))
    with pytest.raises(BuildError, match=r"(?s)lines/a: its record has a result of another type.*lines/a"):
        Stage("lines", "lines", count).result(commit)
