"""Masks repeated tokens in documents, so that they are left out of the loss.

If the same 1 to `LONGEST_PERIOD` tokens follow each other more than `most` times, they are a span: a run of
tokens that each equal the token one period before, and the period before the run. All tokens of a span are
masked.

A run must have at least `period * most` tokens. The search therefore jumps ahead by this number and compares
tokens backwards, so where nothing repeats it reads one token per jump. It takes about a nanosecond per token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardkit.kernels.numba_support import Int64s, UInt8s, kernel
from shardkit.order.token_mask import LONGEST_PERIOD

_Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


def mask_repetitions(
    tokens: _Tokens, starts: Int64s, lengths: Int64s, masks: UInt8s, mask_starts: Int64s, most: int
) -> Int64s:
    """Set `masks` to 0 in the repeated spans of documents; return int64[documents], how many masks changed.

    Document i has `lengths[i]` tokens from `starts[i]` on, and their masks from `mask_starts[i]` on. Raises
    IndexError if a document is outside of `tokens` or `masks`.
    """
    for values, begins in ((tokens, starts), (masks, mask_starts)):
        if ((begins < 0) | (lengths < 0) | (begins + lengths > len(values))).any():
            raise IndexError("a document is outside the tokens or the masks")
    masked = np.zeros(len(lengths), np.int64)
    _mask(tokens, starts, lengths, masks, mask_starts, most, LONGEST_PERIOD, masked)
    return masked


@kernel
def _mask(
    tokens: _Tokens,
    starts: Int64s,
    lengths: Int64s,
    masks: UInt8s,
    mask_starts: Int64s,
    most: int,
    longest: int,
    masked: Int64s,
) -> None:
    for number in range(len(lengths)):
        first, stop = starts[number], starts[number] + lengths[number]
        to_mask = mask_starts[number] - first
        for period in range(1, longest + 1):
            least = period * most
            begin = first + period  # the run cannot begin before this index
            while begin + least <= stop:
                at = begin + least - 1
                while at >= begin and tokens[at] == tokens[at - period]:
                    at -= 1
                if at >= begin:
                    begin = at + 1
                    continue
                end = begin + least
                while end < stop and tokens[end] == tokens[end - period]:
                    end += 1
                for place in range(begin - period + to_mask, end + to_mask):
                    masked[number] += masks[place]
                    masks[place] = 0
                begin = end + 1
