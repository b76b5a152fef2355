"""The recipes for kinds of corpora keep and drop what their comments promise, on small data of their shape.

Every recipe in recipes/ is run by this file or by test_recipes.py.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from builds.test_recipes import DANISH, PAGE, PROFILES, PROSE, STORY
from shardkit import open_dataset
from shardkit.datasets.verify import verify
from shardkit.loaders import Stream, StreamingLoader
from shardkit.tools.demo.run import RECIPE as DEMO_RECIPE
from shardkit.tools.trace.text import Decoder
from shardkit.writers import BuildResult, build, build_dedup_index, load_recipe
from support.small_build import make_corpus

pytestmark = pytest.mark.usefixtures("inline_builds")

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
NOTICE = "This text comes from the archive of the village paper, where all others are kept as well.\n"
ITEM = "Which of the three sisters has kept the key of the old mill since the year of the flood?"
FUNCTION = '''\
"""Areas and volumes of simple bodies."""

import math


def area_of_circle(radius: float) -> float:
    """The area inside a circle."""
    return math.pi * radius**2


def volume_of_cylinder(radius: float, height: float) -> float:
    """The volume of an upright cylinder, base times height."""
    if height < 0:
        raise ValueError("a height cannot be negative")
    return area_of_circle(radius) * height
'''
STRUCT = """\
struct node { struct node *next; int value; };

int sum(const struct node *first) {
    int total = 0;
    for (const struct node *at = first; at != NULL; at = at->next) total += at->value;
    return total;
}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_corpus(tmp_path / "small", 40)
    (tmp_path / "recipes").mkdir()
    shutil.copy(tmp_path / "small" / "tokenizer.json", tmp_path / "recipes")
    return tmp_path / "recipes"


def run(folder: Path, name: str, *overrides: str) -> BuildResult:
    """Build a recipe as it is given, and verify what it made."""
    shutil.copy(RECIPES / f"{name}.yaml", folder)
    result = build(folder / f"{name}.yaml", workers=1, overrides=overrides, progress=False)
    assert verify(result.location).ok
    return result


def dropped(result: BuildResult) -> dict[str, int]:
    """Documents by the reason they were dropped for."""
    return {reason: lost.documents for reason, lost in result.funnel.dropped.items() if lost.documents}


