"""Text to token ids; special tokens spelled in a text stay text.

The library that a tokenizer file is made for defines the correct ids (`own_engine`): `tokenizers` of Hugging
Face for tokenizer.json, `sentencepiece` or `tiktoken` for their files. `gigatoken` computes the same ids some
fifty times faster; `shardkit.tokens.parity` compares the two before it is used.

All engines encode text that spells a special token as plain text, so that the eos id occurs exactly where a
document ends; an eos id inside a text stops the build. Unigram models list special tokens among their pieces
and would find them in text, so those pieces get a name that no text has (`hide_special_pieces`).
`sentencepiece` finds no control symbol in text, but the user-defined symbols of its models are tokens
wherever they are spelled.

Encoding uses one core per process (no hidden thread pools), and memory for the engine and for a piece of
`ENCODE_BYTES` of text with its ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from shardkit.errors import BuildError, RecipeError
from shardkit.files import FileVersion, file_version, load_json
from shardkit.formats.tokenizer_file import Encoding, Engine, own_engine, special_tokens, tokenizer_config
from shardkit.kernels.numba_support import Bools, Int64s, UInt8s, kernel
from shardkit.kernels.simd import load_8_bytes
from shardkit.kernels.text_arrays import text_bytes, text_offsets, text_pieces
from shardkit.kernels.utf8 import CODE_POINTS, next_character
from shardkit.tokens.chat import TRAINED, parts_of
from shardkit.tokens.engines import (
    EncodingError,
    Gigatoken,
    HuggingFace,
    Ids,
    Marked,
    OwnEngine,
    SentencePiece,
    Tiktoken,
)

__all__ = [
    "Encoder",
    "EncodingError",
    "EosInTextError",
    "Tokens",
    "load_encoder",
    "tokenizer_digest",
    "with_marks",
]

Tokens = npt.NDArray[np.uint16 | np.uint32]
Value = TypeVar("Value", bound=np.generic)
Ranges = tuple[tuple[int, int], ...]
"""Ranges of code points as (first, last), inclusive."""

ENCODE_BYTES = 16 << 20  # text per call of an engine; the ids take up to four times as much memory
MAX_TOKENIZER_BYTES = 1 << 30  # the largest published tokenizer.json is about 40 MB
_BEYOND_ASCII = np.uint64(0x8080808080808080)

# Texts on which engines have differed: white space, line ends, digits, apostrophes, combining marks, scripts,
# emoji.
_PROBES = (
    " ", "  a", "a \n\n b\t\tc  ", "x\r\n\r\ny", "1234567890 3.14 1,000", "I'll WE'VE don\u2019t o'Clock",
    "e\u0301 \u1e9b\u0323 \ufb01", "\u4f60\u597d\uff0c\u4e16\u754c", "\u0645\u0631\u062d\u0628\u0627",
    "\u0928\u092e\u0938\u094d\u0924\u0947", "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "\u2028\u0085\u00a0\ufeff", "http://a.b/c?d=e&f=%20#g", "_a__b___ ===--->>",
)  # fmt: skip


class EosInTextError(EncodingError):
    """The ids of a text contain the eos or bos id."""


class Encoder:
    """Encodes text with one tokenizer file. `eos` and `bos` are the tokens that end and begin documents.

    If `engine` is None, the file's own library is used. `vocab_size` is the greatest id plus one; `dtype` is
    uint16 if all ids fit, else uint32; `digest` is the blake2b-128 of the file's bytes. Texts with a
    character in `unlike` are always encoded by the file's own library. Raises RecipeError if the file cannot
    be used.
    """

    def __init__(
        self,
        path: Path,
        eos: str,
        *,
        bos: str | None = None,
        encoding: Encoding | None = None,
        engine: Engine | None = "gigatoken",
        unlike: Ranges = (),
    ) -> None:
        data = _read_tokenizer(path)
        self.path = path
        self.eos, self.bos = eos, bos
        self.own_engine = own_engine(data)
        self.engine: Engine = engine or self.own_engine
        self.digest = _digest(data)
        self.encoding = encoding
        self._config = config = _config_of(path, data, encoding)
        self._unlike = _table_of(unlike) if unlike and engine == "gigatoken" else None
        ids = _vocabulary_ids(config)
        self._check_marks(ids)
        marks = {eos} if bos is None else {eos, bos}
        self._encode: Gigatoken | OwnEngine
        if self.engine == "gigatoken":
            self._encode = Gigatoken(path, config, marks)
        else:
            self._encode = self._reference
            ids = self._encode.vocabulary()
            self._check_marks(ids)
        self.eos_id = ids[eos]
        self.bos_id = None if bos is None else ids[bos]
        self.vocab_size = max(ids.values()) + 1
        self.dtype: np.dtype[np.uint16 | np.uint32]
        self.dtype = np.dtype(np.uint16) if self.vocab_size <= 1 << 16 else np.dtype(np.uint32)

    def _check_marks(self, ids: Mapping[str, int]) -> None:
        for key, token in (("eos", self.eos), ("bos", self.bos)):
            if token is not None and token not in ids:
                raise RecipeError(
                    f"tokenizer.{key}: {self.path} has no token {token!r}; {_candidates(self._config)}"
                )

    def encode(self, texts: pa.Array | Sequence[str]) -> tuple[Tokens, npt.NDArray[np.int64]]:
        """Return the concatenated ids of all texts and the number of ids of each text; no eos is added.

        `texts` is an Arrow array of strings without nulls, whose buffer is encoded without creating Python
        strings, or a sequence of str. Raises EosInTextError if a text yields the eos or bos id, EncodingError
        if the tokenizer cannot encode a text, BuildError for an id outside the vocabulary.
        """
        array = texts if isinstance(texts, pa.Array) else pa.array(list(texts), pa.large_string())
        if array.type != pa.large_string():
            array = array.cast(pa.large_string())
        joined, counts, row = [np.zeros(0, self.dtype)], [np.zeros(0, np.int64)], 0
        for first, stop in text_pieces(array, ENCODE_BYTES):
            piece = array.slice(first, stop - first)
            with _rows_from(range(row, row + len(piece))):
                ids, lengths = self._encode_piece(piece)
            self._check(ids, lengths, row)
            joined.append(ids.astype(self.dtype, copy=False))
            counts.append(lengths)
            row += len(piece)
        return np.concatenate(joined), np.concatenate(counts)

    def probes(self) -> list[str]:
        """Return short texts on which engines are likely to differ; some spell special tokens."""
        added = self._config.get("added_tokens") or ()
        contents = [str(t["content"]) for t in added if t.get("content")][:64]
        forms = [(content, f"a{content}b", f" {content}\n{content}") for content in contents]
        return [*_PROBES, *(text for form in forms for text in form)]

    def special_id(self, token: str, key: str) -> int:
        """Return the id of a special token. Raises RecipeError, which names `key`, if it does not exist."""
        special = {t["content"]: t["id"] for t in self._config.get("added_tokens") or () if t.get("special")}
        if token not in special:
            raise RecipeError(
                f"{key}: {self.path} has no special token {token!r}; {_candidates(self._config)}"
            )
        return int(special[token])

    def sparing(self, unlike: Ranges) -> Encoder:
        """Return a copy that encodes texts with a character in `unlike` by the tokenizer's own library."""
        other = copy(self)
        other._unlike = _table_of(unlike) if unlike and self.engine == "gigatoken" else None
        return other

    def encode_marked(
        self, texts: pa.Array, marks: pa.Array
    ) -> tuple[Tokens, npt.NDArray[np.int64], npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
        """Encode texts, some of which have marks (shardkit.tokens.chat).

        Returns all ids; the number of ids of each text; uint8 per id, 1 if it is trained on; bool per text,
        whether its last part is trained on. Texts with marks are encoded by `tokenizers`, which recognizes
        the special tokens that their marks flag. Texts without marks are trained on as a whole.
        """
        rows = np.flatnonzero(marks.is_valid().to_numpy(zero_copy_only=False))
        with _rows_from(np.flatnonzero(marks.is_null().to_numpy(zero_copy_only=False))):
            ids, lengths = self.encode(texts.filter(marks.is_null()))
        plain = iter(np.split(ids, np.cumsum(lengths)[:-1]) if len(lengths) else [])
        marked = set(rows.tolist())
        parts, masks, last = [], [], np.ones(len(texts), np.bool_)
        for row in range(len(texts)):
            if row not in marked:
                parts.append(next(plain))
                masks.append(np.ones(len(parts[-1]), np.uint8))
                continue
            pieces = parts_of(texts[row].as_py(), marks[row].as_py())
            with _rows_from([row]):
                found, mask = self._marked.encode(pieces)
            self._check(found, np.array([len(found)]), row)
            parts.append(found.astype(self.dtype))
            masks.append(mask)
            last[row] = bool(pieces[-1][1] & TRAINED)
        empty: Tokens = np.zeros(0, self.dtype)
        counts = np.fromiter(map(len, parts), np.int64, len(parts))
        return np.concatenate([empty, *parts]), counts, np.concatenate([np.zeros(0, np.uint8), *masks]), last

    @cached_property
    def _marked(self) -> Marked:
        assert isinstance(self._reference, HuggingFace), "ChatFormat.of refuses other files"
        return Marked(self._config, self._reference)

    def _encode_piece(self, texts: pa.Array) -> tuple[Ids, npt.NDArray[np.int64]]:
        rows = np.zeros(0, np.int64) if self._unlike is None else _rows_with(texts, self._unlike)
        if self.own_engine == "tiktoken" and self.engine == "gigatoken":
            # gigatoken and tiktoken apply patterns differently to white space at the end of a text.
            rows = np.union1d(rows, _rows_ending_in_space(texts))
        ids, lengths = self._encode(texts)
        if not len(rows):
            return ids, lengths
        with _rows_from(rows):
            right, right_lengths = self._reference(texts.take(pa.array(rows)))
        parts = np.split(ids, np.cumsum(lengths)[:-1])
        for row, part in zip(rows.tolist(), np.split(right, np.cumsum(right_lengths)[:-1]), strict=True):
            parts[row] = part
        lengths[rows] = right_lengths
        return np.concatenate(parts), lengths

    @cached_property
    def _reference(self) -> OwnEngine:
        if self.own_engine == "sentencepiece":
            return SentencePiece(self.path)
        if self.own_engine == "tiktoken":
            encoding = self.encoding or Encoding.named_by(self.path)
            assert encoding is not None, "tokenizer_config has refused the file"
            return Tiktoken(self.path, encoding)
        return HuggingFace(self.path, self._config, {self.eos} if self.bos is None else {self.eos, self.bos})

    def _check(self, ids: Ids, lengths: npt.NDArray[np.int64], first_row: int) -> None:
        if len(ids) and int(ids.max()) >= self.vocab_size:
            raise BuildError(
                f"{self.path}: {self.engine} returned id {int(ids.max())}, outside the vocabulary of "
                f"{self.vocab_size:,}; the tokenizer file is inconsistent"
            )
        marks = [("eos", self.eos_id, self.eos)]
        marks += [] if self.bos_id is None else [("bos", self.bos_id, str(self.bos))]
        for key, mark, token in marks:
            if len(found := np.flatnonzero(ids == mark)):
                raise EosInTextError(
                    f"{self.path}: text was encoded to the {key} id {mark} ({token!r}), so document ends "
                    f"would be ambiguous; set tokenizer.{key} to a special token that text cannot produce",
                    first_row + int(np.searchsorted(np.cumsum(lengths), found[0], side="right")),
                )


def with_marks(
    values: npt.NDArray[Value],
    lengths: npt.NDArray[np.int64],
    begin: int | None,
    end: int | npt.NDArray[np.uint8],
) -> npt.NDArray[Value]:
    """Insert `begin` before (unless None) and `end` after the values of each document."""
    marks = 1 if begin is None else 2
    marked = np.zeros(len(values) + marks * len(lengths), values.dtype)
    is_text = np.ones(len(marked), np.bool_)
    ends = np.cumsum(lengths + marks)
    is_text[ends - 1], marked[ends - 1] = False, end
    if begin is not None:
        begins = ends - lengths - marks
        is_text[begins], marked[begins] = False, begin
    marked[is_text] = values
    return marked


@contextmanager
def _rows_from(rows: Sequence[int] | Int64s) -> Iterator[None]:
    """Convert the row in an EncodingError: the block encodes a subset of texts, which has the rows `rows`."""
    try:
        yield
    except EncodingError as error:
        raise type(error)(str(error), int(rows[error.row])) from error.__cause__


def _table_of(ranges: Ranges) -> npt.NDArray[np.bool_]:
    """Return bool[1,114,112]: whether each code point is in one of the ranges."""
    table = np.zeros(CODE_POINTS, np.bool_)
    for first, last in ranges:
        table[first : last + 1] = True
    return table


def _rows_with(texts: pa.LargeStringArray, table: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return the indices of texts with a character that is set in the table."""
    found = np.zeros(len(texts), np.bool_)
    _find_characters(text_bytes(texts), text_offsets(texts), table, found)
    return np.flatnonzero(found)


def _rows_ending_in_space(texts: pa.LargeStringArray) -> npt.NDArray[np.int64]:
    lengths = (pc.binary_length(each).to_numpy() for each in (texts, pc.utf8_rtrim_whitespace(texts)))
    return np.flatnonzero(np.not_equal(*lengths))


@kernel
def _find_characters(data: UInt8s, edges: Int64s, table: Bools, found: Bools) -> None:
    for text in range(len(found)):
        at, stop = edges[text], edges[text + 1]
        while at < stop:
            if at + 8 <= stop and not load_8_bytes(data, at) & _BEYOND_ASCII:
                at += 8
                continue
            code, at = next_character(data, at)
            if table[code]:
                found[text] = True
                break


def load_encoder(
    path: Path,
    eos: str,
    engine: Engine = "gigatoken",
    unlike: Ranges = (),
    bos: str | None = None,
    encoding: Encoding | None = None,
) -> Encoder:
    """Return an Encoder for a tokenizer file. It is cached in this process while the file stays the same."""
    digest = _digest_of_version(path, file_version(path.stat()))
    return _load_encoder(path, digest, eos, engine, bos, encoding).sparing(unlike)


@lru_cache(maxsize=4)
def _digest_of_version(path: Path, version: FileVersion) -> str:
    """Return `tokenizer_digest(path)`, cached per version of the file (its size, times and inode)."""
    return tokenizer_digest(path)


@lru_cache(maxsize=2)
def _load_encoder(
    path: Path,
    digest: str,
    eos: str,
    engine: Engine,
    bos: str | None,
    encoding: Encoding | None,
) -> Encoder:
    encoder = Encoder(path, eos, bos=bos, encoding=encoding, engine=engine)
    if encoder.digest != digest:
        raise BuildError(f"{path}: the tokenizer changed while the build ran; start the build again")
    return encoder


def _read_tokenizer(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise RecipeError(
                f"tokenizer.path: {path} is larger than {MAX_TOKENIZER_BYTES:,} bytes; give a tokenizer file"
            )
        return path.read_bytes()
    except OSError as error:
        raise RecipeError(
            f"tokenizer.path: {path} cannot be read ({error.strerror or error}); "
            f"give a Hugging Face tokenizer.json file"
        ) from error


@lru_cache(maxsize=1)
def _config_of(path: Path, data: bytes, encoding: Encoding | None) -> dict[str, Any]:
    """Return `tokenizer_config`, cached so that both engines share one parse."""
    return tokenizer_config(path, data, encoding, parse=_parse_json)


def _parse_json(data: bytes) -> Any:
    try:
        return orjson.loads(data)  # four times as fast as `load_json`
    except orjson.JSONDecodeError:  # orjson rejects lone surrogates
        return load_json(data)


def _vocabulary_ids(config: dict[str, Any]) -> dict[str, int]:
    vocabulary = config["model"].get("vocab") or {}
    if isinstance(vocabulary, dict):
        ids = dict(vocabulary)
    else:  # Unigram: a list of [piece, score]
        ids = {entry[0]: number for number, entry in enumerate(vocabulary)}
    return ids | {t["content"]: t["id"] for t in config.get("added_tokens") or ()}


def _candidates(config: dict[str, Any]) -> str:
    special = special_tokens(config)
    if not special:
        return "it defines no special tokens; add one that ends documents"
    return (
        "its special tokens are " + ", ".join(map(repr, special[:12])) + (", …" if len(special) > 12 else "")
    )


def tokenizer_digest(path: Path) -> str:
    """Return the hex blake2b-128 of a tokenizer file; raises RecipeError if it cannot be read."""
    return _digest(_read_tokenizer(path))


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
