"""The workspace of one (group, GPU): memory that the calls of plans use one after the other, and the protocol's words.

Calls are chained (memory/cuda/streams.py): each begins, on the device, after the one before it, whatever stream it came
from. Memory is never given back while the process lives, because a captured graph may hold its addresses.
"""

from __future__ import annotations

import atexit
import time
from typing import ClassVar

import torch
from torch.distributed import ProcessGroup

from overweave.errors import OverweaveError, WorkspaceBroken
from overweave.memory.board.alarm import Alarm
from overweave.memory.board.board import Board
from overweave.memory.cuda import driver
from overweave.memory.cuda.captures import Captures
from overweave.memory.cuda.heap import CudaHeap, heap_of
from overweave.memory.cuda.streams import Chain
from overweave.memory.cuda.watcher import Watcher, reason_within
from overweave.memory.device.packed import PACKED_OPERATION
from overweave.memory.device.protocol import BEGIN_OPERATION, QUEUE_OPERATION, STATE_WORDS
from overweave.memory.device.signals import (
    REPORT_EXPECTED,
    REPORT_IS_SET,
    REPORT_OPERATION,
    REPORT_SEEN,
    REPORT_SIGNAL,
    REPORTED,
)
from overweave.memory.group import Group
from overweave.memory.heap import HALVES, PackedSpace
from overweave.memory.layout import REPORT_WORDS, SIGNAL_STRIDE_BYTES, SlotLayout, aligned
from overweave.memory.packed_layout import SMALLEST_HALF_BYTES
from overweave.memory.shares import SharedShares

SMALLEST_BYTES = 32 << 20
SETTLES_EVERY_S = 20e-6  # a look takes the driver's lock for a moment
TOLD_WITHIN_S = 2.0  # ten turns of a watcher
KERNEL_QUEUES = 4
IS_SET = int(REPORT_IS_SET.value)


