"""Tokenizer files as targets of `fuzzing`: loaded as builds, `init` and `trace` do, and used on some texts.

Each is mutated in its bytes, and in its structure: values of a JSON document, fields of a protocol buffer,
lines of byte pairs and ranks.
"""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import sentencepiece
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from fuzz.engine import Target, mutate
from shardkit.datasets.provenance.text import Decoder
from shardkit.errors import ShardkitError
from shardkit.formats.tokenizer_file import Encoding, end_token
from shardkit.tokens.chat import MARK, SPECIAL, TRAINED
from shardkit.tokens.tokenizer import Encoder

__all__ = ["TOKENIZERS", "TOKENIZER_FILES"]

EOS = "</s>"
_TEXTS = ["a b  the lines\n\n of text 12", "", " the \u4f60\u597d e\u0301 x</s>[UNK] <0x0A>\t\r\n", "x" * 200]
_ODD = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**32,
    2**64,
    10**30,
    1.5,
    "",
    "a",
    "\ud800",
    "</s>",
    [],
    {},
    [1],
    {"a": 1},
]
_Change = Callable[[bytes, random.Random], bytes]
_ENCODING = {"pattern": r"\w+|\s+|[^\w\s]+", "special_tokens": {EOS: 300}}


def _json_file(kind: str) -> bytes:
    special = ["[UNK]", EOS, "<pad>"]
    texts = [*_TEXTS, "other lines of words and things to be joined", "the text of the lines"] * 4
    pieces = [
        *special,
        *"abcdefhilnostx",
        "\u2581",
        "\u2581the",
        "th",
        "##e",
        "##s",
        "the",
        "lines",
        "12",
        "of",
    ]
    trainer: Any = None
    settings: dict[str, Any] = {"vocab_size": 300, "special_tokens": special, "show_progress": False}
    if kind == "bpe":
        made = Tokenizer(models.BPE(unk_token="[UNK]"))
        made.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("x", "y")])
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.Whitespace()])
        trainer = trainers.BpeTrainer(**settings)
    elif kind == "bytes":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(**settings | {"vocab_size": 280}, initial_alphabet=alphabet)
    elif kind == "unigram":
        made = Tokenizer(models.Unigram([(piece, -float(n)) for n, piece in enumerate(pieces)], unk_id=0))
        made.normalizer = normalizers.NFKC()
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Metaspace()
    elif kind == "wordpiece":
        made = Tokenizer(models.WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token="[UNK]"))
        made.normalizer = normalizers.BertNormalizer()
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece()
    else:
        made = Tokenizer(models.WordLevel({piece: n for n, piece in enumerate(pieces)}, unk_token="[UNK]"))
        made.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    if trainer is not None:
        made.train_from_iterator(texts, trainer)
    made.add_special_tokens(special)
    made.add_tokens(["lines"])
    made.post_processor = processors.TemplateProcessing(
        f"$A {EOS}", special_tokens=[(EOS, made.token_to_id(EOS))]
    )
    return str(made.to_str()).encode()


def _sentencepiece_file(kind: str) -> bytes:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text.strip() for text in _TEXTS if text.strip()] * 9),
        model_writer=written,
        model_type=kind,
        vocab_size=300 if kind == "bpe" else 40,
        hard_vocab_limit=False,
        byte_fallback=kind == "bpe",
        user_defined_symbols=["lines"],
        minloglevel=2,
    )
    return written.getvalue()


def _ranks_file() -> bytes:
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" t", b"in", b"li", b"\xe4\xbd"]
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def _changed_json(data: bytes, rng: random.Random) -> bytes:
    """Values replaced, gone, doubled or moved, one to three of them; objects near the root more often."""
    config = json.loads(data)
    for _ in range(rng.choice([1, 1, 2, 3])):
        holder, key = config, rng.choice(list(config))
        while isinstance(holder[key], dict | list) and holder[key] and rng.random() < 0.9:
            holder = holder[key]
            key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
        what = rng.randrange(5)
        if what == 0 and len(holder) > 1:
            del holder[key]
        elif what == 1 and isinstance(holder, list):
            holder.append(deepcopy(holder[key]))
        elif what == 2 and isinstance(holder, dict):
            holder[key] = deepcopy(rng.choice(list(holder.values())))
        else:
            holder[key] = deepcopy(rng.choice(_ODD))
    return json.dumps(config).encode()


