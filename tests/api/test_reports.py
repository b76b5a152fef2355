"""What verify, upload, download and convert return prints what was done, on a few lines."""

from __future__ import annotations

from pathlib import Path

import shardkit as sk
from support.loader_data import make_dataset


def facts_of(printed: object) -> dict[str, str]:
    lines = repr(printed).splitlines()
    assert lines[0].startswith("Dataset ")
    return {name.strip(): value for name, _, value in (line.strip().partition("  ") for line in lines[1:])}


def test_verify_prints_the_verdict_and_the_first_problems(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "data", "mds")
    assert facts_of(sk.verify(folder))["verdict"].strip() == "intact"
    (folder / "shard.00001.mds").unlink()
    report = sk.verify(folder)
    assert facts_of(report)["verdict"].strip() == "1 problem"
    assert "shard.00001.mds: " in repr(report)
    assert "<table>" in report._repr_html_()


def test_transfers_print_what_was_moved_and_what_was_there(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "data", "mds")
    would = facts_of(sk.upload(folder, "memory://reports", dry_run=True, progress=False))
    did = facts_of(sk.upload(folder, "memory://reports", progress=False))
    assert would["to write"].strip() == did["written"].strip() != "nothing"
    again = facts_of(sk.download("memory://reports", folder, progress=False))
    assert again["written"].strip() == "nothing"
    assert again["there before"].strip() == did["files"].strip().replace(", ", " files, ", 1)


def test_a_conversion_prints_what_it_made(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "data", "columns", samples=9)
    output = sk.OutputOptions(format="wds")
    facts = facts_of(
        sk.convert(folder, tmp_path / "tars", output=output, columns=["text", "label"], progress=False)
    )
    assert facts["rows"].strip() == "9"
    assert "text" in facts["columns"]
    assert facts["verified"].strip() == "read back and equal to the source"
