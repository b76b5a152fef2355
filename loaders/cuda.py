"""`CudaPrefetcher`: copies batches to a GPU before the training loop requests them.

A thread advances the loader, moves each batch to pinned memory and starts its copy on a separate CUDA stream,
`depth - 1` batches ahead of the loop. The loop's CUDA stream waits for the copy on the GPU; the loop's thread
waits only for a batch whose copy has not started. A ready batch is delivered even if the next one is late or
fails.

Each batch is stored with the loader's state: `state_dict` returns the state of the last delivered batch.
No batch is lost after an error or interrupt. An error of the loader is raised after the batches before it. A
batch whose copy fails (for example, the GPU is out of memory) is copied again at the next `next`. An
interrupt (Ctrl-C, or a signal handler that raises) reaches only the loop's thread, which takes a batch by
plain assignments: Python handles no signal between them, so the batch is either delivered or still queued.

torch reuses pinned and device memory and tracks which streams still need it (`record_stream`), so a batch may
be kept for any length of time. Tensors that are on a GPU already are copied or delivered after the work that
produced them: work queued on the current stream of the thread that runs the loader, and work queued on the
loop's stream before the iteration began.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any, Protocol, Self, TypeGuard, cast, runtime_checkable

from shardkit.errors import naming_extras

with naming_extras("CudaPrefetcher"):
    import torch

from shardkit.loaders.batch import Batch
from shardkit.loaders.metrics import LoaderStats, Telemetry
from shardkit.loaders.profiled import profiled

MAX_DEPTH = 64  # maximum `depth` of a CudaPrefetcher: each batch ahead of the loop takes device memory

_CHECK_SECONDS = 1.0  # interval at which a waiting loop checks that the copying thread is alive

_JOIN_SECONDS = 5.0  # longest wait at interpreter exit for a copying thread that is reading a batch

State = dict[str, object]


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> State: ...
    def load_state_dict(self, state: Mapping[str, object]) -> None: ...


@dataclass(frozen=True, slots=True)
class Copied:
    """A batch whose copy to the device has started, its tensors there, and the event at the copy's end."""

    batch: Batch
    tensors: tuple[torch.Tensor, ...] = ()
    done: Any = None  # a torch.cuda.Event


class Copies(Protocol):
    """Moves batches to a device."""

    def begin(self) -> None:
        """Prepare an iteration. Called in the loop's thread before the first batch is requested."""

    def enter(self) -> None:
        """Prepare a copying thread; called at its start."""

    def start(self, batch: Batch) -> Copied:
        """Start the copy of a batch; called in the copying thread."""

    def finish(self, copied: Copied) -> None:
        """Make a batch usable on the loop's CUDA stream; called in the loop's thread, possibly twice."""

    def stalled_seconds(self) -> float:
        """Return how long the loop's CUDA stream has waited for copies so far; may lack the latest ones."""


class HostCopies:
    """Leaves batches in host memory."""

    def begin(self) -> None:
        pass

    def enter(self) -> None:
        pass

    def start(self, batch: Batch) -> Copied:
        return Copied(batch)

    def finish(self, copied: Copied) -> None:
        pass

    def stalled_seconds(self) -> float:
        return 0.0


