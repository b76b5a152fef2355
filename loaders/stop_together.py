"""An error on one rank ends the run on all of them, instead of leaving the others in a collective for ever.

The rank that fails puts its error where all ranks look: in the store that torch.distributed met over. On each
rank a thread looks there every `poll_seconds`, over a connection of its own (torch's would be locked while it
waits). What happens on the others when an error is found:

1. The next time the training loop comes to its loader, `check` raises `PeerError`, which names rank and step.
2. A loop that has not come within `grace_seconds` hangs in a collective that waits for the dead rank. A line
   on stderr says so; then the process group is aborted (which frees a loop that waits for NCCL), and after
   `END_SECONDS` each, the process gets SIGTERM and is ended.

An error stands for as long as the process group does: whoever looks later hears of it too. A rank that ends
without an error says nothing, and a store that is gone means only that rank 0 ended first: neither stops
anyone (torch may print a warning of its own about the store). There is nothing to watch without
torch.distributed or with one rank, and no thread then.

Every wait is bounded. The thread is a daemon, ends with `close`, and does not keep its owner alive.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, cast

from shardkit.errors import ShardkitError

__all__ = ["PeerError", "StopTogether"]

END_SECONDS = 10.0  # between abort, SIGTERM and the end: enough to unwind, short beside a lost run
MESSAGE_CHARACTERS = 2000  # of a peer's error: rank 0's store holds it and every rank prints it
_CONNECT_SECONDS = 30.0  # the store is there already: torch.distributed has met over it
_JOIN_SECONDS = 2.0  # closing waits so long for a thread that is asking the store
_SLACK_SECONDS = 1.0  # added to what peers need to hear, for busy machines
_POLL_SECONDS_MOST = 60.0

# Errors that the training loop was given by any loader of this process: then it hangs in no collective.
_given: set[str] = set()


class PeerError(ShardkitError):
    """Another rank stopped, so this one does too; the message is that rank's."""

    def __init__(self, rank: int, step: int | None, problem: str) -> None:
        self.rank, self.step, self.problem = rank, step, problem
        where = "" if step is None else f" at step {step:,}"
        super().__init__(f"rank {rank} stopped{where}: {problem}")

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.rank, self.step, self.problem))


class _Store(Protocol):
    """What we need of torch's stores; all of it raises RuntimeErrors when the store is gone."""

    def check(self, keys: list[str]) -> bool: ...
    def get(self, key: str) -> bytes: ...
    def set(self, key: str, value: str) -> None: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


class StopTogether:
    """Tells other ranks of this one's error, and this one of theirs.

    `grace_seconds`: how long after a peer's error the training loop may stay away from its loader; None: for
    ever (the process is never ended, and a hanging collective hangs).
    """

    def __init__(self, *, grace_seconds: float | None = 60.0, poll_seconds: float = 1.0) -> None:
        if grace_seconds is not None and not grace_seconds > 0:
            raise ValueError(f"grace_seconds must be above 0, or None for never, not {grace_seconds}")
        if not 0 < poll_seconds <= _POLL_SECONDS_MOST:
            raise ValueError(f"poll_seconds must be above 0 and at most 60, not {poll_seconds}")
        self._grace_seconds = grace_seconds
        self._poll_seconds = poll_seconds
        self._listeners: list[Callable[[PeerError], None]] = []
        self._watch: _Watch | None = None
        self._process = os.getpid()

    @property
    def watching(self) -> bool:
        """Whether peers are listened to: not without torch.distributed, with one rank, or after `close`."""
        return self._watch is not None and self._watch.thread.is_alive()

    def on_peer_error(self, listener: Callable[[PeerError], None]) -> None:
        """Call `listener` in the watching thread when a peer's error arrives: to end a wait for data."""
        self._listeners.append(listener)

    def watch(self, rank: int, world_size: int) -> None:
        """Start to listen, unless that is done or there is no one to listen to. For the training thread."""
        if self._watch is not None:
            self._watch.training_thread = threading.get_ident()
            return
        store = _connect() if world_size > 1 else None
        if store is None:
            return
        self._process = os.getpid()
        self._watch = watch = _Watch(rank, world_size, store, self._poll_seconds, self._grace_seconds)
        watch.listeners = weakref.WeakMethod(self._tell_listeners)
        weakref.finalize(self, watch.finish).atexit = False
        atexit.register(watch.at_exit)
        watch.thread.start()

    def check(self) -> None:
        """Raise PeerError if a peer has stopped. For every step: costs a tenth of a microsecond."""
        watch = self._watch
        if watch is not None and watch.heard is not None:
            watch.give()

    def report(self, error: BaseException, step: int | None = None) -> None:
        """Tell the peers that this rank stops because of `error`; the first error of a run is the one told.

        Returns when they have heard, after a few seconds at most. What came from a peer is not told again.
        """
        if self._watch is not None and os.getpid() == self._process:
            self._watch.send(error, step)

    def close(self) -> None:
        """End the thread. Safe to call twice, and from a forked child; `watch` may start anew.

        What has been heard stays: `check` raises it again.
        """
        watch = self._watch
        if watch is None or os.getpid() != self._process:
            return
        watch.finish()
        if watch.heard is None:
            self._watch = None
        if watch.thread is not threading.current_thread():
            watch.thread.join(_JOIN_SECONDS)

    def _tell_listeners(self, error: PeerError) -> None:
        for listener in self._listeners:
            listener(error)


