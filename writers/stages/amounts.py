"""Step: chooses how much of each source goes into the datasets, by the recipe's `amounts`.

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
not taken are removed like duplicates, with the reason AMOUNT, and are listed in `duplicates/`.

With `group`, all documents of a group have one hash, so a group is taken as a whole. Documents without text
do not count; they are dropped later, as empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import sqrt
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from shardkit.card import AmountFacts, Count
from shardkit.errors import warn_user
from shardkit.writers.dedup.outcomes import AMOUNT, NOTHING, OUTCOME, SplitRemovals, SplitTable
from shardkit.writers.exchange.exchange import Limits, RunWriter, Slice, Table, exchange
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.digests import MemoryBytes, RecipeKey
from shardkit.writers.execution.stage import Stage, partition_name
from shardkit.writers.kernels.text_arrays import text_offsets
from shardkit.writers.recipe.inputs import GroupConfig
from shardkit.writers.recipe.outputs import AmountConfig
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.stages.flow import Build, Documents, Step
from shardkit.writers.stages.inputs import TokenizerFile
from shardkit.writers.stages.needs import DOCUMENTS, LOSERS, Needs
from shardkit.writers.stages.tokenize import (
    PARITY,
    TOKENIZER,
    TokenSettings,
    count_tokens,
    parity_task,
)
from shardkit.writers.tokens.groups import order_hashes

CHOICES = Table("choices.run", np.dtype([("key", "<u8"), ("units", "<i8"), ("source", "<i4")]))
_ROWS = "rows.bin"
_ALL = (1 << 64) - 1  # the highest hash: if it is the last one taken, all documents are
_PURPOSE = "amount"
_SPARES = 6.0  # hashes to sort beyond the expected number, in standard deviations
_TEXT_OF_TOKEN = 8  # bytes; about twice the average of English
_FURTHER = 4  # factor by which a bound grows that was too low


def choose_amounts(documents: Documents, build: Build) -> Documents:
    """Remove the documents beyond the amounts; warns of sources that have less than their amount."""
    return _Choice(documents, build).run()


@dataclass(frozen=True)
class _Choice:
    """Runs the stages that choose documents. Sources are numbered by their places in `labels`."""

    documents: Documents
    build: Build

    @property
    def labels(self) -> list[str]:
        """The labels of the sources with an amount; several inputs may have the same label."""
        amounts = self.documents.recipe.amounts
        return sorted(label for label, one in amounts.items() if one.chooses)

    def run(self) -> Documents:
        """Run all stages; return the documents that are left, with what is known of each amount."""
        recipe = self.documents.recipe
        lasts = {label: _last_of(one.share) for label, one in recipe.amounts.items() if one.share is not None}
        lasts |= self._lasts_of_numbers()
        tasks, numbers = [], []
        for number in self._splits_of(lasts):
            split, label = self.documents.splits[number], self._label(number)
            file, removed = self.documents.file(number), self.documents.removals[number]
            choosing = lasts[label], recipe.seed
            tasks.append(AMOUNTS.task(split.task_name, split.bytes, file, removed, *choosing, recipe.group))
            numbers.append(number)
        [commits] = self.build.run(tasks)
        tables = [NOTHING for _ in self.documents.splits]
        found = {label: Count() for label in self.labels}
        taken = dict(found)
        for number, commit in zip(numbers, commits, strict=True):
            result, label = AMOUNTS.result(commit), self._label(number)
            found[label] += result.found
            taken[label] += Count(
                result.found.documents - result.left.documents, result.found.bytes - result.left.bytes
            )
            if result.left.documents:
                rows = commit.file(_ROWS)
                tables[number] = SplitTable(rows, 0, result.left.documents, result.digest, result.left)
        facts = [AmountFacts(label, found[label], taken[label]) for label in self.labels]
        removals = [
            own.also(AMOUNT, table) if table.count else own
            for own, table in zip(self.documents.removals, tables, strict=True)
        ]
        return replace(self.documents, removals=removals, amounts=facts)

    def _label(self, number: int) -> str:
        return self.documents.recipe.sources[self.documents.splits[number].source]

    def _splits_of(self, labels: Mapping[str, object]) -> Iterator[int]:
        return (number for number in range(len(self.documents.splits)) if self._label(number) in labels)

    def _lasts_of_numbers(self) -> dict[str, int]:
        """Return the last hash that is taken of each source with a number of documents or tokens.

        Warns of sources that have less.
        """
        amounts = self.documents.recipe.amounts
        wanted = {label: one.number for label, one in amounts.items() if one.number is not None}
        left, tokenizer = self._left(), self._tokenizer()
        bounds = {label: _bound(amounts[label], left[label]) for label in wanted}
        lasts: dict[str, int] = {}
        while bounds:
            limits = {label: _last_of(bound) for label, bound in bounds.items()}
            found, units = self._find({label: wanted[label] for label in bounds}, limits, tokenizer)
            lasts |= found
            for label, bound in bounds.items():
                if label not in found and bound >= 1:
                    lasts[label] = _ALL
                    unit = "documents" if amounts[label].tokens is None else "tokens"
                    warn_user(
                        f"amounts.{label}: {wanted[label]:,} {unit} are wanted, but only {units[label]:,} "
                        f"are left after filters and duplicate removal; all of them are used"
                    )
            bounds = {
                label: min(1.0, _FURTHER * bound) for label, bound in bounds.items() if label not in lasts
            }
        return lasts

    def _tokenizer(self) -> TokenizerFile | None:
        """Return the tokenizer that counts tokens, with the engine that will encode; None if none counts."""
        if all(one.tokens is None for one in self.documents.recipe.amounts.values()):
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
        self, wanted: Mapping[str, int], bounds: Mapping[str, int], tokenizer: TokenizerFile | None
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Return the last hash taken of each source that has enough up to its bound, and what each has."""
        recipe, limits = self.documents.recipe, self.build.limits
        tasks = []
        for number in self._splits_of(wanted):
            split, label = self.documents.splits[number], self._label(number)
            counting = None
            if recipe.amounts[label].tokens is not None:
                assert tokenizer is not None
                settings = TokenSettings(recipe.seed, recipe.inputs[split.source].fim, recipe.group)
                counting = Counting(tokenizer, settings)
            file, removed = self.documents.file(number), self.documents.removals[number]
            choosing = Choosing(self.labels.index(label), bounds[label], recipe.seed, recipe.group)
            memory = self.build.memory_bytes
            tasks.append(
                AMOUNTS_COUNT.task(
                    split.task_name, split.bytes, file, removed, choosing, counting, memory, limits
                )
            )
        [counted] = self.build.run(tasks)
        rows = sum(AMOUNTS_COUNT.result(commit) for commit in counted)
        end = max(bounds.values()) + 1
        readers = limits.partitions(rows, CHOICES.dtype)
        edges = [*pairwise(end * number // readers for number in range(readers + 1))]
        moved = exchange(
            self.build.run, AMOUNTS_SUMS, CHOICES, counted, readers=readers, end=end, limits=limits
        )
        pieces = [(partition_name(n, readers), moved.slice(*edge)) for n, edge in enumerate(edges)]
        [summed] = self.build.run([AMOUNTS_SUMS.task(name, one.bytes, one) for name, one in pieces])
        places = _places({self.labels.index(label): one for label, one in wanted.items()}, summed)
        tasks = []
        for number, here in places.items():
            name, piece = pieces[number]
            tasks.append(AMOUNTS_LASTS.task(name, piece.bytes, piece, here))
        [ended] = self.build.run(tasks)
        found = [AMOUNTS_LASTS.result(commit) for commit in ended]
        lasts = {self.labels[int(number)]: last for one in found for number, last in one.items()}
        units: Counter[str] = Counter()
        for commit in summed:
            units.update(AMOUNTS_SUMS.result(commit))
        return lasts, {label: units[str(self.labels.index(label))] for label in wanted}


def _bound(amount: AmountConfig, left: Count) -> float:
    """Return the share of the `left` documents of a source that is expected to have enough."""
    if amount.tokens is not None:
        return min(1.0, _TEXT_OF_TOKEN * amount.tokens / max(1, left.bytes))
    assert amount.documents is not None
    expected = amount.documents + _SPARES * sqrt(amount.documents) + 10
    return min(1.0, expected / max(1, left.documents))


def _last_of(share: float) -> int:
    """Return the last hash of a share of all hashes."""
    return _ALL if share >= 1 else max(0, (int(share * (1 << 53)) << 11) - 1)


def _places(wanted: Mapping[int, int], summed: Sequence[Commit]) -> dict[int, dict[str, int]]:
    """Return, by the number of the range that completes an amount: by source, what is taken in this range."""
    found: dict[int, dict[str, int]] = {}
    left = dict(wanted)
    for number, commit in enumerate(summed):
        for source, units in AMOUNTS_SUMS.result(commit).items():
            missing = left[int(source)]
            if 0 < missing <= units:
                found.setdefault(number, {})[source] = missing
            left[int(source)] = missing - units
    return found


def _kept(
    documents: Artifact, removed: SplitRemovals
) -> Iterator[tuple[pa.RecordBatch, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yield (kept documents with text, their rows in the file, text sizes) of each batch with any."""
    lost, start = removed.load(), 0
    with documents.open_arrow(mapped=True) as source:
        reader = pa.ipc.open_file(source)
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            sizes = np.diff(text_offsets(batch.column("text")))
            keep = sizes > 0
            for rows in lost.within(start, batch.num_rows).rows.values():
                keep[rows] = False
            rows = np.flatnonzero(keep)
            taken = batch if keep.all() else batch.take(pa.array(rows))
            if len(rows):
                yield taken, rows + start, sizes[keep]
            start += batch.num_rows


@dataclass(frozen=True, slots=True)
class Choosing:
    """How documents of source number `source` are ordered: by hash, up to and including `bound`."""

    source: int
    bound: int
    seed: int
    group: Annotated[GroupConfig | None, RecipeKey("group")]


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
) -> int:
    """Write the hash and the tokens (or 1) of each document up to the bound; return their number."""
    count = 0
    with RunWriter(folder / CHOICES.file, CHOICES, memory_bytes=memory_bytes, limits=limits) as run:
        for batch, _, _ in _kept(documents, removed):
            hashes = order_hashes(batch, choosing.group, choosing.seed, _PURPOSE)
            near = hashes <= np.uint64(choosing.bound)
            rows = np.zeros(int(near.sum()), CHOICES.dtype)
            rows["key"], rows["units"], rows["source"] = hashes[near], 1, choosing.source
            if counting is not None and len(rows):
                taken = batch.filter(pa.array(near))
                rows["units"] = count_tokens(taken, counting.tokenizer.encoder(), counting.settings)
            run.write(rows)
            count += len(rows)
    return count


AMOUNTS_COUNT = Stage("amounts_count", "amounts", count_documents, cost=5)


def sum_units(folder: Path, piece: Slice) -> dict[str, int]:
    """Return what a range of hashes has of each source, by the number of the source."""
    found: Counter[str] = Counter()
    for rows, _ in piece.stream(piece.limits.read_memory_bytes):
        for source in np.unique(rows["source"]).tolist():
            found[str(source)] += int(rows["units"][rows["source"] == source].sum())
    return dict(sorted(found.items()))


AMOUNTS_SUMS = Stage("amounts_sums", "amounts", sum_units)


def find_lasts(folder: Path, piece: Slice, wanted: Mapping[str, int]) -> dict[str, int]:
    """Return, for each source in `wanted`, the hash at which a range of hashes has as much of it."""
    rows, _ = piece.read()
    lasts = {}
    for source, missing in wanted.items():
        own = rows[rows["source"] == int(source)]
        lasts[source] = int(own["key"][np.searchsorted(np.cumsum(own["units"]), missing)])
    return lasts


AMOUNTS_LASTS = Stage("amounts_lasts", "amounts", find_lasts)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The documents of a split before the choice, and those `left` out, with a digest of their rows."""

    found: Count
    left: Count
    digest: str


def choose(
    folder: Path,
    documents: Artifact,
    removed: SplitRemovals,
    last: int,
    seed: int,
    group: Annotated[GroupConfig | None, RecipeKey("group")],
) -> Chosen:
    """Write the rows of a split's documents whose hashes are above `last`, as rows of OUTCOME."""
    found = left = Count()
    hasher = xxhash.xxh3_128()
    with (folder / _ROWS).open("wb") as file:
        for batch, rows, sizes in _kept(documents, removed):
            beyond = order_hashes(batch, group, seed, _PURPOSE) > np.uint64(last)
            found += Count(len(rows), int(sizes.sum()))
            left += Count(int(beyond.sum()), int(sizes[beyond].sum()))
            outcomes = np.zeros(int(beyond.sum()), OUTCOME)
            outcomes["row"], outcomes["similarity"] = rows[beyond], np.nan
            file.write(outcomes.data)
            hasher.update(outcomes.data)
    return Chosen(found, left, hasher.hexdigest())


AMOUNTS = Stage("amounts", "amounts", choose)


def needs(n: Needs) -> None:
    """Add the requests and bytes of choosing amounts; all splits are assumed to be of sources with one."""
    c = n.corpus
    if c.shape.counted:
        gets, read = n.scans(c.text_bytes * DOCUMENTS, c.splits)
        size = c.documents * CHOICES.dtype.itemsize
        n.add(AMOUNTS_COUNT, c.splits, gets, read, files=1, written=size)
        readers = c.limits.partitions(c.documents, CHOICES.dtype)
        found = n.exchange(AMOUNTS_SUMS, CHOICES, c.splits, c.documents, readers)
        n.add(AMOUNTS_SUMS, readers, *n.slices(found, readers))
        n.add(AMOUNTS_LASTS, min(readers, c.shape.counted), *n.slices(found, 1))
    if c.shape.amounts:
        gets, read = n.scans(c.text_bytes * DOCUMENTS, c.splits)
        n.add(AMOUNTS, c.splits, gets, read, files=1, written=c.documents * LOSERS * OUTCOME.itemsize)


def _stages(recipe: Recipe) -> Sequence[Stage[..., Any]]:
    counted = any(one.number is not None for one in recipe.amounts.values())
    found = (AMOUNTS_COUNT, AMOUNTS_SUMS, AMOUNTS_LASTS) if counted else ()
    return (*found, AMOUNTS) if any(one.chooses for one in recipe.amounts.values()) else ()


STEP = Step(_stages, choose_amounts, needs)
