"""How much of each source is used: exact numbers, choices that growing sources keep, and the rest."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
import zstandard
from hypothesis import given
from hypothesis import strategies as st

import shardkit
from shardkit.cli.main import main
from shardkit.errors import BuildError, RecipeError
from shardkit.hashing import keyed_hashes
from shardkit.units import parse_count
from shardkit.writers import build
from shardkit.writers.explain import explain_build
from shardkit.writers.stages.amounts import CHOICES, _last_of, find_lasts
from support.small_build import EOS, make_corpus, text_of, train_bpe, tree

SEED = 17


def write_source(folder: Path, name: str, numbers: range, **fields: Any) -> dict[str, Any]:
    lines = [json.dumps({"text": f"{name} {text_of(n)}", "id": f"{name}{n}", **fields}) for n in numbers]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return {"path": str(folder / f"{name}.jsonl"), "source": name, "base": str(folder)}


def recipe_of(inputs: list[dict[str, Any]], output: Path, amounts: Any, **more: Any) -> dict[str, Any]:
    place = {"path": str(output), "format": "parquet"}
    return {"inputs": inputs, "dedup": {"exact": True}, "amounts": amounts, "output": place, **more}


def documents(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(sorted(folder.glob("text-*.parquet"))).to_pylist()
    return rows


def rewritten(recipe: Path, **changes: Any) -> Path:
    """Replace keys of a recipe's file; `outputs` replaces `output`."""
    data = yaml.safe_load(recipe.read_text()) | changes
    if "outputs" in changes:
        data.pop("output", None)
    recipe.write_text(yaml.safe_dump(data))
    return recipe


def ids_of(folder: Path, source: str) -> set[str]:
    return {row["document_id"] for row in documents(folder) if row["source"] == source}


def made(recipe: dict[str, Any] | Path, **more: Any) -> Any:
    return build(recipe, workers=1, progress=False, **more)


def card_of(folder: Path) -> Any:
    card = shardkit.open(folder).card
    assert card is not None
    return card


class Piece:
    """The rows of a slice of CHOICES."""

    def __init__(self, rows: np.ndarray[Any, Any]) -> None:
        self.rows = rows

    def read(self) -> tuple[np.ndarray[Any, Any], None]:
        return self.rows, None


def last_taken(ids: list[int], number: int) -> set[int]:
    """The documents that a number of documents takes, by the stage's own search."""
    hashes = keyed_hashes((b"%016d" % one for one in ids), SEED, "amount")
    rows = np.zeros(len(ids), CHOICES.dtype)
    rows["key"], rows["units"] = np.sort(hashes), 1
    if len(ids) < number:
        return {*ids}
    last = find_lasts(Path(), Piece(rows), {"0": number})["0"]  # type: ignore[arg-type]
    return {one for one, key in zip(ids, hashes.tolist(), strict=True) if key <= last}


@given(st.sets(st.integers(0, 10**6), min_size=1), st.sets(st.integers(0, 10**6)), st.integers(1, 50))
def test_a_number_is_exact_and_more_documents_displace_only_the_highest_hashes(
    old: set[int], new: set[int], number: int
) -> None:
    before, after = last_taken(sorted(old), number), last_taken(sorted(old | new), number)
    assert len(before) == min(number, len(old))
    assert len(after) == min(number, len(old | new))
    assert not (after & old) - before, "an old document that was left out does not come back"
    gone = before - after
    assert len(gone) <= len(after - before), "an old document goes only for a new one"
    hashes = {one: keyed_hashes([b"%016d" % one], SEED, "amount")[0] for one in old | new}
    assert all(hashes[one] > hashes[stays] for one in gone for stays in after)


@given(st.floats(0.0001, 1), st.floats(0.0001, 1))
def test_a_larger_share_has_all_documents_of_a_smaller_one(a: float, b: float) -> None:
    assert _last_of(min(a, b)) <= _last_of(max(a, b))
    assert abs(_last_of(a) / 2**64 - a) < 1e-9


