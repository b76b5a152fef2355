"""Tokenizers of the published families: shardkit's ids are those of the library that each is made for.

No published file may be downloaded, so each family's trainer makes a small one with the published settings.
"""

from __future__ import annotations

import base64
import importlib
import io
import json
import os
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tiktoken
import tokenizers
import zstandard
from tokenizers import models, pre_tokenizers, trainers

from shardkit.errors import RecipeError
from shardkit.formats.tokenizer_file import ENCODINGS, Encoding, find_tokenizer, own_engine
from shardkit.tokens.parity import check_parity, unlike_characters
from shardkit.tokens.tokenizer import Encoder, load_encoder
from shardkit.writers import build
from support.small_build import make_corpus

SAYINGS = (
    "The quick brown fox, it's said, jumps over 12,345 lazy dogs; they'LL never WE'VE known.",
    "  def add(a, b):\n      return a + b  # \u00fcber\n\n\n",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u3053\u3093",
    "42 \u0645\u0631\u062d\u0628\u0627 \U0001f469\u200d\U0001f467",
    "na\u00efve fa\u00e7ade e\u0301 \u1e9b\u0323 \ufb01 \u00bd \u2028\u0085\u00a0x\t\ty",
    "<s> spelled </s> and <bos> <eos> <|endoftext|> <|begin_of_text|> <start_of_turn>",
    "a\u2581b \u2581\u2581 c" + " " * 40 + "d\r\n\r\n\r\n e" + "\n" * 9 + "  \n  ",
)
SENTENCEPIECE: dict[str, dict[str, Any]] = {
    "llama2": {"model_type": "bpe", "add_dummy_prefix": True},
    "mistral": {"model_type": "bpe", "add_dummy_prefix": True, "user_defined_symbols": ["[INST]", "[/INST]"]},
    "gemma": {
        "model_type": "bpe",
        "add_dummy_prefix": False,
        "pad_id": 0,
        "eos_id": 1,
        "bos_id": 2,
        "unk_id": 3,
        "pad_piece": "<pad>",
        "eos_piece": "<eos>",
        "bos_piece": "<bos>",
        "user_defined_symbols": ["<start_of_turn>", "\n\n", "\u2581\u2581", "\u2581\u2581\u2581", "<table>"],
    },
    "t5": {"model_type": "unigram", "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
}
_PUBLISHED = {
    "byte_fallback": True,
    "split_digits": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
}
ENDS = {
    "llama2": ("<s>", "</s>"),
    "mistral": ("<s>", "</s>"),
    "gemma": ("<bos>", "<eos>"),
    "t5": (None, "</s>"),
    "llama3": ("<|begin_of_text|>", "<|end_of_text|>"),
    "cl100k_base": (None, "<|endoftext|>"),
    "o200k_base": (None, "<|endoftext|>"),
    "r50k_base": (None, "<|endoftext|>"),
    "qwen": (None, "<|endoftext|>"),
}


@dataclass(frozen=True)
class Family:
    """A tokenizer file, and what its own library makes of a text, with bos and eos."""

    path: Path
    encoding: Encoding | None
    own: Callable[[str], list[int]]


def documents(count: int) -> Iterator[str]:
    """Texts of many kinds; of the test data if there are any."""
    if folder := os.environ.get("SHARDKIT_TEST_DATA"):
        for name in ("multilang-00.jsonl.zst", "junk-00.jsonl.zst"):
            with (Path(folder) / "corpus" / name).open("rb") as file:
                lines = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file), "utf-8")
                for _, line in zip(range(count // 2), lines, strict=False):
                    yield json.loads(line)["text"][:4096]
        return
    draw = random.Random(7)
    sources = [path.read_text() for path in sorted(Path(__file__).parents[1].rglob("test_*.py"))[:60]]
    for number in range(count):
        source = sources[number % len(sources)]
        start = draw.randrange(len(source))
        yield (
            source[start : start + draw.randrange(400)] + draw.choice(SAYINGS) + draw.choice(["", "\n", " "])
        )


@lru_cache(maxsize=1)
def training_texts() -> tuple[str, ...]:
    return tuple(documents(400))


def train_sentencepiece(folder: Path, family: str) -> Family:
    written = io.BytesIO()
    of_bpe: dict[str, Any] = {} if family == "t5" else _PUBLISHED
    lines = (line for text in training_texts() for line in text.split("\n") if line)
    settings: dict[str, Any] = {"vocab_size": 800, "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=written, **settings, **of_bpe, **SENTENCEPIECE[family]
    )
    path = folder / "tokenizer.model"
    path.write_bytes(written.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    has_bos = ENDS[family][0] is not None
    return Family(path, None, lambda text: list(processor.encode(text, add_bos=has_bos, add_eos=True)))


def byte_pairs(pattern: str, size: int) -> bytes:
    """The lines of a .tiktoken file."""
    trained = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(training_texts(), trainer)
    letters = {}
    for byte in range(256):  # an independent way to learn which letter stands for a byte
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
        hidden = [each for each in range(256) if each not in shown]
        letters[chr(byte) if byte in shown else chr(256 + hidden.index(byte))] = byte
    vocabulary = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(letters[letter] for letter in token) for token, _ in vocabulary]
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def train_tiktoken(folder: Path, family: str) -> Family:
    encoding = ENCODINGS[family]
    path = folder / f"{family}.tiktoken"
    path.write_bytes(byte_pairs(encoding.plain or encoding.pattern, 800))
    lines = path.read_bytes().split()
    ranks = {base64.b64decode(token): int(rank) for token, rank in zip(lines[::2], lines[1::2], strict=True)}
    special = {token: 800 * encoding.after_ranks + at for token, at in encoding.special}
    own = tiktoken.Encoding(family, pat_str=encoding.pattern, mergeable_ranks=ranks, special_tokens=special)
    bos, eos = ENDS[family]
    before = [] if bos is None else own.encode(bos, allowed_special="all")
    after = own.encode(eos, allowed_special="all")
    assert len(before) <= len(after) == 1
    return Family(path, encoding, lambda text: [*before, *own.encode(text, disallowed_special=()), *after])


def train(folder: Path, family: str) -> Family:
    return (train_sentencepiece if family in SENTENCEPIECE else train_tiktoken)(folder, family)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "family",
    [
        name if name in ("llama2", "gemma", "llama3") else pytest.param(name, marks=pytest.mark.extended)
        for name in ENDS
    ],
)
def test_ids_are_those_of_the_models_own_library_with_bos_and_eos(tmp_path: Path, family: str) -> None:
    made, (bos, eos) = train(tmp_path, family), ENDS[family]
    texts = [*SAYINGS, *documents(1000 if "SHARDKIT_TEST_DATA" in os.environ else 200)]
    own = Encoder(made.path, eos, bos=bos, encoding=made.encoding, engine=None)
    assert own.engine == ("sentencepiece" if family in SENTENCEPIECE else "tiktoken")
    encoders = [own]
    if family != "t5":  # gigatoken has no Unigram models
        fast = Encoder(made.path, eos, bos=bos, encoding=made.encoding)
        unlike = unlike_characters(fast, own)
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # of the engine below
            parity = check_parity([], made.path, eos, unlike, bos=bos, encoding=made.encoding)
        # gigatoken puts the dummy prefix also behind a user-defined symbol, which the probes find.
        assert parity.engine == ("sentencepiece" if family == "mistral" else "gigatoken")
        encoders.append(load_encoder(made.path, eos, parity.engine, unlike, bos, made.encoding))
        assert (fast.eos_id, fast.bos_id, fast.vocab_size) == (own.eos_id, own.bos_id, own.vocab_size)
    before = [] if bos is None else [own.bos_id]
    for encoder in encoders:
        ids, lengths = encoder.encode(texts)
        parts = np.split(ids, np.cumsum(lengths)[:-1])
        for text, part in zip(texts, parts, strict=True):
            assert [*before, *part.tolist(), own.eos_id] == made.own(text), (encoder.engine, text[:80])


@pytest.mark.parametrize(
    ("family", "engine"),
    [("llama2", "gigatoken"), pytest.param("t5", "sentencepiece", marks=pytest.mark.extended)],
)
def test_a_build_with_a_sentencepiece_model_traces_its_text(
    tmp_path: Path, family: str, engine: str, inline_builds: None
) -> None:
    recipe = make_corpus(tmp_path / "corpus", 60)
    made, (bos, eos) = train(tmp_path, family), ENDS[family]
    settings = [f"tokenizer.path={made.path}", f"tokenizer.eos={eos}", "output.format=tokens"]
    settings += [] if bos is None else [f"tokenizer.bos={bos}"]
    data = build(recipe, overrides=settings, workers=1, progress=False).open()
    text = build(recipe, overrides=["output.format=jsonl", "output.path=t"], workers=1, progress=False).open()
    assert data.card is not None
    assert data.card.data["tokenizer"]["engine"] == engine
    rows = sorted(np.asarray(row["tokens"]).tolist() for row in data)
    assert rows == sorted(made.own(str(row["text"])) for row in text)
    shown = {str(document.text).strip() for row in range(len(data)) for document in data.documents(row)}
    assert shown == {str(row["text"]).strip() for row in text}, "t5 drops spaces at the end"


@pytest.mark.extended
def test_a_build_with_byte_pairs_names_their_encoding(tmp_path: Path, inline_builds: None) -> None:
    recipe = make_corpus(tmp_path / "corpus", 60)
    pattern = r"\w+|\W+"
    (tmp_path / "mine.tiktoken").write_bytes(byte_pairs(pattern, 400))
    path = [f"tokenizer.path={tmp_path / 'mine.tiktoken'}", "tokenizer.eos=<|end|>"]
    with pytest.raises(RecipeError, match=r"tokenizer\.encoding: .* name their encoding \(r50k_base"):
        build(recipe, overrides=path, workers=1, progress=False)
    given = json.dumps({"pattern": pattern, "special_tokens": {"<|end|>": 400}})
    built = build(recipe, overrides=[*path, f"tokenizer.encoding={given}"], workers=1, progress=False)
    card = built.open().card
    assert card is not None
    assert card.data["tokenizer"]["engine"] == "tiktoken", "gigatoken does not know the pattern"
    assert card.recipe["tokenizer"]["encoding"]["pattern"] == pattern
    texts = [document.text for row in range(len(built.open())) for document in built.open().documents(row)]
    assert any("more words and more words" in str(text) for text in texts)


def test_the_published_encodings_are_those_of_tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    openai_public = importlib.import_module("tiktoken_ext.openai_public")

    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: {})
    for name in ("r50k_base", "p50k_base", "cl100k_base", "o200k_base"):
        published = getattr(openai_public, name)()
        assert dict(ENCODINGS[name].special) == published["special_tokens"]
        ranks = {bytes([byte]): byte for byte in range(256)}
        ours, theirs = (
            tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
            for pattern in (ENCODINGS[name].pattern, published["pat_str"])
        )
        assert ours._pat_str == theirs._pat_str


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            b"\x0a\xff\xff\xff\xff\xff\xff",
            "is not a known kind of tokenizer .*; give a tokenizer.json, SentencePiece model or tiktoken",
        ),
        (b"\x00\x01\x02" * 9, "is not a known kind of tokenizer|is not a SentencePiece model"),
        (b"YQ== 0\nYg== x\n", "is not a byte pair and a rank"),
        (b"YQ== 0\nYg== 1\n", "has no rank for byte 0x00"),
        (b"YQ== 0\nYg== 0\n", "is damaged: line 2: rank 0 or its byte pair occurs twice"),
        (b"YQ== 0\nYQ== 1\n", "is damaged: line 2: rank 1 or its byte pair occurs twice"),
        (b"YQ== 0\nYg== -1\n", "is damaged: line 2: rank -1 is out of range"),
        (b"YQ== 0\nYg== 4294967295\n", "is damaged: line 2: rank 4294967295 is out of range"),
        (b"YQ== 0\nYg== 1 1\n", "line 2 is not a byte pair and a rank"),
        (b"\x0a\x00", "is not a known kind of tokenizer .a piece has no name"),
        (b"\x0a\x02\x10\x01", "is not a known kind of tokenizer .field 2 is not of type bytes"),
        (b"\x0a\x06\x0a\x01a\x12\x01x", "is not a known kind of tokenizer .a piece's score"),
        (b"\x0a\x03\x0a\x01\xff", "is not a known kind of tokenizer .*utf-8"),
        (
            b"\x0a\x03\x0a\x01a\x12\x03\x1a\x01x",
            "is not a known kind of tokenizer .field 3 is not of type int",
        ),
        (
            b"\x0a\x03\x0a\x01a\x1a\x02\x10\x01",
            "is not a known kind of tokenizer .field 2 is not of type bytes",
        ),
        (b"\x0a\x03\x0a\x01a\x12\x03\xc0\x02\x05", "is not a SentencePiece model"),
        (b"\x0a" + b"\xff" * 100_000, "more than 64 bits"),
    ],
)
def test_a_damaged_file_is_refused_with_its_name(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "llama3.tiktoken"
    path.write_bytes(content)
    with pytest.raises(RecipeError, match=rf"llama3\.tiktoken.*({problem})"):
        Encoder(path, "<|end_of_text|>")


def test_folders_and_names_find_models_of_every_kind(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine.tiktoken").write_bytes(b"YQ== 0\n")
    assert find_tokenizer(tmp_path, "a").name == "mine.tiktoken"
    (tmp_path / "a" / "tokenizer.model").write_bytes(b"\x0a\x00")
    assert find_tokenizer(tmp_path, "a").name == "tokenizer.model"
    assert own_engine((tmp_path / "a" / "tokenizer.model").read_bytes()) == "sentencepiece"
    assert Encoding.of({"pattern": "x"}) == Encoding("x")


def test_prompts_need_a_tokenizer_whose_specials_text_can_mark(tmp_path: Path, inline_builds: None) -> None:
    path = train(tmp_path, "llama2").path
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"p": "a", "c": "b"}) + "\n")
    pairs = {"path": str(tmp_path / "pairs.jsonl"), "prompt": "p", "completion": "c"}
    recipe = {
        "inputs": [pairs],
        "tokenizer": {"path": str(path), "eos": "</s>"},
        "output": str(tmp_path / "o"),
    }
    with pytest.raises(RecipeError, match=r"need a tokenizer\.json; .*tokenizer\.model is of another kind"):
        build(recipe, workers=1, progress=False)
