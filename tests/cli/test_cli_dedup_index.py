"""`shardkit dedup-index`: what it shows of an index, and how it makes one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardkit.cli import dedup_index as verb
from shardkit.cli.main import main
from shardkit.writers.dedup import index as module
from shardkit.writers.dedup.config import MinHashConfig, NearDedupConfig
from shardkit.writers.dedup.index import INDEX_FILE, open_index
from support.dedup_indexes import make_index
from support.small_build import make_corpus

CONFIG = NearDedupConfig(minhash=MinHashConfig(permutations=32), bands=8, rows=4)


@pytest.fixture
def index(tmp_path: Path) -> Path:
    made_from = {"recipe_digest": "0123", "inputs": [{"source": "old [1]", "files": 2}]}
    make_index(tmp_path, [], CONFIG, 1024, made_from=made_from)
    return tmp_path / "index"


def test_an_index_is_shown_with_its_settings_and_its_curve(
    index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dedup-index", "--show", str(index)]) == 0
    text = capsys.readouterr().out
    for words in (
        "0, 0 B of text",
        "the 1,024 smallest hashes of a document",
        "files 2, source old [1]",
        "permutations 32",
        "8 bands x 4 rows: pairs that become candidates",
    ):
        assert words in text
    assert main(["dedup-index", "--show", str(index), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == open_index(index).to_dict()


@pytest.mark.extended
def test_the_index_of_a_recipe_is_made_once_and_named_in_json(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe, place = make_corpus(tmp_path / "corpus", 80), tmp_path / "old"
    words = ["dedup-index", str(recipe), str(place), "--workers", "1", "--sketch", "64"]
    assert main(words) == 2
    assert "error: dedup.near: is not set" in capfd.readouterr().err
    words += ["--set", "dedup.near={minhash: {permutations: 32}, bands: 8, rows: 4}"]
    assert main([*words, "--json", "--quiet"]) == 0
    result = json.loads(capfd.readouterr().out)
    index = open_index(place)
    index.check(CONFIG)
    assert (result["location"], result["digest"]) == (str(place), index.digest)
    assert result["documents"] + sum(result["removed"].values()) == 115
    assert main([*words, "--set", "dedup.near.similarity=0.7"]) == 1
    assert "holds another index; use --replace" in capfd.readouterr().err
    assert main([*words, "--set", "dedup.near.similarity=0.7", "--replace"]) == 0
    assert f"{place} holds the signatures of {result['documents']} documents" in capfd.readouterr().err


def test_what_is_no_index_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dedup-index", "--show", str(tmp_path)]) == 1
    assert f"shardkit: error: {tmp_path / INDEX_FILE}: cannot be read" in capsys.readouterr().err


def test_the_sizes_of_sketches_are_those_of_the_index() -> None:
    assert verb.DEFAULT_SKETCH == module.SKETCH
    assert (verb.MIN_SKETCH, verb.MAX_SKETCH) == (module.MIN_SKETCH, module.MAX_SKETCH)
