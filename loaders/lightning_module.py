"""`ShardDataModule`: feeds shards to Lightning's Trainer, with a state that is exact at every checkpoint.

    data = ShardDataModule("out", val="out-val", global_batch_size=64, labels=True)
    Trainer(max_steps=10_000, callbacks=[DataMonitor()]).fit(model, data, ckpt_path="last.ckpt")

The state is in the data module's part of the checkpoint. It is the same on every rank, so it is enough that
Lightning saves the state of rank 0 and loads it on all ranks. Lightning does not replace a sampler here
(use_distributed_sampler has no effect): a StreamingLoader computes its rank's part of every batch.

A checkpoint covers the batches that Lightning counts as trained, not the fetched ones: Lightning may fetch a
batch ahead, drop it at the end of an epoch, or save while a step is failing. So the state is computed: the
cursor of the first batch, advanced by the batches that Lightning has counted since then. (Lightning saves
this count, `batch_progress.total.processed`, and continues from it, so the two cannot disagree.)

Training (`TrainingBatches`) is one endless stream, which Lightning's epochs only divide: an epoch begins with
the batch after the last trained one, no matter how the previous epoch ended. Only overfit_batches repeats
batches. All epochs have the same length, because Lightning reads the length only once and would miss the end
of shorter epochs, and their validation. Evaluation (`EvaluationBatches`) delivers each sample once.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any, TypeAlias, Unpack

from shardkit.datasets.dataset import Dataset
from shardkit.errors import naming_extras, warn_user

with naming_extras("ShardDataModule"):
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.strategies import ModelParallelStrategy


from shardkit.loaders.batch import Batch
from shardkit.loaders.config import (
    DataSource,
    LoaderConfig,
    LoaderOptions,
    RunOptions,
    Weights,
    flattened,
    grouped,
)
from shardkit.loaders.loader import StreamingLoader
from shardkit.loaders.metrics import LoaderStats
from shardkit.order.batches import Cursor
from shardkit.order.state import OnMismatch

Trainer: TypeAlias = Any  # `lightning.pytorch.Trainer`; Any, because its types lack some attributes

_ORIGIN: Cursor = (0, 0)


class TrainingBatches:
    """The stream of training batches, in epochs of `len` batches, or without epochs if `endless`."""

    def __init__(self, loader: StreamingLoader, trainer: Trainer | None, *, endless: bool) -> None:
        self.loader = loader
        self.trainer = trainer
        self._endless = endless
        self._live: Iterator[Batch] | None = None
        self._start = loader.cursor
        self._trained_at_start: int | None = None  # trained batches at `_start`; None: no batch requested
        self._mended = False
        self._repeated: int | None = None  # number of batches that overfit_batches repeats

    def __len__(self) -> int:
        if self._endless:
            raise TypeError("an endless loader has no length")
        return self.loader.plan.batches_left(0)  # same for all epochs: Lightning reads the length only once

    def __iter__(self) -> Iterator[Batch]:
        # A generator, because Lightning also calls iter() just to see whether it works.
        self._begin()
        ahead = self._endless and not isinstance(getattr(self.trainer, "limit_train_batches", None), int)
        if not ahead:
            self._mend_counts()
        end = None if self._repeated is None else self.loader.plan.advance(_ORIGIN, self._repeated)
        while True:
            assert self._live is not None
            yield next(self._live)
            if not self._mended:  # with `ahead`, Lightning fetches the first batch before its loop begins
                self._mend_counts()
            if self.loader.cursor == end:
                self._seek(_ORIGIN)

    def cursor(self) -> Cursor:
        """Return the cursor after the last trained batch; batches that were only fetched do not count."""
        if self.trainer is None:
            return self.loader.cursor
        if self._trained_at_start is None:
            return self._start
        batches = trained_batches(self.trainer) - self._trained_at_start
        if self._repeated is None:
            return self.loader.plan.advance(self._start, batches)
        return self.loader.plan.advance(_ORIGIN, (self._start[1] + batches) % self._repeated)

    def state(self) -> dict[str, Any]:
        """Return the state that continues with the first batch that has not been trained on."""
        return self.loader.state_at(self.cursor())

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Continue from `state` (None: the first sample) when the next epoch begins."""
        self.loader.load_state_dict(state or self.loader.state_at(_ORIGIN))
        self._start, self._trained_at_start, self._live = self.loader.cursor, None, None

    # Lightning warns of loaders without these two methods. The real state is in the data module's state.

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass

    def _begin(self) -> None:
        self._mended = False
        self._start = self.cursor()
        if self.trainer is not None:
            self._trained_at_start = trained_batches(self.trainer)
            if self.trainer.overfit_batches > 0:
                self._repeated = int(self.trainer.num_training_batches)
                if self.loader.plan.epoch(self._start[0]) or self._start[1] >= self._repeated:
                    self._start = _ORIGIN
        if self._live is None or self.loader.cursor != self._start:
            self._seek(self._start)

    def _mend_counts(self) -> None:
        """Set Lightning's counts to what they would be in a run that was never resumed.

        Lightning 2.6 still counts a failed batch of the previous run as started, and does not count a new
        epoch as started after a checkpoint of an epoch's last batch. Resuming from its next checkpoint would
        then be wrong.
        """
        self._mended = True
        if self.trainer is not None:
            loop = self.trainer.fit_loop
            batches, epochs = loop.epoch_loop.batch_progress, loop.epoch_progress
            batches.total.ready = batches.total.started = batches.total.processed
            for count in (epochs.total, epochs.current):
                count.ready = count.started = count.processed + 1

    def _seek(self, cursor: Cursor) -> None:
        if self.loader.cursor != cursor:
            self.loader.load_state_dict(self.loader.state_at(cursor))
        self._live = iter(self.loader)


