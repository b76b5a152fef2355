"""The card and the report say what the build counted, without a time or a place, and escape names."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from shardkit.errors import ConservationError
from shardkit.manifest import FileInfo, Manifest, ShardInfo
from shardkit.writers.card import card_bytes, make_card, recipe_content
from shardkit.writers.funnel import Funnel
from shardkit.writers.ledger import Count, Ledger
from shardkit.writers.recipe import recipe_from_mapping
from shardkit.writers.report import render_report

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
    funnel.packed = dict(zip(names, (1, 12, 10, 95, 5, 2, 0), strict=True))
    return funnel


def make() -> dict[str, object]:
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


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lose_between_stages, "source 1: documents for tokenizing"),
        (lose_bytes, "source 0, cleaning: read 10 documents"),
        (lose_tokens, "tokens to pack: 95 before, 94 after"),
        (lose_padding, "tokens in rows: 100 before, 99 after"),
        (lose_a_document, "documents to pack: 12 before, 11 after"),
        (forget_a_loser, "exact_duplicate"),
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
    assert card["samples"] == 10
    assert card["tokens"] == 95
    assert card["padding"] == 5
    assert card["recipe"] == recipe_content(recipe_from_mapping(RECIPE, folder=Path("/elsewhere")))
    assert json.loads(card_bytes(card)) == card
    assert b"/somewhere" not in card_bytes(card)
    assert b'"work"' not in card_bytes(card)


def test_the_recipe_digest_ignores_places_only() -> None:
    def content(**changes: object) -> object:
        return recipe_content(recipe_from_mapping(RECIPE | changes, folder=Path("/x")))

    assert content() == content(work="elsewhere", output={"path": "other"})
    assert content() != content(seed=3)
    assert content() != content(output={"path": "out", "format": "wds"})


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_report_shows_the_funnel_and_escapes_names() -> None:
    page = render_report(make()).decode()
    parser = _Text()
    parser.feed(page)
    assert "<b>&amp;" in parser.text  # as text, not as a tag
    assert "b" not in parser.tags
    assert {"script", "link", "img"}.isdisjoint(parser.tags)
    text = " ".join(parser.text)
    for shown in ("read", "short", "exact_duplicate", "kept", "12", "80.00 %", "<|end|>"):
        assert shown in text
    assert page == render_report(make()).decode()
