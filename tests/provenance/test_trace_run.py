"""What trace says of a run is what loaders deliver: each row's step, rank and index, and each step's rows."""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.cli.main import main, make_parser
from shardkit.cli.trace import find_run
from shardkit.datasets.dataset import open_dataset
from shardkit.datasets.provenance.run import Run, read_state
from shardkit.errors import StateError
from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.config import grouped
from shardkit.order.exclusions import Exclusions
from shardkit.tools.rewind.checkpoints import read_run
from support.loader_data import make_dataset

SAMPLES = 53
Place = tuple[int, int, int]
"""(step, rank, index in the rank's batch)."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("streams")
    sizes = {"web": ("mds", SAMPLES), "code": ("tar", 31)}
    return {name: make_dataset(folder / name, kind, samples=n) for name, (kind, n) in sizes.items()}


@contextmanager
def traced(*words: object) -> Iterator[Run]:
    """The run that a command line describes."""
    arguments = make_parser().parse_args(["trace", *map(str, words), "--step", "1"])
    with ExitStack() as opened:
        saved = read_run(arguments.state) if arguments.state else None
        found = find_run(arguments, opened.enter_context(open_dataset(arguments.path)), saved, opened)
        assert found is not None
        yield found


def deliveries(data: Any, steps: int, world_size: int, **options: Any) -> dict[Place, tuple[int, int]]:
    """{place: (stream, row)} of the first steps, from real loaders; padding left out."""
    seen = {}
    for rank in range(world_size):
        with StreamingLoader(
            data, rank=rank, world_size=world_size, return_ids=True, endless=True, **grouped(options)
        ) as loader:
            for step, batch in enumerate(islice(loader, steps), 1):
                rows = batch["sample_id"].tolist()
                streams = batch["stream_id"].tolist() if "stream_id" in batch else [0] * len(rows)
                for index, (stream, row) in enumerate(zip(streams, rows, strict=True)):
                    if row >= 0:
                        seen[step, rank, index] = (stream, row)
    return seen


def assert_agrees(run: Run, seen: dict[Place, tuple[int, int]], steps: int, epochs: int) -> None:
    """`run` computes of every step and of every row what `seen` has."""
    computed: dict[Place, tuple[int, int]] = {}
    for step in range(1, steps + 1):
        computed |= {(step, row.rank, row.index): (row.stream, row.row) for row in run.batch(step)}
    assert computed == seen
    places = defaultdict(list)
    for place, sample in seen.items():
        places[sample].append(place)
    for (stream, row), expected in places.items():
        sightings = run.sightings(row, stream, epochs=epochs)
        found = [(s.step, s.rank, s.index) for s in sightings if s.step is not None and s.step <= steps]
        assert sorted(found) == sorted(expected)


@pytest.mark.parametrize(
    ("tail", "world_size", "options"),
    [
        ("carry", 3, {}),
        ("drop", 2, {"shuffle": "global"}),
        ("pad", 3, {"lanes": 4, "window": 5}),
        ("carry", 1, {"shuffle": "none", "seed": 3}),
    ],
)
def test_a_run_by_its_options_is_that_of_a_loader_with_them(
    folders: dict[str, Path], tail: Any, world_size: int, options: dict[str, Any]
) -> None:
    steps = 3 * SAMPLES // (4 * world_size)
    seen = deliveries(str(folders["web"]), steps, world_size, batch_size=4, tail=tail, **options)
    sizes = ["--batch-size", 4, "--world-size", world_size, "--tail", tail]
    for name, value in options.items():
        sizes += ["--loader", f"{name}={value}"] if name in ("lanes", "window") else [f"--{name}", value]
    with traced(folders["web"], *sizes) as run:
        assert_agrees(run, seen, steps, epochs=4)
        dropped = [s for row in range(SAMPLES) for s in run.sightings(row, epochs=1) if s.is_dropped]
        assert len(dropped) == (SAMPLES % (4 * world_size) if tail == "drop" else 0)
        for step in (1, 3, 6):
            assert run.plan is not None
            assert run.batch_at(run.plan.start_of_step(step)) == run.batch(step)


def test_a_run_with_an_exclusion_list_never_sees_its_rows(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "gone.txt").write_text("3:9\n40\n")
    data = [Stream(folders["web"], exclude=tmp_path / "gone.txt")]
    seen = deliveries(data, 20, 2, batch_size=3)
    with StreamingLoader(data, batch_size=3, rank=0, world_size=2) as loader:
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    known = [folders["web"], "--batch-size", 3, "--world-size", 2]
    for words in ([*known], [*known, "--state", tmp_path / "state.json"]):
        with traced(*words, "--without", tmp_path / "gone.txt") as run:
            assert_agrees(run, seen, 20, epochs=4)
            for row in range(SAMPLES):
                assert bool(run.sightings(row, epochs=1)) == (row not in {3, 4, 5, 6, 7, 8, 40})
    with pytest.raises(StateError, match="give that list with --without"), traced(*words):
        pass


def test_a_mixture_is_traced_from_its_state_whose_weights_changed(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    data = [Stream(folders["web"], 3, name="web"), Stream(folders["code"], 1, name="code")]
    schedule = [(0, {"web": 3, "code": 1}), (40, {"web": 1, "code": 2})]
    options: dict[str, Any] = {"batch_size": 4, "schedule": schedule, "window": 7}
    seen = deliveries(data, 18, 2, **options)
    with StreamingLoader(data, rank=0, world_size=2, endless=True, **grouped(options)) as loader:
        batches = iter(loader)
        for _ in range(11):
            next(batches)
        delivered = list(loader.stream_samples().values())
        state = {"step": 11, "loaders": [{"train": loader.state_dict()}]}  # somewhere in a checkpoint
    (tmp_path / "state.json").write_text(json.dumps(state))
    words = ["--state", tmp_path / "state.json", "--batch-size", 4, "--world-size", 2]
    with traced(folders["code"], *words, "--stream", folders["web"]) as run:
        assert [run.streams_of(open_dataset(folders[name])) for name in ("web", "code")] == [[0], [1]]
        assert run.names == ("web", "code")
        assert_agrees(run, seen, 18, epochs=5)
        sizes = (SAMPLES, 31)
        assert [run.epochs(n) for n in (0, 1)] == [-(-delivered[n] // sizes[n]) for n in (0, 1)]
        for stream, row in set(seen.values()):
            for sighting in run.sightings(row, stream, epochs=2):
                assert sighting.is_delivered == (sighting.position < 88)
                assert sighting.step is not None
    with (
        pytest.raises(StateError, match=r"stream 'web' .* give its path with --stream"),
        traced(folders["code"], *words),
    ):
        pass


def test_a_state_in_a_checkpoint_of_torch_is_found(folders: dict[str, Path], tmp_path: Path) -> None:
    import torch

    with StreamingLoader(folders["web"], batch_size=4, rank=0, world_size=1) as loader:
        checkpoint = {"model": {"w": torch.zeros(3)}, "data": {"loader": loader.state_dict()}}
        torch.save(checkpoint, tmp_path / "step.pt")
    seen = deliveries(str(folders["web"]), 9, 1, batch_size=4)
    with traced(folders["web"], "--state", tmp_path / "step.pt", "--batch-size", 4) as run:
        assert_agrees(run, seen, 9, epochs=1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "holds no loader's state"),
        ("{", "cannot be read as JSON"),
        ('{"position": 0, "order_version": 1, "streams": [], "tail": "carry"}', "not a loader's state"),
    ],
)
def test_a_file_that_is_no_state_is_refused(
    folders: dict[str, Path], tmp_path: Path, content: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state.json").write_text(content)
    assert main(["trace", str(folders["web"]), "--row", "1", "--state", str(tmp_path / "state.json")]) == 1
    assert message in capsys.readouterr().err


def test_a_state_of_another_dataset_is_refused(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with StreamingLoader(folders["web"], batch_size=4, rank=0, world_size=1) as loader:
        (tmp_path / "s.json").write_text(json.dumps(loader.state_dict()))
    assert main(["trace", str(folders["code"]), "--row", "1", "--state", str(tmp_path / "s.json")]) == 1
    assert "give that dataset's path" in capsys.readouterr().err


def test_a_dataset_of_others_tells_where_rows_are_seen_and_that_documents_are_not_known(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["trace", str(folders["web"]), "--batch-size", "4"]
    assert main([*command, "--row", "5"]) == 0
    out, err = capsys.readouterr()
    assert "epoch 0: position" in out
    assert "has no provenance tables" in err
    assert main([*command, "--step", "3", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["rows"]) == 4
    assert all(row["documents"] is None for row in answer["rows"])
    assert answer["sources"] == []
    short = ["--tail", "pad", "--world-size", "13", "--step", "2", "--json"]  # one row, which rank 12 has
    for rank, rows in ((0, 0), (12, 1)):
        assert main([*command, *short, "--rank", str(rank)]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["row_count"], answer["positions"]) == (rows, [52, 53])
    assert main(["trace", str(folders["web"]), "--url", "https://a.org/x"]) == 1
    assert "has no provenance tables" in capsys.readouterr().err


def test_an_exclusion_list_of_another_dataset_is_refused_as_by_loaders(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone.txt").write_text("# fingerprint: " + "0" * 32 + "\n3\n")
    assert Exclusions.read(tmp_path / "gone.txt").fingerprint == "0" * 32
    with pytest.raises(ValueError, match="its rows have other numbers"):
        StreamingLoader([Stream(folders["web"], exclude=tmp_path / "gone.txt")], batch_size=2)
    words = ["--row", "1", "--batch-size", "2", "--without", str(tmp_path / "gone.txt")]
    assert main(["trace", str(folders["web"]), *words]) == 1
    assert "its rows have other numbers" in capsys.readouterr().err
    with open_dataset(folders["web"]) as dataset:
        (tmp_path / "gone.txt").write_text(f"# fingerprint: {dataset.fingerprint}\n3\n")
    StreamingLoader([Stream(folders["web"], exclude=tmp_path / "gone.txt")], batch_size=2).close()


@pytest.mark.parametrize("kind", ["torch 1.5", "pickle", "TorchScript", "noise", "nothing"])
def test_a_file_that_is_no_checkpoint_of_todays_torch_is_refused_in_one_readable_line(
    tmp_path: Path, kind: str
) -> None:
    file = tmp_path / "step.pt"
    if kind == "torch 1.5":
        torch.save({"a": 1}, file, _use_new_zipfile_serialization=False)
    elif kind == "TorchScript":
        torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), file)
    else:
        file.write_bytes({"pickle": pickle.dumps({"a": 1}), "noise": b"noise" * 99, "nothing": b""}[kind])
    with pytest.raises(StateError) as caught:
        read_state(file)
    message = str(caught.value)
    assert str(file) in message
    assert "give the state as JSON" in message
    assert ("TorchScript program" in message) == (kind == "TorchScript")
    assert "weights_only" not in message
    assert len(message.splitlines()) == 1
    assert len(message) < 500 + len(str(file))
