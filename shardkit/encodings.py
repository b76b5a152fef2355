"""Decoding bytes to text by the WHATWG Encoding Standard, as browsers decode pages.

`encoding_of` maps a label (all 228 of the standard, using the package webencodings) to the name of its
encoding: iso-8859-1 is windows-1252, gb2312 is gbk. `decode` uses Python's codec of that name and corrects it
where the standard differs: control characters for unassigned bytes of windows-125x, NEC's and IBM's
characters in EUC-JP and ISO-2022-JP, HKSCS-2008 in Big5, and a few characters in other encodings. The tests
compare a digest of each table with that of the standard's. https://encoding.spec.whatwg.org/

A byte that cannot be decoded becomes `BAD`, which valid text cannot contain: the caller rejects the text or
replaces it by U+FFFD. `to_utf8` converts a stream, so that every reader sees UTF-8: a bad byte becomes 0xFF,
which is never valid in UTF-8, so only the record that contains it is rejected.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from types import MappingProxyType

BAD = "\udcff"
GUESS = "guess"
"""A setting instead of a label: the encoding of pages that are not UTF-8 and declare none is guessed."""
REPLACEMENT = "replacement"
"""The encoding of labels that browsers refuse to decode: hz-gb-2312, iso-2022-kr and others."""
PYTHON_NAMES = MappingProxyType(
    {"utf-16le": "utf-16-le", "utf-16be": "utf-16-be", "utf-32le": "utf-32-le", "utf-32be": "utf-32-be"}
)
_SINGLE_BYTE = {  # Python codecs of single-byte encodings whose name differs from the standard's
    "iso-8859-8-i": "iso-8859-8",
    "koi8-u": "koi8-u",
    "macintosh": "mac-roman",
    "windows-874": "cp874",
    "x-mac-cyrillic": "mac-cyrillic",
}
_OTHER_BYTES = {"koi8-u": {0xAE: "\u045e", 0xBE: "\u040e"}, "windows-1255": {0xCA: "\u05ba"}}
_MULTI_BYTE = {  # Python codecs that are closest to the standard's multi-byte encodings
    "big5": "big5hkscs",
    "euc-jp": "euc_jp",
    "euc-kr": "cp949",
    "gb18030": "gb18030",
    "shift_jis": "cp932",
}
# Bytes (hexadecimal) that some Python version decodes to another character than the standard, followed by the
# standard's character, or `BAD` if it has none. As no other bytes decode to the codec's character, it can be
# replaced in decoded text.
_OTHER_CHARACTERS = {
    "big5": "a145\u2027 a14e\ufe51 a1c2\u00af a1e3\uff5e a1f2\u2295 a1f3\u2299 "
    "a244\uffe5 a246\uffe0 a247\uffe1",
    "euc-jp": "a1c1\uff5e a1c2\u2225 a1dd\uff0d a1f1\uffe0 a1f2\uffe1 a2cc\uffe2",
    "gb18030": "a3a0\u3000 a6d9\ufe10 a6da\ufe12 a6db\ufe11 a6dc\ufe13 a6dd\ufe14 a6de\ufe15 a6df\ufe16 "
    "a6ec\ufe17 a6ed\ufe18 a6f3\ufe19 a8bc\u1e3f 8135f437\ue7c7 fe59\u9fb4 fe61\u9fb5 fe66\u9fb6 fe67\u9fb7 "
    "fe6d\u9fb8 fe7e\u9fb9 fe90\u9fba fea0\u9fbb",
    "shift_jis": f"a0{BAD} fd{BAD} fe{BAD} ff{BAD}",
}
# Byte pairs that Python's Big5 codec lacks: the first pair of a run (hexadecimal), then the run's characters.
_BIG5_RUNS = """
877a㡵𡵓𣚞𦀡㻬𥣞㫵竼龗𤅡𨤍𣇪𠪊𣉞䌊蒄龖鐯䤰蘓墖靊鈘秐稲晠権袝瑌篅枂稬剏遆㓦珄
87c0𥶹瓆鿇垳䤯呌䄱𣚎堘穲𧭥讏䚮𦺈䆁𥶙箮𢒼鿈𢓁𢓉𢓌鿉蔄𣖻䂴鿊䓡𪷿拁灮鿋 8e69箸
8e6f簆 8e7e糎 8eab緒 8eb4縝 8ecd者 8ed0耨 8f57菁 8f69蒨 8f6e萏 8fcb覦覩 8ffe起 906d都 907a銹
90dc靜 90f1響 91bf鼖 9244蔃 92af兙兛兝兞 92c8鍮 92d1瑹 9447浧 94ca禛 95d9邗 9644靝 96ed瀞
96fc嬨 9b76爁 9b78矗 9b7b纇 9bc6駖 9bde釔 9bec惞 9bf6澶 9c42輶 9c53侻 9c62營 9c68鄄 9c6b鷰
9c77菏 9cbc尐秣 9cd0婧 9d57輋 9d5a筑 9dc4拐 9ea9恢 9eef痹 9efd汊 9f60鬮 9f66鼗 9fcb僭 9fd8弌
a063蠏 a077拎 a0d5瑨 a0df煢 a0e4牐 a3c0␀␁␂␃␄␅␆␇␈␉␊␋␌␍␎␏␐␑␒␓␔␕␖␗␘␙␚␛␜␝␞␟␡€ c6cf廴
c6d3无 c6d5癶 c6d7隶 c6de〃仝 fa5f倩 fa66偽 fabd包 fac5卄 fad5卿 fb48嘅 fbb8婷 fbf3幵 fbf9廐
fc4f彘 fc6c悤 fcb9撐 fce2晴 fcf1杞 fdb7沜渝 fdbb港 fdf1煮 fe52猪 fe6f瑜 feaa瓩 fedd砉
"""
_NEC_AND_IBM_ROWS = (13, 89, 90, 91, 92)  # rows of JIS X 0208 with NEC's and IBM's characters
# Byte sequences for which the standard has another character than the codec. The codec's character cannot be
# replaced in the decoded text, because other sequences decode to it correctly.
_OTHER_SEQUENCES = {
    "euc-jp": {b"\x8f\xa2\xb7": "\uff5e"},
    "big5": {b"\xa2\x41": "\u2215", b"\xa2\x42": "\ufe68"},
}
_SEQUENCE = {  # matches the bytes of one character
    "euc-jp": re.compile(rb"\x8f[\xa1-\xfe]{2}|[\x8e\xa1-\xfe][\xa1-\xfe]|.", re.DOTALL),
    "big5": re.compile(rb"[\x81-\xfe][\x40-\x7e\xa1-\xfe]|.", re.DOTALL),
}
_ISO_2022_JP = re.compile(rb"\x1b(\([BJI]|\$[@B])")
_HIGH = bytes(byte | 0x80 if 0x20 < byte < 0x7F else byte for byte in range(256))
_ROMAN = str.maketrans("\\~", "\u00a5\u203e")
_SAFE = re.compile(rb"[\x00-\x2f](?=[^\x00-\x2f]*\Z)")  # the last byte that cannot be inside a character


def encoding_of(label: str) -> str | None:
    """Return the name of the encoding with this label; None if the standard does not list the label."""
    import webencodings  # type: ignore[import-untyped]  # its stubs are a separate package

    found = webencodings.lookup(label)
    return None if found is None else str(found.name)


def keeps_newlines(encoding: str) -> bool:
    """Return whether every byte 0x0A in this encoding is a line end, so that a file can be cut after it."""
    return encoding not in PYTHON_NAMES and encoding != "iso-2022-jp"


def decode(data: bytes, encoding: str) -> str:
    """Decode bytes in an encoding of the standard or in UTF-32; each bad byte becomes `BAD`."""
    if encoding == "gbk":
        return decode(data, "gb18030")
    if encoding == "utf-8" or encoding in PYTHON_NAMES:
        return data.decode(PYTHON_NAMES.get(encoding, encoding), _bad_handler())
    if encoding == "iso-2022-jp":
        return _Iso2022Jp().decode(data)
    if encoding == REPLACEMENT:
        return BAD * len(data)
    if encoding not in _MULTI_BYTE:
        return codecs.charmap_decode(data, _bad_handler(), _table(encoding))[0]
    apart = _OTHER_SEQUENCES.get(encoding, {})
    if not any(sequence in data for sequence in apart):
        return _decode_by_codec(data, encoding)
    parts, start = [], 0
    for found in _SEQUENCE[encoding].finditer(data):
        if found[0] in apart:
            parts += [_decode_by_codec(data[start : found.start()], encoding), apart[found[0]]]
            start = found.end()
    return "".join([*parts, _decode_by_codec(data[start:], encoding)])


def _decode_by_codec(data: bytes, encoding: str) -> str:
    text = data.decode(_MULTI_BYTE[encoding], _bad_handler(encoding))
    others, any_of_them = _other_characters(encoding)
    return text.translate(others) if others and any_of_them.search(text) else text


def to_utf8(pieces: Iterator[bytes], encoding: str) -> Iterator[bytes]:
    """Yield a stream of byte strings converted to UTF-8; each byte that cannot be decoded becomes 0xFF."""
    held = b""
    step = _incremental(encoding)
    for piece in pieces:
        text, held = step(held + piece, False)
        if text:
            yield text.encode("utf-8", "surrogateescape")
    if held:
        yield step(held, True)[0].encode("utf-8", "surrogateescape")


_Step = Callable[[bytes, bool], tuple[str, bytes]]
"""A function (data, is the data the last) -> (decoded text, undecoded bytes to put before the next data)."""


def _incremental(encoding: str) -> _Step:
    if encoding in PYTHON_NAMES:
        python = codecs.lookup(PYTHON_NAMES[encoding])

        def wide(data: bytes, final: bool) -> tuple[str, bytes]:
            if final:
                return python.decode(data, _bad_handler())[0], b""
            decoder = codecs.getincrementaldecoder(PYTHON_NAMES[encoding])(_bad_handler())
            text = decoder.decode(data)
            return text, decoder.getstate()[0]

        return wide
    jis = _Iso2022Jp()

    def by_safe_byte(data: bytes, final: bool) -> tuple[str, bytes]:
        if not final:
            newline = data.rfind(b"\n") + 1
            safe = None if newline or encoding == "iso-2022-jp" else _SAFE.search(data)
            end = safe.end() if safe else newline
            data, rest = data[:end], data[end:]
        else:
            rest = b""
        return (jis.decode(data) if encoding == "iso-2022-jp" else decode(data, encoding)), rest

    return by_safe_byte


class _Iso2022Jp:
    """Decodes ISO-2022-JP, whose escape codes switch between ASCII, JIS Roman, katakana and JIS X 0208."""

    def __init__(self) -> None:
        self._set = b"(B"

    def decode(self, data: bytes) -> str:
        parts = _ISO_2022_JP.split(data)
        made = [self._part(parts[0])]
        for chosen, part in zip(parts[1::2], parts[2::2], strict=True):
            self._set = chosen
            made.append(self._part(part))
        return "".join(made)

    def _part(self, data: bytes) -> str:
        if self._set in (b"$@", b"$B"):
            return decode(data.translate(_HIGH), "euc-jp") if data.isascii() else BAD * len(data)
        text = data.decode("ascii", _bad_handler())
        if self._set == b"(J":
            return text.translate(_ROMAN)
        if self._set == b"(I":
            return "".join(map(_katakana, text))
        return text


def _katakana(character: str) -> str:
    if "!" <= character <= "_":
        return chr(ord(character) + 0xFF40)
    return BAD if "_" < character < "\x7f" else character


@cache
def _table(encoding: str) -> str:
    """Return 256 characters for `charmap_decode`, one per byte of an encoding; U+FFFE marks invalid bytes."""
    python = _SINGLE_BYTE.get(encoding, encoding)
    table = [bytes([byte]).decode(python, "replace") for byte in range(256)]
    for byte in range(256):
        if table[byte] == "\ufffd":
            is_control = encoding.startswith("windows-") and byte < 0xA0
            table[byte] = chr(byte) if is_control else "\ufffe"
    for byte, character in _OTHER_BYTES.get(encoding, {}).items():
        table[byte] = character
    return "".join(table)


@cache
def _other_characters(encoding: str) -> tuple[dict[int, str], re.Pattern[str]]:
    """Return {wrong code point from the codec: right character}, and a pattern that finds wrong ones."""
    made: dict[int, str] = {}
    for entry in filter(None, _OTHER_CHARACTERS.get(encoding, "").split(" ")):
        data = bytes.fromhex(entry[:-1])
        own = data.decode(_MULTI_BYTE[encoding], "replace")
        if own not in ("", "\ufffd", entry[-1]):
            made[ord(own)] = entry[-1]
    return made, re.compile(f"[{re.escape(''.join(map(chr, made)))}]" if made else r"\Z")


@cache
def _bad_handler(encoding: str = "") -> str:
    """Register a decoding error handler and return its name.

    For bytes that Python's codec rejects, the handler returns the characters that the standard has for them
    (`_lacking`), and `BAD` for each other byte.
    """
    lacking = _lacking(encoding)

    def handle(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeDecodeError)
        start, data = error.start, error.object
        for sequence in (data[start : start + 2], data[start : start + 1]):
            if sequence in lacking:
                return lacking[sequence], start + len(sequence)
        return BAD * (error.end - start), error.end

    name = f"shardkit-{encoding or 'bad'}"
    codecs.register_error(name, handle)
    return name


def _lacking(encoding: str) -> dict[bytes, str]:
    """Return {bytes: character} for the characters of an encoding that Python's codec does not decode."""
    if encoding == "gb18030":
        return {b"\x80": "\u20ac"}
    if encoding == "euc-jp":
        return {pair: text for row in _NEC_AND_IBM_ROWS for pair, text in _row(row)}
    found = {}
    if encoding == "big5":
        for run in _BIG5_RUNS.split():
            lead, trail = bytes.fromhex(run[:4])
            for character in run[4:]:
                found[bytes((lead, trail))] = character
                trail = 0xA1 if trail == 0x7E else trail + 1
    return found


def _row(row: int) -> Iterator[tuple[bytes, str]]:
    """Yield (EUC-JP bytes, character) for a row of JIS X 0208, decoding its Shift_JIS form by cp932."""
    lead = (row - 1) // 2 + (0x81 if row < 63 else 0xC1)
    for cell in range(1, 95):
        trail = (cell + 0x3F + (cell > 63)) if row % 2 else cell + 0x9E
        with suppress(UnicodeDecodeError):
            yield bytes((row + 0xA0, cell + 0xA0)), bytes((lead, trail)).decode("cp932")
