"""Preloaded by a fork server that `worker_signals` starts: unblocks signals in its children.

The fork server must outlive signals that are meant for the trainer; whoever else has it fork processes must
be able to end these by TERM.
"""

import os
import signal

from shardkit.loaders.worker_signals import TRAINER_SIGNALS


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TRAINER_SIGNALS)


os.register_at_fork(after_in_child=_unblock)
