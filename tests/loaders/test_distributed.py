"""Where rank and world size come from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardkit.loaders.distributed import Place, find_place


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    import torch.distributed

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_a_lone_process_is_rank_0_of_1() -> None:
    assert find_place(None, None) == Place(0, 1, 1)


def test_torchruns_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert find_place(None, None) == Place(5, 8, 4)


def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert find_place(1, 3) == Place(1, 3, 3)


def test_torch_distributed_wins_over_the_environment(
    monkeypatch: pytest.MonkeyPatch, process_group: None
) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert find_place(None, None) == Place(0, 1, 1)


@pytest.mark.parametrize(("rank", "world_size"), [(0, None), (None, 2)])
def test_half_an_answer_is_refused(rank: int | None, world_size: int | None) -> None:
    with pytest.raises(ValueError, match="together"):
        find_place(rank, world_size)


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match="WORLD_SIZE is missing"):
        find_place(None, None)


def test_an_environment_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "one")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="RANK must be a whole number"):
        find_place(None, None)


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0), (True, 2), (0.0, 1)])
def test_bad_numbers_are_refused(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=r"rank|world_size"):
        find_place(rank, world_size)
