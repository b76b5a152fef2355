"""The steps of a build in order, from splits of raw files to datasets that can be published.

    read and filter -> equal URLs -> equal texts -> lines -> near-duplicates -> semantic duplicates
                    -> buckets -> amounts -> split -> rows of tokens, files of text -> what was removed

The recipe may list the steps before `buckets` in another order and repeatedly, with further passes of filters
and samples between them.

A recipe may define several datasets: several outputs, each for every part of a split. They share all steps,
and datasets of tokens also share the tokenized documents; each has the bytes that it would have alone. The
function `run` returns the commits of tasks. In a build, it skips finished tasks and an engine executes the
others; to explain a build or to estimate its disk space, it only looks up finished tasks. The tasks of a
stage depend on the recipe and on the commits of earlier stages, never on the number of workers or on time. So
the same inputs and recipe give the same bytes, and a changed recipe repeats only the tasks that it affects.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil
from typing import Any

from shardkit.writers.execution.stage import RunTasks, Stage
from shardkit.writers.filters.buckets import BucketsConfig
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.recipe.steps import SAMPLE, GlobalStep
from shardkit.writers.stages import (
    amounts,
    buckets,
    clean,
    exact,
    filter_left,
    lines,
    near,
    removed,
    rows,
    scores,
    semantic,
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
OVER_ALL: Mapping[str, Callable[[GlobalStep], Step]] = {  # keys are the names in `steps` of a recipe
    "url": exact.urls_step,
    "exact": exact.texts_step,
    "lines": lines.step_of,
    "near": near.step_of,
    "semantic": semantic.step_of,
    SAMPLE: amounts.sample_step,
}
MAKING: Sequence[Step] = (
    *(buckets.STEP, amounts.STEP, split.STEP, rows.STEP),
    *(filter_left.ANNOTATIONS_STEP, text.STEP, removed.STEP),
)


def steps_of(recipe: Recipe) -> list[Step]:
    """Return the steps of a recipe's build up to the last of its `steps`, in order."""
    found, before, unlabeled = [*FIRST], 0, False
    for number, move in enumerate(recipe.moves):
        if unlabeled and not (isinstance(move, GlobalStep) and move.name != SAMPLE):  # it may use the labels
            found.append(buckets.STEP)
            unlabeled = False
        if isinstance(move, GlobalStep):
            before += 1
            found.append(_over_all(move))
            continue
        if number:
            found.append(filter_left.step_of(number, number - before))
        unlabeled |= any(isinstance(config, BucketsConfig) for _, config in move)
    return found


def names_over_all(move: GlobalStep, recipe: Recipe, names: Iterable[str]) -> list[str]:
    """Return the stages, of these names, of a step over all documents; merges of its exchanges, too."""
    number = _number_of(move)
    own = [stage.name for stage in _over_all(move).stages(recipe)]
    end = "" if number == 1 else f"-{number}"
    merges = "|".join(re.escape(name.removesuffix(end)) for name in own)
    merge = re.compile(rf"(?:{merges})-.+-merge-[0-9]+{end}")
    return [name for name in names if name in own or merge.fullmatch(name)]


def _number_of(move: GlobalStep) -> int:
    return move.nth + (move.name == SAMPLE)  # the stages of `amounts`, which are the same, are the first


def _over_all(move: GlobalStep) -> Step:
    """Return a step over all documents; its stages, and those of merges, are named by its number."""
    step = OVER_ALL[move.name](move)
    number = _number_of(move)
    return Step(
        lambda recipe: [stage.nth(number) for stage in step.stages(recipe)],
        lambda documents, build: step.run(documents, build.nth(number)),
        step.needs,
    )


def _making(recipe: Recipe) -> list[Step]:
    before = steps_of(recipe)
    return [step for step in MAKING if step not in before]


def stages_of(recipe: Recipe) -> list[Stage[..., Any]]:
    """Return the stages of a recipe's build in order, without merges, whose number depends on the data."""
    return [stage for step in (*steps_of(recipe), *_making(recipe)) for stage in step.stages(recipe)]


def find_survivors(build: Build) -> Documents:
    """Read and filter the documents and remove duplicates.

    Raises RecipeError if no record of a file has a field that the recipe names. Raises BuildError if too many
    records are unreadable, if no document is left, or if a source is mostly duplicates.
    """
    recipe = build.inputs.recipe
    semantic.check(recipe)
    documents = _run(steps_of(recipe), Documents(recipe, build.inputs.splits), build)
    check_losses(documents)
    return documents


def run_build(inputs: BuildInputs, run: RunTasks) -> Documents:
    """Run all steps; return the documents with one entry of `outputs` per dataset, in the recipe's order."""
    tokenizer = inputs.tokenizer
    build = Build(inputs, run, () if tokenizer is None else (tokenizer_task(inputs.recipe, tokenizer),))
    documents = find_survivors(build)
    outputs = [Outputs(one) for one in inputs.recipe.datasets()]
    return _run(_making(inputs.recipe), documents.with_outputs(outputs), build)


def _run(steps: Sequence[Step], documents: Documents, build: Build) -> Documents:
    for step in steps:
        if step.stages(documents.recipe):
            documents = step.run(documents, build)
    return documents


def stage_needs(corpus: Corpus) -> list[StageNeeds]:
    """Return the requests and bytes of all stages, merges of exchanges included, for a build of `corpus`.

    Raises RecipeError if the memory of a task is too small for the build.
    """
    needs = Needs(corpus)
    for step in FIRST:
        step.needs(needs)
    for number, name in enumerate(corpus.steps):
        nth = 1 + corpus.steps[:number].count(name)
        needs.nth, needs.is_first = nth + (name == SAMPLE), not number
        OVER_ALL[name](GlobalStep(name, None, nth)).needs(needs)
    needs.nth = 1
    filter_left.needs(needs)
    for step in MAKING:
        step.needs(needs)
    if corpus.is_sent:
        _upload_needs(needs)
    return needs.stages


def _upload_needs(n: Needs) -> None:
    """Add the requests of stage `upload`, which has the store copy each file; looks it up on both sides."""
    c = n.corpus
    files = n.shards + n.tables
    tasks = ceil(max(files / _TASK_FILES, n.output_bytes / (_TASK_BYTES / c.scale)))
    n.add(UPLOAD, tasks, 2 * files, sent=files)
