"""Groups: the files of a repository come out as one text, with the headers that were asked for."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import shardkit as sk
from shardkit.card import DatasetCard
from shardkit.errors import RecipeError
from shardkit.tokens.packing import fill_rows, pack_best_fit, pack_concat
from shardkit.tokens.tokenizer import Encoder
from shardkit.writers import build
from shardkit.writers.recipe.inputs import FimConfig, GroupConfig
from shardkit.writers.stages.tokenize import TokenSettings, _encoding
from shardkit.writers.tokens.groups import Groups, join_groups
from support.small_build import EOS, train_bpe

NAME, FILE, BOS = "<repo_name>", "<file_sep>", "<|begin|>"
FIM = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>")
STARCODER = {"by": "repo", "begin": NAME, "separator": FILE, "title": "path"}
Text = list[str]  # special tokens and what is between them


def make_files() -> list[dict[str, Any]]:
    rng = random.Random(3)
    files: list[dict[str, Any]] = []
    for repo in range(60):
        for number in range(rng.randrange(1, 9)):
            words = " ".join(f"w{rng.randrange(60)}" for _ in range(rng.randrange(3, 30)))
            text = f"\ndef f{repo}_{number}({FILE}):\n    return '{words}' # 你好 {NAME}\n"
            files.append({"text": text, "repo": f"org/repo {repo}", "path": f"src/{number * 7 % 10}.py"})
    files += [{"text": f"a page without a repository, number {n}"} for n in range(30)]
    files += [{"text": "a text of a number", "repo": 7, "path": None}]
    rng.shuffle(files)
    return files


FILES = make_files()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("groups")
    special = (EOS, BOS, NAME, FILE, *FIM)
    train_bpe([file["text"] for file in FILES], vocabulary=400, special=special).save(
        str(made / "tokenizer.json")
    )
    for number in range(3):
        lines = (json.dumps(file) + "\n" for file in FILES[number::3])
        (made / f"{number}.jsonl").write_text("".join(lines))
    return made


def recipe_of(folder: Path, place: Path, group: Any, **changes: Any) -> dict[str, Any]:
    return {
        "inputs": [{"path": str(folder / "*.jsonl"), "metadata": ["repo", "path"]}],
        "tokenizer": {"path": str(folder / "tokenizer.json"), "eos": EOS},
        "pack": {"sequence_length": 4096},
        "group": group,
        "output": {"path": str(place / "out")},
    } | changes


def texts_of(folder: Path, result: sk.BuildResult) -> list[Text]:
    """The texts in rows that have whole ones, as special tokens and what is between them."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.decoder = decoders.ByteLevel()
    special = {tokenizer.token_to_id(token): token for token in (EOS, BOS, NAME, FILE, *FIM)}
    texts: list[Text] = []
    for sample in result.open():
        text: Text = []
        plain: list[int] = []
        for token in np.asarray(sample["tokens"]).tolist():
            if token not in special:
                plain.append(token)
                continue
            text += [tokenizer.decode(plain, skip_special_tokens=False)] if plain else []
            plain = []
            if special[token] != EOS:
                text.append(special[token])
            elif text:  # else padding
                texts.append(text)
                text = []
        assert not plain
        assert not text
    return texts


def expected(order: bool, header: str = "all") -> list[list[Text]]:
    """What stands for each document, in texts; without an order, documents are sorted here."""
    repositories: dict[Any, list[dict[str, Any]]] = {}
    for number, file in enumerate(FILES):
        repositories.setdefault(file.get("repo", number), []).append(file)
    texts = []
    for name, files in repositories.items():
        if "repo" not in files[0]:
            texts.append([[files[0]["text"]]])
            continue
        files = sorted(files, key=lambda file: file["path"] or "") if order else files
        titles = [f"{file['path']}\n" if header == "all" and file["path"] else "" for file in files]
        shown = [[FILE, title + file["text"]] for title, file in zip(titles, files, strict=True)]
        first = [[NAME, str(name)]] if header == "all" else []
        texts.append([*first, *(shown if order else sorted(shown))])
    return texts


