"""Measures near-duplicate removal: recall on planted copies, and precision on a sample of what was removed.

`plant` makes copies of known similarity. A planted document is a copy of an input in which words are replaced
by words that no corpus contains (random hexadecimal numbers), spread over the text: each replaced word takes
`ngram` n-grams out of the set and adds as many new ones, so that copies spread evenly over similarities of
0.5 to 1. Their similarity is then counted exactly, n-gram by n-gram, from the two texts. Originals are the
documents with the lowest hash(seed, "planted", document id) among those with 50 to 20,000 n-grams, so neither
splits nor their order decide anything. The folder receives
  planted.npy       PLANTED, one row a copy
  documents.arrow   the copies in the same order (DOCUMENT_SCHEMA); `source` is the original's, so that a
                    copy is compared where its original is
Where n-grams are of characters, single characters are replaced by rare ideographs. Cost: ids are read once,
texts only where an original may be; about 300 bytes of memory for each copy, and one batch of documents.

`measure_recall` counts, for each band of similarity, the planted copies that became a candidate pair with
their original, next to the number that the S-curve of bands and rows gives for exactly these similarities
(`expected`) and the 95 % interval of the measured share (Wilson's, which is right for shares near 1, too).
`measure_precision` compares the words of removed documents and of those that stay in their place again, as
strings instead of hashes, for a sample drawn by hash of content ranks. Both are functions of the documents
alone. Memory: the planted rows, the sample, and pieces of `PIECE_ROWS` rows of the stages' files.
"""

from __future__ import annotations

import heapq
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, pairwise
from math import sqrt
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from shardkit.card import PairFacts, PrecisionFacts, RecallBand, RecallFacts
from shardkit.writers.dedup.bands import probability
from shardkit.writers.dedup.candidates import PAIR_RUNS_FILE, PAIRS_FILE
from shardkit.writers.dedup.config import MinHashConfig, NearDedupConfig
from shardkit.writers.dedup.population import DOCUMENT, DOCUMENTS_FILE, PAIR, Part, Population
from shardkit.writers.dedup.removals import document_keys
from shardkit.writers.dedup.resolve import NEAR_LOSER
from shardkit.writers.dedup.tables import Rows
from shardkit.writers.dedup.verify import PLANTED_EDGES_FILE
from shardkit.writers.documents import (
    BATCH_DOCUMENTS,
    BATCH_TEXT_BYTES,
    DOCUMENT_SCHEMA,
    document_ids,
    keyed_hashes,
)
from shardkit.writers.exchange import Slice
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.kernels.shingles import text_units

__all__ = [
    "BAND_EDGES",
    "NAMESPACE",
    "PLANTED",
    "PLANTED_FILE",
    "TEXTS_FILE",
    "binomial_interval",
    "measure_precision",
    "measure_recall",
    "ngrams",
    "plant",
    "read_rows",
]

PLANTED = np.dtype(
    [
        ("original_split", "<i4"),
        ("original_row", "<i8"),  # in the split's documents.arrow
        ("shared", "<i8"),  # distinct n-grams that both have
        ("union", "<i8"),  # distinct n-grams that either has
    ]
)

PLANTED_FILE = "planted.npy"

TEXTS_FILE = "documents.arrow"

NAMESPACE = "shardkit:planted"  # the file name of all copies; their record is the rank of the original's hash

# Below 50 n-grams one replaced word is a leap in similarity; above 20,000 a copy costs more than it tells.
MIN_NGRAMS, MAX_NGRAMS = 50, 20_000

TARGETS = ((0.52, 0.6), (0.6, 0.7), (0.7, 0.8), (0.8, 0.85), (0.85, 0.9), (0.9, 0.95), (0.95, 0.995))

_GOLDEN = 0.6180339887498949  # its multiples, modulo 1, spread evenly whatever their number

_IDEOGRAPHS = range(0x20000, 0x2A6D0)  # CJK Extension B: letters, without case, that texts rarely have

