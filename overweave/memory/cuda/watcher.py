"""The watcher: one thread per workspace that ends waits which nothing else can end.

A kernel's waits have a deadline; a stream's have none, and a dead peer should be noticed long before any deadline. So
the watcher polls the report of this GPU's kernels, the peers' alarms and their processes. On any failure it sets the
abort word, which every kernel polls, and raises every signal of the workspace, which satisfies every stream wait. What
then runs computes garbage, and the next call raises the failure.

It writes through a stream of its own, and if these writes are blocked, through a CUDA context of its own. A thread that
launches a kernel for the first time, creates a graph or frees memory may block until the GPU is idle. Driver calls of
other threads in the same context block with it (campaigns/rates/gpu_driver_waits.py): memsets and launches do not even
return, and writes return, but are not always executed.
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
from overweave.memory.outside_modes import exempt_thread_from_capture

POLL_EVERY_S = 0.2
BLOCKED_AFTER_S = 0.1  # writes take a thousandth of it
OWN_PRIORITY = -3  # no other stream here has it: a waiting stream blocks others in the same hardware queue
ABORTED_BY_HOST = 3


def poll_within(seconds: float, poll: Callable[[], OverweaveError | None]) -> OverweaveError | None:
    """Call `poll` until it returns a failure, for at most so long; None if it returns none."""
    end_s = time.monotonic() + seconds
    while True:
        failure = poll()
        if failure is not None or time.monotonic() >= end_s:
            return failure
        time.sleep(POLL_EVERY_S / 10)


class Watched(Protocol):
    """What the watcher needs of a workspace."""

    device: torch.device
    timeout_s: float
    calls: int

    def reported_alarm(self) -> Alarm | None:
        """Return what a kernel of this GPU has reported."""

    def is_idle(self) -> bool:
        """Return whether the last call has ended on the device."""

    def abort_address(self) -> int:
        """Return the address of this rank's abort word."""

    def signal_addresses(self) -> list[int]:
        """Return the addresses of this rank's signals in all heaps."""


class Watcher:
    """The watcher thread of a workspace. failure: the first failure since the last reset, None if there is none."""

    def __init__(self, workspace: Watched, board: Board) -> None:
        self.failure: OverweaveError | None = None
        self._workspace = workspace
        self._board = board
        self._stream = torch.cuda.Stream(workspace.device, priority=OWN_PRIORITY)
        self._seen_calls, self._seen_s, self._wrote_s = 0, 0.0, 0.0
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="overweave watcher", daemon=True).start()

    def poll(self) -> OverweaveError | None:
        """Look for a failure; if there is one, end all waits of this GPU and return it. Safe from any thread."""
        with self._lock:
            is_known = self.failure is not None
            if not is_known:
                self.failure = self._detect()
            # Repeated until the GPU is idle: the prologue of a call that was just starting zeroes signals.
            if self.failure is not None and not (is_known and self._workspace.is_idle() and self._stream.query()):
                self._end_all_waits()
            return self.failure

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Stop polling inside, while every rank resets the workspace; clear the failure on exit.

        A slower peer's alarm is still set after this rank has cleared its words: to act on it would set them again,
        and fail the next call.
        """
        with self._lock:
            yield
            self.failure = None

    def _run(self) -> None:
        torch.cuda.set_device(self._workspace.device)
        exempt_thread_from_capture()
        while True:
            time.sleep(POLL_EVERY_S)
            self.poll()

    def _detect(self) -> OverweaveError | None:
        """Return a kernel's report, a peer's alarm or death, or a timeout; None if there is no failure."""
        alarm = self._workspace.reported_alarm()
        if alarm is not None:
            return self._board.alarm(alarm)
        try:
            self._board.check()
        except OverweaveError as error:
            return error
        return self._overdue()

    def _overdue(self) -> OverweaveError | None:
        """Return a timeout if a call has run for twice the deadline: a stream waits, or a kernel never got an SM."""
        calls, now_s = self._workspace.calls, time.monotonic()
        if calls != self._seen_calls or self._workspace.is_idle():
            self._seen_calls, self._seen_s = calls, now_s
            return None
        if now_s - self._seen_s <= 2 * self._workspace.timeout_s:
            return None
        return self._board.alarm(Alarm("timeout", "a stream waits for a peer's signal"))

    def _end_all_waits(self) -> None:
        """Set the abort word and all signals, by the own stream, or by an own context if the last writes are blocked.

        A new context may find no memory: then a later poll tries again.
        """
        now_s = time.monotonic()
        if self._stream.query():
            self._wrote_s = now_s
            self._write_abort(self._stream.cuda_stream)
        elif now_s - self._wrote_s > BLOCKED_AFTER_S:
            with suppress(MachineError), driver.own_context(self._workspace.device.index) as stream:
                self._write_abort(stream)

    def _write_abort(self, stream: int) -> None:
        driver.write_value(stream, self._workspace.abort_address(), ABORTED_BY_HOST)
        driver.write_values(stream, self._workspace.signal_addresses(), SATISFIED.value)
