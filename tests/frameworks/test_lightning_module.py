"""Lightning trains on each sample in its turn, wherever a run was stopped, and evaluates each sample once."""

from __future__ import annotations

import csv
import importlib
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support import lightning_runs as runs

# isort: split
import lightning
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger

from shardkit.datasets.dataset import open_dataset
from shardkit.errors import MissingExtraError, StateError
from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.config import grouped
from shardkit.loaders.lightning_module import DataMonitor, ShardDataModule
from shardkit.loaders.pytorch import StreamingDataLoader, StreamingDataset
from shardkit.storage.memory import MemoryStore
from support.default_cases import cases
from support.lightning_runs import EveryStep, Model, Record, Trained, fit, stop_at, trained_batches
from support.loader_data import make_dataset
from support.remote_harness import fresh_url, put_folder

SAMPLES, VAL_SAMPLES = 53, 10
EPOCH = 14  # batches of 4, the last of which goes on into the next epoch
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Lightning's advice, and what it uses that torch deprecates
]

Data = Callable[..., ShardDataModule]


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    name = "lightning.pytorch"
    level = logging.getLogger(name).level
    logging.getLogger(name).setLevel(logging.ERROR)
    yield
    logging.getLogger(name).setLevel(level)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "train", "mds", samples=SAMPLES)


@pytest.fixture(scope="module")
def val(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "val", "mds", samples=VAL_SAMPLES, shards=2)


@pytest.fixture
def data(train: Path, val: Path) -> Data:
    def make(dataset: Any = train, **options: Any) -> ShardDataModule:
        chosen: dict[str, Any] = {"val": val, "batch_size": 4, "return_ids": True} | options
        return ShardDataModule(dataset, **grouped(chosen))

    return make


def sample_ids(record: Record) -> list[int]:
    return list(chain.from_iterable(batch.sample_ids for batch in record.trained))


def direct_ids(dataset: Any, batches: int, **options: Any) -> list[int]:
    """What a StreamingLoader gives without Lightning."""
    with StreamingLoader(dataset, batch_size=4, return_ids=True, endless=True, **grouped(options)) as loader:
        return [
            i for _, batch in zip(range(batches), loader, strict=False) for i in batch["sample_id"].tolist()
        ]


def assert_continues(resumed: Record, checkpoint: Path, whole: Record) -> None:
    """A run from a checkpoint did what came after it in one that was never stopped: bit for bit."""
    before = trained_batches(checkpoint)
    assert resumed.trained == whole.trained[before:]
    assert resumed.weights == whole.weights
    later = [(before + number, ids) for number, ids in resumed.validated if number > 0]
    assert later == [(number, ids) for number, ids in whole.validated if number > before]