class _Watch:
    """The thread and what it shares with the training thread; knows its owner weakly only."""

    def __init__(
        self, rank: int, world_size: int, store: _Store, poll_seconds: float, grace_seconds: float | None
    ) -> None:
        self.rank = rank
        self.training_thread = threading.get_ident()
        self.heard: PeerError | None = None
        self.listeners: weakref.WeakMethod[Callable[[PeerError], None]] | None = None
        # The thread alone holds the connection, so that its end closes it.
        self.thread = threading.Thread(target=self._run, args=(store,), name="shardkit-stop", daemon=True)
        self._world_size = world_size
        self._poll_seconds = poll_seconds
        self._grace_seconds = grace_seconds
        self._key = f"shardkit/stop/{_run_name()}"
        self._nonce = ""  # of the error that was heard: two may read alike
        self._outgoing: str | None = None
        self._closed = False
        self._wake = threading.Event()  # set after each change of the two above
        self._sent = threading.Event()  # or given up

    def give(self) -> None:
        """Raise what was heard, in the training thread: it is back, and nothing has to be ended."""
        assert self.heard is not None
        _given.add(self._nonce)
        self._wake.set()
        raise PeerError(self.heard.rank, self.heard.step, self.heard.problem)

    def send(self, error: BaseException, step: int | None) -> None:
        if isinstance(error, PeerError) or self._outgoing is not None or self.heard is not None:
            return
        problem = f"{type(error).__name__}: {error}"[:MESSAGE_CHARACTERS]
        told = {"rank": self.rank, "step": step, "problem": problem, "nonce": uuid.uuid4().hex}
        self._outgoing = json.dumps(told)
        self._wake.set()
        # Longer than the thread takes: it may be asking the store just now.
        self._sent.wait(self._hear_seconds + _SLACK_SECONDS)

    def finish(self) -> None:
        """Let the thread end; called by `close`, or when the owner is garbage."""
        atexit.unregister(self.at_exit)
        self._closed = True
        self._wake.set()

    def at_exit(self) -> None:
        """At the interpreter's end: an error that ended the script is an error of this rank."""
        error = getattr(sys, "last_value", None)
        if isinstance(error, BaseException) and not hasattr(sys, "ps1") and self.thread.is_alive():
            self.send(error, None)
        self.finish()

    @property
    def _hear_seconds(self) -> float:
        return 2 * self._poll_seconds + _SLACK_SECONDS  # a peer looks once in every `poll_seconds`

    def _run(self, store: _Store) -> None:
        try:
            heard = self._listen(store)
        except RuntimeError:
            return  # how torch's stores fail: rank 0 has ended, well or not; its peers cannot know which
        finally:
            self._sent.set()
        if not heard:
            return
        tell = self.listeners() if self.listeners is not None else None
        if tell is not None:
            tell(heard)
        del tell  # it holds the owner
        if self._grace_seconds is not None and not self._came_back(self._grace_seconds):
            self._end_process(heard, self._grace_seconds)

    def _listen(self, store: _Store) -> PeerError | None:
        """A peer's error; None once this rank has sent its own or wants no more."""
        while True:
            if self._outgoing is not None:
                self._tell_peers(store, self._outgoing)
                return None
            if self._closed:
                return None
            if store.check([self._key]):
                told = json.loads(store.get(self._key))
                self._nonce = told["nonce"]
                self.heard = PeerError(told["rank"], told["step"], told["problem"])
                store.set(f"{self._key}/heard/{self.rank}", "1")
                return self.heard
            self._wake.wait(self._poll_seconds)
            self._wake.clear()

    def _tell_peers(self, store: _Store, told: str) -> None:
        """Store the error, and stay until all peers have it: the store may end with this process."""
        store.compare_set(self._key, "", told)
        peers = [rank for rank in range(self._world_size) if rank != self.rank]
        heard = [f"{self._key}/heard/{rank}" for rank in peers]
        deadline = time.monotonic() + self._hear_seconds
        while not store.check(heard) and time.monotonic() < deadline:
            time.sleep(min(0.05, self._poll_seconds))

    def _came_back(self, seconds: float) -> bool:
        """Wait until the training loop has the error or closes its loader; False if it did neither."""
        deadline = time.monotonic() + seconds
        while not self._closed and self._nonce not in _given:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._wake.wait(left)
            self._wake.clear()
        return True

    def _end_process(self, heard: PeerError, seconds: float) -> None:
        """The training loop hangs: say so, free it if torch can, else end the process."""
        sys.stderr.write(
            f"shardkit: {heard}; rank {self.rank} has not come back to its loader for {seconds:g} s "
            f"({_place(self.training_thread)}), as if it waited for that rank: ending it\n"
        )
        sys.stderr.flush()
        if _abort_process_groups() and self._came_back(END_SECONDS):
            return
        os.kill(os.getpid(), signal.SIGTERM)
        # Ended here already, unless something handles the signal: in Python, only once the loop runs again.
        if not self._came_back(END_SECONDS):
            os._exit(1)


