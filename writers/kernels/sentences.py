"""Count sentences as spaCy's rule-based sentencizer does for English.

C4's rules need sentences, and datatrove splits them with spaCy's English tokenizer and its "sentencizer": a
full stop, question mark or exclamation mark that is a token of its own ends a sentence, and the next token
that is not punctuation begins another one. Here, whether a full stop is a token is decided within one word
between white space: marks are stripped from both ends, but a full stop only after a lower-case letter, a
digit, a mark or two capitals; abbreviations and web addresses are not split. This is spaCy's tokenizer
without its rarer exceptions: of 19,607 lines of prose, HTML and code, 99.5 % have the same count.

The kernel allocates no memory.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from shardkit.kernels.numba_support import Bools, UInt8s, UInt16s, UInt64s, boolean, int64, kernel
from shardkit.kernels.simd import range_mask, trailing_zeros
from shardkit.kernels.utf8 import (
    ASSIGNED,
    CODE_POINTS,
    TERMINAL,
    character_at,
    character_before,
    characters_with,
    every_character,
    first_bytes,
    pack_bytes,
    signs,
)
from shardkit.writers.kernels.blocks import BLOCK_BYTES

_SPACE, _END, _PUNCTUATION, _AFFIX, _PREFIX, _BEFORE_STOP, _LOWER, _UPPER, _QUOTE = (
    1 << bit for bit in range(9)
)

_MARKS = "…,:;!?¿؟¡()[]{}<>_#*&。？！，、；：～·।،۔؛٪"
_QUOTES = "'\"”“`‘´’‚,„»«「」『』（）〔〕【】《》〈〉〈〉⟦⟧"
_CURRENCY = "$£€¥฿₽﷼₴₠₡₢₣₤₥₦₧₨₩₪₫₭₮₯₰₱₲₳₵₶₷₸₹₺₻₼₾₿"
_ABBREVIATIONS = """
    Mr. Mrs. Ms. Messrs. Dr. Prof. Rev. Gen. Adm. Gov. Sen. Rep. Jr. Ph.D. St. Mt. Inc. Ltd. Co. co. Corp.
    Bros. a.m. p.m. e.g. E.g. E.G. i.e. I.e. I.E. vs. v.s. ä. ö. ü.
    Jan. Feb. Mar. Apr. Jun. Jul. Aug. Sep. Sept. Oct. Nov. Dec.
    Ak. Ala. Ariz. Ark. Calif. Colo. Conn. D.C. Del. Fla. Ga. Ia. Id. Ill. Ind. Kan. Kans. Ky. La. Mass. Md.
    Mich. Minn. Miss. Mo. Mont. N.C. N.D. N.H. N.J. N.M. N.Y. Neb. Nebr. Nev. Okla. Ore. Pa. S.C. Tenn. Va.
    Wash. Wis.
