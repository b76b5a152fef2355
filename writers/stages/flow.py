"""What flows through a build: its inputs, the documents from step to step, and the datasets that come out.

A step is what a recipe asks for, in stages/graph.py's order; a stage is a kind of task
(execution/stage.py). A step takes the `Documents` that are left, runs its stages, and returns what is left
of them, with what it found out:

    documents = Documents(recipe, splits)
    for step in steps_of(recipe):
        documents = step.run(documents, build)

A document that a step removes stays in its file, and `removals` says which rows are gone. Steps that edit
texts, and filters behind duplicate removal, write what is left anew (`Written`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardkit.card import Count, NearFacts
from shardkit.settings import TRAIN
from shardkit.writers.dedup.near import NearResult
from shardkit.writers.dedup.outcomes import SplitRemovals, SplitTable
from shardkit.writers.dedup.population import LanguageLabels, RowFiles, SplitDocuments
from shardkit.writers.dedup.rewriting import ROWS_FILE
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
class Filtering:
    """What a pass of filters did with a split: its checked ledger, counts of each filter, and the meaning of
    language codes. `urls` are kept documents with a URL, if these are compared behind the pass.
    """

    ledger: Ledger
    filters: FilterCounts
    languages: Sequence[str] | None = None
    urls: int = 0


@dataclass(frozen=True, slots=True)
class Cleaned(Filtering):
    """The same of the pass over what is read.

    `fields` are named fields that no record had (`NamedFields.to_dict`), and `inputs` are `hash_split`, both
    of each part of the split.
    """

    fields: Sequence[Mapping[str, Any]] = ()
    inputs: Sequence[str] = ()


@dataclass(frozen=True)
class Written:
    """The files of documents that a step wrote, by split, and what became there of the documents before.

    `filtering` is of passes of filters. The folders of `commits` have documents.arrow, and, but for the first
    step of a build, ROWS_FILE.
    """

    title: str
    commits: Sequence[Commit]
    ledgers: Sequence[Ledger]
    filtering: Sequence[Filtering] = ()

    @property
    def kept(self) -> Count:
        """The documents and bytes that are in the files."""
        return sum((one.kept for one in self.ledgers), Count())


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

    `written` are the steps that wrote documents: cleaning, and those that edited texts or filtered what was
    left. `removals` are the rows of the last one's files that steps removed since, and `pending` the counts
    by reason that writing the rest will book. `lost` are documents and bytes of each split that duplicate
    removal took away, by reason in the order of steps.
    """

    recipe: Recipe
    splits: Sequence[Split]
    scores: Sequence[ScoreTable] = ()
    """The tables of `scores` filters, in their order."""
    counts: Sequence[Cleaned] = ()
    written: Sequence[Written] = ()
    removals: Sequence[SplitRemovals] = ()
    pending: Mapping[str, Count] = field(default_factory=dict)
    lost: Mapping[str, Sequence[Count]] = field(default_factory=dict)
    beside: Sequence[Commit] = ()
    single: int = 0
    """Documents that the last step over equal URLs or texts compared, less those that it removed."""
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
    def cleaned(self) -> Sequence[Commit]:
        """The tasks that read and filtered the splits."""
        return self.written[0].commits

    @property
    def files(self) -> Sequence[Commit]:
        """The commits that have the documents."""
        return self.written[-1].commits

    @property
    def left(self) -> Count:
        """The documents and bytes of the files that no step has removed since."""
        removed = sum(self.pending.values(), Count())
        kept = self.written[-1].kept
        return Count(kept.documents - removed.documents, kept.bytes - removed.bytes)

    @property
    def input_hashes(self) -> list[str]:
        """`hash_split` of all parts of the splits."""
        return [content for one in self.counts for content in one.inputs]

    def file(self, number: int) -> Artifact:
        """Return the Arrow file of a split's documents."""
        return self.files[number].file(DOCUMENTS_FILE)

    def step_with(self, name: str) -> Written:
        """Return the last step whose commits have a file of this name."""
        return next(step for step in reversed(self.written) if name in step.commits[0].outputs)

    def rows_since(self, step: Written, number: int) -> RowFiles:
        """Return what leads from a split's documents to those that `step` wrote."""
        first = self.written.index(step) + 1
        return tuple(later.commits[number].file(ROWS_FILE) for later in self.written[first:])

    def languages(self, number: int) -> LanguageLabels | None:
        """Return the languages of a split's documents, if they are known."""
        for step in reversed(self.written):
            if step.filtering and (labels := step.filtering[number].languages) is not None:
                codes = step.commits[number].file(LANGUAGES_FILE)
                return LanguageLabels(codes, tuple(labels), self.rows_since(step, number))
        return None

    def bucket_labels(self, number: int) -> BucketLabels | None:
        """Return what labels a split's documents get, if any."""
        if self.labels is None:
            return None
        step = self.step_with(BUCKETS_FILE)
        return BucketLabels(
            self.labels, step.commits[number].file(BUCKETS_FILE), self.rows_since(step, number)
        )

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

    def rewritten(self, step: Written, left: Sequence[SplitTable]) -> Documents:
        """Return the documents as a step wrote them anew, without those that were removed before.

        `left` say by split how many documents those that stay stand for.
        """
        return replace(
            self,
            written=[*self.written, step],
            removals=[SplitRemovals({step.title: table}) for table in left],
            pending={},
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
