"""What a step costs is divided as it was spent: input, copies, training; sinks receive it."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import MissingExtraError
from shardkit.loaders import Run, StreamingLoader
from shardkit.loaders.metrics import CacheStats, LoaderStats, StoreStats, Telemetry
from shardkit.loaders.step_report import (
    Accelerators,
    log_to,
    mlflow,
    opentelemetry,
    prometheus,
    tensorboard,
    wandb,
)
from shardkit.storage.memory import MemoryBody, MemoryStore
from support.loader_data import parts, token_rows
from support.remote_harness import Remote, fresh_url, put_folder, write_hashed

torch = pytest.importorskip("torch")
from shardkit.loaders.cuda import Copied, CudaPrefetcher, HostCopies  # noqa: E402

ROWS, LENGTH = 400, 16
GPUS = Accelerators(flops_per_token=1e9, peak_flops=1e12, dollars_per_hour=3600.0, tokens_per_step=100)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steps") / "out"
    write_hashed(folder, "mds", token_rows(ROWS, LENGTH), parts(ROWS, 4))
    return folder


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


TIMES = st.floats(0.0, 100.0)
LOOPS = st.lists(
    st.tuples(st.lists(st.tuples(TIMES, TIMES, TIMES, st.integers(1, 4)), min_size=1, max_size=8),
              st.booleans(), TIMES),
    max_size=5,
)  # fmt: skip


@given(LOOPS)
def test_all_time_inside_loops_is_wait_copy_or_rest_and_none_between_them(
    loops: list[tuple[list[tuple[float, float, float, int]], bool, float]],
) -> None:
    """Run several loops, each ended or left, with pauses between them."""
    clock = Clock()
    telemetry = Telemetry(8, clock=clock)
    waits = copies = rest = completed = 0.0
    for steps, ends, pause in loops:
        telemetry.begin()
        of_loop: list[float] = []
        for wait, copy, train, batches in steps:
            clock.now += wait + copy
            telemetry.step(wait, 0, copy)
            waits, copies = waits + wait, copies + copy
            for number in range(batches):
                if number:
                    telemetry.more()
                clock.now += train
                of_loop.append(train)
        if ends:
            telemetry.end()
        else:
            of_loop.pop()  # its loop never came back, so nobody knows how long it trained
        rest, completed = rest + sum(of_loop), completed + len(of_loop)
        clock.now += pause
    stats = telemetry.stats()
    assert stats.completed_steps == completed
    assert stats.loop_seconds == pytest.approx(waits + copies + rest, abs=1e-6)
    assert stats.wait_seconds == pytest.approx(waits)
    assert stats.copy_seconds == pytest.approx(copies)
    assert stats.rest_seconds == pytest.approx(rest, abs=1e-6)


@given(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=30), st.data())
def test_an_interval_is_what_a_telemetry_of_its_own_would_have_counted(
    steps: list[tuple[float, float]], data: st.DataObject
) -> None:
    clock = Clock()
    whole, own = Telemetry(8, clock=clock), Telemetry(8, clock=clock)
    cut = data.draw(st.integers(0, len(steps) - 1))
    before = whole.stats()
    for number, (wait, train) in enumerate(steps):
        if number == cut:
            before = whole.stats()
        clock.now += wait
        whole.step(wait)
        if number >= cut:
            own.step(wait)
        clock.now += train
    found, expected = whole.stats().since(before), own.stats()
    for name in ("steps", "samples", "slow_steps", "wait_p50_seconds", "wait_p99_seconds"):
        # A percentile is at most the longest wait, which an interval knows by its class only.
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=0.1), name
    for name in ("wait_seconds", "slow_wait_seconds"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), abs=1e-6)
    assert found.wait_max_seconds >= expected.wait_max_seconds
    assert "wait_counts" not in found.to_dict()


def test_intervals_subtract_counters_and_keep_levels() -> None:
    def at(steps: int, requests: float) -> LoaderStats:
        cache = CacheStats(hits=requests, used_bytes=7 * requests)
        store = StoreStats(requests=requests, first_byte_p50_seconds=requests)
        return LoaderStats(steps=steps, wait_counts=(steps, 0), cache=cache, store=store)

    found = at(30, 10.0).since(at(10, 4.0))
    assert found.cache == CacheStats(hits=6.0, used_bytes=70.0)
    assert found.store == StoreStats(requests=6.0, first_byte_p50_seconds=10.0)
    assert found.steps == 20
    assert at(10, 4.0).since(at(30, 10.0)) == at(10, 4.0), "another loader, which has counted more"
    assert at(10, 4.0).since(LoaderStats()) == at(10, 4.0)
    local = LoaderStats(steps=3, wait_counts=(3,))
    assert local.since(LoaderStats(steps=1, wait_counts=(1,))).cache is None


def test_mfu_and_dollars_follow_from_their_definitions() -> None:
    stats = LoaderStats(
        steps=11, completed_steps=10, samples=44, loop_seconds=4.0, wait_seconds=0.75, copy_seconds=0.25,
        ranks=2, sample_tokens=25,
    )  # fmt: skip
    report = Accelerators(flops_per_token=1e9, peak_flops=1e12, dollars_per_hour=36.0, count=8).report(stats)
    assert report.tokens_per_second == pytest.approx(10 * 4 * 25 * 2 / 4)
    assert report.mfu == pytest.approx(500 * 1e9 / 8e12)
    assert report.mfu_without_waits == pytest.approx(4 / 3 * 500 * 1e9 / 8e12)
    assert report.mfu_lost_points == pytest.approx(100 / 3 * 500 * 1e9 / 8e12)
    assert report.idle_dollars == pytest.approx(1.0 * 8 * 36.0 / 3600)
    assert (report.rest_seconds, report.lost_share) == (3.0, 0.25)
    text = (
        "400 ms a step: input 18.8%, copy 6.2%, rest 75.0%; MFU 6.2%, 8.3% without waits; $0.08 of idle GPUs"
    )
    assert str(report) == text
    assert Accelerators().report(stats).mfu is None
    assert "mfu" not in Accelerators().report(stats).to_dict()
    nothing = Accelerators(flops_per_token=1.0, peak_flops=1.0).report(LoaderStats())
    assert (nothing.mfu, nothing.lost_share, str(nothing)) == (None, 0.0, "no completed steps yet")


def test_what_cannot_be_computed_is_refused_with_what_to_give(path: Path) -> None:
    with pytest.raises(ValueError, match="give both, or leave both out"):
        Accelerators(flops_per_token=6e9)
    for name in ("count", "dollars_per_hour", "tokens_per_step"):
        with pytest.raises(ValueError, match=f"{name} must be above 0, not 0"):
            Accelerators(**{name: 0})
    with pytest.raises(ValueError, match=r"give Accelerators\(tokens_per_step=…\)"):
        Accelerators(flops_per_token=1.0, peak_flops=1.0).report(LoaderStats(steps=2, completed_steps=1))
    with pytest.raises(ValueError, match="every_steps must be at least 1"), loader_of(path) as loader:
        log_to(loader, every_steps=0)


def loader_of(path: Path, **options: Any) -> StreamingLoader:
    return StreamingLoader(path, batch_size=4, **options)


@pytest.mark.parametrize(
    ("options", "tokens"),
    [({}, LENGTH), ({"labels": "shifted"}, LENGTH - 1)],
)
def test_a_loader_knows_the_tokens_of_its_samples(path: Path, options: Any, tokens: int) -> None:
    with loader_of(path, **options) as loader:
        batch = next(iter(loader))
        assert batch["tokens"].shape[1] == tokens
        assert loader.stats().sample_tokens == tokens
        assert CudaPrefetcher(loader, "cpu").stats().sample_tokens == tokens


class Slow:
    """Batches that each take `seconds` to come."""

    def __init__(self, seconds: float, count: int) -> None:
        self._seconds, self._count = seconds, count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(self._count):
            time.sleep(self._seconds)
            yield {"x": torch.full((2,), number)}


def train(batches: Iterable[Any], seconds: float) -> tuple[float, float]:
    """Sleep `seconds` with each batch; return the time of the loop and the part of it in which it slept."""
    slept, began = 0.0, time.perf_counter()
    for _ in batches:
        at = time.perf_counter()
        time.sleep(seconds)
        slept += time.perf_counter() - at
    return time.perf_counter() - began, slept


def assert_within_half_a_point(measure: Callable[[], tuple[float, float]]) -> None:
    """Compare a reported and a measured loss of MFU, in points; up to 4 times, as the machine may be busy."""
    seen = []
    for _ in range(4):
        seen.append(measure())
        if abs(seen[-1][0] - seen[-1][1]) <= 0.5:
            return
    pytest.fail(f"reported and injected: {seen}")


def test_the_loss_of_mfu_by_a_slow_source_is_the_injected_one() -> None:
    """A batch takes 40 ms and begins when the previous one is taken; training takes 20: the loop waits 20."""

    def measure() -> tuple[float, float]:
        ahead = CudaPrefetcher(Slow(0.04, 60), "cpu", depth=2)
        seconds, slept = train(ahead, 0.02)
        # A step without waits uses the GPU in full: then a share of the time is the same share of MFU.
        full = Accelerators(
            flops_per_token=1.0, peak_flops=60 / slept, dollars_per_hour=3600, tokens_per_step=1
        )
        report = full.report(ahead.stats())
        assert report.steps == 60
        assert report.idle_dollars == pytest.approx(seconds - slept, rel=0.2)
        assert report.mfu_lost_points is not None
        return report.mfu_lost_points, 100 * (1 - slept / seconds)

    assert_within_half_a_point(measure)


class SlowStore(MemoryStore):
    """A memory store that takes 100 ms to answer a request for a body."""

    def open(
        self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None
    ) -> MemoryBody:
        time.sleep(0.1)
        return super().open(key, start, stop, version=version)


def test_the_loss_of_mfu_by_a_slow_store_is_what_the_loop_itself_saw(path: Path) -> None:
    store = SlowStore(fresh_url())
    put_folder(path, store)

    def measure() -> tuple[float, float]:
        with Remote.open(store).loader(run=Run(prefetch_batches=0, connections=1)) as loader:
            seconds, slept = train(loader, 0.02)
            report = Accelerators().report(loader.stats())
        assert report.wait_seconds > 0.1
        return 100 * report.lost_share, 100 * (1 - slept / seconds)

    assert_within_half_a_point(measure)


def test_a_slow_copy_is_not_a_slow_input() -> None:
    class SlowCopies(HostCopies):
        def start(self, batch: Any) -> Copied:
            time.sleep(0.01)
            return super().start(batch)

    ahead = CudaPrefetcher(Slow(0.005, 20), "cpu", depth=1, copies=SlowCopies())
    assert sum(1 for _ in ahead) == 20
    stats = ahead.stats()
    assert 20 * 0.01 <= stats.copy_seconds < 20 * 0.02
    assert 20 * 0.005 <= stats.wait_seconds < 20 * 0.014
    assert stats.rest_seconds < 0.1


def test_a_loop_that_is_left_or_never_comes_back_costs_nothing_more(path: Path) -> None:
    with loader_of(path) as loader:
        kept = iter(loader)
        for _ in itertools.islice(kept, 3):
            time.sleep(0.02)
        before = loader.stats()
        time.sleep(0.2)
        assert loader.stats().loop_seconds == before.loop_seconds < 0.2
        assert before.completed_steps == 2
        for number, _ in enumerate(loader):
            if number == 4:
                break
        left = loader.stats()
        assert (left.steps, left.completed_steps) == (8, 6)
        assert left.loop_seconds < 0.2, "not the pause between the loops"
        total = 8 + sum(1 for _ in loader)
        assert loader.stats().completed_steps == total - 2, "an epoch that ended has ended its last step"


def test_reports_come_at_each_interval_and_at_the_end_of_each_loop(path: Path) -> None:
    logged: list[tuple[int, Mapping[str, float]]] = []
    with loader_of(path) as loader:
        batches = log_to(loader, lambda *entry: logged.append(entry), every_steps=30, accelerators=GPUS)
        for loop in (1, 2):
            assert sum(1 for _ in batches) == ROWS / 4, loop
        for _ in itertools.islice(batches, 31):
            pass
    assert [step for step, _ in logged] == [30, 60, 90, 100, 130, 160, 190, 200, 230]
    counts = [values["data/steps"] for _, values in logged]
    assert sum(counts) >= 200
    assert set(logged[0][1]) >= {"data/mfu", "data/mfu_lost_points", "data/idle_dollars", "data/wait_seconds"}


def test_an_interval_whose_one_step_began_in_the_interval_before_has_its_tokens(path: Path) -> None:
    logged: list[Mapping[str, float]] = []
    gpus = Accelerators(flops_per_token=1e9, peak_flops=1e12)
    with loader_of(path) as loader:
        for _ in log_to(loader, lambda _, values: logged.append(values), every_steps=33, accelerators=gpus):
            pass
    assert [values["data/steps"] for values in logged] == [33, 33, 33, 1]
    for values in logged:
        tokens = values["data/steps"] * 4 * LENGTH
        assert values["data/tokens_per_second"] == pytest.approx(tokens / values["data/seconds"])


# Sinks, each with the client that it is for.

VALUES = {"data/mfu": 0.4, "data/wait_seconds": 1.5}


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        tensorboard(writer)(7, VALUES)
    events = reading.EventAccumulator(str(tmp_path))
    events.Reload()
    for name, value in VALUES.items():
        [one] = events.Scalars(name)
        assert one.step == 7
        assert one.value == pytest.approx(value, rel=1e-6)


def test_prometheus_serves_what_was_set() -> None:
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    sink = prometheus(registry, rank="3")
    sink(6, VALUES)
    sink(7, VALUES)
    text = client.generate_latest(registry).decode()
    assert 'shardkit_data_mfu{rank="3"} 0.4' in text
    assert 'shardkit_data_step{rank="3"} 7.0' in text
    plain = client.CollectorRegistry()
    prometheus(plain)(1, VALUES)
    assert plain.get_sample_value("shardkit_data_wait_seconds") == 1.5


def test_prometheus_without_its_client_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtraError, match="pip install prometheus-client"):
        prometheus()


def test_opentelemetry_exports_what_was_set() -> None:
    metrics = pytest.importorskip("opentelemetry.sdk.metrics")
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    reader = export.InMemoryMetricReader()
    sink = opentelemetry(metrics.MeterProvider([reader]).get_meter("test"), rank="3")
    sink(7, {**VALUES, "data/mfu": 0.1})
    sink(8, VALUES)
    data: Any = reader.get_metrics_data()
    [scope] = data.resource_metrics[0].scope_metrics
    found = {metric.name: metric.data.data_points[0] for metric in scope.metrics}
    assert {name: point.value for name, point in found.items()} == {
        "shardkit.data.mfu": 0.4, "shardkit.data.wait_seconds": 1.5, "shardkit.data.step": 8,
    }  # fmt: skip
    assert dict(found["shardkit.data.mfu"].attributes) == {"rank": "3"}


def test_mlflow_stores_what_was_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client.set_tracking_uri(f"file:{tmp_path}")
    client.set_experiment("steps")
    with client.start_run() as run:
        mlflow(client)(7, VALUES)
    mlflow(client, run.info.run_id)(8, VALUES)
    stored = client.MlflowClient().get_metric_history(run.info.run_id, "data/mfu")
    assert [(each.step, each.value) for each in stored] == [(7, 0.4), (8, 0.4)]


def test_wandb_offline_takes_what_was_logged(tmp_path: Path) -> None:
    client = pytest.importorskip("wandb")
    with client.init(mode="offline", dir=str(tmp_path), project="test") as run:
        run.log({"loss": 1.0}, step=50)
        wandb(run)(7, VALUES)
        wandb(run)(6, VALUES)
        summary = dict(run.summary)
    assert summary["data/mfu"] == 0.4
    assert summary["data/step"] == 6, "its own axis, so that it may lie behind the run's steps"


class Recorded:
    """The methods of clients that sinks call, for machines without these clients."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: self.calls.append((name, *given, named))


