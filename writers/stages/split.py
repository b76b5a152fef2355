"""Stage `split`: selects parts such as a validation set from the kept documents, without leaks between parts.

A document is proposed for a part by hash(seed, document id), so a part depends only on its own share and the
shares of the parts before it. A proposed document that is similar to any other document, in whichever part,
stays in train.

    propose   a split: its proposed documents with their sets of n-grams            PROPOSED
    tables    a range of hashes: n-gram -> the proposed documents that have it       tables.npy …
    probe     a split and a table: proposed documents similar to a document of the split    ALIKE
    choose    a range of hashes: the unique proposed documents (similar to no other document)
    rows      a range of hashes: the selected ones of these, then by split           PARTS

Two documents are similar if they share `similarity` of the distinct n-grams of one of them, or if this share
of the n-grams of one, with repetitions, occurs in the other one. That includes a Jaccard similarity of
`similarity`, and short documents contained in long ones. A share is relative to the kept documents. More
documents are proposed than wanted, and the unique ones with the lowest hashes are selected. If too few are
unique, the stages run again with more proposals, according to the rate of unique ones, at most `_ROUNDS`
times. A part that is short even then gets, in the order of hashes, unique documents that were proposed for
other parts and not needed there: all parts are full if enough unique documents exist.

With `by`, whole families (stages/families.py) are proposed, compared with all other documents, and selected
until their part has the wanted number of documents. So a part has at most one family more than that, and a
family that is larger than the number is not proposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import ceil, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.errors import RecipeError, warn_user
from shardkit.kernels.numba_support import Bools, Int32s, Int64s, UInt64s
from shardkit.settings import TRAIN
from shardkit.writers.dedup.config import MinHashConfig
from shardkit.writers.dedup.outcomes import (
    Part,
    SplitRemovals,
    SplitTable,
    by_split,
    document_keys,
    write_tables,
)
from shardkit.writers.exchange.exchange import Limits, RunWriter, Slice, Table, exchange
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.stage import Stage, Task, partition_name
from shardkit.writers.recipe.outputs import SplitConfig
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.stages.families import (
    CANDIDATES,
    DRAWN,
    FITTING,
    SPLIT_DRAW,
    SPLIT_FAMILIES,
    SPLIT_FIT,
    Families,
    Wanted,
)
from shardkit.writers.stages.flow import Build, Documents, PartsFound, Step
from shardkit.writers.stages.needs import DOCUMENTS, Needs
from shardkit.writers.stages.proposals import (
    ALIKE,
    PROPOSED,
    SPLIT_PROBE,
    SPLIT_PROPOSE,
    SPLIT_TABLES,
    TABLE_BYTES,
)

PARTS = Table("parts.run", np.dtype([("key", "<u8"), ("part", "<i4")]))  # keyed by `document_keys`

_CHOSEN = "chosen.npy"
_ROUNDS = 5
_SPARES = 6.0  # additional proposals, in standard deviations of the wanted number
_MORE, _MORE_FAMILIES = 0.9, 0.125  # a short part's expected rate of unique documents falls at least to this
_MEMORY = 64 << 20
_HASHES = 1 << 64

Bounds = tuple[tuple[int, ...], ...]
"""For each source, the hashes (exclusive) at which its parts end; the first part begins at hash 0."""
Quota = int | list[int]
"""The maximum number of documents that a part may get: from all sources together, or from each source."""


def split_documents(documents: Documents, build: Build) -> Documents:
    """Select the parts. Raises RecipeError for unknown sources, or if a part wants too many documents."""
    config = documents.recipe.split
    assert config is not None
    return replace(documents, parts=_Drawing(documents, build, config).run())


@dataclass(frozen=True)
class _Fitting:
    """The proposed families: a commit for each range of hashes (`edges`), and the documents of each split."""

    edges: Sequence[tuple[int, int]]
    candidates: Sequence[Commit]
    tables: Sequence[SplitTable] = ()


@dataclass(frozen=True)
class _Drawing:
    """Runs the stages that select the parts of `documents`."""

    documents: Documents
    build: Build
    config: SplitConfig

    def run(self) -> PartsFound:
        """Run all stages and return the parts."""
        names, left = tuple(self.config.parts), self._remaining()
        wanted = self._wanted(left)
        rates, together = [1.0 for _ in names], self.config.by is not None
        for _ in range(_ROUNDS):
            bounds = _bounds(wanted, left, rates, together=together)
            chosen = self._choose_from(bounds, wanted)
            counted = [SPLIT_CHOOSE.result(commit) for commit in chosen]
            found_rates = _rates(wanted, counted, rates, _MORE_FAMILIES if together else _MORE)
            if found_rates == rates or _bounds(wanted, left, found_rates, together=together) == bounds:
                break
            rates = found_rates
        taken = self._deal(wanted, chosen, counted)
        numbers = [SPLIT_ROWS.result(commit).taken for commit in taken]
        drawn = [sum(sum(one[code]) for one in numbers) for code in range(len(names))]
        _warn_of_few(names, wanted, drawn, self.config.by)
        splits = len(self.documents.splits)
        found = by_split(self.build.run, SPLIT, PARTS, taken, splits, limits=self.build.limits)
        proposed = [sum(sum(one.proposed[code]) for one in counted) for code in range(len(names))]
        clean = [sum(sum(one.clean[code]) for one in counted) for code in range(len(names))]
        alike = [all_of - own for all_of, own in zip(proposed, clean, strict=True)]
        removals = {part: self._of_part(part, names, found) for part in (TRAIN, *names)}
        return PartsFound(removals, *(dict(zip(names, one, strict=True)) for one in (drawn, proposed, alike)))

    def _deal(
        self, wanted: Sequence[Wanted], chosen: Sequence[Commit], counted: Sequence[Chosen]
    ) -> Sequence[Commit]:
        """Select the documents of all parts from the unique ones; return the commits that list them."""
        most = None if self.config.by is None else wanted
        quotas = _quotas(wanted, counted)
        nothing = [None] * len(quotas)
        [taken] = self.build.run(self._take(chosen, quotas, nothing, most))
        more, is_full = _spares(wanted, [SPLIT_ROWS.result(commit) for commit in taken])
        if not is_full:  # parts of any source may have taken documents that a part of named sources needs
            named = [[0 if isinstance(one, int) else one for one in quota] for quota in quotas]
            [apart] = self.build.run(self._take(chosen, named, nothing, most))
            others, fills = _spares(wanted, [SPLIT_ROWS.result(commit) for commit in apart])
            quotas, more = (named, others) if fills else (quotas, more)
        elif not any(more):
            return taken
        [taken] = self.build.run(self._take(chosen, quotas, more, most))
        return taken

    def _choose_from(self, bounds: Bounds, wanted: Sequence[Wanted]) -> Sequence[Commit]:
        """Propose documents with hashes below `bounds`; return the commits that list the unique ones."""
        end = max(1, *(stops[-1] for stops in bounds))
        fitting = None if self.config.by is None else self._fit(bounds, wanted, end)
        [proposed] = self.build.run(self._propose(bounds, fitting))
        texts = sum(SPLIT_PROPOSE.result(commit).bytes for commit in proposed)
        groups = max(1, -(-texts * TABLE_BYTES // self.build.memory_bytes))
        keys = end if fitting is None else _HASHES
        edges = [*pairwise(keys * number // groups for number in range(groups + 1))]
        move = partial(exchange, self.build.run, limits=self.build.limits)
        moved = move(SPLIT_TABLES, PROPOSED, proposed, readers=groups, end=keys)
        pieces = [(partition_name(n, groups), moved.slice(*edge)) for n, edge in enumerate(edges)]
        [tables] = self.build.run([SPLIT_TABLES.task(name, piece.bytes, piece) for name, piece in pieces])
        [probed] = self.build.run(self._probe(tables))
        found = _Fitting(edges, tables) if fitting is None else fitting
        alike = move(SPLIT_CHOOSE, ALIKE, probed, readers=len(found.edges), end=end)
        sizes, tasks = (len(self.config.parts), len(self.documents.recipe.inputs)), []
        for edge, commit in zip(found.edges, found.candidates, strict=True):
            args = alike.slice(*edge), commit.file(CANDIDATES), *sizes
            tasks.append(SPLIT_CHOOSE.task(commit.name, 0, *args))
        [chosen] = self.build.run(tasks)
        return chosen

    def _fit(self, bounds: Bounds, wanted: Sequence[Wanted], end: int) -> _Fitting:
        """Find the families with hashes below `bounds` that are no larger than their part."""
        recipe, run, limits, tasks = self.documents.recipe, self.build.run, self.build.limits, []
        for number, split in enumerate(self.documents.splits):
            place = self.documents.file(number), self.documents.removals[number]
            args = *place, bounds[split.source], self._families(number), limits
            tasks.append(SPLIT_DRAW.task(split.task_name, split.bytes, *args))
        [drawn] = run(tasks)
        readers = limits.partitions(sum(SPLIT_DRAW.result(commit) for commit in drawn), DRAWN.dtype)
        edges = [*pairwise(end * number // readers for number in range(readers + 1))]
        moved = exchange(run, SPLIT_FIT, DRAWN, drawn, readers=readers, end=end, limits=limits)
        tasks = []
        for number, edge in enumerate(edges):
            name, piece = partition_name(number, readers), moved.slice(*edge)
            tasks.append(SPLIT_FIT.task(name, piece.bytes, piece, wanted, len(recipe.inputs), limits))
        [fitted] = run(tasks)
        tables = by_split(run, SPLIT_FAMILIES, FITTING, fitted, len(self.documents.splits), limits=limits)
        return _Fitting(edges, fitted, tables)

    def _families(self, number: int) -> Families:
        """Return how families of documents of split `number` are told apart."""
        recipe, by = self.documents.recipe, self.config.by
        labels = self.documents.labels_of(number) if by is not None else ()
        return Families(recipe.seed, by, tuple(one for one in labels if one.field == by))

    def _propose(self, bounds: Bounds, fitting: _Fitting | None) -> list[Task]:
        made = []
        families = Families(self.documents.recipe.seed, self.config.by)
        settings = families, self._ngrams, self.build.memory_bytes, self.build.limits
        for number, split in enumerate(self.documents.splits):
            stops, table = bounds[split.source], None
            if fitting is not None:
                stops, table = (), fitting.tables[number]
            args = self.documents.file(number), self.documents.removals[number], stops, *settings, table
            made.append(SPLIT_PROPOSE.task(split.task_name, split.bytes, *args))
        return made

    def _probe(self, tables: Sequence[Commit]) -> list[Task]:
        settings = self._ngrams, self.config.similarity, self.build.limits
        families = [self._families(number) for number in range(len(self.documents.splits))]
        made = []
        for number, table in enumerate(tables):
            for at, split in enumerate(self.documents.splits):
                place = self.documents.file(at), self.documents.removals[at]
                args = *place, table.files, families[at], *settings
                made.append(SPLIT_PROBE.task(f"{split.task_name}.{number:05d}", split.bytes, *args))
        return made

    def _take(
        self,
        chosen: Sequence[Commit],
        quotas: Sequence[Sequence[Quota]],
        spares: Sequence[Sequence[Quota] | None],
        most: Sequence[Wanted] | None,
    ) -> list[Task]:
        sources, made = len(self.documents.recipe.inputs), []
        for commit, quota, more in zip(chosen, quotas, spares, strict=True):
            args = commit.file(_CHOSEN), quota, more, sources, self.build.limits, most
            made.append(SPLIT_ROWS.task(commit.name, 0, *args))
        return made

    @property
    def _ngrams(self) -> MinHashConfig:
        """The n-gram settings of near-duplicates; the other settings are defaults and have no effect."""
        near = self.documents.recipe.dedup.near
        minhash = MinHashConfig() if near is None else near.minhash
        return MinHashConfig(unit=minhash.unit, ngram=minhash.ngram)

    def _of_part(self, part: str, names: tuple[str, ...], found: Sequence[SplitTable]) -> list[SplitRemovals]:
        pairs = zip(self.documents.removals, found, strict=True)
        return [removed.of_part(Part(part, names, table)) for removed, table in pairs]

    def _wanted(self, left: Sequence[int]) -> list[Wanted]:
        """Return how many documents each part should get; `left` are the remaining documents per source."""
        labels = self.documents.recipe.sources
        wanted: list[Wanted] = []
        for name, share in self.config.parts.items():
            if not isinstance(share, Mapping):
                wanted.append(_number(share, sum(left)))
                continue
            if unknown := [label for label in share if label not in labels]:
                known = ", ".join(dict.fromkeys(labels))
                raise RecipeError(f"split.parts.{name}: there is no source {unknown[0]!r}; there are {known}")
            asked = (share.get(label, 0) for label in labels)
            wanted.append([_number(one, there) for one, there in zip(asked, left, strict=True)])
        return wanted

    def _remaining(self) -> list[int]:
        """Return the number of remaining documents of each source."""
        left = [0 for _ in self.documents.recipe.inputs]
        for split, commit, removed in zip(
            self.documents.splits, self.documents.files, self.documents.removals, strict=True
        ):
            lost = sum(table.lost.documents for table in removed.tables.values())
            left[split.source] += commit.ledger().kept.documents - lost
        return left


def _warn_of_few(
    names: Sequence[str], wanted: Sequence[Wanted], drawn: Sequence[int], by: str | None
) -> None:
    for name, asked, found in zip(names, wanted, drawn, strict=True):
        number = asked if isinstance(asked, int) else sum(asked)
        if found < number:
            families = "" if by is None else f", or have a value of {by} that more documents have than wanted"
            warn_user(
                f"split: {name} has {found:,} documents, {number:,} are wanted: too many of the proposed "
                f"ones are similar to another document{families}; remove duplicates (dedup.near) or lower "
                "its share"
            )


def _number(share: float, documents: int) -> int:
    """Convert a part's share to a number of documents; a fraction becomes at least 1, but never all."""
    if isinstance(share, int):
        return share
    return min(max(1, round(share * documents)), max(0, documents - 1))


