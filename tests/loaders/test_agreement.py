"""Ranks that disagree get an error before their first batch, and all of them get it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardkit.errors import RanksDisagreeError
from shardkit.loaders import StreamingLoader, agreement
from shardkit.loaders.agreement import RankAgreement
from shardkit.loaders.config import LoaderConfig, grouped
from shardkit.loaders.peers import StopTogether
from shardkit.loaders.placement import Place
from shardkit.loaders.producer import LoaderTimeoutError
from support import disagreeing_ranks
from support.disagreeing_ranks import CASES
from support.loader_data import make_dataset
from support.stop_ranks import LOADER

ProcessGroups = Callable[[int, int], None]  # the fixture `process_groups`


@pytest.fixture(scope="module")
def seen(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[dict[str, Any]]]:
    """Run the cases that this run has once, in disagreeing_ranks.py; give what the processes of one saw."""
    cases = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    names = {"slice"} | {case.params["name"] for case in cases if case is not None and "name" in case.params}
    folder = tmp_path_factory.mktemp("ranks")
    tests = Path(disagreeing_ranks.__file__).parents[1]
    path = os.pathsep.join([str(tests), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    command = [sys.executable, disagreeing_ranks.__file__, str(folder), *sorted(names)]
    subprocess.run(command, check=True, timeout=240, env=environment)

    def of_case(name: str) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}.?"))]

    return of_case


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.named and "slice" not in name])
def test_a_difference_is_an_error_of_every_rank_that_names_the_setting_and_both_values(
    seen: Callable[[str], list[dict[str, Any]]], name: str
) -> None:
    processes = seen(name)
    assert len(processes) == CASES[name].processes
    for each in processes:
        assert each["error"].startswith("RanksDisagreeError: the ranks of this run disagree:"), each
        assert all(part in each["error"] for part in CASES[name].named), each["error"]


def test_slices_of_a_mesh_are_compared_with_each_other(
    seen: Callable[[str], list[dict[str, Any]]],
) -> None:
    """Processes 1 and 3 are one slice, whose process 3 differs; the other slice need not wait for it."""
    processes = seen("slice")
    for number in (1, 3):
        assert all(part in processes[number]["error"] for part in CASES["slice"].named)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.named])
def test_what_may_differ_is_no_error(seen: Callable[[str], list[dict[str, Any]]], name: str) -> None:
    processes = seen(name)
    assert len(processes) == CASES[name].processes
    assert all(each.keys() == {"batches"} for each in processes), processes
    assert {each["batches"] for each in processes} <= {0, processes[0]["batches"]}


def test_a_rank_that_does_not_come_is_named_after_timeout_seconds(
    seen: Callable[[str], list[dict[str, Any]]],
) -> None:
    first, second = seen("stays_away")
    assert second == {"batches": 0}
    assert first["error"].startswith(
        "LoaderTimeoutError: rank 0: rank 1 has not begun to read within 1 s (timeout_seconds)"
    )


def test_a_rank_that_fails_before_its_first_batch_ends_the_wait_of_the_others(
    seen: Callable[[str], list[dict[str, Any]]],
) -> None:
    first, second = seen("fails_before")
    assert second["error"] == "KeyError: 'no such checkpoint'"
    assert first["error"] == "PeerError: rank 1 stopped at step 0: KeyError: 'no such checkpoint'"


def test_more_ranks_than_processes_are_not_waited_for_and_are_compared(
    seen: Callable[[str], list[dict[str, Any]]],
) -> None:
    errors = [each.get("error", "") for each in seen("world_size")]
    assert any("world_size: 2 on rank 0, 4 on rank 1" in error for error in errors), errors


# Without other processes: ranks of the backend "fake" never come.


def test_ranks_that_cannot_come_are_compared_and_not_waited_for(
    tmp_path: Path, process_groups: ProcessGroups
) -> None:
    data = make_dataset(tmp_path / "data", "mds")
    options: dict[str, Any] = {"batch_size": 2, "stop_together": False}
    for rank in range(3):
        process_groups(rank, 4)
        with StreamingLoader(data, **grouped(options)) as loader:
            assert len(next(iter(loader))["tokens"]) == 2
    process_groups(3, 4)
    with (
        StreamingLoader(data, seed=20, **grouped(options)) as loader,
        pytest.raises(RanksDisagreeError, match="seed: 17 on rank 0, 20 on rank 3"),
    ):
        iter(loader)


def test_a_long_wait_is_announced_and_replicas_that_stay_away_end_it(
    process_groups: ProcessGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "_WARN_SECONDS", 0.05)
    process_groups(0, 4)
    monkeypatch.setattr("torch.distributed.get_backend", lambda: "gloo")
    whole = RankAgreement(Place(0, 1, "mesh", (0, 1, 2, 3)), StopTogether(LOADER), timeout_seconds=20.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole.check({"seed": 1}, data=["a"])  # every rank has come
    alone = RankAgreement(Place(0, 4), StopTogether(LOADER), timeout_seconds=0.2)
    with (
        pytest.warns(RuntimeWarning, match=r"rank 0: ranks 1, 2, 3 have not begun to read for 0 s; waiting"),
        pytest.raises(LoaderTimeoutError, match=r"ranks 1, 2, 3 have not begun to read within 0\.2 s"),
    ):
        alone.check({"seed": 1}, data=["a"])


def test_a_process_alone_and_one_without_a_group_compare_nothing() -> None:
    for place in (Place(0, 1), Place(1, 2)):
        agreement_of_one = RankAgreement(place, StopTogether(LOADER), timeout_seconds=0.1)
        agreement_of_one.check({"seed": 1}, data=["a"])
        assert not agreement_of_one.has_met


def test_every_option_is_compared_unless_it_belongs_to_one_rank_or_to_the_state() -> None:
    """A new option is compared without being listed anywhere; these are all that are not."""
    left_out = {field.name for field in fields(LoaderConfig)} - LoaderConfig().shared_by_ranks().keys()
    assert left_out == {
        *("prefetch_batches", "prefetch_bytes", "timeout_seconds", "cache_dir", "cache_bytes", "connections"),
        *("storage", "verify", "usage_log", "stop_grace_seconds", "stop_together", "threads"),
        *("mesh", "group", "lanes", "window", "schedule", "epoch_samples", "global_batch"),
    }


def test_functions_are_compared_by_name_because_ranks_have_different_objects() -> None:
    def of(function: Any) -> object:
        return json.loads(json.dumps(LoaderConfig(transform=function).shared_by_ranks()["transform"]))

    assert of(json.loads) == of(json.loads) == "json.loads"
    assert of(json.loads) != of(json.dumps)
    assert of(partial(json.loads)) == of(partial(json.loads)) == "functools.partial"
