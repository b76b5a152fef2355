"""Near-duplicate removal, from documents to who is removed.

`remove_near` strings the stages together; a build calls it between exact removal and tokenizing.
`find_near_duplicates` is the same for anyone's files of documents. `NearStages` makes the tasks of each stage
and says what they depend on:

    signatures  split -> its part of the population
    equal       range of word keys -> documents whose words others have
    bands       part -> band keys of the other documents
    candidates  range of band keys -> pairs
    shingles    part, and the pairs of its documents -> their sets of n-grams, sent to blocks of pairs
    verify      block of documents: pairs, and sets of both sides -> edges
    near        edges -> who is removed (shardkit.writers.dedup.resolve has its stages: near_equal, …)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardkit.errors import BuildError, warn_user
from shardkit.hashing import digest_of, hash_file
from shardkit.progress import make_listener
from shardkit.writers.dedup.bands import BANDS
from shardkit.writers.dedup.bands import partitions_for as band_partitions
from shardkit.writers.dedup.candidates import (
    PAIRS_BY_FIRST,
    PAIRS_BY_SECOND,
    CandidateCounts,
    find_candidates,
)
from shardkit.writers.dedup.config import NearDedupConfig
from shardkit.writers.dedup.exact import KEYS, find_copies, partition_bounds
from shardkit.writers.dedup.index import DedupIndex, key_runs
from shardkit.writers.dedup.population import (
    LanguageLabels,
    Part,
    Population,
    PopulationFile,
    SplitDocuments,
    write_parts,
)
from shardkit.writers.dedup.removals import (
    OUTCOMES,
    SplitRemovals,
    SplitTable,
    by_split,
    document_keys,
)
from shardkit.writers.dedup.resolve import EQUALS, LOSERS_FILE, WINNERS_FILE, Resolved, resolve
from shardkit.writers.dedup.shingle_store import GUESTS, OWN, write_sets
from shardkit.writers.dedup.signatures import (
    LOST,
    SignedPart,
    bands_and_rows,
    part_settings,
    sign_documents,
    value_groups,
    write_bands,
)
from shardkit.writers.dedup.verify import VerifiedBlock, block_bits, verify_block
from shardkit.writers.exchange import Exchanged, RunWriter, Segment, Slice, exchange
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.engine import InlineEngine, LocalEngine
from shardkit.writers.execution.runner import Journal, Runner
from shardkit.writers.execution.task import Commit, PlainCounts, RunTasks, Task, partition_name
from shardkit.writers.kernels.words import normalization_version
from shardkit.writers.runs import DEFAULT_LIMITS, Limits

__all__ = [
    "NearDuplicates",
    "NearResult",
    "NearStages",
    "find_equal",
    "find_near_duplicates",
    "remove_near",
]


@dataclass(frozen=True)
class NearStages:
    """Makes the tasks of each stage. `memory_bytes` bounds what one task holds, `limits` are of exchanges."""

    config: NearDedupConfig
    splits: Sequence[SplitDocuments]
    removals: Sequence[SplitRemovals]
    memory_bytes: int
    seed: int
    limits: Limits = DEFAULT_LIMITS

    def signature_tasks(self) -> list[Task]:
        """One task a split."""
        config = {
            "dedup.near": part_settings(self.config),
            "normalization": normalization_version(),
        }
        tasks = []
        for split, removed in zip(self.splits, self.removals, strict=True):
            inputs = {"documents": split.digest, "removed": removed.digest}
            args = (split.documents, removed, self.config, self.memory_bytes, split.languages)
            tasks.append(Task("signatures", split.name, config, _sign, args, split.bytes, inputs))
        return tasks

    def splits_file(self, run: RunTasks, signed: Sequence[Commit]) -> PopulationFile:
        """Write where the splits' parts and documents are, by a task of its own."""
        folders = [split.documents.path.parent for split in self.splits]
        texts = Path(os.path.commonpath(folders)) if folders else Path()
        parts = []
        for split, commit in zip(self.splits, signed, strict=True):
            name = split.documents.path.relative_to(texts).as_posix()
            parts.append((commit.files.path.name, SignedPart.of(commit).documents, name))
        task = Task("parts", "parts", {}, write_parts, (parts,), inputs={"parts": digest_of(parts)})
        [[written]] = run([task])
        inputs = Artifact(signed[0].folder.parent, signed[0].remote) if signed else written.files
        remote = self.splits[0].documents.remote if self.splits else None
        return PopulationFile(written.files, inputs, Artifact(texts, remote))

    def equal_tasks(
        self,
        run: RunTasks,
        population: Population,
        file: PopulationFile,
        keys: Sequence[Commit | Segment],
    ) -> list[Task]:
        """One task a range of word keys; `keys` holds those of each part."""
        partitions = self.limits.partitions(int(population.starts[-1]), KEYS.dtype)
        exchanged = exchange(run, "equal", KEYS, keys, readers=partitions, limits=self.limits)
        first_index = len(self.splits)
        starts = digest_of(population.starts.tolist())
        tasks = []
        for number in range(partitions):
            mine = exchanged.slice(*partition_bounds(number, partitions))
            inputs = {"keys": mine.digest, "starts": starts, "first_index": str(first_index)}
            args = (mine, file, first_index, self.memory_bytes)
            name = partition_name(number, partitions)
            tasks.append(Task("equal", name, {}, find_equal, args, mine.bytes, inputs))
        return tasks

    def band_tasks(self, population: Population, lost: Exchanged) -> list[Task]:
        """One task a part; `lost` are the documents that lost to equal words."""
        tasks = []
        starts = population.starts.tolist()
        for number, part in enumerate(population.parts):
            first = starts[number]
            mine = lost.slice(number << 32, number + 1 << 32)
            config = {"dedup.near": part_settings(self.config), "first": first}
            inputs = {"part": part.digest, "lost": mine.digest}
            args = (part, first, mine, self.config, self.memory_bytes)
            name = self._part_name(number)
            tasks.append(Task("bands", name, config, write_bands, args, part.documents, inputs))
        return tasks

    def candidate_tasks(
        self,
        run: RunTasks,
        population: Population,
        file: PopulationFile,
        digest: str,
        bands: Sequence[Commit],
    ) -> list[Task]:
        """One task a range of band keys."""
        entries = int(population.starts[-1]) * bands_and_rows(self.config)[0]
        partitions = band_partitions(entries, self.memory_bytes)
        exchanged = exchange(run, "bands", BANDS, bands, readers=partitions, limits=self.limits)
        tasks = []
        for number in range(partitions):
            mine = exchanged.slice(*partition_bounds(number, partitions))
            config = {"dedup.near.similarity": self.config.similarity}
            inputs = {"parts": digest, "bands": mine.digest}
            args = (mine, file, self.config.similarity, self.memory_bytes)
            name = partition_name(number, partitions)
            tasks.append(Task("candidates", name, config, _find_candidates, args, mine.bytes, inputs))
        return tasks

    def _part_name(self, number: int) -> str:
        inputs = len(self.splits)
        return self.splits[number].name if number < inputs else f"index-{number - inputs:05d}"

    def shingle_tasks(
        self, population: Population, firsts: Exchanged, seconds: Exchanged, bits: int
    ) -> list[Task]:
        """One task a part: `firsts` and `seconds` are the pairs by either side, `bits` those of a block."""
        settings = {"dedup.near": part_settings(self.config), "block_bits": bits}
        sources = [(split.name, split.documents, split.digest) for split in self.splits]
        for number in population.parts_of("index"):
            part = population.parts[number]
            sources.append((self._part_name(number), part.folder, part.digest))
        tasks = []
        starts = population.starts.tolist()
        for number, (name, documents, digest) in enumerate(sources):
            part = population.parts[number]
            sides = [pairs.slice(starts[number], starts[number + 1]) for pairs in (firsts, seconds)]
            inputs = {"documents": digest, "part": part.digest, "pairs": [side.digest for side in sides]}
            args = (part, documents, *sides, self.config.minhash, bits, self.memory_bytes)
            tasks.append(Task("shingles", name, settings, write_sets, args, part.documents, inputs))
        return tasks

    def verify_tasks(
        self, population: Population, pairs: Exchanged, own: Exchanged, guests: Exchanged, bits: int
    ) -> list[Task]:
        """One task a block of documents: the first of a pair is an input's."""
        names = ("similarity", "containment", "small_shingles", "small_repetition", "small_similarity")
        rule = {f"dedup.near.{name}": getattr(self.config, name) for name in names}
        rule |= {"dedup.near": part_settings(self.config)}
        tasks = []
        for start in range(0, population.count("input"), 1 << bits):
            slices = [table.slice(start, start + (1 << bits)) for table in (pairs, own, guests)]
            if not slices[0].runs:
                continue
            inputs = {piece.table.file: piece.digest for piece in slices}
            args = (*slices, self.config, self.memory_bytes)
            weight = sum(piece.bytes for piece in slices)
            tasks.append(Task("verify", f"{start:012d}", rule, verify_block, args, weight, inputs))
        return tasks


