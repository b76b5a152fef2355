"""The map of semantic clusters is of what the build kept: the clusters in the metadata of documents."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("starlette", reason="the pages need shardkit[view]")
pytest.importorskip("uvicorn", reason="the pages need shardkit[view]")
pytest.importorskip("faiss", reason="dedup.semantic needs it")

from shardkit.errors import ShardkitError
from shardkit.tools.explore.export import export_site
from shardkit.tools.explore.site import Site
from shardkit.tools.explore.topics import _squarified
from shardkit.writers import build
from support.explored_build import Page, explore, lines_of, links_to, show
from support.small_build import make_corpus
from support.static_model import make_static_model

WORDS = [f"word{number}" for number in range(200)]
SEMANTIC = {
    "embed": {"model": "vectors.safetensors", "tokenizer": "words.json"},
    "clusters": 6,
    "similarity": 0.98,
}


def make(folder: Path, **fields: str) -> Path:
    """120 documents about six kinds of things, some nearly twice; some pretend to be in cluster 5."""
    recipe = make_corpus(folder, 8)
    make_static_model(folder, WORDS)
    rng, lines = random.Random(4), list[str]()
    for number in range(120):
        words = rng.choices(WORDS[30 * (number % 6) : 30 * (number % 6) + 30], k=80)
        for text in (" ".join(words), " ".join([*words, "word1"]))[: 1 + (number % 3 == 0)]:
            odd: Any = {"cluster": 5, "x": '","cluster":5,"'} if number % 2 else '{"cluster":5}, "cluster":5'
            lines.append(json.dumps({"text": text, "odd": odd}))
    (folder / "plain-0.jsonl").write_text("\n".join(lines) + "\n")
    inputs = [{"path": "plain-0.jsonl", "source": "web", "metadata": ["odd"]}]
    settings = {
        "inputs": inputs,
        "dedup": {"semantic": SEMANTIC | fields, "max_removed_fraction": 1},
        "filters": [],
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return Path(build(recipe, overrides=overrides, progress=False).output)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, inline_builds: None) -> Path:
    return make(tmp_path_factory.mktemp("topics") / "corpus", field="cluster", distance="far")


def documents(out: Path) -> list[dict[str, Any]]:
    """The kept documents: their ids, copies, and what the build wrote into their metadata."""
    first = [line for line in lines_of(out, "provenance") if line["document_start"] == 0]
    return [line | json.loads(str(line["metadata"])) for line in first]


def test_tiles_have_the_documents_of_each_cluster_and_their_duplicates(out: Path) -> None:
    page = show(Site(explore(out)), "map")
    kept, removed = Counter[int](), Counter[int]()
    for one in documents(out):
        kept[one["cluster"]] += 1
        removed[one["cluster"]] += one["copies"] - 1
    assert len(kept) == 6
    assert sum(removed.values()) == pq.read_table(out / "duplicates").num_rows > 10
    shown = re.findall(r"cluster (\d+): (\d+) documents, (\d+) duplicates removed", page.words)
    assert {int(a): (int(b), int(c)) for a, b, c in shown} == {n: (kept[n], removed[n]) for n in kept}
    areas = [
        float(str(one["width"]).rstrip("%")) * float(str(one["height"]).rstrip("%"))
        for tag, one in page.tags
        if tag == "rect" and str(one["class"]).startswith("shade")
    ]
    whole = sum(kept.values())
    assert areas == pytest.approx([1e4 * int(count) / whole for _, count, _ in shown], rel=0.01)


def test_a_cluster_shows_its_most_typical_documents(out: Path) -> None:
    site = Site(explore(out))
    clusters = {int(link["cluster"]) for link in links_to(show(site, "map"), "topic")}
    assert clusters == {one["cluster"] for one in documents(out)}
    for cluster in clusters:
        page = show(site, "topic", cluster=cluster)
        members = [one for one in documents(out) if one["cluster"] == cluster]
        assert f"{len(members)} kept documents" in page.words
        distances = {one["document_id"].hex(): one["far"] for one in members}
        found = [distances[link["id"]] for link in links_to(page, "document")]
        assert found == sorted(distances.values())[:12]
    with pytest.raises(ShardkitError, match="no document is in a semantic cluster 77"):
        show(site, "topic", cluster=77)


def test_an_export_has_the_map_and_its_clusters(out: Path, tmp_path: Path) -> None:
    export_site(Site(explore(out)), tmp_path / "site")
    pages = {file.name for file in (tmp_path / "site").iterdir()}
    assert {f"topic-{number:03d}.html" for number in range(1, 7)} < pages
    html = (tmp_path / "site" / "map-001.html").read_text()
    assert "refresh" not in html
    links = {link for link in Page(html).links if link.startswith("topic")}
    assert len(links) == 6
    assert links < pages


def test_a_build_that_kept_no_clusters_says_how_to_have_a_map(tmp_path: Path, inline_builds: None) -> None:
    site = Site(explore(make(tmp_path / "corpus")))
    assert "field: cluster" in show(site, "map").words
    assert "6 clusters of vectors" in show(site, "map").words


def test_a_build_without_semantic_duplicates_has_no_map(tmp_path: Path, inline_builds: None) -> None:
    made = Path(build(make_corpus(tmp_path, 40), progress=False).output)
    site = Site(explore(made))
    assert "map" not in site.pages
    assert "/map" not in show(site, "funnel").links


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=80))
def test_tiles_fill_the_map_and_do_not_overlap(sizes: list[int]) -> None:
    sizes.sort(reverse=True)
    places = list(_squarified(sizes, 2.0, 1.0))
    whole = sum(sizes)
    assert [w * h for _, _, w, h in places] == pytest.approx([2.0 * size / whole for size in sizes])
    for x, y, w, h in places:
        assert -1e-9 <= x <= x + w <= 2 + 1e-6
        assert -1e-9 <= y <= y + h <= 1 + 1e-6
    for number, (x, y, w, h) in enumerate(places):
        for left, top, width, height in places[:number]:
            assert (
                min(x + w, left + width) - max(x, left) < 1e-6
                or min(y + h, top + height) - max(y, top) < 1e-6
            )
