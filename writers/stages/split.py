"""Stage `split`: draws parts such as a validation set from the documents that stay, so that none leaks.

A document is proposed for a part by hash(seed, document id), so a part depends on nothing but its own share
and the shares of the parts before it. A proposed document that is like any other one, whichever part that is
in, stays in train. All pairs are compared, not candidates of a hash: the n-grams of the proposed documents
are few and fit into tables, and every document that stays is looked up in them.

    propose   a split: its proposed documents with their sets of n-grams            PROPOSED
    tables    a range of hashes: n-gram -> the proposed documents that have it       tables.npy …
    probe     a split and a table: the proposed documents that are like one of the split's   ALIKE
    choose    a range of hashes: the proposed documents that are like no other one
    rows      a range of hashes: those of them that are taken, then by split         PARTS

Two documents are alike if they share `similarity` of the distinct n-grams of one of them, or if this share of
the n-grams of one, with repetitions, occurs in the other one. That includes a Jaccard similarity of
`similarity`, and short documents that lie in long ones. A share is a number of the documents that stay. More
are proposed than wanted, and the lowest hashes of those that are like no other are taken. Where too many were
like another one, the stages run again with as many more proposed as their part says, at most `_ROUNDS` times.
A part that is short even then gets, in the order of hashes, what was proposed for other parts, is like no
other document and was not needed there: all parts are full where enough such documents exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.errors import RecipeError, warn_user
from shardkit.hashing import keyed_hashes
from shardkit.writers.dedup.config import MinHashConfig
from shardkit.writers.dedup.removals import Part, SplitRemovals, SplitTable, by_split, document_keys
from shardkit.writers.exchange import Exchanged, Limits, RunWriter, Slice, Table, exchange
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.task import Commit, PlainCounts, RunTasks, Task, partition_name
from shardkit.writers.inputs.scan import Split
from shardkit.writers.kernels.hash_tables import fill_places, find_matches, table_slots
from shardkit.writers.kernels.numba_support import Bools, Int32s, Int64s, UInt64s, kernel
from shardkit.writers.kernels.shingles import shingle_batch
from shardkit.writers.kernels.text_arrays import text_offsets
from shardkit.writers.recipe import Recipe, SplitConfig
from shardkit.writers.settings import TRAIN
from shardkit.writers.stages.clean import DOCUMENTS_FILE, split_name

__all__ = ["PARTS", "PROPOSED", "TABLE_BYTES", "PartsFound", "SplitStage"]

PROPOSED = Table(
    "proposed.run",
    np.dtype(
        [
            ("key", "<u8"),  # hash(seed, document id)
            ("size", "<i8"),  # of the payload: the document's distinct n-grams, uint64, ascending
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
TABLE_BYTES = 40  # that a table and what it is made of take for a byte of text, with room
_BITS_PER_KEY = 16
_ROUNDS = 5
_SPARES = 6.0  # standard deviations by which more documents are proposed than are wanted
_MEMORY = 64 << 20
_PURPOSE = "split"

Bounds = tuple[tuple[int, ...], ...]
"""Of each source, the hashes at which its parts end; the first begins at 0."""
Wanted = int | list[int]
"""Documents of all sources together, or of each source."""
Quota = int | list[int]
"""The most documents of all sources together, or of each source."""


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
class SplitStage:
    """What the tasks have in common.

    `documents` have documents.arrow of each of `splits`; what `removals` leave is drawn from.
    """

    recipe: Recipe
    config: SplitConfig
    splits: Sequence[Split]
    documents: Sequence[Commit]
    removals: Sequence[SplitRemovals]
    memory_bytes: int
    limits: Limits

    def run(self, run: RunTasks) -> PartsFound:
        """Draw the parts; RecipeError if a source is not there, or if too many documents are asked for."""
        names, left = tuple(self.config.parts), self._remaining()
        wanted = self._wanted(left)
        rates = [1.0 for _ in names]
        for _ in range(_ROUNDS):
            bounds = _bounds(wanted, left, rates)
            chosen = self._choose_from(bounds, run)
            counted = [Chosen.of(commit) for commit in chosen]
            found_rates = _rates(wanted, counted, rates)
            if found_rates == rates or _bounds(wanted, left, found_rates) == bounds:
                break
            rates = found_rates
        taken = self._deal(wanted, chosen, counted, run)
        drawn = [sum(sum(commit.counts["taken"][code]) for commit in taken) for code in range(len(names))]
        _warn_of_few(names, wanted, drawn)
        found = by_split(run, "split", PARTS, taken, len(self.splits), limits=self.limits)
        return PartsFound(
            {part: self._of_part(part, names, found) for part in (TRAIN, *names)},
            dict(zip(names, drawn, strict=True)),
            {name: sum(sum(one.proposed[code]) for one in counted) for code, name in enumerate(names)},
            {
                name: sum(sum(one.proposed[code]) - sum(one.clean[code]) for one in counted)
                for code, name in enumerate(names)
            },
        )

    def _deal(
        self, wanted: Sequence[Wanted], chosen: Sequence[Commit], counted: Sequence[Chosen], run: RunTasks
    ) -> Sequence[Commit]:
        """Return the commits of the documents that are taken for parts of `wanted` documents."""
        quotas = _quotas(wanted, counted)
        nothing = [None] * len(quotas)
        [taken] = run(self._take(chosen, quotas, nothing))
        more, is_full = _spares(wanted, [commit.counts for commit in taken])
        if not is_full:  # parts of any source may have what a part of named ones needs
            named = [[0 if isinstance(one, int) else one for one in quota] for quota in quotas]
            [apart] = run(self._take(chosen, named, nothing))
            others, fills = _spares(wanted, [commit.counts for commit in apart])
            quotas, more = (named, others) if fills else (quotas, more)
        elif not any(more):
            return taken
        [taken] = run(self._take(chosen, quotas, more))
        return taken

    def _choose_from(self, bounds: Bounds, run: RunTasks) -> Sequence[Commit]:
        """Return the commits of those below `bounds` that are like no other document."""
        end = max(1, *(stops[-1] for stops in bounds))
        [proposed] = run(self._propose(bounds))
        texts = sum(commit.counts["bytes"] for commit in proposed)
        groups = max(1, -(-texts * TABLE_BYTES // self.memory_bytes))
        edges = [*pairwise(end * number // groups for number in range(groups + 1))]
        shared = {"readers": groups, "end": end, "limits": self.limits}
        [tables] = run(_tables(exchange(run, "split_propose", PROPOSED, proposed, **shared), edges))
        [probed] = run(self._probe(tables))
        alike = exchange(run, "split_probe", ALIKE, probed, **shared)
        [chosen] = run(self._choose(alike, edges, tables))
        return chosen

    def _propose(self, bounds: Bounds) -> list[Task]:
        made = []
        for split, read, file, removed in self._inputs():
            stops = bounds[split.source]
            config = self._shared | {"bounds": [str(stop) for stop in stops]}
            args = (file, removed, stops, self.recipe.seed, self._minhash, self.memory_bytes, self.limits)
            name = split_name(split)
            made.append(Task("split_propose", name, config, propose, args, split.bytes, read))
        return made

    def _probe(self, tables: Sequence[Commit]) -> list[Task]:
        config = self._shared | {"similarity": self.config.similarity}
        shared = self.recipe.seed, self._minhash, self.config.similarity, self.limits
        made = []
        for number, table in enumerate(tables):
            for split, read, file, removed in self._inputs():
                name, needed = f"{split_name(split)}.{number:05d}", read | {"table": table.content}
                args = (file, removed, table.files, *shared)
                made.append(Task("split_probe", name, config, probe, args, split.bytes, needed))
        return made

    def _choose(
        self, alike: Exchanged, edges: Sequence[tuple[int, int]], tables: Sequence[Commit]
    ) -> list[Task]:
        sizes = len(self.config.parts), len(self.recipe.inputs)
        made = []
        for (start, stop), table in zip(edges, tables, strict=True):
            piece = alike.slice(start, stop)
            inputs = {"alike": piece.digest, "table": table.content}
            args = (piece, table.files, *sizes)
            config = {"parts": sizes[0], "sources": sizes[1]}
            made.append(Task("split_choose", table.name, config, choose, args, inputs=inputs))
        return made

    def _take(
        self,
        chosen: Sequence[Commit],
        quotas: Sequence[Sequence[Quota]],
        spares: Sequence[Sequence[Quota] | None],
    ) -> list[Task]:
        made = []
        for commit, quota, more in zip(chosen, quotas, spares, strict=True):
            args = (commit.files / _CHOSEN, quota, more, len(self.recipe.inputs), self.limits)
            config = {"quota": quota} if more is None else {"quota": quota, "spares": more}
            inputs = {"chosen": commit.content}
            made.append(Task("split_rows", commit.name, config, take, args, inputs=inputs))
        return made

    def _inputs(self) -> Iterator[tuple[Split, dict[str, Any], Artifact, SplitRemovals]]:
        """Of each split: what its tasks read, their digests, the file of documents and what is removed."""
        for split, commit, removed in zip(self.splits, self.documents, self.removals, strict=True):
            digests = {"documents": commit.outputs[DOCUMENTS_FILE].xxh3_128, "removed": removed.digest}
            yield split, digests, commit.files / DOCUMENTS_FILE, removed

    @property
    def _minhash(self) -> MinHashConfig:
        near = self.recipe.dedup.near
        return MinHashConfig() if near is None else near.minhash

    @property
    def _shared(self) -> dict[str, Any]:
        ngrams = {"unit": self._minhash.unit, "ngram": self._minhash.ngram}
        return {"seed": self.recipe.seed, "ngrams": ngrams, "block_bytes": self.limits.block_bytes}

    def _of_part(self, part: str, names: tuple[str, ...], found: Sequence[SplitTable]) -> list[SplitRemovals]:
        pairs = zip(self.removals, found, strict=True)
        return [removed.of_part(Part(part, names, table)) for removed, table in pairs]

    def _wanted(self, left: Sequence[int]) -> list[Wanted]:
        """Return how many documents each part gets, of those that are `left` of each source."""
        labels = self.recipe.sources
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
        """Documents of each source to draw from."""
        left = [0 for _ in self.recipe.inputs]
        for split, commit, removed in zip(self.splits, self.documents, self.removals, strict=True):
            lost = sum(table.lost.documents for table in removed.tables.values())
            left[split.source] += commit.ledger().kept.documents - lost
        return left


def _warn_of_few(names: Sequence[str], wanted: Sequence[Wanted], drawn: Sequence[int]) -> None:
    for name, asked, found in zip(names, wanted, drawn, strict=True):
        number = asked if isinstance(asked, int) else sum(asked)
        if found < number:
            warn_user(
                f"split: {name} has {found:,} documents, {number:,} were asked for: too many of those "
                f"drawn are like another document; remove duplicates (dedup.near), or ask for fewer"
            )


def _number(share: float, documents: int) -> int:
    """Return how many of `documents` a share is, at least 1 but never all; a number is one already."""
    if isinstance(share, int):
        return share
    return min(max(1, round(share * documents)), max(0, documents - 1))


def _rates(wanted: Sequence[Wanted], chosen: Sequence[Chosen], rates: Sequence[float]) -> list[float]:
    """Return of each part how many proposed documents are like no other; `rates` where that is enough."""
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


def _tables(proposed: Exchanged, edges: Sequence[tuple[int, int]]) -> list[Task]:
    made = []
    for number, (start, stop) in enumerate(edges):
        piece = proposed.slice(start, stop)
        name, inputs = partition_name(number, len(edges)), {"proposed": piece.digest}
        made.append(Task("split_tables", name, {}, make_table, (piece,), piece.bytes, inputs))
    return made


def _bounds(wanted: Sequence[Wanted], left: Sequence[int], rates: Sequence[float]) -> Bounds:
    """Return the hashes at which the parts of each source end; RecipeError for more than there is.

    `rates`: of each part, the share of proposed documents that are like no other one.
    """
    stops = []
    for source, documents in enumerate(left):
        shares = []
        for one, rate in zip(wanted, rates, strict=True):
            number = one if isinstance(one, int) else one[source]
            whole = sum(left) if isinstance(one, int) else documents
            if number and number >= whole:
                problem = f"{number:,} documents are asked for, there are {whole:,} to draw from"
                raise RecipeError(f"split: {problem}")
            proposed = number + _SPARES * sqrt(number) + 10 if number else 0.0
            shares.append(min(proposed / rate / max(1, whole), 1.0))
        ends = np.minimum(np.cumsum(shares), 1.0)
        stops.append(tuple(min(int(end * (1 << 53)) << 11, (1 << 64) - 1) for end in ends.tolist()))
    return tuple(stops)


def _quotas(wanted: Sequence[Wanted], chosen: Sequence[Chosen]) -> list[list[Quota]]:
    """What each range of hashes may give to each part, the lowest hashes first."""
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


def _spares(
    wanted: Sequence[Wanted], taken: Sequence[Mapping[str, Any]]
) -> tuple[list[list[Quota] | None], bool]:
    """Return what parts that are short get of what is left in each range, and whether that fills them all.

    `taken` are the counts of `take`. Parts that name their sources are served first: others take any.
    """
    is_full = True
    left = [np.array(counts["spare"], np.int64) for counts in taken]
    got = np.sum([counts["taken"] for counts in taken], axis=0)
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
class Proposed(PlainCounts):
    """Documents that are proposed, and the bytes of their text."""

    documents: int
    bytes: int


def _left(documents: Artifact, removed: SplitRemovals) -> Iterator[tuple[int, pa.RecordBatch, Int64s]]:
    """(row of the batch's first document, batch, rows in it that stay) of each batch that has any."""
    lost, start = removed.load(), 0
    with documents.open_arrow(mapped=True) as source:
        reader = pa.ipc.open_file(source)
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            here = lost.within(start, batch.num_rows)
            keep = np.ones(batch.num_rows, np.bool_)
            for rows in here.rows.values():
                keep[rows] = False
            if keep.any():
                yield start, batch, np.flatnonzero(keep)
            start += batch.num_rows


def propose(
    folder: Path,
    documents: Artifact,
    removed: SplitRemovals,
    stops: Sequence[int],
    seed: int,
    minhash: MinHashConfig,
    memory_bytes: int,
    limits: Limits,
) -> Proposed:
    """Write the documents of a split whose hashes lie below the last of `stops`, with their n-grams."""
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
            found = shingle_batch(taken.column("text"), minhash)
            sets = [np.unique(found.hashes[a:b]) for a, b in pairwise(found.offsets.tolist())]
            rows["size"] = [one.nbytes for one in sets]
            run.write(rows, np.concatenate([np.empty(0, np.uint64), *sets]).view(np.uint8))
            count += len(drawn)
            size += int(np.diff(text_offsets(taken.column("text"))).sum())
    return Proposed(count, size)


def make_table(folder: Path, piece: Slice) -> dict[str, int]:
    """Write the table of a range of proposed documents: which of them have an n-gram."""
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
    return {"documents": len(rows), "ngrams": len(unique)}


_CANDIDATE = np.dtype(
    [("key", "<u8"), ("row", "<u4"), ("part", "<i4"), ("source", "<i4"), ("split", "<i4"), ("ngrams", "<i8")]
)


@dataclass(frozen=True, slots=True)
class _NgramTable:
    """The proposed documents of a range, ascending by key, and which of them have an n-gram."""

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
    minhash: MinHashConfig,
    similarity: float,
    limits: Limits,
) -> dict[str, int]:
    """Write the keys of the proposed documents in `table` that are like another document of this split."""
    for name in (_CANDIDATES, _HASHES, _STARTS, _MEMBERS):
        (table / name).local()
    loaded = _load_table(table.path)
    alike = np.zeros(len(loaded.keys), np.bool_)
    for _, batch, kept in _left(documents, removed) if len(alike) else ():
        taken = batch.take(pa.array(kept)) if len(kept) < batch.num_rows else batch
        found = shingle_batch(taken.column("text"), minhash)
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
    return {"alike": len(rows)}


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
    """Set `alike` of the proposed documents that are like a text; `own` is a text's own number, or -1.

    `matches` are (n-gram of the texts, number in the table) ascending, `offsets` the n-grams of each text.
    """
    distinct = np.zeros(len(ngrams), np.int64)
    positions = np.zeros(len(ngrams), np.int64)
    touched = np.empty(len(ngrams), np.int64)
    seen = np.full(len(starts), -1, np.int64)  # the last text that had an n-gram
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
class Chosen(PlainCounts):
    """Documents of a range of hashes that were proposed, and that are like no other, by part and source."""

    proposed: list[list[int]]
    clean: list[list[int]]


