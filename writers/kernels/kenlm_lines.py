"""Lines of ARPA files, the text form of n-gram models: n-grams with their probabilities and backoffs.

A line is a number, words and, optionally, another number, separated by spaces or tabs. A kernel reads all
lines in a piece of the file at once. An error message has the number and the text of the line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from shardkit.kernels.numba_support import Float64s, UInt8s, UInt32s, UInt64s, boolean, int64, kernel
from shardkit.writers.kernels.kenlm_binary import is_binary
from shardkit.writers.kernels.kenlm_tables import (
    MAX_ORDER,
    NO_EXTENSION,
    SIGN,
    KenlmModel,
    find_word,
    murmur_hash,
)

# Hashes of <unk> and <UNK>, the names of the unknown word.
UNKNOWN, UNKNOWN_TOO = np.uint64(0xEA91E7561F5B392B), np.uint64(0x7E163219007D2F54)
_PIECE_ROWS = 1 << 16  # maximum number of lines that a kernel reads in one call
_MAX_LINE_BYTES = 1 << 20  # maximum size of a line; an n-gram of twenty words takes a few hundred bytes
_MANTISSA = np.uint64(10**18)  # from this value on, digits are ignored: they do not change a float32
_COUNT = re.compile(rb"ngram (\d+)=\s*(\d{1,18})")
_TENS = np.array([float(f"1e{power}") for power in range(309)])
_TAB, _LINE_END, _RETURN, _SPACE = 9, 10, 13, 32
_PROBLEMS = (
    "",
    "its probability is not a number such as -1.25",
    "its probability is greater than 1 (its log10 is positive)",
    "it has too few words",
    "one of its words is not a unigram",
    "its backoff is not a number such as -0.5",
    "there is text after its backoff",
)


class ArpaLines:
    """Reads the parts of an ARPA file in order; the file's content comes in pieces.

    Each method raises ValueError for an invalid line.
    """

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = self._lines = b""
        self._data = np.zeros(8, np.uint8)  # the loaded lines, followed by eight zero bytes
        self._at = 0  # position of the next line in the loaded lines
        self.number = 0  # number of lines read so far

    def _fill(self) -> bool:
        """Load the next piece if no line is left; return False at the end of the file."""
        while self._at >= len(self._lines):
            piece = next(self._pieces, b"")
            if not piece and not self._rest:
                return False
            if len(self._rest) > _MAX_LINE_BYTES:
                raise ValueError(f"line {self.number + 1:,} has more than {_MAX_LINE_BYTES:,} bytes")
            joined = self._rest + piece if piece else self._rest + b"\n"
            whole = joined.rfind(b"\n") + 1
            self._lines, self._rest = joined[:whole], joined[whole:]
            self._data = np.frombuffer(self._lines + bytes(8), np.uint8)
            self._at = 0
        return True

    def _line(self) -> bytes:
        """Read a line, without white space at its ends; return b"" at the end of the file."""
        if not self._fill():
            return b""
        begin, self._at = self._at, self._lines.index(b"\n", self._at) + 1
        self.number += 1
        return self._lines[begin : self._at].strip()

    def _text_line(self) -> bytes:
        """Read the next line that is not blank; return b"" at the end of the file."""
        found = self._line()
        while not found and self._fill():
            found = self._line()
        return found

    def expect(self, wanted: str, what: str) -> None:
        """Read the next line, which must be `wanted`; `what` describes it in the error message."""
        found = self._text_line()
        if found != wanted.encode():
            shown = f"line {self.number:,} is {_shown(found)}" if found else "it ends"
            raise ValueError(f"{shown} where {wanted}, {what}, should be")

    def counts(self) -> list[int]:
        """Read the header: the number of n-grams of each order."""
        found = self._text_line()
        while found.startswith(b"#"):
            found = self._text_line()
        if found != b"\\data\\":
            if is_binary(found):
                raise ValueError("it is a compressed binary model: decompress it, so that it can be mapped")
            raise ValueError(f"it begins with {_shown(found)} instead of \\data\\")
        counts: list[int] = []
        while line := self._line():
            match = _COUNT.fullmatch(line)
            if match is None or int(match[1]) != len(counts) + 1:
                wanted = f"'ngram {len(counts) + 1}=...'"
                raise ValueError(f"line {self.number:,} is {_shown(line)} where {wanted} should be")
            counts.append(int(match[2]))
        if not 2 <= len(counts) <= MAX_ORDER:
            raise ValueError(f"its order is {len(counts)}; the order of a model is 2 to {MAX_ORDER}")
        return counts

    def unigrams(self, count: int) -> tuple[UInt64s, UInt64s]:
        """Read the unigrams; return (hashes of the words, their weights: bits of two float32 each)."""
        hashes, weights = [np.zeros(0, np.uint64)], [np.zeros(0, np.uint64)]
        for rows in self._next_rows(1, count):
            found, values = np.zeros(rows, np.uint64), np.zeros(rows, np.uint64)
            end = len(self._lines)
            done = self._passed(_parse_unigrams(self._data, self._at, end, _TENS, found, values))
            hashes.append(found[:done])
            weights.append(values[:done])
        return np.concatenate(hashes), np.concatenate(weights)

    def ngrams(self, order: int, count: int, known: KenlmModel) -> tuple[UInt32s, UInt64s]:
        """Read n-grams of `known` words; return (their words uint32[count, order], weights uint64[count])."""
        words, weights = [np.zeros((0, order), np.uint32)], [np.zeros(0, np.uint64)]
        for rows in self._next_rows(order, count):
            found, values = np.zeros((rows, order), np.uint32), np.zeros(rows, np.uint64)
            end = len(self._lines)
            done = self._passed(_parse_ngrams(self._data, self._at, end, _TENS, known, found, values))
            words.append(found[:done])
            weights.append(values[:done])
        return np.concatenate(words), np.concatenate(weights)

    def _next_rows(self, order: int, count: int) -> Iterator[int]:
        """Yield the maximum number of lines to read next, until `_passed` has counted `count` lines."""
        first = self.number
        while missing := count - (self.number - first):
            if not self._fill():
                raise ValueError(f"it ends, but {missing:,} of {count:,} {order}-grams are missing")
            yield min(missing, _PIECE_ROWS)

    def _passed(self, outcome: tuple[int, int, int]) -> int:
        """Move past the lines that a kernel has read; return their number.

        `outcome` is (number of lines, index of the next line in the loaded lines, index in _PROBLEMS or 0).
        """
        count, self._at, problem = outcome
        self.number += count
        if problem:
            line, what = self._line(), _PROBLEMS[problem]
            if not line or line.startswith(b"\\"):
                what = "there are fewer n-grams than the file declares at its beginning"
            raise ValueError(f"line {self.number:,} is {_shown(line)}: {what}")
        return count


def _shown(line: bytes) -> str:
    text = line.decode("utf-8", "replace")
    return repr(text if len(text) <= 60 else text[:60] + "...")


@kernel(allocates=False)
def _parse_number(data: UInt8s, at: int, tens: Float64s) -> tuple[float, int]:
    """Parse the decimal number at data[at]; return (value, index after it), or (0, -1) if it is invalid."""
    negative = data[at] == 45
    at += int64(negative or data[at] == 43)
    if (data[at] | 32) == 105 and (data[at + 1] | 32) == 110 and (data[at + 2] | 32) == 102:
        return -np.inf if negative else np.inf, at + 3
    mantissa, exponent = np.uint64(0), int64(0)
    point, digits = boolean(False), boolean(False)
    while True:
        byte = int64(data[at])
        if 48 <= byte < 58:
            digits = boolean(True)
            if mantissa < _MANTISSA:
                mantissa = mantissa * np.uint64(10) + np.uint64(byte - 48)
                exponent -= int64(point)
            else:
                exponent += int64(not point)
        elif byte == 46 and not point:
            point = boolean(True)
        else:
            break
        at += 1
    if not digits:
        return 0.0, int64(-1)
    if (data[at] | 32) == 101:
        at += 1
        is_small = data[at] == 45
        at += int64(is_small or data[at] == 43)
        power, begin = int64(0), at
        while 48 <= data[at] < 58:
            power = min(power * 10 + int64(data[at]) - 48, 9999)
            at += 1
        if at == begin:
            return 0.0, int64(-1)
        exponent += -power if is_small else power
    value = np.float64(mantissa)
    if exponent < 0:
        value = value / tens[min(-exponent, 308)] / tens[min(max(-exponent - 308, 0), 308)]
    else:
        value *= tens[min(exponent, 308)]
    return -value if negative else value, at


@kernel(allocates=False)
def _next_word(data: UInt8s, at: int) -> tuple[int, int]:
    """Return (begin, end) of the next word of a line; they are equal if there is none."""
    while data[at] == _SPACE or data[at] == _TAB:
        at += 1
    begin = at
    while data[at] != _SPACE and data[at] != _TAB and data[at] != _LINE_END and data[at] != _RETURN:
        at += 1
    return begin, at


@kernel(allocates=False)
def _parse_backoff(data: UInt8s, at: int, prob: float, tens: Float64s) -> tuple[np.uint64, int, int]:
    """Parse the rest of a line; return (bits of weights, start of the next line, index in _PROBLEMS)."""
    backoff, found = 0.0, at
    begin, end = _next_word(data, at)
    if end > begin:
        backoff, found = _parse_number(data, begin, tens)
        if found != end or not abs(backoff) < np.inf:
            return np.uint64(0), at, 5
    begin, end = _next_word(data, end)
    if end > begin:
        return np.uint64(0), at, 6
    at = end + int64(data[end] == _RETURN)
    if data[at] != _LINE_END:
        return np.uint64(0), at, 6
    low = np.uint64(np.float32(prob).view(np.uint32)) | SIGN
    high = np.uint64(np.float32(backoff).view(np.uint32)) if backoff != 0 else NO_EXTENSION
    return low | high << np.uint64(32), at + 1, 0


@kernel(allocates=False)
def _parse_probability(data: UInt8s, at: int, tens: Float64s) -> tuple[float, int, int]:
    """Parse the start of a line; return (log10 probability, index after it, index in _PROBLEMS)."""
    begin, stop = _next_word(data, at)
    prob, end = _parse_number(data, begin, tens)
    if end != stop or begin == stop:
        return prob, at, 1
    return prob, end, 2 if prob > 0 else 0


@kernel(allocates=False)
def _parse_unigrams(
    data: UInt8s, at: int, end: int, tens: Float64s, hashes: UInt64s, weights: UInt64s
) -> tuple[int, int, int]:
    """Read lines of unigrams; return (their number, start of the next line, its index in _PROBLEMS or 0)."""
    for row in range(len(hashes)):
        if at >= end:
            return row, at, 0
        prob, place, problem = _parse_probability(data, at, tens)
        if problem:
            return row, at, problem
        begin, place = _next_word(data, place)
        if begin == place:
            return row, at, 3
        hashes[row] = murmur_hash(data, begin, place - begin)
        weights[row], place, problem = _parse_backoff(data, place, prob, tens)
        if problem:
            return row, at, problem
        at = place
    return len(hashes), at, 0


@kernel(allocates=False)
def _parse_ngrams(
    data: UInt8s, at: int, end: int, tens: Float64s, known: KenlmModel, words: UInt32s, weights: UInt64s
) -> tuple[int, int, int]:
    """Read lines of n-grams as `_parse_unigrams` does; words are stored as their numbers in `known`."""
    for row in range(len(words)):
        if at >= end:
            return row, at, 0
        prob, place, problem = _parse_probability(data, at, tens)
        if problem:
            return row, at, problem
        for column in range(words.shape[1]):
            begin, place = _next_word(data, place)
            if begin == place:
                return row, at, 3
            value = murmur_hash(data, begin, place - begin)
            word = find_word(known, value)
            if word == 0 and value != UNKNOWN and value != UNKNOWN_TOO:
                return row, at, 4
            words[row, column] = word
        weights[row], place, problem = _parse_backoff(data, place, prob, tens)
        if problem:
            return row, at, problem
        at = place
    return len(words), at, 0
