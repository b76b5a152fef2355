"""The items of evaluation sets, and a table of the hashes of their n-grams.

An item of `ngram` words or more gives all its n-grams, a shorter one itself as a whole, and one of fewer than
`min_item_words` nothing. Words are those of near-duplicate removal (`dedup/normalization.py`): lower case,
without punctuation.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numba
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.errors import RecipeError
from shardkit.files import load_json
from shardkit.writers.dedup.config import MinHashConfig
from shardkit.writers.filters.decontamination_settings import DecontaminationConfig, EvaluationConfig
from shardkit.writers.kernels.shingles import shingle_batch

__all__ = ["EvaluationItem", "HashTable", "find_matches", "make_tables", "read_items"]

_MAX_ITEM_BYTES = 1 << 26  # a line of an evaluation file; the largest items are books of a few MB
_BLOCK, _FIRST_ROOM = 1024, 256
_BITS_PER_KEY = 16  # a hash that is not in the table passes its bits once in 16 times


@dataclass(frozen=True, slots=True)
class EvaluationItem:
    """One item: which set, its line in the file (from 0), and its text."""

    evaluation: str
    record: int
    text: str


@dataclass(frozen=True, slots=True)
class HashTable:
    """n-grams of `ngram` words of some items; `places` are indexes into `first`-sorted n-grams of all items.

    `bits` tell quickly that a hash is not there; keys[slot] is a hash whose n-gram is number places[slot]
    (-1: empty slot). N-gram g belongs to item items[i] and begins at its word g - first[i], where i is the
    last with first[i] <= g. Of equal n-grams the first is told.
    """

    ngram: int
    bits: npt.NDArray[np.uint64]
    keys: npt.NDArray[np.uint64]
    places: npt.NDArray[np.int64]
    items: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]

    def place(self, ngram: int) -> tuple[int, int]:
        """(item, word at which it begins there) of an n-gram's number."""
        at = int(np.searchsorted(self.first, ngram, side="right")) - 1
        return int(self.items[at]), ngram - int(self.first[at])


def read_items(config: DecontaminationConfig, folder: Path) -> list[EvaluationItem]:
    """All items; RecipeError for a file or a line that cannot be read."""
    return [item for one in config.evaluations for item in _read(one, folder / one.path)]


def _read(config: EvaluationConfig, path: Path) -> Iterator[EvaluationItem]:
    name = config.name or Path(config.path).name
    is_jsonl = path.name.removesuffix(".gz").endswith((".jsonl", ".json"))
    try:
        with path.open("rb") as raw:
            file = cast(BinaryIO, gzip.open(raw)) if path.suffix == ".gz" else raw  # noqa: SIM115
            number = 0
            while line := file.readline(_MAX_ITEM_BYTES):
                where = f"decontamination: {path}: line {number + 1:,}"
                text = _decoded(line, where)
                if text.strip():
                    text = _item(text, config.fields, where) if is_jsonl else text
                    yield EvaluationItem(name, number, text)
                number += 1
    except (OSError, EOFError) as error:
        raise RecipeError(f"decontamination: {path}: {error}") from None


def _decoded(line: bytes, where: str) -> str:
    if len(line) == _MAX_ITEM_BYTES and not line.endswith(b"\n"):
        raise RecipeError(f"{where} is longer than {_MAX_ITEM_BYTES:,} bytes")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise RecipeError(f"{where} is not UTF-8: {error}") from None


def _item(line: str, fields: Sequence[str], where: str) -> str:
    try:
        record = load_json(line)
    except ValueError as error:
        raise RecipeError(f"{where} is not JSON: {error}") from None
    texts = [_text(record.get(field)) if isinstance(record, dict) else None for field in fields]
    if all(text is None for text in texts):
        raise RecipeError(f"{where} has no text under {', '.join(fields)}; set fields to those of your file")
    return "\n".join(filter(None, texts)).encode(errors="replace").decode()


def _text(value: Any) -> str | None:
    """A string, or the strings of a list such as choices."""
    if isinstance(value, list):
        return "\n".join(one for one in value if isinstance(one, str))
    return value if isinstance(value, str) else None


def make_tables(items: Sequence[EvaluationItem], config: DecontaminationConfig) -> list[HashTable]:
    """A table for n-grams of `config.ngram` words, and one for each length of shorter items."""
    texts = pa.array([item.text for item in items], pa.large_string())
    lengths = np.diff(shingle_batch(texts, MinHashConfig(ngram=1)).offsets)
    tables = []
    for size in range(min(config.min_item_words, config.ngram), config.ngram + 1):
        chosen = lengths >= size if size == config.ngram else lengths == size
        numbers = np.flatnonzero(chosen & (lengths >= config.min_item_words))
        if len(numbers):
            tables.append(_table(texts.take(pa.array(numbers)), size, numbers))
    return tables


def _table(texts: pa.LargeStringArray, size: int, numbers: npt.NDArray[np.int64]) -> HashTable:
    hashes, offsets = shingle_batch(texts, MinHashConfig(ngram=size))
    slots = 1 << (2 * len(hashes)).bit_length()
    bits = np.zeros(max(1, slots * _BITS_PER_KEY // 128), np.uint64)
    keys, places = np.zeros(slots, np.uint64), np.full(slots, -1, np.int64)
    _fill(hashes, bits, keys, places)
    return HashTable(size, bits, keys, places, numbers, offsets[:-1])


@numba.njit(nogil=True, cache=True)
def _fill(hashes, bits, keys, places):  # type: ignore[no-untyped-def]
    mask, low = np.uint64(len(keys) - 1), np.uint64(63)
    for number in range(len(hashes)):
        value = hashes[number]
        bit = (value >> np.uint64(20)) & np.uint64(64 * len(bits) - 1)
        bits[bit >> np.uint64(6)] |= np.uint64(1) << (bit & low)
        slot = value & mask
        while places[slot] >= 0 and keys[slot] != value:
            slot = (slot + np.uint64(1)) & mask
        if places[slot] < 0:
            keys[slot], places[slot] = value, number


@numba.njit(nogil=True, cache=True)
def _place(value, keys, places):  # type: ignore[no-untyped-def]
    """Number of the n-gram with a hash, or -1."""
    mask = np.uint64(len(keys) - 1)
    slot = value & mask
    while places[slot] >= 0:
        if keys[slot] == value:
            return places[slot]
        slot = (slot + np.uint64(1)) & mask
    return -1


@numba.njit(nogil=True, cache=True)
def find_matches(hashes, bits, keys, places):  # type: ignore[no-untyped-def]
    """int64[m, 2]: (index, n-gram's number) of the hashes that are in the table."""
    found = np.empty((_FIRST_ROOM, 2), np.int64)
    candidates = np.empty(_BLOCK, np.int64)
    mask, low, one = np.uint64(64 * len(bits) - 1), np.uint64(63), np.uint64(1)
    count = 0
    for begin in range(0, len(hashes), _BLOCK):
        passed = np.int64(0)
        for at in range(begin, min(begin + _BLOCK, len(hashes))):  # without a branch: misses overlap
            bit = (hashes[at] >> np.uint64(20)) & mask
            candidates[passed] = at
            passed = passed + np.int64(bits[bit >> np.uint64(6)] >> (bit & low) & one)
        for i in range(passed):
            number = _place(hashes[candidates[i]], keys, places)
            if number >= 0:
                if count == len(found):
                    found = np.concatenate((found, np.empty_like(found)))
                found[count, 0], found[count, 1] = candidates[i], number
                count += 1
    return found[:count]
