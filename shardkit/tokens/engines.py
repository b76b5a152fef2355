"""The engines that encode text: gigatoken, and the libraries that tokenizer files are made for.

Each engine is created once per process. A call takes an Arrow array of texts and returns all ids and the
number of ids of each text. No engine starts threads.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence, Set
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from shardkit.errors import BuildError, MissingExtraError, RecipeError
from shardkit.formats.tokenizer_file import Encoding, read_ranks, reason_of, special_tokens
from shardkit.kernels.text_arrays import text_bytes, text_offsets
from shardkit.tokens.chat import SPECIAL, TRAINED

Ids = npt.NDArray[np.uint32]

CACHE_BYTES = 256 << 20  # gigatoken's word cache has no limit: if memory grows by this, load gigatoken again
# A process encodes its first texts one by one: batch calls need awkward, which saves 1 to 8 us per text, but
# takes 0.2 s to import.
_FIRST_TEXTS = 20_000


class EncodingError(BuildError):
    """A tokenizer cannot encode a text; `row` is the index of the text in the call."""

    def __init__(self, message: str, row: int = 0) -> None:
        super().__init__(message)
        self.row = row


class Gigatoken:
    """Encodes with `gigatoken`, the fast engine, without copies of texts and without threads of its own."""

    def __init__(self, path: Path, config: dict[str, Any], marks: Set[str]) -> None:
        added = [
            t
            for t in config.get("added_tokens") or ()
            if not t.get("special") and t.get("content") not in marks
        ]
        unused = {"post_processor": None, "truncation": None, "padding": None}
        self._data = _to_json(config | unused | {"added_tokens": added})
        self._path = path
        self._grown = self._texts = 0
        self._tokenizer = self._load()

    def _load(self) -> Any:
        try:
            import gigatoken
        except ImportError as error:
            raise MissingExtraError("gigatoken", "write", "tokenizing") from error
        try:
            return gigatoken.Tokenizer.from_json(self._data)
        except BaseException as error:  # RuntimeError or ValueError: a part of the file is not supported
            raise BuildError(f"gigatoken cannot load this tokenizer ({reason_of(error)})") from error

    def __call__(self, texts: pa.Array) -> tuple[Ids, npt.NDArray[np.int64]]:
        before = _resident_bytes()
        self._texts += len(texts)
        ids, lengths = (self._one_by_one if self._texts <= _FIRST_TEXTS else self._at_once)(texts)
        self._grown += max(0, _resident_bytes() - before - ids.nbytes)
        if self._grown > CACHE_BYTES:
            self._tokenizer = self._load()
            self._grown = 0
        return ids, lengths

    def _one_by_one(self, texts: pa.Array) -> tuple[Ids, npt.NDArray[np.int64]]:
        data, edges = text_bytes(texts), text_offsets(texts).tolist()
        encoded = (self._tokenizer.encode(data[a:b].tobytes()) for a, b in pairwise(edges))
        return _joined(encoded, self._path, "gigatoken")

    def _at_once(self, texts: pa.Array) -> tuple[Ids, npt.NDArray[np.int64]]:
        import awkward

        contents = awkward.contents
        strings = contents.ListOffsetArray(
            awkward.index.Index64(text_offsets(texts)),
            contents.NumpyArray(text_bytes(texts), parameters={"__array__": "char"}),
            parameters={"__array__": "string"},
        )
        try:
            encoded = self._tokenizer.encode_batch(awkward.Array(strings), parallel=False).layout
        except BaseException as error:
            reason_of(error)
            self._tokenizer = self._load()
            return self._one_by_one(texts)  # unlike the batch call, this reports which text failed
        ids: Ids = np.asarray(encoded.content.data)
        offsets: npt.NDArray[np.int64] = np.asarray(encoded.offsets.data, np.int64)
        return ids, np.diff(offsets)


class HuggingFace:
    """Encodes with `tokenizers`: slow, correct by definition. One text per call, as batches start threads."""

    def __init__(self, path: Path, config: dict[str, Any], marks: Set[str]) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise MissingExtraError("tokenizers", "write", "tokenizing") from error
        added = [
            t | {"special": True} if t.get("content") in marks else t
            for t in config.get("added_tokens") or ()
        ]
        # The packer cuts and pads documents, so the file's truncation and padding settings are ignored.
        plain = config | {"added_tokens": added, "truncation": None, "padding": None}
        try:
            self._named = self._tokenizer = tokenizers.Tokenizer.from_str(_to_json(plain))
            if (hidden := hide_special_pieces(plain, marks)) is not plain:
                self._tokenizer = tokenizers.Tokenizer.from_str(_to_json(hidden))
        except BaseException as error:  # tokenizers raises plain Exception, and Rust panics
            raise RecipeError(
                f"tokenizer.path: {path} cannot be loaded by tokenizers: {reason_of(error)}"
            ) from error
        self.path = path
        self._tokenizer.encode_special_tokens = True  # encode "<|endoftext|>" in a text as plain characters
        self.tokenizer = self._tokenizer

    def vocabulary(self) -> dict[str, int]:
        return dict(self._named.get_vocab(with_added_tokens=True))

    def __call__(self, texts: pa.Array) -> tuple[Ids, npt.NDArray[np.int64]]:
        encode = self._tokenizer.encode_batch_fast
        encoded = (encode([text.as_py()], add_special_tokens=False)[0].ids for text in texts)
        return _joined(encoded, self.path, "tokenizers")


class SentencePiece:
    """Encodes with `sentencepiece`, the library that a tokenizer.model file is made for."""

    def __init__(self, path: Path) -> None:
        try:
            import sentencepiece
        except ImportError as error:
            raise MissingExtraError("sentencepiece", "sentencepiece", "tokenizer.model") from error
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
            count = self._processor.get_piece_size()
            self._names = {self._processor.id_to_piece(number): number for number in range(count)}
        except Exception as error:
            raise RecipeError(
                f"tokenizer.path: {path} cannot be loaded by sentencepiece: {reason_of(error)}"
            ) from error
        self._path = path

    def vocabulary(self) -> dict[str, int]:
        return dict(self._names)

    def __call__(self, texts: pa.Array) -> tuple[Ids, npt.NDArray[np.int64]]:
        encoded = (self._processor.encode(text.as_py(), out_type=int) for text in texts)
        return _joined(encoded, self._path, "sentencepiece")


class Tiktoken:
    """Encodes with `tiktoken`, the library that files of byte pairs with ranks are made for."""

    def __init__(self, path: Path, encoding: Encoding) -> None:
        try:
            import tiktoken
        except ImportError as error:
            raise MissingExtraError(
                "tiktoken", "tiktoken", "encoding with a tiktoken vocabulary file"
            ) from error
        ranks = read_ranks(path, path.read_bytes())
        self._special = encoding.special_ids(ranks)
        self._names = {token.decode(errors="surrogateescape"): rank for token, rank in ranks.items()}
        try:
            self._encoding = tiktoken.Encoding(
                path.name,
                pat_str=encoding.pattern,
                mergeable_ranks=ranks,
                special_tokens=self._special,
            )
        except BaseException as error:  # an invalid pattern raises ValueError, or a panic of the Rust code
            raise RecipeError(
                f"tokenizer.encoding: tiktoken cannot use it for {path}: {reason_of(error)}"
            ) from error
        self._path = path

    def vocabulary(self) -> dict[str, int]:
        return self._names | self._special

    def __call__(self, texts: pa.Array) -> tuple[Ids, npt.NDArray[np.int64]]:
        encoded = (self._encoding.encode_ordinary(text.as_py()) for text in texts)
        return _joined(encoded, self._path, "tiktoken")


def _to_json(config: dict[str, Any]) -> str:
    try:
        return orjson.dumps(config).decode()
    except orjson.JSONEncodeError:  # orjson rejects lone surrogates and integers of more than 64 bits
        return json.dumps(config)


OwnEngine = HuggingFace | SentencePiece | Tiktoken


def _joined(encoded: Iterable[Sequence[int]], path: Path, library: str) -> tuple[Ids, npt.NDArray[np.int64]]:
    """Concatenate the ids of texts; return all ids and the number of ids of each text.

    Raises EncodingError if `library` cannot encode a text, when its ids are taken from `encoded`.
    """
    parts: list[Ids] = [np.zeros(0, np.uint32)]
    try:
        parts += (np.array(ids, np.uint32) for ids in encoded)
    except BaseException as error:
        raise _refusal(error, path, library, len(parts) - 1) from error
    return np.concatenate(parts), np.fromiter(map(len, parts[1:]), np.int64, len(parts) - 1)


def _refusal(error: BaseException, path: Path, library: str, row: int = 0) -> EncodingError:
    return EncodingError(
        f"{path}: {library} cannot encode this text with this tokenizer: {reason_of(error)}", row
    )


class Marked:
    """Encodes texts made of flagged parts: a special token is only special in a part flagged `SPECIAL`."""

    def __init__(self, config: dict[str, Any], plain: HuggingFace) -> None:
        import tokenizers

        self._plain = plain
        self._ids = plain.vocabulary()
        unused = {"truncation": None, "padding": None, "post_processor": None}
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(_to_json(config | unused))
        except BaseException as error:
            raise RecipeError(
                f"tokenizer.path: {plain.path} cannot be loaded by tokenizers: {reason_of(error)}"
            ) from error
        self._spelled = re.compile("|".join(map(re.escape, special_tokens(config))) or r"(?!)")

    def encode(self, parts: Sequence[tuple[str, int]]) -> tuple[Ids, npt.NDArray[np.uint8]]:
        """Return the ids of one text, given as (part, flags), and uint8 per id: 1 if it is trained on."""
        if not any(self._spelled.search(part) for part, flags in parts if not flags & SPECIAL):
            return self._run(self._tokenizer, parts)
        found = []
        for is_special, group in groupby(parts, key=lambda part: part[1] & SPECIAL):
            for run in [[part] for part in group] if is_special else [list(group)]:
                if is_special:
                    [(token, flags)] = run
                    trained = np.array([flags & TRAINED > 0], np.uint8)
                    found.append((np.array([self._ids[token]], np.uint32), trained))
                else:
                    found.append(self._run(self._plain.tokenizer, run))
        return np.concatenate([ids for ids, _ in found]), np.concatenate([mask for _, mask in found])

    def _run(self, tokenizer: Any, parts: Sequence[tuple[str, int]]) -> tuple[Ids, npt.NDArray[np.uint8]]:
        """Encode the parts as one text; return the ids, and uint8 per id: 1 if it is trained on.

        An id is trained on if it shares a character with a part flagged `TRAINED`.
        """
        try:
            encoded = tokenizer.encode("".join(part for part, _ in parts), add_special_tokens=False)
        except BaseException as error:
            raise _refusal(error, self._plain.path, "tokenizers") from error
        sizes = [len(part) for part, _ in parts]
        before = np.append(0, np.cumsum(np.repeat([flags & TRAINED > 0 for _, flags in parts], sizes)))
        offsets = np.array(encoded.offsets, np.int64).reshape(-1, 2)
        starts = np.minimum(offsets[:, 0], len(before) - 1)
        stops = np.minimum(np.maximum(offsets[:, 1], starts + 1), len(before) - 1)
        mask = before[stops] > before[starts]
        return np.array(encoded.ids, np.uint32), mask.astype(np.uint8)


def hide_special_pieces(config: dict[str, Any], marks: Set[str]) -> dict[str, Any]:
    """Return the tokenizer's config with Unigram pieces renamed that spell special tokens or `marks`.

    So text never matches them, just as SentencePiece does not match control symbols in text. All ids stay the
    same. Scores stay too, because the lowest score decides the cost of an unknown character. The added tokens
    with the names of renamed pieces are removed: special ones are not searched for in text, and without a
    piece of their name they would get new ids.
    """
    vocabulary = config["model"].get("vocab")
    if not isinstance(vocabulary, list):
        return config
    special = {*marks} | {t["content"] for t in config["added_tokens"] if t.get("special")}
    hidden = special & {piece for piece, _ in vocabulary}
    if not hidden:
        return config
    names = {piece: f"\U0010ffff{hashlib.sha256(piece.encode()).hexdigest()}" for piece in hidden}
    model = config["model"] | {"vocab": [[names.get(piece, piece), score] for piece, score in vocabulary]}
    added = [token for token in config["added_tokens"] if token["content"] not in hidden]
    return config | {"model": model, "added_tokens": added}


def _linux_resident_bytes() -> int:
    with Path("/proc/self/statm").open("rb") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_resident_bytes: Callable[[], int]
_resident_bytes = _linux_resident_bytes if Path("/proc/self/statm").exists() else (lambda: 0)
