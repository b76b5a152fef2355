r"""Texts for benchmarks: of a corpus or made up, with near-duplicates of known similarity, or of any size.

`write_documents` makes cuts of source texts with every fourth word replaced, at random, by another word of
that text: they look like text and are like no other, though sources are cut many times (of its 5-grams, a
quarter stay, and two cuts of the same place share a sixteenth at most). A copy has single words of its
original replaced until it has about the similarity aimed at; its real one, of sets of 5-grams of `\w+` words
in lower case, is computed from the two texts.

`write_corpus` repeats documents with mutations: in a copy each word is replaced, with a probability of
`GROWN`, by another word of the same text, so that a quarter of all 5-grams are common with the original: no
near-duplicate. Of each copy, `NEAR` of the documents are changed in one word of a hundred only, and `EQUAL`
not at all. So the parts that filters and duplicate removal take do not change much as the corpus grows.

Same arguments, same bytes.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from shardkit.writers.rows.documents import DOCUMENT_SCHEMA
from support.documents import document_batch
from support.small_build import EOS, make_corpus

__all__ = [
    "EOS",
    "PAIR",
    "documents",
    "put_tokenizer",
    "read_sources",
    "similarity",
    "sources_by_language",
    "write_corpus",
    "write_documents",
]

NGRAM = 5
LONGEST_SOURCE = 1 << 20  # of a very long text so much is taken, so that no source has most of the cuts
REPLACED = 0.25
SIMILARITIES = (0.5, 1.0)
BATCH = 2048
GROWN, NEAR, EQUAL = 0.15, 0.05, 0.02
FILE_BYTES = 8_000_000  # of text: enough tasks for any number of workers
LONGEST = 60_000  # characters of one document; longer texts are cut into several

PAIR = np.dtype([("original", "<i8"), ("copy", "<i8"), ("similarity", "<f8")])

_PIECES = re.compile(r"\S+\s*")
_WORDS = re.compile(r"\w+")


def read_corpus(folder: Path) -> Iterator[tuple[str, str | None]]:
    """(text, lang) of every record of the JSONL (plain, .gz, .zst) and Parquet files of a folder."""
    for file in sorted(folder.iterdir()):
        if file.suffix == ".parquet":
            table = pq.ParquetFile(file)
            columns = [name for name in ("text", "lang") if name in table.schema_arrow.names]
            for batch in table.iter_batches(columns=columns):
                yield from ((row["text"], row.get("lang")) for row in batch.to_pylist())
        elif ".jsonl" in file.name:
            for record in map(json.loads, _opened(file)):
                yield record["text"], record.get("lang")


def _opened(file: Path) -> IO[bytes]:
    if file.suffix == ".gz":
        return io.BufferedReader(gzip.open(file))
    if file.suffix == ".zst":
        reader = zstandard.ZstdDecompressor().stream_reader(file.open("rb"), read_across_frames=True)
        return io.BufferedReader(reader)
    return file.open("rb")


def synthetic_sources(random: np.random.Generator, count: int = 200) -> list[str]:
    """Made-up texts: words with Zipf's frequencies, sentences, paragraphs."""
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    odds = 1.0 / np.arange(2, 28)
    odds /= odds.sum()
    vocabulary = sorted(
        {"".join(random.choice(letters, size, p=odds)) for size in random.integers(2, 12, 40_000)}
    )
    random.shuffle(vocabulary)
    frequency = 1.0 / (np.arange(len(vocabulary)) + 2.7)
    frequency /= frequency.sum()
    texts = []
    for _ in range(count):
        words = random.choice(len(vocabulary), 20_000, p=frequency)
        ends = random.choice(["", ",", ".", ".\n\n"], len(words), p=[0.85, 0.07, 0.06, 0.02])
        texts.append(" ".join(vocabulary[word] + end for word, end in zip(words.tolist(), ends, strict=True)))
    return texts


def read_sources(corpus: Path | None) -> list[str]:
    """Of a folder of corpus files, of $SHARDKIT_TEST_DATA's corpus if there is one, else made up."""
    return [text for text, _ in sources_by_language(corpus)]


def sources_by_language(corpus: Path | None) -> list[tuple[str, str | None]]:
    """`read_sources` with the language of each text, if the corpus has it."""
    if corpus is None and (data := os.environ.get("SHARDKIT_TEST_DATA")):
        corpus = Path(data) / "corpus"
    if corpus is not None:
        return list(read_corpus(corpus))
    return [(text, None) for text in synthetic_sources(np.random.default_rng(0))]


