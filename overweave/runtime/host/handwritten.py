"""Kernels fused by hand on CPU ranks: interpreted, in threads beside copies, with real signals between processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from overweave.errors import OverweaveError
from overweave.memory.board.alarm import Alarm
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
from overweave.runtime.host.event_loop import Beside, IsDone, run_event_loop
from overweave.runtime.host.interpreted import host_words
from overweave.runtime.interpreted import interpreter

interpreter.repair()

# Behind the repair: importing a kernel decorates it, for interpreting or for compiling.
from overweave.runtime.kernel_calls.program import ProgramArguments  # noqa: E402
from overweave.runtime.kernel_calls.protocol import signal_words  # noqa: E402


class HostHandwrittenRun:
    """A program bound to this rank's group. Calls follow each other in the same sequence on all ranks."""

    def __init__(self, declared: Declared, group: Group, device: torch.device) -> None:
        self._declared, self._group = declared, group
        self._layout = declared.lay_out()

    def __call__(self, signature: bytes, steps: list[TileStep]) -> None:
        """Returns when the call has ended. Raises RankMismatch and PeerError; what was written is void then."""
        workspace = HostWorkspace.of(self._group)
        workspace.check_usable()
        call = None
        try:
            workspace.board.post(signature)
            slot = workspace.begin(self._layout, self._group.timeout_s)
            call = _Call(self._declared, _SlotView(self._declared, slot, workspace, self._group), workspace)
            call.work_off(steps)
        except BaseException as error:
            workspace.is_broken = True
            if call is not None:
                call.give_up()
            if not isinstance(error, OverweaveError):
                raise workspace.board.alarm(Alarm("failed", f"{type(error).__name__}: {error}")) from error
            raise
        workspace.board.finish()


class _SlotView:
    """The slot of one call: what kernels and copies of this rank address in it."""

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
        """Ends every wait of the kernels of this rank."""
        self._lines[ABORT] = 1

    def seen(self, channel: str, counter: int) -> int:
        """What an own signal says."""
        return int(self.signals[self.layout.signal(channel, counter) * SIGNAL_STRIDE_WORDS])

    def signal_address(self, rank: int, channel: str, counter: int) -> int:
        """Where a signal of any rank lies in this process."""
        return self.slot.heap.addresses[rank] + self.layout.signal_offset(channel, counter)

    def matrix(self, declared: Declared, buffer: str, rank: int) -> torch.Tensor:
        """Any rank's part of a buffer."""
        one = declared.buffers[buffer]
        return self.slot.matrix(buffer, (one.rows, one.cols), one.dtype, rank)


class _Call:
    """One call on one rank: each queue does one thing after the other, beside the other queues."""

    def __init__(self, declared: Declared, view: _SlotView, workspace: HostWorkspace) -> None:
        self._declared, self._view, self._workspace = declared, view, workspace
        self._launched = Beside()
        self._raised = 0

    def work_off(self, steps: list[TileStep]) -> None:
        """Raises PeerTimeout if nothing has moved for the group's timeout, and what peers raised."""
        lines: dict[str, list[Any]] = {}
        for queue, action in steps:
            lines.setdefault(queue, []).append(action)
        running: dict[str, IsDone] = {}
        run_event_loop(
            lambda: not any(lines.values()),
            lambda: self._advance(lines, running) or self._has_moved(),
            lambda: self._late(lines),
            self._workspace.board,
            self._view.group.timeout_s,
        )

    def give_up(self) -> None:
        """The call is void: sets the abort word, which every wait polls, and waits for the kernels to end."""
        self._view.abort()
        self._launched.join()

    def _advance(self, lines: dict[str, list[Any]], running: dict[str, IsDone]) -> bool:
        moved = False
        for queue, actions in lines.items():
            if not actions:
                continue
            if queue not in running:
                running[queue] = self._start(actions[0])
                moved = moved or isinstance(actions[0], TileLaunch)
            if running[queue]():
                del running[queue], actions[0]
                moved = True
        return moved

    def _start(self, action: TileLaunch | TileMove | Raise | Await) -> IsDone:
        if isinstance(action, TileLaunch):
            return self._beside(action)
        if isinstance(action, Await):
            return lambda: self._is_full(action)
        if isinstance(action, TileMove):
            self._place(action.target).copy_(self._place(action.source))
        else:
            self._workspace.fence()
            interpreter.atomic_add(self._view.signal_address(action.rank, action.channel, action.counter), 1)
        return lambda: True

    def _is_full(self, action: Await) -> bool:
        full = all(self._view.seen(action.channel, counter) >= count for counter, count in action.counts)
        self._workspace.fence()
        return full

    def _beside(self, launch: TileLaunch) -> IsDone:
        """Interprets a kernel in a thread of its own."""
        arguments, options = self._view.arguments.of(launch)
        return self._launched.start(lambda: launch.kernel[launch.grid](*arguments, **options))

    def _place(self, place: Part | torch.Tensor) -> torch.Tensor:
        if isinstance(place, torch.Tensor):
            return place
        whole = self._view.matrix(self._declared, place.buffer, place.rank)
        return whole[slice(*place.rows), slice(*place.cols)]

    def _has_moved(self) -> bool:
        """Whether any own signal was raised since the last look."""
        before, self._raised = self._raised, int(self._view.signals.sum())
        return self._raised != before

    def _late(self, lines: Mapping[str, list[Any]]) -> Alarm:
        """What is not done, and the first counter of a channel that is not full."""
        names = ", ".join(_name(actions[0]) for actions in lines.values() if actions)
        for name, channel in self._declared.channels.items():
            for counter in range(channel.counters):
                count, seen = channel.count_of(counter), self._view.seen(name, counter)
                if seen < count:
                    text = f"{names} did not end; counter {counter} of channel {name} is not full"
                    return Alarm("timeout", text, expected=count, seen=seen)
        return Alarm("timeout", f"{names} did not end")


def _name(action: TileLaunch | TileMove | Raise | Await) -> str:
    return action.name if isinstance(action, TileLaunch) else f"{type(action).__name__.lower()} in a queue"
