"""The event loop of a call on a CPU rank, and the threads that interpret its kernels."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from overweave.memory.board.alarm import Alarm
from overweave.memory.board.board import Board
from overweave.memory.board.records import Pause

IsDone = Callable[[], bool]


def run_event_loop(
    is_over: Callable[[], bool],
    advance: Callable[[], bool],
    timeout_alarm: Callable[[], Alarm],
    board: Board,
    timeout_s: float,
) -> None:
    """Call `advance` until `is_over`. Raises peers' alarms, and PeerTimeout after `timeout_s` without progress.

    advance: returns whether it has made progress. timeout_alarm: returns the alarm of a timeout.
    """
    pause, progress_s = Pause(), time.monotonic()
    while not is_over():
        if advance():
            pause, progress_s = Pause(), time.monotonic()
        else:
            pause()
        board.check_periodically()
        if time.monotonic() - progress_s > timeout_s:
            raise board.alarm(timeout_alarm())


class Beside:
    """The kernel launches of one call, each in a thread of its own."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def start(self, work: Callable[[], None]) -> IsDone:
        """Run a launch in a new thread. Return a function that polls for its end, and raises what it raised."""
        errors: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised by the loop
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()

        def is_done() -> bool:
            has_ended = not thread.is_alive()  # before `errors`: a thread may fail in between
            if errors:
                raise errors[0]
            return has_ended

        return is_done

    def join(self) -> None:
        """Wait for all threads. The abort word must be set, or all signals."""
        for thread in self._threads:
            thread.join()
