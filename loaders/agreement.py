"""Raises an error before the first batch if the ranks have different settings.

`RankAgreement.check` compares, when an iteration begins, everything that decides order, number of steps and
position: a loader's whole state, its batch size and world size, and its options (those of `shared_by_ranks`).
A rank with another seed would repeat rows of other ranks and leave out its own; a rank with another batch
size would end its epoch at another step and leave the others hanging in a collective.

The ranks meet in the store of the process group, under one key per loader and iteration. The first process
stores its settings there. Each later process compares the digest of its settings with the digest of the
first. A process whose settings differ stores a description of the differences, and every waiting process
raises it as an error. If all agree, the last one stores the outcome "open", and all continue. Each process
sends about seven small requests to the store, at any world size.

**Which processes meet.** Without replicas, all processes of the world or group meet: each process numbers
its loaders, and loaders with the same number are compared, even if they have opened different data. Where
processes may be replicas (tensor and pipeline parallel peers; more processes than ranks), they need not all
have the same loaders, so only loaders that have opened the same data meet. All are compared with the first.
The members of a mesh, or of a slice of one, wait for each other. For ranks given as numbers, only one process
of each rank is waited for, and a replica that comes later is compared with the stored settings. Nothing is
compared without the store of a process group, by DataLoader workers, or by a single process. No process waits
for ranks that do not exist: with the backend "fake", or if there are more ranks than processes.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from shardkit.errors import RanksDisagreeError, ShardkitError, warn_user
from shardkit.loaders.peers import StopTogether
from shardkit.loaders.placement import (
    CountingStore,
    Place,
    dataloader_workers,
    distributed_in_use,
    group_store,
    run_key,
)
from shardkit.loaders.producer import LoaderTimeoutError
from shardkit.storage.running_clock import running_seconds

_WARN_SECONDS = 30.0  # wait before a warning; long, because ranks already met in init_process_group
_LONGEST_PAUSE = 0.1  # longest pause between two checks of the store, in seconds
_CHECKS_PER_SECOND = 4096  # checks of the store by all ranks together; they cost rank 0 5 % of a core
_NAMED_RANKS = 8  # maximum number of missing ranks that a message names
_NAMED_CHARACTERS = 200  # maximum length of a setting's value in a message, in characters
_REPLICAS = "replicas of this rank have"  # result of `_missing` if every rank has come, but not all replicas
_OPEN = "open"  # outcome that is stored if the settings of all processes agree


class RankAgreement:
    """Compares the settings of one loader with those of the same loader in other processes."""

    def __init__(self, place: Place, peers: StopTogether[Any], *, timeout_seconds: float) -> None:
        """`peers` raises errors of other ranks while this rank waits, and reports errors of this rank."""
        self._place, self._peers, self._timeout_seconds = place, peers, timeout_seconds
        self._key: str | None = None  # key of this loader in the store; None before its first check
        self._meetings = 0
        self._members = place.members

    @property
    def has_met(self) -> bool:
        """Whether settings have been compared at least once."""
        return self._meetings > 0

    def may_have_replicas(self) -> bool:
        """Return whether other processes may have the same data-parallel rank and get the same batches."""
        distributed = distributed_in_use()
        if distributed is None:
            return False
        if self._place.source == "group":
            return False
        return max(len(self._members), int(distributed.get_world_size())) > self._place.world_size

    def check(self, settings: Mapping[str, object], *, data: Sequence[str]) -> None:
        """Compare `settings` (plain data) between all ranks; wait until every rank has called this method.

        `data`: fingerprints of the opened datasets. Raises RanksDisagreeError on all ranks if settings
        differ, LoaderTimeoutError if a rank does not call in time, PeerError if a rank fails meanwhile.
        """
        distributed = distributed_in_use()
        if distributed is None or dataloader_workers():
            return
        if max(self._place.world_size, len(self._members)) == 1:
            return
        try:
            if (store := group_store()) is not None:
                process = int(distributed.get_rank())
                key = f"{self._key_of_loader(store, process, data)}/{self._meetings}"
                self._meetings += 1
                waits = distributed.get_backend() != "fake"
                waits &= int(distributed.get_world_size()) >= self._place.world_size
                meeting = _Meeting(store, key, self._place, process, self._timeout_seconds, self._peers.check)
                meeting.compare(settings, counts_processes=not self.may_have_replicas())
                if waits:
                    meeting.await_others()
        except RuntimeError:
            return  # not compared: the store is gone, or is a FileStore, which lacks some calls
        except ShardkitError as error:
            self._peers.report(error)  # also stops processes that have no loader or do not wait here
            raise

    def _key_of_loader(self, store: CountingStore, process: int, data: Sequence[str]) -> str:
        """Return this loader's key. The store counts the loaders, because it may outlive a process group."""
        if self._key is None:
            scope = [f"{self._members}" if self._place.source == "group" else ""]
            if self.may_have_replicas():
                scope += [f"{self._place.world_size}", *data]
            name = hashlib.blake2b("\0".join(scope).encode(), digest_size=8).hexdigest()
            base = f"{run_key()}/agree/{name}"
            self._key = f"{base}/{store.add(f'{base}/process/{process}', 1)}"
        return self._key


