"""Reset locks and counts in a forked child, where the threads that held them do not exist."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["remake_after_fork"]


class Remade(Protocol):
    """An object whose state is not valid in a forked child."""

    def after_fork(self) -> None: ...


_members: weakref.WeakSet[Remade] = weakref.WeakSet()


def remake_after_fork(member: Remade) -> None:
    """Call `member.after_fork()` at the start of every forked child, as long as `member` lives."""
    _members.add(member)


def _remake_all() -> None:
    for member in list(_members):
        member.after_fork()


os.register_at_fork(after_in_child=_remake_all)
