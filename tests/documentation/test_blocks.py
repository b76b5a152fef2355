"""The code blocks of README and documentation: commands parse, recipes are valid, and Python runs.

Python blocks of a page run in their order and in one namespace, in a folder that has what the pages name: the
datasets "out", "annotated", "web" and so on, a recipe, lists of exclusions, and a store for s3://bucket.
Pages of trainers have tests of their own, and so have the tutorial and the pages for those who come from
other tools.
"""

from __future__ import annotations

import ast
import importlib
import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import shardkit as sk
from shardkit.cli.main import main as run_command
from shardkit.cli.main import make_parser
from shardkit.storage import open_store
from shardkit.writers.recipe.recipe import recipe_from_mapping
from shardkit.yaml_file import load_yaml
from support.foreign_tars import make_tar
from support.loader_data import make_rows
from support.pages import PAGES, ROOT, Block, blocks
from support.remote_harness import fresh_url, put_folder
from support.small_build import EOS, make_corpus

TRAINERS = ROOT / "docs" / "trainers"
GUIDES = ROOT / "docs" / "guides"
ELSEWHERE = (TRAINERS, *(GUIDES / f"{name}.md" for name in ("migrate", "replace_streaming", "tutorial")))
BLOCKS = [
    block
    for page in PAGES
    for block in blocks(page, "bash", "yaml", "python")
    if block.language == "bash" or not page.is_relative_to(TRAINERS)
]
RUN_PAGES = [
    page
    for page in PAGES
    if not any(page.is_relative_to(other) for other in ELSEWHERE)
    and any(block.is_run for block in blocks(page, "python"))
]
MILD_FILTERS = [  # the rules that a page asks about, in a form that keeps random words
    {
        "gopher_quality": {
            "min_doc_words": 4, "min_stop_words": 0, "max_avg_word_length": 100,
            "max_non_alpha_words_ratio": 0.0,
        }
    },
    {
        "fineweb_quality": {
            "line_punct_thr": 0.0, "short_line_thr": 1.0, "char_duplicates_ratio": 1.0, "new_line_ratio": 1.0
        }
    },
]  # fmt: skip
FILES = re.compile(r"(?<![\w/.-])(?:examples|recipes|tests|docs)/[\w/.-]+\.(?:py|sh|sbatch|yaml)")


def of_language(language: str) -> list[Any]:
    return [pytest.param(block, id=str(block)) for block in BLOCKS if block.language == language]


def commands(text: str) -> list[list[str]]:
    """The words of each command of a shell block."""
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize("block", of_language("bash"))
def test_commands_have_verbs_options_and_files_that_exist(block: Block) -> None:
    for words in commands(block.text):
        if words[0].split("/")[-1] == "shardkit":
            try:
                make_parser().parse_args([word for word in words[1:] if word not in ("||", "true")])
            except SystemExit:
                pytest.fail(f"{block}: {shlex.join(words)}")
    for name in FILES.findall(block.text):
        assert (ROOT / name).exists(), f"{block}: {name}"


@pytest.mark.parametrize("block", of_language("yaml"))
def test_recipes_and_parts_of_recipes_are_valid(block: Block, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(block.text)
    rest = {"inputs": "data", "tokenizer": {"path": "tokenizer.json", "eos": EOS}, "output": "out"}
    given = load_yaml(tmp_path / "recipe.yaml")
    if "outputs" in given:
        del rest["output"]
    recipe_from_mapping(rest | given, folder=tmp_path)


@pytest.mark.parametrize("block", of_language("python"))
def test_python_compiles_and_imports_what_there_is(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text, str(block))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "shardkit":
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), f"{block}: {ast.unparse(node)}"


def make_pictures(folder: Path) -> None:
    """Tars of JPEG files in three classes, as webdataset writes them."""
    folder.mkdir()
    for first in range(0, 60, 20):
        members = []
        for number in range(first, first + 20):
            file = io.BytesIO()
            Image.new("RGB", (40 + number % 3, 30), (number, 99, 3)).save(file, "JPEG")
            members += [(f"{number:03d}.jpg", file.getvalue()), (f"{number:03d}.cls", b"%d" % (number % 3))]
        (folder / f"pictures-{first:03d}.tar").write_bytes(make_tar(members))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, inline_builds: None) -> Path:
    """What the pages name."""
    folder = tmp_path_factory.mktemp("pages") / "pages"
    recipe = make_corpus(folder, 160)
    recipe.write_text(recipe.read_text().replace("source: plain", "source: data"))
    sk.build(recipe, workers=1, progress=False)
    mapping = load_yaml(recipe) | {"filters": MILD_FILTERS, "annotate": True, "output": "annotated"}
    sk.build(recipe_from_mapping(mapping, folder=folder), workers=1, progress=False)
    lines = [
        json.dumps({"text": f"Text {number} " * (9 + number), "score": number / 60}) for number in range(60)
    ]
    (folder / "scored.jsonl").write_text("\n".join(lines))
    scored = {"path": "scored.jsonl", "source": "data", "metadata": ["score"]}
    rest = {"inputs": [scored, mapping["inputs"][1]], "output": "scored", "filters": [], "annotate": False}
    sk.build(recipe_from_mapping(mapping | rest, folder=folder), workers=1, progress=False)
    for name in ("web", "code", "books", "out-val"):
        make_rows(folder / name, 150, 65)
    for name in ("once", "few", "many"):
        make_rows(folder / name, 12, 65)
    for name, rows, length in (("out-2k", 40, 2049), ("out-8k", 12, 8193)):
        make_rows(folder / name, rows, length)
    labelled = [{"text": f"{word} {n} " * 9, "label": word} for n in range(90) for word in ("prose", "list")]
    (folder / "labelled.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in labelled))
    (folder / "reference.jsonl").write_text('{"text": "The cat sat on the mat.\\nIt slept."}\n' * 3)
    (folder / "tokens").mkdir()
    np.arange(60_001, dtype="<u2").tofile(folder / "tokens" / "part-000.npy")
    (folder / "rows").mkdir()
    lists = pa.table({"input_ids": [list(range(2048))] * 40})
    pq.write_table(lists, folder / "rows" / "part-000.parquet")
    (folder / "texts").mkdir()
    texts = [f"Document {number} says: " + "and more words " * 400 for number in range(40)]
    pq.write_table(pa.table({"text": texts}), folder / "texts" / "part-000.parquet")
    make_pictures(folder / "pictures")
    everything = ["trace", str(folder / "out"), "--export", str(folder / "documents.parquet"), "--json"]
    assert run_command(everything) == 0
    for option, name in (("--exclude", "removed.txt"), ("--mask", "masked.txt")):
        asked = ["trace", str(folder / "out"), "--source", "zipped", option, str(folder / name), "--json"]
        assert run_command(asked) == 0
    return folder


@pytest.mark.extended
@pytest.mark.parametrize("page", RUN_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_of_a_page_runs(
    page: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for entry in folder.iterdir():
        (here / entry.name).symlink_to(entry)
    if page.name == "README.md":
        (here / "out").unlink()  # it builds it
    monkeypatch.chdir(here)
    url = fresh_url()
    store = open_store(url)
    put_folder(folder, store)
    space: dict[str, Any] = {"__name__": page.stem}
    for block in blocks(page, "python"):
        if block.is_run:
            code = block.text.replace("s3://bucket/name", f"{url}/out").replace("s3://bucket", url)
            code = code.replace("/nvme/cache", str(tmp_path / "cache"))
            exec(compile("\n" * (block.line - 1) + code, str(page), "exec"), space)
