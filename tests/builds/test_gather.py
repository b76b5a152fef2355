"""Neighboring splits that keep little text are joined behind the first pass of filters; the dataset stays."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from shardkit.writers import BuildResult, build
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS
from shardkit.writers.explain import explain_build
from shardkit.writers.inputs.files import InputFile
from shardkit.writers.inputs.scan import Split
from shardkit.writers.rows.ledger import Count
from shardkit.writers.stages import inputs as build_inputs
from shardkit.writers.stages.gather import neighbors
from shardkit.writers.stages.needs import Corpus
from support.small_build import EOS, text_of, train_bpe, tree
from support.small_models import model_bytes
from support.static_model import make_static_model

FILES = 26
APART = replace(DEFAULT_LIMITS, gather_splits=1 << 30)
JOINED = replace(DEFAULT_LIMITS, gather_splits=2, gather_bytes=256 << 20)  # a few of the small splits
LONG = {"length": {"min_words": 3}}
SCORES = {"scores": {"path": "scores.parquet", "key": "id", "document": "id", "columns": {"a": None}}}
BUCKETS = {"buckets": {"scores": [{"column": "a"}], "field": "quality", "bins": 4}}
LANGUAGE = {"language": {"model": "language.bin", "threshold": 0.0}}
SEMANTIC = {
    "semantic": {"embed": {"model": "vectors.safetensors", "tokenizer": "words.json"}, "similarity": 0.9}
}
PARQUET = {"path": "text", "format": "parquet"}
SHAPES: dict[str, dict[str, Any]] = {
    "steps": {
        "steps": [
            LONG,
            SCORES,
            BUCKETS,
            "url",
            "exact",
            {"lines": {"min_characters": 20}},
            LONG,
            {"near": 0.8},
        ],
        "outputs": [{"path": "mds"}, PARQUET],
        "split": {"validation": 9},
    },
    "source": {"dedup": {"exact": {}}, "pack": {"sequence_length": 64, "order": "source"}},
    "languages": {
        "filters": [LANGUAGE],
        "dedup": {"exact": {}, "near": {"scope": "language"}},
        "amounts": {"web": {"by": "language", "documents": 40}},
    },
    "semantic": {"dedup": {"url": True, **SEMANTIC}, "split": {"validation": 9}},
    "normalized": {"dedup": {"url": {"keep": "longest"}, "exact": {"text": "normalized"}, "near": {}}},
    "annotate": {"annotate": True, "dedup": {"exact": {}}, "outputs": [{"path": "mds"}, PARQUET]},
}
OF_PEOPLE = ("dropped/", "duplicates/")  # each task keeps some examples of texts


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many small files of several formats, with documents that others resemble; one keeps nothing."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "texts").mkdir()
    for number in range(FILES):
        numbers = [number * 5 + n for n in range(number % 4 + 2)] + ([number % 7] if number % 5 == 0 else [])
        write(folder / "texts" / f"{number:03d}", number, numbers)
    write(folder / "texts" / f"{FILES:03d}", FILES, [9, 19])  # all of it is dropped
    special = train_bpe([text_of(n) for n in range(50)], special=[EOS])
    special.save(str(folder / "tokenizer.json"))
    make_static_model(folder, ["document", "says", "and", "more", "words"])
    (folder / "language.bin").write_bytes(model_bytes())
    pq.write_table(
        pa.table({"id": range(200), "a": [n * 37 % 199 for n in range(200)]}), folder / "scores.parquet"
    )
    return folder


def write(stem: Path, number: int, numbers: Sequence[int]) -> None:
    line = "\na line that stands in every document of the corpus"
    texts = [text_of(n) + ("" if n % 10 == 9 else " " + "word " * (number % 3) + line) for n in numbers]
    rows = [
        {"text": text, "id": n, "url": f"https://a.org/{n}"} for n, text in zip(numbers, texts, strict=True)
    ]
    if number % 11 == 10:
        pq.write_table(pa.Table.from_pylist(rows), f"{stem}.parquet")
        return
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    is_gzip = number % 11 == 5
    data = gzip.compress(data, mtime=0) if is_gzip else data
    Path(f"{stem}.jsonl{'.gz' if is_gzip else ''}").write_bytes(data)


def recipe_of(corpus: Path, folder: Path, shape: dict[str, Any]) -> Path:
    content: dict[str, Any] = {
        "inputs": [{"path": str(corpus / "texts" / "*"), "source": "web", "id": "id", "url": "url"}],
        "filters": [LONG],
        "tokenizer": {"path": str(corpus / "tokenizer.json"), "eos": EOS},
        "pack": {"sequence_length": 64},
        "max_failed_splits": 1,  # a split for each file
    }
    content |= shape
    if "steps" in content:
        del content["filters"]
    if "outputs" not in content:
        content["output"] = {"path": "mds"}
    for one in content.get("outputs", [content.get("output")]):
        one.setdefault("shard_bytes", "8KiB")
    text = yaml.safe_dump(content)
    for name in ("scores.parquet", "vectors.safetensors", "words.json", "language.bin"):
        text = text.replace(f" {name}", f" {corpus / name}")
    folder.mkdir()
    (folder / "recipe.yaml").write_text(text)
    return folder / "recipe.yaml"


def made(corpus: Path, folder: Path, shape: dict[str, Any], limits: object, *overrides: str) -> BuildResult:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_inputs, "DEFAULT_LIMITS", limits)
        return build(recipe_of(corpus, folder, shape), overrides=overrides, progress=False)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("inline_builds")
@pytest.mark.parametrize("shape", SHAPES)
def test_the_dataset_does_not_depend_on_which_splits_are_joined(
    corpus: Path, tmp_path: Path, shape: str
) -> None:
    check_same(corpus, tmp_path, SHAPES[shape], is_joined=shape != "annotate")


@pytest.mark.usefixtures("inline_builds")
def test_splits_are_joined_in_a_store_too(corpus: Path, tmp_path: Path) -> None:
    work = f"work=memory://gather-{os.getpid()}/work", f"scratch={tmp_path / 'scratch'}"
    check_same(corpus, tmp_path, SHAPES["source"], *work)


def check_same(
    corpus: Path, folder: Path, shape: dict[str, Any], *overrides: str, is_joined: bool = True
) -> None:
    """Build with and without joined splits; compare all files except those that each task writes its own."""
    apart = made(corpus, folder / "apart", shape, APART)
    joined = made(corpus, folder / "joined", shape, JOINED, *overrides)
    assert ("gather" in joined.seconds) == is_joined
    assert (joined.tasks < apart.tasks) == is_joined
    for result in (apart, joined):
        assert not any(one.funnel.quarantined for one in (result, *result.others))
    one, two = (tree(place) for place in (folder / "apart", folder / "joined"))
    names = {name for name in one.keys() | two.keys() if one.get(name) != two.get(name)}
    ours = {name for name in names if not any(part in name for part in OF_PEOPLE)}
    texts = {name for name in ours if Path(name).name.startswith("text-")}
    about = {"recipe.yaml", "report.html"}
    about |= {"dataset.json", "index.json", "files.json"} if is_joined else set()
    of_files = ("files", "shards", "bytes", "stored_bytes", "fingerprint")
    about |= {"documents.json"} if texts else set()  # the index of files of text, which are cut elsewhere
    assert {Path(name).name for name in ours - texts} <= about
    for place in (one for one in (folder / "apart").rglob("*") if one.is_dir()):
        other = folder / "joined" / place.relative_to(folder / "apart")
        assert rows_of(place) == rows_of(other)
        if (card := place / "dataset.json").exists():
            facts = [json.loads(path.read_text()) for path in (card, other / "dataset.json")]
            for fact in facts:
                for name in of_files if texts else ("files",):
                    fact.pop(name, None)
            assert facts[0] == facts[1]


def rows_of(folder: Path) -> list[str]:
    """The rows of all tables: those of datasets in their order, others without examples of texts."""
    found, is_of_people = [], folder.name in ("dropped", "duplicates")
    for file in sorted(folder.glob("*.parquet")):
        table = pq.read_table(file)
        examples = {"text", "kept_text"} & {*table.column_names} if is_of_people else set()
        found += [str(row) for row in table.drop_columns([*examples]).to_pylist()]
    return sorted(found) if is_of_people else found


SCRIPT = """
import sys
from dataclasses import replace
from shardkit.writers import build
from shardkit.writers.stages import inputs
inputs.DEFAULT_LIMITS = replace(inputs.DEFAULT_LIMITS, gather_splits=2, gather_bytes=256 << 20)
build(sys.argv[1], overrides=["work=work"], workers=1, progress=False)
"""


@pytest.mark.extended
def test_a_build_that_is_killed_while_it_joins_splits_goes_on_to_the_same_bytes(
    corpus: Path, tmp_path: Path
) -> None:
    shape: dict[str, Any] = {"dedup": {"exact": {}, "near": {}}}
    recipe = recipe_of(corpus, tmp_path / "killed", shape)
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(recipe)], start_new_session=True)
    finished = recipe.parent / "work" / "gather"
    while process.poll() is None and not (finished.is_dir() and any(finished.iterdir())):
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (recipe.parent / "mds").exists()
    subprocess.run([sys.executable, "-c", SCRIPT, str(recipe)], check=True)
    whole = made(corpus, tmp_path / "whole", shape, JOINED).output
    assert tree(recipe.parent / "mds") == tree(whole)


@pytest.mark.usefixtures("inline_builds")
def test_a_changed_file_joins_only_its_own_splits_again(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_inputs, "DEFAULT_LIMITS", JOINED)
    shape = {"inputs": [{"path": "texts/*", "source": "web"}]}
    recipe = recipe_of(corpus, tmp_path / "changed", shape)
    (recipe.parent / "texts").symlink_to(corpus / "texts")
    build(recipe, overrides=["work=work"], progress=False)
    (recipe.parent / "texts").unlink()
    (recipe.parent / "texts").mkdir()
    for file in (corpus / "texts").iterdir():
        (recipe.parent / "texts" / file.name).write_bytes(file.read_bytes())
    write(recipe.parent / "texts" / "017", 17, [1000, 1001])
    build(recipe, overrides=["work=work", "output.path=more"], progress=False)
    plans = {plan.stage: plan for plan in explain_build(recipe, overrides=["work=work"]).stages}
    assert plans["gather"].tasks > 2
    joined = len([*(recipe.parent / "work" / "gather").iterdir()])
    assert joined == plans["gather"].tasks + 1


def splits_of(count: int, source: int = 0) -> list[Split]:
    files = [InputFile(f"{source}/{n:06d}.txt", "", 1, "0") for n in range(count)]
    return [Split(n, source, file, "text", None, 0, 1, 0, 1) for n, file in enumerate(files)]


def ranges_of(splits: Sequence[Split], sizes: Sequence[int]) -> list[range]:
    found = neighbors(splits, [Count(0, size) for size in sizes], DEFAULT_LIMITS)
    assert [number for one in found for number in one] == [*range(len(splits))]
    return found


@pytest.mark.parametrize(
    ("total", "wanted"), [(9 << 20, 1 << 20), (600 << 20, 16 << 20), (12 << 40, 4 << 30)]
)
def test_joined_splits_have_about_the_size_that_the_kept_text_asks_for(total: int, wanted: int) -> None:
    draw, count = random.Random(total), 10 * total // wanted
    sizes = [draw.randrange(total // count * 2) for _ in range(count)]
    found = ranges_of(splits_of(count), sizes)
    weights = [sum(sizes[n] for n in one) for one in found]
    assert max(weights) < 1.25 * wanted
    assert min(weights[:-1]) >= 0.5 * wanted
    planned = Corpus(splits=count, documents=1, text_bytes=sum(sizes), tokens=1).gathered
    assert planned == pytest.approx(len(found), rel=0.2)
    large = [DEFAULT_LIMITS.gathered(size) for size in (90 << 30, 3 << 40, 99 << 40)]
    assert large == [32 << 20, 1 << 30, 4 << 30]


def test_large_splits_few_small_ones_and_other_sources_stay_apart() -> None:
    large, small = 8 << 20, 100 << 10
    assert ranges_of(splits_of(31), [small] * 31) == [range(n, n + 1) for n in range(31)]
    assert ranges_of(splits_of(32), [small] * 32)[0] != range(1)
    sizes = [small] * 50 + [large] + [small] * 50
    found = ranges_of([*splits_of(75), *splits_of(26, 1)], sizes)
    assert range(50, 51) in found
    assert not any({74, 75} <= {*one} for one in found)
    assert len(found) < 60
    assert all(len(one) == 1 for one in found if one.start >= 75), "26 are few"


def test_another_file_moves_only_the_joined_splits_next_to_it() -> None:
    splits = splits_of(5000)
    sizes = [random.Random(n).randrange(60_000) for n in range(5000)]
    names = [tuple(splits[n].file for n in one) for one in ranges_of(splits, sizes)]
    more, sizes = splits[:2500] + splits[2501:], sizes[:2500] + sizes[2501:]
    other = [tuple(more[n].file for n in one) for one in ranges_of(more, sizes)]
    assert len(names) > 30
    assert len({*names} ^ {*other}) < 12


def test_splits_with_many_short_documents_or_without_any_are_joined_less() -> None:
    wanted = DEFAULT_LIMITS.gathered(0)
    kept = [Count(0, 0)] * 5000
    assert max(map(len, neighbors(splits_of(5000), kept, DEFAULT_LIMITS))) <= 1024
    short = [Count(1000, 1000)] * 500
    assert len(neighbors(splits_of(500), short, DEFAULT_LIMITS)) == 500
    assert wanted < 4 * 2048 * 1000
    assert (
        np.ptp([len(one) for one in neighbors(splits_of(500), [Count(10, 10)] * 500, DEFAULT_LIMITS)]) < 100
    )
