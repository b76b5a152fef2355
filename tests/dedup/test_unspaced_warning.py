"""Near-duplicates of texts without spaces are not missed without a word."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from shardkit.writers import build

pytestmark = pytest.mark.usefixtures("inline_builds")

HAN = "".join(chr(0x4E00 + i * 7919 % 5000) for i in range(2000))
SENTENCES = "，".join(HAN[at : at + 11] for at in range(0, 2000, 11))
KANA = "".join(chr(0x3042 + i * 31 % 80) for i in range(2000))
THAI = "".join(chr(0x0E01 + i * 17 % 40) for i in range(2000))
ENGLISH = " ".join(f"word{i}" for i in range(400))


def build_near(folder: Path, text: str, near: object, others: int = 0) -> tuple[int, str]:
    """(documents that stay of five that differ in one character, what is said)."""
    texts = [text[: i * 10] + chr(0x5E00 + i) + text[i * 10 + 1 :] for i in range(5)]
    texts += [f"{n} " + " ".join(f"w{n * 50 + i}" for i in range(50)) for n in range(others)]
    lines = "".join(json.dumps({"text": one}) + "\n" for one in texts)
    (folder / "a.jsonl").write_text(lines)
    recipe = {"inputs": str(folder / "a.jsonl"), "dedup": {"near": near}}
    recipe |= {"output": {"path": str(folder / "out"), "format": "jsonl"}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build(recipe, workers=1, progress=False)
    parts = (folder / "out").glob("text-*.jsonl")
    left = sum(len(part.read_text().splitlines()) for part in parts)
    return left, "\n".join(str(one.message) for one in caught)


@pytest.mark.parametrize("text", [HAN, SENTENCES, KANA, THAI], ids=["han", "sentences", "kana", "thai"])
def test_texts_without_spaces_are_named_with_the_key_that_finds_their_near_duplicates(
    text: str, tmp_path: Path
) -> None:
    _, said = build_near(tmp_path, text, 0.8)
    assert "dedup.near: 5 of 5 documents are written without spaces" in said
    assert "dedup.near.minhash.unit: auto" in said
    (tmp_path / "auto").mkdir()
    left, said = build_near(tmp_path / "auto", text, {"minhash": {"unit": "auto"}})
    assert said == ""
    assert left == 1 or text in (KANA, THAI), "these have few distinct n-grams"


@pytest.mark.parametrize(
    "text",
    [
        ENGLISH,
        "x" * 3000,
        "Рыба и рак " * 200,
        "한국어는 띄어쓰기가 있다 " * 99,
        "https://a.test/" + "b/" * 999,
    ],
)
def test_other_texts_bring_no_word_about_spaces(text: str, tmp_path: Path) -> None:
    assert "spaces" not in build_near(tmp_path, text, 0.8)[1]


def test_a_few_texts_without_spaces_among_many_bring_no_word(tmp_path: Path) -> None:
    assert "spaces" not in build_near(tmp_path, HAN, 0.8, others=600)[1]