_PIECES = {"words": re.compile(r"\w+"), "characters": re.compile(r"\w")}


class _Original(NamedTuple):
    """Ordered so that the highest hash, then the highest id, comes first: what a heap gives up first."""

    inverse_hash: int
    inverse_id: int
    split: int
    row: int


def ngrams(text: str, config: MinHashConfig) -> list[str]:
    """The n-grams of a text as strings, in order and with repetitions."""
    units = text_units(text, config.unit)
    joint = " " if config.unit == "words" else ""
    count = max(1, len(units) - config.ngram + 1) if units else 0
    return [joint.join(units[at : at + config.ngram]) for at in range(count)]


def plant(
    documents: Sequence[Artifact],
    excluded: Callable[[int], npt.NDArray[np.int64]],
    config: MinHashConfig,
    *,
    count: int,
    seed: int,
    folder: Path,
) -> None:
    """Write up to `count` copies of documents (one Arrow file a split) into `folder`.

    `excluded(split)` gives the rows of a split that cannot be originals because they are removed already.
    """
    originals = _choose(documents, excluded, config, count, seed)
    ranks = {(original.split, original.row): rank for rank, original in enumerate(originals)}
    by_split = groupby(sorted(ranks), key=lambda place: place[0])
    rows = np.empty(len(originals), PLANTED)
    written = 0
    with _document_writer(folder / TEXTS_FILE) as write:
        for split, places in by_split:
            for row, batch in read_rows(documents[split], [row for _, row in places]):
                text: str = batch.column("text")[0].as_py()
                rank = ranks[split, row]
                [copy_id] = document_ids(NAMESPACE, [rank])
                before = ngrams(text, config)
                copy = _near_copy(text, before, _target(rank), copy_id, config)
                known, found = set(before), set(ngrams(copy, config))
                rows[written] = (split, row, len(known & found), len(known | found))
                write(copy_id, batch.column("source")[0].as_py(), rank, copy)
                written += 1
    np.save(folder / PLANTED_FILE, rows)
    assert written == len(originals)