def _rates(
    wanted: Sequence[Wanted], chosen: Sequence[Chosen], rates: Sequence[float], more: float
) -> list[float]:
    """Return the rate of unique documents among each part's proposals, or its old rate if it has enough.

    The rate of a short part falls at least to the factor `more`.
    """
    found = []
    for part, (asked, rate) in enumerate(zip(wanted, rates, strict=True)):
        clean = np.sum([one.clean[part] for one in chosen], axis=0)
        proposed = np.sum([one.proposed[part] for one in chosen], axis=0)
        if isinstance(asked, int):
            clean, proposed = clean.sum(keepdims=True), proposed.sum(keepdims=True)
        needed = np.atleast_1d(asked)
        short = clean < needed
        seen = (clean[short] + 1) / (proposed[short] + 1)
        found.append(min(rate, float(more * min(seen.min(), rate))) if short.any() else rate)
    return found


def _bounds(
    wanted: Sequence[Wanted], left: Sequence[int], rates: Sequence[float], *, together: bool
) -> Bounds:
    """Return the hashes at which the parts of each source end; RecipeError if too much is wanted.

    `rates` are the expected rates of unique documents among the proposed ones, per part. With `together`, all
    sources have the same bounds.
    """
    proposals = []
    for source, documents in enumerate(left):
        shares = []
        for one, rate in zip(wanted, rates, strict=True):
            number = one if isinstance(one, int) else one[source]
            whole = sum(left) if isinstance(one, int) else documents
            if number and number >= whole:
                problem = f"{number:,} documents are wanted for a part, but only {whole:,} remain in all"
                raise RecipeError(f"split: {problem}")
            proposed = number + _SPARES * sqrt(number) + 10 if number else 0.0
            shares.append(min(proposed / rate / max(1, whole), 1.0))
        proposals.append(shares)
    if together:
        proposals = [[max(shares) for shares in zip(*proposals, strict=True)]] * len(proposals)
    stops = []
    for shares in proposals:
        ends = np.minimum(np.cumsum(shares), 1.0)
        stops.append(tuple(min(int(end * (1 << 53)) << 11, _HASHES - 1) for end in ends.tolist()))
    return tuple(stops)


