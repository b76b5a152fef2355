"""What the report and the card of a real build show: all that was counted, whatever the texts and workers."""

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

from shardkit.card import Histogram, funnel_steps
from shardkit.cli.info import card_tables
from shardkit.cli.main import main
from shardkit.writers import build, executors
from shardkit.writers.progress import StageProgress
from shardkit.writers.report import render_report
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


class _Page(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.names: set[str] = set()
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.names |= {name for name, _ in attrs}
        self.links += [value or "" for name, value in attrs if name == "href"]


def test_histograms_hold_all_documents_rows_and_tokens(built: Path, card: dict[str, Any]) -> None:
    found = {name: Histogram.from_dict(data) for name, data in card["histograms"].items()}
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
    steps = funnel_steps(card)
    assert [step.label for step in steps[:2]] == ["read", "length"]
    for before, after in pairwise(steps):
        assert before.documents - after.lost_documents == after.documents
        assert before.bytes - after.lost_bytes == after.bytes
    assert steps[-1].kind == "kept"


def test_the_page_needs_nothing_and_runs_nothing(built: Path, card: dict[str, Any]) -> None:
    page = (built / "out" / "report.html").read_text()
    parsed = _Page(page)
    assert not {"script", "img", "link", "iframe", "object", "base"} & parsed.tags.keys()
    assert not {"src", "onerror", "onload", "srcset"} & parsed.names
    assert all(link.startswith("#") for link in parsed.links)
    assert parsed.tags["style"] == 1
    style = page.partition("<style>")[2].partition("</style>")[0]
    assert not re.search(r"@import|url\(|https?:", style)
    assert "prefers-color-scheme: dark" in style
    assert not [c for c in page if (ord(c) < 32 and c != "\n") or c in "\u202e\u202c"]
    assert parsed.tags["table"] == parsed.tags["caption"]
    assert len(page) < 300_000
    for title in ("Funnel", "Sources", "Languages", "Filters", "Duplicates", "Document lengths", "Packing"):
        assert f"<h2>{title}</h2>" in page
    assert page.encode() == render_report(json.loads(json.dumps(card)))
    assert "seconds" not in json.dumps(card)
    assert str(built) not in page


def test_hostile_texts_are_shown_as_texts(built: Path, card: dict[str, Any]) -> None:
    excerpts = [{"file": HOSTILE[0], "record": 1, "text": text} for text in HOSTILE]
    rules = [dict(rule, rule=HOSTILE[3], excerpts=excerpts) for rule in card["filters"]["rules"]]
    page = render_report(card | {"filters": card["filters"] | {"rules": rules}}).decode()
    parsed = _Page(page)
    assert not {"script", "img"} & parsed.tags.keys()
    assert page.count("</style>") == 1
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "\x1b" not in page


@pytest.mark.extended  # test_build_determinism.py holds all files of builds without languages to it
def test_report_and_card_are_the_same_with_other_workers(built: Path) -> None:
    from shardkit.writers.execution.engine_local import LocalEngine

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
    assert "from s" in capfd.readouterr().err
    parsed = _Page((tmp_path / "t.html").read_text())
    assert parsed.tags["tr"] > len(stages)
    assert main([*command, "--replace", "--quiet", "--timings", str(tmp_path / "t.json")]) == 0
    told = json.loads((tmp_path / "t.json").read_text())
    assert {stage["stage"] for stage in told["stages"]} == stages.keys()
    assert main([*command, "--timings", str(tmp_path / "nowhere" / "t.json")]) == 1
    assert "its folder does not exist" in capfd.readouterr().err


def test_info_draws_the_short_form(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(built / "out")]) == 0
    text = capsys.readouterr().out
    for word in ("german", "de ", "tokens a document", "padding a row", "length/too_few_words", "█"):
        assert word in text
    assert main(["info", str(built / "out"), "--json"]) == 0
    assert "histograms" in json.loads(capsys.readouterr().out)["card"]


def test_info_shows_cards_that_lack_what_came_later(card: dict[str, Any]) -> None:
    old = {name: value for name, value in card.items() if name != "histograms"}
    old["inputs"] = [{k: v for k, v in source.items() if k != "languages"} for source in card["inputs"]]
    heads = [str(table.columns[0].header) for table in card_tables(old, blocks=False)]
    assert heads == ["funnel", "dropped most by", "sources"]
    assert card_tables({}, blocks=True) == []
    assert card_tables({"tokens": 5, "padding": 0}, blocks=True) == []


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
        assert "is not one that shardkit wrote" in capsys.readouterr().out
