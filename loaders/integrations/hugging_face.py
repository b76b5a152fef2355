"""The Hugging Face Trainer, TRL's SFTTrainer and Accelerate: batches in shardkit's order, resumed exactly.

    from shardkit.loaders.integrations.hugging_face import StreamingTrainer, TrainerDataset

    data = TrainerDataset("s3://bucket/dataset", cache_dir="/nvme/cache")
    StreamingTrainer(model=model, args=args, train_dataset=data).train(resume_from_checkpoint=…)

A user changes only the class (or, for SFTTrainer and other subclasses of Trainer, writes `class
Pretrainer(StreamingTrainerMixin, SFTTrainer): ...`) and `train_dataset`. Everything else is as before; an
`eval_dataset` is a `MapDataset`, whose order and padding the Trainer decides.

The Trainer does not save a loader's state. It counts steps, and when it resumes it reads the first batches of
an epoch only to discard them. It is therefore given a DataLoader over the *numbers* of micro-batches, which
cost nothing to discard; micro-batch t of a run is at position t * batch size * world size of one endless
stream, wherever the Trainer begins to count. Epochs cut this stream into equal numbers of whole steps. Each
checkpoint has the loader's state in trainer_state.json. It is checked at a resume (data, seed, shuffle);
because it gives the position of a global step, ranks, batch size and accumulation may have changed.

With Accelerate alone no adapter is needed, because `prepare` leaves a StreamingLoader as it is:

    loader = StreamingLoader("out", batch_size=8, **placement(accelerator))
    accelerator.register_for_checkpointing(loader)
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

from shardkit.datasets.dataset import Dataset
from shardkit.errors import naming_extras

with naming_extras("shardkit.loaders.integrations.hugging_face"):
    from accelerate import Accelerator
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.data import DataLoader, Sampler
    from torch.utils.data import Dataset as TorchDataset
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState
    from transformers.utils.import_utils import is_datasets_available

from shardkit.loaders.batch import Batch
from shardkit.loaders.config import LoaderOptions, Stream, flattened, grouped
from shardkit.loaders.loader import StreamingLoader
from shardkit.loaders.pytorch import MapDataset
from shardkit.order.order import Shuffle
from shardkit.order.state import OnMismatch

DATA_PARALLEL_DIMENSIONS = ("dp_replicate", "dp_shard")  # names in accelerate's mesh


class Placement(TypedDict, total=False):
    """Arguments of `StreamingLoader` that determine the part of each batch that this process reads."""

    mesh: DeviceMesh
    rank: int
    world_size: int


def placement(accelerator: Accelerator) -> Placement:
    """Return the place of this process in Accelerate's mesh; TP and CP peers read equal data."""
    mesh = accelerator.torch_device_mesh
    if mesh is None:
        return {}
    if set(DATA_PARALLEL_DIMENSIONS) & set(mesh.mesh_dim_names or ()):
        return {"mesh": mesh}
    return {"rank": 0, "world_size": 1}


class TrainerDataset(TorchDataset[Batch]):
    """Training data: a path, an open `Dataset` or a list of `Stream`, with options of `StreamingLoader`.

    Batches have the fields that transformers expects: `input_ids` and `labels`.
    `layout=Layout(position_ids=True)` adds positions that restart in each document, which keeps attention
    inside documents. Batch size, seed (`data_seed`, else `seed`) and ranks come from the Trainer.
    """

    def __init__(
        self,
        dataset: str | os.PathLike[str] | Dataset | Sequence[Stream],
        *,
        shuffle: Shuffle = "window",
        return_ids: bool = False,
        on_mismatch: OnMismatch = "error",
        **options: Unpack[LoaderOptions],
    ) -> None:
        """Describe the data. `on_mismatch` is passed to `StreamingLoader.load_state_dict` at a resume."""
        self._dataset = dataset
        self._shuffle: Shuffle = shuffle
        self._return_ids = return_ids
        self.on_mismatch: OnMismatch = on_mismatch
        defaults = {"labels": True, "rename": {"tokens": "input_ids"}}
        self._options = grouped({**defaults, **flattened(options), "endless": True})

    def open(self, *, batch_size: int, seed: int, place: Placement) -> StreamingLoader:
        """Open an endless loader over the data."""
        options = self._options
        if "mesh" in place:
            options = {**options, "mesh": place["mesh"]}
        return StreamingLoader(
            self._dataset,
            batch_size=batch_size,
            seed=seed,
            shuffle=self._shuffle,
            rank=place.get("rank"),
            world_size=place.get("world_size"),
            return_ids=self._return_ids,
            **options,
        )

    def __len__(self) -> int:
        """Return the number of samples in an epoch."""
        with self._alone() as loader:
            return loader.plan.samples

    def first_row(self) -> Mapping[str, Any]:
        """Return the first sample."""
        with self._alone() as loader:
            return {name: value[0] for name, value in next(iter(loader)).items()}

    def _alone(self) -> StreamingLoader:
        """Open a loader of single rows for this process alone, to inspect the data."""
        options = grouped({**flattened(self._options), "usage_log": None, "prefetch_batches": 0})
        return StreamingLoader(self._dataset, batch_size=1, rank=0, world_size=1, shuffle="none", **options)