def _quotas(wanted: Sequence[Wanted], chosen: Sequence[Chosen]) -> list[list[Quota]]:
    """Return the quota of each part in each range of hashes, the lowest hashes first."""
    left: list[Quota] = [one if isinstance(one, int) else [*one] for one in wanted]
    quotas = []
    for group in chosen:
        quota: list[Quota] = []
        for part, clean in enumerate(group.clean):
            room = left[part]
            if isinstance(room, int):
                quota.append(min(room, sum(clean)))
                left[part] = room - min(room, sum(clean))
            else:
                taken = [min(most, there) for most, there in zip(room, clean, strict=True)]
                quota.append(taken)
                left[part] = [most - one for most, one in zip(room, taken, strict=True)]
        quotas.append(quota)
    return quotas


def _spares(wanted: Sequence[Wanted], taken: Sequence[Taken]) -> tuple[list[list[Quota] | None], bool]:
    """Return how many spare documents of each range every short part gets, and whether this fills all parts.

    Parts that name their sources come first, since other parts can take documents of any source.
    """
    is_full = True
    left = [np.array(one.spare, np.int64) for one in taken]
    got = np.sum([one.taken for one in taken], axis=0)
    found: list[list[Quota]] = [
        [0 if isinstance(one, int) else [0] * len(one) for one in wanted] for _ in left
    ]
    for part, asked in enumerate(wanted):
        if isinstance(asked, int):
            continue
        short = np.maximum(np.array(asked) - got[part], 0)
        for quota, spare in zip(found, left, strict=True):
            here = np.minimum(short, spare)
            quota[part] = here.tolist()
            short -= here
            spare -= here
        is_full &= not short.any()
    whole = [int(spare.sum()) for spare in left]
    for part, asked in enumerate(wanted):
        if not isinstance(asked, int):
            continue
        missing = max(asked - int(got[part].sum()), 0)
        for number, quota in enumerate(found):
            here_all = min(missing, whole[number])
            quota[part] = here_all
            missing -= here_all
            whole[number] -= here_all
        is_full &= not missing
    return [quota if any(np.any(one) for one in quota) else None for quota in found], is_full


