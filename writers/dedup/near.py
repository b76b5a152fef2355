"""Near-duplicate removal, from documents to who is removed.

`remove_near` strings the stages together; a build calls it between exact removal and
tokenizing. `find_near_duplicates` is the same for anyone's files of documents.

Near-duplicate removal as tasks: what each depends on, and the functions that workers run.

signatures  split -> part            planted     sample -> near-duplicates of known similarity, a part
equal       partition of word keys -> documents whose words others have
equal_mask  -> one bit a document    candidates  partition of band keys -> pairs
shingles    part -> sets of n-grams of the documents in pairs
verify      block of documents -> edges      near   all edges -> who is removed
measure     what was found of what was planted, and whether what was removed was alike
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.hashing import digest_of, hash_file
from shardkit.progress import make_listener
from shardkit.writers.dedup.bands import partitions_for as band_partitions
from shardkit.writers.dedup.candidates import NUMBERS_FILE, find_candidates
from shardkit.writers.dedup.config import NearDedupConfig
from shardkit.writers.dedup.exact import LOSER_DTYPE, find_losers
from shardkit.writers.dedup.exact import partitions_for as key_partitions
from shardkit.writers.dedup.index import DedupIndex, copy_sketches
from shardkit.writers.dedup.measure import PLANTED_FILE, measure_precision, measure_recall, plant
from shardkit.writers.dedup.measure import TEXTS_FILE as PLANTED_DOCUMENTS
from shardkit.writers.dedup.population import DOCUMENT, DOCUMENTS_FILE, Part, Population
from shardkit.writers.dedup.removals import LOSERS_FILE, WINNERS_FILE, Removals, Removed
from shardkit.writers.dedup.resolve import resolve
from shardkit.writers.dedup.shingle_store import ShingleWriter
from shardkit.writers.dedup.signatures import KEYS_FILE, bands_and_rows, part_settings, sign_documents
from shardkit.writers.dedup.tables import Rows
from shardkit.writers.dedup.verify import EDGES_FILE, plan_blocks, verify_block
from shardkit.writers.execution.engine import InlineEngine
from shardkit.writers.execution.engine_local import LocalEngine
from shardkit.writers.execution.runner import Journal, Runner
from shardkit.writers.execution.task import Commit, Task, contents, partition_name
from shardkit.writers.execution.work_files import local, open_arrow, read_bytes
from shardkit.writers.kernels.shingles import shingle_batch
from shardkit.writers.kernels.words import normalization_version

__all__ = [
    "NearDuplicates",
    "NearResult",
    "NearStages",
    "SplitDocuments",
    "find_near_duplicates",
    "population_of",
    "remove_near",
]

MASK_FILE = "removed.bin"  # one bit a document, the lowest first

_PLANTED_SOURCE = 1 << 30  # after all inputs


@dataclass(frozen=True, slots=True)
class SplitDocuments:
    """The documents of one split: the name of its tasks, the Arrow file, and the digest of that."""

    name: str
    documents: Path
    digest: str
    bytes: int


def population_of(signed: Sequence[Commit], planted: Sequence[Commit], indexed: Sequence[Part]) -> Population:
    """All parts in order."""
    parts = [Part(commit.folder, commit.counts["documents"]) for commit in signed]
    parts += [Part(commit.folder, commit.counts["documents"], "planted") for commit in planted]
    return Population((*parts, *indexed))


@dataclass(frozen=True)
class NearStages:
    """Makes the tasks of each stage. `memory_bytes` bounds what one task holds."""

    config: NearDedupConfig
    splits: Sequence[SplitDocuments]
    removals: Removals
    memory_bytes: int
    seed: int

    def signature_tasks(self) -> list[Task]:
        """One task a split."""
        config = {"dedup.near": part_settings(self.config), "normalization": normalization_version()}
        tasks = []
        for number, split in enumerate(self.splits):
            inputs = {"documents": split.digest, "removed": self.removals.digest(number)}
            args = (split.documents, self.removals, number, self.config)
            tasks.append(Task("signatures", split.name, config, _sign, args, split.bytes, inputs))
        return tasks

    def planted_tasks(self) -> list[Task]:
        """One task, if something is to be planted."""
        measure = self.config.measure
        if measure is None or not measure.planted:
            return []
        inputs = {
            "documents": [split.digest for split in self.splits],
            "removed": [self.removals.digest(number) for number in range(len(self.splits))],
        }
        config = {
            "dedup.near": part_settings(self.config),
            "normalization": normalization_version(),
            "dedup.near.measure.planted": measure.planted,
            "seed": self.seed,
        }
        documents = tuple(split.documents for split in self.splits)
        args = (documents, self.removals, self.config, measure.planted, self.seed)
        return [Task("planted", "planted", config, _plant, args, inputs=inputs)]

    def equal_tasks(self, population: Population, digest: str) -> list[Task]:
        """One task a partition of keys; `digest` is that of all parts."""
        partitions = key_partitions(int(population.starts[-1]), self.memory_bytes)
        return [
            Task(
                "equal",
                partition_name(number, partitions),
                {"partition": number, "partitions": partitions},
                _find_equal,
                (population, number, partitions),
                inputs={"parts": digest},
            )
            for number in range(partitions)
        ]

    def mask_task(self, population: Population, equal: Sequence[Commit]) -> Task:
        """The bits of documents that lost to equal words."""
        folders = tuple(commit.folder for commit in equal)
        inputs = {"equal": contents(equal), "starts": digest_of(population.starts.tolist())}
        return Task("equal_mask", "equal_mask", {}, _write_mask, (population, folders), inputs=inputs)

    def candidate_tasks(self, population: Population, digest: str, mask: Commit) -> list[Task]:
        """One task a partition of band keys."""
        entries = int(population.starts[-1]) * bands_and_rows(self.config)[0]
        partitions = band_partitions(entries, self.memory_bytes)
        inputs = {"parts": digest, "mask": mask.content}
        tasks = []
        for number in range(partitions):
            config = {"dedup.near.similarity": self.config.similarity}
            config |= {"partition": number, "partitions": partitions}
            args = (population, number, partitions, mask.folder, self.config.similarity, self.memory_bytes)
            name = partition_name(number, partitions)
            tasks.append(Task("candidates", name, config, _find_candidates, args, inputs=inputs))
        return tasks

    def shingle_tasks(self, population: Population, digest: str, candidates: Sequence[Commit]) -> list[Task]:
        """One task a part."""
        pairs = tuple(commit.folder for commit in candidates)
        inputs = {"parts": digest, "pairs": contents(candidates)}
        settings = {"dedup.near": part_settings(self.config)}
        sources = [(split.name, split.documents) for split in self.splits]
        sources += [("planted", part.folder / PLANTED_DOCUMENTS) for part in _of_kind(population, "planted")]
        sources += [
            (f"index-{number:05d}", part.folder) for number, part in enumerate(_of_kind(population, "index"))
        ]
        tasks = []
        for number, (name, documents) in enumerate(sources):
            args = (population, number, documents, pairs, self.config)
            weight = population.parts[number].documents
            config = settings | {"part": number}
            tasks.append(Task("shingles", name, config, _write_sets, args, weight, inputs))
        return tasks

    def verify_tasks(
        self,
        population: Population,
        candidates: Sequence[Commit],
        shingles: Sequence[Commit],
        blocks: Sequence[tuple[int, int]],
    ) -> list[Task]:
        """One task a block of documents."""
        folders = [tuple(commit.folder for commit in commits) for commits in (candidates, shingles)]
        names = ("similarity", "containment", "small_shingles", "small_repetition", "small_similarity")
        inputs = {"pairs": contents(candidates), "sets": contents(shingles)}
        rule = {f"dedup.near.{name}": getattr(self.config, name) for name in names}
        tasks = []
        for block in blocks:
            args = (population, block, *folders, self.config, self.memory_bytes)
            name = f"{block[0]:012d}-{block[1]:012d}"
            config = rule | {"block": list(block)}
            tasks.append(Task("verify", name, config, _verify, args, inputs=inputs))
        return tasks

    def resolve_task(
        self, population: Population, digest: str, equal: Sequence[Commit], verified: Sequence[Commit]
    ) -> Task:
        """Who is removed."""
        inputs = {"parts": digest, "equal": contents(equal), "edges": contents(verified)}
        edges, losers = (tuple(commit.folder for commit in commits) for commits in (verified, equal))
        args = (population, edges, losers, self.memory_bytes)
        return Task("near", "near", {}, _resolve, args, inputs=inputs)

    def measure_tasks(
        self,
        population: Population,
        planted: Sequence[Commit],
        mask: Commit,
        found: Mapping[str, Sequence[Commit]],
    ) -> list[Task]:
        """One task, if anything is measured. `found` holds the commits of candidates, verify and near."""
        if self.config.measure is None:
            return []
        inputs = {
            "found": {stage: contents(commits) for stage, commits in found.items()},
            "planted": contents(planted),
            "mask": mask.content,
            "documents": [split.digest for split in self.splits],
        }
        config = {"dedup.near": self.config.model_dump(mode="json", exclude={"against"}), "seed": self.seed}
        documents = tuple(split.documents for split in self.splits)
        folders = {stage: tuple(commit.folder for commit in commits) for stage, commits in found.items()}
        args = (population, documents, mask.folder, folders, self.config, self.seed)
        return [Task("measure", "measure", config, _measure, args, inputs=inputs)]


def _sign(
    folder: Path, documents: Path, removals: Removals, split: int, config: NearDedupConfig
) -> dict[str, Any]:
    return dict(sign_documents(documents, removals.of_split(split), config, folder))


def _plant(
    folder: Path,
    documents: Sequence[Path],
    removals: Removals,
    config: NearDedupConfig,
    count: int,
    seed: int,
) -> dict[str, Any]:
    def removed(split: int) -> npt.NDArray[np.int64]:
        return np.concatenate([np.zeros(0, np.int64), *removals.of_split(split).rows.values()])

    counts = plant(documents, removed, config.minhash, count=count, seed=seed, folder=folder)
    return counts | sign_documents(folder / PLANTED_DOCUMENTS, Removed(), config, folder)


def _find_equal(folder: Path, population: Population, partition: int, partitions: int) -> dict[str, Any]:
    sources: list[int | None] = []
    for number, part in enumerate(population.parts):
        # Several indexes may hold the same document: the first one keeps it.
        kinds = {"input": None, "planted": _PLANTED_SOURCE, "index": number - len(population.parts)}
        sources.append(kinds[part.kind])
    paths = [part.folder / KEYS_FILE for part in population.parts]
    losers = find_losers(paths, partition, partitions, longest_first=True, sources=sources)
    np.save(folder / LOSERS_FILE, losers, allow_pickle=False)
    return {"losers": len(losers)}


def _write_mask(folder: Path, population: Population, equal: Sequence[Path]) -> dict[str, Any]:
    bits = np.zeros(-(-int(population.starts[-1]) // 8), np.uint8)
    removed = 0
    for part in equal:
        table = Rows(part / LOSERS_FILE, LOSER_DTYPE)
        removed += len(table)
        for start in range(0, len(table), 1 << 16):
            rows = table.read(start, min(start + (1 << 16), len(table)))
            numbers = population.starts[rows["split"]] + rows["row"]
            np.bitwise_or.at(bits, numbers >> 3, (1 << (numbers & 7)).astype(np.uint8))
    bits.tofile(folder / MASK_FILE)
    return {"removed": removed}


def _read_mask(folder: Path) -> npt.NDArray[np.uint8]:
    return np.frombuffer(read_bytes(folder / MASK_FILE), np.uint8)


def _find_candidates(
    folder: Path,
    population: Population,
    partition: int,
    partitions: int,
    mask: Path,
    similarity: float,
    memory_bytes: int,
) -> dict[str, Any]:
    removed = _read_mask(mask)
    counts = find_candidates(
        population, partition, partitions, removed, folder, similarity=similarity, memory_bytes=memory_bytes
    )
    return dict(counts)


def _write_sets(
    folder: Path,
    population: Population,
    number: int,
    documents: Path,
    pairs: Sequence[Path],
    config: NearDedupConfig,
) -> dict[str, Any]:
    first, last = (int(start) for start in population.starts[number : number + 2])
    wanted = _numbers_between(pairs, first, last)
    part = population.parts[number]
    if part.kind == "index":
        return dict(copy_sketches(part.folder, first, wanted, folder))
    rows = Rows(part.folder / DOCUMENTS_FILE, DOCUMENT)
    in_file = rows.read()["row"][wanted.astype(np.int64) - first]
    start = 0
    with ShingleWriter(folder) as sets, open_arrow(documents) as file:
        reader = pa.ipc.open_file(file, options=pa.ipc.IpcReadOptions(included_fields=[4]))
        for batch_number in range(reader.num_record_batches):
            texts = reader.get_batch(batch_number).column(0)
            begin, end = np.searchsorted(in_file, [start, start + len(texts)])
            if begin < end:
                chosen = texts.take(pa.array(in_file[begin:end] - start))
                sets.write(wanted[begin:end], *shingle_batch(chosen, config.minhash))
            start += len(texts)
    return {"documents": len(wanted)}


def _numbers_between(folders: Sequence[Path], first: int, last: int) -> npt.NDArray[np.uint64]:
    """The numbers in [first, last) that occur in any pair, ascending."""
    found = [np.zeros(0, np.uint64)]
    for folder in folders:
        numbers = np.load(local(folder / NUMBERS_FILE), mmap_mode="r")
        begin, end = np.searchsorted(numbers, np.array([first, last], np.uint64))
        found.append(np.array(numbers[begin:end]))
    return np.unique(np.concatenate(found))


def _verify(
    folder: Path,
    population: Population,
    block: tuple[int, int],
    pairs: Sequence[Path],
    sets: Sequence[Path],
    config: NearDedupConfig,
    memory_bytes: int,
) -> dict[str, Any]:
    return verify_block(population, block, pairs, sets, config, memory_bytes, folder)


def _resolve(
    folder: Path, population: Population, edges: Sequence[Path], equal: Sequence[Path], memory_bytes: int
) -> dict[str, Any]:
    edge_files = [part / EDGES_FILE for part in edges]
    return resolve(population, edge_files, [part / LOSERS_FILE for part in equal], memory_bytes, folder)


def _measure(
    folder: Path,
    population: Population,
    documents: Sequence[Path],
    mask: Path,
    found: Mapping[str, Sequence[Path]],
    config: NearDedupConfig,
    seed: int,
) -> dict[str, Any]:
    assert config.measure is not None
    result: dict[str, Any] = {}
    for part in _of_kind(population, "planted"):
        bands, rows = bands_and_rows(config)
        result["recall"] = measure_recall(
            np.load(local(part.folder / PLANTED_FILE)),
            population,
            found["candidates"],
            found["verify"],
            bands=bands,
            rows=rows,
            removed=_read_mask(mask),
        )
    [near] = found["near"]
    losers = near / LOSERS_FILE
    result["precision"] = measure_precision(
        losers, population, documents, config, count=config.measure.checked, seed=seed
    )
    return result


def _of_kind(population: Population, kind: str) -> list[Part]:
    return [part for part in population.parts if part.kind == kind]


Run = Callable[..., list[list[Commit]]]

"""`Runner.run`: the commits of groups of tasks."""


@dataclass(frozen=True)
class NearResult:
    """The commit that says who is removed, those of the parts, and what was counted and measured."""

    resolved: Commit
    parts: Sequence[Commit]
    population: Population
    counts: Mapping[str, Any]
    measured: Mapping[str, Any]


def remove_near(run: Run, stages: NearStages, indexes: Sequence[DedupIndex] = ()) -> NearResult:
    """Run all stages. The documents of `indexes` win over all of the splits'."""
    signed, planted = run(stages.signature_tasks(), stages.planted_tasks())
    population = population_of(signed, planted, [part for index in indexes for part in index.parts])
    parts = digest_of(
        [commit.content for commit in (*signed, *planted)] + [index.digest for index in indexes]
    )
    [equal] = run(stages.equal_tasks(population, parts))
    [[mask]] = run([stages.mask_task(population, equal)])
    [candidates] = run(stages.candidate_tasks(population, parts, mask))
    [shingles] = run(stages.shingle_tasks(population, parts, candidates))
    blocks = plan_blocks(_folders(shingles), _folders(candidates), stages.memory_bytes)
    [verified] = run(stages.verify_tasks(population, candidates, shingles, blocks))
    [[resolved]] = run([stages.resolve_task(population, parts, equal, verified)])
    found = {"candidates": candidates, "verify": verified, "near": [resolved]}
    [measured] = run(stages.measure_tasks(population, planted, mask, found))
    counts = dict(resolved.counts) | {
        "documents": int(population.count("input")),
        "wordless": _total(signed, "wordless"),
        "planted": int(population.count("planted")),
        "planted_removed": resolved.counts["planted"],
        "indexed": int(population.count("index")),
        "candidates": _total(verified, "pairs"),
        "verified": _total(verified, "verified"),
        "hubs": _total(candidates, "hubs"),
        "largest_bucket": max((commit.counts["largest_bucket"] for commit in candidates), default=0),
        "bounded": _total(candidates, "bounded"),
    }
    return NearResult(resolved, signed, population, counts, measured[0].counts if measured else {})