class _Batches(TorchDataset[Batch]):
    """The micro-batches of a loader by their number in the run; consecutive numbers are prefetched."""

    def __init__(self, loader: StreamingLoader, on_mismatch: OnMismatch) -> None:
        self.loader = loader
        self._on_mismatch: OnMismatch = on_mismatch
        self._origin = 0  # the position of micro-batch 0
        self._iterator: Iterator[Batch] | None = None

    def __len__(self) -> int:
        return self.loader.plan.samples  # the Trainer reports it as the number of examples

    def __getitem__(self, number: int) -> Batch:
        position = self._origin + number * self.loader.plan.global_batch
        if self._iterator is None or position != self.loader.position:
            self.loader.seek(position)
            self._iterator = iter(self.loader)
        return next(self._iterator)

    def resume(self, state: Mapping[str, object], number: int) -> None:
        """Load a saved state whose next micro-batch is number `number`."""
        self.loader.load_state_dict(state, on_mismatch=self._on_mismatch)
        self._origin = self.loader.position - number * self.loader.plan.global_batch
        self._iterator = None


class _Numbers(Sampler[list[int]]):
    """The numbers of the micro-batches of an epoch, each as a list of one."""

    def __init__(self, batches: int) -> None:
        self._batches = batches
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[list[int]]:
        first = self._epoch * self._batches
        return ([number] for number in range(first, first + self._batches))


class _TrainDataLoader(DataLoader[Batch]):
    """The DataLoader of micro-batches for the Trainer, in epochs of whole optimizer steps."""

    def __init__(self, batches: _Batches, *, batches_per_step: int, pin_memory: bool) -> None:
        self.batches, plan = batches, batches.loader.plan
        steps = -(-plan.samples // (plan.global_batch * batches_per_step))
        self._numbers = _Numbers(steps * batches_per_step)
        super().__init__(
            self.batches, batch_sampler=self._numbers, collate_fn=_only_one, pin_memory=pin_memory
        )

    def set_epoch(self, epoch: int) -> None:
        self._numbers.set_epoch(epoch)


def _only_one(batches: list[Batch]) -> Batch:
    (batch,) = batches
    return batch


class LoaderState(TrainerCallback, ExportableState):  # type: ignore[misc, unused-ignore]
    """Keeps the loader's state in trainer_state.json, which the Trainer writes last."""

    def __init__(self) -> None:
        self._batches: _Batches | None = None

    def state(self) -> dict[str, Any]:
        state = {} if self._batches is None else self._batches.loader.state_dict()
        return {"args": {}, "attributes": {"loader": state}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        train_dataloader = kwargs["train_dataloader"]
        if not isinstance(train_dataloader, _TrainDataLoader):
            return
        self._batches = train_dataloader.batches
        if not state.global_step:
            return
        if args.ignore_data_skip:
            raise ValueError(
                "ignore_data_skip=True would repeat samples: leave it out; skipping batches costs nothing"
            )
        saved = cast(dict[str, Any], state.stateful_callbacks).get(type(self).__name__)
        if not saved:
            raise ValueError(
                f"the checkpoint of step {state.global_step:,} has no loader state: it was saved by another "
                "class of Trainer; load its model and start a new run instead of resuming"
            )
        number = state.global_step * args.gradient_accumulation_steps
        self._batches.resume(saved["attributes"]["loader"], number)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._batches is not None:
            self._batches.loader.close()


if TYPE_CHECKING:
    _Trainer = Trainer
else:
    _Trainer = object


class StreamingTrainerMixin(_Trainer):  # type: ignore[misc, unused-ignore]
    """Lets a Trainer train on a `TrainerDataset`: `class Pretrainer(StreamingTrainerMixin, SFTTrainer): ...`.

    The arguments dataloader_num_workers and dataloader_drop_last, and the arguments for sampling, prefetching
    and dispatching, have no effect on it: the loader prefetches by itself.
    """

    def __init__(
        self, *args: Any, train_dataset: Any = None, eval_dataset: Any = None, **kwargs: Any
    ) -> None:
        shown = {"train_dataset": _shown(train_dataset), "eval_dataset": _shown(eval_dataset)}
        cast(Any, super().__init__)(*args, **shown, **kwargs)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.add_callback(LoaderState())  # type: ignore[no-untyped-call, unused-ignore]

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss without a key-value cache.

        With a cache, models make no masks from `position_ids` and attend across documents.
        """
        config = getattr(self.model, "config", None)
        if "position_ids" in inputs and hasattr(config, "use_cache"):
            inputs = {**inputs, "use_cache": False}
        return super().compute_loss(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the loader without `Accelerator.prepare`, which would divide batches among ranks again."""
        if not isinstance(self.train_dataset, TrainerDataset):
            return super().get_train_dataloader()
        args = self.args
        loader = self.train_dataset.open(
            batch_size=self._train_batch_size if args.auto_find_batch_size else args.train_batch_size,
            seed=args.seed if args.data_seed is None else args.data_seed,
            place=placement(self.accelerator),
        )
        return _TrainDataLoader(
            _Batches(loader, self.train_dataset.on_mismatch),
            batches_per_step=args.gradient_accumulation_steps,
            pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
        )


class StreamingTrainer(StreamingTrainerMixin, Trainer):  # type: ignore[misc, unused-ignore]
    """The `Trainer` of transformers, changed to train on a `TrainerDataset`."""


def _shown(dataset: Any) -> Any:
    """Return shardkit data as a one-row Hugging Face dataset, which TRL inspects; other data unchanged."""
    if not isinstance(dataset, TrainerDataset | MapDataset) or not is_datasets_available():
        return dataset
    import datasets

    row = dataset.first_row() if isinstance(dataset, TrainerDataset) else dataset[0]
    return datasets.Dataset.from_list([{name: value.tolist() for name, value in row.items()}])
