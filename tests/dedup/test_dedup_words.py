"""Normalization, words, n-grams and signatures: kernels against plain Python."""

from __future__ import annotations

import random
import re
import unicodedata

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference.near import (
    reference_band_keys,
    reference_key,
    reference_shingle_hashes,
    reference_shingles,
    reference_signature,
)
from shardkit.writers.dedup.config import MinHashConfig
from shardkit.writers.dedup.signatures import band_keys, sign_batch, word_keys
from shardkit.writers.kernels.shingles import shingle_batch, text_units
from shardkit.writers.kernels.words import (
    SEGMENT_BYTES,
    WORD,
    character_tables,
    combining_classes,
    composed,
    normalized_words,
)

# Letters that change length or form in lower case or NFC, that join with others, and of 1 to 4 bytes.
ODD = "éÄßİıΣςσЖ字あ한ᄒ\u1161\u11a8\u0301\u0308\u0345ﬁⅣ²𝔘😀—“”\u2028\u00a0ก็ａ_0"
ALPHABET = st.sampled_from(list("abcXYZ019 .,-\n\t'" * 2 + ODD))
TEXTS = st.lists(st.text(ALPHABET, max_size=60), max_size=6)
LONG = ["a" * 10_000 + " b", "字" * 3_000, "字a " * 2_000, "x" * SEGMENT_BYTES, " " * 5_000 + "q"]
LONG += ["ab" * 2_048 + " " + "cd" * 3_000, "é" * 2_047 + "a b", "word " * 819 + "é word", "é. " * 3_000]


def texts_of(values: list[str]) -> pa.LargeStringArray:
    return pa.array(values, pa.large_string())


def test_words_are_what_the_definition_says() -> None:
    assert normalized_words("Don't STOP: 3.14 km², naïve_x—Ünï") == [
        "don",
        "t",
        "stop",
        "3",
        "14",
        "km²",
        "naïve_x",
        "ünï",
    ]
    assert normalized_words("e\u0301a") == ["éa"] == normalized_words("É" + "A")
    assert normalized_words("ΟΔΟΣ οδος οδοσ") == ["οδοσ"] * 3
    assert normalized_words("İstanbul 1 ١") == ["istanbul", "1", "١"]


@settings(deadline=None)
@given(st.text(max_size=80))
def test_words_are_python_s_but_for_what_the_docstring_excepts(text: str) -> None:
    plain = unicodedata.normalize("NFC", text).replace("İ", "i").lower().replace("ς", "σ")
    assert normalized_words(text) == re.findall(r"\w+", plain)


@settings(deadline=None)
@given(TEXTS)
@example(["e\u0301", "plain", "ascii only, but long enough", "\u1112\u1161\u11ab"])
def test_composing_gives_form_c_and_leaves_the_rest_alone(texts: list[str]) -> None:
    assert composed(texts_of(texts)).to_pylist() == [unicodedata.normalize("NFC", text) for text in texts]
    done = texts_of([unicodedata.normalize("NFC", text) for text in texts])
    assert composed(done) is done


def test_every_pair_that_form_c_makes_one_is_found() -> None:
    """All characters alone; each that leads a pair before each that ends one, with a mark between or not."""
    every = [chr(code) for code in range(0x40000) if not 0xD800 <= code < 0xE000]
    pairs = [unicodedata.decomposition(character).split() for character in every]
    pairs = [pair for pair in pairs if len(pair) == 2 and not pair[0].startswith("<")]
    leading, joining = ({chr(int(pair[end], 16)) for pair in pairs} for end in (0, 1))
    leading, joining = leading | set("\u1100\uac00\uac01"), joining | set("\u1161\u11a8")
    texts = every + [one + other for one in sorted(leading) for other in sorted(joining)]
    texts += [f"{one}\u0327{other}" for one in sorted(leading)[::9] for other in sorted(joining)]
    assert composed(texts_of(texts)).to_pylist() == [unicodedata.normalize("NFC", text) for text in texts]


@settings(deadline=None)
@given(TEXTS, st.sampled_from(["words", "characters", "auto"]), st.integers(1, 7))
def test_shingles_are_those_of_plain_python(texts: list[str], unit: str, ngram: int) -> None:
    check_shingles(texts, MinHashConfig.model_validate({"unit": unit, "ngram": ngram}))


@pytest.mark.parametrize("unit", ["words", "characters", "auto"])
def test_shingles_of_long_texts_do_not_depend_on_segments(unit: str) -> None:
    check_shingles(LONG, MinHashConfig.model_validate({"unit": unit}))
    shifted = [" " * shift + "é" + "ab cd " * 700 + "ef字 " * 700 for shift in (0, 1, 7, 63, 64)]
    check_shingles(shifted, MinHashConfig.model_validate({"unit": unit}))


def test_words_of_any_length_and_with_any_character_are_those_of_plain_python() -> None:
    lengths = ["A" * length for length in range(1, 70)]
    texts = [" ".join(lengths), " ".join(f"{word}é’{word}" for word in lengths)]
    every = [chr(code) for code in range(0x400, 0x40000) if chr(code).lower() != chr(code)]
    texts += [" ".join(f"{one}b ab{one}cd" for one in every), " ".join(map(chr, range(0x80, 0x3000)))]
    check_shingles(texts, MinHashConfig.model_validate({"unit": "words", "ngram": 1}))


