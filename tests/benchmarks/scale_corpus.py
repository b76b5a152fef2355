r"""A corpus of any size, recombined from real text; the number of a document says what it is a copy of.

A *unit* is a sentence, a clause, or a paragraph in another language. Document `i` is made of units that only
its family and `i` decide, by splitmix64: most documents are the first of a family, 8 % are exact copies of an
earlier one, and 20 % are near copies: units are appended, dropped or replaced. A family is drawn at random,
or (`HUBS` of the copies) with a probability of 1 / rank, so that the largest has about 1 % of all documents,
whatever their number. Nothing is stored of a document but its line; `Corpus.text(i)` makes it again.

    short   350 bytes of text on average, of clauses
    web     2.5 kB on average, of sentences in paragraphs; 12 % in other languages, 5 % navigation lines

Same arguments, same bytes. Lines are JSON objects with `id` and `text`, in files compressed by zstd level 1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import zstandard

EXACT, NEAR, HUBS, HUB_FAMILIES = 0.08, 0.20, 0.43, 100_000
LONGEST_LINE = 1 << 20  # bytes of a document's line, at most
_BATCH = 20_000
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(])")

ORIGINAL, EXACT_COPY, NEAR_COPY = range(3)
_APPEND, _DROP, _REPLACE = range(3)


@dataclass(frozen=True)
class Pool:
    """Units of text as they stand in JSON: unit u is data[starts[u]:starts[u + 1]].

    A document takes its units from one of the groups: [edges[g], edges[g + 1]); `shares` are their odds,
    cumulated. A paragraph begins with each unit whose number is a multiple of `paragraph` (0: with none).
    """

    data: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    edges: npt.NDArray[np.int64]
    shares: npt.NDArray[np.float64]
    paragraph: int
    sizes: tuple[int, float, int]
    """The least number of units of a document, the mean of what is above it, and the most."""


def make_pool(kind: str, texts: Sequence[tuple[str, str | None]]) -> Pool:
    """Return the pool for corpora of a kind (`short` or `web`), from (text, language) pairs."""
    english = [text for text, language in texts if language in (None, "en", "eng")]
    sentences = list(dict.fromkeys(one for text in english for one in _sentences(text)))
    if kind == "short":
        clauses = [clause for one in sentences for clause in _clauses(one.split())]
        return _pool([clauses], [1.0], 0, (5, 5.5, 40))
    others: dict[str, list[str]] = {}
    for text, language in texts:
        if language not in (None, "en", "eng"):
            found = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
            others.setdefault(language, []).extend(part for part in found if 60 < len(part) < 1500)
    groups = [found for found in others.values() if len(found) >= 50]
    menu = [" ".join(one.split()[:3]) for one in sentences]
    share = [0.12 / max(1, len(groups))] * len(groups)
    return _pool([sentences, menu, *groups], [0.95 - sum(share), 0.05, *share], 5, (6, 14.0, 60))


def _sentences(text: str) -> list[str]:
    found = (" ".join(one.split()) for part in re.split(r"\n\s*\n", text) for one in _SENTENCE.split(part))
    return [one for one in found if 5 <= one.count(" ") <= 60 and one[-1] in '.!?"' and _is_prose(one)]


def _is_prose(text: str) -> bool:
    return sum(letter.isalpha() or letter == " " for letter in text) > 0.9 * len(text)


def _clauses(words: list[str]) -> list[str]:
    return [" ".join(words[at : at + 6]) for at in range(0, len(words) - 3, 6)]


def _pool(
    groups: list[list[str]], shares: list[float], paragraph: int, sizes: tuple[int, float, int]
) -> Pool:
    units = [json.dumps(one, ensure_ascii=False)[1:-1].encode() for group in groups for one in group]
    starts = np.concatenate([[0], np.cumsum([len(one) for one in units])]).astype(np.int64)
    edges = np.concatenate([[0], np.cumsum([len(group) for group in groups])]).astype(np.int64)
    data = np.frombuffer(b"".join(units), np.uint8)
    return Pool(data, starts, edges, np.cumsum(np.array(shares)) / sum(shares), paragraph, sizes)


@dataclass(frozen=True)
class Corpus:
    """The documents [0, count) that a seed makes of a pool."""

    pool: Pool
    count: int
    seed: int = 1

    def placed(self, numbers: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int64]]:
        """Return kind and family of documents; the number of a family is that of its first document."""
        kinds, families = np.empty(len(numbers), np.int8), np.empty(len(numbers), np.int64)
        _place(self.seed, numbers, self.count, kinds, families)
        return kinds, families

    def lines(self, first: int, stop: int) -> bytes:
        """Return the JSON lines of the documents [first, stop)."""
        one, made, at = self.pool, bytearray(), first
        room = np.empty(1 << 24, np.uint8)
        while at < stop:
            data = one.data, one.starts, one.edges, one.shares, one.paragraph, one.sizes
            at, size = _write_lines(*data, self.seed, self.count, at, stop, room)
            made += room[:size].data
        return bytes(made)

    def text(self, number: int) -> str:
        """Return the text of one document."""
        found: str = json.loads(self.lines(number, number + 1))["text"]
        return found

    def write(self, folder: Path, files: int, threads: int = 2) -> int:
        """Write the corpus in files of equal numbers of documents; return the bytes of all lines."""
        folder.mkdir(parents=True)
        edges = [self.count * number // files for number in range(files + 1)]
        with ThreadPoolExecutor(threads) as pool:
            return sum(pool.map(lambda n: self._write(folder, n, edges[n], edges[n + 1]), range(files)))

    def _write(self, folder: Path, number: int, first: int, stop: int) -> int:
        size = 0
        with (
            (folder / f"part-{number:05d}.jsonl.zst").open("wb") as file,
            zstandard.ZstdCompressor(level=1).stream_writer(file) as writer,
        ):
            for start in range(first, stop, _BATCH):
                lines = self.lines(start, min(start + _BATCH, stop))
                size += len(lines)
                writer.write(lines)
        return size


@numba.njit(cache=True, nogil=True, inline="always")
def _mixed(value: Any) -> Any:
    """Return the output function of splitmix64 (Steele, Lea and Flood 2014) of a uint64."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@numba.njit(cache=True, nogil=True, inline="always")
