"""Calls of tile programs on CPU ranks: copies, signals and work of torch, without kernels, hence without triton."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from overweave.errors import InputError, OverweaveError
from overweave.memory.board.board import Alarm, Board
from overweave.memory.group import Group
from overweave.memory.host.workspace import HostSlot, HostWorkspace
from overweave.runtime.handwritten import (
    Declared,
    Part,
    TileAction,
    TileLaunch,
    TileMove,
    TileNotify,
    TileRetire,
    TileRows,
    TileStep,
    TileTask,
    TileVoid,
    TileWait,
)
from overweave.runtime.host.emulate import IsDone, LaunchThreads, run_event_loop


class HostTaskRun:
    """A program bound to this rank's group. Calls follow each other in the same sequence on all ranks."""

    def __init__(self, declared: Declared, group: Group, device: torch.device) -> None:
        self._declared, self._group = declared, group
        self._layout = declared.lay_out()
        Board.of(group).islands.require_one("run a program that addresses peers")

    def __call__(self, signature: bytes, steps: list[TileStep]) -> None:
        """Run a call to its end. Raises RankMismatch and PeerError; outputs are undefined then."""
        workspace = HostWorkspace.of(self._group)
        workspace.check_usable()
        call = None
        try:
            workspace.board.post(signature)
            slot = workspace.begin(self._layout, self._group.timeout_s)
            call = self._make_call(slot, workspace)
            call.run_steps(steps)
        except BaseException as error:
            workspace.is_broken = True
            if call is not None:
                call.abort()
            if not isinstance(error, OverweaveError):
                raise workspace.board.alarm(Alarm("failed", f"{type(error).__name__}: {error}")) from error
            raise
        workspace.board.finish()

    def _make_call(self, slot: HostSlot, workspace: HostWorkspace) -> TaskCall:
        """Return a new call; a subclass's also runs kernels."""
        return TaskCall(self._declared, slot, workspace, self._group)