"""


@cache
def _abbreviations() -> frozenset[str]:
    """Return words whose full stop is part of them; each has at most eight bytes, which fit in a uint64."""
    hours = {f"{hour}{half}.m." for hour in range(1, 13) for half in "ap"}
    return (
        frozenset(_ABBREVIATIONS.split()) | hours | {f"{letter}." for letter in "abcdefghijklmnopqrstuvwxyz"}
    )


@cache
def _flags() -> UInt16s:
    """Return uint16[1,114,112]: the flags of every code point, such as _SPACE or _END."""
    flags, every = np.zeros(CODE_POINTS, np.uint16), every_character()
    letters, space, upper, lower = (
        test(every) for test in (np.char.isalpha, np.char.isspace, np.char.isupper, np.char.islower)
    )
    flags[:ASSIGNED] = space * np.uint16(_SPACE)
    flags[:ASSIGNED] |= (letters & ~upper) * np.uint16(_LOWER | _BEFORE_STOP)
    flags[:ASSIGNED] |= (letters & ~lower) * np.uint16(_UPPER)
    codes, categories = signs()
    flags[codes] = (categories.astype("U1") == "P") * np.uint16(_PUNCTUATION)
    flags[codes] |= (categories == "So") * np.uint16(_AFFIX)
    for characters, flag in (
        (characters_with(TERMINAL), _END),
        (_MARKS + _QUOTES, _AFFIX | _BEFORE_STOP),
        ("—–", _AFFIX),
        ("§%=+" + _CURRENCY, _PREFIX),
        ("0123456789%²-+", _BEFORE_STOP),
        (_QUOTES, _QUOTE),
    ):
        for character in characters:
            flags[ord(character)] |= flag
    flags.flags.writeable = False
    return flags


# (flags of characters, first bytes of the marks that end sentences, abbreviations as sorted uint64)
SentenceTables = tuple[UInt16s, Bools, UInt64s]


@cache
def sentence_tables() -> SentenceTables:
    """Return the tables that `count_sentences` reads."""
    packed = sorted(int.from_bytes(word.encode(), "little") for word in _abbreviations())
    return _flags(), first_bytes(characters_with(TERMINAL)), np.array(packed, np.uint64)


@kernel(allocates=False)
def count_sentences(data: UInt8s, begin: int, end: int, tables: SentenceTables) -> int:
    """Count the sentences of data[begin:end], valid UTF-8; 0 if it is blank. Pass sentence_tables()."""
    flags, marks, abbreviations = tables
    while end > begin and flags[_last(data, end)[0]] & _SPACE:
        end = _last(data, end)[1]
    if begin == end:
        return 0
    count, at, done = 1, begin, begin
    pending = boolean(False)  # typed: for a literal, Numba would compile the called functions again
    while at < end:
        if pending:  # a sentence has ended, and the next word decides whether another one begins
            gap = at
            while flags[character_at(data, at)[0]] & _SPACE:
                at = character_at(data, at)[1]
            # spaCy makes a token of any white space other than a single space.
            if at - gap > 1 or (at > gap and data[gap] != 32):
                count, pending = count + 1, boolean(False)
                continue
            first = at
        else:
            at = _find_mark(data, at, end, marks)
            if at == end:
                break
            code, after = character_at(data, at)
            if not flags[code] & _END:
                at = after
                continue
            first = at
            while first > done and not flags[_last(data, first)[0]] & _SPACE:
                first = _last(data, first)[1]
        while at < end:
            code, after = character_at(data, at)
            if flags[code] & _SPACE:
                break
            at = after
        done = at
        breaks, pending = _word(data, first, at, flags, abbreviations, pending)
        count += breaks
    return count


@kernel(allocates=False)
def _find_mark(data: UInt8s, at: int, end: int, marks: Bools) -> int:
    """Return the index of the first byte in data[at:end] that may begin a sentence's end mark, or `end`."""
    while at < end and at + BLOCK_BYTES <= len(data):
        found = range_mask(data, at, 46, 1) | range_mask(data, at, 33, 1) | range_mask(data, at, 63, 1)
        found |= range_mask(data, at, 0xC2, 0x3E)
        while found:
            here = at + trailing_zeros(found)
            if here >= end or marks[data[here]]:
                return min(here, end)
            found &= found - np.uint64(1)
        at += BLOCK_BYTES
    while at < end and not marks[data[at]]:
        at += 1
    return min(at, end)


@kernel(allocates=False)
def _last(data: UInt8s, end: int) -> tuple[int, int]:
    """Call character_before without inlining it, which saves compile time (see `character_at`)."""
    return character_before(data, end)


@kernel(allocates=False)
def _word(
    data: UInt8s, begin: int, end: int, flags: UInt16s, abbreviations: UInt64s, pending: bool
) -> tuple[int, bool]:
    """Return (number of sentences that begin in a word, whether a sentence has ended and none begun)."""
    first, last = _core(data, begin, end, flags, abbreviations)
    breaks, pending = _affixes(data, begin, first, flags, int64(0), pending)
    piece = first
    if not _abbreviated(data, first, last, abbreviations) and not _address(data, first, last, flags):
        for at in range(first + 1, last - 1):
            if data[at] != 46:
                continue
            before = flags[_last(data, at)[0]] if at > piece else 0
            if before & (_LOWER | _QUOTE) and flags[character_at(data, at + 1)[0]] & (_UPPER | _QUOTE):
                breaks, pending = _token(data, piece, at, flags, breaks, pending)
                pending, piece = True, at + 1
    breaks, pending = _token(data, piece, last, flags, breaks, pending)
    return _affixes(data, last, end, flags, breaks, pending)


