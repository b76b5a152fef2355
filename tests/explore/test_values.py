"""The picture of a rule: values of dropped and kept documents around its bound, wherever they come from."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("starlette", reason="the pages need shardkit[view]")
pytest.importorskip("uvicorn", reason="the pages need shardkit[view]")

from shardkit.datasets.dataset import open_dataset
from shardkit.tools.explore.background import Background
from shardkit.tools.explore.explored import Explored
from shardkit.tools.explore.histogram import draw_chart
from shardkit.tools.explore.site import Site
from shardkit.tools.explore.summary import Rules, RuleValues, Values, _bin_key, _bin_value, spread_order
from shardkit.writers import build
from support.explored_build import Page, explore, lines_of, make_explored, show
from support.small_build import make_corpus

SHORT = "length/too_few_words"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, inline_builds: None) -> Path:
    return make_explored(tmp_path_factory.mktemp("explore") / "corpus")


def drawing(page: Page) -> list[dict[str, str]]:
    """The shapes and labels of the picture of a rule: their attributes, and their kind as `tag`."""
    kinds = ("rect", "line", "text")
    return [
        {"tag": tag, **{k: str(v) for k, v in attributes.items()}}
        for tag, attributes in page.tags
        if tag in kinds and str(attributes.get("class")) not in ("bar", "read")
    ]


def sides(page: Page) -> dict[str, list[tuple[float, float]]]:
    """The left and right ends of the bars in the picture, by kind, in percent."""
    found: dict[str, list[tuple[float, float]]] = {"kept": [], "dropped": []}
    for one in drawing(page):
        if one["tag"] == "rect":
            x, width = (float(one[name].rstrip("%")) for name in ("x", "width"))
            found[one["class"]].append((x, x + width))
    return found


def test_the_bound_is_marked_where_dropped_documents_end_and_kept_ones_begin(out: Path) -> None:
    page = show(Site(explore(out)), "rule", rule=SHORT)
    [line] = [one for one in drawing(page) if one["tag"] == "line" and one["class"] == "bound"]
    [label] = [one for one in drawing(page) if one["tag"] == "text" and one["class"] == "bound"]
    assert "bound 5" in page.words
    assert line["x1"] == line["x2"] == label["x"]
    bound, bars = float(line["x1"].rstrip("%")), sides(page)
    assert max(end for _, end in bars["dropped"]) <= bound <= min(start for start, _ in bars["kept"])
    kept = len({line["document_id"] for line in lines_of(out, "provenance")})
    inside = sum(map(int, re.findall(r"(\d+) kept", page.words)))
    assert inside == kept
    assert "estimated from all, which length judged again just now" in page.words


def test_a_value_far_from_the_bound_is_outside_of_the_picture_and_counted(
    tmp_path: Path, inline_builds: None
) -> None:
    recipe = make_corpus(tmp_path, 80)
    texts = [f"{n} " + "word " * length for n, length in enumerate([*[40, 41, 42] * 200, 5000])]
    lines = [json.dumps({"text": text, "number": n}) for n, text in enumerate(texts)]
    (tmp_path / "plain-0.jsonl").write_text("\n".join(lines) + "\n")
    made = Path(build(recipe, overrides=['filters=[{"length": {"max_words": 30}}]'], progress=False).output)
    page = show(Site(explore(made)), "rule", rule="length/too_many_words")
    outside = r"Outside of the picture: \d dropped[ \w]*\. Dropped documents have values from 3\d to 5,001\."
    assert re.search(outside, page.words)


def test_kept_documents_have_the_values_that_a_build_annotated(tmp_path: Path, inline_builds: None) -> None:
    recipe = make_corpus(tmp_path, 80)
    lines = [json.dumps({"text": " ".join(["word"] * n), "number": n}) for n in range(1, 60)]
    (tmp_path / "plain-0.jsonl").write_text("\n".join(lines) + "\n")
    filters = [{"length": {"max_words": 30}}, {"ratios": {"max_digit_ratio": 0.5}}]
    overrides = [f"filters={json.dumps(filters)}", "annotate=true"]
    made = Path(build(recipe, overrides=overrides, progress=False).output)
    page = show(Site(explore(made)), "rule", rule="length/too_many_words")
    table = pq.read_table(made / "annotations")
    values = table.filter(pc.is_null(table.column("dropped"))).column("length/too_many_words").to_pylist()
    bars = re.findall(r"(\d+)(?: to (\d+))?: (\d+) dropped(?:, (\d+) kept)?", page.words)
    assert "the values that the build annotated." in page.words
    for low, high, _, kept in bars:
        assert sum(int(low) <= value <= int(high or low) for value in values) == int(kept or 0)
    bound = next(float(one["x1"].rstrip("%")) for one in drawing(page) if one.get("class") == "bound")
    found = sides(page)
    assert max(end for _, end in found["kept"]) <= bound <= min(start for start, _ in found["dropped"])


def test_without_a_tokenizer_kept_documents_are_not_judged(out: Path) -> None:
    page = show(Site(Explored(open_dataset(out))), "rule", rule=SHORT)
    assert "The texts of kept documents cannot be read: give --tokenizer." in page.words
    assert not sides(page)["kept"]


@pytest.mark.parametrize("form", ["parquet", "jsonl", "tokens"])
def test_kept_documents_are_judged_wherever_the_dataset_has_texts(
    tmp_path: Path, inline_builds: None, form: str
) -> None:
    recipe = make_corpus(tmp_path, 80)
    lines = [json.dumps({"text": " ".join(["word"] * n), "number": n}) for n in range(1, 60)]
    (tmp_path / "plain-0.jsonl").write_text("\n".join(lines) + "\n")
    settings = {"filters": [{"length": {"max_words": 30}}], "output": {"path": "made", "format": form}}
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    made = Path(build(recipe, overrides=overrides, progress=False).output)
    explored = explore(made)
    page = show(Site(explored), "rule", rule="length/too_many_words")
    assert explored.card is not None
    kept = sum(map(int, re.findall(r"(\d+) kept", page.words)))
    if form == "tokens":
        assert "they are neither rows of tokens nor texts. Build with `annotate: true`" in page.words
        assert not kept
    else:
        assert "estimated from all, which length judged again" in page.words
        assert kept == explored.card.funnel.kept.documents


@pytest.mark.parametrize(
    "entry",
    [
        {"python": {"file": "evil.py", "function": "keep"}},
        {"classifier": {"model": "evil.bin", "label": "x"}},
        {"length": {"min_words": 5}, "by_language": "evil/*.yml"},
        {"length": {"min_words": "many"}},
        {"bad_words": {"files": ["evil.txt"]}},
    ],
)
def test_no_file_and_no_code_that_a_card_names_judges_kept_documents(
    out: Path, tmp_path: Path, entry: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "dataset"
    shutil.copytree(out, folder)
    shutil.copy(out.parent / "tokenizer.json", tmp_path)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef keep(batch): return []\n")
    monkeypatch.chdir(tmp_path)
    card = json.loads((folder / "dataset.json").read_bytes())
    name = next(iter(entry))
    card["recipe"]["filters"] = [entry]
    counts = card["funnel"]["dropped"]
    counts[f"{name}/rule"] = counts.pop(SHORT)
    (folder / "dataset.json").write_text(json.dumps(card))
    for file in (folder / "dropped").iterdir():
        table = pq.read_table(file)
        rules = pa.array([f"{name}/rule"] * len(table))
        pq.write_table(
            table.set_column(table.schema.get_field_index("rule"), table.schema.field("rule"), rules), file
        )
    page = show(Site(explore(folder)), "rule", rule=f"{name}/rule")
    assert "judges by more than the text as it was kept" in page.words
    assert "annotate: true" in page.words
    assert not (tmp_path / "ran").exists()


def test_a_page_shows_what_is_counted_so_far_and_then_all(out: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    [file] = (copy / "dropped").iterdir()
    table = pq.read_table(file)
    size = -(-len(table) // 4)
    for number in range(4):
        pq.write_table(table.slice(number * size, size), file.with_name(f"part-{number:05d}.parquet"))
    explored, first, rest = explore(copy), Event(), Event()
    count, files = explored.rules.count, len(explored.dropped.names)
    assert files == 4

    def slow(report: Callable[[float], None]) -> Rules:
        def reported(share: float) -> None:
            report(share)
            first.set()
            rest.wait(60)

        return count(reported)

    explored.counted_rules = Background(slow)
    assert explored.counted_rules.wait(0) is None
    assert first.wait(60)
    early = show(Site(explored), "rule", rule=SHORT)
    assert f"{100 / files:.1f}% of the table of dropped documents is counted so far" in early.words
    assert ("meta", {"http-equiv": "refresh", "content": "2"}) in early.tags
    rest.set()
    explored.counted_rules.wait(60)
    late = show(Site(explored), "rule", rule=SHORT)
    assert "counted so far" not in late.words
    dropped = [line for line in lines_of(out, "dropped") if line["rule"] == SHORT]
    counts = [sum(map(int, re.findall(r": (\d+) dropped", page.words))) for page in (early, late)]
    assert 0 < counts[0] < counts[1] == len(dropped)


@given(st.integers(1, 500))
def test_what_is_counted_first_is_spread_over_the_table(count: int) -> None:
    order = spread_order(count)
    assert sorted(order) == list(range(count))
    for some in range(1, count + 1):
        gaps = np.diff([-1, *sorted(order[:some]), count])
        assert gaps.max() <= 4 * count / some + 1


@given(
    st.lists(st.floats(-1e6, 1e6) | st.integers(-300, 300), min_size=1, max_size=60),
    st.lists(st.floats(-1e6, 1e6) | st.integers(-300, 300), max_size=60),
    st.floats(-1e3, 1e3) | st.integers(-50, 50),
    st.booleans(),
)
def test_no_bar_has_documents_of_both_sides_of_the_bound(
    dropped: list[float], kept: list[float], bound: float, is_above: bool
) -> None:
    fails, passes = (np.array(one, np.float64) for one in (dropped, kept))
    fails = bound + (1 if is_above else -1) * (np.abs(fails) + 1)
    passes = bound - (1 if is_above else -1) * np.abs(passes)
    rule, beside = RuleValues(bounds=[float(bound)]), Values()
    rule.add(fails)
    beside.add(passes)
    chart = draw_chart(rule, beside)
    assert chart is not None
    [(place, value)] = chart.bounds
    assert value == bound
    assert sum(bar.dropped for bar in chart.bars) + chart.dropped_outside == len(fails)
    assert sum(bar.kept for bar in chart.bars) + chart.kept_outside == len(passes)
    assert all(-1e-6 <= bar.x <= bar.x + bar.width <= 100 + 1e-6 for bar in chart.bars)
    assert all(-1e-6 <= at <= 100 + 1e-6 for at, _ in [*chart.bounds, *chart.ticks])
    for bar in chart.bars:
        assert not (bar.dropped and bar.kept)
        is_left = bar.x + bar.width <= place + 1e-6
        assert is_left or bar.x >= place - 1e-6
        assert is_left == (bool(bar.kept) == is_above)
        assert 0 < bar.kept_height + bar.dropped_height <= 100 + 1e-6


def test_bins_keep_the_order_of_values_and_count_them_all() -> None:
    values = np.sort(np.concatenate([np.random.default_rng(17).normal(0, 1000, 500), [0.0, -0.5, 3.0, 1e30]]))
    keys = _bin_key(values)
    assert (np.diff(keys) >= 0).all()
    assert np.allclose(np.abs(_bin_value(keys)), np.abs(values), rtol=2**-6)
    rule = RuleValues()
    for _ in range(2):
        rule.add(values)
    assert rule.values()[1].sum() == rule.documents == 2 * len(values)
    assert (rule.low, rule.high) == (values[0], values[-1])
