"""Every table of the WHATWG Encoding Standard, held to a digest of the standard's own index."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise, product

import pytest
import webencodings  # type: ignore[import-untyped]
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.encodings import BAD, decode, encoding_of, keeps_newlines, to_utf8

# Of all bytes, and all pairs of them that begin above 0x80, what the standard decodes them to.
SINGLE_BYTE = {
    "big5": "7d86daebcd205b3e",
    "euc-jp": "7d86daebcd205b3e",
    "euc-kr": "7d86daebcd205b3e",
    "gb18030": "b293158ad35a3efa",
    "gbk": "b293158ad35a3efa",
    "ibm866": "d06db22e2cd0490d",
    "iso-8859-10": "22c930f5e88416a8",
    "iso-8859-13": "8b51e5fa88126390",
    "iso-8859-14": "b3c67d88ad31187e",
    "iso-8859-15": "bac59a6332ea7a8e",
    "iso-8859-16": "d13092911209ad3e",
    "iso-8859-2": "5e00204a322b99e1",
    "iso-8859-3": "6e7af04b5ec017fa",
    "iso-8859-4": "ba3796d8feca43b6",
    "iso-8859-5": "96489985f41e5681",
    "iso-8859-6": "db8bc1fd74088597",
    "iso-8859-7": "68ab9704b31ba063",
    "iso-8859-8": "53fca31bb2737ff2",
    "iso-8859-8-i": "53fca31bb2737ff2",
    "koi8-r": "df4ba3999d78628b",
    "koi8-u": "293957a7d94885bb",
    "macintosh": "b4b80bbb70218aa7",
    "shift_jis": "ae2ce01f6b58a5d2",
    "windows-1250": "de7d511ea7e05c24",
    "windows-1251": "6b15574f2acdf29d",
    "windows-1252": "bc0725cc8fd12155",
    "windows-1253": "9a5dd52d7f1ce894",
    "windows-1254": "b9510bf858e9851b",
    "windows-1255": "dcaf9f96d80d6e84",
    "windows-1256": "0b9fed286a1461e2",
    "windows-1257": "351117fd9863f9bb",
    "windows-1258": "05be7d4553713411",
    "windows-874": "b548135704ca67d9",
    "x-mac-cyrillic": "633933c46bf2b4c6",
}
MULTI_BYTE = {
    ("big5", "pairs"): "d86f0d16c08742db",
    ("euc-jp", "high"): "a58b74aa363e021d",
    ("euc-jp", "jis0212"): "14dd68906d46c9fa",
    ("euc-jp", "katakana"): "748486a3a89309d7",
    ("euc-kr", "pairs"): "81a6aa86b181f201",
    ("gb18030", "four"): "f06f6d062c0ff713",
    ("gb18030", "pairs"): "3d378f80391e27a1",
    ("gbk", "pairs"): "3d378f80391e27a1",
    ("iso-2022-jp", "escaped"): "a58b74aa363e021d",
    ("iso-2022-jp", "escaped katakana"): "748486a3a89309d7",
    ("shift_jis", "leads"): "5531b23791bb2d1b",
}


def digest(texts: Iterator[str]) -> str:
    """The digest of what byte sequences are decoded to; of one that is no character, of a lone comma."""
    return xxhash.xxh3_64_hexdigest(",".join("" if BAD in text else text for text in texts).encode())


def pairs(
    lead: Iterable[int], trail: Iterable[int], before: bytes = b"", after: bytes = b""
) -> Iterator[bytes]:
    return (before + bytes(pair) + after for pair in product(lead, trail))


SEQUENCES: dict[str, Callable[[], Iterator[bytes]]] = {
    "pairs": lambda: pairs(range(0x81, 0xFF), range(0x40, 0xFF)),
    "leads": lambda: pairs([*range(0x81, 0xA0), *range(0xE0, 0xFD)], range(0x40, 0xFF)),
    "high": lambda: pairs(range(0xA1, 0xFF), range(0xA1, 0xFF)),
    "jis0212": lambda: pairs(range(0xA1, 0xFF), range(0xA1, 0xFF), b"\x8f"),
    "katakana": lambda: (b"\x8e%c" % byte for byte in range(0xA1, 0xFF)),
    "escaped": lambda: pairs(range(0x21, 0x7F), range(0x21, 0x7F), b"\x1b$B", b"\x1b(B"),
    "escaped katakana": lambda: (b"\x1b(I%c\x1b(B" % byte for byte in range(0x21, 0x7F)),
    "four": lambda: (
        bytes(four)
        for four in product(range(0x81, 0x85), range(0x30, 0x3A), range(0x81, 0xFF), range(0x30, 0x3A))
    ),
}
LABELS = "d69bb5bfba2da46d"  # of all 228 and their encodings


def test_each_byte_is_the_character_that_the_standard_says() -> None:
    found = {name: digest(decode(bytes([byte]), name) for byte in range(256)) for name in SINGLE_BYTE}
    assert found == SINGLE_BYTE


@pytest.mark.parametrize(("encoding", "kind"), MULTI_BYTE)
def test_each_sequence_of_bytes_is_the_character_that_the_standard_says(encoding: str, kind: str) -> None:
    found = digest(decode(data, encoding) for data in SEQUENCES[kind]())
    assert found == MULTI_BYTE[encoding, kind]


def test_all_labels_of_the_standard_are_known_in_any_case_and_with_blanks() -> None:
    labels = {label: encoding_of(label) for label in webencodings.LABELS}
    assert xxhash.xxh3_64_hexdigest(json.dumps(sorted(labels.items())).encode()) == LABELS
    assert {label: encoding_of(f"\t {label.upper()}\n") for label in labels} == labels
    assert encoding_of("utf-32") is encoding_of("foo-8") is encoding_of("") is None


@pytest.mark.parametrize(
    ("encoding", "data", "text"),
    [
        ("gb18030", "a\U0001f600\u00fcb".encode("gb18030"), "a\U0001f600\u00fcb"),
        ("gb18030", b"\x81\nb", f"{BAD}\nb"),
        ("shift_jis", b"\x81\n\xa0x", f"{BAD}\n{BAD}x"),
        ("euc-jp", b"~\x8f\xa2\xb7\xad\xa1", "~\uff5e\u2460"),
        ("euc-jp", b"\xa4\n", f"{BAD}\n"),
        ("big5", b"\xa2\x41\xa1\xfe\x88\x62\xa3\xe1", "\u2215\uff0f\u00ca\u0304\u20ac"),
        ("big5", b"\xa4\xa2\x41", "\u4e10A"),  # not a pair: its first byte ends another one
        ("iso-2022-jp", b"a\x1b$B-!\x1b(J\\~\x1b(I1\x1b(Bz", "a\u2460\u00a5\u203e\uff71z"),
        ("iso-2022-jp", b"\x1b(B\xe9", BAD),
        ("utf-8", b"a\xffb", f"a{BAD}b"),
        ("utf-16le", b"a\0\x00\xd8b\0", f"a{BAD}{BAD}b"),
        ("utf-16be", b"\0a\0", f"a{BAD}"),
        ("windows-1252", b"\x80\x81\x9f", "\u20ac\x81\u0178"),
        ("replacement", b"any", BAD * 3),
    ],
)
def test_bad_bytes_are_marked_and_cost_nothing_beside_them(encoding: str, data: bytes, text: str) -> None:
    assert decode(data, encoding) == text


TEXTS = {
    "gb18030": "\u4e2d\u6587 ab\n\U0001f600\u00fc",
    "gbk": "\u4e2d\u6587 ab\n",
    "big5": "\u4e2d\u6587 \u529f\u529f\n",  # its second byte is a backslash
    "euc-jp": "\u65e5\u672c \uff76\n",
    "iso-2022-jp": "a\u65e5\u672c\nb",
    "shift_jis": "\u65e5\u672c \u8868\u8868\n\uff76",
    "euc-kr": "\ud55c\uad6d ab\n",
    "utf-16le": "a\n\u010a\U0001f600\u0a0a",
    "utf-16be": "a\n\u010a\U0001f600\u0a0a",
    "utf-32le": "a\n\u010a\U0001f600",
    "windows-1251": "\u043f\u0440\u0438\u0432\u0435\u0442\n",
}
PYTHON = {"iso-2022-jp": "iso2022_jp", "shift_jis": "cp932", "euc-kr": "cp949", "utf-32le": "utf-32-le"}


@settings(deadline=None)
@given(st.data())
def test_a_stream_gives_the_same_text_wherever_it_is_cut(data: st.DataObject) -> None:
    encoding = data.draw(st.sampled_from(sorted(TEXTS)))
    text = data.draw(st.text(st.sampled_from(TEXTS[encoding]), max_size=60))
    encoded = text.encode(PYTHON.get(encoding, encoding))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(encoded)), max_size=8)))
    places = [0, *cuts, len(encoded)]
    pieces = [encoded[a:b] for a, b in pairwise(places)]
    assert b"".join(to_utf8(iter(pieces), encoding)).decode() == text


def test_a_stream_has_a_byte_that_is_not_utf8_for_each_bad_one() -> None:
    assert b"".join(to_utf8(iter([b"a\xff", b"\xff\nb\x81"]), "shift_jis")) == b"a\xff\xff\nb\xff"
    assert b"".join(to_utf8(iter([b"a\0\0", b"\xd8b\0"]), "utf-16le")) == b"a\xff\xffb"
    assert b"".join(to_utf8(iter([b"\xd2\xff"]), "windows-1253")) == b"\xff\xff"  # never UTF-8 by chance


def test_files_are_cut_at_newlines_only_where_these_are_one_byte() -> None:
    names = {*map(str, filter(None, map(encoding_of, webencodings.LABELS)))} | {"utf-32le", "utf-32be"}
    assert {name for name in names if not keeps_newlines(name)} == {
        *("iso-2022-jp", "utf-16le", "utf-16be", "utf-32le", "utf-32be")
    }
