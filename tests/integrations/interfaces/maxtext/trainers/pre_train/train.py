"""The training of MaxText (e591f30c), as far as its data: the iterators are made and read."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from maxtext.input_pipeline import input_pipeline_interface

__all__ = ["main"]

DEFAULTS = {
    "grain_eval_files": "",
    "eval_interval": "-1",
    "steps": "2",
    "per_device_batch_size": "4",
    "data_shuffle_seed": "0",
    "max_target_length": "2048",
}


def main(argv: Sequence[str]) -> None:
    """`argv`: the program, a configuration file, KEY=VALUE."""
    keys = DEFAULTS | dict(setting.split("=", 1) for setting in argv[2:])
    batch = int(keys.pop("per_device_batch_size"))
    numbers = {name: int(keys.pop(name)) for name in list(keys) if keys[name].lstrip("-").isdigit()}
    config = SimpleNamespace(
        **keys,
        **numbers,
        global_batch_size_to_load=batch,
        global_batch_size_to_load_eval=batch,
        enable_data_shuffling=True,
        generate_padding_batch_train=False,
        generate_padding_batch_eval=False,
    )
    training, evaluation = input_pipeline_interface.create_data_iterator(config, None)
    for _ in range(config.steps):
        assert next(training)["inputs"].shape == (batch, config.max_target_length)
    for kept in evaluation or ():
        assert kept["targets_segmentation"].shape == (batch, config.max_target_length)
