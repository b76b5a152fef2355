"""KenLM models of every type are read from their files and give texts the probabilities that KenLM gives."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.kenlm import Arpa, parse_arpa, reference_murmur, reference_text
from shardkit.errors import RecipeError
from shardkit.kernels.numba_support import UInt64s, kernel
from shardkit.writers.filters.perplexity import PerplexityConfig, load_model
from shardkit.writers.kernels.kenlm_lines import UNKNOWN, UNKNOWN_TOO
from shardkit.writers.kernels.kenlm_tables import hash_of, reciprocal_64, remainder_64
from shardkit.writers.kernels.words import normalized_words
from support.filter_runs import judge, text_batch, values
from support.small_models import ARPA, random_arpa

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "kenlm"
KENLM = json.loads((GOLDEN / "scores.json").read_text(encoding="utf-8"))
SENTENCES: list[str] = KENLM["sentences"]
SCORES: dict[str, list[float]] = KENLM["scores"]


def scores(path: Path, texts: list[str], *, normalized: bool = False) -> list[tuple[float, int]]:
    batch = text_batch(texts)
    totals, lengths = load_model(path, normalized=normalized).scores(batch.data, batch.offsets, batch.wanted)
    return list(zip(totals.tolist(), lengths.tolist(), strict=True))


def test_every_golden_file_has_scores() -> None:
    files = {path.name for path in GOLDEN.iterdir() if path.suffix not in (".py", ".json") and path.is_file()}
    assert files == SCORES.keys()
    assert sum(path.stat().st_size for path in GOLDEN.iterdir() if path.is_file()) < 200_000


@pytest.mark.parametrize("name", SCORES)
def test_scores_have_the_bits_of_kenlms(name: str) -> None:
    expected = [*zip(SCORES[name], (len(one.split()) + 1 for one in SENTENCES), strict=True)]
    assert scores(GOLDEN / name, SENTENCES) == expected
    together = scores(GOLDEN / name, ["\n".join(SENTENCES), "", "\n \r\n"])
    total = 0.0
    for score, _ in expected:
        total += score
    assert together == [(total, sum(length for _, length in expected)), (0, 0), (0, 0)]


@pytest.mark.parametrize("name", SCORES)
def test_scores_are_those_of_the_package_kenlm(name: str) -> None:
    kenlm = pytest.importorskip("kenlm", reason="it is built from source: pip install kenlm")
    model = kenlm.Model(str(GOLDEN / name))
    rng = random.Random(name)
    words = [*" ".join(SENTENCES).split(), "nobody", "x" * 40]
    sentences = [" ".join(rng.choices(words, k=rng.randint(1, 70))) for _ in range(300)]
    assert [score for score, _ in scores(GOLDEN / name, sentences)] == [model.score(s) for s in sentences]


@pytest.mark.parametrize("name", [name for name in SCORES if name.endswith(".arpa")])
def test_scores_are_those_of_the_plain_reference(name: str) -> None:
    arpa = parse_arpa((GOLDEN / name).read_text())
    for sentence, (found, _) in zip(SENTENCES, scores(GOLDEN / name, SENTENCES), strict=True):
        # Words are looked up as they are: <s> inside of a sentence is the word <s>.
        assert found == pytest.approx(reference_text(arpa, [sentence.split()])[0], abs=1e-4), sentence


@pytest.fixture(scope="module", params=[2, 3, 4, 5, 6])
def random_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Arpa]:
    path = tmp_path_factory.mktemp("arpa") / "model.arpa"
    text = random_arpa(request.param, seed=request.param)
    path.write_text(text)
    return path, parse_arpa(text)


PARTS = st.one_of(
    st.sampled_from(
        ["w0", "w1", "W2", "größe", "Größe", "e\u0301tude", "\u0130x", "\u212a", "w3", "w4", "中文"]
    ),
    st.sampled_from(["x" * 31, "é" * 5000, "𝄞", "<s>", "\u023a" * 9]),
    st.text(max_size=6),
)
GAPS = st.sampled_from([" ", "\n", "\r\n", "\u2028", "\u3000", "\0", "", "\t", "\x1c"])
TEXTS = st.lists(st.lists(st.tuples(PARTS, GAPS), max_size=30), max_size=4)


@settings(max_examples=30, deadline=None)
@given(TEXTS)
def test_words_and_sentences_are_those_of_plain_python(
    random_model: tuple[Path, Arpa], parts: list[list[tuple[str, str]]]
) -> None:
    path, arpa = random_model
    texts = ["w0 w1 w0\nw1", *("".join(a + b for a, b in text) for text in parts)]
    for words, setting in ((normalized_words, "normalized"), (str.split, "white_space")):
        config = PerplexityConfig.model_validate({"model": path.name, "words": setting})
        found = values(judge(config, text_batch(texts), path.parent)[0])
        for value, text in zip(found, texts, strict=True):
            sentences = [split for line in text.splitlines() if (split := words(line))]
            total, length = reference_text(arpa, sentences)
            expected = 10 ** min(-total / length, 300) if length else 0
            assert value == pytest.approx(expected, rel=1e-4), (setting, text)


def test_documents_that_are_not_wanted_are_not_scored() -> None:
    batch = text_batch([*SENTENCES, *SENTENCES])
    wanted = np.arange(len(batch)) % 2 == 1
    scorer = load_model(GOLDEN / "3.probing", normalized=True)
    totals, lengths = scorer.scores(batch.data, batch.offsets, wanted)
    every, _ = scorer.scores(batch.data, batch.offsets, batch.wanted)
    assert (totals[wanted] == every[wanted]).all()
    assert not totals[~wanted].any()
    assert not lengths[~wanted].any()


@pytest.mark.parametrize("name", ["3.probing", "3.trie"])
def test_a_long_sentence_is_scored_as_a_whole(name: str) -> None:
    words = SENTENCES[1].split() * 40  # several segments of the kernel, which carry the context on
    pieces = [scores(GOLDEN / name, [" ".join(words[:count])])[0][0] for count in range(1, 120)]
    reference = parse_arpa((GOLDEN / "3.arpa").read_text())
    expected = [reference_text(reference, [words[:count]])[0] for count in range(1, 120)]
    assert pieces == pytest.approx(expected, abs=1e-3)


@given(st.binary(max_size=40))
def test_words_are_hashed_as_kenlm_hashes_them(word: bytes) -> None:
    assert hash_of(word) == reference_murmur(word)


def test_the_hashes_of_the_unknown_word_are_constants() -> None:
    assert (hash_of(b"<unk>"), hash_of(b"<UNK>")) == (UNKNOWN, UNKNOWN_TOO)


@kernel
def remainders(numbers: UInt64s, divisor: int, reciprocal: np.uint64, out: UInt64s) -> None:
    for i in range(len(numbers)):
        out[i] = remainder_64(numbers[i], divisor, reciprocal)


@settings(deadline=None)
@given(st.integers(2, 1 << 40), st.lists(st.integers(0, (1 << 64) - 1), max_size=20))
def test_buckets_are_hashes_modulo_their_number(buckets: int, hashes: list[int]) -> None:
    multiples = [k * buckets + d for k in (0, 1, ((1 << 64) - 1) // buckets) for d in (-1, 0, 1)]
    numbers = np.array([v for v in [*hashes, *multiples] if 0 <= v < 1 << 64], np.uint64)
    found = np.zeros_like(numbers)
    remainders(numbers, buckets, np.uint64(reciprocal_64(buckets)), found)
    assert (found == numbers % np.uint64(buckets)).all()


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress, zstandard.compress])
def test_an_arpa_file_may_be_compressed(compress: Callable[[bytes], bytes], tmp_path: Path) -> None:
    data = (GOLDEN / "4.arpa").read_bytes()
    (tmp_path / "model.arpa").write_bytes(compress(data[:5000]) + compress(data[5000:]))
    assert scores(tmp_path / "model.arpa", SENTENCES) == scores(GOLDEN / "4.arpa", SENTENCES)
    for damaged in (compress(data)[:-20], compress(data)[:300] + b"x" * 300):
        (tmp_path / "damaged.arpa").write_bytes(damaged)
        with pytest.raises(RecipeError, match=r"damaged\.arpa"):
            load_model(tmp_path / "damaged.arpa", normalized=True)


def test_lines_and_numbers_of_arpa_files_may_be_written_in_other_ways(tmp_path: Path) -> None:
    plain = scores_of(ARPA, tmp_path)
    head = "# made by hand\n\n" + ARPA.replace("\n", "\r\n")
    assert scores_of(head, tmp_path) == plain
    assert scores_of(ARPA.replace("-0.125\t", "-1.25e-1 ").replace("\t-0.25", "  -.25 "), tmp_path) == plain
    assert scores_of(ARPA.replace("-0.75", "-750000000000000000000000000000e-30"), tmp_path) == plain
    assert scores_of(ARPA.rstrip("\n"), tmp_path) == plain
    impossible = scores_of(
        ARPA.replace("-1.5\tcat", "-inf\tcat").replace("-0.75\tthe cat", "-inf\tthe cat"), tmp_path
    )
    assert impossible[0][0] == -np.inf


def scores_of(arpa: str, folder: Path) -> list[tuple[float, int]]:
    (folder / "model.arpa").write_bytes(arpa.encode())
    return scores(folder / "model.arpa", ["the cat", "zebra the\ncat"])


WRONG_ARPA: dict[str, tuple[str, str, str]] = {
    "no data": ("\\data\\", "\\date\\", r"it begins with '\\\\date\\\\'"),
    "counts in another order": ("ngram 2=2", "ngram 3=2", r"line 3 is 'ngram 3=2' where 'ngram 2=\.\.\.'"),
    "only unigrams": ("ngram 2=2\n", "", "its order is 1"),
    "too few": ("ngram 1=5", "ngram 1=6", "line 11 is '': there are fewer n-grams than"),
    "too many": ("ngram 1=5", "ngram 1=4", r"line 10 is .*cat' where \\2-grams:"),
    "huge counts": ("ngram 2=2", "ngram 2=999999999999999999", "fewer n-grams than"),
    "no number": ("-1.0\t", "-1.x\t", r"line 8 is '-1\.x\\t</s>': its probability is not a number"),
    "positive": ("-1.0\t", "1.0\t", "line 8 is .*greater than 1"),
    "no word": ("-1.0\t</s>", "-1.0", "line 8 is .*too few words"),
    "backoff": ("the\t-0.25", "the\tnan", "line 9 .*its backoff"),
    "something else": ("the\t-0.25", "the\t-0.25 7", "line 9 .*text after its backoff"),
    "unknown word": ("the cat", "the dog", r"line 14 .*one of its words is not a unigram"),
    "no sentences": ("<s>\t-0.5", "<t>\t-0.5", "it lacks <s>"),
    "no end": ("\\end\\", "", r"it ends where \\end\\"),
    "a long line": ("# x", "#" * (9 << 20), "line 1 has more than"),
}


@pytest.mark.parametrize("name", WRONG_ARPA)
def test_what_is_wrong_in_an_arpa_file_is_said_with_its_line(name: str, tmp_path: Path) -> None:
    before, after, problem = WRONG_ARPA[name]
    arpa = "# x\n" * (before == "# x") + ARPA
    assert before in arpa
    (tmp_path / "model.arpa").write_text(arpa.replace(before, after))
    with pytest.raises(RecipeError, match=problem) as caught:
        load_model(tmp_path / "model.arpa", normalized=True)
    assert str(tmp_path / "model.arpa") in str(caught.value)


def test_an_ngram_without_its_context_is_refused(tmp_path: Path) -> None:
    lines = (GOLDEN / "3.arpa").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.count(" ") == 2 and "\t<s> " in line)
    context = " ".join(lines[first].split("\t")[1].split(" ")[:2])
    at = next(i for i, line in enumerate(lines) if line.split("\t")[1:2] == [context])
    count = next(i for i, line in enumerate(lines) if line.startswith("ngram 2="))
    lines[count] = f"ngram 2={int(lines[count][8:]) - 1}"
    del lines[at]
    (tmp_path / "model.arpa").write_text("\n".join(lines) + "\n")
    message = f"line {first:,}: the first 2 words of this 3-gram are not listed among the model's 2-grams"
    with pytest.raises(RecipeError, match=message):
        load_model(tmp_path / "model.arpa", normalized=True)


def patched(name: str, at: int, layout: str, *numbers: Any) -> bytes:
    data = bytearray((GOLDEN / name).read_bytes())
    struct.pack_into(layout, data, at, *numbers)
    return bytes(data)


HEADER = 88  # where the order and other facts are, of models of 19 words and three orders
WORDS = HEADER + 48  # where the vocabulary is, and behind it a trie's unigrams or quantizer
UNIGRAMS = QUANTIZER = WORDS + 8 * 20
WRONG_BINARY: dict[str, tuple[bytes, str]] = {
    "another version": (
        (GOLDEN / "3.trie").read_bytes().replace(b"version 5", b"version 4"),
        "'format version 4' instead of 'format version 5'; build it again",
    ),
    "unfinished": (b"mmap lm http://kheafield.com/code incomplete\n" + bytes(900), "did not finish"),
    "only a header": ((GOLDEN / "3.trie").read_bytes()[:100], "it has 100 bytes"),
    "cut": ((GOLDEN / "3.probing").read_bytes()[:5000], "its tables need"),
    "another machine": (patched("3.trie", 56, "<f", 2.0), "a processor with another number format"),
    "order": (patched("3.trie", HEADER, "<B", 1), "its order is 1"),
    "multiplier": (patched("3.probing", HEADER + 4, "<f", float("nan")), "buckets for each n-gram"),
    "endless multiplier": (patched("3.probing", HEADER + 4, "<f", float("inf")), "buckets for each n-gram"),
    "type": (patched("3.trie", HEADER + 8, "<I", 6), "its type is 6, not one of probing, "),
    "another type": (patched("3.trie", HEADER + 8, "<I", 0), "a probing model of version 1"),
    "counts": (patched("3.trie", HEADER + 20, "<Q", 1 << 63), "cannot hold"),
    "no words": (patched("3.trie", HEADER + 20, "<Q", 0), "cannot hold"),
    "fewer words": (patched("3.trie", HEADER + 20, "<Q", 18), "unigrams; it is damaged|should begin at"),
    "quantizer": (patched("3.trie-q", QUANTIZER, "<B", 7), "its quantizer has version 7"),
    "compressed": (gzip.compress((GOLDEN / "3.trie").read_bytes()), "decompress it"),
}


@pytest.mark.parametrize("name", WRONG_BINARY)
def test_binary_files_that_are_damaged_are_refused(name: str, tmp_path: Path) -> None:
    data, problem = WRONG_BINARY[name]
    (tmp_path / "model.bin").write_bytes(data)
    with pytest.raises(RecipeError, match=problem) as caught:
        load_model(tmp_path / "model.bin", normalized=True)
    assert str(tmp_path / "model.bin") in str(caught.value)


def test_tables_that_point_outside_of_the_file_are_refused_when_they_are_used(tmp_path: Path) -> None:
    trie = patched("3.trie", UNIGRAMS, "<" + "ffQ" * 19, *(-1.0, -1.0, 1 << 50) * 19)
    words = WORDS + 8
    full = bytearray((GOLDEN / "3.probing").read_bytes())
    for at in range(words, words + 12 * 28, 12):
        struct.pack_into("<QI", full, at, at, 1 << 30)
    for data, problem in ((trie, "table of 1-grams"), (bytes(full), "its vocabulary points")):
        (tmp_path / "model.bin").write_bytes(data)
        with pytest.raises(RecipeError, match=problem):
            scores(tmp_path / "model.bin", SENTENCES)
