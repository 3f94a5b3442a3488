"""Python's garbage collector, kept out of where it would do harm or only look in vain."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Rest:
    """How many want it to rest now, on any thread, and whether the first of them found it at work."""

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
    """Nothing is collected meanwhile, whatever other threads do; what is counted away goes as ever."""
    _REST.begin()
    try:
        yield
    finally:
        _REST.end()
