"""Every recipe in recipes/ builds a sound dataset from inputs of the kind that it names."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
import zstandard

from shardkit import open_dataset
from shardkit.datasets.verify import verify
from shardkit.writers import build, build_dedup_index, load_recipe
from support.default_cases import cases
from support.s3_moto import s3_server
from support.small_build import make_corpus, tree

pytestmark = pytest.mark.usefixtures("inline_builds")

PROFILES = {"c4", "code", "continue-pretraining", "demo", "gopher", "wikipedia"}  # test_recipes_profiles.py
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
TEXTS = [PROSE.replace("plan", f"plan{n}") for n in range(30)]

KEPT = {"fineweb": 2, "jsonl-mds": 30, "near-dedup": 20, "parquet-wds": 30, "plain-text": 8, "s3": 30}
KEPT |= {"ray-cluster": 30, "slurm": 30}

DROPPED = {
    "gopher_repetition/top_4_gram": 1,  # PROSE
    "language/label": 1,  # DANISH, which has English stop words
    "warc/http_status": 1,
    "warc/not_a_response": 1,
}


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
    make_web(data)
    return tmp_path


def make_web(data: Path) -> None:
    """What fineweb.yaml reads: extracted texts, and pages among other records of a WARC file."""
    (data / "web").mkdir()
    (data / "warc").mkdir()
    texts = [STORY, PROSE]  # the second one repeats itself
    lines = "".join(json.dumps({"text": text, "url": "http://example.com/"}) + "\n" for text in texts)
    (data / "web" / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    tale, danish = ("".join(f"<p>{line}</p>" for line in page.splitlines()) for page in (PAGE, DANISH))
    records = [_warc_record("warcinfo", "application/warc-fields", b"software: x\r\n")]
    for number, (status, page) in enumerate([("200 OK", tale), ("200 OK", danish), ("404 Not Found", tale)]):
        body = f"<html><head><title>x</title></head><body><article>{page}</article></body></html>".encode()
        head = f"HTTP/1.1 {status}\r\nContent-Type: text/html\r\nContent-Length: {len(body)}\r\n\r\n"
        records.append(_warc_record("response", "application/http", head.encode() + body, number))
    (data / "warc" / "b.warc.gz").write_bytes(b"".join(gzip.compress(record) for record in records))


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


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 3


CASES = cases(RECIPES, [recipe for recipe in RECIPES if recipe.stem != "ray-cluster"])  # it starts a server


@pytest.mark.parametrize("recipe", CASES, ids=lambda recipe: recipe.stem)
def test_a_recipe_builds_a_sound_dataset(folder: Path, recipe: Path) -> None:
    shutil.copy(recipe, folder)
    make_index(folder, recipe.stem)
    own_disk = [f"scratch={folder / 'scratch'}"] if load_recipe(recipe).scratch else []
    with buckets_of(recipe, folder / "data"):
        result = build(folder / recipe.name, workers=1, overrides=own_disk, progress=False)
        assert verify(result.location).ok
        assert result.funnel.kept.documents == KEPT[recipe.stem]
        if recipe.stem == "fineweb":
            dropped = result.funnel.dropped
            assert {reason: lost.documents for reason, lost in dropped.items() if lost.documents} == DROPPED
        with open_dataset(result.location) as dataset:
            assert len(dataset) == result.samples > 0


def make_index(folder: Path, recipe: str) -> None:
    """As near-dedup.yaml says at its top: an index of the curated texts, five of which were crawled too."""
    if recipe == "near-dedup":
        overrides = ['inputs=[{path: "data/curated/*.jsonl.zst"}]', "dedup.near.against=[]"]
        index = folder / "indexes" / "earlier"
        build_dedup_index(folder / "near-dedup.yaml", index, workers=1, overrides=overrides, progress=False)


@contextmanager
def buckets_of(recipe: Path, data: Path) -> Iterator[None]:
    """A server with the bucket that a recipe names, if it names one, and in it what it reads from there."""
    loaded = load_recipe(recipe)
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


@pytest.mark.extended
def test_the_job_array_shares_one_build_and_gives_what_a_single_process_gives(folder: Path) -> None:
    shutil.copy(FOLDER / "slurm.yaml", folder)
    alone = build(folder / "slurm.yaml", workers=1, output=folder / "alone", progress=False)
    shutil.rmtree(folder / "work")
    command = ["bash", str(FOLDER / "clusters" / "slurm.sbatch"), str(folder / "slurm.yaml"), "--quiet"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    array = {"SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_COUNT": "2", "SLURM_CPUS_PER_TASK": "1"}
    elements = [
        subprocess.Popen(command, env=os.environ | array | {"PATH": path, "SLURM_ARRAY_TASK_ID": number})
        for number in ("1", "2")
    ]
    assert [element.wait(120) for element in elements] == [0, 0]
    assert tree(folder / "out" / "slurm") == tree(alone.output)


def test_the_cluster_file_is_what_ray_takes_and_its_nodes_fit_the_recipe() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    ray = importlib.util.find_spec("ray")
    if ray is None or ray.origin is None:
        pytest.skip("ray is not installed")
    cluster = yaml.safe_load((FOLDER / "clusters" / "ray-aws.yaml").read_text())
    schema = json.loads((Path(ray.origin).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(cluster, schema)
    recipe = load_recipe(FOLDER / "ray-cluster.yaml")
    assert recipe.memory * 32 < 0.7 * (128 << 30)  # Ray offers 70 % of a node's memory to tasks
    assert recipe.scratch is not None
    mounted = recipe.scratch.rpartition("/")[0]
    assert any(f"mount /dev/nvme1n1 {mounted}" in line for line in cluster["worker_setup_commands"])
    assert set(cluster["available_node_types"]) == {"head", "worker"}