@dataclass(frozen=True, slots=True)
class Chosen:
    """Counts in a range of hashes, by part and source: `proposed` documents, and unique ones (`clean`)."""

    proposed: list[list[int]]
    clean: list[list[int]]


def choose(folder: Path, alike: Slice, candidates: Artifact, parts: int, sources: int) -> Chosen:
    """Write the unique proposed documents of a range (similar to no other document), ordered by hash."""
    with candidates.open() as file:
        described = np.load(file)
    keys, _ = alike.read()
    clean = described[~np.isin(described["key"], keys["key"])]
    np.save(folder / _CHOSEN, clean)
    return Chosen(*(_counted(rows, parts, sources) for rows in (described, clean)))


SPLIT_CHOOSE = Stage("split_choose", "split", choose)


def _counted(rows: npt.NDArray[np.void], parts: int, sources: int) -> list[list[int]]:
    rows = rows[rows["part"] < parts]  # others may be given to any part that is short
    cells = rows["part"].astype(np.int64) * sources + rows["source"]
    counts: list[list[int]] = np.bincount(cells, minlength=parts * sources).reshape(parts, sources).tolist()
    return counts


@dataclass(frozen=True, slots=True)
class Taken:
    """Counts in a range of hashes: selected documents by part and source, and spare ones by source."""

    taken: list[list[int]]
    spare: list[int]


