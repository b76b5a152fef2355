"""Finds what a run has left about itself: the states of its loader in checkpoints, and its usage logs.

A path is a file (a state as JSON, or a torch checkpoint that contains one), a pattern of such files, a folder
of them, or a folder of usage logs (loader option usage_log). All of them must be of one run: the settings of
the furthest state count. Usage logs also know batch size and number of ranks, and a state of a loader with
`global_batch` the size of a step, so that nobody has to give these again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardkit.datasets.provenance.run import Keys, find_state, find_states
from shardkit.errors import ShardkitError, StateError
from shardkit.formats.usage_log import SUFFIX
from shardkit.order.state import LoaderState
from shardkit.tools.audit.findings import Findings
from shardkit.tools.audit.logs import find_runs

_ENDINGS = (".json", ".pt", ".pth", ".ckpt", ".bin")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loader's state in a file; `keys` lead to it in what the file holds."""

    file: Path
    keys: Keys
    state: LoaderState


@dataclass(frozen=True, slots=True)
class SavedRun:
    """The checkpoints of a run by ascending position, and its furthest state, which may be of usage logs.

    `sizes` has batch_size, world_size and accumulate if they are known, else it is empty. `logged` is the
    position that usage logs reach, None without them. `unread` says which files of folders cannot be read.
    """

    checkpoints: tuple[Checkpoint, ...]
    state: LoaderState
    sizes: dict[str, int]
    logged: int | None = None
    unread: tuple[str, ...] = ()


def read_run(paths: Sequence[str]) -> SavedRun:
    """Read all states and usage logs at `paths`. Raises StateError or ShardkitError if they do not fit."""
    found: list[Checkpoint] = []
    logged: LoaderState | None = None
    sizes: dict[str, int] = {}
    unread: list[str] = []
    for text in paths:
        path = Path(text)
        if path.is_dir() and any(path.glob(f"*{SUFFIX}")):
            logged, sizes = _of_usage_logs(path)
        elif path.is_dir():
            found += _of_folder(path, sorted(path.iterdir()), unread)
        elif any(mark in text for mark in "*?[") and not path.exists():
            base = Path(path.anchor)
            found += _of_folder(path, sorted(base.glob(str(path.relative_to(base)))), unread)
        else:
            state, keys = find_state(path)
            found.append(Checkpoint(path, keys, state))
    found.sort(key=lambda one: one.state.position)
    states = [one.state for one in found] + ([] if logged is None else [logged])
    furthest = max(states, key=lambda state: state.position)
    for one in found:
        if differences := one.state.settings.differences(furthest.settings, one.state.position):
            what = "; ".join(f"{each.what} {each.before}, not {each.now}" for each in differences)
            raise StateError(f"{one.file}: is of another run than the furthest state: {what}")
    steps = None if furthest.step_sizes is None else furthest.step_sizes.to_list()
    if not sizes and steps is not None and len(steps) == 1 and furthest.settings.tail == "carry":
        sizes = {"batch_size": steps[0][1], "world_size": 1, "accumulate": 1}
    reached = None if logged is None else logged.position
    return SavedRun(tuple(found), furthest, sizes, reached, tuple(unread))


def _of_folder(path: Path, files: Sequence[Path], unread: list[str]) -> list[Checkpoint]:
    """Return the files that contain a state; other files, such as those of a model, need not.

    Adds to `unread` why a file cannot be read: a killed run leaves such, and trainers other pickles.
    """
    found = []
    for file in files:
        if file.suffix not in _ENDINGS or not file.is_file():
            continue
        try:
            states = find_states(file)
        except StateError as error:
            unread.append(str(error))
            continue
        if len(states) > 1:
            raise StateError(f"{file}: holds {len(states)} different states of loaders: name one file")
        found += [Checkpoint(file, keys, state) for state, keys in states]
    if not found:
        raise StateError(
            f"{path}: has no file ({', '.join(_ENDINGS)}) that holds a loader's state, and no usage logs"
            + "".join(f"; {one}" for one in unread[:1])
        )
    return found


def _of_usage_logs(folder: Path) -> tuple[LoaderState, dict[str, int]]:
    """Return the state that the logs reach, and the sizes of its batches."""
    runs = [run for run in find_runs(folder, Findings()) if run.stop is None or run.stop > run.start]
    last = runs[-1]
    for run in runs:
        if run.world_size * run.batch_size != last.world_size * last.batch_size:
            before, now = (one.world_size * one.batch_size for one in (run, last))
            raise ShardkitError(
                f"{folder}: the batch over all ranks changed from {before:,} to {now:,} at position "
                f"{last.start:,}, so numbers of steps say nothing about positions: ask with --position"
            )
        if differences := run.settings.differences(last.settings, last.start):
            raise StateError(
                f"{folder}: {differences[0].what} changed at position {last.start:,}: these are two orders; "
                "give a checkpoint of the one that is asked about as --state instead"
            )
    reached = last.last + last.world_size * last.batch_size
    sizes = {"batch_size": last.batch_size, "world_size": last.world_size}
    return LoaderState(reached, 0, last.settings), sizes
