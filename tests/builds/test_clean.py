from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import BuildError
from shardkit.writers.dedup.exact import KEYS
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.inputs.scan import scan_inputs
from shardkit.writers.recipe.recipe import Recipe, recipe_from_mapping
from shardkit.writers.rows.documents import DOCUMENT_SCHEMA
from shardkit.writers.rows.ledger import Count, Ledger
from shardkit.writers.stages.clean import CleanSettings, clean_split, join_side_files
from support.task_folders import TaskFolders, commit_folder, read_run


def recipe(folder: Path, data: bytes, **changes: Any) -> Recipe:
    (folder / "a.jsonl").write_bytes(data)
    content = {
        "inputs": [{"path": "a.jsonl"}],
        "filters": [{"length": {"min_words": 2}}, {"gopher_quality": {"min_doc_words": 3}}],
        "tokenizer": {"path": "t.json", "eos": "</s>"},
        "output": {"path": "out"},
        "max_bad_fraction": 1,
    }
    return recipe_from_mapping(content | changes, folder=folder)


def read_keys(folder: Path) -> np.ndarray[Any, Any]:
    rows = read_run(folder / KEYS.file, KEYS)
    return rows[np.argsort(rows["row"])]


def clean(folder: Path, data: bytes, **changes: Any) -> tuple[pa.Table, np.ndarray[Any, Any], Ledger]:
    built = recipe(folder, data, **changes)
    (split,) = scan_inputs(built)
    out = folder / "task"
    out.mkdir()
    ledger = clean_split(out, split, CleanSettings.of(built, 0), {}, Artifact(folder)).ledger
    table = pa.ipc.open_file(str(out / "documents.arrow")).read_all()
    return table, read_keys(out), ledger


TEXT = st.sampled_from(
    ["", "one", "two words", "the end of the house and that", "the end of it …", "é" * 40, "\0"]
)
LINE = st.one_of(
    TEXT.map(lambda t: orjson.dumps({"text": t})), st.sampled_from([b"", b"{", b"\xff", b'{"text":1}'])
)


@settings(max_examples=100, deadline=None)
@given(lines=st.lists(LINE, max_size=30))
def test_the_ledger_of_any_split_adds_up_and_tells_what_the_files_hold(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    folder = tmp_path_factory.mktemp("clean")
    table, keys, ledger = clean(folder, b"\n".join(lines))
    ledger.check("again")
    assert ledger.read.documents == sum(bool(line) for line in lines)
    texts = table["text"].to_pylist()
    assert ledger.kept == Count(len(texts), sum(len(text.encode()) for text in texts))
    quarantined = (folder / "task/quarantine.jsonl").read_bytes().splitlines()
    assert sum(count.documents for count in ledger.quarantined.values()) == len(quarantined)
    assert table.schema == DOCUMENT_SCHEMA
    hashes = np.stack([keys["key"], keys["low"]], axis=1).astype(">u8")
    assert [key.tobytes() for key in hashes] == [xxhash.xxh3_128_digest(t.encode()) for t in texts]
    halves = zip(hashes, table["document_id"].to_pylist(), strict=True)
    assert [key.tobytes() for key in keys["id"].astype(">u8")] == [
        key.tobytes()[:8] + id[:8] for key, id in halves
    ]
    assert keys["bytes"].tolist() == [len(text.encode()) for text in texts]
    assert not keys["source"].any()


def test_a_damaged_member_leaves_no_trace_in_what_a_split_writes(tmp_path: Path) -> None:
    text = [
        b"".join(b'{"text": "the end of %d and that"}\n' % n for n in numbers)
        for numbers in (range(5), range(9))
    ]
    damaged = gzip.compress(text[1], compresslevel=0).replace(b"end of 4", b"end of 5")
    folder = tmp_path / "task"
    folder.mkdir()
    built = recipe(tmp_path, b"", filters=[], annotate=True, inputs=[{"path": "a.jsonl.gz"}])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text[0]) + damaged)
    (split,) = scan_inputs(built)
    ledger = clean_split(folder, split, CleanSettings.of(built, 0), {}, Artifact(tmp_path)).ledger
    assert (ledger.kept.documents, ledger.read.documents) == (5, 14)
    assert pa.ipc.open_file(str(folder / "documents.arrow")).read_all()["record"].to_pylist() == list(
        range(5)
    )
    assert len(read_keys(folder)) == 5
    assert pq.read_table(folder / "annotations.parquet")["record"].to_pylist() == list(range(5))
    assert len((folder / "quarantine.jsonl").read_bytes().splitlines()) == 1


