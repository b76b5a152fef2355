"""Transforms: random numbers that depend on a sample's position alone, batches of one form, clear errors."""

from __future__ import annotations

import itertools
import random
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image

from shardkit.errors import TransformError
from shardkit.loaders import Stream, StreamingLoader, balanced_streams
from shardkit.loaders.batch import held_bytes
from shardkit.loaders.config import grouped
from shardkit.loaders.cuda import CudaPrefetcher
from shardkit.loaders.producer import WHOLE
from shardkit.loaders.pytorch import StreamingDataLoader, StreamingDataset, unchanged
from shardkit.loaders.transform import takes_generator
from shardkit.storage import open_store
from support.foreign_tars import tars
from support.loader_data import make_dataset
from support.remote_harness import QUICK, fresh_url
from support.resume import Batch, State, assert_equal, assert_exact_resume, batches, run, saved
from support.uneven_data import make_uneven

COLUMNS = ["__key__", "png", "json", "cls"]
SAMPLES, BATCH, STEPS = 23, 6, 12  # twelve batches span four epochs, and begin in the middle of three


def drawn(sample: dict[str, Any], numbers: Any) -> dict[str, Any]:
    """A sample with an array of constant shape, a number, a string and an image."""
    pixels = np.asarray(sample["png"])[:2, :3].transpose(2, 0, 1)
    return {
        "number": sample["json"]["number"],
        "image": np.roll(pixels, int(numbers[0] * 3), axis=2),
        "drawn": torch.tensor(numbers, dtype=torch.float64),
        "key": sample["__key__"],
        "picture": sample["png"],
    }


