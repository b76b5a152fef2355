"""Settings by language: each document is judged as a chain for its language alone would judge it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from shardkit.errors import RecipeError
from shardkit.writers.filters.chain import FilterChain
from shardkit.writers.filters.config import FilterEntry
from shardkit.writers.recipe.recipe import Recipe, recipe_from_mapping
from shardkit.writers.report.page import render_filters
from shardkit.writers.rows.funnel import FilterCounts, filters_card
from support.filter_runs import documents
from support.small_models import model_bytes

_COUNTS = TypeAdapter(FilterCounts)
LABELS = ("eng_Latn", "deu_Latn", "zho_Hans", "fra_Latn")
WORDS = ("the", "of", "größe", "a", "中", "x1", "end.", "#", "...", "1 2 3 4", "verylongwordsthatare", "\n")
FINEWEB2 = {
    "dup_line_frac": 0.263,
    "dup_n_grams": [[5, 0.141], [6, 0.134], [7, 0.126], [8, 0.117], [9, 0.108], [10, 0.098]],
    "language_score": 0.3,
    "line_punct_thr": -1,
    "max_avg_word_length": 15,
    "max_non_alpha_words_ratio": 0.774,
    "min_avg_word_length": 0,
    "new_line_ratio": 0.152,
    "stopwords": ["the", "größe"],
    "top_n_grams": [[2, 1.169], [3, 0.153], [4, 0.137]],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four languages, and two of FineWeb2's files."""
    made = tmp_path_factory.mktemp("languages")
    labels = [f"__label__{label}".encode() for label in LABELS]
    (made / "model.bin").write_bytes(model_bytes(labels=labels, seed=9))
    (made / "configs").mkdir()
    (made / "configs" / "eng_Latn.yml").write_text(yaml.safe_dump(FINEWEB2))
    german = FINEWEB2 | {"dup_line_frac": 1.32, "stopwords": ["a"], "language_score": 0.9}
    (made / "configs" / "deu_Latn.yml").write_text(yaml.safe_dump(german))
    return made


def recipe(folder: Path, *filters: object) -> Recipe:
    rest = {"inputs": "a.jsonl", "tokenizer": {"path": "t.json", "eos": "</s>"}, "output": "out"}
    return recipe_from_mapping(rest | {"filters": list(filters)}, folder=folder)


def chain(folder: Path, *filters: object, annotate: bool = False) -> FilterChain:
    return FilterChain(recipe(folder, *filters).filter_chain(), folder, annotate=annotate)


def outcomes(chain: FilterChain, texts: list[str]) -> list[tuple[str | None, float | None, float | None]]:
    """(reason, value, bound) of each document as it was dropped, None for those that stay."""
    result = chain.apply(documents(texts))
    found: dict[int, Any] = {}
    for dropped in result.removed:
        bounds = np.broadcast_to(np.nan if dropped.bound is None else dropped.bound, len(dropped.hashes))
        rows = dropped.documents.column("record").to_numpy()[dropped.rows].tolist()
        for row, value, bound in zip(rows, dropped.values.tolist(), bounds.tolist(), strict=True):  # type: ignore[union-attr]
            found[row] = (dropped.rule, value, None if np.isnan(bound) else bound)
    return [found.get(row, (None, None, None)) for row in range(len(texts))]


OVERRIDES: dict[str, dict[str, object]] = {
    "eng_Latn": {"min_doc_words": 3, "stop_words": ["of"], "min_stop_words": 1},
    "zho_Hans": {"min_doc_words": 0, "min_stop_words": 0, "max_avg_word_length": None},
    "default": {"min_doc_words": 2},
}
LINES = {"eng_Latn": {"short_line_thr": 1.0}, "fra_Latn": {"line_punct_thr": 0.0, "new_line_ratio": 9.0}}
LANGUAGE = {"language": {"model": "model.bin", "threshold": 0.0}}
TEXTS = st.lists(st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join), max_size=12)


@pytest.fixture(scope="module")
def chains(folder: Path) -> dict[str, FilterChain]:
    """A chain for each language alone, by its label."""
    return {
        label: chain(
            folder,
            LANGUAGE,
            {"length": {"max_words": 10}},
            {"gopher_quality": {"min_avg_word_length": 1.0, **OVERRIDES.get(label, OVERRIDES["default"])}},
            {"fineweb_quality": LINES.get(label, {})},
        )
        for label in LABELS
    }


