"""The page for those who come from datatrove: both sides keep the same documents, and its names exist."""

from __future__ import annotations

import ast
import gzip
import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardkit.cli.main import VERBS, make_parser
from shardkit.cli.main import main as run_command
from shardkit.writers.filters.config import FilterEntry
from shardkit.writers.recipe.recipe import Recipe, recipe_from_mapping
from support.pages import ROOT, blocks

PAGE = ROOT / "docs" / "guides" / "replace_datatrove.md"
ROWS = re.findall(r"^\| (`[A-Z].*?) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
# Blocks of datatrove 0.10.1 that a pipeline can have, but those for media and for generating text.
CLASSES = """
    C4BadWordsFilter C4ParagraphFilter C4QualityFilter CCNetPerplexityStats CsvReader DocStats
    DocumentTokenizer DocumentTokenizerContextShuffler DocumentTokenizerMerger ESDatasetToSequence
    ESMergeSequences ESRangeRemover ExactDedupBuildIndex ExactDedupFilter ExactDedupSignature ExactFindDedups
    FTFYFormatter FastTextClassifierFilter FineWebQualityFilter GopherQualityFilter GopherRepetitionFilter
    HuggingFaceBucketWriter HuggingFaceDatasetReader HuggingFaceDatasetWriter IpcReader JobsPipelineExecutor
    JsonlReader JsonlWriter LambdaFilter LangStats LanguageFilter LengthCounter LineStats
    LocalPipelineExecutor MegatronDocumentTokenizer MinhashBuildIndex MinhashDedupBuckets MinhashDedupCluster
    MinhashDedupFilter MinhashDedupSignature NGramsDecontFilter NGramsDecontIndexer PIIFormatter
    ParagraphStats ParquetReader ParquetWriter RayPipelineExecutor ReadabilityInscriptis RegexFilter
    SamplerFilter SentenceDedupBuildIndex SentenceDedupFilter SentenceDedupSignature SentenceFindDedups
    SentenceStats SingleBloomFilter SlurmPipelineExecutor StatsMerger SymbolLinesFormatter TokenStats
    TokensCounter Trafilatura URLFilter UnigramLogProbFilter WarcReader WordStats WordsContaminationStats
"""
FOLDERS = ["readers", "extractors", "filters", "formatters", "dedup", "decont", "tokens", "writers", "stats"]


def test_every_block_of_datatrove_is_on_the_page() -> None:
    named = set(re.findall(r"`([A-Z]\w+)`", PAGE.read_text()))
    assert named >= {*CLASSES.split()}
    assert named - {*CLASSES.split()} == {"BaseFilter", "BaseFormatter", "InferenceRunner"}


def test_the_recorded_blocks_are_datatroves() -> None:
    """Read the sources of the installed version, which may be older: importing them needs more packages."""
    found = importlib.util.find_spec("datatrove")
    if found is None or found.origin is None:
        pytest.skip("datatrove is not installed")
    package = Path(found.origin).parent
    files = [file for name in FOLDERS for file in (package / "pipeline" / name).glob("*.py")]
    defined = {
        node.name
        for file in [*files, *(package / "executor").glob("*.py")]
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    assert {*CLASSES.split()} - defined <= {"HuggingFaceBucketWriter", "JobsPipelineExecutor"}


@pytest.mark.parametrize("cell", [pytest.param(right, id=left[:40]) for left, right in ROWS])
def test_what_stands_on_the_right_is_ours(cell: str) -> None:
    rest = {"inputs": "data", "tokenizer": {"path": "t.json", "eos": "x"}, "output": "out"}
    for words in re.findall(r"`([^`]+)`", cell):
        if words.startswith("shardkit "):
            assert words.split()[1] in VERBS
        elif words.startswith("--"):
            make_parser().parse_args(["build", "recipe.yaml", *words.split()])
        elif ":" in words:
            keys: dict[str, Any] = yaml.safe_load(words)
            if isinstance(output := keys.get("output"), dict):
                output["path"] = "out"
            if not keys.keys() <= Recipe.model_fields.keys():
                keys = {"inputs": {"path": "data"} | keys}
            recipe_from_mapping(rest | keys, folder=Path("/nowhere"))
        elif not re.search(r"[./]", words):  # else the name of a file
            assert words in {*Recipe.model_fields, *FilterEntry.model_fields}


@pytest.mark.extended
@pytest.mark.usefixtures("inline_builds")
def test_both_sides_keep_the_same_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("spacy", reason="pip install 'shardkit[spacy]'")
    pytest.importorskip("datatrove.pipeline.filters")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    words = "that the river be to of and with have house garden winter letters were found "
    texts = [words * (1 + number % 4) + f"on page {number}." for number in range(40)]
    texts += [f"{text} It says lorem ipsum." for text in texts[:9]] + ["#" * 300, "Too short to be kept."]
    lines = [json.dumps({"text": text, "id": f"{number}"}) for number, text in enumerate(texts)]
    (tmp_path / "data" / "a.jsonl").write_text("\n".join(lines))
    theirs, ours = blocks(PAGE, "python")
    exec(compile(theirs.text, str(PAGE), "exec"), {"__name__": "pipeline"})
    expected = [
        json.loads(line)["text"]
        for file in (tmp_path / "kept").glob("*.jsonl.gz")
        for line in gzip.decompress(file.read_bytes()).splitlines()
    ]
    (tmp_path / "my_steps.py").write_text(ours.text)
    (tmp_path / "recipe.yaml").write_text(next(block.text for block in blocks(PAGE, "yaml")))
    [command] = blocks(PAGE, "bash")
    assert run_command([*shlex.split(command.text)[1:], "--output", "ours", "--quiet"]) == 0
    found = [
        json.loads(line)["text"]
        for file in (tmp_path / "ours").rglob("*.jsonl")
        for line in file.read_text().splitlines()
    ]
    assert 0 < len(expected) < len(texts) - 9
    assert sorted(found) == sorted(expected)
