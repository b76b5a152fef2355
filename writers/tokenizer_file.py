"""Which tokenizer a recipe means, and its file as the content of a Hugging Face tokenizer.json.

A file, a folder that has one, or a model of the Hugging Face Hub. Nothing is downloaded: a model's name, such
as `gpt2` or `org/model`, is looked up in the Hub's cache on this machine; if it is not there, the error says
how to get it. A file or folder of that name comes first.

Beside tokenizer.json there are SentencePiece models (`tokenizer.model` of Llama 2, Mistral, Gemma, T5) and
byte pairs with ranks (`.tiktoken`, and `tokenizer.model` of Llama 3). `tokenizer_config` writes them as the
tokenizer.json that means the same, for the fast engine and to decode. What their ids are is said by the
libraries that they are made for, `own_engine`, with which shardkit.writers.tokenizer compares.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from shardkit.errors import RecipeError
from shardkit.files import load_json
from shardkit.writers.settings import StrictModel

__all__ = [
    "ENCODINGS",
    "Encoding",
    "EncodingName",
    "Engine",
    "TiktokenConfig",
    "end_token",
    "find_tokenizer",
    "own_engine",
    "read_ranks",
    "stated_tokens",
    "tokenizer_config",
]

Engine = Literal["gigatoken", "tokenizers", "sentencepiece", "tiktoken"]
EncodingName = Literal["r50k_base", "p50k_base", "cl100k_base", "o200k_base", "llama3", "qwen"]

NAME = "tokenizer.json"
_NAMES = (NAME, "tokenizer.model", "qwen.tiktoken")
_HUB_NAME = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)?")
_HEAD_BYTES = 1 << 12  # which tell what a file is
_FILE_ENDINGS = (".json", ".model", ".tiktoken", ".txt", ".bin")
# Tokens that end documents in published models, most usual first.
_END_TOKENS = (
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|eot|>", "[EOS]", "<|im_end|>", "[SEP]",
)  # fmt: skip


def find_tokenizer(folder: Path, path: str) -> Path:
    """The file that a recipe's `tokenizer.path` means, relative to `folder`. RecipeError if there is none."""
    given = folder / path
    if given.is_dir():
        names = [*_NAMES, *sorted(file.name for file in given.glob("*.tiktoken"))]
        if files := [given / name for name in names if (given / name).is_file()]:
            return files[0]
        raise RecipeError(f"tokenizer.path: the folder {given} has no {NAME}, tokenizer.model or .tiktoken")
    if given.exists() or path.endswith(_FILE_ENDINGS) or not _HUB_NAME.fullmatch(path):
        return given  # reading it reports what is wrong with it
    cached = (_in_hub_cache(path, name) for name in _NAMES)
    found = next((file for file in cached if file is not None), None)
    if found is None:
        raise RecipeError(
            f"tokenizer.path: there is no file {given}, and the Hugging Face cache has no tokenizer of "
            f"{path!r}; to fetch it: hf download {path} {NAME}"
        )
    return found