def by_generator(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return drawn(sample, rng.random(3))


def by_globals(sample: dict[str, Any]) -> dict[str, Any]:
    """Draws from all three global generators, and for the normal ones, which keep half of a pair."""
    numbers = [random.random(), np.random.rand(), float(torch.rand(()))]
    return drawn(sample, [n + random.gauss(0, 1) + np.random.randn() for n in numbers])


FUNCTIONS = {"generator": by_generator, "globals": by_globals}
kinds = pytest.mark.parametrize("kind", FUNCTIONS)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    local, remote = tmp_path_factory.mktemp("tars"), fresh_url()
    for url in (str(local), remote):
        for name, data in tars().items():
            open_store(url).put(name, data)
    mixed = [Stream(local, weight=2, name="a"), Stream(remote, weight=1, name="b", exclude=[3, 7])]
    return {"local": local, "remote": remote, "mixture": mixed}


def arguments(kind: str, **more: Any) -> dict[str, Any]:
    common = dict(QUICK) | {"batch_size": BATCH, "columns": COLUMNS, "transform": FUNCTIONS[kind]}
    return grouped(common | more)


def make(place: Any, kind: str, workers: int = -1, /, **more: Any) -> Any:
    """A loader, or a DataLoader with this number of workers."""
    if workers < 0:
        return StreamingLoader(place, **arguments(kind, **more))
    dataset = StreamingDataset(place, **arguments(kind, **more))
    return StreamingDataLoader(dataset, num_workers=workers)


@contextmanager
def closing(loader: Any) -> Iterator[Any]:
    try:
        yield loader
    finally:
        loader.close()


def augmented(batch: Batch) -> list[tuple[Any, ...]]:
    """What the transform made of each sample of a batch."""
    names = ("number", "sample_id", "drawn", "image")
    return list(zip(*(batch[name].tolist() for name in names), batch["key"], strict=True))


def sets_of_steps(make_rank: Callable[[int], Any], ranks: int, steps: int, state: State | None) -> list[Any]:
    """For each step what the samples of all ranks became, sorted, and the state after it."""
    of_ranks = []
    for rank in range(ranks):
        with closing(make_rank(rank)) as loader:
            if state is not None:
                loader.load_state_dict(state)
            of_ranks.append([(augmented(batch), saved(loader)) for batch in islice(batches(loader), steps)])
    return [
        (sorted(sample for own, _ in step for sample in own), step[0][1])
        for step in zip(*of_ranks, strict=True)
    ]


@pytest.mark.sampled(3)
@kinds
@pytest.mark.parametrize("place", ["local", "remote", "mixture"])
def test_random_transforms_resume_exactly(places: dict[str, Any], place: str, kind: str) -> None:
    assert_exact_resume(lambda: closing(make(places[place], kind, threads=2)), steps=STEPS)


@kinds
def test_workers_threads_and_prefetching_change_nothing(places: dict[str, Any], kind: str) -> None:
    with closing(make(places["mixture"], kind, prefetch_batches=0)) as loader:
        expected = run(loader, STEPS)
    ways: list[tuple[int, dict[str, Any]]] = [
        (-1, {"threads": 3}),
        (0, {}),
        (1, {}),
        (2, {"threads": 2}),
        (2, {"prefetch_batches": 0}),
    ]
    for workers, more in ways:
        with closing(make(places["mixture"], kind, workers, **more)) as loader:
            for number, (batch, state) in enumerate(run(loader, STEPS)):
                assert_equal(batch, expected[number][0], f"{workers} workers, {more}, batch {number}")
                assert state == expected[number][1]


@pytest.mark.sampled(2)
@kinds
@pytest.mark.parametrize("place", ["local", "mixture"])
def test_ranks_and_batch_sizes_change_nothing(places: dict[str, Any], place: str, kind: str) -> None:
    """One rank, then two, then three, then one with another batch size, each resumed from the one before."""
    common: dict[str, Any] = {"endless": True, "epoch_samples": 100}

    def of(ranks: int, size: int, rank: int, workers: int = -1) -> Any:
        more = common | {"world_size": ranks, "rank": rank, "batch_size": size}
        return make(places[place], kind, workers, **more)

    whole = sets_of_steps(partial(of, 1, 6), 1, STEPS, None)
    parts: list[Any] = []
    for ranks, workers in ((1, 0), (2, 2), (3, -1)):
        state = parts[-1][1] if parts else None
        parts += sets_of_steps(partial(of, ranks, 6 // ranks, workers=workers), ranks, 3, state)
    assert parts == whole[:9]
    larger = sets_of_steps(partial(of, 1, 18), 1, 1, parts[-1][1])
    assert larger[0][0] == sorted(sample for step, _ in whole[9:12] for sample in step)


def tokens_drawn(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"first": sample["tokens"][:2], "drawn": rng.random()}


def test_balanced_ranks_draw_the_same(tmp_path: Path) -> None:
    path = make_uneven(tmp_path / "data")

    def steps(balance: str | None) -> list[list[Any]]:
        of_ranks = []
        for rank in range(4):
            options = {"lanes": 8, "window": 32, "balance": balance, "transform": tokens_drawn}
            with StreamingLoader(path, batch_size=6, rank=rank, world_size=4, **grouped(options)) as loader:
                of_ranks.append(
                    [list(zip(*map(torch.Tensor.tolist, b.values()), strict=True)) for b in loader]
                )
        return [sorted(itertools.chain(*step)) for step in zip(*of_ranks, strict=True)]

    assert steps("attention") == steps(None)


@kinds
def test_each_epoch_and_seed_draws_anew(places: dict[str, Any], kind: str) -> None:
    with closing(make(places["local"], kind, seed=5)) as loader:
        epochs = [dict(sorted((s[0], s[2]) for b in loader for s in augmented(b))) for _ in range(2)]
    with closing(make(places["local"], kind, seed=6)) as loader:
        other = {s[0]: s[2] for b in loader for s in augmented(b)}
    for first, second in ((epochs[0], epochs[1]), (epochs[0], other)):
        same = first.keys() & second.keys()
        assert len(same) > 10
        assert all(set(first[n]).isdisjoint(second[n]) for n in same)


@kinds
def test_evaluation_that_restarts_draws_the_same(places: dict[str, Any], kind: str) -> None:
    with closing(make(places["local"], kind, restart=True, tail="drop")) as loader:
        first, second = ([augmented(batch) for batch in loader] for _ in range(2))
    assert first == second != []


def test_random_numbers_never_change_between_versions(places: dict[str, Any]) -> None:
    with closing(make(places["local"], "generator", batch_size=2, shuffle="none", seed=17)) as loader:
        [first, second] = next(iter(loader))["drawn"].tolist()
    expected = np.random.Generator(np.random.PCG64(GOLDEN[0])).random(3).tolist()
    assert first == expected
    assert second == np.random.Generator(np.random.PCG64(GOLDEN[1])).random(3).tolist()


GOLDEN = (143272002881151635547306009344138778886, 8640326579945584053412175966010444743)
"""Seeds of the samples at positions 0 and 1 of a run with seed 17."""


# The training loop's own generators.


def states() -> tuple[Any, ...]:
    numpy_state = np.random.get_state(legacy=False)
    return random.getstate(), str(numpy_state), torch.get_rng_state().tolist()


@pytest.mark.parametrize("workers", [-1, 0, 2])
def test_the_loops_generators_are_as_without_a_loader(places: dict[str, Any], workers: int) -> None:
    def draw() -> list[float]:
        return [random.gauss(0, 1), float(np.random.randn()), float(torch.randn(()))]

    def seed() -> None:
        random.seed(1), np.random.seed(1), torch.manual_seed(1)

    seed()
    expected = [draw() for _ in range(STEPS)]
    with closing(make(places["local"], "globals", workers, threads=2)) as loader:
        iterator = batches(loader)
        next(iterator)  # torch's DataLoader draws a seed for its workers when it begins
        seed()
        found = []
        for _ in range(3):
            before = states()
            next(iterator)
            assert states() == before
            found.append(draw())
    assert found == expected[:3]


def test_a_failed_transform_leaves_the_generators_as_they_were(places: dict[str, Any]) -> None:
    def fails(sample: dict[str, Any]) -> dict[str, Any]:
        raise ValueError(random.random())

    with closing(make(places["local"], "globals", transform=fails)) as loader:
        before = states()
        with pytest.raises(TransformError):
            next(iter(loader))
        assert states() == before


def test_global_generators_are_refused_in_a_thread_beside_the_loop(places: dict[str, Any]) -> None:
    with closing(make(places["local"], "globals")) as loader:
        prefetched = iter(CudaPrefetcher(loader, "cpu"))
        with pytest.raises(RuntimeError, match="second parameter"):
            next(prefetched)
    with closing(make(places["local"], "generator")) as loader:
        expected = next(iter(loader))
    with closing(make(places["local"], "generator")) as loader:
        assert_equal(next(iter(CudaPrefetcher(loader, "cpu"))), expected, "first batch")


def test_a_loop_in_another_thread_than_the_main_one_may_use_them(places: dict[str, Any]) -> None:
    found: list[Batch] = []

    def loop() -> None:
        with closing(make(places["local"], "globals")) as loader:
            found.append(next(iter(loader)))

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    with closing(make(places["local"], "globals")) as loader:
        assert_equal(found[0], next(iter(loader)), "first batch")


class Module(torch.nn.Module):
    def forward(self, sample: Any, rng: Any) -> Any:
        return sample


class Plain(torch.nn.Module):
    def forward(self, *inputs: Any) -> Any:
        return inputs[0]


class Call:
    def __call__(self, sample: Any, rng: Any) -> Any:
        return sample


@pytest.mark.parametrize(
    ("function", "takes"),
    [
        (by_generator, True),
        (by_globals, False),
        (lambda sample, size=3: sample, False),
        (lambda sample, rng=None: sample, True),
        (partial(lambda sample, rng, size: sample, size=3), True),
        (partial(lambda size, sample: sample, 3), False),
        (Module(), True),
        (Plain(), False),
        (Call(), True),
        (dict, False),
    ],
)
def test_a_second_parameter_says_that_a_function_draws_from_a_generator(function: Any, takes: bool) -> None:
    assert takes_generator(function) is takes


# The form of batches.


def test_arrays_are_stacked_and_all_else_is_listed(places: dict[str, Any]) -> None:
    values = {
        "int": 3, "float": 0.5, "bool": True, "scalar": np.float32(2), "bytes": np.zeros((2, 3), np.uint8),
        "half": torch.ones(2, dtype=torch.float16), "big": np.ones(2, ">i4"),
        "text": "ä", "none": None, "list": [1, 2], "objects": np.array([None]), "words": np.array(["a"]),
    }  # fmt: skip
    with closing(make(places["local"], "globals", transform=lambda sample: dict(values))) as loader:
        batch = next(iter(loader))
    stacked = {name: (v.dtype, tuple(v.shape)) for name, v in batch.items() if isinstance(v, torch.Tensor)}
    assert stacked == {
        "int": (torch.int64, (BATCH,)),
        "float": (torch.float64, (BATCH,)),
        "bool": (torch.bool, (BATCH,)),
        "scalar": (torch.float32, (BATCH,)),
        "bytes": (torch.uint8, (BATCH, 2, 3)),
        "half": (torch.float16, (BATCH, 2)),
        "big": (torch.int32, (BATCH, 2)),
        "sample_id": (torch.int64, (BATCH,)),
    }
    assert all(batch[name] == [values[name]] * BATCH for name in ("text", "none", "list"))
    assert batch["objects"][0].dtype == object


def test_arrays_of_numpy_and_other_names_for_fields(places: dict[str, Any]) -> None:
    more = {"tensors": "numpy", "rename": {"image": "pixel_values", "sample_id": "row"}}
    with closing(make(places["local"], "generator", **more)) as loader:
        batch = next(iter(loader))
    assert batch["pixel_values"].dtype == np.uint8
    assert isinstance(batch["row"], np.ndarray)
    assert "image" not in batch
    with closing(make(places["local"], "generator", rename={"jpg": "image"})) as loader:
        iterator = iter(loader)
        with pytest.raises(ValueError, match="rename has 'jpg', but the fields of a batch are number, image"):
            next(iterator)


@pytest.mark.parametrize("workers", [-1, 2])
def test_a_transform_may_use_its_memory_again(places: dict[str, Any], workers: int) -> None:
    buffer, tensor = np.zeros((300, 100)), torch.zeros(3)

    def reuses(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        buffer[:], tensor[:] = sample["json"]["number"], sample["json"]["number"]
        return {"view": buffer[1:], "own": buffer, "tensor": tensor, "number": sample["json"]["number"]}

    kept = []
    with closing(make(places["local"], "generator", workers, transform=reuses)) as loader:
        for batch in islice(batches(loader), STEPS):
            kept.append(batch)
    for batch in kept:
        for name in ("view", "own", "tensor"):
            numbers = batch["number"].double()
            assert torch.equal(batch[name].double().reshape(BATCH, -1).amin(1), numbers), name
            assert torch.equal(batch[name].double().reshape(BATCH, -1).amax(1), numbers), name


def test_workers_send_stacked_arrays_in_shared_memory(places: dict[str, Any]) -> None:
    def large(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"pixels": np.full((3, 512, 1024), sample["json"]["number"], np.float32)}

    with closing(make(places["local"], "generator", 2, transform=large)) as loader:
        iterator = batches(loader)
        batch = next(iterator)
        assert batch["pixels"].nbytes == BATCH * 3 * 512 * 1024 * 4 > 32 << 20
        memory = loader._memory._bytes
        first = memory.__array_interface__["data"][0]
        assert first <= batch["pixels"].data_ptr() < first + len(memory)


@pytest.mark.parametrize("kind", ["mds", "columns", "tar"])
def test_columns_of_constant_size_are_transformed_too(tmp_path: Path, kind: str) -> None:
    path = make_dataset(tmp_path / "data", kind)
    name = "image" if kind == "columns" else "tokens"

    def first(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        found = {"first": int(sample[name].reshape(-1)[0]), "drawn": rng.random()}
        sample[name][...] = 0  # of its own copy
        return found

    options: dict[str, Any] = {"batch_size": 4, "return_ids": True, "rank": 0, "world_size": 1}
    with (
        StreamingLoader(path, **options) as plain,
        StreamingLoader(path, transform=first, **options) as loader,
    ):
        for batch, stored in zip(islice(batches(loader), 30), batches(plain), strict=False):
            assert torch.equal(batch["sample_id"], stored["sample_id"])
            assert torch.equal(batch["first"], stored[name].reshape(4, -1)[:, 0])
    assert_exact_resume(lambda: closing(StreamingLoader(path, transform=first, **options)), steps=STEPS)


@kinds
@pytest.mark.parametrize("ranks", [1, 4])
def test_padding_has_the_form_of_samples(places: dict[str, Any], kind: str, ranks: int) -> None:
    """Of 23 samples the last batch of four ranks has three, so that one rank has padding only."""
    size = 5 if ranks == 4 else 6
    for rank in range(ranks):
        more = {"tail": "pad", "batch_size": size, "rank": rank, "world_size": ranks}
        with closing(make(places["local"], kind, **more)) as loader:
            *_, before, last = list(loader)
            state = saved(loader)
        assert last["is_padding"].any()
        forms = [
            {name: (v.dtype, v.shape[1:]) if isinstance(v, torch.Tensor) else list for name, v in b.items()}
            for b in (before, last)
        ]
        assert forms[0] == forms[1]
        assert not last["image"][last["is_padding"]].any()
        assert [key is None for key in last["key"]] == last["is_padding"].tolist()
        with closing(make(places["local"], kind, **more)) as loader:  # a run that begins with the last batch
            loader.load_state_dict(state)
            loader.seek((len(last["key"]) * ranks) * ((SAMPLES - 1) // (size * ranks)))
            assert_equal(next(iter(loader)), last, f"rank {rank}")


def test_prefetching_counts_what_lists_hold(places: dict[str, Any]) -> None:
    """Decoded images are most of a batch, and come as lists."""
    image = Image.new("RGB", (20, 10))
    assert held_bytes([image, np.zeros(5, np.int16), torch.zeros(3), "abcd", b"ab", {"a": (1, None)}]) == 628
    more = {"transform": None, "decode": "rgb8", "columns": ["png"], "prefetch_bytes": 1, "return_ids": False}
    with closing(make(places["local"], "globals", **more)) as loader:
        groups = loader.groups(WHOLE)
        group = next(groups)
        assert group.bytes == sum(image.nbytes for image in group.fields["png"][0]) > 0
        groups.close()


# Functions that make the batch.


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "sum": sum(sample["drawn"].sum() for sample in samples) + torch.rand(()),
        "keys": tuple(sample["key"] for sample in samples),
        "sample_id": torch.tensor([sample["sample_id"] for sample in samples]),
    }


def collate_by_generator(samples: list[dict[str, Any]], rng: np.random.Generator) -> dict[str, Any]:
    return {"keys": [sample["key"] for sample in samples], "drawn": rng.random()}


@pytest.mark.sampled(2)
@kinds
@pytest.mark.parametrize("function", [collate, collate_by_generator])
def test_collate_fn_makes_the_batch(places: dict[str, Any], kind: str, function: Any) -> None:
    assert_exact_resume(
        lambda: closing(make(places["local"], kind, collate_fn=function, threads=2)), steps=STEPS
    )
    with closing(make(places["local"], kind, collate_fn=function)) as loader:
        expected = [batch for batch, _ in run(loader, STEPS)]
    for workers in (0, 2):
        with closing(make(places["local"], kind, workers, collate_fn=function)) as loader:
            for batch, wanted in zip(islice(batches(loader), STEPS), expected, strict=True):
                assert_equal(batch, wanted, f"{workers} workers")


def test_collate_fn_gets_decoded_samples_without_a_transform(places: dict[str, Any]) -> None:
    def numbers(samples: list[dict[str, Any]], rng: object) -> list[tuple[int, int, int]]:
        return [(s["json"]["number"], s["sample_id"], s["cls"]) for s in samples]

    with closing(make(places["local"], "globals", transform=None, collate_fn=numbers)) as loader:
        for batch in loader:
            assert all(number == row and number % 10 == label for number, row, label in batch)


def test_collate_fn_cannot_get_padding_nor_names(places: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="padding, which is no sample"):
        make(places["local"], "generator", collate_fn=collate, tail="pad")
    with pytest.raises(ValueError, match="without rename"):
        make(places["local"], "generator", collate_fn=collate, rename={"key": "k"})


def test_the_data_loader_has_no_second_meaning_of_collate_fn(places: dict[str, Any]) -> None:
    dataset = StreamingDataset(places["local"], **arguments("generator"))
    with pytest.raises(TypeError, match="give it to the StreamingDataset"):
        StreamingDataLoader(dataset, collate_fn=unchanged)  # type: ignore[call-arg]
    dataset.close()


# Errors.


class Failing:
    """Does `what` to the sample with the number 8."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> Any:
        good = {"image": np.zeros((2, 2), np.uint8), "text": "a"}
        if sample["json"]["number"] != 8:
            return good
        if self.what == "stop":
            raise StopIteration
        if self.what == "key error":
            return sample["jpg"]
        return {
            "none": None,
            "generator": (value for value in good.items()),
            "list": [good],
            "fewer keys": {"text": "a"},
            "other keys": {"image": good["image"], "label": 3, "text": "b"},
            "other shape": good | {"image": np.zeros((2, 3), np.uint8)},
            "other dtype": good | {"image": np.zeros((2, 2), np.float32)},
            "list for array": good | {"image": [[0, 0], [0, 0]]},
            "array for text": good | {"text": np.zeros(3)},
            "odd key": good | {3: 4},
            "large": good | {"image": 1 << 70},
            "bfloat16": good | {"image": torch.zeros(2, dtype=torch.bfloat16)},
        }[self.what]


WORDS = {
    "stop": "transform raised StopIteration",
    "key error": "transform raised KeyError: 'jpg'; Stream(path, exclude=[8]) leaves this row out",
    "none": "not NoneType (it cannot leave samples out: Stream(path, exclude=[8])",
    "generator": "must return a sample, a dict {key: value}, not generator",
    "list": "not list",
    "fewer keys": "returned the keys",
    "other keys": "returned the keys",
    "other shape": "'image' is uint8[2, ",
    "other dtype": "'image' is ",
    "list for array": "no array or number",
    "array for text": "no array or number",
    "odd key": "a key 3, not a string",
    "large": "does not fit 64 bits",
    "bfloat16": "cannot be stacked",
}


@pytest.mark.parametrize("what", WORDS)
@pytest.mark.parametrize(("workers", "threads"), [(-1, 0), (-1, 3), (2, 0)])
def test_an_error_names_the_sample_where_its_batch_was_due(
    places: dict[str, Any], what: str, workers: int, threads: int
) -> None:
    if workers > 0 and what not in ("stop", "none", "other shape"):
        return  # the same code as without workers: a few suffice
    with closing(make(places["local"], "generator", columns=["__key__", "json"], transform=None)) as loader:
        due = next(n for n, batch in enumerate(loader) if 8 in batch["sample_id"])
    more = {"columns": ["__key__", "json"], "transform": Failing(what), "threads": threads}
    with closing(make(places["local"], "generator", workers, **more)) as loader:
        iterator = iter(loader)
        assert len(list(islice(iterator, due))) == due
        with pytest.raises(TransformError, match=re.escape(WORDS[what])) as caught:
            next(iterator)
    if what not in ("fewer keys", "other keys", "other shape", "other dtype"):  # which name two samples
        assert re.search(r"part-003\.tar: sample 0\b", str(caught.value)) or "no array" in WORDS[what]
    assert "part-" in str(caught.value)


def test_following_the_advice_of_an_error_continues_the_run(places: dict[str, Any]) -> None:
    with closing(make(places["local"], "generator", transform=Failing("none"))) as loader:
        state, error = saved(loader), ""
        try:
            for _ in loader:
                state = saved(loader)
        except TransformError as caught:
            error = str(caught)
    row = int(cast(re.Match[str], re.search(r"exclude=\[(\d+)\]", error))[1])
    streams = [Stream(places["local"], exclude=[row])]
    with closing(make(streams, "generator", transform=Failing("none"))) as loader:
        loader.load_state_dict(state, on_mismatch="fork")
        assert len(run(loader, STEPS)) == STEPS


def test_an_error_of_collate_fn_names_its_samples(places: dict[str, Any]) -> None:
    def fails(samples: list[Any]) -> None:
        raise ValueError("no batch")

    with closing(make(places["local"], "generator", collate_fn=fails)) as loader:
        iterator = iter(loader)
        with pytest.raises(TransformError, match=r"ValueError: no batch; its samples: .*tar: sample"):
            next(iterator)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"transform": 3}, "transform must be a function, not 3"),
        ({"transform": by_globals, "labels": True}, "labels describes stored tokens: make it in transform"),
        ({"collate_fn": collate, "cu_seqlens": True}, "cu_seqlens describes stored tokens"),
        ({"threads": -1}, "threads must be from 0 to"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    places: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        StreamingLoader(places["local"], batch_size=2, **grouped(options))


def test_a_key_of_an_option_is_not_silently_replaced(places: dict[str, Any]) -> None:
    def named(sample: dict[str, Any], rng: object) -> dict[str, Any]:
        return {"sample_id": 3}

    for more, error in (({}, ValueError), ({"collate_fn": collate}, TransformError)):
        with closing(make(places["local"], "generator", transform=named, **more)) as loader:
            iterator = iter(loader)
            with pytest.raises(error, match="sample_id"):
                next(iterator)


@kinds
def test_classes_in_balance_resume_exactly_too(places: dict[str, Any], kind: str) -> None:
    streams = balanced_streams(places["local"], "cls", weights={1: 2, 2: 3, 7: 1})

    def labels(sample: dict[str, Any], *rng: np.random.Generator) -> dict[str, Any]:
        function: Any = FUNCTIONS[kind]
        return {**function(sample, *rng), "label": sample["cls"]}

    function: Any = labels if kind == "globals" else lambda sample, rng: labels(sample, rng)
    assert_exact_resume(lambda: closing(make(streams, kind, transform=function)), steps=STEPS)
    with closing(make(streams, kind, transform=function)) as loader:
        for batch in islice(batches(loader), STEPS):
            assert sorted(batch["label"].tolist()) == [1, 1, 2, 2, 2, 7]


# Decoding.


@pytest.mark.parametrize("threads", [0, 3])
def test_decode_is_that_of_open(places: dict[str, Any], threads: int) -> None:
    for decode, of in (("basic", bytes), ("rgb8", np.ndarray), (True, object), (False, bytes)):
        columns = ["__key__", "png", "cls"]
        more = {"transform": None, "decode": decode, "threads": threads, "columns": columns}
        with closing(make(places["local"], "generator", **more)) as loader:
            rows = list(loader)
        assert all(isinstance(value, of) for batch in rows for value in batch["png"])
        assert len({s for batch in rows for s in batch["sample_id"].tolist()}) == SAMPLES


def test_an_open_dataset_has_its_own_decode(places: dict[str, Any]) -> None:
    import shardkit as sk

    dataset = sk.open(places["local"], decode="basic")
    with pytest.raises(ValueError, match="was opened with decode='basic'"):
        make(dataset, "generator", decode="rgb8")
    with closing(make(dataset, "generator", transform=None, decode="basic")) as loader:
        assert isinstance(next(iter(loader))["png"][0], bytes)
