"""Stage `split`: selects parts such as a validation set from the kept documents, without leaks between parts.

A document is proposed for a part by hash(seed, document id), so a part depends only on its own share and the
shares of the parts before it. A proposed document that is similar to any other document, in whichever part,
stays in train. All pairs are compared, not candidates of a hash: the n-grams of the proposed documents are
few and fit into tables, in which every kept document is looked up.

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
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from math import ceil, sqrt
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.errors import RecipeError, warn_user
from shardkit.hashing import keyed_hashes
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
from shardkit.writers.execution.digests import MemoryBytes, RecipeKey
from shardkit.writers.execution.stage import Stage, Task, partition_name
from shardkit.writers.kernels.hash_tables import fill_places, find_matches, table_slots
from shardkit.writers.kernels.numba_support import Bools, Int32s, Int64s, UInt64s, kernel
from shardkit.writers.kernels.shingles import shingle_batch
from shardkit.writers.kernels.text_arrays import text_offsets
from shardkit.writers.recipe.outputs import SplitConfig
from shardkit.writers.stages.flow import Build, Documents, PartsFound, Step
from shardkit.writers.stages.needs import DOCUMENTS, Needs

PROPOSED = Table(
    "proposed.run",
    np.dtype(
        [
            ("key", "<u8"),  # hash(seed, document id)
            ("size", "<i8"),  # bytes of the payload: the document's distinct n-grams, uint64, ascending
            ("row", "<u4"),
            ("part", "<i4"),
            ("source", "<i4"),
            ("split", "<i4"),
        ]
    ),
    payload=True,
    origin="split",
)
ALIKE = Table("alike.run", np.dtype([("key", "<u8")]))
PARTS = Table("parts.run", np.dtype([("key", "<u8"), ("part", "<i4")]))  # keyed by `document_keys`

_CANDIDATES, _HASHES, _STARTS, _MEMBERS = "candidates.npy", "hashes.npy", "starts.npy", "members.npy"
_CHOSEN = "chosen.npy"
TABLE_BYTES = 40  # upper estimate of the memory of a table and its inputs, per byte of text
_BITS_PER_KEY = 16
_ROUNDS = 5
_SPARES = 6.0  # additional proposals, in standard deviations of the wanted number
_MEMORY = 64 << 20
_PURPOSE = "split"

Bounds = tuple[tuple[int, ...], ...]
"""For each source, the hashes (exclusive) at which its parts end; the first part begins at hash 0."""
Wanted = int | list[int]
"""The number of documents that a part should get: from all sources together, or from each source."""
Quota = int | list[int]
"""The maximum number of documents that a part may get: from all sources together, or from each source."""


def split_documents(documents: Documents, build: Build) -> Documents:
    """Select the parts. Raises RecipeError for unknown sources, or if a part wants too many documents."""
    config = documents.recipe.split
    assert config is not None
    return replace(documents, parts=_Drawing(documents, build, config).run())


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
        rates = [1.0 for _ in names]
        for _ in range(_ROUNDS):
            bounds = _bounds(wanted, left, rates)
            chosen = self._choose_from(bounds)
            counted = [SPLIT_CHOOSE.result(commit) for commit in chosen]
            found_rates = _rates(wanted, counted, rates)
            if found_rates == rates or _bounds(wanted, left, found_rates) == bounds:
                break
            rates = found_rates
        taken = self._deal(wanted, chosen, counted)
        numbers = [SPLIT_ROWS.result(commit).taken for commit in taken]
        drawn = [sum(sum(one[code]) for one in numbers) for code in range(len(names))]
        _warn_of_few(names, wanted, drawn)
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
        quotas = _quotas(wanted, counted)
        nothing = [None] * len(quotas)
        [taken] = self.build.run(self._take(chosen, quotas, nothing))
        more, is_full = _spares(wanted, [SPLIT_ROWS.result(commit) for commit in taken])
        if not is_full:  # parts of any source may have taken documents that a part of named sources needs
            named = [[0 if isinstance(one, int) else one for one in quota] for quota in quotas]
            [apart] = self.build.run(self._take(chosen, named, nothing))
            others, fills = _spares(wanted, [SPLIT_ROWS.result(commit) for commit in apart])
            quotas, more = (named, others) if fills else (quotas, more)
        elif not any(more):
            return taken
        [taken] = self.build.run(self._take(chosen, quotas, more))
        return taken

    def _choose_from(self, bounds: Bounds) -> Sequence[Commit]:
        """Propose documents with hashes below `bounds`; return the commits that list the unique ones."""
        end = max(1, *(stops[-1] for stops in bounds))
        [proposed] = self.build.run(self._propose(bounds))
        texts = sum(SPLIT_PROPOSE.result(commit).bytes for commit in proposed)
        groups = max(1, -(-texts * TABLE_BYTES // self.build.memory_bytes))
        edges = [*pairwise(end * number // groups for number in range(groups + 1))]
        move = partial(exchange, self.build.run, readers=groups, end=end, limits=self.build.limits)
        moved = move(SPLIT_TABLES, PROPOSED, proposed)
        pieces = [(partition_name(n, groups), moved.slice(*edge)) for n, edge in enumerate(edges)]
        [tables] = self.build.run([SPLIT_TABLES.task(name, piece.bytes, piece) for name, piece in pieces])
        [probed] = self.build.run(self._probe(tables))
        alike = move(SPLIT_CHOOSE, ALIKE, probed)
        sizes, tasks = (len(self.config.parts), len(self.documents.recipe.inputs)), []
        for edge, table in zip(edges, tables, strict=True):
            args = alike.slice(*edge), table.file(_CANDIDATES), *sizes
            tasks.append(SPLIT_CHOOSE.task(table.name, 0, *args))
        [chosen] = self.build.run(tasks)
        return chosen

    def _propose(self, bounds: Bounds) -> list[Task]:
        made = []
        for number, split in enumerate(self.documents.splits):
            place = self.documents.file(number), self.documents.removals[number]
            shared = self.documents.recipe.seed, self._ngrams, self.build.memory_bytes, self.build.limits
            args = *place, bounds[split.source], *shared
            made.append(SPLIT_PROPOSE.task(split.task_name, split.bytes, *args))
        return made

    def _probe(self, tables: Sequence[Commit]) -> list[Task]:
        settings = self.documents.recipe.seed, self._ngrams, self.config.similarity, self.build.limits
        made = []
        for number, table in enumerate(tables):
            for at, split in enumerate(self.documents.splits):
                args = self.documents.file(at), self.documents.removals[at], table.files, *settings
                made.append(SPLIT_PROBE.task(f"{split.task_name}.{number:05d}", split.bytes, *args))
        return made

    def _take(
        self,
        chosen: Sequence[Commit],
        quotas: Sequence[Sequence[Quota]],
        spares: Sequence[Sequence[Quota] | None],
    ) -> list[Task]:
        sources, made = len(self.documents.recipe.inputs), []
        for commit, quota, more in zip(chosen, quotas, spares, strict=True):
            args = commit.file(_CHOSEN), quota, more, sources, self.build.limits
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


def _warn_of_few(names: Sequence[str], wanted: Sequence[Wanted], drawn: Sequence[int]) -> None:
    for name, asked, found in zip(names, wanted, drawn, strict=True):
        number = asked if isinstance(asked, int) else sum(asked)
        if found < number:
            warn_user(
                f"split: {name} has {found:,} documents, {number:,} are wanted: too many of the proposed "
                f"ones are similar to another document; remove duplicates (dedup.near) or lower its share"
            )


def _number(share: float, documents: int) -> int:
    """Convert a part's share to a number of documents; a fraction becomes at least 1, but never all."""
    if isinstance(share, int):
        return share
    return min(max(1, round(share * documents)), max(0, documents - 1))


