"""Arrow string arrays for kernels: the UTF-8 buffer and its offsets; replacing, copying and splitting texts.

All arrays are large_string without nulls. `text_offsets` and `text_bytes` are views and copy nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from shardkit.kernels.numba_support import Bools, Int64s, UInt8s, kernel
from shardkit.kernels.utf8 import SPACE, character_flags, next_character


def text_offsets(texts: pa.LargeStringArray) -> npt.NDArray[np.int64]:
    """Return int64[n + 1]: where texts begin and end in the array's UTF-8 buffer; slices are supported."""
    if not len(texts):
        return np.zeros(1, np.int64)
    return np.frombuffer(texts.buffers()[1], np.int64)[texts.offset : texts.offset + len(texts) + 1]


def text_bytes(texts: pa.LargeStringArray) -> npt.NDArray[np.uint8]:
    """Return uint8[m], the array's UTF-8 buffer, read-only; never empty, so that it has an address.

    It is read-only even if Arrow's buffer is not: else Numba would compile each kernel for both cases.
    """
    data = texts.buffers()[2]
    found = np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(1, np.uint8)
    found.flags.writeable = False
    return found


def text_pieces(texts: pa.LargeStringArray, most_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (first, stop) of runs of texts that have at most `most_bytes` in total, or of one longer text."""
    yield from offset_pieces(text_offsets(texts), most_bytes)


def offset_pieces(offsets: npt.NDArray[np.int64], most_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield pieces as `text_pieces` does; text i is from byte offsets[i] to offsets[i + 1]."""
    first = 0
    while first < len(offsets) - 1:
        stop = int(np.searchsorted(offsets, offsets[first] + most_bytes, "right")) - 1
        stop = max(stop, first + 1)
        yield first, stop
        first = stop


def replace_texts(texts: pa.LargeStringArray, replacements: Mapping[int, str]) -> pa.LargeStringArray:
    """Replace texts by row; `replacements` is in row order. If it is empty, return the same array."""
    if not replacements:
        return texts
    mask = np.zeros(len(texts), np.bool_)
    mask[list(replacements)] = True
    changed = pa.array(list(replacements.values()), pa.large_string())
    return pc.replace_with_mask(texts, pa.array(mask), changed)


@kernel
def copy_texts(source: UInt8s, starts: Int64s, sizes: Int64s, target: UInt8s, places: Int64s) -> None:
    """Copy the texts of `sizes` bytes that start at `starts` in `source` to `places` in `target`."""
    for number in range(len(sizes)):
        # A loop over two views from index 0 is vectorized: ten times as fast as with sums as indexes.
        text, place = source[starts[number] :], target[places[number] :]
        for byte in range(sizes[number]):
            place[byte] = text[byte]


class Chunks(NamedTuple):
    """The parts of n texts between white space.

    `texts` has the chunks of all texts; text i has the chunks firsts[i] to firsts[i + 1] - 1. `joined`,
    bool[chunks], tells whether exactly one space, U+0020, is between a chunk and the one before in its text.
    """

    texts: pa.LargeStringArray
    firsts: Int64s
    joined: Bools


def split_chunks(data: UInt8s, offsets: Int64s, wanted: Bools) -> Chunks:
    """Split the texts data[offsets[i]:offsets[i + 1]], valid UTF-8, as `str.split()` does, where `wanted`."""
    flags = character_flags()
    counts = np.zeros(len(wanted), np.int64)
    sizes = np.zeros(len(wanted), np.int64)
    _count_chunks(data, offsets, wanted, flags, counts, sizes)
    firsts = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
    ends = np.zeros(firsts[-1] + 1, np.int64)
    joined = np.zeros(firsts[-1], np.bool_)
    chunks = np.empty(max(1, int(sizes.sum())), np.uint8)
    _copy_chunks(data, offsets, wanted, flags, chunks, ends, joined)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(chunks)]
    return Chunks(pa.LargeStringArray.from_buffers(len(joined), buffers[1], buffers[2]), firsts, joined)


@kernel
def _count_chunks(
    data: UInt8s, offsets: Int64s, wanted: Bools, flags: UInt8s, counts: Int64s, sizes: Int64s
) -> None:
    for text in range(len(wanted)):
        if not wanted[text]:
            continue
        at, inside = offsets[text], False
        while at < offsets[text + 1]:
            code, after = next_character(data, at)
            space = (flags[code] & SPACE) != 0
            if not space:
                sizes[text] += after - at
                counts[text] += not inside
            inside = not space
            at = after


@kernel
def _copy_chunks(
    data: UInt8s, offsets: Int64s, wanted: Bools, flags: UInt8s, chunks: UInt8s, ends: Int64s, joined: Bools
) -> None:
    chunk = size = 0
    for text in range(len(wanted)):
        if not wanted[text]:
            continue
        at, begin, inside, gap, only = offsets[text], chunk, False, 0, False
        while at < offsets[text + 1]:
            code, after = next_character(data, at)
            if flags[code] & SPACE:
                if inside:
                    ends[chunk] = size
                    gap, inside = 0, False
                gap += 1
                only = code == 32
            else:
                if not inside:
                    joined[chunk] = gap == 1 and only and chunk > begin
                    chunk += 1
                    inside = True
                for byte in range(at, after):
                    chunks[size] = data[byte]
                    size += 1
            at = after
        if inside:
            ends[chunk] = size
