"""The watcher: one thread per workspace that ends waits which nobody else can end.

A kernel's waits have a deadline of their own; a stream's have none, and a dead peer should be known long before any
deadline. So the watcher looks at the report of this GPU's kernels, at the peers' alarms and at their processes. On any
trouble it sets the abort word, which every kernel polls, and raises every signal of the workspace, which satisfies
every stream wait: what then runs is void, and the next call raises what was found.

It does so by writes of its own stream, and where these are held back, in a context of its own. A thread that launches a
kernel for the first time, makes a graph or frees memory may stand still until the GPU is idle, and with it whatever
other threads ask of their context meanwhile (campaigns/rates/gpu_driver_waits.py): memsets and launches do not even
return, and writes return, but are not always done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import torch

from overweave.errors import MachineError, OverweaveError
from overweave.memory.board.alarm import Alarm
from overweave.memory.board.board import Board
from overweave.memory.cuda import driver
from overweave.memory.device.signals import SATISFIED
from overweave.memory.lasting import exempt_thread_from_capture

LOOK_EVERY_S = 0.2
HELD_BACK_S = 0.1  # writes take a thousandth of it
OWN_PRIORITY = -3  # no other stream here has it: streams that wait hold up others in the same queue of the GPU
ABORTED_BY_HOST = 3


def reason_within(seconds: float, look: Callable[[], OverweaveError | None]) -> OverweaveError | None:
    """What `look` finds, asked again and again for so long; None if that is nothing."""
    end_s = time.monotonic() + seconds
    while True:
        found = look()
        if found is not None or time.monotonic() >= end_s:
            return found
        time.sleep(LOOK_EVERY_S / 10)


class Watched(Protocol):
    """What the watcher needs of a workspace."""

    device: torch.device
    timeout_s: float
    calls: int

    def reported_alarm(self) -> Alarm | None:
        """What a kernel of this GPU reported."""

    def is_idle(self) -> bool:
        """Whether the last call has ended on the device."""

    def abort_address(self) -> int:
        """The own abort word."""

    def signal_addresses(self) -> list[int]:
        """Where the own signals are, in all memory ever leased."""


class Watcher:
    """See the module. `trouble` is what it found; it stays until it is forgotten."""

    def __init__(self, workspace: Watched, board: Board) -> None:
        self.trouble: OverweaveError | None = None
        self._workspace = workspace
        self._board = board
        self._stream = torch.cuda.Stream(workspace.device, priority=OWN_PRIORITY)
        self._seen_calls, self._seen_s, self._wrote_s = 0, 0.0, 0.0
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="overweave watcher", daemon=True).start()

    def look(self) -> OverweaveError | None:
        """Finds trouble, if there is any, and ends all waits of this GPU. Safe from any thread."""
        with self._lock:
            is_known = self.trouble is not None
            if not is_known:
                self.trouble = self._found()
            # Again, too: the head of a call that began in that moment clears signals of the one before it.
            if self.trouble is not None and not (is_known and self._workspace.is_idle() and self._stream.query()):
                self._end_all_waits()
            return self.trouble

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """Looks at nothing inside, where the workspace is reset on every rank, and trouble is over behind it.

        A peer that is behind still shows its alarm when this rank has cleared its words: to heed it now would set them
        again, for the first call that follows.
        """
        with self._lock:
            yield
            self.trouble = None

    def _run(self) -> None:
        torch.cuda.set_device(self._workspace.device)
        exempt_thread_from_capture()
        while True:
            time.sleep(LOOK_EVERY_S)
            self.look()

    def _found(self) -> OverweaveError | None:
        alarm = self._workspace.reported_alarm()
        if alarm is not None:
            return self._board.alarm(alarm)
        try:
            self._board.check()
        except OverweaveError as error:
            return error
        return self._overdue()

    def _overdue(self) -> OverweaveError | None:
        """Kernels give their waits up once they run. Where one never does, its call must end all the same."""
        calls, now_s = self._workspace.calls, time.monotonic()
        if calls != self._seen_calls or self._workspace.is_idle():
            self._seen_calls, self._seen_s = calls, now_s
            return None
        if now_s - self._seen_s <= 2 * self._workspace.timeout_s:
            return None
        return self._board.alarm(Alarm("timeout", "a stream waits for a peer's signal"))

    def _end_all_waits(self) -> None:
        """By the own stream, unless that still holds the last writes back. A context finds no memory, at times: then
        at a later look."""
        now_s = time.monotonic()
        if self._stream.query():
            self._wrote_s = now_s
            self._write_all(self._stream.cuda_stream)
        elif now_s - self._wrote_s > HELD_BACK_S:
            with suppress(MachineError), driver.own_context(self._workspace.device.index) as stream:
                self._write_all(stream)

    def _write_all(self, stream: int) -> None:
        driver.write_value(stream, self._workspace.abort_address(), ABORTED_BY_HOST)
        driver.write_values(stream, self._workspace.signal_addresses(), SATISFIED.value)