def _sign(
    folder: Path,
    documents: Artifact,
    removed: SplitRemovals,
    config: NearDedupConfig,
    memory_bytes: int,
    languages: LanguageLabels | None,
) -> SignedPart:
    gone = removed.load()
    groups = None if languages is None else value_groups(languages.labels)[languages.read()]
    return sign_documents(documents, gone, config, folder, memory_bytes=memory_bytes, groups=groups)


@dataclass(frozen=True, slots=True)
class EqualWords(PlainCounts):
    """Documents whose words another one has, and that lose to it."""

    losers: int


def find_equal(
    folder: Path, keys: Slice, population: PopulationFile, first_index: int, memory_bytes: int
) -> EqualWords:
    """Parts from `first_index` on are of indexes."""
    starts = population.load().starts
    losers, share = 0, memory_bytes // 8
    with (
        RunWriter(folder / LOST.file, LOST, memory_bytes=share) as lost,
        RunWriter(folder / EQUALS.file, EQUALS, memory_bytes=share) as equals,
    ):
        # Several indexes may hold the same document: the first one keeps it.
        for found in find_copies(keys, memory_bytes, order="longest_of_source", above=first_index):
            rows = np.empty(len(found.lost), EQUALS.dtype)
            rows["key"] = _numbers(found.kept, starts, first_index)
            rows["loser"] = _numbers(found.lost, starts, first_index)
            rows["rank"] = found.kept["id"]
            equals.write(rows)
            lost.write(document_keys(found.lost["split"], found.lost["row"]).view(LOST.dtype))
            losers += len(rows)
    return EqualWords(losers)