@kernel(allocates=False)
def _core(data: UInt8s, first: int, last: int, flags: UInt16s, abbreviations: UInt64s) -> tuple[int, int]:
    """Return (begin, end) of a word without the marks at both ends, such as quotes and full stops."""
    while first < last and not _abbreviated(data, first, last, abbreviations):
        before = (first, last)
        code, after = character_at(data, first)
        if code == 46:
            while after < last and data[after] == 46:
                after += 1
            if after - first > 1:
                first = after
        elif flags[code] & (_AFFIX | _PREFIX):
            first = after
        if first == last or _abbreviated(data, first, last, abbreviations):
            break
        code, at = _last(data, last)
        if code == 46:
            while at > first and data[at - 1] == 46:
                at -= 1
            if last - at > 1 or _full_stop(data, first, at, flags):
                last = at
        elif flags[code] & _AFFIX:
            last = at
        if before == (first, last):
            break
    return first, last


@kernel(allocates=False)
def _full_stop(data: UInt8s, begin: int, stop: int, flags: UInt16s) -> bool:
    """Return whether the dot at `stop` is a token, judging by the characters before it in the word."""
    if stop == begin:
        return False
    code, at = _last(data, stop)
    if flags[code] & _BEFORE_STOP:
        return True
    return at > begin and (flags[code] & flags[_last(data, at)[0]] & _UPPER) != 0


@kernel(allocates=False)
def _affixes(
    data: UInt8s, begin: int, end: int, flags: UInt16s, breaks: int, pending: bool
) -> tuple[int, bool]:
    """Call `_token` for each mark in data[begin:end], return its last result; dots in a row are one token."""
    at = begin
    while at < end:
        here = at
        at = character_at(data, at)[1]
        while data[here] == 46 and at < end and data[at] == 46:
            at += 1
        breaks, pending = _token(data, here, at, flags, breaks, pending)
    return breaks, pending


@kernel(allocates=False)
def _token(
    data: UInt8s, begin: int, end: int, flags: UInt16s, breaks: int, pending: bool
) -> tuple[int, bool]:
    """Return the new (number of sentence beginnings, whether a sentence has ended) after a token.

    A token ends a sentence, begins one if another has ended, or is only punctuation.
    """
    if begin == end:
        return breaks, pending
    code, at = character_at(data, begin)
    if at == end and flags[code] & _END:
        return breaks, True
    while flags[code] & _PUNCTUATION:
        if at == end:
            return breaks, pending
        code, at = character_at(data, at)
    return breaks + pending, False


@kernel(allocates=False)
def _abbreviated(data: UInt8s, begin: int, end: int, abbreviations: UInt64s) -> bool:
    if end - begin > 8 or begin == end or data[end - 1] != 46:
        return False
    packed = pack_bytes(data, begin, end)
    low, high = 0, len(abbreviations) - 1
    while low < high:
        middle = (low + high) >> 1
        if abbreviations[middle] < packed:
            low = middle + 1
        else:
            high = middle
    return boolean(abbreviations[low] == packed)


@kernel(allocates=False)
def _address(data: UInt8s, begin: int, end: int, flags: UInt16s) -> bool:
    """Return whether a word looks like [scheme://]host.domain[:/?#...], with a domain in lower case."""
    for at in range(begin, end - 2):
        if data[at] == 58 and data[at + 1] == 47 and data[at + 2] == 47:
            begin = at + 3
            break
    at, dot, letters = begin, -1, 0
    while at < end and data[at] != 47 and data[at] != 63 and data[at] != 35 and data[at] != 58:
        code, after = character_at(data, at)
        if code == 46:
            dot, letters = at, 0
        elif flags[code] & _LOWER:
            letters += 1
        else:
            letters = -(1 << 40)  # not a domain, unless another dot follows
        at = after
    return dot > begin and letters >= 2
