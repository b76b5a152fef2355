"""What a step costs: how it divides into input, copies and training, and what that means in MFU and dollars.

    gpus = Accelerators(flops_per_token=6 * 8e9, peak_flops=989e12, dollars_per_hour=2.5)
    for batch in log_to(loader, tensorboard(writer), every_steps=100, accelerators=gpus):
        ...
    print(gpus.report(loader.stats()))

`Accelerators.report` computes everything from a `LoaderStats`, so it works for a `StreamingLoader`, for a
`CudaPrefetcher`, and for an interval (`stats.since(earlier)`). A model FLOPs utilization counts the tokens of
completed steps over the time inside `for` loops: evaluation and checkpoints between loops do not lower it.
Waits are those of one rank; in synchronous training, all GPUs wait for the slowest one.

A sink is any callable `(step, {name: value})`. The sinks here pass values to the client that you have set up,
so that its options stay its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Protocol, TypeVar

from shardkit.errors import naming_extras
from shardkit.loaders.metrics import LoaderStats

Sink = Callable[[int, Mapping[str, float]], object]
Item = TypeVar("Item", covariant=True)

PREFIX = "data/"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """The division of the time inside `for` loops, on one rank; None: not known without `Accelerators`."""

    steps: int
    """Completed steps."""
    seconds: float
    wait_seconds: float
    """Time that the loop waited for batches."""
    copy_seconds: float
    """Time that the loop or the GPU waited for copies to the device."""
    rest_seconds: float
    """Everything else: training."""
    wait_p50_seconds: float
    wait_p99_seconds: float
    wait_max_seconds: float
    tokens_per_second: float | None = None
    """Tokens per second over all ranks."""
    mfu: float | None = None
    """Model FLOPs utilization, from 0 to 1."""
    mfu_without_waits: float | None = None
    """The utilization if no step had waited for input and copies."""
    idle_dollars: float | None = None
    """Price of all GPUs while they waited for input and copies."""

    @property
    def lost_share(self) -> float:
        """Share of the time spent waiting for input and copies, from 0 to 1."""
        waited = self.wait_seconds + self.copy_seconds
        return min(1.0, waited / self.seconds) if self.seconds > 0 else 0.0

    @property
    def mfu_lost_points(self) -> float | None:
        """Percentage points of MFU lost to waits for input and copies."""
        if self.mfu is None or self.mfu_without_waits is None:
            return None
        return 100 * (self.mfu_without_waits - self.mfu)

    def to_dict(self) -> dict[str, float]:
        """Return all known figures as numbers, including derived ones."""
        derived = {"lost_share": self.lost_share, "mfu_lost_points": self.mfu_lost_points}
        return {name: value for name, value in (asdict(self) | derived).items() if value is not None}

    def __str__(self) -> str:
        if not self.steps or self.seconds <= 0:
            return "no completed steps yet"
        parts = {"input": self.wait_seconds, "copy": self.copy_seconds, "rest": self.rest_seconds}
        shares = ", ".join(f"{name} {100 * part / self.seconds:.1f}%" for name, part in parts.items())
        text = f"{1000 * self.seconds / self.steps:.4g} ms a step: {shares}"
        if self.mfu is not None and self.mfu_without_waits is not None:
            without = 100 * self.mfu_without_waits
            text += f"; MFU {100 * self.mfu:.1f}%, {without:.1f}% without waits"
        return text if self.idle_dollars is None else f"{text}; ${self.idle_dollars:,.2f} of idle GPUs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerators:
    """The GPUs of a run, and what a token costs them."""

    flops_per_token: float | None = None
    """FLOPs of the model for a token, forward and backward: about 6 times its active parameters."""
    peak_flops: float | None = None
    """FLOPs per second of one GPU in the type that is trained in, such as 989e12 (H100, dense bf16)."""
    count: int | None = None
    """Number of GPUs of the whole run; None: one for each data-parallel rank."""
    dollars_per_hour: float | None = None
    """Price of one GPU for an hour."""
    tokens_per_step: float | None = None
    """Tokens of one rank's batch; None: rows times their length. Needed if rows differ in length."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise ValueError(f"{field.name} must be above 0, not {value!r}")
        if (self.flops_per_token is None) != (self.peak_flops is None):
            raise ValueError("MFU needs both flops_per_token and peak_flops: give both, or leave both out")

    def report(self, stats: LoaderStats) -> StepReport:
        """Return what the steps of `stats` cost; raise ValueError if MFU needs `tokens_per_step`."""
        seconds, gpus = stats.loop_seconds, self.count or stats.ranks
        waited = min(seconds, stats.wait_seconds + stats.copy_seconds)
        tokens = self._tokens_per_step(stats)
        total = None if tokens is None else tokens * stats.completed_steps * stats.ranks
        mfu = without = None
        if self.flops_per_token is not None and self.peak_flops is not None and stats.completed_steps:
            if total is None:
                raise ValueError(
                    "MFU needs the number of tokens of a batch, and rows differ in length here: give "
                    "Accelerators(tokens_per_step=…)"
                )
            full_seconds = total * self.flops_per_token / (self.peak_flops * gpus)
            mfu = full_seconds / seconds if seconds > 0 else None
            without = full_seconds / (seconds - waited) if seconds > waited else None
        price = self.dollars_per_hour
        return StepReport(
            steps=stats.completed_steps,
            seconds=seconds,
            wait_seconds=stats.wait_seconds,
            copy_seconds=stats.copy_seconds,
            rest_seconds=stats.rest_seconds,
            wait_p50_seconds=stats.wait_p50_seconds,
            wait_p99_seconds=stats.wait_p99_seconds,
            wait_max_seconds=stats.wait_max_seconds,
            tokens_per_second=total / seconds if total is not None and seconds > 0 else None,
            mfu=mfu,
            mfu_without_waits=without,
            idle_dollars=None if price is None else waited / 3600 * gpus * price,
        )

    def _tokens_per_step(self, stats: LoaderStats) -> float | None:
        if self.tokens_per_step is not None:
            return self.tokens_per_step
        if stats.sample_tokens is None or not stats.steps:
            return None
        return stats.sample_tokens * stats.samples / stats.steps


