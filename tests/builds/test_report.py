"""Card and report say what a build counted, whatever its texts and workers, without a time or a place.

Every number is shown, every text escaped, and a page needs and runs nothing.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from copy import deepcopy
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
from shardkit.errors import ConservationError
from shardkit.manifest import FileInfo, Manifest, ShardInfo
from shardkit.writers import build, executors
from shardkit.writers.card import card_bytes, make_card, recipe_content
from shardkit.writers.dedup.bands import probability
from shardkit.writers.dedup.measure import BAND_EDGES, binomial_interval
from shardkit.writers.funnel import Funnel
from shardkit.writers.ledger import Count, Ledger
from shardkit.writers.progress import StageProgress
from shardkit.writers.recipe import recipe_from_mapping
from shardkit.writers.report import render_report
from shardkit.writers.report.dedup import render_dedup
from shardkit.writers.report.html import STYLE
from support.small_build import make_corpus

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


class Page(HTMLParser):
    """Open and closing tags match; collects tags with their attributes, and texts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "wbr"):  # these have no end
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
        """Of tags."""
        return Counter(tag for tag, _ in self.tags)

    def attributes(self, name: str) -> list[str | None]:
        return [attributes[name] for _, attributes in self.tags if name in attributes]


# What makes a page run or fetch something.
ACTIVE_TAGS = {"script", "img", "link", "iframe", "object", "base"}
ACTIVE_ATTRIBUTES = ("src", "onerror", "onload", "srcset")


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


def test_the_report_shows_the_funnel_and_escapes_names() -> None:
    html = render_report(make()).decode()
    page = Page(html)
    assert "<b>&amp;" in page.words  # as text, not as a tag
    assert not (ACTIVE_TAGS | {"b"}) & page.counts.keys()
    text = " ".join(page.words)
    for shown in ("read", "short", "exact_duplicate", "kept", "12", "80.00 %", "<|end|>"):
        assert shown in text
    assert html == render_report(make()).decode()


PAIRS = 285


def recall() -> dict[str, Any]:
    bands: list[dict[str, Any]] = []
    for low, high in pairwise(BAND_EDGES[1:]):
        expected = PAIRS * probability((low + high) / 2, 14, 8)
        found = round(expected) - (3 if low < 0.8 else 0)
        interval = list(binomial_interval(found, PAIRS))
        bands.append(
            {
                "low": low,
                "high": high,
                "pairs": PAIRS,
                "candidates": found,
                "verified": found if low >= 0.8 else 0,
                "expected": round(expected, 3),
                "interval": interval,
            }
        )
    return {"bands": bands, "left_out": 17}


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
    "recall": recall(),
    "precision": {
        "checked": 480,
        "left_out": 20,
        "similar": 470,
        "contained": 10,
        "wrong": 0,
        "least": 0.8003,
        "excerpts": [
            {
                "similarity": 0.80031,
                "removed": "<script>alert('x')</script> \x00\x1b[31m The terms of use of this site",
                "kept": "The terms of use of this site, changed in May & since then in force.",
            },
            {
                "similarity": 0.97,
                "removed": "שלום עולם, זה טקסט לדוגמה",
                "kept": "שלום עולם, זה טקסט אחר לדוגמה",
            },
        ],
    },
}


def changed(**fields: Any) -> dict[str, Any]:
    return deepcopy(DEDUP) | fields


def test_every_count_of_the_card_is_on_the_page() -> None:
    page = Page(render_dedup(DEDUP))
    text = " | ".join(page.words)
    for shown in (
        "676,543",  # documents of both sources
        "81,234",
        "40,321",
        "321 (1.44 %)",
        "0 (0.00 %)",
        "near duplicate",
        "<b>&amp;",
        "<last year>",
        "One document stands for 98 at most",
        "8,123",
        "112 permutations, 14 bands of 8 rows",
        "3, the largest of 20,123 documents",
        "4,567 times",
        "at least 0.8, or containment at least 0.95",
        "0.85 to 0.90",
        "17 more were planted",
        "480 (100.00 %) are rightly removed, 10 of them as contained in it",
        "similar is 0.8003",
        "20 more lost to an index",
        "שלום עולם, זה טקסט לדוגמה",
    ):
        assert shown in text, shown
    band = DEDUP["recall"]["bands"][3]
    assert f"{100 * band['candidates'] / PAIRS:.2f} %" in text
    assert f"{100 * band['expected'] / PAIRS:.2f} %" in text


