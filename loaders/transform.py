"""Applies `transform` to samples and `collate_fn` to batches of them; their random numbers resume exactly.

A sample is a dict {column: value}, as `shardkit.open(path)[row]` gives it. Its random numbers come from a
seed that is a function of the loader's seed and of the sample's position in the run, counted over all ranks
and epochs, and of nothing else: not of ranks, workers, threads, batch size, prefetching or restarts. In its
second epoch a sample has another position, so it is augmented differently. The seed of `collate_fn` is that
of the smallest position in its batch. There are two kinds of functions:

    f(sample, rng)   draws from `rng`, a NumPy Generator made from the seed; runs in any thread, ahead of the
                     loop
    f(sample)        may draw from the global generators of Python, NumPy and torch (CPU), as torchvision's
                     transforms do; they are seeded for each sample, and set back after each batch

Global generators belong to the training loop, which may draw from them (for dropout, for example) while a
thread prepares batches. So functions of the second kind run only in the thread that iterates over the loader,
inside `next`, where the loop waits. In the worker processes of a `StreamingDataLoader` this costs nothing.
Saving and setting back take 90 microseconds a batch, a sample's own generator or seeding 30 to 40.

What a transform returns is the sample. Numbers, arrays and tensors are always stacked, and must have one
shape and dtype in a batch. All other values (strings, images of Pillow, lists, None) are always lists. So the
type of a key depends on the type of its values, never on which samples are in a batch. Arrays are copied into
the batch as soon as a transform returns them, so it may use its memory again; in a worker process, the batch
is in the memory that it shares with the loop.
"""

from __future__ import annotations

import hashlib
import inspect
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.errors import ShardkitError, TransformError
from shardkit.loaders.config import LoaderConfig
from shardkit.loaders.gather import OutputMemory
from shardkit.loaders.placement import dataloader_workers
from shardkit.loaders.streams import Columns, ReadRows, Streams

Sample = dict[str, Any]

_Array = npt.NDArray[np.generic]
_Layout = dict[str, tuple[np.dtype[np.generic], tuple[int, ...]] | None]
"""For each key the dtype and shape of its arrays; None if its values are not stacked."""

_STACKED_KINDS = "biufc"  # NumPy kinds of the arrays that are stacked
_NUMBERS: Mapping[type, str] = {bool: "bool", int: "int64", float: "float64"}
_PIECES_PER_THREAD = 4  # samples take different times to decode, so that each thread gets several pieces


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """Planned samples, of one rank and without padding: how to read them, where and when they are."""

    read: ReadRows
    streams: Streams
    shard: npt.NDArray[np.int32]  # numbered as in `streams`
    row: npt.NDArray[np.int64]  # in the shard
    position: npt.NDArray[np.int64]

    def where(self, number: int) -> str:
        """Return a text that names the file and row of planned sample `number`."""
        shard = int(self.shard[number])
        return f"{self.streams.where(shard)}: sample {int(self.row[number])}"

    def advice(self, number: int) -> str:
        """Return a text that says how to leave planned sample `number` out."""
        return self.streams.exclusion_advice(int(self.shard[number]), int(self.row[number]))


