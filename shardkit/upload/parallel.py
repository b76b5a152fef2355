"""One action on many items, several at a time, with memory for a few items only.

After `MAX_ERRORS` failures nothing new is started. An interruption (any exception that is no `Exception`)
stops the rest, too, and is raised at once: the threads are daemons and end with the item they are at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import TypeVar

__all__ = ["MAX_ERRORS", "run_all"]

MAX_ERRORS = 16  # enough to see whether one file or everything is wrong

T = TypeVar("T")


def run_all(items: Iterable[T], action: Callable[[T], None], threads: int) -> list[tuple[T, Exception]]:
    """Call `action` on every item in `threads` threads; the items that failed, with their errors."""
    remaining = iter(items)
    lock = threading.Lock()
    stop = threading.Event()
    errors: list[tuple[T, Exception]] = []
    ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def work() -> None:
        interruption: BaseException | None = None
        try:
            while not stop.is_set():
                with lock:
                    item = next(remaining, stop)
                if item is stop:
                    break
                try:
                    action(item)  # type: ignore[arg-type]
                except Exception as error:
                    with lock:
                        errors.append((item, error))  # type: ignore[arg-type]
                        if len(errors) >= MAX_ERRORS:
                            stop.set()
        except BaseException as error:
            interruption = error
        ended.put(interruption)

    workers = [
        threading.Thread(target=work, name=f"shardkit-transfer-{n}", daemon=True) for n in range(threads)
    ]
    for worker in workers:
        worker.start()
    try:
        for _ in workers:
            interruption = ended.get()  # each action is bounded by the store's own deadlines
            if interruption is not None:
                raise interruption
    finally:
        stop.set()
    return errors
