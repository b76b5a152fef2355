"""`split.by`: documents with one value of a field are in one part, and nothing leaks between parts."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import shardkit
from reference.split import alike, select_families, text_ngrams
from shardkit.card import DatasetCard
from shardkit.errors import BuildError, RecipeError
from shardkit.hashing import keyed_hashes
from shardkit.tools.plan.build import measured_from_card
from shardkit.writers import build
from shardkit.writers.exchange.exchange import RunWriter, Slice
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.inputs import scan
from shardkit.writers.recipe.recipe import recipe_from_mapping
from shardkit.writers.stages.families import DRAWN, _whole_families
from shardkit.writers.stages.split import PARTS, take
from support.small_build import EOS, train_bpe, tree

WORDS = [f"word{n}" for n in range(400)]
Record = dict[str, Any]


def text_of(number: int) -> str:
    """Texts 2n and 2n + 1 are similar to each other and to no other text."""
    words = random.Random(number // 2).choices(WORDS, k=30)
    return " ".join(words + (["and", "more"] if number % 2 else []))


def write(folder: Path, records: Sequence[Record], name: str = "a") -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))


def recipe_of(folder: Path, split: Any, output: str = "out", **more: Any) -> dict[str, Any]:
    inputs = [
        {"path": str(file), "source": file.stem, "base": str(folder), "metadata": ["book"]}
        for file in sorted(folder.glob("*.jsonl"))
    ]
    place = {"path": str(folder / output), "format": "parquet"}
    return {"inputs": inputs, "split": split, "dedup": None, "output": place} | more


def made(recipe: dict[str, Any], **more: Any) -> Any:
    return build(recipe, workers=1, progress=False, **more)


def rows_of(folder: Path) -> list[Record]:
    rows: list[Record] = []
    for file in sorted(folder.glob("text-*.parquet")):
        rows += pq.read_table(file).to_pylist()
    return rows


def parts_of(folder: Path, names: Sequence[str]) -> dict[str, list[Record]]:
    return {name: rows_of(folder / name) for name in ("train", *names)}


def name_of(row: Record) -> str:
    """The family of a row of a text output."""
    value = json.loads(row["metadata"] or "{}").get("book")
    if value is None:
        return str(row["document_id"])
    return value if isinstance(value, str) else json.dumps(value)


def check_parts(parts: dict[str, list[Record]], documents: int) -> None:
    """Every document is in one part; no family is in two; no document of a part is like one outside of it."""
    rows = [(part, row, text_ngrams(row["text"], 5)) for part, found in parts.items() for row in found]
    places = Counter((row["file"], row["record"]) for _, row, _ in rows)
    assert len(places) == len(rows) == documents
    of_family = defaultdict(set)
    for part, row, _ in rows:
        of_family[name_of(row)].add(part)
    assert not [name for name, found in of_family.items() if len(found) > 1]
    holders = defaultdict(set)
    for number, (_, _, ngrams) in enumerate(rows):
        for ngram in ngrams:
            holders[ngram].add(number)
    for part, row, ngrams in rows:
        if part == "train":
            continue
        for number in set().union(*(holders[one] for one in ngrams)):  # what shares no n-gram is not alike
            _, other, others = rows[number]
            assert name_of(other) == name_of(row) or not alike(ngrams, others, 0.8), (row, other)


VALUES = st.sampled_from([None, "a", "b", "c", "d", "e", "f", "", 7])


@settings(deadline=None, max_examples=12, phases=[Phase.explicit, Phase.generate])  # a build each
@given(
    st.lists(st.tuples(VALUES, st.integers(0, 40)), min_size=8, max_size=40),
    st.lists(st.tuples(VALUES, st.integers(0, 40)), max_size=10),
    st.integers(1, 7),
)
def test_whole_families_with_the_lowest_hashes_are_taken(
    inline_builds: None, first: list[tuple[Any, int]], second: list[tuple[Any, int]], wanted: int
) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        for file, entries in (("a", [("a", 0), *first]), ("b", [("b", 50), *second])):
            records = [{"text": text_of(n)} | ({} if v is None else {"book": v}) for v, n in entries]
            write(folder, records, file)
        made(recipe_of(folder, None, "whole"))
        rows = rows_of(folder / "whole")
        families = defaultdict(list)
        for number, row in enumerate(rows):
            families[name_of(row)].append(number)
        hashes = {one: int(keyed_hashes([one.encode()], 17, "split")[0]) for one in families}
        ngrams = [text_ngrams(row["text"], 5) for row in rows]
        chosen = [rows[number] for number in sorted(select_families(families, ngrams, hashes, wanted))]
        recipe = recipe_of(folder, {"validation": wanted, "by": "book"})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shardkit.writers.stages.split.warn_user", lambda text: None)
            if not chosen:
                with pytest.raises(BuildError, match="no document is in validation"):
                    made(recipe)
                return
            made(recipe)
        parts = parts_of(folder / "out", ["validation"])
        check_parts(parts, len(rows))
        assert parts["validation"] == chosen
        assert len(chosen) < 2 * wanted


@settings(deadline=None, max_examples=12, phases=[Phase.explicit, Phase.generate])  # a build each
@given(
    st.lists(st.tuples(VALUES, st.integers(0, 80)), min_size=20, max_size=50),
    st.integers(2, 6),
    st.sampled_from(["equal", "larger", "source"]),
)
def test_of_two_parts_none_has_a_family_of_the_other_and_both_are_full_if_possible(
    inline_builds: None, entries: list[tuple[Any, int]], wanted: int, kind: str
) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        singles: list[tuple[Any, int]] = [(None, n) for n in range(100, 120, 2)]
        for file, own in (("a", [*singles, *entries[::2]]), ("b", entries[1::2])):
            some = [("a", 0), *own]
            write(folder, [{"text": text_of(n)} | ({} if v is None else {"book": v}) for v, n in some], file)
        parts = {"equal": wanted, "larger": 2 * wanted, "source": {"a": wanted}}
        recipe = recipe_of(folder, {"parts": {"validation": wanted, "test": parts[kind]}, "by": "book"})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shardkit.writers.stages.split.warn_user", lambda text: None)
            made(recipe)
        found = parts_of(folder / "out", ["validation", "test"])
        check_parts(found, len(entries) + len(singles) + 2)
        least = min(len(found["validation"]), len(found["test"]))
        assert len(found["validation"]) < 2 * wanted
        assert len(found["test"]) < (4 if kind == "larger" else 2) * wanted
        if kind == "equal":  # at least the ten documents without a book are unique
            assert least >= min(wanted, 10 - wanted)


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """900 documents of 2 sources: of books with 1 to 12 documents, of one with 150, and of none."""
    folder = tmp_path_factory.mktemp("books")
    draw, numbers = random.Random(3), iter(range(10**6))
    records: dict[str, list[Record]] = {"web": [], "shop": []}
    for book in range(80):
        for _ in range(draw.randint(1, 12)):
            number = next(numbers) * 2 if draw.random() < 0.97 else draw.randrange(200)
            records[draw.choice(["web", "shop"])].append({"text": text_of(number), "book": f"b{book}"})
    for _ in range(150):
        records["web"].append({"text": text_of(next(numbers) * 2), "book": "large"})
    while sum(map(len, records.values())) < 900:
        records["web"].append({"text": text_of(next(numbers) * 2)})
    for source, found in records.items():
        draw.shuffle(found)
        write(folder, found, source)
    return folder


@pytest.mark.parametrize(
    "parts",
    [
        {"validation": "5%"},
        {"validation": "5%", "test": 30},
        {"validation": {"shop": "10%"}, "test": {"web": 20, "shop": 10}},
        {"validation": {"web": 40}, "test": 60, "other": {"shop": 9}},
        {"validation": 100, "test": 250},
    ],
)
def test_parts_have_their_numbers_and_at_most_one_family_more(
    books: Path, tmp_path: Path, parts: dict[str, Any], inline_builds: None, recwarn: pytest.WarningsRecorder
) -> None:
    recipe = recipe_of(books, {"parts": parts, "by": "book"})
    recipe["output"]["path"] = str(tmp_path / "out")
    made(recipe)
    assert not [one for one in recwarn if "are wanted" in str(one.message)]
    found = parts_of(tmp_path / "out", [*parts])
    check_parts(found, 900)
    sources = [one["source"] for one in recipe["inputs"]]
    whole = Counter(row["source"] for rows in found.values() for row in rows)
    homes: dict[str, str] = {}
    for row in (row for rows in found.values() for row in rows):
        home = homes.setdefault(name_of(row), row["source"])
        homes[name_of(row)] = min(home, row["source"], key=sources.index)
    for part, asked in parts.items():
        of_homes = Counter(homes[name_of(row)] for row in found[part])
        numbers = dict(of_homes) if isinstance(asked, dict) else {"all": len(found[part])}
        wanted = asked if isinstance(asked, dict) else {"all": asked}
        assert numbers.keys() == wanted.keys()
        for source, share in wanted.items():
            total = 900 if source == "all" else whole[source]
            number = round(float(share.rstrip("%")) / 100 * total) if isinstance(share, str) else share
            assert number <= numbers[source] <= number + 11
    card = json.loads((tmp_path / "out" / "train" / "dataset.json").read_text())
    assert card["split"]["by"] == "book"
    assert card["split"]["documents"] == {part: len(found[part]) for part in parts}
    assert sum(card["split"]["alike"].values()) > 0
    assert b"one value of <code>book</code>" in (tmp_path / "out" / "train" / "report.html").read_bytes()
    assert shardkit.verify(tmp_path / "out" / "train").ok


def test_a_family_larger_than_the_part_stays_in_train_and_a_short_part_says_why(
    tmp_path: Path, inline_builds: None
) -> None:
    records = [{"text": text_of(2 * n), "book": f"b{n // 10}"} for n in range(100)]
    write(tmp_path, [*records, {"text": text_of(300)}])
    problem = r"validation has 1 documents, 7 are wanted: .* have a value of book that more documents have"
    with pytest.warns(RuntimeWarning, match=problem):
        made(recipe_of(tmp_path, {"validation": 7, "by": "book"}))
    assert [name_of(row)[0] == "b" for row in rows_of(tmp_path / "out" / "validation")] == [False]
    made(recipe_of(tmp_path, {"validation": 13, "by": "book"}, "more"))
    assert len(rows_of(tmp_path / "more" / "validation")) in (20, 21)
    write(tmp_path, records)
    with (
        pytest.warns(RuntimeWarning, match="validation has 0 documents, 7 are wanted"),
        pytest.raises(BuildError, match="no document is in validation; raise its share"),
    ):
        made(recipe_of(tmp_path, {"validation": 7, "by": "book"}, "none"))


def test_a_family_with_one_document_like_another_one_stays_in_train(
    tmp_path: Path, inline_builds: None
) -> None:
    records = [{"text": text_of(2 * n), "book": f"b{n // 4}"} for n in range(80)]
    records += [{"text": text_of(4 * 2 * n + 1)} for n in range(10)]  # like the first one of books 0 to 9
    records += [{"text": text_of(n + 1), "book": f"b{n // 8}"} for n in range(80, 160, 8)]  # of the same book
    write(tmp_path, records)
    made(recipe_of(tmp_path, {"validation": 40, "by": "book"}))
    held = {name_of(row) for row in rows_of(tmp_path / "out" / "validation")}
    assert held <= {f"b{n}" for n in range(10, 20)}
    assert len(held) == 8  # each has 5 documents


def test_a_short_part_gets_no_family_that_is_larger_than_itself(tmp_path: Path) -> None:
    """Families 1 to 4 have 4, 2, 3 and 1 documents; only the second one was drawn for the first part."""
    sizes = {1: 4, 2: 2, 3: 3, 4: 1}
    rows = np.zeros(sum(sizes.values()), DRAWN.dtype)
    rows["key"] = np.repeat([*sizes], [*sizes.values()])
    rows["row"], rows["part"] = range(len(rows)), np.where(rows["key"] == 2, 0, 2)
    np.save(tmp_path / "chosen.npy", rows)
    taken = take(tmp_path, Artifact(tmp_path / "chosen.npy"), [2, 0], [0, 3], 1, DEFAULT_LIMITS, [2, 3])
    found, _ = Slice.whole(PARTS, [Artifact(tmp_path / PARTS.file)]).read()
    parts = {(int(rows["key"][row]), part) for row, part in found.tolist()}
    assert parts == {(2, 0), (3, 1)}
    assert (taken.taken, taken.spare) == ([[2], [3]], [5])


def test_data_that_grows_keeps_its_choice(tmp_path: Path, inline_builds: None) -> None:
    records = [{"text": text_of(2 * n), "book": f"b{n % 60}"} for n in range(300)]
    write(tmp_path, records)
    split = {"validation": 50, "by": "book"}
    made(recipe_of(tmp_path, split))
    before = {name_of(row) for row in rows_of(tmp_path / "out" / "validation")}
    write(tmp_path, records + [{"text": text_of(2 * n), "book": f"c{n % 6}"} for n in range(1000, 1030)])
    made(recipe_of(tmp_path, split, "grown"))
    after = {name_of(row) for row in rows_of(tmp_path / "grown" / "validation")}
    new = {name for name in after if name.startswith("c")}
    assert len(before) == len(after) == 10
    hashes = {one: int(keyed_hashes([one.encode()], 17, "split")[0]) for one in before | after}
    assert after == {*sorted(before | after, key=hashes.__getitem__)[:10]}
    assert len(before - after) == len(new)


def test_parts_do_not_depend_on_splits_or_the_memory_of_a_task(
    books: Path, tmp_path: Path, inline_builds: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(books, {"validation": "5%", "by": "book"})
    recipe["output"]["path"] = str(tmp_path / "one")
    made(recipe)
    recipe["output"]["path"] = str(tmp_path / "two")
    made({**recipe, "memory": "256MiB"})
    for part in ("train", "validation"):
        one, two = tree(tmp_path / "one" / part), tree(tmp_path / "two" / part)
        for name in ("dataset.json", "report.html"):  # which state the memory
            assert one.pop(name) != two.pop(name)
        assert one == two
    monkeypatch.setattr(scan, "SPLIT_BYTES", 10_000)
    recipe["output"]["path"] = str(tmp_path / "many")
    many = made(recipe)
    assert many.samples
    for part in ("train", "validation"):
        assert [*rows_of(tmp_path / "many" / part)] == [*rows_of(tmp_path / "one" / part)]


def test_a_label_of_buckets_is_a_field_too(tmp_path: Path, inline_builds: None) -> None:
    records = [{"text": text_of(2 * n), "id": str(n), "score": n % 50} for n in range(200)]
    write(tmp_path, records)
    recipe = recipe_of(tmp_path, {"validation": 6, "by": "class"})
    recipe["inputs"][0]["metadata"] = ["score"]
    scores = [{"column": "score", "thresholds": [*range(1, 50)]}]
    recipe["filters"] = [{"buckets": {"scores": scores, "field": "class"}}]
    made(recipe)
    parts = parts_of(tmp_path / "out", ["validation"])
    classes = {part: {json.loads(row["metadata"])["class"] for row in rows} for part, rows in parts.items()}
    assert not classes["train"] & classes["validation"]
    assert len(classes["validation"]) == 2
    assert len(parts["validation"]) == 8


def test_groups_are_not_torn_apart(tmp_path: Path, inline_builds: None) -> None:
    records = [{"text": f"{text_of(2 * n)} {n}", "book": f"b{n // 5}"} for n in range(100)]
    write(tmp_path, records)
    train_bpe([one["text"] for one in records], special=(EOS,)).save(str(tmp_path / "tokenizer.json"))
    recipe = recipe_of(tmp_path, {"validation": "10%"}, group="book", pack={"sequence_length": 4096})
    recipe["tokenizer"] = {"path": str(tmp_path / "tokenizer.json"), "eos": EOS}
    recipe["output"]["format"] = "mds"
    with pytest.raises(RecipeError, match=r"split.by: documents with one book are joined .* write by: book"):
        made(recipe)
    with pytest.raises(RecipeError, match="write by: book"):
        made(recipe | {"split": {"validation": "10%", "by": "other"}})
    result = made(recipe | {"split": {"validation": "10%", "by": "book"}})
    found = {}
    for one in (result, *result.others):
        dataset = one.open()
        pieces = [piece for row in range(len(dataset)) for piece in dataset.documents(row)]
        found[dataset.path.name] = Counter(json.loads(piece.metadata or "")["book"] for piece in pieces)
    assert not found["train"].keys() & found["validation"].keys()
    assert [*found["validation"].values()] == [5, 5]
    assert sum(found["train"].values()) == 90
    card = json.loads((tmp_path / "out" / "train" / "dataset.json").read_text())
    del card["recipe"]["split"]["by"]  # as earlier versions built it
    assert measured_from_card(DatasetCard(card)).shape.parts == 1


@pytest.mark.parametrize(
    ("split", "problem"),
    [
        ({"validation": 5, "by": "author"}, "split.by: no input keeps a field 'author'; add it to inputs"),
        ({"validation": 5, "by": "language"}, "by: a language would be in one part as a whole"),
        ({"validation": 5, "by": ""}, "split.by: .*text that is not empty"),
        ({"parts": {"validation": 5}, "by": 3}, "split.by: .*text"),
    ],
)
def test_fields_that_cannot_be_meant_are_refused(tmp_path: Path, split: Any, problem: str) -> None:
    write(tmp_path, [{"text": "a", "book": "b"}])
    with pytest.raises(RecipeError, match=problem):
        made(recipe_of(tmp_path, split))


def test_recipes_without_a_field_keep_their_content(tmp_path: Path) -> None:
    plain, null, given = (
        recipe_from_mapping(recipe_of(tmp_path, split, inputs=["a.jsonl"]), folder=tmp_path)
        for split in (
            {"validation": 5},
            {"parts": {"validation": 5}, "by": None},
            {"parts": {"validation": 5}, "similarity": 0.8},
        )
    )
    assert plain.content() == null.content() == given.content()
    assert plain.content()["split"] == {"parts": {"validation": 5}, "similarity": 0.8}


@given(st.lists(st.integers(0, 12), max_size=60), st.integers(0, 5), st.integers(300, 2000))
def test_large_families_are_left_out_while_they_are_read(keys: list[int], most: int, memory: int) -> None:
    with TemporaryDirectory() as name:
        rows = np.zeros(len(keys), DRAWN.dtype)
        rows["key"], rows["row"] = sorted(keys), range(len(keys))
        path = Path(name) / DRAWN.file
        limits = replace(DEFAULT_LIMITS, block_bytes=64, read_bytes=120, read_memory_bytes=memory)
        with RunWriter(path, DRAWN, memory_bytes=1 << 20, limits=limits) as run:
            run.write(rows)
        found = [*_whole_families(Slice.whole(DRAWN, [Artifact(path)], limits), most)]
    counts = Counter(keys)
    seen = Counter(key for batch in found for key in set(batch["key"].tolist()))
    assert {*seen.values()} <= {1}
    kept = Counter(key for batch in found for key in batch["key"].tolist())
    assert kept.keys() == counts.keys()
    for key, count in counts.items():
        assert kept[key] == count if count <= most else most < kept[key] <= count
