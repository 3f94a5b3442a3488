"""One at a time among the processes of a host: how emulated ranks add to the same memory, where GPUs have atomics."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable


def run_alone(work: Callable[[], None]) -> bool:
    """Runs `work` while no other process of this host runs one; False, at once, if one does.

    Whoever dies holds nothing. Whoever is stopped meanwhile is waited for like any other late peer.
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
