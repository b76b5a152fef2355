"""The tutorial: its commands run in small, and its outputs and figures are those of the recorded run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from support.pages import ROOT, blocks, script

PAGE = ROOT / "docs" / "guides" / "tutorial.md"
RECORD = json.loads((ROOT / "docs" / "figures" / "tutorial.json").read_text())
OUTPUTS = {one["command"]: one["output"] for one in RECORD["commands"]}


def test_the_recorded_commands_are_those_of_the_page() -> None:
    text = "\n".join(block.text for block in blocks(PAGE, "bash")).replace("\\\n", "")
    assert {" ".join(line.split()) for line in text.splitlines() if line} == OUTPUTS.keys()


def test_the_outputs_on_the_page_are_recorded_ones() -> None:
    info, sample = (block.text for block in blocks(PAGE, "text"))
    assert info in "\n".join(line.rstrip() for line in OUTPUTS["shardkit info out"].splitlines()) + "\n"
    assert sample.strip() == OUTPUTS["python sample.py"].strip()


def test_the_sentences_about_the_run_have_its_figures() -> None:
    text = PAGE.read_text()
    [seconds] = [one["seconds"] for one in RECORD["commands"] if "train_plain" in one["command"]]
    assert f"The one below took {seconds / 60:.0f}," in text
    [rows, length] = re.findall(r"^(?:samples|sequence) +([\d,]+)", OUTPUTS["shardkit info out"], re.M)
    [tokens] = re.findall(r"^tokens +([\d,]+)", OUTPUTS["shardkit info out"], re.MULTILINE)
    assert len(RECORD["losses"]) * 16 < int(rows.replace(",", "")), "no row came twice"
    trained = len(RECORD["losses"]) * 16 * (int(length) - 1)
    stated = f"{trained / 1e6:.1f} of the {int(tokens.replace(',', '')) / 1e6:.1f} million tokens"
    assert f"{len(RECORD['losses'])} steps are {stated}" in text


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_of_the_page_run_and_the_model_writes(tmp_path: Path) -> None:
    tutorial = script("tutorial")
    smaller = {
        "--megabytes 16": "--megabytes 1",
        "--steps 800": "--steps 3",
        "--quiet": "--quiet --workers 1",
    }
    outputs = {command: output for command, _, output in tutorial.run(tmp_path, smaller)}
    assert len(outputs) == len(OUTPUTS)
    assert len(tutorial.losses(tmp_path)) == 3
    assert outputs["python sample.py"].startswith("Return the ")