class Reported(Protocol[Item]):
    """An iterable that counts its steps: a `StreamingLoader` or a `CudaPrefetcher`."""

    def __iter__(self) -> Iterator[Item]: ...
    def stats(self) -> LoaderStats: ...


def log_to(
    loader: Reported[Item],
    *sinks: Sink,
    every_steps: int = 100,
    accelerators: Accelerators | None = None,
    first_step: int = 0,
) -> Iterable[Item]:
    """Return an iterable over `loader` that reports each interval of `every_steps` steps to the sinks.

    Each value is of its interval, and of this rank. `first_step`: number of the first step, of a resumed run.
    The last, shorter interval of a `for` is reported, too, unless the loop is left early.
    """
    if every_steps < 1:
        raise ValueError(f"every_steps must be at least 1, not {every_steps}")
    return _Logged(loader, sinks, every_steps, accelerators or Accelerators(), first_step)


class _Logged(Iterable[Item]):
    def __init__(
        self, loader: Reported[Item], sinks: Iterable[Sink], every: int, of: Accelerators, step: int
    ) -> None:
        self._loader, self._sinks, self._every = loader, tuple(sinks), every
        self._accelerators, self._step = of, step
        self._before = loader.stats()

    def __iter__(self) -> Iterator[Item]:
        due = self._step + self._every
        for item in self._loader:
            # Here the loop has come back for `item`, so all steps before it are complete.
            if self._step >= due:
                self._report()
                due = self._step + self._every
            self._step += 1
            yield item
        self._report()

    def _report(self) -> None:
        stats = self._loader.stats()
        interval, self._before = stats.since(self._before), stats
        if not interval.completed_steps:
            return
        accelerators = self._accelerators
        if not interval.steps:  # its one step began in the interval before, which counted its tokens
            tokens = accelerators._tokens_per_step(stats)
            accelerators = replace(accelerators, tokens_per_step=tokens)
        report = accelerators.report(interval).to_dict()
        values = {f"{PREFIX}{name}": float(value) for name, value in report.items()}
        for sink in self._sinks:
            sink(self._step, values)


def tensorboard(writer: Any) -> Sink:
    """Return a sink for a `torch.utils.tensorboard.SummaryWriter`, or Lightning's logger of it."""

    def sink(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return sink


def wandb(run: Any) -> Sink:
    """Return a sink for a W&B run, which is what `wandb.init` returns.

    Its steps have an axis of their own, `data/step`, so they need not agree with the run's other steps.
    """
    axis = f"{PREFIX}step"
    run.define_metric(f"{PREFIX}*", step_metric=axis)
    return lambda step, values: run.log({**values, axis: step})


def mlflow(client: Any, run_id: str | None = None) -> Sink:
    """Return a sink for the module `mlflow` and its active run, or for the run `run_id`."""
    options = {} if run_id is None else {"run_id": run_id}
    return lambda step, values: client.log_metrics(dict(values), step=step, **options)


def opentelemetry(meter: Any, **attributes: str) -> Sink:
    """Return a sink that sets gauges of an OpenTelemetry meter, such as `shardkit.data.mfu`."""
    gauges: dict[str, Any] = {}

    def sink(step: int, values: Mapping[str, float]) -> None:
        for name, value in {**values, f"{PREFIX}step": step}.items():
            gauge = gauges.get(name) or meter.create_gauge(f"shardkit.{name.replace('/', '.')}")
            gauges[name] = gauge
            gauge.set(value, attributes)

    return sink


def prometheus(registry: Any = None, **labels: str) -> Sink:
    """Return a sink that sets gauges such as `shardkit_data_mfu` of a prometheus_client registry.

    `registry`: default: the client's own, which its `start_http_server` serves. A registry takes one sink.
    """
    with naming_extras("the sink for Prometheus"):
        prometheus_client: Any = importlib.import_module("prometheus_client")

    registry = prometheus_client.REGISTRY if registry is None else registry
    gauges: dict[str, Any] = {}

    def sink(step: int, values: Mapping[str, float]) -> None:
        for name, value in {**values, f"{PREFIX}step": step}.items():
            if name not in gauges:
                full = f"shardkit_{name.replace('/', '_')}"
                gauge = prometheus_client.Gauge(full, f"shardkit: {name}", list(labels), registry=registry)
                gauges[name] = gauge.labels(**labels) if labels else gauge
            gauges[name].set(value)

    return sink
