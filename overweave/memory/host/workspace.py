"""The workspace of CPU ranks: two slots of a symmetric heap in turn, and the protocol that makes their reuse safe.

The protocol is that of memory/device/protocol.py, run by the host. At the head of call e a rank has finished all calls
before
it: it zeroes the signals it has read, tells every peer so (the credit), and waits until all of them have told the same.
Nothing trails a call.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from overweave.errors import InputError, WorkspaceBroken
from overweave.ir.schedule import SYMMETRIC, Schedule
from overweave.memory.board.alarm import Alarm
from overweave.memory.board.board import Board
from overweave.memory.board.records import Pause
from overweave.memory.group import Group
from overweave.memory.host.heap import COMPLETED, SLOTS, HostHeap
from overweave.memory.host.packed import HostPacked
from overweave.memory.host.shared import Fence
from overweave.memory.layout import SIGNAL_STRIDE_WORDS, SlotLayout

# A signal's line holds one word per contributor, so that no word has two writers and no atomic add is needed.
MAX_RANKS = SIGNAL_STRIDE_WORDS

# Adds to the int32 word at an address, atomically: for kernels that read a signal as one counter.
AtomicAdd = Callable[[int, int], None]


class HostWorkspace:
    """One per group. Calls follow each other in the same sequence on all ranks; one at a time."""

    def __init__(self, group: Group, board: Board) -> None:
        if group.world_size > MAX_RANKS:
            raise InputError(f"at most {MAX_RANKS} CPU ranks", f"group has {group.world_size}", "Use a smaller group")
        self.board = board
        self.rank = group.rank
        self.world_size = group.world_size
        self.is_broken = False
        self.agreed: set[bytes] = set()
        self.fence = Fence()
        self._heap: HostHeap | None = None
        self._packed: HostPacked | None = None
        self._calls = 0
        self._used: memoryview | None = None

    @staticmethod
    def of(group: Group) -> HostWorkspace:
        """The group's workspace; the first call is collective."""
        workspace = _WORKSPACES.get(group.process_group)
        if workspace is None:
            workspace = _WORKSPACES[group.process_group] = HostWorkspace(group, Board.of(group))
        return workspace

    @staticmethod
    def opened(group: Group) -> HostWorkspace | None:
        """The workspace, if this rank has made one."""
        return _WORKSPACES.get(group.process_group)

    def begin(self, schedule: Schedule, layout: SlotLayout, dtype: torch.dtype, timeout_s: float) -> HostSlot:
        """`take_slot`, as a schedule sees it."""
        heap, index = self.take_slot(layout, timeout_s)
        return HostSlot(self, heap, index, schedule, layout, dtype)

    def take_slot(self, layout: SlotLayout, timeout_s: float) -> tuple[HostHeap, int]:
        """The head of a call: a slot that nobody else reads or writes any more. Raises PeerDied, PeerTimeout."""
        self.check_whole()
        heap = self._heap_for(layout, timeout_s)
        call = self._calls = self._calls + 1
        index = call % SLOTS
        if self._used is not None:
            self._used[:] = bytes(self._used.nbytes)
        self.fence()
        for peer in range(self.world_size):
            heap.word_lines(peer)[(COMPLETED + self.rank) * SIGNAL_STRIDE_WORDS] = call - 1
        self._used = heap.signal_lines(self.rank, index)[: layout.signals * SIGNAL_STRIDE_WORDS].cast("B")
        self._await_credits(heap.word_lines(self.rank), call - 1, timeout_s)
        return heap, index

    def check_whole(self) -> None:
        """Raises WorkspaceBroken after a call that failed."""
        if self.is_broken:
            cure = "Call overweave.reset(group) on every rank"
            raise WorkspaceBroken("call on this group", "an earlier call failed", cure)

    def packed(self, half_bytes: int, timeout_s: float) -> HostPacked:
        """The memory of packed messages, large enough. Collective if it must grow. Raises PeerDied, PeerTimeout."""
        if self._packed is None or self._packed.half_bytes < half_bytes:
            self._packed = HostPacked(self.board, half_bytes, timeout_s)
        return self._packed

    def forget(self) -> None:
        """This rank's part of a reset (`overweave.reset`); the board's is its own affair."""
        # A new heap at the next call: an interrupted growth may have left the ranks with different ones.
        self._take(None)
        self._packed = None
        self.agreed.clear()
        self.is_broken = False

    def _take(self, heap: HostHeap | None) -> None:
        self._heap, self._calls, self._used = heap, 0, None

    def _heap_for(self, layout: SlotLayout, timeout_s: float) -> HostHeap:
        heap = self._heap
        if heap is None or not heap.holds(layout):
            signals, slot_bytes = layout.signals, layout.size_bytes
            if heap is not None:
                signals, slot_bytes = max(signals, heap.signals), max(slot_bytes, heap.slot_bytes)
            # Every rank has finished its earlier calls when it gets here, so nobody uses the old heap.
            heap = HostHeap.create(self.board, signals, slot_bytes, timeout_s)
            self._take(heap)
        return heap

    def _await_credits(self, words: memoryview, previous: int, timeout_s: float) -> None:
        """From every peer: it has finished the call before, and begun this one."""
        pause, start_s = Pause(), time.monotonic()
        for giver in range(self.world_size):
            while (seen := words[(COMPLETED + giver) * SIGNAL_STRIDE_WORDS]) < previous:
                pause()
                self.board.check_now_and_then()
                if time.monotonic() - start_s > timeout_s:
                    late = Alarm("timeout", "begin: it has not begun this call", giver, expected=previous, seen=seen)
                    raise self.board.alarm(late)
        self.fence()


