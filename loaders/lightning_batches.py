"""What Lightning's loops iterate over: a stream of batches for training, whole datasets for evaluation.

What a checkpoint says was trained on is what Lightning counts as trained on, not what was fetched: Lightning
may fetch a batch ahead, drop it at an epoch's end, or save while a step is failing. So the state is
arithmetic: where the first batch came from, moved by the batches that Lightning has counted since then. It
is the number that Lightning saves and goes on from (`batch_progress.total.processed`): they cannot disagree.

Training is one endless stream, which Lightning's epochs only cut: an epoch begins with the batch after the
last one trained on, whatever ended the epoch before. Only overfit_batches repeats batches. All epochs have
the same length: Lightning asks for it once and would miss the end, and the validation, of shorter ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from shardkit.loaders.batch import Batch
from shardkit.loaders.loader import StreamingLoader
from shardkit.loaders.plan import Cursor

__all__ = ["EvaluationBatches", "Trainer", "TrainingBatches", "find_replica", "trained_batches"]

Trainer: TypeAlias = Any  # `lightning.pytorch.Trainer`, which sets attributes that its types do not know

_ORIGIN: Cursor = (0, 0)


class TrainingBatches:
    """The stream of batches that training reads, in epochs of `len` batches (none if `endless`)."""

    def __init__(self, loader: StreamingLoader, trainer: Trainer | None, *, endless: bool) -> None:
        self.loader = loader
        self.trainer = trainer
        self._endless = endless
        self._live: Iterator[Batch] | None = None
        self._start = loader.cursor
        self._trained_at_start: int | None = None  # Lightning's count there; None: no batch was asked for yet
        self._mended = False
        self._repeated: int | None = None  # overfit_batches: the first so many batches over and over

    def __len__(self) -> int:
        if self._endless:
            raise TypeError("an endless loader has no length")
        return self.loader.plan.batches_left(0)  # the same in every epoch: Lightning asks for it only once

    def __iter__(self) -> Iterator[Batch]:
        # A generator, because Lightning also calls iter() only to see whether it can.
        self._begin()
        ahead = self._endless and not isinstance(getattr(self.trainer, "limit_train_batches", None), int)
        if not ahead:
            self._mend_counts()
        end = None if self._repeated is None else self.loader.plan.advance(_ORIGIN, self._repeated)
        while True:
            assert self._live is not None
            yield next(self._live)
            if not self._mended:  # Lightning has fetched the first batch before its loop began
                self._mend_counts()
            if self.loader.cursor == end:
                self._seek(_ORIGIN)

    def cursor(self) -> Cursor:
        """What has been trained on, as `StreamingLoader.cursor`, whatever has been fetched."""
        if self.trainer is None:
            return self.loader.cursor
        if self._trained_at_start is None:
            return self._start
        batches = trained_batches(self.trainer) - self._trained_at_start
        if self._repeated is None:
            return self.loader.plan.advance(self._start, batches)
        return self.loader.plan.advance(_ORIGIN, (self._start[1] + batches) % self._repeated)

    def state(self) -> dict[str, Any]:
        """From which a loader goes on with the first batch that has not been trained on."""
        position, epoch_batches = self.cursor()
        return {**self.loader.state_dict(), "position": position, "epoch_batches": epoch_batches}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go on from `state`, None: from the first sample, when the next epoch begins."""
        self.loader.load_state_dict(state or _moved(self.loader, _ORIGIN))
        self._start, self._trained_at_start, self._live = self.loader.cursor, None, None

    # Lightning warns of loaders that cannot resume: those without these two. The data module has the state.

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
        """Let Lightning's counts be what they would be in a run that was never resumed.

        Lightning 2.6 keeps a failed batch of the run before among those that were begun, and does not
        begin an epoch after a checkpoint of an epoch's last batch. Its next checkpoint would be misread.
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
            self.loader.load_state_dict(_moved(self.loader, cursor))
        self._live = iter(self.loader)


class EvaluationBatches:
    """Each sample of a dataset once over all ranks, in its order, as often as it is iterated."""

    def __init__(self, loader: StreamingLoader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return self.loader.plan.batches_left(0)

    def __iter__(self) -> Iterator[Batch]:
        self.loader.load_state_dict(_moved(self.loader, _ORIGIN))  # a run before may have stopped in between
        yield from self.loader


def _moved(loader: StreamingLoader, cursor: Cursor) -> dict[str, object]:
    """A loader's state, elsewhere."""
    return {**loader.state_dict(), "position": cursor[0], "epoch_batches": cursor[1]}


def trained_batches(trainer: Trainer | None) -> int:
    """Batches that Lightning counts as trained on, over all epochs, and in the runs that it continues."""
    return 0 if trainer is None else int(trainer.fit_loop.epoch_loop.batch_progress.total.processed)


def find_replica(trainer: Trainer | None) -> tuple[int | None, int | None]:
    """Rank and number of those that read different data: tensor-parallel ranks read the same."""
    if trainer is None:
        return None, None
    replicas = trainer.distributed_sampler_kwargs
    return (0, 1) if replicas is None else (replicas["rank"], replicas["num_replicas"])
