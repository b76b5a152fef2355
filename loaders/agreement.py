"""Ranks that disagree are an error before the first batch.

`RankAgreement.check` compares, when an iteration begins, everything that decides order, number of steps and
position: a loader's whole state, its batch size and world size, and its options (`StreamingLoader` says
which). A rank with another seed would deliver rows that others deliver too and leave out as many; a rank with
another batch size ends its epoch at another step, where the others hang in a collective.

The ranks meet in the store of the process group, under a key for each loader and each of its iterations. The
first to come leaves its settings there. Each other rank compares a digest with the first one's; one that
differs writes what differs, and everyone who waits raises that same error. The last rank to come without a
difference opens the way. About seven small requests to the store for each process, whatever the world size.

**Which processes meet.** Without replicas, those of the world or group: their loaders are counted, so that
the k-th of each rank meet, whatever data each has opened. Where processes may be replicas (tensor and
pipeline parallel peers; more processes than ranks), they need not all have the same loaders: loaders meet
that have opened the same data. All of them are compared with the first. The members of a mesh, or of a slice
of one, wait for each other; of ranks given as numbers, one process of each is waited for, and a replica that
comes later is compared with what is there. Nothing is compared without the store of a process group, by
DataLoader workers, or by a single process. Ranks that cannot come (the backend "fake", more ranks than
processes) are not waited for.
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

_WARN_SECONDS = 30.0  # of waiting: ranks have met in init_process_group, and come one after another
_LONGEST_PAUSE = 0.1  # between two looks at the store
_CHECKS_PER_SECOND = 4096  # of all ranks together: 5 % of a core of rank 0, as in `peers`
_NAMED_RANKS = 8  # that are missing, in a message
_NAMED_CHARACTERS = 200  # of a value, in a message
_REPLICAS = "replicas of this rank have"  # if nobody else is missing
_OPEN = "open"  # what the key of the outcome holds if nobody differs


class RankAgreement:
    """Compares the settings of one loader with those of the same loader in other processes."""

    def __init__(self, place: Place, peers: StopTogether[Any], *, timeout_seconds: float) -> None:
        """`peers`: hears errors of other ranks while this one waits, and tells them this rank's."""
        self._place, self._peers, self._timeout_seconds = place, peers, timeout_seconds
        self._key: str | None = None  # of this loader, once it has met others
        self._meetings = 0
        self._members = place.members

    @property
    def has_met(self) -> bool:
        """Whether settings were compared before."""
        return self._meetings > 0

    def may_have_replicas(self) -> bool:
        """Whether other processes may be the same rank and get the same batches as this one."""
        distributed = distributed_in_use()
        if distributed is None:
            return False
        if self._place.source == "group":
            return False
        return max(len(self._members), int(distributed.get_world_size())) > self._place.world_size

    def check(self, settings: Mapping[str, object], *, data: Sequence[str]) -> None:
        """Return once every rank has come with equal `settings`, which are plain data.

        `data`: fingerprints of what was opened. Raises RanksDisagreeError on all ranks if they differ,
        LoaderTimeoutError if a rank does not come in time, PeerError if one fails meanwhile.
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
            return  # the store is gone, or is one of files, which lacks a call
        except ShardkitError as error:
            self._peers.report(error)  # also to processes that have no loader, or were not waited for
            raise

    def _key_of_loader(self, store: CountingStore, process: int, data: Sequence[str]) -> str:
        """The key of this loader; its number is counted in the store, which may outlive a process group."""
        if self._key is None:
            scope = [f"{self._members}" if self._place.source == "group" else ""]
            if self.may_have_replicas():
                scope += [f"{self._place.world_size}", *data]
            name = hashlib.blake2b("\0".join(scope).encode(), digest_size=8).hexdigest()
            base = f"{run_key()}/agree/{name}"
            self._key = f"{base}/{store.add(f'{base}/process/{process}', 1)}"
        return self._key


class _Meeting:
    """One comparison, as one process takes part in it."""

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
        # Slices of a mesh are compared with each other, and each waits for its own members.
        self._waiting = f"{key}/{hashlib.blake2b(repr(place.members).encode(), digest_size=8).hexdigest()}"
        self._timeout_seconds, self._on_wait = timeout_seconds, on_wait

    def compare(self, settings: Mapping[str, object], *, counts_processes: bool) -> None:
        """Compare with the first process's settings, and count this rank among those that agree.

        `counts_processes`: each rank is one process, so a second one of this rank is an error.
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
        """Return when all ranks have come; raise the error of one that differs."""
        self._await(f"{self._waiting}/outcome", is_outcome=True)
        if (outcome := self._store.get(f"{self._waiting}/outcome").decode()) != _OPEN:
            raise RanksDisagreeError(outcome)

    @property
    def _expected(self) -> int:
        return len(self._place.members) or self._place.world_size

    def _settle(self, outcome: str) -> str:
        """Store the outcome unless there is one; return what is there."""
        return self._store.compare_set(f"{self._waiting}/outcome", "", outcome).decode()

    def _refuse(self, lines: str) -> None:
        """Raise the error, which everyone who waits raises too."""
        problem = (
            f"the ranks of this run disagree:\n{lines}\ngive every rank the same settings, data and state "
            "(rows are divided by the rank alone; a seed needs no rank added); processes that train "
            "different models each need the process group of their model, group=…"
        )
        outcome = self._settle(problem)
        raise RanksDisagreeError(problem if outcome == _OPEN else outcome)

    def _await(self, key: str, *, is_outcome: bool = False) -> None:
        """Wait for a key of the store; LoaderTimeoutError names the ranks that have not come.

        The outcome is not waited for much longer if all ranks have come, and only replicas are missing.
        """
        began, pause, has_warned = running_seconds(), 0.001, False
        longest = max(_LONGEST_PAUSE, self._place.world_size / _CHECKS_PER_SECOND)
        while not self._store.check([key]):
            self._on_wait()
            waited = running_seconds() - began
            if waited >= self._timeout_seconds:
                raise LoaderTimeoutError(
                    f"{self._name(self._process)}: {self._missing()} not begun to read within "
                    f"{self._timeout_seconds:g} s (timeout_seconds): all ranks iterate over the loader "
                    "together; a loader that one process reads alone needs rank=0, world_size=1"
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
        """Name the ranks that have not come, as the beginning of a sentence."""
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
    """Return a line for each value that differs between the (process, settings) `one` and `two`."""
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
    """Whether lists have an entry for each stream, of which each that differs is named."""
    return len(value) == len(other) and not any(isinstance(each, list) for each in [*value, *other])


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _NAMED_CHARACTERS else f"{text[:_NAMED_CHARACTERS]}…"