def _in_hub_cache(model: str, name: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ModuleNotFoundError:  # tokenizers, which brings it, is not installed
        return None
    try:
        found = try_to_load_from_cache(model, name)
    except HFValidationError:  # no possible name of a model
        return None
    return Path(found) if isinstance(found, str) else None


def end_token(file: Path) -> str | None:
    """The special token of a tokenizer that ends documents; None if nothing tells it.

    It is the `eos_token` of the files beside it, or of the tokenizer's special tokens one whose name says so.
    """
    try:
        config = tokenizer_config(file, file.read_bytes())
    except (OSError, RecipeError):
        return None
    tokens = _special_tokens(config)
    stated = stated_tokens(file).get("eos")
    if stated is not None and (stated in tokens or not tokens):
        return stated
    likely = [token for token in _END_TOKENS if token in tokens]
    likely += [token for token in tokens if re.search("eos|end", token, re.IGNORECASE)]
    return likely[0] if likely else None


def stated_tokens(file: Path) -> dict[str, str]:
    """Return what files beside a tokenizer name: "eos", "bos", and "adds_bos" if texts begin with it.

    tokenizer_config.json goes before special_tokens_map.json. Files that cannot be read name nothing.
    """
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        try:
            data = load_json(file.with_name(name).read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        if not isinstance(data, Mapping):
            continue
        for kind in ("eos", "bos"):
            token = data.get(f"{kind}_token")
            token = token.get("content") if isinstance(token, Mapping) else token
            if isinstance(token, str) and token:
                found[kind] = token
        if data.get("add_bos_token") is True and "bos" in found:
            found["adds_bos"] = found["bos"]
    return found


def _special_tokens(config: Any) -> list[str]:
    added = config.get("added_tokens") if isinstance(config, Mapping) else None
    return [
        str(token.get("content"))
        for token in added or ()
        if isinstance(token, Mapping) and token.get("special")
    ]


class TiktokenConfig(StrictModel):
    """What a file of byte pairs and ranks does not say."""

    pattern: str = Field(min_length=1, description="The regular expression that splits texts (`pat_str`).")
    special_tokens: dict[str, int] = Field(default={}, description="Ids of special tokens.")


@dataclass(frozen=True, slots=True)
class Encoding:
    """How texts are split before byte pairs are merged, and the special tokens.

    `pattern` is for tiktoken, and `plain` the same for engines without possessive quantifiers, but for white
    space at the end of a text. `special`: by id, or from the first id after all ranks if `after_ranks`.
    """

    pattern: str
    special: tuple[tuple[str, int], ...] = ()
    plain: str | None = None
    after_ranks: bool = False

    @classmethod
    def of(cls, given: EncodingName | TiktokenConfig | None) -> Encoding | None:
        """What a recipe names or gives."""
        if isinstance(given, TiktokenConfig):
            return cls(given.pattern, tuple(given.special_tokens.items()))
        return None if given is None else ENCODINGS[given]

    @classmethod
    def named_by(cls, path: Path) -> Encoding | None:
        """That of a file such as cl100k_base.tiktoken."""
        return ENCODINGS.get(path.stem) if path.suffix == ".tiktoken" else None

    def special_ids(self, ranks: Mapping[bytes, int]) -> dict[str, int]:
        """Special tokens of a file of these ranks."""
        first = max(ranks.values()) + 1 if self.after_ranks else 0
        return {token: first + number for token, number in self.special}


_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_GPT2_PLAIN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT4 = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
])  # fmt: skip
_LLAMA3_SPECIAL = (
    "<|begin_of_text|>", "<|end_of_text|>",
    *(f"<|reserved_special_token_{number}|>" for number in range(4)),
    "<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>",
    *(f"<|reserved_special_token_{number}|>" for number in range(5, 251)),
)  # fmt: skip
_QWEN_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205))
)  # fmt: skip