class EvaluationBatches:
    """Delivers each sample of a dataset once over all ranks, in stored order, in each iteration."""

    def __init__(self, loader: StreamingLoader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return self.loader.plan.batches_left(0)

    def __iter__(self) -> Iterator[Batch]:
        self.loader.load_state_dict(self.loader.state_at(_ORIGIN))  # the last iteration may have ended early
        yield from self.loader


def trained_batches(trainer: Trainer | None) -> int:
    """Return how many batches Lightning counts as trained, over all epochs and all runs before this one."""
    return 0 if trainer is None else int(trainer.fit_loop.epoch_loop.batch_progress.total.processed)


def find_replica(trainer: Trainer | None) -> tuple[int | None, int | None]:
    """Return (data-parallel rank, world size), equal for tensor-parallel peers; Nones without a trainer."""
    if trainer is None:
        return None, None
    replicas = trainer.distributed_sampler_kwargs
    return (0, 1) if replicas is None else (replicas["rank"], replicas["num_replicas"])


def _placement(trainer: Trainer | None) -> dict[str, Any]:
    """Return loader arguments: the `mesh` of a ModelParallelStrategy, or else rank and world size."""
    strategy = getattr(trainer, "strategy", None)
    if isinstance(strategy, ModelParallelStrategy):
        return {"mesh": strategy.device_mesh}
    rank, world_size = find_replica(trainer)
    return {"rank": rank, "world_size": world_size}


EvaluationSource: TypeAlias = "DataSource | Mapping[str, DataSource]"

logger = logging.getLogger(__name__)


class DataOptions(RunOptions, total=False):
    """`StreamingLoader`'s keyword arguments except rank and world size, which Lightning sets."""

    on_mismatch: OnMismatch
    """For a checkpoint made with other data or settings: "error", or "fork" to continue from its position."""


_NOT_IN_CONFIG = DataOptions.__annotations__.keys() - LoaderOptions.__annotations__.keys()
# Options of training that evaluation ignores: it reads in stored order, writes no log and loads no state.
_NOT_IN_EVALUATION = {
    *("seed", "shuffle", "tail", "endless", "lanes", "window", "schedule", "epoch_samples"),
    *("usage_log", "on_mismatch"),
}


class ShardDataModule(pl.LightningDataModule):
    """Feeds a Trainer from `train`, `val`, `test` and `predict`: paths, URLs, Datasets or lists of `Stream`.

    Sequences per step: `batch_size` on each device, or `global_batch_size` on all devices together, which
    keeps every step's samples when the number of devices changes. `val_batch_size`: sequences on each device
    in evaluation; default: as in training. All further options are those of `StreamingLoader`.

    A Lightning epoch has as many batches as one pass over `train` needs. With tail="carry" (the default) its
    last batch is filled up from the next pass, and the next epoch continues from there. limit_train_batches
    makes epochs shorter; the next epoch continues with the next batch of the data. With endless=True training
    has no epochs, and `len` raises an error.

    `val`, `test` and `predict` may also be dicts of datasets: one Lightning loader each. Every sample comes
    once over all ranks; rows that fill up the last batch are marked in `is_padding`, and their labels are
    -100.
    """

    def __init__(
        self,
        train: DataSource | None,
        *,
        val: EvaluationSource | None = None,
        test: EvaluationSource | None = None,
        predict: EvaluationSource | None = None,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        val_batch_size: int | None = None,
        **options: Unpack[DataOptions],
    ) -> None:
        super().__init__()
        if (batch_size is None) == (global_batch_size is None):
            raise ValueError("give either batch_size (per device) or global_batch_size (over all devices)")
        given: dict[str, Any] = dict(options)
        LoaderConfig.of({name: given[name] for name in given if name not in _NOT_IN_CONFIG})  # type: ignore[arg-type]
        for name, instead in (
            ("restart", "evaluation always starts at the first sample, and training continues where it was"),
            ("global_batch", "give global_batch_size; Lightning accumulates gradients by itself"),
        ):
            if flattened(given).get(name):
                raise ValueError(f"ShardDataModule has no option {name}: {instead}")
        self.options = given
        self.train, self.val, self.test, self.predict = train, val, test, predict
        self.batch_size, self.global_batch_size = batch_size, global_batch_size
        self.val_batch_size = val_batch_size
        self._training: TrainingBatches | None = None
        self._evaluating: dict[str, dict[str, EvaluationBatches]] = {}
        self._opened_from: dict[str, object] = {}
        self._state: dict[str, Any] | None = None  # where training begins or ended; None: at the first sample
        self._loaded = False  # whether `_state` comes from a checkpoint, not from a previous run

    @property
    def train_loader(self) -> StreamingLoader | None:
        """The training loader, or None outside training; its `position` may be a batch ahead of training."""
        return None if self._training is None else self._training.loader

    @property
    def position(self) -> int:
        """Samples trained on so far, over all ranks and epochs."""
        if self._training is not None:
            return self._training.cursor()[0]
        return 0 if self._state is None else int(self._state["position"])

    def __str__(self) -> str:  # Lightning's own __str__ would open every loader
        return f"ShardDataModule(train={self.train!r}, position={self.position:,})"

    def stats(self) -> LoaderStats:
        """Return this rank's waits and counters since the first training batch, and a verdict."""
        return LoaderStats() if self._training is None else self._training.loader.stats()

    def set_weights(self, weights: Weights, *, at_position: int) -> None:
        """Mix with `weights` from `at_position`: see `StreamingLoader.set_weights`. Call it on all ranks."""
        if self._training is None:
            raise RuntimeError(
                "set_weights works only while training runs; to set weights before, give "
                "order=Order(schedule=…)"
            )
        self._training.loader.set_weights(weights, at_position=at_position)

    # Lightning calls the public methods below.

    def setup(self, stage: str) -> None:
        callbacks: list[pl.Callback] = getattr(self.trainer, "callbacks", [])
        if not any(isinstance(callback, _StopPeersFirst) for callback in callbacks):
            callbacks.insert(0, _StopPeersFirst())
        # A new Trainer without a checkpoint starts at the first sample; a Trainer that has trained continues.
        if stage == "fit" and not self._loaded and trained_batches(self.trainer) == 0:
            self._close()
            self._state = None

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self._state if self._training is None else self._training.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if (trainer := self.trainer) is not None and (trainer.evaluating or trainer.predicting):
            return  # Trainer.validate(ckpt_path=…) loads model weights only: a later fit must not start there
        self._state, self._loaded = state_dict["loader"], True
        if self._training is not None:
            self._training.load(self._state)

    def train_dataloader(self) -> TrainingBatches:
        if self.train is None:
            raise ValueError("ShardDataModule has no training dataset: give train=…")
        size = self._train_batch_size()
        origin = self._origin(self.train, size)
        if self._training is not None and self._opened_from.get("train") == origin:
            return self._training
        self._close_training()
        if self._state is None and not self._loaded and trained_batches(self.trainer):
            warn_user(
                "the checkpoint has no state of ShardDataModule (a class with another name saved it): "
                "training continues from the first sample of the data"
            )
        self._loaded = self._loaded and self.trainer is None
        options = {name: value for name, value in self.options.items() if name != "on_mismatch"}
        loader = self._open(self.train, size, **{**options, "endless": True})
        if self._state is not None:
            loader.load_state_dict(self._state, on_mismatch=self.options.get("on_mismatch", "error"))
        self._training = TrainingBatches(loader, self.trainer, endless=self.options.get("endless", False))
        self._opened_from["train"] = origin
        return self._training

    def val_dataloader(self) -> Any:
        return self._evaluation_batches("val") if self.val is not None else []

    def test_dataloader(self) -> Any:
        return self._evaluation_batches("test")

    def predict_dataloader(self) -> Any:
        return self._evaluation_batches("predict")

    def on_exception(self, exception: BaseException) -> None:
        # Called twice: by `_StopPeersFirst` before the other callbacks, then by Lightning after them.
        if self._training is not None and not isinstance(exception, SystemExit):
            # Leaving a loader with an error reports it to the other ranks, which may be waiting for this one.
            self._training.loader.__exit__(type(exception), exception, exception.__traceback__)
        self._close()

    def teardown(self, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        self._close_training()
        for name in list(self._evaluating):
            self._close_evaluation(name)

    def _close_training(self) -> None:
        self._opened_from.pop("train", None)
        if self._training is not None:
            if self._training.trainer is not None:  # else a user only inspected the data, without training
                self._state = self._training.state()
            self._training.loader.close()
            self._training = None

    def _close_evaluation(self, name: str) -> None:
        self._opened_from.pop(name, None)
        for batches in self._evaluating.pop(name, {}).values():
            batches.loader.close()

    def _origin(self, source: EvaluationSource, batch_size: int) -> object:
        """Return the values that a loader is opened from; the loader is reused until these values change.

        Lightning requests loaders again with reload_dataloaders_every_n_epochs; users do to get a length.
        """
        copied = source if isinstance(source, (str, os.PathLike, Dataset)) else copy(source)
        return self.trainer, copied, batch_size, dict(self.options)

    def _train_batch_size(self) -> int:
        """Return the number of sequences per step on each device."""
        if self.batch_size is not None:
            return self.batch_size
        assert self.global_batch_size is not None
        _, world_size = find_replica(self.trainer)
        size, rest = divmod(self.global_batch_size, world_size or 1)
        if rest:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is not a multiple of the {world_size} devices"
            )
        return size

    def _evaluation_batches(self, name: str) -> Any:
        source: EvaluationSource | None = getattr(self, name)
        if source is None:
            raise ValueError(f"ShardDataModule has no {name} dataset: give {name}=…")
        size = self.val_batch_size or self._train_batch_size()
        origin = self._origin(source, size)
        if self._opened_from.get(name) != origin:
            self._close_evaluation(name)
            self._evaluating[name] = {}
            several = source if isinstance(source, Mapping) else {"": source}
            for key, one in several.items():
                self._evaluating[name][key] = self._open_evaluation(f"{name} {key}".strip(), one, size)
            self._opened_from[name] = origin
        opened = self._evaluating[name]
        return opened if isinstance(source, Mapping) else opened[""]

    def _open_evaluation(self, name: str, source: DataSource, batch_size: int) -> EvaluationBatches:
        if not isinstance(source, (str, os.PathLike, Dataset)) and len(source) > 1:
            raise ValueError(
                f"{name} is a mixture, whose weights would determine how often each sample is evaluated: "
                "give a dict of datasets instead"
            )
        flat = {k: v for k, v in flattened(self.options).items() if k not in _NOT_IN_EVALUATION}
        return EvaluationBatches(self._open(source, batch_size, shuffle="none", tail="pad", **grouped(flat)))

    def _open(self, source: DataSource, batch_size: int, **options: Any) -> StreamingLoader:
        if options.get("mesh") is None and options.get("group") is None:
            options |= _placement(self.trainer)
        return StreamingLoader(source, batch_size=batch_size, **options)


class _StopPeersFirst(pl.Callback):
    """Reports an error to other ranks before a callback (one that saves a checkpoint, say) waits for them."""

    def on_exception(self, trainer: Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if isinstance(trainer.datamodule, ShardDataModule):
            trainer.datamodule.on_exception(exception)


class DataMonitor(pl.Callback):
    """Logs how well a ShardDataModule feeds training, every `every_n_batches` (default: log_every_n_steps).

    data/wait_s: mean wait for a batch, on the rank that waits longest. data/samples_per_s, data/tokens_per_s:
    rates over all ranks, including padding, excluding the time of validation. data/position: samples
    trained on so far. The loader's verdict is logged by Python's logger `shardkit.loaders.lightning_module`
    when it changes between "fed" and "input-bound", as a warning if it is "input-bound".
    """

    def __init__(self, every_n_batches: int | None = None) -> None:
        if every_n_batches is not None and every_n_batches < 1:
            raise ValueError(f"every_n_batches must be at least 1, not {every_n_batches}")
        self.every_n_batches = every_n_batches
        self._said = ""
        self._last = 0.0
        self._begin()

    def _begin(self, stats: LoaderStats | None = None) -> None:
        self._before = stats or LoaderStats()
        self._batches = self._samples = self._tokens = 0
        self._seconds = 0.0

    def setup(self, trainer: Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not isinstance(getattr(trainer, "datamodule", None), ShardDataModule):
            raise ValueError("DataMonitor needs Trainer.fit(model, datamodule=ShardDataModule(…))")

    def on_train_start(self, trainer: Trainer, pl_module: pl.LightningModule) -> None:
        self._begin()
        self._last = time.perf_counter()

    def on_validation_start(self, trainer: Trainer, pl_module: pl.LightningModule) -> None:
        self._seconds += time.perf_counter() - self._last

    def on_validation_end(self, trainer: Trainer, pl_module: pl.LightningModule) -> None:
        self._last = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        self._seconds, self._last = self._seconds + now - self._last, now
        data = trainer.datamodule
        self._batches += 1
        self._samples += data.train_loader.batch_size
        name = (flattened(data.options).get("rename") or {}).get("tokens", "tokens")
        if isinstance(batch, Mapping) and isinstance(tokens := batch.get(name), torch.Tensor):
            self._tokens += tokens.numel()
        if self._batches == (self.every_n_batches or trainer.log_every_n_steps):
            self._log(trainer, data)

    def _log(self, trainer: Trainer, data: ShardDataModule) -> None:
        stats = data.stats()
        # A new loader counts from 0 again.
        before = self._before if self._before.steps <= stats.steps else LoaderStats()
        wait = (stats.wait_seconds - before.wait_seconds) / max(1, stats.steps - before.steps)
        waits = trainer.strategy.all_gather(torch.tensor(wait, device=trainer.strategy.root_device))
        replicas = find_replica(trainer)[1] or 1
        rates = {"samples": self._samples, "tokens": self._tokens}
        metrics = {
            f"data/{name}_per_s": replicas * count / self._seconds for name, count in rates.items() if count
        }
        metrics |= {"data/wait_s": float(waits.max()), "data/position": float(data.position)}
        for sink in trainer.loggers:
            sink.log_metrics(metrics, step=trainer.global_step)
        kind = stats.verdict.partition(":")[0]
        if kind != self._said and (kind != "fed" or trainer.is_global_zero):
            level = logging.INFO if kind == "fed" else logging.WARNING
            logger.log(level, "rank %d: %s", trainer.global_rank, stats.verdict)
        self._said = kind
        self._begin(stats)