@pytest.mark.parametrize(
    ("given", "expected"),
    [("10B", 10**10), ("1.5M", 1_500_000), ("200k", 200_000), (7, 7), ("1_000", 1000), ("2 T", 2 * 10**12)],
)
def test_counts_are_read_as_people_write_them(given: str | int, expected: int) -> None:
    assert parse_count(given) == expected


@pytest.mark.parametrize("given", [0, -1, True, "0", "0.1", "10X", "10GB", "", "9" * 30])
def test_other_counts_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="write a number of at least 1"):
        parse_count(given)


def test_numbers_are_exact_and_sources_without_an_amount_are_whole(
    tmp_path: Path, inline_builds: None
) -> None:
    inputs = [write_source(tmp_path, name, range(400)) for name in ("web", "code", "wiki")]
    amounts = {"web": {"documents": 123}, "code": {"share": "25%"}}
    made(recipe_of(inputs, tmp_path / "out", amounts))
    whole = {row["document_id"]: row for row in documents_of_all(inputs, tmp_path)}
    chosen = {name: ids_of(tmp_path / "out", name) for name in ("web", "code", "wiki")}
    assert len(chosen["web"]) == 123
    assert len(chosen["wiki"]) == 400
    for name, ids in chosen.items():
        own = [one for one, row in whole.items() if row["source"] == name]
        hashes = dict(zip(own, keyed_hashes(map(bytes.fromhex, own), SEED, "amount").tolist(), strict=True))
        lowest = sorted(own, key=lambda one: hashes[one])
        expected = {"web": lowest[:123], "wiki": lowest}.get(name)
        if expected is None:
            expected = [one for one in own if hashes[one] < 2**64 // 4]
        assert ids == {*expected}, name
    card = card_of(tmp_path / "out")
    assert {one.source: (one.found.documents, one.taken.documents) for one in card.amounts} == {
        "web": (400, 123),
        "code": (400, len(chosen["code"])),
    }
    lost = 400 - 123 + 400 - len(chosen["code"])
    assert card.funnel.dropped["amount"].documents == lost
    assert [step.lost_documents for step in card.funnel_steps() if step.label == "amount"] == [lost]
    assert shardkit.verify(tmp_path / "out").ok
    assert b"<h2>Amounts</h2>" in (tmp_path / "out" / "report.html").read_bytes()


def documents_of_all(inputs: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    recipe = recipe_of(inputs, folder / "all", {})
    made(recipe)
    return documents(folder / "all")


def test_a_source_that_grows_keeps_its_choice(tmp_path: Path, inline_builds: None) -> None:
    found: list[tuple[set[str], set[str]]] = []
    for size in (300, 400):
        inputs = [write_source(tmp_path, name, range(size)) for name in ("web", "code")]
        out = tmp_path / f"out{size}"
        made(recipe_of(inputs, out, {"web": {"share": 0.5}, "code": {"documents": 150}}))
        found.append((ids_of(out, "web"), ids_of(out, "code")))
    (share, number), (more_share, more_number) = found
    assert share < more_share
    assert len(number) == len(more_number) == 150
    assert 0 < len(number - more_number) < 75
    recipe = recipe_of(inputs, tmp_path / "fewer", {"code": {"documents": 100}})
    made(recipe)
    assert ids_of(tmp_path / "fewer", "code") < more_number


def test_inputs_with_one_label_share_an_amount(tmp_path: Path, inline_builds: None) -> None:
    first, second = (write_source(tmp_path, name, range(200)) for name in ("a", "b"))
    inputs = [first | {"source": "web"}, second | {"source": "web"}]
    made(recipe_of(inputs, tmp_path / "out", {"web": {"documents": 111}}))
    assert len(ids_of(tmp_path / "out", "web")) == 111
    assert {row["file"] for row in documents(tmp_path / "out")} == {"a.jsonl", "b.jsonl"}


def test_an_amount_above_the_source_takes_all_of_it_and_says_so(tmp_path: Path, inline_builds: None) -> None:
    inputs = [write_source(tmp_path, "web", range(50))]
    with pytest.warns(RuntimeWarning, match=r"amounts.web: 1,000 documents are wanted, but only 50 are left"):
        made(recipe_of(inputs, tmp_path / "out", {"web": {"documents": "1K"}}))
    assert len(documents(tmp_path / "out")) == 50
    assert not list((tmp_path / "out").glob("duplicates/*"))


@pytest.mark.extended
def test_parts_of_a_split_are_drawn_from_the_chosen_documents(tmp_path: Path, inline_builds: None) -> None:
    inputs = [write_source(tmp_path, name, range(300)) for name in ("web", "code")]
    amounts = {"web": {"documents": 100}}
    made(recipe_of(inputs, tmp_path / "out", amounts, split={"validation": {"web": 9}}))
    made(recipe_of(inputs, tmp_path / "alone", amounts))
    train, held = (ids_of(tmp_path / "out" / part, "web") for part in ("train", "validation"))
    assert len(held) == 9
    assert len(train) == 91
    assert not train & held
    assert train | held == ids_of(tmp_path / "alone", "web")


def with_topics(folder: Path, counts: dict[str | None, int]) -> list[dict[str, Any]]:
    lines = [
        {"text": f"{topic} {text_of(n)}"} | ({} if topic is None else {"topic": topic})
        for topic, count in counts.items()
        for n in range(count)
    ]
    (folder / "forum.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return [{"path": str(folder / "forum.jsonl"), "source": "forum", "metadata": ["topic"]}]


@pytest.mark.parametrize(
    ("amount", "expected"),
    [
        ({"by": "topic", "at_most": 10}, {"cats": 120, "dogs": 45, "null": 70, "law": 12}),
        ({"by": "topic", "at_most": 2.5}, {"cats": 30, "dogs": 30, "null": 30, "law": 12}),
        ({"by": "topic", "documents": 50}, {"cats": 50, "dogs": 45, "null": 50, "law": 12}),
    ],
)
def test_no_value_of_a_field_has_more_than_it_should(
    tmp_path: Path, inline_builds: None, amount: dict[str, Any], expected: dict[str, int]
) -> None:
    there: dict[str | None, int] = {"cats": 200, "dogs": 45, None: 70, "law": 12}
    inputs = with_topics(tmp_path, there)
    made(recipe_of(inputs, tmp_path / "out", {"forum": amount}))
    found: dict[str, int] = {}
    for row in documents(tmp_path / "out"):
        topic = "null" if row["metadata"] is None else json.loads(row["metadata"]).get("topic", "null")
        found[topic] = found.get(topic, 0) + 1
    assert found == expected
    [entry] = card_of(tmp_path / "out").amounts
    assert entry.values == {one: [there[None if one == "null" else one], n] for one, n in found.items()}
    assert b"forum: cats" in (tmp_path / "out" / "report.html").read_bytes()


def test_a_field_with_very_many_values_is_refused(tmp_path: Path, inline_builds: None) -> None:
    inputs = with_topics(tmp_path, {f"t{n}": 1 for n in range(1001)})
    with pytest.raises(BuildError, match=r"amounts.forum.by: 'topic' has more than 1,000 values"):
        made(recipe_of(inputs, tmp_path / "out", {"forum": {"by": "topic", "at_most": 2}}))


def test_a_source_of_which_nothing_is_left_has_nothing_to_choose(tmp_path: Path, inline_builds: None) -> None:
    inputs = [write_source(tmp_path, name, range(20)) for name in ("web", "code")]
    drop = [{"length": {"min_words": 900}}]
    recipe = recipe_of(inputs, tmp_path / "out", {"web": {"documents": 5}}, filters=drop)
    with pytest.raises(BuildError, match=r"nothing to write|no document"):
        made(recipe)


def test_groups_are_taken_whole(tmp_path: Path, inline_builds: None) -> None:
    lines = [{"text": text_of(n * 10), "repo": f"r{n % 40}"} for n in range(400)]
    (tmp_path / "code.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    inputs = [{"path": str(tmp_path / "code.jsonl"), "source": "code", "metadata": ["repo"]}]
    made(recipe_of(inputs, tmp_path / "out", {"code": {"documents": 95}}, group={"by": "repo"}))
    repos = [json.loads(row["metadata"])["repo"] for row in documents(tmp_path / "out")]
    assert len(repos) == 100, "whole groups of 10, until there are 95 documents"
    assert all(repos.count(one) == 10 for one in repos)


def test_what_was_not_taken_is_known_with_its_reason(tmp_path: Path, inline_builds: None) -> None:
    inputs = [write_source(tmp_path, "web", range(60))]
    made(recipe_of(inputs, tmp_path / "out", {"web": {"documents": 20}}))
    table = pq.read_table(tmp_path / "out" / "duplicates")
    assert table.column("reason").to_pylist() == ["amount"] * 40
    assert table.column("kept_document_id").null_count == 40
    kept = ids_of(tmp_path / "out", "web")
    assert {one.hex() for one in table.column("document_id").to_pylist()}.isdisjoint(kept)


def test_rows_and_text_of_one_build_have_the_same_documents(
    tmp_path: Path, inline_builds: None, capfd: pytest.CaptureFixture[str]
) -> None:
    amounts = {"plain": {"documents": 70}, "zipped": {"share": 0.4}}
    outputs = [{"path": "rows"}, {"path": "text", "format": "parquet"}]
    made(rewritten(make_corpus(tmp_path), amounts=amounts, outputs=outputs))
    tables = [pq.read_table(one) for one in sorted((tmp_path / "rows/provenance").glob("*.parquet"))]
    packed = {one.hex() for table in tables for one in table.column("document_id").to_pylist()}
    texts = documents(tmp_path / "text")
    assert packed == {row["document_id"] for row in texts}
    assert sum(row["source"] == "plain" for row in texts) == 70
    lost = pq.read_table(tmp_path / "rows" / "duplicates").to_pylist()
    one = next(row for row in lost if row["reason"] == "amount")
    assert main(["trace", str(tmp_path / "rows"), "--why", "--document", one["document_id"].hex()]) == 0
    label = ["plain", "tables", "zipped"][one["source"]]
    assert f"left out by amounts.{label}" in capfd.readouterr().out


def tokens_of(folder: Path, source: str) -> dict[str, int]:
    """The tokens of each document of a source in the rows of a dataset, from its provenance."""
    tables = [pq.read_table(one).to_pylist() for one in sorted((folder / "provenance").glob("*.parquet"))]
    labels = card_of(folder).source_labels
    found: dict[str, int] = {}
    for row in (row for table in tables for row in table):
        if labels[row["source"]] == source:
            name = row["document_id"].hex()
            found[name] = found.get(name, 0) + row["token_end"] - row["token_start"]
    return found


def test_tokens_are_exact_to_one_document_in_every_output(tmp_path: Path, inline_builds: None) -> None:
    recipe = make_corpus(tmp_path)
    outputs = [{"path": "text", "format": "parquet"}, {"path": "rows"}]
    made(rewritten(recipe, outputs=outputs))
    lengths = tokens_of(tmp_path / "rows", "plain")
    ids = [*lengths]
    hashes = dict(zip(ids, keyed_hashes(map(bytes.fromhex, ids), SEED, "amount").tolist(), strict=True))
    lowest = sorted(ids, key=lambda one: hashes[one])
    for number, wanted in enumerate((1, 2000, 3000)):
        amounts = {"plain": {"tokens": wanted}}
        outputs = [{"path": f"text{number}", "format": "parquet"}, {"path": f"rows{number}"}]
        made(rewritten(recipe, amounts=amounts, outputs=outputs))
        found = tokens_of(tmp_path / f"rows{number}", "plain")
        first = next(n for n in range(1, len(ids)) if sum(lengths[one] for one in lowest[:n]) >= wanted)
        assert found == {one: lengths[one] for one in lowest[:first]}
        assert {*found} == ids_of(tmp_path / f"text{number}", "plain")
        [entry] = [one for one in card_of(tmp_path / f"rows{number}").inputs if one.source == "plain"]
        assert wanted <= entry.tokens == sum(found.values())


def test_tokens_of_more_text_than_expected_are_found_in_further_rounds(
    tmp_path: Path, inline_builds: None
) -> None:
    word = "antidisestablishmentarianism"
    texts = [f"{' '.join([word] * 20)} {n}" for n in range(300)]
    train_bpe(texts, vocabulary=400).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "web.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    recipe = {
        "inputs": [{"path": str(tmp_path / "web.jsonl"), "source": "web"}],
        "tokenizer": {"path": str(tmp_path / "tokenizer.json"), "eos": EOS},
        "pack": {"sequence_length": 64},
    }
    place = {"work": str(tmp_path / "work"), "output": str(tmp_path / "out")}
    made(recipe | place | {"amounts": {"web": {"tokens": 4000}}})
    rounds = len([*(tmp_path / "work").rglob("amounts_count/*/commit.json")])
    assert rounds == 2, "the first bound is for text of 8 bytes a token"
    assert 4000 <= card_of(tmp_path / "out").inputs[0].tokens < 4030


def test_repeated_documents_are_in_the_order_as_often_as_asked(
    tmp_path: Path, inline_builds: None, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = make_corpus(tmp_path)
    amounts = {"plain": {"repeat": 2.5}, "zipped": {"documents": 40, "repeat": 2}}
    made(rewritten(recipe, amounts=amounts, split={"validation": 12}))
    train = tmp_path / "out" / "train"
    [table] = [pq.read_table(one) for one in (train / "provenance").glob("*.parquet")]
    starts = [row for row in table.to_pylist() if row["document_start"] == 0]
    labels = card_of(train).source_labels
    times: dict[str, dict[str, int]] = {label: {} for label in labels}
    for row in starts:
        of_source = times[labels[row["source"]]]
        of_source[row["document_id"].hex()] = of_source.get(row["document_id"].hex(), 0) + 1
    assert {*times["tables"].values()} == {1}
    assert {*times["zipped"].values()} == {2}
    ids = [*times["plain"]]
    below = keyed_hashes(map(bytes.fromhex, ids), SEED, "repeat") < np.uint64(1 << 63)
    assert [times["plain"][one] for one in ids] == [3 if again else 2 for again in below.tolist()]
    assert 0.3 < below.mean() < 0.7
    for entry in card_of(train).inputs:
        found = [*times[entry.source].values()]
        assert entry.funnel.kept.documents == len(found)
        assert entry.repeated.documents == sum(found) - len(found)
        once = tokens_of(train, entry.source)
        assert entry.tokens == sum(once.values())
        assert entry.repeated.tokens == sum(
            length - length // times[entry.source][one] for one, length in once.items()
        )
    order = {row["document_id"].hex(): [] for row in starts}  # type: ignore[var-annotated]
    for place, row in enumerate(sorted(starts, key=lambda row: (row["shard"], row["row"]))):
        order[row["document_id"].hex()].append(place / len(starts))
    gaps = [abs(places[1] - places[0]) for places in order.values() if len(places) > 1]
    assert 0.2 < float(np.mean(gaps)) < 0.47, "a third apart on average, as independent places are"
    assert shardkit.verify(train).ok
    assert b"Copies of repeated documents" in (train / "report.html").read_bytes()
    validation = card_of(tmp_path / "out" / "validation")
    assert sum(one.repeated.documents for one in validation.inputs) == 0
    assert validation.packing["documents"] == 12

    document = next(one for one, places in order.items() if len(places) == 3)
    capfd.readouterr()
    assert main(["trace", str(train), "--why", "--document", document, "--json"]) == 0
    [facts] = json.loads(capfd.readouterr().out)["documents"]
    rows = {row["row"] for row in starts if row["document_id"].hex() == document and not row["shard"]}
    assert rows <= {*facts["rows"]}
    assert facts["text"]


def test_a_larger_repetition_repeats_all_that_a_smaller_one_does(tmp_path: Path, inline_builds: None) -> None:
    recipe = make_corpus(tmp_path)
    lengths = []
    for number, times in enumerate((1.2, 1.7, 2, 2.3)):
        made(rewritten(recipe, amounts={"plain": {"repeat": times}}, output={"path": f"out{number}"}))
        lengths.append(tokens_of(tmp_path / f"out{number}", "plain"))
    for few, many in pairwise(lengths):
        assert all(length <= many[one] for one, length in few.items())
        assert few != many


def test_conversations_repeat_with_their_masks(tmp_path: Path, inline_builds: None) -> None:
    talks = [
        [{"role": "user", "content": f"what is {n}?"}, {"role": "assistant", "content": text_of(n)}]
        for n in range(60)
    ]
    lines = "".join(json.dumps({"messages": one}) + "\n" for one in talks)
    (tmp_path / "chat.jsonl").write_text(lines)
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    train_bpe([text_of(n) for n in range(50)]).save(str(tmp_path / "tokenizer.json"))
    recipe = {
        "inputs": [{"path": str(tmp_path / "chat.jsonl"), "messages": "messages", "source": "chat"}],
        "tokenizer": {"path": str(tmp_path / "tokenizer.json"), "eos": EOS},
        "pack": {"sequence_length": 256},
    }
    found = {}
    for times in (None, 2):
        amounts = {} if times is None else {"chat": {"repeat": times}}
        made(recipe | {"output": str(tmp_path / f"out{times}"), "amounts": amounts})
        found[times] = card_of(tmp_path / f"out{times}").data
    assert found[2]["trained_tokens"] == 2 * found[None]["trained_tokens"] > 0
    assert found[2]["tokens"] == 2 * found[None]["tokens"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"amounts": {"wbe": {"share": 0.5}}}, "amounts.wbe: there is no source 'wbe'; sources: web"),
        ({"amounts": {"web": {}}}, "amounts.web: give share, documents, tokens, at_most or repeat"),
        (
            {"amounts": {"web": {"share": 0.5, "documents": 5}}},
            "amounts.web: give share or doc",
        ),
        ({"amounts": {"web": {"documents": 0}}}, "amounts.web.documents: write a number of at least 1"),
        ({"amounts": {"web": {"documents": True}}}, "amounts.web.documents: write a number of at least 1"),
        ({"amounts": {"web": {"documents": [3]}}}, "amounts.web.documents: write a number of at least 1"),
        ({"amounts": {"web": {"share": 0}}}, "amounts.web.share: write a share between 0 and 1"),
        ({"amounts": {"web": {"share": 1.5}}}, "amounts.web.share: write a share between 0 and 1"),
        ({"amounts": {"web": {"share": 2}}}, "amounts.web.share: write a share between 0 and 1"),
        ({"amounts": {"web": {"share": "150%"}}}, "amounts.web.share: write a share"),
        ({"amounts": {"web": {"documents": 3, "tokens": 5}}}, "amounts.web: give documents or tokens"),
        ({"amounts": {"web": {"tokens": 5}}}, "amounts.web.tokens: no output has tokens; give documents"),
        ({"amounts": {"web": {"repeat": 2}}}, "amounts.web.repeat: only rows of tokens"),
        ({"amounts": {"web": {"repeat": 1}}}, "amounts.web.repeat: should be more than 1"),
        ({"amounts": {"web": {"repeat": 0.5}}}, "amounts.web.repeat: should be more than 1"),
        ({"amounts": {"web": {"at_most": 2}}}, "amounts.web: at_most: give `by`"),
        ({"amounts": {"web": {"by": "t", "share": 0.5}}}, "amounts.web: by: is for documents, tokens"),
        ({"amounts": {"web": {"by": "t"}}}, "amounts.web: "),
        ({"amounts": {"web": {"by": "t", "at_most": 2}}}, "amounts.web.by: no input keeps a field 't'"),
        ({"amounts": {"web": {"by": "language", "documents": 2}}}, "amounts.web.by: languages are known"),
        ({"weights": {"web": 2}}, "weights: unknown key; in shardkit: `amounts` at the top level says"),
        ({"repeat": 2}, "repeat: unknown key; in shardkit: `amounts` at the top level says"),
    ],
)
def test_amounts_that_cannot_be_meant_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    inputs = [write_source(tmp_path, "web", range(3))]
    with pytest.raises(RecipeError) as caught:
        made(recipe_of(inputs, tmp_path / "out", {}) | changes)
    assert message in str(caught.value)


@pytest.mark.parametrize("key", ["weight", "sample", "limit", "repeat", "epochs", "proportion", "max_tokens"])
def test_keys_of_other_tools_lead_to_amounts(tmp_path: Path, key: str) -> None:
    inputs = [write_source(tmp_path, "web", range(3)) | {key: 2}]
    with pytest.raises(
        RecipeError, match=rf"inputs\[0\].{key}: unknown key; in shardkit: `amounts` at the top"
    ):
        made(recipe_of(inputs, tmp_path / "out", {}))


def test_a_recipe_without_amounts_keeps_its_digest(tmp_path: Path) -> None:
    inputs = [write_source(tmp_path, "web", range(3))]
    recipe = shardkit.writers.Recipe.model_validate(recipe_of(inputs, tmp_path / "out", {}))
    assert "amounts" not in recipe.content()


def test_workers_and_a_changed_amount_decide_no_other_byte(tmp_path: Path) -> None:
    inputs = [write_source(tmp_path, name, range(300)) for name in ("web", "code")]
    amounts = {"web": {"documents": 100}, "code": {"share": 0.3}}
    places = [tmp_path / f"out{workers}" for workers in (1, 2)]
    for workers, place in enumerate(places, 1):
        recipe = recipe_of(inputs, place, amounts)
        build(recipe, workers=workers, progress=False)
    assert tree(places[0]) == tree(places[1])
    kept = {"work": str(tmp_path / "work")}
    made(recipe_of(inputs, tmp_path / "b", {"web": {"documents": 150}}) | kept)
    again = shardkit.writers.Recipe.model_validate(recipe_of(inputs, tmp_path / "c", amounts) | kept)
    explained = explain_build(again)
    unfinished = {one.stage for one in explained.stages if one.tasks > one.finished}
    assert unfinished <= {"amounts_count", "amounts", "text"}
    made(recipe_of(inputs, tmp_path / "c", amounts) | kept)
    assert tree(tmp_path / "c") == tree(places[0])


@pytest.mark.data
def test_languages_of_real_pages_are_balanced(tmp_path: Path, inline_builds: None) -> None:
    if "SHARDKIT_TEST_DATA" not in os.environ:
        pytest.skip("SHARDKIT_TEST_DATA is not set")
    file = Path(os.environ["SHARDKIT_TEST_DATA"]) / "corpus" / "multilang-00.jsonl.zst"
    with zstandard.ZstdDecompressor().stream_reader(file.open("rb"), read_across_frames=True) as pages:
        rows = [json.loads(line) for line in pages.read().split(b"\n") if line]
    there: dict[str, set[str]] = {}
    for row in rows:
        there.setdefault(row["lang"], set()).add(row["text"])
    inputs = [{"path": str(file), "id": "id", "metadata": ["lang"]}]
    steps = ["exact", {"sample": {"by": "lang", "at_most": 2}}, {"length": {"min_chars": 1}}]
    made({"inputs": inputs, "steps": steps, "output": {"path": str(tmp_path / "out"), "format": "parquet"}})
    left: dict[str, set[str]] = {}
    for row in documents(tmp_path / "out"):
        left.setdefault(json.loads(row["metadata"])["lang"], set()).add(row["text"])
    least = min(map(len, there.values()))
    assert {lang: len(texts) for lang, texts in left.items()} == {
        lang: min(len(texts), 2 * least) for lang, texts in there.items()
    }
    assert len(left) >= 10