def _rates(wanted: Sequence[Wanted], chosen: Sequence[Chosen], rates: Sequence[float]) -> list[float]:
    """Return the rate of unique documents among each part's proposals, or its old rate if it has enough."""
    found = []
    for part, (asked, rate) in enumerate(zip(wanted, rates, strict=True)):
        clean = np.sum([one.clean[part] for one in chosen], axis=0)
        proposed = np.sum([one.proposed[part] for one in chosen], axis=0)
        if isinstance(asked, int):
            clean, proposed = clean.sum(keepdims=True), proposed.sum(keepdims=True)
        needed = np.atleast_1d(asked)
        short = clean < needed
        seen = (clean[short] + 1) / (proposed[short] + 1)
        found.append(min(rate, float(0.9 * min(seen.min(), rate))) if short.any() else rate)
    return found


def _bounds(wanted: Sequence[Wanted], left: Sequence[int], rates: Sequence[float]) -> Bounds:
    """Return the hashes at which the parts of each source end; RecipeError if too much is wanted.

    `rates` are the expected rates of unique documents among the proposed ones, per part.
    """
    stops = []
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
        ends = np.minimum(np.cumsum(shares), 1.0)
        stops.append(tuple(min(int(end * (1 << 53)) << 11, (1 << 64) - 1) for end in ends.tolist()))
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
class Proposed:
    """Counts of one split: the number of proposed documents, and the size of their texts in bytes."""

    documents: int
    bytes: int