@settings(max_examples=25, deadline=None)
@given(TEXTS, st.booleans())
def test_a_document_is_judged_by_the_settings_of_its_language(
    folder: Path, chains: dict[str, FilterChain], texts: list[str], annotate: bool
) -> None:
    mixed = chain(
        folder,
        LANGUAGE,
        {"length": {"max_words": 10}},
        {"gopher_quality": {"min_avg_word_length": 1.0}, "by_language": OVERRIDES},
        {"fineweb_quality": {}, "by_language": LINES},
        annotate=annotate,
    )
    labels = chain(folder, LANGUAGE).apply(documents(texts)).languages
    expected = [
        outcomes(chains[label], [text])[0]
        for text, label in zip(texts, [] if labels is None else labels.tolist(), strict=True)
    ]
    assert outcomes(mixed, texts) == expected


def test_counts_by_language_add_up_and_are_shown(folder: Path) -> None:
    texts = [" ".join(WORDS[n % 7 : n % 7 + 1 + n % 4]) for n in range(200)]
    mixed = chain(
        folder,
        {"length": {"min_words": 2}},
        {"language": {"model": "model.bin", "threshold": 0.4, "languages": LABELS[:3]}},
        {"gopher_quality": {}, "by_language": OVERRIDES},
    )
    counts = FilterCounts.of_rules(mixed.reasons, mixed.edits)
    total: Counter[str] = Counter()
    for start in (0, 120):
        result = mixed.apply(documents(texts[start : start + 120]))
        counts.add(result)
        total[""] += result.kept.num_rows
        total.update({reason: count.documents for reason, count in result.dropped.items()})
    facts = filters_card([[_COUNTS.validate_json(_COUNTS.dump_json(counts))]])
    assert facts is not None
    of_languages: Counter[str] = Counter()
    for found in facts.languages.values():
        of_languages.update(found)
    assert total.pop("length/too_few_words") > 0
    assert of_languages == total
    assert facts.languages["fra_Latn"] == {"language/label": sum(facts.languages["fra_Latn"].values())}, (
        "one that is not listed"
    )
    assert len(facts.languages) == len(LABELS)
    html = render_filters(facts, next(iter(counts.dropped.values())))
    assert "by language" in html
    assert all(label in html for label in LABELS)


def test_builds_without_settings_by_language_count_none(folder: Path) -> None:
    plain = chain(folder, {"language": {"model": "model.bin"}}, "gopher_quality")
    counts = FilterCounts.of_rules(plain.reasons, plain.edits)
    counts.add(plain.apply(documents(["the of a", "größe"])))
    facts = filters_card([[counts]])
    assert facts is not None
    assert facts.languages == {}


def test_files_in_fineweb2s_keys_are_the_settings_of_the_languages_they_are_named_by(folder: Path) -> None:
    read = recipe(
        folder,
        {"language": {"model": "model.bin"}, "by_language": "configs/*.yml"},
        {"profile": "fineweb2", "by_language": "configs/*.yml"},
    )
    content = read.content()["filters"]
    assert [next(iter(entry)) for entry in content] == [
        *("language", "gopher_quality", "gopher_repetition", "fineweb_quality")
    ]
    assert content[0]["language"]["languages"] == ["deu_Latn", "eng_Latn"]
    assert content[0]["language"]["threshold"] == {"deu_Latn": 0.9, "eng_Latn": 0.3}
    assert content[1]["by_language"]["eng_Latn"] == {
        "stop_words": ["the", "größe"],
        "max_avg_word_length": 15,
        "min_avg_word_length": 0,
        "max_non_alpha_words_ratio": 0.774,
    }
    assert content[2]["by_language"]["deu_Latn"] == {
        "dup_line_frac": 1,  # of 1.32: no text has more
        "dup_n_grams": FINEWEB2["dup_n_grams"],
        "top_n_grams": FINEWEB2["top_n_grams"],
    }
    assert content[3]["by_language"]["deu_Latn"] == {"line_punct_thr": 0, "new_line_ratio": 0.152}
    assert content[3]["fineweb_quality"]["char_duplicates_ratio"] == 0.1


