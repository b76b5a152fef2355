"""Words as split by spaCy's rule-based tokenizers; datatrove, and therefore FineWeb, counts these words.

spaCy splits a text at white space, and then splits each chunk by the rules of a language, independently of
the other chunks. Therefore each distinct chunk is split once and then looked up. The result is a text with a
space after each word, from which kernels that split at white space count the words.

One rule of spaCy depends on neighboring chunks. A special case among the words of a chunk, such as `:)` in
`hello:)`, does not apply if a longer special case that includes words of the next chunk overlaps it, as in
`hello:) )`. Where this is possible, spaCy splits the chunks together, with all neighbors that are a single
space apart. The same is done where words of two chunks may form one special case; Spanish has such cases.

spaCy takes quadratic time for long chunks that begin or end with much punctuation, or have many colons. Such
chunks are cut every PART_CHARACTERS characters, and each cut adds one word.

`spacy:zh` is spaCy's Chinese tokenizer with jieba, as in datatrove. It has no such rules and splits whole
texts.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.errors import RecipeError, naming_extras
from shardkit.kernels.text_arrays import Chunks, offset_pieces, split_chunks, text_bytes, text_offsets

PART_CHARACTERS = 1000
_MOST_KNOWN = 1 << 17  # maximum chunks in one generation of the cache; its two generations take 60 MB
_PIECE_BYTES = 1 << 22  # maximum size of the texts that are split at a time
_CALL_CHARACTERS = 1 << 17  # maximum size of the text in one call of spaCy, in characters
_LONG = re.compile(rf"\S{{{PART_CHARACTERS + 1},}}")
_PART = re.compile(rf"\S{{{PART_CHARACTERS}}}(?=\S)")
# The part of a chunk that spaCy may split off in many steps: punctuation, and units such as km.
_PUNCTUATED = re.compile(r"(?:\w{0,8}\W)*")
_MOST_STEPS = 1 << 22  # chunks that take spaCy more steps are cut; so many take up to two seconds
_CUT, _NEXT = "\n", "\t"  # separators of a chunk's parts and of chunks; no special case contains them
# Bit flags of a chunk. _SPECIAL: it contains a special case. _FIRST: its first word may form a special case
# with words of the previous chunk. _LAST: its last word may form one with words of the next chunk.
_SPECIAL, _FIRST, _LAST = 1, 2, 4

_Texts = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]


class _Ends(NamedTuple):
    """Whether a chunk has a special case among its words, and its possible first and last words.

    If a special case is at the beginning, the first word differs before and after spaCy applies the case, and
    `firsts` has both; the same holds for the end and `lasts`.
    """

    special: bool
    firsts: set[str]
    lasts: set[str]


@cache
def spacy_words(language: str) -> SpacyWords:
    """Return the splitter for a language, one per process. Raises RecipeError if spaCy lacks its rules."""
    return SpacyWords(language)


class SpacyWords:
    """Splits texts into words, and caches the words of chunks."""

    def __init__(self, language: str) -> None:
        with naming_extras("words: spacy"):
            import spacy
            from spacy.tokenizer import Tokenizer
        settings = {"nlp": {"tokenizer": {"segmenter": "jieba"}}} if language == "zh" else {}
        try:
            blank: Any = spacy.blank
            self._language = blank(language, config=settings)
        except (ImportError, ValueError) as error:  # ValueError: jieba is not installed
            raise RecipeError(f"words: spacy:{language}: {' '.join(str(error).split())}") from None
        logging.getLogger("jieba").setLevel(logging.WARNING)  # do not log where jieba keeps its dictionary
        self._language.vocab.lex_attr_getters = {}  # do not compute attributes of words that nothing reads
        self._tokenizer = self._language.tokenizer
        self._has_rules = isinstance(self._tokenizer, Tokenizer)
        if not self._has_rules and language != "zh":
            raise RecipeError(
                f"words: spacy:{language}: spaCy has no rules to split this language by; use a language that "
                "has rules, zh, or xx for the rules that all languages share"
            )
        self._known: dict[str, tuple[str, int]] = {}
        self._older: dict[str, tuple[str, int]] = {}
        if self._has_rules:
            self._read_rules()

    def _read_rules(self) -> None:
        """Collect the special cases that spaCy's other rules would split, and the words of such splits."""
        from spacy.symbols import ORTH
        from spacy.tokenizer import Tokenizer

        given = self._tokenizer
        names = ("prefix_search", "suffix_search", "infix_finditer", "token_match", "url_match")
        plain = Tokenizer(self._language.vocab, rules={}, **{name: getattr(given, name) for name in names})
        self._rules = {case: [part[ORTH] for part in parts] for case, parts in given.rules.items()}
        # Special cases by first word, as pairs: the words of the case, and its words by the other rules.
        self._cases: dict[str, list[tuple[list[str], list[str]]]] = {}
        self._pairs: set[tuple[str, str]] = set()  # neighboring words in special cases split by other rules
        self._spaced = False
        for case, words in self._rules.items():
            split = [word.text for word in plain(case)]
            if split == words or not case.strip():
                continue
            self._spaced |= " " in case
            self._pairs.update(pairwise(split))
            self._cases.setdefault(words[0], []).append((words, split))
        self._firsts, self._lasts = ({pair[end] for pair in self._pairs} for end in (1, 0))

    def split(
        self, data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64], wanted: npt.NDArray[np.bool_]
    ) -> _Texts:
        """Return the texts data[offsets[i]:offsets[i + 1]] with a space after each word.

        The result has the form of `data` and `offsets`; texts that are not `wanted` are empty.
        """
        pieces = [np.zeros(1, np.uint8)]
        ends = [np.ones(1, np.int64)]
        split = self._split_chunks if self._has_rules else self._split_whole
        for first, stop in offset_pieces(offsets, _PIECE_BYTES):
            piece, own = split(data, offsets[first : stop + 1], wanted[first:stop])
            pieces.append(piece[own[0] : own[-1]])
            ends.append(ends[-1][-1] + own[1:] - own[0])
        return np.concatenate(pieces), np.concatenate(ends)

    def _split_whole(
        self, data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64], wanted: npt.NDArray[np.bool_]
    ) -> _Texts:
        """Split texts with one call of spaCy per text."""
        found = []
        for row, chosen in enumerate(wanted.tolist()):
            text = data[offsets[row] : offsets[row + 1]].tobytes().decode() if chosen else ""
            with self._language.memory_zone():
                stripped = [word.text.strip() for word in self._tokenizer(text)]
            found.append(_spaced(word for word in stripped if word))
        texts = pa.array(found, pa.large_string())
        return text_bytes(texts), text_offsets(texts)

    def _split_chunks(
        self, data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64], wanted: npt.NDArray[np.bool_]
    ) -> _Texts:
        """Split texts by looking up the words of their chunks."""
        chunks = split_chunks(data, offsets, wanted)
        encoded = chunks.texts.dictionary_encode()
        distinct, places = encoded.dictionary.to_pylist(), encoded.indices.to_numpy()
        known = self._look_up(distinct)
        flags = np.array([flags for _, flags in known], np.uint8)
        replaced = [words for words, _ in known]
        together = self._together(chunks, distinct, places, flags[places])
        if together:
            places = places.copy()
            replaced.append("")
            for (first, stop), words in zip(
                together, self._split_runs(distinct, places, together), strict=True
            ):
                places[first:stop] = len(distinct)
                places[first] = len(replaced)
                replaced.append(words)
        texts = pa.array(replaced, pa.large_string()).take(pa.array(places))
        return text_bytes(texts), text_offsets(texts)[chunks.firsts]

    def _look_up(self, chunks: Sequence[str]) -> list[tuple[str, int]]:
        """Return for each distinct chunk its words, with a space after each word, and its bit flags."""
        if len(self._known) > _MOST_KNOWN:
            self._known, self._older = {}, self._known
        older = self._older
        self._known.update((chunk, older[chunk]) for chunk in chunks if chunk in older)
        new = [chunk for chunk in chunks if chunk not in self._known]
        for chunk, words in zip(new, self._ask(new), strict=True):
            special, firsts, lasts = self._ends(chunk, words)
            flags = _SPECIAL * special
            flags |= _FIRST * (not firsts.isdisjoint(self._firsts))
            flags |= _LAST * (not lasts.isdisjoint(self._lasts))
            self._known[chunk] = _spaced(words), flags
        return [self._known[chunk] for chunk in chunks]

    def _ask(self, texts: Sequence[str]) -> Iterator[list[str]]:
        """Yield for each text its words by spaCy, without words that are white space."""
        begin = 0
        while begin < len(texts):
            stop, size = begin, 0
            while stop < len(texts) and (stop == begin or size + len(texts[stop]) < _CALL_CHARACTERS):
                size += len(texts[stop]) + 1
                stop += 1
            together = _NEXT.join(_LONG.sub(_cut_slow, text) for text in texts[begin:stop])
            with self._language.memory_zone():
                sizes = self._tokenizer(together).to_array(["LENGTH", "SPACY"]).sum(axis=1)
            characters = np.frombuffer(together.encode("utf-32-le"), np.uint32)
            spaced = np.insert(characters, np.cumsum(sizes).astype(np.int64), ord(" "))
            split = spaced.tobytes().decode("utf-32-le")
            yield from (part.split() for part in split.split(_NEXT))
            begin = stop

    def _ends(self, chunk: str, words: Sequence[str]) -> _Ends:
        special, firsts, lasts = False, set(words[:1]), set(words[-1:])
        if self._rules.get(chunk) == words:
            return _Ends(special, firsts, lasts)
        for at, word in enumerate(words):
            for case, split in self._cases.get(word, ()):
                if words[at : at + len(case)] == case:
                    special = True
                    if at == 0:
                        firsts.add(split[0])
                    if at + len(case) == len(words):
                        lasts.add(split[-1])
        return _Ends(special, firsts, lasts)

    def _together(
        self,
        chunks: Chunks,
        distinct: Sequence[str],
        places: npt.NDArray[np.int32],
        flags: npt.NDArray[np.uint8],
    ) -> list[tuple[int, int]]:
        """Return the runs (first, stop) of chunks that spaCy must split together, in order."""
        before, after = flags[:-1], flags[1:]
        doubtful = (before & _LAST).astype(np.bool_) & (after & _FIRST).astype(np.bool_) & chunks.joined[1:]
        if not self._spaced:
            doubtful &= ((before | after) & _SPECIAL).astype(np.bool_)
        found: list[tuple[int, int]] = []
        for place in np.flatnonzero(doubtful).tolist():
            if found and place < found[-1][1]:
                continue
            left, right = (distinct[number] for number in places[place : place + 2].tolist())
            lasts = self._ends(left, self._known[left][0].split()).lasts
            firsts = self._ends(right, self._known[right][0].split()).firsts
            if any((last, first) in self._pairs for last in lasts for first in firsts):
                found.append(_run(chunks.joined, place))
        return found

    def _split_runs(
        self, distinct: Sequence[str], places: npt.NDArray[np.int32], runs: Sequence[tuple[int, int]]
    ) -> Iterator[str]:
        texts = [" ".join(distinct[number] for number in places[first:stop].tolist()) for first, stop in runs]
        yield from map(_spaced, self._ask(texts))


def _spaced(words: Iterable[str]) -> str:
    """Join words, with a space after each."""
    return "".join(word + " " for word in words)


def _cut_slow(match: re.Match[str]) -> str:
    """Return a long chunk, cut into parts if spaCy would take too long for it."""
    chunk = match[0]
    ends = sum(found.end() for text in (chunk, chunk[::-1]) if (found := _PUNCTUATED.match(text)))
    slow = (ends + chunk.count(":") // 4) * len(chunk) > _MOST_STEPS
    return _PART.sub(rf"\g<0>{_CUT}", chunk) if slow else chunk


def _run(joined: npt.NDArray[np.bool_], place: int) -> tuple[int, int]:
    """Return (first, stop) of the run of chunks around `place` that are joined by single spaces."""
    first = stop = place
    while joined[first]:
        first -= 1
    stop += 1
    while stop < len(joined) and joined[stop]:
        stop += 1
    return first, stop