def _numbered(tokens: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    return tuple((token, number) for number, token in enumerate(tokens))


ENCODINGS: Mapping[str, Encoding] = {
    "r50k_base": Encoding(_GPT2, (("<|endoftext|>", 50256),), _GPT2_PLAIN),
    "p50k_base": Encoding(_GPT2, (("<|endoftext|>", 50256),), _GPT2_PLAIN),
    "cl100k_base": Encoding(
        _GPT4,
        (
            ("<|endoftext|>", 100257),
            ("<|fim_prefix|>", 100258),
            ("<|fim_middle|>", 100259),
            ("<|fim_suffix|>", 100260),
            ("<|endofprompt|>", 100276),
        ),
        _LLAMA3,
    ),
    "o200k_base": Encoding(_GPT4O, (("<|endoftext|>", 199999), ("<|endofprompt|>", 200018))),
    "llama3": Encoding(_LLAMA3, _numbered(_LLAMA3_SPECIAL), after_ranks=True),
    "qwen": Encoding(_LLAMA3.replace("{1,3}", ""), _numbered(_QWEN_SPECIAL), after_ranks=True),
}
"""Published ones, by tiktoken's names; llama3 is that of Llama 3 and 4, qwen that of Qwen and Qwen 2."""


def own_engine(source: bytes | Path) -> Engine:
    """The library that says what ids a tokenizer file gives, or one with this content."""
    if isinstance(source, Path):
        try:
            with source.open("rb") as file:
                source = file.read(_HEAD_BYTES)
        except OSError:
            return "tokenizers"  # reading it reports what is wrong with it
    data = source
    if data.lstrip()[:1] in (b"{", b""):
        return "tokenizers"
    return "tiktoken" if re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n", data) else "sentencepiece"


def tokenizer_config(
    path: Path,
    data: bytes,
    encoding: Encoding | None = None,
    *,
    parse: Callable[[bytes], Any] = load_json,
) -> dict[str, Any]:
    """The content of a tokenizer file as that of a tokenizer.json; RecipeError if it is none."""
    engine = own_engine(data)
    if encoding is not None and engine != "tiktoken":
        raise RecipeError(f"tokenizer.encoding: is for files of byte pairs and ranks; {path} is none")
    if engine == "tiktoken":
        if (encoding := encoding or Encoding.named_by(path)) is None:
            raise RecipeError(
                f"tokenizer.encoding: {path} holds byte pairs and ranks only; name the encoding they are of "
                f"({', '.join(ENCODINGS)}), or give its pattern and special_tokens"
            )
        return _tiktoken_config(read_ranks(path, data), encoding)
    if engine == "sentencepiece":
        return _sentencepiece_config(path, data)
    try:
        config = parse(data)
    except ValueError as error:
        raise RecipeError(
            f"tokenizer.path: {path} is not JSON ({error}); give a Hugging Face tokenizer.json"
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        raise RecipeError(f"tokenizer.path: {path} has no `model`; give a Hugging Face tokenizer.json")
    return config


def read_ranks(path: Path, data: bytes) -> dict[bytes, int]:
    """The byte pairs of a .tiktoken file, each with its rank, which is its id."""
    try:
        pairs = (line.split() for line in data.splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error) as error:
        raise RecipeError(
            f"tokenizer.path: {path} has a line that is no byte pair and rank ({error})"
        ) from error
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise RecipeError(f"tokenizer.path: {path} has no rank for byte {missing[0]:#04x}")
    return ranks


def _tiktoken_config(ranks: Mapping[bytes, int], encoding: Encoding) -> dict[str, Any]:
    """Byte-level BPE. Any two neighbors merge that are a token together, at its rank."""
    letters = dict(zip(range(256), _byte_letters(), strict=True))
    named = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=lambda token: ranks[token]):
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        known = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        merges += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    special = encoding.special_ids(ranks)
    gpt2 = encoding.plain == _GPT2_PLAIN
    split = {
        "type": "Split",
        "pattern": {"Regex": encoding.plain or encoding.pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": gpt2}
    return _config(
        {
            "type": "BPE",
            "byte_fallback": False,
            "ignore_merges": True,  # a text between two splits that is a token is that token
            "vocab": {named[token]: rank for token, rank in ranks.items()},
            "merges": [f"{named[left]} {named[right]}" for left, right in merges],
        },
        [(number, token, True) for token, number in special.items()],
        pre_tokenizer=byte_level if gpt2 else {"type": "Sequence", "pretokenizers": [split, byte_level]},
        decoder={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
    )


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in byte-level vocabularies (Radford et al. 2019, GPT-2)."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # types of SentencePiece's pieces
_UNIGRAM, _BPE = 1, 2
_SPACE = "\u2581"


def _sentencepiece_config(path: Path, data: bytes) -> dict[str, Any]:
    """A SentencePiece model (sentencepiece_model.proto): BPE or Unigram."""
    try:
        fields = list(_fields(data))
        pieces = [_piece(value) for number, value in fields if number == 1]
        trainer, normalizer = (dict(_fields(dict(fields).get(number, b""))) for number in (2, 3))
    except (ValueError, IndexError, TypeError, UnicodeDecodeError) as error:
        raise RecipeError(f"tokenizer.path: {path} is no tokenizer that is known ({error})") from error
    kind, unknown = trainer.get(3, _UNIGRAM), trainer.get(40, 0)
    if kind not in (_UNIGRAM, _BPE) or not 0 <= unknown < len(pieces):
        raise RecipeError(f"tokenizer.path: {path} is no SentencePiece model of type bpe or unigram")
    vocabulary = {piece: number for number, (piece, _, _) in enumerate(pieces)}
    byte_fallback = bool(trainer.get(35, 0))
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
            "merges": _sentencepiece_merges(pieces),
        }
    added = [
        (number, piece.replace(_SPACE, " ") if kind == _USER_DEFINED else piece, kind != _USER_DEFINED)
        for number, (piece, _, kind) in enumerate(pieces)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    prefix = bool(normalizer.get(3, 1))
    steps: list[dict[str, Any]] = []
    if normalizer.get(2):
        characters = base64.b64encode(normalizer[2]).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": characters})
    if normalizer.get(4, 1):  # spaces at both ends go, and all but one of others in a row
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
    return _config(
        model,
        added,
        normalizer={"type": "Sequence", "normalizers": steps},
        decoder={"type": "Sequence", "decoders": decoders},
    )


def _sentencepiece_merges(pieces: list[tuple[str, float, int]]) -> list[str]:
    """Any two neighbors that are a piece together, at that piece's score, best first."""
    scores = {piece: score for piece, score, kind in pieces if kind == _NORMAL}
    found = []
    for piece, score in scores.items():
        cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        found += [(score, left, right) for left, right in cuts if left in scores and right in scores]
    found.sort(key=lambda merge: (-merge[0], -len(merge[1])))
    return [f"{left} {right}" for _, left, right in found]


def _config(
    model: dict[str, Any],
    added: list[tuple[int, str, bool]],
    *,
    decoder: dict[str, Any],
    normalizer: dict[str, Any] | None = None,
    pre_tokenizer: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A tokenizer.json; `added` are ids, tokens, and whether each is special."""
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
    [score] = struct.unpack("<f", found.get(2, bytes(4)))
    return found[1].decode(), score, found.get(3, _NORMAL)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of the fields of a protocol buffer message: int, or bytes."""
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
            raise ValueError(f"no protocol buffer: wire type {kind} at byte {at:,}")
        if at + size > len(data):
            raise ValueError(f"the file ends in a field of {size:,} bytes at byte {at:,}")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value, at
