"""Limits on the work of rendering one record by a chat template: a number of steps, and the sizes of values.

shardkit.tokens.chat_template counts the steps while a template runs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from jinja2.utils import Namespace

from shardkit.errors import RecipeError

# A step takes 0.2 to 2 microseconds. A typical template takes 50 to 150 steps per message, in five
# renderings, and a message has at least 30 characters. So _STEPS_PER_CHARACTER suffice for work that is
# linear in the size of a conversation; _FIRST_STEPS are for other templates.
_FIRST_STEPS, _STEPS_PER_CHARACTER, _MOST_STEPS = 4_000_000, 32, 64_000_000
_FIRST_LARGEST, _LARGEST_PER_CHARACTER = 16 << 20, 4
CHARACTERS_PER_STEP_BITS = 6  # log2 of the characters copied per step: copying 64 takes less than a step
_MOST_SECONDS = 600.0
_CLOCK_EVERY = 1 << 12  # calls of `Work.spend` per reading of the clock


class TemplateLimitError(Exception):
    """A template exceeds the limit of steps for a record, or does something whose cost has no bound."""


class Work:
    """The remaining steps of one record, and a size limit of values; both grow with its `characters`.

    `limit` is the initial number of steps, `largest` the maximum size of a value and of the output.
    """

    def __init__(self, characters: int, *, first: int = _FIRST_STEPS, seconds: float = _MOST_SECONDS) -> None:
        self.limit = self._left = min(first + _STEPS_PER_CHARACTER * characters, _MOST_STEPS)
        self.largest = _FIRST_LARGEST + _LARGEST_PER_CHARACTER * characters
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        self._calls = 0

    def spend(self, steps: int = 1) -> None:
        """Use up `steps`; raise TemplateLimitError if too few are left, RecipeError after ten minutes."""
        self._left -= steps
        if self._left < 0:
            raise TemplateLimitError(
                f"the chat template needs more than {self.limit:,} steps (iterations, calls, attributes)"
            )
        self._calls += 1
        if self._calls % _CLOCK_EVERY == 0 and time.monotonic() > self._deadline:
            raise RecipeError(
                f"tokenizer.chat_template: rendering one record has taken {self._seconds:.0f} s, within its "
                f"limit of steps; the build stops, because dropping the record would depend on the speed of "
                f"this machine"
            )

    def make(self, size: int) -> None:
        """Take the steps for a value of `size` characters or items; raise TemplateLimitError if too large."""
        if size > self.largest:
            raise TemplateLimitError(
                f"the chat template makes a value of more than {self.largest:,} characters or items"
            )
        self.spend(1 + (size >> CHARACTERS_PER_STEP_BITS))


def size_of(value: object, work: Work) -> int:
    """Return the number of characters and items in a value, including its nested containers.

    An object that occurs twice counts twice. Takes one step per item, so it ends even if containers repeat
    each other exponentially often.
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
    """Return the attributes of a Jinja2 `namespace()`; changes to the dict change the namespace."""
    values: dict[str, Any] = object.__getattribute__(namespace, "_Namespace__attrs")
    return values
