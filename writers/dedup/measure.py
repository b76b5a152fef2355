"""Measures near-duplicate removal: recall on planted copies, and precision on a sample of what was removed.

A planted document is a copy of an input in which words are replaced by words that no corpus contains (random
hexadecimal numbers), spread over the text: each replaced word takes `ngram` n-grams out of the set and adds
as many new ones, so that copies spread evenly over similarities of 0.5 to 1. Their similarity is then counted
exactly, n-gram by n-gram, from the two texts. Originals are the documents with the lowest hash("planted",
document id) among those with 50 to 20,000 n-grams, so neither splits nor their order decide anything. Each
split proposes its lowest ones (`Lowest`). Of the exchanged proposals only the lowest hashes are read, whose
range follows from the number of documents (`lowest_end`), and only the texts of originals. `plant` writes
  planted.npy       PLANTED, one row a copy
  documents.arrow   the copies in the same order (DOCUMENT_SCHEMA); `source` is the original's, so that a
                    copy is compared where its original is
Where n-grams are of characters, single characters are replaced by rare ideographs.

`measure_recall` counts, for each band of similarity, the planted copies that became a candidate pair with
their original, next to the number that the S-curve of bands and rows gives for exactly these similarities
(`expected`) and the 95 % interval of the measured share (Wilson's, which is right for shares near 1, too).
`measure_precision` compares the words of removed documents and of those that stay in their place again, as
strings instead of hashes, for a sample drawn in the same way by hash of content ranks. Both are functions of
the documents alone, and read no more of a large corpus than of a small one.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from shardkit.hashing import keyed_id_hashes
from shardkit.writers.dedup.bands import probability
from shardkit.writers.dedup.config import MinHashConfig, NearDedupConfig
from shardkit.writers.dedup.population import DOCUMENT, DOCUMENTS_FILE, Population
from shardkit.writers.dedup.removals import document_keys
from shardkit.writers.dedup.tables import Rows
from shardkit.writers.documents import (
    BATCH_DOCUMENTS,
    BATCH_TEXT_BYTES,
    DOCUMENT_OPTIONS,
    DOCUMENT_SCHEMA,
    document_ids,
)
from shardkit.writers.exchange import Slice, Table
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.kernels.shingles import text_units
from shardkit.writers.kernels.words import UNSPACED_CLASS

__all__ = [
    "BAND_EDGES",
    "CHECKED",
    "NAMESPACE",
    "PLANTED",
    "PLANTED_FILE",
    "PROPOSED",
    "TEXTS_FILE",
    "Lowest",
    "binomial_interval",
    "checkable",
    "lowest_end",
    "measure_precision",
    "measure_recall",
    "ngrams",
    "plant",
    "proposals",
    "read_rows",
]

# Documents that could be planted, by hash: where they are in documents.arrow, and `at`, in the part.
PROPOSED = Table(
    "proposed.run",
    np.dtype(
        [
            ("key", "<u8"),
            ("row", "<i8"),
            ("batch", "<i4"),
            ("in_batch", "<i4"),
            ("at", "<i8"),
            ("group", "<u8"),
            ("split", "<i4"),
        ]
    ),
    origin="split",
)

# Removed documents by hash, and the number of the document that each is booked on.
CHECKED = Table(
    "checked.run",
    np.dtype([("key", "<u8"), ("kept", "<u8"), ("row", "<i8"), ("bytes", "<i8"), ("split", "<i4")]),
)

PLANTED = np.dtype(
    [
        ("split", "<i4"),  # of the original, and its rows in documents.arrow and in the part
        ("row", "<i8"),
        ("at", "<i8"),
        ("group", "<u8"),  # with a scope that has groups
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

_ALONE = re.compile(f"[{UNSPACED_CLASS}]")
_PIECES = {
    "words": re.compile(r"\w+"),
    "characters": re.compile(r"\w"),
    "auto": re.compile(rf"(?!\W)[{UNSPACED_CLASS}]|[^\W{UNSPACED_CLASS}]+"),
}


class Lowest:
    """The rows of the lowest keys among all that are added, at most `count`."""

    def __init__(self, table: Table, count: int) -> None:
        self._count = count
        self._rows = np.empty(0, table.dtype)

    def add(self, rows: npt.NDArray[np.void]) -> None:
        """Take rows of the table into account."""
        if len(self._rows) == self._count:
            rows = rows[rows["key"] < self._rows["key"][-1]] if self._count else rows[:0]
        both = np.concatenate([self._rows, rows])
        self._rows = both[np.argsort(both["key"], kind="stable")[: self._count]]

    @property
    def rows(self) -> npt.NDArray[np.void]:
        """They, by key."""
        return self._rows


def lowest_end(wanted: int, documents: int) -> int:
    """The end of the keys among which the lowest `wanted` of so many hashes are, but for one time in 10^9."""
    share = (wanted + 6 * sqrt(wanted) + 20) / max(1, documents)
    return 1 << 64 if share >= 1 else int(share * (1 << 64))


def proposals(
    ids: npt.NDArray[np.uint8],
    shingles: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    groups: npt.NDArray[np.uint64] | None = None,
) -> npt.NDArray[np.void]:
    """PROPOSED of those documents of a batch that are neither too short nor too long; uint8[n, 16] `ids`.

    `rows` are in the batch, of which `row` and `at` count, too; `groups` are those of `rows`.
    """
    chosen = np.flatnonzero((shingles >= MIN_NGRAMS) & (shingles <= MAX_NGRAMS))
    found = np.zeros(len(chosen), PROPOSED.dtype)
    found["key"] = keyed_id_hashes(ids[rows[chosen]], 0, "planted")
    found["row"] = found["in_batch"] = rows[chosen]
    found["at"] = chosen
    found["group"] = 0 if groups is None else groups[chosen]
    return found


def checkable(ranks: npt.NDArray[np.uint8], losers: npt.NDArray[np.void], count: int) -> npt.NDArray[np.void]:
    """CHECKED: of removed documents, NEAR_LOSER, with their content ranks, those of the lowest hashes."""
    rows = np.empty(len(losers), CHECKED.dtype)
    rows["key"] = keyed_id_hashes(ranks, 0, "checked")
    for name in ("split", "row", "bytes", "kept"):
        rows[name] = losers[name]
    lowest = Lowest(CHECKED, count)
    lowest.add(rows)
    return lowest.rows


def ngrams(text: str, config: MinHashConfig) -> list[str]:
    """The n-grams of a text as strings, in order and with repetitions."""
    units = text_units(text, config.unit)
    joint = "" if config.unit == "characters" else " "
    count = max(1, len(units) - config.ngram + 1) if units else 0
    return [joint.join(units[at : at + config.ngram]) for at in range(count)]


def plant(
    originals: npt.NDArray[np.void], documents: Mapping[int, Artifact], config: MinHashConfig, folder: Path
) -> None:
    """Write copies of `originals`, rows of PROPOSED by key; `documents` are the Arrow files of splits."""
    places = np.lexsort((originals["row"], originals["split"]))
    rows = np.empty(len(originals), PLANTED)
    with _document_writer(folder / TEXTS_FILE) as write:
        written = 0
        for split, ranks in groupby(places.tolist(), key=lambda rank: int(originals["split"][rank])):
            with documents[split].open_arrow() as file:
                reader = pa.ipc.open_file(file)
                for number, some in groupby(ranks, key=lambda rank: int(originals["batch"][rank])):
                    batch = reader.get_batch(number)
                    for rank in some:
                        original = originals[rank]
                        at = int(original["in_batch"])
                        text: str = batch.column("text")[at].as_py()
                        [copy_id] = document_ids(NAMESPACE, [rank])
                        before = ngrams(text, config)
                        copy = _near_copy(text, before, _target(rank), copy_id, config)
                        known, found = set(before), set(ngrams(copy, config))
                        shared, union = len(known & found), len(known | found)
                        place = [original[name] for name in ("split", "row", "at", "group")]
                        rows[written] = (*place, shared, union)
                        write(copy_id, batch.column("source")[at].as_py(), rank, copy)
                        written += 1
    np.save(folder / PLANTED_FILE, rows)


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
        result += [text[end : piece.start()], _foreign(key, number, config, piece[0])]
        end = piece.end()
    return "".join([*result, text[end:]])


def _foreign(key: bytes, number: int, config: MinHashConfig, piece: str) -> str:
    """A word, or a character, that the corpus has not, in place of `piece`."""
    value = xxhash.xxh3_64_intdigest(key, number)
    if config.unit == "characters" or (config.unit == "auto" and _ALONE.match(piece)):
        return chr(_IDEOGRAPHS[value % len(_IDEOGRAPHS)])
    return f"{value:016x}"


@contextmanager
def _document_writer(path: Path) -> Iterator[Callable[[bytes, int, int, str], None]]:
    """Writes (document id, source, record, text) as batches of bounded size."""
    rows: list[tuple[bytes, int, int, str]] = []
    text_bytes = 0

    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_file(file, DOCUMENT_SCHEMA, options=DOCUMENT_OPTIONS) as out,
    ):

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

TEXT_BYTES = 64 << 20  # of sampled documents, read together

EXCERPTS, EXCERPT_CHARACTERS = 10, 120

_NORMAL_95 = 1.959963984540054


def measure_recall(
    planted: npt.NDArray[np.void],
    population: Population,
    *,
    pairs: Slice,
    edges: Slice,
    lost: Slice,
    bands_and_rows: tuple[int, int],
) -> RecallFacts:
    """Count planted pairs by band of similarity; bands without any are left out.

    `planted` are PLANTED rows; `pairs` and `edges` lead from their copies to other documents, candidates and
    verified. `lost` are rows of LOST, documents that were taken out before candidates were sought: their
    copies have nothing to meet and are left out.
    """
    copies = population.planted
    assert len(copies) == len(planted), "signatures of other copies"
    numbers = (population.starts[planted["split"]] + planted["at"]).astype(np.uint64)
    candidates, verified = (
        _met(table.within(copies.start, copies.stop), numbers) for table in (pairs, edges)
    )
    compared = ~_are_lost(planted, lost)
    similarity = planted["shared"] / np.maximum(planted["union"], 1)
    columns = (similarity[compared], candidates[compared], verified[compared])
    return RecallFacts(_by_band(*columns, *bands_and_rows), left_out=int((~compared).sum()))


def _met(pairs: Slice, originals: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Which copies are in a pair with their originals; `key` is the number of the copy."""
    found = np.zeros(len(originals), np.bool_)
    for rows, _ in pairs.stream(pairs.limits.read_memory_bytes):
        copies = (rows["key"] - np.uint64(pairs.start)).astype(np.int64)
        found[copies[originals[copies] == rows["other"]]] = True
    return found


