"""Threads and processes as cooperative tasks on one virtual clock: one seed decides who runs when.

A task is a greenlet. It gives up control at its switch points only: where it takes a lock, waits, sleeps,
starts a thread, calls the operating system or a store. At each of them (a *step*) the seed decides whether
another task runs now. Time passes while nobody can run: the clock jumps to the next timer. If there is no
timer either, or if steps go on without end while no time passes, `StuckError` ends the run with all stacks.

A process is a group of tasks with a number, open files and a variable for each thing that real processes have
of their own. It can be killed at its next step: its tasks never run again, its descriptors are closed (so its
locks are free), and its files stay as they are. It can be suspended and resumed (SIGSTOP, SIGCONT).

Two runs of one seed take the same steps: `Scheduler.digest` is a hash of all of them.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from types import FrameType
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

__all__ = [
    "Event", "Process", "Scheduler", "StuckError", "Task", "active", "wake_all",
]  # fmt: skip

LATEST = 1e5  # virtual seconds; runs take some thousand
STEP_SECONDS = 1e-6  # that each step takes, so that loops without a wait make time pass, too
_STUCK_STEPS = 1_000_000
_MASK = (1 << 64) - 1


class StuckError(Exception):
    """Nobody can run and nobody ever will, or somebody runs without end; the message has all stacks."""


class Process:
    """Tasks that live and die together."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number = name, number
        self.is_alive = True
        self.tasks: set[Task] = set()
        self.descriptors: set[int] = set()
        self.variables: dict[object, Any] = {}
        self.environment: dict[str, str] = {}  # variables that are not those of the real process
        self.held: list[Task] = []  # that could run if the process were not suspended
        self.is_suspended = False
        self.suspended_at = 0.0
        self.suspensions: list[tuple[float, float]] = []  # those that are over: from when to when
        self.ended = Event()  # killed, or its main task returned

    def ran(self, began: float, now: float) -> tuple[float, int]:
        """(seconds in which it was not suspended, how often it was) since `began`."""
        parts = [(max(since, began), until) for since, until in self.suspensions if until > began]
        return now - began - sum(until - since for since, until in parts), len(parts)


class Task:
    """A thread of a process."""

    def __init__(self, process: Process, number: int, name: str, action: Callable[[], None]) -> None:
        self.process, self.number, self.name, self.action = process, number, name, action
        self.greenlet: greenlet | None = None
        self.is_done = False
        self.waits = 0  # waits begun: a timer of an earlier one is void
        self.is_waiting = False
        self.timed_out = False
        self.variables: dict[object, dict[str, Any]] = {}  # of `local`
        self.thread: object = None  # what the code that runs here sees as its thread
        self.ended = Event()

    def __hash__(self) -> int:
        return self.number


