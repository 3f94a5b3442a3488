"""The workspace of one (group, GPU): memory that the calls of plans use one after the other, and the protocol's words.

Calls are chained (memory/cuda/streams.py): each begins, on the device, after the call before it, whatever its stream.
Memory is never freed while the process lives, because a captured graph may hold its addresses.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import ClassVar

import torch
from torch.distributed import ProcessGroup

from overweave.errors import MachineError, OverweaveError, WorkspaceBroken
from overweave.memory.board.board import Alarm, Board
from overweave.memory.cuda import driver
from overweave.memory.cuda.heap import CudaHeap, allocate_heap
from overweave.memory.cuda.streams import Captures, Chain
from overweave.memory.device.packed import PACKED_OPERATION
from overweave.memory.device.protocol import BEGIN_OPERATION, QUEUE_OPERATION, STATE_WORDS
from overweave.memory.device.signals import (
    REPORT_EXPECTED,
    REPORT_IS_SET,
    REPORT_OPERATION,
    REPORT_SEEN,
    REPORT_SIGNAL,
    REPORTED,
    SATISFIED,
)
from overweave.memory.group import Group
from overweave.memory.heap import HALVES, PackedSpace, ranks_in_reach
from overweave.memory.layout import REPORT_WORDS, SIGNAL_STRIDE_BYTES, SMALLEST_HALF_BYTES, SlotLayout, aligned
from overweave.memory.outside_modes import exempt_thread_from_capture
from overweave.memory.split_k import SharedShares

# A kernel's waits have a deadline; a stream's have none, and a dead peer should be noticed long before any deadline. So
# the watcher polls the report of this GPU's kernels, the peers' alarms and their processes. On any failure it sets the
# abort word, which every kernel polls, and raises every signal of the workspace, which satisfies every stream wait.
# What then runs computes garbage, and the next call raises the failure.
#
# It writes through a stream of its own, and if these writes are blocked, through a CUDA context of its own. A thread
# that launches a kernel for the first time, creates a graph or frees memory may block until the GPU is idle. Driver
# calls of other threads in the same context block with it (campaigns/rates/gpu_driver_waits.py): memsets and launches
# do not even return, and writes return, but are not always executed.

WATCH_EVERY_S = 0.2
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
        time.sleep(WATCH_EVERY_S / 10)


class Watcher:
    """The watcher thread of a workspace. failure: the first failure since the last reset, None if there is none."""

    def __init__(self, workspace: Workspace, board: Board) -> None:
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
            time.sleep(WATCH_EVERY_S)
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


SMALLEST_BYTES = 32 << 20
POLL_EVERY_S = 20e-6  # a poll takes the driver's lock for a moment
REASON_WITHIN_S = 2.0  # ten polls of a watcher
KERNEL_QUEUES = 4
IS_SET = int(REPORT_IS_SET.value)


class Workspace:
    """The workspace of a group on this rank's GPU. Created collectively; `Workspace.of` keeps one per group and device.

    words, state, limits, claims, report: the protocol's words (memory/device/signals.py, memory/device/protocol.py).
    shares: split-K memory. calls: how many calls this rank has launched eagerly. chain: the calls of this GPU.
    current_stream: returns the caller's stream. captures: captures graphs of calls. captured_runs: bound plans that the
    callers' graphs replay, kept alive.
    """

    _open: ClassVar[dict[tuple[ProcessGroup, torch.device], Workspace]] = {}

    def __init__(self, group: Group, device: torch.device, board: Board) -> None:
        self.group, self.device, self.board = group, device, board
        self.timeout_s = group.timeout_s
        self.calls = 0
        self.captures = Captures(device, self.drain)
        self.captured_runs: list[object] = []
        self.words = allocate_heap(group, device, (1 + group.world_size) * SIGNAL_STRIDE_BYTES)
        self.state = torch.zeros(STATE_WORDS, dtype=torch.int64, device=device)
        self.claims = torch.zeros(KERNEL_QUEUES, dtype=torch.int32, device=device)
        self.report = torch.zeros(REPORT_WORDS, dtype=torch.int32, device="cpu").pin_memory()
        self._report: memoryview[int] = memoryview(self.report.numpy())  # type: ignore[arg-type]
        self._in_reach = ranks_in_reach(self.words.addresses, group.rank)  # as kernels count their peers
        peers = [self.words.addresses[rank] for rank in self._in_reach]
        limits = [int(self.timeout_s * 1e9), self.report.data_ptr(), *peers]
        self.limits = torch.tensor(limits, dtype=torch.int64, device=device)
        self.shares = SharedShares(device)
        self._packed: list[PackedSpace] = []  # the last one is current; plans bound earlier use older ones
        self._heaps: list[CudaHeap] = []  # likewise
        self._most_signals = 0
        self._last_call = torch.cuda.Event()
        self._record_last = super(
            torch.cuda.Event, self._last_call
        ).record  # the C function, without torch's Python wrapper
        self._streams: dict[str, torch.cuda.Stream] = {}  # queue -> side stream
        self.chain = Chain.of(device)
        self.current_stream = self.chain.streams.current
        self._watcher = Watcher(self, board)
        board.is_watched = True
        atexit.register(self._finish)

    @classmethod
    def of(cls, group: Group, device: torch.device) -> Workspace:
        """Return the workspace of a group on this rank's GPU; the first call is collective."""
        key = (group.process_group, device)  # not its name, which a later group may have
        if key not in cls._open:
            cls._open[key] = cls(group, device, Board.of(group))
        return cls._open[key]

    @classmethod
    def existing(cls, group: Group) -> Workspace | None:
        """Return the workspace on any GPU if this rank has created one: plans of library calls alone need none."""
        return next((each for (own, _), each in list(cls._open.items()) if own is group.process_group), None)

    def lease(self, layout: SlotLayout) -> CudaHeap:
        """Return memory large enough for a layout. Collective if it must grow: all ranks pass the same layout.

        A plan keeps the memory that it has leased.
        """
        self._most_signals = max(self._most_signals, layout.signals)
        if not self._heaps or layout.size_bytes > self._heaps[-1].tensor.numel():
            self.drain()
            self._heaps.append(allocate_heap(self.group, self.device, aligned(max(layout.size_bytes, SMALLEST_BYTES))))
        return self._heaps[-1]

    def packed_space(self, half_bytes: int) -> PackedSpace:
        """Return memory of packed messages, large enough. Collective if it must grow: all ranks pass the same size."""
        if not self._packed or half_bytes > self._packed[-1].half_bytes:
            self.drain()
            size = aligned(max(half_bytes, SMALLEST_HALF_BYTES))
            heap = CudaHeap(self.group, self.device, HALVES * size)
            self._packed.append(PackedSpace(heap, self.device, size))
        return self._packed[-1]

    @property
    def size_bytes(self) -> int:
        """Bytes of symmetric memory of this rank, with allocations that were outgrown: plans still use them."""
        packed_bytes = sum(HALVES * each.half_bytes for each in self._packed)
        return sum(heap.tensor.numel() for heap in (self.words, *self._heaps)) + packed_bytes

    def stream(self, queue: str) -> torch.cuda.Stream:
        """Return the side stream of a queue: high priority, so that copies are issued ahead of the tiles that wait."""
        if queue not in self._streams:
            self._streams[queue] = torch.cuda.Stream(self.device, priority=-1)
        return self._streams[queue]

    def enter(self) -> torch.cuda.Stream:
        """Begin a call on the caller's stream, and return that stream. It waits for the last call's stream.

        The caller holds the lock of the chain until `leave`. Raises the failure of an earlier call.
        """
        if self._watcher.failure is not None or self._report[IS_SET]:
            self._raise_failure()
        chain = self.chain
        stream = chain.streams[chain.streams.handle()]  # not `current()`: every call comes here, functions cost time
        if chain.last_stream is not stream and chain.last_call is not None:
            stream.wait_event(chain.last_call)
        return stream

    def leave(self, stream: torch.cuda.Stream) -> None:
        """End the call begun by `enter`."""
        self._record_last(stream)
        self.chain.last_stream, self.chain.last_call = stream, self._last_call
        self.calls += 1

    def drain(self) -> None:
        """Wait until the eager calls of this GPU have ended. Raises the failure of a call meanwhile.

        Call it before the creation of a graph or of memory: the driver may block these until the GPU is idle, and other
        threads with them. A blocked watcher could not end a stream's wait for a peer that died.
        """
        last = self.chain.last_call
        while last is not None and not last.query():
            if self._watcher.failure is not None or self._report[IS_SET]:
                self._raise_failure()
            time.sleep(POLL_EVERY_S)

    def check(self) -> None:
        """Wait for all calls to end on the device; raise the failure of any of them."""
        torch.cuda.synchronize(self.device)
        failure = self._find_failure()
        if failure is not None:
            raise failure

    def reset(self) -> None:
        """Repair a broken workspace once every rank has called this. Collective.

        Each rank waits for its GPU first: a late store would land on words that peers have cleared.
        """
        torch.cuda.synchronize(self.device)
        with self._watcher.suspended():
            self.board.reset(self._clear)

    def reported_alarm(self) -> Alarm | None:
        """Return what a kernel of this GPU reported when one of its waits timed out; None if there is no report."""
        if self._report[REPORT_IS_SET.value] != REPORTED.value:
            return None
        operation, signal, expected, seen = (
            int(self._report[field.value]) for field in (REPORT_OPERATION, REPORT_SIGNAL, REPORT_EXPECTED, REPORT_SEEN)
        )
        if operation == BEGIN_OPERATION.value:
            late = self._in_reach[signal]
            return Alarm("timeout", "begin: it has not begun this call", peer=late, expected=expected, seen=seen)
        if operation == PACKED_OPERATION.value:
            return Alarm("timeout", f"its messages of packed call {expected} did not come", peer=signal)
        waiting = "a queue" if operation == QUEUE_OPERATION.value else f"operation {operation}"
        return Alarm("timeout", f"{waiting} waits for signal {signal}", expected=expected, seen=seen)

    def is_idle(self) -> bool:
        """Return whether the last eager call has ended on the device."""
        return bool(self._last_call.query())

    def abort_address(self) -> int:
        """Return the address of this rank's abort word."""
        return self.words.addresses[self.group.rank]

    def signal_addresses(self) -> list[int]:
        """Return the addresses of this rank's signals in all heaps."""
        starts = (heap.addresses[self.group.rank] for heap in self._heaps)
        return [start + signal * SIGNAL_STRIDE_BYTES for start in starts for signal in range(self._most_signals)]

    def _is_aborted(self) -> bool:
        """Return whether this rank's abort word is set. Waits for the device."""
        return bool(self.words.view(0, (1,), torch.int32).item())

    def _find_failure(self) -> OverweaveError | None:
        """Return the failure of an earlier call, if there is one. Waits for the device if none is known yet."""
        failure = self._watcher.poll()
        if failure is None and self._is_aborted():
            # A peer's kernel aborted our waits. Its watcher will publish the reason within a moment.
            failure = poll_within(REASON_WITHIN_S, self._watcher.poll)
            failure = failure or self.board.alarm(Alarm("timeout", "a peer gave a call up"))
        return failure

    def _raise_failure(self) -> None:
        """Raise the failure of an earlier call: once as it is, then as WorkspaceBroken."""
        failure = self._find_failure()
        assert failure is not None
        if not getattr(failure, "was_raised", False):
            failure.was_raised = True  # type: ignore[attr-defined]
            raise failure
        raise WorkspaceBroken(
            f"call on group {self.group.name}",
            f"an earlier call failed: {failure}",
            "Call overweave.reset(group) on every rank, or start the group anew",
        )

    def _clear(self) -> None:
        """Zero all words and signals of this rank. Waits for the device."""
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
        """At exit, mark this rank's calls as done: the end of its process is no failure."""
        if self._watcher.failure is None:
            torch.cuda.synchronize(self.device)
            self.board.finish()
