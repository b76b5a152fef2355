"""C4's line rules and spaCy's sentences in plain Python: what the kernels are tested against."""

from __future__ import annotations

import re

from shardkit.writers.filters.c4 import C4QualityEditor
from shardkit.writers.kernels.sentences import (
    _AFFIX,
    _BEFORE_STOP,
    _END,
    _LOWER,
    _PREFIX,
    _PUNCTUATION,
    _QUOTE,
    _UPPER,
    _abbreviations,
    _flags,
)

_POLICY = "terms of use|privacy policy|cookie policy|uses cookies|use of cookies|use cookies"


def reference_sentences(text: str) -> int:
    """The same count in plain Python."""
    count, pending = 0, False
    for part in re.findall(r"\S+|\s+", text.strip()):
        if part.isspace():
            count, pending = (count + 1, False) if pending and part != " " else (count, pending)
            continue
        for token in _reference_tokens(part):
            if len(token) == 1 and _is(token, _END):
                pending = True
            elif pending and not all(_is(character, _PUNCTUATION) for character in token):
                count, pending = count + 1, False
    return count + bool(text.strip())


def _is(character: str, flag: int) -> bool:
    return bool(_flags()[ord(character)] & flag)


def _reference_tokens(word: str) -> list[str]:
    """The tokens of a word without white space."""
    before: list[str] = []
    after: list[str] = []
    rest, previous = word, ""
    while rest and rest != previous and rest not in _abbreviations():
        previous = rest
        if dots := re.match(r"\.\.+", rest):
            before.append(dots[0])
        elif _is(rest[0], _AFFIX | _PREFIX):
            before.append(rest[0])
        rest = word[sum(map(len, before)) : len(word) - sum(map(len, after))]
        if not rest or rest in _abbreviations():
            break
        if dots := re.search(r"\.\.+\Z", rest):
            after.insert(0, dots[0])
        elif _is(rest[-1], _AFFIX) or (rest[-1] == "." and _reference_full_stop(rest[:-1])):
            after.insert(0, rest[-1])
        rest = rest[: len(word) - sum(map(len, before)) - sum(map(len, after))]
    return [*before, *_reference_infixes(rest), *after]


def _reference_full_stop(before: str) -> bool:
    both = len(before) > 1 and _is(before[-1], _UPPER) and _is(before[-2], _UPPER)
    return bool(before) and (_is(before[-1], _BEFORE_STOP) or both)


def _reference_infixes(core: str) -> list[str]:
    """A core, cut at dots between a lower-case letter or quote and a capital or quote."""
    host = re.split("[/?#:]", core.partition("://")[2] if "://" in core else core)[0]
    front, _, domain = host.rpartition(".")
    address = front and len(domain) > 1 and all(_is(character, _LOWER) for character in domain)
    pieces: list[str] = [core] if core else []
    if address or core in _abbreviations():
        return pieces
    for at in range(len(core) - 2, 0, -1):
        joined = _is(core[at - 1], _LOWER | _QUOTE) and _is(core[at + 1], _UPPER | _QUOTE)
        if core[at] == "." and joined:
            pieces[:1] = [core[:at], ".", core[at + 1 :]]
    return pieces


def reference_c4(text: str, config: C4QualityEditor) -> tuple[str | None, str]:
    """(the reason it is dropped, or None; the text that stays), in plain Python."""
    sentences, kept = 0, []
    for line in map(str.strip, text.splitlines()):
        words = line.split()
        if config.max_word_length != -1 and any(len(word) > config.max_word_length for word in words):
            continue
        if config.remove_citations:
            line = re.sub(r"\[\d*]|\[edit]|\[citation needed]", "", line)
        good = line.endswith((".", "?", "!", '"', "'")) and not line.endswith("...")
        if (config.filter_no_terminal_punct and not good) or len(words) < config.min_words_per_line:
            continue
        lower = line.lower()
        if config.filter_lorem_ipsum and "lorem ipsum" in lower:
            return "lorem_ipsum", text
        if config.filter_javascript and "javascript" in lower:
            continue
        if config.filter_curly_bracket and "{" in line:
            return "curly_bracket", text
        if config.filter_policy and re.search(_POLICY, lower):
            continue
        sentences += reference_sentences(line)
        kept.append(line)
    if config.min_num_sentences != -1 and sentences < config.min_num_sentences:
        return "too_few_sentences", text
    return None, "\n".join(kept).strip()