class _Meeting:
    """The part of one process in one comparison of settings by all ranks."""

    def __init__(
        self,
        store: CountingStore,
        key: str,
        place: Place,
        process: int,
        timeout_seconds: float,
        on_wait: Callable[[], None],
    ) -> None:
        self._store, self._key, self._place, self._process = store, key, place, process
        # All slices of a mesh are compared with each other, but a process waits only for its own slice.
        self._waiting = f"{key}/{hashlib.blake2b(repr(place.members).encode(), digest_size=8).hexdigest()}"
        self._timeout_seconds, self._on_wait = timeout_seconds, on_wait

    def compare(self, settings: Mapping[str, object], *, counts_processes: bool) -> None:
        """Compare `settings` with the settings of the first process, and count this rank as agreeing.

        `counts_processes`: each rank has exactly one process, so a second process of this rank is an error.
        """
        store, key, rank = self._store, self._key, self._place.rank
        text = json.dumps(settings, sort_keys=True, default=repr)
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        mine = f"{digest} {self._process}"
        first = store.compare_set(f"{key}/first", "", mine).decode()
        if first == mine:
            who = [rank, self._name(self._process)]
            store.set(f"{key}/settings", json.dumps([*who, json.loads(text)]))
        elif not first.startswith(digest):
            self._await(f"{key}/settings")
            other_rank, name, other = json.loads(store.get(f"{key}/settings"))
            sides = [(other_rank, name, other), (rank, self._name(self._process), json.loads(text))]
            (_, *one), (_, *two) = sorted(sides, key=itemgetter(0))
            self._refuse("\n".join(_differences((one[0], one[1]), (two[0], two[1]))))
        holder = int(store.compare_set(f"{self._waiting}/rank/{rank}", "", f"{self._process}"))
        if holder != self._process and counts_processes:
            both = f"processes {min(holder, self._process)} and {max(holder, self._process)}"
            self._refuse(f"  rank: {both} are both rank {rank} of {self._place.world_size}")
        counts = holder == self._process or bool(self._place.members)
        if counts and store.add(f"{self._waiting}/count", 1) == self._expected:
            self._settle(_OPEN)

    def await_others(self) -> None:
        """Wait until all ranks have come; raise RanksDisagreeError if one differs."""
        self._await(f"{self._waiting}/outcome", is_outcome=True)
        if (outcome := self._store.get(f"{self._waiting}/outcome").decode()) != _OPEN:
            raise RanksDisagreeError(outcome)

    @property
    def _expected(self) -> int:
        return len(self._place.members) or self._place.world_size

    def _settle(self, outcome: str) -> str:
        """Store the outcome of the comparison unless one is stored already; return the stored outcome."""
        return self._store.compare_set(f"{self._waiting}/outcome", "", outcome).decode()

    def _refuse(self, lines: str) -> None:
        """Raise RanksDisagreeError here and in every process that waits."""
        problem = (
            f"the ranks of this run disagree:\n{lines}\ngive every rank the same settings, data and state "
            "(the rank alone divides the rows, so do not add it to the seed); processes that train "
            "different models each need the process group of their model, group=…"
        )
        outcome = self._settle(problem)
        raise RanksDisagreeError(problem if outcome == _OPEN else outcome)

    def _await(self, key: str, *, is_outcome: bool = False) -> None:
        """Wait until the store has `key`; raise LoaderTimeoutError with the missing ranks after the timeout.

        With `is_outcome`, the wait ends after `_WARN_SECONDS` without an error if only replicas are missing.
        """
        began, pause, has_warned = running_seconds(), 0.001, False
        longest = max(_LONGEST_PAUSE, self._place.world_size / _CHECKS_PER_SECOND)
        while not self._store.check([key]):
            self._on_wait()
            waited = running_seconds() - began
            if waited >= self._timeout_seconds:
                raise LoaderTimeoutError(
                    f"{self._name(self._process)}: {self._missing()} not begun to read within "
                    f"{self._timeout_seconds:g} s (timeout_seconds): all ranks must iterate over the loader "
                    "together; give a loader that only one process reads rank=0, world_size=1"
                )
            if waited >= _WARN_SECONDS and not has_warned:
                has_warned = True
                missing = self._missing()
                if is_outcome and missing == _REPLICAS:
                    self._settle(_OPEN)
                    return
                warn_user(
                    f"{self._name(self._process)}: {missing} not begun to read for {waited:.0f} s; "
                    f"waiting up to {self._timeout_seconds:g} s (timeout_seconds)"
                )
            time.sleep(min(pause, self._timeout_seconds - waited))
            pause = min(2 * pause, longest)

    def _missing(self) -> str:
        """Return the beginning of a sentence about the ranks that have not come, such as "rank 3 has"."""
        away = [
            rank
            for rank in range(self._place.world_size)
            if not self._store.check([f"{self._waiting}/rank/{rank}"])
        ]
        if not away:
            return _REPLICAS
        named = ", ".join(map(str, away[:_NAMED_RANKS]))
        more = f" and {len(away) - _NAMED_RANKS:,} more" if len(away) > _NAMED_RANKS else ""
        return f"rank {named} has" if len(away) == 1 else f"ranks {named}{more} have"

    def _name(self, process: int) -> str:
        rank = f"rank {self._place.rank}"
        return rank if self._place.rank == process else f"{rank} (process {process})"


def _differences(one: tuple[str, object], two: tuple[str, object], setting: str = "") -> list[str]:
    """Return one line per value that differs between two (process, settings) pairs."""
    (process, value), (other_process, other) = one, two
    pairs: list[tuple[str, object, object]]
    if isinstance(value, dict) and isinstance(other, dict):
        prefix = f"{setting}." if setting else ""
        pairs = [(f"{prefix}{key}", value.get(key), other.get(key)) for key in {**value, **other}]
    elif isinstance(value, list) and isinstance(other, list) and _are_entries(value, other):
        pairs = [(f"{setting}[{i}]", *each) for i, each in enumerate(zip(value, other, strict=True))]
    elif value == other:
        return []
    else:
        return [f"  {setting}: {_short(value)} on {process}, {_short(other)} on {other_process}"]
    found = (_differences((process, mine), (other_process, its), name) for name, mine, its in pairs)
    return [line for lines in found for line in lines]


def _are_entries(value: list[object], other: list[object]) -> bool:
    """Return whether two lists can be compared entry by entry: same length, no nested lists."""
    return len(value) == len(other) and not any(isinstance(each, list) for each in [*value, *other])


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _NAMED_CHARACTERS else f"{text[:_NAMED_CHARACTERS]}…"