class Workspace:
    """See the module. Built collectively; `Workspace.of` keeps one per group and device.

    words, state, limits, claims, report: the protocol's words (memory/device/signals.py, memory/device/protocol.py).
    shares: memory for tiles that are dealt out along k.
    calls: how many calls this rank has launched eagerly. chain: those of this GPU. current_stream: gives the caller's.
    captures: makes the graphs of its calls. captured: what graphs of callers replay, which nobody may drop.
    """

    _open: ClassVar[dict[tuple[ProcessGroup, torch.device], Workspace]] = {}

    def __init__(self, group: Group, device: torch.device, board: Board) -> None:
        self.group, self.device, self.board = group, device, board
        self.timeout_s = group.timeout_s
        self.calls = 0
        self.captures = Captures(device, self.settle)
        self.captured: list[object] = []
        self.words = heap_of(group, device, (1 + group.world_size) * SIGNAL_STRIDE_BYTES)
        self.state = torch.zeros(STATE_WORDS, dtype=torch.int64, device=device)
        self.claims = torch.zeros(KERNEL_QUEUES, dtype=torch.int32, device=device)
        self.report = torch.zeros(REPORT_WORDS, dtype=torch.int32, device="cpu").pin_memory()
        self._report: memoryview[int] = memoryview(self.report.numpy())  # type: ignore[arg-type]
        limits = [int(self.timeout_s * 1e9), self.report.data_ptr(), *self.words.addresses]
        self.limits = torch.tensor(limits, dtype=torch.int64, device=device)
        self.shares = SharedShares(device)
        self._packed: list[PackedSpace] = []  # as the heaps
        self._heaps: list[CudaHeap] = []  # the last one is leased; plans bound earlier keep to theirs
        self._most_signals = 0
        self._last_call = torch.cuda.Event()
        self._record_last = super(torch.cuda.Event, self._last_call).record  # without its function of Python
        self._streams: dict[str, torch.cuda.Stream] = {}
        self.chain = Chain.of(device)
        self.current_stream = self.chain.streams.current
        self._watcher = Watcher(self, board)
        board.is_watched = True
        atexit.register(self._finish)

    @classmethod
    def of(cls, group: Group, device: torch.device) -> Workspace:
        """The workspace of a group on this rank's GPU; the first call is collective."""
        key = (group.process_group, device)  # not its name, which a later group may bear
        if key not in cls._open:
            cls._open[key] = cls(group, device, Board.of(group))
        return cls._open[key]

    @classmethod
    def opened(cls, group: Group) -> Workspace | None:
        """The workspace, if this rank has made one, on whichever GPU: plans of library calls alone need none."""
        return next((each for (own, _), each in list(cls._open.items()) if own is group.process_group), None)

    def lease(self, layout: SlotLayout) -> CudaHeap:
        """Memory large enough for a layout. Collective if it must grow; all ranks ask for the same layout. Plans keep
        what they leased."""
        self._most_signals = max(self._most_signals, layout.signals)
        if not self._heaps or layout.size_bytes > self._heaps[-1].tensor.numel():
            self.settle()
            self._heaps.append(heap_of(self.group, self.device, aligned(max(layout.size_bytes, SMALLEST_BYTES))))
        return self._heaps[-1]

    def packed_space(self, half_bytes: int) -> PackedSpace:
        """The memory of packed messages, large enough. Collective if it must grow; all ranks ask for as much."""
        if not self._packed or half_bytes > self._packed[-1].half_bytes:
            self.settle()
            size = aligned(max(half_bytes, SMALLEST_HALF_BYTES))
            heap = CudaHeap(self.group, self.device, HALVES * size)
            self._packed.append(PackedSpace(heap, self.device, size))
        return self._packed[-1]

    @property
    def size_bytes(self) -> int:
        """Of the memory that this rank offers its peers; outgrown pieces stay as long as plans know them."""
        packed_bytes = sum(HALVES * each.half_bytes for each in self._packed)
        return sum(heap.tensor.numel() for heap in (self.words, *self._heaps)) + packed_bytes

    def stream(self, queue: str) -> torch.cuda.Stream:
        """The side stream of a queue: high priority, so that copies are issued ahead of the tiles that wait."""
        if queue not in self._streams:
            self._streams[queue] = torch.cuda.Stream(self.device, priority=-1)
        return self._streams[queue]

    def enter(self) -> torch.cuda.Stream:
        """Begins a call on the caller's stream, which it returns: behind the last one, if that ran on another.

        The thread has the turn of the chain until `leave`. Raises what went wrong before.
        """
        if self._watcher.trouble is not None or self._report[IS_SET]:
            self._refuse()
        chain = self.chain
        stream = chain.streams[chain.streams.handle()]  # without a function of Python, as every call comes here
        if chain.last_stream is not stream and chain.last_call is not None:
            stream.wait_event(chain.last_call)
        return stream

    def leave(self, stream: torch.cuda.Stream) -> None:
        """Ends the call begun by `enter`."""
        self._record_last(stream)
        self.chain.last_stream, self.chain.last_call = stream, self._last_call
        self.calls += 1

    def settle(self) -> None:
        """Waits until the eager calls of this GPU have ended. Raises what goes wrong in this group meanwhile.

        It comes before whatever the driver may hold back until then, graphs and memory. It holds other threads back
        with it, the watcher too, and nobody else could end a stream's wait for a peer that is gone.
        """
        last = self.chain.last_call
        while last is not None and not last.query():
            if self._watcher.trouble is not None or self._report[IS_SET]:
                self._refuse()
            time.sleep(SETTLES_EVERY_S)

    def check(self) -> None:
        """Waits for all calls to end on the device; raises what went wrong in any of them."""
        torch.cuda.synchronize(self.device)
        trouble = self._trouble()
        if trouble is not None:
            raise trouble

    def reset(self) -> None:
        """Collective. Makes a broken workspace fit for use again, once every rank has come here.

        A rank comes when its GPU is idle: what it still sent would land on words that peers have cleared.
        """
        torch.cuda.synchronize(self.device)
        with self._watcher.forgetting():
            self.board.reset(self._clear)

    def reported_alarm(self) -> Alarm | None:
        """What a kernel of this GPU reported when a wait of its own was void."""
        if self._report[REPORT_IS_SET.value] != REPORTED.value:
            return None
        operation, signal, expected, seen = (
            int(self._report[field.value]) for field in (REPORT_OPERATION, REPORT_SIGNAL, REPORT_EXPECTED, REPORT_SEEN)
        )
        if operation == BEGIN_OPERATION.value:
            return Alarm("timeout", "begin: it has not begun this call", peer=signal, expected=expected, seen=seen)
        if operation == PACKED_OPERATION.value:
            return Alarm("timeout", f"its messages of packed call {expected} did not come", peer=signal)
        waiting = "a queue" if operation == QUEUE_OPERATION.value else f"operation {operation}"
        return Alarm("timeout", f"{waiting} waits for signal {signal}", expected=expected, seen=seen)

    def is_idle(self) -> bool:
        """Whether the last eager call has ended on the device."""
        return bool(self._last_call.query())

    def abort_address(self) -> int:
        """The own abort word."""
        return self.words.addresses[self.group.rank]

    def signal_addresses(self) -> list[int]:
        """Where the own signals are, in all memory ever leased."""
        starts = (heap.addresses[self.group.rank] for heap in self._heaps)
        return [start + signal * SIGNAL_STRIDE_BYTES for start in starts for signal in range(self._most_signals)]

    def _is_aborted(self) -> bool:
        """Whether the own abort word is set. Waits for the device."""
        return bool(self.words.view(0, (1,), torch.int32).item())

    def _trouble(self) -> OverweaveError | None:
        """What went wrong in earlier calls, if anything did. Waits for the device where nobody has told yet."""
        trouble = self._watcher.look()
        if trouble is None and self._is_aborted():
            # A peer's kernel ended our waits, and its host has not told why yet: its watcher will, within a moment.
            trouble = reason_within(TOLD_WITHIN_S, self._watcher.look)
            trouble = trouble or self.board.alarm(Alarm("timeout", "a peer gave a call up"))
        return trouble

    def _refuse(self) -> None:
        trouble = self._trouble()
        assert trouble is not None
        if not getattr(trouble, "was_raised", False):
            trouble.was_raised = True  # type: ignore[attr-defined]
            raise trouble
        raise WorkspaceBroken(
            f"call on group {self.group.name}",
            f"an earlier call failed: {trouble}",
            "Call overweave.reset(group) on every rank, or start the group anew",
        )

    def _clear(self) -> None:
        torch.cuda.synchronize(self.device)
        self.words.tensor.zero_()
        self.state.zero_()
        self.claims.zero_()
        self.shares.clear()
        for space in self._packed:
            space.clear()
        self.report.zero_()
        stream = torch.cuda.current_stream(self.device).cuda_stream
        driver.write_values(stream, self.signal_addresses(), 0)
        torch.cuda.synchronize(self.device)

    def _finish(self) -> None:
        """At exit: this rank's calls are done, so its end is no failure."""
        if self._watcher.trouble is None:
            torch.cuda.synchronize(self.device)
            self.board.finish()
