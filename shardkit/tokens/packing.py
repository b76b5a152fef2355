"""Packing: place the tokens of documents into rows of L tokens.

`pack_concat` cuts the stream of documents every L tokens: no padding, but at L = 2,048 a quarter of all
documents is cut without need. `pack_best_fit` cuts only documents longer than L, into pieces of L and a
remainder, and packs the remainders by best-fit-decreasing in windows of about 10,000: longest first, each
into the open row with the least room that still holds it. Both keep every token exactly once.

With these two functions, a row may begin inside a document. With `row_bos` the bos id is repeated before
every piece that continues a document, so that each row begins with it. `pack_best_fit_truncate` and
`pack_best_fit_crop` begin every row with a document instead, and drop tokens: the first drops every token of
a document after its first L, as packing in TRL does ("bfd"); the second drops all that does not fit, so that
no row is padded, as nanochat does.

Best fit keeps open rows in one stack for each number of free tokens. A two-level bit set finds the stack with
the least sufficient number: this scans L / 4096 words per piece at worst, some nanoseconds in practice. All
packing is arithmetic on lengths, without the GIL.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from shardkit.kernels.numba_support import Int32s, Int64s, UInt8s, UInt64s, int64, kernel
from shardkit.tokens.tokenizer import Tokens

WINDOW_PIECES = 10_000

# The position of the lowest set bit of a word: isolate the bit, multiply it by a de Bruijn sequence, and look
# up the top 6 bits in this table.
_DE_BRUIJN = 0x03F79D71B4CB0A89
_BIT_INDEX = np.zeros(64, np.int64)

for _bit in range(64):
    _BIT_INDEX[((_DE_BRUIJN << _bit) & (1 << 64) - 1) >> 58] = _bit


@dataclass(frozen=True, slots=True)
class Placement:
    """Pieces of documents and their places in rows: arrays of type int64[pieces], one entry per piece.

    Tokens [start, start + length) of document number `document` are tokens [column, column + length) of row
    number `row`. Places that no piece covers are padding, always at the end of a row. With `row_bos` there is
    also a bos at `column - 1` of each piece that continues a document.
    """

    sequence_length: int
    rows: int
    document: Int64s
    start: Int64s
    length: Int64s
    row: Int64s
    column: Int64s
    row_bos: bool = field(default=False, kw_only=True)

    @property
    def repeated_bos(self) -> int:
        """The number of pieces that have a repeated bos before them in their row."""
        return int((self.start > 0).sum()) if self.row_bos else 0

    @property
    def padding(self) -> int:
        """The number of padding tokens in all rows."""
        return self.rows * self.sequence_length - int(self.length.sum()) - self.repeated_bos

    def moved(self, rows: Int64s) -> Placement:
        """Return the placement with row r renumbered to `rows[r]`, and pieces sorted by (row, column)."""
        row = rows[self.row]
        order = _by_row(row, self.column, self.rows)
        columns = (self.document, self.start, self.length, row, self.column)
        moved = (values[order] for values in columns)
        return Placement(self.sequence_length, self.rows, *moved, row_bos=self.row_bos)

    def divided(self, lengths: Int64s, firsts: Int64s) -> Placement:
        """Convert this placement of texts, which consist of documents, to a placement of the documents.

        Text number i consists of documents `firsts[i]` to `firsts[i + 1]`, exclusive. `lengths` has the
        length of each document, at least 1. A piece of a text becomes pieces of its documents, in order.
        """
        ends = np.cumsum(lengths)
        begin = (ends - lengths)[firsts[self.document]] + self.start  # offset in the stream of all documents
        first = np.searchsorted(ends, begin, side="right")
        count = np.searchsorted(ends, begin + self.length, side="left") + 1 - first
        piece = np.repeat(np.arange(len(count)), count)
        part = np.arange(len(piece)) + np.repeat(first - (np.cumsum(count) - count), count)
        here = np.maximum(begin[piece], ends[part] - lengths[part])
        stop = np.minimum((begin + self.length)[piece], ends[part])
        start, column = here - (ends - lengths)[part], self.column[piece] + here - begin[piece]
        return Placement(self.sequence_length, self.rows, part, start, stop - here, self.row[piece], column)


def pack_best_fit(
    lengths: Int64s, sequence_length: int, window: int = WINDOW_PIECES, *, row_bos: bool = False
) -> Placement:
    """Place documents into rows by best fit, cutting only documents longer than a row.

    All `lengths` and `sequence_length` must be at least 2. The remainders are split evenly into windows of
    `window` to 2 * `window` - 1 remainders, or one smaller window if there are fewer.
    """
    _check(lengths, sequence_length)
    if window < 1:
        raise ValueError(f"a window needs at least one piece, not {window}")
    lengths = np.ascontiguousarray(lengths, np.int64)
    if row_bos:  # add each repeated bos to the length of its document: all pieces but the first begin with it
        lengths = lengths + np.maximum(0, -(-(lengths - sequence_length) // (sequence_length - 1)))
    lengths = lengths.view()
    lengths.flags.writeable = False  # read-only, like arrays from files: Numba compiles for one array type
    rows, document, start, length, row, column = _best_fit(lengths, sequence_length, window)
    if row_bos:
        piece = start // sequence_length
        further = (piece > 0).astype(np.int64)
        start, length, column = start - piece + further, length - further, column + further
    return Placement(sequence_length, int(rows), document, start, length, row, column, row_bos=row_bos)


def pack_best_fit_truncate(lengths: Int64s, sequence_length: int, window: int = WINDOW_PIECES) -> Placement:
    """Place the first L tokens of each document by best fit, as one piece; drop all further tokens."""
    return pack_best_fit(np.minimum(lengths, sequence_length), sequence_length, window)


def pack_best_fit_crop(lengths: Int64s, sequence_length: int) -> Placement:
    """Fill rows one by one: with the longest documents that fit, then with the start of the shortest one.

    Every document is one piece that begins with its first token; only the last row is padded.
    """
    _check(lengths, sequence_length)
    rows, *columns = _best_fit_crop(np.ascontiguousarray(lengths, np.int64), sequence_length)
    return Placement(sequence_length, int(rows), *columns)


def pack_concat(lengths: Int64s, sequence_length: int, *, row_bos: bool = False) -> Placement:
    """Place documents one after the other, cut wherever a row ends; only the last row is padded."""
    _check(lengths, sequence_length)
    rows, *columns = _concat(np.ascontiguousarray(lengths, np.int64), sequence_length, int(row_bos))
    return Placement(sequence_length, int(rows), *columns, row_bos=row_bos)


def fill_rows(
    tokens: Tokens | UInt8s,
    sources: Int64s,
    lengths: Int64s,
    rows: Int64s,
    columns: Int64s,
    out: Tokens | UInt8s,
    eos_id: int,
) -> None:
    """Write piece i, `tokens[sources[i] : sources[i] + lengths[i]]`, to `out[rows[i], columns[i] :]`.

    The rest of `out` (n, L) becomes `eos_id`. Raises IndexError if a piece is outside of either array.
    """
    inside = (sources >= 0) & (sources + lengths <= len(tokens)) & (rows >= 0) & (rows < out.shape[0])
    if not (inside & (lengths >= 0) & (columns >= 0) & (columns + lengths <= out.shape[1])).all():
        raise IndexError("a piece is outside of the token array or of the rows")
    out.fill(eos_id)
    _copy_pieces(tokens, sources, lengths, rows, columns, out)


def _check(lengths: Int64s, sequence_length: int) -> None:
    if sequence_length < 2:
        raise ValueError(f"a sequence needs at least 2 tokens, not {sequence_length}")
    if len(lengths) and int(lengths.min()) < 2:
        raise ValueError("a document has at least one token and its eos: a length below 2 cannot be packed")


_Buckets = tuple[UInt64s, UInt64s, Int32s, Int32s, Int32s]


@kernel
def _lowest_bit(word: np.uint64) -> int:
    isolated = word & (~word + np.uint64(1))
    position: int = _BIT_INDEX[(isolated * np.uint64(_DE_BRUIJN)) >> np.uint64(58)]
    return position


@kernel
def _first_at_least(words: UInt64s, summary: UInt64s, start: int) -> int:
    """Return the least member >= `start` of a bit set, or -1; bit i of `summary` tells if word i is not 0."""
    all_ones = ~np.uint64(0)
    index = start >> 6
    bits = words[index] & (all_ones << np.uint64(start & 63))
    if bits != 0:
        return (index << 6) + _lowest_bit(bits)
    index += 1
    block = index >> 6
    bits = summary[block] & (all_ones << np.uint64(index & 63))
    while bits == 0:
        block += 1
        if block == len(summary):
            return -1
        bits = summary[block]
    index = (block << 6) + _lowest_bit(bits)
    return (index << 6) + _lowest_bit(words[index])


@kernel
def _set_bit(words: UInt64s, summary: UInt64s, i: int) -> None:
    words[i >> 6] |= np.uint64(1) << np.uint64(i & 63)
    summary[i >> 12] |= np.uint64(1) << np.uint64((i >> 6) & 63)


@kernel
def _clear_bit(words: UInt64s, summary: UInt64s, i: int) -> None:
    words[i >> 6] &= ~(np.uint64(1) << np.uint64(i & 63))
    if words[i >> 6] == 0:
        summary[i >> 12] &= ~(np.uint64(1) << np.uint64((i >> 6) & 63))


@kernel
def _best_fit(lengths: Int64s, size: int, window: int) -> tuple[int, Int64s, Int64s, Int64s, Int64s, Int64s]:
    """Cut pieces of a whole row off long documents, then pack the remainders window by window."""
    whole, count = int64(0), 0
    for length in lengths:
        long = length // size if length >= size else 0  # avoid divisions, the slowest operation of this loop
        whole += long
        count += length != long * size
    document = np.empty(whole + count, np.int64)
    start = np.empty(whole + count, np.int64)
    piece = np.empty(whole + count, np.int64)
    row = np.empty(whole + count, np.int64)
    column = np.empty(whole + count, np.int64)
    owner, rests = np.empty(count, np.int64), np.empty(count, np.int32)
    made, found = 0, 0
    for i in range(len(lengths)):
        rest = lengths[i]
        while rest >= size:
            document[made], start[made], piece[made], row[made], column[made] = (
                i,
                lengths[i] - rest,
                size,
                made,
                0,
            )
            rest -= size
            made += 1
        if rest:
            owner[found], rests[found] = i, rest
            found += 1
    rows = whole
    windows = max(1, count // window)
    buckets = _new_buckets(size, -(-count // windows))
    for w in range(windows):
        first, last = count * w // windows, count * (w + 1) // windows
        order, sizes = _longest_first(rests[first:last], buckets[4])
        here = slice(made, made + last - first)
        used = _pack_window(sizes, rows, size, buckets, row[here], column[here])
        for k in range(last - first):
            i, rest = owner[first + order[k]], sizes[k]
            document[made + k], start[made + k], piece[made + k] = i, lengths[i] - rest, rest
        made += last - first
        rows += used
    return rows, document, start, piece, row, column


@kernel
def _new_buckets(size: int, pieces: int) -> _Buckets:
    """Return empty stacks of open rows, one per number of free tokens, as a tuple of arrays.

    They are: bit set of the stacks with rows; its summary; the top row of each stack; for each row, the row
    under it; space for counts.
    """
    words = np.zeros((size >> 6) + 2, np.uint64)
    summary = np.zeros((len(words) >> 6) + 1, np.uint64)
    tops, counts = np.full(size + 1, -1, np.int32), np.empty(size + 1, np.int32)
    return words, summary, tops, np.empty(pieces, np.int32), counts


@kernel
def _longest_first(rests: Int32s, counts: Int32s) -> tuple[Int32s, Int32s]:
    """Return the stable order of remainders by decreasing size, and their sizes in it, by a counting sort."""
    counts[:] = 0
    for rest in rests:
        counts[rest] += 1
    place = 0
    for rest in range(len(counts) - 1, -1, -1):
        counts[rest], place = place, place + counts[rest]
    order, sizes = np.empty(len(rests), np.int32), np.empty(len(rests), np.int32)
    for i in range(len(rests)):
        rest = rests[i]
        order[counts[rest]], sizes[counts[rest]] = i, rest
        counts[rest] += 1
    return order, sizes


@kernel
def _pack_window(sizes: Int32s, rows: int, size: int, buckets: _Buckets, row: Int64s, column: Int64s) -> int:
    """Place pieces of decreasing size by best fit into new rows, numbered from `rows`.

    Fills `row` and `column`; returns the number of rows used.
    """
    words, summary, top, under, _ = buckets
    used = int64(0)
    for k in range(len(sizes)):
        rest = sizes[k]
        # All pieces before this one are at least as long, so a piece of over half a row needs a new row.
        free = -1 if 2 * rest > size else _first_at_least(words, summary, rest)
        if free < 0:
            free, target = size, used
            used += 1
        else:
            target = top[free]
            top[free] = under[target]
            if top[free] < 0:
                _clear_bit(words, summary, free)
        row[k], column[k] = rows + target, size - free
        left = free - rest
        # A remainder of one token is a lone eos. These come last, and a row takes only one: it stays closed.
        if left > 0 and rest > 1:
            under[target] = top[left]
            if top[left] < 0:
                _set_bit(words, summary, left)
            top[left] = target
    free = _first_at_least(words, summary, 0)
    while free >= 0:
        top[free] = -1
        _clear_bit(words, summary, free)
        free = _first_at_least(words, summary, free)
    _lone_eos_first(sizes, rows, used, row, column)
    return used


@kernel
def _lone_eos_first(sizes: Int32s, rows: int, used: int, row: Int64s, column: Int64s) -> None:
    """Move one-token remainders to the start of their rows, and the other pieces there one column up.

    A remainder of one token is a lone eos. After the end of another document it would look like padding.
    """
    ones = len(sizes)
    while ones > 0 and sizes[ones - 1] == 1:
        ones -= 1
    if ones == len(sizes):
        return
    shift = np.zeros(used, np.int64)
    for k in range(ones, len(sizes)):
        shift[row[k] - rows] = 1
        column[k] = 0
    for k in range(ones):
        column[k] += shift[row[k] - rows]


@kernel
def _best_fit_crop(lengths: Int64s, size: int) -> tuple[int, Int64s, Int64s, Int64s, Int64s, Int64s]:
    """Pack as `pack_best_fit_crop` describes; documents of equal length are taken in order."""
    count, most = len(lengths), size + 1
    document, row, column = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    piece = np.empty(count, np.int64)
    # `up` has the lengths of the documents not placed yet; `down` has `most` - length for each of them, so
    # that `_first_at_least` finds the longest that fits.
    up, up_summary, _, _, ends = _new_buckets(most, 0)
    down, down_summary, _, _, _ = _new_buckets(most, 0)
    order, sizes = _longest_first(np.minimum(lengths, most).astype(np.int32), ends)
    heads = np.zeros(most + 1, np.int32)
    for k in range(count - 1, -1, -1):
        heads[sizes[k]] = k
        _set_bit(up, up_summary, sizes[k])
        _set_bit(down, down_summary, most - sizes[k])
    rows, free = 0, 0
    for k in range(count):
        if free == 0:
            rows, free = rows + 1, size
        found = _first_at_least(down, down_summary, most - free)
        length = most - found if found >= 0 else _first_at_least(up, up_summary, free + 1)
        document[k], row[k], column[k] = order[heads[length]], rows - 1, size - free
        piece[k] = min(length, free)
        free -= piece[k]
        heads[length] += 1
        if heads[length] == ends[length]:
            _clear_bit(up, up_summary, length)
            _clear_bit(down, down_summary, most - length)
    return rows, document, np.zeros(count, np.int64), piece, row, column


@kernel
def _concat(lengths: Int64s, size: int, bos: int) -> tuple[int, Int64s, Int64s, Int64s, Int64s, Int64s]:
    """Pack as `pack_concat`; `bos` is 1 if the bos is repeated where a row continues a document, else 0."""
    total = 0
    for length in lengths:
        total += length
    count = len(lengths) + -(-total // (size - bos))  # upper bound: one cut in every row
    document = np.empty(count, np.int64)
    start = np.empty(count, np.int64)
    piece = np.empty(count, np.int64)
    row = np.empty(count, np.int64)
    column = np.empty(count, np.int64)
    made, place = 0, 0
    for i in range(len(lengths)):
        done = 0
        while done < lengths[i]:
            if done > 0:  # the document continues in a new row
                place += bos
            take = min(lengths[i] - done, size - place % size)
            document[made], start[made], piece[made] = i, done, take
            row[made], column[made] = place // size, place % size
            done += take
            place += take
            made += 1
    here = slice(0, made)
    return -(-place // size), document[here], start[here], piece[here], row[here], column[here]


@kernel
def _by_row(row: Int64s, column: Int64s, rows: int) -> Int64s:
    """Return the order of pieces by (row, column): a counting sort by row, then an insertion sort in rows."""
    ends = np.zeros(rows + 1, np.int64)
    for r in row:
        ends[r + 1] += 1
    for r in range(rows):
        ends[r + 1] += ends[r]
    order = np.empty(len(row), np.int64)
    for i in range(len(row)):
        order[ends[row[i]]] = i
        ends[row[i]] += 1
    for k in range(1, len(order)):
        piece, j = order[k], k
        while j > 0 and row[order[j - 1]] == row[piece] and column[order[j - 1]] > column[piece]:
            order[j] = order[j - 1]
            j -= 1
        order[j] = piece
    return order


@kernel
def _copy_pieces(
    tokens: Tokens | UInt8s,
    sources: Int64s,
    lengths: Int64s,
    rows: Int64s,
    columns: Int64s,
    out: Tokens | UInt8s,
) -> None:
    flat = out.reshape(-1)
    for i in range(len(sources)):
        # Views that begin at 0 let the compiler vectorize the loop; with sums as indices it takes four times
        # as long.
        target, source = flat[rows[i] * out.shape[1] + columns[i] :], tokens[sources[i] :]
        for k in range(lengths[i]):
            target[k] = source[k]
