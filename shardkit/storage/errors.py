"""What can go wrong with an object, in kinds that a caller can act on.

`TransientError` and its `ThrottledError` may be tried again; all others will not go away by themselves.
"""

from __future__ import annotations

from shardkit.errors import ShardkitError

__all__ = [
    "ObjectChangedError",
    "ObjectExistsError",
    "ObjectNotFoundError",
    "StoreError",
    "ThrottledError",
    "TransientError",
]


class StoreError(ShardkitError):
    """A request to a store failed: which object, what happened, and the HTTP status if there was one."""

    def __init__(self, where: str, problem: str, *, status: int | None = None) -> None:
        self.where, self.problem, self.status = where, problem, status
        super().__init__(f"{where}: {problem}" + ("" if status is None else f" (status {status})"))

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.where, self.problem, self.status))


def _rebuild(kind: type[StoreError], where: str, problem: str, status: int | None) -> StoreError:
    return kind(where, problem, status=status)


class ObjectNotFoundError(StoreError):
    """There is no such object (or bucket)."""


class ObjectExistsError(StoreError):
    """An object is there already, where one was to be put only if there was none."""


class ObjectChangedError(StoreError):
    """The object is no longer of the version that was asked for."""


class TransientError(StoreError):
    """A timeout, a broken connection, a 5xx: trying again may help."""


class ThrottledError(TransientError):
    """The store asks for fewer requests (503 SlowDown, 429): try again later, and with less at a time."""
