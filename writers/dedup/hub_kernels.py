"""Comparing signatures of many documents with many others: equal values are counted over one byte of each.

A value of a signature is cut to a byte that all of its bits decide (b-bit minwise hashing: Li and König,
2010): values that differ agree in it once in 256 times, which thresholds allow for. The bytes of a document,
filled up with zeros to whole words, are its *print*: uint64[words], 112 bytes for 112 permutations instead of
448. The prints that others are compared with are held by columns, so that the comparison runs over many of
them at once in vector registers: about 3 ns a comparison of 112 values.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

__all__ = ["INDEX", "INPUT", "PLANTED", "make_prints", "matches_for", "scan", "scan_groups"]

INDEX, INPUT, PLANTED = 0, 1, 2  # kinds of documents, in the order of their priorities

_BLOCK = 256  # documents whose counts stay in the nearest cache
_LOW7 = np.uint64(0x7F7F7F7F7F7F7F7F)
_BIT7 = np.uint64(0x8080808080808080)
_PAIRS = np.uint64(0x00FF00FF00FF00FF)
_ONES = np.uint64(0x0001000100010001)


def make_prints(signatures: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    """uint64[n, words] of uint32[n, permutations]."""
    count, permutations = signatures.shape
    prints = np.zeros((count, -(-permutations // 8) * 8), np.uint8)
    # All bits of the value decide the product's upper byte, and small values spread too (Fibonacci hashing).
    prints[:, :permutations] = signatures * np.uint32(0x9E3779B1) >> np.uint32(24)
    return prints.view("<u8")


def matches_for(similarity: float, permutations: int) -> int:
    """The least number of equal bytes, zeros at the end included, that makes an estimate of `similarity`."""
    equal = similarity + (1 - similarity) / 256
    filling = -permutations % 8
    return int(np.ceil(permutations * equal - 1e-9)) + filling


@numba.njit(nogil=True, cache=True)
def count_matches(document, columns, count, out):  # type: ignore[no-untyped-def]
    """out[i] = equal bytes of the print `document` and of column i of `columns`, for i < count."""
    for start in range(0, count, _BLOCK):
        stop = min(count, start + _BLOCK)
        sums = out[start:stop]
        sums[:] = np.uint64(0)
        for word in range(len(document)):
            value = document[word]
            row = columns[word, start:stop]
            for i in range(len(sums)):
                # A byte of `differs` has its upper bit set if any bit of it is; sums stay below 256 a byte.
                x = row[i] ^ value
                differs = ((x & _LOW7) + _LOW7) | x
                sums[i] += (~differs & _BIT7) >> np.uint64(7)
        for i in range(len(sums)):
            halves = (sums[i] & _PAIRS) + ((sums[i] >> np.uint64(8)) & _PAIRS)
            sums[i] = halves * _ONES >> np.uint64(48)


@numba.njit(nogil=True, cache=True)
def scan(prints, kinds, ranks, begin, leaders, settings, bounded, space, out, at):  # type: ignore[no-untyped-def]
    """Pair documents with the leaders before them, making leaders of those that none covers.

    Goes through the rows of `prints` from `begin` while a row's pairs fit into `out` from `at`. space holds
    `leaders` leaders: (their prints by columns, ranks, kinds, whether they are firm, and place for counts).
    settings = (floor, similar, cover, most leaders, most pairs of a document, similar firm leaders that
    cover it), the first three as `matches_for`. Sets bounded[i] to 1 where one more leader was needed than
    there may be, to 2 where pairs of a document that is not covered were left out (3: both). Returns (next
    row, leaders, next place in out).
    """
    floor, similar, cover, most_leaders, most_pairs, enough = settings
    columns, heads, head_kinds, firm, sums = space
    for i in range(begin, len(prints)):
        if at + min(leaders, most_pairs) > len(out):
            return i, leaders, at
        count_matches(prints[i], columns, leaders, sums)
        kind = kinds[i]
        hits = alike = 0
        best = np.uint64(0)  # of firm leaders
        for j in range(leaders):  # free of branches, so that it runs in vector registers
            of_firm = sums[j] * np.uint64(firm[j])
            best = max(best, of_firm)
            alike += of_firm >= similar
            hits += sums[j] >= floor
        if kind == PLANTED:
            for j in range(leaders):
                hits -= sums[j] >= floor and head_kinds[j] != INPUT
        covered = leaders > 0 and (best >= cover or alike >= enough)
        if hits and kind != INDEX:
            at = _pair(ranks[i], kind, leaders, floor, hits, most_pairs, space, out, at)
            if hits > most_pairs and not covered:
                bounded[i] |= 2
        if covered:
            continue
        if leaders == most_leaders:
            bounded[i] |= 1
        elif kind != PLANTED:
            for word in range(len(columns)):  # a slice assigned to a slice takes Numba seconds to compile
                columns[word, leaders] = prints[i, word]
            heads[leaders] = ranks[i]
            head_kinds[leaders] = kind
            firm[leaders] = kind == INDEX or best < similar
            leaders += 1
    return len(prints), leaders, at


@numba.njit(nogil=True, cache=True)
def _pair(rank, kind, leaders, floor, hits, most, space, out, at):  # type: ignore[no-untyped-def]
    """Write the pairs of one document; of more than `most`, half the first and half the most alike others."""
    _, heads, head_kinds, _, sums = space
    first = hits if hits <= most else most // 2
    least, ties = floor, 0
    if hits > most:
        least, ties = _cut(kind, leaders, floor, first, most - first, head_kinds, sums)
    for j in range(leaders):
        if sums[j] < floor or (kind == PLANTED and head_kinds[j] != INPUT):
            continue
        if first > 0:
            first -= 1
        elif sums[j] < least:
            continue
        elif sums[j] == least:
            if ties == 0:
                continue
            ties -= 1
        out[at, 0] = heads[j]
        out[at, 1] = rank
        at += 1
    return at


@numba.njit(nogil=True, cache=True)
def _cut(kind, leaders, floor, first, most, head_kinds, sums):  # type: ignore[no-untyped-def]
    """(least, ties): past `first` hits, the `most` alike are those over least, and ties equal to it."""
    histogram = np.zeros(np.int64(sums[:leaders].max()) + 1, np.int64)
    for j in range(leaders):
        if sums[j] >= floor and (kind != PLANTED or head_kinds[j] == INPUT):
            if first > 0:
                first -= 1
            else:
                histogram[np.int64(sums[j])] += 1
    left = np.int64(most)
    for matches in range(len(histogram) - 1, -1, -1):
        if histogram[matches] >= left:
            return np.uint64(matches), left
        left -= histogram[matches]
    return floor, left


@numba.njit(nogil=True, cache=True)
def scan_groups(prints, kinds, ranks, edges, state, settings, space, out):  # type: ignore[no-untyped-def]
    """`scan` of many small groups of rows, group g from edges[g] to edges[g + 1], where all become leaders:

    no group may have as many documents, planted ones aside, as settings allow leaders, nor any be covered.

    state = (group, row, leaders): where to go on; returns how many pairs are in `out`. Done when the state's
    group is len(edges) - 1.
    """
    at = 0
    bounded = np.zeros(0, np.uint8)
    while state[0] < len(edges) - 1:
        start, stop = edges[state[0]], edges[state[0] + 1]
        row, leaders, at = scan(
            prints[start:stop],
            kinds[start:stop],
            ranks[start:stop],
            state[1],
            state[2],
            settings,
            bounded,
            space,
            out,
            at,
        )
        state[1], state[2] = row, leaders
        if row < stop - start:
            return at
        state[0] += 1
        state[1] = state[2] = 0
    return at
