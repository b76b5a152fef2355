"""What flows through a build: its inputs, the documents from step to step, and the datasets that come out.

A step is what a recipe asks for, in stages/graph.py's order; a stage is a kind of task
(execution/stage.py). A step takes the `Documents` that are left, runs its stages, and returns what is left
of them, with what it found out:

    documents = Documents(recipe, splits)
    for step in STEPS:
        documents = step.run(documents, build)

Nothing is copied from step to step: a document that a step removes stays in its file, and `removals` says
which rows are gone. Only steps that edit texts write new files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardkit.card import Count, NearFacts
from shardkit.settings import TRAIN
from shardkit.writers.dedup.lines import ROWS_FILE
from shardkit.writers.dedup.near import NearResult
from shardkit.writers.dedup.outcomes import SplitRemovals, SplitTable
from shardkit.writers.dedup.population import LanguageLabels, SplitDocuments
from shardkit.writers.exchange.sorted_runs import Limits
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.stage import RunTasks, Stage, Task
from shardkit.writers.inputs.scan import Split
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.rows.documents import DOCUMENTS_FILE
from shardkit.writers.rows.funnel import FilterCounts
from shardkit.writers.rows.ledger import Ledger
from shardkit.writers.stages.inputs import BuildInputs
from shardkit.writers.stages.labels import BUCKETS_FILE, BucketLabels, Buckets
from shardkit.writers.stages.languages import LANGUAGES_FILE
from shardkit.writers.stages.needs import Needs, task_memory
from shardkit.writers.stages.score_tables import ScoreTable


@dataclass(frozen=True)
class Build:
    """What all steps of a build share: its inputs, and how tasks get run.

    `beside` are tasks that need no documents and run beside cleaning.
    """

    inputs: BuildInputs
    run: RunTasks
    beside: Sequence[Task] = ()

    @property
    def limits(self) -> Limits:
        """Sizes of all exchanges."""
        return self.inputs.limits

    @property
    def memory_bytes(self) -> int:
        """Bytes that a task over all documents may hold; libraries and page cache need the rest."""
        return task_memory(self.inputs.recipe.memory)


@dataclass(frozen=True, slots=True)
class Cleaned:
    """Result of a split: its checked ledger, counts of each filter, and the meaning of language codes.

    `fields` are named fields that no record had (`NamedFields.to_dict`), and `inputs` are `hash_split`, both
    of each part of the split. `urls` are kept documents with a URL, in builds that compare these.
    """

    ledger: Ledger
    filters: FilterCounts
    fields: Sequence[Mapping[str, Any]]
    inputs: Sequence[str]
    languages: Sequence[str] | None = None
    urls: int = 0


@dataclass(frozen=True, slots=True)
class PartsFound:
    """The parts of the documents: what each split file loses, by part, and what was drawn.

    `documents` are those of each part; `proposed` were proposed for it; `alike` of these are like another
    document, and so stay in train.
    """

    removals: Mapping[str, Sequence[SplitRemovals]]
    documents: Mapping[str, int]
    proposed: Mapping[str, int]
    alike: Mapping[str, int]


@dataclass(frozen=True)
class Outputs:
    """One dataset: the commits of its tasks, whose files are published or say what was done.

    `recipe` is that of the dataset alone. Of a dataset of text, `texts` have the files, and nothing is
    tokenized or packed. `side_files` have one file each, which has its name in the dataset; `duplicates` have
    DUPLICATES_FILE; only one part of a split has either. `tokenizer` is the card's entry.
    """

    recipe: Recipe
    tokenized: Sequence[Commit] = ()
    packed: Sequence[Commit] = ()
    provenance: Sequence[Commit] = ()
    texts: Sequence[Commit] = ()
    duplicates: Sequence[Commit] = ()
    side_files: Sequence[Commit] = ()
    tokenizer: Mapping[str, Any] | None = None

    @property
    def has_removed(self) -> bool:
        """Whether the dataset tells what was removed: once a split, with the part that is the rest."""
        return self.recipe.part in (None, TRAIN)


@dataclass(frozen=True)
class Documents:
    """The documents of a build between two steps; all sequences are by split.

    `files` are the commits that have documents.arrow: `cleaned`, unless a step edited texts after cleaning.
    `removals` are the rows of each file that steps removed, and `pending` the counts by reason that writing
    the rest will book. `lost` are documents and bytes of each split that duplicate removal took away, by
    reason in the order of steps; `cut` the ledgers of the step that cut lines.
    """

    recipe: Recipe
    splits: Sequence[Split]
    scores: Sequence[ScoreTable] = ()
    """The tables of `scores` filters, in their order."""
    cleaned: Sequence[Commit] = ()
    counts: Sequence[Cleaned] = ()
    files: Sequence[Commit] = ()
    removals: Sequence[SplitRemovals] = ()
    pending: Mapping[str, Count] = field(default_factory=dict)
    lost: Mapping[str, Sequence[Count]] = field(default_factory=dict)
    cut: Sequence[Ledger] = ()
    beside: Sequence[Commit] = ()
    equal: Sequence[str] = ()
    """The reasons among `lost` of documents that equal another one."""
    groups: Sequence[int] = ()
    """Documents that represent 1, 2, … ones, in the classes of `count_groups`; without `near`, [0] is 0."""
    largest_group: int = 1
    near: NearResult | None = None
    near_facts: NearFacts | None = None
    labels: Buckets | None = None
    """How scores become labels."""
    parts: PartsFound | None = None
    outputs: Sequence[Outputs] = ()

    @property
    def kept(self) -> Count:
        """The documents and bytes that the filters kept."""
        return sum((one.ledger.kept for one in self.counts), Count())

    @property
    def input_hashes(self) -> list[str]:
        """`hash_split` of all parts of the splits."""
        return [content for one in self.counts for content in one.inputs]

    def file(self, number: int) -> Artifact:
        """Return the Arrow file of a split's documents."""
        return self.files[number].file(DOCUMENTS_FILE)

    def rows(self, number: int) -> Artifact | None:
        """Return what leads from a split's documents to what cleaning wrote; None: they are the same."""
        commit = self.files[number]
        return None if commit is self.cleaned[number] else commit.file(ROWS_FILE)  # some may be gone

    def languages(self, number: int) -> LanguageLabels | None:
        """Return the languages of a split's documents, if they are known."""
        labels = self.counts[number].languages
        if labels is None:
            return None
        return LanguageLabels(self.cleaned[number].file(LANGUAGES_FILE), tuple(labels), self.rows(number))

    def bucket_labels(self, number: int) -> BucketLabels | None:
        """Return what labels a split's documents get, if any."""
        if self.labels is None:
            return None
        return BucketLabels(self.labels, self.cleaned[number].file(BUCKETS_FILE), self.rows(number))

    def described(self, *, languages: bool = False) -> list[SplitDocuments]:
        """Return where each split's documents are, with their `languages` where these are compared."""
        return [
            SplitDocuments(
                commit.name,
                self.file(number),
                commit.outputs[DOCUMENTS_FILE].bytes,
                self.languages(number) if languages else None,
            )
            for number, commit in enumerate(self.files)
        ]

    def without(self, reason: str, tables: Sequence[SplitTable]) -> Documents:
        """Return the documents without what a step removed for a reason."""
        lost = [table.lost for table in tables]
        removals = [own.also(reason, table) for own, table in zip(self.removals, tables, strict=True)]
        return replace(
            self,
            removals=removals,
            pending={**self.pending, reason: sum(lost, Count())},
            lost={**self.lost, reason: lost},
        )

    def with_outputs(self, outputs: Sequence[Outputs]) -> Documents:
        """Return the documents with what is made of them."""
        return replace(self, outputs=outputs)

    def by_source(self, amounts: Sequence[Count]) -> list[Count]:
        """Return the sum of amounts of splits for each source."""
        total = [Count() for _ in self.recipe.inputs]
        for split, amount in zip(self.splits, amounts, strict=True):
            total[split.source] += amount
        return total

    def of_part(self, part: str | None) -> Documents:
        """Return the documents of a part that `split` drew; all of them if it is None."""
        if self.parts is None or part is None:
            return self
        return replace(self, removals=self.parts.removals[part])


@dataclass(frozen=True)
class Step:
    """A step of a build: `run` takes what the steps before it left; `needs` states what it asks for.

    `stages` are those that it runs for a recipe, in order, without merges and rounds, of which data may need
    any number; none: the recipe does not ask for the step.
    """

    stages: Callable[[Recipe], Sequence[Stage[..., Any]]]
    run: Callable[[Documents, Build], Documents]
    needs: Callable[[Needs], None]