def split_files(text: Text) -> list[Text]:
    """A text as in `expected` without an order."""
    starts = [at for at, part in enumerate(text) if part == FILE]
    if not starts:
        return [text]
    files = [text[at : at + 2] for at in starts]
    return [*([text[: starts[0]]] if starts[0] else []), *sorted(files)]


def joined(texts: list[list[Text]]) -> list[Text]:
    return sorted([part for piece in text for part in piece] for text in texts)


@pytest.mark.parametrize("strategy", ["best_fit", "concat"])
def test_files_of_a_repository_are_one_text_in_the_order_of_their_paths(
    folder: Path, tmp_path: Path, inline_builds: None, strategy: str
) -> None:
    length = 4096 if strategy == "best_fit" else 1 << 16  # one row holds all
    pack = {"sequence_length": length, "strategy": strategy}
    made = build(recipe_of(folder, tmp_path, {**STARCODER, "order": "path"}, pack=pack), progress=False)
    assert sorted(texts_of(folder, made)) == joined(expected(order=True))


def test_without_an_order_files_stand_in_any_and_a_share_of_the_repositories_has_headers(
    folder: Path, tmp_path: Path, inline_builds: None
) -> None:
    made = build(recipe_of(folder, tmp_path, STARCODER | {"header_rate": 0.5}), progress=False)
    found = sorted(split_files(text) for text in texts_of(folder, made))
    both = [sorted(map(list, expected(order=False, header=header))) for header in ("all", "none")]
    titled = [text for text in found if text in both[0] and text not in both[1]]
    bare = [text for text in found if text in both[1] and text not in both[0]]
    pages = [text for text in found if text in both[0] and text in both[1]]
    assert len(titled) + len(bare) + len(pages) == len(found) == len(both[0])
    assert min(len(titled), len(bare)) > 15
    assert len(pages) == 30
    texts = texts_of(folder, made)
    paths = [[part.split("\n")[0] for part in text[3::2]] for text in texts if text[0] == NAME]
    assert any(some != sorted(some) for some in paths)


def test_a_group_by_itself_needs_no_special_tokens(folder: Path, tmp_path: Path, inline_builds: None) -> None:
    tokenizer = {"path": str(folder / "tokenizer.json"), "eos": EOS, "bos": BOS}
    recipe = recipe_of(folder, tmp_path, {"by": "repo", "order": "path"}, tokenizer=tokenizer)
    texts = [
        [BOS, "".join(piece[-1] for piece in text)]
        for text in (
            [piece for piece in text if piece[0] != NAME] for text in expected(order=True, header="none")
        )
    ]
    assert sorted(texts_of(folder, build(recipe, progress=False))) == sorted(texts)


def test_fim_moves_parts_of_files_inside_their_repository(
    folder: Path, tmp_path: Path, inline_builds: None
) -> None:
    inputs = [{"path": str(folder / "*.jsonl"), "metadata": ["repo", "path"], "fim": 0.5}]
    recipe = recipe_of(folder, tmp_path, STARCODER | {"order": "path"}, inputs=inputs)
    made = build(recipe, progress=False)
    texts = texts_of(folder, made)
    assert Counter(text[1] for text in texts if text[0] == NAME) == Counter(
        {str(file["repo"]) for file in FILES if "repo" in file}
    )
    tokens = np.concatenate([sample["tokens"] for sample in made.open()])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    separators, *turned = (int((tokens == tokenizer.token_to_id(token)).sum()) for token in (FILE, *FIM))
    assert separators == sum("repo" in file for file in FILES)
    assert min(turned) == max(turned)
    assert 0.3 * len(FILES) < turned[0] < 0.7 * len(FILES)


