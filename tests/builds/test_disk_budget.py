"""A build that would not fit is refused before it writes, by an estimate that is safe and not wild."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from shardkit.cli.main import main
from shardkit.errors import BuildError
from shardkit.writers import build, load_recipe
from shardkit.writers import estimate as disk_budget
from shardkit.writers.estimate import (
    CERTAIN,
    Finished,
    StageBytes,
    check_disk,
    disk_needs,
    finished_stages,
    rehearse,
)
from shardkit.writers.execution.work_local import LocalWork
from shardkit.writers.execution.work_store import StoreWork
from shardkit.writers.executors import Execution, work_of
from shardkit.writers.inputs.scan import scan_inputs
from shardkit.writers.recipe import Recipe
from shardkit.writers.stages.graph import BuildInputs
from shardkit.writers.stages.tokenize import TokenizerFile
from support.disk_meter import files_of, peak_bytes
from support.small_build import make_corpus, tree

pytestmark = pytest.mark.usefixtures("inline_builds")

ESTIMATE = StageBytes({"clean": 100, "pack": 50}, output=60, largest_task=7, documents=10, text_bytes=1000)
RECIPE = """\
inputs:
  - {path: "plain-*.jsonl", source: plain}
  - {path: "zipped-*.jsonl.gz", source: zipped}
  - {path: "small.jsonl.zst", source: small}
  - {path: "table.parquet", source: table}
