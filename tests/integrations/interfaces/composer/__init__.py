"""The parts of Composer (mosaicml 0.32.1) that shardkit's adapter touches, and its Trainer's calls.

Written from reading it. The real Trainer has many more arguments; those that are here have its names.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from composer.core import DataSpec, Evaluator

__all__ = ["DataSpec", "Evaluator", "Trainer"]


class Trainer:
    """Counts batches, samples and epochs, saves and loads the dataset's state, and spins, as Composer does.

    It keeps what it saw in `seen` (epoch, batch in epoch, batch), and each step's in `microbatches`.
    """

    def __init__(
        self,
        *,
        model: Any,
        train_dataloader: DataSpec | DataLoader[Any] | None = None,
        optimizers: Any = None,
        max_duration: str | None = None,
        eval_dataloader: Any = None,
        eval_interval: int | str = 1,
        device_train_microbatch_size: int | None = None,
        save_folder: str | None = None,
        save_interval: str = "1ep",
        autoresume: bool = False,
        run_name: str | None = None,
        load_path: str | None = None,
    ) -> None:
        assert train_dataloader is not None
        assert max_duration is not None
        self.spec = train_dataloader if isinstance(train_dataloader, DataSpec) else DataSpec(train_dataloader)
        self.loader = self.spec.dataloader
        self.evaluators = [each for each in [eval_dataloader] if each is not None]
        self.microbatch_size = device_train_microbatch_size or self.loader.batch_size
        assert self.microbatch_size, "device_train_microbatch_size must be set"
        self.limit, self.unit = int(max_duration[:-2]), max_duration[-2:]
        self.every = int(save_interval[:-2]) if save_interval.endswith("ba") else 0
        self.folder = Path(save_folder) if save_folder else None
        self.epoch = self.batch = self.batch_in_epoch = self.sample_in_epoch = 0
        self.resumes_dataset = False
        self.seen: list[tuple[int, int, Any]] = []
        self.evaluated: list[list[Any]] = []
        self.microbatches: list[list[Any]] = []
        latest = self.folder / "latest.json" if self.folder else None
        if autoresume and latest is not None and latest.exists():
            load_path = str(latest)
        if load_path is not None:
            self._load(json.loads(Path(load_path).read_text()))

    def _load(self, state: dict[str, Any]) -> None:
        self.epoch, self.batch = state["epoch"], state["batch"]
        self.batch_in_epoch, self.sample_in_epoch = state["batch_in_epoch"], state["sample_in_epoch"]
        dataset = self.loader.dataset if isinstance(self.loader, DataLoader) else None
        if hasattr(dataset, "load_state_dict"):
            dataset.load_state_dict(state["dataset"])  # type: ignore[union-attr]
            self.resumes_dataset = True

    def _save(self) -> None:
        assert self.folder is not None
        dataset = self.loader.dataset if isinstance(self.loader, DataLoader) else None
        state: dict[str, Any] = {"epoch": self.epoch, "batch": self.batch}
        state |= {"batch_in_epoch": self.batch_in_epoch, "sample_in_epoch": self.sample_in_epoch}
        if hasattr(dataset, "state_dict"):
            state["dataset"] = dataset.state_dict(self.sample_in_epoch, True)  # type: ignore[union-attr]
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (f"ba{self.batch}.json", "latest.json"):
            (self.folder / name).write_text(json.dumps(state))

    def _batches(self) -> Iterator[Any]:
        return itertools.islice(self.loader, len(self.loader))

    def _is_done(self) -> bool:
        return (self.epoch if self.unit == "ep" else self.batch) >= self.limit

    def fit(self) -> None:
        """The order of Composer's `_train_loop`."""
        for evaluator in self.evaluators:
            next(iter(evaluator.dataloader.dataloader))  # it spins them once
        if not self.resumes_dataset:
            for _ in range(self.epoch):
                next(iter(self.loader))
        while not self._is_done():
            for number, batch in enumerate(self._batches()):
                if not self.resumes_dataset and number < self.batch_in_epoch:
                    continue
                self.seen.append((self.epoch, self.batch_in_epoch, batch))
                self.microbatches.append(list(self.spec.split_batch(batch, self.microbatch_size)))
                self.batch += 1
                self.batch_in_epoch += 1
                self.sample_in_epoch += self.spec.get_num_samples_in_batch(batch)
                if self.every and self.folder and self.batch % self.every == 0:
                    self._save()
                if self._is_done():
                    return
            self.epoch, self.batch_in_epoch, self.sample_in_epoch = self.epoch + 1, 0, 0
            self.evaluated += [list(evaluator.dataloader.dataloader) for evaluator in self.evaluators]
