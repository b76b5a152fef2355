"""What a build asks of the store that its work folder is in: tasks, requests and bytes, stage by stage.

What an exchange merges, in how many tasks and by requests of which size, is asked of the `Limits` that the
exchange itself uses. The rest is one line a stage in `_stages`: how many tasks it has, what a task reads and
how many files it writes. Shares of the text and of the documents were counted on web text
(tests/benchmarks/bench_requests.py), and a test compares the whole with a build in a store that counts.

A stage reads objects from one end to the other (`_scans`), or ranges of keys of exchanged runs (`_slices`).
A task writes its files and its commit, one object each. The shards of an output in a store are sent by tasks,
in parts if they are large; what the driver sends (index, card, report) is not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, exp

import numpy as np

from shardkit.storage.object_file import _FIRST_BYTES, _MOST_BYTES
from shardkit.storage.s3_upload import PART_BYTES
from shardkit.writers.dedup.bands import BANDS
from shardkit.writers.dedup.bands import partitions_for as band_partitions
from shardkit.writers.dedup.candidates import PAIRS_BY_FIRST
from shardkit.writers.dedup.duplicates import DUPLICATES_OF_FILE
from shardkit.writers.dedup.exact import KEYS, WEIGHTED_KEYS
from shardkit.writers.dedup.lines import LINE_KEYS, LINE_LOSERS
from shardkit.writers.dedup.removals import OUTCOMES, SPLITS_PER_GROUP
from shardkit.writers.dedup.shingle_store import OWN
from shardkit.writers.dedup.signatures import LOST
from shardkit.writers.dedup.verify import block_bits
from shardkit.writers.filters.scores import ScoresConfig
from shardkit.writers.publish import _TASK_BYTES, _TASK_FILES
from shardkit.writers.recipe import Recipe
from shardkit.writers.runs import DEFAULT_LIMITS, EMPTY_BYTES, Limits
from shardkit.writers.score_tables import score_dtype
from shardkit.writers.stages.clean import JOINED_AT_ONCE, SIDE_FILES
from shardkit.writers.stages.graph import PARTITION_TEXT_BYTES
from shardkit.writers.stages.selection import Selection
from shardkit.writers.stages.split import PARTS, TABLE_BYTES
from shardkit.writers.stages.split import PROPOSED as DRAWN_DOCUMENTS
from shardkit.writers.stages.tokenize import PARITY_SPLITS, TOKENS, choose_partitions
from shardkit.writers.tokenizer import PARITY_BYTES

__all__ = ["Corpus", "Model", "Shape", "StageRequests", "compared_lines", "stage_requests", "together"]

# Of a byte of kept text: documents as they are stored, and texts of those in pairs, once for each block.
DOCUMENTS = 0.43
TEXTS = 0.26
# Of a document: bytes of its signature and keys, pairs that it is in, rounds of deciding who is removed.
SIGNATURE_BYTES = 520
PAIRS = 0.6
LOSERS = 0.1
TWIN_BYTES = 250  # a removed document, or one that stays for it, on their way to each other
CUT_LINES = 0.25  # of lines that are compared: what other documents have
DRAWN = 0.01  # of the documents, by `split`
_GUESSED_FOOTER_BYTES = 700  # with which a small run is read whole


def compared_lines(text_bytes: float, words: int | None) -> int:
    """How many lines kept text has that are long enough to be compared, or sampled windows of shared `words`.

    These begin (words // 3 + 2) / 2 words of 6 bytes apart.
    """
    return ceil(text_bytes / (120 if words is None else words))


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The datasets that a build makes, and its optional stages outside of duplicate removal."""

    tokenized: int = 1
    """How often the documents are read to be tokenized: once for each part and each `where` of rows."""
    packed: int = 1
    """Datasets of tokens."""
    texts: int = 0
    """Datasets of text."""
    parts: int = 0
    """Parts that `split` draws."""
    scores: int = 0
    """Filters that look up scores."""
    has_buckets: bool = False

    @classmethod
    def of(cls, recipe: Recipe) -> Shape:
        """Return the shape of a recipe's build."""
        packed = [one for one in recipe.datasets() if not one.output.is_text]
        return cls(
            tokenized=len({(one.part, Selection.of(one)) for one in packed}),
            packed=len(packed),
            texts=len(recipe.datasets()) - len(packed),
            parts=0 if recipe.split is None else len(recipe.split.parts),
            scores=sum(isinstance(config, ScoresConfig) for _, config in recipe.filter_chain()),
            has_buckets=recipe.buckets is not None and recipe.buckets.is_fitted,
        )


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """What comes out of the filters, and how it is cut. `scale` divides all sizes, as of small data."""

    splits: int
    documents: int
    text_bytes: int
    tokens: int
    token_bytes: int = 4
    memory: int = 2_000_000_000
    shard_bytes: int = 1 << 26
    has_url: bool = False
    has_exact: bool = True
    has_near: bool = True
    lines: int = 0
    """Lines that are compared; 0: none are removed."""
    is_sent: bool = False
    """Whether the output is in a store, too."""
    bands: int = 14
    shape: Shape = field(default_factory=Shape)
    scale: int = 1
    limits: Limits = field(init=False)

    def __post_init__(self) -> None:
        limits = DEFAULT_LIMITS.within(self.memory)
        object.__setattr__(self, "limits", limits.divided(self.scale) if self.scale > 1 else limits)

    @property
    def task_memory(self) -> int:
        """What a task of duplicate removal may hold."""
        return self.memory // self.scale // 5

    def partitions(self) -> int:
        """Tasks of stage `pack`. RecipeError if there are too many."""
        memory, shard = self.memory // self.scale, self.shard_bytes // self.scale
        needed = choose_partitions(self.text_bytes, self.documents, memory, shard_bytes=shard)
        return max(needed, ceil(self.text_bytes / (PARTITION_TEXT_BYTES // self.scale)))

    def band_partitions(self) -> int:
        """Tasks of stage `candidates`. RecipeError if there would have to be more than are possible."""
        return band_partitions(self.documents * self.bands, self.task_memory)


@dataclass(frozen=True, slots=True)
class StageRequests:
    """What the tasks of a stage ask for, all together."""

    stage: str
    tasks: int
    gets: int
    puts: int
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of an exchange, in `segments` files each, together of `bytes` in rows of `row_bytes`."""

    count: int
    bytes: float
    row_bytes: float
    segments: int = 1


def stage_requests(corpus: Corpus) -> list[StageRequests]:
    """All stages from cleaned documents to shards, merges of exchanges among them.

    RecipeError if the build cannot be made with the memory that a task has.
    """
    model = Model(corpus)
    model.add_stages()
    return model.stages


@dataclass(slots=True)
class Model:
    """Collects the stages of a build of `corpus`."""

    corpus: Corpus
    stages: list[StageRequests] = field(default_factory=list)

    def add_stages(self) -> None:
        """The stages in order, as far as the build has them."""
        c = self.corpus
        text = c.text_bytes * DOCUMENTS
        readers = c.limits.partitions(c.documents, KEYS.dtype)
        keys_bytes = (1 + c.has_url) * c.documents * KEYS.dtype.itemsize
        looked_up = self._add_scores()
        files = 3 + c.has_url + c.shape.has_buckets
        self._add("clean", c.splits, looked_up * c.splits, 0, files=files, written=text + keys_bytes)
        if c.has_url:
            keys = self.exchange("url", KEYS.dtype, c.splits, c.documents, readers)
            self._add("url", readers, *self._slices(keys, readers), files=1)
            self._by_split("url_removed", OUTCOMES.dtype, readers, c.documents * 0.01)
        if c.has_exact:
            if c.has_url:
                read = c.documents * KEYS.dtype.itemsize
                written = c.documents * WEIGHTED_KEYS.dtype.itemsize
                self._add("url_left", c.splits, 2 * c.splits, read, files=1, written=written)
            dtype = WEIGHTED_KEYS.dtype if c.has_url else KEYS.dtype
            keys = self.exchange("exact", dtype, c.splits, c.documents, readers)
            self._add("exact", readers, *self._slices(keys, readers), files=1)
            self._by_split("exact_removed", OUTCOMES.dtype, readers, c.documents * 0.01)
        if c.lines:
            self._add_lines(text)
        if c.has_near:
            self._add_near(text, readers)
        if c.shape.has_buckets:
            self._add("buckets", 1, 3 * c.splits, 16 * c.documents)
        if c.shape.parts:
            self._add_split(text)
        rows = self._add_rows(text) if c.shape.packed else (0, 0, 0.0)
        texts = self._add_texts(text) if c.shape.texts else (0, 0.0)
        removed = c.documents * LOSERS * (c.has_url or c.has_exact or c.has_near)
        files = max(1, ceil(removed / DUPLICATES_OF_FILE))
        twins = self.exchange("duplicates", None, c.splits, 2 * removed, files, TWIN_BYTES)
        self._add("duplicates", files, *self._slices(twins, files), files=1, written=removed * TWIN_BYTES)
        joined, level = c.splits, 0
        while joined > 1 or level == 0:
            stage = f"{SIDE_FILES}-merge-{level}" if level else SIDE_FILES
            self._add(stage, ceil(joined / JOINED_AT_ONCE), joined, files=1)
            joined, level = ceil(joined / JOINED_AT_ONCE), level + 1
        if c.is_sent:
            self._add_upload(rows[0] + texts[0], rows[1], rows[2] + texts[1])

    def _add_rows(self, text: float) -> tuple[int, int, float]:
        """Tokenize each part and selection, pack them for each dataset: (shards, other files, bytes)."""
        c = self.corpus
        gets, read = self._scans(text, c.splits)
        times = c.shape.tokenized
        tokenized = times * c.splits
        self._add("tokenize", tokenized, times * gets, times * read, files=2, written=self._spilled)
        sampled = min(c.splits, PARITY_SPLITS)
        self._add("parity", 1, 3 * sampled, PARITY_BYTES)
        outputs = ceil(c.shape.packed / (1 + c.shape.parts))
        partitions = c.partitions()
        row = TOKENS.dtype.itemsize + c.tokens * c.token_bytes / max(1, c.documents)
        tokens = self.exchange("tokens", None, c.splits, c.documents, partitions, row)
        shards = ceil(c.tokens * c.token_bytes / partitions / (c.shard_bytes / c.scale))
        written = c.tokens * c.token_bytes
        drawn = _Runs(c.splits, DRAWN * tokens.bytes + c.splits * EMPTY_BYTES, row)
        small = self._slices(drawn, 1)
        gets, read = self._slices(tokens, partitions)
        gets, read = gets + c.shape.parts * small[0], read + c.shape.parts * small[1]
        tasks = outputs * (partitions + c.shape.parts)
        self._add("pack", tasks, outputs * gets, outputs * read, files=shards + 2, written=outputs * written)
        self._add("provenance", tasks, 2 * tasks, files=1)
        return tasks * shards, tasks, outputs * written

    def _add_texts(self, text: float) -> tuple[int, float]:
        """Write each dataset of text, by tasks of neighboring splits: (files, bytes)."""
        c = self.corpus
        shard_bytes = c.shard_bytes / c.scale
        tasks = max(1, min(c.splits, ceil(c.text_bytes / shard_bytes)))
        shards = max(tasks, ceil(c.text_bytes / shard_bytes))
        gets, read = self._scans(text, c.splits)
        outputs = ceil(c.shape.texts / (1 + c.shape.parts))
        times = c.shape.texts
        files = ceil(shards / tasks) + 1
        self._add("text", times * tasks, times * gets, times * read, files=files, written=outputs * text)
        return times * shards, outputs * text

    def _add_scores(self) -> int:
        """Sort a row for each document and filter; return the requests of a split that looks them up."""
        c, dtype = self.corpus, score_dtype(1)
        readers = c.limits.partitions(c.documents, dtype)
        size, times = c.documents * dtype.itemsize, c.shape.scores
        for _ in range(times):
            self._add("scores", c.splits, 0, files=1, written=size)
            runs = self.exchange("scores", dtype, c.splits, c.documents, readers)
            self._add("score_tables", readers, *self._slices(runs, readers), files=2, written=size)
        return 2 * readers * times

    def _add_split(self, text: float) -> None:
        """All documents are looked up in tables of the n-grams of those that are proposed."""
        c = self.corpus
        proposed = c.documents * DRAWN
        ngrams = 8 * c.text_bytes / 6 / max(1, c.documents)  # of a document: one begins with each word
        row = DRAWN_DOCUMENTS.dtype.itemsize + ngrams
        tables = max(1, ceil(c.text_bytes * DRAWN * TABLE_BYTES / c.task_memory))
        gets, read = self._scans(text, c.splits)
        self._add("split_propose", c.splits, gets, read, files=1, written=proposed * row)
        found = self.exchange("split_propose", None, c.splits, proposed, tables, row)
        self._add("split_tables", tables, *self._slices(found, tables), files=4, written=2 * proposed * row)
        looked = c.splits * tables
        size = looked * 2 * proposed * row / tables
        self._add("split_probe", looked, tables * gets + 4 * looked, tables * read + size, files=1)
        alike = self.exchange("split_probe", KEYS.dtype, looked, proposed, tables)
        self._add("split_choose", tables, *self._slices(alike, tables), files=1)
        self._add("split_rows", tables, 2 * tables, files=1)
        self._by_split("split", PARTS.dtype, tables, proposed)

    @property
    def _spilled(self) -> float:
        return self.corpus.tokens * self.corpus.token_bytes + self.corpus.documents * TOKENS.dtype.itemsize

    def _add_near(self, text: float, readers: int) -> None:
        c = self.corpus
        signatures = c.documents * SIGNATURE_BYTES
        self._add("signatures", c.splits, *self._scans(text, c.splits), files=3, written=signatures)
        self._add("parts", 1, 0, files=1)
        keys = self.exchange("equal", KEYS.dtype, c.splits, c.documents, readers)
        self._add("equal", readers, *self._slices(keys, readers), files=2)
        lost = self.exchange("lost", LOST.dtype, readers, c.documents * LOSERS, c.splits)
        gets, read = self._scans(signatures, c.splits)
        more, also = self._slices(lost, c.splits)
        entries = c.documents * c.bands
        size = entries * BANDS.dtype.itemsize
        self._add("bands", c.splits, gets + more, read + also, files=1, written=size)
        candidates = c.band_partitions()
        bands = self.exchange("bands", BANDS.dtype, c.splits, entries, candidates)
        self._add("candidates", candidates, *self._slices(bands, candidates), files=2)
        self._add_verified(text, candidates)

    def _add_verified(self, text: float, candidates: int) -> None:
        c = self.corpus
        pairs, side = c.documents * PAIRS, PAIRS_BY_FIRST.dtype
        blocks = ceil(c.documents / (1 << block_bits(c.documents, int(text), c.task_memory)))
        firsts = self.exchange("pairs", side, candidates, pairs, max(c.splits, blocks))
        seconds = self.exchange("partners", side, candidates, pairs, c.splits)
        parts = [self._scans(text, c.splits), self._slices(firsts, c.splits)]
        parts.append(self._slices(seconds, c.splits))
        texts = c.text_bytes * TEXTS
        gets, read = (sum(amounts) for amounts in zip(*parts, strict=True))
        self._add("shingles", c.splits, gets, read, files=2, written=texts)
        row = OWN.dtype.itemsize + texts / max(1.0, 2 * pairs)
        own = self.exchange("own", None, c.splits, texts * 0.22 / row, blocks, row)
        guests = self.exchange("guests", None, c.splits, texts * 0.78 / row, blocks, row)
        read_by_block = [self._slices(runs, blocks) for runs in (firsts, own, guests)]
        gets, read = (sum(amounts) for amounts in zip(*read_by_block, strict=True))
        self._add("verify", blocks, gets, read, files=3)
        self._add("near", 1, 2 * blocks, pairs * PAIRS_BY_FIRST.dtype.itemsize, files=2)
        self._add("near_equal", blocks, 2 * blocks, c.documents * LOSERS * 24, files=1)
        self._add("near_lost", c.splits, 4 * c.splits, c.documents * 24, files=3)
        self._add("near_kept", c.splits, 5 * c.splits, c.documents * 24, files=2)
        self._by_split("near_removed", OUTCOMES.dtype, 2 * c.splits, c.documents * 2 * LOSERS)

    def _add_lines(self, text: float) -> None:
        c = self.corpus
        size = c.lines * LINE_KEYS.dtype.itemsize
        self._add("line_keys", c.splits, *self._scans(text, c.splits), files=2, written=size)
        readers = c.limits.partitions(c.lines, LINE_KEYS.dtype)
        keys = self.exchange("line_keys", LINE_KEYS.dtype, c.splits, c.lines, readers)
        cut = c.lines * CUT_LINES
        written = cut * LINE_LOSERS.dtype.itemsize
        self._add("line_losers", readers, *self._slices(keys, readers), files=1, written=written)
        self._by_split("lines_removed", LINE_LOSERS.dtype, readers, cut)
        gets, read = self._scans(text, c.splits)
        self._add("lines", c.splits, gets + 2 * c.splits, read + written, files=3, written=text)

    def _add_upload(self, shards: int, partitions: int, size: float) -> None:
        """Tasks that look whether a file is there, read it, and send it in one request or in parts."""
        c = self.corpus
        tasks = ceil(max((shards + partitions) / _TASK_FILES, size / (_TASK_BYTES / c.scale)))
        parts = ceil(c.shard_bytes / PART_BYTES)
        puts = shards * (parts + 2 if parts > 1 else 1) + partitions
        files = shards + partitions
        gets, read = self._scans(size, files)
        self._add("upload", tasks, files + gets, read, written=size, sent=puts)

    def _by_split(self, stage: str, dtype: np.dtype[np.void], runs: int, rows: float) -> None:
        """Tables of what was decided about each split, one file for a group of splits."""
        groups = ceil(self.corpus.splits / SPLITS_PER_GROUP)
        found = self.exchange(stage, dtype, runs, rows, groups)
        self._add(stage, groups, *self._slices(found, groups), files=1)

    def exchange(
        self,
        name: str,
        dtype: np.dtype[np.void] | None,
        runs: int,
        rows: float,
        readers: int,
        row_bytes: float = 0.0,
    ) -> _Runs:
        """What readers meet, after the merges that the limits ask for."""
        limits = self.corpus.limits
        row_bytes = row_bytes if dtype is None else dtype.itemsize
        found = _Runs(runs, rows * row_bytes + runs * EMPTY_BYTES, row_bytes)
        level = 0
        while limits.merges(found.count, int(found.bytes), readers):
            level += 1
            groups = ceil(found.count / limits.fan_in)
            ranges = limits.merge_tasks(int(found.bytes / groups))
            fan_in = found.count / groups
            piece = _Runs(ceil(fan_in), found.bytes / groups, row_bytes, found.segments)
            gets, read = self._slices(piece, ranges, limits.merge_memory_bytes)
            stage = f"{name}-merge-{level}"
            self._add(stage, groups * ranges, gets * groups, read * groups, files=1, written=found.bytes)
            found = _Runs(groups, found.bytes, row_bytes, ranges)
        return found

    def _slices(self, runs: _Runs, readers: int, memory_bytes: int | None = None) -> tuple[float, float]:
        """Requests and bytes of `readers` that each read a range of keys of all runs."""
        limits = self.corpus.limits
        memory = limits.read_memory_bytes if memory_bytes is None else memory_bytes
        met = runs.count * readers
        footers = met * (1 + (runs.segments - 1) / readers)
        file_bytes = runs.bytes / runs.count / runs.segments
        if file_bytes <= limits.block_bytes + _GUESSED_FOOTER_BYTES:
            return footers, footers * file_bytes  # the footer's request has all of it
        piece = runs.bytes / met
        block = limits.block_bytes + runs.row_bytes  # is full with the row that exceeds it
        chunk = max(limits.chunk_bytes(memory, runs.count) - block / 2, block)
        some = 1 - exp(-piece / max(1.0, runs.row_bytes))  # of the pieces have any row
        chunks = some * met * max(1.0, piece / chunk + 0.5)
        footer_bytes = min(file_bytes, 65_536, 40 * (file_bytes / limits.block_bytes + 16))
        return footers + chunks, footers * footer_bytes + some * met * (piece + block)

    def _scans(self, size: float, objects: int) -> tuple[float, float]:
        """Requests and bytes that read `objects` of together `size` from one end to the other."""
        first, most = _FIRST_BYTES / self.corpus.scale, _MOST_BYTES / self.corpus.scale
        left, requests = size / objects, 0.0
        while first < most and left > 0:
            left, first, requests = left - first, 2 * first, requests + 1
        requests += max(0.0, left / most)
        return (requests + 1) * objects, size  # and the end of the file, with its index

    def _add(
        self,
        stage: str,
        tasks: int,
        gets: float,
        read: float = 0,
        *,
        files: int = 0,
        written: float = 0,
        sent: int = 0,
    ) -> None:
        """`files`: that each task writes; `sent`: requests that write somewhere else."""
        puts = tasks * (files + 1) + sent
        self.stages.append(StageRequests(stage, tasks, ceil(gets), puts, ceil(read), ceil(written)))


def together(stages: Sequence[StageRequests]) -> StageRequests:
    """All of them as one."""
    names = ("tasks", "gets", "puts", "read_bytes", "written_bytes")
    return StageRequests("all", *(sum(getattr(stage, name) for stage in stages) for name in names))
