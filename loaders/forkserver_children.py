"""Unblocks signals in the children of the fork server that `worker_signals` starts.

The fork server imports this module at its start. It blocks signals that are meant for the trainer, so that
it survives them, but its children that are not DataLoader workers must still end at SIGTERM.
"""

import os
import signal

from shardkit.loaders.worker_signals import TRAINER_SIGNALS


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TRAINER_SIGNALS)


os.register_at_fork(after_in_child=_unblock)
