"""A campaign's loop: it shows how far it is, and ctrl-C ends it behind the case under way, with what it has."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import TypeVar

from overweave.cli.progress import progress

_T = TypeVar("_T")
INTERRUPTED = 128 + signal.SIGINT


def shown(items: Iterable[_T], what: str, total: int | None = None, name: Callable[[_T], str] = str) -> Iterator[_T]:
    """The items, with a progress bar where the error stream is a terminal.

    The first ctrl-C lets the case under way end. The loop is over then, so a campaign tells what it has found so far,
    and its process ends with 130. The second ctrl-C ends the process at once.
    """
    stop = _Stop()
    before = stop.install()
    done = 0
    try:
        with progress(what, total) as tell:
            for item in items:
                tell(name(item), done)
                yield item
                done += 1
                if stop.is_asked:
                    break
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
    if stop.is_asked:
        print(f"UNFINISHED: {what} ended by ctrl-C after {done} of {'unknown' if total is None else total}", flush=True)
        atexit.register(_leave)


def ignore_interrupts() -> None:
    """What a worker process does: the process that started it ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Stop:
    def __init__(self) -> None:
        self.is_asked = False

    def install(self) -> Callable[[int, FrameType | None], object] | int | None:
        """The handler that was there; None in a thread, which gets no signals."""
        if threading.current_thread() is not threading.main_thread():
            return None
        before = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, self._ask)
        return before

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked:
            sys.exit(INTERRUPTED)
        self.is_asked = True
        print("\nending behind the case under way; ctrl-C again ends at once", file=sys.stderr, flush=True)


def _leave() -> None:
    """A campaign that was ended early has not held what it promises, whatever it found."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(INTERRUPTED)
