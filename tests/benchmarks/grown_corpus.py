"""A corpus and what it is when it grows: its documents, and copies of them that are other documents.

In a copy each word is replaced, with a probability of `REPLACED`, by another word of the same text, so that a
quarter of all 5-grams are common with the original: no near-duplicate. Of each copy, `NEAR` of the documents
are changed in one word of a hundred only, and `EQUAL` not at all. So the parts that filters and duplicate
removal take do not change much as the corpus grows. Same arguments, same bytes.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent / "dedup_peers"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from near_texts import read_sources

from support.small_build import EOS, make_corpus

__all__ = ["EOS", "documents", "put_tokenizer", "write_corpus"]

REPLACED = 0.15
NEAR, EQUAL = 0.05, 0.02
FILE_BYTES = 8_000_000  # of text: enough tasks for any number of workers
LONGEST = 60_000  # characters of one document; longer texts are cut into several
_PIECES = re.compile(r"\S+\s*")


def documents(corpus: Path | None, megabytes: float, seed: int = 1) -> list[str]:
    """About so many MB of text, as documents in an order of their own."""
    random = np.random.default_rng(seed)
    texts = []
    for text in read_sources(corpus):
        longest = LONGEST if corpus is not None else 4000
        texts += [text[start : start + longest] for start in range(0, len(text), longest)]
    left, chosen = megabytes * 1e6, []
    for number in random.permutation(len(texts)).tolist():
        if left <= 0:
            break
        chosen.append(texts[number])
        left -= len(texts[number].encode())
    return chosen


def write_corpus(
    folder: Path, originals: list[str], copies: int, *, file_bytes: int = FILE_BYTES, seed: int = 1
) -> int:
    """`copies` times the documents, the first time as they are, in text-NNNNN.jsonl; bytes of text."""
    folder.mkdir(parents=True)
    size = file = held = 0
    out = (folder / f"text-{file:05d}.jsonl").open("w")
    for text in _grown(originals, copies, seed):
        out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        size += (added := len(text.encode()))
        held += added
        if held >= file_bytes:
            out.close()
            file, held = file + 1, 0
            out = (folder / f"text-{file:05d}.jsonl").open("w")
    out.close()
    return size


def _grown(originals: list[str], copies: int, seed: int) -> Iterator[str]:
    yield from originals
    for copy in range(1, copies):
        random = np.random.default_rng([seed, copy])
        for text, kind in zip(originals, random.random(len(originals)).tolist(), strict=True):
            if kind < EQUAL:
                yield text
            else:
                yield _changed(text, 0.01 if kind < EQUAL + NEAR else REPLACED, random)


def _changed(text: str, part: float, random: np.random.Generator) -> str:
    pieces = _PIECES.findall(text)
    places = np.flatnonzero(random.random(len(pieces)) < part)
    others = random.integers(0, max(1, len(pieces)), len(places))
    for place, other in zip(places.tolist(), others.tolist(), strict=True):
        pieces[place] = pieces[other]
    return "".join(pieces)


def put_tokenizer(folder: Path, tokenizer: Path | None) -> None:
    """tokenizer.json: the one given, else a small one that is made here."""
    if tokenizer is None:
        tokenizer = make_corpus(folder / "small", 20).parent / "tokenizer.json"
    shutil.copy(tokenizer, folder / "tokenizer.json")
