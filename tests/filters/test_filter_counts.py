"""What filters did adds up over splits, whatever the splits are, and the report shows it, escaped."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from shardkit.writers.documents import DOCUMENT_SCHEMA
from shardkit.writers.filters.bounds import LengthFilter
from shardkit.writers.filters.chain import FilterChain, Filtered
from shardkit.writers.filters.gopher import GopherQualityFilter
from shardkit.writers.funnel import FilterCounts, filters_card
from shardkit.writers.report.page import render_filters
from support import filter_runs

STEPS = [("length", LengthFilter(min_words=3, max_words=6)), ("gopher_quality", GopherQualityFilter())]


TEXTS = [f"<b>{n}</b> " + "é\x00w " * (n * 7 % 9) for n in range(900)]
DOCUMENTS = filter_runs.documents(TEXTS, file="<a>.jsonl")


def documents(records: range) -> pa.RecordBatch:
    return DOCUMENTS.slice(records.start, len(records))


def count(*splits: range, batch: int = 1000) -> dict[str, Any]:
    chain = FilterChain(STEPS, seed=3)
    commits = []
    for split in splits:
        counts = FilterCounts.of_chain(chain)
        for start in range(split.start, split.stop, batch):
            counts.add(chain.apply(documents(range(start, min(start + batch, split.stop)))))
        commits.append(FilterCounts.from_dict(json.loads(json.dumps(counts.to_dict()))))
    card = filters_card(commits)
    assert card is not None
    return card


def test_counts_do_not_depend_on_batches_or_splits() -> None:
    whole = count(range(900))
    assert whole == count(range(400), range(400, 400), range(400, 900), batch=37)
    rules = {rule["rule"]: rule for rule in whole["rules"]}
    texts = documents(range(900)).column("text").to_pylist()
    short = [text for text in texts if len(text.split()) < 3]
    assert rules["length/too_few_words"]["documents"] == len(short)
    assert rules["length/too_few_words"]["bytes"] == sum(len(text.encode()) for text in short)
    assert len(rules["length/too_few_words"]["excerpts"]) == 3
    assert all(one["text"] in short for one in rules["length/too_few_words"]["excerpts"])
    assert 0 < whole["sampled"] < 30
    # All are too short for Gopher, and of those that are dropped before, the sample tells.
    assert rules["gopher_quality/gopher_short_doc"]["alone"] == whole["sampled"]
    assert [rule["rule"] for rule in whole["rules"]] == list(FilterChain(STEPS).reasons)


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
    card = filters_card([counts])
    assert card is not None
    assert card["cut"] == [{"edit": "x/cut", "bytes": -3}]
    page = render_filters(card, {"documents": 1, "bytes": 10})
    assert "3 B more" in page
    assert 'x/<wbr>seen</td><td class="n">4</td>' in page


def test_a_recipe_without_filters_has_no_section() -> None:
    assert filters_card([FilterCounts.of_chain(FilterChain([]))]) is None


def test_the_report_shows_rules_in_order_and_alone_and_escapes_texts() -> None:
    card = count(range(900))
    page = render_filters(card, {"documents": 900, "bytes": 10_000})
    for rule in card["rules"]:
        assert f">{rule['rule']}</td>" in page.replace("<wbr>", "")
    assert "<bdi>&lt;a&gt;.jsonl</bdi>, record&nbsp;" in page
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert "\x00" not in page
    assert f"a sample of {card['sampled']:,} documents (one in 100" in page