@pytest.mark.parametrize(
    "cases",
    [
        [(1, "best_fit"), (4, "concat")],
        pytest.param([*itertools.product((1, 4), ("best_fit", "concat"))], marks=pytest.mark.extended),
    ],
    ids=["two", "all"],
)
def test_every_token_is_booked_and_traced_whatever_the_rows_and_partitions(
    folder: Path,
    tmp_path: Path,
    inline_builds: None,
    monkeypatch: pytest.MonkeyPatch,
    cases: list[tuple[int, str]],
) -> None:
    counts: set[tuple[int, int]] = set()
    for partitions, strategy in cases:
        cut_into = partial(lambda count, *_: count, partitions)
        monkeypatch.setattr("shardkit.writers.stages.rows.count_partitions", cut_into)
        pack = {
            "sequence_length": 96,
            "strategy": strategy,
            "max_repetitions": None if partitions == 1 else 3,
        }
        place = tmp_path / f"{strategy}-{partitions}"
        made = build(recipe_of(folder, place, STARCODER | {"order": "path"}, pack=pack), progress=False)
        assert made.funnel.kept.documents == len(FILES)
        card = DatasetCard.read(made.output / "dataset.json")
        assert card is not None
        assert card.packing["needless_cuts"] == 0 or strategy == "concat"
        assert card.histograms["lengths"].sum == card.tokens + card.packing["joined"]
        counts.add((card.tokens, card.packing["joined"]))
        tokens: dict[str, list[int]] = {}
        dataset = sk.open(str(made.output))
        rows = [np.asarray(sample["tokens"]).tolist() for sample in dataset]
        pieces = [piece for row in range(len(rows)) for piece in dataset.trace(row=row).documents]
        for piece in sorted(pieces, key=lambda piece: (piece.document_id, piece.document_start)):
            mine = tokens.setdefault(piece.document_id, [])
            assert len(mine) == piece.document_start
            mine += rows[piece.row][piece.start : piece.end]
        assert len(tokens) == len(FILES)
        assert sum(map(len, tokens.values())) == card.tokens
        some = pieces[len(pieces) // 2]
        [found] = {piece.document_id for piece in dataset.trace(document=some.document_id).documents}
        assert found == some.document_id
    assert len(counts) == 1


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=30),
    length=st.integers(2, 64),
    concat=st.booleans(),
)
def test_rows_of_parts_are_rows_of_their_texts(lengths: list[list[int]], length: int, concat: bool) -> None:
    lengths = [some if sum(some) > 1 else [2] for some in lengths]
    texts, parts = (
        np.array([sum(some) for some in lengths]),
        np.array([one for some in lengths for one in some]),
    )
    firsts = np.cumsum([0, *map(len, lengths)])[:-1]
    whole = (pack_concat if concat else pack_best_fit)(texts, length)
    whole = whole.moved(np.arange(whole.rows))
    made = whole.divided(parts, firsts)
    tokens = np.arange(1, texts.sum() + 1, dtype=np.uint32)
    rows = []
    for placement, starts in ((whole, np.cumsum(texts) - texts), (made, np.cumsum(parts) - parts)):
        out = np.zeros((placement.rows, length), np.uint32)
        sources = starts[placement.document] + placement.start
        fill_rows(tokens, sources, placement.length, placement.row, placement.column, out, 0)
        rows.append(out)
    assert np.array_equal(rows[0], rows[1])
    assert (np.bincount(made.document, made.length) == parts).all()
    assert (made.length > 0).all()


def test_groups_of_one_hash_and_documents_of_none_stay_apart() -> None:
    values = ["b", None, "a", "b", None, "a", "z", None]
    hashes = np.array([5, 5, 5, 5, 5, 5, 6, 7], np.uint64)
    metadata = [
        None if value is None else json.dumps({"g": value, "p": str(-n)}) for n, value in enumerate(values)
    ]
    table = pa.table({"hash": hashes, "metadata": metadata})
    lengths = np.full(8, 10)
    groups = Groups(GroupConfig(by="g", order="p"), None, has_bos=True)
    made = join_groups(table, np.zeros(80, np.uint16), np.arange(0, 80, 10), lengths, groups)
    assert made.order.tolist() == [2, 5, 3, 0, 1, 4, 6, 7]
    assert made.firsts.tolist() == [0, 2, 4, 5, 6, 7]
    assert made.lengths.tolist() == [9, 9, 9, 9, 10, 10, 10, 10]
    assert made.starts.tolist() == [20, 51, 30, 1, 10, 40, 60, 70]
    assert made.left_out == 4


