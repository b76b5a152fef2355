"""Hypothesis strategies of texts that are made of what rules and kernels look for."""

from __future__ import annotations

from hypothesis import strategies as st

# Words, marks and line ends that Gopher's and FineWeb's rules count.
_WORDED = st.sampled_from(
    [
        *("the ", "and ", "word ", "longerword ", "12 ", "é"),
        *("# ", "... ", "…\n", "...\n", "• ", "- ", "\n", ". ", ".\n", "!?\n"),
    ]
)
WORDED_TEXTS = st.lists(st.lists(_WORDED, min_size=1, max_size=30).map("".join), min_size=1, max_size=4)

# Few words, some of which are others' ends: "ab c" and "a bc" are the same when joined.
_WORDS = ["a", "b", "ab", "bc", "c", "é", "中", "\u0301", "longer-than-eight", "x" * 20]
_SPACES = [" ", "\n", "\n\n", "\r\n", "\u2028", "\x85", "\xa0", "\u3000", "  ", "\n \n", "\t", "\x1c"]
REPEATING_TEXT = st.one_of(
    st.lists(st.sampled_from(_WORDS + _SPACES), max_size=80).map("".join),
    st.lists(st.sampled_from(["a ", "b ", "c\n", "ab "]), max_size=120).map("".join),
    st.text(max_size=30),
)

_DOLMA = [
    *" \n\t\r…#*-1",
    *("the", "be", "of", "é", "\u3000", "\u2028", "\x85", "word", "longer-word", "\u0301"),
]
DOLMA_TEXT = st.one_of(st.lists(st.sampled_from(_DOLMA), max_size=60).map("".join), st.text(max_size=20))

_PHRASES = [*"ab _.&\n\u2028中é\u0301٣", "bad", "a bad", "ÉA", "\r\n", "s&m", "x"]
PHRASES_TEXT = st.lists(st.sampled_from(_PHRASES), max_size=25).map("".join)

# What C4's line rules look for, and what ends lines and sentences.
_C4 = st.sampled_from(
    [
        *"\n\n\n\r\u2028\x85\u200a\t .?!\"'…{(é中٣ \N{KELVIN SIGN}",
        *(
            "\r\n",
            ".\n",
            "?\n",
            "...",
            " a word",
            " The end.",
            "U.S.",
            "e.g.",
            "NASA.",
            "end.Next",
            "x.Com/A.B",
        ),
        *("[1]", "[٣]", "[edit]", "[citation needed]", "[", "]", "javascript", "JavaScript", "LOREM ipsum"),
        *(
            "lorem",
            " ipsum",
            "terms of use",
            "Privacy Policy",
            "cookie policy",
            "uses cookies",
            "use of cookies",
        ),
        *(
            "use coo\N{KELVIN SIGN}ies",
            "use",
            "cookies",
            "policy",
            "longer-than-twelve",
            "http://a.b/",
            "12.5",
        ),
    ]
)
C4_TEXT = st.lists(st.one_of(_C4, _C4, st.characters(exclude_categories=["Cs"])), max_size=40).map("".join)
