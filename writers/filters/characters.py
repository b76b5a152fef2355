"""What kernels must know about characters: one byte of flags for each code point.

White space, letters and line ends are Python's own (`str.isspace`, `str.isalpha`, `str.splitlines`), so they
follow the Unicode version of the running Python; the two punctuation sets are datatrove's, listed here.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

__all__ = ["ALPHA", "LINE_END", "PUNCTUATION", "SPACE", "TERMINAL", "character_flags", "characters_with"]

SPACE = 1
ALPHA = 2
PUNCTUATION = 4  # a word of nothing else is a symbol to Gopher's rules
TERMINAL = 8  # may end a sentence, by FineWeb's line rule
LINE_END = 16

# Letters are assigned in planes 0 to 3 only; the other planes hold tags, private use and nothing.
_ASSIGNED = 0x40000
_CODE_POINTS = 0x110000

# datatrove.utils.text.TERMINAL_PUNCTUATION: Unicode's sentence terminals with a few more full stops.
_TERMINAL = (
    "21 2E 3F 589 61D-61F 6D4 700-702 7F9 837 839 83D-83E 964-965 104A-104B 1362 1367-1368 166E 1735-1736 "
    "17D4-17D6 17D9-17DA 1803 1809 1944-1945 1AA8-1AAB 1B5A-1B5B 1B5E-1B5F 1B7D-1B7E 1C3B-1C3C 1C7E-1C7F "
    "203C-203D 2047-2049 2E2E 2E3C 2E53-2E54 3002 A4FF A60E-A60F A6F3 A6F7 A876-A877 A8CE-A8CF A92F "
    "A9C8-A9C9 AA5D-AA5F AAF0-AAF1 ABEB FE52 FE56-FE57 FF01 FF0E FF1F FF61 10A56-10A57 10F55-10F59 "
    "10F86-10F89 11047-11048 110BE-110C1 11141-11143 111C5-111C6 111CD 111DE-111DF 11238-11239 1123B-1123C "
    "112A9 1144B-1144C 115C2-115C3 115C9-115D7 11641-11642 1173C-1173E 11944 11946 11A42-11A43 11A9B-11A9C "
    "11C41-11C42 11EF7-11EF8 11F43-11F44 16A6E-16A6F 16AF5 16B37-16B38 16B44 16E98 1BC9F 1DA88"
)
# datatrove.utils.text.PUNCTUATION, without the terminals that are in it too.
_OTHER_PUNCTUATION = (
    "0-8 B-1F 22-2D 2F 3A-3E 40 5B-60 7B-9F AB B4 BB 2013-2014 2019 201C-201E 2026 2236 2501 25BA 3001 "
    "3008-300D 3010-3011 FF05 FF08-FF09 FF0C FF11 FF1A-FF1B FF5E"
)
_LINE_ENDS = "A-D 1C-1E 85 2028-2029"


@cache
def character_flags() -> npt.NDArray[np.uint8]:
    """uint8[1,114,112]: the flags of every code point, read-only."""
    flags = np.zeros(_CODE_POINTS, np.uint8)
    every = [chr(code) for code in range(_ASSIGNED)]
    flags[:_ASSIGNED] |= np.fromiter(map(str.isspace, every), np.uint8, _ASSIGNED) * np.uint8(SPACE)
    flags[:_ASSIGNED] |= np.fromiter(map(str.isalpha, every), np.uint8, _ASSIGNED) * np.uint8(ALPHA)
    for ranges, flag in (
        (_OTHER_PUNCTUATION, PUNCTUATION),
        (_TERMINAL, PUNCTUATION | TERMINAL),
        (_LINE_ENDS, LINE_END),
    ):
        for first, last in _ranges(ranges):
            flags[first : last + 1] |= flag
    flags.flags.writeable = False
    return flags


@cache
def characters_with(flag: int) -> frozenset[str]:
    """The characters that have a flag."""
    return frozenset(map(chr, np.flatnonzero(character_flags() & flag).tolist()))


def _ranges(text: str) -> list[tuple[int, int]]:
    pairs = [part.split("-") for part in text.split()]
    return [(int(pair[0], 16), int(pair[-1], 16)) for pair in pairs]
