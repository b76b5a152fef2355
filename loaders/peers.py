"""Stops all ranks of the world after an error of one rank, including ranks that have no loader.

`StopTogether`: the failing rank writes its error to the store of the process group. On each rank a thread
polls that store every `poll_seconds` through a separate connection, because the group's own connection may be
blocked in a wait. The loaders of the other ranks raise the error as `PeerError` at their next batch; a loop
that waits for data is interrupted at once. A loop that hangs in a collective is left to the timeout of its
process group, unless the user sets `grace_seconds`: if the loop has not returned to its loader after that
time, its stacks are printed, its process gets SIGTERM, and `END_SECONDS` later the process is ended.

In this module, ranks are those of torch.distributed, not data-parallel ranks: the error of a loader also
concerns its tensor, pipeline and context parallel peers. `watch` is for ranks that create no loader.

Cost at the store: one `check` of one key per rank and poll, at most `_MOST_CHECKS_PER_SECOND` over all ranks
(worlds above 4,096 ranks poll less often). Details are read only when that key exists. Ranks that have
received the error increment one shared counter, so the failing rank waits for a number, not for a key of each
rank.

An error stays in effect as long as the process group exists. A rank that ends without an error writes
nothing, and a store that is gone only means that rank 0 ended first: neither stops another rank. Without
torch.distributed, or with one rank, there is no thread. Every wait is bounded. The thread is a daemon, ends
with `close`, and does not keep the loader alive.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from shardkit.errors import PeerError
from shardkit.loaders.placement import Store, group_store, process_place, run_key

END_SECONDS = 10.0  # from SIGTERM to the forced end: enough to unwind, short compared with a lost run

MESSAGE_CHARACTERS = 2000  # limit of a reported error: rank 0's store holds it and every rank prints it

_JOIN_SECONDS = 12.0  # longest wait for the thread's end; its request to a hanging store fails after 10 s

_SLACK_SECONDS = 1.0  # additional time that waits for other ranks take if machines are busy

# A check costs the store of rank 0 13 microseconds of CPU (measured with 256 connections): 5 % of a core.
_MOST_CHECKS_PER_SECOND = 4096

_POLL_SECONDS_MOST = 60.0  # limit of `poll_seconds`


Owner = TypeVar("Owner")


class StopTogether(Generic[Owner]):
    """Reports errors of `owner`, a loader of this rank, to the other ranks, and their errors to `owner`."""

    def __init__(
        self,
        owner: Owner,
        *,
        on_peer_error: Callable[[Owner, PeerError], None] = lambda owner, error: None,
        grace_seconds: float | None = None,
        poll_seconds: float = 1.0,
        end_seconds: float = END_SECONDS,
        process: tuple[int, int] | None = None,
        connect: Callable[[], Store | None] = group_store,
    ) -> None:
        """`on_peer_error`: called in the thread with the owner and the error of another rank.

        `process`: (rank, world size) of this process; default: torch.distributed's. `connect`: opens a
        connection to the store of the ranks.
        """
        if grace_seconds is not None and not grace_seconds > 0:
            raise ValueError(f"grace_seconds must be above 0, or None for no limit, not {grace_seconds}")
        if not 0 < poll_seconds <= _POLL_SECONDS_MOST:
            raise ValueError(f"poll_seconds must be above 0 and at most 60, not {poll_seconds}")
        self._owner, self._on_peer_error = weakref.ref(owner), on_peer_error
        self._grace_seconds, self._poll_seconds, self._end_seconds = grace_seconds, poll_seconds, end_seconds
        self._place, self._connect = process, connect
        self._heard: PeerError | None = None
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    @property
    def watching(self) -> bool:
        """Whether the thread runs; False without torch.distributed, with one rank, and after `close`."""
        return self._thread is not None and self._thread.is_alive()

    def watch(self) -> None:
        """Start the thread, unless it runs, an error was received, or there is no other rank."""
        if self._thread is not None or self._heard is not None:
            return
        rank, world_size = self._place or process_place() or (0, 1)
        if world_size == 1 or (store := self._connect()) is None:
            return
        self._rank, self._world_size, self._process = rank, world_size, os.getpid()
        self._wait_seconds = max(self._poll_seconds, world_size / _MOST_CHECKS_PER_SECOND)
        self._key = f"{run_key()}/stop"
        self._outgoing: str | None = None
        self._closed = False
        self._wake = threading.Event()  # set after each change of `_outgoing` or `_closed`
        self._sent = threading.Event()  # set when the error was sent, or sending was given up
        self._returned = threading.Event()  # set when the loop got the error or closed its loader
        # Only the thread refers to the connection, so the end of the thread closes it.
        self._thread = threading.Thread(target=self._run, args=(store,), name="shardkit-stop", daemon=True)
        _watching.add(self)
        atexit.register(self._at_exit)
        self._thread.start()

    def check(self) -> None:
        """Raise PeerError if another rank has failed; cheap enough for every step."""
        if self._heard is not None:
            for each in list(_watching):  # the loop does not hang, so no loader's thread may end this process
                each._returned.set()
            raise PeerError(self._heard.rank, self._heard.step, self._heard.problem)

    def report(self, error: BaseException, step: int | None = None) -> None:
        """Tell the other ranks that this rank stops because of `error`; only a run's first error is kept.

        Returns when all ranks have read it, or after a few seconds. Does nothing for a PeerError, which
        another rank reported.
        """
        if not self.watching or os.getpid() != self._process or isinstance(error, PeerError):
            return
        if self._outgoing is None and self._heard is None:
            problem = f"{type(error).__name__}: {error}"[:MESSAGE_CHARACTERS]
            self._outgoing = json.dumps({"rank": self._rank, "step": step, "problem": problem})
            self._wake.set()
            self._sent.wait(self._hear_seconds + _SLACK_SECONDS)

    def close(self) -> None:
        """End the thread. Safe to call twice, and from a forked child; `watch` may start another thread.

        A received error stays: `check` raises it again.
        """
        thread = self._thread
        if thread is None or os.getpid() != self._process:
            return
        self._finish()
        self._thread = None
        if thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)

    def _finish(self) -> None:
        atexit.unregister(self._at_exit)
        self._closed = True
        self._wake.set()
        self._returned.set()

    def _at_exit(self) -> None:
        """Report the error that ended the script, and end the thread before the interpreter exits.

        Otherwise the thread could return from the store's C++ code after the interpreter's exit, and C++
        would abort the process.
        """
        error = getattr(sys, "last_value", None)
        if isinstance(error, BaseException) and not hasattr(sys, "ps1"):
            self.report(error)
        self.close()

    @property
    def _hear_seconds(self) -> float:
        return 2 * self._wait_seconds + _SLACK_SECONDS  # other ranks poll every `_wait_seconds`

    def _run(self, store: Store) -> None:
        # torch's stores raise RuntimeError after rank 0 has ended. It may have ended normally: no error here.
        with suppress(RuntimeError):
            self._listen(store)
        self._sent.set()
        del store
        atexit.unregister(self._at_exit)  # nothing is left to send, and the registration keeps `self` alive
        if self._heard is None:
            return
        if (owner := self._owner()) is not None:
            self._on_peer_error(owner, self._heard)
        del owner  # this thread must not keep the loader alive during the wait below
        if self._grace_seconds is not None and not self._returned.wait(self._grace_seconds):
            self._end_process(self._heard, self._grace_seconds)

    def _listen(self, store: Store) -> None:
        """Poll until this rank has sent an error, the watch is closed, or another rank's error arrives."""
        while not self._closed and self._owner() is not None:
            if self._outgoing is not None:
                return self._send(store, self._outgoing)
            if store.check([self._key]):
                self._heard = PeerError(**json.loads(store.get(self._key)))
                return self._count(store)
            self._wake.wait(self._wait_seconds)
            self._wake.clear()
        return None

    def _send(self, store: Store, error: str) -> None:
        """Store the error and wait until all ranks have read it; the store may end with this process."""
        store.compare_set(self._key, "", error)
        self._count(store)
        deadline = time.monotonic() + self._hear_seconds
        while store.add(self._heard_key, 0) < self._world_size and time.monotonic() < deadline:
            time.sleep(min(0.05, self._poll_seconds))

    @property
    def _heard_key(self) -> str:
        return f"{self._key}/heard"

    def _count(self, store: Store) -> None:
        """Count this rank once as having read the error, even if it has several loaders."""
        if store.add(f"{self._heard_key}/{self._rank}", 1) == 1:
            store.add(self._heard_key, 1)

    def _end_process(self, heard: PeerError, seconds: float) -> None:
        sys.stderr.write(
            f"shardkit: {heard}; the loop of rank {self._rank} has not returned to its loader for "
            f"{seconds:g} s and probably waits for that rank: ending this process (stop_grace_seconds)\n"
        )
        with suppress(
            OSError, ValueError, AttributeError
        ):  # stderr may be an object without a file descriptor
            faulthandler.dump_traceback(sys.stderr)
        os.kill(os.getpid(), signal.SIGTERM)
        # A Python handler of SIGTERM does not run while the loop hangs in C++: end the process after a while.
        if not self._returned.wait(self._end_seconds):
            os._exit(1)


_watching: weakref.WeakSet[StopTogether[Any]] = weakref.WeakSet()


class PeerWatch:
    """Receives errors of other ranks' loaders on a rank that has no loader: see `watch`."""

    def __init__(self, grace_seconds: float | None = None) -> None:
        self._stop_together = StopTogether(self, grace_seconds=grace_seconds)
        self._stop_together.watch()

    def check(self) -> None:
        """Raise PeerError if a loader of another rank has failed; cheap enough for every step."""
        self._stop_together.watch()  # the process group may have been created after this object
        self._stop_together.check()

    def close(self) -> None:
        """Stop listening."""
        self._stop_together.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, SystemExit):
            self._stop_together.report(error)
        self.close()


def watch(grace_seconds: float | None = None) -> PeerWatch:
    """Listen for errors of other ranks' loaders, on a rank without a loader, such as a pipeline stage.

        with watch() as peers:
            for step in range(steps):
                peers.check()  # raises PeerError
                train_step()

    An error that leaves the `with` is reported to the other ranks. `grace_seconds`: end this process if it
    has not called `check` this many seconds after another rank failed; default: never.
    """
    return PeerWatch(grace_seconds)
