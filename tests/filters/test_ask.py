"""`ask`: documents are scored, labelled and rewritten by a model behind a real HTTP server that fails."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from shardkit.errors import BuildError, MissingExtraError, RecipeError
from shardkit.writers import build
from shardkit.writers.execution.resources import UnavailableError
from shardkit.writers.filters.answers import Answer, Answers, Meter, Rates
from shardkit.writers.filters.base import Edit, Rule
from shardkit.writers.filters.chain import FilterChain
from shardkit.writers.filters.config import FilterEntry
from shardkit.writers.recipe.recipe import recipe_from_mapping
from support.filter_runs import documents, text_batch
from support.model_server import ModelServer, answer_to, score_of

TEXTS = [f"Document {number} about water and light." for number in range(60)]
PATTERN = r"score: *(\d)"


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer() as found:
        yield found


@pytest.fixture(scope="module")
def failing() -> Iterator[ModelServer]:
    with ModelServer(faults=0.2) as found:
        yield found


def config(server: ModelServer, **settings: Any) -> Any:
    given: dict[str, Any] = {"url": server.url, "model": "m", "prompt": "Judge: {text}"} | settings
    if not {"score", "label", "rewrite"} & settings.keys():
        given["score"] = {"pattern": PATTERN, "min": 3}
    [(_, made)] = FilterEntry.model_validate({"ask": given}).filters()
    return made


def judge(folder: Path, config: Any, texts: list[str], **more: Any) -> tuple[list[Rule], Edit | None, Any]:
    step = config.build(folder)
    batch = text_batch(texts, **more)
    edit = step.edit(batch) if config.rewrite else None
    rules = list(edit.rules if edit else step.judge(batch))
    return rules, edit, step.take_spent()


def test_scores_are_those_of_the_model_and_are_paid_once(tmp_path: Path, server: ModelServer) -> None:
    server.counts()
    texts = [*TEXTS, TEXTS[0]]
    rules, _, spent = judge(tmp_path, config(server), texts)
    expected = [score_of(f"Judge: {text}") for text in texts]
    assert [rule.name for rule in rules] == ["failed", "unusable", "score"]
    assert rules[2].values is not None
    assert rules[2].values.tolist() == expected
    assert rules[2].fails is not None
    assert rules[2].fails.tolist() == [value < 3 for value in expected]
    assert (spent["requests"], spent["documents"], spent["reused"]) == (len(TEXTS), len(texts), 1)
    assert spent["tokens_out"] == 12 * len(TEXTS)
    again, _, spent = judge(tmp_path, config(server), [*TEXTS, "A new one."])
    assert (spent["requests"], spent["reused"]) == (1, len(TEXTS))
    assert again[2].values is not None
    assert again[2].values[:-1].tolist() == expected[:-1]
    assert sorted(server.counts()["requests"].values()) == [1] * (len(TEXTS) + 1)


def test_a_failing_server_changes_no_score_and_is_paid_once_for_each_answer(
    tmp_path: Path, failing: ModelServer
) -> None:
    rules, _, spent = judge(tmp_path, config(failing, timeout_seconds=5, retries=20), TEXTS)
    assert rules[2].values is not None
    assert rules[2].values.tolist() == [score_of(f"Judge: {text}") for text in TEXTS]
    seen = failing.counts()
    assert sum(seen["faults"].values()) > 5
    assert {*seen["answers"].values()} == {1}
    assert spent["failed_requests"] > 0
    lines = [json.loads(line) for file in tmp_path.glob("answers/*.jsonl") for line in file.open()]
    assert sorted(line["key"] for line in lines) == sorted(seen["answers"])


KEY = "sk-a-secret-of-ours-123"


def write_inputs(folder: Path, texts: list[str], name: str = "a") -> None:
    rows = [{"text": text, "id": n} for n, text in enumerate(texts)]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def recipe(folder: Path, server: ModelServer, *before: Any, **settings: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"url": server.url, "model": "m", "prompt": "Judge: {text}"}
    given["answers"] = str(folder / "answers")
    if not {"label", "rewrite"} & settings.keys():
        given["score"] = {"pattern": PATTERN, "min": 3}
    return {
        "inputs": [{"path": str(folder / "*.jsonl"), "base": str(folder)}],
        "steps": [*before, {"ask": given | settings}],
        "output": {"path": str(folder / "out"), "format": "jsonl"},
    }


def texts_of(folder: Path) -> list[str]:
    rows = [json.loads(line) for file in sorted((folder / "out").glob("text-*")) for line in file.open()]
    return sorted(row["text"] for row in rows)


def everything_in(folder: Path) -> bytes:
    return b"\n".join(file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file())


def test_a_build_asks_behind_duplicate_removal_and_a_second_build_pays_for_new_documents(
    tmp_path: Path, server: ModelServer, inline_builds: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.counts()
    monkeypatch.setenv("OUR_KEY", KEY)
    texts = [f"Text {n} of the first build." for n in range(300)]
    write_inputs(tmp_path, texts + texts)
    given = recipe(tmp_path, server, {"length": {"max_chars": 28}}, "exact", api_key_env="OUR_KEY")
    made = build(given, workers=1, progress=False)
    short = [text for text in texts if len(text) <= 28]
    assert texts_of(tmp_path) == sorted(text for text in short if score_of(f"Judge: {text}") >= 3)
    seen = server.counts()
    assert seen["keys"] == [f"Bearer {KEY}"]
    assert [*seen["requests"].values()] == [1] * len(short)
    spent = made.costs[-1].spent
    assert (spent["requests"], spent["documents"], spent["reused"]) == (len(short), len(short), 0)
    assert f"{len(short):,} requests (0 failed)" in dict(made.describe()[1])["ask"]
    assert KEY.encode() not in everything_in(tmp_path)
    assert server.url.encode() not in everything_in(tmp_path / "out")

    write_inputs(tmp_path, [f"New {n}." for n in range(3)], "b")
    made = build(given, workers=1, progress=False, replace=True)
    assert [*server.counts()["requests"].values()] == [1] * 3
    spent = made.costs[-1].spent
    assert (spent["requests"], spent["documents"], spent["reused"]) == (3, len(short) + 3, len(short))


def test_where_and_how_fast_requests_go_changes_no_byte(
    tmp_path: Path, server: ModelServer, failing: ModelServer, inline_builds: None
) -> None:
    write_inputs(tmp_path, TEXTS)
    first = build(recipe(tmp_path, server), workers=1, progress=False)
    again = recipe(tmp_path, failing, concurrency=60, retries=30, answers=str(tmp_path / "others"), budget={})
    assert build(again, workers=1, progress=False).up_to_date
    other = build(again, workers=1, progress=False, output=str(tmp_path / "elsewhere"))
    assert other.fingerprint == first.fingerprint
    with pytest.raises(BuildError, match="another"):
        build(recipe(tmp_path, server, version="2"), workers=1, progress=False)


def test_a_score_sorts_documents_into_buckets(
    tmp_path: Path, server: ModelServer, inline_builds: None
) -> None:
    write_inputs(tmp_path, TEXTS)
    given = recipe(tmp_path, server, score={"pattern": PATTERN, "name": "edu"})
    buckets = {"scores": {"column": "edu", "thresholds": [2, 4]}, "labels": {"low": 0, "mid": 1, "high": 2}}
    given["steps"].append({"buckets": buckets})
    given["output"]["where"] = {"bucket": "high"}
    build(given, workers=1, progress=False)
    assert texts_of(tmp_path) == sorted(text for text in TEXTS if score_of(f"Judge: {text}") >= 4)


def cheapest(folder: Path, server: ModelServer, *later: Any, **settings: Any) -> dict[str, Any]:
    """A recipe of the short form, in which `ask` comes before other filters."""
    given = recipe(folder, server, **settings)
    [ask] = given.pop("steps")
    return given | {"filters": [ask, *later], "dedup": {"exact": True}}


@pytest.mark.extended
def test_the_cheapest_order_asks_behind_exact_and_leaves_the_same_documents(
    tmp_path: Path, failing: ModelServer, inline_builds: None
) -> None:
    texts = [
        f"Text {number} {'NOSCORE' * (number % 5 == 0)}{'REFUSE' * (number % 7 == 0)}" for number in range(90)
    ]
    write_inputs(tmp_path, texts * 2)
    write_inputs(tmp_path, texts[::-1], "b")
    kinds: dict[str, dict[str, Any]] = {
        "score": {},
        "label": {"label": {"pattern": "score: *([0-5])", "keep": ["3", "4"]}, "unusable": "keep"},
    }
    for name, settings in kinds.items():
        made = {}
        for order in ("given", "cheapest"):
            given = cheapest(
                *(tmp_path, failing, {"length": {"max_chars": 12}}),
                **settings,
                answers=str(tmp_path / name / order),
                retries=30,
            )
            given |= {"order": order, "output": {"path": str(tmp_path / "out"), "format": "jsonl"}}
            failing.counts()  # forgets those before
            result = build(given, workers=1, progress=False, replace=True)
            steps = [cost.step for cost in result.costs]
            assert steps == (["ask", "length", "exact"] if order == "given" else ["length", "exact", "ask"])
            rows = [json.loads(line) for file in (tmp_path / "out").glob("text-*") for line in file.open()]
            made[order] = sorted(row["document_id"] for row in rows), failing.counts()["answers"]
            assert {*made[order][1].values()} == {1}
        assert made["given"][0] == made["cheapest"][0]
        assert 10 < len(made["given"][0]) < 80
        assert 0 < len(made["cheapest"][1]) < len(made["given"][1]) == 90


@pytest.mark.parametrize(
    ("settings", "later", "waits"),
    [
        ({}, [], True),
        ({"label": {"keep": ["a"]}, "unusable": "keep"}, [], True),
        ({"prompt": "Judge {text} of {url}"}, [], False),
        ({"prompt": "Judge {text} of {metadata.site}"}, [], False),
        ({"prompt": "Judge {id}"}, [], False),
        ({"prompt": None, "prompt_file": "prompt.txt"}, [], False),
        ({"on_error": "drop"}, [], False),
        ({"on_error": "keep"}, [], False),
        ({"rewrite": True}, [], False),
        ({"field": "edu"}, [], False),
        ({}, [{"repeated_lines": {}}], False),
        ({}, [{"buckets": {"scores": {"column": "score", "thresholds": [2]}}}], False),
        ({"score": {"name": "other"}}, [{"buckets": {"scores": {"model": "a.bin", "label": "score"}}}], True),
    ],
)
def test_the_cheapest_order_moves_only_what_judges_equal_texts_alike(
    tmp_path: Path, server: ModelServer, settings: dict[str, Any], later: list[Any], waits: bool
) -> None:
    given = cheapest(tmp_path, server, *later, **settings) | {"order": "cheapest"}
    if settings.get("prompt", "") is None:
        del given["filters"][0]["ask"]["prompt"]
    passes = recipe_from_mapping(given, folder=tmp_path).passes
    assert ["ask" in dict(one) for one in passes] == ([False, True] if waits else [True])


def test_what_a_model_says_is_a_field_for_later_steps_and_outputs(
    tmp_path: Path, server: ModelServer, inline_builds: None
) -> None:
    texts = [*TEXTS, "NOSCORE at all."]
    write_inputs(tmp_path, texts)
    given = recipe(tmp_path, server, label={"pattern": r"score: (\d)"}, field="grade", unusable="keep")
    [asked] = given["steps"]
    score = {"score": {"pattern": PATTERN, "name": "edu"}, "field": "edu"}
    again = {name: value for name, value in asked["ask"].items() if name != "label"} | score
    given["steps"] += [{"sample": {"documents": 5, "by": "grade"}}, {"ask": again}]
    given["output"]["where"] = {"grade": ["2", "3"], "edu": {"min": 2}}
    result = build(given, workers=1, progress=False)
    grades = [score_of(f"Judge: {text}") for text in texts[:-1]]
    rows = [json.loads(line) for line in (tmp_path / "out" / "text-00000.jsonl").read_text().splitlines()]
    assert len(rows) == sum(min(5, grades.count(grade)) for grade in (2, 3))
    for row in rows:
        grade = score_of(f"Judge: {row['text']}")
        assert row["metadata"] == {"grade": f"{grade:.0f}", "edu": grade}
    assert "requests" not in result.costs[-1].spent, "the same question is answered once"
    wrong = given | {"amounts": {"input-0": {"documents": 1, "by": "mark"}}}
    with pytest.raises(RecipeError, match="no input keeps a field 'mark'"):
        build(wrong, workers=1, progress=False)


def test_documents_that_an_earlier_rule_dropped_are_never_sent(tmp_path: Path, server: ModelServer) -> None:
    server.counts()
    entries = [FilterEntry.model_validate({"length": {"max_chars": 38}}).filters()[0]]
    texts = [f"Document {number} is dropped or sent." for number in range(800, 1200)]
    for annotate in (False, True):
        made = config(server, answers=f"answers-{annotate}")
        chain = FilterChain([*entries, ("ask", made)], tmp_path, annotate=annotate, seed=1)
        filtered = chain.apply(documents([*texts, *(f"{text}!" * 2 for text in texts)]))
        assert filtered.sampled > 1
        sent = server.counts()["requests"]
        assert [*sent.values()] == [1] * len(texts)
        assert filtered.kept.num_rows == sum(score_of(f"Judge: {text}") >= 3 for text in texts)
        assert filtered.alone.keys() == {"length/too_many_characters", "ask/score"}


def test_answers_are_numbers_labels_or_nothing(tmp_path: Path, server: ModelServer) -> None:
    texts = ["one", "REFUSE two", "EMPTY three", "NOSCORE four"]
    for unusable, dropped in (("drop", [False, True, True, True]), ("keep", [False] * 4)):
        rules, _, _ = judge(tmp_path, config(server, unusable=unusable, score={"pattern": PATTERN}), texts)
        fails = rules[1].fails
        assert (fails is None) == (unusable == "keep")
        assert (dropped if fails is None else fails.tolist()) == dropped
        assert rules[1].values is not None
        assert rules[1].values.tolist() == ["", "refused", "no score", "no score"]
        assert rules[2].fails is None
    label = {"pattern": r"(\w+) score", "keep": ["Educational"]}
    rules, _, _ = judge(tmp_path, config(server, label=label), texts)
    assert rules[2].values is not None
    assert rules[2].values.tolist() == ["Educational", "", "", ""]
    assert rules[1].values is not None
    assert rules[1].values.tolist() == ["", "refused", "no label", "no label"]
    rules, _, _ = judge(tmp_path, config(server, label=label | {"keep": "Other"}), texts)
    assert rules[2].fails is not None
    assert rules[2].fails.tolist() == [True, False, False, False]


@pytest.mark.parametrize(
    ("extract", "answer", "number"),
    [
        ({}, " 3.5 ", 3.5),
        ({}, "3 of 5", None),
        ({}, "nan", None),
        ({}, "1e999", None),
        ({"key": "score"}, 'Here: ```json\n{"score": 4}\n```', 4.0),
        ({"key": "score"}, '{"score": "2"}', 2.0),
        ({"key": "a.b"}, '{"a": {"b": -1}}', -1.0),
        *(({"key": "a.b"}, text, None) for text in ('{"a": 3}', '{"a": {"b": true}}', "{", "", "[1]", "}{")),
        ({"pattern": r"\d+"}, "first 1, then 22", 22.0),
        ({"pattern": r"x(\d)?"}, "x", None),
    ],
)
def test_a_number_is_found_in_an_answer(
    extract: dict[str, Any], answer: str, number: float | None, server: ModelServer
) -> None:
    found = config(server, score=extract).score.number(answer)
    assert found == number or (number is None and np.isnan(found))


def test_a_prompt_holds_the_fields_of_a_document_and_no_more(tmp_path: Path, server: ModelServer) -> None:
    (tmp_path / "prompt.txt").write_text("{url}|{id}|{metadata.a.b}|{metadata.none}|{text}|{other}|{}")
    made = config(server, prompt=None, prompt_file="prompt.txt", characters=9, system="S", body={"top_p": 1})
    assert made.files() == ("prompt.txt",)
    asker = made.build(tmp_path)._asker
    batch = text_batch(["{url}{id} is longer"], ["http://x.test/"], metadata=['{"a": {"b": [1, "\u00e9"]}}'])
    [body] = asker._bodies(batch, [0])
    assert json.loads(body) == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "S"},
            {"role": "user", "content": 'http://x.test/||[1, "\u00e9"]||{url}{id}|{other}|{}'},
        ],
        "max_tokens": 1024,
        "temperature": 0.0,
        "top_p": 1,
    }


REWRITE = {"prompt": "Rewrite: {text}", "rewrite": True}


@pytest.mark.parametrize("unusable", ["drop", "keep"])
def test_rewritten_documents_keep_their_ids_and_are_listed(
    tmp_path: Path, server: ModelServer, inline_builds: None, unusable: str
) -> None:
    odd = ["REFUSE this", "EMPTY that", "LONG one"]
    texts = [*TEXTS, *odd]
    write_inputs(tmp_path, texts)
    given = recipe(tmp_path, server, **REWRITE, unusable=unusable)
    made = build(given, workers=1, progress=False)
    new = {text: answer_to(f"Rewrite: {text}") for text in TEXTS}
    assert texts_of(tmp_path) == sorted([*new.values(), *(odd if unusable == "keep" else [])])
    rows = [json.loads(line) for line in (tmp_path / "out" / "rewritten.jsonl").open()]
    assert [row["record"] for row in rows] == [*range(len(TEXTS))]
    assert {(row["file"], row["model"], row["version"]) for row in rows} == {("a.jsonl", "m", "1")}
    assert [row["bytes_after"] for row in rows] == [len(text) for text in new.values()]
    assert [row["bytes_before"] for row in rows] == [len(text) for text in TEXTS]
    written = [json.loads(line) for file in (tmp_path / "out").glob("text-*") for line in file.open()]
    ids = {row["record"]: row["document_id"] for row in written}
    assert all(ids[row["record"]] == row["document_id"] for row in rows)
    lost = made.funnel.dropped
    assert lost["ask/rewrite"].documents == 0
    assert ("ask/unusable" in lost and lost["ask/unusable"].documents == 3) == (unusable == "drop")


def test_a_budget_is_never_exceeded_and_a_build_continues_where_it_ended(
    tmp_path: Path, failing: ModelServer, inline_builds: None
) -> None:
    failing.counts()
    write_inputs(tmp_path, TEXTS)
    for allowed in (20, 45):
        given = recipe(tmp_path, failing, retries=30, concurrency=60, budget={"requests": allowed})
        with pytest.raises(BuildError, match="budget is spent") as caught:
            build(given, workers=1, progress=False)
        assert f"{allowed:,} requests" in str(caught.value)
        assert "run the same command again" in str(caught.value)
    paid = failing.counts()["answers"]
    assert {*paid.values()} == {1}
    assert len(paid) <= 45
    build(recipe(tmp_path, failing, retries=30, concurrency=60), workers=1, progress=False)
    more = failing.counts()["answers"]
    assert not paid.keys() & more.keys()
    assert len(paid) + len(more) == len(TEXTS)
    with pytest.raises(BuildError, match="budget is spent"):
        judge(tmp_path, config(failing, budget={"tokens": 2000}, answers="c"), TEXTS)


def test_rates_hold_for_all_processes_that_share_the_answers(tmp_path: Path) -> None:
    meters = [Meter(tmp_path / "m", Rates(requests_per_minute=6000)) for _ in range(2)]
    assert meters[0].reserve(10) == 0
    assert 0 < meters[1].reserve(10) <= 0.01
    tokens = Meter(tmp_path / "t", Rates(tokens_per_minute=600))
    assert tokens.reserve(10) == 0
    assert 0.9 < tokens.reserve(1) <= 1
    for meter in (*meters, tokens):
        meter.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("status", "problem"),
    [
        (401, "status 401: the key is missing, wrong"),
        (403, "api_key_env"),
        (404, "check `url`, to which /chat/completions is added"),
        (302, "redirects are not followed"),
        (429, "the server asks to wait 9,999 s"),
    ],
)
def test_what_every_document_would_meet_stops_the_build_at_once(
    tmp_path: Path, status: int, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUR_KEY", KEY)
    with ModelServer(status=status, header="retry-after: 9999") as server:
        made = config(server, concurrency=1, api_key_env="OUR_KEY", on_error="keep")
        with pytest.raises(BuildError, match=problem) as caught:
            judge(tmp_path, made, TEXTS)
        assert sum(server.counts()["requests"].values()) == 1
    assert KEY not in repr(caught.getrepr(showlocals=False))


def test_a_document_whose_request_fails_stops_the_build_or_is_dropped_or_kept(tmp_path: Path) -> None:
    texts = TEXTS[:5]
    with ModelServer(status=400) as server:
        with pytest.raises(BuildError, match=r"f: record \d: ask: http.*status 400: .*no"):
            judge(tmp_path, config(server, on_error="stop"), texts)
        rules, _, spent = judge(tmp_path, config(server, on_error="drop"), texts)
        assert rules[0].fails is not None
        assert rules[0].fails.all()
        rules, _, _ = judge(tmp_path, config(server, on_error="keep"), texts)
        assert rules[0].fails is None
        assert rules[2].fails is not None
        assert not rules[2].fails.any()
        assert spent["failures"] == 5
        with pytest.raises(BuildError, match="50 requests failed in a row"):
            judge(tmp_path, config(server, on_error="keep"), TEXTS)


@pytest.mark.parametrize(
    ("settings", "status", "message"),
    [
        ({}, 400, "a.jsonl: record 0: ask: http.*status 400"),
        ({"on_error": "drop"}, 401, "status 401"),
        ({"budget": {"requests": 3}}, 200, "the budget is spent: 3 requests"),
    ],
)
def test_what_stops_asking_is_no_failure_of_a_split(
    tmp_path: Path, settings: dict[str, Any], status: int, message: str, inline_builds: None
) -> None:
    write_inputs(tmp_path, TEXTS)
    with ModelServer(status=status) as server:
        given = recipe(tmp_path, server, **settings) | {"max_failed_splits": 5}
        with pytest.raises(UnavailableError, match=message):
            build(given, workers=1, progress=False)


def test_the_key_is_in_no_message_though_the_server_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUR_KEY", KEY)
    with ModelServer(status=400) as server, pytest.raises(BuildError) as caught:
        judge(tmp_path, config(server, api_key_env="OUR_KEY"), TEXTS)
    assert "Bearer ***" in str(caught.value)
    assert KEY not in str(caught.value)


def test_a_request_that_takes_too_long_is_sent_again_and_fails_in_the_end(tmp_path: Path) -> None:
    with ModelServer(seconds=30) as server:
        with pytest.raises(BuildError, match=r"no answer in 0.1 s \(after 2 attempts\)"):
            judge(tmp_path, config(server, timeout_seconds=0.1, retries=1, concurrency=1), TEXTS)
        assert sum(server.counts()["requests"].values()) == 2


def test_it_asks_where_an_event_loop_runs_too_as_in_notebooks(tmp_path: Path, server: ModelServer) -> None:
    async def cell() -> list[Rule]:
        return judge(tmp_path, config(server), TEXTS)[0]

    rules = asyncio.run(cell())
    assert rules[2].values is not None
    assert rules[2].values.tolist() == [score_of(f"Judge: {text}") for text in TEXTS]


def test_without_its_extra_the_error_names_it(
    tmp_path: Path, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "httptools", None)
    with pytest.raises(MissingExtraError, match=r"ask needs httptools: pip install 'shardkit\[ask\]'"):
        judge(tmp_path, config(server), TEXTS)


def test_an_endpoint_that_is_not_there_ends_the_retries(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    [(_, made)] = FilterEntry.model_validate(
        {"ask": {"url": url, "model": "m", "prompt": "{text}", "score": {}, "retries": 1}}
    ).filters()
    with pytest.raises(BuildError, match=r"cannot connect to 127.0.0.1:.* \(after 2 attempts\)"):
        judge(tmp_path, made, TEXTS[:2])
    assert not [*tmp_path.glob("answers/*.jsonl")]


def test_a_missing_key_is_named_by_its_variable(
    tmp_path: Path, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = config(server, api_key_env="NO_SUCH_KEY")
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(RecipeError, match="the environment variable NO_SUCH_KEY is not set"):
        judge(tmp_path, made, TEXTS)
    monkeypatch.setenv("NO_SUCH_KEY", "a\r\nhost: b")
    with pytest.raises(RecipeError, match="has characters that no key has") as caught:
        judge(tmp_path, made, TEXTS)
    assert "host" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"url": "localhost:8000"}, "not a base URL"),
        ({"url": "http://a/v1?key=3"}, "not a base URL"),
        ({"url": "http://me:secret@a/v1"}, "has a user or password"),
        ({"prompt": "no place"}, "has no {text}"),
        ({"prompt": None}, "give prompt or prompt_file"),
        ({"prompt_file": "a"}, "give prompt or prompt_file"),
        ({"score": {"key": "a", "pattern": "b"}}, "give key or pattern, not both"),
        ({"score": {"pattern": "("}}, "not a regular expression"),
        ({"score": {"pattern": "(a)(b)"}}, "has 2 groups"),
        ({"score": {"min": 3, "max": 2}}, "no document can pass"),
        ({"score": {"name": "failed"}}, "the name of a rule"),
        ({"score": {}, "rewrite": True}, "give one of score, label and rewrite"),
        ({"rewrite": False}, "got none"),
        ({"label": {"keep": []}}, "give keep, or a field"),
        ({"label": {}}, "give keep, or a field"),
        ({"rewrite": True, "field": "topic"}, "field: a rewritten text has no score or label"),
        ({"body": {"stream": True}}, "stream is not set here"),
        ({"budget": {"requests": 0}}, "greater than or equal to 1"),
        ({"retries": -1}, "greater than or equal to 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    settings: dict[str, Any], problem: str, server: ModelServer
) -> None:
    with pytest.raises(ValidationError, match=problem) as caught:
        config(server, **settings)
    assert "secret" not in caught.value.errors(include_input=False)[0]["msg"]


def test_a_prompt_file_without_a_place_for_the_text_is_a_recipe_error(
    tmp_path: Path, server: ModelServer
) -> None:
    made = config(server, prompt=None, prompt_file="p.txt")
    with pytest.raises(RecipeError, match=r"ask.prompt_file: .*p.txt: No such file"):
        made.build(tmp_path)
    for content, problem in ((b"none", "has no {text}"), (b"\xff{text}", "codec")):
        (tmp_path / "p.txt").write_bytes(content)
        with pytest.raises(RecipeError, match=problem):
            made.build(tmp_path)


def test_settings_cannot_differ_by_language(server: ModelServer) -> None:
    ask = {"url": server.url, "model": "m", "prompt": "{text}", "score": {}}
    with pytest.raises(ValidationError, match="must be the same for all languages"):
        FilterEntry.model_validate({"ask": ask, "by_language": {"de": {"version": "2"}}})


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def test_lines_that_are_torn_or_damaged_are_no_answers(tmp_path: Path) -> None:
    first = Answers(tmp_path)
    for number in range(10):
        first.keep(key_of(number), Answer(f"answer {number}", tokens_in=number), "s", "m")
    [path] = tmp_path.glob("*.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].replace(b"answer", b"ans\0er")
    lines[4] = b"\0" * len(lines[4][:-1]) + b"\n"
    lines[5] = lines[5].replace(b'"key":"0', b'"key":"x')
    path.write_bytes(b"".join(lines) + lines[0][:-9])
    os.close(first._files[0])  # as if the process had ended: its lock is free
    second = Answers(tmp_path)
    found = [second.find(key_of(number)) for number in range(10)]
    assert [number for number, one in enumerate(found) if one is None] == [3, 4, 5]
    assert found[7] == Answer("answer 7", tokens_in=7)
    second.keep(key_of(99), Answer("new"), "s", "m")
    second.sync()
    assert path.read_bytes().splitlines(keepends=True)[:10] == lines
    assert json.loads(path.read_bytes().splitlines()[10])["text"] == "new"
    third = Answers(tmp_path)
    assert third.find(key_of(99)) == Answer("new")
    third.keep(key_of(100), Answer("of another process"), "s", "m")
    assert len([*tmp_path.glob("*.jsonl")]) == 2
    second.refresh()
    assert second.find(key_of(100)) == Answer("of another process")


def test_an_index_of_many_answers_finds_each(tmp_path: Path) -> None:
    first = Answers(tmp_path)
    keys = [np.random.default_rng(number).bytes(16) for number in range(400)]
    keys.append(keys[0][:8] + b"8 others")
    for number, key in enumerate(keys):
        first.keep(key, Answer(str(number)), "s", "m")
        if number % 150 == 149:
            first._compact()
    first._compact()
    assert [first.find(key) for key in keys] == [Answer(str(number)) for number in range(len(keys))]
    assert first.find(keys[0][:8] + b"unknown.") is None


def test_a_folder_of_answers_that_is_made_anew_is_opened_anew(tmp_path: Path, server: ModelServer) -> None:
    made = config(server)
    judge(tmp_path, made, TEXTS[:3])
    (tmp_path / "answers").rename(tmp_path / "moved")
    _, _, spent = judge(tmp_path, made, TEXTS[:3])
    assert spent["requests"] == 3
    assert [*tmp_path.glob("answers/*.jsonl")]
