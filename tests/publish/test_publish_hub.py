"""Datasets on the Hugging Face Hub: few commits, nothing sent twice, read at one commit, with a page."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from servers.hub import HubServer, Rule
from shardkit import open_dataset
from shardkit.cli.main import main
from shardkit.datasets.verify import verify
from shardkit.errors import BuildError, RecipeError, ShardError
from shardkit.loaders import StreamingLoader
from shardkit.loaders.config import grouped
from shardkit.manifest import FileInfo, Manifest
from shardkit.publish import RefusedError, TransferProgress, download, upload
from shardkit.publish import transports as module
from shardkit.publish.contents import MARKER_NAME, find_only_contents
from shardkit.publish.repository_card import PAGE_NAME, repository_card
from shardkit.storage.hub import HubPlace
from shardkit.storage.local import LocalStore
from shardkit.writers import build
from shardkit.writers.inputs.patterns import key_matches
from shardkit.writers.stages.publish import RemoteOutput
from support.foreign_tars import tar_bytes
from support.hub_environment import hub_server
from support.resume import assert_exact_resume
from support.small_build import make_corpus, tree
from support.small_dataset import Built, files_of, make_dataset

pytestmark = pytest.mark.usefixtures("inline_builds")
WAIT_SECONDS = 60.0  # far above what any test takes


@pytest.fixture(scope="module")
def running() -> Iterator[HubServer]:
    with hub_server() as hub:
        yield hub


@pytest.fixture
def hub(running: HubServer) -> Iterator[HubServer]:
    running.rules.replace([])
    running.requests.clear()
    yield running
    running.rules.replace([])
    running.on_request = None


@pytest.fixture
def name(hub: HubServer) -> str:
    return hub.new_repository()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "out"
    make_dataset(folder)
    return folder


@pytest.mark.parametrize("folder", ["br[1]", "x{1,2}/y[a-b]", "star*", "plain"])
def test_names_on_the_hub_are_taken_literally_before_they_are_patterns(
    hub: HubServer, name: str, made: Path, folder: str
) -> None:
    files = {f"{folder}/{path}": data for path, data in files_of(made).items()}
    tars = {"t[1].tar": tar_bytes(0, 3), "t{1,2}.tar": tar_bytes(0, 4), "t1.tar": tar_bytes(0, 1)}
    hub.commit(name, files | {f"tars/{each}": data for each, data in tars.items()})
    url = f"hf://datasets/{name}"
    with open_dataset(f"{url}/{folder}") as dataset, open_dataset(made) as local:
        assert dataset.fingerprint == local.fingerprint
    for path, samples in (("t[1].tar", 3), ("t{1,2}.tar", 4), ("t[12].tar", 1), ("t*.tar", 8)):
        with open_dataset(f"{url}/tars/{path}") as dataset:
            assert len(dataset) == samples


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"), 80)


def sent(hub: HubServer) -> int:
    """Large files, or parts of them, that clients have sent."""
    return sum(request.startswith("PUT /upload/") for request in hub.requests)


def dataset_of(hub: HubServer, name: str) -> dict[str, bytes]:
    return {path: data for path, data in hub.files(name).items() if path != PAGE_NAME}


def test_a_dataset_arrives_in_few_commits_and_again_in_none(hub: HubServer, name: str, made: Path) -> None:
    url = f"hf://datasets/{name}"
    report = upload(made, url, progress=False, verify=True)
    assert dataset_of(hub, name) == files_of(made)
    assert len(report.sent) == report.files
    subjects = hub.repositories[name].subjects[1:]
    assert subjects == [f"Add {MARKER_NAME}", f"Add {report.files} files", "Add index.json",
                        "Delete 1 file", f"Add {PAGE_NAME}"]  # fmt: skip
    hub.requests.clear()
    assert upload(made, url, progress=False).up_to_date
    assert len(hub.repositories[name].subjects) == 6
    assert sent(hub) == 0
    assert not [request for request in hub.requests if "/resolve/" in request and ".mds" in request]


@pytest.mark.extended
def test_many_files_are_one_commit_for_every_thousand(
    hub: HubServer, name: str, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMMIT_FILES", 3)
    heard: list[TransferProgress] = []
    at_commits: list[int] = []
    hub.on_request = lambda request: at_commits.append(len(heard)) if "/commit/" in request else None
    report = upload(made, f"hf://datasets/{name}/deep/er", progress=heard.append)
    assert [each.files_done for each in heard] == list(range(1, report.files + 1))
    assert heard[-1].bytes_moved == report.bytes
    assert at_commits == [0, 0, 3, 6, 8, 8]  # reported after each commit, not at the end
    counted = [subject for subject in hub.repositories[name].subjects if subject.endswith(" files")]
    assert counted == ["Add 3 files"] * (report.files // 3) + ["Add 2 files"]
    assert {path.removeprefix("deep/er/"): data for path, data in hub.files(name).items()} == files_of(made)
    assert PAGE_NAME not in hub.files(name)  # it would not be the repository's page


@pytest.mark.extended
def test_no_commit_shows_an_index_without_its_files_whatever_replaces_what(
    hub: HubServer, name: str, made: Path, tmp_path: Path
) -> None:
    url = f"hf://datasets/{name}"
    make_dataset(tmp_path / "other", shards=3, first=7000)
    upload(made, url, progress=False)
    with pytest.raises(RefusedError, match="holds another dataset; use --replace"):
        upload(tmp_path / "other", url, progress=False)
    upload(tmp_path / "other", url, progress=False, replace=True)
    assert dataset_of(hub, name) == files_of(tmp_path / "other")
    for commit in hub.repositories[name].commits:
        files = hub.files(name, commit)
        if "index.json" in files:
            shards = json.loads(files["index.json"])["shards"]
            assert {shard["raw_data"]["basename"] for shard in shards} <= files.keys()
            with open_dataset(f"{url}@{commit}") as dataset:
                assert len(dataset) in (8 * 5, 8 * 3)
    assert len(hub.repositories[name].subjects) < 14


@pytest.mark.extended
def test_a_damaged_file_stays_at_home(hub: HubServer, name: str, made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "copy")
    shard = next((tmp_path / "copy").glob("*.mds"))
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises(ShardError, match="is damaged, and was not sent"):
        upload(tmp_path / "copy", f"hf://datasets/{name}", progress=False)
    assert sent(hub) == 0
    assert set(hub.files(name)) == {MARKER_NAME}
    hub.commit(name, {MARKER_NAME: None, shard.name: bytes(damaged)})
    with pytest.raises(ShardError, match="is damaged, and was not sent"):  # also where it is there already
        upload(tmp_path / "copy", f"hf://datasets/{name}", progress=False)


UPLOAD = "import sys; from shardkit.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.extended
@pytest.mark.parametrize(
    ("fatal", "count"),
    [("/upload/", 1), ("/upload/", 4), ("/commit/", 1), ("/commit/", 2), ("/commit/", 3), ("/commit/", 4)],
)
def test_a_killed_upload_continues_and_sends_no_file_twice(
    hub: HubServer, name: str, tmp_path: Path, fatal: str, count: int
) -> None:
    made = tmp_path / "out"
    make_dataset(made, first=1 + count + 100 * len(fatal))  # of bytes that the Hub does not have yet
    url, lock, seen = f"hf://datasets/{name}", threading.Lock(), [0]
    command = [sys.executable, "-c", UPLOAD, "upload", str(made), url, "--quiet"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def kill(request: str) -> None:
        with lock:
            seen[0] += fatal in request
            if seen[0] >= count:
                process.kill()
                process.wait(WAIT_SECONDS)

    hub.on_request = kill
    _, errors = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == -signal.SIGKILL, errors.decode()
    hub.on_request = None
    time.sleep(0.1)  # what arrived before the kill may still be worked on
    assert ("index.json" in hub.files(name)) == (fatal == "/commit/" and count >= 3)
    if "index.json" in hub.files(name):
        assert verify(url).ok
    else:
        with pytest.raises(ShardError):
            open_dataset(url)
    there = {request for request in hub.requests if request.startswith("PUT /upload/")}
    there = {request for request in there if request.removeprefix("PUT /upload/") in hub.objects}
    hub.requests.clear()
    upload(made, url, progress=False)
    assert dataset_of(hub, name) == files_of(made)
    assert not there & set(hub.requests)
    assert verify(url).ok


@pytest.mark.extended
def test_what_another_repository_has_is_not_sent_either(hub: HubServer, made: Path) -> None:
    upload(made, f"hf://datasets/{hub.new_repository()}", progress=False)
    hub.requests.clear()
    upload(made, f"hf://datasets/{hub.new_repository()}", progress=False)
    assert sent(hub) == 0


@pytest.mark.extended
def test_a_dataset_on_the_hub_is_informed_about_verified_fetched_and_streamed_from_one_commit(
    hub: HubServer, name: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"hf://datasets/{name}"
    upload(made, url, progress=False)
    with open_dataset(made) as expected:
        fingerprint = expected.fingerprint
    assert main(["info", url]) == 0
    assert fingerprint in capsys.readouterr().out
    assert main(["verify", url]) == 0
    download(url, tmp_path / "copy", progress=False)
    assert tree(tmp_path / "copy") == tree(made)

    def loader(steps: int | None = None, **changes: Any) -> StreamingLoader:
        settings = {"batch_size": 4, "seed": 3, "cache_dir": tmp_path / "cache", "rank": 0, "world_size": 1}
        return StreamingLoader(url, **grouped(settings | changes))

    with loader() as local, StreamingLoader(made, batch_size=4, seed=3, rank=0, world_size=1) as plain:
        for _, got, want in zip(range(15), local, plain, strict=False):
            assert (got["tokens"] == want["tokens"]).all()
    assert_exact_resume(loader, steps=12)


@pytest.mark.extended
def test_a_branch_that_moves_while_a_dataset_is_open_is_not_seen(
    hub: HubServer, name: str, made: Path, tmp_path: Path
) -> None:
    url = f"hf://datasets/{name}"
    upload(made, url, progress=False)
    with open_dataset(url) as dataset:
        first = np.asarray(next(iter(dataset))["tokens"])
        make_dataset(tmp_path / "other", shards=3, first=7000)
        upload(tmp_path / "other", url, progress=False, replace=True)
        rows = [sample["tokens"] for sample in dataset]
        assert len(rows) == 40
        assert np.array_equal(np.asarray(rows[0]), first)
    with open_dataset(url) as dataset:
        assert len(dataset) == 24
    moved: list[str] = []

    def move(request: str) -> None:
        if "shard.00001" in request and not moved:
            moved.append(hub.commit(name, {"shard.00002.mds": b"rubbish", "index.json": b"rubbish"}))

    hub.on_request = move
    download(url, tmp_path / "copy", progress=False, threads=1)
    assert moved
    assert tree(tmp_path / "copy") == tree(tmp_path / "other")


@pytest.mark.extended
@pytest.mark.parametrize("names", ["", "/shard-*.tar", "/shard-{00000..00002}.tar", "/**/*.tar"])
def test_tars_of_others_are_read_where_they_lie(
    hub: HubServer, name: str, tmp_path: Path, names: str
) -> None:
    built = Built(tmp_path / "work", "tar", 3, 0, {})
    built.publish(RemoteOutput(f"hf://datasets/{name}"))
    tars = {path: data for path, data in hub.files(name).items() if path.endswith(".tar")}
    other = hub.new_repository()
    hub.commit(other, {**tars, "README.md": b"# Theirs"})
    moved: list[str] = []

    def move(request: str) -> None:
        if "/resolve/" in request and not moved:
            moved.append(hub.commit(other, {"shard-00001.tar": b"rubbish", "shard-00009.tar": b"rubbish"}))

    hub.on_request = move
    rows = []
    settings = {"batch_size": 4, "seed": 3, "rank": 0, "world_size": 1, "shuffle": "none", "tail": "drop"}
    with StreamingLoader(f"hf://datasets/{other}{names}", **grouped(settings)) as loader:
        for _, batch in zip(range(6), loader, strict=False):
            rows.append(np.asarray(batch["tokens"]))
    assert moved
    assert np.array_equal(np.concatenate(rows).ravel(), np.arange(96))


@pytest.mark.extended
def test_inputs_on_the_hub_give_the_dataset_of_the_same_local_files(
    hub: HubServer, name: str, corpus: Path, tmp_path: Path
) -> None:
    folder = corpus.parent
    keys = ["plain-0.jsonl", "plain-1.jsonl", "tables/some.parquet", "lines.jsonl.gz"]
    hub.commit(name, {f"data/{key}": (folder / key).read_bytes() for key in keys} | {"data/_x": b"no"})
    paths = ["plain-*.jsonl", "tables/", "lines.jsonl.gz"]

    def inputs(top: str, base: str) -> str:
        entries = [{"path": f"{top}/{path}", "base": base, "source": path} for path in paths]
        return f"inputs={json.dumps(entries)}"

    local = build(
        corpus,
        overrides=[inputs(str(folder), str(folder))],
        output=tmp_path / "local",
        workers=1,
        progress=False,
    )
    commit = hub.repositories[name].branches["main"]
    for number, revision in enumerate(["", "@main", f"@{commit}"]):
        top = f"hf://datasets/{name}{revision}/data"
        made = build(
            corpus, overrides=[inputs(top, top)], output=tmp_path / f"hub-{number}", workers=1, progress=False
        )
        assert made.fingerprint == local.fingerprint
        for path in sorted(local.output.glob("**/*")):
            if path.suffix in (".mds", ".parquet") or path.name == "index.json":
                copy = made.output / path.relative_to(local.output)
                assert copy.read_bytes() == path.read_bytes(), path.name


@pytest.mark.extended
def test_a_branch_that_moves_between_scan_and_read_leaves_the_build_at_the_commit_that_it_scanned(
    hub: HubServer, name: str, corpus: Path, tmp_path: Path
) -> None:
    lines = (corpus.parent / "plain-0.jsonl").read_bytes()
    hub.commit(name, {"a.jsonl": lines, "b.jsonl": lines.replace(b"document", b"paper")})
    overrides = [f'inputs=[{{"path": "hf://datasets/{name}/*.jsonl"}}]', f"work={tmp_path / 'work'}"]
    expected = build(corpus, overrides=overrides[:1], output=tmp_path / "one", workers=1, progress=False)
    moved: list[str] = []

    def move(request: str) -> None:
        if "/resolve/" in request and not moved:
            moved.append(hub.commit(name, {"a.jsonl": b'{"text": "x"}\n', "b.jsonl": None, "c.jsonl": lines}))

    hub.on_request = move
    made = build(corpus, overrides=overrides, output=tmp_path / "two", workers=1, progress=False)
    hub.on_request = None
    assert moved
    assert made.fingerprint == expected.fingerprint
    again = build(corpus, overrides=overrides, output=tmp_path / "three", workers=1, progress=False)
    assert again.fingerprint != expected.fingerprint  # the next build sees the branch as it is


@pytest.mark.extended
def test_a_build_after_other_commits_reads_only_the_files_that_they_changed(
    hub: HubServer, name: str, corpus: Path, tmp_path: Path
) -> None:
    lines = (corpus.parent / "plain-0.jsonl").read_bytes()
    hub.commit(name, {"a.jsonl": lines, "b.jsonl": lines.replace(b"document", b"paper")})
    overrides = [f'inputs=[{{"path": "hf://datasets/{name}/*.jsonl"}}]', f"work={tmp_path / 'work'}"]

    def read(output: str) -> set[str]:
        hub.requests.clear()
        build(corpus, overrides=overrides, output=tmp_path / output, workers=1, progress=False)
        return {request.rpartition("/")[2] for request in hub.requests if "/resolve/" in request}

    assert read("one") == {"a.jsonl", "b.jsonl"}
    hub.commit(name, {"README.md": b"# New"})
    assert read("two") == set()
    assert tree(tmp_path / "two") == tree(tmp_path / "one")
    hub.commit(name, {"b.jsonl": lines.replace(b"document", b"letter")})
    assert read("three") == {"b.jsonl"}


@pytest.mark.extended
def test_a_build_goes_straight_to_the_hub_and_a_changed_one_is_refused(
    hub: HubServer, name: str, corpus: Path, tmp_path: Path
) -> None:
    local = build(corpus, output=tmp_path / "local", workers=1, progress=False)
    url = f"hf://datasets/{name}"
    made = build(corpus, output=url, overrides=[f"work={tmp_path / 'work'}"], workers=1, progress=False)
    assert made.location == url
    assert dataset_of(hub, name) == files_of(local.output)
    assert len(hub.repositories[name].subjects) == 6
    with pytest.raises(BuildError, match="already holds a dataset, made by another recipe"):
        build(corpus, output=url, overrides=["seed=5"], workers=1, progress=False)
    with pytest.raises(BuildError, match="no such dataset repository"):
        build(corpus, output="hf://datasets/team/none", workers=1, progress=False)
    with pytest.raises(RecipeError, match=r"inputs\[0\].path: hf://datasets/team/none.*no such dataset"):
        build(
            corpus,
            overrides=['inputs=[{"path": "hf://datasets/team/none/*.jsonl"}]'],
            workers=1,
            progress=False,
        )


@pytest.mark.extended
def test_a_build_whose_work_lies_in_a_store_makes_no_commit_for_each_file(
    hub: HubServer, name: str, corpus: Path, tmp_path: Path
) -> None:
    local = build(corpus, output=tmp_path / "local", workers=1, progress=False)
    made = build(
        corpus,
        output=f"hf://datasets/{name}",
        overrides=["work=memory://hub-work"],
        workers=1,
        progress=False,
    )
    assert made.fingerprint == local.fingerprint
    assert dataset_of(hub, name) == files_of(local.output)
    assert len(hub.repositories[name].subjects) == 6


def header_of(page: bytes) -> dict[str, Any]:
    found = re.match(rb"---\n(.*?)\n---\n", page, re.DOTALL)
    assert found
    header: dict[str, Any] = yaml.safe_load(found[1])
    return header


@pytest.mark.extended
def test_the_page_says_what_the_dataset_is_and_is_the_same_for_the_same_dataset(
    hub: HubServer, name: str, corpus: Path, tmp_path: Path
) -> None:
    from huggingface_hub import DatasetCard

    local = build(corpus, output=tmp_path / "local", workers=1, progress=False)
    url = f"hf://datasets/{name}"
    upload(local.output, url, progress=False)
    page = hub.files(name)[PAGE_NAME]
    header = header_of(page)
    assert header == {"size_categories": ["n<1K"], "viewer": False}
    text = page.decode()
    assert f"| sequences | {local.samples:,} |" in text
    assert f"| exact_duplicate | {local.funnel.dropped['exact_duplicate'].documents:,} |" in text
    assert local.fingerprint in text
    assert f'StreamingLoader("{url}"' in text
    recipe = re.search(r"````yaml\n(.*?)````", text, re.DOTALL)
    assert recipe
    assert yaml.safe_load(recipe[1])["pack"]["sequence_length"] == 64
    assert DatasetCard(text).data.get("viewer") is False  # as the Hub's own library reads it
    contents = find_only_contents(LocalStore(local.output))
    assert contents
    assert repository_card({"": contents}, HubPlace.parse(url)) == page


@pytest.mark.extended
def test_a_page_of_somebody_else_or_edited_is_never_written(
    hub: HubServer, name: str, made: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    url = f"hf://datasets/{name}"
    hub.commit(name, {PAGE_NAME: b"---\nlicense: mit\n---\n# Ours\n"})
    upload(made, url, progress=False)
    assert hub.files(name)[PAGE_NAME].endswith(b"# Ours\n")
    assert not recwarn
    hub.commit(name, {PAGE_NAME: None})
    upload(made, url, progress=False)
    page = hub.files(name)[PAGE_NAME]
    make_dataset(tmp_path / "other", shards=3, first=7000)
    upload(tmp_path / "other", url, progress=False, replace=True)
    newer = hub.files(name)[PAGE_NAME]
    assert newer != page  # ours, so it follows the dataset
    edited = newer.replace(b"---\n", b"---\nlicense: cc0-1.0\n", 1)
    hub.commit(name, {PAGE_NAME: edited})
    with pytest.warns(RuntimeWarning, match=r"README.md: was edited after shardkit wrote it"):
        upload(made, url, progress=False, replace=True)
    assert hub.files(name)[PAGE_NAME] == edited


@pytest.mark.extended
@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_a_text_dataset_on_the_hub_is_verified_and_its_page_names_its_documents_only(
    hub: HubServer, name: str, corpus: Path, tmp_path: Path, form: str
) -> None:
    url = f"hf://datasets/{name}"
    overrides = [f"output.format={form}", "annotate=true", f"work={tmp_path / 'work'}"]
    made = build(corpus, output=url, overrides=overrides, workers=1, progress=False)
    assert verify(url).ok
    files = hub.files(name)
    [config] = header_of(files[PAGE_NAME])["configs"]
    [data] = config["data_files"]
    shown = {path for path in files for glob in data["path"] if key_matches(glob, path)}
    assert shown == {entry["name"] for entry in json.loads(files["documents.json"])["files"]}
    assert {path for path in files if path.endswith(".parquet")} - shown  # what was dropped, or thought of it
    assert f"| documents | {made.funnel.kept.documents:,} |" in files[PAGE_NAME].decode()


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:split")
def test_the_parts_of_a_split_share_a_page_that_names_the_documents_of_each(
    hub: HubServer, name: str, corpus: Path, tmp_path: Path
) -> None:
    url = f"hf://datasets/{name}"
    overrides = ["split={validation: 6}", "output.format=parquet", f"work={tmp_path / 'work'}"]
    build(corpus, output=url, overrides=overrides, workers=1, progress=False)
    files = hub.files(name)
    assert {path for path in files if path.endswith("README.md")} == {"README.md"}
    [config] = header_of(files[PAGE_NAME])["configs"]
    assert [data["split"] for data in config["data_files"]] == ["train", "validation"]
    for data in config["data_files"]:
        shown = {path for path in files for glob in data["path"] if key_matches(glob, path)}
        listed = json.loads(files[f"{data['split']}/documents.json"])["files"]
        assert shown == {f"{data['split']}/{entry['name']}" for entry in listed}
        assert f"## {data['split']}\n" in files[PAGE_NAME].decode()
    packed = hub.new_repository()
    build(
        corpus,
        output=f"hf://datasets/{packed}",
        overrides=["split={validation: 6}"],
        workers=1,
        progress=False,
    )
    page = hub.files(packed)[PAGE_NAME]
    assert header_of(page)["viewer"] is False
    assert f'StreamingLoader("hf://datasets/{packed}/train"' in page.decode()


def test_the_page_of_a_text_dataset_names_its_tables_and_no_others(made: Path) -> None:
    contents = find_only_contents(LocalStore(made))
    assert contents
    [shard, *_] = contents.manifest.shards

    def named(base: str) -> Any:
        return replace(shard, raw=FileInfo(base, 10, {}), zip=None)

    shards = tuple(named(f"text-{number:05d}.parquet") for number in range(3))
    text = replace(contents, manifest=Manifest("parquet", shards))
    page = repository_card({"": text}, HubPlace("org/name", None, ""))
    [config] = header_of(page)["configs"]
    assert config["config_name"] == "default"
    assert config["data_files"] == [{"split": "train", "path": ["text-*.parquet"]}]
    assert b'load_dataset("org/name", split="train")' in page
    spread = replace(contents, manifest=Manifest("jsonl", (named("0a/text-00000.jsonl.zst"),)))
    [config] = header_of(repository_card({"": spread}, HubPlace("org/name", None, "")))["configs"]
    assert config["data_files"][0]["path"] == ["*/text-*.jsonl.zst"]


@pytest.mark.extended
@pytest.mark.parametrize(
    "rule",
    [
        Rule(fault="status", status=429, probability=0.2),
        Rule(fault="status", status=503, probability=0.2),
        Rule(fault="lost_acknowledgement", probability=0.1),
    ],
    ids=lambda rule: f"{rule.fault}-{rule.status}",
)
def test_an_upload_through_faults_is_the_dataset(hub: HubServer, name: str, made: Path, rule: Rule) -> None:
    hub.rules.replace([rule])
    upload(made, f"hf://datasets/{name}", progress=False)
    hub.rules.replace([])
    assert dataset_of(hub, name) == files_of(made)
