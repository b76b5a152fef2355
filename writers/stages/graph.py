"""The stages of a build, in order: what each gets from those before it, and what comes of it.

    clean -> exact -> lines -> near -> tokenize -> pack -> provenance

A stage is a list of tasks. `run` gives their commits: a runner skips those that are finished and has an
engine run the others; to explain a build, or to estimate its disk space, one only looks up what is finished.
What a stage has to do follows from the recipe and from what the stages before it committed, never from the
number of workers or from time, so the same inputs and recipe give the same bytes. A task's config and inputs
name all that decides its outputs and nothing else, so a changed recipe redoes exactly what depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardkit.errors import BuildError, RecipeError, warn_user
from shardkit.writers.dedup import exact as exact_dedup
from shardkit.writers.dedup import lines
from shardkit.writers.dedup.index import DedupIndex, open_index
from shardkit.writers.dedup.near import NearResult, NearStages, remove_near
from shardkit.writers.dedup.population import SplitDocuments
from shardkit.writers.dedup.removals import Removals
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.task import Commit, RunTasks, Task
from shardkit.writers.inputs.fields import check_named_fields
from shardkit.writers.inputs.scan import Split
from shardkit.writers.ledger import Count, Ledger, check_bad_fraction, first_of
from shardkit.writers.recipe import Recipe
from shardkit.writers.stages import clean, exact, pack, provenance, tokenize
from shardkit.writers.stages.clean import Cleaned
from shardkit.writers.stages.duplicates import EXACT, NEAR, DuplicateLosses
from shardkit.writers.stages.pack import Packed
from shardkit.writers.stages.tokenize import Tokenized, TokenizerFacts, TokenizerFile
from shardkit.writers.tokenizer import Engine, Parity

__all__ = ["PARTITION_TEXT_BYTES", "BuildInputs", "Outputs", "Survivors", "find_survivors", "run_stages"]

PARTITION_TEXT_BYTES = 256_000_000  # one task packs at most this much text, so that others may work as well


@dataclass(frozen=True)
class BuildInputs:
    """What a build reads, looked at before the first task.

    `filter_files` are `clean.filter_files`; `filter_folder` is where tasks find these files, if not by their
    paths in the recipe.
    """

    recipe: Recipe
    splits: Sequence[Split]
    indexes: Sequence[DedupIndex]
    filter_files: Mapping[str, str]
    filter_folder: Artifact | None = None

    @classmethod
    def of(cls, recipe: Recipe, splits: Sequence[Split]) -> BuildInputs:
        """Open indexes of other corpora and hash the files of filters; RecipeError if one does not fit."""
        indexes = []
        near = recipe.dedup.near
        for number, path in enumerate(near.against if near is not None else ()):
            key = f"dedup.near.against[{number}]"
            try:
                index = open_index(recipe.resolve(path))
            except BuildError as error:
                raise RecipeError(f"{key}: {error}") from None
            assert near is not None
            index.check(near, key)
            indexes.append(index)
        return cls(recipe, splits, indexes, clean.filter_files(recipe))


@dataclass(frozen=True)
class Survivors:
    """The documents that filters and duplicate removal left.

    `cleaned` and `documents` have a commit for each split, `counts` what was counted as it was cleaned.
    `documents` hold documents.arrow, and are `cleaned` unless lines were cut. `removals` are the rows of it
    that were removed, `removed` the counts that stage `tokenize` will book for them by reason, `lines_cut`
    the ledgers of stage `lines`. `kept` is what filters left. `beside` are the commits of the tasks that ran
    beside stage `clean`.
    """

    cleaned: Sequence[Commit]
    counts: Sequence[Cleaned]
    documents: Sequence[Commit]
    removals: Removals
    removed: Mapping[str, Count]
    lines_cut: Sequence[Ledger]
    near: NearResult | None
    card: Mapping[str, Any] | None
    kept: Count
    beside: Sequence[Commit]


def task_memory(recipe: Recipe) -> int:
    """Bytes that one task of duplicate removal may hold: the rest of `memory` is libraries and file pages."""
    return recipe.memory // 5


def find_survivors(inputs: BuildInputs, run: RunTasks, *, beside: Sequence[Task] = ()) -> Survivors:
    """Clean the documents and find their duplicates; `beside` are tasks that need nothing of this.

    RecipeError if no record of a file has a field that the recipe names. BuildError if too much is
    unreadable, if nothing is left, or if a source is mostly duplicates.
    """
    recipe, splits, config = inputs.recipe, inputs.splits, inputs.recipe.dedup
    memory_bytes = task_memory(recipe)

    others, cleaned = run(beside, clean.tasks(recipe, splits, inputs.filter_files, inputs.filter_folder))
    counts = [Cleaned.of(commit) for commit in cleaned]
    kept = _check_cleaned(recipe, splits, cleaned, counts)
    losses = DuplicateLosses(recipe.sources, splits, [one.ledger for one in counts])
    documents, removals, removed, lines_cut = cleaned, Removals({}), dict[str, Count](), list[Ledger]()

    duplicates: list[Commit] = []
    if config.exact is not None:
        partitions = exact_dedup.partitions_for(kept.documents, 2 * memory_bytes)
        [duplicates] = run(exact.tasks(cleaned, partitions))
        losses.add_exact(duplicates)
        removals = Removals({EXACT: [commit.files for commit in duplicates]})
        removed[EXACT] = losses.total(EXACT)

    if config.lines is not None:
        whole = _describe(cleaned)
        [keys] = run(lines.key_tasks(whole, duplicates, config.lines))
        [losers] = run(lines.loser_tasks(keys, config.lines, memory_bytes))
        [documents] = run(lines.cut_tasks(whole, keys, losers, duplicates, config.lines))
        lines_cut = [commit.ledger() for commit in documents]
        losses.add_lines(lines_cut)
        removals = Removals({}, [commit.files for commit in documents])  # the files have none of them
        removed = {}

    near = None
    if config.near is not None:
        stages = NearStages(config.near, _describe(documents), removals, memory_bytes, recipe.seed)
        near = remove_near(run, stages, inputs.indexes)
        losses.add_near(near)
        removals = Removals({**removals.folders, NEAR: [near.resolved.files]}, removals.rewritten)
        removed[NEAR] = losses.total(NEAR)

    losses.check(config.max_removed_fraction)
    card = losses.card(recipe, duplicates, near, inputs.indexes)
    return Survivors(cleaned, counts, documents, removals, removed, lines_cut, near, card, kept, others)


@dataclass(frozen=True)
class Outputs:
    """What was counted for each split and partition, and the commits whose files are published.

    `tokenizer` is the card's entry.
    """

    survivors: Survivors
    tokenized: Sequence[Tokenized]
    packed: Sequence[Commit]
    parts: Sequence[Packed]
    provenance: Sequence[Commit]
    tokenizer: Mapping[str, Any]


def run_stages(inputs: BuildInputs, tokenizer: TokenizerFile, run: RunTasks) -> Outputs:
    """Run all stages of a build."""
    recipe = inputs.recipe
    check = tokenize.tokenizer_task(tokenizer)
    survivors = find_survivors(inputs, run, beside=[check])
    [checked] = survivors.beside
    facts = TokenizerFacts.of(checked)
    partitions = _count_partitions(recipe, survivors.kept)
    spilled, engine = _tokenize(inputs, survivors, tokenizer, facts, partitions, run)
    [packed] = run(pack.tasks(recipe, spilled, partitions, eos_id=facts.eos_id, dtype=facts.dtype))
    parts = [Packed.of(commit) for commit in packed]
    [numbered] = run(provenance.tasks(packed, [len(part.shards) for part in parts]))
    entry = {
        "file": tokenizer.file.path.name,
        "digest": tokenizer.digest,
        "eos": tokenizer.eos,
        "eos_id": facts.eos_id,
        "vocab_size": facts.vocab_size,
        "dtype": facts.dtype,
        "engine": engine,
    }
    tokenized = [Tokenized.of(commit) for commit in spilled]
    return Outputs(survivors, tokenized, packed, parts, numbered, entry)


def _check_cleaned(
    recipe: Recipe, splits: Sequence[Split], cleaned: Sequence[Commit], counts: Sequence[Cleaned]
) -> Count:
    """What was kept of all splits."""
    total = Ledger()
    for one in counts:
        total.merge(one.ledger)
    check_named_fields(splits, [one.fields for one in counts])
    check_bad_fraction("all inputs", total, recipe.max_bad_fraction)
    if not total.kept.documents:
        raise BuildError(_nothing_left(total, cleaned))
    return total.kept


def _nothing_left(total: Ledger, cleaned: Sequence[Commit]) -> str:
    message = f"no document is left of {total.read.documents:,} that were read"
    for fate, reasons in (("dropped", total.dropped), ("quarantined", total.quarantined)):
        lost = [f"{reason} {count.documents:,}" for reason, count in sorted(reasons.items())]
        message += f"; {fate}: {', '.join(lost)}" if lost else ""
    name = clean.QUARANTINE_FILE
    quarantines = (commit.files / name for commit in cleaned if commit.outputs[name].bytes)
    first = next((first_of(file.read_bytes()) for file in quarantines), None)
    return f"{message} (first: {first})" if first else message


def _describe(commits: Sequence[Commit]) -> list[SplitDocuments]:
    described = []
    for commit in commits:
        output = commit.outputs[clean.DOCUMENTS_FILE]
        file = commit.files / clean.DOCUMENTS_FILE
        described.append(SplitDocuments(commit.name, file, output.xxh3_128, output.bytes))
    return described


def _count_partitions(recipe: Recipe, kept: Count) -> int:
    """Enough for the memory, and for work to be shared; depends on the documents and the recipe only."""
    shard = recipe.output.shard_bytes
    needed = tokenize.choose_partitions(kept.bytes, kept.documents, recipe.memory, shard_bytes=shard)
    return max(needed, min(-(-kept.bytes // PARTITION_TEXT_BYTES), tokenize.MAX_PARTITIONS))


def _tokenize(
    inputs: BuildInputs,
    survivors: Survivors,
    tokenizer: TokenizerFile,
    facts: TokenizerFacts,
    partitions: int,
    run: RunTasks,
) -> tuple[list[Commit], Engine]:
    """Tokenize with the fast engine while one core compares it with the reference.

    If they differ, what the fast engine made is thrown away and made again with the reference.
    """

    def tasks(engine: Engine) -> list[Task]:
        return tokenize.tasks(
            inputs.recipe,
            inputs.splits,
            survivors.documents,
            survivors.removals,
            cleaned=survivors.cleaned,
            tokenizer=tokenizer,
            engine=engine,
            unlike=facts.unlike,
            partitions=partitions,
        )

    parity_task = tokenize.parity_task(survivors.documents, tokenizer, facts.unlike)
    try:
        [compared], tokenized = run([parity_task], tasks(facts.engine))
    except BuildError:
        [[compared]] = run([parity_task])  # it may be what the check is there to find
        if Parity.of(compared).engine == facts.engine:
            raise
    parity = Parity.of(compared)
    if parity.reason:
        warn_user(f"{parity.reason}; encoding with tokenizers (slow)")
    if parity.engine != facts.engine:
        [tokenized] = run(tasks(parity.engine))
    return tokenized, parity.engine