class SampleTransform:
    """Makes columns and batches from planned samples, with the functions and threads of a config."""

    def __init__(self, config: LoaderConfig, seed: int, memory: OutputMemory) -> None:
        """`seed`: the loader's. `memory`: memory that stacked arrays are written to."""
        self._transform = None if config.transform is None else _Function("transform", config.transform)
        self._collate = None if config.collate_fn is None else _Function("collate_fn", config.collate_fn)
        self._seed, self._memory = seed, memory
        self._threads = config.threads
        self._pool: ThreadPoolExecutor | None = None
        self._loop = threading.get_ident()
        if self.needs_loop and find_spec("torch") is not None:
            import torch  # noqa: F401  # now, so that no first call of a function imports it unseeded

    @property
    def transforms(self) -> bool:
        """Whether there is a `transform`."""
        return self._transform is not None

    @property
    def collates(self) -> bool:
        """Whether `batch` makes the batches, because there is a `collate_fn`."""
        return self._collate is not None

    @property
    def needs_loop(self) -> bool:
        """Whether a function may draw from global generators, so that it must run in the loop's thread."""
        functions = (self._transform, self._collate)
        return any(function is not None and not function.takes_generator for function in functions)

    def columns(self, rows: PlannedRows, low: int, high: int) -> Columns:
        """Return the columns of planned samples `low` to `high` - 1, transformed if there is a transform."""
        if self._transform is None:
            return self._read(rows, low, high)
        stack = _Stack(high - low, self._memory)

        def put(number: int, sample: Sample) -> None:
            try:
                stack.put(number, sample)
            except ValueError as error:
                raise TransformError(f"{rows.where(low + number)}: {error}") from error

        self._each(rows, low, high, put)
        return stack.columns(lambda number: rows.where(low + number))

    def batch(self, rows: PlannedRows, low: int, high: int, fields: Columns) -> Any:
        """Return what `collate_fn` makes of planned samples `low` to `high` - 1.

        `fields` are added to the samples, one entry each.
        """
        assert self._collate is not None
        samples: list[Sample] = [{}] * (high - low)
        self._each(rows, low, high, samples.__setitem__)
        for name, values in fields.items():
            for number, sample in enumerate(samples):
                if name in sample:
                    problem = f"has a key {name!r}, which an option of the loader adds: name it differently"
                    raise TransformError(f"{rows.where(low + number)} {problem}")
                sample[name] = _plain(values[number])
        seed = _seed_of(self._seed, int(rows.position[low:high].min()), b"shardkit.batch.1")
        with self._generators(self._collate):
            try:
                return self._collate(samples, seed)
            except ShardkitError:
                raise
            except Exception as error:
                last = rows.where(high - 1)
                problem = f"collate_fn raised {type(error).__name__}: {error}"
                raise TransformError(f"{problem}; its samples: {rows.where(low)}, …, {last}") from error

    def _read(self, rows: PlannedRows, low: int, high: int) -> Columns:
        """Read samples without a transform, in pieces by several threads if there are threads."""
        pieces = min(high - low, self._threads * _PIECES_PER_THREAD)
        if pieces < 2:
            return rows.read(low, high)
        edges = np.linspace(low, high, pieces + 1).astype(int).tolist()
        found = list(self._in_threads(rows.read, edges[:-1], edges[1:]))
        return {name: _joined([part[name] for part in found]) for name in found[0]}

    def _each(self, rows: PlannedRows, low: int, high: int, put: Callable[[int, Sample], None]) -> None:
        """Read and transform samples, and pass each to `put` with its number from `low`."""
        function = self._transform
        # By shard, so that a decompressed shard is not closed and opened again within a batch.
        numbers = (np.argsort(rows.shard[low:high], kind="stable") + low).tolist()

        def read(number: int) -> Sample:
            columns = rows.read(number, number + 1)
            return {name: _plain(values[0]) for name, values in columns.items()}

        def finish(number: int, sample: Sample) -> None:
            if function is not None:
                sample = self._transformed(function, rows, number, sample)
            put(number - low, sample)

        if function is None or function.takes_generator:
            for _ in self._in_threads(lambda number: finish(number, read(number)), numbers):
                pass
            return
        samples = self._in_threads(read, numbers)
        with self._generators(function):
            for number, sample in zip(numbers, samples, strict=True):
                finish(number, sample)

    def _transformed(self, function: _Function, rows: PlannedRows, number: int, sample: Sample) -> Sample:
        seed = _seed_of(self._seed, int(rows.position[number]), b"shardkit.sample1")
        try:
            result = function(sample, seed)
        except Exception as error:
            problem = f"transform raised {type(error).__name__}: {error}"
            raise TransformError(f"{rows.where(number)}: {problem}; {rows.advice(number)}") from error
        if not isinstance(result, dict):
            problem = f"transform must return a sample, a dict {{key: value}}, not {type(result).__name__}"
            if result is None:
                problem += f" (it cannot leave samples out: {rows.advice(number)})"
            raise TransformError(f"{rows.where(number)}: {problem}")
        if wrong := [key for key in result if not isinstance(key, str)]:
            raise TransformError(f"{rows.where(number)}: transform returned a key {wrong[0]!r}, not a string")
        return result

    def _in_threads(self, work: Callable[..., Any], *arguments: Iterable[Any]) -> Iterator[Any]:
        """Return an iterator like `map`, which calls `work` in the threads if there are any."""
        if not self._threads:
            return map(work, *arguments)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="shardkit-sample")
        return self._pool.map(work, *arguments)

    @contextmanager
    def _generators(self, function: _Function) -> Iterator[None]:
        """Set global generators back at the end of the block, if `function` may draw from them."""
        if function.takes_generator:
            yield
            return
        if threading.get_ident() != self._loop and not dataloader_workers():
            raise RuntimeError(
                f"{function.name} has one parameter, so it may draw from global random generators, which the "
                "training loop uses too: it cannot run in another thread than the one that called "
                f"iter(loader). Give it a second parameter, {function.name}(…, rng), and let it draw from "
                "that, or use the worker processes of a StreamingDataLoader"
            )
        with _global_generators():
            yield