def take(
    folder: Path,
    chosen: Artifact,
    quota: Sequence[Quota],
    spares: Sequence[Quota] | None,
    sources: int,
    limits: Limits,
    most: Sequence[Wanted] | None,
) -> Taken:
    """Write the selected documents: for each part, `quota` of those proposed for it, lowest hashes first.

    `spares` is the number of further documents for each part, from those that are not selected so far. With
    `most`, whole families are selected, of at most this number of documents, and the last one may have more
    documents than are missing.
    """
    with chosen.open() as file:
        rows = np.load(file)
    given = np.full(len(rows), -1, np.int32)
    for part, room in enumerate(quota):
        _give(given, part, room, rows, rows["part"] == part, whole=most is not None)
    for of_sources in (True, False) if spares is not None else ():
        for part, room in enumerate(spares or ()):
            if isinstance(room, int) == of_sources:
                continue
            free = given < 0
            if most is not None:
                free &= _sizes(rows) <= np.broadcast_to(most[part], sources)[rows["source"]]
            _give(given, part, room, rows, free, whole=most is not None)
    rows["part"], keep = given, given >= 0
    taken = rows[keep]
    found = np.empty(len(taken), PARTS.dtype)
    found["key"], found["part"] = document_keys(taken["split"], taken["row"]), taken["part"]
    with RunWriter(folder / PARTS.file, PARTS, memory_bytes=_MEMORY, limits=limits) as run:
        run.write(found)
    spare = np.bincount(rows["source"][~keep], minlength=sources).tolist()
    return Taken(_counted(taken, len(quota), sources), spare)


