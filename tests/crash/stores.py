"""Builds whose work folder and output are stores that fail at one operation, and the same command again.

Tasks run in this process, so that stores in its memory do. After each operation on the output a reader looks.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from unittest.mock import patch

from crash.builds import differences, make_recipe
from crash.victims import expire_quickly
from shardkit.errors import ShardkitError
from shardkit.storage.memory import MemoryStore
from shardkit.storage.retry import RetryPolicy
from shardkit.storage.store import Store
from shardkit.writers import BuildResult, build
from shardkit.writers.execution import scratch
from shardkit.writers.execution import work as work_module
from shardkit.writers.execution.engine import InlineEngine
from shardkit.writers.execution.processes import run_guarded
from support.stores import (
    FakeClock,
    FalseIndexError,
    FaultRule,
    FaultyStore,
    Operation,
    PulledPlugError,
    RequestFault,
    WatchedStore,
    check_reader,
    objects,
)

__all__ = ["FAULTS", "Place", "StoreCell", "StoreCrashes", "StoreOutcome"]

Fault = Literal["deny", "lost_ack", "error", "outage", "plug", "late plug"]
Place = Literal["work", "out"]
FAULTS: tuple[Fault, ...] = ("deny", "lost_ack", "error", "outage", "plug", "late plug")
ENDURED = ("lost_ack", "error")  # the build must not even mind
_CLOCK = FakeClock()
_POLICY = RetryPolicy(
    backoff_seconds=12.0,
    longest_backoff_seconds=100.0,
    deadline_seconds=60.0,
    first_contact_seconds=60.0,
    hedge=False,
    clock=_CLOCK,
    sleep=_CLOCK.sleep,
    jitter=lambda: 1.0,
)
"""Three attempts, at once."""
_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True)
class StoreCell:
    """A fault of operation `number` (from 1) on one of the stores: of all operations, or of a kind of them
    on keys with a match of `key`.

    It is denied (403), its answer is lost, or it fails once; with an outage it and all later ones fail; with
    a plug the process is gone before it, or (late) just after its effect.
    """

    fault: Fault
    place: Place
    number: int
    operation: Operation = "any"
    key: str = ""

    def __str__(self) -> str:
        kind = f"{self.operation} of {self.key} " if self.key else "operation "
        return f"{self.fault}, {self.place}, {kind}{self.number}"


@dataclass
class StoreOutcome:
    """What came of it. `struck`: whether the fault met an operation."""

    cell: StoreCell
    struck: bool = False
    error: str = ""
    problems: list[str] = field(default_factory=list)


class StoreCrashes:
    """A corpus, and what builds of it put into stores. `operations`: how many an undisturbed build takes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._recipe = make_recipe(folder / "corpus")
        places = _fresh()
        watched = {url: WatchedStore(store) for url, store in places.items()}
        result = self._build(places, dict(watched))
        self._fingerprint = result.fingerprint
        self.expected = {name: data.hex() for name, data in objects(list(places.values())[1]).items()}
        names: tuple[Place, Place] = ("work", "out")
        self.operations = {
            name: store.operations for name, store in zip(names, watched.values(), strict=True)
        }
        self._forget()

    def run(self, cell: StoreCell) -> StoreOutcome:
        """Do it, and look at everything."""
        outcome = StoreOutcome(cell)
        places = _fresh()
        work, out = places.values()

        def look(number: int = 0) -> None:
            check_reader(out, {self._fingerprint})

        limit = cell.number if "plug" in cell.fault else None
        late = cell.fault == "late plug"
        in_work = cell.place == "work"
        made = {
            work.url: WatchedStore(work, limit=limit if in_work else None, late=late),
            out.url: WatchedStore(out, limit=None if in_work else limit, late=late, watch=look),
        }
        stores: dict[str, Store] = dict(made)
        url = work.url if in_work else out.url
        if limit is None:
            stores[url] = FaultyStore(stores[url], [_rule(cell)])
        self._first_run(outcome, places, stores)
        faulty = stores[url]
        met = made[url].operations >= cell.number
        outcome.struck = bool(faulty.log) if isinstance(faulty, FaultyStore) else met
        self._second_run(outcome, places, {work.url: work, out.url: WatchedStore(out, watch=look)})
        found = {name: data.hex() for name, data in objects(out).items()}
        outcome.problems += differences(found, self.expected)
        return outcome

    def _first_run(
        self, outcome: StoreOutcome, places: dict[str, MemoryStore], stores: dict[str, Store]
    ) -> None:
        fault = outcome.cell.fault
        try:
            self._build(places, stores)
        except PulledPlugError:
            outcome.error = "(killed)"
        except ShardkitError as error:
            outcome.error = str(error)
            if fault in ENDURED:
                outcome.problems.append(f"was not endured: {error}")
            if not any(place in outcome.error for place in places):
                outcome.problems.append(f"does not say where: {error}")
        except (Exception, FalseIndexError) as error:
            outcome.problems.append(f"{type(error).__name__}: {error}")
        finally:
            self._forget()

    def _second_run(
        self, outcome: StoreOutcome, places: dict[str, MemoryStore], stores: dict[str, Store]
    ) -> None:
        try:
            self._build(places, stores)
        except (Exception, FalseIndexError) as error:
            outcome.problems.append(f"second run: {type(error).__name__}: {error}")
        finally:
            self._forget()
            shutil.rmtree(self._folder / "scratch", ignore_errors=True)

    def _build(self, places: dict[str, MemoryStore], stores: dict[str, Store]) -> BuildResult:
        work, out = places
        changes = [f"work={work}", f"scratch={self._folder / 'scratch'}", f"output.path={out}"]
        with _reached(stores):
            return build(self._recipe, overrides=changes, progress=False)

    @staticmethod
    def _forget() -> None:
        """What the end of a process does."""
        work_module._connect.cache_clear()
        work_module._outputs.cache_clear()
        for descriptor in scratch._locks.values():
            os.close(descriptor)
        scratch._locks.clear()


@contextmanager
def _reached(stores: dict[str, Store]) -> Iterator[None]:
    """URLs lead to these stores, operations are retried twice, at once, and the dead are soon known."""
    with (
        expire_quickly(),
        patch("shardkit.storage.resilient.open_store", lambda url, options=None: stores[str(url)]),
        patch("shardkit.storage.resilient.RetryPolicy.of", lambda *_, **__: _POLICY),
        patch("shardkit.writers.executors.LocalEngine", lambda workers, **options: InlineEngine(run_guarded)),
    ):
        yield


def _fresh() -> dict[str, MemoryStore]:
    """Stores that nobody has used, by URL: of the work folder and of the output."""
    name = f"memory://crashes-{next(_numbers)}"
    return {url: MemoryStore(url) for url in (f"{name}/work", f"{name}/out")}


def _rule(cell: StoreCell) -> FaultRule:
    faults: dict[str, RequestFault] = {"deny": "deny", "lost_ack": "lost_ack", "error": "error"}
    return FaultRule(
        fault=faults.get(cell.fault, "error"),
        operation=cell.operation,
        key=cell.key,
        skip=cell.number - 1,
        count=None if cell.fault == "outage" else 1,
    )
