from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardkit.errors import BuildError, ConservationError
from shardkit.writers.rows.ledger import BadRecord, Count, Ledger, Quarantine, check_bad_fraction, snippet_of


def filled() -> Ledger:
    ledger = Ledger(read=Count(10, 100), kept=Count(5, 60))
    ledger.drop("length/short", 2, 15)
    ledger.drop("length/short", 1, 5)
    ledger.quarantine("bad_json", 2, 20)
    return ledger


def test_a_ledger_that_adds_up_passes_and_survives_json() -> None:
    ledger = filled()
    ledger.check("task")
    assert Ledger.from_dict(json.loads(json.dumps(ledger.to_dict()))) == ledger


@pytest.mark.parametrize("change", [Count(1, 0), Count(0, 1), Count(-1, 0)])
def test_one_lost_document_or_byte_is_an_error_that_names_the_task(change: Count) -> None:
    ledger = filled()
    ledger.kept += change
    with pytest.raises(ConservationError, match="clean/00003"):
        ledger.check("clean/00003")


def test_merging_adds_every_reason() -> None:
    total = filled()
    total.merge(filled())
    total.check("all")
    assert total.dropped == {"length/short": Count(6, 40)}
    assert total.quarantined == {"bad_json": Count(4, 40)}


BAD = BadRecord("a.jsonl", 3, 1234, "bad_json", "not JSON", "{")


def test_entries_are_json_lines(tmp_path: Path) -> None:
    with Quarantine(tmp_path / "q.jsonl", max_bad_fraction=0.5) as quarantine:
        quarantine.add(BAD)
        quarantine.add(BadRecord("é.parquet", 0, None, "no_text", "null", "\u2028"))
    entries = [json.loads(line) for line in (tmp_path / "q.jsonl").read_bytes().split(b"\n")[:-1]]
    assert [entry["file"] for entry in entries] == ["a.jsonl", "é.parquet"]
    assert entries[0]["byte_offset"] == 1234
    assert quarantine.first == BAD


def test_the_entry_that_stops_the_build_is_still_written(tmp_path: Path) -> None:
    with (
        pytest.raises(BuildError, match=r"a.jsonl: record 3 \(byte 1,234\): bad_json: not JSON"),
        Quarantine(tmp_path / "q.jsonl") as quarantine,
    ):
        quarantine.add(BAD)
    assert json.loads((tmp_path / "q.jsonl").read_text())["record"] == 3


@pytest.mark.parametrize(
    ("bad", "read", "allowed", "unit"),
    [
        (Count(1, 10), Count(100, 1000), 0.01, None),
        (Count(2, 10), Count(100, 1000), 0.01, "2 of 100 records"),
        (Count(1, 500), Count(1000, 1000), 0.01, "500 of 1,000 bytes"),
        (Count(1, 0), Count(1, 0), 0.99, "1 of 1 records"),
        (Count(1, 0), Count(1, 0), 1, None),
        (Count(), Count(), 0, None),
    ],
)
def test_records_and_bytes_both_have_to_stay_within_the_fraction(
    bad: Count, read: Count, allowed: float, unit: str | None
) -> None:
    ledger = Ledger(read=read)
    if bad.documents:
        ledger.quarantine("bad_json", bad.documents, bad.bytes)
    if unit is None:
        check_bad_fraction("a.jsonl", ledger, allowed, BAD)
    else:
        with pytest.raises(
            BuildError, match=f"a.jsonl: {unit} are unreadable .bad_json .*first: a.jsonl: record 3"
        ):
            check_bad_fraction("a.jsonl", ledger, allowed, BAD)


def test_snippets_are_short_and_printable() -> None:
    assert snippet_of(b"ok \xff" + b"x" * 1000) == "ok \\xff" + "x" * 156