def texts(result: BuildResult, folder: Path) -> list[str]:
    """The documents as they were tokenized, sorted."""
    decoder = Decoder(folder / "tokenizer.json")
    with open_dataset(result.location) as dataset:
        rows = [decoder.text(sample["tokens"]) for sample in dataset]  # type: ignore[arg-type]
    return sorted(text for row in rows for text in row.split("<|endoftext|>") if text)


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    """JSON lines, compressed as the name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes({".gz": gzip.compress(data), ".zst": zstandard.compress(data)}.get(path.suffix, data))


def provenance(result: BuildResult) -> list[dict[str, Any]]:
    return [
        row for file in result.output.glob("provenance/*.parquet") for row in pq.read_table(file).to_pylist()
    ]


def test_every_recipe_that_is_left_to_this_file_has_its_test() -> None:
    assert {path.stem for path in RECIPES.glob("*.yaml")} >= PROFILES
    for name in PROFILES:
        assert any(test.startswith(f"test_{name.replace('-', '_')}_") for test in globals())


def test_demo_builds_what_the_demo_does(folder: Path) -> None:
    corpus = folder.parent / "shardkit-demo" / "corpus"
    words = "# " + "one of the many functions that this library has kept " * 3
    write_lines(
        corpus / "source-0.jsonl.gz", [{"text": words, "kind": "source"}, {"text": "", "kind": "source"}]
    )
    write_lines(corpus / "source-1.jsonl.gz", [{"text": STORY, "kind": "source"}])
    columns = {"text": [STORY, PAGE, "too short"], "id": ["a", "b", "c"], "kind": ["manual"] * 3}
    pq.write_table(pa.table(columns), corpus / "documentation.parquet")
    shutil.copy(folder / "tokenizer.json", corpus.parent)
    result = run(folder, "demo")
    assert dropped(result) == {"length/too_few_words": 2, "exact_duplicate": 1}
    assert texts(result, folder) == sorted([words, STORY, PAGE])
    (folder / "theirs.yaml").write_text(DEMO_RECIPE)
    ours, theirs = (load_recipe(folder / name) for name in ("demo.yaml", "theirs.yaml"))
    same_place = ours.model_dump_json().replace("../shardkit-demo/", "")
    same_place = same_place.replace('"path":"again"', '"path":"mds"').replace('"work":null', '"work":"work"')
    assert same_place == theirs.model_dump_json()


def test_c4_cuts_lines_and_drops_pages(folder: Path) -> None:
    (folder / "lists").mkdir()
    (folder / "lists" / "bad_words_en.txt").write_text("frobnicate\n")
    menu = "Home | About us | Frobnicate our company today\nEnable javascript to read this page of ours.\n"
    pages = [
        menu + NOTICE + STORY,
        NOTICE + PAGE,
        STORY + "They like to frobnicate on all of their days.\n",
        PAGE + "Lorem ipsum dolor sit amet.\n",
        PAGE + "It says {name} where there should be a name.\n",
        DANISH,
        "A page of one line is not enough for C4, is it?\n",
        NOTICE + PAGE,
    ]
    write_lines(folder / "data" / "web" / "a.jsonl.gz", [{"text": text} for text in pages])
    result = run(folder, "c4")
    assert dropped(result) == {
        "bad_words/document_removed_with_badwords": 1,
        "c4_quality/curly_bracket": 1,
        "c4_quality/lorem_ipsum": 1,
        "c4_quality/too_few_sentences": 1,
        "exact_duplicate": 1,
        "language/label": 1,
    }
    kept = "\n".join(texts(result, folder))
    whole = [line for line in (NOTICE + STORY + PAGE).splitlines() if not line.endswith("ships")]
    assert Counter(kept.splitlines()) == Counter(whole), "menu cut, the notice once"


def test_gopher_drops_repetition_evaluations_and_near_duplicates(folder: Path) -> None:
    questions = folder / "evaluations" / "questions.jsonl"
    write_lines(questions, [{"question": ITEM, "answer": "None of them."}])
    near = STORY.replace("one more name", "a new name")
    pages = [
        STORY,
        near,
        PAGE,
        PROSE,
        PAGE + ITEM.lower().replace(",", " "),
        "To be or not to be, and that is it.",
    ]
    write_lines(folder / "data" / "web" / "a.jsonl.gz", [{"text": text} for text in pages])
    result = run(folder, "gopher", "dedup.near.measure.planted=4")
    assert dropped(result) == {
        "gopher_quality/gopher_short_doc": 1,
        "gopher_repetition/top_4_gram": 1,
        "decontamination/overlap": 1,
        "near_duplicate": 1,
    }
    assert texts(result, folder) == sorted([STORY, PAGE])


def test_code_keeps_permitted_files_that_people_wrote(folder: Path) -> None:
    shutil.copy(RECIPES / "code_rules.py", folder)

    def record(content: str, *licenses: str) -> dict[str, Any]:
        return {"content": content, "hexsha": "1", "licenses": licenses, "repository": "r", "path": "p"}

    python = [
        record(FUNCTION, "MIT"),
        record(FUNCTION.replace("    ", "\t"), "MIT"),
        record(FUNCTION + "\nx = 1\n", "MIT", "GPL-3.0"),
        record(FUNCTION + "\ny = 2\n"),
        record("# Generated code: DO NOT EDIT\n" + FUNCTION, "ISC"),
        record(FUNCTION + f"names = {['name'] * 200}\n", "MIT"),
        record(FUNCTION.replace("\n", " "), "MIT"),
        record("\n".join(f"{n:#04x}, {n}," for n in range(100)), "MIT"),
        record("pass\n", "MIT"),
    ]
    write_lines(folder / "data" / "python" / "a.jsonl.zst", python)
    write_lines(
        folder / "data" / "c" / "b.jsonl.zst",
        [record(STRUCT, "MIT"), record(FUNCTION, "MIT"), record(STRUCT + "// ask anna@example.org", "MIT")],
    )
    result = run(folder, "code")
    assert dropped(result) == {
        "length/too_few_characters": 1,
        "ratios/too_few_letters": 1,
        "python/license": 2,
        "python/generated": 1,
        "python/long_line": 1,
        "python/long_lines": 1,
        "exact_duplicate": 1,
        "near_duplicate": 2,
    }
    assert texts(result, folder) == sorted([FUNCTION, STRUCT + "// ask email@example.com"])
    [kept] = [row for row in provenance(result) if row["record"] == 0]
    assert json.loads(kept["metadata"]) == {"licenses": ["MIT"], "repository": "r", "path": "p"}


def test_wikipedia_keeps_articles_without_their_boilerplate(folder: Path) -> None:
    stub = "This article is a stub: you can help by expanding it with sources.\n"
    articles = {
        "Harbour": STORY.replace("\n", " ") + "\n" + stub,
        "Bakery": PAGE.replace("\n", " ") + "\n" + stub * 2,
        "Brothers": DANISH.replace("\n", " "),
        "List": "See also\nBakery\nHarbour\n",
    }
    columns = {
        "id": [str(n) for n in range(4)],
        "url": ["https://example.org/" + name for name in articles],
        "title": list(articles),
        "text": list(articles.values()),
    }
    (folder / "data" / "dump").mkdir(parents=True)
    pq.write_table(pa.table(columns), folder / "data" / "dump" / "a.parquet")
    write_lines(
        folder / "data" / "later" / "b.jsonl.gz", [{"id": "9", "title": "Bakery", "text": articles["Bakery"]}]
    )
    result = run(folder, "wikipedia")
    assert dropped(result) == {
        "c4_paragraph/too_few_paragraphs": 1,
        "language/label": 1,
        "exact_duplicate": 1,
    }
    assert "".join(texts(result, folder)).count(stub) == 1
    expected = {
        ("Harbour", "https://example.org/Harbour", "0"),
        ("Bakery", "https://example.org/Bakery", "1"),
    }
    rows = provenance(result)
    assert {(json.loads(row["metadata"])["title"], row["url"], row["id"]) for row in rows} == expected


def test_continue_pretraining_keeps_what_is_new_to_the_model(folder: Path) -> None:
    old = "data/pretraining/*.jsonl.gz"
    write_lines(folder / "data" / "pretraining" / "a.jsonl.gz", [{"text": STORY}, {"text": PROSE}])
    new = [PAGE, STORY.replace("one more name", "a new name"), PAGE, "short"]
    write_lines(folder / "data" / "domain" / "b.jsonl.gz", [{"text": text} for text in new])
    shutil.copy(RECIPES / "continue-pretraining.yaml", folder)
    overrides = [f'inputs=[{{path: "{old}"}}]', "filters=[]", "dedup.near.against=[]"]
    recipe = folder / "continue-pretraining.yaml"
    build_dedup_index(
        recipe, folder / "indexes" / "pretraining", workers=1, overrides=overrides, progress=False
    )
    result = run(folder, "continue-pretraining")
    assert dropped(result) == {"length/too_few_words": 1, "exact_duplicate": 1, "near_duplicate": 1}
    assert texts(result, folder) == [PAGE]
    rehearsal = run(folder, "continue-pretraining", *overrides, "output.path=out/rehearsal")
    assert texts(rehearsal, folder) == sorted([STORY, PROSE])
    streams = [Stream(result.location, weight=19), Stream(rehearsal.location)]
    with StreamingLoader(streams, batch_size=20, return_ids=True) as loader:
        assert next(iter(loader))["stream_id"].sum() == 1