tokenizer: {path: tokenizer.json, eos: "<|endoftext|>"}
pack: {sequence_length: 512}
output: {path: out, shard_bytes: 1MiB}
work: work
"""


def look(recipe: Recipe) -> tuple[BuildInputs, TokenizerFile]:
    """What a build reads before its first task."""
    return BuildInputs.of(recipe, scan_inputs(recipe)), TokenizerFile.of(recipe)


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture
def set_free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Have disks tell that so many bytes are free."""

    def set_free(free: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(1 << 40, 0, free))

    return set_free


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders named fast/… and slow/… lie on file systems of their own."""
    monkeypatch.setattr(disk_budget, "_device", lambda folder: "fast" in folder.parts)


@pytest.mark.usefixtures("devices")
def test_an_output_beside_its_work_folder_takes_nothing_and_elsewhere_a_copy() -> None:
    work = LocalWork(Path("/slow/work"))
    [need] = disk_needs(ESTIMATE, {}, work, Path("/slow/out"), 2)
    assert (need.bytes, dict(need.parts)) == (150, {"work folder": 150})
    first, second = disk_needs(ESTIMATE, {}, work, Path("/fast/out"), 2)
    assert (first.folder, first.bytes) == (work.folder, 150)
    assert (second.folder, dict(second.parts)) == (Path("/fast/out"), {"output": 60})
    [need] = disk_needs(ESTIMATE, {}, work, None, 2)  # to a bucket
    assert need.bytes == 150


@pytest.mark.usefixtures("devices")
def test_what_finished_tasks_hold_is_taken_off_stage_by_stage() -> None:
    held = {"clean": Finished(130), "exact": Finished(9, True), "pack": Finished(20)}
    [need] = disk_needs(ESTIMATE, held, LocalWork(Path("/slow/work")), None, 2)
    assert need.bytes == 30
    held["pack"] = Finished(20, complete=True)  # it took less than was reckoned
    [need] = disk_needs(ESTIMATE, held, LocalWork(Path("/slow/work")), None, 2)
    assert need.bytes == 0


@pytest.mark.usefixtures("devices")
def test_a_work_folder_in_a_store_needs_scratch_for_running_tasks_and_room_for_the_output() -> None:
    work = StoreWork("memory://disk-budget/work", Path("/slow/scratch"))
    [need] = disk_needs(ESTIMATE, {}, work, Path("/slow/out"), 3)
    assert set(need.parts) == {"scratch", "output"}
    assert need.parts["scratch"] >= 3 * 7
    assert need.parts["output"] == 60  # fetched: there is nothing to link to
    assert need.bytes < ESTIMATE.work + 60 + 10 * 64


def test_a_build_that_does_not_fit_writes_nothing_and_says_what_to_do(
    tmp_path: Path, set_free: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_corpus(tmp_path, 60)
    before = tree(tmp_path)
    set_free(20_000)
    with pytest.raises(BuildError, match=r"about [\d.]+ KB more there .*20 KB are free.*check_disk"):
        build(recipe, workers=1, progress=False)
    assert tree(tmp_path) == before
    assert main(["build", str(recipe), "--workers", "1", "--quiet"]) == 1
    assert "out.work: the build would need about" in capsys.readouterr().err
    assert build(recipe, workers=1, overrides=["check_disk=false"], progress=False).samples
    assert build(recipe, workers=1, progress=False).up_to_date  # the key decides no byte, and is in no card


def test_the_same_build_goes_on_where_what_is_left_fits(
    tmp_path: Path, set_free: Callable[[int], None]
) -> None:
    recipe = make_corpus(tmp_path, 60)
    first = build(recipe, workers=1, overrides=["work=work"], progress=False)
    shutil.rmtree(first.output)
    shutil.rmtree(tmp_path / "work" / "provenance")
    read, work = look(load_recipe(recipe, ["work=work"])), LocalWork(tmp_path / "work")
    held = finished_stages(*read, work)
    assert {stage for stage in held if held[stage].complete} >= {"clean", "exact", "tokenize", "pack"}
    packed = sum(commit.bytes for _, commit in work.commits("pack"))
    assert packed <= held["pack"].bytes <= packed + (1 << 16)
    assert held["provenance"] == Finished(0, complete=False)
    whole = rehearse(*read, 1)
    set_free(whole.work)  # too little to be certain
    [left] = check_disk(*read, work, tmp_path / "out", Execution(workers=1))
    assert left.bytes < whole.work / 2
    set_free(left.bytes * 21 // 20)
    assert check_disk(*read, work, tmp_path / "out", Execution(workers=1))
    with pytest.raises(BuildError, match="would need"):
        check_disk(*read, LocalWork(tmp_path / "elsewhere"), None, Execution(workers=1))


def test_an_input_that_fits_many_times_over_is_not_measured(
    tmp_path: Path, set_free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = look(load_recipe(make_corpus(tmp_path, 40)))
    stored = sum(split.bytes for split in read[0].splits)
    monkeypatch.setattr(disk_budget, "rehearse", lambda *_: pytest.fail("measured"))
    set_free(CERTAIN * stored)
    assert check_disk(*read, LocalWork(tmp_path / "work"), tmp_path / "out", Execution()) == []


def test_a_sample_that_tells_nothing_stops_no_build(tmp_path: Path, set_free: Callable[[int], None]) -> None:
    recipe = make_corpus(tmp_path, 40)
    set_free(20_000)
    read = look(load_recipe(recipe, ["filters=[{length: {min_words: 1000}}]"]))
    with pytest.warns(RuntimeWarning, match="is not known: no document is left") as caught:
        assert check_disk(*read, LocalWork(tmp_path / "work"), None, Execution(workers=1)) == []
    assert caught[0].filename == __file__


@pytest.fixture(scope="module")
def texts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 MB of text in plain and compressed files: one document in ten is a copy, another one nearly so."""
    folder = tmp_path_factory.mktemp("texts")
    shutil.copy(make_corpus(folder / "small", 20).parent / "tokenizer.json", folder)
    some = random.Random(7)
    words = ["".join(some.choices("etaoinshrdlucmfwypvbgk", k=some.randrange(2, 10))) for _ in range(20_000)]
    odds = list(itertools.accumulate(1 / (n + 3) for n in range(len(words))))
    texts: list[str] = []
    for number in range(6_000):
        text = [
            f"{word}{'.' * (k % 12 == 11)}\n" if k % 12 == 11 else word
            for k, word in enumerate(some.choices(words, cum_weights=odds, k=some.randrange(40, 180)))
        ]
        if number % 10 == 1:
            text = texts[some.randrange(number)].split(" ")
        elif number % 10 == 2:
            text = texts[some.randrange(number)].split(" ")
            text[len(text) // 2] = "another"
        texts.append(" ".join(text))

    def lines(part: list[str]) -> bytes:
        return "".join(json.dumps({"text": text}) + "\n" for text in part).encode()

    for file in range(4):
        (folder / f"plain-{file}.jsonl").write_bytes(lines(texts[file * 500 : (file + 1) * 500]))
        (folder / f"zipped-{file}.jsonl.gz").write_bytes(
            gzip.compress(lines(texts[2000 + file : 3000 : 4]), 6)
        )
    (folder / "small.jsonl.zst").write_bytes(zstandard.compress(lines(texts[3000:5000])))
    pq.write_table(pa.table({"text": texts[5000:]}), folder / "table.parquet")
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


RECIPES = {
    "plain": [],
    "filtered": ["filters=[{length: {max_words: 120}}, {ratios: {max_digit_ratio: 0.5}}]", "annotate=true"],
    "near": ["dedup.near={measure: {planted: 200}}", "output.compression=zstd"],
    "lines": ["dedup.lines={}", "output.format=wds", "pack.strategy=concat"],
    "everything": ["annotate=true", "dedup.lines={}", "dedup.near={}", "dedup.exact={text: normalized}"],
}


@pytest.mark.extended
@pytest.mark.parametrize("name", RECIPES)
def test_an_estimate_is_between_what_a_build_takes_and_half_as_much_again(
    texts_folder: Path, tmp_path: Path, name: str
) -> None:
    places = [f"work={tmp_path / 'work'}", f"output.path={tmp_path / 'out'}"]
    recipe = load_recipe(texts_folder / "recipe.yaml", [*RECIPES[name], *places])
    stored = sum(split.bytes for split in look(recipe)[0].splits)
    estimate = rehearse(*look(recipe), 1, sample_bytes=stored // 4)
    with peak_bytes(tmp_path) as peak:
        build(recipe, workers=1, progress=False)
    assert peak[0] <= estimate.work <= 1.5 * peak[0], (estimate, peak)
    published = sum(status.st_size for status in files_of(tmp_path / "out").values())
    assert published * 0.95 <= estimate.output <= 1.5 * published, (estimate, published)


@pytest.mark.extended
def test_scratch_of_a_work_folder_in_a_store_is_enough_for_a_worker(
    texts_folder: Path, tmp_path: Path
) -> None:
    places = [f"work=memory://disk-budget-{uuid.uuid4()}/work", f"scratch={tmp_path / 'scratch'}"]
    overrides = [*RECIPES["everything"], *places, f"output.path={tmp_path / 'out'}"]
    recipe = load_recipe(texts_folder / "recipe.yaml", overrides)
    read = look(recipe)
    stored = sum(split.bytes for split in read[0].splits)
    work = work_of(recipe, tmp_path / "work", None, Execution())
    [need] = disk_needs(rehearse(*read, 1, sample_bytes=stored // 4), {}, work, tmp_path / "out", 1)
    with peak_bytes(tmp_path / "scratch", tmp_path / "out") as peak:
        build(recipe, workers=1, progress=False)
    assert peak[0] <= need.bytes, (need, peak)