def _left(documents: Artifact, removed: SplitRemovals) -> Iterator[tuple[int, pa.RecordBatch, Int64s]]:
    """Yield (row of the batch's first document, batch, kept rows in it) for batches with kept rows."""
    lost, start = removed.load(), 0
    with documents.open_arrow(mapped=True) as source:
        reader = pa.ipc.open_file(source)
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            here = lost.within(start, batch.num_rows)
            keep = here.left(batch.num_rows)
            if keep.any():
                yield start, batch, np.flatnonzero(keep)
            start += batch.num_rows


def propose(
    folder: Path,
    documents: Artifact,
    removed: SplitRemovals,
    stops: Sequence[int],
    seed: int,
    ngrams: Annotated[MinHashConfig, RecipeKey("dedup.near.minhash")],
    memory_bytes: MemoryBytes,
    limits: Limits,
) -> Proposed:
    """Write the proposed documents of a split (hash below the last of `stops`) with their n-grams."""
    count = size = 0
    ends = np.array(stops, np.uint64)
    with RunWriter(folder / PROPOSED.file, PROPOSED, memory_bytes=memory_bytes // 2, limits=limits) as run:
        for start, batch, kept in _left(documents, removed):
            ids = batch.column("document_id").to_pylist()
            hashes = keyed_hashes([ids[row] for row in kept.tolist()], seed, _PURPOSE)
            parts = np.searchsorted(ends, hashes, side="right")
            drawn = np.flatnonzero(parts < len(ends))
            if not len(drawn):
                continue
            rows = np.zeros(len(drawn), PROPOSED.dtype)
            rows["key"], rows["part"] = hashes[drawn], parts[drawn]
            rows["row"], rows["split"] = start + kept[drawn], -1
            taken = batch.take(pa.array(kept[drawn]))
            rows["source"] = taken.column("source").to_numpy()
            found = shingle_batch(taken.column("text"), ngrams)
            sets = [np.unique(found.hashes[a:b]) for a, b in pairwise(found.offsets.tolist())]
            rows["size"] = [one.nbytes for one in sets]
            run.write(rows, np.concatenate([np.empty(0, np.uint64), *sets]).view(np.uint8))
            count += len(drawn)
            size += int(np.diff(text_offsets(taken.column("text"))).sum())
    return Proposed(count, size)


SPLIT_PROPOSE = Stage("split_propose", "split", propose, cost=8)


def make_table(folder: Path, piece: Slice) -> None:
    """Write the table of a range of proposed documents: which documents contain each n-gram."""
    rows, payload = piece.read()
    hashes = payload.view("<u8")
    sizes = rows["size"] // 8
    unique, inverse = np.unique(hashes, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    members = np.repeat(np.arange(len(rows), dtype=np.int32), sizes)[order]
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(inverse, minlength=len(unique)))])
    described = np.zeros(len(rows), _CANDIDATE)
    for name in ("key", "row", "part", "source", "split"):
        described[name] = rows[name]
    described["ngrams"] = sizes
    files = {_CANDIDATES: described, _HASHES: unique, _STARTS: starts, _MEMBERS: members}
    for name, values in files.items():
        np.save(folder / name, values)


