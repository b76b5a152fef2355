"""The report shows all that a build counted, whatever the texts and workers, and needs nothing else."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from shutil import copytree
from typing import Any

import pyarrow.parquet as pq
import pytest

from shardkit.card import DatasetCard
from shardkit.cli.info import card_tables
from shardkit.cli.main import main
from shardkit.writers import build, executors
from shardkit.writers.execution.progress import StageProgress
from shardkit.writers.report import render_report
from shardkit.writers.report.dedup import render_dedup
from shardkit.writers.report.html import STYLE
from support.small_build import make_corpus

HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(1)> & \u202eright to left\u202c\u200b\x00\x1b[31m ",
    "שלום " * 9,
    "w" * 4000,
    "]]> --> </style></table> http://elsewhere.example/x @import url(y) ",
)
RECIPE = """\
inputs:
  - {path: "plain-*.jsonl", source: "<script>s</script>"}
  - {path: "german.jsonl", source: german}
filters: [{length: {min_words: 3}}, {language: {languages: null, threshold: 0.0}}]
dedup: {exact: {}, lines: {}}
tokenizer: {path: tokenizer.json, eos: "<|endoftext|>"}
pack: {sequence_length: 64}
output: {path: out, shard_bytes: 8KiB}
work: work
"""
GERMAN = "Das ist ein ganz gewöhnlicher deutscher Satz über die Katze Nummer {}, und noch ein zweiter dazu."

pytestmark = pytest.mark.usefixtures("inline_builds")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, inline_builds: None) -> Path:
    folder = tmp_path_factory.mktemp("report")
    recipe = make_corpus(folder, 200, RECIPE)
    hostile = [json.dumps({"text": text}) for text in HOSTILE]
    (folder / "plain-2.jsonl").write_text("\n".join(hostile) + "\n")
    lines = [json.dumps({"text": GERMAN.format(n) + f"\n{GERMAN.format(0)}"}) for n in range(30)]
    (folder / "german.jsonl").write_text("\n".join(lines) + "\n")
    build(recipe, progress=False)
    return folder


@pytest.fixture(scope="module")
def card(built: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((built / "out" / "dataset.json").read_text())
    return found


class Page(HTMLParser):
    """A page or a part of one, whose tags match; collects tags with their attributes, and texts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "wbr"):
            self.open.append(tag)
        self.tags.append((tag, dict(attrs)))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def counts(self) -> Counter[str]:
        """Tags by name."""
        return Counter(tag for tag, _ in self.tags)


def assert_harmless(html: str) -> Page:
    """The page runs nothing, fetches nothing and commands no terminal."""
    page = Page(html)
    assert not page.counts.keys() & {"script", "img", "link", "iframe", "object", "base", "b"}
    names = {name for _, attributes in page.tags for name in attributes}
    assert not names & {"src", "onerror", "onload", "srcset"}
    assert all((attributes.get("href") or "#").startswith("#") for _, attributes in page.tags)
    assert not re.search(r"@import|url\(|https?:", STYLE)
    assert not [c for c in html if (ord(c) < 32 and c != "\n") or c in "\u202e\u202c"]
    return page


def test_histograms_hold_all_documents_rows_and_tokens(built: Path, card: dict[str, Any]) -> None:
    found = DatasetCard(card).histograms
    assert found["lengths"].count == card["funnel"]["kept"]["documents"]
    assert found["lengths"].sum == card["tokens"]
    assert (found["row_padding"].count, found["row_padding"].sum) == (card["samples"], card["padding"])
    assert (found["row_pieces"].count, found["row_pieces"].sum) == (
        card["samples"],
        card["packing"]["pieces"],
    )
    provenance = pq.read_table(built / "out" / "provenance").to_pylist()
    lengths: Counter[str] = Counter()
    for piece in provenance:
        lengths[piece["document_id"]] += piece["token_end"] - piece["token_start"]
    bins = Counter(length.bit_length() for length in lengths.values())
    assert {b: n for b, n in enumerate(found["lengths"].counts) if n} == dict(bins)
    rows = Counter((piece["shard"], piece["row"]) for piece in provenance)
    assert {b: n for b, n in enumerate(found["row_pieces"].counts) if n} == dict(
        Counter(pieces.bit_length() for pieces in rows.values())
    )


