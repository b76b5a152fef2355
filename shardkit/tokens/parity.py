"""Compare the fast engine with a tokenizer file's own library on a sample of the documents.

On any difference, or if `gigatoken` does not support the tokenizer, all text is encoded by the file's own
library, so that no byte depends on which task found the difference (`check_parity`). A sample can miss rare
characters: the engines' Unicode tables differ in age, so form C may order combining marks of recently added
scripts differently. `unlike_characters` compares the engines on every combining mark, and on both ends of
every run of characters of one category, which is where tables of different age differ. A text with a
character on which they differ is always encoded by the file's own library. That comparison takes half a
second and depends only on the tokenizer and the versions of all code.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardkit.errors import BuildError, MissingExtraError, warn_user
from shardkit.formats.tokenizer_file import Encoding, Engine
from shardkit.kernels.utf8 import ASSIGNED, CODE_POINTS
from shardkit.tokens.tokenizer import (
    Encoder,
    EncodingError,
    EosInTextError,
    Ranges,
    Tokens,
    load_encoder,
)

PARITY_BYTES = 2 << 20  # maximum size of the parity sample; `tokenizers` encodes one to three MB/s
PARITY_LEAST_BYTES = 1 << 17  # minimum size of the parity sample
PARITY_PART = 256  # 1/256 of all text is sampled; encoding it with `tokenizers` takes about 2 % of a build
PARITY_CHARACTERS = 1 << 13  # maximum sample of one document, so that one book is not the whole sample
# The search for new characters in a file stops after this many times the file's share of the parity sample.
_SCANNED = 16
_AROUND = 48  # characters of context sampled on each side of a character not seen so far
_PICTOGRAPHS = range(0x1F000, 0x1FB00)  # symbols that never combine, such as emoji; new ones come every year


def unlike_characters(fast: Encoder, reference: Encoder) -> Ranges:
    """Return ranges of characters such that the two engines may encode a text with one of them differently.

    These are combining marks that the engines order differently; canonical compositions that only one engine
    makes; runs of characters of one category whose first or last character the engines classify differently;
    and characters newer than Python's Unicode tables, except pictographs, because the engines' tables may be
    older or newer. A character's class and compositions never change once it is assigned.
    """
    young, ranges, texts = _characters_to_compare()
    unlike = young.copy()
    ids, right = (_split(*encoder.encode(texts)) for encoder in (fast, reference))
    for (first, last), a, b in zip(ranges, ids, right, strict=True):
        if not np.array_equal(a, b):
            unlike[first : last + 1] = True
    if reference.own_engine == "sentencepiece":
        unlike[ord("\u2581")] = True  # SentencePiece's own symbol for a space
    edges = np.flatnonzero(np.diff(unlike, prepend=False, append=False)).tolist()
    return tuple((first, stop - 1) for first, stop in zip(edges[::2], edges[1::2], strict=True))


@cache
def _characters_to_compare() -> tuple[npt.NDArray[np.bool_], list[tuple[int, int]], list[str]]:
    """Return the code points that Python does not know, ranges of the others, and a test text per range.

    The text for a combining or composed character reveals the combining class: it puts the character before
    a mark of the lowest class and after one of the most frequent class. A run of one category has a text for
    its first and one for its last character. The neighbors of the character in the text reveal whether it is
    a letter, a digit, a space or a sign.
    """
    young = np.zeros(CODE_POINTS, np.bool_)
    ranges: list[tuple[int, int]] = []
    texts: list[str] = []
    young[ASSIGNED:0xF0000] = True  # the loop below clears assigned tags; private use begins at 0xF0000
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


def fast_engine(reference: Encoder) -> tuple[Engine, Ranges]:
    """Return the engine to start with, and the characters that it must not encode (`unlike_characters`).

    It is gigatoken if that supports the tokenizer file of `reference`, an encoder with the file's own
    library, and else that library. Raises MissingExtraError if gigatoken is not installed.
    """
    try:
        fast = load_encoder(reference.path, reference.eos, "gigatoken", (), reference.bos, reference.encoding)
        return "gigatoken", unlike_characters(fast, reference)
    except MissingExtraError:
        raise
    except Exception:  # gigatoken raises exceptions of its own for tokenizers that it does not support
        return reference.engine, ()


@dataclass(frozen=True, slots=True)
class Parity:
    """The engine that the whole build uses, how much text was compared, and why gigatoken was rejected.

    `differences` is the number of texts with different ids. `reason` is None if gigatoken is used.
    """

    engine: Engine
    documents: int
    bytes: int
    differences: int = 0
    reason: str | None = None


def check_parity(
    sample: Iterable[str],
    path: Path,
    eos: str,
    unlike: Ranges = (),
    *,
    bos: str | None = None,
    encoding: Encoding | None = None,
) -> Parity:
    """Compare both engines on a sample of texts.

    Texts with characters in `unlike` (from `unlike_characters`) cannot differ, because the tokenizer file's
    own library always encodes them. Warns (RuntimeWarning) if the own library has to be used.
    """
    reference = Encoder(path, eos, bos=bos, encoding=encoding, engine=None)
    own = reference.engine
    texts = [*reference.probes(), *sample]
    size = sum(len(text.encode()) for text in texts)
    try:
        fast = load_encoder(path, eos, "gigatoken", unlike, bos, encoding)
    except BuildError as error:
        return _fall_back(path, Parity(own, len(texts), size, 0, str(error)))
    facts = [(encoder.eos_id, encoder.bos_id, encoder.vocab_size) for encoder in (fast, reference)]
    if facts[0] != facts[1]:
        reason = f"gigatoken and {own} give the added tokens of the file different ids"
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
        return True  # not a difference: tokenizing the document fails with either engine
    except EncodingError:
        return False  # a document that the file's own library cannot encode must fail the build
    try:
        ids, _ = fast.encode([text])
    except Exception:  # any failure of gigatoken means falling back to the file's own library
        return False
    return bool(np.array_equal(ids, right))


def _fall_back(path: Path, parity: Parity) -> Parity:
    warn_user(f"{path}: {parity.reason}; encoding with {parity.engine} (slow)")
    return parity


def sample_bytes(text_bytes: int) -> int:
    """Return the size in bytes of the sample for `check_parity`, given the size of all text."""
    return max(PARITY_LEAST_BYTES, min(PARITY_BYTES, text_bytes // PARITY_PART))


def sample_texts(files: Sequence[Iterable[str]], sample_bytes: int) -> Iterator[str]:
    """Yield texts for the comparison of engines, of the same size from the texts of each file.

    Half of `sample_bytes` are the beginnings of the first documents of each file. The other half are
    characters that no earlier text had, each with its neighbors, from the rest of these and later documents.
    """
    seen = np.zeros(CODE_POINTS, np.bool_)
    for file in files:
        share = sample_bytes // len(files)
        beginnings, others, scanned = -(-share // 2), share // 2, _SCANNED * share
        for text in file:
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


def _new_characters(text: str, seen: npt.NDArray[np.bool_], most_bytes: int) -> Iterator[str]:
    """Yield windows of a text around characters not in `seen`, about `most_bytes` in all; update `seen`."""
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