def _numbers(
    keys: npt.NDArray[np.void], starts: npt.NDArray[np.int64], first_index: int
) -> npt.NDArray[np.int64]:
    """The documents' numbers. BuildError: a part, which someone else may have made, has no such row."""
    numbers: npt.NDArray[np.int64] = starts[keys["split"]] + keys["row"]
    wrong = numbers >= starts[keys["split"] + 1]
    if wrong.any():
        part = int(keys["split"][wrong.argmax()]) - first_index
        raise BuildError(
            f"dedup.near.against: part {part} of the indexes: {KEYS.file} names a document that is not in "
            "the part; make the index again"
        )
    return numbers


def _find_candidates(
    folder: Path, entries: Slice, file: PopulationFile, similarity: float, memory_bytes: int
) -> CandidateCounts:
    population = file.load()
    return find_candidates(entries, population, folder, similarity=similarity, memory_bytes=memory_bytes)


@dataclass(frozen=True)
class NearResult:
    """`lost` and `kept` are the tasks that wrote who is removed, and what the others represent, of each part;
    `parts` those of the splits' signatures.

    `removed` is what they decided about each split's documents. `counts` are facts for the dataset card.
    """

    lost: Sequence[Commit]
    kept: Sequence[Commit]
    decided: Resolved
    removed: Sequence[SplitTable]
    parts: Sequence[Commit]
    counts: Mapping[str, int]


def _warn_of_unspaced(signed: Sequence[SignedPart]) -> None:
    """Warn if a hundredth of the documents is of scripts without spaces, of which words tell little."""
    documents, unspaced = sum(part.documents for part in signed), sum(part.unspaced for part in signed)
    if unspaced and unspaced * 100 >= documents:
        warn_user(
            f"dedup.near: {unspaced:,} of {documents:,} documents are written without spaces (as Chinese and "
            "Thai), so near-duplicates among them are hardly found; set dedup.near.minhash.unit: auto"
        )


