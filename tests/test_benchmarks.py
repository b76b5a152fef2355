"""Benchmarks are listed in their README, report in one format, and leave out tools that are not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parent / "benchmarks"
sys.path.insert(0, str(FOLDER))

import all as all_benchmarks  # noqa: E402
import bench_driver  # noqa: E402
import bench_mistakes  # noqa: E402
from figures import Heads, benchmark_parser, give  # noqa: E402
from peer_processes import MARKER, REQUIREMENTS  # noqa: E402

HEADS: Heads = {"side": ("tool", ""), "rate": ("MB/s", ",.1f"), "x": ("x", ".2f")}
ROWS = [
    {"side": "shardkit", "rate": 2000.0, "x": 1.0, "runs": [1900.0, 2000.0, 2300.0]},
    {"side": "other", "rate": 20.25, "x": None, "runs": [20.25]},
]


def test_every_script_is_in_the_readme() -> None:
    listed = (FOLDER / "README.md").read_text()
    scripts = [*FOLDER.glob("bench_*.py"), *FOLDER.glob("soak_*.py")]
    assert len(scripts) > 10
    assert [script.name for script in scripts if f"`{script.name}" not in listed] == []


def test_figures_come_as_text_markdown_json_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = benchmark_parser("A % of help.", runs=3)
    several = [ROWS[0], {**ROWS[1], "runs": [20.25, 21.0]}]

    def printed(*options: str, rows: list[dict[str, Any]] = ROWS) -> list[str]:
        give(parser.parse_args(options), rows, HEADS, title="t", unit="MB/s")
        return capsys.readouterr().out.splitlines()

    assert printed() == ["tool         MB/s     x", "shardkit  2,000.0  1.00", "other        20.2"]
    assert json.loads("".join(printed("--json"))) == ROWS
    prefix = tmp_path / "new" / "bars"
    assert printed("--save", str(prefix)) == printed()
    markdown = "| tool | MB/s | x |\n| --- | ---: | ---: |\n"
    markdown += "| shardkit | 2,000.0 | 1.00 |\n| other | 20.2 |  |\n"
    assert prefix.with_suffix(".md").read_text() == markdown
    saved = json.loads(prefix.with_suffix(".json").read_text())
    assert saved == {"title": "t", "markdown": markdown, "rows": ROWS}
    assert not prefix.with_suffix(".png").exists(), "one run has no range to draw"
    printed("--save", str(prefix), rows=several)
    assert prefix.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_every_benchmark_has_a_table_or_a_reason() -> None:
    listed = {benchmark.command.split()[0] for benchmark in all_benchmarks.BENCHMARKS}
    assert {script.name for script in FOLDER.glob("bench_*.py")} - listed == set()
    assert len({benchmark.name for benchmark in all_benchmarks.BENCHMARKS}) == len(all_benchmarks.BENCHMARKS)


@pytest.mark.extended
def test_the_comparison_of_resumed_runs_finds_ours_exact(tmp_path: Path) -> None:
    cases = ["fewer ranks", "rows removed", "mixture changed", "kill -9", "damaged cache"]
    command = [sys.executable, str(FOLDER / "bench_resume.py"), "--libraries", "shardkit", "--json"]
    done = subprocess.run([*command, "--cases", ",".join(cases)], capture_output=True, text=True, check=True)
    assert {row["case"]: row["shardkit"] for row in json.loads(done.stdout)} == dict.fromkeys(cases, "exact")
    [damaged] = [row["details"]["shardkit"] for row in json.loads(done.stdout) if row["case"] == cases[-1]]
    assert damaged["damaged"] > 0


@pytest.mark.extended  # 12 s: it runs a benchmark
def test_one_command_makes_tables_once_and_names_what_is_missing(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "all.py"), str(tmp_path), "--only", "cache", "preprocess"]

    def ran() -> str:
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stderr

    assert "missing: no texts" in ran() or "missing: no tokenizer" in ran()
    table = json.loads((tmp_path / "cache.json").read_text())
    assert table["command"] == "python tests/benchmarks/bench_cache.py"
    assert table["markdown"] == (tmp_path / "cache.md").read_text()
    assert table["machine"]["cores"] >= 1
    assert "cache: is there" in ran(), "an interrupted run goes on"
    page = (tmp_path / "benchmarks.md").read_text()
    assert table["markdown"] in page
    assert "- preprocess: no t" in page


def test_each_library_has_each_mistake_or_the_reason_why_not() -> None:
    verdicts = bench_mistakes.reviews()
    for library in bench_mistakes.LIBRARIES:
        mistakes, tasks, absent = bench_mistakes.side(library)
        assert mistakes.keys() | tasks.keys() | absent.keys() == (
            bench_mistakes.MISTAKES.keys() | bench_mistakes.TASKS.keys()
        )
        assert not absent.keys() & (mistakes.keys() | tasks.keys())
        assert verdicts[library].keys() <= mistakes.keys()
        assert all(snippet.names for snippet in mistakes.values())
    assert bench_mistakes.side("shardkit")[2] == {}, "ours has all of them"


@pytest.mark.extended  # 20 s
def test_our_errors_name_the_thing_and_say_what_to_do() -> None:
    command = [sys.executable, str(FOLDER / "bench_mistakes.py"), "--libraries", "shardkit", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert "no verdict" not in done.stderr, "a message changed: judge it (--review)"
    [row] = json.loads(done.stdout)
    assert (row["errors"], row["named"], row["helpful"], row["handled"]) == (18, 18, 18, 2)


def test_tables_of_the_documentation_are_those_that_were_measured() -> None:
    page = all_benchmarks.PAGE.read_text()
    assert all_benchmarks.with_tables(page, json.loads(all_benchmarks.STORED.read_text())) == page
    assert len(all_benchmarks.BLOCK.findall(page)) >= 5
    with pytest.raises(KeyError):
        all_benchmarks.with_tables("<!-- table: unheard-of -->\n<!-- end -->", {})


def test_the_documentation_shows_the_chosen_rows_of_a_table() -> None:
    table = "| busy | batch |\n| --- | ---: |\n| none | 8 |\n| none | 64 |\n| all | 8 |\n"
    shown = all_benchmarks.chosen_rows(table, "busy=none|some; batch=8")
    assert shown == "| busy | batch |\n| --- | ---: |\n| none | 8 |\n"
    with pytest.raises(ValueError, match="no row"):
        all_benchmarks.chosen_rows(table, "busy=non")


@pytest.mark.extended
def test_a_loader_that_is_not_installed_is_left_out_with_the_reason(tmp_path: Path) -> None:
    bare = tmp_path / "litdata" / "bin" / "python"
    bare.parent.mkdir(parents=True)
    (tmp_path / "litdata" / MARKER).write_text(json.dumps(REQUIREMENTS["litdata"]))
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # -S: without installed packages
    bare.chmod(0o755)
    command = [
        sys.executable,
        str(FOLDER / "bench_loaders.py"),
        "--sides",
        "gather,shardkit,litdata",
        "--json",
    ]
    command += ["--megabytes", "8", "--runs", "1", "--seconds", "0.2", "--venvs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "left out: litdata: ModuleNotFoundError" in done.stderr
    assert [row["side"] for row in json.loads(done.stdout)] == ["gather", "shardkit"]


def driven(count: int, *, slow: float = 0.0, hanging: float = 0.0, speculate: bool = True) -> dict[str, Any]:
    """Figures of a driver with 2,000 workers."""
    options = Namespace(workers=2000, slow=slow, hanging=hanging)
    return bench_driver.measured(count, options, speculate=speculate)


@pytest.mark.extended
def test_stragglers_and_hanging_workers_cost_a_stage_minutes_not_hours() -> None:
    usual, without, speculating = (
        driven(20_000, slow=0.005 * some, hanging=0.001 * some, speculate=speculate)
        for some, speculate in ((0, True), (1, False), (1, True))
    )
    assert without["hours"] > 6, "as long as a hanging task may take"
    assert speculating["hours"] < usual["hours"] + 0.35
    assert speculating["more_attempts"] < 100, "of those that hang or are slow at the end"
    assert speculating["requests"] <= 0.05


@pytest.mark.extended
def test_a_driver_costs_as_much_a_task_with_ten_times_as_many() -> None:
    few, many = (driven(count) for count in (5_000, 50_000))
    assert many["cpu_us"] <= 1.5 * few["cpu_us"], "on an idle machine 1.1"
    assert max(many["requests"], many["restart_requests"]) <= 0.05
    # With the task itself, and what the allocator keeps of tasks and answers on their way: 2,250 measured.
    assert (many["peak_mb"] - few["peak_mb"]) * 1e6 / 45_000 <= 2400, "bytes a task"