def test_languages_follow_their_documents_through_line_dedup(card: dict[str, Any]) -> None:
    for source in card["inputs"]:
        counts = source["languages"].values()
        assert sum(one["documents"] for one in counts) == source["funnel"]["kept"]["documents"]
        assert sum(one["tokens"] for one in counts) == source["tokens"]
    plain, german = (source["languages"] for source in card["inputs"])
    assert set(german) == {"de"}
    assert "he" in plain
    assert card["funnel"]["dropped"]["duplicate_lines"]["bytes"]  # rows are not what they were


def test_steps_of_the_funnel_lead_from_read_to_kept(card: dict[str, Any]) -> None:
    steps = DatasetCard(card).funnel_steps()
    assert [step.label for step in steps[:2]] == ["read", "length"]
    for before, after in pairwise(steps):
        assert before.documents - after.lost_documents == after.documents
        assert before.bytes - after.lost_bytes == after.bytes
    assert steps[-1].kind == "kept"


def test_the_page_needs_nothing_and_runs_nothing(built: Path, card: dict[str, Any]) -> None:
    page = (built / "out" / "report.html").read_text()
    parsed = assert_harmless(page)
    assert parsed.counts["style"] == 1
    assert page.partition("<style>")[2].partition("</style>")[0] == STYLE
    assert "prefers-color-scheme: dark" in STYLE
    assert parsed.counts["table"] == parsed.counts["caption"]
    shown = {"<script>s</script>", "<|endoftext|> = 0."}
    for step in DatasetCard(card).funnel_steps():
        shown |= {step.label, f"{step.documents:,}"}
    shown.add(f"{card['tokens']:,} tokens from {card['funnel']['kept']['documents']:,} documents")
    for source in card["inputs"]:  # what the tokenizer makes of each
        shown.add(f"{source['funnel']['kept']['bytes'] / source['tokens']:.2f}")
    text = " ".join(parsed.words)
    assert not [words for words in shown if words not in text]
    assert len(page) < 300_000
    for title in ("Funnel", "Sources", "Languages", "Filters", "Duplicates", "Document lengths", "Packing"):
        assert f"<h2>{title}</h2>" in page
    assert page.encode() == render_report(DatasetCard(card))
    assert "seconds" not in json.dumps(card)
    assert str(built) not in page


def test_hostile_texts_are_shown_as_texts(built: Path, card: dict[str, Any]) -> None:
    excerpts = [{"file": HOSTILE[0], "record": 1, "text": text} for text in HOSTILE]
    rules = [dict(rule, rule=HOSTILE[3], excerpts=excerpts) for rule in card["filters"]["rules"]]
    page = render_report(DatasetCard(card | {"filters": card["filters"] | {"rules": rules}})).decode()
    assert HOSTILE[0].partition("<img")[0] in " ".join(assert_harmless(page).words)
    assert page.count("</style>") == 1


@pytest.mark.extended  # test_build_determinism.py holds all files of builds without languages to it
def test_report_and_card_are_the_same_with_other_workers(built: Path) -> None:
    from shardkit.writers.execution.engine import LocalEngine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executors, "LocalEngine", LocalEngine)  # processes, unlike the first build
        build(
            built / "recipe.yaml",
            output=built / "again",
            overrides=["work=work-again"],
            workers=2,
            progress=False,
        )
    for name in ("report.html", "dataset.json"):
        assert (built / "out" / name).read_bytes() == (built / "again" / name).read_bytes()


def test_times_tell_of_every_stage_once_and_are_files_of_their_own(
    built: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    heard: list[StageProgress] = []
    result = build(built / "recipe.yaml", output=tmp_path / "out", progress=heard.append)
    stages = {stage.stage: stage for stage in result.stages}
    assert len(stages) == len(result.stages)
    assert stages.keys() == {"scan", "publish"} | {report.stage for report in heard}
    assert sum(stage.tasks for stage in stages.values()) == result.tasks
    assert sum(stage.tasks_reused for stage in stages.values()) == result.tasks_reused == result.tasks
    starts = [stage.start for stage in result.stages]
    assert starts == sorted(starts)
    command = ["build", str(built / "recipe.yaml"), "--output", str(tmp_path / "two")]
    assert main([*command, "--timings", str(tmp_path / "t.html")]) == 0
    assert re.search(r"time +\d+\.\d s.*; [a-z -]+ \d", capfd.readouterr().err)
    parsed = Page((tmp_path / "t.html").read_text())
    assert parsed.counts["tr"] > len(stages)
    assert main([*command, "--replace", "--quiet", "--timings", str(tmp_path / "t.json")]) == 0
    told = json.loads((tmp_path / "t.json").read_text())
    assert {stage["stage"] for stage in told["stages"]} == stages.keys()
    assert [cost["step"] for cost in told["costs"]] == ["length", "language", "exact", "lines"]
    assert "What each step judged" in (tmp_path / "t.html").read_text()
    assert main([*command, "--timings", str(tmp_path / "nowhere" / "t.json")]) == 1
    assert "its folder does not exist" in capfd.readouterr().err


def test_info_draws_the_short_form(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(built / "out")]) == 0
    text = capsys.readouterr().out
    for word in ("german", "de ", "tokens per document", "padding per row", "length/too_few_words", "█"):
        assert word in text
    assert main(["info", str(built / "out"), "--json"]) == 0
    assert "histograms" in json.loads(capsys.readouterr().out)["card"]