def test_each_client_gets_the_calls_of_its_interface() -> None:
    board, run, flow = Recorded(), Recorded(), Recorded()
    tensorboard(board)(7, VALUES)
    wandb(run)(7, VALUES)
    mlflow(flow, "abc")(7, VALUES)
    assert board.calls == [("add_scalar", name, value, 7, {}) for name, value in VALUES.items()]
    assert run.calls == [
        ("define_metric", "data/*", {"step_metric": "data/step"}),
        ("log", VALUES | {"data/step": 7}, {}),
    ]
    assert flow.calls == [("log_metrics", VALUES, {"step": 7, "run_id": "abc"})]


# Ranges of a profiler.


def test_the_parts_of_a_batch_are_ranges_of_a_running_profiler(path: Path) -> None:
    with loader_of(path) as loader, torch.profiler.profile() as profiler:
        for _ in loader:
            pass
    names = {event.key: event.count for event in profiler.key_averages()}
    assert {"shardkit.wait", "shardkit.gather", "shardkit.make"} <= set(names)
    with loader_of(path) as loader, torch.autograd.profiler.profile() as older:
        for _ in loader:
            pass
    assert "shardkit.wait" in {event.key for event in older.key_averages()}


def test_a_prefetchers_waits_are_ranges_too_and_threads_end(path: Path) -> None:
    with loader_of(path) as loader, torch.profiler.profile() as profiler:
        ahead = CudaPrefetcher(loader, "cpu")
        assert sum(1 for _ in ahead) == ROWS / 4
        ahead.close()
    assert "shardkit.wait" in {event.key for event in profiler.key_averages()}
    assert all(thread.name != "shardkit-copy" for thread in threading.enumerate())
