"""Language models that are trained here are those that KenLM's lmplz makes of the same text."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.kenlm import log10_of, parse_arpa
from shardkit.errors import BuildError
from shardkit.writers.filters.perplexity import PerplexityConfig
from shardkit.writers.train_perplexity import train_perplexity
from support.filter_runs import judge, text_batch, values

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "kenlm"
LINES: list[str] = runpy.run_path(str(GOLDEN / "make.py"))["training_lines"]()


@pytest.mark.parametrize("order", [2, 3, 4, 5])
def test_ngrams_and_probabilities_are_those_of_lmplz(order: int, tmp_path: Path) -> None:
    done = train_perplexity(LINES, tmp_path / "model.arpa", order=order, words="white_space")
    made = parse_arpa((tmp_path / "model.arpa").read_text()).ngrams
    golden = parse_arpa((GOLDEN / f"{order}.arpa").read_text()).ngrams
    assert made.keys() == golden.keys()
    for ngram, expected in golden.items():
        assert made[ngram] == pytest.approx(expected, abs=1e-5), ngram
    assert (done.sentences, done.words) == (len(LINES), len(" ".join(LINES).split()))
    assert sum(done.ngrams) == len(golden)
    assert done.bytes == (tmp_path / "model.arpa").stat().st_size
    assert bool(done.fallback) == (order > 2)  # as of lmplz with --discount_fallback: so small is the text


WORDS = st.sampled_from(["a", "b", "c", "D", "<s>", "<unk>", "é"])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(WORDS, max_size=8).map(" ".join), min_size=1, max_size=12), st.integers(2, 4))
def test_probabilities_of_all_words_after_a_context_are_one(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], order: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "summed.arpa"
    train_perplexity(["a b c b", *lines], path, order=order, words="white_space")
    arpa = parse_arpa(path.read_text())
    words = [ngram[0] for ngram in arpa.ngrams if len(ngram) == 1 and ngram != ("<s>",)]
    contexts = [(), ("a",), ("b", "a"), ("<s>", "a", "b"), ("c",) * 3]
    contexts += [ngram for ngram in arpa.ngrams if len(ngram) < order and ngram[-1] != "</s>"]
    for context in contexts:
        assert sum(10 ** log10_of(arpa, (*context, word)) for word in words) == pytest.approx(1, abs=1e-5)


def test_the_filter_judges_with_a_model_that_was_trained_here(tmp_path: Path) -> None:
    train_perplexity(
        ["The cat sat; the cat ran.\nThe dog sat!", "x" * 2000], tmp_path / "model.arpa", order=3
    )
    texts = ["the cat sat", "sat cat the", "quantum entanglement", ""]
    found = values(judge(PerplexityConfig(model="model.arpa"), text_batch(texts), tmp_path)[0])
    assert 1 < found[0] < found[1] < found[2]
    assert found[3] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["model.arpa"]


def test_orders_that_no_sentence_reaches_are_empty(tmp_path: Path) -> None:
    done = train_perplexity(["a\nb"], tmp_path / "model.arpa", order=5)
    assert done.ngrams == (5, 4, 2, 0, 0)
    [found] = values(judge(PerplexityConfig(model="model.arpa"), text_batch(["a"]), tmp_path)[0])
    assert found > 1


def test_texts_without_words_and_orders_without_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"model\.arpa: the texts have no word"):
        train_perplexity(["", "...\n"], tmp_path / "model.arpa")
    with pytest.raises(ValueError, match="order is 1"):
        train_perplexity(["a"], tmp_path / "model.arpa", order=1)
    assert not list(tmp_path.iterdir())
