"""Near-duplicates of known similarity, planted to measure what near-duplicate removal finds.

A planted document is a copy of one of the inputs in which words are replaced by words that no corpus has
(random hexadecimal numbers), spread over the text: each replaced word takes `ngram` n-grams out of the set
and puts as many new ones in, so copies come to lie evenly over the similarities of 0.5 to 1. What counts is
not that arithmetic: the exact Jaccard similarity is then taken from the two texts, n-gram by n-gram.

Originals are the documents with the lowest hash(seed, "planted", document id) among those with 50 to 20,000
n-grams, so neither splits nor their order decide anything. The folder receives
  planted.npy       PLANTED, one row a copy
  documents.arrow   the copies in the same order (DOCUMENT_SCHEMA); `source` is the original's, so that a
                    copy is compared where its original is
Where n-grams are of characters, single characters are replaced by rare ideographs. Cost: ids are read once,
texts only where an original may lie; about 300 bytes of memory for each copy, and one batch of documents.
"""

from __future__ import annotations

import heapq
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from shardkit.writers.dedup.config import MinHashConfig
from shardkit.writers.dedup.shingles import text_units
from shardkit.writers.documents import (
    BATCH_DOCUMENTS,
    BATCH_TEXT_BYTES,
    DOCUMENT_SCHEMA,
    document_ids,
    keyed_hashes,
)
from shardkit.writers.execution.work_files import open_arrow

__all__ = ["DOCUMENTS_FILE", "NAMESPACE", "PLANTED", "PLANTED_FILE", "ngrams", "plant", "read_rows"]

PLANTED = np.dtype(
    [
        ("original_split", "<i4"),
        ("original_row", "<i8"),  # in the split's documents.arrow
        ("shared", "<i8"),  # distinct n-grams that both have
        ("union", "<i8"),  # distinct n-grams that either has
    ]
)
PLANTED_FILE = "planted.npy"
DOCUMENTS_FILE = "documents.arrow"
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
    documents: Sequence[Path],
    excluded: Callable[[int], npt.NDArray[np.int64]],
    config: MinHashConfig,
    *,
    count: int,
    seed: int,
    folder: Path,
) -> dict[str, int]:
    """Write up to `count` copies of documents (one Arrow file a split) into `folder`; counts.

    `excluded(split)` gives the rows of a split that cannot be originals because they are removed already.
    """
    originals = _choose(documents, excluded, config, count, seed)
    ranks = {(original.split, original.row): rank for rank, original in enumerate(originals)}
    by_split = groupby(sorted(ranks), key=lambda place: place[0])
    rows = np.empty(len(originals), PLANTED)
    written = planted_bytes = 0
    with _document_writer(folder / DOCUMENTS_FILE) as write:
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
                planted_bytes += len(copy.encode())
    np.save(folder / PLANTED_FILE, rows)
    assert written == len(originals)
    return {"planted": written, "bytes": planted_bytes}


def read_rows(documents: Path, rows: Sequence[int]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """(row, a batch of that document alone) for ascending rows; batches without any are not decoded."""
    with open_arrow(documents) as file, open_arrow(documents) as same:
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
    documents: Sequence[Path],
    excluded: Callable[[int], npt.NDArray[np.int64]],
    config: MinHashConfig,
    count: int,
    seed: int,
) -> list[_Original]:
    """The originals, lowest hash first."""
    heap: list[_Original] = []
    for split, path in enumerate(documents):
        unwanted = excluded(split)
        with open_arrow(path) as file, open_arrow(path) as same:
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
