"""Near-duplicate removal, from documents to who is removed.

`remove_near` runs all stages in order; a build calls it between exact removal and tokenizing.
`find_near_duplicates` does the same for any files of documents.

    word_keys   split -> keys of its documents' words, if there is an index (known.py)
    known       range of these keys, and those of indexes -> documents that are in an index already
    signatures  split -> its part of the population, without these
    equal       range of word keys -> documents with the same words as another
    bands       part -> band keys of the other documents
    candidates  range of band keys, and those of indexes -> pairs
    near_blocks range of documents: their pairs -> blocks of pairs of documents that are alike (blocks.py)
    shingles    part, and the blocks of its documents -> texts or sets of n-grams, sent to blocks
    verify      block of pairs, and the texts of their documents -> edges
    near        edges -> removed documents (its stages are in shardkit.writers.dedup.resolve: near_equal, …)

No stage has a task that reads an index as a whole (index.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardkit.errors import warn_user
from shardkit.hashing import digest_of, hash_file
from shardkit.progress import make_listener
from shardkit.writers.dedup.bands import BANDS
from shardkit.writers.dedup.bands import partitions_for as band_partitions
from shardkit.writers.dedup.blocks import PAIRS_OF_BLOCK, PLACES, block_bits, put_into_blocks
from shardkit.writers.dedup.candidates import CANDIDATES, CandidateCounts
from shardkit.writers.dedup.compare import PairRule
from shardkit.writers.dedup.config import NearDedupConfig
from shardkit.writers.dedup.exact import find_copies, partition_bounds
from shardkit.writers.dedup.index import BANDS_OF_INDEX, DedupIndex, keys_of
from shardkit.writers.dedup.known import Known, find_known
from shardkit.writers.dedup.outcomes import (
    OUTCOMES,
    SplitRemovals,
    SplitTable,
    by_split,
    document_keys,
    write_tables,
)
from shardkit.writers.dedup.population import (
    BANDS_FILE,
    PARTS,
    PARTS_FILE,
    PRINTS_FILE,
    STARTS_FILE,
    Part,
    Population,
    PopulationFile,
    SplitDocuments,
)
from shardkit.writers.dedup.resolve import EQUALS, LOSERS_FILE, WINNERS_FILE, Resolved, resolve
from shardkit.writers.dedup.shingle_store import SHINGLES, TEXTS
from shardkit.writers.dedup.signatures import (
    EQUAL_KEYS,
    LOST,
    MAKE_BANDS,
    SIGN,
    SignedPart,
    bands_and_rows,
)
from shardkit.writers.dedup.verify import VERIFY, VerifiedBlock
from shardkit.writers.exchange.exchange import RunWriter, Slice, exchange
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS, Limits
from shardkit.writers.execution.artifacts import Artifact, Files
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.digests import MemoryBytes
from shardkit.writers.execution.engine import InlineEngine, LocalEngine
from shardkit.writers.execution.runner import Journal, Runner
from shardkit.writers.execution.stage import RunTasks, Stage, partition_name
from shardkit.writers.execution.work import Work


@dataclass(frozen=True)
class NearResult:
    """The result of near-duplicate removal.

    Per split, `lost` has the commit with the removed documents, `kept` the commit with the documents that
    represent others, and `parts` the commit with the signatures. `known` has the removed documents whose
    words an index has, which are in none of these. `removed` has the decisions per split. `counts` are facts
    for the dataset card.
    """

    lost: Sequence[Commit]
    kept: Sequence[Commit]
    decided: Resolved
    removed: Sequence[SplitTable]
    parts: Sequence[Commit]
    known: Known
    counts: Mapping[str, int]


def remove_near(
    run: RunTasks,
    splits: Sequence[SplitDocuments],
    removals: Sequence[SplitRemovals],
    config: NearDedupConfig,
    memory_bytes: int,
    *,
    indexes: Sequence[DedupIndex] = (),
    limits: Limits = DEFAULT_LIMITS,
    to_index: bool = False,
) -> NearResult:
    """Run all stages of near-duplicate removal.

    `removals` are the earlier removals of each split. Documents of `indexes` have priority over all inputs.
    `memory_bytes` limits the memory of one task; `limits` apply to exchanges. With `to_index`, the files of
    the parts that an index is made of stay.
    """
    known = find_known(run, splits, removals, config.minhash, indexes, memory_bytes, limits)
    how, tasks = (config.minhash, *bands_and_rows(config), config.scope), []
    for split, gone in zip(splits, known.removals, strict=True):
        args = split.documents, gone, *how, split.languages, memory_bytes
        tasks.append(SIGN.task(split.name, split.bytes, *args))
    [signed] = run(tasks)
    described = [SIGN.result(commit) for commit in signed]
    _warn_of_unspaced(described)
    parts = [Part(commit.files, one.documents) for commit, one in zip(signed, described, strict=True)]
    population = Population.of([*parts, *(part for index in indexes for part in index.parts)])
    stored = _store(run, population, signed, consumed=not to_index)

    equal = _find_equal(run, signed, population, stored, memory_bytes, limits, consumed=not to_index)
    names = [split.name for split in splits]
    names += [f"index-{number:05d}" for number in range(len(population.parts) - len(splits))]
    band_keys = [replace(commit.file(BANDS_FILE), goes=not to_index) for commit in signed]
    candidates = _pair(
        run, names, population, stored, band_keys, equal, indexes, config, memory_bytes, limits
    )
    verified = _verify(run, names, population, splits, candidates, config, memory_bytes, limits)
    compared = [VERIFY.result(commit) for commit in verified]
    edges = sum(block.verified for block in compared)
    equals = sum(EQUAL_WORDS.result(commit) for commit in equal)
    decided, lost, kept = resolve(
        run,
        parts,
        verified,
        equal,
        edges=edges,
        equals=equals,
        memory_bytes=memory_bytes,
        indexed=population.count("index"),
        limits=limits,
    )
    decided, found = known.added_to(decided), [*lost, *kept, *known.commits]
    move = partial(by_split, run, limits=limits, consumed=not known.commits)
    removed = move(NEAR_REMOVED, OUTCOMES, found, len(splits))
    met = [CANDIDATES.result(one) for one in candidates]
    counts = _counts(population, described, met, compared, decided, known)
    return NearResult(lost, kept, decided, removed, signed, known, counts)


def _find_equal(
    run: RunTasks,
    signed: Sequence[Commit],
    population: Population,
    stored: PopulationFile,
    memory_bytes: int,
    limits: Limits,
    *,
    consumed: bool,
) -> list[Commit]:
    """Find documents that have the same words as another one; `consumed` is as in `exchange`."""
    readers = limits.partitions(population.count("input"), EQUAL_KEYS.dtype)
    keys = exchange(run, EQUAL_WORDS, EQUAL_KEYS, signed, readers=readers, limits=limits, consumed=consumed)
    tasks = []
    for number in range(readers):
        piece = keys.slice(*partition_bounds(number, readers))
        name = partition_name(number, readers)
        tasks.append(EQUAL_WORDS.task(name, piece.bytes, piece, stored.starts, memory_bytes))
    [equal] = run(tasks)
    return equal


def _store(
    run: RunTasks, population: Population, signed: Sequence[Commit], *, consumed: bool
) -> PopulationFile:
    """Run a task that stores the locations of all parts in files, so that task arguments stay short.

    With `consumed`, no stage after those that are given the result reads the prints of `signed`.
    """
    inputs, others = population.parts[: population.inputs], population.parts[population.inputs :]
    named = [(part.folder.path.name, part.documents) for part in inputs]
    [[written]] = run([PARTS.task("parts", 0, named, [part.documents for part in others])])
    names, starts = written.file(PARTS_FILE), written.file(STARTS_FILE)
    first = inputs[0].folder if inputs else written.files
    content = digest_of([part.folder.content for part in population.parts])
    folder = Artifact(first.path.parent, first.remote)
    prints = Files.of([commit.file(PRINTS_FILE) for commit in signed], content) if signed else None
    return PopulationFile(names, starts, folder, tuple(others), content, prints, consumed)


def _pair(
    run: RunTasks,
    names: Sequence[str],
    population: Population,
    stored: PopulationFile,
    band_keys: Sequence[Artifact],
    equal: Sequence[Commit],
    indexes: Sequence[DedupIndex],
    config: NearDedupConfig,
    memory_bytes: int,
    limits: Limits,
) -> list[Commit]:
    """Find candidate pairs among documents that were not removed for equal words.

    `names` are the names of the tasks of each part, and `band_keys` the files with the keys of each.
    """
    (bands, _), parts = bands_and_rows(config), len(band_keys)
    lost = exchange(run, MAKE_BANDS, LOST, equal, readers=parts, end=parts << 32, limits=limits)
    tasks = []
    for number, file in enumerate(band_keys):
        first, own = int(population.starts[number]), lost.slice(number << 32, number + 1 << 32)
        weight = population.parts[number].documents
        tasks.append(MAKE_BANDS.task(names[number], weight, file, first, own, memory_bytes))
    [keys] = run(tasks)
    end = population.count("input")
    partitions = band_partitions(end * bands, memory_bytes)
    moved = exchange(run, CANDIDATES, BANDS, keys, readers=partitions, limits=limits)
    tasks = []
    for number in range(partitions):
        bounds = partition_bounds(number, partitions)
        piece, indexed = moved.slice(*bounds), keys_of(indexes, BANDS_OF_INDEX, end, *bounds)
        name, args = partition_name(number, partitions), (stored, config.similarity, memory_bytes)
        tasks.append(CANDIDATES.task(name, piece.bytes, piece, indexed, *args))
    [candidates] = run(tasks)
    return candidates


def _verify(
    run: RunTasks,
    names: Sequence[str],
    population: Population,
    splits: Sequence[SplitDocuments],
    candidates: Sequence[Commit],
    config: NearDedupConfig,
    memory_bytes: int,
    limits: Limits,
) -> list[Commit]:
    """Put pairs into blocks, send the texts of their documents there, and verify the blocks."""
    parts, starts, end = population.parts, population.starts.tolist(), int(population.starts[-1])
    bits = block_bits(sum(split.bytes for split in splits), memory_bytes)
    assigned = put_into_blocks(run, candidates, end, bits, memory_bytes, limits)
    places = exchange(run, SHINGLES, PLACES, assigned, readers=len(parts), end=end, limits=limits)
    documents = [*(split.documents for split in splits), *[None] * (len(parts) - len(splits))]
    tasks = []
    for number, (part, texts) in enumerate(zip(parts, documents, strict=True)):
        own = places.slice(starts[number], starts[number + 1])
        tasks.append(SHINGLES.task(names[number], part.documents, part, texts, own, memory_bytes))
    [sent] = run(tasks)

    blocks = 1 << bits
    move = partial(exchange, run, VERIFY, readers=blocks, end=blocks)
    pairs_of = move(PAIRS_OF_BLOCK, assigned, limits=limits)
    texts_of = move(TEXTS, sent, limits=limits)
    rule, tasks = PairRule.of(config), []
    for block in range(blocks):
        some, own = (moved.slice(block, block + 1) for moved in (pairs_of, texts_of))
        if some.runs:
            weight = some.bytes + own.bytes
            tasks.append(VERIFY.task(partition_name(block, blocks), weight, some, own, rule, memory_bytes))
    [verified] = run(tasks)
    return verified


def _counts(
    population: Population,
    signed: Sequence[SignedPart],
    met: Sequence[CandidateCounts],
    compared: Sequence[VerifiedBlock],
    decided: Resolved,
    known: Known,
) -> Mapping[str, int]:
    """Return the counts of near-duplicate removal for the dataset card."""
    return {
        "documents": population.count("input") + known.counts.losers,
        "wordless": sum(part.wordless for part in signed),
        "indexed": population.count("index"),
        "candidates": sum(block.pairs for block in compared),
        "verified": decided.edges,
        "estimated": sum(block.estimated for block in compared),
        "hubs": sum(one.hubs for one in met),
        "largest_bucket": max((one.largest_bucket for one in met), default=0),
        "bounded": sum(one.bounded for one in met),
        "edges": decided.edges,
        "equal": decided.equal,
        "copies": decided.copies,
        "kept_by_index": decided.kept_by_index,
    }


def _warn_of_unspaced(signed: Sequence[SignedPart]) -> None:
    """Warn if at least 1 % of the documents are in scripts without spaces, where a "word" is a sentence."""
    documents, unspaced = sum(part.documents for part in signed), sum(part.unspaced for part in signed)
    if unspaced and unspaced * 100 >= documents:
        warn_user(
            f"dedup.near: {unspaced:,} of {documents:,} documents are written without spaces (such as "
            "Chinese or Thai), so most near-duplicates among them are missed; set "
            "dedup.near.minhash.unit: auto"
        )


def find_equal(folder: Path, keys: Slice, starts: Artifact, memory_bytes: MemoryBytes) -> int:
    """Write the documents that are removed because another has equal words; return their number.

    `keys` is one range of word keys. `starts` is the file with the number of each part's first document.
    """
    first: npt.NDArray[np.int64] = np.load(starts.local(), mmap_mode="r")
    losers, share = 0, memory_bytes // 8
    with (
        RunWriter(folder / LOST.file, LOST, memory_bytes=share) as lost,
        RunWriter(folder / EQUALS.file, EQUALS, memory_bytes=share) as equals,
    ):
        for found in find_copies(keys, memory_bytes, order="longest_of_source"):
            rows = np.empty(len(found.lost), EQUALS.dtype)
            rows["key"] = first[found.kept["split"]] + found.kept["row"]
            rows["loser"] = first[found.lost["split"]] + found.lost["row"]
            rows["rank"] = found.kept["id"]
            equals.write(rows)
            lost.write(document_keys(found.lost["split"], found.lost["row"]).view(LOST.dtype))
            losers += len(rows)
    return losers


EQUAL_WORDS = Stage("equal", "near-duplicates", find_equal, cost=0.4)


NEAR_REMOVED = Stage("near_removed", "near-duplicates", write_tables)


@dataclass(frozen=True)
class NearDuplicates:
    """The result of `find_near_duplicates`; `split` is the index of a file, `row` a row in that file."""

    losers: npt.NDArray[np.void]
    """Removed documents, of dtype resolve.NEAR_LOSER, sorted by (split, row)."""
    winners: npt.NDArray[np.void]
    """Kept documents that represent others too, of dtype resolve.WINNER_DTYPE."""
    result: NearResult
    seconds: Mapping[str, float]


def find_near_duplicates(
    documents: Sequence[Path],
    config: NearDedupConfig,
    *,
    folder: Path,
    memory_bytes: int = 512 << 20,
    workers: int = 0,
    indexes: Sequence[DedupIndex] = (),
    to_index: bool = False,
) -> NearDuplicates:
    """Find near-duplicates among documents in Arrow files of DOCUMENT_SCHEMA, whose ids are distinct.

    `folder` is the work folder; finished tasks in it are reused. With 0 `workers` tasks run in this process.
    `memory_bytes` limits the memory of one task; `to_index` is as in `remove_near`. Equal documents are
    near-duplicates, too.
    """
    splits = []
    for number, path in enumerate(documents):
        file = Artifact(path, content=hash_file(path, ["xxh3_128"])["xxh3_128"])
        splits.append(SplitDocuments(f"{number:05d}", file, path.stat().st_size))
    removals = [SplitRemovals()] * len(splits)
    engine = LocalEngine(workers, modules=[__name__]) if workers else InlineEngine()
    with Journal(Work.at(folder)) as journal, engine, make_listener(False) as listener:
        runner = Runner(journal, engine, listener)
        result = runner.complete(
            lambda: remove_near(
                runner.run, splits, removals, config, memory_bytes, indexes=indexes, to_index=to_index
            )
        )
    losers, winners = (
        np.concatenate([np.load(commit.folder / name) for commit in commits])
        for commits, name in ((result.lost, LOSERS_FILE), (result.kept, WINNERS_FILE))
    )
    if result.known.commits:
        known = result.known.rows()
        known["kept"] += np.uint64(
            result.counts["documents"] - len(known)
        )  # the number of compared documents
        losers = np.sort(np.concatenate([losers, known]), order=("split", "row"))
    return NearDuplicates(losers, winners, result, dict(runner.seconds))