def read_rows(documents: Artifact, rows: Sequence[int]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """(row, a batch of that document alone) for ascending rows; batches without any are not decoded."""
    with documents.open_arrow() as file, documents.open_arrow() as same:
        sizes = pa.ipc.open_file(same, options=pa.ipc.IpcReadOptions(included_fields=[1]))
        reader = pa.ipc.open_file(file)
        at = start = 0
        for number in range(sizes.num_record_batches):
            if at == len(rows):
                return
            stop = start + sizes.get_batch(number).num_rows
            if rows[at] < stop:
                batch = reader.get_batch(number)
                while at < len(rows) and rows[at] < stop:
                    yield rows[at], batch.slice(rows[at] - start, 1)
                    at += 1
            start = stop
        assert at == len(rows), f"{documents} has {start:,} rows, not row {rows[at]:,}"


def _choose(
    documents: Sequence[Artifact],
    excluded: Callable[[int], npt.NDArray[np.int64]],
    config: MinHashConfig,
    count: int,
    seed: int,
) -> list[_Original]:
    """The originals, lowest hash first."""
    heap: list[_Original] = []
    for split, texts_of_split in enumerate(documents):
        unwanted = excluded(split)
        with texts_of_split.open_arrow() as file, texts_of_split.open_arrow() as same:
            reader = pa.ipc.open_file(file)
            only_ids = pa.ipc.open_file(same, options=pa.ipc.IpcReadOptions(included_fields=[0]))
            start = 0
            for number in range(only_ids.num_record_batches):
                ids: list[bytes] = only_ids.get_batch(number).column("document_id").to_pylist()
                hashes = keyed_hashes(ids, seed, "planted")
                allowed = ~np.isin(np.arange(start, start + len(ids)), unwanted)
                if len(heap) == count:
                    allowed &= hashes <= (-heap[0].inverse_hash if heap else 0)
                order = np.flatnonzero(allowed)[np.argsort(hashes[allowed], kind="stable")]
                found = [
                    _Original(-int(hashes[row]), -int.from_bytes(ids[row], "big"), split, start + row)
                    for row in order.tolist()
                ]
                start += len(ids)
                if found and count:
                    texts = reader.get_batch(number).column("text")
                    _offer(heap, found, start - len(ids), texts, config, count)
    return sorted(heap, reverse=True)


def _offer(
    heap: list[_Original],
    found: Sequence[_Original],
    start: int,
    texts: pa.LargeStringArray,
    config: MinHashConfig,
    count: int,
) -> None:
    """Take in those that are low enough and long enough; lengths are looked at last: that takes longest."""
    for original in found:
        if len(heap) == count and original < heap[0]:
            continue
        text = unicodedata.normalize("NFC", texts[original.row - start].as_py())
        pieces = len(_PIECES[config.unit].findall(text))
        if MIN_NGRAMS <= pieces - config.ngram + 1 <= MAX_NGRAMS:
            (heapq.heappush if len(heap) < count else heapq.heappushpop)(heap, original)


def _target(rank: int) -> float:
    """The similarity to aim at: band after band, and evenly within each."""
    low, high = TARGETS[rank % len(TARGETS)]
    return low + (high - low) * (rank // len(TARGETS) * _GOLDEN % 1)


def _near_copy(text: str, before: Sequence[str], target: float, key: bytes, config: MinHashConfig) -> str:
    """The text with as many units replaced as bring the similarity of the n-grams near to the target.

    K of N n-grams exchanged leave (N - K) / (N + K). A unit amid the text is in n of them; the rest of K is
    taken from the end, where the last r units are in r.
    """
    text = unicodedata.normalize("NFC", text)
    pieces = list(_PIECES[config.unit].finditer(text))
    n, distinct = config.ngram, len(set(before))
    exchanged = max(1, round(distinct * (1 - target) / (1 + target)))
    inner, last = divmod(exchanged, n)
    first, stop = n - 1, len(pieces) - last - n + 1
    places = [first + (2 * number + 1) * (stop - first) // (2 * inner) for number in range(inner)]
    places += range(len(pieces) - last, len(pieces))
    result, end = [], 0
    for number, place in enumerate(places):
        piece = pieces[place]
        result += [text[end : piece.start()], _foreign(key, number, config)]
        end = piece.end()
    return "".join([*result, text[end:]])


def _foreign(key: bytes, number: int, config: MinHashConfig) -> str:
    """A word, or a character, that the corpus has not."""
    value = xxhash.xxh3_64_intdigest(key, number)
    if config.unit == "characters":
        return chr(_IDEOGRAPHS[value % len(_IDEOGRAPHS)])
    return f"{value:016x}"


@contextmanager
def _document_writer(path: Path) -> Iterator[Callable[[bytes, int, int, str], None]]:
    """Writes (document id, source, record, text) as batches of bounded size."""
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    rows: list[tuple[bytes, int, int, str]] = []
    text_bytes = 0

    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, DOCUMENT_SCHEMA, options=options) as out:

        def flush() -> None:
            if rows:
                ids, sources, records, texts = map(list, zip(*rows, strict=True))
                nothing = [None] * len(rows)
                columns = [ids, sources, [NAMESPACE] * len(rows), records, texts, nothing, nothing, nothing]
                arrays = [pa.array(c, f.type) for c, f in zip(columns, DOCUMENT_SCHEMA, strict=True)]
                out.write_batch(pa.record_batch(arrays, schema=DOCUMENT_SCHEMA))
            rows.clear()

        def write(document_id: bytes, source: int, record: int, text: str) -> None:
            nonlocal text_bytes
            rows.append((document_id, source, record, text))
            text_bytes += len(text)
            if len(rows) == BATCH_DOCUMENTS or text_bytes >= BATCH_TEXT_BYTES:
                flush()
                text_bytes = 0

        yield write
        flush()


BAND_EDGES = (0.0, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0)

PIECE_ROWS = 1 << 20  # 16 MB of pairs, 44 MB of edges

TEXT_BYTES = 64 << 20  # of sampled documents, read together

EXCERPTS, EXCERPT_CHARACTERS = 10, 120

_NORMAL_95 = 1.959963984540054

Columns = tuple[npt.NDArray[np.uint64], ...]


def measure_recall(
    planted: npt.NDArray[np.void],
    population: Population,
    pair_folders: Sequence[Artifact],
    edge_folders: Sequence[Artifact],
    bands_and_rows: tuple[int, int],
    *,
    lost: Slice | None = None,
) -> RecallFacts:
    """Count planted pairs by band of similarity; bands without any are left out.

    `planted` are PLANTED rows; `lost` are rows of LOST, documents that were taken out before candidates were
    sought: their copies have nothing to meet and are left out.
    """
    originals = _originals(planted, population)
    copies = np.arange(population.planted.start, population.planted.stop, dtype=np.uint64)
    assert len(copies) == len(planted), "signatures of other copies"
    compared = originals >= 0
    if lost is not None:
        keys = document_keys(*population.locate(np.maximum(originals, 0).astype(np.uint64)))
        for rows, _ in lost.stream(lost.limits.read_memory_bytes):
            compared &= ~np.isin(keys, rows["key"])
    chosen = np.flatnonzero(compared)
    pairs: Columns = (originals[chosen].astype(np.uint64), copies[chosen])
    candidates, verified = np.zeros(len(chosen), np.bool_), np.zeros(len(chosen), np.bool_)
    for folder in pair_folders:
        candidates |= _pairs_in(folder, pairs)
    for folder in edge_folders:
        verified |= _edges_in(folder, pairs)
    similarity = planted["shared"][chosen] / np.maximum(planted["union"][chosen], 1)
    bands = _by_band(similarity, candidates, verified, *bands_and_rows)
    return RecallFacts(bands, left_out=len(planted) - len(chosen))


def binomial_interval(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share: (0, 1) without trials."""
    if not trials:
        return 0.0, 1.0
    z = _NORMAL_95**2 / trials
    share = successes / trials
    half = _NORMAL_95 * sqrt(share * (1 - share) / trials + z / (4 * trials))
    return max(0.0, (share + z / 2 - half) / (1 + z)), min(1.0, (share + z / 2 + half) / (1 + z))


def _by_band(
    similarity: npt.NDArray[np.float64],
    candidates: npt.NDArray[np.bool_],
    verified: npt.NDArray[np.bool_],
    bands: int,
    rows: int,
) -> list[RecallBand]:
    table = []
    for low, high in pairwise(BAND_EDGES):
        inside = (similarity >= low) & ((similarity < high) | (high == 1.0))
        count, found = int(inside.sum()), int((inside & candidates).sum())
        if count:
            expected = sum(probability(value, bands, rows) for value in sorted(similarity[inside].tolist()))
            least, most = binomial_interval(found, count)
            table.append(
                RecallBand(
                    low,
                    high,
                    pairs=count,
                    candidates=found,
                    verified=int((inside & verified).sum()),
                    expected=round(expected, 3),
                    interval=(round(least, 6), round(most, 6)),
                )
            )
    return table


def _originals(planted: npt.NDArray[np.void], population: Population) -> npt.NDArray[np.int64]:
    """Numbers of the originals, -1 where a document is not compared at all."""
    numbers = np.full(len(planted), -1, np.int64)
    for split in np.unique(planted["original_split"]).tolist():
        chosen = np.flatnonzero(planted["original_split"] == split)
        at, known = _rows_of(_documents(population.parts[split]), planted["original_row"][chosen])
        numbers[chosen[known]] = population.starts[split] + at[known]
    return numbers


def _documents(part: Part) -> npt.NDArray[np.void]:
    """All rows of a part's table: a split's."""
    documents: npt.NDArray[np.void] = Rows(part.folder / DOCUMENTS_FILE, DOCUMENT).read()
    return documents


def _rows_of(
    documents: npt.NDArray[np.void], rows: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Where rows of documents.arrow are in the table, and whether they are there."""
    known = np.ascontiguousarray(documents["row"])
    at = np.searchsorted(known, rows)
    inside = at < len(known)
    inside[inside] = known[at[inside]] == rows[inside]
    return at, inside


def _pairs_in(folder: Artifact, wanted: Columns) -> npt.NDArray[np.bool_]:
    """Which (a, b) are in any run of a folder of candidates."""
    edges = Rows(folder / PAIR_RUNS_FILE, "<i8").read().tolist()
    found = np.zeros(len(wanted[0]), np.bool_)
    entries = Rows(folder / PAIRS_FILE, PAIR, header=False)
    for begin, end in pairwise(edges):
        for start in range(begin, end, PIECE_ROWS):
            found |= _contained(wanted, entries.read(start, min(start + PIECE_ROWS, end)), _pair_columns)
    return found


def _edges_in(folder: Artifact, wanted: Columns) -> npt.NDArray[np.bool_]:
    """Which (original, copy) are verified edges."""
    entries = Rows(folder / PLANTED_EDGES_FILE, PAIR)
    return _contained(wanted, entries.read(), _pair_columns)


def _pair_columns(pairs: npt.NDArray[np.void]) -> Columns:
    return pairs["a"], pairs["b"]


def _contained(
    wanted: Columns, entries: npt.NDArray[np.void], columns: Callable[[npt.NDArray[np.void]], Columns]
) -> npt.NDArray[np.bool_]:
    """Which keys are among sorted entries, by bisection; a key has several columns, the first counts most."""
    low = np.zeros(len(wanted[0]), np.int64)
    high = np.full(len(low), len(entries), np.int64)
    while (open_ := np.flatnonzero(low < high)).size:
        middle = (low[open_] + high[open_]) // 2
        below, equal = np.zeros(len(open_), np.bool_), np.ones(len(open_), np.bool_)
        for have, want in zip(columns(entries[middle]), wanted, strict=True):
            below |= equal & (have < want[open_])
            equal &= have == want[open_]
        low[open_[below]] = middle[below] + 1
        high[open_[~below]] = middle[~below]
    found = low < len(entries)
    at = np.flatnonzero(found)
    for have, want in zip(columns(entries[low[at]]), wanted, strict=True):
        found[at] &= have == want[at]
    return found


class _Pair(NamedTuple):
    """A removed document and the one it is booked on, as (split, row), and their bytes together."""

    kept: tuple[int, int]
    removed: tuple[int, int]
    bytes: int


def measure_precision(
    losers: Sequence[Artifact],
    population: Population,
    documents: Sequence[Artifact],
    config: NearDedupConfig,
    *,
    count: int,
    seed: int,
) -> PrecisionFacts:
    """Compare `count` removed documents with those that they are booked on, by words.

    `losers` are files of NEAR_LOSER rows, each of one split.

    Left out are those that lost to an index, whose texts are not here. Excerpts are up to ten pairs, below 1
    if possible, least alike first.
    """
    sample = _sample(losers, population, count, seed)
    parts, rows = population.locate(sample["kept"])
    here = sample["kept"] < population.planted.start
    assert not (
        (sample["kept"] >= population.planted.start) & (sample["kept"] < population.planted.stop)
    ).any()
    pairs = []
    for part in np.unique(parts[here]).tolist():
        chosen = np.flatnonzero(here & (parts == part))
        table = _documents(population.parts[part])[rows[chosen]]
        for lost, kept in zip(sample[chosen], table, strict=True):
            removed = (int(lost["split"]), int(lost["row"]))
            pairs.append(_Pair((part, int(kept["row"])), removed, int(lost["bytes"] + kept["bytes"])))
    compared = [
        _compare(texts[pair.removed], texts[pair.kept], config)
        for group in _groups(sorted(pairs))
        for texts in [_texts(documents, group)]
        for pair in group
    ]
    verdicts = [verdict for _, verdict, *_ in compared]
    compared.sort()
    shown = [pair for pair in compared if pair[0] < 1] or compared  # the same words twice tell little
    step = max(1, -(-len(shown) // EXCERPTS))
    return PrecisionFacts(
        checked=len(compared),
        left_out=len(sample) - len(compared),
        similar=verdicts.count("similar"),
        contained=verdicts.count("contained"),
        wrong=verdicts.count("wrong"),
        least=min((round(least, 6) for least, verdict, *_ in compared if verdict == "similar"), default=None),
        excerpts=[PairFacts(round(s, 6), removed, kept) for s, _, removed, kept in shown[::step]],
    )


def _sample(
    losers: Sequence[Artifact], population: Population, count: int, seed: int
) -> npt.NDArray[np.void]:
    """The losers with the lowest hash(seed, "checked", content rank), lowest first."""
    heap: list[tuple[int, bytes, int, int]] = []  # the inverse of the hash, rank, file of losers, row in it
    for number, file in enumerate(losers if count else ()):
        entries = Rows(file, NEAR_LOSER)
        documents = np.empty(0, DOCUMENT)
        for start in range(0, len(entries), PIECE_ROWS):
            piece = entries.read(start, min(start + PIECE_ROWS, len(entries)))
            if not start:
                documents = _documents(population.parts[int(piece["split"][0])])
            at, known = _rows_of(documents, piece["row"])
            assert known.all(), f"{file}: a loser that was never compared"
            ranks = [bytes(rank) for rank in documents["id"][at]]
            hashes = keyed_hashes(ranks, seed, "checked")
            for row in np.argsort(hashes, kind="stable").tolist():
                entry = (-int(hashes[row]), ranks[row], number, start + row)
                if len(heap) < count:
                    heapq.heappush(heap, entry)
                elif entry > heap[0]:
                    heapq.heapreplace(heap, entry)
                else:
                    break  # the following ones have higher hashes
    chosen = [Rows(losers[file], NEAR_LOSER).read(row, row + 1) for _, _, file, row in sorted(heap)[::-1]]
    return np.concatenate(chosen) if chosen else np.empty(0, NEAR_LOSER)


def _groups(pairs: Sequence[_Pair]) -> Iterator[list[_Pair]]:
    """Consecutive pairs whose texts may be held together; a pair of long ones alone if it must be."""
    group: list[_Pair] = []
    held = 0
    for pair in pairs:
        if group and held + pair.bytes > TEXT_BYTES:
            yield group
            group, held = [], 0
        group.append(pair)
        held += pair.bytes
    if group:
        yield group


def _texts(documents: Sequence[Artifact], pairs: Sequence[_Pair]) -> dict[tuple[int, int], str]:
    """The texts of both sides by (split, row)."""
    places = sorted({place for pair in pairs for place in (pair.kept, pair.removed)})
    texts = {}
    for split in sorted({split for split, _ in places}):
        rows = [row for other, row in places if other == split]
        for row, batch in read_rows(documents[split], rows):
            texts[split, row] = batch.column("text")[0].as_py()
    return texts


def _compare(removed: str, kept: str, config: NearDedupConfig) -> tuple[float, str, str, str]:
    """(similarity; "similar", "contained" or "wrong"; the beginnings of both texts)."""
    small, sets = False, []
    for text in (removed, kept):
        grams = ngrams(text, config.minhash)
        sets.append(set(grams))
        small |= len(sets[-1]) < config.small_shingles
        small |= len(grams) >= config.small_repetition * max(1, len(sets[-1]))
    shared, union = len(sets[0] & sets[1]), len(sets[0] | sets[1])
    similarity = shared / union if union else 1.0
    least = min(map(len, sets))
    verdict = "wrong"
    if similarity >= (config.small_similarity if small else config.similarity):
        verdict = "similar"
    elif config.containment is not None and not small and least and shared / least >= config.containment:
        verdict = "contained"
    return similarity, verdict, removed[:EXCERPT_CHARACTERS], kept[:EXCERPT_CHARACTERS]
