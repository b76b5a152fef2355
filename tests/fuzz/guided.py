"""Hostile files by coverage: inputs that reach new code of shardkit are mutated further.

    python -m fuzz.guided all --seconds 3600 --keep /tmp/found       a long soak (from the folder tests)
    python -m fuzz.guided tar-index mds-rows --seconds 60

Coverage is the pairs of lines that follow each other in one function of shardkit, by `sys.settrace`. An input
that reaches a new pair joins the population; the next one is made from one of it, mostly from the latest.
Mutations are those of `engine`, of JSON trees, and of structures that the target knows; where it can repair
checksums, most inputs are repaired, or no damage would get behind them. The same seed and number of inputs
give the same ones. A failure is kept as files, and named by target, seed and number.

Targets that run in libraries which may end the process are read in a process of its own, which reports the
number of each input before it reads it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import shardkit
from fuzz.engine import MEMORY_BYTES, SECONDS, Target, mutate, written
from shardkit.errors import ShardkitError
from support.json_trees import HOSTILE

__all__ = ["Found", "explore", "explore_apart"]

_ROOTS = tuple(str(Path(folder).resolve()) for folder in shardkit.__path__)
_ROOTS += tuple(str(Path(_ROOTS[0]).parent / folder) for folder in ("writers", "loaders"))
_REPAIRED = 0.75  # of the inputs of a target that can repair
_POPULATION = 2000
_FRESH = 0.3  # of the inputs are made from the sound one: what a mutation broke is seldom mended by another


@dataclass
class Found:
    """What a run of a target came to."""

    inputs: int = 0
    refused: int = 0
    population: int = 0
    pairs: int = 0
    failures: list[str] = field(default_factory=list)


class _Coverage:
    """The pairs of lines that follow each other, in functions of shardkit."""

    def __init__(self) -> None:
        self.pairs: set[tuple[CodeType, int, int]] = set()
        self._is_ours: dict[CodeType, bool] = {}
        self._fresh = False

    def __enter__(self) -> _Coverage:
        self._fresh = False
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    @property
    def is_new(self) -> bool:
        """Whether the last block reached a pair that none before did."""
        return self._fresh

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if (known := self._is_ours.get(code)) is None:
            known = self._is_ours[code] = os.path.realpath(code.co_filename).startswith(_ROOTS)
        if not known:
            return None
        last = code.co_firstlineno
        pairs = self.pairs

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            if event == "line":
                pair = (code, last, frame.f_lineno)
                if pair not in pairs:
                    pairs.add(pair)
                    self._fresh = True
                last = frame.f_lineno
            return line

        return line


def explore(
    target: Target,
    folder: Path,
    *,
    seed: int = 0,
    inputs: int = sys.maxsize,
    seconds: float = 1e9,
    keep: Path | None = None,
) -> Found:
    """Read inputs of a target until there were enough, or the time is up; `keep` failing ones."""
    found, coverage = Found(), _Coverage()
    population: list[Mapping[str, bytes]] = [target.files]
    with coverage:
        _read(target, target.files, folder)
    end = time.monotonic() + seconds
    while found.inputs < inputs and time.monotonic() < end and len(found.failures) < 20:
        rng = random.Random(f"{target.name} {seed} {found.inputs}")
        latest = population[-1 - int(len(population) * rng.random() ** 2)]
        parent = target.files if rng.random() < _FRESH else latest
        files = _child(target, parent, rng)
        began = time.monotonic()
        with coverage:
            failure, is_refused = _read(target, files, folder)
        found.inputs += 1
        found.refused += is_refused
        if failure is None and (took := time.monotonic() - began) > SECONDS:
            failure = f"{took:.1f} s"
        if failure is not None:
            found.failures.append(f"{target.name}, seed {seed}, input {found.inputs - 1}: {failure}")
            if keep is not None:
                written(files, keep / f"{target.name}-{seed}-{found.inputs - 1}")
        elif coverage.is_new and len(population) < _POPULATION:
            population.append(files)
    found.population, found.pairs = len(population), len(coverage.pairs)
    return found


def _child(target: Target, parent: Mapping[str, bytes], rng: random.Random) -> Mapping[str, bytes]:
    files = dict(parent)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        name = rng.choice(target.chosen)
        if rng.random() < 0.5 and (changed := _json_changed(files[name], rng)) is not None:
            files[name] = changed
        elif target.change is not None and rng.random() < 0.5:
            files[name] = target.change(files[name], rng)
        else:
            files[name] = mutate(files[name], rng, target.tokens)
    if target.repair is not None and rng.random() < _REPAIRED:
        files |= {name: target.repair(files[name]) for name in target.chosen}
    return files


def _json_changed(data: bytes, rng: random.Random) -> bytes | None:
    """A JSON text with one node changed, or lines of JSON with one of theirs; None if it is none."""
    lines = data.splitlines(keepends=True)
    at = 0
    try:
        value = json.loads(data)
        lines = [data]
    except (ValueError, RecursionError):
        if not 0 < len(lines) < 10_000:
            return None
        at = rng.randrange(len(lines))
        try:
            value = json.loads(lines[at])
        except (ValueError, RecursionError):
            return None
    try:
        changed = json.dumps(_changed(value, rng)).encode()
    except (ValueError, RecursionError):  # a number of more digits than Python writes
        return None
    return b"".join([*lines[:at], changed, b"\n" if len(lines) > 1 else b"", *lines[at + 1 :]])


def _changed(value: Any, rng: random.Random) -> Any:
    inner = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))
        if isinstance(value, list)
        else []
    )
    if not inner or rng.random() < 0.1:
        return rng.choice([*HOSTILE, *([value + 1, value - 1, -value] if type(value) is int else [])])
    key, chosen = rng.choice(inner)
    way = rng.random()
    if isinstance(value, dict):
        if way < 0.1:
            return {name: each for name, each in value.items() if name != key}
        if way < 0.2:
            return value | {rng.choice(["\ud800", "../../x", "a" * 300, *value]): chosen}
        return value | {key: _changed(chosen, rng)}
    if way < 0.1:
        return [*value[:key], *value[key + 1 :]]
    if way < 0.2:
        return [*value[:key], *[chosen] * rng.choice([1, 2, 100]), *value[key:]]
    return [*value[:key], _changed(chosen, rng), *value[key + 1 :]]


def _read(target: Target, files: Mapping[str, bytes], folder: Path) -> tuple[str | None, bool]:
    """(what went wrong, whether the input was refused)."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory(dir=folder) as place:
        written(files, Path(place))
        try:
            target.read(Path(place))
        except ShardkitError as error:
            if not str(error).strip():
                return "an error without words", True
            return _grown(before), True
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:200]!r}", False
    return _grown(before), False


