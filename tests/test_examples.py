"""Every training example survives SIGKILL: same samples and same losses as a run that was never killed.

The runs that are never killed are started as users do; the others are forked from a process that has torch.
`test_training_runs.py` has the examples for several ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.script_server import ScriptServer
from support.train_harness import (
    CHECKPOINT_EVERY,
    TORCHVISION,
    WITH_TORCHVISION,
    Record,
    Training,
    by_step,
    make_dataset,
    script_server,
)

pytestmark = pytest.mark.slow
TRANSFORMERS = ["transformers.trainer", "transformers.models.llama.modeling_llama"]
KILL_STEP = 2 * CHECKPOINT_EVERY + 2  # between two checkpoints
SAMPLES = 70  # of make_dataset: a batch of 4 meets its first epoch's end at step 18


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("examples") / "data")


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptServer]:
    with script_server("torch._dynamo", "lightning", "shardkit.loaders.loader") as running:
        yield running


@pytest.mark.extended
@pytest.mark.parametrize("script", ["train_plain.py", "train_lightning.py"])
def test_a_killed_run_continues_with_the_same_samples_and_losses(
    server: ScriptServer, script: str, dataset: Path, tmp_path: Path
) -> None:
    arguments = ["--data", str(dataset), "--batch-size", "4", "--inside-documents"]
    killed = Training(script, tmp_path / "killed", arguments, server=server)
    stop = max(killed.run_until_killed_between_checkpoints(KILL_STEP), SAMPLES // 4) + 2  # in the next epoch
    last_step = stop + 2
    for steps in (stop, last_step):  # the second run goes on where the first one ended by itself
        killed.run(steps)
    whole = Training(script, tmp_path / "whole", arguments)
    whole.run(last_step)

    assert_exact(killed, whole, last_step)
    first_epoch = [i for record in whole.records()[: SAMPLES // 4] for i in record["sample_ids"]]
    assert len(set(first_epoch)) == len(first_epoch), "a sample came twice within the first epoch"


@pytest.mark.extended
@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")
def test_a_killed_trainer_continues_with_the_same_samples_and_losses(dataset: Path, tmp_path: Path) -> None:
    arguments = ["--data", str(dataset), "--global-batch-size", "4"]
    with script_server("torch._dynamo", *TRANSFORMERS) as server:
        killed = Training("train_hf.py", tmp_path / "killed", arguments, server=server)
        last_step = max(killed.run_until_killed_between_checkpoints(KILL_STEP), SAMPLES // 4) + 4
        killed.run(last_step)
        whole = Training("train_hf.py", tmp_path / "whole", arguments, server=server)
        whole.run(last_step)
    assert_exact(killed, whole, last_step)


@pytest.mark.extended
@pytest.mark.skipif(
    not TORCHVISION.exists(), reason="`make test` installs torchvision beside the environment"
)
def test_killed_training_on_images_continues_on_other_ranks_with_the_same_crops(tmp_path: Path) -> None:
    """Also with another number of workers; torchvision draws crops from torch's global generator."""

    def training(name: str, ranks: int, workers: int) -> Training:
        arguments = ["--data", str(tmp_path / "pictures"), "--crop", "16", "--workers", str(workers)]
        return Training(
            "train_images.py",
            tmp_path / name,
            arguments,
            ranks,
            sizes=["--global-batch-size", "8"],
            environment=WITH_TORCHVISION,
        )

    last_step = training("killed", 2, 2).run_until_killed_between_checkpoints(KILL_STEP) + 4
    killed = training("killed", 1, 0)
    killed.run(last_step)
    whole = training("whole", 1, 1)
    whole.run(last_step)
    crops = {record["step"]: cropped(record) for record in whole.records()}
    assert list(crops) == list(range(1, last_step + 1))
    assert len(killed.records()) > last_step, "no step was repeated"
    assert all(cropped(record) == crops[record["step"]] for record in killed.records())
    losses = {record["step"]: record["loss"] for record in whole.records()}
    for record in killed.records():
        assert record["loss"] == pytest.approx(losses[record["step"]], rel=1e-3)


@pytest.mark.extended
def test_killed_training_on_pairs_continues_with_the_same_crops_and_captions(
    server: ScriptServer, tmp_path: Path
) -> None:
    arguments = ["--data", str(tmp_path / "pictures")]
    killed = Training("train_clip.py", tmp_path / "killed", arguments, server=server, sizes=())
    last_step = killed.run_until_killed_between_checkpoints(KILL_STEP) + 4
    killed.run(last_step)
    whole = Training("train_clip.py", tmp_path / "whole", arguments, server=server, sizes=())
    whole.run(last_step)
    assert_exact(killed, whole, last_step)


def cropped(record: Record) -> list[tuple[int, int]]:
    """The images of a step with the sums of the crops' pixels, whatever rank had them."""
    return sorted(zip(record["sample_ids"], record["pixels"], strict=True))


def assert_exact(killed: Training, whole: Training, last_step: int) -> None:
    assert len(killed.records()) > last_step, "no step was repeated"
    assert by_step(killed.records()) == by_step(whole.records())
    assert len(whole.records()) == last_step
