"""Ranks that stop together, as real processes: `python stop_ranks.py FOLDER` runs all scenarios at once.

torch is imported once and every rank is a fork, so that this takes the time of the longest waits only. A rank
ends as a script does, by returning or by an uncaught error. Its output is FOLDER/SCENARIO.RANK; how all of
them ended goes to FOLDER/ends.json.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from shardkit.errors import PeerError
from shardkit.loaders.peers import StopTogether
from shardkit.loaders.placement import rendezvous_store

WORLD_SIZE = 3
POLL_SECONDS = 0.1
GRACE_SECONDS = 0.6
LIMIT_SECONDS = 100.0


class Loader:
    """The loader that a `StopTogether` belongs to."""


LOADER = Loader()


def start(rank: int, **options: Any) -> StopTogether[Loader]:
    torch.distributed.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE)
    stop = StopTogether(LOADER, poll_seconds=POLL_SECONDS, **options)
    stop.watch()
    torch.distributed.all_reduce(torch.ones(4))
    return stop


def hang(rank: int) -> None:
    """Rank 1 fails but lives on, as it does when NCCL keeps its connections: the others' collective hangs."""
    stop = start(rank, grace_seconds=GRACE_SECONDS, end_seconds=0.5)
    if rank == 1:
        stop.report(ValueError("boom"), step=812)
        signal.pause()
    if rank == 2:  # as frameworks do; a loop in a collective never gets to run it
        signal.signal(signal.SIGTERM, lambda *_: None)
    torch.distributed.all_reduce(torch.ones(4))


def stay_away(rank: int) -> None:
    """Rank 1 fails; the others come to their next batch late, and nobody has asked to end them."""
    stop = start(rank)
    if rank == 1:
        stop.report(ValueError("boom"), step=812)
        signal.pause()
    time.sleep(3 * GRACE_SECONDS)
    step_until_error(stop)


def come_back(rank: int) -> None:
    """Rank 0 fails and ends, and the store with it; the others are between two batches."""
    fail_and_end(rank, start(rank, grace_seconds=GRACE_SECONDS))


def met_by_address(rank: int) -> None:
    """The same, with the connection that versions of torch before 2.8 get."""
    fail_and_end(rank, start(rank, connect=rendezvous_store))


def fail_and_end(rank: int, stop: StopTogether[Loader]) -> None:
    if rank == 0:
        stop.report(ValueError("boom"), step=812)
        raise ValueError("boom")
    step_until_error(stop)


def uncaught(rank: int) -> None:
    """Rank 0 fails outside its loader and reports nothing."""
    stop = start(rank)
    if rank == 0:
        raise ValueError("boom")
    step_until_error(stop)


def one_ends(rank: int) -> None:
    """Rank 0 is done, and the store gone, while the others still have batches."""
    stop = start(rank)
    time.sleep(rank * 5 * POLL_SECONDS)  # ranks that end one after another, at their own pace
    stop.check()
    stop.close()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("shardkit")]
    tell({"left": left})


def tell(value: object) -> None:
    sys.stdout.write(f"{json.dumps(value)}\n")
    sys.stdout.flush()


def step_until_error(stop: StopTogether[Loader]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    try:
        while time.monotonic() < deadline:
            stop.check()
            time.sleep(0.001)
    except PeerError as error:
        tell({"error": str(error), "rank": error.rank, "step": error.step})
        time.sleep(1.5 * GRACE_SECONDS)  # saves what it can; being back, it is not ended
        tell({"saved": True})


SCENARIOS = {each.__name__: each for each in (hang, stay_away, come_back, met_by_address, uncaught, one_ends)}
HELD = {"hang": [1], "stay_away": [1]}  # ranks that do not end by themselves


def fork(name: str, rank: int, folder: Path) -> int:
    """Start a rank; returns its process id, in the parent. The child returns 0 and is to run the scenario."""
    process = os.fork()
    if process == 0:
        output = os.open(folder / f"{name}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
    return process


def wait(ranks: dict[str, list[int]]) -> dict[str, list[dict[str, float]]]:
    """Exit codes (negative: the signal) and seconds; held ranks are killed when the others have ended."""
    began = time.monotonic()
    ends: dict[str, dict[int, dict[str, float]]] = {name: {} for name in ranks}
    while any(len(ends[name]) < WORLD_SIZE for name in ranks):
        seconds = time.monotonic() - began
        for name, processes in ranks.items():
            held, ended = HELD.get(name, []), ends[name]
            for rank, process in enumerate(processes):
                if rank in ended:
                    continue
                if seconds > LIMIT_SECONDS or (rank in held and len(ended) >= WORLD_SIZE - len(held)):
                    os.kill(process, signal.SIGKILL)
                found, status = os.waitpid(process, os.WNOHANG)
                if found:
                    ended[rank] = {"code": os.waitstatus_to_exitcode(status), "seconds": seconds}
        time.sleep(0.01)
    return {name: [ended[rank] for rank in range(WORLD_SIZE)] for name, ended in ends.items()}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(folder: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks: dict[str, list[int]] = {}
    gc.freeze()  # so that the ranks share the memory of what was imported, and end sooner
    for name, scenario in SCENARIOS.items():
        os.environ["MASTER_PORT"] = str(free_port())
        ranks[name] = []
        for rank in range(WORLD_SIZE):
            ranks[name].append(fork(name, rank, folder))
            if ranks[name][-1] == 0:
                return scenario(rank)
    (folder / "ends.json").write_text(json.dumps(wait(ranks)))
    return None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
