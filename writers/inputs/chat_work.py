"""What rendering a record by a chat template may cost: steps, and sizes of values, counted as it goes.

See shardkit.writers.inputs.chat_template, which spends them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from jinja2.utils import Namespace

from shardkit.errors import RecipeError

# A step takes 0.2 to 2 microseconds. A usual template takes 50 to 150 for a message, in five renderings, and
# a message takes 30 characters at least: so the first steps are for templates whose work is not linear.
_FIRST_STEPS, _STEPS_PER_CHARACTER, _MOST_STEPS = 4_000_000, 32, 64_000_000
_FIRST_LARGEST, _LARGEST_PER_CHARACTER = 16 << 20, 4
CHARACTERS_PER_STEP_BITS = 6  # to copy 64 characters takes less than a step
_MOST_SECONDS = 600.0
_CLOCK_EVERY = 1 << 12  # calls of Work


class TemplateLimitError(Exception):
    """A template needs more steps than a record has, or asks for something without bounds."""


class Work:
    """What a record whose values have so many characters may still cost: steps, and the size of a value.

    `limit` are the steps that it began with, `largest` the characters or items of a value or the output.
    """

    def __init__(self, characters: int, *, first: int = _FIRST_STEPS, seconds: float = _MOST_SECONDS) -> None:
        self.limit = self._left = min(first + _STEPS_PER_CHARACTER * characters, _MOST_STEPS)
        self.largest = _FIRST_LARGEST + _LARGEST_PER_CHARACTER * characters
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        self._calls = 0

    def spend(self, steps: int = 1) -> None:
        """Take steps; TemplateLimitError without any left, RecipeError when the last resort is reached."""
        self._left -= steps
        if self._left < 0:
            raise TemplateLimitError(
                f"the chat template needs more than {self.limit:,} steps (iterations, calls, attributes)"
            )
        self._calls += 1
        if self._calls % _CLOCK_EVERY == 0 and time.monotonic() > self._deadline:
            raise RecipeError(
                f"tokenizer.chat_template: one record has been rendered for {self._seconds:.0f} s, within "
                f"its steps; the build stops, because dropping it would depend on this machine's speed"
            )

    def make(self, size: int) -> None:
        """Take the steps for a value of so many characters or items; TemplateLimitError if too many."""
        if size > self.largest:
            raise TemplateLimitError(
                f"the chat template makes a value of more than {self.largest:,} characters or items"
            )
        self.spend(1 + (size >> CHARACTERS_PER_STEP_BITS))


def size_of(value: object, work: Work) -> int:
    """Characters and items of a value, those inside of containers included, as often as they are in it.

    Spends a step for each item, so that it ends for containers that have themselves many times over.
    """
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return 1 + value.bit_length() // 8
    total, stack = 1, [value]
    while stack:
        one = stack.pop()
        work.spend(1)
        total += 1
        if isinstance(one, str | bytes):
            total += len(one)
        elif isinstance(one, Mapping):
            stack += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            stack += one
        elif isinstance(one, Namespace):
            stack.append(namespace_values(one))
    return total


def namespace_values(namespace: Namespace) -> dict[str, Any]:
    """The attributes of a `namespace()`, to read and to set."""
    values: dict[str, Any] = object.__getattribute__(namespace, "_Namespace__attrs")
    return values
