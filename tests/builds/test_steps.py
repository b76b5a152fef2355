"""`steps` of a recipe: filters and duplicate removal in the order of the user."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardkit
from shardkit.errors import BuildError, RecipeError
from shardkit.writers import BuildResult, build
from shardkit.writers.estimate import rehearse
from shardkit.writers.inputs.scan import scan_inputs
from shardkit.writers.recipe.recipe import recipe_from_mapping
from shardkit.writers.recipe.steps import GlobalStep
from shardkit.writers.report.costs import StepCost, better_place
from shardkit.writers.stages.graph import names_over_all
from shardkit.writers.stages.inputs import BuildInputs
from support.small_build import EOS, text_of, train_bpe, tree
from support.small_models import model_bytes

pytestmark = pytest.mark.usefixtures("inline_builds")

Step = str | dict[str, Any]
FILTER = """
import pathlib
def keep(batch, remainder):
    with pathlib.Path(__file__).with_name("seen").open("a") as seen:
        seen.write("x" * batch.num_rows)
    return [len(text) % 3 != remainder for text in batch.column("text").to_pylist()]
"""
PYTHON: Step = {"python": {"file": "filters.py", "function": "keep", "parameters": {"remainder": 0}}}
LENGTH: Step = {"length": {"min_words": 4}}
EDIT: Step = {"repeated_lines": {}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """240 documents of 60 texts, with URLs that some share; every fourth text is a near copy of another."""
    rng = random.Random(3)
    long = [" ".join(f"word{rng.randrange(400)}" for _ in range(120)) for _ in range(15)]
    texts = [text_of(n) for n in range(45)] + [f"{text} added {n}" for n, text in enumerate(long)]
    rows = [
        {"text": texts[n % 60] if n < 180 else long[n % 15], "id": n, "url": f"https://a.org/{n % 150}"}
        for n in range(240)
    ]
    for part in range(3):
        lines = [json.dumps(row) + "\n" for row in rows[part::3]]
        (tmp_path / f"part-{part}.jsonl").write_text("".join(lines))
    (tmp_path / "filters.py").write_text(FILTER)
    train_bpe(texts[:20]).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def run(folder: Path, name: str, **keys: Any) -> BuildResult:
    recipe = {
        "inputs": [{"path": "part-*.jsonl", "url": "url"}],
        "tokenizer": {"path": "tokenizer.json", "eos": EOS},
        "pack": {"sequence_length": 64},
        "output": name,
        "memory": "256MiB",
    }
    (folder / "seen").write_text("")
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe | keys))
    return build(folder / f"{name}.yaml", progress=False)


def texts_of(folder: Path, name: str, **keys: Any) -> list[str]:
    """The texts that a build leaves, sorted."""
    run(folder, name, **keys, output={"path": name, "format": "jsonl"})
    files = sorted((folder / name).glob("*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return sorted(row["text"] for row in rows if "text" in row)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("filters", "dedup", "steps"),
    [
        ([LENGTH], {"exact": True}, [LENGTH, "exact"]),
        (
            [PYTHON, LENGTH],
            {"url": True, "exact": True, "near": 0.8},
            [PYTHON, LENGTH, "url", "exact", {"near": 0.8}],
        ),
        ([], {"exact": {"text": "normalized"}, "lines": True}, [{"exact": {"text": "normalized"}}, "lines"]),
        ([{"profile": "minimal"}], {}, ["minimal"]),
    ],
)
def test_steps_in_the_order_of_the_short_form_give_its_bytes(
    folder: Path, filters: list[Step], dedup: dict[str, Any], steps: list[Step]
) -> None:
    run(folder, "out", filters=filters, dedup=dedup)
    short = tree(folder / "out")
    run(folder, "again", steps=steps)
    assert tree(folder / "again") == short


def test_exact_finds_again_what_other_steps_made_equal(folder: Path) -> None:
    line = "a long line that stands at the end of many documents " * 12
    rows = [{"text": f"{text_of(n % 6)}\n{line}" if n > 5 else text_of(n % 6), "id": n} for n in range(12)]
    for file in folder.glob("part-*.jsonl"):
        file.unlink()
    (folder / "part-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps: list[Step] = ["exact", {"lines": {"min_characters": 500}}, "exact", {"near": 0.9}]
    inputs = [{"path": "part-*.jsonl"}]
    result = run(folder, "out", steps=steps, inputs=inputs)
    once = run(folder, "once", steps=steps[:2], inputs=inputs)
    assert [cost.step for cost in result.costs] == ["exact", "lines", "exact", "near"]
    assert result.costs[0].dropped == 0
    assert result.funnel.kept.documents < once.funnel.kept.documents
    twice = result.funnel.dropped["exact_duplicate"].documents
    assert twice == result.costs[2].dropped == once.funnel.kept.documents - result.funnel.kept.documents
    table = pq.read_table(folder / "out" / "duplicates").to_pylist()
    assert sum(row["reason"] == "exact_duplicate" for row in table) == twice
    copies = pq.read_table(folder / "out" / "provenance", columns=["copies"]).column("copies")
    assert max(copies.to_pylist()) == 2


@pytest.mark.parametrize(
    "steps",
    [
        [{"near": 0.8}, "exact"],
        [{"near": 0.8}, "lines", LENGTH, "exact"],
        ["lines", {"near": 0.8}, PYTHON, "exact"],
    ],
)
def test_any_order_adds_up_and_leaves_no_equal_texts(folder: Path, steps: list[Step]) -> None:
    left = texts_of(folder, "out", steps=steps)
    assert len(set(left)) == len(left) > 10


def kept_by(steps: Sequence[Step], rows: Sequence[dict[str, Any]]) -> list[str]:
    """The texts that steps leave in plain Python; rows are in the order of priority."""
    left = list(rows)
    for step in steps:
        if step == LENGTH:
            left = [row for row in left if len(row["text"].split()) >= 4]
        elif step == EDIT:
            left = [row | {"text": "\n".join(dict.fromkeys(row["text"].split("\n")))} for row in left]
        elif step == PYTHON:
            left = [row for row in left if len(row["text"]) % 3 != 0]
        else:
            key, seen, stays = {"url": "url", "exact": "text"}[str(step)], set(), []
            for row in left:
                if row[key] not in seen:
                    stays.append(row)
                seen.add(row[key])
            left = stays
    return sorted(row["text"] for row in left)


@pytest.mark.parametrize(
    "steps",
    [
        ["exact", LENGTH],
        [LENGTH, "exact", PYTHON],
        ["url", PYTHON, "exact", LENGTH],
        [PYTHON, "url", LENGTH, "exact"],
        ["url", "exact", PYTHON, LENGTH],
        ["exact", EDIT, "exact"],
        ["exact", "exact", LENGTH, EDIT, "exact"],
    ],
)
def test_steps_leave_what_plain_python_leaves(folder: Path, steps: list[Step]) -> None:
    files = sorted(folder.glob("part-*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    # Of equal URLs the document of the lowest content rank stays, so texts of one URL are made equal here.
    first: dict[str, str] = {}
    for row in rows:
        row["text"] = first.setdefault(row["url"], row["text"])
    for file in folder.glob("part-*.jsonl"):
        file.unlink()
    (folder / "part-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert texts_of(folder, "out", steps=steps) == kept_by(steps, rows)


def test_a_filter_behind_duplicates_judges_only_what_is_left(folder: Path) -> None:
    before = run(folder, "before", filters=[PYTHON], dedup={"exact": True})
    judged = len((folder / "seen").read_text())
    behind = run(folder, "behind", steps=["exact", PYTHON])
    exact = behind.funnel.dropped["exact_duplicate"].documents
    assert len((folder / "seen").read_text()) <= judged - exact + 240 // 50  # and a sample for the report
    assert before.funnel.kept == behind.funnel.kept
    assert behind.funnel.dropped.keys() == {"exact_duplicate", "python/keep"}


TEXT_FILTERS: dict[str, Step] = {
    "length": LENGTH,
    "python": PYTHON,
    "ratios": {"ratios": {"max_digit_ratio": 0.9}},
    "gopher_quality": {
        "gopher_quality": {"min_doc_words": 5, "min_stop_words": 0, "max_avg_word_length": 20.0}
    },
    "repetition": {"gopher_repetition": {"top_n_grams": [[2, 0.5]], "dup_n_grams": [[5, 0.8]]}},
}


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(sorted(TEXT_FILTERS)), min_size=1, max_size=3, unique=True), st.integers(0, 3)
)
def test_filters_of_the_text_alone_leave_the_same_texts_before_and_behind_exact(
    folder: Path, names: list[str], place: int
) -> None:
    filters = [TEXT_FILTERS[name] for name in names]
    at = min(place, len(filters))
    first = texts_of(folder, "first", filters=filters, dedup={"exact": True}, work="first-work")
    moved = texts_of(folder, "moved", steps=[*filters[:at], "exact", *filters[at:]], work="moved-work")
    assert first == moved
    for name in ("first", "moved"):
        for path in sorted((folder / name).rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        (folder / name).rmdir()


def test_what_each_pass_dropped_is_told_with_its_reason(folder: Path) -> None:
    behind: Step = {"length": {"max_words": 100}}
    steps = [LENGTH, "url", PYTHON, "exact", "lines", {"near": 0.7}, behind]
    result = run(folder, "out", steps=steps)
    dropped = pq.read_table(folder / "out" / "dropped").column("rule").to_pylist()
    counts = result.funnel.dropped
    of_filters = {reason: count.documents for reason, count in counts.items() if "/" in reason}
    assert {reason: dropped.count(reason) for reason in set(dropped)} == of_filters
    assert set(of_filters) == {"length/too_few_words", "length/too_many_words", "python/keep"}
    table = pq.read_table(folder / "out" / "duplicates")
    removed = [reason for reason in table.column("reason").to_pylist() if reason is not None]
    duplicates = {reason: count.documents for reason, count in counts.items() if "/" not in reason}
    assert {reason: removed.count(reason) for reason in set(removed)} == {
        reason: count for reason, count in duplicates.items() if count
    }
    card = shardkit.open(folder / "out").card
    assert card is not None
    assert card.filters is not None
    assert [rule.rule for rule in card.filters.rules][:1] == ["length/too_few_words"]
    assert [next(iter(step)) for step in card.recipe["steps"]] == [
        *("length", "url", "python", "exact", "lines", "near", "length")
    ]


def test_languages_that_a_later_pass_finds_route_documents(folder: Path) -> None:
    labels = ("eng_Latn", "deu_Latn", "zho_Hans")
    model = model_bytes(labels=[f"__label__{one}".encode() for one in labels], seed=9)
    (folder / "model.bin").write_bytes(model)
    language: Step = {"language": {"model": "model.bin", "threshold": 0.0}}
    keys: dict[str, Any] = {"dedup": {"exact": True}}
    first = run(folder, "first", filters=[language], **keys)
    later = run(folder, "later", steps=["exact", language, "lines", {"near": {"scope": "language"}}, LENGTH])
    assert later.funnel.read == first.funnel.read
    for name, result in (("first", first), ("later", later)):
        card = shardkit.open(folder / name).card
        assert card is not None
        found = sum(counts.documents for counts in card.languages().values())
        assert found == result.funnel.kept.documents
    by_language: Step = {"length": {"min_words": 2}, "by_language": {"eng_Latn": {"min_words": 6}}}
    assert texts_of(folder, "one", filters=[language, by_language], **keys) == texts_of(
        folder, "two", steps=[language, "exact", by_language]
    )


def test_a_changed_filter_behind_duplicates_redoes_only_its_pass(folder: Path) -> None:
    steps: list[Step] = [LENGTH, "exact", {"near": 0.8}, {"length": {"max_words": 90}}]
    run(folder, "out", steps=steps, work="work")
    steps[-1] = {"length": {"max_words": 80}}
    again = run(folder, "other", steps=steps, work="work")
    ran = {stage.stage for stage in again.stages if stage.tasks > stage.tasks_reused}
    assert "filter_left" in ran
    assert not {"clean", "exact", "near", "signatures"} & ran


def test_a_pass_that_leaves_nothing_names_its_filters(folder: Path) -> None:
    with pytest.raises(BuildError, match=r"no document is left of \d+ after length \(dropped: .* length/"):
        run(folder, "out", steps=["exact", {"length": {"min_words": 5000}}])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"steps": ["exact", "url"]}, "steps: url must come before exact; only filters may precede it"),
        ({"steps": ["exact"], "filters": ["gopher_quality"]}, "filters: `steps` lists all of it in order"),
        ({"steps": ["exact"], "dedup": {"near": 0.8}}, "dedup: `steps` lists all of it in order"),
        ({"steps": ["exakt"]}, r"steps\[0\]: there is no step 'exakt'; did you mean 'exact'"),
        (
            {"steps": [{"near": {"similarty": 0.8}}]},
            r"steps\[0\]\.near\.similarty: unknown key; did you",
        ),
        ({"steps": ["exact"], "order": "cheapest"}, "order: `steps` lists the steps in their order"),
        ({"order": "cheapest"}, "order: cheapest needs dedup.exact"),
        ({"order": "cheapest", "dedup": {"exact": True, "url": True}}, "not possible with dedup.url"),
        ({"filters": ["exact"]}, r"filters\[0\]: there is no filter 'exact'; .*`steps`"),
    ],
)
def test_mistakes_are_named_with_their_place(keys: dict[str, Any], message: str) -> None:
    recipe = {"inputs": "a.jsonl", "tokenizer": {"path": "t", "eos": "e"}, "output": "o"}
    with pytest.raises(RecipeError, match=message):
        recipe_from_mapping(recipe | keys, folder=Path("/x"))


def test_a_result_says_what_each_filter_judged_dropped_and_took(folder: Path) -> None:
    result = run(folder, "out", steps=[LENGTH, "url", PYTHON, "exact", {"length": {"max_words": 100}}])
    costs = result.costs
    assert [cost.step for cost in costs] == ["length", "url", "python", "exact", "length"]
    dropped = {reason: count.documents for reason, count in result.funnel.dropped.items()}
    assert costs[0].documents == result.funnel.read.documents
    for before, after in pairwise(costs):
        assert after.documents == before.documents - before.dropped
    assert costs[-1].documents - costs[-1].dropped == result.funnel.kept.documents
    assert costs[1].dropped == dropped["url_duplicate"]
    assert costs[2].dropped == dropped["python/keep"]
    assert all(cost.is_global == (cost.step in ("url", "exact")) for cost in costs)
    assert all(cost.seconds is not None and cost.seconds > 0 for cost in costs)
    stages = {one.stage: one.cpu_seconds for one in result.stages}
    assert 0 < costs[1].seconds < sum(stages.values())  # type: ignore[operator]
    assert result.to_dict()["costs"][2]["documents"] == costs[2].documents


def test_a_result_names_each_step_that_dropped_something(folder: Path) -> None:
    bounds = [{"length": {"max_words": words}} for words in range(118, 112, -1)]  # each drops a few
    result = run(folder, "out", steps=[LENGTH, "url", PYTHON, "exact", *bounds])
    listed = [name for name, _ in result.describe()[1]]
    lost = [step.label for step in result.steps if step.lost_documents]
    assert listed[1 : listed.index("kept")] == lost


def test_the_filters_of_a_pass_are_listed_in_the_order_of_the_recipe(folder: Path) -> None:
    steps = [{"ratios": {"max_digit_ratio": 0.9}}, LENGTH, "exact"]
    assert [cost.step for cost in run(folder, "out", steps=steps).costs] == ["ratios", "length", "exact"]


def test_a_step_over_all_documents_that_was_finished_before_has_no_cpu_seconds(folder: Path) -> None:
    steps = [LENGTH, "exact"]
    first = run(folder, "out", steps=steps, work="work").costs
    again = run(folder, "other", steps=[*steps, "near"], work="work").costs
    assert first[1].seconds is not None
    assert [cost.seconds is None for cost in again] == [False, True, False]
    assert again[0].seconds == first[0].seconds, "that of a filter is kept with its task"


def test_the_stages_of_a_repeated_step_are_its_own_and_so_are_their_merges(folder: Path) -> None:
    recipe = recipe_from_mapping(
        {
            "inputs": "a",
            "tokenizer": {"path": "t", "eos": "e"},
            "output": "o",
            "steps": ["exact", "lines", "exact", {"near": 0.8}, {"sample": "50%"}],
        },
        folder=folder,
    )
    moves = [move for move in recipe.moves if isinstance(move, GlobalStep)]
    names = [
        "clean",
        "exact",
        "exact-2",
        "exact-keys-merge-1",
        "exact-keys-merge-1-2",
        "lines",
        "near",
        "bands",
    ]
    found = [names_over_all(move, recipe, names) for move in moves]
    assert found[0] == ["exact", "exact-keys-merge-1"]
    assert found[2] == ["exact-2", "exact-keys-merge-1-2"]
    assert found[3] == ["near", "bands"]
    assert "clean" not in [name for some in found for name in some]


def test_the_filter_that_would_save_most_behind_later_steps_is_named() -> None:
    costs = [
        StepCost("length", 1000, 100, 2.0),
        StepCost("python", 900, 0, 90.0),
        StepCost("exact", 900, 500),
        StepCost("near", 400, 200),
    ]
    advice = better_place(costs)
    assert advice is not None
    assert advice.startswith("python took 90 s of CPU for 900 documents, 78% of which later steps removed")
    assert "(most by exact and near)" in advice
    assert advice.endswith("it would take about 20 s")
    behind = [*costs[:1], *costs[2:], StepCost("python", 200, 0, 20.0)]
    assert better_place(behind) is None, "nothing stands behind it"
    assert better_place([StepCost("python", 900, 0, 9.0), *costs[2:]]) is None, "less than ten seconds"
    edited = [*costs[:2], StepCost("pii", 900, 1, 1.0, edits=True), *costs[2:]]
    assert better_place(edited) is None, "it would judge other texts"


SLOW: dict[str, Step] = {
    "classifier": {"classifier": {"model": "model.bin", "label": "eng_Latn", "threshold": 0.3}},
    "language": {"language": {"model": "model.bin", "threshold": 0.25}},
    "unigram": {"unigram_log_prob": {"frequencies": "words.csv", "logprobs_threshold": -12.0}},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("filters", "behind"),
    [
        ([LENGTH, SLOW["classifier"]], ["classifier"]),
        (
            [SLOW["language"], LENGTH, SLOW["classifier"], SLOW["unigram"]],
            ["language", "classifier", "unigram_log_prob"],
        ),
        ([SLOW["classifier"], EDIT, SLOW["language"], LENGTH], ["language"]),
        ([SLOW["language"], {"length": {"min_words": 2}, "by_language": {"deu_Latn": {"min_words": 6}}}], []),
        ([LENGTH], []),
    ],
)
def test_the_cheapest_order_leaves_the_same_texts_and_puts_slow_filters_behind(
    folder: Path, filters: list[Step], behind: list[str]
) -> None:
    labels = ("eng_Latn", "deu_Latn", "zho_Hans")
    model = model_bytes(labels=[f"__label__{one}".encode() for one in labels], seed=9)
    (folder / "model.bin").write_bytes(model)
    (folder / "words.csv").write_text("word,count\ndocument,40\nsays,30\nwords,20\nmore,20\nand,10\n")
    dedup = {"exact": True, "near": 0.9, "lines": True}
    keys: dict[str, Any] = {"filters": filters, "dedup": dedup}
    given = texts_of(folder, "given", **keys)
    assert texts_of(folder, "cheapest", **keys, order="cheapest") == given
    text = {"inputs": "a", "output": {"path": "o", "format": "jsonl"}, "order": "cheapest"}
    recipe = recipe_from_mapping(text | keys, folder=folder)
    assert recipe.global_steps[0].name == "exact"
    assert [name for filters in recipe.passes[1:] for name, _ in filters] == behind


OWN_STEPS = """
import os, pathlib

