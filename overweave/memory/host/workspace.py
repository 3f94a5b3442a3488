"""The workspace of CPU ranks: memory that calls use one after the other, and the protocol that makes its reuse safe.

The protocol is that of memory/device/protocol.py, run by the host. In the prologue of call e a rank has finished all
calls before it: it zeroes the signals it has read, sends every peer a credit, and waits for a credit of each of them.
A call has no epilogue.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from overweave.errors import InputError, WorkspaceBroken
from overweave.memory.board.board import Alarm, Board
from overweave.memory.board.records import Fence, Pause, create_shared_memory
from overweave.memory.group import Group, OfGroup
from overweave.memory.heap import HALVES, PackedSpace
from overweave.memory.layout import SIGNAL_STRIDE_BYTES, SIGNAL_STRIDE_WORDS, SlotLayout, aligned


def try_run_locked(work: Callable[[], None]) -> bool:
    """Run `work` under the lock and return True; return False at once if another process holds the lock.

    A process that dies releases the lock. A process suspended while it holds the lock delays peers; their deadlines
    apply.
    """
    descriptor = os.open(__file__, os.O_RDONLY | os.O_CLOEXEC)  # any file that all processes can open
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        work()
        return True
    finally:
        os.close(descriptor)


class HostHeap:
    """`size_bytes` zeroed bytes of every rank of a group. Collective: all ranks allocate in one order.

    Ranks of each island map one file of their own.
    tensor: this rank's part, uint8. starts: of each rank of the island, where its part starts. addresses: of each
    rank's part in this process; of ranks of other islands, of the own one. Raises MachineError on every rank if one
    cannot map its island's file, PeerDied, PeerTimeout.
    """

    def __init__(self, board: Board, size_bytes: int, deadline_s: float | None = None) -> None:
        part_bytes, ranks, island = aligned(size_bytes), range(board.world_size), board.islands.of(board.rank)
        self.starts = {rank: place * part_bytes for place, rank in enumerate(island)}
        file = create_shared_memory(
            board.rank,
            len(island) * part_bytes,
            lambda data: board.all_gather_bytes(data, deadline_s),
            creator=island[0],
        )
        file.close_descriptor()
        self._memory = torch.frombuffer(file.memory, dtype=torch.uint8)
        self._bytes, self._rank = file.memory, board.rank
        own = self.starts[board.rank]
        self.tensor = self._memory[own : own + part_bytes]
        self.addresses = tuple(self._memory.data_ptr() + self.starts.get(rank, own) for rank in ranks)

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype, rank: int | None = None) -> torch.Tensor:
        """Return a row-major tensor, `offset` bytes from the start of a rank's part. rank: None for this rank."""
        start = self.starts[self._rank if rank is None else rank] + offset
        return self._memory[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def words(self, offset: int, count: int, rank: int | None = None) -> memoryview:
        """Return int32 words of a rank's part: a memoryview, which Python reads and writes quicker than a tensor."""
        start = self.starts[self._rank if rank is None else rank] + offset
        return self._bytes[start : start + 4 * count].cast("i")


ABORT, COMPLETED = 0, 1  # lines of the words
# A signal's line holds one word per contributor, so that no word has two writers and no atomic add is needed.
MAX_RANKS = SIGNAL_STRIDE_WORDS

# Adds to the int32 word at an address, atomically: for kernels that read a signal as one counter.
AtomicAdd = Callable[[int, int], None]


class HostWorkspace:
    """The workspace of a group of CPU ranks. Calls follow each other in the same sequence on all ranks, one at a time.

    words: symmetric, the abort word and each rank's completed calls, a line each (memory/device/signals.py). agreed:
    signatures of the plans that all ranks have called before.
    """

    words: HostHeap

    def __init__(self, group: Group, board: Board) -> None:
        if group.world_size > MAX_RANKS:
            raise InputError(f"at most {MAX_RANKS} CPU ranks", f"group has {group.world_size}", "Use a smaller group")
        self.board = board
        self.rank = group.rank
        self.world_size = group.world_size
        # Across islands nobody writes a peer's memory: the library's collectives synchronize the ranks.
        self._connected = board.islands.of(group.rank)
        self.is_broken = False
        self.agreed: set[bytes] = set()
        self.fence = Fence()
        self._heap: HostHeap | None = None
        self._packed: PackedSpace | None = None
        self._used: memoryview | None = None
        self._calls = 0

    @staticmethod
    def of(group: Group) -> HostWorkspace:
        """Return the group's workspace; the first call is collective."""
        workspace = _WORKSPACES.get(group.process_group)
        if workspace is None:
            workspace = _WORKSPACES[group.process_group] = HostWorkspace(group, Board.of(group))
        return workspace

    @staticmethod
    def existing(group: Group) -> HostWorkspace | None:
        """Return the group's workspace if this rank has created one."""
        return _WORKSPACES.get(group.process_group)

    def begin(self, layout: SlotLayout, timeout_s: float) -> HostSlot:
        """Run the prologue of a call; return memory that no rank uses any more. Raises PeerDied, PeerTimeout."""
        self.check_usable()
        heap = self._heap_for(layout, timeout_s)
        call = self._calls = self._calls + 1
        if self._used is not None:
            self._used[:] = bytes(self._used.nbytes)
        self.fence()
        for peer in self._connected:
            self.lines(peer)[(COMPLETED + self.rank) * SIGNAL_STRIDE_WORDS] = call - 1
        slot = HostSlot(self, heap, layout)
        self._used = slot.signals[self.rank].cast("B")
        self._await_credits(self.lines(self.rank), call - 1, timeout_s)
        return slot

    def lines(self, rank: int) -> memoryview:
        """Return a rank's abort word and completed-calls words: int32, `SIGNAL_STRIDE_WORDS` to a line."""
        return self.words.words(0, (COMPLETED + self.world_size) * SIGNAL_STRIDE_WORDS, rank)

    def check_usable(self) -> None:
        """Raise WorkspaceBroken after a call that failed."""
        if self.is_broken:
            cure = "Call overweave.reset(group) on every rank"
            raise WorkspaceBroken("call on this group", "an earlier call failed", cure)

    def packed(self, half_bytes: int, timeout_s: float) -> PackedSpace:
        """Return memory of packed messages, large enough. Collective if it must grow. Raises PeerDied, PeerTimeout."""
        if self._packed is None or self._packed.half_bytes < half_bytes:
            heap = HostHeap(self.board, HALVES * half_bytes, timeout_s)
            self._packed = PackedSpace(heap, torch.device("cpu"), half_bytes)
        return self._packed

    @property
    def size_bytes(self) -> int:
        """Bytes of symmetric memory of this rank."""
        heaps = [] if self._heap is None else [self.words, self._heap]
        packed_bytes = 0 if self._packed is None else HALVES * self._packed.half_bytes
        return sum(heap.tensor.numel() for heap in heaps) + packed_bytes

    def reset_local(self) -> None:
        """Reset this rank's workspace, without its board (`overweave.reset`)."""
        # The next call allocates new heaps: an interrupted growth may have left the ranks with different ones.
        self._heap = self._packed = self._used = None
        self._calls = 0
        self.agreed.clear()
        self.is_broken = False

    def _heap_for(self, layout: SlotLayout, timeout_s: float) -> HostHeap:
        """Return a heap large enough for a layout. Collective if it must grow."""
        if self._heap is None:
            size_bytes = (COMPLETED + self.world_size) * SIGNAL_STRIDE_BYTES
            self.words = HostHeap(self.board, size_bytes, timeout_s)
        if self._heap is None or layout.size_bytes > self._heap.tensor.numel():
            # Every rank has finished its earlier calls when it gets here: none uses the old heap.
            self._used, self._heap = None, HostHeap(self.board, layout.size_bytes, timeout_s)
        return self._heap

    def _await_credits(self, words: memoryview, previous: int, timeout_s: float) -> None:
        """Wait for a credit of every peer: it has finished the call before, and begun this one."""
        pause, start_s = Pause(), time.monotonic()
        for peer in self._connected:
            while (seen := words[(COMPLETED + peer) * SIGNAL_STRIDE_WORDS]) < previous:
                pause()
                self.board.check_periodically()
                if time.monotonic() - start_s > timeout_s:
                    late = Alarm("timeout", "begin: it has not begun this call", peer, expected=previous, seen=seen)
                    raise self.board.alarm(late)
        self.fence()


class HostSlot:
    """The memory of one call: the parts that are mapped into this process. signals: int32 words, by rank."""

    def __init__(self, workspace: HostWorkspace, heap: HostHeap, layout: SlotLayout) -> None:
        self.heap, self.layout = heap, layout
        self.atomic_add: AtomicAdd | None = None
        self._fence, self._rank, self._world_size = workspace.fence, workspace.rank, workspace.world_size
        words = layout.signals * SIGNAL_STRIDE_WORDS
        self.signals = {rank: heap.words(0, words, rank) for rank in heap.starts}

    def matrix(self, name: str, shape: tuple[int, int], dtype: torch.dtype, rank: int) -> Tensor:
        """Return any rank's instance of a buffer, `[rows, cols]`."""
        return self.heap.view(self.layout.buffers[name], shape, dtype, rank)

    def notify(self, pad: str, rank: int, signal: int, count: int) -> None:
        """Add `count` to a signal of `rank`, in release order."""
        self._fence()
        if self.atomic_add is None:
            self.signals[rank][self.layout.signal(pad, signal) * SIGNAL_STRIDE_WORDS + self._rank] += count
        else:
            self.atomic_add(self.heap.addresses[rank] + self.layout.signal_offset(pad, signal), count)

    def counts(self, pad: str, signal: int) -> list[int]:
        """Return what each rank has added to a signal of this rank; with `atomic_add` only the sum has meaning."""
        start = self.layout.signal(pad, signal) * SIGNAL_STRIDE_WORDS
        return self.signals[self._rank][start : start + self._world_size].tolist()

    def has_reached(self, pad: str, signals: tuple[int, int], count: int) -> bool:
        """Return whether each of this rank's signals `[lo, hi)` has reached `count`, in acquire order."""
        for signal in range(*signals):
            if sum(self.counts(pad, signal)) < count:
                return False
        self._fence()
        return True


_WORKSPACES = OfGroup[HostWorkspace]()
