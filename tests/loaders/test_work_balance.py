"""Balanced ranks: the same rows in every global batch, each rank its own number of them, less uneven work."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from reference.work_balance import level_one
from shardkit.datasets.dataset import open_dataset
from shardkit.datasets.row_costs import table_of
from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.config import grouped
from shardkit.loaders.lengths import LengthLoader
from shardkit.loaders.pytorch import StreamingDataset
from shardkit.order.balance import CostModel, WorkBalance, level
from shardkit.order.batches import BatchPlan, StepSizes
from shardkit.order.exclusions import Exclusions
from shardkit.order.order import Order, OrderSpec
from support.default_cases import cases
from support.loader_data import make_rows
from support.resume import assert_exact_resume
from support.uneven_data import ids_of_ranks, make_uneven, uneven_rows, work_of

Ints = npt.NDArray[np.int64]
OPTIONS: dict[str, Any] = {"lanes": 8, "window": 32}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_uneven(tmp_path_factory.mktemp("data") / "mds")


def hashed_costs(batches: int, ranks: int, rows: int) -> Ints:
    """Costs with a long tail, the same on every machine and from every NumPy."""
    count = batches * ranks * rows
    words = [hashlib.blake2b(b"%d" % n, digest_size=8).digest() for n in range(count)]
    uniform = [1 + int.from_bytes(word) % (1 << 16) for word in words]
    return np.array([(1 << 32) // u for u in uniform], dtype=np.int64).reshape(batches, ranks, rows)


@st.composite
def some_costs(draw: st.DrawFn) -> tuple[Ints, Ints | None]:
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 40)), draw(st.integers(1, 20)))
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    most = draw(st.sampled_from([1, 5, 1 << 20, 1 << 36]))
    costs = (most * random.random(shape) ** draw(st.sampled_from([1, 6]))).astype(np.int64)
    before = random.integers(0, 1 + most * shape[2], shape[:2]) if draw(st.booleans()) else None
    return costs, before


@settings(deadline=None)
@given(some_costs())
def test_every_row_is_placed_once_as_the_plain_definition_says(case: tuple[Ints, Ints | None]) -> None:
    costs, before = case
    batches, ranks, rows = costs.shape
    places = level(costs, before)
    assert places.shape == costs.shape
    assert (np.sort(places.reshape(batches, -1), axis=1) == np.arange(ranks * rows)).all()
    for number in range(batches):
        done = None if before is None else before[number]
        expected = level_one(costs[number].tolist(), None if done is None else done.tolist())
        assert places[number].tolist() == [[r * rows + i for r, i in place] for place in expected]
        alone = level(costs[number : number + 1], None if done is None else done[None])
        assert (alone[0] == places[number]).all(), "what is placed together decides nothing"
        work, plain = costs[number].ravel()[places[number]].sum(axis=1), costs[number].sum(axis=1)
        done = 0 if done is None else done
        assert (work + done).max() <= (plain + done).max(), "never worse than the order's own parts"


def test_rows_that_cost_the_same_stay_where_they_are() -> None:
    costs = np.full((2, 5, 4), 77)
    assert (level(costs).reshape(2, -1) == np.arange(20)).all()


@pytest.mark.parametrize(
    ("shape", "digest"),
    [
        ((3, 8, 4), "11b2cb78d00c3430"),
        ((2, 7, 24), "ff0096cd50865eb4"),
        ((1, 64, 16), "378d7ae90eaa993e"),
        ((1, 1024, 4), "aa49b62fc4f1c764"),
    ],
)
def test_placements_are_those_of_every_version(shape: tuple[int, int, int], digest: str) -> None:
    """A change here would let ranks of one job that run different versions lose and repeat rows."""
    places = level(hashed_costs(*shape)).astype("<i8")
    assert hashlib.blake2b(places.tobytes(), digest_size=8).hexdigest() == digest


@pytest.mark.parametrize(("ranks", "rows"), [(8, 16), (64, 16), (256, 8), (8, 512)])
def test_work_is_level_or_close_to_what_the_dearest_row_allows(ranks: int, rows: int) -> None:
    random = np.random.default_rng(1)
    costs = (1e6 * random.lognormal(0, 0.9, (6, ranks, rows))).astype(np.int64)
    shares = np.take_along_axis(costs.reshape(6, -1), level(costs).reshape(6, -1), axis=1)
    work = shares.reshape(costs.shape).sum(axis=2)
    uneven, plain = (each.max(axis=1) / costs.sum(axis=(1, 2)) * ranks for each in (work, costs.sum(axis=2)))
    bound = costs.max(axis=(1, 2)) / costs.sum(axis=(1, 2)) * ranks
    assert (uneven <= np.maximum(1.04, 1.1 * bound)).all()
    assert (plain > uneven).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shuffle", ["window", "global", "none"])
@pytest.mark.parametrize("tail", cases(["carry", "drop", "pad"], ["carry"]))
def test_global_batches_hold_the_same_rows_with_and_without(path: Path, tail: str, shuffle: str) -> None:
    plain_states: list[dict[str, Any]] = []
    states: list[dict[str, Any]] = []
    options: dict[str, Any] = OPTIONS | {"tail": tail, "shuffle": shuffle}
    for world_size, batch_size in ((4, 6), (3, 8), (8, 3)):
        plain = ids_of_ranks(path, world_size, batch_size, 30, states=plain_states, **options)
        placed = ids_of_ranks(path, world_size, batch_size, 30, states=states, balance="attention", **options)
        assert plain.shape == placed.shape
        assert (np.sort(plain.reshape(30, -1)) == np.sort(placed.reshape(30, -1))).all()
        assert (plain != placed).any()
    assert states == plain_states, "a state knows nothing of it"


def test_work_is_more_level_than_in_the_orders_own_parts_and_the_figures_say_so(path: Path) -> None:
    work = work_of(uneven_rows(300))
    plain, placed = (
        work[ids_of_ranks(path, 4, 8, 40, balance=balance, **OPTIONS)].sum(axis=2)
        for balance in (None, "attention")
    )
    plain_over, placed_over = (each.max(axis=1).sum() / each.mean(axis=1).sum() for each in (plain, placed))
    assert placed_over < 1.04 < plain_over
    with StreamingLoader(
        path, batch_size=8, rank=2, world_size=4, endless=True, **grouped({"balance": "attention", **OPTIONS})
    ) as one:
        assert one.stats().balance is None
        for _, _ in zip(range(40), one, strict=False):
            pass
        figures = one.stats().balance
    assert figures is not None
    assert figures.max_over_mean == pytest.approx(placed_over)
    assert figures.unbalanced == pytest.approx(plain_over)
    assert figures.step_max_over_mean is None
    with StreamingLoader(path, batch_size=8, rank=0, world_size=4, **grouped(OPTIONS)) as other:
        next(iter(other))
        assert other.stats().balance is None


def test_the_linear_part_of_a_cost_model_says_how_many_rows_are_worth_moving(path: Path) -> None:
    plain = ids_of_ranks(path, 4, 8, 20, **OPTIONS)
    moved = [
        int((ids_of_ranks(path, 4, 8, 20, balance=model, **OPTIONS) != plain).sum())
        for model in (CostModel(), CostModel(linear=64), CostModel(linear=100_000))
    ]
    assert moved[0] > moved[1] > moved[2] == 0
    same = ids_of_ranks(path, 4, 8, 20, balance=CostModel(quadratic=1000), **OPTIONS)
    assert (same == ids_of_ranks(path, 4, 8, 20, balance="attention", **OPTIONS)).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"global_batch": 48}])
def test_a_run_goes_on_exactly_when_ranks_change(path: Path, options: dict[str, Any]) -> None:
    """4, then 3, then 8 ranks: every sample once, and each rank has what it has in a run of its own."""
    options = OPTIONS | {"balance": "attention"} | options
    states: list[dict[str, Any]] = []
    parts = [ids_of_ranks(path, 4, 6, 10, states=states, **options)]
    parts.append(ids_of_ranks(path, 3, 8, 10, state=states[-1], states=states, **options))
    parts.append(ids_of_ranks(path, 8, 3, 10, state=states[-1], states=states, **options))
    delivered = np.concatenate([part.ravel() for part in parts])
    alone = ids_of_ranks(path, 1, 24, 30, **OPTIONS)
    assert (np.sort(delivered.reshape(30, -1)) == np.sort(alone.reshape(30, -1))).all()
    for world_size, part, first in ((3, parts[1], 10), (8, parts[2], 20)):
        whole = ids_of_ranks(path, world_size, 24 // world_size, first + 10, **options)
        assert (whole[first:] == part).all(), "where a run was begun decides nothing"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"global_batch": 32}])
def test_every_state_goes_on_with_the_same_batches(path: Path, options: dict[str, Any]) -> None:
    def make() -> StreamingLoader:
        balanced: dict[str, Any] = {"balance": "attention", **OPTIONS, **options}
        place: dict[str, Any] = {"batch_size": 4, "rank": 1, "world_size": 4}
        return StreamingLoader(path, endless=True, return_ids=True, **place, **grouped(balanced))

    assert_exact_resume(make, steps=24, tail_steps=6)


def test_mixtures_with_excluded_rows_are_balanced_by_the_work_of_each_stream(
    path: Path, tmp_path: Path
) -> None:
    other = make_uneven(tmp_path / "other", "tar", samples=120, shards=3, seed=8)
    removed = Exclusions.of([3, (50, 71)])
    streams = [Stream(path, 3, exclude=removed), Stream(other, 1, name="code")]
    plain = ids_of_ranks(streams, 4, 8, 40, **OPTIONS)
    placed = ids_of_ranks(streams, 4, 8, 40, balance="attention", **OPTIONS)
    assert (np.sort(plain.reshape(40, -1)) == np.sort(placed.reshape(40, -1))).all()
    work = np.concatenate([work_of(uneven_rows(300)), work_of(uneven_rows(120, seed=8))])
    level_over, plain_over = (
        (each := work[ids].sum(axis=2)).max(axis=1).sum() / each.mean(axis=1).sum() for ids in (placed, plain)
    )
    assert level_over < 1.04 < plain_over


def steps_of_ranks(path: Path, world_size: int, batch_size: int, count: int, **options: Any) -> Ints:
    """int64[steps, batches of a step, ranks, batch] of `steps()`."""
    found = []
    for rank in range(world_size):
        place: dict[str, Any] = {"rank": rank, "world_size": world_size, "batch_size": batch_size}
        with StreamingLoader(
            path, endless=True, return_ids=True, **grouped({**place, **OPTIONS, **options})
        ) as loader:
            steps = loader.steps()
            found.append([[batch["sample_id"].tolist() for batch in next(steps)] for _ in range(count)])
    return np.array(found).transpose(1, 2, 0, 3)


def test_a_step_is_level_over_its_batches_even_where_a_batch_cannot_be(path: Path) -> None:
    """With one row a rank there is nothing to swap inside of a batch: the rows of its batches add up."""
    work = work_of(uneven_rows(300))
    plain = steps_of_ranks(path, 4, 1, 12, global_batch=32)
    placed = steps_of_ranks(path, 4, 1, 12, global_batch=32, balance="attention")
    assert (np.sort(plain, axis=2) == np.sort(placed, axis=2)).all(), "each batch keeps its rows"
    sums = [work[ids].sum(axis=(1, 3)) for ids in (plain, placed)]
    plain_over, placed_over = (each.max(axis=1).sum() / each.mean(axis=1).sum() for each in sums)
    assert placed_over < 1.1 < 1.25 < plain_over
    options: dict[str, Any] = OPTIONS | {"balance": "attention", "global_batch": 32}
    with StreamingLoader(
        path, batch_size=1, rank=3, world_size=4, endless=True, **grouped(options)
    ) as loader:
        for _, _ in zip(range(12), loader.steps(), strict=False):
            pass
        figures = loader.stats().balance
    assert figures is not None
    assert figures.step_max_over_mean == pytest.approx(placed_over)
    assert figures.step_unbalanced == pytest.approx(plain_over)
    assert figures.max_over_mean == pytest.approx(figures.unbalanced)


def test_ranks_agree_after_the_size_of_steps_has_changed_however_far_they_had_planned(path: Path) -> None:
    def run(rank: int, prefetch: int) -> list[list[int]]:
        options: dict[str, Any] = OPTIONS | {
            "balance": "attention",
            "prefetch_batches": prefetch,
            "return_ids": True,
        }
        found = []
        with StreamingLoader(
            path,
            batch_size=1,
            rank=rank,
            world_size=4,
            endless=True,
            **grouped({"global_batch": 16, **options}),
        ) as loader:
            steps = loader.steps()
            for number in range(12):
                if number == 3:
                    loader.set_global_batch(24, at_position=loader.position)
                found.append([int(batch["sample_id"]) for batch in next(steps)])
        return found

    by_rank = [run(rank, prefetch) for rank, prefetch in enumerate((0, 1, 16, 64))]
    assert by_rank == [run(rank, 0) for rank in range(4)]
    samples = [one for steps in by_rank for step in steps for one in step]
    with StreamingLoader(
        path, batch_size=len(samples), rank=0, world_size=1, return_ids=True, **grouped(OPTIONS)
    ) as one:
        assert sorted(samples) == sorted(next(iter(one))["sample_id"].tolist())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"global_batch": 48}])
def test_workers_of_a_dataloader_make_the_batches_of_one_process(path: Path, options: dict[str, Any]) -> None:
    options = OPTIONS | {"balance": "attention", "return_ids": True} | options
    place: dict[str, Any] = {"batch_size": 4, "rank": 1, "world_size": 3}
    with StreamingLoader(path, **grouped({**place, **options})) as loader:
        expected = [batch["sample_id"].tolist() for batch in loader]
    for workers in (2, 3):
        loaded = DataLoader(
            StreamingDataset(path, **grouped({**place, **options})), batch_size=None, num_workers=workers
        )
        assert [batch["sample_id"].tolist() for batch in loaded] == expected


def test_rows_of_several_lengths_are_balanced_in_each_of_them(path: Path, tmp_path: Path) -> None:
    short = make_rows(tmp_path / "short", samples=200, length=32)
    found: dict[str | None, list[list[int]]] = {}
    for balance in (None, "attention"):
        of_ranks = []
        for rank in range(2):
            place: dict[str, Any] = {"rank": rank, "world_size": 2, "tokens_per_batch": 512}
            with LengthLoader(
                [path, short], return_ids=True, **grouped({"balance": balance, **place})
            ) as loader:
                of_ranks.append([batch["sample_id"].tolist() for batch in loader])
        found[balance] = [sorted(one + other) for one, other in zip(*of_ranks, strict=True)]
    assert found[None] == found["attention"]


def test_sums_of_the_largest_costs_do_not_overflow() -> None:
    length, samples = 1 << 28, 64
    order, plan = Order([samples], OrderSpec(1, 1, 0, "none")), BatchPlan(samples, 4, 0, 8, "carry")
    squares = np.full(samples, length * length, dtype=np.uint64)
    squares[::4] //= 7
    balance = WorkBalance([table_of(squares, length)], CostModel(), StepSizes.of(1 << 24))
    steps = balance.steps(plan, order, 0, 2)
    assert steps.work is not None
    assert (steps.work >= 0).all()
    assert steps.work[0, 0] <= 8 * steps.work[0, 1]


TWO: dict[str, Any] = {"rank": 0, "world_size": 2, "balance": "attention"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"balance": "mlp"}, 'must be "attention", a CostModel'),
        ({"eos_id": 0, "bos_id": 1}, "eos_id or by bos_id"),
        ({"batch_size": 1 << 24}, "global batches of at most 16,777,216 rows, not 33,554,432"),
        ({"endless": True, "global_batch": 1 << 25}, "steps of at most 16,777,216 rows"),
    ],
)
def test_what_cannot_be_balanced_is_refused(path: Path, options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"batch_size": 1, **TWO, **options}
    with pytest.raises(ValueError, match=message):
        next(iter(StreamingLoader(path, **grouped(arguments))))


@pytest.mark.parametrize(
    ("linear", "quadratic", "message"),
    [
        (-1, 1, "linear of a CostModel must be from 0"),
        (0, 0, "quadratic of a CostModel must be from 1"),
        (0, 1 << 33, "quadratic of a CostModel must be from 1 to"),
    ],
)
def test_a_cost_model_has_whole_numbers_that_make_sense(linear: int, quadratic: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostModel(linear, quadratic)
    with pytest.raises(ValueError, match="linear must be a whole number"):
        CostModel(linear=0.5)  # type: ignore[arg-type]


def test_a_dataset_without_the_id_that_ends_documents_is_refused(path: Path, tmp_path: Path) -> None:
    bare = make_uneven(tmp_path / "bare", samples=40, shards=2)
    (bare / "dataset.json").unlink()
    place: dict[str, Any] = {"batch_size": 2, "rank": 0, "world_size": 2}
    with pytest.raises(ValueError, match="balance need the id that ends documents"):
        StreamingLoader(bare, **grouped({"balance": "attention", **place}))
    with StreamingLoader(bare, eos_id=0, **grouped({"balance": "attention", **place})) as loader:
        assert len(next(iter(loader))["tokens"]) == 2


def test_the_only_rank_has_nothing_to_balance(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("rows were counted")

    monkeypatch.setattr("shardkit.loaders.defaults.open_row_costs", refuse)
    with StreamingLoader(
        open_dataset(path), batch_size=2, rank=0, world_size=1, **grouped({"balance": "attention"})
    ) as loader:
        next(iter(loader))
        assert loader.stats().balance is None
