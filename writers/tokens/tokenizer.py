"""Text to token ids, with text kept text.

The library that a tokenizer file is made for defines which ids are right (`own_engine`): `tokenizers` of
Hugging Face for tokenizer.json, `sentencepiece` or `tiktoken` for theirs. `gigatoken` computes them, some
fifty times faster. The two are compared once per build on a sample of its documents (`check_parity`): on any
difference, or when `gigatoken` does not know the tokenizer's parts, the whole build uses the file's own
library, so that no byte depends on which task noticed. What a sample can miss are rare characters: the
Unicode tables of both differ in age, so form C orders combining marks of young scripts in two ways.
`unlike_characters` compares the engines on every combining mark, and on both ends of every run of characters
of one category, which is where tables of different age differ; texts that hold a character whose texts differ
are encoded by the own library, whatever the engine. That takes half a second and follows from the tokenizer
and the versions of all code, so it is kept for the next build on the machine (remembered.py).

All encode text that spells a special token as plain text, so that the eos id occurs exactly where a document
ends; an id that breaks this stops the build. Unigram models list special tokens among their pieces and would
find them in text; there those pieces get a name that no text has (`hide_special_pieces`). `sentencepiece`
finds no control symbol in text; the user-defined symbols of its models are tokens wherever they are spelled.

Cost: one core per process (no hidden thread pools), and memory for one piece of `ENCODE_BYTES` of text plus
what the engine holds (shardkit.writers.tokens.engines).
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from shardkit.errors import BuildError, RecipeError, warn_user
from shardkit.files import FileVersion, file_version, load_json
from shardkit.formats.tokenizer_file import Encoding, Engine, own_engine, special_tokens, tokenizer_config
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.inputs.chat import TRAINED, parts_of
from shardkit.writers.kernels.numba_support import Bools, Int64s, UInt8s, kernel
from shardkit.writers.kernels.simd import load_8_bytes
from shardkit.writers.kernels.text_arrays import text_bytes, text_offsets, text_pieces
from shardkit.writers.kernels.utf8 import ASSIGNED, CODE_POINTS, next_character
from shardkit.writers.tokens.engines import (
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
    "Parity",
    "Tokens",
    "check_parity",
    "load_encoder",
    "sample_bytes",
    "sample_texts",
    "tokenizer_digest",
    "unlike_characters",
]

Tokens = npt.NDArray[np.uint16 | np.uint32]
Ranges = tuple[tuple[int, int], ...]
"""Code points: the first and the last one of each range."""

ENCODE_BYTES = 16 << 20  # text per call of an engine; its ids take up to four times as much
PARITY_BYTES = 2 << 20  # at most: `tokenizers` encodes one to three MB/s
PARITY_LEAST_BYTES = 1 << 17
PARITY_PART = 256  # a 256th of all text takes `tokenizers` about 2 % of what a build takes in all
PARITY_CHARACTERS = 1 << 13  # of one document, so that a book does not stand for all others
_SCANNED = 16  # times its part of the sample are looked through in each file for characters not yet seen
_AROUND = 48  # characters on each side of one not yet seen
MAX_TOKENIZER_BYTES = 1 << 30  # the largest published tokenizer.json is about 40 MB
_BEYOND_ASCII = np.uint64(0x8080808080808080)
_PICTOGRAPHS = range(0x1F000, 0x1FB00)  # reserved for symbols, which never combine; emoji come every year

# Where engines have differed: white space, line ends, digits, apostrophes, combining marks, scripts, emoji.
_PROBES = (
    " ", "  a", "a \n\n b\t\tc  ", "x\r\n\r\ny", "1234567890 3.14 1,000", "I'll WE'VE don\u2019t o'Clock",
    "e\u0301 \u1e9b\u0323 \ufb01", "\u4f60\u597d\uff0c\u4e16\u754c", "\u0645\u0631\u062d\u0628\u0627",
    "\u0928\u092e\u0938\u094d\u0924\u0947", "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "\u2028\u0085\u00a0\ufeff", "http://a.b/c?d=e&f=%20#g", "_a__b___ ===--->>",
)  # fmt: skip


class EosInTextError(EncodingError):
    """A text was encoded to the eos id."""


class Encoder:
    """One tokenizer file, the id that ends documents, and the one that begins them if `bos` is given.

    `engine` None: the file's own. `vocab_size` is one more than the greatest id; `dtype` is uint16 where
    that suffices, else uint32; `digest` is the blake2b-128 of the file's bytes. Texts with a character of
    `unlike` are encoded by the file's own library in any case. Raises RecipeError for a file that cannot be
    used.
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
        self._encoding = encoding
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
        """(ids of all texts one after the other, number of ids of each text); no eos is added.

        `texts` is an Arrow array of strings without nulls (encoded from its buffer, with no string made), or
        a sequence of str. Raises EosInTextError when a text yields the eos id, EncodingError for one that the
        tokenizer cannot encode, BuildError for an id outside the vocabulary.
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
        """Short texts on which engines are likely to differ; some spell special tokens."""
        added = self._config.get("added_tokens") or ()
        contents = [str(t["content"]) for t in added if t.get("content")][:64]
        forms = [(content, f"a{content}b", f" {content}\n{content}") for content in contents]
        return [*_PROBES, *(text for form in forms for text in form)]

    def special_id(self, token: str, key: str) -> int:
        """The id of a special token; RecipeError that names `key` if the tokenizer has none of that name."""
        special = {t["content"]: t["id"] for t in self._config.get("added_tokens") or () if t.get("special")}
        if token not in special:
            raise RecipeError(
                f"{key}: {self.path} has no special token {token!r}; {_candidates(self._config)}"
            )
        return int(special[token])

    def sparing(self, unlike: Ranges) -> Encoder:
        """This encoder, with texts that have a character of `unlike` left to the file's own library."""
        other = copy(self)
        other._unlike = _table_of(unlike) if unlike and self.engine == "gigatoken" else None
        return other

    def encode_marked(
        self, texts: pa.Array, marks: pa.Array
    ) -> tuple[Tokens, npt.NDArray[np.int64], npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
        """`encode` of texts of which some have marks (shardkit.writers.inputs.chat), and what is trained on.

        (ids, number of ids of each text; uint8 for each id, 1: trained on; bool for each text: its last part
        is). Texts with marks are encoded by `tokenizers`: their ids are the tokenizer's own for the text with
        its special tokens. Texts without are trained on as a whole.
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
            rows = np.union1d(rows, _rows_ending_in_space(texts))  # its patterns treat the end in another way
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
            encoding = self._encoding or Encoding.named_by(self.path)
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


@contextmanager
def _rows_from(rows: Sequence[int] | Int64s) -> Iterator[None]:
    """Give an EncodingError of some texts the row that its text has among all."""
    try:
        yield
    except EncodingError as error:
        raise type(error)(str(error), int(rows[error.row])) from error.__cause__


def unlike_characters(fast: Encoder, reference: Encoder) -> Ranges:
    """The characters whose texts the two engines may encode in different ways.

    Combining marks that the engines order in two ways beside others, canonical compositions that they do not
    both make, runs of characters of one category whose first or last one they do not take for the same kind,
    and characters that are younger than Python's Unicode tables, pictographs aside: the engines' may be older
    or younger. A character's class and compositions never change once it is assigned.
    """
    young, ranges, texts = _characters_to_compare()
    unlike = young.copy()
    ids, right = (_split(*encoder.encode(texts)) for encoder in (fast, reference))
    for (first, last), a, b in zip(ranges, ids, right, strict=True):
        if not np.array_equal(a, b):
            unlike[first : last + 1] = True
    if reference.own_engine == "sentencepiece":
        unlike[ord("\u2581")] = True  # its own sign for a space
    edges = np.flatnonzero(np.diff(unlike, prepend=False, append=False)).tolist()
    return tuple((first, stop - 1) for first, stop in zip(edges[::2], edges[1::2], strict=True))


@cache
def _characters_to_compare() -> tuple[npt.NDArray[np.bool_], list[tuple[int, int]], list[str]]:
    """Which code points Python does not know; ranges of others, and for each a text that stands for it.

    The text of one that combines or is composed shows the class of a mark: before one of the lowest class and
    behind one of the most frequent. A run of one category has a text for each of its ends, that shows by its
    neighbors whether it is a letter, a digit, a space or a sign.
    """
    young = np.zeros(CODE_POINTS, np.bool_)
    ranges: list[tuple[int, int]] = []
    texts: list[str] = []
    young[ASSIGNED:0xF0000] = True  # except for some tags; private use follows
    codes = [*range(0x80, 0xD800), *range(0xE000, ASSIGNED), *range(0xE0000, 0xE1000)]
    young[0xD800:0xE000] = False
    for category, run in groupby(codes, key=lambda code: unicodedata.category(chr(code))):
        members = list(run)
        young[members] = category == "Cn"
        if category == "Cn":
            continue
        for character in map(chr, sorted({members[0], members[-1]})):
            ranges.append((members[0], members[-1]))
            texts.append(f"a{character}b 1{character}2 {character}{character}'s \n{character} x{character}")
        for character in map(chr, members):
            decomposition = unicodedata.decomposition(character)
            if category[0] == "M" or (decomposition and decomposition[0] != "<"):
                parts = unicodedata.normalize("NFD", character)
                ranges.append((ord(character), ord(character)))
                texts.append(f"{character} a{character}\u0334 a\u0301{character} {parts} a{parts}\u0334")
    young[_PICTOGRAPHS.start : _PICTOGRAPHS.stop] = False
    return young, ranges, texts


def _split(ids: Tokens, lengths: npt.NDArray[np.int64]) -> list[Tokens]:
    return np.split(ids, np.cumsum(lengths)[:-1])


def _table_of(ranges: Ranges) -> npt.NDArray[np.bool_]:
    """bool[1,114,112]: whether a code point lies in any of them."""
    table = np.zeros(CODE_POINTS, np.bool_)
    for first, last in ranges:
        table[first : last + 1] = True
    return table


def _rows_with(texts: pa.LargeStringArray, table: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """The texts that hold a character of the table."""
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
    """An Encoder, kept for the process's next task as long as the file's bytes stay the same."""
    digest = _digest_of_version(path, file_version(path.stat()))
    return _load_encoder(path, digest, eos, engine, bos, encoding).sparing(unlike)


@lru_cache(maxsize=4)
def _digest_of_version(path: Path, version: FileVersion) -> str:
    """`tokenizer_digest`, once for tasks of a process that find the file unchanged."""
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


@dataclass(frozen=True, slots=True)
class Parity:
    """Which engine the whole build uses, and why: what was compared, and the first difference if any."""

    engine: Engine
    documents: int
    bytes: int
    differences: int = 0
    reason: str | None = None


def check_parity(
    documents: Sequence[Artifact],
    path: Path,
    eos: str,
    unlike: Ranges = (),
    *,
    bos: str | None = None,
    encoding: Encoding | None = None,
    sample_bytes: int = PARITY_BYTES,
) -> Parity:
    """Compare both engines on a fixed sample of the build's documents (Arrow files of DOCUMENT_SCHEMA).

    Texts with characters of `unlike` (`unlike_characters`) do not count: the own engine gets them anyway.
    The sample depends on the files' contents and order only. Warns (RuntimeWarning) when the build has to
    use the file's own engine. Call it once per build and give the engine's name to every tokenize task.
    """
    reference = Encoder(path, eos, bos=bos, encoding=encoding, engine=None)
    own = reference.engine
    texts = [*reference.probes(), *sample_texts(documents, sample_bytes)]
    size = sum(len(text.encode()) for text in texts)
    try:
        fast = load_encoder(path, eos, "gigatoken", unlike, bos, encoding)
    except BuildError as error:
        return _fall_back(path, Parity(own, len(texts), size, 0, str(error)))
    facts = [(encoder.eos_id, encoder.bos_id, encoder.vocab_size) for encoder in (fast, reference)]
    if facts[0] != facts[1]:
        reason = f"the tokenizer file numbers its added tokens in another way than {own} does"
        return _fall_back(path, Parity(own, len(texts), size, 0, reason))
    different = [text for text in texts if not _agree(fast, reference, text)]
    if different:
        where = f"{len(different)} of {len(texts)} texts, first {different[0][:80]!r}"
        reason = f"gigatoken and {own} differ on {where}"
        return _fall_back(path, Parity(own, len(texts), size, len(different), reason))
    return Parity("gigatoken", len(texts), size)


def _agree(fast: Encoder, reference: Encoder, text: str) -> bool:
    try:
        right, _ = reference.encode([text])
    except EosInTextError:
        return True  # tokenizing the document fails, too, and names file and record
    except EncodingError:
        return False  # it must fail, too, if a document is such a text
    try:
        ids, _ = fast.encode([text])
    except Exception:  # whatever the engine fails with, the other one is there
        return False
    return bool(np.array_equal(ids, right))


def _fall_back(path: Path, parity: Parity) -> Parity:
    warn_user(f"{path}: {parity.reason}; this build encodes with {parity.engine} (slow)")
    return parity


def sample_bytes(text_bytes: int) -> int:
    """How much of so much text both engines encode."""
    return max(PARITY_LEAST_BYTES, min(PARITY_BYTES, text_bytes // PARITY_PART))


def sample_texts(documents: Sequence[Artifact], sample_bytes: int) -> Iterator[str]:
    """Texts to compare engines on, of all files alike.

    Half of `sample_bytes` are the beginnings of the first documents of each file. The other half is for what
    those lack: of the documents that follow, each character that no text before had, with its neighbors.
    """
    seen = np.zeros(CODE_POINTS, np.bool_)
    for file in documents:
        share = sample_bytes // len(documents)
        beginnings, others, scanned = -(-share // 2), share // 2, _SCANNED * share
        for text in _texts_of(file):
            piece = ""
            if beginnings > 0:
                piece = text[: min(beginnings, PARITY_CHARACTERS)]
                beginnings -= len(piece.encode()) + 1
                yield piece
            rest = text[len(piece) :][:scanned]
            scanned -= len(rest)
            seen[_code_points(piece)] = True
            for window in _new_characters(rest, seen, others):
                others -= len(window.encode()) + 1
                yield window
            if beginnings <= 0 and (others <= 0 or scanned <= 0):
                break


def _texts_of(file: Artifact) -> Iterator[str]:
    with file.open_arrow(mapped=True) as source:
        column = pa.ipc.open_file(source).schema.get_field_index("text")
        reader = pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=[column]))
        for batch in range(reader.num_record_batches):
            for text in reader.get_batch(batch).column(0):
                yield text.as_py()


def _new_characters(text: str, seen: npt.NDArray[np.bool_], most_bytes: int) -> Iterator[str]:
    """The parts of a text around characters not in `seen`, which learns them; up to `most_bytes`."""
    codes = _code_points(text)
    at = 0
    while most_bytes > 0 and len(new := np.flatnonzero(~seen[codes[at:]])):
        at += int(new[0])
        window = text[max(0, at - _AROUND) : at + _AROUND]
        most_bytes -= len(window.encode()) + 1
        at = min(at + _AROUND, len(text))
        seen[_code_points(window)] = True
        yield window


def _code_points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def _read_tokenizer(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise RecipeError(
                f"tokenizer.path: {path} is larger than {MAX_TOKENIZER_BYTES:,} bytes; not a tokenizer"
            )
        return path.read_bytes()
    except OSError as error:
        raise RecipeError(
            f"tokenizer.path: {path} cannot be read ({error.strerror or error}); "
            f"give a Hugging Face tokenizer.json file"
        ) from error


@lru_cache(maxsize=1)
def _config_of(path: Path, data: bytes, encoding: Encoding | None) -> dict[str, Any]:
    """`tokenizer_config`, once for both engines."""
    return tokenizer_config(path, data, encoding, parse=_parse_json)


def _parse_json(data: bytes) -> Any:
    try:
        return orjson.loads(data)  # four times as fast
    except orjson.JSONDecodeError:  # halves of surrogate pairs
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
    """Hex blake2b-128 of a tokenizer file; RecipeError if it cannot be read."""
    return _digest(_read_tokenizer(path))


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
