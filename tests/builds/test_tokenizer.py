"""Ids are those of `tokenizers`, text is never a special token, and one check decides on the engine."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from shardkit.datasets.provenance.text import Decoder
from shardkit.errors import BuildError, RecipeError, ShardkitError
from shardkit.formats.tokenizer_file import Engine
from shardkit.tokens import engines
from shardkit.tokens import tokenizer as module
from shardkit.tokens.chat import MARK
from shardkit.tokens.engines import Gigatoken
from shardkit.tokens.parity import check_parity, sample_bytes, sample_texts, unlike_characters
from shardkit.tokens.tokenizer import (
    Encoder,
    EncodingError,
    load_encoder,
)
from shardkit.writers import build
from shardkit.writers.execution.digest_cache import remembered
from shardkit.writers.execution.work import Work
from support.small_build import EOS, make_corpus, train_bpe

TEXTS = [
    "Hello world",
    "",
    "a<|endoftext|>b",
    "naïve café 你好 👩‍👩‍👧",
    "x\r\n\r\n  y\u2028z ",
    "1234567890" * 9,
]
ENGINES: tuple[Engine, ...] = ("gigatoken", "tokenizers")


def train(
    folder: Path, *, bos: bool = False, normalizer: Any = None, special: Sequence[str] = (EOS,)
) -> Path:
    """A small byte-level BPE, saved as tokenizer.json."""
    texts = ["hello world, the quick brown fox jumps over the lazy dog "] * 20
    made = train_bpe(texts, vocabulary=400, special=special)
    if normalizer is not None:
        made.normalizer = normalizer
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single=f"{EOS} $A {EOS}", special_tokens=[(EOS, made.token_to_id(EOS))]
        )
    path = folder / "tokenizer.json"
    made.save(str(path))
    return path


def edited(path: Path, **changes: Any) -> Path:
    """The same file with top-level keys replaced."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def split_texts(encoded: tuple[Any, Any]) -> list[list[int]]:
    ids, lengths = encoded
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("engine", ENGINES)
def test_ids_are_those_of_tokenizers(path: Path, engine: Engine) -> None:
    reference = tokenizers.Tokenizer.from_file(str(path))
    reference.encode_special_tokens = True
    encoder = Encoder(path, EOS, engine=engine)
    expected = [reference.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert split_texts(encoder.encode(TEXTS)) == expected
    assert encoder.eos_id == reference.token_to_id(EOS)
    assert encoder.vocab_size == reference.get_vocab_size()
    assert encoder.encode(TEXTS)[0].dtype == encoder.dtype == np.uint16


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=60), max_size=6))
def test_both_engines_agree_on_any_text(path: Path, texts: list[str]) -> None:
    fast, right = (load_encoder(path, EOS, engine) for engine in ENGINES)
    for one, other in zip(fast.encode(texts), right.encode(texts), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("engine", ENGINES)
def test_text_that_spells_a_special_token_is_text(tmp_path: Path, engine: Engine) -> None:
    path = train(tmp_path, special=(EOS, "<|im_start|>"))
    encoder = Encoder(path, EOS, engine=engine)
    ids, lengths = encoder.encode([EOS, f"a{EOS}b <|im_start|>user", f"{EOS}{EOS}"])
    special = {t["id"] for t in json.loads(path.read_text())["added_tokens"]}
    assert not special & set(ids.tolist())
    decoder = tokenizers.Tokenizer.from_file(str(path))
    decoder.decoder = tokenizers.decoders.ByteLevel()
    assert decoder.decode(ids[: lengths[0]].tolist(), skip_special_tokens=False) == EOS


@pytest.mark.parametrize("engine", ENGINES)
def test_added_tokens_that_are_not_special_keep_their_ids(tmp_path: Path, engine: Engine) -> None:
    # Qwen numbers its special tokens before the plain ones: dropping the first must not move the others.
    path = train(tmp_path)
    config = json.loads(path.read_text())
    size = len(config["model"]["vocab"])
    special = config["added_tokens"][0] | {"id": size, "content": "<|end|>"}
    plain = config["added_tokens"][0] | {"id": size + 1, "content": "<tool>", "special": False}
    edited(path, added_tokens=[*config["added_tokens"], special, plain])
    encoder = Encoder(path, "<|end|>", engine=engine)
    assert (encoder.eos_id, encoder.vocab_size) == (size, size + 2)
    ids = encoder.encode(["x<tool>y<|end|>"])[0].tolist()
    assert ids[1] == size + 1
    assert size not in ids


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_added_cut_or_padded_whatever_the_file_asks_for(tmp_path: Path, engine: Engine) -> None:
    plain = Encoder(train(tmp_path), EOS, engine=engine).encode(TEXTS)
    path = train(tmp_path, bos=True)
    cut = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    pad = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    pad |= {"pad_type_id": 0, "pad_token": EOS}
    edited(path, truncation=cut, padding=pad)
    assert split_texts(Encoder(path, EOS, engine=engine).encode(TEXTS)) == split_texts(plain)


def test_slices_of_arrow_arrays_and_small_pieces_give_the_same_ids(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = Encoder(path, EOS)
    whole = split_texts(encoder.encode(TEXTS))
    array = pa.array(["not this", *TEXTS, "nor this"], pa.large_string()).slice(1, len(TEXTS))
    assert split_texts(encoder.encode(array)) == whole
    assert split_texts(encoder.encode(array.cast(pa.string()))) == whole
    monkeypatch.setattr(module, "ENCODE_BYTES", 8)
    assert split_texts(encoder.encode(array)) == whole


def test_no_texts_give_no_ids(path: Path) -> None:
    ids, lengths = Encoder(path, EOS).encode([])
    assert (len(ids), len(lengths), ids.dtype) == (0, 0, np.dtype(np.uint16))


def test_the_engine_is_loaded_anew_when_its_cache_has_grown(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "CACHE_BYTES", 1 << 20)
    sizes = iter(range(0, 1 << 40, 1 << 24))
    monkeypatch.setattr(engines, "_resident_bytes", lambda: next(sizes))
    encoder = Encoder(path, EOS)
    assert isinstance(encoder._encode, Gigatoken)
    before = encoder._encode._tokenizer
    ids = encoder.encode(TEXTS)[0]
    assert encoder._encode._tokenizer is not before
    assert np.array_equal(encoder.encode(TEXTS)[0], ids)


def test_more_than_65536_ids_need_four_bytes(tmp_path: Path) -> None:
    path = train(tmp_path)
    added = json.loads(path.read_text())["added_tokens"]
    edited(path, added_tokens=[*added, added[0] | {"id": 65_535, "content": "<|last|>"}])
    assert Encoder(path, EOS).dtype == np.uint16
    edited(path, added_tokens=[*added, added[0] | {"id": 65_536, "content": "<|last|>"}])
    assert Encoder(path, EOS).dtype == np.uint32


def test_the_digest_is_that_of_the_files_bytes(tmp_path: Path) -> None:
    first = Encoder(train(tmp_path), EOS)
    assert load_encoder(tmp_path / "tokenizer.json", EOS).digest == first.digest
    edited(tmp_path / "tokenizer.json", version="1.0")
    again = load_encoder(tmp_path / "tokenizer.json", EOS)
    assert again.digest == Encoder(tmp_path / "tokenizer.json", EOS).digest
    assert again.digest != first.digest


def test_an_unknown_eos_is_refused_with_the_candidates(path: Path) -> None:
    with pytest.raises(RecipeError, match=r"tokenizer\.eos: .*no token '</s>'.*<\|endoftext\|>"):
        Encoder(path, "</s>")


@pytest.mark.parametrize("content", [b"", b"not json", b"[]", b"{}"])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(RecipeError, match=r"tokenizer\.path"):
        Encoder(tmp_path / "t.json", EOS)
    with pytest.raises(RecipeError, match=r"tokenizer\.path.*absent"):
        Encoder(tmp_path / "absent.json", EOS)


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        (("added_tokens",), 3, "added_tokens is not a list"),
        (("added_tokens",), [None], "entry 0 has no string `content`"),
        (("added_tokens", 0, "content"), 5, "entry 0 has no string `content`"),
        (("added_tokens", 0, "id"), None, "the id of .* is None"),
        (("added_tokens", 0, "id"), -1, "the id of .* is -1"),
        (("added_tokens", 0, "id"), True, "the id of .* is True"),
        (("added_tokens", 0, "id"), 1 << 40, "the id of .* is 1099511627776"),
        (("added_tokens", 0, "special"), "yes", "neither true nor false"),
        (("model",), [], "has no `model`"),
        (("model", "vocab"), 3, "neither an object nor a list"),
        (("model", "vocab"), ["a"], "entry 0 is not a pair of piece and score"),
        (("model", "vocab"), [["a", 0.0], ["b", "x"]], "entry 1 is not a pair of piece and score"),
        (("model", "vocab", "a"), 1.5, "the id of 'a' is 1.5"),
        (("model", "vocab", "a"), "1", "the id of 'a' is 1"),
        (("model", "vocab", "a"), 4294967295, "the id of 'a' is 4294967295"),
        (("model", "merges"), [["a"]], "cannot be loaded by tokenizers"),
        (("model", "type"), "Other", "cannot be loaded by tokenizers"),
        (("normalizer",), {"type": "Precompiled", "precompiled_charsmap": "eHh4eHh4"}, "cannot be loaded"),
        (("pre_tokenizer",), {"type": "Split", "pattern": {"Regex": "("}}, "cannot be loaded by tokenizers"),
    ],
)
def test_a_damaged_tokenizer_json_is_an_error_that_names_it(
    path: Path, tmp_path: Path, place: tuple[Any, ...], value: Any, problem: str
) -> None:
    config = json.loads(path.read_text())
    inner = config
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    (tmp_path / "t.json").write_text(json.dumps(config))
    with pytest.raises(RecipeError, match=rf"tokenizer\.path: .*t\.json.*{problem}"):
        Encoder(tmp_path / "t.json", EOS, engine=None)
    with pytest.raises(ShardkitError, match=r"t\.json"):
        Decoder(tmp_path / "t.json")


