"""`--explain` tells what has to run and why, and `clean` removes what is not used and nothing else."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from shardkit.errors import BuildError
from shardkit.writers import build
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS
from shardkit.writers.execution.runner import Journal
from shardkit.writers.execution.work import Work
from shardkit.writers.explain import LOST, NEW, Explanation, clean_work, explain_build
from shardkit.writers.recipe.recipe import load_recipe
from shardkit.writers.stages import inputs as build_inputs
from shardkit.writers.stages.graph import stages_of
from support.small_build import make_corpus, text_of, tree

WORK = ["work=work"]
ALIKE = "{similarity: 0.3, minhash: {ngram: 1}, bands: 112, rows: 1}"  # so that some pairs are verified
ALL_STAGES = [f"dedup={{exact: {{}}, lines: {{min_characters: 20}}, near: {ALIKE}}}"]

pytestmark = pytest.mark.usefixtures("inline_builds")


def make(recipe: Path, *changes: str, output: str = "out") -> dict[str, str]:
    place = recipe.parent.parent / output
    build(recipe, output=place, overrides=[*WORK, *changes], progress=False)
    return tree(place)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, inline_builds: None) -> Path:
    folder = tmp_path_factory.mktemp("explain")
    make(make_corpus(folder / "corpus", documents=120))
    return folder


@pytest.fixture
def recipe(built: Path, tmp_path: Path) -> Path:
    """That of a finished build, whose work folder is kept. Inputs are links: copies would be other files."""
    corpus = tmp_path / "built" / "corpus"
    shutil.copytree(built / "out", tmp_path / "built" / "out")
    shutil.copytree(built / "corpus", corpus, copy_function=os.symlink)
    shutil.rmtree(corpus / "work")
    shutil.copytree(built / "corpus" / "work", corpus / "work")
    return corpus / "recipe.yaml"


def explain(recipe: Path, *changes: str) -> Explanation:
    before = tree(recipe.parent)
    found = explain_build(recipe, output=recipe.parent.parent / "none", overrides=[*WORK, *changes])
    assert tree(recipe.parent) == before, "nothing is written"
    return found


def to_run(explanation: Explanation) -> dict[str, tuple[int, list[str]]]:
    """{stage: (tasks that have to run, why)} of the stages that were looked up."""
    return {
        plan.stage: (plan.tasks - plan.finished, [reason.what for reason in plan.reasons])
        for plan in explanation.stages
        if plan.finished < plan.tasks
    }


def test_before_the_first_build_everything_is_new(tmp_path: Path) -> None:
    found = explain(make_corpus(tmp_path / "corpus", documents=120))
    assert to_run(found) == {"tokenizer": (1, [NEW]), "clean": (4, [NEW])}
    stages = [
        "gather",
        "exact",
        "exact_removed",
        "parity",
        "tokenize",
        "pack",
        "provenance",
        "duplicates",
        "side_files",
    ]
    assert list(found.later) == stages
    assert not found.stale


@pytest.mark.parametrize("changes", [[], ALL_STAGES], ids=["plain", "all-stages"])
def test_after_a_build_nothing_has_to_run_and_every_stage_was_looked_up(
    recipe: Path, changes: list[str]
) -> None:
    if changes:
        shutil.rmtree(recipe.parent / "work")
        make(recipe, *changes, output="more")
    found = explain(recipe, *changes)
    assert to_run(found) == {}
    assert not found.later
    assert not found.stale
    named = [stage.name for stage in stages_of(load_recipe(recipe, [*WORK, *changes]))]
    for name in ("side_files", "gather"):  # this build has none, and no small splits
        named.remove(name)
    assert sorted(plan.stage for plan in found.stages) == sorted(named)


READ_AGAIN = "removed after it was read; pack reads it again ({})"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("change", "stage", "tasks", "why"),
    [
        ("pack.sequence_length=32", "tokenize", None, READ_AGAIN.format("pack.sequence_length: 64 -> 32")),
        ("output.shard_bytes=4KiB", "tokenize", None, READ_AGAIN.format("output.shard_bytes: 8192 -> 4096")),
        ("seed=18", "clean", 4, "seed: 17 -> 18"),  # it selects what filters count and show
        ("max_bad_fraction=0.5", "clean", 4, "max_bad_fraction: 0.0 -> 0.5"),
        ("filters=[{length: {min_words: 4}}]", "clean", 4, "filters[0].length.min_words: 3 -> 4"),
        ("dedup={}", "tokenize", None, "removed.exact_duplicate: read from other bytes"),
    ],
)
def test_a_changed_key_is_named_at_the_first_stage_that_depends_on_it_and_no_earlier_one(
    recipe: Path, change: str, stage: str, tasks: int | None, why: str
) -> None:
    [(found, (count, reasons))] = to_run(explain(recipe, change)).items()
    assert found == stage
    assert reasons == [why]
    assert tasks in (None, count)
    finished = sum(plan.finished for plan in explain(recipe, change).stages)
    result = build(recipe, output=recipe.parent / "o", overrides=[*WORK, change], progress=False)
    assert result.tasks_reused >= finished


@pytest.mark.extended
def test_what_was_merged_is_kept_as_long_as_its_readers_are_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_inputs, "group_small_files", list)  # a run for each file
    limits = replace(DEFAULT_LIMITS, gather_splits=1 << 30)
    monkeypatch.setattr(build_inputs, "DEFAULT_LIMITS", limits)
    recipe = make_corpus(tmp_path / "corpus", 40)
    for number in range(70):  # more runs than a task reads at once
        (recipe.parent / f"plain-x{number}.jsonl").write_text(
            json.dumps({"text": text_of(1000 + number * 10), "number": 1})
        )
    make(recipe, "filters=[]", output="out")
    merges = {plan.stage for plan in explain(recipe, "filters=[]").stages if "-" in plan.stage}
    assert merges == {"exact-keys-merge-1", "pack-tokens-addresses"}
    assert not explain(recipe, "filters=[]").stale
    stale = {task.commit.stage for task in explain(recipe, "filters=[{length: {min_words: 4}}]").stale}
    assert stale == {"clean"}
    stale = {task.commit.stage for task in explain(recipe, "filters=[]", "seed=18").stale}
    assert stale == {"tokenize"}


def test_a_seed_changes_what_filters_show_of_a_build_that_is_continued(recipe: Path) -> None:
    fresh = make(recipe, "seed=18", "work=other", output="fresh")
    assert make(recipe, "seed=18", output="again") == fresh


def test_an_added_file_is_the_only_one_that_is_cleaned(recipe: Path) -> None:
    lines = [json.dumps({"text": text_of(n), "number": n}) for n in range(900, 920)]
    (recipe.parent / "plain-7.jsonl").write_text("\n".join(lines) + "\n")
    assert to_run(explain(recipe)) == {"clean": (1, [NEW])}
    make(recipe, output="more")
    assert explain(recipe).stale, "partitions of the smaller corpus"


def test_a_changed_file_is_told_from_an_added_one(recipe: Path) -> None:
    file = recipe.parent / "plain-1.jsonl"
    text = file.read_text()
    file.unlink()
    file.write_text(text + "\n" + json.dumps({"text": text_of(999), "number": 1}) + "\n")
    [(stage, (count, reasons))] = to_run(explain(recipe)).items()
    assert (stage, count) == ("clean", 1)
    assert "file: read from other bytes" in reasons
    assert NEW not in reasons


def test_a_lost_output_is_named(recipe: Path) -> None:
    next((recipe.parent / "work" / "clean").glob("some.parquet*/documents.arrow")).unlink()
    assert to_run(explain(recipe)) == {"clean": (1, [LOST])}


def test_other_code_is_named(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("execution.stage", "explain"):
        monkeypatch.setattr(f"shardkit.writers.{module}.code_version", lambda: "newer")
    for count, reasons in to_run(explain(recipe)).values():
        assert count
        assert all(reason.startswith("code: made by another version of shardkit") for reason in reasons)


def test_cleaning_keeps_what_the_recipe_uses_and_an_earlier_recipe_builds_again(recipe: Path) -> None:
    other = ["pack.sequence_length=32", "dedup={}"]
    make(recipe, *other, output="second")
    stale = explain(recipe).stale
    would = clean_work(recipe, overrides=WORK, dry_run=True)
    assert {task.key for task in would.removed} == {task.key for task in stale}
    assert {task.key.split("/")[0] for task in stale} >= {"pack", "tokenize", "provenance"}
    done = clean_work(recipe, overrides=WORK)
    assert [task.key for task in done.removed] == [task.key for task in would.removed]
    assert done.removed_bytes > 0
    assert not clean_work(recipe, overrides=WORK).removed
    assert to_run(explain(recipe)) == {}
    assert make(recipe, output="third") == tree(recipe.parent.parent / "out")
    assert "clean" not in to_run(explain(recipe, *other)), "both recipes use the cleaned splits"


def test_cleaning_waits_for_nobody_and_harms_no_build(recipe: Path) -> None:
    with (
        Journal(Work.at(recipe.parent / "work")),
        pytest.raises(BuildError, match="another build uses this work folder"),
    ):
        clean_work(recipe, overrides=WORK)
    assert to_run(explain(recipe)) == {}


def test_everything_may_be_removed_but_not_a_foreign_folder(recipe: Path) -> None:
    report = clean_work(recipe, overrides=WORK, everything=True)
    assert len(report.removed) == 15
    assert not (recipe.parent / "work").exists()
    assert clean_work(recipe, overrides=WORK, everything=True).removed == ()
    (recipe.parent / "foreign").mkdir()
    (recipe.parent / "foreign" / "mine.txt").write_text("mine")
    with pytest.raises(BuildError, match="contains files that no build wrote"):
        clean_work(recipe, overrides=["work=foreign"], everything=True)
    assert (recipe.parent / "foreign" / "mine.txt").exists()