class Topics:
    def __init__(self, words):
        self.words = pathlib.Path(words).read_text().split()

    def __call__(self, document):
        found = [word for word in self.words if word in document.text]
        document.metadata["topic"] = found[0] if found else "none"
        document.metadata["score"] = len(found)
        document.text = document.text.replace("added", "")
        return document.metadata["topic"] != "none", "no topic"
"""


@pytest.mark.parametrize("behind", [False, True])
def test_a_step_of_the_user_adds_fields_that_later_steps_and_outputs_use(folder: Path, behind: bool) -> None:
    (folder / "own.py").write_text(OWN_STEPS)
    (folder / "words.txt").write_text("word11 word12 word13")
    topics = {
        "python": {
            "file": "own.py",
            "function": "Topics",
            "data": {"words": "words.txt"},
            "columns": ["topic", "score"],
            "edits": True,
            "batch_documents": 7,
        }
    }
    buckets = {
        "buckets": {"scores": [{"column": "score", "thresholds": [2]}], "labels": {"few": 0, "many": 1}}
    }
    steps = ["exact", topics, buckets] if behind else [topics, buckets, "exact"]
    wanted = {"topic": ["word11", "word12"], "score": {"min": 2}}
    output = {"path": "own", "format": "parquet", "where": wanted}
    run(folder, "own", steps=steps, output=output)
    rows = [
        row for file in sorted((folder / "own").glob("*.parquet")) for row in pq.read_table(file).to_pylist()
    ]
    assert rows
    for row in rows:
        found = json.loads(row["metadata"])
        words = [word for word in ("word11", "word12", "word13") if word in row["text"]]
        assert found == {"topic": words[0], "score": len(words), "bucket": "many"}
        assert len(words) >= 2
        assert "added" not in row["text"]
    dropped = [
        row
        for file in (folder / "own" / "dropped").glob("*.parquet")
        for row in pq.read_table(file).to_pylist()
    ]
    assert {row["rule"] for row in dropped} == {"python/Topics"}


def test_fields_of_a_step_must_be_named_in_the_recipe(folder: Path) -> None:
    step = {"python": {"file": "filters.py", "function": "keep", "parameters": {"remainder": 0}}}
    output = {"path": "x", "format": "jsonl", "where": {"topic": ["a"]}}
    with pytest.raises(RecipeError, match="no input keeps a field 'topic'"):
        run(folder, "x", steps=[step], output=output)


def test_a_rehearsal_runs_no_costly_step_and_selects_by_none_of_its_fields(folder: Path) -> None:
    (folder / "own.py").write_text("def topic(document):\n    raise RuntimeError('rehearsed')\n")
    costly = {"python": {"file": "own.py", "function": "topic", "columns": ["topic"], "gpus": 1}}
    recipe = recipe_from_mapping(
        {
            "inputs": [{"path": "part-*.jsonl"}],
            "steps": [LENGTH, "exact", costly],
            "tokenizer": {"path": "tokenizer.json", "eos": EOS},
            "output": {"path": "out", "where": {"topic": ["a"], "source": "input-0"}},
        },
        folder=folder,
    )
    inputs = BuildInputs.of(recipe, scan_inputs(recipe))
    assert rehearse(inputs, workers=1).output > 0
    assert recipe.without_costly_filters().output.where == {"source": ("input-0",)}