class HostSlot:
    """One call's slot: the buffers and signals of every rank."""

    def __init__(
        self,
        workspace: HostWorkspace,
        heap: HostHeap,
        index: int,
        schedule: Schedule,
        layout: SlotLayout,
        dtype: torch.dtype,
    ) -> None:
        self.index = index
        self.layout = layout
        self.heap = heap
        self.atomic_add: AtomicAdd | None = None
        self._rank = workspace.rank
        self._fence = workspace.fence
        self._lines = [heap.signal_lines(rank, index) for rank in range(workspace.world_size)]
        own = {buffer.name: getattr(torch, buffer.dtype) for buffer in schedule.buffers if buffer.dtype}
        self._buffers = {
            buffer.name: [
                heap.tensor(
                    rank,
                    index,
                    layout.buffers[buffer.name],
                    (buffer.rows, buffer.cols),
                    own.get(buffer.name, dtype),
                )
                for rank in range(workspace.world_size)
                if buffer.home == SYMMETRIC or rank == workspace.rank
            ]
            for buffer in schedule.buffers
            if buffer.name in layout.buffers
        }

    def buffer(self, name: str, rank: int) -> Tensor:
        """`rank`'s instance of a symmetric buffer, or the own instance of a local one. `[rows, cols]`."""
        instances = self._buffers[name]
        return instances[rank] if len(instances) > 1 else instances[0]

    def notify(self, pad: str, rank: int, signal: int, count: int) -> None:
        """Adds `count` to a signal of `rank`, after everything this rank has stored."""
        self._fence()
        number = self.layout.signal(pad, signal)
        if self.atomic_add is None:
            self._lines[rank][number * SIGNAL_STRIDE_WORDS + self._rank] += count
        else:
            self.atomic_add(self.heap.signal_address(rank, self.index, number), count)

    def arrived(self, pad: str, signal: int) -> list[int]:
        """How much each contributing rank has added to an own signal; the sum alone has meaning with `atomic_add`."""
        start = self.layout.signal(pad, signal) * SIGNAL_STRIDE_WORDS
        return self._lines[self._rank][start : start + len(self._lines)].tolist()

    def has_arrived(self, pad: str, signals: tuple[int, int], count: int) -> bool:
        """Whether each of the own signals `[lo, hi)` has reached `count`; then what was stored before them is seen."""
        for signal in range(*signals):
            if sum(self.arrived(pad, signal)) < count:
                return False
        self._fence()
        return True


_WORKSPACES: WeakKeyDictionary[ProcessGroup, HostWorkspace] = WeakKeyDictionary()
atexit.register(_WORKSPACES.clear)  # a process group must not outlive the interpreter
