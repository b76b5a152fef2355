"""One at a time: what a build does once, where several processes share it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardkit.errors import BuildError
from shardkit.writers.execution.claims import Claims
from shardkit.writers.execution.queue import POLL_SECONDS, Waiting

__all__ = ["TURN_SECONDS", "take_turn"]

TURN_SECONDS = 24 * 3600.0  # a publication moves terabytes; longer than that, somebody hangs


@contextmanager
def take_turn(
    claims: Claims,
    key: str,
    is_done: Callable[[], bool],
    waiting: Waiting,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[bool]:
    """Whether it is this process's turn to do it, which nobody else has done: see `Journal.take_turn`.

    BuildError if somebody who lives is at it for `TURN_SECONDS`.
    """
    start = clock()
    while True:
        if is_done():
            yield False
            return
        claims.refresh()
        if claims.take(key):
            break
        holder = claims.holder(key) or "another process"
        waiting({holder: 1})
        if clock() - start > TURN_SECONDS:
            raise BuildError(
                f"waited {TURN_SECONDS / 3600:.0f} hours for {holder} to publish the dataset; end that "
                f"process, then start again"
            )
        sleep(POLL_SECONDS)
    try:
        yield not is_done()  # another one may have been quicker
    finally:
        claims.release(key)
