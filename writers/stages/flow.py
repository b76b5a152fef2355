"""The data that steps of a build pass on: its inputs, the remaining documents, and the datasets.

A step is one operation of a recipe, such as removing near-duplicates; stages/graph.py has the order of steps.
A stage is a kind of task (execution/stage.py). A step takes the remaining `Documents`, runs its stages, and
returns the documents that still remain, together with its results:

    documents = Documents(recipe, splits)
    for step in steps_of(recipe):
        documents = step.run(documents, build)

A document that a step removes stays in its file, and `removals` lists its row. Steps that edit texts, and
filters after duplicate removal, write the remaining documents to new files (`Written`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardkit.card import AmountFacts, Count, NearFacts, SemanticFacts
from shardkit.settings import TRAIN
from shardkit.writers.dedup.near import NearResult
from shardkit.writers.dedup.outcomes import NOT_SAMPLED, SplitRemovals, SplitTable
from shardkit.writers.dedup.population import DOCUMENTS_FILE as ROWS_OF_PART
from shardkit.writers.dedup.population import LanguageLabels, RowFiles, SplitDocuments
from shardkit.writers.dedup.rewriting import ROWS_FILE
from shardkit.writers.dedup.semantic import CLUSTERS_FILE
from shardkit.writers.exchange.sorted_runs import Limits
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.stage import RunTasks, Stage, Task
from shardkit.writers.inputs.scan import Split
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.rows.annotations import ANNOTATIONS_FILE
from shardkit.writers.rows.documents import DOCUMENTS_FILE
from shardkit.writers.rows.filtered import FilterCost
from shardkit.writers.rows.funnel import FilterCounts
from shardkit.writers.rows.ledger import Ledger
from shardkit.writers.stages.id_tables import IdTable
from shardkit.writers.stages.inputs import BuildInputs
from shardkit.writers.stages.labels import BUCKETS_FILE, BucketLabels, Buckets, ClusterLabels, Labels
from shardkit.writers.stages.languages import LANGUAGES_FILE
from shardkit.writers.stages.needs import Needs, task_memory


@dataclass(frozen=True)
class Build:
    """The context that all steps of a build share: its inputs, and the function that runs tasks.

    `beside` are tasks that need no documents; they run at the same time as cleaning. With `to_index`, an
    index is made of the signatures, and their files stay.
    """

    inputs: BuildInputs
    run: RunTasks
    beside: Sequence[Task] = ()
    to_index: bool = False

    @property
    def limits(self) -> Limits:
        """The limits of all exchanges."""
        return self.inputs.limits

    @property
    def memory_bytes(self) -> int:
        """Memory budget of a task of duplicate removal, in bytes; libraries and page cache use the rest."""
        return task_memory(self.inputs.recipe.memory)

    def nth(self, number: int) -> Build:
        """Return the context of a step that runs its stages for the `number`-th time in the build, from 1."""
        if number == 1:
            return self

        def run(*groups: Sequence[Task]) -> list[list[Commit]]:
            return self.run(*([replace(task, of=task.of.nth(number)) for task in group] for group in groups))

        return replace(self, run=run)


@dataclass(frozen=True, slots=True)
class Filtering:
    """The result of a pass of filters over one split: its checked ledger, and the counts of each filter.

    `languages[code]` is the label of a language code; None without a language filter. `urls` counts the kept
    documents with a URL, if URLs are compared after the pass.
    """

    ledger: Ledger
    filters: FilterCounts
    languages: Sequence[str] | None = None
    urls: int = 0
    costs: Mapping[str, FilterCost] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cleaned(Filtering):
    """The result of the first pass of filters, which reads the records of the inputs.

    Per part of the split, `fields` has the result of `NamedFields.to_dict` (fields that occur in no record),
    and `inputs` has the hash of the input (`hash_split`).
    """

    fields: Sequence[Mapping[str, Any]] = ()
    inputs: Sequence[str] = ()


@dataclass(frozen=True)
class Written:
    """The files of documents that a step wrote, one commit and one ledger per split.

    `filtering` has the results of a pass of filters; empty for other steps. The folders of `commits` contain
    documents.arrow, and also ROWS_FILE, except for the first step of a build. `judged` are the commits of the
    tasks of a pass of filters, with the files about what filters dropped.
    """

    title: str
    commits: Sequence[Commit]
    ledgers: Sequence[Ledger]
    filtering: Sequence[Filtering] = ()
    judged: Sequence[Commit] = ()

    def has(self, name: str) -> bool:
        """Whether the step wrote a file with this name for each split."""
        return name in self.commits[0].outputs

    @property
    def kept(self) -> Count:
        """The number and text bytes of the documents in the files."""
        return sum((one.kept for one in self.ledgers), Count())


@dataclass(frozen=True, slots=True)
class PartsFound:
    """The result of stage `split`. All mappings are by the name of a part, such as validation.

    `removals` has, per split file, the documents that are not in the part. The others are numbers of
    documents: in the part (`documents`), proposed for it, and proposed but similar to another document
    (`alike`), so that they stay in train.
    """

    removals: Mapping[str, Sequence[SplitRemovals]]
    documents: Mapping[str, int]
    proposed: Mapping[str, int]
    alike: Mapping[str, int]


@dataclass(frozen=True)
class Outputs:
    """One dataset: the commits of its tasks, with the files to publish and the results for the card.

    `recipe` is the recipe of this dataset alone. For a dataset of text, `texts` have the files, and the
    fields for tokens are empty. Each commit of `side_files` has one file, under its name in the dataset;
    each commit of `duplicates` has DUPLICATES_FILE. Only one part of a split (train) has these two.
    `tokenizer` is the tokenizer's entry in the card.
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
        """Whether the dataset has the files of removed documents; with `split`, only part train has them."""
        return self.recipe.part in (None, TRAIN)


