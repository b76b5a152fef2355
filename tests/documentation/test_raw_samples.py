"""The page on raw samples: its table has every encoding, and its command shuffles what its code writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardkit.cli.main import main as run_command
from shardkit.datasets.dataset import open_dataset
from shardkit.formats.mds.encodings import encoding_of
from support.pages import ROOT, blocks

PAGE = ROOT / "docs" / "guides" / "raw_samples.md"


def known_encodings() -> set[str]:
    """The names that an error lists."""
    with pytest.raises(ValueError, match="known: ") as unknown:
        encoding_of("no such encoding")
    return set(str(unknown.value).partition("known: ")[2].split(", "))


def test_every_encoding_is_in_the_table_and_every_name_there_is_one() -> None:
    cells = "\n".join(re.findall(r"^\| (`.*?) \|.*\|$", PAGE.read_text(), re.MULTILINE))
    named = set(re.findall(r"`([^`]+)`", cells))
    for name in named:
        encoding_of(name)
    aliases = {"ndarray[:dtype[:shape]]", "jpegarray"}
    between = {
        "int16",
        "int32",
        "uint16",
        "uint32",
        "float32",
    }  # of the ranges that the table writes with "…"
    assert known_encodings() - named == aliases | between


def test_the_command_shuffles_the_samples_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = next(iter(blocks(PAGE, "python")))
    exec(compile(first.text, str(PAGE), "exec"), {})
    [command] = re.findall(r"`shardkit (convert [^`]+)`", PAGE.read_text())
    assert run_command([*command.split(), "--quiet"]) == 0
    written, shuffled = ([sample["caption"] for sample in open_dataset(n)] for n in ("samples", "shuffled"))
    assert written != shuffled
    assert sorted(written) == sorted(shuffled)  # type: ignore[type-var]
