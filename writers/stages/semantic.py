"""Step: removes semantic duplicates, by vectors of documents (dedup/semantic.py has the stages)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from shardkit.card import SemanticFacts
from shardkit.errors import BuildError, naming_extras, warn_user
from shardkit.writers.dedup.config import EmbedConfig, SemanticDedupConfig
from shardkit.writers.dedup.outcomes import OUTCOMES
from shardkit.writers.dedup.population import DOCUMENT, Part
from shardkit.writers.dedup.semantic import (
    ASSIGN,
    CLUSTER,
    CLUSTERS,
    DECIDING,
    NEIGHBORS,
    SEMANTIC_DUPLICATE,
    SEMANTIC_REMOVED,
    default_clusters,
    remove_semantic,
    vector_table,
)
from shardkit.writers.execution.stage import Stage
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.recipe.steps import GlobalStep
from shardkit.writers.stages.embed import EMBED, Embedded, open_embedder
from shardkit.writers.stages.flow import Build, Clustered, Documents, Step
from shardkit.writers.stages.id_tables import table_needs
from shardkit.writers.stages.needs import DOCUMENTS, LOSERS, Needs
from shardkit.writers.stages.vectors import KEY, VECTOR_TABLES, VECTORS, joined_table, sort_vectors

_WITHOUT = 0.01  # share of documents without a vector above which a build warns


def check(recipe: Recipe) -> None:
    """Raise the errors of a missing faiss, model or code before any document is read."""
    if (config := recipe.dedup.semantic) is None:
        return
    with naming_extras("dedup.semantic"):
        import faiss  # noqa: F401
    if config.embed.code is not None:
        config.embed.code.load(KEY, recipe.folder)
    elif config.embed.model is not None:
        open_embedder(config.embed, recipe.folder)


def drop_semantic_duplicates(config: SemanticDedupConfig, documents: Documents, build: Build) -> Documents:
    """Remove documents whose vector is verified to be alike that of a kept document.

    Raises BuildError if vectors are wrong, or if no document has one.
    """
    names, files = config.embed.files(), build.inputs.filter_files
    own, place = {name: files[name] for name in names}, build.inputs.folder_of_filters
    described, tasks, joined = documents.described(), [], None
    if (given := build.inputs.vectors) is not None:
        limits = build.memory_bytes, build.limits
        joined = sort_vectors(build.run, given.splits, config.embed, given.dimensions, *limits)
    for split, removed in zip(described, documents.removals, strict=True):
        args = split.documents, removed, config.embed, own, place, joined
        tasks.append(EMBED.task(split.name, split.bytes, *args))
    [commits] = build.run(tasks)
    found = [EMBED.result(commit) for commit in commits]
    dimensions = _check_vectors(config.embed, found)
    parts = [Part(commit.files, one.documents) for commit, one in zip(commits, found, strict=True)]
    result = remove_semantic(
        build.run,
        parts,
        [split.name for split in described],
        dimensions,
        config,
        build.memory_bytes,
        build.limits,
    )
    facts = SemanticFacts(
        similarity=config.similarity,
        vectors=config.embed.origin,
        dimensions=dimensions,
        probes=config.probes,
        counts=result.counts
        | {"without_vector": sum(one.without for one in found), "copies": result.decided.copies},
    )
    return replace(
        documents.without(SEMANTIC_DUPLICATE, result.removed),
        semantic_facts=facts,
        groups=result.decided.groups,
        largest_group=result.decided.largest_group,
        clustered=None
        if not config.fields
        else Clustered(config.fields, documents.written[-1], commits, result.assigned),
    )


def _check_vectors(embed: EmbedConfig, found: Sequence[Embedded]) -> int:
    """Return the number of dimensions of all vectors; warn if many documents have none.

    Raises BuildError if vectors differ in their dimensions, or if no document has one.
    """
    kinds = sorted({one.dimensions for one in found} - {0})
    if len(kinds) > 1:
        raise BuildError(
            f"{KEY}: some splits have vectors of {kinds[0]:,} dimensions, others of {kinds[-1]:,}; all must "
            "have the same number"
        )
    total, without = (sum(getattr(one, name) for one in found) for name in ("documents", "without"))
    lacking = next((f", such as {one.lacking!r}" for one in found if one.lacking is not None), "")
    if not total:
        why = f" in {embed.origin}{lacking}; key and document say which ids are compared"
        problem = f"none of {without:,} documents has a vector that is not zero"
        raise BuildError(f"{KEY}: {problem}{why if embed.vectors else ''}")
    if without > _WITHOUT * (total + without):
        why = f"no row with their {embed.document}" if embed.vectors else "no token that the model knows"
        warn_user(
            f"{KEY}: {without:,} of {total + without:,} documents have no vector ({why}, or a vector of "
            f"zeros){lacking}; they are kept without a comparison"
        )
    return kinds[0]


_DIMENSIONS = 256  # assumed; those of the vectors are not known before
_EDGES = 0.2  # edges per document


def needs(n: Needs) -> None:
    """Add the requests and bytes of all stages, for vectors of _DIMENSIONS values and default settings."""
    c = n.corpus
    joined = joined_table(_DIMENSIONS)
    looked_up = table_needs(n, VECTORS, VECTOR_TABLES, joined) if c.shape.has_vectors else 0
    rows, probes = c.documents, 4
    table, clusters = vector_table(_DIMENSIONS), default_clusters(rows)
    probes = min(probes, clusters)
    size = rows * (DOCUMENT.itemsize + 2 * _DIMENSIONS)
    gets, read = n.scans(c.text_bytes * DOCUMENTS, c.gathered)
    n.add(EMBED, c.gathered, gets + looked_up * c.gathered, read, files=2, written=size)
    sampled = min(rows, 64 * clusters) * 2 * _DIMENSIONS
    n.add(CLUSTERS, 1, 4 * c.gathered, rows * DOCUMENT.itemsize + sampled, files=1)
    moved = rows * probes * table.row_bytes
    gets, read = n.scans(size, 2 * c.gathered)
    n.add(ASSIGN, c.gathered, gets + c.gathered, read, files=2, written=moved + CLUSTER.itemsize * rows)
    readers = min(clusters, c.limits.partitions(rows * probes, table.dtype))
    runs = n.exchange(NEIGHBORS, table, c.gathered, rows * probes, readers)
    n.add(NEIGHBORS, readers, *n.slices(runs, readers), files=2, written=rows * _EDGES * 52)
    n.add(DECIDING.rest, 1, 2 * readers, rows * _EDGES * 44, files=1)
    n.add(DECIDING.lost, c.gathered, 2 * c.gathered, rows * 24, files=3)
    n.add(DECIDING.kept, c.gathered, 3 * c.gathered, rows * 24, files=2)
    n.by_split(SEMANTIC_REMOVED, OUTCOMES, 2 * c.gathered, rows * 2 * LOSERS)


STAGES: Sequence[Stage[..., Any]] = (EMBED, CLUSTERS, ASSIGN, NEIGHBORS, *DECIDING.all, SEMANTIC_REMOVED)
JOINING: Sequence[Stage[..., Any]] = (VECTORS, VECTOR_TABLES)


def step_of(move: GlobalStep) -> Step:
    """Return a step over semantic duplicates."""

    def stages(recipe: Recipe) -> Sequence[Stage[..., Any]]:
        return (*JOINING, *STAGES) if move.settings.embed.vectors else STAGES

    return Step(stages, partial(drop_semantic_duplicates, move.settings), needs)
