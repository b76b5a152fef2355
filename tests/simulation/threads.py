"""What code in a simulation sees in place of `threading`, `queue` and `concurrent.futures`."""

from __future__ import annotations

import concurrent.futures
import concurrent.futures._base as futures_base
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from types import TracebackType
from typing import Any

from simulation.scheduler import Task, active, wake_all

__all__ = [
    "AcquireFutures", "Condition", "Executor", "Future", "Lock", "PerProcess", "ProcessDict", "RLock",
    "SimpleQueue", "Thread", "current_thread", "local",
]  # fmt: skip


class Lock:
    """`threading.Lock`."""

    def __init__(self) -> None:
        self._owner: object = None
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = active()
        if scheduler is None:
            assert self._owner is None
            self._owner = self
            return True
        scheduler.step()
        deadline = None if timeout < 0 else scheduler.now + timeout
        task = scheduler.current
        assert task is not None
        while self._owner is not None:
            if not blocking or (deadline is not None and scheduler.now >= deadline):
                return False
            self._waiting.append(task)
            if not scheduler.wait(None if deadline is None else deadline - scheduler.now):
                self._waiting.remove(task)
        self._owner = task
        return True

    def release(self) -> None:
        if self._owner is None and active() is not None:
            raise RuntimeError("release unlocked lock")
        self._owner = None
        if self._waiting:
            wake_all([self._waiting.pop(0)])

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class RLock(Lock):
    """`threading.RLock`."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = active()
        if scheduler is not None and self._owner is scheduler.current:
            self._depth += 1
            return True
        if super().acquire(blocking, timeout):
            self._depth = 1
            return True
        return False

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            super().release()


class Condition:
    """`threading.Condition`."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or RLock()
        self._waiting: list[Task] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = active()
        assert scheduler is not None
        task = scheduler.current
        assert task is not None
        self._waiting.append(task)
        self._lock.release()
        woken = scheduler.wait(timeout)
        if not woken and task in self._waiting:
            self._waiting.remove(task)
        self._lock.acquire()
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        scheduler = active()
        result = predicate()
        end = None
        while not result:
            assert scheduler is not None
            if timeout is not None:
                end = scheduler.now + timeout if end is None else end
                if end <= scheduler.now:
                    break
            self.wait(None if end is None else end - scheduler.now)
            result = predicate()
        return result

    def notify(self, n: int = 1) -> None:
        tasks, self._waiting = self._waiting[:n], self._waiting[n:]
        wake_all(tasks)

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Thread:
    """`threading.Thread`."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._target, self._args, self._kwargs = target, tuple(args), dict(kwargs or {})
        self.name, self.daemon = name or "thread", bool(daemon)
        self.task: Task | None = None

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def start(self) -> None:
        scheduler = active()
        assert scheduler is not None
        self.task = scheduler.spawn(self.run, self.name)
        self.task.thread = self
        scheduler.step()

    def join(self, timeout: float | None = None) -> None:
        assert self.task is not None
        self.task.ended.wait(timeout)

    def is_alive(self) -> bool:
        return self.task is not None and not self.task.is_done

    @property
    def ident(self) -> int | None:
        return None if self.task is None else self.task.number


def current_thread() -> Thread | threading.Thread:
    """`threading.current_thread`; the main task of a process has a `Thread`, too."""
    scheduler = active()
    if scheduler is None or scheduler.current is None:
        return threading.current_thread()
    task = scheduler.current
    if not isinstance(task.thread, Thread):
        task.thread = thread = Thread(name=task.name)
        thread.task = task
        return thread
    return task.thread


class local:  # noqa: N801 (as in threading)
    """`threading.local`: attributes of each task."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self._own()[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: object) -> None:
        self._own()[name] = value

    def _own(self) -> dict[str, Any]:
        scheduler = active()
        assert scheduler is not None
        assert scheduler.current is not None
        return scheduler.current.variables.setdefault(self, {})


class PerProcess:
    """One object for each simulated process, the real one outside of a simulation."""

    def __init__(self, real: object, make: Callable[[], object]) -> None:
        self._real, self._make = real, make

    def __getattr__(self, name: str) -> Any:
        scheduler = active()
        if scheduler is None or scheduler.current is None:
            return getattr(self._real, name)
        variables = scheduler.current.process.variables
        if self not in variables:
            variables[self] = self._make()
        return getattr(variables[self], name)

    def __call__(self) -> Any:
        return self.__getattr__("__call__")()


class ProcessDict(MutableMapping[Any, Any]):
    """A dict of each simulated process."""

    def __getitem__(self, key: Any) -> Any:
        return self._own()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._own()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._own()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._own())

    def __len__(self) -> int:
        return len(self._own())

    def __hash__(self) -> int:
        return id(self)

    def _own(self) -> dict[Any, Any]:
        scheduler = active()
        assert scheduler is not None
        assert scheduler.current is not None
        found: dict[Any, Any] = scheduler.current.process.variables.setdefault(self, {})
        return found


class SimpleQueue:
    """`queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._changed = Condition(Lock())

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._items, timeout if block else 0.0)
            if not self._items:
                raise queue.Empty
            return self._items.popleft()


class Future(concurrent.futures.Future[Any]):
    """A future that sets hold in the same order in every run."""

    def __init__(self) -> None:
        super().__init__()
        scheduler = active()
        self._number = id(self) if scheduler is None else scheduler.next_number()

    def __hash__(self) -> int:
        return self._number


class AcquireFutures(futures_base._AcquireFutures):
    """Takes the locks of futures in the order of their numbers, not of their addresses."""

    def __init__(self, futures: Iterable[Any]) -> None:
        self.futures = sorted(futures, key=hash)


class Executor(concurrent.futures.Executor):
    """`ThreadPoolExecutor`, with a thread for each task at first and no more than `max_workers` at a time."""

    def __init__(self, max_workers: int = 8, thread_name_prefix: str = "pool") -> None:
        self._name, self._left = thread_name_prefix, max_workers
        self._changed = Condition(Lock())
        self._threads: list[Thread] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        future = Future()
        with self._changed:
            self._changed.wait_for(lambda: self._left > 0)
            self._left -= 1

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:
                    future.set_exception(error)
            with self._changed:
                self._left += 1
                self._changed.notify_all()

        thread = Thread(target=run, name=self._name)
        self._threads.append(thread)
        thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for thread in self._threads:
            thread.join()