def test_drops_are_booked_by_filter_and_rule(tmp_path: Path) -> None:
    data = b"\n".join(
        orjson.dumps({"text": text}) for text in ["one", "two words", "the end of the house and that", "é é"]
    )
    table, _, ledger = clean(tmp_path, data)
    assert table["record"].to_pylist() == [2]
    assert ledger.dropped == {
        "length/too_few_words": Count(1, 3),
        "gopher_quality/gopher_short_doc": Count(2, 9 + 5),
    }


def test_too_many_unreadable_records_stop_the_build(tmp_path: Path) -> None:
    data = b'{"text": "the end of the house and that"}\n' * 9 + b"{\n"
    _, _, ledger = clean(tmp_path, data, max_bad_fraction=0.1)
    assert ledger.quarantined == {"bad_json": Count(1, 1)}
    (tmp_path / "b").mkdir()
    with pytest.raises(BuildError, match=r"a.jsonl \(split 0\): 1 of 10 records .*first: a.jsonl: record 9"):
        clean(tmp_path / "b", data, max_bad_fraction=0.09)
    (tmp_path / "c").mkdir()
    with pytest.raises(BuildError, match=r"a.jsonl: record 9 \(byte 378\): bad_json"):
        clean(tmp_path / "c", data, max_bad_fraction=0)
    assert json.loads((tmp_path / "c/task/quarantine.jsonl").read_text())["record"] == 9


def test_an_empty_file_is_an_empty_result(tmp_path: Path) -> None:
    table, keys, ledger = clean(tmp_path, b"")
    assert (table.num_rows, len(keys), ledger) == (0, 0, Ledger())


def test_side_files_are_joined_in_the_order_of_splits_by_tasks_of_64_files(tmp_path: Path) -> None:
    lines = defaultdict[str, list[bytes]](list)
    commits = []
    for split in range(64 * 64 + 1):
        (folder := tmp_path / "clean" / f"{split:05d}").mkdir(parents=True)
        texts = {
            "quarantine.jsonl": b"" if split % 3 else b'{"split": %d}\n' % split,
            "report.jsonl": b"%d\n" % split * 2,
            "silent.jsonl": b"",
        }
        for name, text in texts.items():
            (folder / name).write_bytes(text)
            lines[name].append(text)
        commits.append(commit_folder(folder, "clean", str(split)))
    run = TaskFolders(tmp_path)
    joined = {name: commit for commit in join_side_files(run, commits) for name in commit.outputs}
    assert {name: (commit.files / name).read_bytes() for name, commit in joined.items()} == {
        name: b"".join(texts) for name, texts in lines.items()
    }
    stages = Counter(task.partition("/")[0] for task in run.ran)
    assert stages == {"side_files": 22 + 65 + 1, "side_files-merge-1": 1 + 2, "side_files-merge-2": 1}


def test_a_corpus_without_unreadable_records_has_no_quarantine(tmp_path: Path) -> None:
    (folder := tmp_path / "clean").mkdir()
    (folder / "quarantine.jsonl").write_bytes(b"")
    run = TaskFolders(tmp_path)
    assert join_side_files(run, [commit_folder(folder, "clean", "0")]) == []
    assert run.ran == []