class _Function:
    """A function of the user, with the way in which it takes random numbers."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self._function = name, function
        self.takes_generator = takes_generator(function)

    def __call__(self, value: Any, seed: int) -> Any:
        """Call the function, with a generator made from `seed` or after seeding the global generators."""
        if self.takes_generator:
            return self._function(value, np.random.Generator(np.random.PCG64(seed)))
        random.seed(seed)
        np.random.seed(np.frombuffer(seed.to_bytes(_SEED_BYTES, "little"), "<u4"))
        if (torch := sys.modules.get("torch")) is not None:
            torch.default_generator.manual_seed(seed & ((1 << 63) - 1))
        return self._function(value)


def takes_generator(function: Callable[..., Any]) -> bool:
    """Return whether a function draws from a generator that it is given: its second parameter.

    That is a positional parameter without a default, or called `rng`. Of a torch module, `forward` counts.
    """
    target = function if inspect.isroutine(function) else getattr(function, "forward", function)
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):  # some functions of C extensions have no signature
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 1 and (
        positional[1].default is inspect.Parameter.empty or positional[1].name == "rng"
    )


_SEED_BYTES = 16


def _seed_of(seed: int, position: int, purpose: bytes) -> int:
    """Return the seed, of 128 bits, of the sample or batch at `position` in a run with `seed`."""
    text = f"{seed}:{position}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=_SEED_BYTES, person=purpose).digest(), "little")


_generators_in_use = threading.RLock()  # held by the thread in which transforms use the global generators


@contextmanager
def _global_generators() -> Iterator[None]:
    """Set the global generators of Python, NumPy and torch (CPU) back at the end of the block."""
    torch = sys.modules.get("torch")
    with _generators_in_use:
        of_python, of_numpy = random.getstate(), np.random.get_state(legacy=False)
        of_torch = None if torch is None else torch.get_rng_state()
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
            if torch is not None:
                torch.set_rng_state(of_torch)


class _Stack:
    """The columns of `count` samples, which are put in one by one, in any order and by several threads."""

    def __init__(self, count: int, memory: OutputMemory) -> None:
        self._layouts: list[_Layout] = [{}] * count
        self._memory = memory
        self._allocating = threading.Lock()
        self._layout: _Layout | None = None  # of the first sample that came
        self._columns: Columns = {}

    def put(self, number: int, sample: Sample) -> None:
        """Copy a sample's arrays and keep its other values. Differences between samples are found later.

        Raises ValueError for a number or tensor that cannot be stacked.
        """
        arrays = {key: _as_array(key, value) for key, value in sample.items()}
        layout: _Layout = {k: None if a is None else (a.dtype, a.shape) for k, a in arrays.items()}
        self._layouts[number] = layout
        with self._allocating:
            if self._layout is None:
                self._layout = layout
                for key, found in layout.items():
                    self._columns[key] = self._allocated(found)
        if layout == self._layout:
            for key, array in arrays.items():
                self._columns[key][number] = sample[key] if array is None else array

    def columns(self, where: Callable[[int], str]) -> Columns:
        """Return the columns. Raises TransformError, which names samples by `where`, if samples differ."""
        first = self._layouts[0] if self._layouts else {}
        for number, layout in enumerate(self._layouts):
            if layout != first:
                raise TransformError(f"{where(number)}: {_difference(layout, first)} ({where(0)}); {_ADVICE}")
        return {key: self._columns[key] for key in first}

    def _allocated(self, found: tuple[np.dtype[np.generic], tuple[int, ...]] | None) -> _Array | list[object]:
        count = len(self._layouts)
        if found is None:
            return [None] * count
        dtype, shape = found
        return self._memory.lend((count, *shape), dtype)


_ADVICE = (
    "give all samples the same keys, and arrays of one shape and dtype, or make batches with collate_fn=, "
    "which gets the list of samples"
)


def _difference(layout: _Layout, first: _Layout) -> str:
    """Return in words how a sample's layout differs from that of the first sample of its batch."""
    if layout.keys() != first.keys():
        return f"transform returned the keys {', '.join(layout)}, but {', '.join(first)} for another sample"
    key = next(key for key in layout if layout[key] != first[key])
    mine, other = (
        "no array or number" if found is None else f"{found[0].name}{list(found[1])}"
        for found in (layout[key], first[key])
    )
    return f"{key!r} is {mine}, but {other} in another sample of the batch"


def _as_array(key: str, value: object) -> _Array | None:
    """Return a value as an array if it is a number, an array of numbers or a tensor on the CPU; else None."""
    if (dtype := _NUMBERS.get(type(value))) is not None:
        try:
            return np.array(value, dtype)
        except OverflowError:
            raise ValueError(f"the value {value} of {key!r} does not fit 64 bits") from None
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        if array.dtype.kind not in _STACKED_KINDS:
            return None
        return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return None
    try:
        found: _Array = value.detach().numpy()
    except (TypeError, RuntimeError) as error:  # on a GPU, sparse, or of a dtype that NumPy lacks
        problem = f"tensor {key!r} ({value.dtype}, {value.device}) cannot be stacked: {error}"
        raise ValueError(f"{problem}; return a dense tensor on the CPU, of a dtype that NumPy has") from error
    return found


def _plain(value: Any) -> Any:
    """Return an entry of a column as samples have it: a Python number instead of a NumPy scalar."""
    return value.item() if isinstance(value, np.generic) else value


def _joined(parts: list[_Array | list[object]]) -> _Array | list[object]:
    if isinstance(parts[0], list):
        return [value for part in parts for value in part]
    return np.concatenate(parts)  # type: ignore[arg-type]