def _fields(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(number, wire type, payload) of the fields of a sound message."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            value |= (byte & 127) << shift
            at, shift = at + 1, shift + 7
            if byte < 128:
                return value

    while at < len(data):
        tag, start = varint(), at
        if tag & 7 == 2:
            size = varint()
            start, at = at, at + size
        elif tag & 7 == 0:
            varint()
        else:
            at += 4 if tag & 7 == 5 else 8
        yield tag >> 3, tag & 7, data[start:at]


def _varint(value: int) -> bytes:
    made = bytearray()
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    return bytes([*made, value])


def _joined(fields: list[tuple[int, int, bytes]]) -> bytes:
    made = b""
    for number, kind, payload in fields:
        made += _varint(number << 3 | kind) + (_varint(len(payload)) if kind == 2 else b"") + payload
    return made


def _changed_message(data: bytes, rng: random.Random, depth: int = 0) -> bytes:
    """Fields of a message, or of one inside, changed, gone, doubled, or of another number or type."""
    fields = list(_fields(data))
    at = rng.randrange(len(fields))
    if depth == 0 and rng.random() < 0.5:  # trainer and normalizer, which are at the end
        at = rng.randrange(max(0, len(fields) - 2), len(fields))
    number, kind, payload = fields[at]
    what = rng.randrange(6)
    if depth == 0 and kind == 2 and payload and rng.random() < 0.8:
        fields[at] = number, kind, _changed_message(payload, rng, 1)
    elif what == 0:
        del fields[at]
    elif what == 1:
        fields.insert(rng.randrange(len(fields) + 1), fields[at])
    elif what == 2:
        fields[at] = rng.choice([1, 2, 3, 4, 35, 40, 100]), kind, payload
    elif what == 3:
        fields[at] = number, 2, mutate(payload, rng)
    elif what == 4:
        fields[at] = (
            number,
            0,
            _varint(rng.choice([0, 1, 2, 3, 6, 99, (1 << 31) - 1, 1 << 31, (1 << 64) - 1])),
        )
    else:
        fields[at] = number, 5, bytes(rng.randrange(256) for _ in range(4))
    return _joined(fields)


def _changed_ranks(data: bytes, rng: random.Random) -> bytes:
    lines = data.splitlines()
    at, other = (
        rng.choice([rng.randrange(len(lines)), rng.randrange(256, len(lines))]),
        rng.randrange(len(lines)),
    )
    token, rank = lines[at].split()
    odd = [b"-1", b"4294967295", b"4294967296", b"9" * 30, b"1_0", b"1.5", b"", lines[other].split()[1]]
    odd += [b"262", b"263", b"999", b"70000", b"2000000"]
    if rng.random() < 0.3:
        del lines[rng.randrange(256, len(lines))]
        return b"\r\n".join(lines)
    lines[at] = rng.choice([
        token + b" " + rng.choice(odd),
        lines[other].split()[0] + b" " + rank,
        rng.choice([b"", b"=", b"AAAA====", b"dGhl", b"\xff"]) + b" " + rank,
        token + b"\t" + rank + b" 1",
    ])  # fmt: skip
    return b"\n".join(lines)


def _of_any(change: _Change) -> _Change:
    """Of a file whose structure an earlier change broke, bytes are changed."""

    def changed(data: bytes, rng: random.Random) -> bytes:
        try:
            return change(data, rng)
        except (ValueError, TypeError, LookupError, RecursionError):
            return mutate(data, rng)

    return changed


def _read(encoding: Encoding | None) -> Callable[[Path], object]:
    def read_all(folder: Path) -> None:
        [file] = folder.iterdir()
        end_token(file)
        encoder = Encoder(
            file, EOS, bos="<pad>" if file.suffix == ".json" else None, encoding=encoding, engine=None
        )
        with suppress(ShardkitError):  # the build goes on with the file's own library
            Encoder(file, EOS, encoding=encoding).encode(_TEXTS)
        if file.suffix == ".json":
            parts = [("the ", TRAINED), (EOS, SPECIAL | TRAINED), (" lines", 0)]
            marks = np.array([(len(part), flags) for part, flags in parts], MARK).tobytes()
            texts = pa.array(["".join(part for part, _ in parts), "the lines"], pa.large_string())
            with suppress(ShardkitError):
                encoder.encode_marked(texts, pa.array([marks, None], pa.binary()))
        with suppress(ShardkitError):  # as a word of its own, an eos may be found
            encoder.encode(encoder.probes())
        ids, lengths = encoder.encode(_TEXTS)
        assert int(lengths.sum()) == len(ids)
        if encoding is None:
            decoder = Decoder(file)
            decoder.text(ids)
            if len(ids):  # vocabularies of words without an unknown one may have none for these
                decoder.piece(int(ids[0]), ids[1:9].tolist())
            decoder.encode(_TEXTS[0])

    return read_all


@cache
def _tokenizer(name: str) -> Target:
    kind, _, which = name.partition("-")
    if kind == "json":
        files, change = {"tokenizer.json": _json_file(which)}, _changed_json
    elif kind == "sentencepiece":
        files, change = {"tokenizer.model": _sentencepiece_file(which)}, _changed_message
    else:
        files, change = {"x.tiktoken": _ranks_file()}, _changed_ranks
    encoding = Encoding.of(_ENCODING) if kind == "tiktoken" else None
    tokens = (b'"id":', b'"type":"', b'"special":true', b"IQ== 0\n", b'"unk_id":null', b'{"Regex":"("}')
    return Target(f"tokenizer={name}", files, _read(encoding), tokens=tokens, change=_of_any(change))


TOKENIZERS: dict[str, Callable[..., Target]] = {"tokenizer": _tokenizer}
"""Makers of targets by name; "tokenizer" takes one of `TOKENIZER_FILES`."""
TOKENIZER_FILES = (
    *(f"json-{kind}" for kind in ("bpe", "bytes", "unigram", "wordpiece", "wordlevel")),
    *("sentencepiece-bpe", "sentencepiece-unigram", "tiktoken"),
)
