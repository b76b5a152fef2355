"""Near-duplicate removal, from documents to who is removed.

`remove_near` strings the stages together (`near_stages.py`); a build calls it between exact removal and
tokenizing. `find_near_duplicates` is the same for anyone's files of documents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.hashing import digest_of, hash_file
from shardkit.progress import make_listener
from shardkit.writers.dedup.blocks import plan_blocks
from shardkit.writers.dedup.config import NearDedupConfig
from shardkit.writers.dedup.index import DedupIndex
from shardkit.writers.dedup.near_stages import NearStages, SplitDocuments, population_of
from shardkit.writers.dedup.population import Population
from shardkit.writers.dedup.removals import LOSERS_FILE, WINNERS_FILE, Removals
from shardkit.writers.execution.engine_inline import InlineEngine
from shardkit.writers.execution.engine_local import LocalEngine
from shardkit.writers.execution.journal import Journal
from shardkit.writers.execution.runner import Runner
from shardkit.writers.execution.task import Commit
from shardkit.writers.execution.work_files import local

__all__ = ["NearDuplicates", "NearResult", "find_near_duplicates", "remove_near"]

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
