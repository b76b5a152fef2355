"""Semantic duplicates: documents whose vectors have a cosine of at least `similarity` (SemDeDup, Abbas 2023).

    semantic_embed      split -> its documents and their vectors (writers/stages/embed.py)
    semantic_clusters   a sample of all vectors -> centroids, by spherical k-means
    semantic_assign     split -> each vector, sent to its `probes` nearest clusters
    semantic_neighbors  range of clusters: the pairs in each cluster that verify -> edges
    semantic_decide     edges -> removed documents (dedup/resolve.py), as for near-duplicates

A pair counts if the cosine of the two stored vectors, computed in double precision and in a fixed order,
reaches `similarity`: which pairs verify is the same on every machine, and a document goes if and only if a
kept one of higher priority verifies against it. faiss only proposes pairs. A pair is missed if no cluster is
among the nearest ones of both documents; `probes` clusters for each make that rare.

Clusters are found by faiss on a sample of at most 256 MiB, chosen by a hash of each text, and in one thread.
So the same machine gives the same clusters. Processors with other vector units may round sums differently,
which can move a document between two clusters that are equally near, and so change which pairs are compared.

A task holds a block of a cluster's vectors and, within a quarter of its memory, those before it; a larger
cluster is put into a file. Rows arrive in the order of priority, but for equal source and length, so each
block is compared with those before it until a document has _MOST_EDGES that are alike and come first; such
documents are counted as `bounded`. Cost grows with the square of a cluster that is not full of duplicates.

    centroids.npy  float32[clusters, dimensions]
    clusters.npy   CLUSTER, the nearest cluster of each document of a part, and the distance to its centroid
    vectors.run    a vector in one of its clusters (`vector_table`)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from shardkit.errors import naming_extras
from shardkit.writers.dedup.config import SemanticDedupConfig
from shardkit.writers.dedup.outcomes import OUTCOMES, SplitTable, by_split, write_tables
from shardkit.writers.dedup.population import DOCUMENT, DOCUMENTS_FILE, Part, priority
from shardkit.writers.dedup.resolve import Resolved, Resolving, resolve
from shardkit.writers.dedup.tables import CHUNK_ROWS, RowFile, Rows, RowsWriter
from shardkit.writers.dedup.verify import EDGES, WAITING, direct
from shardkit.writers.exchange.exchange import RunWriter, Slice, Table, exchange
from shardkit.writers.exchange.sorted_runs import Limits
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.digests import MemoryBytes, RecipeKey
from shardkit.writers.execution.stage import RunTasks, Stage, partition_name
from shardkit.writers.kernels.token_means import cosines, squares, take_highest

TITLE = "semantic duplicates"
VECTORS_FILE, CENTROIDS_FILE, CLUSTERS_FILE = "vectors.npy", "centroids.npy", "clusters.npy"
SEMANTIC_DUPLICATE = "semantic_duplicate"  # reason in ledgers

CLUSTER = np.dtype([("cluster", "<i4"), ("distance", "<f8")])

_DECIMALS = 4  # of a distance, which thus rarely depends on how sums are rounded
_SAMPLE_BYTES = 256 << 20
_SAMPLED = 64  # vectors of the sample per cluster
_ITERATIONS, _SEED = 10, 1234  # of k-means
_ASSIGNED = 8192  # vectors per search for the nearest clusters
_BLOCK = 1024  # vectors of a cluster that are compared with as many others at a time
_MOST_EDGES = 32  # from how many documents of higher priority an edge leads to one, in each cluster

_PRIORITY_BITS = 40  # of a key; the bits above them are the cluster
_LENGTH_BITS = 28

_U64 = npt.NDArray[np.uint64]


def vector_table(dimensions: int) -> Table:
    """Return the table of vectors in clusters, by (cluster, source, longest text first)."""
    kind = [("key", "<u8"), ("number", "<u8"), ("priority", "<u8", (3,)), ("vector", "<f2", (dimensions,))]
    return Table("vectors.run", np.dtype(kind), packed=1)


@dataclass(frozen=True)
class SemanticResult:
    """The result of semantic duplicate removal: decisions per split (`removed`), totals, and `counts`.

    `assigned` are the commits, one per split, with the clusters of its documents.
    """

    removed: Sequence[SplitTable]
    decided: Resolved
    assigned: Sequence[Commit]
    counts: dict[str, int]


def default_clusters(documents: int) -> int:
    """Return the power of two that is nearest to the square root of the number of documents.

    Assigning a document takes time with the number of clusters, comparing it with the size of one: this
    number balances both, and changes seldom while a corpus grows.
    """
    return 1 << round(math.log2(max(1, documents)) / 2)


def remove_semantic(
    run: RunTasks,
    parts: Sequence[Part],
    names: Sequence[str],
    dimensions: int,
    config: SemanticDedupConfig,
    memory_bytes: int,
    limits: Limits,
) -> SemanticResult:
    """Run all stages behind `semantic_embed`, whose files `parts` have, one per split.

    `names` are the names of the tasks of each part.
    """
    starts = np.cumsum([0, *(part.documents for part in parts)], dtype=np.int64).tolist()
    wanted = default_clusters(starts[-1]) if config.clusters is None else config.clusters
    [[made]] = run([CLUSTERS.task("clusters", 0, parts, starts[-1], wanted, dimensions)])
    clusters = CLUSTERS.result(made).clusters
    tasks = []
    for part, first, name in zip(parts, starts[:-1], names, strict=True):
        args = part, first, made.file(CENTROIDS_FILE), min(config.probes, clusters), dimensions, memory_bytes
        tasks.append(ASSIGN.task(name, part.documents, *args))
    [assigned] = run(tasks)
    table, end = vector_table(dimensions), clusters << _PRIORITY_BITS
    readers = min(clusters, limits.partitions(starts[-1] * min(config.probes, clusters), table.dtype))
    moved = exchange(run, NEIGHBORS, table, assigned, readers=readers, end=end, limits=limits)
    tasks = []
    for number in range(readers):
        low, high = (clusters * at // readers << _PRIORITY_BITS for at in (number, number + 1))
        piece = moved.slice(low, high)
        name = partition_name(number, readers)
        tasks.append(NEIGHBORS.task(name, piece.bytes, piece, config.similarity, memory_bytes))
    [verified] = run(tasks)
    found = [NEIGHBORS.result(commit) for commit in verified]
    decided, lost, kept = resolve(
        run,
        parts,
        verified,
        (),
        edges=sum(one.edges for one in found),
        equals=0,
        memory_bytes=memory_bytes,
        limits=limits,
        stages=DECIDING,
    )
    removed = by_split(run, SEMANTIC_REMOVED, OUTCOMES, [*lost, *kept], len(parts), limits=limits)
    counts = {
        "documents": starts[-1],
        "clusters": clusters,
        "largest_cluster": max(one.largest for one in found),
        "compared": sum(one.compared for one in found),
        "verified": decided.edges,
        "bounded": sum(one.bounded for one in found),
    }
    return SemanticResult(removed, decided, assigned, counts)


@contextmanager
def _one_thread() -> Iterator[Any]:
    """Yield the module faiss, which uses one thread meanwhile. Raises MissingExtraError without it."""
    with naming_extras("dedup.semantic"):
        import faiss
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield faiss
    finally:
        faiss.omp_set_num_threads(before)


@dataclass(frozen=True, slots=True)
class Clusters:
    """The number of clusters, found on `sampled` documents; fewer than asked for if there are few."""

    clusters: int
    sampled: int


def find_clusters(
    folder: Path,
    parts: Sequence[Part],
    documents: int,
    clusters: Annotated[int, RecipeKey("dedup.semantic.clusters")],
    dimensions: int,
) -> Clusters:
    """Write the centroids of the clusters of a sample. It and its order depend on the texts alone."""
    wanted = min(_SAMPLED * clusters, _SAMPLE_BYTES // (4 * dimensions))
    bound = np.uint64(min((1 << 64) - 1, (wanted << 64) // max(1, documents)))
    ids, vectors = [np.empty(0, "V16")], [np.empty((0, dimensions), np.float16)]
    for part in parts:
        described = Rows(part.folder / DOCUMENTS_FILE, DOCUMENT)
        for start in range(0, len(described), CHUNK_ROWS):
            found = np.ascontiguousarray(described.read(start, min(start + CHUNK_ROWS, len(described)))["id"])
            chosen = np.flatnonzero(found.view(">u8")[:, 0].astype(np.uint64) <= bound)
            if len(chosen):
                ids.append(found[chosen].view("V16")[:, 0])
                vectors.append(RowFile(part.folder / VECTORS_FILE).read(start + chosen))
    sample = np.concatenate(vectors).astype(np.float32)
    del vectors
    sample = sample[np.argsort(np.concatenate(ids).view("S16"), kind="stable")]
    if not len(sample):  # every text has a hash above the bound
        return find_clusters(folder, parts, 0, clusters, dimensions)
    count = min(clusters, len(sample))
    with _one_thread() as faiss:
        means = faiss.Kmeans(
            dimensions,
            count,
            niter=_ITERATIONS,
            seed=_SEED,
            spherical=True,
            min_points_per_centroid=1,
            max_points_per_centroid=len(sample),
        )
        means.train(sample)
        centroids = np.ascontiguousarray(means.centroids, np.float32)
    with RowsWriter(folder / CENTROIDS_FILE, "<f4", width=dimensions) as writer:
        writer.write(centroids)
    return Clusters(count, len(sample))


CLUSTERS = Stage("semantic_clusters", TITLE, find_clusters, cost=10)


def assign_split(
    folder: Path,
    part: Part,
    first: int,
    centroids: Artifact,
    probes: Annotated[int, RecipeKey("dedup.semantic.probes")],
    dimensions: int,
    memory_bytes: MemoryBytes,
) -> None:
    """Write a part's vectors, each once for each of its nearest clusters; its first document has `first`."""
    stored = RowFile(centroids)
    means = stored.read(np.arange(stored.rows))
    table, described = vector_table(dimensions), Rows(part.folder / DOCUMENTS_FILE, DOCUMENT)
    with (
        _one_thread() as faiss,
        RunWriter(folder / table.file, table, memory_bytes=memory_bytes // 2) as run,
        RowsWriter(folder / CLUSTERS_FILE, CLUSTER) as nearest,
    ):
        index = faiss.IndexFlatIP(dimensions)
        index.add(means)
        vectors = RowFile(part.folder / VECTORS_FILE)
        for start in range(0, part.documents, _ASSIGNED):
            stop = min(start + _ASSIGNED, part.documents)
            found = vectors.read(np.arange(start, stop))
            wide = found.astype(np.float32)
            _, clusters = index.search(wide, probes)
            nearest.write(_nearest(wide, means, clusters[:, 0]))
            ranks = priority(described.read(start, stop), part.kind)
            lengths = np.minimum(~ranks[:, 0] & np.uint64((1 << 40) - 1), np.uint64((1 << _LENGTH_BITS) - 1))
            most = np.uint64((1 << (_PRIORITY_BITS - _LENGTH_BITS)) - 1)
            order = np.minimum(ranks[:, 0] >> np.uint64(40), most) << np.uint64(_LENGTH_BITS)
            order |= np.uint64((1 << _LENGTH_BITS) - 1) - lengths
            for probe in range(probes):
                rows = np.empty(stop - start, table.dtype)
                rows["key"] = clusters[:, probe].astype(np.uint64) << np.uint64(_PRIORITY_BITS) | order
                rows["number"] = np.arange(first + start, first + stop)
                rows["priority"], rows["vector"] = ranks, found
                run.write(rows)


def _nearest(
    vectors: npt.NDArray[np.float32], means: npt.NDArray[np.float32], clusters: npt.NDArray[np.int64]
) -> npt.NDArray[np.void]:
    """Return CLUSTER of vectors in these clusters, whose centroids are `means`."""
    rows = np.empty(len(vectors), CLUSTER)
    rows["cluster"] = clusters
    lengths = np.maximum(squares(means), np.finfo(np.float64).tiny)  # a centroid may be 0
    cosine = cosines(vectors, means, squares(vectors), lengths, np.arange(len(vectors)), clusters)
    rows["distance"] = np.round(np.maximum(1 - cosine, 0), _DECIMALS)
    return rows


ASSIGN = Stage("semantic_assign", TITLE, assign_split, cost=5)


@dataclass(frozen=True, slots=True)
class Neighbors:
    """Counts of a range of clusters: pairs `compared`, `edges`, `bounded` documents, the `largest` one."""

    compared: int
    edges: int
    bounded: int
    largest: int


def find_neighbors(
    folder: Path,
    vectors: Slice,
    similarity: Annotated[float, RecipeKey("dedup.semantic.similarity")],
    memory_bytes: MemoryBytes,
) -> Neighbors:
    """Write the edges among the documents of each cluster whose key is in the range of `vectors`."""
    compared = edges = bounded = largest = 0
    with (
        RunWriter(folder / EDGES.file, EDGES, memory_bytes=memory_bytes // 8) as found,
        RunWriter(folder / WAITING.file, WAITING, memory_bytes=memory_bytes // 16) as waiting,
    ):
        for cluster in _clusters_of(vectors, memory_bytes // 4, folder / ".cluster"):
            for block in cluster.blocks():
                pairs = _edges(block, cluster, similarity)
                compared += pairs.compared
                bounded += pairs.bounded
                for rows in pairs.edges:
                    found.write(rows)
                    waiting.write(np.unique(rows["lo"]).view(WAITING.dtype))
                    edges += len(rows)
            largest = max(largest, cluster.rows)
    return Neighbors(compared, edges, bounded, largest)


NEIGHBORS = Stage("semantic_neighbors", TITLE, find_neighbors, cost=20)


@dataclass(frozen=True)
class _Block:
    """Some documents of a cluster: their vectors, and the squares of their lengths."""

    numbers: _U64
    priorities: _U64
    vectors: npt.NDArray[np.float32]
    squares: npt.NDArray[np.float64]

    @classmethod
    def of(cls, rows: npt.NDArray[np.void]) -> _Block:
        vectors = np.ascontiguousarray(rows["vector"], np.float32)
        numbers, priorities = (np.ascontiguousarray(rows[name]) for name in ("number", "priority"))
        return cls(numbers, priorities, vectors, squares(vectors))


@dataclass
class _Cluster:
    """The rows of a cluster in the order in which they come; `held` are those that are complete blocks."""

    batches: Iterator[npt.NDArray[np.void]]
    memory_bytes: int
    spill: Path
    rows: int = 0
    held: list[npt.NDArray[np.void]] = field(default_factory=list)
    spilled: int = 0

    def blocks(self) -> Iterator[_Block]:
        """Yield the blocks of the cluster; each is among those `before` when the next one is yielded."""
        pending: list[npt.NDArray[np.void]] = []
        for batch in self.batches:
            pending.append(batch)
            if sum(map(len, pending)) >= _BLOCK:
                joined = np.concatenate(pending)
                whole = len(joined) // _BLOCK * _BLOCK
                for start in range(0, whole, _BLOCK):
                    yield from self._block(joined[start : start + _BLOCK])
                pending = [joined[whole:]]
        if sum(map(len, pending)):
            yield from self._block(np.concatenate(pending))
        if self.spilled:
            self.spill.unlink()

    def _block(self, rows: npt.NDArray[np.void]) -> Iterator[_Block]:
        yield _Block.of(rows)
        self.rows += len(rows)
        if len(self.held) * _BLOCK * rows.dtype.itemsize < self.memory_bytes:
            self.held.append(rows.copy())
            return
        with self.spill.open("ab" if self.spilled else "wb") as file:
            file.write(rows.tobytes())
        self.spilled += 1

    def before(self) -> Iterator[_Block]:
        """Yield the blocks before the last one that `blocks` yielded, in order."""
        for rows in self.held:
            yield _Block.of(rows)
        if self.spilled:
            dtype = self.held[0].dtype
            with self.spill.open("rb") as file:
                for _ in range(self.spilled):
                    yield _Block.of(np.frombuffer(file.read(_BLOCK * dtype.itemsize), dtype))


def _clusters_of(vectors: Slice, memory_bytes: int, spill: Path) -> Iterator[_Cluster]:
    """Yield the clusters of a slice; each must be read to its end before the next."""
    pieces = _pieces(vectors, memory_bytes)
    following = next(pieces, None)

    def of(cluster: int) -> Iterator[npt.NDArray[np.void]]:
        nonlocal following
        while following is not None and following[0] == cluster:
            rows = following[1]
            following = next(pieces, None)
            yield rows

    while following is not None:
        yield _Cluster(of(following[0]), memory_bytes, spill)


def _pieces(vectors: Slice, memory_bytes: int) -> Iterator[tuple[int, npt.NDArray[np.void]]]:
    """Yield (cluster, rows) in order; a cluster may have several pieces. Equal keys are put in priority."""
    for rows, _ in vectors.stream(memory_bytes):
        ranks, keys = rows["priority"], rows["key"]
        if (keys[1:] == keys[:-1]).any():
            rows = rows[np.lexsort((ranks[:, 2], ranks[:, 1], ranks[:, 0], keys))]
        clusters = (rows["key"] >> np.uint64(_PRIORITY_BITS)).astype(np.int64)
        for begin, end in pairwise([0, *(np.flatnonzero(np.diff(clusters)) + 1).tolist(), len(rows)]):
            if begin < end:
                yield int(clusters[begin]), rows[begin:end]


@dataclass
class _Pairs:
    edges: list[npt.NDArray[np.void]] = field(default_factory=list)
    compared: int = 0
    bounded: int = 0


def _edges(block: _Block, cluster: _Cluster, similarity: float) -> _Pairs:
    """Return the edges between a block's documents, and from those before it in its cluster."""
    pairs, taken = _Pairs(), np.zeros(len(block.numbers), np.int64)
    dimensions = block.vectors.shape[1]
    slack = (dimensions + 8) * 2.0**-22  # bounds the error of faiss's sums in single precision
    with _one_thread() as faiss:
        for other in chain(cluster.before(), (block,)):
            left = np.flatnonzero(taken <= _MOST_EDGES)
            if not len(left):
                break
            index = faiss.IndexFlatIP(dimensions)
            index.add(other.vectors)
            least = similarity * math.sqrt(float(block.squares.min() * other.squares.min())) - slack
            bounds, _, found = index.range_search(block.vectors[left], least)
            ours = np.repeat(left, np.diff(bounds.astype(np.int64)))
            pairs.compared += len(left) * len(other.numbers)
            if other is block:
                earlier = found < ours
                ours, found = ours[earlier], found[earlier]
            order = np.lexsort((found, ours))
            ours, found = ours[order], found[order]
            cosine = cosines(block.vectors, other.vectors, block.squares, other.squares, ours, found)
            used = take_highest(ours, cosine >= similarity, taken, _MOST_EDGES)
            if not used.any():
                continue
            ours, found, cosine = ours[used], found[used], cosine[used]
            rows = np.empty(len(ours), EDGES.dtype)
            a, b = other, block
            direct(rows, a.numbers[found], a.priorities[found], b.numbers[ours], b.priorities[ours])
            rows["jaccard"] = np.minimum(cosine, 1)
            pairs.edges.append(rows)
    pairs.bounded = int((taken > _MOST_EDGES).sum())
    return pairs


DECIDING = Resolving.of("semantic", TITLE)
SEMANTIC_REMOVED = Stage("semantic_removed", TITLE, write_tables)
