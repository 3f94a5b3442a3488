"""The loop of a call on a CPU rank, and kernels that are interpreted in threads beside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from overweave.memory.board.alarm import Alarm
from overweave.memory.board.board import Board
from overweave.memory.board.records import Pause

IsDone = Callable[[], bool]


def run_event_loop(
    is_over: Callable[[], bool], advance: Callable[[], bool], late: Callable[[], Alarm], board: Board, timeout_s: float
) -> None:
    """Advances until all is over. Raises what peers raised, and PeerTimeout once nothing has moved for so long.

    advance: whether anything has moved. late: what stands still.
    """
    pause, moved_s = Pause(), time.monotonic()
    while not is_over():
        if advance():
            pause, moved_s = Pause(), time.monotonic()
        else:
            pause()
        board.check_periodically()
        if time.monotonic() - moved_s > timeout_s:
            raise board.alarm(late())


class Beside:
    """Launches of one call, each in a thread of its own."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def start(self, work: Callable[[], None]) -> IsDone:
        """Runs a launch; what it raises is raised by whoever asks whether it is done."""
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
            has_ended = not thread.is_alive()  # asked first: a thread may fail between the two questions
            if errors:
                raise errors[0]
            return has_ended

        return is_done

    def join(self) -> None:
        """Waits for all of them: they must have been told to end."""
        for thread in self._threads:
            thread.join()