def remove_near(run: RunTasks, stages: NearStages, indexes: Sequence[DedupIndex] = ()) -> NearResult:
    """Run all stages. The documents of `indexes` win over all of the splits'."""
    [signed] = run(stages.signature_tasks())
    _warn_of_unspaced([SignedPart.of(commit) for commit in signed])
    file = stages.splits_file(run, signed)
    parts = [Part(commit.files, SignedPart.of(commit).documents, digest=commit.content) for commit in signed]
    population = Population((*parts, *(part for index in indexes for part in index.parts)))
    digest = digest_of([commit.content for commit in signed] + [index.digest for index in indexes])
    keys = [*signed, *key_runs(run, indexes, stages.memory_bytes)]
    file = replace(file, others=tuple(population.parts[len(signed) :]))
    [equal] = run(stages.equal_tasks(run, population, file, keys))
    parts, parts_end = list(population.parts), len(population.parts) << 32
    lost = exchange(run, "lost", LOST, equal, readers=len(parts), end=parts_end, limits=stages.limits)
    [bands] = run(stages.band_tasks(population, lost))
    [candidates] = run(stages.candidate_tasks(run, population, file, digest, bands))
    verified = _verify(run, stages, population, candidates)
    compared = [VerifiedBlock.of(commit) for commit in verified]
    edges = sum(block.verified for block in compared)
    equals = sum(EqualWords.of(commit).losers for commit in equal)
    memory_bytes, limits = stages.memory_bytes, stages.limits
    decided, removals, kept = resolve(
        run, parts, verified, equal, edges=edges, equals=equals, memory_bytes=memory_bytes, limits=limits
    )
    rows = [*removals, *kept]
    removed = by_split(run, "near_removed", OUTCOMES, rows, len(stages.splits), limits=limits)
    met = [CandidateCounts.of(commit) for commit in candidates]
    counts = {
        "documents": population.count("input"),
        "wordless": sum(SignedPart.of(commit).wordless for commit in signed),
        "indexed": population.count("index"),
        "candidates": sum(block.pairs for block in compared),
        "verified": edges,
        "hubs": sum(one.hubs for one in met),
        "largest_bucket": max((one.largest_bucket for one in met), default=0),
        "bounded": sum(one.bounded for one in met),
        "edges": decided.edges,
        "equal": decided.equal,
        "copies": decided.copies,
        "kept_by_index": decided.kept_by_index,
    }
    return NearResult(removals, kept, decided, removed, signed, counts)


def _verify(
    run: RunTasks, stages: NearStages, population: Population, candidates: Sequence[Commit]
) -> list[Commit]:
    """Send pairs to the parts of both documents and their sets to the blocks of pairs; verify these."""
    end, inputs = int(population.starts[-1]), population.count("input")
    text_bytes = sum(split.bytes for split in stages.splits)
    bits = block_bits(inputs, text_bytes, stages.memory_bytes)
    blocks = -(-inputs // (1 << bits))
    parts = len(population.parts)
    move = partial(exchange, run, end=end, limits=stages.limits)
    firsts = move("pairs", PAIRS_BY_FIRST, candidates, readers=max(parts, blocks))
    seconds = move("partners", PAIRS_BY_SECOND, candidates, readers=parts)
    [shingles] = run(stages.shingle_tasks(population, firsts, seconds, bits))
    own = move("own", OWN, shingles, readers=blocks)
    guests = move("guests", GUESTS, shingles, readers=blocks)
    [verified] = run(stages.verify_tasks(population, firsts, own, guests, bits))
    return verified


@dataclass(frozen=True)
class NearDuplicates:
    """What `find_near_duplicates` found; rows are those of the files of documents, `split` the file."""

    losers: npt.NDArray[np.void]
    """resolve.NEAR_LOSER, sorted by (split, row)."""
    winners: npt.NDArray[np.void]
    """resolve.WINNER_DTYPE: kept documents that stand for more than themselves."""
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
    seed: int = 17,
) -> NearDuplicates:
    """Near-duplicates among documents in Arrow files of DOCUMENT_SCHEMA, whose ids are distinct.

    Works in `folder`, where finished tasks are found again; with 0 `workers` in this process. `memory_bytes`
    bounds what one task holds. Equal documents are near-duplicates, too.
    """
    splits = []
    for number, path in enumerate(documents):
        digest = hash_file(path, ["xxh3_128"])["xxh3_128"]
        splits.append(SplitDocuments(f"{number:05d}", Artifact(path), digest, path.stat().st_size))
    stages = NearStages(config, splits, [SplitRemovals()] * len(splits), memory_bytes, seed)
    engine = LocalEngine(workers, modules=[__name__]) if workers else InlineEngine()
    with Journal(folder) as journal, engine, make_listener(False) as listener:
        runner = Runner(journal, engine, listener)
        result = remove_near(runner.run, stages, indexes)
    losers, winners = (
        np.concatenate([np.load(commit.folder / name) for commit in commits[: len(documents)]])
        for commits, name in ((result.lost, LOSERS_FILE), (result.kept, WINNERS_FILE))
    )
    return NearDuplicates(losers, winners, result, dict(runner.seconds))
