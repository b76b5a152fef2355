"""The text and the file that Prometheus reads, parsed back by a parser that knows only the format."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.loaders.metrics import CacheStats, LoaderStats, StoreStats, Telemetry
from shardkit.loaders.prometheus import MetricsFile, render

STATS = LoaderStats(
    steps=12,
    samples=96,
    seconds=3.5,
    wait_seconds=0.25,
    wait_p50_seconds=0.001,
    wait_p99_seconds=0.2,
    cache=CacheStats(hits=7, fetched_bytes=2.0**60, used_bytes=5),
    store=StoreStats(throttled=3, first_byte_p99_seconds=2.125),
)
Labels = tuple[tuple[str, str], ...]
SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\["\\n])*)"(?:,|$)')
ESCAPED = re.compile(r"\\(.)")


def parse(text: str) -> tuple[dict[tuple[str, Labels], float], dict[str, str]]:
    """({(name, labels): value}, {family: type}); fails on whatever the format does not allow."""
    samples: dict[tuple[str, Labels], float] = {}
    types: dict[str, str] = {}
    helped: set[str] = set()
    assert text.endswith("\n")
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            name = line.split(" ", 3)[2]
            assert name not in helped
            helped.add(name)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in types
            assert kind in ("counter", "gauge", "summary")
            types[name] = kind
        else:
            found = SAMPLE.fullmatch(line)
            assert found is not None, line
            labels, rest = [], found[2] or ""
            while rest:
                label = LABEL.match(rest)
                assert label is not None, rest
                value = ESCAPED.sub(lambda one: "\n" if one[1] == "n" else one[1], label[2])
                labels.append((label[1], value))
                rest = rest[label.end() :]
            family = found[1] if found[1] in types else re.sub("_(sum|count)$", "", found[1])
            assert family in types, f"{line}: a sample before its TYPE"
            assert family == list(types)[-1], f"{line}: the samples of a family must stand together"
            assert (found[1], tuple(labels)) not in samples
            samples[found[1], tuple(labels)] = float(found[3])
    assert helped == set(types)
    return samples, types


def test_the_figures_come_back_from_the_text() -> None:
    samples, types = parse(render(STATS, {"rank": 3}))
    rank = (("rank", "3"),)
    assert samples["shardkit_samples_total", rank] == 96
    assert samples["shardkit_step_wait_seconds_count", rank] == 12
    assert samples["shardkit_step_wait_seconds_sum", rank] == 0.25
    assert samples["shardkit_step_wait_seconds", (*rank, ("quantile", "0.99"))] == 0.2
    assert samples["shardkit_cache_hits_total", rank] == 7
    assert samples["shardkit_cache_fetched_bytes_total", rank] == 2.0**60
    assert samples["shardkit_cache_used_bytes", rank] == 5
    assert samples["shardkit_store_throttled_total", rank] == 3
    assert samples["shardkit_store_first_byte_p99_seconds", rank] == 2.125
    assert types["shardkit_step_wait_seconds"] == "summary"


def test_counters_end_in_total_and_nothing_else_does() -> None:
    _, types = parse(render(STATS))
    for name, kind in types.items():
        assert name.startswith("shardkit_")
        assert name.endswith("_total") == (kind == "counter"), name


def test_every_figure_of_cache_and_store_is_shown_and_the_unknown_left_out() -> None:
    full = StoreStats(first_byte_p50_seconds=0.1, first_byte_p99_seconds=0.2)
    samples, _ = parse(render(LoaderStats(cache=CacheStats(), store=full)))
    names = {name.removesuffix("_total") for name, _ in samples}
    assert {f"shardkit_cache_{field}" for field in CacheStats.__slots__} <= names
    assert {f"shardkit_store_{field}" for field in StoreStats.__slots__} <= names
    assert "first_byte" not in render(LoaderStats(store=StoreStats()))
    assert "shardkit_cache" not in render(LoaderStats())


@given(st.text(st.characters(exclude_categories=["Cs"])), st.floats())
def test_any_label_and_any_number_survive(label: str, value: float) -> None:
    samples, _ = parse(render(LoaderStats(wait_last_seconds=value), {"job": label, "rank": 0}))
    found = samples["shardkit_last_wait_seconds", (("job", label), ("rank", "0"))]
    assert found == value or (found != found and value != value)


@pytest.mark.parametrize("name", ["", "a-b", "1a", "__meta", "quantile", "le", "rank\n"])
def test_a_label_that_prometheus_refuses_is_refused_at_once(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be a label"):
        render(STATS, {name: 1})
    with pytest.raises(ValueError, match="cannot be a label"):
        MetricsFile(tmp_path / "a.prom", Telemetry(1), labels={name: 1})


def test_the_file_is_written_by_the_step_that_finds_it_due(tmp_path: Path) -> None:
    now = [100.0]
    telemetry = Telemetry(8)
    path = tmp_path / "rank3.prom"
    metrics = MetricsFile(path, telemetry, every_seconds=10, labels={"rank": 3}, clock=lambda: now[0])

    def shown() -> float:
        return parse(path.read_text())[0]["shardkit_samples_total", (("rank", "3"),)]

    telemetry.step(0.0)
    metrics.step()
    assert shown() == 8
    telemetry.step(0.0)
    now[0] = 109.9
    metrics.step()
    assert shown() == 8
    now[0] = 110.0
    metrics.step()
    assert shown() == 16
    telemetry.step(0.0)
    metrics.write()
    assert shown() == 24
    assert [file.name for file in tmp_path.iterdir()] == ["rank3.prom"]


def test_a_reader_never_sees_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.prom"
    metrics = MetricsFile(path, Telemetry(1))
    metrics.write()
    before = path.read_text()

    def half(self: Path, text: str, encoding: str) -> int:
        with self.open("w", encoding=encoding) as file:
            file.write(text[:20])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.warns(RuntimeWarning, match="No space left"):
        metrics.write()
    assert path.read_text() == before


def test_a_file_that_cannot_be_written_warns_once_and_never_raises(tmp_path: Path) -> None:
    now = [0.0]
    metrics = MetricsFile(tmp_path / "no" / "a.prom", Telemetry(1), clock=lambda: now[0])
    with pytest.warns(
        RuntimeWarning, match=r"no/a\.prom: cannot write the loader's metrics.*training continues"
    ) as caught:
        metrics.step()
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        now[0] = 20.0
        metrics.step()
        MetricsFile(tmp_path / "no" / "b.prom", Telemetry(1)).step()
    (tmp_path / "no").mkdir()
    metrics.write()
    assert (tmp_path / "no" / "a.prom").exists()


def test_figures_that_cannot_be_read_do_not_stop_training(tmp_path: Path) -> None:
    broken: Any = SimpleNamespace()  # without counters
    metrics = MetricsFile(tmp_path / "a.prom", Telemetry(1, shards=[broken]))
    with pytest.warns(RuntimeWarning, match="AttributeError"):
        metrics.step()


def test_an_interval_must_be_above_zero(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="above 0, not 0"):
        MetricsFile(tmp_path / "a.prom", Telemetry(1), every_seconds=0)
