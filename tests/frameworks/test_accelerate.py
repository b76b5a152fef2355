"""Accelerate on two ranks: each gets its own batches, exactly, or an error that says what to do.

As a script: both ranks, forked from one process that has imported everything; what they saw goes to a file.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest
from torch.utils.data import DataLoader

from shardkit.loaders import StreamingLoader
from shardkit.loaders.config import grouped
from shardkit.loaders.pytorch import StreamingDataLoader, StreamingDataset, unchanged

SAMPLES, SIZE = 53, 4  # per rank: epochs of 7 and 6 batches with tail="carry"


def loader(path: Path, workers: int = 0, **more: Any) -> StreamingDataLoader:
    dataset = StreamingDataset(path, batch_size=SIZE, return_ids=True, **grouped({"window": 9, **more}))
    context = "fork" if workers else None
    return StreamingDataLoader(dataset, num_workers=workers, multiprocessing_context=context)


def ids(batches: Any) -> list[list[int]]:
    return [batch["sample_id"].tolist() for batch in batches]


def refusal(prepared: Any) -> str:
    try:
        next(iter(prepared))
    except TypeError as error:
        return str(error)
    return "no error"


def run_two_ranks(what: str, path: Path, folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"OMP_NUM_THREADS": "1"}
    run = [sys.executable, __file__, what, str(path), str(folder)]
    subprocess.run(run, env=environment, check=True, timeout=300)


def seen(rank: int, path: Path, folder: Path) -> None:
    """What this rank gets in each of the ways to use a loader with Accelerate."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    from accelerate import Accelerator, skip_first_batches
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    saw: dict[str, Any] = {}
    for workers in (0, 1):
        prepared = accelerator.prepare(loader(path, workers))
        saw[f"epochs {workers}"] = [ids(prepared), ids(prepared)]
    saver = Accelerator(cpu=True)
    first = ids(islice(saver.prepare(loader(path)), 3))
    saver.save_state(str(folder / "state"))
    saver.wait_for_everyone()
    goes_on = Accelerator(cpu=True)
    other = goes_on.prepare(loader(path))
    goes_on.load_state(str(folder / "state"))
    saw["saved"] = [first + ids(other), ids(other)]
    for tail in ("drop", "pad"):
        whole = loader(path, tail=tail)
        saw[f"{tail} whole"] = [ids(whole) for _ in range(3)]
        resumed = accelerator.prepare(loader(path, tail=tail))
        resumed.set_epoch(1)
        rest = ids(skip_first_batches(resumed, 2))
        resumed.set_epoch(2)
        saw[f"{tail} skipped"] = [rest, ids(resumed)]
    skipped = loader(path)
    rest = ids(skip_first_batches(skipped, 4))
    saw["skipped"] = [[*first, [], *rest], ids(skipped)]
    for name, config in (("", {}), ("not dispatched", {"dispatch_batches": False})):
        each = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
        for workers in (0, 1):
            dataset = StreamingDataset(path, batch_size=SIZE)
            context = "fork" if workers else None
            plain = DataLoader(
                dataset,
                batch_size=None,
                num_workers=workers,
                collate_fn=cast(Any, unchanged),
                multiprocessing_context=context,
            )
            saw[f"plain {workers} {name}"] = refusal(each.prepare(plain))
    (folder / f"rank{rank}.json").write_text(json.dumps(saw))
    accelerator.wait_for_everyone()