WITHOUT_UNKNOWN: dict[str, Any] = {
    "words": models.WordLevel({"a": 0, "b": 1}),
    "pieces": models.WordPiece({"a": 0, "b": 1}, unk_token="[UNK]"),
    "unigram": models.Unigram([("a", 0.0), ("b", 0.0)]),
}


@pytest.mark.parametrize("kind", WITHOUT_UNKNOWN)
def test_a_text_that_the_tokenizer_cannot_encode_is_named_with_the_tokenizers_reason(
    kind: str, tmp_path: Path, inline_builds: None
) -> None:
    made = tokenizers.Tokenizer(WITHOUT_UNKNOWN[kind])
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens([EOS])
    made.save(str(tmp_path / "t.json"))
    texts = ["a b", "b a", "a c", "b b"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    recipe = {
        "inputs": [{"path": str(tmp_path / "a.jsonl")}],
        "tokenizer": {"path": str(tmp_path / "t.json"), "eos": EOS},
        "output": {"path": str(tmp_path / "out"), "format": "tokens"},
    }
    with pytest.raises(BuildError, match=r"a\.jsonl: record 2: .*t\.json: tokenizers cannot encode"):
        build(recipe, progress=False)
    encoder = Encoder(tmp_path / "t.json", EOS, engine=None)
    with pytest.raises(EncodingError, match=r"unknown|UNK") as refused:
        encoder.encode(texts)
    assert refused.value.row == 2
    marks = np.array([(3, 2)], MARK).tobytes()
    for row, some in ((2, [None, None, None]), (2, [marks, marks, marks]), (2, [None, marks, None])):
        with pytest.raises(EncodingError) as refused:
            encoder.encode_marked(pa.array(texts[:3], pa.large_string()), pa.array(some, pa.binary()))
        assert refused.value.row == row
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a b"}) + "\n")
    [first] = build(recipe, progress=False).open()
    assert np.asarray(first["tokens"]).tolist()[:2] == [0, 1]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_eos_that_text_can_produce_stops_the_build(path: Path, engine: Engine) -> None:
    with pytest.raises(BuildError, match="document ends would be ambiguous"):
        Encoder(path, "h", engine=engine).encode(["a horse"])


def test_parity_keeps_the_fast_engine_where_both_agree(path: Path) -> None:
    parity = check_parity(sample_texts([TEXTS * 3] * 3, 1 << 17), path, EOS)
    assert (parity.engine, parity.differences, parity.reason) == ("gigatoken", 0, None)
    assert parity.documents >= len(TEXTS) * 9


# The tables of `tokenizers` do not know that these marks combine: below, below; above, attached, left.
YOUNG_MARKS = "\U00010f4a\u1ac0\u0898\u0c3c\U0001e4ee"
OLD_MARKS = "a \u0301\u0334\u0327\u0928\u093c\u1100\u1161\u11a8\u0378\u1fa7"
MARKED = st.text(st.sampled_from(YOUNG_MARKS + OLD_MARKS))


@pytest.fixture(scope="module")
def composing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Encoder, Encoder]:
    """(fast, right) of a tokenizer that puts texts into form C, as Qwen does."""
    path = train(tmp_path_factory.mktemp("composing"), normalizer=normalizers.NFC())
    fast, right = (Encoder(path, EOS, engine=engine) for engine in ENGINES)
    return Encoder(path, EOS, unlike=unlike_characters(fast, right)), right


