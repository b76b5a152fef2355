"""A build that would not fit is refused before it writes, by an estimate that is safe and not wild.

A recipe may be measured on a part of its input: which part, and that what is measured is what a build does.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
import shutil
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from shardkit.card import CARD_NAME, DatasetCard
from shardkit.cli.main import main
from shardkit.errors import BuildError
from shardkit.tools.plan.build import measured_from_card
from shardkit.tools.plan.sampling import measure_sample
from shardkit.writers import build, estimate
from shardkit.writers.estimate import (
    CERTAIN,
    FILE_BYTES,
    Finished,
    StageBytes,
    check_disk,
    disk_needs,
    finished_stages,
    most_bytes,
    rehearse,
)
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS
from shardkit.writers.execution.work import Work
from shardkit.writers.executors import Execution, work_of
from shardkit.writers.input_sample import Piece, choose_pieces, copy_start, put_pieces
from shardkit.writers.inputs.scan import scan_inputs
from shardkit.writers.recipe.recipe import Recipe, load_recipe
from shardkit.writers.stages.inputs import BuildInputs
from support.bombs import zstd_of
from support.disk_meter import disk_bytes, files_of, peak_bytes
from support.read_inputs import recipe as recipe_of
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


def look(recipe: Recipe) -> BuildInputs:
    """What a build reads before its first task."""
    return BuildInputs.of(recipe, scan_inputs(recipe))


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
    monkeypatch.setattr(estimate, "_device", lambda folder: "fast" in folder.parts)


@pytest.mark.usefixtures("devices")
def test_an_output_beside_its_work_folder_takes_nothing_and_elsewhere_a_copy() -> None:
    work = Work.at(Path("/slow/work"))
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
    [need] = disk_needs(ESTIMATE, held, Work.at(Path("/slow/work")), None, 2)
    assert need.bytes == 30
    held["pack"] = Finished(20, complete=True)  # it took less than was reckoned
    [need] = disk_needs(ESTIMATE, held, Work.at(Path("/slow/work")), None, 2)
    assert need.bytes == 0


@pytest.mark.usefixtures("devices")
def test_a_work_folder_in_a_store_needs_scratch_for_running_tasks_and_room_for_the_output() -> None:
    work = Work("memory://disk-budget/work", Path("/slow/scratch"))
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


@pytest.mark.extended
def test_the_same_build_goes_on_where_what_is_left_fits(
    tmp_path: Path, set_free: Callable[[int], None]
) -> None:
    recipe = make_corpus(tmp_path, 60)
    first = build(recipe, workers=1, overrides=["work=work"], progress=False)
    shutil.rmtree(first.output)
    shutil.rmtree(tmp_path / "work" / "provenance")
    read, work = look(load_recipe(recipe, ["work=work"])), Work.at(tmp_path / "work")
    held = finished_stages(read, work)
    assert {stage for stage in held if held[stage].complete} >= {"clean", "exact", "tokenize", "pack"}
    packed = sum(commit.bytes for _, commit in work.commits("pack"))
    assert packed <= held["pack"].bytes <= packed + (1 << 16)
    assert held["provenance"] == Finished(0, complete=False)
    whole = rehearse(read, 1)
    set_free(whole.work)  # too little to be certain
    [left] = check_disk(read, work, tmp_path / "out", Execution(workers=1))
    assert left.bytes < whole.work / 2
    set_free(left.bytes * 21 // 20)
    assert check_disk(read, work, tmp_path / "out", Execution(workers=1))
    with pytest.raises(BuildError, match="would need"):
        check_disk(read, Work.at(tmp_path / "elsewhere"), None, Execution(workers=1))


def test_an_input_that_fits_many_times_over_is_not_measured(
    tmp_path: Path, set_free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = look(load_recipe(make_corpus(tmp_path, 40)))
    stored = sum(split.bytes for split in read.splits)
    monkeypatch.setattr(estimate, "rehearse", lambda *_: pytest.fail("measured"))
    set_free(CERTAIN * stored)
    assert check_disk(read, Work.at(tmp_path / "work"), tmp_path / "out", Execution()) == []


@pytest.mark.parametrize("words", [pytest.param(1, marks=pytest.mark.extended), 400])
def test_what_a_build_of_json_lines_writes_is_bounded_without_a_rehearsal(
    tmp_path: Path, set_free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, words: int
) -> None:
    """All that can be written of records that are short, or have many lines that all others have."""
    recipe = make_corpus(tmp_path / "corpus", 20)
    some = random.Random(words)
    lines = [f"the line number {number} of all that are" for number in range(500)]
    with (recipe.parent / "plain-0.jsonl").open("w") as file:
        for number in range(6000 // words + 100):
            text = f"{number % 900}" if words == 1 else "\n".join(some.choices(lines, k=words // 7))
            file.write(json.dumps({"text": text}) + "\n")
    settings = ["filters=[]", "dedup={exact: {}, lines: {}, near: {}}"]
    settings += ["dedup.max_removed_fraction=1", 'inputs=[{path: "plain-*.jsonl"}]']
    made = look(load_recipe(recipe, settings))
    most, stored = most_bytes(made.splits), sum(split.bytes for split in made.splits)
    set_free(2 * most)
    monkeypatch.setattr(estimate, "rehearse", lambda *_: pytest.fail("measured"))
    build(recipe, overrides=[*settings, "work=work"], output=tmp_path / "out", progress=False)
    written = sum(file.stat().st_size for file in (recipe.parent / "work").rglob("*") if file.is_file())
    assert written < most
    if words > 1:
        assert most < 40 * stored, "a fifth of what is taken of a compressed file"


def test_a_sample_that_tells_nothing_stops_no_build(tmp_path: Path, set_free: Callable[[int], None]) -> None:
    recipe = make_corpus(tmp_path, 40)
    set_free(20_000)
    read = look(load_recipe(recipe, ["filters=[{length: {min_words: 1000}}]"]))
    with pytest.warns(RuntimeWarning, match="fits on its disks: no document is left") as caught:
        assert check_disk(read, Work.at(tmp_path / "work"), None, Execution(workers=1)) == []
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
    "steps": ["annotate=true", "steps=[{length: {max_words: 120}}, exact, {ratios: {max_digit_ratio: 0.5}}]"],
    "near": ["dedup.near={}", "output.compression=zstd"],
    "lines": ["dedup.lines={}", "output.format=wds", "pack.strategy=concat"],
    "everything": ["annotate=true", "dedup.lines={}", "dedup.near={}", "dedup.exact={text: normalized}"],
}


@pytest.mark.extended
@pytest.mark.parametrize("name", RECIPES)
def test_an_estimate_is_between_what_a_build_takes_and_half_as_much_again(
    texts_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    places = [f"work={tmp_path / 'work'}", f"output.path={tmp_path / 'out'}"]
    recipe = load_recipe(texts_folder / "recipe.yaml", [*RECIPES[name], *places])
    stored = sum(split.bytes for split in look(recipe).splits)
    found = rehearse(look(recipe), 1, sample_bytes=stored // 4)
    peak, remove_files = [0], Work.remove_files

    def measured(work: Work, files: Sequence[Path]) -> None:  # files are only removed here
        peak[0] = max(peak[0], disk_bytes(tmp_path))
        remove_files(work, files)

    monkeypatch.setattr(Work, "remove_files", measured)
    build(recipe, workers=1, progress=False)
    assert peak[0] <= found.work <= 1.5 * peak[0], (found, peak)
    published = sum(status.st_size for status in files_of(tmp_path / "out").values())
    assert published * 0.95 <= found.output <= 1.5 * published, (found, published)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("least", "stages"), [(1 << 30, ["exact-keys-merge-1", "pack-tokens-addresses"]), (32, ["gather"])]
)
def test_an_estimate_has_what_exchanges_and_joined_splits_take_though_a_sample_is_of_few_files(
    texts_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int, stages: list[str]
) -> None:
    for module in ("inputs", "needs"):  # from `least` small splits on, they are joined
        limits = replace(DEFAULT_LIMITS, gather_splits=least)
        monkeypatch.setattr(f"shardkit.writers.stages.{module}.DEFAULT_LIMITS", limits)
    lines = (texts_folder / "plain-0.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "files").mkdir()
    for number in range(100):
        (tmp_path / "files" / f"{number}.jsonl").write_bytes(b"".join(lines[number * 5 : number * 5 + 5]))
    inputs = f'inputs=[{{path: "{tmp_path}/files/*.jsonl"}}]'
    places = [f"work={tmp_path / 'work'}", f"output.path={tmp_path / 'out'}"]
    apart = "max_failed_splits=1"  # a task for each file
    recipe = load_recipe(texts_folder / "recipe.yaml", [inputs, "dedup.exact={}", apart, *places])
    found = rehearse(look(recipe), 1, sample_bytes=1 << 16)
    build(recipe, workers=1, progress=False)
    work = Work.at(tmp_path / "work")
    for stage in stages:
        made = sum(commit.bytes for _, commit in work.commits(stage))
        assert made <= found.stages[stage] <= 1.5 * max(made, FILE_BYTES), stage


@pytest.mark.extended
def test_scratch_of_a_work_folder_in_a_store_is_enough_for_a_worker(
    texts_folder: Path, tmp_path: Path
) -> None:
    places = [f"work=memory://disk-budget-{uuid.uuid4()}/work", f"scratch={tmp_path / 'scratch'}"]
    overrides = [*RECIPES["everything"], *places, f"output.path={tmp_path / 'out'}"]
    recipe = load_recipe(texts_folder / "recipe.yaml", overrides)
    read = look(recipe)
    stored = sum(split.bytes for split in read.splits)
    work = work_of(recipe, tmp_path / "work", None, Execution())
    [need] = disk_needs(rehearse(read, 1, sample_bytes=stored // 4), {}, work, tmp_path / "out", 1)
    with peak_bytes(tmp_path / "scratch", tmp_path / "out") as peak:
        build(recipe, workers=1, progress=False)
    assert peak[0] <= need.bytes, (need, peak)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("sampling"), 400)


@pytest.mark.extended  # four builds
def test_a_sample_of_everything_measures_what_the_build_s_card_says(corpus: Path) -> None:
    sample = measure_sample(corpus, share=Fraction(1), progress=False)
    built = build(corpus, progress=False)
    card = DatasetCard.read(built.output / CARD_NAME)
    assert card is not None
    expected = measured_from_card(card)
    found = sample.measured
    assert (found.read_bytes, found.kept_bytes) == (expected.read_bytes, expected.kept_bytes)
    assert found.funnel.retention == expected.funnel.retention
    assert {s.name for s in found.funnel.stages} == {s.name for s in expected.funnel.stages}
    assert (found.tokens, found.stored_bytes) == (expected.tokens, expected.stored_bytes)
    assert found.text_bytes_per_token == expected.text_bytes_per_token
    assert sample.whole_text_bytes == expected.read_bytes
    assert found.core_bytes_per_second is not None
    assert found.core_bytes_per_second > 0
    assert not (corpus.parent / "out.work").exists()


def test_a_part_takes_of_every_source_its_share_and_always_the_same_files(corpus: Path) -> None:
    splits = scan_inputs(load_recipe(corpus))
    whole = sum(split.bytes for split in splits)
    chosen = choose_pieces(splits, whole // 3)
    assert chosen == choose_pieces(splits[::-1], whole // 3)
    assert {piece.split.source for piece in chosen} == {split.source for split in splits}
    everything = choose_pieces(splits, whole)
    assert sum(piece.bytes for piece in everything) == whole
    assert {piece.split.path for piece in everything} == {split.path for split in splits}


@pytest.mark.parametrize("name", ["plain-0.jsonl", "lines.jsonl.gz"])
def test_the_beginning_of_a_file_is_whole_lines(corpus: Path, tmp_path: Path, name: str) -> None:
    [split] = [split for split in scan_inputs(load_recipe(corpus)) if split.file == name]
    taken = copy_start(Piece(split, split.bytes // 2), tmp_path / "head", whole_lines=True)
    lines = (tmp_path / "head").read_bytes().split(b"\n")
    assert 0 < taken <= split.bytes
    assert lines.pop() == b""
    assert [json.loads(line)["number"] for line in lines]


def test_the_beginning_of_a_bomb_fills_no_disk_and_damaged_tables_are_left_to_the_build(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl.zst").write_bytes(zstd_of([(b"\n", 8 << 30)]))
    (folder / "b.parquet").write_bytes(b"PAR1" + bytes(1000) + b"PAR1")
    found = {split.file: split for split in scan_inputs(recipe_of(folder, "*"))}
    bomb, table = found["a.jsonl.zst"], found["b.parquet"]
    assert copy_start(Piece(bomb, 200_000), tmp_path / "head", whole_lines=True) == 0
    assert not (tmp_path / "head").exists()
    inputs, stored = put_pieces(recipe_of(folder, "*"), [Piece(table, 500)], tmp_path / "sample")
    assert stored == {0: table.bytes}
    assert len(inputs) == 1


def test_the_command_plans_from_a_finished_dataset(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = build(corpus, progress=False)
    assert main(["plan", "build", "--from", str(result.output), "--tokens", "1e9", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    kept, read = result.funnel.kept.bytes, result.funnel.read.bytes
    assert plan["retention"] == pytest.approx(kept / read)
    assert plan["raw_bytes"] == pytest.approx(1e9 * read / result.tokens)
    assert plan["inputs"]["text_bytes_per_token"] == {
        "value": pytest.approx(kept / result.tokens),
        "origin": "measured",
    }
    assert plan["inputs"]["core_bytes_per_second"]["origin"] == "assumed"


@pytest.mark.extended
def test_the_command_measures_a_recipe(corpus: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "build", str(corpus), "--sample-bytes", "20KB", "--quiet", "--json"]) == 0
    out, err = capfd.readouterr()
    plan = json.loads(out)
    assert plan["inputs"]["core_bytes_per_second"]["origin"] == "measured"
    assert plan["measured_on"]["stored_bytes"] > 0
    assert err == ""
    assert any("duplicates were found within the sample only" in note for note in plan["notes"])
