"""The stages of a build in order: the input of each, and its result.

    clean -> url -> exact -> lines -> near
          -> split -> tokenize -> pack -> provenance -> duplicates -> side files
                   -> text

A recipe may ask for several datasets: several outputs, each for every part of a split. They share the stages
up to `split`, those of tokens also `tokenize`; each has the bytes that it would have alone.
A stage is a list of tasks. `run` returns their commits: a runner skips finished tasks and has an engine run
the others; to explain a build or to estimate its disk space, `run` only looks up finished tasks. The tasks of
a stage follow from the recipe and from the commits of earlier stages, never from the number of workers or
from time, so the same inputs and recipe give the same bytes. The config and inputs of a task name everything
that decides its outputs and nothing else, so a changed recipe redoes exactly what depends on the change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardkit.card import DedupFacts
from shardkit.errors import BuildError, RecipeError, warn_user
from shardkit.formats.tokenizer_file import Engine
from shardkit.hashing import digest_of
from shardkit.storage.store import StorageOptions
from shardkit.storage.url import is_remote
from shardkit.writers.dedup import lines
from shardkit.writers.dedup.duplicates import join_duplicates
from shardkit.writers.dedup.index import DedupIndex, open_index
from shardkit.writers.dedup.near import NearResult, NearStages, remove_near
from shardkit.writers.dedup.population import SplitDocuments
from shardkit.writers.dedup.removals import SPLIT, SplitRemovals
from shardkit.writers.exchange import exchange
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.task import Commit, RunTasks, Task
from shardkit.writers.filters.base import FilterSettings
from shardkit.writers.filters.decontamination import DecontaminationConfig
from shardkit.writers.inputs.chat import Masking
from shardkit.writers.inputs.fields import check_named_fields, warn_of_notes
from shardkit.writers.inputs.scan import Split, parts_of
from shardkit.writers.inputs.small_files import group_small_files
from shardkit.writers.ledger import FAILED_SPLIT, Count, Ledger, check_bad_fraction, first_of
from shardkit.writers.recipe import Recipe
from shardkit.writers.runs import DEFAULT_LIMITS, Limits
from shardkit.writers.score_tables import ScoreTable
from shardkit.writers.settings import TRAIN
from shardkit.writers.stages import clean, exact, pack, provenance, text, tokenize
from shardkit.writers.stages.buckets import Buckets, fit_buckets
from shardkit.writers.stages.clean import Cleaned
from shardkit.writers.stages.duplicate_losses import EXACT, LINES, NEAR, URL, DuplicateLosses
from shardkit.writers.stages.pack import Packed
from shardkit.writers.stages.record_counts import count_records
from shardkit.writers.stages.scores import ScoreFiles, find_score_files, sort_scores
from shardkit.writers.stages.selection import NOT_SELECTED, Selection
from shardkit.writers.stages.split import PartsFound, SplitStage
from shardkit.writers.stages.tokenize import TokenizerFacts, TokenizerFile
from shardkit.writers.tokenizer import Parity

__all__ = [
    "PARTITION_TEXT_BYTES",
    "BuildInputs",
    "Outputs",
    "Survivors",
    "count_partitions",
    "find_survivors",
    "run_stages",
    "splits_of_tasks",
]

_EDITORS = frozenset({"c4_quality", "pii", "python", "repeated_lines"})  # these may change texts

PARTITION_TEXT_BYTES = 256_000_000  # at most, of one task of `pack`, so that several workers have tasks


@dataclass(frozen=True)
class BuildInputs:
    """What a build reads, examined before the first task.

    `filter_files` are `clean.filter_files`; `filter_folder` is where tasks find these files, if not by their
    paths in the recipe. `scores` are the files of `scores` filters, which are sorted before stage `clean`;
    `read_files` are the digests of all files that filters read. `limits` are those of all exchanges: of small
    data that should behave as large data.
    """

    recipe: Recipe
    splits: Sequence[Split]
    indexes: Sequence[DedupIndex]
    filter_files: Mapping[str, str]
    filter_folder: Artifact | None = None
    masking: Masking | None = None
    limits: Limits = DEFAULT_LIMITS
    scores: Sequence[ScoreFiles] = ()
    read_files: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, recipe: Recipe, splits: Sequence[Split], storage: StorageOptions | None = None
    ) -> BuildInputs:
        """Open indexes of other corpora and hash the files of filters; RecipeError if one does not fit."""
        splits = splits_of_tasks(recipe, splits)
        indexes = []
        near = recipe.dedup.near
        for number, path in enumerate(near.against if near is not None else ()):
            key = f"dedup.near.against[{number}]"
            try:
                index = open_index(path if is_remote(path) else recipe.resolve(path), storage)
            except BuildError as error:
                raise RecipeError(f"{key}: {error}") from None
            assert near is not None
            index.check(near, key)
            indexes.append(index)
        limits = DEFAULT_LIMITS.within(recipe.memory)
        editing = [name for name, config in recipe.filter_chain() if _edits(name, config)]
        if recipe.is_masked and editing:
            raise RecipeError(
                f"filters: {editing[0]} edits texts, and would cut into conversations and prompts; give "
                f"these a build of their own"
            )
        files, masking = clean.filter_files(recipe), Masking.of(recipe)
        scores = find_score_files(recipe, storage)
        read = files | {name: digest for one in scores for name, digest in one.digests().items()}
        return cls(
            recipe, splits, indexes, files, masking=masking, limits=limits, scores=scores, read_files=read
        )


def _clean_tasks(inputs: BuildInputs, splits: Sequence[Split], scores: Sequence[ScoreTable]) -> list[Task]:
    files, folder = inputs.filter_files, inputs.filter_folder
    return clean.tasks(inputs.recipe, splits, files, folder, inputs.masking, scores)


@dataclass(frozen=True)
class Survivors:
    """The documents that are left after filters and duplicate removal.

    `cleaned` and `documents` have a commit for each split, and `counts` the counts of stage `clean`.
    `documents` have documents.arrow, and are `cleaned` unless lines were cut. `removals` are the rows of
    each that were removed, `removed` the counts by reason that stage `tokenize` will book for them,
    `lines_cut` the ledgers of stage `lines`. `kept` is what the filters kept. `concurrent` are the commits of
    the tasks that ran at the same time as stage `clean`, `buckets` how scores become labels.
    """

    cleaned: Sequence[Commit]
    counts: Sequence[Cleaned]
    documents: Sequence[Commit]
    removals: Sequence[SplitRemovals]
    removed: Mapping[str, Count]
    lines_cut: Sequence[Ledger]
    near: NearResult | None
    card: DedupFacts | None
    kept: Count
    concurrent: Sequence[Commit]
    buckets: Buckets | None = None

    @property
    def input_hashes(self) -> list[str]:
        """`hash_split` of all parts of the splits."""
        return [content for one in self.counts for content in one.inputs]


def splits_of_tasks(recipe: Recipe, splits: Sequence[Split]) -> Sequence[Split]:
    """Group small files, except where splits may fail, so that a file that fails costs only itself."""
    return splits if recipe.max_failed_splits else group_small_files(splits)


def _edits(name: str, config: FilterSettings) -> bool:
    """Whether a filter may change texts."""
    return name in _EDITORS or (isinstance(config, DecontaminationConfig) and config.cut is not None)


def task_memory(recipe: Recipe) -> int:
    """Bytes that a task of duplicate removal may hold; libraries and page cache need the rest of `memory`."""
    return recipe.memory // 5


def find_survivors(inputs: BuildInputs, run: RunTasks, *, concurrent: Sequence[Task] = ()) -> Survivors:
    """Clean the documents and find their duplicates; `concurrent` are other tasks to run with cleaning.

    RecipeError if no record of a file has a field that the recipe names. BuildError if too much is
    unreadable, if nothing is left, or if a source is mostly duplicates.
    """
    recipe, config = inputs.recipe, inputs.recipe.dedup
    splits = count_records(inputs.splits, run)
    memory_bytes = task_memory(recipe)

    scores = sort_scores(inputs.scores, run, memory_bytes, inputs.limits)
    others, cleaned = run(concurrent, _clean_tasks(inputs, splits, scores))
    counts = [Cleaned.of(commit) for commit in cleaned]
    kept = _check_cleaned(recipe, splits, cleaned, counts)
    losses = DuplicateLosses(recipe.sources, splits, [one.ledger for one in counts])
    removals = [SplitRemovals() for _ in splits]
    documents, removed, lines_cut = cleaned, dict[str, Count](), list[Ledger]()

    duplicates, tables = list[exact.ExactDuplicates](), None
    if config.url is not None:
        urls = _count_urls(counts)
        duplicates, tables = exact.remove_urls(
            run, cleaned, urls, config.url, memory_bytes, limits=inputs.limits
        )
        losses.add(URL, tables)
        removals = [own.also(URL, table) for own, table in zip(removals, tables, strict=True)]
        removed[URL] = losses.total(URL)

    if config.exact is not None:
        more, tables = exact.remove_exact(
            run, cleaned, kept.documents, memory_bytes, urls=tables, limits=inputs.limits
        )
        duplicates += more
        losses.add(EXACT, tables)
        removals = [own.also(EXACT, table) for own, table in zip(removals, tables, strict=True)]
        removed[EXACT] = losses.total(EXACT)

    if config.lines is not None:
        whole = _describe(cleaned)
        documents = lines.remove_lines(run, whole, removals, config.lines, memory_bytes, limits=inputs.limits)
        lines_cut = [commit.ledger() for commit in documents]
        losses.add_lines(lines_cut)
        removals = [SplitRemovals({LINES: lines.remaining(commit)}) for commit in documents]
        removed = {}

    near = None
    if config.near is not None:
        described = _describe(documents)
        if config.near.scope == "language":
            pairs = zip(described, cleaned, documents, strict=True)
            described = [_with_languages(own, first, commit) for own, first, commit in pairs]
        stages = NearStages(config.near, described, removals, memory_bytes, recipe.seed, inputs.limits)
        near = remove_near(run, stages, inputs.indexes)
        losses.add(NEAR, near.removed)
        removals = [own.also(NEAR, table) for own, table in zip(removals, near.removed, strict=True)]
        removed[NEAR] = losses.total(NEAR)

    losses.check(config.max_removed_fraction)
    card = losses.card(recipe, duplicates, near, inputs.indexes)
    return Survivors(cleaned, counts, documents, removals, removed, lines_cut, near, card, kept, others)


def _count_urls(counts: Sequence[Cleaned]) -> int:
    """Documents whose URLs are compared; RecipeError if there are none."""
    if urls := sum(one.urls for one in counts):
        return urls
    raise RecipeError(
        "dedup.url: no document has a URL; name the field that has it by inputs[].url, or leave out dedup.url"
    )


@dataclass(frozen=True)
class Outputs:
    """Of one dataset: the counts of each split and partition, and the commits whose files are published.

    `recipe` is that of the dataset alone. Of a dataset of text, `texts` have the files, and nothing is
    tokenized or packed. `side_files` have one file each, which has its name in the dataset; `duplicates` have
    DUPLICATES_FILE; only one part of a split has either. `tokenizer` is the card's entry.
    """

    recipe: Recipe
    survivors: Survivors
    found: PartsFound | None
    tokenized: Sequence[Commit] = ()
    packed: Sequence[Commit] = ()
    parts: Sequence[Packed] = ()
    provenance: Sequence[Commit] = ()
    texts: Sequence[Commit] = ()
    duplicates: Sequence[Commit] = ()
    side_files: Sequence[Commit] = ()
    tokenizer: Mapping[str, Any] | None = None

    @property
    def has_removed(self) -> bool:
        """Whether the dataset tells what was removed: once a split, with the part that is the rest."""
        return self.recipe.part in (None, TRAIN)


def run_stages(inputs: BuildInputs, tokenizer: TokenizerFile | None, run: RunTasks) -> list[Outputs]:
    """Run all stages of a build; what each dataset of the recipe is made of, in its order."""
    recipe = inputs.recipe
    check = [] if tokenizer is None else [tokenize.tokenizer_task(tokenizer)]
    survivors = find_survivors(inputs, run, concurrent=check)
    buckets = fit_buckets(recipe, run, survivors.cleaned, survivors.documents, survivors.removals)
    survivors = replace(survivors, buckets=buckets)
    found = _find_parts(inputs, survivors, run)
    made = [Outputs(each, survivors, found) for each in recipe.datasets()]
    if tokenizer is not None:
        [checked] = survivors.concurrent
        made = _pack(inputs, made, tokenizer, TokenizerFacts.of(checked), run)
    made = [_write_text(inputs, each, run) if each.recipe.output.is_text else each for each in made]
    first = made[0]
    spilled = first.tokenized or first.texts
    lost = survivors.kept.documents - _kept(first)
    cut = survivors.documents if recipe.dedup.lines is not None else ()
    memory_bytes = task_memory(recipe)
    duplicates = join_duplicates(run, [*cut, *spilled], lost, memory_bytes, limits=inputs.limits)
    side_files = clean.join_side_files(run, survivors.cleaned)
    return [
        replace(each, duplicates=duplicates, side_files=side_files) if each.has_removed else each
        for each in made
    ]


def _kept(made: Outputs) -> int:
    """Documents that are in any part of the split."""
    ledgers = [commit.ledger() for commit in made.tokenized]
    ledgers += [ledger for commit in made.texts for ledger in text.Written.of(commit).ledgers]
    lost = (item for ledger in ledgers for item in ledger.dropped.items())
    others = f"{SPLIT}/", NOT_SELECTED
    elsewhere = sum(count.documents for reason, count in lost if reason.startswith(others))
    return sum(ledger.kept.documents for ledger in ledgers) + elsewhere


def _find_parts(inputs: BuildInputs, survivors: Survivors, run: RunTasks) -> PartsFound | None:
    recipe = inputs.recipe
    if recipe.split is None:
        return None
    stage = SplitStage(
        recipe,
        recipe.split,
        inputs.splits,
        survivors.documents,
        survivors.removals,
        task_memory(recipe),
        inputs.limits,
    )
    return stage.run(run)


def _pack(
    inputs: BuildInputs,
    datasets: Sequence[Outputs],
    tokenizer: TokenizerFile,
    facts: TokenizerFacts,
    run: RunTasks,
) -> list[Outputs]:
    """Tokenize each part of the documents once, and pack it for each dataset that has rows of tokens."""
    tokenized: dict[tuple[str | None, Selection | None], list[Commit]] = {}
    engine = facts.engine
    made = []
    for one in datasets:
        recipe = one.recipe
        part = recipe.part, Selection.of(recipe)
        if recipe.output.is_text:
            made.append(one)
            continue
        if part not in tokenized:
            tokenized[part], engine = _tokenize(inputs, one, tokenizer, facts, run)
        kept = sum((commit.ledger().kept for commit in tokenized[part]), Count())
        partitions = count_partitions(recipe, kept)
        tokens = exchange(
            run, "tokens", tokenize.TOKENS, tokenized[part], readers=partitions, limits=inputs.limits
        )
        [packed] = run(
            pack.tasks(
                recipe,
                tokens,
                partitions,
                eos_id=facts.eos_id,
                bos_id=facts.bos_id,
                dtype=facts.dtype,
                separator_id=facts.separator_id,
            )
        )
        parts = [Packed.of(commit) for commit in packed]
        [numbered] = run(provenance.tasks(packed, [len(part.shards) for part in parts]))
        entry = {
            "file": tokenizer.file.path.name,
            "digest": tokenizer.digest,
            "eos": tokenizer.eos,
            "eos_id": facts.eos_id,
            **({} if tokenizer.bos is None else {"bos": tokenizer.bos, "bos_id": facts.bos_id}),
            "vocab_size": facts.vocab_size,
            "dtype": facts.dtype,
            "engine": engine,
        }
        one = replace(one, tokenized=tokenized[part], packed=packed, parts=parts)
        made.append(replace(one, provenance=numbered, tokenizer=entry))
    return made


def _write_text(inputs: BuildInputs, one: Outputs, run: RunTasks) -> Outputs:
    survivors = one.survivors
    [texts] = run(
        text.tasks(
            one.recipe,
            inputs.splits,
            survivors.documents,
            _removals(one),
            cleaned=survivors.cleaned,
            limits=inputs.limits,
            buckets=survivors.buckets,
        )
    )
    return replace(one, texts=texts)


def _removals(one: Outputs) -> Sequence[SplitRemovals]:
    """What the dataset lacks of each split."""
    if one.found is None or one.recipe.part is None:
        return one.survivors.removals
    return one.found.removals[one.recipe.part]


def _check_cleaned(
    recipe: Recipe, splits: Sequence[Split], cleaned: Sequence[Commit], counts: Sequence[Cleaned]
) -> Count:
    """Check the counts of all splits together; returns what was kept."""
    total = Ledger()
    for one in counts:
        total.merge(one.ledger)
    facts = [fields for one in counts for fields in one.fields]
    check_named_fields(parts_of(splits), facts)
    warn_of_notes(parts_of(splits), facts)
    check_bad_fraction("all inputs", total, recipe.max_bad_fraction)
    failed = total.quarantined.get(FAILED_SPLIT, Count()).documents
    if failed > recipe.max_failed_splits:  # found finished, or made by several processes
        names = [split.file for split, one in zip(splits, counts, strict=True) if _has_failed(one.ledger)]
        raise BuildError(
            f"{failed:,} splits failed, more than max_failed_splits {recipe.max_failed_splits:,} allows "
            f"({', '.join(sorted(names))}); raise it, or run again with --retry-failed"
        )
    if not total.kept.documents:
        raise BuildError(_nothing_left(total, cleaned))
    return total.kept


def _has_failed(ledger: Ledger) -> bool:
    return FAILED_SPLIT in ledger.quarantined


def _nothing_left(total: Ledger, cleaned: Sequence[Commit]) -> str:
    message = f"no document is left of {total.read.documents:,} that were read"
    message += "; loosen or remove a filter" if total.dropped else ""
    for fate, reasons in (("dropped", total.dropped), ("quarantined", total.quarantined)):
        by_loss = sorted(reasons.items(), key=lambda item: (-item[1].documents, item[0]))
        lost = [f"{count.documents:,} by {reason}" for reason, count in by_loss]
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


def _with_languages(split: SplitDocuments, cleaned: Commit, documents: Commit) -> SplitDocuments:
    languages, named = tokenize.split_languages(cleaned, documents)
    return replace(split, languages=languages, digest=digest_of([split.digest, named]))


def count_partitions(recipe: Recipe, kept: Count) -> int:
    """Enough to fit the memory and to keep several workers busy; depends on documents and recipe only."""
    shard = recipe.output.shard_bytes
    token_bytes = 4 if recipe.pack.max_repetitions is None else 5  # masks are made beside the tokens
    needed = tokenize.choose_partitions(
        kept.bytes, kept.documents, recipe.memory, token_bytes=token_bytes, shard_bytes=shard
    )
    return max(needed, min(-(-kept.bytes // PARTITION_TEXT_BYTES), tokenize.MAX_PARTITIONS))


def _tokenize(
    inputs: BuildInputs,
    one: Outputs,
    tokenizer: TokenizerFile,
    facts: TokenizerFacts,
    run: RunTasks,
) -> tuple[list[Commit], Engine]:
    """Tokenize with the fast engine while one task compares it with the reference.

    If they differ, the output of the fast engine is discarded and made again with the reference.
    """
    survivors = one.survivors

    def tasks(engine: Engine) -> list[Task]:
        return tokenize.tasks(
            one.recipe,
            inputs.splits,
            survivors.documents,
            _removals(one),
            cleaned=survivors.cleaned,
            tokenizer=tokenizer,
            engine=engine,
            unlike=facts.unlike,
            limits=inputs.limits,
            buckets=survivors.buckets,
        )

    parity_task = tokenize.parity_task(survivors.documents, tokenizer, facts.unlike)
    try:
        [compared], tokenized = run([parity_task], tasks(facts.engine))
    except BuildError:
        [[compared]] = run([parity_task])  # the error may be the difference that this check looks for
        if Parity.of(compared).engine == facts.engine:
            raise
    parity = Parity.of(compared)
    if parity.reason:
        warn_user(f"{parity.reason}; encoding with {parity.engine} (slow)")
    if parity.engine != facts.engine:
        [tokenized] = run(tasks(parity.engine))
    return tokenized, parity.engine
