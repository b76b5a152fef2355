"""Random runs of real loaders and caches on a virtual machine keep all promises; a seed replays one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from simulation.builds import simulate_build
from simulation.planted import PLANTED, PLANTED_IN_BUILDS, planted
from simulation.scheduler import Scheduler, StuckError
from simulation.threads import Condition, Lock, Thread
from simulation.training import simulate
from simulation.world import BrokenPromiseError, Outcome

STEPS, BUILD_STEPS = 1_000_000, 300_000


def test_two_runs_of_a_seed_take_the_same_steps() -> None:
    first, second, other = simulate(5), simulate(5), simulate(0)
    assert first == second
    assert first.digest != other.digest


@pytest.mark.parametrize("seed", [0, 8])
def test_a_run_reads_every_sample_once_whatever_befalls_it(seed: int) -> None:
    outcome = simulate(seed)
    assert outcome.samples > 0
    assert outcome.steps > 1000


def test_builds_of_several_machines_publish_what_one_process_makes() -> None:
    assert simulate_build(3) == simulate_build(3)
    for seed in (1, 2):
        assert simulate_build(seed).incarnations > 0


@pytest.mark.extended
@pytest.mark.timeout(900)
def test_three_hundred_thousand_steps_of_builds_keep_every_promise() -> None:
    steps = kills = 0
    for seed in range(100, 10_000):
        outcome = simulate_build(seed)
        steps, kills = steps + outcome.steps, kills + outcome.kills
        if steps >= BUILD_STEPS:
            break
    assert steps >= BUILD_STEPS
    assert kills > 10


@pytest.mark.extended
@pytest.mark.timeout(900)
@pytest.mark.parametrize("run", [simulate, simulate_build])
def test_interruptions_between_any_two_lines_break_no_promise(run: Callable[..., Outcome]) -> None:
    assert run(40, lines=True) == run(40, lines=True)
    for seed in range(41, 46):
        run(seed, lines=True)


@pytest.mark.extended
@pytest.mark.timeout(900)
def test_a_million_steps_keep_every_promise() -> None:
    steps = kills = starts = 0
    for seed in range(100, 10_000):
        outcome = simulate(seed)
        steps, kills, starts = steps + outcome.steps, kills + outcome.kills, starts + outcome.incarnations
        if steps >= STEPS:
            break
    assert steps >= STEPS
    assert kills > 10
    assert starts > 30


def find(fault: str, runs: int) -> Exception | None:
    """What the first of `runs` runs that a planted fault breaks says."""
    run = simulate_build if fault in PLANTED_IN_BUILDS else simulate
    for seed in range(runs):
        try:
            with planted(fault):
                run(seed)
        except Exception as error:
            return error
    return None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", ["lease-kept", "ready-lost", "index-before-files"])
def test_a_planted_fault_is_found_within_a_few_runs(fault: str) -> None:
    assert isinstance(find(fault, 4), BrokenPromiseError)


@pytest.mark.extended
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", PLANTED | PLANTED_IN_BUILDS)
def test_every_planted_fault_is_found(fault: str) -> None:
    assert find(fault, 100) is not None


def test_a_deadlock_ends_a_run_with_the_stacks_of_all_who_wait() -> None:
    def take_two(first: Lock, second: Lock, scheduler: Scheduler) -> None:
        with first:
            scheduler.sleep(1.0)
            with second:
                pass

    def direct() -> None:
        one, two = Lock(), Lock()
        threads = [Thread(target=take_two, args=(*pair, scheduler)) for pair in ((one, two), (two, one))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    scheduler = Scheduler(1)
    with pytest.raises(StuckError, match="deadlock") as caught:
        scheduler.run(direct)
    assert str(caught.value).count("in take_two") == 2


def test_a_killed_process_takes_no_further_step_and_a_suspended_one_waits() -> None:
    seen: list[tuple[str, float]] = []

    def count(name: str) -> None:
        while True:
            scheduler.sleep(1.0)
            seen.append((name, scheduler.now - 1000.0))

    def direct() -> None:
        killed, suspended = (scheduler.process(name, lambda name=name: count(name)) for name in ("a", "b"))  # type: ignore[misc]
        scheduler.sleep(2.5)
        scheduler.kill(killed)
        scheduler.suspend(suspended, 1e9)
        scheduler.sleep(10.0)
        scheduler.resume(suspended)
        scheduler.sleep(0.1)

    scheduler = Scheduler(1)
    scheduler.stall = 0.0
    scheduler.run(direct)
    assert [round(when) for name, when in seen if name == "a"] == [1, 2]
    assert [round(when, 1) for name, when in seen if name == "b"] == [1.0, 2.0, 12.5]


def test_a_waiter_that_is_not_notified_waits_for_its_time() -> None:
    times: list[float] = []

    def direct() -> None:
        condition = Condition()
        with condition:
            assert not condition.wait(3.0)
            times.append(scheduler.now - 1000.0)

    scheduler = Scheduler(1)
    scheduler.run(direct)
    assert round(times[0], 2) == 3.0
