"""The encoders of the WHATWG Encoding Standard, turned around from the decoders, for tests of the latter.

The tables are held to the standard's by tests/inputs/test_encodings.py. Of several byte sequences with one
character any is right for a test of decoding.
"""

from __future__ import annotations

from functools import cache
from itertools import product

from shardkit.encodings import BAD, decode

__all__ = ["ENCODINGS", "encode"]

_PAIRS = {"big5", "euc-jp", "euc-kr", "gbk", "gb18030", "shift_jis"}
ENCODINGS = (
    *("utf-8", "utf-16le", "utf-16be", "ibm866", "koi8-r", "koi8-u", "macintosh", "x-mac-cyrillic"),
    *(f"iso-8859-{part}" for part in (2, 3, 4, 5, 6, 7, 8, "8-i", 10, 13, 14, 15, 16)),
    *(f"windows-{number}" for number in (874, *range(1250, 1259))),
    *("big5", "euc-jp", "euc-kr", "gbk", "gb18030", "iso-2022-jp", "shift_jis"),
)
_UNICODE = {"utf-8": "utf-8", "utf-16le": "utf-16-le", "utf-16be": "utf-16-be"}


def encode(text: str, encoding: str) -> bytes | None:
    """Return the text in an encoding of the standard; None if it has a character that this does not have."""
    if encoding in _UNICODE:
        return text.encode(_UNICODE[encoding])
    if encoding == "iso-2022-jp":
        return _encode_jis(text)
    table = _sequences(encoding)
    lacking = set(text) - table.keys()
    if lacking and encoding != "gb18030":
        return None
    own = {one: one.encode("gb18030") for one in lacking}
    return b"".join(table.get(one) or own[one] for one in text)


@cache
def _sequences(encoding: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    if encoding in _PAIRS:
        for pair in product(range(0x81, 0xFF), range(0x40, 0xFF)):
            text = decode(bytes(pair), encoding)
            if len(text) == 1 and text != BAD:
                found[text] = bytes(pair)
    for byte in range(255, -1, -1):
        text = decode(bytes([byte]), encoding)
        if text != BAD:
            found[text] = bytes([byte])
    return found


def _encode_jis(text: str) -> bytes | None:
    """Switch to JIS X 0208 and back for each run of characters that are not ASCII."""
    made, in_jis = bytearray(), False
    table = _sequences("euc-jp")
    for one in text:
        pair = table.get(one, b"")
        is_jis = len(pair) == 2 and min(pair) >= 0xA1
        if not (is_jis or (one.isascii() and one not in "\x0e\x0f\x1b")):
            return None
        if is_jis != in_jis:
            made += b"\x1b$B" if is_jis else b"\x1b(B"
            in_jis = is_jis
        made += bytes(byte & 0x7F for byte in pair) if is_jis else one.encode()
    return bytes(made + (b"\x1b(B" if in_jis else b""))
