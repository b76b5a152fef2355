"""Step: filters that run after duplicate removal, on the remaining documents only.

There is one task per split and pass. It writes the files of a pass (passes.py) into its folder, and
  rows.npy         int64[n]: the former row of each kept document
  outcomes.bin     OUTCOME: how many documents each kept one represents, with new rows
  duplicates.run   documents that duplicate removal took since the last rewrite, and those kept for them
  annotations_left.parquet  with `annotate`: the values of its filters (rows/annotations.py)
The ledger: read = kept + dropped, with the reasons of earlier steps and of the filters.

With `annotate`, one more task per split joins the annotations of all passes, once all documents are filtered:
  annotations.parquet  as in the dataset
  rows.npy             int64[n]: for each remaining document, its row among the lines that no filter dropped
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shardkit.errors import BuildError
from shardkit.writers.dedup.duplicates import TwinsFile
from shardkit.writers.dedup.outcomes import SplitRemovals
from shardkit.writers.dedup.population import LanguageLabels, RowFiles, in_rows
from shardkit.writers.dedup.rewriting import ROWS_FILE, RewrittenRows, left_of
from shardkit.writers.dedup.tables import RowsWriter
from shardkit.writers.exchange.sorted_runs import Limits
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.digests import DecidesNoByte, MemoryBytes, RecipeKey
from shardkit.writers.execution.progress import PULSE
from shardkit.writers.execution.stage import Stage
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.recipe.steps import FilterPass
from shardkit.writers.rows.annotations import (
    ANNOTATIONS_FILE,
    LEFT_FILE,
    AnnotationFile,
    LaterPass,
    join_passes,
)
from shardkit.writers.rows.ledger import Ledger, by_loss
from shardkit.writers.stages.flow import Build, Documents, Filtering, Step, Written
from shardkit.writers.stages.id_tables import IdTable
from shardkit.writers.stages.labels import Labels, marked_batches
from shardkit.writers.stages.needs import DOCUMENTS, Needs
from shardkit.writers.stages.passes import PassFiles, PassSettings
from shardkit.writers.stages.selection import remaining

_LINE_BYTES = 60  # assumed size of a line of annotations, in bytes


def filter_left(
    folder: Path,
    documents: Artifact,
    settings: Annotated[PassSettings, RecipeKey()],
    removals: SplitRemovals,
    filter_files: Mapping[str, str],
    filter_folder: Annotated[Artifact, DecidesNoByte("where the files of filters are")],
    scores: Sequence[IdTable],
    languages: LanguageLabels | None,
    marks: Labels,
    memory_bytes: MemoryBytes,
    limits: Limits,
) -> Filtering:
    """Filter the documents of a split that are not in `removals`, and write the files into `folder`.

    `filter_files` and `filter_folder` are as in `clean_split`; `languages` are from an earlier pass. `marks`
    are labels that earlier steps found, which become fields of the metadata.
    """
    known = None if languages is None else languages.labels
    chain = settings.chain(filter_files, filter_folder, scores, labels=known)
    labels = None if languages is None else np.array(languages.labels, np.object_)[languages.read()]
    removed, ledger, start = removals.load(), Ledger(), 0
    with (
        documents.open_arrow() as file,
        TwinsFile(folder, memory_bytes=memory_bytes // 4, limits=limits) as twins,
        RewrittenRows(folder) as rows,
        AnnotationFile(folder / LEFT_FILE, of_left=True)
        if settings.annotate
        else nullcontext() as annotations,
    ):
        reader = pa.ipc.open_file(file)
        with PassFiles(folder, settings, chain, reader.schema) as files:
            for whole in marked_batches(reader, marks):
                here = removed.within(start, whole.num_rows)
                numbered = whole.append_column("row", pa.array(np.arange(start, start + whole.num_rows)))
                left, copies = remaining(numbered, here, ledger, twins)
                at = left.column("row").to_numpy()
                filtered = chain.apply(left.drop_columns(["row"]), None if labels is None else labels[at])
                files.write(filtered, ledger)
                if annotations is not None:
                    annotations.write(left, filtered)
                rows.write(at[filtered.stays], copies[filtered.stays])
                start += whole.num_rows
                PULSE.tell(ledger)
    ledger.check(str(folder))
    return files.result(ledger)


FILTER_LEFT = Stage("filter_left", "filter what is left", filter_left, cost=60)


def step_of(number: int, nth: int) -> Step:
    """Return the step of the pass at index `number` of `Recipe.moves`, the `nth` after duplicate removal."""
    stage = FILTER_LEFT.nth(nth)
    return Step(lambda recipe: (stage,), partial(_filter, stage, number), needs)


def _filter(stage: Stage[..., Filtering], number: int, documents: Documents, build: Build) -> Documents:
    recipe, inputs = documents.recipe, build.inputs
    settings = PassSettings.of(recipe, number)
    folder = inputs.folder_of_filters
    files, scores = inputs.files_of(settings.filters), settings.scores_of(recipe, documents.scores)
    tasks = []
    for at, described in enumerate(documents.described(languages=True)):
        args = documents.file(at), settings, documents.removals[at], files, folder, scores
        known = described.languages, documents.labels_of(at)
        task = stage.task(described.name, described.bytes, *args, *known, build.memory_bytes, build.limits)
        tasks.append(replace(task, resources=settings.resources))
    [commits] = build.run(tasks)
    found = [stage.result(commit) for commit in commits]
    if not sum(one.ledger.kept.documents for one in found):
        raise BuildError(_nothing_left(recipe, number, found))
    title = f"filtering what is left ({stage.name})"
    written = Written(title, commits, [one.ledger for one in found], found, commits)
    marked = documents.marked.union(one.field for one in documents.labels_of(0))
    return replace(documents.rewritten(written, [left_of(commit) for commit in commits]), marked=marked)


def _nothing_left(recipe: Recipe, number: int, found: Sequence[Filtering]) -> str:
    total = Ledger()
    for one in found:
        total.merge(one.ledger)
    names = [name for name, _ in PassSettings.of(recipe, number).filters]
    after = f" after {', '.join(names)}" if names else ""
    return (
        f"no document is left of {total.read.documents:,}{after} (dropped: {by_loss(total.dropped)}); loosen "
        "or remove a step"
    )


def needs(n: Needs) -> None:
    """Add the requests and bytes of passes after duplicate removal, as if they dropped no document."""
    c = n.corpus
    text, files = c.text_bytes * DOCUMENTS, 5 + bool(c.shape.annotated)
    for nth in range(1, c.shape.passes + 1):
        n.add(FILTER_LEFT.nth(nth), c.gathered, *n.scans(text, c.gathered), files=files, written=text)


@dataclass(frozen=True, slots=True)
class LeftAnnotations:
    """The annotations of one split by a later pass of filters, as an argument of a task.

    `rows` map the documents that the pass read to those that the later pass before it read, or else to those
    that the first pass kept. The other fields are as in `LaterPass`.
    """

    annotations: Artifact
    rows: RowFiles
    number: int
    names: Mapping[str, str]
    like: Artifact | None


def join_annotations(
    folder: Path, first: Artifact, later: Sequence[LeftAnnotations], rows: RowFiles, passes: int
) -> None:
    """Join the annotations of one split by all passes of filters.

    `rows` map the remaining documents to those that the last pass read; `first` and `passes` are as in
    `join_passes`.
    """
    with ExitStack() as stack:
        source = stack.enter_context(first.open_arrow())
        dropped = pq.ParquetFile(source).read(columns=["dropped"]).column("dropped")
        lines = np.flatnonzero(dropped.is_null().to_numpy())  # of the documents that the first pass kept
        made = []
        for one in later:
            lines = in_rows(lines, one.rows)
            file = stack.enter_context(one.annotations.open_arrow())
            like = None if one.like is None else stack.enter_context(one.like.open_arrow())
            made.append(LaterPass(file, lines, number=one.number, names=one.names, like=like))
        stays = join_passes(folder / ANNOTATIONS_FILE, source, made, passes=passes)
    with RowsWriter(folder / ROWS_FILE, np.int64) as written:
        written.write(np.cumsum(stays)[in_rows(lines, rows)] - 1)


JOIN_ANNOTATIONS = Stage("join_annotations", "annotations", join_annotations, cost=5)


def _join(documents: Documents, build: Build) -> Documents:
    """Join the annotations of all passes of filters for each split."""
    recipe, written = documents.recipe, documents.written
    at = [number for number, step in enumerate(written) if step.filtering]
    passes = [(step, filters) for step, filters in zip(at, recipe.passes, strict=True) if filters]
    found = [
        (step, _names(passes, number), _reached(written[step])) for number, (step, _) in enumerate(passes)
    ]
    tasks = []
    for split, cleaned in enumerate(written[0].commits):
        rows = [step.commits[split].file(ROWS_FILE) for step in written[1:]]
        later, begin = list[LeftAnnotations](), 0
        for number, (step, names, reached) in enumerate(found, 1):
            if step:  # 0 is the first pass
                files = [commit.file(LEFT_FILE) for commit in written[step].commits]
                like = None if reached[split] else files[reached.index(True)]
                own = tuple(rows[begin : step - 1])
                later.append(LeftAnnotations(files[split], own, number, names, like))
                begin = step - 1
        first, size = cleaned.file(ANNOTATIONS_FILE), cleaned.outputs[ANNOTATIONS_FILE].bytes
        args = first, later, tuple(rows[begin:]), int(bool(recipe.passes[0]))
        tasks.append(JOIN_ANNOTATIONS.task(cleaned.name, size, *args))
    [commits] = build.run(tasks)
    return replace(documents, joined=commits)


def _names(passes: Sequence[tuple[int, FilterPass]], number: int) -> dict[str, str]:
    """Return the names of filters in a pass's annotations, if an earlier pass used them, too."""
    used = Counter(name for _, filters in passes[: number + 1] for name in dict(filters))
    return {name: f"{name}-{used[name]}" for name in dict(passes[number][1]) if used[name] > 1}


def _reached(step: Written) -> list[bool]:
    """Return for each split whether a document of it reached this pass of filters."""
    ledgers = [one.ledger for one in step.filtering]
    return [one.kept.documents > 0 or any("/" in reason for reason in one.dropped) for one in ledgers]


def annotation_needs(n: Needs) -> None:
    """Add the requests and bytes of joining annotations."""
    c = n.corpus
    if not c.shape.annotated:
        return
    size = c.documents * _LINE_BYTES
    gets, read = n.scans(size, c.gathered)
    files = 2 + 2 * c.shape.annotated  # annotations and rows, first and of each later pass
    n.add(JOIN_ANNOTATIONS, c.gathered, files * gets, 2 * read, files=2, written=size)


ANNOTATIONS_STEP = Step(
    lambda recipe: (JOIN_ANNOTATIONS,) if recipe.annotate and any(recipe.passes[1:]) else (),
    _join,
    annotation_needs,
)
