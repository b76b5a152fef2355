"""`CudaPrefetcher`: batches on a GPU before the training loop asks for them.

While a step computes, the next batch is copied from pinned memory on a separate CUDA stream. The loop's
stream waits for the copy on the GPU; the loop's thread never waits. torch reuses pinned and device memory
and knows which streams still need it (`record_stream` registers the loop's), so a batch may be kept for any
length of time.

The loop's own thread advances the loader, `depth - 1` batches ahead of what the loop gets. The loader's state
is kept with each batch: `state_dict` is that of the batch handed out last. An error of the loader is raised
as many batches early.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Protocol, TypeGuard, cast, runtime_checkable

import torch

from shardkit.loaders.batch import Batch

__all__ = ["CudaPrefetcher"]

MAX_DEPTH = 64  # batches in flight; each takes device memory


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> dict[str, object]: ...
    def load_state_dict(self, state: Mapping[str, object]) -> None: ...


class CudaPrefetcher:
    """The batches of `loader`, their tensors on `device`; all other values as they are.

    `loader`: a `StreamingLoader`, a DataLoader, or anything that gives dicts. `device`: by default the GPU
    in use, or the CPU where there is none, to which nothing is copied. `depth`: batches on the device or
    on their way, those handed out not counted; 1: each is copied when it is asked for.

    One `for` is one of the loader's. Leaving it early and starting another continues with the next batch.
    """

    def __init__(
        self, loader: Iterable[Batch], device: torch.device | str | None = None, *, depth: int = 2
    ) -> None:
        if not 1 <= depth <= MAX_DEPTH:
            raise ValueError(f"depth must be from 1 to {MAX_DEPTH}, not {depth}")
        self.loader = loader
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self.device.type not in ("cuda", "cpu"):
            raise ValueError(f"device must be a CUDA device or the CPU, not {self.device}")
        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            if self.device == torch.device("cuda"):  # the one in use now, whichever is in use later
                self.device = torch.device("cuda", torch.cuda.current_device())
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._depth = depth
        self._source: Iterator[Batch] | None = None
        self._ready: deque[_Copied] = deque()
        self._state: dict[str, object] | None = None  # with the batch handed out last
        self._length: int | None = None  # of the loader, when the iteration began
        self._iteration: object = None

    def __iter__(self) -> Iterator[Batch]:
        self._iteration = object()
        return self._deliver(self._iteration)

    def __len__(self) -> int:
        """That of the loader, which may itself be an epoch ahead."""
        return len(cast(Sized, self.loader)) if self._length is None else self._length

    def state_dict(self) -> dict[str, object]:
        """The loader's state with the batch handed out last; TypeError if it has none."""
        state = self._loader_state() if self._state is None else self._state
        if state is None:
            raise TypeError(f"{type(self.loader).__name__} has no state_dict and load_state_dict")
        return state

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue where `state` was taken."""
        if not isinstance(self.loader, _Stateful):
            raise TypeError(f"{type(self.loader).__name__} has no state_dict and load_state_dict")
        self._end()
        self._iteration = self._state = None
        self.loader.load_state_dict(state)

    def _deliver(self, iteration: object) -> Iterator[Batch]:
        while True:
            if self._iteration is not iteration:
                raise RuntimeError("stale iterator: the prefetcher was re-iterated, or had a state loaded")
            self._fetch()
            if not self._ready:
                self._end()
                return
            copied = self._ready.popleft()
            self._state = copied.state
            yield self._handed_out(copied)

    def _fetch(self) -> None:
        """Start to copy batches until `depth` are on their way, or the loader has no more."""
        if self._source is None:
            if not self._ready:
                self._state = self._loader_state()
            self._length = len(self.loader) if _has_length(self.loader) else None
            self._source = iter(self.loader)
        try:
            while len(self._ready) < self._depth:
                self._ready.append(self._copied(next(self._source)))
        except StopIteration:
            self._source = iter(())
        except Exception:
            self._source = None  # an iterator that has raised is of no more use, the loader may be
            raise

    def _copied(self, batch: Batch) -> _Copied:
        state = self._loader_state()
        if self._stream is None:
            return _Copied(batch, state, None)
        with torch.cuda.stream(self._stream):
            moved = {name: self._moved(value) for name, value in batch.items()}
            return _Copied(moved, state, self._stream.record_event())

    def _moved(self, value: object) -> object:
        if not isinstance(value, torch.Tensor) or value.device == self.device:
            return value
        pinned = value if value.is_pinned() or value.is_cuda else value.pin_memory()
        return pinned.to(self.device, non_blocking=True)

    def _handed_out(self, copied: _Copied) -> Batch:
        """The batch, for the stream that the loop uses now."""
        if copied.done is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(copied.done)
            for value in copied.batch.values():
                if isinstance(value, torch.Tensor) and value.is_cuda:
                    value.record_stream(stream)
        return copied.batch

    def _loader_state(self) -> dict[str, object] | None:
        return self.loader.state_dict() if isinstance(self.loader, _Stateful) else None

    def _end(self) -> None:
        self._source = None
        self._ready.clear()
        self._length = None


@dataclass(frozen=True, slots=True)
class _Copied:
    """A batch, the loader's state with it, and the event that ends its copy (None: it is not copied)."""

    batch: Batch
    state: dict[str, object] | None
    done: torch.cuda.Event | None


def _has_length(loader: object) -> TypeGuard[Sized]:
    """Whether len() works: some loaders that never end have it and raise."""
    try:
        len(loader)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True
