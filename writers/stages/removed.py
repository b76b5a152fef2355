"""Step: joins the files of removed documents over all splits: `duplicates/`, quarantine, files of filters.

If the recipe has `split`, only the dataset of part train gets these files.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from shardkit.writers.dedup.duplicates import (
    BATCHES,
    DUPLICATES,
    DUPLICATES_OF_FILE,
    TEXTS_OF_SPLIT,
    TWINS,
    join_duplicates,
)
from shardkit.writers.dedup.outcomes import SPLIT
from shardkit.writers.rows.ledger import dropped_by_filters
from shardkit.writers.stages.clean import JOINED_AT_ONCE, SIDE_FILES, join_side_files
from shardkit.writers.stages.flow import Build, Documents, Outputs, Step
from shardkit.writers.stages.needs import LOSERS, Needs
from shardkit.writers.stages.selection import NOT_SELECTED
from shardkit.writers.stages.text import TEXT


def join_removed(documents: Documents, build: Build) -> Documents:
    """Join the files of removed documents that the tasks of all splits wrote, and add them to the outputs."""
    first = documents.outputs[0]
    filtered = (ledger for step in documents.written[1:] if step.filtering for ledger in step.ledgers)
    judged = sum(dropped_by_filters(ledger) for ledger in filtered)
    lost = documents.written[0].kept.documents - judged - _written(first)
    cut = [commit for step in documents.written[1:] for commit in step.commits]
    duplicates = join_duplicates(
        build.run,
        [*cut, *(first.tokenized or first.texts)],
        lost,
        build.memory_bytes,
        limits=build.limits,
    )
    side_files = join_side_files(
        build.run,
        [commit for step in documents.written for commit in step.judged],
    )
    outputs = [
        replace(one, duplicates=duplicates, side_files=side_files) if one.has_removed else one
        for one in documents.outputs
    ]
    return replace(documents, outputs=outputs)


def _written(made: Outputs) -> int:
    """Return the number of documents in all parts of the split, also those that `output.where` left out."""
    ledgers = [commit.ledger() for commit in made.tokenized]
    ledgers += [ledger for commit in made.texts for ledger in TEXT.result(commit).ledgers]
    lost = (item for ledger in ledgers for item in ledger.dropped.items())
    others = f"{SPLIT}/", NOT_SELECTED
    elsewhere = sum(count.documents for reason, count in lost if reason.startswith(others))
    return sum(ledger.kept.documents for ledger in ledgers) + elsewhere


_TWIN_BYTES = 215  # assumed size of a row of TWINS with its strings, in bytes
_TEXT_BYTES = 1100  # bytes of a text that is stored as a sample, at most 2,000 characters


def needs(n: Needs) -> None:
    """Add the requests and bytes of joining the files of removed documents."""
    c = n.corpus
    removed = c.documents * LOSERS * bool({*c.steps} - {"lines"})
    files = max(1, ceil(removed / DUPLICATES_OF_FILE))
    texts = min(2 * removed, 2 * TEXTS_OF_SPLIT * c.gathered) * _TEXT_BYTES
    payload = _TWIN_BYTES - TWINS.row_bytes + texts / max(1.0, 2 * removed)
    twins = n.exchange(DUPLICATES, TWINS, c.gathered, 2 * removed, files, payload)
    slices = n.slices(twins, files, c.task_memory // BATCHES)
    n.add(DUPLICATES, files, *slices, files=1, written=removed * _TWIN_BYTES + texts * 0.3)
    joined, level = c.splits, 0
    while joined > 1 or level == 0:
        stage = SIDE_FILES.step(f"merge-{level}") if level else SIDE_FILES
        n.add(stage, ceil(joined / JOINED_AT_ONCE), joined, files=1)
        joined, level = ceil(joined / JOINED_AT_ONCE), level + 1


STEP = Step(lambda recipe: (DUPLICATES, SIDE_FILES), join_removed, needs)
