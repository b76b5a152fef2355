"""Gopher's rules: against datatrove's, in plain Python."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference.filters import reference_ngrams
from shardkit.kernels.utf8 import PUNCTUATION, characters_with
from shardkit.writers.filters.config import FilterEntry
from shardkit.writers.filters.gopher import GopherQualityFilter, GopherRepetitionFilter
from shardkit.writers.kernels.ngrams import EXCESS
from support.filter_runs import decide, judge, text_batch, values
from support.filter_texts import REPEATING_TEXT, WORDED_TEXTS

ROOMY = GopherQualityFilter(min_doc_words=3, min_stop_words=1, min_avg_word_length=2)
GOOD = (
    "It was the best of times, it was the worst of times, it was the age of wisdom and that of folly.\n"
    "We had everything before us, we had nothing before us, we were all going direct to Heaven.\n"
    "In short, the period was so far like the present period that people have to be told so with force."
)


def quality(text: str, config: GopherQualityFilter) -> str | None:
    """datatrove's rules, one line each, for texts with at least one word."""
    words, lines = text.split(), text.splitlines()
    punctuation = characters_with(PUNCTUATION)
    plain = [word for word in words if any(character not in punctuation for character in word)]
    mean = sum(map(len, plain)) / len(plain) if plain else float("nan")
    bullets = sum(line.lstrip().startswith(("•", "-")) for line in lines)
    ends = sum(line.rstrip().endswith(("...", "…")) for line in lines)
    letters = sum(any(map(str.isalpha, word)) for word in words)
    rules: list[tuple[str, object, Callable[[float], bool]]] = [
        ("gopher_short_doc", config.min_doc_words, lambda bound: len(plain) < bound),
        ("gopher_long_doc", config.max_doc_words, lambda bound: len(plain) > bound),
        ("gopher_below_avg_threshold", config.min_avg_word_length, lambda bound: mean < bound),
        ("gopher_above_avg_threshold", config.max_avg_word_length, lambda bound: mean > bound),
        ("gopher_too_many_hashes", config.max_symbol_word_ratio, lambda b: text.count("#") / len(words) > b),
        (
            "gopher_too_many_ellipsis",
            config.max_symbol_word_ratio,
            lambda bound: (text.count("...") + text.count("…")) / len(words) > bound,
        ),
        ("gopher_too_many_bullets", config.max_bullet_lines_ratio, lambda b: bullets / len(lines) > b),
        ("gopher_too_many_end_ellipsis", config.max_ellipsis_lines_ratio, lambda b: ends / len(lines) > b),
        (
            "gopher_below_alpha_threshold",
            config.max_non_alpha_words_ratio,
            lambda b: letters / len(words) < b,
        ),
        (
            "gopher_enough_stop_words",
            config.min_stop_words,
            lambda bound: len(set(config.stop_words) & set(words)) < bound,
        ),
    ]
    return next((name for name, bound, fails in rules if bound and fails(float(str(bound)))), None)


@settings(max_examples=300, deadline=None)
@given(WORDED_TEXTS)
def test_quality_decides_as_datatrove_does(texts: list[str]) -> None:
    worded = [text for text in texts if text.split()]
    for config in (
        ROOMY,
        GopherQualityFilter(min_doc_words=None, min_avg_word_length=0, min_stop_words=None),
    ):
        assert decide(config, worded) == [quality(text, config) for text in worded]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (GOOD, None),
        ("", "gopher_short_doc"),
        ("the of " * 20, "gopher_short_doc"),
        ("the of " * 50_001, "gopher_long_doc"),
        ("a be " * 50, "gopher_below_avg_threshold"),
        ("incomprehensibilities the of " * 50, None),
        ("incomprehensibilities the " * 50, "gopher_above_avg_threshold"),
        (GOOD + " #" * 20, "gopher_too_many_hashes"),
        (GOOD + " ..." * 20, "gopher_too_many_ellipsis"),
        ("\n".join("- " + word for word in GOOD.split()), "gopher_too_many_bullets"),
        (GOOD.replace(".", "…"), "gopher_too_many_end_ellipsis"),
        (GOOD + " 1234" * 60, "gopher_below_alpha_threshold"),
        ("some words here that mean little " * 10, "gopher_enough_stop_words"),
    ],
)
def test_each_quality_rule_has_a_text_that_only_it_rejects(text: str, reason: str | None) -> None:
    assert decide(GopherQualityFilter(), [text]) == [reason]


@pytest.mark.parametrize("text", ["", " ", "\n\n", "...", "\u2028"])
def test_texts_without_words_divide_by_nothing(text: str) -> None:
    bare = GopherQualityFilter(min_doc_words=None, min_stop_words=None)
    assert decide(bare, [text])[0] in {"gopher_below_alpha_threshold", "gopher_too_many_ellipsis"}


def repetition(text: str, config: GopherRepetitionFilter) -> str | None:
    """datatrove's rules in plain Python."""
    if not text:
        return "empty"
    for name, elements in (
        ("para", re.split("\n{2,}", text.strip())),
        ("line", re.split("\n+", text)),
    ):
        repeated = [element for at, element in enumerate(elements) if element in elements[:at]]
        of_elements, of_characters = (
            getattr(config, f"dup_{name}_frac"),
            getattr(config, f"dup_{name}_char_frac"),
        )
        if of_elements and len(repeated) / len(elements) > of_elements:
            return f"dup_{name}_frac"
        if of_characters and sum(map(len, repeated)) / len(text) > of_characters:
            return f"dup_{name}_char_frac"
    words = text.split()
    for n, most in config.top_n_grams:
        grams = Counter(" ".join(words[at : at + n]) for at in range(len(words) - n + 1))
        if grams:
            gram, times = grams.most_common(1)[0]
            if len(gram) * times / len(text) > most:
                return f"top_{n}_gram"
    for n, most in config.dup_n_grams:
        if reference_ngrams(text, n, EXCESS)[0] / len(text) > most:
            return f"duplicated_{n}_n_grams"
    return None


@settings(max_examples=60, deadline=None)
@given(st.lists(REPEATING_TEXT, max_size=4))
@example(["I am Frank, I am Frank, I am Frank", "\n", " \n \n ", "a\n\na", "one two"])
def test_repetition_decides_as_datatrove_does(texts: list[str]) -> None:
    lenient = GopherRepetitionFilter(
        dup_line_frac=None,
        dup_para_frac=0,
        top_n_grams=((1, 0.5), (3, 0.4)),
        dup_n_grams=((2, 0.3), (4, 0.2)),
    )
    for config in (GopherRepetitionFilter(), lenient):
        assert decide(config, texts) == [repetition(text, config) for text in texts]


def test_values_are_what_was_judged() -> None:
    entry = FilterEntry.model_validate({"gopher_repetition": {"top_n_grams": [[2, 0.5]], "dup_n_grams": []}})
    [(_, config)] = entry.filters()
    rules = judge(config, text_batch(["ab c ab c ab c\nd\nd"]))
    assert {rule.name: values(rule) for rule in rules} == {
        "empty": [18],
        "dup_para_frac": [0],
        "dup_para_char_frac": [0],
        "dup_line_frac": [1 / 3],
        "dup_line_char_frac": [1 / 18],
        "top_2_gram": [3 * len("ab c") / 18],
    }