def write_documents(
    file: Path, count: int, *, seed: int, sources: list[str], mean_words: int, copies: float
) -> npt.NDArray[np.void]:
    """Write documents.arrow (DOCUMENT_SCHEMA) and return its near-duplicates, as PAIR.

    `copies` is the part of the documents that are copies; each follows its original somewhere later.
    """
    random = np.random.default_rng(seed)
    pieces = [found for text in sources if len(found := _PIECES.findall(text[:LONGEST_SOURCE])) >= 50]
    edges = np.cumsum([len(found) for found in pieces])
    waiting: list[tuple[int, int, list[str], list[str]]] = []  # (earliest row, original, its words, source)
    pairs, texts = [], []
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, DOCUMENT_SCHEMA) as writer:
        for row in range(count):
            if waiting and (waiting[0][0] <= row or len(waiting) >= count - row):
                _, original, words, source = waiting.pop(0)
                copy, similarity = _copy(words, random, source)
                pairs.append((original, row, similarity))
                texts.append(copy)
            else:
                source = pieces[int(np.searchsorted(edges, random.integers(edges[-1]), side="right"))]
                words = _cut(source, random, mean_words)
                if random.random() < copies / (1 - copies) and len(words) >= 50:
                    waiting.append((row + int(random.integers(1, 1000)), row, words, source))
                texts.append("".join(words))
            if len(texts) == BATCH or row == count - 1:
                records = range(row + 1 - len(texts), row + 1)
                writer.write_batch(document_batch(texts, file=file.name, records=records))
                texts = []
    return np.array(pairs, PAIR)


def _cut(source: list[str], random: np.random.Generator, mean_words: int) -> list[str]:
    """Some hundred pieces (a word and the white space after it) of a source, a quarter of them replaced."""
    length = min(len(source), int(random.gamma(2.0, mean_words / 2)) + 20)
    start = int(random.integers(0, len(source) - length + 1))
    words = source[start : start + length]
    _replace(words, np.flatnonzero(random.random(length) < REPLACED), random, source)
    return words


def _replace(
    words: list[str], places: npt.NDArray[np.int64], random: np.random.Generator, source: list[str]
) -> None:
    """Put other words of the source there; the white space stays, so that lines and paragraphs do."""
    chosen = random.integers(len(source), size=len(places))
    for at, word in zip(places.tolist(), chosen.tolist(), strict=True):
        space = words[at][len(words[at].rstrip()) :]
        words[at] = source[word].rstrip() + space


def _copy(words: list[str], random: np.random.Generator, source: list[str]) -> tuple[str, float]:
    """A copy and its similarity: each replaced word costs up to 5 n-grams and brings as many."""
    aim = random.uniform(*SIMILARITIES)
    lost = len(words) * (1 - aim) / (1 + aim)
    changed = list(words)
    places = random.choice(len(words), max(1, round(lost / NGRAM)), replace=False)
    _replace(changed, places, random, source)
    text = "".join(changed)
    return text, similarity("".join(words), text)


def similarity(first: str, second: str) -> float:
    """Jaccard similarity of the sets of 5-grams."""
    a, b = _shingles(first), _shingles(second)
    return len(a & b) / len(a | b)


def _shingles(text: str) -> set[tuple[str, ...]]:
    words = _WORDS.findall(text.lower())
    return {tuple(words[at : at + NGRAM]) for at in range(max(1, len(words) - NGRAM + 1))}


def documents(corpus: Path | None, megabytes: float, seed: int = 1) -> list[str]:
    """About so many MB of text, as documents in an order of their own."""
    random = np.random.default_rng(seed)
    texts = []
    for text in read_sources(corpus):
        longest = LONGEST if corpus is not None else 4000
        texts += [text[start : start + longest] for start in range(0, len(text), longest)]
    left, chosen = megabytes * 1e6, []
    for number in random.permutation(len(texts)).tolist():
        if left <= 0:
            break
        chosen.append(texts[number])
        left -= len(texts[number].encode())
    return chosen


def write_corpus(
    folder: Path, originals: list[str], copies: int, *, file_bytes: int = FILE_BYTES, seed: int = 1
) -> int:
    """`copies` times the documents, the first time as they are, in text-NNNNN.jsonl; bytes of text."""
    folder.mkdir(parents=True)
    size = file = held = 0
    out = (folder / f"text-{file:05d}.jsonl").open("w")
    for text in _grown(originals, copies, seed):
        out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        size += (added := len(text.encode()))
        held += added
        if held >= file_bytes:
            out.close()
            file, held = file + 1, 0
            out = (folder / f"text-{file:05d}.jsonl").open("w")
    out.close()
    return size


def _grown(originals: list[str], copies: int, seed: int) -> Iterator[str]:
    yield from originals
    for copy in range(1, copies):
        random = np.random.default_rng([seed, copy])
        for text, kind in zip(originals, random.random(len(originals)).tolist(), strict=True):
            if kind < EQUAL:
                yield text
            else:
                yield _changed(text, 0.01 if kind < EQUAL + NEAR else GROWN, random)


def _changed(text: str, part: float, random: np.random.Generator) -> str:
    pieces = _PIECES.findall(text)
    places = np.flatnonzero(random.random(len(pieces)) < part)
    others = random.integers(0, max(1, len(pieces)), len(places))
    for place, other in zip(places.tolist(), others.tolist(), strict=True):
        pieces[place] = pieces[other]
    return "".join(pieces)


def put_tokenizer(folder: Path, tokenizer: Path | None) -> None:
    """tokenizer.json: the one given, else a small one that is made here."""
    if tokenizer is None:
        tokenizer = make_corpus(folder / "small", 20).parent / "tokenizer.json"
    shutil.copy(tokenizer, folder / "tokenizer.json")
