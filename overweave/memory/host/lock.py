"""A lock among the processes of a host: emulated ranks add to shared memory under it, where GPUs use atomics."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable


def try_run_locked(work: Callable[[], None]) -> bool:
    """Run `work` under the lock and return True; return False at once if another process holds the lock.

    A process that dies releases the lock. A process suspended while it holds the lock delays peers; their deadlines
    apply.
    """
    descriptor = os.open(__file__, os.O_RDONLY | os.O_CLOEXEC)  # any file that all processes can open
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        work()
        return True
    finally:
        os.close(descriptor)
