"""Convert SentencePiece models, such as tokenizer.model of Llama 2, to an equivalent tokenizer.json.

The models are protocol buffers. Only a few of their fields are needed, so they are parsed here without a
library. A damaged model raises RecipeError.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardkit.errors import RecipeError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # types of pieces
_UNIGRAM, _BPE = 1, 2
_SPACE = "\u2581"
_UNKNOWN_KIND = (
    "is not a known kind of tokenizer ({}); give a tokenizer.json, SentencePiece model or tiktoken file"
)


def sentencepiece_config(path: Path, data: bytes) -> dict[str, Any]:
    """Convert a SentencePiece model (sentencepiece_model.proto), BPE or Unigram, to a tokenizer.json.

    Raises RecipeError if `data` is not such a model.
    """
    try:
        fields = list(_fields(data))
        pieces = [_piece(value) for number, value in fields if number == 1]
        trainer, normalizer = (dict(_fields(dict(fields).get(number, b""))) for number in (2, 3))
        kind, unknown, byte_fallback = (
            _typed(trainer, *one) for one in ((3, int, _UNIGRAM), (40, int, 0), (35, int, 0))
        )
        prefix, trimmed = (bool(_typed(normalizer, number, int, 1)) for number in (3, 4))
        characters: bytes = _typed(normalizer, 2, bytes, b"")
        _check_characters(characters)
    except (ValueError, IndexError, TypeError) as error:  # UnicodeDecodeError is a ValueError
        raise RecipeError(f"tokenizer.path: {path} {_UNKNOWN_KIND.format(error)}") from error
    if kind not in (_UNIGRAM, _BPE) or not 0 <= unknown < len(pieces):
        raise RecipeError(f"tokenizer.path: {path} is not a SentencePiece model of type bpe or unigram")
    vocabulary = {piece: number for number, (piece, _, _) in enumerate(pieces)}
    byte_fallback = bool(byte_fallback)
    if kind == _UNIGRAM:
        scores = [[piece, score] for piece, score, _ in pieces]
        model = {"type": "Unigram", "unk_id": unknown, "byte_fallback": byte_fallback, "vocab": scores}
    else:
        model = {
            "type": "BPE",
            "unk_token": pieces[unknown][0],
            "fuse_unk": True,
            "byte_fallback": byte_fallback,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": _merges(pieces),
        }
    added = [
        (number, piece.replace(_SPACE, " ") if kind == _USER_DEFINED else piece, kind != _USER_DEFINED)
        for number, (piece, _, kind) in enumerate(pieces)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    steps: list[dict[str, Any]] = []
    if characters:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(characters).decode()})
    if trimmed:  # remove spaces at both ends, and reduce other runs of spaces to one
        steps.append({"type": "Replace", "pattern": {"Regex": "^ +| +$"}, "content": ""})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if prefix:
        steps.append({"type": "Prepend", "prepend": _SPACE})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    decoders = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return huggingface_config(
        model,
        added,
        normalizer={"type": "Sequence", "normalizers": steps},
        decoder={"type": "Sequence", "decoders": decoders},
    )


def _merges(pieces: list[tuple[str, float, int]]) -> list[str]:
    """Return "left right" for all pairs of pieces that form a piece, by descending score of that piece."""
    scores = {piece: score for piece, score, kind in pieces if kind == _NORMAL}
    found = []
    for piece, score in scores.items():
        cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        found += [(score, left, right) for left, right in cuts if left in scores and right in scores]
    found.sort(key=lambda merge: (-merge[0], -len(merge[1])))
    return [f"{left} {right}" for _, left, right in found]


def huggingface_config(
    model: dict[str, Any],
    added: list[tuple[int, str, bool]],
    *,
    decoder: dict[str, Any],
    normalizer: dict[str, Any] | None = None,
    pre_tokenizer: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the content of a tokenizer.json. `added` lists added tokens as (id, text, is_special)."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokens = [{"id": number, "content": text, "special": special} | plain for number, text, special in added]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": tokens,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def _piece(data: bytes) -> tuple[str, float, int]:
    found = dict(_fields(data))
    score = _typed(found, 2, bytes, bytes(4))
    if len(score) != 4:
        raise ValueError("a piece's score is not a number of 4 bytes")
    if not (name := _typed(found, 1, bytes, b"").decode()):
        raise ValueError("a piece has no name")
    return name, struct.unpack("<f", score)[0], _typed(found, 3, int, _NORMAL)


def _check_characters(table: bytes) -> None:
    """Raise ValueError unless a normalization table is empty, or has u32 trie size, trie and UTF-8 text."""
    size = int.from_bytes(table[:4], "little")
    if table and (size % 4 or size > len(table) - 4):
        raise ValueError("the table of normalized characters is cut short or damaged")
    table[4 + size :].decode()


def _typed(fields: Mapping[int, Any], number: int, kind: type, default: Any) -> Any:
    """Return field `number`, or `default` if it is missing. Raises ValueError if it is not of type `kind`."""
    value = fields.get(number, default)
    if not isinstance(value, kind):
        raise ValueError(f"field {number} is not of type {kind.__name__}")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of each field of a protocol buffer message; values are int or bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"not a protocol buffer: unknown wire type {kind} before byte {at:,}")
        if at + size > len(data):
            raise ValueError(f"the file ends inside a field of {size:,} bytes at byte {at:,}")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value, at
        if shift > 63:
            raise ValueError(f"a number has more than 64 bits before byte {at:,}")