@dataclass(frozen=True)
class NearDuplicates:
    """What `find_near_duplicates` found; rows are those of the files of documents, `split` the file."""

    losers: npt.NDArray[np.void]
    """resolve.NEAR_LOSER, sorted by (split, row)."""
    winners: npt.NDArray[np.void]
    """exact.WINNER_DTYPE: kept documents that stand for more than themselves."""
    counts: Mapping[str, Any]
    measured: Mapping[str, Any]
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
        splits.append(SplitDocuments(f"{number:05d}", path, digest, path.stat().st_size))
    stages = NearStages(config, splits, Removals({}), memory_bytes, seed)
    engine = LocalEngine(workers) if workers else InlineEngine()
    with Journal(folder) as journal, engine, make_listener(False) as listener:
        runner = Runner(journal, engine, listener)
        result = remove_near(runner.run, stages, indexes)
    losers, winners = (np.load(local(result.resolved.folder / name)) for name in (LOSERS_FILE, WINNERS_FILE))
    return NearDuplicates(losers, winners, result.counts, result.measured, dict(runner.seconds))


def _folders(commits: Sequence[Commit]) -> list[Path]:
    return [commit.folder for commit in commits]


def _total(commits: Sequence[Commit], name: str) -> int:
    return sum(int(commit.counts.get(name, 0)) for commit in commits)
