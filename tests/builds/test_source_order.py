"""`pack.order: source` keeps documents in the order of the inputs, whatever reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

import shardkit as sk
from shardkit.errors import RecipeError
from shardkit.writers import build
from shardkit.writers.exchange.addresses import range_of
from shardkit.writers.tokens.source_order import FileUnits, source_keys
from support.small_build import EOS, make_corpus, text_of, tree

ORDER = """\
inputs:
  - {path: "plain-*.jsonl", source: plain, metadata: [number]}
  - {path: "tables/*.parquet", source: tables}
  - {path: "lines.jsonl.gz", source: zipped}
steps: STEPS
tokenizer: {path: tokenizer.json, eos: "<|endoftext|>"}
pack: {sequence_length: 64, strategy: concat, order: source}
output: {path: out, shard_bytes: 8KiB}
"""


def texts_in_order(documents: int = 400) -> list[str]:
    """The texts of `make_corpus` in the order of its inputs."""
    quarter = documents // 4
    numbers = [
        *range(2 * quarter),
        *range(2 * quarter - 20, 3 * quarter),
        *range(15),
        *range(3 * quarter, documents),
    ]
    return [text_of(number) for number in numbers]


def recipe_of(folder: Path, steps: str = "[]", text: str = ORDER) -> Path:
    return make_corpus(folder, recipe=text.replace("STEPS", steps))


def decoded(folder: Path, output: str = "out") -> list[str]:
    """The texts of all rows of a dataset, one after the other."""
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.decoder = tokenizers.decoders.ByteLevel()
    eos = made.token_to_id(EOS)
    with sk.open(folder / output) as dataset:
        ids = np.concatenate([np.asarray(row["tokens"]) for row in dataset])
    parts = np.split(ids, np.flatnonzero(ids == eos) + 1)
    return [made.decode(part[:-1].tolist()) for part in parts if len(part) > 1]


def test_documents_are_in_the_order_of_the_inputs(tmp_path: Path) -> None:
    recipe_of(tmp_path)
    build(tmp_path / "recipe.yaml", progress=False)
    assert decoded(tmp_path) == texts_in_order()


def test_removed_documents_leave_the_others_in_order(tmp_path: Path) -> None:
    recipe_of(tmp_path, "[exact]")
    build(tmp_path / "recipe.yaml", progress=False)
    assert decoded(tmp_path) == list(dict.fromkeys(texts_in_order()))


def test_any_number_of_workers_makes_the_same_bytes(tmp_path: Path) -> None:
    trees = []
    for workers in (1, 3):
        recipe_of(tmp_path / str(workers), "[exact]")
        build(tmp_path / str(workers) / "recipe.yaml", progress=False, workers=workers)
        trees.append(tree(tmp_path / str(workers) / "out"))
    assert trees[0] == trees[1]


def test_units_without_documents_make_no_shard(tmp_path: Path) -> None:
    recipe_of(tmp_path, "[{length: {min_words: 3}}]")
    short = [json.dumps({"text": "no", "number": number}) for number in range(9)]
    (tmp_path / "plain-1.jsonl").write_text("\n".join(short))
    build(tmp_path / "recipe.yaml", progress=False)
    left = texts_in_order()[:100] + texts_in_order()[200:]
    assert decoded(tmp_path) == [text for text in left if len(text.split()) >= 3]


def test_parts_keep_the_order_too(tmp_path: Path) -> None:
    text = ORDER + "split: {validation: 40}\n"
    recipe_of(tmp_path, "[exact]", text)
    build(tmp_path / "recipe.yaml", progress=False)
    order = {text: number for number, text in enumerate(dict.fromkeys(texts_in_order()))}
    total = 0
    for part in ("train", "validation"):
        places = [order[text] for text in decoded(tmp_path, f"out/{part}")]
        assert places == sorted(places)
        total += len(places)
    assert total == len(order)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ("group: {by: number}\n", "group"),
        ("amounts: {plain: {repeat: 2}}\n", "amounts.repeat"),
        ("output: {path: out, format: tokens}\n", "output.format: tokens"),
    ],
)
def test_what_orders_documents_itself_is_refused(tmp_path: Path, more: str, what: str) -> None:
    text = ORDER if not more.startswith("output") else ORDER[: ORDER.index("output")]
    recipe_of(tmp_path, "[]", text + more)
    with pytest.raises(RecipeError, match=rf"pack.order: source cannot be used with {what}"):
        build(tmp_path / "recipe.yaml", progress=False)


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    before=st.integers(0, 900_000),
    after=st.integers(0, 50_000),
    data=st.data(),
)
def test_keys_lead_to_units_and_keep_the_order_of_records(
    sizes: list[int], before: int, after: int, data: Any
) -> None:
    starts = np.cumsum([0, *sizes])
    records = data.draw(st.lists(st.integers(0, int(starts[-1]) - 1), unique=True, min_size=1))
    documents = pa.record_batch({"file": ["a"] * len(records), "record": records})
    count = before + len(sizes) + after
    keys = source_keys(documents, {"a": FileUnits(before, tuple(starts[:-1].tolist()))}, count)
    assert np.argsort(keys).tolist() == np.argsort(records).tolist()
    units = np.searchsorted(starts, records, side="right") - 1 + before
    assert range_of(keys, count).tolist() == units.tolist()
