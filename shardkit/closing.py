"""Objects that a `with` closes."""

from __future__ import annotations

from types import TracebackType
from typing import Self

__all__ = ["Closing"]


class Closing:
    """A `with` block over it ends with `close`, whatever happened in it."""

    __slots__ = ()

    def close(self) -> None:
        """Give back what is held; safe to call again."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
