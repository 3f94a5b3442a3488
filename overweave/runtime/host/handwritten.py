"""Kernels fused by hand on CPU ranks: interpreted, in threads beside copies, with real signals between processes."""

from __future__ import annotations

import torch

from overweave.memory.group import Group
from overweave.memory.host.workspace import ABORT, HostSlot, HostWorkspace
from overweave.memory.layout import REPORT_WORDS
from overweave.runtime.handwritten import Declared, TileLaunch, TileRows
from overweave.runtime.host.emulate import IsDone
from overweave.runtime.host.interpreted import host_words
from overweave.runtime.host.tasks import HostTaskRun, TaskCall
from overweave.runtime.interpreted import interpreter

interpreter.repair()

# Behind the repair: importing a kernel decorates it, for interpreting or for compiling.
from overweave.runtime.kernel_calls.call import signal_words  # noqa: E402
from overweave.runtime.kernel_calls.program import ProgramArguments  # noqa: E402


class HostHandwrittenRun(HostTaskRun):
    """A program with kernels bound to this rank's group."""

    def _make_call(self, slot: HostSlot, workspace: HostWorkspace) -> TaskCall:
        slot.atomic_add = interpreter.atomic_add  # kernels read a signal as one counter
        return _KernelCall(self._declared, slot, workspace, self._group)


class _KernelCall(TaskCall):
    """One call with kernels on one rank."""

    def __init__(self, declared: Declared, slot: HostSlot, workspace: HostWorkspace, group: Group) -> None:
        super().__init__(declared, slot, workspace, group)
        self._lines = workspace.lines(group.rank)
        self._lines[ABORT] = 0
        self._report = torch.zeros(REPORT_WORDS, dtype=torch.int32)
        words = host_words(group, workspace.words, self._report)
        protocol = signal_words(words, slot.heap, slot.layout.signals)
        self._arguments = ProgramArguments(
            declared, slot.layout, slot.heap, protocol, group.rank, lambda layout: layout
        )

    def abort(self) -> None:
        """Set the abort word, which every wait polls, and wait for the kernels to end."""
        self._lines[ABORT] = 1
        super().abort()

    def start_kernel(self, launch: TileLaunch) -> IsDone:
        """Interpret a kernel in a thread of its own."""
        arguments, options = self._arguments.of(launch)
        return self.threads.start(lambda: launch.kernel[launch.grid](*arguments, **options))

    def start_rows(self, rows: TileRows) -> IsDone:
        """Interpret their kernel."""
        return self.start_kernel(rows.launch())
