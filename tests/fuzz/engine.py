"""Hostile files by number: input `n` of a target is the same in every run, so a failure is a number.

A target is a set of files and a function that reads them. Mutations are what fuzzers have found to matter:
flipped bits, bytes of interest, integers at their limits at aligned places, cuts, doubled, swapped and
deleted ranges, tokens of the format put over or between others, and digits of texts changed.
"""

from __future__ import annotations

import random
import resource
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardkit.errors import ShardkitError

__all__ = ["MEMORY_BYTES", "SECONDS", "Outcome", "Target", "fuzz", "mutate", "written"]

SECONDS = 30.0  # for one input, on a machine that is not overloaded: milliseconds
MEMORY_BYTES = 400 << 20  # more than before: what a declared size of terabytes would ask for
_LIMITS = [0, 1, 2, 7, 127, 128, 255, 256, 32767, 65535, 65536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
_LIMITS += [1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
_TOKENS = [b"\0", b"\n", b"/", b"..", b"../", b"{}", b"[]", b"null", b"-1", b"1e308", b"NaN", b"9" * 30]
_TOKENS += [b"9" * 5000, b'"\\ud800"', b"-0.0", b"true", b"[1]", b'{"a":1}']
_TOKENS += [b'"', b"\xff", b",", b":", b"\xf0\x9f\x98\x80", b"ustar", b"zstd", b"(" * 50, b"[" * 5000]


@dataclass(frozen=True)
class Target:
    """`files` are written to a folder, one of `hostile` mutated; `read(folder)` reads all there is."""

    name: str
    files: Mapping[str, bytes]
    read: Callable[[Path], object]
    hostile: tuple[str, ...] = ()
    tokens: tuple[bytes, ...] = ()
    refuses: bool = True
    """Whether damage is told; False: there is another way to what was damaged."""
    repair: Callable[[bytes], bytes] | None = None
    """Makes checksums of a hostile file right, so that damage gets behind them."""
    change: Callable[[bytes, random.Random], bytes] | None = None
    """A change that knows the structure of a hostile file."""

    @property
    def chosen(self) -> tuple[str, ...]:
        """Names of files that are mutated."""
        return self.hostile or tuple(self.files)


@dataclass
class Outcome:
    """What became of the inputs of a target."""

    inputs: int = 0
    refused: int = 0
    longest_seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


def mutate(data: bytes, rng: random.Random, tokens: Iterable[bytes] = ()) -> bytes:
    """`data` with one to four changes."""
    words = [*_TOKENS, *tokens]
    for _ in range(rng.choice([1, 1, 1, 2, 3, 4])):
        data = rng.choice(_CHANGES)(data, rng, words)
    return data


def _at(data: bytes, rng: random.Random) -> int:
    """A place; headers and ends are where structure is."""
    span = rng.choice([len(data), min(len(data), 64), min(len(data), 600)])
    place = rng.randrange(span + 1)
    return place if rng.random() < 0.8 else len(data) - place


def _flip(data: bytes, rng: random.Random, words: list[bytes]) -> bytes:
    at = min(_at(data, rng), max(0, len(data) - 1))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :] if data else data


def _byte(data: bytes, rng: random.Random, words: list[bytes]) -> bytes:
    at = _at(data, rng)
    return (
        data[:at]
        + bytes([rng.choice([0, 1, 10, 32, 47, 127, 128, 255, rng.randrange(256)])])
        + data[at + 1 :]
    )


def _integer(data: bytes, rng: random.Random, words: list[bytes]) -> bytes:
    size = rng.choice([1, 2, 4, 8])
    at = _at(data, rng) // size * size
    value = (rng.choice(_LIMITS) + rng.choice([0, 0, -1, 1])) % (1 << 8 * size)
    return data[:at] + value.to_bytes(size, rng.choice(["little", "little", "big"])) + data[at + size :]


def _cut(data: bytes, rng: random.Random, words: list[bytes]) -> bytes:
    return data[: _at(data, rng)]


def _remove(data: bytes, rng: random.Random, words: list[bytes]) -> bytes:
    at, count = _at(data, rng), rng.choice([1, 2, 4, 16, 512])
    return data[:at] + data[at + count :]


def _double(data: bytes, rng: random.Random, words: list[bytes]) -> bytes:
    at, count = _at(data, rng), rng.choice([1, 4, 64, 512, 5000])
    return data[: at + count] + data[at:]


def _swap(data: bytes, rng: random.Random, words: list[bytes]) -> bytes:
    (a, b), count = sorted((_at(data, rng), _at(data, rng))), rng.choice([4, 8, 512])
    return data[:a] + data[b : b + count] + data[a + count : b] + data[a : a + count] + data[b + count :]


def _token(data: bytes, rng: random.Random, words: list[bytes]) -> bytes:
    at, word = _at(data, rng), rng.choice(words)
    return data[:at] + word + data[at + rng.choice([0, len(word)]) :]


def _digits(data: bytes, rng: random.Random, words: list[bytes]) -> bytes:
    """Another number in the place of one of a text."""
    places = [i for i in range(len(data)) if 48 <= data[i] < 58 and not (i and 48 <= data[i - 1] < 58)]
    if not places:
        return data
    at = stop = rng.choice(places)
    while stop < len(data) and 48 <= data[stop] < 58:
        stop += 1
    return data[:at] + str(rng.choice([-1, *_LIMITS, rng.randrange(1000)])).encode() + data[stop:]


_CHANGES = [_flip, _flip, _byte, _integer, _integer, _cut, _remove, _double, _swap, _token, _digits]


def fuzz(target: Target, numbers: Iterable[int], folder: Path) -> Outcome:
    """Read the inputs of these numbers: each gives values or a ShardkitError, in bounded time and memory."""
    outcome = Outcome()
    for number in numbers:
        rng = random.Random(f"{target.name} {number}")
        name = rng.choice(target.chosen)
        if target.change is not None and number % 4:
            changed = target.change(target.files[name], rng)
        else:
            changed = mutate(target.files[name], rng, target.tokens)
        files = {**target.files, name: changed}
        if target.repair is not None and number % 2:
            files[name] = target.repair(files[name])
        place = folder / f"{target.name}-{number}"
        written(files, place)
        _read(target, number, place, outcome)
        shutil.rmtree(place)
    return outcome


def written(files: Mapping[str, bytes], folder: Path) -> None:
    """Write the files of an input to a folder."""
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


def _read(target: Target, number: int, place: Path, outcome: Outcome) -> None:
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    try:
        target.read(place)
    except ShardkitError as error:
        outcome.refused += 1
        if not str(error).strip():
            outcome.failures.append(f"{target.name} {number}: an error without words")
    except BaseException as error:  # a panic of Rust is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        outcome.failures.append(f"{target.name} {number}: {type(error).__name__}: {str(error)[:200]}")
    seconds = time.monotonic() - start
    outcome.inputs += 1
    outcome.longest_seconds = max(outcome.longest_seconds, seconds)
    if seconds > SECONDS:
        outcome.failures.append(f"{target.name} {number}: {seconds:.1f} s")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    if grown > MEMORY_BYTES:
        outcome.failures.append(f"{target.name} {number}: {grown >> 20} MiB more memory")