class CudaCopies:
    """Copies batches to a GPU on a separate CUDA stream."""

    def __init__(self, device: torch.device, *, cuda: Any = torch.cuda) -> None:
        """`cuda`: `torch.cuda`, or a replacement in tests."""
        self._device, self._cuda = device, cuda
        self._stream = cuda.Stream(device)
        self._stalls: deque[tuple[Any, Any]] = deque()  # events before and after waits for copies
        self._stalled_seconds = 0.0

    def begin(self) -> None:
        self._stream.wait_stream(self._cuda.current_stream(self._device))

    def enter(self) -> None:
        self._cuda.set_device(self._device)

    def start(self, batch: Batch) -> Copied:
        found: list[torch.Tensor] = []
        _each_tensor(batch, found.append)
        for device in {tensor.device for tensor in found if tensor.is_cuda}:
            # Before the `with` below, in which the current stream is the stream of the copies.
            self._stream.wait_stream(self._cuda.current_stream(device))
        moved: list[torch.Tensor] = []

        def move(tensor: torch.Tensor) -> torch.Tensor:
            moved.append(self._moved(tensor))
            return moved[-1]

        with profiled("shardkit.copy"), self._cuda.stream(self._stream):
            return Copied(_each_tensor(batch, move), tuple(moved), self._stream.record_event())

    def finish(self, copied: Copied) -> None:
        stream = self._cuda.current_stream(self._device)
        if copied.done is None or copied.done.query():  # the GPU will not wait: there is nothing to measure
            stream.wait_event(copied.done)
        else:
            before, after = (self._cuda.Event(enable_timing=True) for _ in range(2))
            before.record(stream)
            stream.wait_event(copied.done)
            after.record(stream)
            self._stalls.append((before, after))
            if len(self._stalls) >= MAX_DEPTH:
                self.stalled_seconds()
        for tensor in copied.tensors:
            tensor.record_stream(stream)

    def stalled_seconds(self) -> float:
        while self._stalls and self._stalls[0][1].query():
            before, after = self._stalls.popleft()
            self._stalled_seconds += before.elapsed_time(after) / 1000
        return self._stalled_seconds

    def _moved(self, value: torch.Tensor) -> torch.Tensor:
        if value.device == self._device:
            return value
        if value.is_cuda:
            value.record_stream(self._stream)  # torch must not reuse the memory before the copy is done
        elif not value.is_pinned():
            value = value.pin_memory()
        return value.to(self._device, non_blocking=True)


