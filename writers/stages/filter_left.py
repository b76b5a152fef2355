"""Step: filters that run after duplicate removal, on the remaining documents only.

There is one task per split and pass. It writes the files of a pass (passes.py) into its folder, and
  rows.npy         int64[n]: the former row of each kept document
  outcomes.bin     OUTCOME: how many documents each kept one represents, with new rows
  duplicates.run   documents that duplicate removal took since the last rewrite, and those kept for them
The ledger: read = kept + dropped, with the reasons of earlier steps and of the filters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa

from shardkit.errors import BuildError
from shardkit.writers.dedup.duplicates import TwinsFile
from shardkit.writers.dedup.outcomes import SplitRemovals
from shardkit.writers.dedup.population import LanguageLabels
from shardkit.writers.dedup.rewriting import RewrittenRows, left_of
from shardkit.writers.exchange.sorted_runs import Limits
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.digests import DecidesNoByte, MemoryBytes, RecipeKey
from shardkit.writers.execution.progress import PULSE
from shardkit.writers.execution.stage import Stage
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.rows.ledger import Ledger, by_loss
from shardkit.writers.stages.flow import Build, Documents, Filtering, Step, Written
from shardkit.writers.stages.id_tables import IdTable
from shardkit.writers.stages.labels import Labels, marked_batches
from shardkit.writers.stages.needs import DOCUMENTS, Needs
from shardkit.writers.stages.passes import PassFiles, PassSettings
from shardkit.writers.stages.selection import remaining


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
    written = Written(title, commits, [one.ledger for one in found], found)
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
    text = c.text_bytes * DOCUMENTS
    for nth in range(1, c.shape.passes + 1):
        n.add(FILTER_LEFT.nth(nth), c.splits, *n.scans(text, c.splits), files=5, written=text)
