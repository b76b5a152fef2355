"""What must not live on in a child as it was is remade there, and only there."""

from __future__ import annotations

import gc
import os
import weakref

from shardkit.storage.threads import remake_after_fork


class Remade:
    def __init__(self) -> None:
        self.process = os.getpid()

    def after_fork(self) -> None:
        self.process = os.getpid()


def test_a_child_remakes_what_lives_and_the_parent_nothing() -> None:
    remade = Remade()
    remake_after_fork(remade)
    child = os.fork()
    if not child:
        os._exit(0 if remade.process == os.getpid() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert remade.process == os.getpid()


def test_being_remade_keeps_nothing_alive() -> None:
    remade = Remade()
    remake_after_fork(remade)
    reference = weakref.ref(remade)
    del remade
    gc.collect()
    assert reference() is None
