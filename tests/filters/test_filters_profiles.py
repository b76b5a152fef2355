"""Profiles: every one is a list of filters that a recipe could have spelled out."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import yaml

from shardkit.writers.card import recipe_content
from shardkit.writers.filters.chain import FilterChain
from shardkit.writers.filters.config import PROFILES, FilterEntry
from shardkit.writers.recipe import recipe_from_mapping

README = Path(__file__).resolve().parents[2] / "writers" / "README.md"


def test_a_recipe_may_name_every_profile_and_no_other() -> None:
    [literal, _] = get_args(FilterEntry.model_fields["profile"].annotation)
    assert sorted(get_args(literal)) == sorted(PROFILES)


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_is_its_list_of_filters(name: str) -> None:
    listed = yaml.safe_load(yaml.safe_dump([dict(entry) for entry in PROFILES[name]]))
    spelled = [step for entry in listed for step in FilterEntry.model_validate(entry).filters()]
    assert list(FilterEntry.model_validate({"profile": name}).filters()) == spelled
    assert [step for step, _ in spelled] == [key for entry in listed for key in entry]


@pytest.mark.parametrize("name", PROFILES)
def test_the_readme_lists_the_filters_of_a_profile_in_order(name: str) -> None:
    [row] = [line for line in README.read_text().splitlines() if line.startswith(f"| `profile: {name}` |")]
    places = [row.index(f"`{key}`") for entry in PROFILES[name] for key in entry]
    assert places == sorted(places)


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
        recipe_content(recipe_from_mapping(rest | {"filters": filters}, folder=Path("/x")))
        for filters in ([{"profile": "minimal"}], [dict(entry) for entry in PROFILES["minimal"]])
    )
    assert short == spelled
    assert short["filters"][0]["length"]["min_words"] == 10
