"""Fill-in-the-middle: documents come back from their parts, in the shares and orders that were asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from shardkit.errors import RecipeError
from shardkit.writers import build
from shardkit.writers.recipe.inputs import FimConfig
from shardkit.writers.tokens.fim import cut_documents, ordered, original
from support.small_build import EOS, train_bpe

TOKENS = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>")
TEXTS = [
    f"def f{n}(x):\n    # 你好 <fim_middle> {'é' * (n % 5)}\n    return x + {n}\n" + "pass\n" * (n % 9)
    for n in range(300)
]


@settings(max_examples=300, deadline=None)
@given(st.text(), st.lists(st.integers(0, (1 << 63) - 1), min_size=2, max_size=2))
def test_a_cut_text_is_its_parts(text: str, places: list[int]) -> None:
    prefix, middle, suffix = ordered(text, np.array([1, *places]))
    assert prefix + middle + suffix == text
    assert original((prefix, suffix, middle)) == text
    assert original(("", suffix, prefix + middle)) == text


def test_every_place_is_as_likely_and_the_shares_are_those_asked_for() -> None:
    ids = [n.to_bytes(16, "big") for n in range(40_000)]
    cuts = cut_documents(ids, 7, FimConfig(rate=0.3, spm_rate=0.25))
    counts = np.bincount(cuts[:, 0], minlength=3) / len(ids)
    assert np.allclose(counts, [0.7, 0.3 * 0.75, 0.3 * 0.25], atol=0.01)
    places = np.bincount([len(ordered("abc", cut)[0]) for cut in cuts[cuts[:, 0] > 0]], minlength=4)
    # The first of two places among 0, 1, 2, 3, uniform and independent: 7, 5, 3, 1 in 16.
    assert np.allclose(places / places.sum(), np.array([7, 5, 3, 1]) / 16, atol=0.02)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("fim")
    train_bpe(TEXTS, vocabulary=400, special=(EOS, *TOKENS)).save(str(made / "tokenizer.json"))
    (made / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return made


def recipe_of(folder: Path, place: Path, fim: Any) -> dict[str, Any]:
    return {
        "inputs": [{"path": str(folder / "a.jsonl"), "fim": fim}],
        "tokenizer": {"path": str(folder / "tokenizer.json"), "eos": EOS},
        "output": {"path": str(place / "out"), "format": "tokens"},
    }


def test_every_document_of_a_build_is_recovered_from_its_tokens(
    folder: Path, tmp_path: Path, inline_builds: None
) -> None:
    made = build(recipe_of(folder, tmp_path, {"rate": 0.6}), workers=1, progress=False)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.decoder = decoders.ByteLevel()
    special = [tokenizer.token_to_id(token) for token in TOKENS]
    eos = tokenizer.token_to_id(EOS)
    found, orders = [], {"plain": 0, "psm": 0, "spm": 0}
    for sample in made.open():
        ids = np.asarray(sample["tokens"]).tolist()
        assert ids.pop() == eos
        at = [ids.index(token) if token in ids else -1 for token in special]
        if at == [-1, -1, -1]:
            orders["plain"] += 1
            found.append(tokenizer.decode(ids, skip_special_tokens=False))
            continue
        assert at[0] == 0
        assert sum(ids.count(token) for token in special) == 3, "text that spells a token stays text"
        prefix, middle, suffix = at
        assert prefix < suffix < middle
        orders["spm" if suffix == 1 else "psm"] += 1
        cut = (ids[1:suffix], ids[suffix + 1 : middle], ids[middle + 1 :])
        parts = [tokenizer.decode(part, skip_special_tokens=False) for part in cut]
        found.append(original((parts[0], parts[1], parts[2])))
    assert sorted(found) == sorted(TEXTS)
    assert min(orders.values()) > 40, orders


@pytest.mark.extended
def test_a_build_is_the_same_for_any_workers_and_a_share_of_nothing_is_no_change(
    folder: Path, tmp_path: Path
) -> None:
    fingerprints = set()
    for workers in (1, 2):
        place = tmp_path / str(workers)
        fingerprints.add(build(recipe_of(folder, place, True), workers=workers, progress=False).fingerprint)
    assert len(fingerprints) == 1
    never = build(recipe_of(folder, tmp_path / "never", 0.0), workers=1, progress=False)
    plain = build(recipe_of(folder, tmp_path / "plain", None), workers=1, progress=False)
    assert never.fingerprint == plain.fingerprint


def test_tokens_that_the_tokenizer_lacks_are_named(folder: Path, tmp_path: Path, inline_builds: None) -> None:
    with pytest.raises(RecipeError, match=r"inputs\[0\].fim: .* has no special token '<PRE>'; its special"):
        build(recipe_of(folder, tmp_path, {"prefix": "<PRE>"}), workers=1, progress=False)
