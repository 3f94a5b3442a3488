"""Kernels fused by hand on CPU ranks: interpreted, in threads beside copies, with real signals between processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from overweave.errors import OverweaveError
from overweave.memory.board.board import Alarm
from overweave.memory.group import Group
from overweave.memory.host.workspace import ABORT, HostSlot, HostWorkspace
from overweave.memory.layout import REPORT_WORDS, SIGNAL_STRIDE_WORDS
from overweave.runtime.handwritten import (
    Await,
    Declared,
    Part,
    Raise,
    TileLaunch,
    TileMove,
    TileStep,
)
from overweave.runtime.host.emulate import Beside, IsDone, run_event_loop
from overweave.runtime.host.interpreted import host_words
from overweave.runtime.interpreted import interpreter

interpreter.repair()

# Behind the repair: importing a kernel decorates it, for interpreting or for compiling.
from overweave.runtime.kernel_calls.call import signal_words  # noqa: E402
from overweave.runtime.kernel_calls.program import ProgramArguments  # noqa: E402


class HostHandwrittenRun:
    """A program bound to this rank's group. Calls follow each other in the same sequence on all ranks."""

    def __init__(self, declared: Declared, group: Group, device: torch.device) -> None:
        self._declared, self._group = declared, group
        self._layout = declared.lay_out()

    def __call__(self, signature: bytes, steps: list[TileStep]) -> None:
        """Run a call to its end. Raises RankMismatch and PeerError; outputs are undefined then."""
        workspace = HostWorkspace.of(self._group)
        workspace.check_usable()
        call = None
        try:
            workspace.board.post(signature)
            slot = workspace.begin(self._layout, self._group.timeout_s)
            call = _Call(self._declared, _SlotView(self._declared, slot, workspace, self._group), workspace)
            call.run_steps(steps)
        except BaseException as error:
            workspace.is_broken = True
            if call is not None:
                call.abort()
            if not isinstance(error, OverweaveError):
                raise workspace.board.alarm(Alarm("failed", f"{type(error).__name__}: {error}")) from error
            raise
        workspace.board.finish()


class _SlotView:
    """The slot of one call: the memory that kernels and copies of this rank access."""

    def __init__(self, declared: Declared, slot: HostSlot, workspace: HostWorkspace, group: Group) -> None:
        self.layout, self.slot, self.group = slot.layout, slot, group
        self._lines = workspace.lines(group.rank)
        self._lines[ABORT] = 0
        self._report = torch.zeros(REPORT_WORDS, dtype=torch.int32)
        words = host_words(group, workspace.words, self._report)
        protocol = signal_words(words, slot.heap, slot.layout.signals)
        self.signals = protocol.signals
        self.arguments = ProgramArguments(declared, slot.layout, slot.heap, protocol, group.rank, lambda layout: layout)

    def abort(self) -> None:
        """Set the abort word: every wait of this rank's kernels ends."""
        self._lines[ABORT] = 1

    def signal_value(self, channel: str, counter: int) -> int:
        """Return the value of a signal of this rank."""
        return int(self.signals[self.layout.signal(channel, counter) * SIGNAL_STRIDE_WORDS])

    def signal_address(self, rank: int, channel: str, counter: int) -> int:
        """Return the address, in this process, of a signal of any rank."""
        return self.slot.heap.addresses[rank] + self.layout.signal_offset(channel, counter)

    def matrix(self, declared: Declared, buffer: str, rank: int) -> torch.Tensor:
        """Return any rank's instance of a buffer."""
        one = declared.buffers[buffer]
        return self.slot.matrix(buffer, (one.rows, one.cols), one.dtype, rank)


class _Call:
    """One call on one rank: each queue runs one action at a time, concurrently with the other queues."""

    def __init__(self, declared: Declared, view: _SlotView, workspace: HostWorkspace) -> None:
        self._declared, self._view, self._workspace = declared, view, workspace
        self._launched = Beside()
        self._signal_sum = 0

    def run_steps(self, steps: list[TileStep]) -> None:
        """Run all actions. Raises PeerTimeout after the group's timeout without progress, and peers' alarms."""
        queues: dict[str, list[Any]] = {}
        for queue, action in steps:
            queues.setdefault(queue, []).append(action)
        running: dict[str, IsDone] = {}
        run_event_loop(
            lambda: not any(queues.values()),
            lambda: self._advance(queues, running) or self._has_progressed(),
            lambda: self._timeout_alarm(queues),
            self._workspace.board,
            self._view.group.timeout_s,
        )

    def abort(self) -> None:
        """Set the abort word, which every wait polls, and wait for the kernels to end."""
        self._view.abort()
        self._launched.join()

    def _advance(self, queues: dict[str, list[Any]], running: dict[str, IsDone]) -> bool:
        """Start and end actions at the heads of queues; return whether one has progressed."""
        has_progressed = False
        for queue, actions in queues.items():
            if not actions:
                continue
            if queue not in running:
                running[queue] = self._start(actions[0])
                has_progressed = has_progressed or isinstance(actions[0], TileLaunch)
            if running[queue]():
                del running[queue], actions[0]
                has_progressed = True
        return has_progressed

    def _start(self, action: TileLaunch | TileMove | Raise | Await) -> IsDone:
        """Start an action; return a function that polls for its end."""
        if isinstance(action, TileLaunch):
            return self._launch_kernel(action)
        if isinstance(action, Await):
            return lambda: self._is_full(action)
        if isinstance(action, TileMove):
            self._matrix(action.target).copy_(self._matrix(action.source))
        else:
            self._workspace.fence()
            interpreter.atomic_add(self._view.signal_address(action.rank, action.channel, action.counter), 1)
        return lambda: True

    def _is_full(self, action: Await) -> bool:
        full = all(self._view.signal_value(action.channel, counter) >= count for counter, count in action.counts)
        self._workspace.fence()
        return full

    def _launch_kernel(self, launch: TileLaunch) -> IsDone:
        """Interpret a kernel in a thread of its own."""
        arguments, options = self._view.arguments.of(launch)
        return self._launched.start(lambda: launch.kernel[launch.grid](*arguments, **options))

    def _matrix(self, place: Part | torch.Tensor) -> torch.Tensor:
        if isinstance(place, torch.Tensor):
            return place
        whole = self._view.matrix(self._declared, place.buffer, place.rank)
        return whole[slice(*place.rows), slice(*place.cols)]

    def _has_progressed(self) -> bool:
        """Return whether a signal of this rank has been raised since the last call."""
        before, self._signal_sum = self._signal_sum, int(self._view.signals.sum())
        return self._signal_sum != before

    def _timeout_alarm(self, queues: Mapping[str, list[Any]]) -> Alarm:
        """Return the alarm of a timeout: the actions that have not ended, and the first counter that is not full."""
        names = ", ".join(_name(actions[0]) for actions in queues.values() if actions)
        for name, channel in self._declared.channels.items():
            for counter in range(channel.counters):
                count, seen = channel.count_of(counter), self._view.signal_value(name, counter)
                if seen < count:
                    text = f"{names} did not end; counter {counter} of channel {name} is not full"
                    return Alarm("timeout", text, expected=count, seen=seen)
        return Alarm("timeout", f"{names} did not end")


def _name(action: TileLaunch | TileMove | Raise | Await) -> str:
    return action.name if isinstance(action, TileLaunch) else f"{type(action).__name__.lower()} in a queue"