SPLIT_TABLES = Stage("split_tables", "split", make_table)


_CANDIDATE = np.dtype(
    [("key", "<u8"), ("row", "<u4"), ("part", "<i4"), ("source", "<i4"), ("split", "<i4"), ("ngrams", "<i8")]
)


@dataclass(frozen=True, slots=True)
class _NgramTable:
    """The proposed documents of a range, ascending by key, and which of them contain each n-gram."""

    keys: UInt64s
    ngrams: Int64s
    bits: UInt64s
    slots: UInt64s
    places: Int64s
    starts: Int64s
    members: Int32s


@lru_cache(maxsize=1)
def _load_table(folder: Path) -> _NgramTable:
    described, hashes = np.load(folder / _CANDIDATES), np.load(folder / _HASHES)
    slots = int(table_slots(2 * len(hashes)))
    bits = np.zeros(max(1, slots * _BITS_PER_KEY // 128), np.uint64)
    keys, places = np.zeros(slots, np.uint64), np.full(slots, -1, np.int64)
    fill_places(hashes, bits, keys, places)
    starts, members = np.load(folder / _STARTS), np.load(folder / _MEMBERS)
    ngrams = np.ascontiguousarray(described["ngrams"])
    return _NgramTable(np.ascontiguousarray(described["key"]), ngrams, bits, keys, places, starts, members)


def probe(
    folder: Path,
    documents: Artifact,
    removed: SplitRemovals,
    table: Artifact,
    seed: int,
    ngrams: Annotated[MinHashConfig, RecipeKey("dedup.near.minhash")],
    similarity: Annotated[float, RecipeKey("split.similarity")],
    limits: Limits,
) -> None:
    """Write the keys of proposed documents in `table` that are similar to another document of this split."""
    for name in (_CANDIDATES, _HASHES, _STARTS, _MEMBERS):
        (table / name).local()
    loaded = _load_table(table.path)
    alike = np.zeros(len(loaded.keys), np.bool_)
    for _, batch, kept in _left(documents, removed) if len(alike) else ():
        taken = batch.take(pa.array(kept)) if len(kept) < batch.num_rows else batch
        found = shingle_batch(taken.column("text"), ngrams)
        matches = find_matches(found.hashes, loaded.bits, loaded.slots, loaded.places)
        if not len(matches):
            continue
        keys = keyed_hashes(taken.column("document_id").to_pylist(), seed, _PURPOSE)
        own = np.searchsorted(loaded.keys, keys)
        own[loaded.keys[np.minimum(own, len(alike) - 1)] != keys] = -1
        _mark_alike(
            *(matches, found.offsets, own, loaded.starts, loaded.members, loaded.ngrams), similarity, alike
        )
    rows = np.zeros(int(alike.sum()), ALIKE.dtype)
    rows["key"] = loaded.keys[alike]
    with RunWriter(folder / ALIKE.file, ALIKE, memory_bytes=_MEMORY, limits=limits) as run:
        run.write(rows)


SPLIT_PROBE = Stage("split_probe", "split", probe, cost=20)


@kernel
def _mark_alike(
    matches: Int64s,
    offsets: Int64s,
    own: Int64s,
    starts: Int64s,
    members: Int32s,
    ngrams: Int64s,
    similarity: float,
    alike: Bools,
) -> None:
    """Set alike[i] if proposed document i is similar to a text other than itself (text t is own[t], or -1).

    `matches` are ascending (n-gram index in the texts, index in the table); `offsets` are per text.
    """
    distinct = np.zeros(len(ngrams), np.int64)
    positions = np.zeros(len(ngrams), np.int64)
    touched = np.empty(len(ngrams), np.int64)
    seen = np.full(len(starts), -1, np.int64)  # the last text that contained each n-gram
    at = 0
    for text in range(len(offsets) - 1):
        count = 0
        while at < len(matches) and matches[at, 0] < offsets[text + 1]:
            ngram = matches[at, 1]
            new = seen[ngram] != text
            seen[ngram] = text
            for i in range(starts[ngram], starts[ngram + 1]):
                other = members[i]
                if other == own[text]:
                    continue
                if positions[other] == 0:
                    touched[count] = other
                    count += 1
                positions[other] += 1
                distinct[other] += new
            at += 1
        total = offsets[text + 1] - offsets[text]
        for i in range(count):
            other = touched[i]
            if distinct[other] >= similarity * ngrams[other] or positions[other] >= similarity * total:
                alike[other] = True
            distinct[other] = positions[other] = 0


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
) -> Taken:
    """Write the selected documents: for each part, `quota` of those proposed for it, lowest hashes first.

    `spares` is the number of further documents for each part, from those that are not selected so far.
    """
    with chosen.open() as file:
        rows = np.load(file)
    given = np.full(len(rows), -1, np.int32)
    for part, room in enumerate(quota):
        _give(given, part, room, rows["source"], rows["part"] == part)
    for of_sources in (True, False) if spares is not None else ():
        for part, room in enumerate(spares or ()):
            if isinstance(room, int) != of_sources:
                _give(given, part, room, rows["source"], given < 0)
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


def _give(given: Int32s, part: int, room: Quota, source: Int32s, free: Bools) -> None:
    """Assign the first `room` of the `free` rows to a part, or the first room[s] of each source s."""
    if isinstance(room, int):
        given[np.flatnonzero(free)[:room]] = part
        return
    for number, most in enumerate(room):
        given[np.flatnonzero(free & (source == number))[:most]] = part


_DRAWN = 0.01  # assumed share of the documents in all parts but train


def needs(n: Needs) -> None:
    """Add the requests and bytes of stage `split`, mainly lookups of all documents in n-gram tables."""
    c = n.corpus
    if not c.shape.parts:
        return
    proposed, text = c.documents * _DRAWN, c.text_bytes * DOCUMENTS
    # Bytes of n-gram hashes per document: one 8-byte hash per word, assuming 6 bytes of text per word.
    ngrams = 8 * c.text_bytes / 6 / max(1, c.documents)
    row = PROPOSED.dtype.itemsize + ngrams
    tables = max(1, ceil(c.text_bytes * _DRAWN * TABLE_BYTES / c.task_memory))
    gets, read = n.scans(text, c.splits)
    n.add(SPLIT_PROPOSE, c.splits, gets, read, files=1, written=proposed * row)
    found = n.exchange(SPLIT_TABLES, PROPOSED, c.splits, proposed, tables, ngrams)
    n.add(SPLIT_TABLES, tables, *n.slices(found, tables), files=4, written=2 * proposed * row)
    looked = c.splits * tables
    size = looked * 2 * proposed * row / tables
    n.add(SPLIT_PROBE, looked, tables * gets + 4 * looked, tables * read + size, files=1)
    alike = n.exchange(SPLIT_CHOOSE, ALIKE, looked, proposed, tables)
    n.add(SPLIT_CHOOSE, tables, *n.slices(alike, tables), files=1)
    n.add(SPLIT_ROWS, tables, 2 * tables, files=1)
    n.by_split(SPLIT, PARTS, tables, proposed)


STAGES = SPLIT_PROPOSE, SPLIT_TABLES, SPLIT_PROBE, SPLIT_CHOOSE, SPLIT_ROWS, SPLIT
STEP = Step(lambda recipe: () if recipe.split is None else STAGES, split_documents, needs)