@pytest.mark.parametrize(
    ("group", "changes", "refusal"),
    [
        ("owner", {}, "group: no input keeps a field 'owner'; add it to inputs"),
        (STARCODER | {"title": "name"}, {}, "group: no input keeps a field 'name'"),
        ({"by": "repo", "begin": NAME}, {}, "group.*separator: is missing; it must follow"),
        (STARCODER | {"separator": NAME}, {}, "begin and separator are the same token"),
        (STARCODER | {"separator": "<sep>"}, {}, "group: .* has no special token '<sep>'"),
        ("repo", {"pack": {"strategy": "best_fit_crop"}}, "group: cannot be used with pack.strategy"),
        (
            "repo",
            {"output": {"path": "o", "format": "tokens"}},
            "group: a token store holds single documents",
        ),
    ],
)
def test_groups_that_cannot_be_made_are_refused(
    folder: Path, tmp_path: Path, inline_builds: None, group: Any, changes: dict[str, Any], refusal: str
) -> None:
    with pytest.raises(RecipeError, match=refusal):
        build(recipe_of(folder, tmp_path, group, **changes), progress=False)


TITLES = ["a", "src/b.py", " ", "7", "x\n", "é", ""]
BEGINNINGS = ["", "\n", "\n\n", " ", "  ", "\t", "\r\n", "7", "e\u0301", "\u0301", ".py", "b", "你好", FILE]


@pytest.fixture(scope="module")
def line_tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizers that join line ends, spaces and what is behind them in ways of their own."""
    made = tmp_path_factory.mktemp("tokenizers")
    texts = [f"{title}\n{begin}def f():\n\n    return 7\n" for title in TITLES for begin in BEGINNINGS]
    special = (EOS, BOS, NAME, FILE, *FIM)
    train_bpe(texts, vocabulary=400, special=special).save(str(made / "gpt2.json"))
    whole = Tokenizer(models.BPE())
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=list(special), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    whole.train_from_iterator(texts, trainer)
    whole.save(str(made / "without-words.json"))
    return made


@pytest.mark.parametrize(("name", "engine"), [("gpt2", "gigatoken"), ("gpt2", None), ("without-words", None)])
def test_a_title_and_its_text_have_the_ids_of_the_text_that_they_are_together(
    line_tokenizers: Path, name: str, engine: Any
) -> None:
    path = line_tokenizers / f"{name}.json"
    encoder = Encoder(path, EOS, engine=engine)
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True
    pairs = list(itertools.product(TITLES, BEGINNINGS))
    texts = [begin + rest for rest in ("def f():\n", "") for _, begin in pairs]
    titles = [title for title, _ in pairs] * 2
    documents = pa.record_batch(
        {
            "document_id": pa.array([b"%d" % number for number in range(len(texts))], pa.binary()),
            "text": pa.array(texts, pa.large_string()),
            "metadata": [json.dumps({"repo": "r", "path": title}) for title in titles],
        }
    )
    group = GroupConfig.model_validate(STARCODER)
    encode = _encoding(encoder, TokenSettings(0, None, group))
    head = [tokenizer.token_to_id(NAME), *tokenizer.encode("r").ids, tokenizer.token_to_id(FILE)]
    ids, lengths = encode(documents)
    for title, text, found in zip(titles, texts, np.split(ids, np.cumsum(lengths)[:-1]), strict=True):
        expected = [*head, *tokenizer.encode(f"{title}\n{text}").ids] if text else []
        assert found.tolist() == expected, (title, text)
    fim = _encoding(encoder, TokenSettings(0, FimConfig(rate=1.0, spm_rate=0.5), group))
    ids, lengths = fim(documents)
    marks = {tokenizer.token_to_id(token) for token in FIM}
    for title, text, found in zip(titles, texts, np.split(ids, np.cumsum(lengths)[:-1]), strict=True):
        if text:
            start = [*head, *tokenizer.encode(f"{title}\n").ids]
            assert found[: len(start)].tolist() == start
            assert found[len(start)] == tokenizer.token_to_id(FIM[0])
            assert marks <= set(found.tolist())
        else:
            assert not len(found)