def assert_resumes_exactly(
    make: Callable[[], ShardDataModule], folder: Path, steps: list[int], **trainer: Any
) -> Record:
    """Resumes from each of `steps`, and those runs once more from their first checkpoint."""
    whole = fit(make(), callbacks=[EveryStep(folder / "whole")], **trainer)
    for step in steps:
        checkpoint, again = folder / "whole" / f"step={step}.ckpt", folder / f"resumed-{step}"
        resumed = fit(make(), callbacks=[EveryStep(again)], resume=checkpoint, **trainer)
        assert_continues(resumed, checkpoint, whole)
        for second in sorted(again.glob("*.ckpt"), key=trained_batches)[:1]:
            assert_continues(fit(make(), resume=second, **trainer), second, whole)
    return whole


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[int], list[int]]] = {
    # (options of the data, of the Trainer, steps to resume from, batches after which it validates)
    "epochs": ({}, {"max_epochs": 2}, [1, 6, 13, 14, 15, 27, 28], [14, 28]),
    "steps": ({}, {"max_steps": 20}, [1, 14, 20], [14]),
    "endless": ({"endless": True}, {"max_steps": 20}, [1, 13, 14, 20], []),
    "drop": ({"tail": "drop"}, {"max_epochs": 2}, [12, 13, 14], [13, 26]),
    "pad": ({"tail": "pad"}, {"max_epochs": 2}, [13, 14, 15], [14, 28]),
    "val every 5": ({}, {"max_epochs": 2, "val_check_interval": 5}, [4, 5, 14], [5, 10, 19, 24]),
    "val half": ({}, {"max_epochs": 2, "val_check_interval": 0.5}, [7, 14], [7, 14, 21, 28]),
    "val by steps": (
        {"endless": True},
        {"max_steps": 20, "val_check_interval": 6, "check_val_every_n_epoch": None},
        [5, 6, 7],
        [6, 12, 18],
    ),
    "accumulate": ({}, {"max_epochs": 2, "accumulate_grad_batches": 3}, [1, 4, 5, 6], [14, 28]),
    "limit 5": ({}, {"max_epochs": 4, "limit_train_batches": 5}, [4, 5, 6], [5, 10, 15, 20]),
    "limit endless": (
        {"endless": True},
        {"max_epochs": 4, "limit_train_batches": 5},
        [4, 5, 6],
        [5, 10, 15, 20],
    ),
    "limit part": ({}, {"max_epochs": 4, "limit_train_batches": 0.4}, [5, 6], [5, 10, 15, 20]),
    "reload": (
        {},
        {"max_epochs": 3, "limit_train_batches": 6, "reload_dataloaders_every_n_epochs": 1},
        [5, 6, 7],
        [6, 12, 18],
    ),
    "no validation": ({"val": None}, {"max_epochs": 2}, [13, 14], []),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", cases(CASES, ["epochs", "endless", "val by steps", "accumulate", "reload"]))
def test_a_resumed_run_is_the_run_that_was_never_stopped(
    case: str, data: Data, train: Path, tmp_path: Path
) -> None:
    options, trainer, steps, validations = CASES[case]
    whole = assert_resumes_exactly(partial(data, **options), tmp_path, steps, **trainer)
    assert [number for number, _ in whole.validated] == validations
    assert all(ids == list(range(VAL_SAMPLES)) for _, ids in whole.validated)
    tail: dict[str, Any] = {name: options[name] for name in ("tail",) if name in options}
    assert sample_ids(whole) == direct_ids(train, len(whole.trained), **tail)


def test_overfitting_repeats_the_same_batches_after_a_resume_too(
    data: Data, train: Path, tmp_path: Path
) -> None:
    whole = assert_resumes_exactly(data, tmp_path, [3, 4, 5], max_epochs=3, overfit_batches=4)
    assert sample_ids(whole) == direct_ids(train, 4) * 3


def test_a_sanity_check_takes_nothing_from_the_validation_after_it(data: Data) -> None:
    record = fit(data(), max_steps=EPOCH, num_sanity_val_steps=2)
    assert record.validated == [(0, list(range(8))), (EPOCH, list(range(VAL_SAMPLES)))]


class Kept(OnExceptionCheckpoint):
    """Keeps what it saves; Lightning's removes that when a later run ends well."""

    def on_exception(self, trainer: Any, *_: Any, **__: Any) -> None:
        # Saving waits for all ranks: those that wait for this one must know of the error by now.
        assert trainer.datamodule.train_loader is None
        super().on_exception(trainer)

    def teardown(self, *_: Any, **__: Any) -> None:
        pass


@pytest.mark.sampled(2)
@pytest.mark.parametrize("endless", [False, pytest.param(True, marks=pytest.mark.extended)])
@pytest.mark.parametrize(
    ("where", "batch"),
    [
        ("step", 6),
        ("step", 0),
        ("end", 13),
        ("validation", 14),
        *(pytest.param(where, 6, marks=pytest.mark.extended) for where in ("start", "end")),
    ],
)
def test_a_batch_that_failed_is_trained_on_once(
    where: str, batch: int, endless: bool, data: Data, tmp_path: Path
) -> None:
    if endless and where == "validation":
        return  # it never validates
    trainer: dict[str, Any] = {"max_steps": 20}
    whole = fit(data(endless=endless), **trainer)
    fit(data(endless=endless), callbacks=[Kept(tmp_path)], fail=stop_at(where, batch), **trainer)
    checkpoint = tmp_path / "on_exception.ckpt"
    assert trained_batches(checkpoint) == batch + (where == "end")
    resumed = fit(data(endless=endless), resume=checkpoint, callbacks=[EveryStep(tmp_path)], **trainer)
    assert_continues(resumed, checkpoint, whole)
    second = min(tmp_path.glob("step=*.ckpt"), key=trained_batches)
    assert_continues(fit(data(endless=endless), resume=second, **trainer), second, whole)


def test_checkpoints_of_validation_and_the_last_one_resume_exactly(data: Data, tmp_path: Path) -> None:
    whole = fit(data(), max_epochs=2, val_check_interval=5)
    best = ModelCheckpoint(tmp_path, filename="{step}", monitor="val_loss", save_top_k=-1, save_last=True)
    fit(data(), callbacks=[best], fail=stop_at("step", 16), max_epochs=2, val_check_interval=5)
    for name, batches in (("step=5", 5), ("step=10", 10), ("last", 10)):
        checkpoint = tmp_path / f"{name}.ckpt"
        assert trained_batches(checkpoint) == batches
        resumed = fit(data(), resume=checkpoint, max_epochs=2, val_check_interval=5)
        assert_continues(resumed, checkpoint, whole)


def test_a_checkpoint_amid_accumulation_loses_gradients_but_no_sample(data: Data, tmp_path: Path) -> None:
    trainer: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 3}
    fit(data(), callbacks=[Kept(tmp_path)], fail=stop_at("step", 7), **trainer)
    resumed = fit(data(), resume=tmp_path / "on_exception.ckpt", **trainer)
    assert sample_ids(resumed) == sample_ids(fit(data(), **trainer))[4 * 7 :]