def choose(folder: Path, alike: Slice, table: Artifact, parts: int, sources: int) -> Chosen:
    """Write the proposed documents of a range that are like no other one, by hash."""
    with (table / _CANDIDATES).open() as file:
        described = np.load(file)
    keys, _ = alike.read()
    clean = described[~np.isin(described["key"], keys["key"])]
    np.save(folder / _CHOSEN, clean)
    return Chosen(*(_counted(rows, parts, sources) for rows in (described, clean)))


def _counted(rows: npt.NDArray[np.void], parts: int, sources: int) -> list[list[int]]:
    cells = rows["part"].astype(np.int64) * sources + rows["source"]
    counts: list[list[int]] = np.bincount(cells, minlength=parts * sources).reshape(parts, sources).tolist()
    return counts


def take(
    folder: Path,
    chosen: Artifact,
    quota: Sequence[Quota],
    spares: Sequence[Quota] | None,
    sources: int,
    limits: Limits,
) -> dict[str, Any]:
    """Write the documents that are taken, the lowest hashes first: `quota` of those proposed for each part.

    `spares`: how many of what these leave each part gets as well. The counts are those taken of each part and
    source, and those left of each source.
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
    return {"taken": _counted(taken, len(quota), sources), "spare": spare}


def _give(given: Int32s, part: int, room: Quota, source: Int32s, free: Bools) -> None:
    """Give a part the first `room` of the rows that are `free`, or so many of each source."""
    if isinstance(room, int):
        given[np.flatnonzero(free)[:room]] = part
        return
    for number, most in enumerate(room):
        given[np.flatnonzero(free & (source == number))[:most]] = part
