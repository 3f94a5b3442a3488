"""Pauses of Python's garbage collector where a collection would do harm or find nothing."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Rest:
    """Counts the threads that want no collection now; the last one restores the collector if it was enabled."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._wanted = 0
        self._was_enabled = False

    def begin(self) -> None:
        with self._lock:
            if not self._wanted:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._wanted += 1

    def end(self) -> None:
        with self._lock:
            self._wanted -= 1
            if not self._wanted and self._was_enabled:
                gc.enable()


_REST = _Rest()


@contextmanager
def without_collection() -> Iterator[None]:
    """Pause the garbage collector for all threads. Reference counting goes on."""
    _REST.begin()
    try:
        yield
    finally:
        _REST.end()