def test_characters_that_the_engines_know_differently_are_for_tokenizers(
    composing: tuple[Encoder, Encoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, right = composing
    odd = f"x{YOUNG_MARKS[:2]}y"
    texts = ["plain", odd, "", "d\u00e9j\u00e0 \u4f60", odd * 3, "\U00010eff", "end"]
    assert not np.array_equal(Encoder(fast.path, EOS).encode([odd])[0], right.encode([odd])[0])
    assert split_texts(fast.encode(texts)) == split_texts(right.encode(texts))
    assert split_texts(fast.encode(pa.array(texts)[1:5])) == split_texts(right.encode(texts[1:5]))
    monkeypatch.setattr(module, "ENCODE_BYTES", 8)
    assert split_texts(fast.encode(texts)) == split_texts(right.encode(texts))


@settings(max_examples=300, deadline=None)
@given(texts=st.lists(MARKED | st.text(max_size=60), min_size=1, max_size=4))
def test_both_engines_agree_on_any_marks(composing: tuple[Encoder, Encoder], texts: list[str]) -> None:
    fast, right = composing
    assert split_texts(fast.encode(texts)) == split_texts(right.encode(texts))


def test_few_characters_are_for_tokenizers(composing: tuple[Encoder, Encoder], path: Path) -> None:
    def assigned(path: Path) -> set[str]:
        ranges = unlike_characters(*(Encoder(path, EOS, engine=engine) for engine in ENGINES))
        found = {chr(code) for first, last in ranges for code in range(first, last + 1)}
        return {character for character in found if unicodedata.category(character) != "Cn"}

    assert assigned(path) == set()
    assert set(YOUNG_MARKS[:2]) <= assigned(composing[0].path)
    assert len(assigned(composing[0].path)) < 300


def test_a_rare_script_behind_the_sample_gets_the_ids_of_tokenizers(
    tmp_path: Path,
    composing: tuple[Encoder, Encoder],
    inline_builds: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Work, "remove_files", lambda work, files: None)  # this test reads the runs, too
    _, right = composing
    recipe = make_corpus(tmp_path, documents=20)
    shutil.copy(right.path, tmp_path / "tokenizer.json")
    odd = "plain words " * 1000 + f" and x{YOUNG_MARKS[:2]}y"
    (tmp_path / "plain-9.jsonl").write_text(json.dumps({"text": odd, "number": 1}) + "\n")
    build(recipe, overrides=["work=work"], progress=False)
    spilled = b"".join(path.read_bytes() for path in sorted(tmp_path.glob("work/tokenize/*/tokens.run")))
    assert right.encode([odd])[0].tobytes() in spilled


def train_unigram(folder: Path) -> Path:
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=60,
        special_tokens=["<unk>", "<s>", "</s>"],
        unk_token="<unk>",
        show_progress=False,
        initial_alphabet=list("</s>"),
    )
    made.train_from_iterator(["hello world, the quick brown fox jumps over the lazy dog "] * 20, trainer)
    made.decoder = decoders.Metaspace()
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_unigram_models_take_text_that_spells_a_special_token_as_text(tmp_path: Path) -> None:
    path = train_unigram(tmp_path)
    encoder = Encoder(path, "</s>", engine="tokenizers")
    whole = tokenizers.Tokenizer.from_file(str(path))
    assert (encoder.eos_id, encoder.vocab_size) == (whole.token_to_id("</s>"), whole.get_vocab_size())
    texts = ["the </s> dog", "</s>", "<s>hello</s>", "hello world"]
    for text, ids in zip(texts, split_texts(encoder.encode(texts)), strict=True):
        assert not {0, 1, 2} & set(ids)
        assert whole.decode(ids) == text
    plain = whole.encode(texts[-1], add_special_tokens=False).ids
    assert encoder.encode(texts[-1:])[0].tolist() == plain


def test_unigram_models_keep_the_ids_of_added_tokens_that_are_not_special(tmp_path: Path) -> None:
    path = train_unigram(tmp_path)
    whole = tokenizers.Tokenizer.from_file(str(path))
    whole.add_special_tokens(["<|end|>"])
    whole.add_tokens(["<tool>"])
    whole.save(str(path))
    encoder = Encoder(path, "</s>", engine="tokenizers")
    assert encoder.vocab_size == whole.get_vocab_size()
    ids = encoder.encode(["the <tool> <|end|>"])[0].tolist()
    assert whole.token_to_id("<tool>") in ids
    assert whole.token_to_id("<|end|>") not in ids


def test_a_document_that_yields_the_eos_id_is_named(tmp_path: Path, inline_builds: None) -> None:
    recipe = make_corpus(tmp_path, documents=20)
    with pytest.raises(BuildError, match=r"plain-0\.jsonl: record 0: .*document ends would be ambiguous"):
        build(recipe, overrides=["tokenizer.eos=d", "inputs=[{path: plain-0.jsonl}]"], progress=False)


def test_a_tokenizer_that_gigatoken_does_not_know_falls_back_with_a_warning(tmp_path: Path) -> None:
    path = train(tmp_path, normalizer=normalizers.Lowercase())
    with pytest.warns(RuntimeWarning, match="gigatoken cannot load this tokenizer") as caught:
        parity = check_parity([], path, EOS)
    assert caught[0].filename == __file__
    assert parity.engine == "tokenizers"
    ids, _ = Encoder(path, EOS, engine=parity.engine).encode(["HELLO"])
    assert ids.tolist() == Encoder(path, EOS, engine="tokenizers").encode(["hello"])[0].tolist()


def test_one_difference_in_the_sample_decides_for_the_whole_build(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Gigatoken.__call__

    def wrong(self: Any, texts: pa.Array) -> Any:
        ids, lengths = plain(self, texts)
        return (ids + 1 if texts[0].as_py() == "odd one" else ids), lengths

    monkeypatch.setattr(Gigatoken, "__call__", wrong)
    with pytest.warns(RuntimeWarning, match="differ on 1 of .* 'odd one'"):
        parity = check_parity([*TEXTS, "odd one"], path, EOS)
    assert (parity.engine, parity.differences) == ("tokenizers", 1)


@pytest.mark.parametrize("text", [*TEXTS, "", "\u1ac0 x\U00010f4a"])
def test_texts_have_the_same_ids_one_by_one_and_at_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    texts = pa.array([*TEXTS, text] * 5)
    ids, lengths = Encoder(path, EOS).encode(texts[2:-2])
    monkeypatch.setattr(engines, "_FIRST_TEXTS", 0)
    at_once, same_lengths = Encoder(path, EOS).encode(texts[2:-2])
    assert np.array_equal(ids, at_once)
    assert np.array_equal(lengths, same_lengths)


def test_a_run_of_characters_that_the_engines_take_for_another_kind_is_for_tokenizers(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine with tables that do not know the capitals of Deseret splits words at them."""
    plain = Gigatoken.__call__
    young = [chr(code) for code in range(0x10400, 0x10428)]

    def older(self: Any, texts: pa.Array) -> Any:
        other = [text.as_py().translate({ord(c): "!" for c in young}) for text in texts]
        return plain(self, pa.array(other, pa.large_string()))

    fast, right = (Encoder(path, EOS, engine=engine) for engine in ENGINES)
    before = unlike_characters(fast, right)
    monkeypatch.setattr(Gigatoken, "__call__", older)
    found = unlike_characters(fast, right)
    assert all(any(first <= ord(character) <= last for first, last in found) for character in young)
    assert sum(last - first + 1 for first, last in found) == len(young) + sum(b - a + 1 for a, b in before)
    texts = [f"a{young[17]}b", "plain", young[3] * 3]
    assert split_texts(fast.sparing(found).encode(texts)) == split_texts(right.encode(texts))


def test_the_sample_has_every_character_of_the_documents_it_looks_through() -> None:
    odd = [chr(code) for code in range(0x4E00, 0x4E00 + 200)]
    texts = [
        "plain words " * 40 + odd[n] + " and more" * 50 if n < 200 else "plain words" for n in range(400)
    ]
    sample = list(sample_texts([texts], 60_000))
    assert set(odd) <= set("".join(sample))
    assert sum(len(text.encode()) for text in sample) < 60_000
    for text in sample:
        assert any(text in whole for whole in texts)
    few = list(sample_texts([texts], 2_000))
    assert sum(len(text.encode()) for text in few) < 2_200
    assert len(set(odd) & set("".join(few))) > 4


def test_the_sample_grows_with_the_text_between_two_bounds() -> None:
    assert sample_bytes(0) == sample_bytes(1 << 20) == 1 << 17
    assert sample_bytes(1 << 28) == 1 << 20
    assert sample_bytes(1 << 40) == 2 << 20


def test_facts_are_kept_for_their_key_and_made_again_if_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def compute() -> dict[str, Any]:
        made.append(len(made))
        return {"number": len(made)}

    monkeypatch.delenv("SHARDKIT_FACTS_DIR")
    assert [remembered("a", compute), remembered("a", compute)] == [{"number": 1}, {"number": 2}]
    monkeypatch.setenv("SHARDKIT_FACTS_DIR", str(tmp_path / "facts"))
    assert [remembered("a", compute), remembered("a", compute)] == [{"number": 3}] * 2
    assert remembered("b", compute) == {"number": 4}
    kept = tmp_path / "facts" / "a.json"
    kept.write_text(kept.read_text().replace("3", "9"))
    assert remembered("a", compute) == {"number": 5}
    (tmp_path / "facts" / "b.json").rename(kept)
    assert remembered("a", compute) == {"number": 6}, "facts of another key"
    assert remembered("a", compute) == {"number": 6}


def test_the_sample_is_the_beginning_of_every_file_within_its_budget() -> None:
    files = [[f"{k}-{i:03d}" * 2 for i in range(50)] for k in range(4)]
    sample = list(sample_texts(files, 400))
    assert sample == list(sample_texts(files, 400))
    assert {text[0] for text in sample} == {"0", "1", "2", "3"}
    assert sum(map(len, sample)) <= 400
    assert list(sample_texts([["y" * 5000, "z"]], 100)) == ["y" * 50]


@pytest.mark.data
@pytest.mark.skipif("SHARDKIT_TEST_DATA" not in os.environ, reason="SHARDKIT_TEST_DATA is not set")
@pytest.mark.parametrize(("name", "key"), [("gpt2", "gpt2_special_as_text"), ("qwen2", "qwen2")])
def test_golden_ids_of_real_tokenizers(name: str, key: str) -> None:
    folder = Path(os.environ["SHARDKIT_TEST_DATA"]) / "tokenizers"
    path = folder / name / "tokenizer.json"
    with gzip.open(folder / "golden_ids_dev.jsonl.gz") as file:
        rows = [json.loads(line) for line in file]
    special = [t["content"] for t in json.loads(path.read_text())["added_tokens"]]
    if not key.endswith("as_text"):  # those ids were made with special tokens parsed
        rows = [row for row in rows if not any(token in row["text"] for token in special)]
    assert len(rows) > 200
    for engine in ENGINES:
        encoded = split_texts(Encoder(path, EOS, engine=engine).encode([row["text"] for row in rows]))
        assert encoded == [row["ids"][key] for row in rows]


@pytest.mark.extended
def test_documents_begin_with_bos_and_end_with_eos_as_the_models_own_tokenizer_makes_them(
    tmp_path: Path, inline_builds: None
) -> None:
    recipe = make_corpus(tmp_path, 120)
    train(tmp_path, special=(EOS, "<s>"))
    own = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    own.post_processor = processors.TemplateProcessing(
        single=f"<s> $A {EOS}", special_tokens=[(token, own.token_to_id(token)) for token in ("<s>", EOS)]
    )
    own.encode_special_tokens = True
    said = {"text": f"it says <s>, {EOS} and <s> again", "number": 1}
    (tmp_path / "plain-0.jsonl").write_text(json.dumps(said) + "\n")
    settings = ["output.format=tokens", "tokenizer.bos=<s>"]
    built = build(recipe, overrides=settings, workers=1, progress=False)
    text = build(recipe, overrides=["output.format=jsonl", "output.path=text"], workers=1, progress=False)
    expected = sorted(own.encode(str(row["text"])).ids for row in text.open())
    assert sorted(list(row["tokens"]) for row in built.open()) == expected  # type: ignore[call-overload]
    facts = json.loads((built.output / "dataset.json").read_text())["tokenizer"]
    assert (facts["bos"], facts["bos_id"]) == ("<s>", own.token_to_id("<s>"))
    rows = build(recipe, overrides=["tokenizer.bos=<s>", "output.path=rows"], workers=1, progress=False)
    texts = [document.text for row in range(len(rows.open())) for document in rows.open().documents(row)]
    assert len(texts) > len(expected) / 2
    assert sum("<s>" in str(text) for text in texts) == 1, "the one that spells it; documents begin with it"


def test_a_bos_that_the_tokenizer_lacks_or_text_can_produce_is_refused(
    tmp_path: Path, inline_builds: None
) -> None:
    recipe = make_corpus(tmp_path, 40)
    with pytest.raises(RecipeError, match=r"tokenizer.bos: .* has no token '<bos>'; its special tokens are"):
        build(recipe, overrides=["tokenizer.bos=<bos>"], workers=1, progress=False)
    with pytest.raises(BuildError, match="text was encoded to the bos id"):
        build(recipe, overrides=["tokenizer.bos=d"], workers=1, progress=False)