class CudaPrefetcher:
    """Iterates over the batches of `loader` with their tensors on `device`; other values are unchanged.

    `loader`: a `StreamingLoader`, a DataLoader, or any iterable of dicts, lists or tuples of tensors.
    `device`: default: the current GPU, or the CPU (without copies) if there is no GPU. `depth`: number of
    batches on the device or being copied, delivered ones not counted; 1 copies each batch when it is
    requested. `copies` replaces the copying in tests.

    One `for` loop is one `for` loop of the loader. After leaving it early, the next one continues with the
    next batch. An iterator stays usable after an error. A thread advances the loader: change its weights only
    inside `with prefetcher.paused():`, and its position only after `close()`.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        device: torch.device | str | None = None,
        *,
        depth: int = 2,
        copies: Copies | None = None,
    ) -> None:
        if not 1 <= depth <= MAX_DEPTH:
            raise ValueError(f"depth must be from 1 to {MAX_DEPTH}, not {depth}")
        self.loader = loader
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self.device.type not in ("cuda", "cpu"):
            raise ValueError(f"device must be a CUDA device or the CPU, not {self.device}")
        if self.device == torch.device("cuda"):  # fix the index now: the current device may change later
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._copies = copies or (CudaCopies(self.device) if self.device.type == "cuda" else HostCopies())
        self._depth = depth
        self._ahead: _Ahead | None = None
        self._state: State | None = None  # state of the loader at the last delivered batch
        self._length: int | None = None  # length of the loader when the iteration began
        self._iteration: object = None
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._telemetry = Telemetry(0)

    def __iter__(self) -> Iterator[Batch]:
        self._iteration = token = object()
        self._telemetry.begin()
        return _Iteration(self, token)

    def __len__(self) -> int:
        """Return the loader's length when the iteration began; by now the loader may be an epoch ahead."""
        return len(cast(Sized, self.loader)) if self._length is None else self._length

    def stats(self) -> LoaderStats:
        """Return the waits of the loop for batches and for copies, with what the loader's `stats()` counts.

        Use these, not the loader's own: its waits are those of the copying thread. The wait for a copy is
        that of the loop for its start (pinning memory), and that of the GPU for its end.
        """
        own = self._telemetry.stats()
        own = replace(own, copy_seconds=own.copy_seconds + self._copies.stalled_seconds())
        counted = self.loader.stats() if hasattr(self.loader, "stats") else None
        if not isinstance(counted, LoaderStats):
            return own
        names = ("ranks", "sample_tokens", "cache", "store", "balance")
        inside = {name: getattr(counted, name) for name in names}
        return replace(own, samples=own.steps * counted.samples // max(1, counted.steps), **inside)

    def state_dict(self) -> State:
        """Return the loader's state at the last delivered batch; raise TypeError if it has no state."""
        state = _state(self.loader) if self._state is None else self._state
        if state is None:
            raise TypeError(f"{type(self.loader).__name__} has no state_dict and load_state_dict")
        return state

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue where `state` was taken, after waiting for the batch that is being read."""
        if not isinstance(self.loader, _Stateful):
            raise TypeError(f"{type(self.loader).__name__} has no state_dict and load_state_dict")
        self.close()
        self._iteration = self._state = None
        self.loader.load_state_dict(state)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the copying thread inside a `with` block, so that the loader may be changed there.

        Waits until the batch that is being read is complete.
        """
        if self._ahead is None:
            yield
            return
        with self._ahead.turn:
            yield

    def close(self) -> None:
        """End the thread and drop its ready batches; the loader's own position stays ahead of the loop."""
        if (ahead := self._ahead) is not None:
            ahead.stop()
        self._ahead = self._length = None

    def _started(self) -> _Ahead:
        """Return the running `_Ahead`; if there is none, start one with a new iterator of the loader."""
        if (ahead := self._ahead) is not None and ahead.process == os.getpid():
            return ahead
        self._state = _state(self.loader)
        self._length = len(self.loader) if _has_length(self.loader) else None
        self._copies.begin()
        ahead = _Ahead(iter(self.loader), self.loader, self._copies, self._depth)
        if self._finalizer is not None:
            self._finalizer.detach()  # it belongs to the previous iterator, which has ended
        self._finalizer = weakref.finalize(self, ahead.stop, _JOIN_SECONDS)
        self._ahead = ahead
        return ahead


class _Iteration:
    """The iterator of one `for` loop over a prefetcher."""

    def __init__(self, prefetcher: CudaPrefetcher, token: object) -> None:
        self._prefetcher, self._token = prefetcher, token
        self._ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        owner = self._prefetcher
        if self._ended:
            raise StopIteration
        if owner._iteration is not self._token:
            raise RuntimeError("stale iterator: the prefetcher was re-iterated, or had a state loaded")
        ahead = owner._started()
        began = time.perf_counter()
        with profiled("shardkit.wait"):
            item = ahead.wait(ahead.taken + 1)
        if (copied := item.copied) is not None:
            waited = time.perf_counter() - began
            copying = min(waited, item.copy_seconds)  # the copy came last, so the loop waited for it last
            owner._copies.finish(copied)
            owner._telemetry.step(waited - copying, ahead.ready, copying)
            ahead.want(item.number)  # after `finish`: the thread that it wakes competes for the GIL
            batch = copied.batch
            # From here to `return` nothing is called, so no signal handler runs and the batch is not lost.
            owner._state = item.state
            ahead.taken = item.number
            item.copied = copied = None
            return batch
        ahead.taken, ahead.thread = item.number, None
        if item.is_last:
            self._ended = item.error is None
            owner._ahead = owner._length = None
        if item.error is None:
            owner._telemetry.end()
            raise StopIteration
        try:
            raise item.error
        finally:
            del item  # avoids a reference cycle: the error's traceback refers to this frame


@dataclass(slots=True)
class _Item:
    """A result of the thread: a batch with the loader's state, an error, or neither at the loader's end."""

    number: int
    state: State | None = None
    copied: Copied | None = None
    copy_seconds: float = 0.0  # duration of `Copies.start`
    error: BaseException | None = None
    is_last: bool = False  # whether this iterator of the loader has ended


class _Ahead:
    """The items of one iterator of the loader, made by a thread and numbered from 1.

    The thread appends to `_ready`, and the loop removes the items that it has taken. Each wakes the other
    through a queue, whose entries are only wake-up signals: both check the items again before they wait, so
    losing an entry in an interrupt does no harm. The thread ends at an error or at the end of the loader; the
    loop starts another.
    """

    def __init__(self, source: Iterator[Batch], loader: object, copies: Copies, depth: int) -> None:
        self._source, self._loader, self._copies, self._depth = source, loader, copies, depth
        self.taken = 0  # number of the last item that the loop has taken
        self.turn = threading.Lock()  # held while the loader is advanced
        self.process = os.getpid()
        self._wanted = self._made = 0
        self._ready: deque[_Item] = deque()
        self._pending: tuple[Batch, State | None] | None = None  # batch of the loader that is not copied yet
        self._is_waiting = self._is_stopped = False
        self._to_thread: SimpleQueue[None] = SimpleQueue()
        self._to_loop: SimpleQueue[None] = SimpleQueue()
        self._running = threading.Lock()  # held by the running thread; an accidental second one ends at once
        self.thread: threading.Thread | None = None

    @property
    def ready(self) -> int:
        """Number of items that are ready behind the one that the loop takes."""
        return max(0, len(self._ready) - 1)

    def wait(self, number: int) -> _Item:
        """Return item `number`, the first one that is not taken yet; wait until it is ready."""
        self._is_waiting = False
        ready = self._ready
        while True:
            while ready and ready[0].number < number:
                ready.popleft()
            if ready:
                return ready[0]
            self.want(number)
            if not self._running.locked() and (self.thread is None or not self.thread.is_alive()):
                if not ready:  # the thread may have appended an item just before it ended
                    # A daemon, so that it cannot keep the process alive.
                    self.thread = threading.Thread(target=self._run, name="shardkit-copy", daemon=True)
                    self.thread.start()
                continue
            self._is_waiting = True
            if not ready:
                with suppress(Empty):
                    self._to_loop.get(timeout=_CHECK_SECONDS)

    def want(self, number: int) -> None:
        """Let the thread make items up to `depth - 1` after item `number`."""
        self._wanted = number
        self._to_thread.put(None)

    def stop(self, join_seconds: float | None = None) -> None:
        """End the thread and wait for it. Safe to call twice, from the thread, and from a forked child."""
        self._is_stopped = True
        self._to_thread.put(None)
        thread = self.thread
        if thread is not None and self.process == os.getpid() and thread is not threading.current_thread():
            thread.join(join_seconds)

    def _run(self) -> None:
        if not self._running.acquire(blocking=False):
            return
        try:
            self._copies.enter()
            while not self._is_stopped:
                if self._made >= self._wanted + self._depth - 1:
                    self._to_thread.get()
                    continue
                item = self._make(self._made + 1)
                self._made = item.number
                self._ready.append(item)
                if self._is_waiting:
                    self._to_loop.put(None)
                if item.copied is None:
                    return
        finally:
            self._running.release()
            self._to_loop.put(None)

    def _make(self, number: int) -> _Item:
        if self._pending is None:
            try:
                with self.turn:
                    batch = next(self._source)
                    self._pending = batch, _state(self._loader)
            except StopIteration:
                return _Item(number, is_last=True)
            except BaseException as error:
                # An iterator that has raised cannot continue, but a new iterator of the loader may.
                return _Item(number, error=error, is_last=True)
        batch, state = self._pending
        began = time.perf_counter()
        try:
            copied = self._copies.start(batch)
        except BaseException as error:
            return _Item(number, error=error)
        self._pending = None
        return _Item(number, state, copied, time.perf_counter() - began)


def _each_tensor(value: Any, change: Callable[[torch.Tensor], object]) -> Any:
    """Return `value` with each tensor in its dicts, lists and tuples replaced by `change(tensor)`."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {name: _each_tensor(entry, change) for name, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_each_tensor(entry, change) for entry in value])
    return value


def _state(loader: object) -> State | None:
    return loader.state_dict() if isinstance(loader, _Stateful) else None


def _has_length(loader: object) -> TypeGuard[Sized]:
    """Return whether len() works; endless loaders define it but raise TypeError."""
    try:
        len(loader)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True