def test_tables_of_characters_are_those_of_str_for_every_code_point() -> None:
    flags, lower = character_tables()
    for code in range(0x110000):
        character = chr(code)
        low = "i" if code == 0x130 else "σ" if character == "ς" else character.lower()
        assert chr(lower[code]) == low, hex(code)
        assert bool(flags[code] & WORD) == (character.isalnum() or character == "_"), hex(code)
    assert combining_classes().tolist() == [unicodedata.combining(chr(code)) for code in range(0x110000)]


def check_shingles(texts: list[str], config: MinHashConfig) -> None:
    array = texts_of(["before", *texts])[1:]  # a slice begins in the middle of its buffer
    hashes, offsets = shingle_batch(array, config)
    for number, text in enumerate(texts):
        got = hashes[offsets[number] : offsets[number + 1]].tolist()
        assert got == reference_shingle_hashes(text, config)


def test_equal_hashes_mean_equal_shingles() -> None:
    texts = [f"w{a} w{b} some words w{a * b}" for a in range(60) for b in range(60)]
    for unit in ("words", "characters", "auto"):
        config = MinHashConfig.model_validate({"unit": unit, "ngram": 3})
        hashes, _ = shingle_batch(texts_of(texts), config)
        assert len(np.unique(hashes)) == len(set().union(*(reference_shingles(t, config) for t in texts)))


@settings(deadline=None)
@given(TEXTS, st.sampled_from(["words", "characters", "auto"]))
def test_signatures_keys_and_bands_are_those_of_plain_python(texts: list[str], unit: str) -> None:
    config = MinHashConfig.model_validate({"unit": unit, "ngram": 2, "permutations": 24, "seed": 5})
    signed = sign_batch(texts_of(texts), config)
    keys = band_keys(signed.values, 6, 4)
    apart = band_keys(signed.values, 6, 4, np.arange(len(texts), dtype=np.int32))
    for number, text in enumerate(texts):
        assert signed.shingles[number] == len(reference_shingle_hashes(text, config))
        assert bytes(signed.keys[number]) == reference_key(text, config)
        signature = reference_signature(text, config)
        if not signature:
            assert (signed.values[number] == 0xFFFFFFFF).all()
            continue
        assert signed.values[number].tolist() == signature
        assert keys[number].tolist() == reference_band_keys(signature, 6, 4)
        assert apart[number].tolist() == reference_band_keys(signature, 6, 4, number)


def test_word_keys_are_equal_where_words_are() -> None:
    texts = [
        "One, two; THREE",
        "one two three",
        "one two thre e",
        "two one three",
        "!!!",
        "",
        "one two three one",
    ]
    keys, some = word_keys(texts_of(texts))
    assert some.tolist() == [True, True, True, True, False, False, True]
    assert len({bytes(key) for key in keys}) == 5
    assert bytes(keys[0]) == bytes(keys[1])


@pytest.mark.parametrize("similarity", [0.3, 0.5, 0.8])
def test_signatures_agree_as_often_as_sets_do(similarity: float) -> None:
    """Within four standard errors over 200 pairs: no structure of the hash functions shows."""
    rng = np.random.default_rng(int(similarity * 100))
    shared = round(200 * 2 * similarity / (1 + similarity))
    config = MinHashConfig(ngram=1)
    agreed = []
    for _ in range(200):
        words = rng.choice(10**6, 400 - shared, replace=False)
        first, second = words[:200], words[200 - shared :]
        pair = [" ".join(f"w{word}" for word in chosen) for chosen in (first, second)]
        values = sign_batch(texts_of(pair), config).values
        agreed.append(float((values[0] == values[1]).mean()))
    exact = shared / (400 - shared)
    assert abs(float(np.mean(agreed)) - exact) < 4 * float(np.sqrt(exact * (1 - exact) / 112 / 200))


def test_every_unit_is_separate_from_its_neighbours() -> None:
    assert text_units("a b", "characters") == ["a", " ", "b"]
    assert text_units("  a--b  ", "characters") == ["a", " ", "b"]


def test_each_character_of_a_script_without_spaces_is_a_word_of_its_own() -> None:
    text = "In 2024 \u6771\u4eac\u30bf\u30ef\u30fc \u0e17\u0e35\u0e48 x\u6771y caf\u00e9 \uc548\ub155"
    japanese, korean = [*"\u6771\u4eac\u30bf\u30ef\u30fc"], "\uc548\ub155"
    expected = ["in", "2024", *japanese, "\u0e17", "x", "\u6771", "y", "caf\u00e9", korean]
    assert text_units(text, "auto") == expected
    assert text_units("No such character.", "auto") == text_units("No such character.", "words")


def test_a_chinese_text_with_a_few_other_characters_is_alike_by_auto_and_not_by_words() -> None:
    draw = random.Random(3)
    clauses = ["".join(chr(draw.randrange(0x4E00, 0x9000)) for _ in range(14)) for _ in range(40)]
    other = [clause[:-1] + "\u9f9f" if number % 5 == 0 else clause for number, clause in enumerate(clauses)]
    texts = ["\uff0c".join(clauses), "\uff0c".join(other)]

    def similarity(unit: str) -> float:
        config = MinHashConfig.model_validate({"unit": unit})
        one, two = (reference_shingles(text, config) for text in texts)
        return len(one & two) / len(one | two)

    assert similarity("words") < 0.05
    assert similarity("auto") > 0.8
