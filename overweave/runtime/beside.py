"""Kernels that are interpreted in threads beside the loop of a call."""

from __future__ import annotations

import threading
from collections.abc import Callable

IsDone = Callable[[], bool]


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