def _grown(before: int) -> str | None:
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    return f"{grown >> 20} MiB more memory" if grown > MEMORY_BYTES else None


def explore_apart(name: str, folder: Path, *, seed: int, inputs: int, seconds: float = 1e9) -> Found:
    """`explore` of a target whose libraries may end the process, which is then a failure."""
    words = [name, "--seed", seed, "--inputs", inputs, "--seconds", seconds, "--json", folder / "found.json"]
    command = [sys.executable, "-m", "fuzz.guided", *map(str, words), "--keep", str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    code = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if code.returncode < 0:
        last = (folder / "last").read_text()
        failure = f"{name}, seed {seed}, input {last}: {signal.Signals(-code.returncode).name}"
        return Found(int(last) + 1, failures=[failure])
    assert (folder / "found.json").exists(), code.stderr[-2000:]
    return Found(**json.loads((folder / "found.json").read_text()))


def _noting(target: Target, file: Path) -> Target:
    """The target, noting the number of each input before it is read."""
    numbers = iter(range(-1, sys.maxsize))

    def read(folder: Path) -> object:
        file.write_text(str(next(numbers)))
        return target.read(folder)

    return Target(**{**vars(target), "read": read})


def _main() -> Iterator[str]:
    from fuzz.targets import NAMES, target

    parser = argparse.ArgumentParser(description="Coverage-guided fuzzing of shardkit's readers.")
    parser.add_argument("targets", nargs="+", help="names of targets, or all")
    parser.add_argument("--seconds", type=float, default=1e9, help="for all targets together")
    parser.add_argument("--inputs", type=int, default=sys.maxsize, help="of each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for failing inputs")
    parser.add_argument("--json", type=Path, help="file for the result of the last target")
    options = parser.parse_args()
    names = list(NAMES) if options.targets == ["all"] else options.targets
    for name in names:
        made = target(name)
        if options.json is not None:
            made = _noting(made, options.json.with_name("last"))
        with tempfile.TemporaryDirectory() as folder:
            found = explore(
                made,
                Path(folder),
                seed=options.seed,
                inputs=options.inputs,
                seconds=options.seconds / len(names),
                keep=options.keep,
            )
        if options.json is not None:
            options.json.write_text(json.dumps(vars(found)))
        yield (
            f"{name}: {found.inputs:,} inputs, {found.refused:,} refused, {found.pairs:,} pairs of lines, "
            f"population {found.population}, {len(found.failures)} failures"
        )
        yield from found.failures


if __name__ == "__main__":
    for line in _main():
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