def _draw(seed: Any, stream: Any, step: Any) -> Any:
    """Return a number in [0, 1) that the three arguments decide."""
    start = _mixed(np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(stream))
    return float(_mixed(start + np.uint64(step) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(11)) / 2.0**53


@numba.njit(cache=True, nogil=True)
def _family(seed: Any, number: Any, count: Any) -> Any:
    """Return (kind, family) of a document."""
    kind = _draw(seed, number, 0)
    if number == 0 or kind >= EXACT + NEAR:
        return ORIGINAL, number
    base = int(_draw(seed, number, 1) * number)
    if _draw(seed, number, 2) < HUBS:
        rank = int(np.exp(_draw(seed, number, 3) * np.log(float(HUB_FAMILIES))))  # odds of about 1 / rank
        base = min(rank * 7919 % count, number - 1)
    return (EXACT_COPY if kind < EXACT else NEAR_COPY), base


@numba.njit(cache=True, nogil=True)
def _place(seed: Any, numbers: Any, count: Any, kinds: Any, families: Any) -> None:
    for row in range(len(numbers)):
        kinds[row], families[row] = _family(seed, numbers[row], count)


@numba.njit(cache=True, nogil=True)
def _choose(
    edges: Any, shares: Any, sizes: Any, seed: Any, kind: Any, family: Any, number: Any, units: Any
) -> Any:
    """Write the numbers of a document's units; return how many they are."""
    stream = family + (np.int64(1) << 40)
    group = np.searchsorted(shares, _draw(seed, stream, 0), side="right")
    first, size = edges[group], edges[group + 1] - edges[group]
    least, mean, most = sizes
    count = min(most, least + int(-mean * np.log(1.0 - _draw(seed, stream, 1))))
    run, unit, step = 0, 0, 2
    for at in range(count):
        if run == 0:
            unit, run = int(_draw(seed, stream, step) * size), 1 + int(_draw(seed, stream, step + 1) * 3)
            step += 2
        units[at] = first + unit % size
        unit, run = unit + 1, run - 1
    if kind == NEAR_COPY:
        edit, stream = _draw(seed, number, 4), number + (np.int64(2) << 40)
        changes = 1 + count // 25
        for change in range(changes):
            other = first + int(_draw(seed, stream, 2 * change) * size)
            place = int(_draw(seed, stream, 2 * change + 1) * count)
            if edit < 0.4:
                units[count] = other
                count += 1
            elif edit < 0.8 and count > 2:
                count -= 1
            else:
                units[count - 1 if edit < 0.9 else place] = other
    return count


@numba.njit(cache=True, nogil=True)
def _write_lines(
    data: Any,
    starts: Any,
    edges: Any,
    shares: Any,
    paragraph: Any,
    sizes: Any,
    seed: Any,
    count: Any,
    first: Any,
    stop: Any,
    room: Any,
) -> Any:
    """Write lines of documents from `first` on until `room` is full; return (next document, bytes)."""
    units, digits = np.empty(128, np.int64), np.empty(20, np.uint8)
    size, number = 0, first
    while number < stop and size + LONGEST_LINE <= len(room):
        kind, family = _family(seed, number, count)
        found = _choose(edges, shares, sizes, seed, kind, family, number, units)
        for letter in b'{"id":"':
            room[size] = letter
            size += 1
        left, length = number, 0
        while length == 0 or left:
            digits[length] = 48 + left % 10
            left //= 10
            length += 1
        for at in range(length):
            room[size + at] = digits[length - 1 - at]
        size += length
        for letter in b'","text":"':
            room[size] = letter
            size += 1
        for at in range(found):
            if at and paragraph and units[at] % paragraph == 0:
                for letter in b"\\n\\n":
                    room[size] = letter
                    size += 1
            elif at:
                room[size] = 32
                size += 1
            begin, end = starts[units[at]], starts[units[at] + 1]
            for place in range(begin, end):
                room[size] = data[place]
                size += 1
        for letter in b'"}\n':
            room[size] = letter
            size += 1
        number += 1
    return number, size
