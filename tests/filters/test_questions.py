"""Documents that hold questions of evaluation sets, with their answers, are found and dropped; no others."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from reference.filters import reference_question_score
from shardkit.cli.main import main
from shardkit.errors import RecipeError
from shardkit.writers import build
from shardkit.writers.filters.base import Filter
from shardkit.writers.filters.decontamination import DecontaminationConfig
from shardkit.writers.filters.questions import QuestionFilter, QuestionsConfig
from shardkit.writers.kernels.words import normalized_words
from support.filter_runs import fails, text_batch, values
from support.small_build import make_corpus

SHORT = "Which river flows through the old town of the city of Bern in Switzerland?"  # 14 words
SHORT_ITEM = {"question": SHORT, "answer": "The Aare"}
LONG = (
    "A baker sells 48 loaves in April, and then she sells half as many loaves in May as she had sold in the "
    "month before; how many loaves has she sold altogether by the end of May, if nobody brings one back?"
)
LONG_WORDS = len(normalized_words(LONG))
LONG_ITEM = {
    "question": LONG,
    "answer": "She sold 48 / 2 = 24 loaves in May, which makes 72 loaves altogether.",
}
OTHERS = [
    {
        "question": f"Which of the following is true of the {name} that lives in the north of the country?",
        "answer": name,
    }
    for name in ("lynx", "wolf", "bear", "moose", "otter", "eagle", "raven", "beaver")
]
FILLER = "It rained for most of the week, so we stayed inside and read what was on the shelf. " * 8


def made(folder: Path, items: list[dict[str, Any]], **given: Any) -> QuestionFilter:
    (folder / "eval.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    config = {"evaluations": {"path": "eval.jsonl"}, "questions": given}
    found = DecontaminationConfig.model_validate(config).build(folder)
    assert isinstance(found, QuestionFilter)
    assert isinstance(found, Filter)
    return found


def scores(folder: Path, texts: list[str], items: list[dict[str, Any]], **given: Any) -> list[float]:
    return values(made(folder, items, **given).judge(text_batch(texts))[0])


def inside(text: str) -> str:
    return f"{FILLER}{text} {FILLER}"


def test_a_short_question_counts_with_its_answer_and_only_so(tmp_path: Path) -> None:
    texts = [
        inside(f"{SHORT} It is the Aare."),
        inside(f"{SHORT.upper().replace(' ', '  ')} -- a) the Rhine, b) THE AARE"),
        inside(f"{SHORT} It is the Rhine."),
        inside(f"{SHORT} {FILLER} It is the Aare."),
        inside(f"It is the Aare. {SHORT}"),
        inside("The Aare flows through Bern."),
    ]
    items = [*OTHERS, SHORT_ITEM]
    found, item = made(tmp_path, items).judge(text_batch(texts))
    assert fails(found) == [True, True, False, False, False, False]
    assert values(found) == [1, 1, 0, 0, 0, 0]
    assert values(item) == ["eval.jsonl:8", "eval.jsonl:8", "", "", "", ""]
    # without an answer to ask for, the question is all there is
    assert scores(tmp_path, texts, [*OTHERS, {"question": SHORT + " Why?"}]) == [0] * 6
    assert scores(tmp_path, [inside(SHORT)], [{"question": SHORT}], min_item_words=14) == [1]


def test_a_long_question_counts_without_its_answer_unless_that_is_asked_for(tmp_path: Path) -> None:
    texts = [inside(LONG), inside(f"{LONG} She sold 60.")]
    assert scores(tmp_path, texts, [*OTHERS, LONG_ITEM]) == [1, 1]
    assert scores(tmp_path, texts, [*OTHERS, LONG_ITEM], long_question=LONG_WORDS) == [1, 1]
    assert scores(tmp_path, texts, [*OTHERS, LONG_ITEM], long_question=LONG_WORDS + 1) == [0, 0]
    assert scores(tmp_path, texts, [*OTHERS, LONG_ITEM], long_question=None) == [0, 0]


def test_a_question_with_a_few_other_words_is_found_and_with_many_it_is_not(tmp_path: Path) -> None:
    few = LONG.replace("April", "March").replace("altogether", "in all")
    answer = LONG_ITEM["answer"]
    assert few != LONG
    words = LONG.split()
    many = " ".join(f"{word}ish" if number % 5 == 0 else word for number, word in enumerate(words))
    reordered = " ".join(sorted(words))
    texts = [inside(f"{text} {answer}") for text in (few, many, reordered)]
    assert [score > 0 for score in scores(tmp_path, texts, [*OTHERS, LONG_ITEM])] == [True, False, False]


def test_boilerplate_of_questions_is_no_question(tmp_path: Path) -> None:
    """Phrases that many items have weigh little, and those that one has are not enough."""
    texts = [
        inside("Which of the following is true of the lynx?"),
        inside("Which of the following is true of the animal that lives in the north of the country? Lynx."),
        inside(
            "Which of the following is true of the lynx that lives in the north of the country? The lynx."
        ),
    ]
    assert scores(tmp_path, texts, OTHERS) == [0, 0, 1]


def test_a_passage_supports_its_question(tmp_path: Path) -> None:
    passage = (
        "The mill at the upper bridge was built by two brothers in 1812, burned down in the winter of 1868, "
        "and was put up again by their grandsons with the money of the whole valley."
    )
    item = {"question": "Who had the mill built for the first time?", "passage": passage}
    texts = [inside(f"{passage} {item['question']}"), inside(item["question"]), inside(passage)]
    assert [score > 0 for score in scores(tmp_path, texts, [*OTHERS, item])] == [True, False, False]
    both = item | {"answer": "two brothers"}
    texts = [f"{passage} {item['question']} {answer}" for answer in ("Two brothers", "The miller", "")]
    found = scores(tmp_path, texts, [*OTHERS, both], threshold=0.5)
    assert found[0] == 1
    assert 1 > found[1] == found[2] > 0


def test_scores_do_not_depend_on_the_order_or_the_copies_of_items(tmp_path: Path) -> None:
    items = [*OTHERS, SHORT_ITEM, LONG_ITEM]
    few = LONG.replace("April", "March")
    texts = [
        inside(f"{few} 72"),
        inside(f"{SHORT} The Aare"),
        inside(f"{OTHERS[3]['question']} Moose"),
        FILLER,
    ]
    expected = scores(tmp_path, texts, items)
    assert [score > 0 for score in expected] == [True, True, True, False]
    rng = random.Random(5)
    for _ in range(5):
        mixed = [*items, *rng.choices(items, k=rng.randrange(20))]
        rng.shuffle(mixed)
        assert scores(tmp_path, texts, mixed) == expected


def test_the_report_tells_the_item_the_words_and_the_overlaps(tmp_path: Path) -> None:
    step = made(tmp_path, [*OTHERS, LONG_ITEM, SHORT_ITEM])
    answer = LONG_ITEM["answer"]
    text = f"É. {LONG} {answer} Then: {SHORT} The Rhine, or the Aare."
    step.judge(text_batch(["fine", text]))
    first, second = step.take_rows()
    assert step.take_rows() == []
    assert (first["file"], first["record"]) == ("f", 2)
    place = {
        "evaluation": "eval.jsonl",
        "item": 8,
        "begin": 1,
        "end": 1 + len(LONG.split()),
        "text": LONG[:-1],
    }
    overlaps = {"score": 1, "question": 1, "answer": 1, "passage": None}
    assert first.items() >= (place | overlaps).items()
    assert second.items() >= {"item": 9, "score": 1, "answer": 1, "text": SHORT[:-1]}.items()


def test_questions_of_scripts_without_spaces_are_found_by_their_characters(tmp_path: Path) -> None:
    question, answer = "下列关于细胞膜的说法中哪一项是正确的？(GSM 8)", "磷脂双分子层"
    item = {"question": question, "answer": answer}
    others = [{"question": question.replace("细胞膜", name), "answer": name} for name in ("线粒体", "叶绿体")]
    texts = [f"今天下雨。{question}答案：{end}今天又下雨。" for end in (answer, "叶绿体")]
    step = made(tmp_path, [*others, item], unit="auto", long_question=40)
    assert values(step.judge(text_batch(texts))[0]) == [1, 0]
    [row] = step.take_rows()
    assert (row["item"], row["begin"], row["end"], row["text"]) == (2, 4, 24, question[:-1])
    with pytest.raises(RecipeError, match=r"too short; .* set questions\.unit to auto"):
        made(tmp_path, [*others, item])


def test_marking_reports_and_drops_nothing(tmp_path: Path) -> None:
    (tmp_path / "eval.jsonl").write_text(json.dumps(LONG_ITEM))
    config = {"evaluations": {"path": "eval.jsonl"}, "questions": {}, "action": "mark"}
    step = DecontaminationConfig.model_validate(config).build(tmp_path)
    assert isinstance(step, QuestionFilter)
    found, item = step.judge(text_batch([inside(LONG)]))
    assert (fails(found), values(found), values(item)) == (None, [1], ["eval.jsonl:0"])
    assert len(step.take_rows()) == 1


def test_items_come_from_json_lines_gzip_and_parquet_with_fields_of_any_name(tmp_path: Path) -> None:
    rows = [
        {"id": 1, "query": "", "answers": {"text": []}},
        {"id": 2, "query": SHORT, "answers": {"text": ["The Rhone", "The Aare"]}},
        {"id": 3, "query": f"{SHORT} How long is it, in km?", "answers": {"text": []}},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with gzip.open(tmp_path / "b.jsonl.gz", "wb") as file:
        file.write(b"\n" + json.dumps({"question": LONG[:70], "answer": 288}).encode() + b"\n")
    sets = [
        {"path": "a.parquet", "name": "rivers", "question": "query", "answer": "answers.text"},
        {"path": "b.jsonl.gz"},
    ]
    config = DecontaminationConfig.model_validate({"evaluations": sets, "questions": {}})
    assert config.files() == ("a.parquet", "b.jsonl.gz")
    step = config.build(tmp_path)
    assert isinstance(step, QuestionFilter)
    texts = [f"{SHORT} the aare", f"{SHORT} the Rhone", f"{LONG[:70]} 288", f"{LONG[:70]} 28", ""]
    _, item = step.judge(text_batch(texts))
    assert values(item) == ["rivers:1", "rivers:1", "b.jsonl.gz:1", "", ""]
    runs = {"evaluations": [{"path": "a.parquet", "fields": ["query"]}]}
    overlap = DecontaminationConfig.model_validate(runs).build(tmp_path)
    assert isinstance(overlap, Filter)
    assert values(overlap.judge(text_batch(texts))[1]) == ["a.parquet:1", "a.parquet:1", "", "", ""]


@pytest.mark.parametrize(
    ("name", "data", "keys", "problem"),
    [
        ("e.jsonl", b'{"question": "x"}\n{"text": "y"}\n', {}, "line 2 has no text under question"),
        (
            "e.jsonl",
            b'{"question": "x", "answer": 1}\n',
            {"answer": "label"},
            "no record has a text under label",
        ),
        ("e.jsonl", b'{"question": "x"}\n', {"passage": "context"}, "under context; set passage"),
        ("e.jsonl", b'"x"\n', {}, "line 1 has no text under question"),
        ("e.jsonl", b'{"question": "x", "choices": ["a", "b"], "answer": 1}\n', {}, "set answer to choices"),
        (
            "e.jsonl",
            b'{"question": "x", "options": {"text": ["a"]}, "key": "B"}\n',
            {"answer": "key"},
            "line 1 has the answer B and a list of options; set answer to options.text",
        ),
        ("e.jsonl", b'{"question": "how long is it"}\n', {}, "all items \\(1\\) are too short"),
        ("e.txt", b"a question\n", {}, "line 1 is plain text"),
        ("e.parquet", b"PAR1 or not", {}, "not a Parquet file that can be read"),
    ],
)
def test_files_without_the_fields_are_refused(
    tmp_path: Path, name: str, data: bytes, keys: dict[str, str], problem: str
) -> None:
    (tmp_path / name).write_bytes(data)
    config = {"evaluations": [{"path": name, **keys}], "questions": {}}
    with pytest.raises(RecipeError, match=problem):
        DecontaminationConfig.model_validate(config).build(tmp_path)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"questions": {}, "cut": {}}, "finds no exact bounds"),
        ({"questions": {}, "ngram": 13}, "ngram: no effect with `questions`"),
        ({"questions": {}, "min_matches": 1}, "min_matches: no effect with `questions`"),
        ({"questions": {}, "evaluations": [{"path": "e", "fields": ["a"]}]}, "fields has no effect"),
        ({"evaluations": [{"path": "e", "answer": "a"}]}, "answer needs `questions`"),
        ({"questions": {"threshold": 0}}, "greater than 0"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        DecontaminationConfig.model_validate({"evaluations": [{"path": "e"}]} | keys)


def test_recipes_of_runs_of_words_keep_their_digests_and_cards_can_be_read_again() -> None:
    runs = DecontaminationConfig.model_validate({"evaluations": [{"path": "e"}]})
    plain = {"ngram": 13, "min_item_words": 8, "min_matches": 1, "action": "drop"}
    assert runs.model_dump(mode="json") == plain | {
        "evaluations": [{"path": "e", "name": None, "fields": ["text"]}]
    }
    chosen = {"evaluations": [{"path": "e", "answer": "a"}], "questions": {"ngram": 3}}
    config = DecontaminationConfig.model_validate(chosen)
    again = DecontaminationConfig.model_validate_json(config.model_dump_json())
    assert again == config
    assert not {"ngram", "min_matches", "cut"} & config.model_dump(mode="json").keys()


def test_nothing_is_found_where_there_is_nothing_to_find(tmp_path: Path) -> None:
    assert scores(tmp_path, [FILLER, ""], []) == [0, 0]
    assert scores(tmp_path, [FILLER, ""], [{"question": "", "answer": "x " * 30}, LONG_ITEM]) == [0, 0]
    assert scores(tmp_path, [], [LONG_ITEM]) == []


Parts = tuple[str, str | None, str | None]
VOCABULARY = [
    "a",
    "B",
    "b",
    "c",
    "d,",
    "é",
    "e\u0301",
    "中文",
    "は1",
    "1",
    "...",
    "\u2028",
    *"fghjklmnopqrstuvwxyz",
]


def parts_and_text(rng: random.Random) -> tuple[list[Parts], str]:
    """Items, and a text of their parts in some order, with words changed, left out and put in between."""

    def words(most: int, vocabulary: list[str]) -> list[str]:
        return rng.choices(vocabulary, k=rng.randrange(1, most))

    shared = [words(9, VOCABULARY) for _ in range(3)]

    def part(most: int) -> str:
        return " ".join(words(most, VOCABULARY) + rng.choice([[], *shared]) + words(most, VOCABULARY))

    items: list[Parts] = []
    for _ in range(rng.randrange(1, 6)):
        most = rng.choice([4, 12, 30])
        answer, passage = [rng.choice([None, part(rng.choice([2, 4, 20]))]) for _ in range(2)]
        question = rng.choice(items)[0] if items and rng.random() < 0.3 else part(most)
        items.append((question, answer, passage))
    text: list[str] = []
    change = rng.choice([0, 0.05, 0.15])
    for _ in range(rng.randrange(1, 4)):
        question, *others = rng.choice(items)
        item = [question, *(one for one in others if one and rng.random() < 0.7)]
        if rng.random() < 0.5:
            rng.shuffle(item)
        for piece in item:
            text += [word if rng.random() >= change else f"other{rng.random()}" for word in piece.split()]
            text += [f"between{rng.random()}"] * rng.choice([0, 0, 3, rng.randrange(150)])
    start = rng.choice([0, 0, rng.randrange(len(text))])
    return items, " ".join(text[start:])


HALF = {"ngram": 1, "unit": "auto", "min_item_words": 1, "max_misses": 0}


@settings(max_examples=400, deadline=None)
@example(  # half of a question, although the weights of its n-grams are rounded
    seed=29179006, chosen={**HALF, "long_question": None, "answer_window": 1, "threshold": 0.101}
)
@given(
    seed=st.integers(0, 2**32),
    chosen=st.fixed_dictionaries(
        {
            "ngram": st.integers(1, 4),
            "unit": st.sampled_from(["words", "auto"]),
            "min_item_words": st.sampled_from([1, 8, 15]),
            "max_misses": st.sampled_from([0, 2, 5, 11]),
            "long_question": st.none() | st.integers(1, 40),
            "answer_window": st.sampled_from([1, 5, 50]),
            "threshold": st.sampled_from([0.101, 0.301, 0.51, 0.667, 0.801, 1.0]),
        }
    ),
)
def test_scores_are_those_of_the_plain_reference(
    tmp_path_factory: pytest.TempPathFactory, seed: int, chosen: dict[str, Any]
) -> None:
    items, text = parts_and_text(random.Random(seed))
    items.append((LONG, LONG_ITEM["answer"], None))  # one that is never too short
    records = [dict(zip(("question", "answer", "passage"), item, strict=True)) for item in items]
    found = scores(tmp_path_factory.getbasetemp(), [FILLER, text], records, **chosen)
    expected = reference_question_score(text, items, **chosen)
    assert found == [0, pytest.approx(expected, abs=2e-6)]


def test_a_document_is_judged_by_itself(tmp_path: Path) -> None:
    """Other documents of the batch, and its place among them, do not matter."""
    rng = random.Random(3)
    items, texts = [], []
    for _ in range(40):
        some, text = parts_and_text(rng)
        items += [dict(zip(("question", "answer", "passage"), item, strict=True)) for item in some]
        texts += [text, f"{text} {FILLER}"]
    step = made(tmp_path, items, threshold=0.5)
    expected = values(step.judge(text_batch(texts))[0])
    rows = step.take_rows()
    assert 10 < sum(score > 0 for score in expected) < 70
    order = list(range(len(texts)))
    rng.shuffle(order)
    mixed = values(step.judge(text_batch([texts[at] for at in order]))[0])
    assert mixed == [expected[at] for at in order]
    assert len(step.take_rows()) == len(rows)
    assert [values(step.judge(text_batch([text]))[0])[0] for text in texts] == expected
    wanted = [at % 3 != 0 for at in range(len(texts))]
    some_scores = values(step.judge(text_batch(texts, wanted=wanted))[0])
    assert some_scores == [
        score if is_wanted else 0 for score, is_wanted in zip(expected, wanted, strict=True)
    ]


def test_of_items_with_equal_scores_the_first_is_named(tmp_path: Path) -> None:
    other: dict[str, Any] = {"question": SHORT, "answer": ["The Rhone", "The Rhine"]}
    items = [*OTHERS, other, SHORT_ITEM]
    text = inside(f"{SHORT} a) The Rhine b) the Aare")
    assert values(made(tmp_path, items).judge(text_batch([text]))[1]) == ["eval.jsonl:8"]
    assert values(made(tmp_path, items[::-1]).judge(text_batch([text]))[1]) == ["eval.jsonl:0"]


def test_a_build_drops_what_holds_questions_and_says_which(
    tmp_path: Path, inline_builds: None, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_corpus(tmp_path, 80)
    (tmp_path / "eval.jsonl").write_text(json.dumps(LONG_ITEM) + "\n" + json.dumps(SHORT_ITEM) + "\n")
    texts = [inside(LONG), inside(f"{SHORT} The Aare."), inside(f"{SHORT} Who knows.")]
    (tmp_path / "plain-0.jsonl").write_text(
        "".join(json.dumps({"text": t, "number": 1}) + "\n" for t in texts)
    )
    entry = {"decontamination": {"evaluations": [{"path": "eval.jsonl"}], "questions": {}}}
    overrides = [f"filters={json.dumps([entry])}", "output.format=jsonl"]
    result = build(recipe, overrides=overrides, workers=1, progress=False)
    assert result.funnel.dropped["decontamination/question"].documents == 2
    left = [str(row["text"]) for row in result.open()]
    assert texts[2] in left
    assert not set(texts[:2]) & set(left)
    rows = [json.loads(line) for line in (result.output / "decontamination.jsonl").read_text().splitlines()]
    assert [(row["record"], row["item"], row["score"]) for row in rows] == [(0, 0, 1.0), (1, 1, 1.0)]
    [removed] = (result.output / "dropped").glob("*.parquet")
    dropped = [row for row in pq.read_table(removed).to_pylist() if "question" in str(row)]
    assert len(dropped) == 2
    assert [(row["value"], row["bound"], row["label"]) for row in dropped] == [
        (1.0, 0.8, "eval.jsonl:0"),
        (1.0, 0.8, "eval.jsonl:1"),
    ]
    assert main(["trace", str(result.output), "--why", "--file", "plain-0.jsonl", "--record", "0"]) == 0
    printed = capsys.readouterr().out
    assert "dropped by decontamination/question: 1 of eval.jsonl:0, bound 0.8" in printed


def test_defaults_are_those_of_the_documented_formula() -> None:
    assert QuestionsConfig().model_dump() == {
        "threshold": 0.8,
        "ngram": 4,
        "unit": "words",
        "min_item_words": 15,
        "max_misses": 11,
        "long_question": 20,
        "answer_window": 50,
    }