def test_info_shows_cards_that_lack_what_came_later(card: dict[str, Any]) -> None:
    old = {name: value for name, value in card.items() if name != "histograms"}
    old["inputs"] = [{k: v for k, v in source.items() if k != "languages"} for source in card["inputs"]]
    heads = [str(table.columns[0].header) for table in card_tables(DatasetCard(old), blocks=False)]
    assert heads == ["funnel", "dropped most by", "sources"]
    assert card_tables(DatasetCard({}), blocks=True) == []
    assert card_tables(DatasetCard({"tokens": 5, "padding": 0}), blocks=True) == []


def test_info_lets_no_card_command_the_terminal(
    built: Path, tmp_path: Path, card: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    copytree(built / "out", tmp_path / "out")
    sources = [dict(source, source="\x1b]0;title\x07\u202ename [bold]") for source in card["inputs"]]
    (tmp_path / "out" / "dataset.json").write_text(json.dumps(card | {"inputs": sources}))
    assert main(["info", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "name [bold]" in text
    assert not [c for c in text if not (c.isprintable() or c == "\n")]
    for harm in ({"histograms": {"lengths": {"counts": [1, -1], "sums": [0, 0]}}}, {"funnel": [3]}):
        (tmp_path / "out" / "dataset.json").write_text(json.dumps(card | harm))
        assert main(["info", str(tmp_path / "out")]) == 0
        assert "not a card written by shardkit" in capsys.readouterr().out


DEDUP: dict[str, Any] = {
    "near": {
        "similarity": 0.8,
        "containment": 0.95,
        "unit": "words",
        "ngram": 5,
        "permutations": 112,
        "bands": 14,
        "rows": 8,
        "scope": "global",
        "against": ["<last year>"],
        "counts": {"hubs": 3, "largest_bucket": 20_123, "bounded": 4_567},
    },
    "stages": [
        {"stage": "exact_duplicate", "documents": 81_234, "bytes": 345_000_000},
        {"stage": "near_duplicate", "documents": 40_321, "bytes": 212_345_678},
    ],
    "sources": [
        {
            "source": "<b>&amp;",
            "documents": 654_321,
            "bytes": 2_800_000_000,
            "removed": {
                "exact_duplicate": {"documents": 81_234, "bytes": 345_000_000},
                "near_duplicate": {"documents": 40_000, "bytes": 212_000_000},
            },
        },
        {
            "source": "web",
            "documents": 22_222,
            "bytes": 90_000_000,
            "removed": {"near_duplicate": {"documents": 321, "bytes": 345_678}},
        },
    ],
    "groups": [
        {"copies": "1", "groups": 500_000},
        {"copies": "2", "groups": 42_424},
        {"copies": "3-10", "groups": 8_123},
        {"copies": "11-100", "groups": 77},
    ],
    "largest_group": 98,
}


def render(**changes: Any) -> str:
    dedup = DatasetCard({"dedup": DEDUP | changes}).dedup
    assert dedup is not None
    return render_dedup(dedup)


def test_every_count_of_the_card_is_on_the_page() -> None:
    page = Page(render())
    text = " | ".join(page.words)
    for shown in (
        "676,543",  # documents of both sources
        "81,234",
        "40,321",
        "321 (1.44%)",
        "0 (0.00%)",
        "near duplicate",
        "<b>&amp;",
        "<last year>",
        "One document stands for 98 at most",
        "8,123",
        "112 permutations, 14 bands of 8 rows",
        "3, the largest of 20,123 documents",
        "4,567 times",
        "at least 0.8, or containment at least 0.95",
    ):
        assert shown in text, shown


def test_texts_are_escaped_and_the_page_needs_nothing_else() -> None:
    assert "style" not in assert_harmless(render()).counts


def test_what_was_not_done_is_not_told() -> None:
    exact = render(near=None)
    assert "Near-duplicates" not in exact
    assert "Removed if" in render()
