"""The iterator for MaxText: its fields, its state on any number of hosts, evaluation.

MaxText needs Python 3.12 and is not on the registry, so interfaces/ stands in for it and for what it is
made of where they are not installed; another test holds the two together where they are.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from itertools import islice
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardkit.loaders import StreamingLoader
from shardkit.loaders.config import Layout, grouped
from support.loader_data import EOS, LENGTH, make_dataset

INTERFACES = Path(__file__).parent / "interfaces"
PACKAGES = ("jax", "grain", "maxtext")
SAMPLES = 53


@pytest.fixture
def adapter(forgotten_modules: None) -> ModuleType:
    """The adapter, on the packages that are installed or else on their stand-ins."""
    return importlib.import_module("shardkit.loaders.integrations.maxtext")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data"), "mds", samples=SAMPLES)


def config(data: Path, **more: Any) -> Any:
    return SimpleNamespace(
        **{
            "grain_train_files": str(data),
            "grain_eval_files": str(data),
            "global_batch_size_to_load": 8,
            "global_batch_size_to_load_eval": 8,
            "max_target_length": LENGTH - 1,
            "data_shuffle_seed": 3,
            "enable_data_shuffling": True,
            "generate_padding_batch_train": False,
            "generate_padding_batch_eval": False,
        }
        | more
    )


def mesh(adapter: Any) -> Any:
    return adapter.Mesh(np.array(adapter.jax.devices()), ("data",))


def training(adapter: Any, data: Path, monkeypatch: pytest.MonkeyPatch, host: int = 0, hosts: int = 1) -> Any:
    monkeypatch.setattr(adapter.jax, "process_index", lambda: host)
    return adapter.make_train_iterator(config(data), mesh(adapter), list(range(hosts)), eos_id=EOS)


def rows(batches: list[dict[str, Any]]) -> list[list[list[int]]]:
    return [sorted(batch["inputs"].tolist()) for batch in batches]


def test_fields_are_those_that_maxtext_reads(
    adapter: Any, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = training(adapter, data, monkeypatch).local_iterator
    options: dict[str, Any] = {"position_ids": True, "document_ids": True, "tensors": "numpy", "eos_id": EOS}
    with StreamingLoader(
        data, batch_size=8, seed=3, labels="shifted", endless=True, **grouped(options)
    ) as loader:
        for batch, plain in islice(zip(local, loader, strict=False), 9):
            assert {values.dtype for values in batch.values()} == {np.dtype(np.int32)}
            scored = plain["labels"] != -100
            assert not scored.all()
            assert np.array_equal(batch["inputs"], plain["tokens"])
            assert np.array_equal(batch["targets"], plain["labels"] * scored)
            assert np.array_equal(batch["targets_segmentation"] != 0, scored)
            for side in ("inputs", "targets"):
                assert np.array_equal(batch[f"{side}_position"], plain["position_ids"])
            assert np.array_equal(batch["inputs_segmentation"], plain["document_ids"] + 1)


def test_any_number_of_hosts_continues_from_the_one_state(
    adapter: Any, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = rows(list(islice(training(adapter, data, monkeypatch).local_iterator, 20)))
    before = [training(adapter, data, monkeypatch, host, 4).local_iterator for host in range(4)]
    for _ in range(9):  # into the second epoch
        for each in before:
            next(each)
    assert all(isinstance(each, adapter.ElasticIterator) for each in before)
    states = {json.dumps(each.get_state()) for each in before}
    assert len(states) == 1
    after = [training(adapter, data, monkeypatch, host, 2).local_iterator for host in range(2)]
    for each in after:
        each.set_state(json.loads(*states))
    parts = [rows(list(islice(each, 11))) for each in after]
    assert [sorted(a + b) for a, b in zip(*parts, strict=True)] == whole[9:]


def test_training_continues_where_maxtext_starts_its_iterator_again(
    adapter: Any, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = rows(list(islice(training(adapter, data, monkeypatch).local_iterator, 6)))
    iterator = training(adapter, data, monkeypatch)
    assert rows([next(iterator) for _ in range(3)] + list(islice(iterator, 3))) == whole


def test_each_evaluation_has_each_sample_once(
    adapter: Any, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter.jax, "process_index", lambda: 0)
    iterator = adapter.make_eval_iterator(config(data), mesh(adapter), [0], eos_id=EOS)
    first, second = rows(list(iterator)), rows(list(iterator))
    assert first == second
    assert len(first) == 7
    iterator.reset()
    scored = [row for batch in iterator for row in batch["targets_segmentation"] if row.any()]
    assert len(scored) == SAMPLES


def test_rows_of_another_length_are_refused(
    adapter: Any, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter.jax, "process_index", lambda: 0)
    wrong = config(data, max_target_length=LENGTH)
    with pytest.raises(ValueError, match="inputs of 7 tokens and max_target_length is 8"):
        next(adapter.make_train_iterator(wrong, mesh(adapter), [0], eos_id=EOS))
    batch = next(
        adapter.make_train_iterator(wrong, mesh(adapter), [0], eos_id=EOS, layout=Layout(keep_length=True))
    )
    assert batch["inputs"].shape == (8, LENGTH)
    with pytest.raises(ValueError, match="does not divide by 3 hosts"):
        adapter.make_train_iterator(wrong, mesh(adapter), [0, 1, 2], eos_id=EOS)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("jax", "process_index"),
        ("jax", "make_array_from_process_local_data"),
        ("grain.experimental", "ElasticIterator"),
        ("maxtext.input_pipeline.multihost_dataloading", "MultiHostDataLoadIterator"),
        ("maxtext.input_pipeline.input_pipeline_interface", "make_grain_train_iterator"),
        ("maxtext.input_pipeline.input_pipeline_interface", "create_data_iterator"),
    ],
)
@pytest.mark.usefixtures("forgotten_modules")
def test_the_recorded_interface_is_that_of_the_package(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    real = getattr(importlib.import_module(module), name)
    if str(INTERFACES) in str(sys.modules[module].__file__):
        pytest.skip(f"{module} is not installed")
    kept = {one: sys.modules.pop(one) for one in list(sys.modules) if one.partition(".")[0] in PACKAGES}
    monkeypatch.syspath_prepend(str(INTERFACES))
    recorded = getattr(importlib.import_module(module), name)
    monkeypatch.undo()
    for one in [one for one in sys.modules if one.partition(".")[0] in PACKAGES]:
        del sys.modules[one]
    sys.modules.update(kept)
    assert list(inspect.signature(real).parameters) == list(inspect.signature(recorded).parameters)
    if inspect.isclass(recorded):
        missing = {one for one in vars(recorded) if not one.startswith("_")} - set(dir(real))
        assert not missing
