"""Finds where documents repeat questions of evaluation sets: clusters of n-grams that both contain.

A cluster of a question in a text begins and ends with one of the question's n-grams, and has no more than
`max_misses` n-grams of other words in a row. Its weight is the sum of the weights of the question's
distinct n-grams in it.

Only clusters whose weight reaches the question's need, a minimum weight, are wanted, so not every n-gram must
be looked up. Put the n-grams of a question in some order, and take the first ones that together weigh more
than the question's weight minus its need: a cluster without any of them cannot reach the need (prefix
filtering, Chaudhuri et al. 2006). They are the question's seeds. With the heaviest n-grams first, the seeds
are rare n-grams, so boilerplate leads to few questions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardkit.kernels.numba_support import Int64s, UInt64s, int64, kernel

_FIRST_ROOM = 64  # initial number of rows of the result


class QuestionGrams(NamedTuple):
    """Distinct n-grams of q questions, and the questions of each of s seeds.

    The n-grams of question i are hashes[offsets[i]:offsets[i + 1]], ascending, with their `weights`; a
    cluster needs the weight needs[i]. The questions of seed j are
    seed_questions[seed_offsets[j]:seed_offsets[j + 1]].
    """

    hashes: UInt64s
    weights: Int64s
    offsets: Int64s
    needs: Int64s
    seed_questions: Int64s
    seed_offsets: Int64s


@kernel
def find_clusters(
    hashes: UInt64s, offsets: Int64s, matches: Int64s, grams: QuestionGrams, max_misses: int
) -> Int64s:
    """Return int64[m, 5]: (text, question, begin, end, weight) of clusters that reach the question's need.

    Text i has the n-grams hashes[offsets[i]:offsets[i + 1]]; `begin` and `end` are indexes of hashes.
    `matches`, int64[k, 2], ascending, has (index of a hash that is a seed, number of the seed).
    """
    found = np.empty((_FIRST_ROOM, 5), np.int64)
    ends = np.zeros(len(grams.needs), np.int64)  # end of the last cluster of each question
    seen = np.zeros(np.max(np.diff(grams.offsets)), np.int64)  # number of the last expansion with each n-gram
    count, text, expansion = 0, 0, 0
    for row in range(len(matches)):
        at, seed = matches[row, 0], matches[row, 1]
        while offsets[text + 1] <= at:
            text += 1
        for place in range(grams.seed_offsets[seed], grams.seed_offsets[seed + 1]):
            question = grams.seed_questions[place]
            if at < ends[question]:
                continue
            expansion += 1
            limits = (offsets[text], offsets[text + 1])
            begin, end, weight = _expand(hashes, at, limits, grams, question, max_misses, seen, expansion)
            ends[question] = end
            if weight < grams.needs[question]:
                continue
            if count == len(found):
                found = np.concatenate((found, np.empty_like(found)))
            found[count, 0], found[count, 1], found[count, 2] = text, question, begin
            found[count, 3], found[count, 4] = end, weight
            count += 1
    return found[:count]


@kernel
def _expand(
    hashes: UInt64s,
    at: int,
    limits: tuple[int, int],
    grams: QuestionGrams,
    question: int,
    max_misses: int,
    seen: Int64s,
    expansion: int,
) -> tuple[int, int, int]:
    """Return (begin, end, weight) of a question's cluster around hashes[at], which is one of its n-grams."""
    first, last = grams.offsets[question], grams.offsets[question + 1]
    begin, end, weight = int64(at), int64(at + 1), int64(0)
    for step in (1, -1):
        place, misses = at if step == 1 else at - 1, 0
        while limits[0] <= place < limits[1] and misses <= max_misses:
            gram = _find(hashes[place], grams.hashes, first, last)
            misses += 1
            if gram >= 0:
                misses = 0
                begin, end = min(begin, place), max(end, place + 1)
                if seen[gram - first] != expansion:
                    seen[gram - first] = expansion
                    weight += grams.weights[gram]
            place += step
    return begin, end, weight


@kernel
def _find(value: np.uint64, hashes: UInt64s, first: int, last: int) -> int:
    """Return the index of `value` among the sorted hashes[first:last], or -1 if it is absent."""
    stop = last
    while first < last:
        middle = (first + last) >> 1
        if hashes[middle] < value:
            first = middle + 1
        else:
            last = middle
    return int64(first) if first < stop and hashes[first] == value else int64(-1)