def _are_lost(planted: npt.NDArray[np.void], lost: Slice) -> npt.NDArray[np.bool_]:
    """Which originals are among `lost`, looked for split by split."""
    found = np.zeros(len(planted), np.bool_)
    for split in np.unique(planted["split"]).tolist():
        of_split = np.flatnonzero(planted["split"] == split)
        keys = document_keys(planted["split"][of_split], planted["at"][of_split])
        rows, _ = lost.within(split << 32, split + 1 << 32).read()
        found[of_split] = np.isin(keys, rows["key"])
    return found


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


class _Pair(NamedTuple):
    """A removed document and the one it is booked on, as (split, row), and their bytes together."""

    kept: tuple[int, int]
    removed: tuple[int, int]
    bytes: int


def measure_precision(
    sample: npt.NDArray[np.void],
    population: Population,
    documents: Mapping[int, Artifact],
    config: NearDedupConfig,
) -> PrecisionFacts:
    """Compare removed documents, rows of CHECKED, with those that they are booked on, by words.

    Left out are those that lost to an index, whose texts are not here. Excerpts are up to ten pairs, below 1
    if possible, least alike first.
    """
    parts, rows = population.locate(sample["kept"])
    here = sample["kept"] < population.planted.start
    assert not (
        (sample["kept"] >= population.planted.start) & (sample["kept"] < population.planted.stop)
    ).any()
    pairs = []
    for part in np.unique(parts[here]).tolist():
        with Rows(population.parts[part].folder / DOCUMENTS_FILE, DOCUMENT) as table:
            for at in np.flatnonzero(here & (parts == part)).tolist():
                [kept] = table.read(int(rows[at]), int(rows[at]) + 1)
                lost = sample[at]
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


def _texts(documents: Mapping[int, Artifact], pairs: Sequence[_Pair]) -> dict[tuple[int, int], str]:
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