class SkipAfter(Callback):
    """Skips the rest of the epoch at its batch number 5."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.skip = batch_idx == 5


class SkippingModel(Model):
    skip = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.skip else None


@pytest.mark.parametrize("endless", [False, True])
def test_a_batch_fetched_ahead_of_a_skipped_epoch_is_not_lost(
    endless: bool, data: Data, train: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "Model", SkippingModel)
    found = fit(
        data(endless=endless, val=None), callbacks=[SkipAfter()], max_epochs=3, enable_checkpointing=False
    )
    ids = direct_ids(train, 18)
    kept = [
        ids[4 * number : 4 * number + 4] for number in range(18) if number % 6 != 5
    ]  # 5 is the skipped one
    assert sample_ids(found) == list(chain.from_iterable(kept))


def test_a_schedule_that_changes_after_a_resume_is_as_if_it_had_always_been_known(
    train: Path, data: Data, tmp_path: Path
) -> None:
    other = make_dataset(tmp_path / "other", "mds", samples=31)
    streams = [Stream(train, weight=3, name="web"), Stream(other, weight=1, name="code")]
    changed: dict[str, Any] = {"schedule": [(0, {"web": 3, "code": 1}), (60, {"web": 1, "code": 1})]}
    whole = fit(data(streams, **changed), max_steps=20)
    fit(data(streams), callbacks=[EveryStep(tmp_path)], max_steps=12)
    for step in (9, 12):
        checkpoint = tmp_path / f"step={step}.ckpt"
        assert_continues(fit(data(streams, **changed), resume=checkpoint, max_steps=20), checkpoint, whole)

    class Reweigh(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 10:
                trainer.datamodule.set_weights({"web": 1, "code": 1}, at_position=60)

    again = tmp_path / "again"
    assert fit(data(streams), callbacks=[Reweigh(), EveryStep(again)], max_steps=20).trained == whole.trained
    checkpoint = again / "step=13.ckpt"  # has the weights that were set
    assert_continues(fit(data(streams), resume=checkpoint, max_steps=20), checkpoint, whole)


def test_a_dataset_in_a_bucket_trains_and_resumes_like_a_local_one(
    train: Path, data: Data, tmp_path: Path
) -> None:
    url = fresh_url()
    put_folder(train, MemoryStore(url))
    whole = fit(data(), max_steps=18)
    make = partial(data, url, cache_dir=tmp_path / "cache", val=None)
    remote = assert_resumes_exactly(make, tmp_path, [5], max_steps=18)
    assert remote.trained == whole.trained


def test_evaluation_gives_each_sample_once_and_begins_anew_each_time(
    data: Data, train: Path, val: Path
) -> None:
    module = data(
        test=train, predict={"a": val, "b": train}, val_batch_size=3, batch_size=None, global_batch_size=4
    )
    record = Record()
    model = EvaluatedModel(record)
    trainer = runs.quick_trainer(limit_val_batches=2)
    trainer.validate(model, module, verbose=False)
    trainer.validate(model, module, verbose=False)
    assert [ids for _, ids in record.validated] == [list(range(6))] * 2
    trainer.test(model, module, verbose=False)
    assert sorted(model.tested) == list(range(SAMPLES))
    predicted: Any = trainer.predict(model, module)
    assert [sorted(chain.from_iterable(ids)) for ids in predicted] == [
        list(range(VAL_SAMPLES)),
        list(range(SAMPLES)),
    ]


class EvaluatedModel(Model):
    def __init__(self, record: Record) -> None:
        super().__init__(record)
        self.tested: list[int] = []

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.tested += batch["sample_id"][~batch["is_padding"]].tolist()

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> list[int]:
        ids: list[int] = batch["sample_id"][~batch["is_padding"]].tolist()
        return ids


def test_only_the_trainer_that_trained_goes_on(data: Data, train: Path, tmp_path: Path) -> None:
    module, ids = data(val=None), direct_ids(train, 8)
    record = Record()
    trainer = runs.quick_trainer(max_steps=5)
    trainer.fit(Model(record), module)
    assert module.position == 20
    saved = module.state_dict()
    trainer.save_checkpoint(tmp_path / "ended.ckpt")
    trainer.fit_loop.epoch_loop.max_steps = 8
    trainer.fit(Model(record), module)
    assert sample_ids(record) == ids
    assert sample_ids(fit(module, max_steps=3)) == ids[:12]  # another Trainer
    resumed = fit(module, resume=tmp_path / "ended.ckpt", max_steps=8)
    assert sample_ids(resumed) == ids[20:]

    validating = data()
    runs.quick_trainer().validate(
        Model(Record()), validating, ckpt_path=tmp_path / "ended.ckpt", verbose=False
    )
    assert sample_ids(fit(validating, max_steps=3)) == ids[:12]

    given = data()
    given.load_state_dict(saved)
    next(iter(given.train_dataloader()))  # a look at the data
    assert sample_ids(fit(given, max_steps=3)) == ids[20:]


class Meddle(Callback):
    """Does what users do while training goes on."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module = trainer.datamodule
        assert f"position={module.position:,}" in str(module)
        assert len(module.train_dataloader()) == -(-SAMPLES // module.batch_size)
        assert len(module.val_dataloader()) == EPOCH

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.datamodule.batch_size = 2  # counts when the loaders are reloaded


def test_a_look_at_the_data_takes_nothing_from_training(data: Data, train: Path) -> None:
    with open_dataset(train) as dataset:
        module = data(dataset, val=dataset, val_batch_size=4)
        assert sample_ids(fit(module, max_steps=2)) == direct_ids(train, 2)
        next(iter(module.train_dataloader()))
        meddled = fit(
            module,
            callbacks=[Meddle()],
            max_epochs=2,
            limit_train_batches=5,
            reload_dataloaders_every_n_epochs=1,
        )
    assert [len(batch.sample_ids) for batch in meddled.trained] == [4] * 5 + [2] * 5
    assert sample_ids(meddled)[:20] == direct_ids(train, 5)
    assert sorted(sample_ids(meddled)[20:]) == sorted(direct_ids(train, 8)[20:30])


def test_a_checkpoint_of_other_data_is_refused_unless_forked(data: Data, tmp_path: Path) -> None:
    fit(data(), callbacks=[EveryStep(tmp_path)], max_steps=2)
    checkpoint = tmp_path / "step=2.ckpt"
    with pytest.raises(StateError, match="seed: saved 17, loader has 18"):
        fit(data(seed=18), resume=checkpoint, max_steps=4)
    assert len(fit(data(seed=18, on_mismatch="fork"), resume=checkpoint, max_steps=4).trained) == 2

    class Renamed(ShardDataModule):
        pass

    renamed = Renamed(data().train, batch_size=4, return_ids=True)
    with pytest.warns(RuntimeWarning, match="no state of ShardDataModule") as caught:
        fit(renamed, resume=checkpoint, max_steps=4)
    assert "/shardkit/" not in caught[0].filename, "Lightning asks for the loader"


def test_wrong_arguments_are_named(data: Data, train: Path) -> None:
    for sizes in ({}, {"batch_size": 4, "global_batch_size": 8}):
        with pytest.raises(ValueError, match="either batch_size"):
            ShardDataModule(train, **grouped(sizes))
    with pytest.raises(TypeError, match="did you mean labels"):
        data(label=True)
    for option in ({"restart": True}, {"global_batch": 8}):
        with pytest.raises(ValueError, match=f"no option {next(iter(option))}"):
            data(**option)
    with pytest.raises(ValueError, match="give a dict of datasets"):
        data(val=[Stream(train), Stream(train)]).val_dataloader()
    with pytest.raises(ValueError, match="test=…"):
        data().test_dataloader()
    module = data(batch_size=None, global_batch_size=8)
    stub: Any = SimpleNamespace(distributed_sampler_kwargs={"rank": 0, "num_replicas": 3})
    module.trainer = stub
    with pytest.raises(ValueError, match="global_batch_size 8 is not a multiple of the 3 devices"):
        module.val_dataloader()


def test_the_monitor_logs_waits_rates_and_verdict(
    data: Data, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = CSVLogger(tmp_path)
    with caplog.at_level(logging.INFO, logger="shardkit"):
        fit(
            data(),
            callbacks=[DataMonitor(every_n_batches=5)],
            max_steps=16,
            logger=sink,
            enable_checkpointing=False,
        )
    with Path(sink.log_dir, "metrics.csv").open() as file:
        rows = [
            {key: float(value) for key, value in row.items() if value}
            for row in csv.DictReader(file)
            if row["data/wait_s"]
        ]
    assert [row["step"] for row in rows] == [5, 10, 15]
    assert [row["data/position"] for row in rows] == [20, 40, 60]
    for row in rows:
        assert 0 <= row["data/wait_s"] < 60
        assert row["data/tokens_per_s"] == pytest.approx(runs.LENGTH * row["data/samples_per_s"])
        assert row["data/samples_per_s"] > 0
    assert any(record.message.startswith(("rank 0: fed", "rank 0: input-bound")) for record in caplog.records)
    with pytest.raises(ValueError, match="DataMonitor needs"):
        runs.quick_trainer(callbacks=[DataMonitor()]).fit(Model(Record()), [])


def test_without_lightning_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "shardkit.loaders.lightning_module")
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'shardkit\[lightning\]'"):
        importlib.import_module("shardkit.loaders.lightning_module")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_fabric_trains_evaluates_and_resumes_exactly(
    train: Path, val: Path, tmp_path: Path, workers: int
) -> None:
    """With a StreamingDataLoader; every evaluation starts anew and may end early."""

    def loaders(fabric: Any) -> Any:
        common: dict[str, Any] = {"batch_size": 4, "rank": 0, "world_size": 1, "return_ids": True}
        datasets = (
            StreamingDataset(train, **grouped(common)),
            StreamingDataset(val, restart=True, tail="pad", **grouped(common)),
        )
        context = "fork" if workers else None
        return fabric.setup_dataloaders(
            *(StreamingDataLoader(d, num_workers=workers, multiprocessing_context=context) for d in datasets)
        )

    def ids(batches: Any) -> list[list[int]]:
        return [batch["sample_id"].tolist() for batch in batches]

    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    with StreamingLoader(train, batch_size=4, rank=0, world_size=1, return_ids=True) as plain:
        expected = [*ids(plain), *ids(plain)]
        with pytest.raises(TypeError, match="Only PyTorch DataLoader"):
            fabric.setup_dataloaders(plain)  # type: ignore[arg-type]
    training, evaluating = loaders(fabric)
    first = ids(islice(evaluating, 2))
    trained = []
    for step, batch in enumerate(training):
        trained.append(batch["sample_id"].tolist())
        if step % 3 == 2:
            assert ids(islice(evaluating, 2)) == first
        if step == 4:
            fabric.save(tmp_path / "state.ckpt", {"loader": training, "step": step})
    trained += ids(training)
    assert trained == expected
    state = {"loader": loaders(fabric)[0], "step": 0}
    fabric.load(tmp_path / "state.ckpt", state)
    assert state["step"] == 4
    assert [*ids(state["loader"]), *ids(state["loader"])] == expected[5:]


def run_two_ranks(train: Path, val: Path, folder: Path) -> dict[str, Any]:
    """The records of lightning_runs.py's two ranks, by run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = subprocess.run(
        [sys.executable, runs.__file__, str(port), str(train), str(val), str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    records: dict[str, Any] = json.loads((folder / "records.json").read_text())
    return records


@pytest.mark.extended
def test_two_ranks_resume_exactly_and_one_goes_on_where_they_were(
    data: Data, train: Path, val: Path, tmp_path: Path
) -> None:
    records = run_two_ranks(train, val, tmp_path)
    for strategy in ("ddp", "sharded", "tensor_parallel"):
        whole, resumed = records[strategy], records[f"{strategy}-resumed"]
        assert len(whole["trained"]) == 14
        assert resumed["trained"] == whole["trained"][5:], strategy
        assert resumed["weights"] == whole["weights"], strategy
        places = {"ddp": [0, 2, "arguments"], "sharded": [0, 2, "mesh"], "tensor_parallel": [0, 1, "mesh"]}
        assert whole["place"] == resumed["place"] == places[strategy]
        copies = 2 if strategy == "tensor_parallel" else 1  # both of its ranks read the same
        for _, ids in whole["validated"] + resumed["validated"]:
            assert sorted(ids) == sorted([*range(VAL_SAMPLES)] * copies), strategy

    module = data(batch_size=None, global_batch_size=8, val_batch_size=4)
    one = fit(module, resume=tmp_path / "ddp" / "step=5.ckpt", max_epochs=2)
    two = [Trained(**entry) for entry in records["ddp"]["trained"][5:]]
    assert len(one.trained) == len(two) == 9
    for alone, together in zip(one.trained, two, strict=True):
        assert set(alone.sample_ids) == set(together.sample_ids)
        assert alone.loss == pytest.approx(together.loss, abs=1e-4)