SPLIT_ROWS = Stage("split_rows", "split", take)
SPLIT = Stage("split", "split", write_tables)


def _give(
    given: Int32s, part: int, room: Quota, rows: npt.NDArray[np.void], free: Bools, *, whole: bool
) -> None:
    """Assign the first `room` of the `free` rows to a part, or the first room[s] of each source s.

    With `whole`, also the other rows of the last family.
    """
    if isinstance(room, int):
        given[_first(rows["key"], np.flatnonzero(free), room, whole=whole)] = part
        return
    for number, most in enumerate(room):
        own = np.flatnonzero(free & (rows["source"] == number))
        given[_first(rows["key"], own, most, whole=whole)] = part


def _first(keys: UInt64s, free: Int64s, room: int, *, whole: bool) -> Int64s:
    """Return the first `room` of the rows `free`; with `whole`, also those with the key of the last one."""
    if whole and 0 < room < len(free):
        room = int(np.searchsorted(keys[free], keys[free[room - 1]], side="right"))
    return free[:room]


def _sizes(rows: npt.NDArray[np.void]) -> Int64s:
    """Return the number of documents of each row's family."""
    _, number, sizes = np.unique(rows["key"], return_inverse=True, return_counts=True)
    found: Int64s = sizes[number]
    return found


_DRAWN = 0.01  # assumed share of the documents in all parts but train


def needs(n: Needs) -> None:
    """Add the requests and bytes of stage `split`, mainly lookups of all documents in n-gram tables."""
    c = n.corpus
    if not c.shape.parts:
        return
    proposed, text = c.documents * _DRAWN, c.text_bytes * DOCUMENTS
    # Bytes of n-gram hashes per document: one 8-byte hash per word, assuming 6 bytes of text per word.
    ngrams = 8 * c.text_bytes / 6 / max(1, c.documents)
    row = PROPOSED.row_bytes + ngrams
    tables = ranges = max(1, ceil(c.text_bytes * _DRAWN * TABLE_BYTES / c.task_memory))
    gets, read = n.scans(text, c.gathered)
    if c.shape.has_families:
        ranges = c.limits.partitions(ceil(proposed), DRAWN.dtype)
        n.add(SPLIT_DRAW, c.gathered, gets, read, files=1, written=proposed * DRAWN.row_bytes)
        drawn = n.exchange(SPLIT_FIT, DRAWN, c.gathered, proposed, ranges)
        n.add(SPLIT_FIT, ranges, *n.slices(drawn, ranges), files=2)
        n.by_split(SPLIT_FAMILIES, FITTING, ranges, proposed)
    n.add(SPLIT_PROPOSE, c.gathered, gets, read, files=1, written=proposed * row)
    found = n.exchange(SPLIT_TABLES, PROPOSED, c.gathered, proposed, tables, ngrams)
    n.add(SPLIT_TABLES, tables, *n.slices(found, tables), files=4, written=2 * proposed * row)
    looked = c.gathered * tables
    size = looked * 2 * proposed * row / tables
    n.add(SPLIT_PROBE, looked, tables * gets + 4 * looked, tables * read + size, files=1)
    alike = n.exchange(SPLIT_CHOOSE, ALIKE, looked, proposed, ranges)
    n.add(SPLIT_CHOOSE, ranges, *n.slices(alike, ranges), files=1)
    n.add(SPLIT_ROWS, ranges, 2 * ranges, files=1)
    n.by_split(SPLIT, PARTS, ranges, proposed)


def _stages(recipe: Recipe) -> Sequence[Stage[..., Any]]:
    if recipe.split is None:
        return ()
    found = () if recipe.split.by is None else (SPLIT_DRAW, SPLIT_FIT, SPLIT_FAMILIES)
    return *found, SPLIT_PROPOSE, SPLIT_TABLES, SPLIT_PROBE, SPLIT_CHOOSE, SPLIT_ROWS, SPLIT


STEP = Step(_stages, split_documents, needs)
