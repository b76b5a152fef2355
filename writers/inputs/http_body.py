"""The body of an HTTP response as the page that it carries: chunks joined, gzip, deflate, br and zstd undone.

As browsers and crawlers see it: a body that says it is chunked or compressed and is not is taken as it is
(many crawlers undo both and leave the header), and one that was cut short gives what there is of it. Damaged
data and a page over the limit raise BodyError.
"""

from __future__ import annotations

import re
import zlib

import zstandard

__all__ = ["BodyError", "decode_body", "join_chunks"]

_CHUNK = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]*(?:;[^\r\n]*)?\r\n")
_CUT_CHUNK = re.compile(rb"[0-9a-fA-F]{1,8}[ \t]*(?:;[^\r\n]*)?\r?")  # a head that the body ends in
_MAX_ENCODINGS = 4
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


class BodyError(Exception):
    """A body cannot be decoded; the message says why."""


def decode_body(body: bytes, transfer_encoding: str, content_encoding: str, limit: int) -> bytes:
    """The content of a body with these headers ("" where there is none), at most `limit` bytes."""
    if "chunked" in transfer_encoding.lower():
        body = join_chunks(body)
    encodings = [name.strip().lower() for name in content_encoding.split(",") if name.strip()]
    if len(encodings) > _MAX_ENCODINGS:
        raise BodyError(f"{len(encodings)} content encodings")
    for name in reversed(encodings):
        body = _undo(body, name, limit)
        if len(body) > limit:
            raise BodyError(f"more than {limit:,} bytes when decoded")
    return body


def join_chunks(body: bytes) -> bytes:
    """What the chunks hold; from where no chunk begins on, the bytes as they are."""
    parts: list[bytes] = []
    at = 0
    while at < len(body):
        head = _CHUNK.match(body, at)
        if head is None:
            if not (parts and _CUT_CHUNK.fullmatch(body, at)):
                parts.append(body[at:])
            break
        size = int(head[1], 16)
        if not size:
            break
        start = head.end()
        parts.append(body[start : start + size])
        at = start + size
        if body.startswith(b"\r\n", at):
            at += 2
    return b"".join(parts)


def _undo(body: bytes, encoding: str, limit: int) -> bytes:
    if encoding in ("gzip", "x-gzip"):
        return _inflate(body, 31, limit) if body.startswith(b"\x1f\x8b") else body
    if encoding == "deflate":
        wrapped = len(body) > 1 and body[0] & 15 == 8 and (body[0] << 8 | body[1]) % 31 == 0
        return _inflate(body, 15 if wrapped else -15, limit)
    if encoding == "br":
        return _unbrotli(body, limit)
    if encoding == "zstd":
        return _unzstd(body, limit) if body.startswith(_ZSTD_MAGIC) else body
    if encoding in ("identity", "none", "utf-8", "utf8"):
        return body
    raise BodyError(f"content encoding {encoding[:40]!r} is not known")


def _inflate(body: bytes, wbits: int, limit: int) -> bytes:
    try:
        return zlib.decompressobj(wbits).decompress(body, limit + 1)
    except zlib.error as error:
        raise BodyError(str(error)) from None


def _unbrotli(body: bytes, limit: int) -> bytes:
    try:
        import brotli
    except ImportError:
        raise BodyError("content encoding br needs Brotli: pip install 'shardkit[warc]'") from None
    decoder = brotli.Decompressor()
    try:
        return bytes(decoder.process(body, output_buffer_limit=limit + 1))
    except brotli.error as error:
        raise BodyError(str(error)) from None


def _unzstd(body: bytes, limit: int) -> bytes:
    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body) as reader:
            return bytes(reader.read(limit + 1))
    except zstandard.ZstdError as error:
        raise BodyError(str(error)) from None
