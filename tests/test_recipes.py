"""Every recipe in recipes/ builds a sound dataset from inputs of the kind that it names."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from s3_moto import s3_server
from small_build import make_corpus

from shardkit import open_dataset
from shardkit.verify import verify
from shardkit.writers import build, build_dedup_index, load_recipe

RECIPES = sorted((Path(__file__).resolve().parent.parent / "recipes").glob("*.yaml"))
# Prose that all of the filters let pass: sentences in paragraphs, with the stop words they look for.
PROSE = "\n".join(
    f"In the {n}th year of the {word} there was a plan that many people had to be with, and they kept it."
    for n, word in enumerate(["river", "house", "garden", "winter", "letter", "island"])
)
TEXTS = [PROSE.replace("plan", f"plan{n}") for n in range(30)]

KEPT = {"jsonl-mds": 30, "near-dedup": 20, "parquet-wds": 30, "plain-text": 8, "s3": 30}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_corpus(tmp_path / "small", 40)
    shutil.copy(tmp_path / "small" / "tokenizer.json", tmp_path)
    data = tmp_path / "data"
    for name in ("curated", "crawl/2024", "books", "text/deep"):
        (data / name).mkdir(parents=True)
    lines = "".join(json.dumps({"text": text, "license": "x"}) + "\n" for text in TEXTS[:10])
    (data / "curated" / "a.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    lines = "".join(json.dumps({"content": text}) + "\n" for text in TEXTS[5:])
    (data / "crawl" / "2024" / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    count = len(TEXTS)
    columns = {"body": TEXTS, "isbn": list(range(count)), "source_url": [None] * count}
    pq.write_table(pa.table(columns | {"title": TEXTS, "year": [1900] * count}), data / "books" / "b.parquet")
    (data / "text" / "deep" / "c.txt").write_text(TEXTS[0])
    (data / "text" / "d").write_text(TEXTS[1])
    (data / "lines.txt").write_text(PROSE)
    return tmp_path


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 3


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_builds_a_sound_dataset(folder: Path, recipe: Path) -> None:
    shutil.copy(recipe, folder)
    make_index(folder, recipe.stem)
    with buckets_of(recipe):
        result = build(folder / recipe.name, workers=1, progress=False)
        assert verify(result.location).ok
        assert result.funnel.kept.documents == KEPT[recipe.stem]
        with open_dataset(result.location) as dataset:
            assert len(dataset) == result.samples > 0


def make_index(folder: Path, recipe: str) -> None:
    """As near-dedup.yaml says at its top: an index of the curated texts, five of which were crawled too."""
    if recipe == "near-dedup":
        overrides = ['inputs=[{path: "data/curated/*.jsonl.zst"}]', "dedup.near.against=[]"]
        index = folder / "indexes" / "earlier"
        build_dedup_index(folder / "near-dedup.yaml", index, workers=1, overrides=overrides, progress=False)


@contextmanager
def buckets_of(recipe: Path) -> Iterator[None]:
    """A server with the bucket that a recipe names, if it names one."""
    bucket = urlsplit(load_recipe(recipe).output.path).netloc
    if not bucket:
        yield
        return
    with s3_server() as server:
        server.client().create_bucket(Bucket=bucket)
        yield
