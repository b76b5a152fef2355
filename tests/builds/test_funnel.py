"""The counts of a build add up or nothing is published; filter counts do not depend on splits or batches."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pydantic import TypeAdapter

from shardkit.card import Count, DatasetCard, EditFacts, FilterFacts, Histogram
from shardkit.errors import ConservationError
from shardkit.manifest import FileInfo, Manifest, ShardInfo
from shardkit.writers.card import make_card
from shardkit.writers.filters.bounds import LengthFilter
from shardkit.writers.filters.chain import FilterChain
from shardkit.writers.filters.gopher import GopherQualityFilter
from shardkit.writers.recipe.recipe import recipe_from_mapping
from shardkit.writers.report.page import render_filters
from shardkit.writers.rows.documents import DOCUMENT_SCHEMA, document_ids
from shardkit.writers.rows.filtered import Filtered
from shardkit.writers.rows.funnel import FilterCounts, Funnel, Trained, filters_card
from shardkit.writers.rows.ledger import Ledger

_COUNTS = TypeAdapter(FilterCounts)
RECIPE = {
    "inputs": [{"path": "a.jsonl", "source": "<b>&amp;"}, {"path": "b.jsonl"}],
    "tokenizer": {"path": "t.json", "eos": "<|end|>"},
    "pack": {"sequence_length": 10},
    "output": {"path": "out"},
}
TOKENIZER = {
    "file": "t.json",
    "digest": "d",
    "eos": "<|end|>",
    "eos_id": 0,
    "vocab_size": 9,
    "dtype": "uint16",
}
INPUTS = [{"source": "<b>&amp;", "files": 1, "bytes": 10, "digest": "x"}] * 2


def make_funnel() -> Funnel:
    def ledger(read: int, kept: int, reason: str) -> Ledger:
        return Ledger(
            Count(read, read * 10), Count(kept, kept * 10), {reason: Count(read - kept, (read - kept) * 10)}
        )

    stages = {
        "cleaning": [ledger(10, 8, "short"), ledger(5, 5, "short")],
        "tokenizing": [ledger(8, 7, "exact_duplicate"), ledger(5, 5, "exact_duplicate")],
    }
    funnel = Funnel(stages, [70, 25], {"exact_duplicate": Count(1, 10)}, 10)
    names = ("shards", "documents", "rows", "tokens", "padding", "cut_documents", "needless_cuts")
    funnel.packed = dict(zip(names, (1, 12, 10, 95, 5, 2, 0), strict=True)) | {"pieces": 13}
    sums = {"lengths": (12, 95), "row_padding": (10, 5), "row_pieces": (10, 13)}
    funnel.histograms = {name: Histogram([count], [total]) for name, (count, total) in sums.items()}
    funnel.trained = Trained(tokenized=95, packed=60, cropped=0, repeated=35)
    return funnel


def make() -> DatasetCard:
    manifest = Manifest("mds", [ShardInfo(FileInfo("shard.00000.mds", 200, {"xxh64": "0"}), 10)])
    recipe = recipe_from_mapping(RECIPE, folder=Path("/somewhere"))
    return make_card(recipe, manifest, make_funnel(), tokenizer=TOKENIZER, inputs=INPUTS, partitions=1)


def test_a_funnel_that_adds_up_passes() -> None:
    funnel = make_funnel()
    funnel.check()
    assert funnel.to_dict()["read"] == {"documents": 15, "bytes": 150}
    assert funnel.to_dict()["kept"] == {"documents": 12, "bytes": 120}
    assert set(funnel.total.dropped) == {"short", "exact_duplicate"}


def lose_between_stages(funnel: Funnel) -> None:
    for count in ("read", "kept"):
        setattr(funnel.stages["tokenizing"][1], count, Count(4, 40))


def lose_bytes(funnel: Funnel) -> None:
    funnel.stages["cleaning"][0].kept = Count(8, 79)
    funnel.stages["tokenizing"][0].read = Count(8, 79)


def lose_tokens(funnel: Funnel) -> None:
    funnel.packed["tokens"] -= 1
    funnel.packed["padding"] += 1


def lose_padding(funnel: Funnel) -> None:
    funnel.packed["padding"] -= 1


def lose_a_document(funnel: Funnel) -> None:
    funnel.packed["documents"] -= 1


def forget_a_loser(funnel: Funnel) -> None:
    funnel.removed = {"exact_duplicate": Count(2, 20)}


def lose_masked_tokens(funnel: Funnel) -> None:
    assert funnel.trained is not None
    funnel.trained = replace(funnel.trained, repeated=34)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lose_between_stages, "source 1: documents for tokenizing"),
        (lose_bytes, "source 0, cleaning: read 10 documents"),
        (lose_tokens, "tokens to pack: 95 before, 94 after"),
        (lose_padding, "tokens in rows: 100 before, 99 after"),
        (lose_a_document, "documents to write: 12 before, 11 after"),
        (forget_a_loser, "exact_duplicate"),
        (lose_masked_tokens, "tokens to train on: 95 before, 94 after"),
    ],
)
def test_anything_lost_between_stages_is_an_error(harm: object, message: str) -> None:
    funnel = make_funnel()
    assert callable(harm)
    harm(funnel)
    with pytest.raises(ConservationError, match=message):
        funnel.check()


def test_the_card_is_whole_and_says_no_place() -> None:
    card = make()
    assert (card.samples, card.tokens, card.padding) == (10, 95, 5)
    assert card.recipe == recipe_from_mapping(RECIPE, folder=Path("/elsewhere")).content()
    stored = card.to_bytes()
    assert json.loads(stored) == card.data
    assert b"/somewhere" not in stored
    assert b'"work"' not in stored


def test_the_recipe_digest_ignores_places_only() -> None:
    def content(**changes: object) -> object:
        return recipe_from_mapping(RECIPE | changes, folder=Path("/x")).content()

    assert content() == content(work="elsewhere", output={"path": "other"})
    assert content() != content(seed=3)
    assert content() == content(pack={"sequence_length": 10, "max_repetitions": None})
    assert content() != content(pack={"sequence_length": 10, "max_repetitions": 31})
    assert content() != content(output={"path": "out", "format": "wds"})


STEPS = [("length", LengthFilter(min_words=3, max_words=6)), ("gopher_quality", GopherQualityFilter())]


def documents(records: range) -> pa.RecordBatch:
    texts = [f"<b>{n}</b> " + "é\x00w " * (n * 7 % 9) for n in records]
    columns: list[Any] = [
        pa.array(document_ids("<a>.jsonl", records), pa.binary(16)),
        pa.array(np.zeros(len(records), np.int32)),
        pa.array(["<a>.jsonl"] * len(records)),
        pa.array(list(records), pa.int64()),
        pa.array(texts, pa.large_string()),
        *(pa.nulls(len(records), pa.string()) for _ in range(3)),
    ]
    return pa.record_batch(columns, schema=DOCUMENT_SCHEMA)


def count(*splits: range, batch: int = 1000) -> FilterFacts:
    chain = FilterChain(STEPS, seed=3)
    commits = []
    for split in splits:
        counts = FilterCounts.of_rules(chain.reasons, chain.edits)
        for start in range(split.start, split.stop, batch):
            counts.add(chain.apply(documents(range(start, min(start + batch, split.stop)))))
        commits.append(_COUNTS.validate_json(_COUNTS.dump_json(counts)))
    card = filters_card([commits])
    assert card is not None
    return card


def test_counts_do_not_depend_on_batches_or_splits() -> None:
    whole = count(range(900))
    assert whole == count(range(400), range(400, 400), range(400, 900), batch=37)
    rules = {rule.rule: rule for rule in whole.rules}
    texts = documents(range(900)).column("text").to_pylist()
    short = [text for text in texts if len(text.split()) < 3]
    assert rules["length/too_few_words"].documents == len(short)
    assert rules["length/too_few_words"].bytes == sum(len(text.encode()) for text in short)
    assert len(rules["length/too_few_words"].excerpts) == 3
    assert all(one.text in short for one in rules["length/too_few_words"].excerpts)
    assert 0 < whole.sampled < 30
    # All are too short for Gopher, and of those that are dropped before, the sample tells.
    assert rules["gopher_quality/gopher_short_doc"].alone == whole.sampled
    assert [rule.rule for rule in whole.rules] == list(FilterChain(STEPS).reasons)


def test_excerpts_are_the_beginnings_of_texts() -> None:
    batch = documents(range(1))
    long = pa.array(["𝄞" * 500], pa.large_string())
    batch = batch.set_column(4, DOCUMENT_SCHEMA.field("text"), long)
    filtered = FilterChain([("length", LengthFilter(max_chars=10))]).apply(batch)
    [[excerpt]] = filtered.excerpts.values()
    assert excerpt.text == "𝄞" * 120


def test_texts_that_grew_are_counted_as_such() -> None:
    counts = FilterCounts(("x/drop",), ("x/cut",))
    for cut in (5, -8):
        counts.add(Filtered(documents(range(1)), cut={"x/cut": cut}, counts={"x/seen": 2}))
    card = filters_card([[counts]])
    assert card is not None
    assert card.cut == [EditFacts("x/cut", -3)]
    page = render_filters(card, Count(1, 10))
    assert "3 B more" in page
    assert 'x/<wbr>seen</td><td class="n">4</td>' in page


def test_a_recipe_without_filters_has_no_section() -> None:
    assert filters_card([[FilterCounts.of_rules((), ())]]) is None


def test_the_report_shows_rules_in_order_and_alone_and_escapes_texts() -> None:
    card = count(range(900))
    page = render_filters(card, Count(900, 10_000))
    for rule in card.rules:
        assert f">{rule.rule}</td>" in page.replace("<wbr>", "")
    assert "<bdi>&lt;a&gt;.jsonl</bdi>, record&nbsp;" in page
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert "\x00" not in page
    assert f"a sample of {card.sampled:,} documents (one in 100" in page
