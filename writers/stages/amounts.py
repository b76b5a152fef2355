"""Steps that choose how much of each source stays: `sample` among the steps, and `amounts` after all steps.

The documents of a source are ordered by hash(seed, document id), and those with the lowest hashes are taken
until the amount is reached. So a choice depends on nothing but the documents that are left, and a source that
grows keeps its choice: of a `share`, every document decides for itself; of a number of documents or tokens,
new documents replace those with the highest hashes.

    count    a split: the hashes and lengths of its documents below a bound        CHOICES
    sums     a range of hashes: how many documents or tokens of each source it has
    lasts    a range of hashes that completes an amount: the last hash that is taken
    amounts  a split: the rows of its documents that are not taken                 one file, as OUTCOME

The bound is a little above the share of a source that is expected to be enough, so few hashes are sorted; if
it was too low, the stages run again with a higher one. A share needs only the last stage. For a number of
tokens, the documents below the bound are tokenized to be counted, and again to be written: at most
`_TEXT_OF_TOKEN` bytes of text for each token that is wanted, unless these are too few. Documents that are
not taken are removed like duplicates, with the reason AMOUNT or NOT_SAMPLED, and are listed in `duplicates/`.
The hashes of each `sample` and of `amounts` are independent of each other.

With `by`, all of this holds for each value of a field of a source. With `group`, all documents of a group
have one hash, so a group is taken as a whole. Documents without text do not count; they are dropped later,
as empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclasses_field
from functools import partial
from itertools import pairwise
from math import sqrt
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from shardkit.card import AmountFacts, Count
from shardkit.errors import BuildError, warn_user
from shardkit.kernels.text_arrays import text_offsets
from shardkit.writers.dedup.outcomes import AMOUNT, NOTHING, OUTCOME, SplitRemovals, SplitTable
from shardkit.writers.dedup.population import LanguageLabels
from shardkit.writers.exchange.exchange import Limits, RunWriter, Slice, Table, exchange
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.digests import DecidesNoByte, MemoryBytes, RecipeKey
from shardkit.writers.execution.stage import Stage, partition_name
from shardkit.writers.recipe.inputs import GroupConfig
from shardkit.writers.recipe.outputs import ChoiceConfig
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.recipe.steps import SAMPLE, GlobalStep
from shardkit.writers.stages.flow import Build, Documents, Step
from shardkit.writers.stages.inputs import TokenizerFile
from shardkit.writers.stages.labels import Labels, marked_batches
from shardkit.writers.stages.needs import DOCUMENTS, LOSERS, Needs
from shardkit.writers.stages.tokenize import (
    PARITY,
    TOKENIZER,
    TokenSettings,
    count_tokens,
    parity_task,
)
from shardkit.writers.tokens.groups import metadata_field, order_hashes

CHOICES = Table("choices.run", np.dtype([("key", "<u8"), ("units", "<i8"), ("value", "<u8")]))
MOST_VALUES = 1000  # of a field: the card lists them
_ROWS = "rows.bin"
_ALL = (1 << 64) - 1  # the highest hash: if it is the last one taken, all documents are
_SPARES = 6.0  # hashes to sort beyond the expected number, in standard deviations
_TEXT_OF_TOKEN = 8  # bytes; about twice the average of English
_FURTHER = 4  # factor by which a bound grows that was too low


def choose_amounts(documents: Documents, build: Build) -> Documents:
    """Remove the documents beyond the amounts; warns of sources that have less than their amount."""
    tables, facts = _Choice(documents, build, documents.recipe.amounts).run()
    removals = [
        own.also(AMOUNT, table) if table.count else own
        for own, table in zip(documents.removals, tables, strict=True)
    ]
    return replace(documents, removals=removals, amounts=[*documents.amounts, *facts])


def take_sample(move: GlobalStep, documents: Documents, build: Build) -> Documents:
    """Remove the documents that a `sample` does not take; warns of sources that have fewer."""
    amounts = move.settings.of(documents.recipe.sources)
    tables, facts = _Choice(documents, build, amounts, move.nth).run()
    return replace(documents.sampled(tables), amounts=[*documents.amounts, *facts])


@dataclass(frozen=True)
class _Choice:
    """Runs the stages that choose documents; `amounts` are by source, `sample` is as in AmountFacts."""

    documents: Documents
    build: Build
    amounts: Mapping[str, ChoiceConfig]
    sample: int = 0

    @property
    def labels(self) -> list[str]:
        """The labels of the sources with an amount; several inputs may have the same label."""
        return sorted(label for label, one in self.amounts.items() if one.chooses)

    @property
    def _purpose(self) -> str:
        """The purpose of the hashes: documents that one choice takes are not more likely in another."""
        return f"{SAMPLE} {self.sample}" if self.sample else AMOUNT

    def _key(self, label: str, setting: str = "") -> str:
        return f"{SAMPLE}{setting} ({label})" if self.sample else f"amounts.{label}{setting}"

    def run(self) -> tuple[list[SplitTable], list[AmountFacts]]:
        """Run all stages; return what is not taken of each split, and what is known of each source."""
        recipe = self.documents.recipe
        lasts = self._lasts_of_numbers()
        for label, one in self.amounts.items():
            if one.share is not None:
                lasts[label] = {str(_key_of(label, "")): _last_of(one.share)}
        tasks, numbers = [], [*self._splits_of(lasts)]
        for number in numbers:
            split = self.documents.splits[number]
            file, removed = self.documents.file(number), self.documents.removals[number]
            label = self._label(number)
            choosing = self._field(number), lasts[label], recipe.seed, recipe.group, self._purpose
            tasks.append(AMOUNTS.task(split.task_name, split.bytes, file, removed, *choosing))
        [commits] = self.build.run(tasks)
        found = {label: Chosen() for label in self.labels}
        tables = [NOTHING] * len(self.documents.splits)
        for number, commit in zip(numbers, commits, strict=True):
            result = AMOUNTS.result(commit)
            found[self._label(number)].add(result)
            if lost := result.left.documents:
                tables[number] = SplitTable(commit.file(_ROWS), 0, lost, result.digest, result.left)
        return tables, [one.facts(label, self.sample) for label, one in found.items()]

    def _field(self, number: int) -> Field:
        """Return how the documents of a split are told apart, by the field `by` of its source's amount."""
        label = self._label(number)
        by = self.amounts[label].by
        if by is None:
            return Field(label, self._key(label, ".by"))
        languages = self.documents.languages(number) if by == "language" else None
        return Field(label, self._key(label, ".by"), by, languages, self.documents.labels_of(number))

    def _label(self, number: int) -> str:
        return self.documents.recipe.sources[self.documents.splits[number].source]

    def _splits_of(self, labels: Mapping[str, object]) -> Iterator[int]:
        return (number for number in range(len(self.documents.splits)) if self._label(number) in labels)

    def _lasts_of_numbers(self) -> dict[str, dict[str, int]]:
        """Return, by label and value, the last hash that is taken of sources with a number.

        A value that is not listed is taken whole. Warns of sources that have less than their number.
        """
        amounts, left, tokenizer = self.amounts, self._left(), self._tokenizer()
        bounds = {label: _bound(one, left[label]) for label, one in amounts.items() if one.counts}
        lasts: dict[str, dict[str, int]] = {}
        while bounds:
            found = self._find({label: _last_of(bound) for label, bound in bounds.items()}, tokenizer)
            for label, bound in bounds.items():
                amount = amounts[label]
                last, units = found[label]
                if last or bound >= 1:
                    lasts[label] = last
                if not last and bound >= 1 and amount.by is None:
                    unit = "documents" if amount.tokens is None else "tokens"
                    warn_user(
                        f"{self._key(label)}: {amount.number:,} {unit} are wanted, but only {units:,} are "
                        "left after earlier steps; all of them are used"
                    )
            bounds = {
                label: min(1.0, _FURTHER * bound) for label, bound in bounds.items() if label not in lasts
            }
        return lasts

    def _tokenizer(self) -> TokenizerFile | None:
        """Return the tokenizer that counts tokens, with the engine that will encode; None if none counts."""
        if all(one.tokens is None for one in self.amounts.values()):
            return None
        file, [checked] = self.build.inputs.tokenizer, self.documents.beside
        assert file is not None
        unlike = TOKENIZER.result(checked).unlike
        [[compared]] = self.build.run([parity_task(self.documents.files, file, unlike)])
        return replace(file, engine=PARITY.result(compared).engine, unlike=unlike)

    def _left(self) -> dict[str, Count]:
        """Return the number and text bytes of the remaining documents of each source, by label."""
        left = {label: Count() for label in self.labels}
        for number in self._splits_of(left):
            kept = self.documents.files[number].ledger().kept
            tables = self.documents.removals[number].tables.values()
            lost = sum((table.lost for table in tables), Count())
            left[self._label(number)] += Count(kept.documents - lost.documents, kept.bytes - lost.bytes)
        return left

    def _find(
        self, bounds: Mapping[str, int], tokenizer: TokenizerFile | None
    ) -> dict[str, tuple[dict[str, int], int]]:
        """Return by label: the last hash taken of each value that has enough up to the bound; the total."""
        recipe, limits = self.documents.recipe, self.build.limits
        tasks, numbers = [], [*self._splits_of(bounds)]
        for number in numbers:
            split, label = self.documents.splits[number], self._label(number)
            counting = None
            if self.amounts[label].tokens is not None:
                assert tokenizer is not None
                settings = TokenSettings(recipe.seed, recipe.inputs[split.source].fim, recipe.group)
                counting = Counting(tokenizer, settings)
            file, removed = self.documents.file(number), self.documents.removals[number]
            field = self._field(number)
            choosing = Choosing(field, bounds[label], recipe.seed, recipe.group, self._purpose)
            memory = self.build.memory_bytes
            tasks.append(
                AMOUNTS_COUNT.task(
                    split.task_name, split.bytes, file, removed, choosing, counting, memory, limits
                )
            )
        [counted] = self.build.run(tasks)
        values: dict[str, set[str]] = {label: set() for label in bounds}
        rows = 0
        for number, commit in zip(numbers, counted, strict=True):
            result = AMOUNTS_COUNT.result(commit)
            rows += result.documents
            own = values[self._label(number)]
            own.update(result.values)
            if len(own) > MOST_VALUES:
                raise _too_many(self._field(number))
        end = max(bounds.values()) + 1
        readers = limits.partitions(rows, CHOICES.dtype)
        edges = [*pairwise(end * number // readers for number in range(readers + 1))]
        moved = exchange(
            self.build.run, AMOUNTS_SUMS, CHOICES, counted, readers=readers, end=end, limits=limits
        )
        names = [partition_name(number, readers) for number in range(readers)]
        pieces = [moved.slice(*edge, consumed=False) for edge in edges]
        named = zip(names, pieces, strict=True)
        [summed] = self.build.run([AMOUNTS_SUMS.task(name, one.bytes, one) for name, one in named])
        units: Counter[str] = Counter()
        for commit in summed:
            units.update(AMOUNTS_SUMS.result(commit))
        wanted: dict[str, int] = {}
        for label, own in values.items():
            wanted |= _wanted(self.amounts[label], {value: units[value] for value in sorted(own)})
        tasks = []
        for number, here in _places(wanted, summed).items():
            piece = moved.slice(*edges[number])
            tasks.append(AMOUNTS_LASTS.task(names[number], piece.bytes, piece, here))
        [ended] = self.build.run(tasks)
        lasts = {value: last for one in ended for value, last in AMOUNTS_LASTS.result(one).items()}
        return {
            label: ({one: lasts[one] for one in sorted(own & lasts.keys())}, sum(units[one] for one in own))
            for label, own in values.items()
        }


def _wanted(amount: ChoiceConfig, units: Mapping[str, int]) -> dict[str, int]:
    """Return how much of each value is wanted; `units` has how much there is."""
    if amount.at_most is not None:
        least = min((one for one in units.values() if one), default=0)
        return {value: int(amount.at_most * least) for value in units}
    assert amount.number is not None
    return dict.fromkeys(units, amount.number)


def _bound(amount: ChoiceConfig, left: Count) -> float:
    """Return the share of the `left` documents of a source that is expected to have enough."""
    if amount.by is not None:
        return 1.0
    if amount.tokens is not None:
        return min(1.0, _TEXT_OF_TOKEN * amount.tokens / max(1, left.bytes))
    assert amount.documents is not None
    expected = amount.documents + _SPARES * sqrt(amount.documents) + 10
    return min(1.0, expected / max(1, left.documents))


def _last_of(share: float) -> int:
    """Return the last hash of a share of all hashes."""
    return _ALL if share >= 1 else max(0, (int(share * (1 << 53)) << 11) - 1)


def _places(wanted: Mapping[str, int], summed: Sequence[Commit]) -> dict[int, dict[str, int]]:
    """Return, by the number of the range that completes an amount: by value, what is taken in this range."""
    found: dict[int, dict[str, int]] = {}
    left = dict(wanted)
    for number, commit in enumerate(summed):
        for value, units in AMOUNTS_SUMS.result(commit).items():
            missing = left[value]
            if 0 < missing <= units:
                found.setdefault(number, {})[value] = missing
            left[value] = missing - units
    return found


@dataclass(frozen=True, slots=True)
class Field:
    """Tells the documents of source `label` apart by the field `name`; None: they are all alike.

    `key` names the choice in messages.
    """

    label: str
    key: Annotated[str, DecidesNoByte("is for messages")]
    name: Annotated[str | None, RecipeKey("by")] = None
    languages: LanguageLabels | None = None
    labels: Labels = ()


def _key_of(label: str, value: str) -> int:
    return xxhash.xxh3_64_intdigest(f"{label}\0{value}".encode())


def _too_many(field: Field) -> BuildError:
    return BuildError(
        f"{field.key}: {field.name!r} has more than {MOST_VALUES:,} values; use a field with "
        f"few values, such as a topic"
    )


@dataclass(frozen=True, slots=True)
class _Batch:
    """Documents of a batch with text: their rows in the file, text sizes, values, and keys of values."""

    documents: pa.RecordBatch
    rows: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    values: list[str]
    keys: npt.NDArray[np.uint64]


def _kept(documents: Artifact, removed: SplitRemovals, field: Field) -> Iterator[_Batch]:
    """Yield the documents of a split that are left and have text."""
    lost, start = removed.load(), 0
    codes = None if field.languages is None else field.languages.read()
    keys: dict[str, int] = {}
    with documents.open_arrow() as source:
        for batch in marked_batches(pa.ipc.open_file(source), field.labels):
            sizes = np.diff(text_offsets(batch.column("text")))
            keep = (sizes > 0) & lost.within(start, batch.num_rows).left(batch.num_rows)
            rows = np.flatnonzero(keep)
            start += batch.num_rows
            if not len(rows):
                continue
            taken = batch if keep.all() else batch.take(pa.array(rows))
            at = rows + start - batch.num_rows
            values = [""] * len(rows)
            if codes is not None:
                assert field.languages is not None
                values = [field.languages.labels[code] for code in codes[at].tolist()]
            elif field.name is not None:
                found = metadata_field(taken.column("metadata"), field.name)
                values = ["null" if one is None else one for one in found]
            for value in {*values} - keys.keys():
                keys[value] = _key_of(field.label, value)
            if len(keys) > MOST_VALUES:
                raise _too_many(field)
            of_rows = np.fromiter((keys[value] for value in values), np.uint64, len(values))
            yield _Batch(taken, at, sizes[keep], values, of_rows)


@dataclass(frozen=True, slots=True)
class Choosing:
    """How documents are ordered: by hash(seed, document id) for a `purpose`, up to and including `bound`."""

    field: Field
    bound: int
    seed: int
    group: Annotated[GroupConfig | None, RecipeKey("group")]
    purpose: str


@dataclass(slots=True)
class Counted:
    """The number of documents of a split up to the bound, and the keys of their values."""

    documents: int = 0
    values: list[str] = dataclasses_field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Counting:
    """How the tokens of documents are counted: as they will be encoded."""

    tokenizer: Annotated[TokenizerFile, RecipeKey()]
    settings: Annotated[TokenSettings, RecipeKey("encoding")]


def count_documents(
    folder: Path,
    documents: Artifact,
    removed: SplitRemovals,
    choosing: Choosing,
    counting: Counting | None,
    memory_bytes: MemoryBytes,
    limits: Limits,
) -> Counted:
    """Write the hash and the tokens (or 1) of each document up to the bound."""
    count, values = 0, set[int]()
    with RunWriter(folder / CHOICES.file, CHOICES, memory_bytes=memory_bytes, limits=limits) as run:
        for batch in _kept(documents, removed, choosing.field):
            hashes = order_hashes(batch.documents, choosing.group, choosing.seed, choosing.purpose)
            near = hashes <= np.uint64(choosing.bound)
            rows = np.zeros(int(near.sum()), CHOICES.dtype)
            rows["key"], rows["units"], rows["value"] = hashes[near], 1, batch.keys[near]
            if counting is not None and len(rows):
                taken = batch.documents.filter(pa.array(near))
                rows["units"] = count_tokens(taken, counting.tokenizer.encoder(), counting.settings)
            run.write(rows)
            count += len(rows)
            values |= {*np.unique(rows["value"]).tolist()}
    return Counted(count, [str(one) for one in sorted(values)])


AMOUNTS_COUNT = Stage("amounts_count", "amounts", count_documents, cost=5)


def sum_units(folder: Path, piece: Slice) -> dict[str, int]:
    """Return how much a range of hashes has of each value, by its key."""
    found: Counter[str] = Counter()
    for rows, _ in piece.stream(piece.limits.read_memory_bytes):
        values, at = np.unique(rows["value"], return_inverse=True)
        sums = np.bincount(at, rows["units"], len(values)).astype(np.int64)
        found.update(dict(zip(map(str, values.tolist()), sums.tolist(), strict=True)))
    return dict(sorted(found.items()))


AMOUNTS_SUMS = Stage("amounts_sums", "amounts", sum_units)


def find_lasts(folder: Path, piece: Slice, wanted: Mapping[str, int]) -> dict[str, int]:
    """Return, for each value in `wanted`, the hash at which a range of hashes has as much of it."""
    rows, _ = piece.read()
    lasts = {}
    for value, missing in wanted.items():
        own = rows[rows["value"] == np.uint64(int(value))]
        lasts[value] = int(own["key"][np.searchsorted(np.cumsum(own["units"]), missing)])
    return lasts


AMOUNTS_LASTS = Stage("amounts_lasts", "amounts", find_lasts)


@dataclass(slots=True)
class Chosen:
    """The documents of a split before the choice, and those `left` out, with a digest of their rows.

    `values` has, by value of the field, how many documents there were and how many are taken.
    """

    found: Count = dataclasses_field(default_factory=Count)
    left: Count = dataclasses_field(default_factory=Count)
    digest: str = ""
    values: dict[str, tuple[int, int]] = dataclasses_field(default_factory=dict)

    def add(self, other: Chosen) -> None:
        """Add the counts of another split."""
        self.found += other.found
        self.left += other.left
        for value, (found, taken) in other.values.items():
            before = self.values.get(value, (0, 0))
            self.values[value] = before[0] + found, before[1] + taken

    def facts(self, label: str, sample: int) -> AmountFacts:
        """Return the card's entry on a source; `sample` is as in AmountFacts."""
        taken = Count(self.found.documents - self.left.documents, self.found.bytes - self.left.bytes)
        values = {value: list(counts) for value, counts in sorted(self.values.items())}
        return AmountFacts(label, self.found, taken, values, sample)


def choose(
    folder: Path,
    documents: Artifact,
    removed: SplitRemovals,
    field: Field,
    lasts: Mapping[str, int],
    seed: int,
    group: Annotated[GroupConfig | None, RecipeKey("group")],
    purpose: str,
) -> Chosen:
    """Write the rows of a split's documents whose hashes are above the last of their value, as OUTCOME."""
    chosen, hasher = Chosen(), xxhash.xxh3_128()
    with (folder / _ROWS).open("wb") as file:
        for batch in _kept(documents, removed, field):
            keys, at = np.unique(batch.keys, return_inverse=True)
            last = np.array([lasts.get(str(key), _ALL) for key in keys.tolist()], np.uint64)[at]
            beyond = order_hashes(batch.documents, group, seed, purpose) > last
            outcomes = np.zeros(int(beyond.sum()), OUTCOME)
            outcomes["row"], outcomes["similarity"] = batch.rows[beyond], np.nan
            file.write(outcomes.data)
            hasher.update(outcomes.data)
            found = Count(len(beyond), int(batch.sizes.sum()))
            left = Count(len(outcomes), int(batch.sizes[beyond].sum()))
            values: dict[str, tuple[int, int]] = {}
            if field.name is not None:
                there = Counter(batch.values)
                gone = Counter(value for value, out in zip(batch.values, beyond.tolist(), strict=True) if out)
                values = {value: (count, count - gone[value]) for value, count in there.items()}
            chosen.add(Chosen(found, left, "", values))
    chosen.digest = hasher.hexdigest()
    return chosen


AMOUNTS = Stage("amounts", "amounts", choose)


def needs(n: Needs) -> None:
    """Add the requests and bytes of choosing amounts; all splits are assumed to be of sources with one."""
    _add(n, n.corpus.shape.amounts, n.corpus.shape.counted)


def _add(n: Needs, chosen: int, counted: int) -> None:
    c = n.corpus
    if counted:
        gets, read = n.scans(c.text_bytes * DOCUMENTS, c.gathered)
        size = c.documents * CHOICES.row_bytes
        n.add(AMOUNTS_COUNT, c.gathered, gets, read, files=1, written=size)
        readers = c.limits.partitions(c.documents, CHOICES.dtype)
        found = n.exchange(AMOUNTS_SUMS, CHOICES, c.gathered, c.documents, readers, last=AMOUNTS_LASTS)
        n.add(AMOUNTS_SUMS, readers, *n.slices(found, readers))
        n.add(AMOUNTS_LASTS, min(readers, counted), *n.slices(found, 1))
    if chosen:
        gets, read = n.scans(c.text_bytes * DOCUMENTS, c.gathered)
        n.add(AMOUNTS, c.gathered, gets, read, files=1, written=c.documents * LOSERS * OUTCOME.itemsize)


def _stages(recipe: Recipe) -> Sequence[Stage[..., Any]]:
    return _stages_of(recipe.amounts.values())


def _stages_of(amounts: Iterable[ChoiceConfig]) -> Sequence[Stage[..., Any]]:
    choosing = [one for one in amounts if one.chooses]
    counting = (AMOUNTS_COUNT, AMOUNTS_SUMS, AMOUNTS_LASTS) if any(one.counts for one in choosing) else ()
    return (*counting, AMOUNTS) if choosing else ()


def sample_step(move: GlobalStep) -> Step:
    """Return a step that takes a sample."""

    def needs(n: Needs) -> None:
        counts = n.corpus.shape.samples[move.nth - 1]
        _add(n, 1, int(counts))

    return Step(lambda recipe: _stages_of([move.settings]), partial(take_sample, move), needs)


STEP = Step(_stages, choose_amounts, needs)