def trained(rank: int, path: Path, folder: Path) -> None:
    """The sample ids of each step of this rank, by the Hugging Face Trainer, resumed in the second epoch."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    import torch
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)
            self.steps: list[list[int]] = []

        def forward(
            self, tokens: torch.Tensor, sample_id: torch.Tensor, is_padding: Any = None
        ) -> dict[str, torch.Tensor]:
            self.steps.append(sample_id.tolist())
            return {"loss": self.layer(tokens.float() / 500).square().mean()}

    def run(
        name: str, data: Any = None, *, prepare: bool = False, resume: bool = False, **more: Any
    ) -> list[list[int]] | str:
        class Own(Trainer):  # type: ignore[misc, unused-ignore]
            def get_train_dataloader(self) -> Any:
                if not isinstance(data, StreamingDataLoader):
                    return super().get_train_dataloader()
                return self.accelerator.prepare(data) if prepare else data

        arguments = TrainingArguments(
            str(folder / name),
            **{"num_train_epochs": 3, "save_steps": 9, **more},
            per_device_train_batch_size=SIZE,
            use_cpu=True,
            save_only_model=True,  # the Trainer cannot load an optimizer on CPUs of several ranks
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
            remove_unused_columns=False,
        )
        model = Model()
        trainer = Own(model, arguments, train_dataset=data, data_collator=cast(Any, unchanged))
        try:
            trainer.train(resume_from_checkpoint=str(folder / name / "checkpoint-9") if resume else None)
        except (TypeError, ValueError) as error:
            return str(error)
        return model.steps

    saw: dict[str, Any] = {}
    for prepare in (False, True):
        for case, more in (
            ("drop", {"tail": "drop"}),
            ("pad", {"tail": "pad"}),
            ("carry", {}),
            ("endless", {"endless": True, "max_steps": 16}),
        ):
            steps: dict[str, Any] = {"max_steps": more.pop("max_steps")} if "max_steps" in more else {}
            name = f"{case} {prepare}"
            whole = run(name, loader(path, **more), prepare=prepare, **steps)
            rest = run(name, loader(path, **more), prepare=prepare, resume=True, **steps)
            sought = loader(path, **more)
            sought.seek(53 + {"drop": 24, "pad": 16}.get(case, 19))  # after nine batches of 8
            steps["ignore_data_skip"] = True
            saw[name] = [whole, rest, run(name, sought, prepare=prepare, resume=True, **steps)]
    saw["dataset"] = run("dataset", StreamingDataset(path, batch_size=SIZE))
    (folder / f"rank{rank}.json").write_text(json.dumps(saw))


@pytest.mark.extended
def test_the_hugging_face_trainer_resumes_exactly_or_says_how(tmp_path: Path) -> None:
    """On two ranks, in the second epoch, whether the loader is prepared or not."""
    path = make_dataset(tmp_path / "data", "mds", samples=SAMPLES)
    run_two_ranks("trained", path, tmp_path)
    for rank in range(2):
        saw = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert "for a trainer that creates the DataLoader itself use a MapDataset" in saw.pop("dataset")
        for name, (whole, rest, sought) in saw.items():
            case = name.split()[0]
            arguments: dict[str, Any] = {"batch_size": SIZE, "return_ids": True, "window": 9}
            tail: Any = "carry" if case == "endless" else case
            with StreamingLoader(path, rank=rank, world_size=2, tail=tail, **grouped(arguments)) as plain:
                expected = [each for _ in range(3) for each in ids(plain)]
            assert whole == expected[: 16 if case == "endless" else None], name
            if case == "carry":
                assert "epochs of 53 samples differ" in rest
            elif case in ("drop", "pad") and isinstance(rest, str):  # transformers 5 skips in the first epoch
                assert "skipped batches in the wrong epoch" in rest
                assert "StreamingTrainer" in rest
            else:
                assert rest == whole[9:], name
            assert sought == whole[9:], name


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_two_ranks_get_their_own_batches_or_an_error(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "data", "mds", samples=SAMPLES)
    run_two_ranks("seen", path, tmp_path)
    for rank in range(2):
        saw = json.loads((tmp_path / f"rank{rank}.json").read_text())
        arguments: dict[str, Any] = {"batch_size": SIZE, "return_ids": True, "window": 9}
        with StreamingLoader(path, rank=rank, world_size=2, **grouped(arguments)) as plain:
            expected = [ids(plain), ids(plain)]
        assert [len(epoch) for epoch in expected] == [7, 7]
        assert saw["epochs 0"] == saw["epochs 1"] == saw["saved"] == expected
        assert saw["skipped"] == [[*expected[0][:3], [], *expected[0][4:]], expected[1]]
        for tail in ("drop", "pad"):
            whole = saw[f"{tail} whole"]
            assert saw[f"{tail} skipped"] == [whole[1][2:], whole[2]]
        for name, message in saw.items():
            if name.startswith("plain"):
                assert "give accelerator.prepare a StreamingDataLoader" in message, name


def main() -> None:
    what, path, folder = sys.argv[1], *map(Path, sys.argv[2:])
    run = {"seen": seen, "trained": trained}[what]
    if what == "trained":
        import transformers  # noqa: F401
    else:
        import accelerate  # noqa: F401
    if (child := os.fork()) == 0:
        run(1, path, folder)
        os._exit(0)
    run(0, path, folder)
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
else:
    from support.loader_data import make_dataset
