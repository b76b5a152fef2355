"""The stages of a build up to its last task: everything but publishing.

    scan -> clean -> duplicates -> tokenize, tokenizer parity -> pack -> provenance

What a stage has to do follows from the recipe and from what the stages before it committed. `run` may be that
of a runner, or of a planner that only looks what is finished.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkit.errors import BuildError, warn_user
from shardkit.writers.dedup.index import DedupIndex
from shardkit.writers.execution.task import Commit, Task
from shardkit.writers.inputs import scan
from shardkit.writers.ledger import Count
from shardkit.writers.preparation import Prepared, prepare
from shardkit.writers.recipe import Recipe
from shardkit.writers.stages import tasks as stages
from shardkit.writers.stages import tokenize as spill
from shardkit.writers.tokenizer import Engine

__all__ = ["Made", "Plan", "make_parts"]

PARTITION_TEXT_BYTES = 256_000_000  # at most so much text is packed by one task, that others may work as well

Run = Callable[..., list[list[Commit]]]
"""`Runner.run`: the commits of groups of tasks."""


@dataclass(frozen=True)
class Plan:
    """What a build is made from. `files` are `stages.filter_files`, `digest` is the tokenizer's."""

    recipe: Recipe
    splits: Sequence[scan.Split]
    digest: str
    indexes: Sequence[DedupIndex]
    files: Mapping[str, str]


@dataclass(frozen=True)
class Made:
    """The commits of a build that is ready to be published; `tokenizer` is what its card says of that."""

    prepared: Prepared
    spilled: Sequence[Commit]
    packed: Sequence[Commit]
    provenance: Sequence[Commit]
    tokenizer: Mapping[str, Any]


def make_parts(plan: Plan, moved: Recipe, tokenizer_path: Path, run: Run) -> Made:
    """Run all stages. `moved` is the recipe that tasks get (`place_files`)."""
    recipe, eos = plan.recipe, plan.recipe.tokenizer.eos
    tokenizer_task = stages.tokenizer_task(tokenizer_path, eos, plan.digest)
    prepared = prepare(moved, plan.splits, run, plan.indexes, plan.files, [tokenizer_task])
    [tokenizer] = prepared.beside
    partitions = _count_partitions(recipe, prepared.kept)
    spilled, parity = _tokenize(plan, prepared, partitions, tokenizer, tokenizer_path, run)
    [packed] = run(stages.pack_tasks(recipe, spilled, partitions=partitions, tokenizer=tokenizer))
    [provenance] = run(stages.provenance_tasks(packed))
    names = {"file": tokenizer_path.name, "digest": plan.digest, "eos": eos}
    known = {name: tokenizer.counts[name] for name in ("eos_id", "vocab_size", "dtype")}
    facts = names | known | {"engine": parity.counts["engine"]}
    return Made(prepared, spilled, packed, provenance, facts)


def _tokenize(
    plan: Plan, prepared: Prepared, partitions: int, tokenizer: Commit, tokenizer_path: Path, run: Run
) -> tuple[list[Commit], Commit]:
    """The spills and the parity check, which runs beside: one core's time that others need not wait for.

    If it finds a difference, what the fast tokenizer made is thrown away and made again.
    """

    unique = prepared.unique
    engine: Engine = tokenizer.counts["engine"]
    unlike = tuple((first, last) for first, last in tokenizer.counts["unlike"])

    def tasks(engine: Engine) -> list[Task]:
        return stages.tokenize_tasks(
            plan.recipe,
            plan.splits,
            unique.documents,
            unique.removals,
            labelled=prepared.cleaned,
            tokenizer_path=tokenizer_path,
            tokenizer_digest=plan.digest,
            engine=engine,
            unlike=unlike,
            partitions=partitions,
        )

    eos = plan.recipe.tokenizer.eos
    parity_task = stages.parity_task(unique.documents, tokenizer_path, eos, plan.digest, unlike)
    try:
        [parity], spilled = run([parity_task], tasks(engine))
    except BuildError:
        [[parity]] = run([parity_task])  # it may be what the check is there to find
        if parity.counts["engine"] == engine:
            raise
    if parity.counts["reason"]:
        warn_user(f"{parity.counts['reason']}; encoding with tokenizers (slow)")
    if parity.counts["engine"] != engine:
        [spilled] = run(tasks(parity.counts["engine"]))
    return spilled, parity


def _count_partitions(recipe: Recipe, kept: Count) -> int:
    """Enough for the memory, and for work to be shared; depends on the documents and the recipe only."""
    shard = recipe.output.shard_bytes
    needed = spill.choose_partitions(kept.bytes, kept.documents, recipe.memory, shard_bytes=shard)
    return max(needed, min(-(-kept.bytes // PARTITION_TEXT_BYTES), spill.MAX_PARTITIONS))
