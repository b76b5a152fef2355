"""MaxText: shardkit's order in its training loop, resumed exactly on any number of hosts. Needs no torch.

MaxText has no registry of input pipelines: in your launch script, replace its Grain pipeline by this one.
MaxText then saves the state of this pipeline in its checkpoints, as it does for Grain.

    from maxtext.input_pipeline import input_pipeline_interface
    from maxtext.trainers.pre_train import train
    from shardkit.loaders.integrations.maxtext import make_eval_iterator, make_train_iterator

    input_pipeline_interface.make_grain_train_iterator = make_train_iterator
    input_pipeline_interface.make_grain_eval_iterator = make_eval_iterator
    app.run(train.main)  # dataset_type=grain grain_train_files=s3://bucket/dataset

`functools.partial(make_train_iterator, cache_dir=…)` passes options to `StreamingLoader`. Rows of
`max_target_length` + 1 tokens become inputs and targets of `max_target_length`. With
`layout=Layout(keep_length=True)`, so do rows of `max_target_length`, whose last position then has no target.

A host reads its part of the global batch. The state is one position, the same on every host. MaxText
therefore treats the iterator like Grain's elastic one: a checkpoint has one file for it, from which any
number of hosts may resume.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeAlias, Unpack

import numpy as np
import numpy.typing as npt

from shardkit.errors import naming_extras

with naming_extras("shardkit.loaders.integrations.maxtext"):
    import grain
    import jax
    from grain.experimental import ElasticIterator
    from jax.sharding import Mesh
    from maxtext.input_pipeline.multihost_dataloading import MultiHostDataLoadIterator

from shardkit.datasets.segments import IGNORED_LABEL
from shardkit.loaders.config import LoaderOptions, flattened, grouped
from shardkit.loaders.loader import StreamingLoader

Fields: TypeAlias = dict[str, npt.NDArray[np.int32]]


class MaxTextConfig(Protocol):
    """The fields of MaxText's HyperParameters that are used here."""

    grain_train_files: str
    grain_eval_files: str
    global_batch_size_to_load: int
    global_batch_size_to_load_eval: int
    max_target_length: int
    data_shuffle_seed: int
    enable_data_shuffling: bool
    generate_padding_batch_train: bool
    generate_padding_batch_eval: bool


class MaxTextBatches(ElasticIterator):  # type: ignore[misc, unused-ignore]
    """This host's batches {"inputs", "targets", "inputs_position", …}: int32[rows, length].

    The loader must have labels="shifted", position_ids, document_ids and tensors="numpy". Segments count from
    1; `targets_segmentation` is 0, which MaxText excludes from the loss, if a target is padding or the first
    token of another document.
    """

    def __init__(self, loader: StreamingLoader, *, length: int) -> None:
        # Skips ElasticIterator.__init__, which requires one of Grain's own datasets.
        grain.IterDataset.__init__(self)
        self.loader = loader
        self._length = length
        self._iterator: Iterator[Mapping[str, npt.NDArray[Any]]] | None = None

    def __iter__(self) -> MaxTextBatches:
        """Return the iterator itself, at the next batch; with the option `restart`, at the first batch."""
        self._iterator = None
        return self

    def __next__(self) -> Fields:
        if self._iterator is None:
            self._iterator = iter(self.loader)
        batch = next(self._iterator)
        inputs, labels = batch["tokens"], batch["labels"]
        if inputs.shape[1] != self._length:
            raise ValueError(
                f"rows give inputs of {inputs.shape[1]:,} tokens and max_target_length is {self._length:,}: "
                "make it one less than the length of the rows, or equal with "
                "layout=Layout(keep_length=True)"
            )
        is_scored = labels != IGNORED_LABEL
        positions = batch["position_ids"].astype(np.int32)
        segments = batch["document_ids"] + np.int32(1)
        return {
            "inputs": inputs,
            "inputs_position": positions,
            "inputs_segmentation": segments,
            "targets": np.where(is_scored, labels, 0).astype(np.int32),
            "targets_position": positions,
            "targets_segmentation": segments * is_scored,
        }

    def get_state(self) -> dict[str, object]:
        """Return the loader's state: the same on every host, and plain data for JSON."""
        return self.loader.state_dict()

    def set_state(self, state: Mapping[str, object]) -> None:
        self.loader.load_state_dict(state)
        self._iterator = None

    def close(self) -> None:
        self.loader.close()


def make_train_iterator(
    config: MaxTextConfig, global_mesh: Mesh, process_indices: list[int], **options: Unpack[LoaderOptions]
) -> MultiHostDataLoadIterator:
    """Make MaxText's training iterator: endless, over `grain_train_files`, with seed `data_shuffle_seed`."""
    loader = _open(
        config.grain_train_files,
        config,
        process_indices,
        global_batch=config.global_batch_size_to_load,
        options={"endless": True, **options},
    )
    batches = MaxTextBatches(loader, length=config.max_target_length)
    return MultiHostDataLoadIterator(batches, global_mesh, config.generate_padding_batch_train)


def make_eval_iterator(
    config: MaxTextConfig, global_mesh: Mesh, process_indices: list[int], **options: Unpack[LoaderOptions]
) -> MultiHostDataLoadIterator:
    """Make MaxText's evaluation iterator: each evaluation reads every sample of `grain_eval_files` once."""
    loader = _open(
        config.grain_eval_files,
        config,
        process_indices,
        global_batch=config.global_batch_size_to_load_eval,
        options={"restart": True, **options},
    )
    batches = MaxTextBatches(loader, length=config.max_target_length)
    return MultiHostDataLoadIterator(batches, global_mesh, config.generate_padding_batch_eval)


def _open(
    dataset: str,
    config: MaxTextConfig,
    process_indices: list[int],
    *,
    global_batch: int,
    options: LoaderOptions,
) -> StreamingLoader:
    """Open a loader for this host's part of the batch; `process_indices` are the hosts that load data."""
    batch_size, rest = divmod(global_batch, len(process_indices))
    if rest:
        raise ValueError(
            f"a global batch of {global_batch} does not divide by {len(process_indices)} hosts: "
            "change one of them"
        )
    needed = {
        **flattened(options),
        "labels": "shifted",
        "position_ids": True,
        "document_ids": True,
        "tensors": "numpy",
    }
    is_evaluation = options.get("restart", False)
    return StreamingLoader(
        dataset,
        batch_size=batch_size,
        seed=config.data_shuffle_seed,
        shuffle="window" if config.enable_data_shuffling and not is_evaluation else "none",
        tail="pad" if is_evaluation else "carry",
        rank=process_indices.index(jax.process_index()),
        world_size=len(process_indices),
        dtype="int32",
        **grouped(needed),
    )
