"""Locks on files (flock): freed by the kernel when their holder ends, whatever ended it.

They hold between processes of a machine, and between machines on file systems that pass flock on (NFS 4,
Lustre mounted with `flock`, CephFS, …).
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

__all__ = ["held_file", "upgraded"]

_POLL_SECONDS = 0.1


def held_file(path: Path, *, shared: bool, wait_seconds: float = 0.0) -> int | None:
    """A descriptor that holds the lock of a file until it is closed; None if others have it. OSError.

    The file is made if there is none. Whoever holds it alone may remove it: that is noticed.
    """
    deadline = time.monotonic() + wait_seconds
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            pass  # removed by who held it: make a new one
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                return None
            time.sleep(_POLL_SECONDS)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def upgraded(descriptor: int) -> bool:
    """Whether a lock that is shared became ours alone; if not, it may be lost."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