def test_the_recipe_of_a_card_is_the_same_recipe_without_the_files(folder: Path, tmp_path: Path) -> None:
    read = recipe(
        folder,
        {"language": {"model": "model.bin"}, "by_language": {"files": "configs/*.yml", "default": {}}},
        {"profile": "fineweb2", "by_language": {"files": ["configs/e*.yml"], "deu_Latn": {"stop_words": []}}},
    )
    content = read.content()["filters"]
    again = recipe(tmp_path, *content)
    assert again.filter_chain() == read.filter_chain()
    assert again.content()["filters"] == content


def test_languages_beside_files_win_over_them(folder: Path) -> None:
    given = {"files": "configs/*.yml", "deu_Latn": {"stop_words": ["der"]}, "fra_Latn": {"min_doc_words": 7}}
    entry = recipe(folder, "language", {"gopher_quality": {}, "by_language": given}).content()
    found = entry["filters"][1]["by_language"]
    assert (found["deu_Latn"]["stop_words"], found["deu_Latn"]["max_avg_word_length"]) == (["der"], 15)
    assert found["fra_Latn"] == {"min_doc_words": 7}


def test_languages_that_are_not_named_are_dropped_or_take_the_default_as_asked(folder: Path) -> None:
    texts = [f"{word} {number}" for word in ("the", "of", "größe", "中", "a") for number in range(20)]

    def kept(**by_language: object) -> set[str]:
        entry = {"language": {"model": "model.bin", "threshold": 0.0}, "by_language": by_language}
        found = chain(folder, entry).apply(documents(texts)).languages
        assert found is not None
        return set(found.tolist())

    named: dict[str, object] = {"eng_Latn": {"language_score": 0.2}, "deu_Latn": {"threshold": 1.0}}
    assert kept(**named) == {"eng_Latn"}
    assert kept(**named, default={}) == set(LABELS) - {"deu_Latn"}
    assert kept(**named, default={"threshold": 1.0}) == {"eng_Latn"}


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        (["language", {"gopher_quality": {}, "by_language": {"de": {}}}], "has no key of gopher_quality"),
        (
            [{"gopher_quality": {}, "by_language": {"de": {"min_doc_words": 3}}}],
            r"filters\[0\]: gopher_quality needs a `language` filter before it",
        ),
        (
            ["language", {"gopher_quality": {}, "by_language": {"de": {"min_doc_word": 3}}}],
            r"filters\[1\]: by_language.de.min_doc_word: unknown key; did you mean 'min_doc_words'",
        ),
        (
            ["language", {"gopher_quality": {}, "by_language": {"de": {"min_doc_words": -3}}}],
            r"by_language.de.min_doc_words: .*, got -3",
        ),
        (
            ["language", {"gopher_quality": {}, "by_language": {"deu": {"min_doc_words": 3}}}],
            r"gopher_quality.by_language: the model .* has no language deu; did you mean",
        ),
        (
            [{"language": {"model": "model.bin"}, "by_language": {"deu": {"threshold": 0.5}}}],
            "model.bin has no language deu; did you mean deu_Latn",
        ),
        ([{"language": {}, "by_language": {"de": {"characters": 3}}}], "characters .* same for all"),
        (["language", {"c4_quality": {}, "by_language": {"de": {"min_num_sentences": 3}}}], "that edit"),
        (
            [
                "language",
                {"scores": {"path": "s", "columns": {"x": {}}}, "by_language": {"de": {"missing": "keep"}}},
            ],
            "must be the same for all languages",
        ),
        (
            ["language", {"gopher_repetition": {}, "by_language": {"de": {"top_n_grams": [[2, 0.3]]}}}],
            "the rules must be the same ones in all languages",
        ),
        (["language", {"length": {}, "by_language": "configs/*.yml"}], "has no key of length"),
        (["language", {"gopher_quality": {}, "by_language": "none/*.yml"}], r"no file matches none/\*.yml"),
        (["language", {"gopher_quality": {}, "by_language": 3}], r"filters\[1\].by_language: should be"),
        (["language", {"by_language": {"de": {"min_doc_words": 3}}}], "this one has none"),
    ],
)
def test_settings_by_language_that_cannot_be_meant_are_refused(
    folder: Path, filters: list[object], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        chain(folder, *filters)


def test_files_are_read_only_where_the_folder_of_the_recipe_is_known() -> None:
    with pytest.raises(ValueError, match="recipe that was read from a file"):
        FilterEntry.model_validate({"gopher_quality": {}, "by_language": "configs/*.yml"})
