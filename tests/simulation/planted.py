"""Faults to plant into the package, each a line that somebody could forget: the simulation finds them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from shardkit.cache import folder, shards
from shardkit.cache.download import Job
from shardkit.cache.folder import CacheFolder, FolderSlot
from shardkit.loaders.loader import StreamingLoader
from shardkit.loaders.producer import Group, Prefetcher
from shardkit.publish import publication
from shardkit.publish.contents import Listing
from shardkit.publish.publication import Publication
from shardkit.storage import retry
from shardkit.storage.resilient import ResilientBody
from shardkit.storage.retry import Call
from shardkit.storage.running_clock import wait_until
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.stage import Task
from shardkit.writers.execution.work import COMMIT_NAME, Work

__all__ = ["PLANTED", "PLANTED_IN_BUILDS", "planted"]

Patch = tuple[Any, str, object]


def _keep_lease() -> list[Patch]:
    return [(Job, "let_go", lambda self: self.drop_slot())]


def _keep_room() -> list[Patch]:
    end = FolderSlot._end
    return [(FolderSlot, "_end", lambda self, *, keep: end(self, keep=True))]


def _state_of_the_batch_before() -> list[Patch]:
    def state_dict(self: StreamingLoader) -> dict[str, object]:
        return self.state_at((max(0, self.position - self.plan.global_batch), self.cursor[1]))

    return [(StreamingLoader, "state_dict", state_dict)]


def _resume_one_byte_on() -> list[Patch]:
    make = ResilientBody.__init__

    def init(self: ResilientBody, call: Call, request: Any, start: int, *more: Any) -> None:
        make(self, call, lambda at, version: request(at + (at > start), version), start, *more)

    return [(ResilientBody, "__init__", init)]


def _keep_place_at_the_gate() -> list[Patch]:
    def release(self: ResilientBody) -> None:
        raw, self._raw = self._raw, None
        if raw is not None:
            raw.close()
            if self.left:  # as if only whole bodies were thought of
                return
        self._call.leave()

    return [(ResilientBody, "_release", release)]


def _leave_late_answers_open() -> list[Patch]:
    return [(retry, "_drop", lambda late, discard: None)]


def _trust_entries() -> list[Patch]:
    return [(folder, "is_sealed", lambda entry, name: True)]


def _take_room_of_others() -> list[Patch]:
    def fits(self: CacheFolder, needed: int) -> bool:
        return self._ledger.used_bytes < self._capacity  # without what is needed

    return [(CacheFolder, "_fits", fits)]


def _lose_what_is_ready() -> list[Patch]:
    take = Prefetcher._take_ready

    def take_ready(self: Prefetcher) -> Group | None:
        group = take(self)
        if self._ready:
            self._ready.popleft()
        return group

    return [(Prefetcher, "_take_ready", take_ready)]


def _forget_the_deadline() -> list[Patch]:
    return [(shards, "wait_until", lambda wait, deadline: wait_until(wait, deadline + 1e6))]


def _record_before_outputs() -> list[Patch]:
    commit = Work.commit

    def record_first(self: Work, task: Task, temporary: Path, made: Commit, record: bytes) -> Commit:
        self.store.put(f"{task.key}/{COMMIT_NAME}", record)
        for name in made.outputs:
            self.store.put(f"{task.key}/{name}", temporary / name)
        return commit(self, task, temporary, made, record)

    return [(Work, "commit", record_first)]


def _index_before_files() -> list[Patch]:
    move = Publication._move

    def index_first(self: Publication, listing: Listing) -> None:
        self._put_index()
        move(self, listing)

    return [(Publication, "_move", index_first)]


def _leave_marker() -> list[Patch]:
    return [(publication, "_clean", lambda *arguments, **options: None)]


PLANTED: dict[str, Callable[[], list[Patch]]] = {
    "lease-kept": _keep_lease,
    "room-kept": _keep_room,
    "state-of-the-batch-before": _state_of_the_batch_before,
    "resumed-one-byte-on": _resume_one_byte_on,
    "place-kept": _keep_place_at_the_gate,
    "late-answers-open": _leave_late_answers_open,
    "entries-trusted": _trust_entries,
    "room-of-others": _take_room_of_others,
    "ready-lost": _lose_what_is_ready,
    "deadline-forgotten": _forget_the_deadline,
}

PLANTED_IN_BUILDS: dict[str, Callable[[], list[Patch]]] = {
    "record-before-outputs": _record_before_outputs,
    "index-before-files": _index_before_files,
    "marker-left": _leave_marker,
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """In the block, the package has the fault of this name."""
    with ExitStack() as stack:
        for holder, attribute, new in (PLANTED | PLANTED_IN_BUILDS)[name]():
            stack.enter_context(patch.object(holder, attribute, new))
        yield
