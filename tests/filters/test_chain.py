"""The filters of a recipe in order, and the profiles that stand for several."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import yaml

from shardkit.writers.filters.bounds import LengthFilter
from shardkit.writers.filters.chain import FilterChain
from shardkit.writers.filters.config import PROFILES, FilterEntry
from shardkit.writers.filters.fineweb import FinewebQualityFilter
from shardkit.writers.filters.gopher import GopherQualityFilter
from shardkit.writers.recipe.recipe import recipe_from_mapping
from support.filter_runs import documents


def test_a_recipe_may_name_every_profile_and_no_other() -> None:
    [literal, _] = get_args(FilterEntry.model_fields["profile"].annotation)
    assert sorted(get_args(literal)) == sorted(PROFILES)


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_is_its_list_of_filters(name: str) -> None:
    listed = yaml.safe_load(yaml.safe_dump([dict(entry) for entry in PROFILES[name]]))
    spelled = [step for entry in listed for step in FilterEntry.model_validate(entry).filters()]
    assert list(FilterEntry.model_validate({"profile": name}).filters()) == spelled
    assert [step for step, _ in spelled] == [key for entry in listed for key in entry]


def test_reasons_of_profiles_name_filter_and_rule() -> None:
    chain = FilterChain(FilterEntry.model_validate({"profile": "gopher"}).filters())
    assert chain.reasons[0] == "gopher_quality/gopher_short_doc"
    assert chain.reasons[-1] == "gopher_repetition/duplicated_10_n_grams"


def test_a_dataset_says_what_a_profile_stood_for() -> None:
    rest = {
        "inputs": [{"path": "a.jsonl"}],
        "tokenizer": {"path": "t.json", "eos": "</s>"},
        "output": {"path": "out"},
    }
    short, spelled = (
        recipe_from_mapping(rest | {"filters": filters}, folder=Path("/x")).content()
        for filters in ([{"profile": "minimal"}], [dict(entry) for entry in PROFILES["minimal"]])
    )
    assert short == spelled
    assert short["filters"][0]["length"]["min_words"] == 10


def test_the_first_failing_filter_of_the_chain_is_the_reason() -> None:
    chain = FilterChain(
        [
            ("length", LengthFilter(min_words=2)),
            ("gopher_quality", GopherQualityFilter(min_doc_words=3, min_stop_words=1, min_avg_word_length=2)),
            ("fineweb_quality", FinewebQualityFilter()),
            ("length", LengthFilter(max_words=30)),
        ]
    )
    texts = [
        "one",
        "two words",
        "the words without an end",
        "the long text of many words " * 10 + ".",
        "The end is near, dear friends of the house.",
        "",
    ]
    result = chain.apply(documents(texts))
    assert result.kept.column("text").to_pylist() == [texts[4]]
    assert {reason: (count.documents, count.bytes) for reason, count in result.dropped.items()} == {
        "length/too_few_words": (2, len(texts[0])),
        "gopher_quality/gopher_short_doc": (1, len(texts[1])),
        "fineweb_quality/line_punct_ratio": (1, len(texts[2])),
        "length/too_many_words": (1, len(texts[3])),
    }


def test_no_filters_keep_everything() -> None:
    batch = documents(["", "x"])
    assert FilterChain([]).apply(batch).kept is batch
