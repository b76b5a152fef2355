"""Every shape of recipe goes through every verb that takes one, and a plan leaves nothing anywhere."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import shardkit
from shardkit.cli.main import main
from shardkit.writers.explain import explain_build
from shardkit.writers.recipe.inputs import FimConfig
from shardkit.writers.recipe.recipe import Recipe, load_recipe
from shardkit.writers.stages.graph import stage_needs
from shardkit.writers.stages.needs import Corpus, Shape, compared_lines
from support.s3_moto import S3Server, s3_server
from support.small_build import EOS, text_of, train_bpe
from support.static_model import make_static_model

pytestmark = pytest.mark.usefixtures("inline_builds")

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
SCORES = {"scores": {"path": "scores.parquet", "key": "id", "document": "id", "columns": {"a": None}}}
BUCKETS = {"buckets": {"scores": [{"column": "a"}], "field": "quality", "bins": 4}}
VECTORS = {"model": "vectors.safetensors", "tokenizer": "words.json"}
JOINED = {"vectors": "vectors.parquet", "key": "id", "document": "id"}
LONG = {"length": {"min_words": 2}}
LINES = {"exact": {}, "lines": {"min_characters": 20}}
MDS, WDS, STORE = ({"path": name, "format": name} for name in ("mds", "wds", "tokens"))
TRAINERS = [{"path": name, "format": name} for name in ("megatron", "olmo", "nanogpt", "llmc", "datatrove")]
BY_REPO = {"by": "repo", "similarity": 1.0}
PARQUET, JSONL = ({"path": name, "format": name} for name in ("parquet", "jsonl"))
DOCUMENTS: dict[str, Any] = {"path": "documents-*.jsonl", "metadata": ["repo", "path"], "source": "web"}
CHAT = {"path": "chat.jsonl", "messages": "messages"}
SHAPES: dict[str, dict[str, Any]] = {
    "output": {},
    "tars": {"output": WDS},
    "store": {"output": STORE},
    "megatron": {"output": TRAINERS[0]},
    "trainers": {"outputs": TRAINERS, "split": {"validation": "5%"}},
    "trainers-rows": {"outputs": [MDS, STORE, *TRAINERS, PARQUET]},
    "trainers-chat": {"inputs": [CHAT], "outputs": [TRAINERS[1], TRAINERS[4]]},
    "text": {"output": JSONL, "tokenizer": None},
    "outputs": {"outputs": [MDS, WDS, STORE, PARQUET, JSONL]},
    "texts": {"outputs": [PARQUET, JSONL], "tokenizer": None},
    "work": {"work": "kept-work", "scratch": "kept-scratch"},
    "share": {"split": {"validation": "5%"}},
    "number": {"split": {"validation": 5, "test": {"web": 3}}},
    "split-outputs": {"outputs": [MDS, PARQUET], "split": {"validation": "1%"}},
    "split-text": {"output": PARQUET, "split": {"validation": 9}},
    "split-by": {"outputs": [MDS, PARQUET], "split": BY_REPO | {"validation": 60}},
    "split-group": {"group": "repo", "split": BY_REPO | {"validation": {"web": 50}}},
    "where": {"outputs": [MDS | {"where": {"repo": "r1"}}, JSONL | {"where": {"repo": ["r0", "r2"]}}]},
    "scores": {"filters": [SCORES]},
    "buckets": {"filters": [SCORES, BUCKETS], "output": MDS | {"where": {"quality": "3"}}},
    "group": {"group": {"by": "repo", "title": "path"}},
    "path-fields": {
        "inputs": [{"path": "hive", "path_fields": "hive"}, DOCUMENTS],
        "group": "lang",
    },
    "chat": {"inputs": [CHAT]},
    "fim": {"inputs": [DOCUMENTS | {"fim": True}]},
    "lines": {"dedup": LINES},
    "url": {"dedup": {"url": True, "exact": {}}},
    "near": {"dedup": {"exact": {}, "near": {"similarity": 0.8}}},
    "semantic": {"dedup": {"exact": {}, "semantic": {"embed": VECTORS, "similarity": 0.9}}},
    "vectors": {"dedup": {"semantic": {"embed": JOINED}}},
    "against": {"dedup": {"near": {"against": ["index"]}}},
    "steps": {"steps": ["exact", LONG, "lines", LONG, {"near": 0.8}, SCORES, "pii"]},
    "steps-outputs": {
        "steps": [LONG, "url", SCORES, BUCKETS, "exact", LONG],
        "outputs": [MDS | {"where": {"quality": ["2", "3"]}}, PARQUET],
        "split": {"validation": 60},
    },
    "steps-again": {"steps": ["url", "exact", "lines", "exact", {"near": 0.8}, LONG, "exact"]},
    "steps-late": {"steps": [LONG, {"near": 0.8}, "exact"]},
    "steps-chat": {"inputs": [CHAT], "steps": ["exact", LONG]},
    "annotate": {"annotate": True, "max_bad_fraction": 0.5},
    "annotate-steps": {
        "annotate": True,
        "steps": [LONG, "exact", SCORES, "lines", "exact", {"near": 0.8}, LONG],
        "outputs": [MDS, PARQUET],
    },
    "limit": {"limit": 50},
    "amounts": {"amounts": {"web": {"documents": 70}}, "outputs": [MDS, PARQUET]},
    "amounts-tokens": {"amounts": {"web": {"tokens": 900}}},
    "amounts-repeat": {"amounts": {"web": {"repeat": 2.5}}, "split": {"validation": 5}},
    "amounts-by": {"amounts": {"web": {"by": "repo", "documents": 20}}},
    "amounts-share": {"amounts": {"web": {"share": 0.5}}, "split": {"validation": 5}},
}
QUICK = (
    *(
        "outputs",
        "semantic",
        "vectors",
        "texts",
        "split-outputs",
        "number",
        "split-by",
        "buckets",
        "group",
        "chat",
        "work",
        "amounts",
    ),
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, inline_builds: None) -> Path:
    folder = tmp_path_factory.mktemp("shapes")
    rows = [
        {"text": text_of(n), "id": n, "url": f"https://a.org/{n}", "repo": f"r{n % 5}", "path": f"{n}.py"}
        for n in range(240)
    ]
    for part in range(2):
        lines = [json.dumps(row) + "\n" for row in rows[part::2]]
        (folder / f"documents-{part}.jsonl").write_text("".join(lines))
    for lang in ("de", "en"):
        (folder / "hive" / f"lang={lang}").mkdir(parents=True)
        lines = [json.dumps({"text": f"{lang} {text_of(n)}"}) + "\n" for n in range(20)]
        (folder / "hive" / f"lang={lang}" / "part.jsonl").write_text("".join(lines))
    talks = [
        [{"role": "user", "content": f"what is {n}?"}, {"role": "assistant", "content": text_of(n)}]
        for n in range(60)
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    make_static_model(folder, ["document", "says", "and", "more", "words"])
    pq.write_table(
        pa.table({"id": range(240), "a": [n * 37 % 241 for n in range(240)]}), folder / "scores.parquet"
    )
    vectors = pa.array(np.random.default_rng(0).standard_normal((240, 8)).tolist())
    pq.write_table(pa.table({"id": range(240), "embedding": vectors}), folder / "vectors.parquet")
    special = EOS, *FimConfig().tokens
    train_bpe([text_of(n) for n in range(50)], special=special).save(str(folder / "tokenizer.json"))
    indexed = write(
        folder, {"inputs": [DOCUMENTS | {"path": "documents-0.jsonl"}], "dedup": {"near": {}}, "limit": 20}
    )
    assert main(["dedup-index", str(indexed), str(folder / "index"), "--quiet"]) == 0
    return folder


def write(folder: Path, shape: dict[str, Any]) -> Path:
    data: dict[str, Any] = {
        "inputs": [DOCUMENTS],
        "tokenizer": {"path": "tokenizer.json", "eos": EOS},
        "pack": {"sequence_length": 64},
        "output": {"path": "out"},
        "memory": "256MiB",
    } | shape
    if "outputs" in shape:
        del data["output"]
    if data["tokenizer"] is None or all(one.get("format") == "tokens" for one in [data.get("output", {})]):
        data.pop("pack")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(data))
    return folder / "recipe.yaml"


@pytest.fixture
def folder(corpus: Path, tmp_path: Path) -> Path:
    """The corpus at a place of its own; its files are links."""
    made = tmp_path / "user"
    for path in corpus.rglob("*"):
        if path.is_file() and path.name != "recipe.yaml":
            target = made / path.relative_to(corpus)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, target)
    return made


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temporary folder."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """{path: (inode, time of the last change)} of all files and folders."""
    found = {str(path): path.stat() for path in [folder, *folder.rglob("*")]}
    return {path: (status.st_ino, status.st_mtime_ns) for path, status in found.items()}


def plan_of(recipe: Path, capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capfd.readouterr()
    code = main(["plan", "build", str(recipe), "--sample-bytes", "20KB", "--quiet", "--json"])
    out, err = capfd.readouterr()
    assert code == 0, err
    plan: dict[str, Any] = json.loads(out)
    return plan


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "shape", [pytest.param(name, marks=() if name in QUICK else pytest.mark.extended) for name in SHAPES]
)
def test_a_recipe_of_every_shape_is_planned_built_explained_and_cleaned(
    folder: Path, scratch: Path, shape: str, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = write(folder, SHAPES[shape])
    before = listing(folder)
    plan = plan_of(recipe, capfd)
    assert listing(folder) == before, "a plan writes to no place of the user's"
    assert not [*scratch.iterdir()], "and leaves nothing"

    work = SHAPES[shape].get("work", "work")
    overrides = ["--set", f"work={work}"]
    assert main(["build", str(recipe), "--quiet", *overrides]) == 0
    result = explain_build(recipe, overrides=[f"work={work}"])
    assert not result.later
    assert not result.stale
    assert all(stage.finished == stage.tasks for stage in result.stages)
    ran = {stage.stage for stage in result.stages if "-merge-" not in stage.stage} | {"upload"}
    modelled = {stage["stage"] for stage in plan["stages"] if "-merge-" not in stage["stage"]}
    assert ran - {"tokenizer"} <= modelled, "a plan counts what every stage asks for"
    assert modelled - ran <= {"side_files", "verify"}, "of which those may have nothing to do"

    check_statements(load_recipe(recipe), folder / work)

    before = listing(folder / work)
    assert main(["clean", str(recipe), *overrides]) == 0
    assert {path for path in before if path.endswith("commit.json")} <= {*listing(folder / work)}
    for one in load_recipe(recipe).datasets():
        assert len(shardkit.open(folder / one.output.path))
    assert main(["clean", str(recipe), "--all", *overrides]) == 0
    assert not (folder / work).exists()


# Stages whose tasks follow from data that sizes do not tell: parts of files with scores, rounds of a split,
# tables of provenance that are equal for two outputs, pairs that there may not be, documents of an index, and
# what a pass of filters behind duplicate removal writes.
FROM_DATA = {
    *("filter_left", "filter_left-2"),
    *("scores", "split_rows", "split_tables", "split_probe", "split_propose", "split_choose", "provenance"),
    *("split_draw", "split_fit", "split_families", "verify", "side_files", "semantic_vectors"),
}
FROM_INDEX = {"shingles"}


def check_statements(recipe: Recipe, work: Path) -> None:
    """A step states the tasks and the files that its stages commit."""
    committed: dict[str, list[int]] = {}
    for path in work.rglob("commit.json"):
        commit = json.loads(path.read_text())
        counted = committed.setdefault(path.parts[-3], [0, 0])
        counted[0] += 1
        counted[1] += 1 + len(commit["outputs"])
    cards = []
    for one in recipe.datasets():
        card = shardkit.open(recipe.folder / one.output.path).card
        assert card is not None
        cards.append((one, card))
    read = cards[0][1].funnel.read
    corpus = Corpus(
        splits=committed["clean"][0],
        documents=read.documents,
        text_bytes=read.bytes,
        tokens=max([1, *(card.tokens for one, card in cards if not one.output.is_text)]),
        memory=recipe.memory,
        shard_bytes=recipe.output.shard_bytes,
        steps=[step.name for step in recipe.global_steps],
        lines=0 if recipe.dedup.lines is None else compared_lines(read.bytes, None),
        shape=Shape.of(recipe),
    )
    stated = {one.stage: [one.tasks, one.puts] for one in stage_needs(corpus)}
    near = recipe.dedup.near
    loose = FROM_DATA | (FROM_INDEX if near is not None and near.against else set()) | {"tokenizer"}
    assert {stage: found for stage, found in committed.items() if stage not in loose} == {
        stage: asked for stage, asked in stated.items() if stage not in loose
    }


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", ["output", "outputs", "split", "work"])
def test_a_plan_of_a_build_in_a_store_writes_nothing_there(
    folder: Path, scratch: Path, s3: S3Server, shape: str, capfd: pytest.CaptureFixture[str]
) -> None:
    url = f"s3://{s3.new_bucket()}"
    shapes: dict[str, dict[str, Any]] = {
        "output": {"output": {"path": f"{url}/out"}},
        "outputs": {"outputs": [{"path": f"{url}/rows"}, {"path": f"{url}/text", "format": "parquet"}]},
        "split": {"output": {"path": f"{url}/out"}, "split": {"validation": 5}},
        "work": {"output": {"path": f"{url}/out"}, "work": f"{url}/work", "scratch": "kept-scratch"},
    }
    recipe = write(folder, shapes[shape])
    before = listing(folder)
    s3.requests.clear()
    plan_of(recipe, capfd)
    assert not [request for request in s3.requests if not request.startswith(("GET", "HEAD"))]
    assert listing(folder) == before
    assert not [*scratch.iterdir()]


def test_a_plan_counts_each_dataset_that_the_build_writes(
    folder: Path, scratch: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one = plan_of(write(folder, {"output": MDS}), capfd)
    two = plan_of(write(folder, {"outputs": [MDS, WDS]}), capfd)
    text = plan_of(write(folder, {"outputs": [MDS, PARQUET]}), capfd)
    split = plan_of(write(folder, {"output": MDS, "split": {"validation": "20%"}}), capfd)
    assert one["tokens"] == two["tokens"] == text["tokens"]
    assert split["tokens"] == pytest.approx(one["tokens"], rel=0.02)
    assert two["output_bytes"] > 1.9 * one["output_bytes"]
    assert text["output_bytes"] > 1.1 * one["output_bytes"]
    assert one["retention"] == two["retention"] == text["retention"]
    assert split["retention"] == pytest.approx(one["retention"], rel=0.02)

    def tasks(plan: dict[str, Any], stage: str) -> int:
        return sum(one["tasks"] for one in plan["stages"] if one["stage"] == stage)

    assert tasks(split, "tokenize") == 2 * tasks(one, "tokenize") == 2 * tasks(two, "tokenize")
    assert tasks(two, "pack") == 2 * tasks(one, "pack")


def test_the_shape_of_a_recipe_says_what_its_build_makes(folder: Path) -> None:
    shape = Shape.of(load_recipe(write(folder, SHAPES["split-outputs"])))
    assert shape == Shape(tokenized=2, packed=2, texts=2, parts=1)
    shape = Shape.of(load_recipe(write(folder, SHAPES["buckets"])))
    assert shape == Shape(scores=1, has_buckets=True, side_files=1, columns=1)
