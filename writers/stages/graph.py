"""The steps of a build in order, from splits of raw files to datasets that can be published.

    read and filter -> equal URLs -> equal texts -> lines -> near-duplicates -> buckets -> split
                    -> rows of tokens, files of text -> what was removed

with passes of filters between and behind the steps that remove duplicates, where the recipe has them.

A recipe may ask for several datasets: several outputs, each for every part of a split. They share all steps,
and datasets of tokens also what is tokenized; each has the bytes that it would have alone. `run` returns the
commits of tasks: a runner skips finished tasks and has an engine run the others; to explain a build or to
estimate its disk space, `run` only looks up finished tasks. The tasks of a stage follow from the recipe and
from the commits of earlier stages, never from the number of workers or from time, so the same inputs and
recipe give the same bytes, and a changed recipe redoes exactly what depends on the change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from shardkit.storage.s3_upload import PART_BYTES
from shardkit.writers.execution.stage import RunTasks, Stage
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.stages import (
    buckets,
    clean,
    exact,
    filter_left,
    lines,
    near,
    removed,
    rows,
    scores,
    split,
    text,
)
from shardkit.writers.stages.flow import Build, Documents, Outputs, Step
from shardkit.writers.stages.inputs import BuildInputs
from shardkit.writers.stages.losses import check_losses
from shardkit.writers.stages.needs import Corpus, Needs, StageNeeds
from shardkit.writers.stages.publish import _TASK_BYTES, _TASK_FILES, UPLOAD
from shardkit.writers.stages.tokenize import tokenizer_task

FIRST: Sequence[Step] = (scores.STEP, clean.STEP)
REMOVING: Mapping[str, Step] = {  # by the name of what `dedup` and `steps` of a recipe ask for
    "url": exact.URLS_STEP,
    "exact": exact.TEXTS_STEP,
    "lines": lines.STEP,
    "near": near.STEP,
}
MAKING: Sequence[Step] = (buckets.STEP, split.STEP, rows.STEP, text.STEP, removed.STEP)


def steps_of(recipe: Recipe) -> list[Step]:
    """Return the steps of a recipe's build that find what is left, in their order."""
    found, passes = [*FIRST], 0
    for number, move in enumerate(recipe.moves[1:], 1):
        if isinstance(move, str):
            found.append(REMOVING[move])
        else:
            passes += 1
            found.append(filter_left.step_of(number, passes))
    return found


def stages_of(recipe: Recipe) -> list[Stage[..., Any]]:
    """Return the stages of a recipe's build in order, without merges, of which data may need any number."""
    return [stage for step in (*steps_of(recipe), *MAKING) for stage in step.stages(recipe)]


def find_survivors(build: Build) -> Documents:
    """Clean the documents and remove their duplicates.

    RecipeError if no record of a file has a field that the recipe names. BuildError if too much is
    unreadable, if nothing is left, or if a source is mostly duplicates.
    """
    recipe = build.inputs.recipe
    documents = _run(steps_of(recipe), Documents(recipe, build.inputs.splits), build)
    check_losses(documents)
    return documents


def run_build(inputs: BuildInputs, run: RunTasks) -> Documents:
    """Run all steps: the documents, with what each dataset of the recipe is made of, in its order."""
    tokenizer = inputs.tokenizer
    build = Build(inputs, run, () if tokenizer is None else (tokenizer_task(inputs.recipe, tokenizer),))
    documents = find_survivors(build)
    outputs = [Outputs(one) for one in inputs.recipe.datasets()]
    return _run(MAKING, documents.with_outputs(outputs), build)


def _run(steps: Sequence[Step], documents: Documents, build: Build) -> Documents:
    for step in steps:
        if step.stages(documents.recipe):
            documents = step.run(documents, build)
    return documents


def stage_needs(corpus: Corpus) -> list[StageNeeds]:
    """Return what all stages from cleaned documents to shards ask for, merges of exchanges among them.

    RecipeError if the build cannot be made with the memory that a task has.
    """
    needs = Needs(corpus)
    for step in (*FIRST, *REMOVING.values()):
        step.needs(needs)
    filter_left.needs(needs)
    for step in MAKING:
        step.needs(needs)
    if corpus.is_sent:
        _upload_needs(needs)
    return needs.stages


def _upload_needs(n: Needs) -> None:
    """State what sending takes: tasks see whether a file is there, read it, and send it whole or in parts."""
    c = n.corpus
    files = n.shards + n.tables
    tasks = ceil(max(files / _TASK_FILES, n.output_bytes / (_TASK_BYTES / c.scale)))
    parts = ceil(c.shard_bytes / PART_BYTES)
    puts = n.shards * (parts + 2 if parts > 1 else 1) + n.tables
    gets, read = n.scans(n.output_bytes, files)
    n.add(UPLOAD, tasks, files + gets, read, written=n.output_bytes, sent=puts)
