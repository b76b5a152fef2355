"""Where iterations of DataLoader workers start: every order in which workers come and go."""

from __future__ import annotations

import copy
import os
import pickle
from itertools import permutations

import pytest

from shardkit.errors import StateError
from shardkit.loaders.shared_cursor import MAX_WORKERS, Shared, SharedCursor, Worker

START, NEXT, LATER = (5, 1), (20, 0), (40, 0)
COUNT = 3


def workers(seed: int = 11, turn: int = 1) -> list[Worker]:
    return [Worker(number, COUNT, seed, turn) for number in range(COUNT)]


@pytest.mark.parametrize("order", list(permutations(range(COUNT))))
@pytest.mark.parametrize("late", range(COUNT + 1))
def test_an_iteration_starts_at_one_place_and_the_next_when_all_is_made(
    order: tuple[int, ...], late: int
) -> None:
    """`late` workers come only when the others have made all of their batches."""
    cursor = SharedCursor(START, 0)
    assert cursor.read() == Shared(START, START, by_workers=False)
    for seed, start, following in ((11, START, NEXT), (11, NEXT, LATER), (12, LATER, (60, 0))):
        entered: dict[int, int] = {}
        soon, afterwards = order[: COUNT - late], order[COUNT - late :]
        for group in (soon, afterwards):
            for number in group:
                entered[number], found = cursor.enter(workers(seed)[number], 0, None)
                assert found == start
            for number in reversed(group):
                assert cursor.read() == Shared(start, start, by_workers=True)
                cursor.mark_done(workers(seed)[number], entered[number], following)
        assert len(set(entered.values())) == 1
        assert cursor.read() == Shared(start, following, by_workers=True)


def test_an_iteration_that_was_left_starts_again_whoever_was_ready() -> None:
    cursor = SharedCursor(START, 0)
    left = {w.number: cursor.enter(w, 0, None)[0] for w in workers()[:2]}
    cursor.mark_done(workers()[0], left[0], NEXT)
    again = {w.number: cursor.enter(w, 0, None) for w in workers(seed=12)}
    assert [start for _, start in again.values()] == [START] * COUNT
    for number in range(COUNT):  # one of the former workers is still at it
        cursor.mark_done(workers(seed=12)[number], again[number][0], NEXT)
    cursor.mark_done(workers()[1], left[1], LATER)
    assert cursor.read().next == NEXT


@pytest.mark.parametrize("first", range(COUNT + 1))
def test_workers_that_come_to_an_iteration_that_was_left_begin_nothing(first: int) -> None:
    """Of a StreamingDataLoader; `first` of them have begun the next one already."""
    cursor, team = SharedCursor(START, 0), -4
    assert cursor.enter(workers(team)[0], 0, None)[1] == START
    cursor.begin(NEXT, 0, left=(team, 1))
    number = cursor.read().iteration
    begun = [cursor.enter(worker, 0, None) for worker in workers(team, turn=2)[:first]]
    late = [cursor.enter(worker, 0, None) for worker in workers(team)[1:]]
    for worker, (iteration, _) in zip(workers(team)[1:], late, strict=True):
        cursor.mark_done(worker, iteration, LATER)
    begun += [cursor.enter(worker, 0, None) for worker in workers(team, turn=2)[first:]]
    assert begun == [(number + 1, NEXT)] * COUNT
    assert cursor.read() == Shared(NEXT, NEXT, by_workers=True)


def test_workers_of_an_iteration_that_is_over_change_nothing() -> None:
    cursor = SharedCursor(START, 0)
    entered = [cursor.enter(worker, 0, None)[0] for worker in workers()]
    cursor.begin(LATER, 0)
    for worker, iteration in zip(workers(), entered, strict=True):
        cursor.mark_done(worker, iteration, NEXT)
    assert cursor.read() == Shared(LATER, LATER, by_workers=False)


def test_workers_that_continue_a_saved_iteration_start_where_it_did() -> None:
    """Though their seed is that of an iteration of this very process."""
    cursor = SharedCursor(START, 0)
    for saved in (LATER, NEXT):
        assert {cursor.enter(worker, 0, saved)[1] for worker in workers()} == {saved}
    assert cursor.enter(workers(turn=2)[0], 0, None)[1] == NEXT
    with pytest.raises(StateError, match="same iteration"):
        cursor.enter(workers(turn=2)[1], 0, LATER)


def test_workers_start_where_an_iteration_without_them_has_come_to() -> None:
    cursor = SharedCursor(START, 0)
    cursor.move(NEXT)
    assert cursor.read() == Shared(NEXT, NEXT, by_workers=False)
    assert cursor.enter(workers()[2], 0, None)[1] == NEXT


def test_a_worker_with_other_settings_is_refused() -> None:
    cursor = SharedCursor(START, 7)
    with pytest.raises(StateError, match="new DataLoader"):
        cursor.enter(workers()[0], 8, None)
    with pytest.raises(ValueError, match="the limit is"):
        cursor.enter(Worker(0, MAX_WORKERS + 1, 0, 1), 7, None)


def test_a_copy_and_a_forked_process_that_is_no_worker_are_on_their_own() -> None:
    cursor = SharedCursor(START, 0)
    for copied in (pickle.loads(pickle.dumps(cursor)), copy.deepcopy(cursor)):
        assert copied.read() == cursor.read()
        copied.begin(LATER, 0)
        assert cursor.read().start == START
    child = os.fork()
    if not child:
        cursor.begin(LATER, 0)
        os._exit(int(cursor.read().start != LATER))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert cursor.read().start == START
