"""Bounds on how much of a text is symbols, digits, capitals, white space and letters.

Kinds are Python's (`str.isdigit`, …) and, for symbols, Unicode's categories P and S: combining marks, which
many scripts need in every word, are none. One pass, a table look-up a character; a ratio of nothing is 0.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numba
import numpy as np
import numpy.typing as npt

from shardkit.writers.filters.ratios_settings import RatiosConfig
from shardkit.writers.filters.rules import Rule, ratio
from shardkit.writers.filters.text_batch import TextBatch
from shardkit.writers.kernels.utf8 import next_character

__all__ = ["RatiosFilter"]

_KINDS = 6  # columns of the kernel's counts: the five below and all characters
_SYMBOL, _DIGIT, _UPPER, _SPACE, _ALPHA = (1 << kind for kind in range(_KINDS - 1))


class RatiosFilter:
    """Drops documents outside the bounds."""

    reasons = (
        "too_many_symbols",
        "too_many_digits",
        "too_many_capitals",
        "too_much_white_space",
        "too_few_letters",
    )

    def __init__(self, config: RatiosConfig, folder: Path | None = None) -> None:
        self._config = config

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge."""
        counts = np.zeros((len(batch), 1 << (_KINDS - 1)), np.int64)
        _count(batch.data, batch.offsets, batch.wanted, _kinds(), counts)
        characters = counts.sum(axis=1)
        symbols, digits, upper, space, letters = (
            counts[:, [mask for mask in range(counts.shape[1]) if mask & kind]].sum(axis=1)
            for kind in (_SYMBOL, _DIGIT, _UPPER, _SPACE, _ALPHA)
        )
        config = self._config
        most = (
            (config.max_symbol_ratio, ratio(symbols, characters)),
            (config.max_digit_ratio, ratio(digits, characters)),
            (config.max_uppercase_ratio, ratio(upper, letters)),
            (config.max_white_space_ratio, ratio(space, characters)),
        )
        rules = [
            Rule(name, None if bound is None else values > bound, values)
            for name, (bound, values) in zip(self.reasons, most, strict=False)
        ]
        values = ratio(letters, characters - space)
        least = config.min_alphabetic_ratio
        return [*rules, Rule("too_few_letters", None if least is None else values < least, values)]


@cache
def _kinds() -> npt.NDArray[np.uint8]:
    """uint8[1,114,112]: the kinds of every code point; none in planes that are empty or private."""
    kinds = np.zeros(0x110000, np.uint8)
    for code in range(0x40000):
        character = chr(code)
        if character.isalpha():
            kinds[code] = _ALPHA | _UPPER * character.isupper()
        elif character.isspace():
            kinds[code] = _SPACE
        else:
            symbol = unicodedata.category(character)[0] in "PS"
            kinds[code] = _SYMBOL * symbol | _DIGIT * character.isdigit()
    kinds.flags.writeable = False
    return kinds


@numba.njit(nogil=True, cache=True)
def _count(data, offsets, wanted, kinds, counts):  # type: ignore[no-untyped-def]
    """Characters of each document by their combination of kinds."""
    for document in range(len(wanted)):
        if wanted[document]:
            at, end = offsets[document], offsets[document + 1]
            while at < end:
                code, at = next_character(data, at)
                counts[document, kinds[code]] += 1
