"""A recipe measured on a part of its input: which part, and that what is measured is what a build does."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from shardkit.cli.main import main
from shardkit.tools.plan.build import measured_from_card
from shardkit.tools.plan.sampling import measure_sample
from shardkit.writers import build
from shardkit.writers.estimate import Piece, choose_pieces, copy_start
from shardkit.writers.inputs.scan import scan_inputs
from shardkit.writers.recipe import load_recipe
from support.small_build import make_corpus

pytestmark = pytest.mark.usefixtures("inline_builds")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("sampling"), 400)


@pytest.mark.extended  # four builds
def test_a_sample_of_everything_measures_what_the_build_s_card_says(corpus: Path) -> None:
    sample = measure_sample(corpus, share=Fraction(1), progress=False)
    built = build(corpus, progress=False)
    expected = measured_from_card(json.loads((built.output / "dataset.json").read_text()), "")
    found = sample.measured
    assert (found.read_bytes, found.kept_bytes) == (expected.read_bytes, expected.kept_bytes)
    assert found.funnel.retention == expected.funnel.retention
    assert {s.name for s in found.funnel.stages} == {s.name for s in expected.funnel.stages}
    assert (found.tokens, found.stored_bytes) == (expected.tokens, expected.stored_bytes)
    assert found.text_bytes_per_token == expected.text_bytes_per_token
    assert sample.whole_text_bytes == expected.read_bytes
    assert found.core_bytes_per_second is not None
    assert found.core_bytes_per_second > 0
    assert found.work_bytes_per_text_byte is not None
    assert found.work_bytes_per_text_byte > 0
    assert not (corpus.parent / "out.work").exists()


def test_a_part_takes_of_every_source_its_share_and_always_the_same_files(corpus: Path) -> None:
    splits = scan_inputs(load_recipe(corpus))
    whole = sum(split.bytes for split in splits)
    chosen = choose_pieces(splits, whole // 3)
    assert chosen == choose_pieces(splits[::-1], whole // 3)
    assert {piece.split.source for piece in chosen} == {split.source for split in splits}
    everything = choose_pieces(splits, whole)
    assert sum(piece.bytes for piece in everything) == whole
    assert {piece.split.path for piece in everything} == {split.path for split in splits}


@pytest.mark.parametrize("name", ["plain-0.jsonl", "lines.jsonl.gz"])
def test_the_beginning_of_a_file_is_whole_lines(corpus: Path, tmp_path: Path, name: str) -> None:
    [split] = [split for split in scan_inputs(load_recipe(corpus)) if split.file == name]
    taken = copy_start(Piece(split, split.bytes // 2), tmp_path / "head", whole_lines=True)
    lines = (tmp_path / "head").read_bytes().split(b"\n")
    assert 0 < taken <= split.bytes
    assert lines.pop() == b""
    assert [json.loads(line)["number"] for line in lines]


def test_the_command_plans_from_a_finished_dataset(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = build(corpus, progress=False)
    assert main(["plan", "build", "--from", str(result.output), "--tokens", "1e9", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    kept, read = result.funnel.kept.bytes, result.funnel.read.bytes
    assert plan["retention"] == pytest.approx(kept / read)
    assert plan["raw_bytes"] == pytest.approx(1e9 * read / result.tokens)
    assert plan["inputs"]["text_bytes_per_token"] == {
        "value": pytest.approx(kept / result.tokens),
        "origin": "measured",
    }
    assert plan["inputs"]["core_bytes_per_second"]["origin"] == "assumed"


@pytest.mark.extended
def test_the_command_measures_a_recipe(corpus: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "build", str(corpus), "--sample-bytes", "20KB", "--quiet", "--json"]) == 0
    out, err = capfd.readouterr()
    plan = json.loads(out)
    assert plan["inputs"]["core_bytes_per_second"]["origin"] == "measured"
    assert plan["measured_on"]["stored_bytes"] > 0
    assert err == ""
    assert any("duplicates were found within the sample only" in note for note in plan["notes"])