class TaskCall:
    """One call on one rank: each queue runs one action at a time, concurrently with the other queues."""

    def __init__(self, declared: Declared, slot: HostSlot, workspace: HostWorkspace, group: Group) -> None:
        self.declared, self.slot, self._workspace, self.group = declared, slot, workspace, group
        self.threads = LaunchThreads()
        self._signal_sum = 0

    def run_steps(self, steps: list[TileStep]) -> None:
        """Run all actions. Raises PeerTimeout after the group's timeout without progress, and peers' alarms."""
        queues: dict[str, list[Any]] = {}
        for queue, action in steps:
            waits = [tile.shard for tile in action.tiles if tile.shard] if isinstance(action, TileTask) else []
            queues.setdefault(queue, []).extend((*waits, action))
        running: dict[str, IsDone] = {}
        run_event_loop(
            lambda: not any(queues.values()),
            lambda: self._advance(queues, running) or self._has_progressed(),
            lambda: self._timeout_alarm(queues),
            self._workspace.board,
            self.group.timeout_s,
        )

    def abort(self) -> None:
        """Wait for the threads of kernels and tasks to end."""
        self.threads.join()

    def start_kernel(self, launch: TileLaunch) -> IsDone:
        """Start a kernel; return a function that polls for its end."""
        found = "it was built for programs without kernels"
        raise InputError(f"launch {launch.name}", found, "Build the TileProgram with has_kernels=True")

    def start_rows(self, rows: TileRows) -> IsDone:
        """Move rows by torch once their sources have arrived, then signal; return a function that polls for its end."""
        moving: list[IsDone] = []
        run = partial(_run, partial(rows.run, self._instance), torch.is_inference_mode_enabled())

        def is_done() -> bool:
            if not moving and all(self._is_shard_full(channel, rank) for channel, rank in rows.awaits):
                moving.append(self.threads.start(run))
            if not moving or not moving[0]():
                return False
            for sent in rows.sends:
                self.slot.notify(sent.channel, sent.peer, sent.counter, sent.programs)
            return True

        return is_done

    def own(self, buffer: str) -> torch.Tensor:
        """Return this rank's instance of a buffer."""
        return self._instance(buffer, self.group.rank)

    def _advance(self, queues: dict[str, list[Any]], running: dict[str, IsDone]) -> bool:
        """Start and end actions at the heads of queues; return whether one has progressed."""
        has_progressed = False
        for queue, actions in queues.items():
            if not actions:
                continue
            if queue not in running:
                running[queue] = self._start(actions[0])
                has_progressed = has_progressed or isinstance(actions[0], TileLaunch | TileTask | TileRows)
            if running[queue]():
                del running[queue], actions[0]
                has_progressed = True
        return has_progressed

    def _start(self, action: TileAction) -> IsDone:
        """Start an action; return a function that polls for its end."""
        if isinstance(action, TileLaunch):
            return self.start_kernel(action)
        if isinstance(action, TileTask):
            channel = () if action.channel is None else (None,)
            work = partial(action.run, self.own, *channel)
            return self.threads.start(partial(_run, work, torch.is_inference_mode_enabled()))
        if isinstance(action, TileRows):
            return self.start_rows(action)
        if isinstance(action, TileVoid):
            return lambda: True  # where a wait fails here, the call raises
        if isinstance(action, TileWait):
            return lambda: all(self._is_full(action.channel, counter, count) for counter, count in action.counts)
        if isinstance(action, TileRetire):
            ended = self._matrix(action.part)
            if ended.is_floating_point():
                ended.fill_(torch.nan)  # whoever reads it nevertheless sees that
        elif isinstance(action, TileMove):
            self._matrix(action.target).copy_(self._matrix(action.source))
        else:
            self.slot.notify(action.channel, action.rank, action.counter, 1)
        return lambda: True

    def _is_full(self, channel: str, counter: int, count: int) -> bool:
        return self.slot.has_reached(channel, (counter, counter + 1), count)

    def _is_shard_full(self, channel: str, rank: int) -> bool:
        layout = self.declared.channels[channel]
        counters = range(rank * layout.channels, (rank + 1) * layout.channels)
        return all(self._is_full(channel, counter, layout.count_of(counter)) for counter in counters)

    def _instance(self, buffer: str, rank: int) -> torch.Tensor:
        one = self.declared.buffers[buffer]
        return self.slot.matrix(buffer, (one.rows, one.cols), one.dtype, rank)

    def _matrix(self, part: Part | torch.Tensor) -> torch.Tensor:
        if isinstance(part, torch.Tensor):
            return part
        return self._instance(part.buffer, part.rank)[slice(*part.rows), slice(*part.cols)]

    def _has_progressed(self) -> bool:
        """Return whether a signal of this rank has been raised since the last call."""
        before, self._signal_sum = self._signal_sum, sum(self.slot.signals[self.group.rank])
        return self._signal_sum != before

    def _timeout_alarm(self, queues: Mapping[str, list[Any]]) -> Alarm:
        """Return the alarm of a timeout: the actions that have not ended, and the first counter that is not full."""
        names = ", ".join(_action_name(actions[0]) for actions in queues.values() if actions)
        for name, channel in self.declared.channels.items():
            for counter in range(channel.counters):
                count, seen = channel.count_of(counter), sum(self.slot.counts(name, counter))
                if seen < count:
                    text = f"{names} did not end; counter {counter} of channel {name} is not full"
                    return Alarm("timeout", text, expected=count, seen=seen)
        return Alarm("timeout", f"{names} did not end")


def _run(work: Callable[[], object], is_inference: bool) -> None:
    """Run work in this thread in the caller's inference mode, which threads do not inherit, without autograd."""
    with torch.inference_mode(is_inference), torch.no_grad():
        work()


def _action_name(action: TileAction) -> str:
    """Return the name of an action for a timeout report."""
    if isinstance(action, TileNotify | TileMove | TileRetire | TileVoid | TileWait):
        return f"{type(action).__name__.removeprefix('Tile').lower()} in a queue"
    return action.name