def test_texts_are_escaped_and_the_page_needs_nothing_else() -> None:
    html = render_dedup(DEDUP)
    page = Page(html)
    assert not (ACTIVE_TAGS | {"style", "b"}) & page.counts.keys()
    assert not any(page.attributes(name) for name in (*ACTIVE_ATTRIBUTES, "href"))
    assert "url(" not in html + STYLE
    assert not [c for c in html if ord(c) < 32 and c != "\n"]


def test_the_picture_shows_curve_and_measure_at_the_same_scale() -> None:
    page = Page(render_dedup(changed(recall=recall())))
    [curve] = [attributes["points"] for tag, attributes in page.tags if tag == "polyline"]
    assert curve is not None
    points = [tuple(map(float, point.split(","))) for point in curve.split()]
    assert points[0][0] == 60.0
    assert points[-1] == (620.0, 20.0)  # similarity 1 is always found
    assert points[60][1] == pytest.approx(20 + 240 * (1 - probability(0.8, 14, 8)), abs=0.06)
    bands = DEDUP["recall"]["bands"]
    marks = [a for tag, a in page.tags if tag == "circle" and a["class"] == "measured"][: len(bands)]
    for mark, band in zip(marks, bands, strict=True):
        assert float(mark["cx"] or 0) == pytest.approx(
            60 + 1120 * ((band["low"] + band["high"]) / 2 - 0.5), abs=0.06
        )
        assert float(mark["cy"] or 0) == pytest.approx(260 - 240 * band["candidates"] / PAIRS, abs=0.06)


def test_what_was_not_done_is_not_told() -> None:
    exact = render_dedup(changed(near=None, recall=None, precision=None))
    assert "Near-duplicates" not in exact
    assert "<svg" not in exact
    unmeasured = render_dedup(changed(recall=None, precision=None))
    assert "Removed if" in unmeasured
    assert "Recall" not in unmeasured
    assert "Precision" not in unmeasured
    nothing: dict[str, Any] = {
        "checked": 0,
        "left_out": 0,
        "similar": 0,
        "contained": 0,
        "wrong": 0,
        "least": None,
        "excerpts": [],
    }
    page = Page(
        render_dedup(changed(recall={"bands": [], "left_out": 0}, precision=nothing, groups=[], sources=[]))
    )
    assert "No removed document was compared again." in page.words


def test_a_wrong_removal_stands_out() -> None:
    precision = DEDUP["precision"] | {"similar": 468, "wrong": 2}
    html = render_dedup(changed(precision=precision))
    assert '<p class="wrong">2 were wrongly removed.</p>' in html
    assert "478 (99.58 %)" in html
    assert "wrongly" not in render_dedup(DEDUP)


def test_the_same_card_gives_the_same_bytes_after_a_round_through_json() -> None:
    assert render_dedup(json.loads(json.dumps(DEDUP, sort_keys=True))) == render_dedup(DEDUP)


HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(1)> & \u202eright to left\u202c\u200b\x00\x1b[31m ",
    "שלום " * 9,
    "w" * 4000,
    "]]> --> </style></table> http://elsewhere.example/x @import url(y) ",
)
BUILT_RECIPE = """\
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


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, inline_builds: None) -> Path:
    folder = tmp_path_factory.mktemp("report")
    recipe = make_corpus(folder, 200, BUILT_RECIPE)
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
    parsed = Page(page)
    assert not ACTIVE_TAGS & parsed.counts.keys()
    assert not any(parsed.attributes(name) for name in ACTIVE_ATTRIBUTES)
    assert all(link and link.startswith("#") for link in parsed.attributes("href"))
    assert parsed.counts["style"] == 1
    style = page.partition("<style>")[2].partition("</style>")[0]
    assert not re.search(r"@import|url\(|https?:", style)
    assert "prefers-color-scheme: dark" in style
    assert not [c for c in page if (ord(c) < 32 and c != "\n") or c in "\u202e\u202c"]
    assert parsed.counts["table"] == parsed.counts["caption"]
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
    assert not ACTIVE_TAGS & Page(page).counts.keys()
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
    assert Page((tmp_path / "t.html").read_text()).counts["tr"] > len(stages)
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