class Scheduler:
    """Runs tasks until the first one, the director, has ended."""

    def __init__(self, seed: int) -> None:
        self.seed, self.thread = seed, get_ident()
        self.random = random.Random(seed)
        self.now = 1000.0
        self.steps = self.switches = 0
        self.digest = seed & _MASK
        self.events: deque[str] = deque(maxlen=400)
        self.current: Task | None = None
        self.failure: BaseException | None = None
        self.preempt = self.random.choice((0.01, 0.05, 0.2, 0.5))
        self.stall = self.random.choice((0.0, 0.0, 1e-4, 1e-3))
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, Task, int]] = []
        self._order = itertools.count(1)
        self._processes: list[Process] = []
        self._awaited: dict[Process, tuple[int, Callable[[], None]]] = {}  # steps left, and what comes then
        self._hub: Any = None
        self._director: Process | None = None
        self._is_unwinding = False
        self._since = (0, 0.0)  # steps and time when time last passed noticeably
        self._trace: Any = None
        self._lock_waiters: list[Task] = []

    def process(self, name: str, main: Callable[[], None]) -> Process:
        """Start a process, whose first task runs `main`."""
        process = Process(name, 100 + next(self._order))
        self._processes.append(process)

        def run() -> None:
            main()
            process.ended.set()

        self.spawn(run, name, process)
        return process

    def spawn(self, action: Callable[[], None], name: str, process: Process | None = None) -> Task:
        """Start a task of a process, by default the running one."""
        assert process is not None or self.current is not None
        owner = process or self.current.process  # type: ignore[union-attr]
        task = Task(owner, next(self._order), f"{owner.name}:{name}", action)
        owner.tasks.add(task)
        self._make_ready(task)
        return task

    def next_number(self) -> int:
        """A number that nothing else has in this run."""
        return next(self._order)

    def interrupt_lines(self, is_interrupted: Callable[[str], bool], share: float) -> None:
        """Switch at a share of all lines of these files, too, as Python may between any two of them."""
        draw = random.Random(f"{self.seed} lines").random

        def in_function(frame: FrameType, event: str, argument: object) -> Any:
            task = self.current
            if event == "line" and task is not None and task.process.is_alive and draw() < share:
                self._make_ready(task)
                self._leave(task)
            return in_function

        self._trace = lambda frame, *more: in_function if is_interrupted(frame.f_code.co_filename) else None

    def run(self, director: Callable[[], None]) -> None:
        """Run until `director` has returned; raises what any task raised."""
        self._hub, trace = getcurrent(), sys.gettrace()
        self._director = self.process("director", director)
        main = next(iter(self._director.tasks))
        with _activated(self):
            try:
                while not main.is_done and self.failure is None:
                    self._run_next()
            finally:
                sys.settrace(trace)
                self._unwind()
        if self.failure is not None:
            raise self.failure

    def _run_next(self) -> None:
        if not self._ready:
            self._pass_time()
            return
        place = self._randrange(len(self._ready))
        task = self._ready[place]
        self._ready[place] = self._ready[-1]
        self._ready.pop()
        if not task.process.is_alive:
            return
        if task.process.is_suspended:
            task.process.held.append(task)
            return
        self.switches += 1
        self.digest = (self.digest * 0x9E3779B97F4A7C15 + task.number + self.steps) & _MASK
        self.current = task
        if task.greenlet is None:
            task.greenlet = greenlet(self._run_task, self._hub)
        task.greenlet.switch(task)
        self.current = None

    def _run_task(self, task: Task) -> None:
        try:
            if self._trace is not None:
                sys.settrace(self._trace)
            task.action()
        except GreenletExit:
            return
        except BaseException as error:
            if self._is_unwinding:
                return
            self.failure = self.failure or error
        task.is_done = True
        task.process.tasks.discard(task)
        task.ended.set()

    def _pass_time(self) -> None:
        if not self._timers:
            raise StuckError("deadlock: nobody can run and nobody waits for a time\n" + self.stacks())
        until, _, task, number = heapq.heappop(self._timers)
        if task.waits == number and task.is_waiting and task.process.is_alive:
            self.now = max(self.now, until)
            if self.now > LATEST:
                raise StuckError("no end: the run would take more than a day\n" + self.stacks())
            task.timed_out = True
            self._wake(task)

    def _make_ready(self, task: Task) -> None:
        (task.process.held if task.process.is_suspended else self._ready).append(task)

    def _wake(self, task: Task) -> None:
        task.is_waiting = False
        task.waits += 1
        self._make_ready(task)

    def wake(self, task: Task) -> None:
        """Let a waiting task go on."""
        if task.is_waiting and task.process.is_alive:
            task.timed_out = False
            self._wake(task)

    def step(self) -> None:
        """A switch point: the seed decides whether another task runs."""
        task = self.current
        if task is None:
            return
        self.steps += 1
        self.now += STEP_SECONDS
        if self.steps - self._since[0] > _STUCK_STEPS:
            if self.now - self._since[1] < 1 + 2 * _STUCK_STEPS * STEP_SECONDS:
                self.failure = StuckError(
                    "livelock: steps without end while no time passes\n" + self.stacks()
                )
            self._since = (self.steps, self.now)
        if not task.process.is_alive:
            raise GreenletExit
        if self._awaited and task.process in self._awaited:
            left, action = self._awaited.pop(task.process)
            if left > 1:
                self._awaited[task.process] = left - 1, action
            else:
                action()
                if task.process.is_suspended:
                    self._make_ready(task)
                    self._leave(task)
        draw = self._draw()
        if draw < self.stall:  # the machine gives this thread no time for a while
            self.sleep(self.random.choice((0.001, 0.05, 1.0)) * self._draw())
        elif draw < self.preempt or self.failure is not None:
            self._make_ready(task)
            self._leave(task)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until somebody wakes this task; False if `seconds` passed first."""
        task = self.current
        assert task is not None, "only tasks wait"
        if self._is_unwinding or not task.process.is_alive:
            raise GreenletExit
        task.waits += 1
        task.is_waiting = True
        if seconds is not None:
            number = next(self._order)
            heapq.heappush(self._timers, (self.now + max(0.0, seconds), number, task, task.waits))
        self._leave(task)
        return not task.timed_out

    def sleep(self, seconds: float) -> None:
        """Let others run for so long."""
        self.wait(seconds)

    def wait_for_locks(self, seconds: float) -> None:
        """Wait until a lock of the system may have been given back."""
        assert self.current is not None
        self._lock_waiters.append(self.current)
        self.wait(seconds)

    def locks_changed(self) -> None:
        """Wake who waits for a lock of the system."""
        tasks, self._lock_waiters = self._lock_waiters, []
        for task in tasks:
            self.wake(task)

    def _leave(self, task: Task) -> None:
        self._hub.switch()
        if self._is_unwinding or not task.process.is_alive:
            raise GreenletExit

    def kill(self, process: Process) -> None:
        """End a process at once, as kill -9 does."""
        if not process.is_alive:
            return
        self.note(f"kill {process.name}")
        process.is_alive = False
        self._awaited.pop(process, None)
        for descriptor in sorted(process.descriptors):
            os.close(descriptor)
        process.descriptors.clear()
        process.ended.set()
        self.locks_changed()
        if self.current is not None and self.current.process is process:
            self._leave(self.current)

    def after_steps(self, process: Process, steps: int, action: Callable[[Process], None]) -> None:
        """Kill or suspend a process, as `action` does, in the middle of its step of this number from now."""
        if process.is_alive:
            self._awaited[process] = steps, lambda: action(process)

    def spare(self) -> None:
        """Let nothing of `after_steps` come."""
        self._awaited.clear()

    def suspend(self, process: Process, seconds: float) -> None:
        """Let no task of a process run for so long, or until `resume`."""

        def resume_later() -> None:
            self.sleep(seconds)
            self.resume(process)

        if not process.is_suspended:
            process.is_suspended, process.suspended_at = True, self.now
            self.note(f"suspend {process.name} for {seconds:.1f} s")
            self.spawn(resume_later, "resume", self._director)

    def resume(self, process: Process) -> None:
        """Let a suspended process go on."""
        if not process.is_suspended:
            return
        process.is_suspended = False
        process.suspensions.append((process.suspended_at, self.now))
        self.note(f"resume {process.name}")
        held, process.held = process.held, []
        for task in held:
            self._make_ready(task)

    def note(self, event: str) -> None:
        """Add an event to the log, and to the digest."""
        text = f"{self.now:.6f} {'' if self.current is None else self.current.name} {event}"
        self.events.append(text)
        for letter in event.encode(errors="replace"):
            self.digest = (self.digest * 1099511628211 + letter) & _MASK

    def stacks(self) -> str:
        """Where each task that has not ended waits."""
        parts = []
        for process in self._processes:
            for task in sorted(process.tasks, key=lambda task: task.number):
                if process.is_alive and task.greenlet is not None and task.greenlet.gr_frame is not None:
                    lines = traceback.format_stack(task.greenlet.gr_frame, limit=8)
                    state = " (suspended)" if process.is_suspended else ""
                    parts.append(f"{task.name}{state}\n{''.join(lines)}")
        return "\n".join(parts)

    def _unwind(self) -> None:
        """End all tasks: none may touch the disk any more."""
        self._is_unwinding = True
        for process in self._processes:
            process.is_alive = False
            for descriptor in sorted(process.descriptors):
                os.close(descriptor)
            process.descriptors.clear()
        for process in self._processes:
            for task in list(process.tasks):
                if task.greenlet is not None and not task.greenlet.dead:
                    self.current = task
                    task.greenlet.throw(GreenletExit)
        self.current = None

    def _draw(self) -> float:
        return self.random.random()

    def _randrange(self, count: int) -> int:
        return int(self.random.random() * count)


_active: list[Scheduler] = []


@contextmanager
def _activated(scheduler: Scheduler) -> Iterator[None]:
    _active.append(scheduler)
    try:
        yield
    finally:
        _active.pop()


def active() -> Scheduler | None:
    """The scheduler that runs the caller, if one does: other real threads of the process have none."""
    found = _active[-1] if _active else None
    return found if found is not None and found.current is not None and found.thread == get_ident() else None


def wake_all(tasks: Iterable[Task]) -> None:
    """Wake tasks that wait."""
    scheduler = _active[-1] if _active else None
    if scheduler is not None:
        for task in tasks:
            scheduler.wake(task)


class Event:
    """`threading.Event`."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        tasks, self._waiting = self._waiting, []
        wake_all(tasks)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = active()
        if scheduler is None or scheduler.current is None:
            return self._is_set
        scheduler.step()
        if not self._is_set and (timeout is None or timeout > 0):
            self._waiting.append(scheduler.current)
            if not scheduler.wait(timeout) and scheduler.current in self._waiting:
                self._waiting.remove(scheduler.current)
        return self._is_set