def _run_name() -> str:
    """Tells runs apart that use one store: torchrun starts failed ones again."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return "/".join(os.environ.get(name, "") for name in names)


def _distributed() -> Any:
    """torch.distributed, if it is in use. Not imported: who uses it has done so."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return torch.distributed


def _connect() -> _Store | None:
    """A connection of our own to the store that the ranks met over; None without torch.distributed."""
    distributed = _distributed()
    if distributed is None:
        return None
    store = distributed.distributed_c10d._get_default_store()
    timeout = timedelta(seconds=_CONNECT_SECONDS)
    if hasattr(store, "clone"):
        connection = store.clone()
        connection.set_timeout(timeout)
        return cast(_Store, connection)
    # torch before 2.8: only a store over TCP says where it is.
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not isinstance(store, distributed.TCPStore):
        return None
    connection = distributed.TCPStore(
        store.host, store.port, is_master=False, wait_for_workers=False, timeout=timeout
    )
    return cast(_Store, connection)


def _abort_process_groups() -> bool:
    """Whether collectives were aborted: NCCL can, gloo cannot. Bounded: an abort may hang as well."""
    distributed = _distributed()
    if distributed is None or distributed.get_backend() == "gloo":
        return False
    abort = getattr(distributed.distributed_c10d, "_abort_process_group", None)  # since torch 2.6
    if abort is None:
        return False
    aborting = threading.Thread(target=abort, name="shardkit-abort", daemon=True)
    aborting.start()
    aborting.join(END_SECONDS)
    return not aborting.is_alive()


def _place(thread: int) -> str:
    """Where a thread is, as "train.py:88 in step": its innermost line outside torch."""
    frame = sys._current_frames().get(thread)
    while (
        frame is not None
        and f"{os.sep}torch{os.sep}" in frame.f_code.co_filename
        and frame.f_back is not None
    ):
        frame = frame.f_back
    if frame is None:
        return "its thread has ended"
    return f"it is at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
