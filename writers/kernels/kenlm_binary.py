"""Maps the binary files that KenLM's `build_binary` writes; all processes of one machine share the memory.

A file (format 5, little-endian) is a header, a vocabulary, one table per order of n-grams and, optionally,
the words themselves, which are not needed. All six types are read: probing, with and without rest costs, and
trie, plain or quantized (`-q`), with or without compressed pointers (`-a`).

Sizes follow from the counts in the header. They are compared with the file's size before anything is read.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from shardkit.files import map_path
from shardkit.kernels.numba_support import Int64s, UInt8s
from shardkit.writers.kernels.kenlm_tables import (
    ARRAY,
    ARRAY_COUNT,
    BACKOFF_BITS,
    BACKOFF_TABLE,
    FIELDS,
    MAX_ORDER,
    NEXT_BITS,
    PROB_BITS,
    PROB_TABLE,
    STRIDE,
    KenlmModel,
    reciprocal_64,
)

BINARY_MAGIC = b"mmap lm http://kheafield.com/code"
_MAGIC = BINARY_MAGIC + b" format version 5\n\0\0"
_INCOMPLETE = BINARY_MAGIC + b" incomplete"
_SANITY = struct.Struct("<3f3IQ")  # test values; they follow the magic bytes, padded to a multiple of 8 bytes
_SANE = (0.0, 1.0, -0.5, 1, 0xFFFFFFFF, 0, 1)
_FIXED = struct.Struct("<B3xfIB3xI")  # order, buckets per n-gram, type, file ends with words, version
_KINDS = (
    "probing",
    "probing with rest costs",
    "trie",
    "quantized trie",
    "trie with compressed pointers",
    "quantized trie with compressed pointers",
)
_FIRST_TRIE = 2
_VERSIONS = (0, 0, 1, 1, 1, 1)
_WORD_ENTRY, _LONGEST_ENTRY = 12, 12  # bytes of a hash-table entry: key and word, or key and probability
_UNIGRAM, _MIDDLE = (8, 12), (16, 20)  # bytes of an entry: without rest costs, with rest costs
_TRIE_UNIGRAM = 16
_PLAIN_BITS = (31, 32)  # bits of a probability (float32 without its sign) and of a backoff, not quantized
_MAX_BITS = 57  # maximum bits of a number; a load of eight bytes contains it at any bit offset from 0 to 7
_QUANTIZED, _ARRAYS = (3, 5), (4, 5)
_QUANTIZER_VERSION, _ARRAY_VERSION, _MAX_QUANTIZED = 2, 0, 25
_SLACK = 8  # bytes of padding after a table, so that a load of eight bytes can read its last record


def is_binary(head: bytes) -> bool:
    """Return whether a file that begins with `head` is a KenLM binary file, of any version."""
    return head.startswith(BINARY_MAGIC)


def map_binary(path: Path) -> KenlmModel:
    """Map a binary file. Raises ValueError if it is damaged or not supported, OSError if it is unreadable."""
    data = map_path(path)
    header = _header(data)
    model, end = _trie(data, header) if header.kind >= _FIRST_TRIE else _probing(data, header)
    if header.has_words and bytes(data[end : end + 6]) != b"<unk>\0":
        _refuse(
            f"its list of words should begin at byte {end:,} with <unk>: it is damaged, or was built on "
            "another type of processor; build it again with build_binary"
        )
    return model


def _refuse(problem: str) -> NoReturn:
    raise ValueError(problem)


@dataclass(frozen=True)
class _Header:
    order: int
    multiplier: float
    kind: int
    has_words: bool
    counts: Sequence[int]
    end: int


def _header(data: UInt8s) -> _Header:
    magic_bytes = _aligned(len(_MAGIC))
    head_bytes = magic_bytes + _SANITY.size + _FIXED.size + 8 * MAX_ORDER
    head = bytes(data[:head_bytes])
    if head.startswith(_INCOMPLETE):
        _refuse("build_binary did not finish writing it; build it again")
    if not head.startswith(_MAGIC):
        found = head[len(BINARY_MAGIC) :].partition(b"\n")[0][:40].decode("ascii", "replace")
        _refuse(f"it has {found.strip()!r} instead of 'format version 5'; build it again from its ARPA file")
    _check_end(data, head_bytes)  # the minimum size of any model
    if _SANITY.unpack_from(head, magic_bytes) != _SANE:
        _refuse("it was built on a processor with another number format; build it again on this one")
    at = magic_bytes + _SANITY.size
    order, multiplier, kind, has_words, version = _FIXED.unpack_from(head, at)
    if kind >= len(_KINDS):
        _refuse(f"its type is {kind}, not one of {', '.join(_KINDS)}; build it again with build_binary")
    if version != _VERSIONS[kind]:
        _refuse(f"it is a {_KINDS[kind]} model of version {version}, not {_VERSIONS[kind]}; build it again")
    if not 2 <= order <= MAX_ORDER:
        _refuse(f"its order is {order}; the order of a model is 2 to {MAX_ORDER}")
    if not (1 <= multiplier < math.inf):
        _refuse(f"its tables have {multiplier} buckets for each n-gram; it is damaged")
    counts = struct.unpack_from(f"<{order}Q", head, at + _FIXED.size)
    if not counts[0] or max(counts) > 8 * len(data):
        _refuse(f"a file of {len(data):,} bytes cannot hold {counts} n-grams; it is damaged or cut short")
    return _Header(order, multiplier, kind, bool(has_words), counts, _aligned(at + _FIXED.size + 8 * order))


def _aligned(size: int) -> int:
    return -(-size // 8) * 8


def _check_end(data: UInt8s, end: int) -> None:
    if end > len(data):
        _refuse(f"it has {len(data):,} bytes, but its tables need {end:,}; it is damaged or cut short")


def _probing(data: UInt8s, header: _Header) -> tuple[KenlmModel, int]:
    """Locate the tables of a probing model; return (model, where the tables end)."""
    counts, rest = header.counts, header.kind == 1
    buckets = [_buckets(count, header.multiplier) for count in counts]
    words = header.end + 8
    end = words + buckets[0] * _WORD_ENTRY
    tables = np.zeros((header.order, FIELDS), np.int64)
    strides = [_UNIGRAM[rest], *[_MIDDLE[rest]] * (header.order - 2), _LONGEST_ENTRY]
    sizes = [counts[0] + 1, *buckets[1:]]  # one more, for an unknown word that the counts do not include
    for row, (stride, size) in enumerate(zip(strides, sizes, strict=True)):
        _check_end(data, end + size * stride)
        tables[row, : STRIDE + 1] = end, size, stride
        end += size * stride
    version, bound = struct.unpack("<II", bytes(data[header.end : header.end + 8]))
    if version != 0 or not 0 < bound <= counts[0] + 1:
        _refuse(f"its vocabulary has version {version}, {bound:,} of {counts[0]:,} words; it is damaged")
    reciprocals = np.array([*map(reciprocal_64, [buckets[0], 1, *buckets[1:]])], np.uint64)
    return KenlmModel(data, tables, reciprocals, False, words, buckets[0], counts[0]), end


def _buckets(count: int, multiplier: float) -> int:
    """Return the number of buckets of a hash table for `count` n-grams, in float32 arithmetic as in KenLM."""
    wanted = float(np.float32(multiplier) * np.float32(count))
    return max(count + 1, int(wanted) if wanted < 1 << 63 else 1 << 63)


def _trie(data: UInt8s, header: _Header) -> tuple[KenlmModel, int]:
    """Locate the tables of a trie model; return (model, where the tables end)."""
    counts, order = header.counts, header.order
    words = header.end + 8
    end = words + 8 * counts[0]
    _check_end(data, end + 16)
    word_slots = int.from_bytes(data[header.end : header.end + 8].tobytes(), "little")
    if word_slots > counts[0]:
        _refuse(f"its vocabulary has {word_slots:,} words for {counts[0]:,} unigrams; it is damaged")
    tables = np.zeros((order, FIELDS), np.int64)
    tables[:, PROB_TABLE] = tables[:, BACKOFF_TABLE] = -1
    tables[:, PROB_BITS], tables[:, BACKOFF_BITS] = _PLAIN_BITS
    if header.kind in _QUANTIZED:
        end = _quantizer(data, end, tables)
    tables[-1, BACKOFF_BITS] = 0
    tables[0, : STRIDE + 1] = end, counts[0], _TRIE_UNIGRAM
    end += (counts[0] + 2) * _TRIE_UNIGRAM
    _check_end(data, end)
    array_bits = _array_bits(data, end) if header.kind in _ARRAYS and order > 2 else 0
    word_bits = counts[0].bit_length()
    for row in range(1, order):
        table, extended = tables[row], counts[row + 1] if row + 1 < order else 0
        if header.kind in _ARRAYS and row + 1 < order:
            array_length, next_bits = _array_shape(counts[row] + 1, extended, array_bits)
            table[ARRAY], table[ARRAY_COUNT] = _aligned(end) + 8, array_length
            end += 8 * (1 + array_length) + 7
        else:
            next_bits = extended.bit_length()
        total = int(word_bits + table[PROB_BITS] + table[BACKOFF_BITS] + next_bits)
        if max(word_bits, next_bits) > _MAX_BITS:
            _refuse(f"its tables have numbers of {max(word_bits, next_bits)} bits; it is damaged")
        table[: NEXT_BITS + 1] = end, counts[row], total, word_bits, next_bits
        end += ((counts[row] + 1) * total + 7) // 8 + _SLACK
        _check_end(data, end)
    reciprocals = np.zeros(order + 1, np.uint64)
    return KenlmModel(data, tables, reciprocals, True, words, word_slots, counts[0]), end


def _quantizer(data: UInt8s, start: int, tables: Int64s) -> int:
    """Write the positions of the tables of quantized values to `tables`; return the end of the last one."""
    version, prob_bits, backoff_bits = map(int, data[start : start + 3])
    if version != _QUANTIZER_VERSION or not all(
        0 < bits <= _MAX_QUANTIZED for bits in (prob_bits, backoff_bits)
    ):
        _refuse(f"its quantizer has version {version}, {prob_bits} and {backoff_bits} bits; it is damaged")
    end = start + 8
    for table in tables[1:]:
        table[PROB_TABLE], table[PROB_BITS] = end, prob_bits
        table[BACKOFF_TABLE], table[BACKOFF_BITS] = end + (4 << prob_bits), backoff_bits
        end += (4 << prob_bits) + (4 << backoff_bits)
    end -= 4 << backoff_bits  # the longest n-grams have no backoffs
    _check_end(data, end)
    return end


def _array_bits(data: UInt8s, start: int) -> int:
    _check_end(data, start + 2)
    version, bits = map(int, data[start : start + 2])
    if version != _ARRAY_VERSION:
        _refuse(f"its pointer arrays have version {version}; build it again with build_binary")
    return bits


def _array_shape(records: int, pointed: int, most: int) -> tuple[int, int]:
    """Return (length of the pointer array, bits of a pointer in a record), as in KenLM: with least memory."""
    needed = pointed.bit_length()
    best = min(
        range(min(needed, most) + 1),
        key=lambda bits: ((pointed >> (needed - bits)) * 64 - records * bits, bits),
    )
    return (pointed >> (needed - best)) + 1, needed - best
