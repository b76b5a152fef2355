"""Step: datasets of tokens, from documents to shards and provenance.

Each part (such as train) or selection of documents is tokenized once, and packed for each dataset that uses
it. Tokenizing begins with the fast engine while one task compares it with the reference; if they differ, all
documents are tokenized again with the reference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any

from shardkit.errors import BuildError, warn_user
from shardkit.formats.tokenizer_file import Engine
from shardkit.tokens.parity import PARITY_BYTES
from shardkit.writers.exchange.addresses import exchange_in_place
from shardkit.writers.exchange.exchange import exchange
from shardkit.writers.exchange.sorted_runs import EMPTY_BYTES
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.stage import Stage, Task
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.rows.ledger import Count
from shardkit.writers.stages import pack, provenance, tokenize
from shardkit.writers.stages.flow import Build, Documents, Outputs, Step
from shardkit.writers.stages.inputs import TokenizerFile
from shardkit.writers.stages.needs import DOCUMENTS, Needs
from shardkit.writers.stages.pack import PACK
from shardkit.writers.stages.provenance import PROVENANCE
from shardkit.writers.stages.selection import Selection
from shardkit.writers.stages.tokenize import PARITY, TOKENIZE, TOKENIZER, TokenizerFacts
from shardkit.writers.tokens.source_order import Units

MANY_PARTITIONS = 8192  # of 256 MB of text each: enough tasks for any number of workers
PARTITION_TEXT_BYTES = 256_000_000  # maximum text per task of `pack`, so that several workers have tasks
_TEXT_OF_FILE = 2  # bytes of text whose tokens take a byte: a task makes at least a file for another trainer
_INDEX_BYTES = 20  # bytes per document of Megatron's index, the largest of other trainers


def count_partitions(recipe: Recipe, kept: Count, tokens: int | None = None) -> int:
    """Return the number of partitions: each fits the memory of a task, and several workers have tasks.

    It depends on documents and recipe only, so that the shards do, too. `tokens` is the number of tokens if
    it is known.
    """
    token_bytes = 4 if recipe.pack.max_repetitions is None else 5  # 1 byte per token for the loss mask
    is_for_trainer = recipe.output.is_for_trainer
    return partitions_of(
        kept.bytes, kept.documents, tokens, recipe.memory, recipe.output.shard_bytes,
        token_bytes=token_bytes, is_for_trainer=is_for_trainer,
    )  # fmt: skip


def partitions_of(
    text_bytes: int,
    documents: int,
    tokens: int | None,
    memory: int,
    shard_bytes: int,
    *,
    token_bytes: int = 4,
    is_for_trainer: bool = False,
    scale: int = 1,
) -> int:
    """Return `count_partitions` of documents of these sizes; `scale` divides all constants.

    More than `MANY_PARTITIONS` would only make the pieces of each run small, so partitions then are as large
    as the memory of a task allows, by the number of their tokens.
    """
    text = PARTITION_TEXT_BYTES // scale
    if is_for_trainer:
        text = max(text, _TEXT_OF_FILE * shard_bytes)
    wanted = -(-text_bytes // text)
    if wanted > MANY_PARTITIONS and tokens is not None:
        wanted, text_bytes = MANY_PARTITIONS, min(text_bytes, 2 * tokens)
    needed = tokenize.choose_partitions(
        text_bytes, documents, memory, token_bytes=token_bytes, shard_bytes=shard_bytes
    )
    return max(needed, min(wanted, tokenize.MAX_PARTITIONS))


def write_rows(documents: Documents, build: Build) -> Documents:
    """Tokenize, shuffle and pack the documents of each dataset of tokens."""
    tokenizer, [checked] = build.inputs.tokenizer, documents.beside
    assert tokenizer is not None
    facts = TOKENIZER.result(checked)
    tokenized: dict[_Tokens, tuple[list[Commit], Engine]] = {}
    outputs, units = [], None
    left = Counter(map(_tokens_of, (one.recipe for one in documents.outputs)))
    for one in documents.outputs:
        if (wanted := _tokens_of(one.recipe)) is not None:
            *_, in_order = wanted
            if in_order and units is None:
                units = Units.of(one.recipe, documents.splits)
            own = units if in_order else None
            if wanted not in tokenized:
                part = documents.of_part(one.recipe.part)
                tokenized[wanted] = _tokenize(one.recipe, part, build, tokenizer, facts, own)
            left[wanted] -= 1
            one = _pack(one, *tokenized[wanted], build, tokenizer, facts, own, consumed=not left[wanted])
        outputs.append(one)
    return replace(documents, outputs=outputs)


_Tokens = tuple[str | None, Selection | None, bool]


def _tokens_of(recipe: Recipe) -> _Tokens | None:
    """Return which tokens a dataset is packed from: part, selection, order; None for a dataset of text."""
    if recipe.output.is_text:
        return None
    return recipe.part, Selection.of(recipe), recipe.pack.order == "source"


def _tokenize(
    recipe: Recipe,
    documents: Documents,
    build: Build,
    tokenizer: TokenizerFile,
    facts: TokenizerFacts,
    units: Units | None,
) -> tuple[list[Commit], Engine]:
    def tasks(engine: Engine) -> list[Task]:
        return tokenize.tasks(recipe, documents, tokenizer, engine, facts.unlike, build.limits, units)

    parity_task = tokenize.parity_task(documents.files, tokenizer, facts.unlike)
    try:
        [compared], tokenized = build.run([parity_task], tasks(facts.engine))
    except BuildError:
        [[compared]] = build.run([parity_task])  # the fast engine may be wrong, which this check detects
        if PARITY.result(compared).engine == facts.engine:
            raise
    parity = PARITY.result(compared)
    if parity.reason:
        warn_user(f"{parity.reason}; encoding with {parity.engine} (slow)")
    if parity.engine != facts.engine:
        [tokenized] = build.run(tasks(parity.engine))
    return tokenized, parity.engine


def _pack(
    one: Outputs,
    tokenized: Sequence[Commit],
    engine: Engine,
    build: Build,
    tokenizer: TokenizerFile,
    facts: TokenizerFacts,
    units: Units | None,
    *,
    consumed: bool,
) -> Outputs:
    """Pack one dataset; it is the last one from these tokens if they are `consumed`."""
    kept = sum((commit.ledger().kept for commit in tokenized), Count())
    kept = sum((TOKENIZE.result(commit).repeated for commit in tokenized), kept)
    encoded = sum(TOKENIZE.result(commit).tokens for commit in tokenized)
    partitions = count_partitions(one.recipe, kept, encoded) if units is None else units.count
    # In the order of the inputs, a run has few partitions' documents, so its pieces are large.
    readers = partitions if units is None else 1
    move = partial(exchange, build.run, limits=build.limits, consumed=consumed)
    runs = move(PACK, tokenize.TOKENS, tokenized, readers=readers)
    place = partial(exchange_in_place, build.run, limits=build.limits, consumed=consumed)
    tokens = place(PACK, runs, partitions, memory_bytes=one.recipe.memory // 2)
    [packed] = build.run(pack.tasks(one.recipe, facts, tokens, partitions, consumed=consumed))
    shards = [len(PACK.result(commit).shards) for commit in packed]
    [numbered] = build.run(provenance.tasks(packed, shards))
    entry: dict[str, Any] = {
        "file": tokenizer.file.path.name,
        "digest": tokenizer.digest,
        "eos": tokenizer.eos,
        "eos_id": facts.eos_id,
        **({} if tokenizer.bos is None else {"bos": tokenizer.bos, "bos_id": facts.bos_id}),
        "vocab_size": facts.vocab_size,
        "dtype": facts.dtype,
        "engine": engine,
    }
    return replace(one, tokenized=tokenized, packed=packed, provenance=numbered, tokenizer=entry)


_DRAWN = 0.01  # assumed share of the documents in all parts but train


def needs(n: Needs) -> None:
    """Add the requests and bytes of tokenizing each part and selection, and of packing each dataset."""
    c = n.corpus
    if not c.shape.packed:
        return
    text, written = c.text_bytes * DOCUMENTS, c.tokens * c.token_bytes
    gets, read = n.scans(text, c.gathered)
    times = c.shape.tokenized
    spilled = written + c.documents * tokenize.TOKENS.row_bytes
    n.add(TOKENIZE, times * c.gathered, times * gets, times * read, files=2, written=spilled)
    n.add(PARITY, 1, 3 * min(c.gathered, tokenize.PARITY_SPLITS), PARITY_BYTES)
    memory, shard = c.memory // c.scale, c.shard_bytes // c.scale
    packed = c.packed_bytes or c.text_bytes
    partitions = partitions_of(
        packed,
        ceil(c.documents * packed / c.text_bytes),
        c.tokens,
        memory,
        shard,
        is_for_trainer=c.shape.trainers == c.shape.packed,
        scale=c.scale,
    )
    payload = written / max(1, c.documents)
    tokens = n.exchange(PACK, tokenize.TOKENS, c.gathered, c.documents, partitions, payload)
    size = _DRAWN * tokens.bytes + c.gathered * EMPTY_BYTES
    drawn = replace(tokens, count=c.gathered, bytes=size, segments=1)
    small = n.slices(drawn, 1)
    gets, read = n.pieces(PACK, tokenize.TOKENS, tokens, partitions)
    gets, read = gets + c.shape.parts * small[0], read + c.shape.parts * small[1]
    outputs = ceil(c.shape.packed / (1 + c.shape.parts))
    tasks = outputs * (partitions + c.shape.parts)
    shards = ceil(written / partitions / (c.shard_bytes / c.scale))
    beside = shards * c.shape.beside / c.shape.packed
    files = shards + beside + 2 - c.shape.stores / c.shape.packed  # only rows have block checksums
    total = outputs * written + ceil(outputs * c.shape.trainers / c.shape.packed) * c.documents * _INDEX_BYTES
    n.add(PACK, tasks, outputs * gets, outputs * read, files=files, written=total)
    n.add(PROVENANCE, tasks, 2 * tasks, files=1)
    n.shards, n.tables = n.shards + tasks * shards, n.tables + tasks + ceil(tasks * beside)
    n.output_bytes += total


def _stages(recipe: Recipe) -> Sequence[Stage[..., Any]]:
    if all(one.output.is_text for one in recipe.datasets()):
        return ()
    return TOKENIZER, PARITY, TOKENIZE, PACK, PROVENANCE


STEP = Step(_stages, write_rows, needs)