@dataclass(frozen=True)
class Clustered:
    """The clusters of `dedup.semantic`: the tasks that embed and assign documents, and the `step` before.

    `fields` are the metadata fields that documents get, by their column in the file of clusters.
    """

    fields: Mapping[str, str]
    step: Written
    embedded: Sequence[Commit]
    assigned: Sequence[Commit]


@dataclass(frozen=True)
class Documents:
    """The documents of a build between two steps. Sequences have one entry per split unless noted otherwise.

    Behind the first pass of filters, a split may be several splits of the inputs (stages/gather.py).
    `written` lists the steps so far that wrote documents: cleaning, and steps that edited texts or filtered
    again. `removals` lists the rows that later steps removed from the last of these steps' files; `pending`
    counts them by reason, until a step that writes documents counts them in its ledgers. `lost` counts the
    documents and bytes that duplicate removal took from each split, by reason in the order of steps.
    """

    recipe: Recipe
    splits: Sequence[Split]
    scores: Sequence[IdTable] = ()
    """One table per `scores` filter, in their order."""
    input_hashes: Sequence[str] = ()
    """The hashes (`hash_split`) of all parts of all splits that were read."""
    written: Sequence[Written] = ()
    removals: Sequence[SplitRemovals] = ()
    pending: Mapping[str, Count] = field(default_factory=dict)
    lost: Mapping[str, Sequence[Count]] = field(default_factory=dict)
    compared: Sequence[tuple[int, int]] = ()
    """How many documents each step over all of them read, and removed."""
    beside: Sequence[Commit] = ()
    single: int = 0
    """Number of documents left by the last step that compared URLs or texts for equality."""
    groups: Sequence[int] = ()
    """Documents by how many they represent, in the classes of `count_groups`; [0] is 0 unless `near` or
    `semantic` compared them."""
    largest_group: int = 1
    near: NearResult | None = None
    """The result of the last `near`."""
    near_facts: Sequence[NearFacts] = ()
    """The facts of each `near`, in order."""
    semantic_facts: SemanticFacts | None = None
    clustered: Clustered | None = None
    """The clusters, if `dedup.semantic` names a field for them or for distances."""
    labels: Buckets | None = None
    """The rules by which scores of a `buckets` filter become labels; None until they are known."""
    marked: frozenset[str] = frozenset()
    """The fields of labels that a pass of filters wrote into the metadata."""
    amounts: Sequence[AmountFacts] = ()
    """Facts of each `sample` and of the recipe's `amounts`, in order."""
    parts: PartsFound | None = None
    joined: Sequence[Commit] = ()
    """The tasks that joined the annotations of all passes; none if only cleaning wrote annotations."""
    outputs: Sequence[Outputs] = ()

    @property
    def cleaned(self) -> Sequence[Commit]:
        """The commits of the tasks that read the inputs, before splits that keep little were joined."""
        return self.written[0].judged

    @property
    def files(self) -> Sequence[Commit]:
        """The commits with the latest files of documents, one per split."""
        return self.written[-1].commits

    @property
    def left(self) -> Count:
        """The number and text bytes of the documents in `files` that no later step has removed."""
        removed = sum(self.pending.values(), Count())
        kept = self.written[-1].kept
        return Count(kept.documents - removed.documents, kept.bytes - removed.bytes)

    def file(self, number: int) -> Artifact:
        """Return the latest Arrow file with the documents of split `number`."""
        return self.files[number].file(DOCUMENTS_FILE)

    def step_with(self, name: str) -> Written:
        """Return the last step whose commits contain a file with this name."""
        return next(step for step in reversed(self.written) if step.has(name))

    def rows_since(self, step: Written, number: int) -> RowFiles:
        """Return the files that map rows of split `number` in `files` back to rows that `step` wrote."""
        first = self.written.index(step) + 1
        return tuple(later.commits[number].file(ROWS_FILE) for later in self.written[first:])

    def languages(self, number: int) -> LanguageLabels | None:
        """Return the languages of the documents of split `number`; None without a language filter."""
        for step in reversed(self.written):
            if step.filtering and (labels := step.filtering[number].languages) is not None:
                codes = step.commits[number].file(LANGUAGES_FILE)
                return LanguageLabels(codes, tuple(labels), self.rows_since(step, number))
        return None

    def annotations(self, number: int) -> tuple[Artifact, RowFiles]:
        """Return the annotations of split `number`, if the recipe has any, with `rows_since` for them.

        The rows are those of the lines of documents that no filter dropped.
        """
        if self.joined:
            commit = self.joined[number]
            return commit.file(ANNOTATIONS_FILE), (commit.file(ROWS_FILE),)
        first = self.written[0]
        return first.commits[number].file(ANNOTATIONS_FILE), self.rows_since(first, number)

    def labels_of(self, number: int) -> Labels:
        """Return the labels of split `number`, buckets and clusters, that the metadata does not have."""
        found: Labels = ()
        if self.labels is not None and any(step.has(BUCKETS_FILE) for step in self.written):
            step = self.step_with(BUCKETS_FILE)
            scores = step.commits[number].file(BUCKETS_FILE)
            found = (BucketLabels(self.labels, scores, self.rows_since(step, number)),)
        if (one := self.clustered) is not None:
            files = one.assigned[number].file(CLUSTERS_FILE), one.embedded[number].file(ROWS_OF_PART)
            rows = one.step.ledgers[number].kept.documents, self.rows_since(one.step, number)
            for column, name in one.fields.items():
                found = (*found, ClusterLabels(name, column, *files, *rows))
        return tuple(one for one in found if one.field not in self.marked)

    def described(self, *, languages: bool = False) -> list[SplitDocuments]:
        """Return the file of documents of each split, with their languages if `languages` is set."""
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
        """Return the documents without the duplicates in `tables`, which a step removed for this reason."""
        return self.losing(reason, [table.lost for table in tables])._left_by(reason, tables)

    def sampled(self, tables: Sequence[SplitTable]) -> Documents:
        """Return the documents without those in `tables`, which a `sample` did not take."""
        return self._compared([table.lost for table in tables])._left_by(NOT_SAMPLED, tables)

    def losing(self, reason: str, lost: Sequence[Count]) -> Documents:
        """Return the documents with the duplicates that a step took from each split booked."""
        before = self.lost.get(reason, [Count()] * len(lost))
        added = [one + more for one, more in zip(before, lost, strict=True)]
        return replace(self._compared(lost), lost={**self.lost, reason: added})

    def _compared(self, lost: Sequence[Count]) -> Documents:
        compared = self.left.documents, sum(one.documents for one in lost)
        return replace(self, compared=[*self.compared, compared])

    def _left_by(self, reason: str, tables: Sequence[SplitTable]) -> Documents:
        removals = [own.also(reason, table) for own, table in zip(self.removals, tables, strict=True)]
        pending = {**self.pending, reason: sum((table.lost for table in tables), Count())}
        return replace(self, removals=removals, pending=pending)

    def rewritten(self, step: Written, left: Sequence[SplitTable]) -> Documents:
        """Return the documents as `step` rewrote them; those that were removed before are not in its files.

        `left` has, per split, how many documents each of the remaining ones represents.
        """
        return replace(
            self,
            written=[*self.written, step],
            removals=[SplitRemovals({step.title: table}) for table in left],
            pending={},
        )

    def with_outputs(self, outputs: Sequence[Outputs]) -> Documents:
        """Return a copy with these datasets as outputs."""
        return replace(self, outputs=outputs)

    def by_source(self, amounts: Sequence[Count]) -> list[Count]:
        """Return the sums of `amounts`, which has one entry per split, for each source."""
        total = [Count() for _ in self.recipe.inputs]
        for split, amount in zip(self.splits, amounts, strict=True):
            total[split.source] += amount
        return total

    def of_part(self, part: str | None) -> Documents:
        """Return the documents of one part of `split`; all if `part` is None or the recipe has no split."""
        if self.parts is None or part is None:
            return self
        return replace(self, removals=self.parts.removals[part])


@dataclass(frozen=True)
class Step:
    """A step of a build: `run` takes the documents that earlier steps left and returns those that it leaves.

    `stages` returns the stages that the step runs for a recipe, in order; none if the recipe does not have
    the step. Merges and rounds are not included, since their number depends on the data. `needs` adds the
    requests and bytes of the step.
    """

    stages: Callable[[Recipe], Sequence[Stage[..., Any]]]
    run: Callable[[Documents, Build], Documents]
    needs: Callable[[Needs], None]
