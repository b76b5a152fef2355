"""Annotations of a build with filters behind duplicate removal hold the values of all passes of filters."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from shardkit.cli.main import main
from shardkit.errors import ShardkitError
from shardkit.writers import BuildResult, build
from shardkit.writers.filters.chain import FilterChain
from shardkit.writers.recipe.recipe import load_recipe
from shardkit.writers.recipe.steps import GlobalStep
from shardkit.writers.rows import annotations as of_rows
from shardkit.writers.rows.annotations import thresholds
from shardkit.writers.rows.filtered import Filtered
from support.documents import document_batch
from support.small_build import EOS, train_bpe, tree
from support.small_models import model_bytes

pytestmark = pytest.mark.usefixtures("inline_builds")

FILTER = """
def keep(document):
    return not document.text.endswith("5")
"""
WORDS: dict[str, Any] = {"length": {"min_words": 4, "max_words": 150}}
DIGITS: dict[str, Any] = {"ratios": {"max_digit_ratio": 0.4}}
PYTHON: dict[str, Any] = {"python": {"file": "filters.py", "function": "keep"}}
GOPHER: dict[str, Any] = {
    "gopher_quality": {"min_doc_words": 6, "min_stop_words": 0, "max_avg_word_length": 30.0}
}
LANGUAGE: dict[str, Any] = {"language": {"model": "model.bin", "threshold": 0.0}}
LABELS = ("eng_Latn", "deu_Latn", "zho_Hans")
SHORT: dict[str, Any] = {"length": {"min_words": 8, "max_words": 125}}
STEPS: list[Any] = [WORDS, DIGITS, "exact", GOPHER, LANGUAGE, PYTHON, {"near": 0.8}, {"sample": "80%"}, SHORT]
FILES = ("a", "b", "c", "d", "e")


def texts_of(file: str) -> list[str]:
    """Texts of all lengths, exact and near copies; none of c reaches the second pass, and d is empty."""
    drawn = random.Random(5)
    long = [" ".join(f"word{drawn.randrange(400)}" for _ in range(100 + 3 * n)) for n in range(20)]
    short = [" ".join(f"term{n * 7 + word}" for word in range(n % 16)) for n in range(40)]
    numbers = [f"1234567890 {n} 99999 1111111 7777777" for n in range(4)]
    return {
        "a": [*long, *short, *numbers],
        "b": [*(f"{text} added" for text in long), *short[10:20], *long[:5]],
        "c": ["one two", *numbers, *numbers],
        "d": [],
        "e": [*long[3:12], *short[5:9], *(f"{text} twice added" for text in long[::4])],
    }[file]


def write_file(folder: Path, file: str, texts: Iterable[str]) -> None:
    rows = ({"text": text, "id": f"{file}{n}"} for n, text in enumerate(texts))
    (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for file in FILES:
        write_file(tmp_path, file, texts_of(file))
    (tmp_path / "filters.py").write_text(FILTER)
    model = model_bytes(labels=[f"__label__{one}".encode() for one in LABELS], seed=4)
    (tmp_path / "model.bin").write_bytes(model)
    train_bpe(texts_of("a")).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder: Path, name: str, steps: Sequence[Any] = STEPS, **keys: Any) -> Path:
    recipe = {
        "inputs": [{"path": "?.jsonl", "id": "id"}],
        "steps": steps,
        "annotate": True,
        "tokenizer": {"path": "tokenizer.json", "eos": EOS},
        "pack": {"sequence_length": 64},
        "outputs": [{"path": f"{name}/rows"}, {"path": f"{name}/text", "format": "jsonl"}],
        "memory": "256MiB",
        "work": f"{name}-work",
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe | keys))
    return folder / f"{name}.yaml"


def run(folder: Path, name: str, steps: Sequence[Any] = STEPS, **keys: Any) -> BuildResult:
    return build(write(folder, name, steps, **keys), progress=False)


def table(dataset: Path, name: str) -> list[dict[str, Any]]:
    return [
        row for path in sorted((dataset / name).glob("*.parquet")) for row in pq.read_table(path).to_pylist()
    ]


def same(one: Any, other: Any) -> bool:
    both_nan = isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other)
    return both_nan or one == other


def reference(folder: Path, steps: Sequence[Any], removed: dict[str, set[str]]) -> dict[str, dict[str, Any]]:
    """The lines of annotations by id, from the filters and the ids that each other step took."""
    texts = {f"{file}{n}": text for file in FILES for n, text in enumerate(texts_of(file))}
    lines: dict[str, dict[str, Any]] = {
        id: {"bytes": len(text.encode()), "dropped": None, "failed": [], "passes": 0}
        for id, text in texts.items()
    }
    left, used = list(texts), Counter[str]()
    for move in load_recipe(write(folder, "reference", steps)).moves:
        if isinstance(move, GlobalStep):
            left = [id for id in left if id not in removed[move.name]]
            continue
        used.update({name for name, _ in move})
        names = {name: name if used[name] == 1 else f"{name}-{used[name]}" for name, _ in move}
        found = FilterChain(move, folder, annotate=True).apply(document_batch([texts[id] for id in left]))
        for row, id in enumerate(left):
            judge(lines[id], found, row, names)
        left = [id for id in left if lines[id]["dropped"] is None]
    return lines


def judge(line: dict[str, Any], found: Filtered, row: int, names: dict[str, str]) -> None:
    """Add to a line what a pass found about a document."""

    def named(rule: str) -> str:
        name, _, rest = rule.partition("/")
        return f"{names[name]}/{rest}"

    line["passes"] += 1
    line |= {named(rule): values[row] for rule, values in found.annotations.items() if rule != "dropped"}
    dropped = found.annotations["dropped"][row]
    line["dropped"] = None if dropped is None else named(dropped)
    line["failed"] = [named(rule) for rule, fails in found.failed.items() if fails[row]]


def removed_by(dataset: Path) -> dict[str, set[str]]:
    """The ids of the documents that each step over all documents took."""
    rows = table(dataset, "duplicates")
    reasons = {"exact": "exact_duplicate", "near": "near_duplicate", "sample": "not_sampled"}
    return {name: {row["id"] for row in rows if row["reason"] == reason} for name, reason in reasons.items()}


@pytest.mark.parametrize("group_documents", [pytest.param(7, marks=pytest.mark.extended), 1 << 15])
def test_every_line_has_what_the_passes_that_it_reached_say(
    folder: Path, monkeypatch: pytest.MonkeyPatch, group_documents: int
) -> None:
    monkeypatch.setattr(of_rows, "ROW_GROUP_DOCUMENTS", group_documents)
    result = run(folder, "out")
    rows, removed = folder / "out" / "rows", removed_by(folder / "out" / "rows")
    expected = reference(folder, STEPS, removed)
    found = table(rows, "annotations")
    assert [(line["file"], line["record"]) for line in found] == [
        (f"{file}.jsonl", number) for file in FILES for number in range(len(texts_of(file)))
    ]
    for line, wanted in zip(found, expected.values(), strict=True):
        for name in set(line) - {"document_id", "source", "file", "record"}:
            assert same(line[name], wanted.get(name)), (line, name)
        assert wanted.keys() <= line.keys()
    # All that there is to tell apart occurs.
    assert {line["passes"] for line in found} == {1, 2, 3}
    assert all(removed.values())
    assert {line["passes"] for line in found if line["dropped"] is None} == {1, 2, 3}
    rules = Counter(line["dropped"] for line in found if line["dropped"])
    assert rules.keys() >= {"length/too_few_words", "ratios/too_many_digits", "python/keep"}
    assert rules.keys() >= {
        "gopher_quality/gopher_short_doc",
        "length-2/too_few_words",
        "length-2/too_many_words",
    }
    assert sum(rules.values()) == len(table(rows, "dropped"))
    counted = Counter[str]()
    for rule, count in rules.items():
        counted[rule.replace("-2/", "/")] += count
    dropped = {rule: count.documents for rule, count in result.funnel.dropped.items() if "/" in rule}
    assert counted == {rule: count for rule, count in dropped.items() if count}


def test_text_outputs_have_the_values_of_all_passes(folder: Path) -> None:
    steps = [WORDS, "exact", {"lines": {"min_characters": 20}}, DIGITS, "exact", SHORT]
    for file in ("a", "b"):  # a line that many have, so that texts change between the passes
        texts = (f"{text}\nThis line stands below many of the texts." for text in texts_of(file))
        write_file(folder, file, texts)
    run(folder, "out", steps)
    noted = {line["document_id"].hex(): line for line in table(folder / "out" / "rows", "annotations")}
    lines = [json.loads(line) for path in (folder / "out" / "text").glob("*.jsonl") for line in path.open()]
    assert len(lines) > 20
    changed = 0
    for line in lines:
        values = noted[line["document_id"]]
        assert line["filters"] == {name: value for name, value in values.items() if "/" in name}
        assert (values["dropped"], values["failed"], values["passes"]) == (None, [], 3)
        assert line["filters"]["length-2/too_few_words"] == len(line["text"].split())
        changed += values["length/too_few_words"] != values["length-2/too_few_words"]
    assert changed > 10
    kept = [line for line in noted.values() if line["passes"] == 3 and line["dropped"] is None]
    assert len(kept) == len(lines)


@pytest.mark.parametrize(
    ("steps", "passes"),
    [
        (["exact", SHORT], {0, 1}),  # no filter before duplicate removal
        ([WORDS, "lines", "exact", SHORT], {1, 2}),  # an empty pass writes keys before `exact`
    ],
)
def test_passes_without_filters_do_not_count(folder: Path, steps: list[Any], passes: set[int]) -> None:
    run(folder, "out", steps)
    found = table(folder / "out" / "rows", "annotations")
    assert {line["passes"] for line in found} == passes
    name = "length-2/too_few_words" if WORDS in steps else "length/too_few_words"
    assert {line["passes"] for line in found if line[name] is not None} == {max(passes)}
    outcome = thresholds(folder / "out" / "rows", {name: (10, None)})
    assert outcome.read.documents == sum(line["passes"] == max(passes) for line in found)


def test_other_bounds_of_one_pass_keep_what_a_build_with_them_keeps(folder: Path) -> None:
    steps = [WORDS, DIGITS, "exact", LANGUAGE, GOPHER, SHORT]
    first = run(folder, "out", steps)
    out = folder / "out" / "rows"
    kept = first.funnel.kept.documents
    second = {"length-2/too_few_words": (12, None), "length-2/too_many_words": (None, 140)}
    outcome = thresholds(out, second)
    other = run(folder, "other", [*steps[:-1], {"length": {"min_words": 12, "max_words": 140}}])
    assert outcome.kept.documents == kept
    assert outcome.would_keep.documents == other.funnel.kept.documents != kept
    exact = first.funnel.dropped["exact_duplicate"].documents
    early = sum(line["passes"] == 1 and line["dropped"] is not None for line in table(out, "annotations"))
    assert outcome.read.documents == first.funnel.read.documents - exact - early
    found = Counter(line["language/label"] for line in table(out, "annotations") if not line["dropped"])
    assert sum(found[label] > 0 for label in LABELS) > 1
    for label in LABELS:
        assert thresholds(out, {"language/label": {label}}).would_keep.documents == found[label]
    # Of the first pass: what it keeps, before everything that follows.
    outcome = thresholds(out, {"length/too_few_words": (9, None)})
    other = run(folder, "filtered", [{"length": {"min_words": 9, "max_words": 150}}, DIGITS])
    assert outcome.would_keep.documents == other.funnel.kept.documents
    assert outcome.kept.documents == first.funnel.read.documents - early
    assert outcome.read == first.funnel.read
    assert thresholds(out, {}).would_keep == thresholds(out, {}).kept == outcome.kept
    message = r"rules of several passes.*pass 1: length/too_few_words; pass 2: length-2/too_few_words"
    with pytest.raises(ShardkitError, match=message):
        thresholds(out, {"length/too_few_words": (9, None), "length-2/too_few_words": (9, None)})


def test_what_became_of_a_document_is_told_with_the_values_of_the_passes_that_it_reached(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(folder, "out")
    out = folder / "out" / "rows"
    found = {f"{line['file'][0]}{line['record']}": line for line in table(out, "annotations")}
    late = next(id for id, line in found.items() if line["dropped"] == "length-2/too_many_words")
    near = next(iter(removed_by(out)["near"]))
    for id in (late, near):
        assert main(["trace", str(out), "--why", "--id", id, "--json"]) == 0
        [facts] = json.loads(capsys.readouterr().out)["documents"]
        rules = {name: value for name, value in found[id].items() if "/" in name}
        assert (facts["values"], facts["failed"]) == (rules, found[id]["failed"])
        if id == late:
            assert (facts["rule"], facts["value"]) == (
                "length/too_many_words",
                rules["length-2/too_many_words"],
            )


def test_a_changed_filter_repeats_no_pass_whose_documents_stay_the_same(folder: Path) -> None:
    run(folder, "out")
    before = table(folder / "out" / "rows", "annotations")
    # A document of fewer than eight characters has fewer than four words, too: it fails one more rule.
    steps = [{"length": WORDS["length"] | {"min_chars": 8}}, *STEPS[1:]]
    keys: dict[str, Any] = {"outputs": [{"path": "again/rows"}, {"path": "again/text", "format": "jsonl"}]}
    again = run(folder, "out", steps, **keys)
    ran = {stage.stage for stage in again.stages if stage.tasks > stage.tasks_reused}
    assert {"clean", "join_annotations"} <= ran
    assert not {"filter_left", "filter_left-2", "signatures"} & ran
    found = table(folder / "again" / "rows", "annotations")
    more = [line for line, old in zip(found, before, strict=True) if line["failed"] != old["failed"]]
    assert more
    assert all("length/too_few_characters" in line["failed"] for line in more)
    steps = [*steps[:-1], {"length": {"min_words": 9, "max_words": 125}}]
    keys = {"outputs": [{"path": "last/rows"}, {"path": "last/text", "format": "jsonl"}]}
    last = run(folder, "out", steps, **keys)
    ran = {stage.stage for stage in last.stages if stage.tasks > stage.tasks_reused}
    assert {"filter_left-2", "join_annotations"} <= ran
    assert not {"clean", "filter_left", "signatures"} & ran
    run(folder, "once", steps)
    assert tree(folder / "last") == tree(folder / "once")


def test_shards_are_the_same_bytes_without_annotations(folder: Path) -> None:
    run(folder, "out")
    run(folder, "plain", annotate=False)
    one, other = (tree(folder / name / "rows") for name in ("out", "plain"))
    about = {"dataset.json", "report.html"}
    parts = {name for name in one if name.startswith("annotations/")}
    assert one.keys() - parts == other.keys()
    assert len(parts) == len(FILES)
    assert {name for name in other if one[name] != other[name]} == about
