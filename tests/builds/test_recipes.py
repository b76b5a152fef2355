"""Every recipe in recipes/ builds a sound dataset from inputs of the kind that it names.

Those for kinds of corpora keep and drop what their comments promise, on small data of their shape.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import zstandard

from servers.web import web_server
from shardkit import open_dataset
from shardkit.datasets.provenance.text import Decoder
from shardkit.datasets.verify import verify
from shardkit.loaders import Stream, StreamingLoader
from shardkit.storage.hub import HubPlace
from shardkit.tools.demo.run import RECIPE as DEMO_RECIPE
from shardkit.writers import BuildResult, build, build_dedup_index, load_recipe
from shardkit.writers.token_store import pack_store
from shardkit.writers.train_classifier import TrainingSettings, train_classifier
from support.default_cases import cases
from support.hub_environment import hub_server
from support.s3_moto import s3_server
from support.small_build import make_corpus

pytestmark = pytest.mark.usefixtures("inline_builds")

# Those that have a test of their own below.
PROFILES = {
    "c4",
    "chat-midtraining",
    "common-crawl",
    "starcoder",
    "toxicity",
    "continue-pretraining",
    "dclm",
    "demo",
    "fineweb2",
    "gopher",
    "long-context",
    "nemotron-cc",
    "wikipedia",
}
FOLDER = Path(__file__).resolve().parents[2] / "recipes"
RECIPES = [recipe for recipe in sorted(FOLDER.glob("*.yaml")) if recipe.stem not in PROFILES]
# Prose that all of the filters let pass: sentences in paragraphs, with the stop words they look for.
PROSE = "\n".join(
    f"In the {n}th year of the {word} there was a plan that many people had to be with, and they kept it."
    for n, word in enumerate(["river", "house", "garden", "winter", "letter", "island"])
)
STORY = """\
The harbour froze early that year, and the fishermen had little to do but mend their nets and wait for spring.
Anna kept the light above the pier. She climbed the stairs each evening with a can of oil, counted the ships
in the ice, and wrote their names into a book that her grandmother began. Nobody had asked her to.
In February a stranger came over the ice with a sledge, and with him a clock that had stopped years ago.
"Can you make it go?" he asked. She had never seen such wheels, but she could not resist taking them apart.
By the time the thaw set in, the clock was running, the stranger had gone, and the book held one more name.
"""
PAGE = """\
Every Thursday the bakery on the corner gives its last loaves away, and half of the street is there.
Old Martin comes with two bags. One is for himself, and the other one is for the horses behind the mill.
There was a time when nobody spoke while they waited; now they trade recipes, seeds and some news.
A girl of about nine has begun to draw them. She sits on the kerb with her pencils and sells nothing.
"You have made my nose too long," the baker said to her once, but he hung it over the oven all the same.
What they will do when he retires is a question that no one in the queue likes to be asked.
"""
DANISH = """\
De to brødre boede i et hus ved havnen, og bag huset lå der en have med gamle æbletræer.
Om vinteren frøs vandet til is, og de kunne gå helt ud til øen og hjem igen på en eftermiddag.
Den ældste ville gerne have et skib, men der var aldrig penge nok. Den yngste læste hellere om stjerner.
En morgen kom der et brev fra Amerika, som ingen af dem havde ventet.
De talte om det hele natten, og til sidst blev de enige om at rejse.
"""
GERMAN = """\
Die beiden Schwestern wohnten in einem Haus an der Mauer, und dahinter lag ein Garten mit alten Birnbäumen.
Im Winter kam das Wasser bis an die Treppe, und sie fuhren mit dem Boot zu den Nachbarn und wieder zurück.
Die ältere wollte auf den Markt in der Stadt, aber von dem Geld war nie genug da.
Die jüngere las sich durch die Bücher des Vaters und schrieb auf, was darin fehlte.
Eines Morgens stand ein Brief auf dem Tisch, mit dem niemand gerechnet hatte.
"""
TEXTS = [PROSE.replace("plan", f"plan{n}") for n in range(30)]

KEPT = {"fineweb": 2, "jsonl-mds": 30, "near-dedup": 20, "parquet-wds": 30, "plain-text": 8, "s3": 30}
KEPT |= {"publish-to-hub": 30, "ray-cluster": 30, "slurm": 30}

DROPPED = {
    "gopher_repetition/top_4_gram": 1,  # PROSE
    "language/label": 1,  # DANISH, which has English stop words
    "warc/http_status": 1,
    "warc/not_a_response": 1,
}


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
    """A place for recipes, with a tokenizer."""
    made = make_corpus(tmp_path / "small", 40).parent
    (tmp_path / "recipes").mkdir()
    shutil.copy(made / "tokenizer.json", tmp_path / "recipes")
    return tmp_path / "recipes"


@pytest.fixture
def corpora(folder: Path) -> Path:
    """The same with what recipes that have no test of their own read."""
    data = folder / "data"
    for name in ("books", "text/deep", "warc"):
        (data / name).mkdir(parents=True)
    write_lines(data / "curated" / "a.jsonl.zst", [{"text": text, "license": "x"} for text in TEXTS[:10]])
    write_lines(data / "crawl" / "2024" / "b.jsonl.gz", [{"content": text} for text in TEXTS[5:]])
    count = len(TEXTS)
    columns = {"body": TEXTS, "isbn": list(range(count)), "source_url": [None] * count}
    pq.write_table(pa.table(columns | {"title": TEXTS, "year": [1900] * count}), data / "books" / "b.parquet")
    (data / "text" / "deep" / "c.txt").write_text(TEXTS[0])
    (data / "text" / "d").write_text(TEXTS[1])
    (data / "lines.txt").write_text(PROSE)
    make_web(data)
    return folder


def warc_of(pages: Sequence[tuple[str, str]]) -> bytes:
    """A WARC file of (status, text of a page), with a record in front that is no page."""
    records = [_warc_record("warcinfo", "application/warc-fields", b"software: x\r\n")]
    for number, (status, text) in enumerate(pages):
        page = "".join(f"<p>{line}</p>" for line in text.splitlines())
        body = f"<html><head><title>x</title></head><body><article>{page}</article></body></html>".encode()
        head = f"HTTP/1.1 {status}\r\nContent-Type: text/html\r\nContent-Length: {len(body)}\r\n\r\n"
        records.append(_warc_record("response", "application/http", head.encode() + body, number))
    return b"".join(gzip.compress(record) for record in records)


def make_web(data: Path) -> None:
    """Write the inputs of fineweb.yaml: extracted texts, and pages among other records of a WARC file."""
    texts = [STORY, PROSE]  # the second one repeats itself
    write_lines(data / "web" / "a.jsonl.gz", [{"text": text, "url": "http://example.com/"} for text in texts])
    pages = [("200 OK", PAGE), ("200 OK", DANISH), ("404 Not Found", PAGE)]
    (data / "warc" / "b.warc.gz").write_bytes(warc_of(pages))


def _warc_record(kind: str, content: str, block: bytes, number: int = 9) -> bytes:
    lines = [
        "WARC/1.0",
        f"WARC-Type: {kind}",
        f"WARC-Record-ID: <urn:uuid:00000000-0000-4000-8000-00000000000{number}>",
        "WARC-Date: 2024-01-01T00:00:00Z",
        f"WARC-Target-URI: http://example.com/{number}",
        f"Content-Type: {content}",
        f"Content-Length: {len(block)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + block + b"\r\n\r\n"


def run(folder: Path, name: str, *overrides: str) -> BuildResult:
    """Build a recipe as it is given, and verify what it made."""
    shutil.copy(FOLDER / f"{name}.yaml", folder)
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


def test_every_recipe_is_built() -> None:
    assert len(RECIPES) >= 3
    assert {path.stem for path in FOLDER.glob("*.yaml")} >= PROFILES
    for name in PROFILES:
        assert any(test.startswith(f"test_{name.replace('-', '_')}_") for test in globals())


SLOW = {"publish-to-hub", "ray-cluster", "fineweb"}  # these start servers, or spaCy
CASES = cases(RECIPES, [recipe for recipe in RECIPES if recipe.stem not in SLOW])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recipe", CASES, ids=lambda recipe: recipe.stem)
def test_a_recipe_builds_a_sound_dataset(corpora: Path, recipe: Path) -> None:
    if recipe.stem == "near-dedup":
        make_index(corpora)
    own_disk = [f"scratch={corpora / 'scratch'}"] if load_recipe(recipe).scratch else []
    with buckets_of(recipe, corpora / "data"):
        result = run(corpora, recipe.stem, *own_disk)
        assert result.funnel.kept.documents == KEPT[recipe.stem]
        if recipe.stem == "fineweb":
            assert dropped(result) == DROPPED
        with open_dataset(result.location) as dataset:
            assert len(dataset) == result.samples > 0


def make_index(folder: Path) -> None:
    """As near-dedup.yaml says at its top: an index of the curated texts, five of which were crawled too."""
    shutil.copy(FOLDER / "near-dedup.yaml", folder)
    overrides = ['inputs=[{path: "data/curated/*.jsonl.zst"}]', "dedup.near.against=[]"]
    index = folder / "indexes" / "earlier"
    build_dedup_index(folder / "near-dedup.yaml", index, workers=1, overrides=overrides, progress=False)


@contextmanager
def buckets_of(recipe: Path, data: Path) -> Iterator[None]:
    """A server with what a recipe writes to, if that is no folder, and with what it reads from there."""
    loaded = load_recipe(recipe)
    if loaded.output.path.startswith("hf://"):
        with hub_server() as hub:
            hub.new_repository(HubPlace.parse(loaded.output.path).repository)
            for place in {HubPlace.parse(config.base) for config in loaded.inputs if config.base}:
                name = hub.new_repository(place.repository)
                files = [file for file in data.rglob("*") if file.is_file()]
                commit = hub.commit(name, {str(file.relative_to(data)): file.read_bytes() for file in files})
                hub.repositories[name].tags[place.revision or "v1"] = commit
            yield
        return
    bucket = urlsplit(loaded.output.path).netloc
    if not bucket:
        yield
        return
    with s3_server() as server:
        client = server.client()
        client.create_bucket(Bucket=bucket)
        for base in {config.base for config in loaded.inputs if config.base}:
            for file in [file for file in data.rglob("*") if file.is_file()]:
                key = f"{urlsplit(base).path.strip('/')}/{file.relative_to(data)}"
                client.put_object(Bucket=bucket, Key=key, Body=file.read_bytes())
        yield


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


def test_common_crawl_is_built_from_the_list_of_a_dump(folder: Path) -> None:
    names = [f"crawl-data/CC-MAIN-2025-08/segments/{n}/warc/CC-MAIN-{n:05d}.warc.gz" for n in range(3)]
    pages = [[("200 OK", PAGE), ("404 Not Found", STORY)], [("200 OK", DANISH)], [("200 OK", PAGE)]]
    files = {name: warc_of(one) for name, one in zip(names, pages, strict=True)}
    given = load_recipe(FOLDER / "common-crawl.yaml").inputs[0]
    path = urlsplit(given.path).path.lstrip("/")
    with web_server(files | {path: gzip.compress("\n".join(names).encode())}) as web:
        places = f"inputs[0].path={web.url}/{path}", f"inputs[0].base={web.url}"
        result = run(folder, "common-crawl", *places)
        assert {row["file"] for row in provenance(result)} <= {*names}
        web.requests.clear()
        assert build(folder / "common-crawl.yaml", overrides=places, progress=False).up_to_date
        # What is unchanged is not read again: only its size and version are.
        asked = sorted(one for one in web.requests if "warc.gz" in one)
        assert asked == [f"HEAD /{name}" for name in names]
    assert texts(result, folder) == ["\n\n".join(PAGE.splitlines())]
    lost = {"warc/not_a_response": 3, "warc/http_status": 1, "language/label": 1, "exact_duplicate": 1}
    assert dropped(result) == lost


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
    result = run(folder, "gopher")
    assert dropped(result) == {
        "gopher_quality/gopher_short_doc": 1,
        "gopher_repetition/top_4_gram": 1,
        "decontamination/overlap": 1,
        "near_duplicate": 1,
    }
    assert texts(result, folder) == sorted([STORY, PAGE])


def test_fineweb2_judges_each_language_by_its_own_configuration(folder: Path) -> None:
    pytest.importorskip("floret", reason="pip install 'shardkit[classifier]'")
    shutil.copytree(FOLDER / "fineweb2", folder / "fineweb2")
    lines = {"dan_Latn": DANISH, "deu_Latn": GERMAN, "eng_Latn": STORY + PAGE}
    spoken = [{"text": line, "label": label} for label, text in lines.items() for line in text.splitlines()]
    write_lines(folder / "languages.jsonl", spoken * 4)
    (folder / "glotlid").mkdir()
    training = TrainingSettings(epochs=60, dimensions=8, word_ngrams=1, buckets=1, held_out=0)
    train_classifier(folder / "languages.jsonl", folder / "glotlid" / "model.bin", settings=training)

    def in_short_lines(text: str) -> str:
        words = text.split()
        return "\n".join(" ".join(words[at : at + 5]) + "." for at in range(0, len(words), 5)) + "\n"

    stops = {"die", "und", "in", "der", "zu", "von", "den", "das", "mit", "sich", "des", "auf"}
    pages = [
        in_short_lines(DANISH),
        in_short_lines(GERMAN),  # German may have fewer lines a word
        GERMAN + "Schreibt an anna@museum.example.org oder kommt vorbei.\n",
        " ".join(word for word in GERMAN.split() if word.lower() not in stops) + "\n",
        GERMAN.splitlines()[0] + "\n" + GERMAN.splitlines()[0] + "\n" + GERMAN,
        STORY,
        DANISH.replace("Amerika", "Afrika"),
    ]
    write_lines(folder / "data" / "web" / "a.jsonl.gz", [{"text": page} for page in pages])
    result = run(folder, "fineweb2")
    assert dropped(result) == {
        "language/label": 1,
        "gopher_quality/gopher_enough_stop_words": 1,
        "gopher_repetition/duplicated_5_n_grams": 1,
        "fineweb_quality/list_ratio": 1,
        "near_duplicate": 1,
    }
    assert texts(result, folder) == sorted(
        [in_short_lines(DANISH), pages[2].replace("anna@museum.example.org", "email@example.com")]
    )
    with open_dataset(result.location) as dataset:
        assert dataset.card is not None
        filters = dataset.card.filters
    assert filters is not None
    assert filters.languages == {
        "deu_Latn": {
            "": 1,
            "gopher_quality/gopher_enough_stop_words": 1,
            "gopher_repetition/duplicated_5_n_grams": 1,
            "fineweb_quality/list_ratio": 1,
        },
        "dan_Latn": {"": 2},
        "eng_Latn": {"language/label": 1},
    }
    assert (
        "What the language filter and those after it dropped" in (result.output / "report.html").read_text()
    )


def test_starcoder_keeps_permitted_files_that_people_wrote(folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(
        ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<repo_name>", "<file_sep>"]
    )
    tokenizer.save(str(folder / "tokenizer.json"))

    def record(content: str, *licenses: str) -> dict[str, Any]:
        return {"content": content, "hexsha": "1", "licenses": licenses, "repository": "r", "path": "p"}

    python = [
        record(FUNCTION, "MIT"),
        record(FUNCTION.replace("    ", "\t"), "MIT"),
        record(FUNCTION + "\nx = 1\n", "MIT", "GPL-3.0"),
        record(FUNCTION + "\ny = 2\n"),
        record("# Auto-generated by a compiler\n" + FUNCTION, "ISC"),
        record(FUNCTION + f"names = {['name'] * 200}\n", "MIT"),
        record(FUNCTION.replace("\n", " "), "MIT"),
        record("\n".join(f"{n}, {n}," for n in range(100)), "MIT"),
        record(FUNCTION + "data = '" + "c2hhcmRraXQ" * 80 + "'\n", "MIT"),
        record("pass\n", "MIT"),
    ]
    write_lines(folder / "data" / "python" / "a.jsonl.zst", python)
    write_lines(
        folder / "data" / "c" / "b.jsonl.zst",
        [record(STRUCT, "MIT"), record(FUNCTION, "MIT"), record(STRUCT + "// ask anna@example.org", "MIT")],
    )
    result = run(folder, "starcoder")
    assert dropped(result) == {
        "length/too_few_characters": 1,
        "code_quality/license": 2,
        "code_quality/generated": 1,
        "code_quality/long_line": 1,
        "code_quality/long_lines": 1,
        "code_quality/too_few_letters": 1,
        "code_quality/too_much_encoded": 1,
        "exact_duplicate": 1,
        "near_duplicate": 2,
    }
    turned = re.compile(r"<fim_prefix>(.*)<fim_suffix>(.*)<fim_middle>(.*)", re.DOTALL)
    [repository] = texts(result, folder)
    header, *files = repository.split("<file_sep>")
    assert header in ("", "<repo_name>r")
    title = "p\n" if header else ""
    assert all(file.startswith(title) for file in files)
    files = [file.removeprefix(title) for file in files]
    found = [turned.fullmatch(text) for text in files]
    plain = [text for text, match in zip(files, found, strict=True) if match is None]
    back = [match[1] + match[3] + match[2] for match in found if match is not None]  # also of SPM
    assert sorted(plain + back) == sorted([FUNCTION, STRUCT + "// ask email@example.com"])
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
    shutil.copy(FOLDER / "continue-pretraining.yaml", folder)
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


def test_long_context_packs_the_same_documents_in_rows_of_every_length(folder: Path) -> None:
    words = [f"w{n}" for n in range(997)]
    texts = [" ".join(words[(n * 31 + k * k) % 997] for k in range(60 + n % 200)) for n in range(150)]
    (folder / "data" / "long").mkdir(parents=True)
    write_lines(folder / "data" / "long" / "a.jsonl.gz", [{"text": text} for text in texts])
    made = run(folder, "long-context")
    kept = {
        Path(one.location).relative_to(folder / "out" / "long").as_posix(): one
        for one in (made, *made.others)
    }
    assert set(kept) == {
        f"{name}/{part}" for name in ("4k", "64k", "tokens") for part in ("train", "validation")
    }
    for part in ("train", "validation"):
        tokens = {kept[f"{name}/{part}"].tokens for name in ("4k", "64k", "tokens")}
        assert len(tokens) == 1
    packed = pack_store(
        folder / "out" / "long" / "tokens" / "train",
        folder / "packed",
        overrides=["pack.sequence_length=65536"],
        workers=1,
        progress=False,
    )
    assert packed.fingerprint == kept["64k/train"].fingerprint


def test_chat_midtraining_trains_on_answers_and_whole_documents(folder: Path) -> None:
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    prompt = "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    (folder / "chat_template.jinja").write_text(template + prompt)
    talk = [{"role": "user", "content": "who kept the light"}, {"role": "assistant", "content": "Anna did"}]
    data = folder / "data"
    write_lines(data / "chats" / "a.jsonl.gz", [{"messages": talk}])
    (data / "pairs").mkdir()
    pairs = {"question": ["what froze that year"], "answer": [" the harbour"]}
    pq.write_table(pa.table(pairs), data / "pairs" / "a.parquet")
    write_lines(data / "documents" / "a.jsonl.gz", [{"text": PAGE}])
    dataset = run(folder, "chat-midtraining").open()
    [row] = dataset
    tokens, mask = (np.asarray(row[name]) for name in ("tokens", "loss_mask"))
    decoder = Decoder(folder / "tokenizer.json", dataset.card)
    ends = np.flatnonzero((tokens == decoder.eos_id) & (np.append(0, tokens[:-1]) != decoder.eos_id)) + 1
    begins = [0, *ends[:-1].tolist()]
    found = {decoder.text(tokens[a:b][mask[a:b] == 1]) for a, b in zip(begins, ends.tolist(), strict=True)}
    assert found == {"Anna did\n", " the harbour", PAGE}


def essay(number: int) -> str:
    """Sentences of the story and the page, in an order of their own."""
    sentences = " ".join((STORY + PAGE).split("\n")).split(". ")
    return ". ".join(random.Random(number).sample(sentences, 10)) + "."


ADVERTISING = (
    "Buy the {} {} today, and you will have it with you by {}.",
    "There is no better {} {} to be found; click here for offer {}.",
    "Our prices of {} {} goods fall until day {}, so be quick!",
    "A voucher for your next {} {} comes with order {} of this shop.",
    "Sign up that we can tell you when a {} {} is on sale for {} points.",
    "Delivery of the {} {} is free from {} euros on, and returns are, too.",
)


def advertisement(number: int) -> str:
    """Sentences that only want something."""
    rng = random.Random(number)
    kinds, things = (
        ["shiny", "cheap", "golden", "light", "rare"],
        ["shoe", "lamp", "phone", "chair", "watch", "coat"],
    )
    chosen = rng.sample(ADVERTISING, len(ADVERTISING))
    return " ".join(
        one.format(f"{rng.choice(kinds)}-{rng.randrange(99)}", rng.choice(things), rng.randrange(10**5))
        for one in chosen
    )


def train(folder: Path, name: str, labels: tuple[str, str]) -> None:
    """A stand-in for a quality model, which knows essays from advertisements."""
    (folder / "models").mkdir(exist_ok=True)
    records = [{"text": essay(n), "label": labels[0]} for n in range(1000, 1060)]
    records += [{"text": advertisement(n), "label": labels[1]} for n in range(1000, 1060)]
    write_lines(folder / "labelled.jsonl", records)
    settings = TrainingSettings(dimensions=8, buckets=1000)
    train_classifier(folder / "labelled.jsonl", folder / "models" / name, settings=settings)


@pytest.mark.extended
def test_dclm_keeps_the_best_tenth_of_what_is_not_a_duplicate(folder: Path) -> None:
    pytest.importorskip("floret", reason="it trains")
    train(folder, "quality.bin", ("hq", "cc"))
    good = [essay(n) for n in range(4)]
    pages = [*good, *(advertisement(n) for n in range(36)), good[0], DANISH.replace("\n", " ")]
    write_lines(folder / "data" / "web" / "a.jsonl.gz", [{"text": page} for page in pages])
    result = run(folder, "dclm")
    assert texts(result, folder) == sorted(good)
    assert dropped(result) == {"exact_duplicate": 1, "language/label": 1, "output/elsewhere": 36}
    facts = json.loads((result.output / "dataset.json").read_text())["buckets"]
    assert (facts["sampled"], facts["documents"]) == (40, 40)
    assert len(facts["edges"]["quality.hq"]) == 9


def test_toxicity_removes_what_its_model_finds_and_marks_what_its_list_has(folder: Path) -> None:
    pytest.importorskip("floret", reason="it trains")
    train(folder, "toxicity.bin", ("other", "toxic"))
    shutil.copytree(FOLDER / "lists", folder / "lists", dirs_exist_ok=True)
    (folder / "lists" / "bad_words_en.txt").write_text("parrot\nold mill\n")
    clean, marked = essay(0), essay(1) + " Parrot, parrots, parrot." + " The old mill."
    pages = [clean, marked, clean, advertisement(3), DANISH.replace("\n", " ")]
    write_lines(folder / "data" / "web" / "a.jsonl.gz", [{"text": page} for page in pages])
    result = run(folder, "toxicity")
    assert texts(result, folder) == [clean]
    [other] = result.others
    assert texts(other, folder) == [marked]
    assert {"classifier/score": 1, "exact_duplicate": 1, "language/label": 1}.items() <= dropped(
        result
    ).items()


@pytest.mark.extended
def test_nemotron_cc_makes_a_dataset_of_each_quality_by_the_best_of_three_scores(folder: Path) -> None:
    pytest.importorskip("floret", reason="it trains")
    train(folder, "quality.bin", ("hq", "cc"))
    train(folder, "informative.bin", ("informative", "not"))
    pages = [essay(n) for n in range(4)] + [advertisement(n) for n in range(56)]
    records = [{"text": page, "id": f"page-{n}"} for n, page in enumerate(pages)]
    write_lines(folder / "data" / "web" / "a.jsonl.gz", records)
    (folder / "data" / "scores").mkdir()
    edu = [float(n == 40) * 5 for n in range(60)]  # one advertisement is educational
    scores = {"id": [record["id"] for record in records], "edu": edu}
    pq.write_table(pa.table(scores), folder / "data" / "scores" / "a.parquet")
    result = run(folder, "nemotron-cc")
    parts = [result, *result.others]
    assert sum(part.funnel.kept.documents for part in parts) == 60
    found = [json.loads(row["metadata"])["quality"] for row in provenance(result)]
    ids = {row["id"] for row in provenance(result)}
    assert {"page-0", "page-1", "page-2", "page-3", "page-40"} <= ids
    assert set(found) <= {"high", "medium-high"}
    low = pq.read_table(sorted((folder / "out" / "nemotron-cc" / "low").glob("text-*.parquet")))
    assert {json.loads(one)["quality"] for one in low.column("metadata").to_pylist()} == {"low"}
