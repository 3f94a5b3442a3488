"""One instant on all GPUs: each rank's clock as it leaves a barrier, so that their clocks can be compared.

The kernel tells every peer that it has come, waits for all of them, and reads the device clock. Ranks leave within the
time that a store takes to cross NVLink, about 1 us.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from overweave.memory.cuda_heap import CudaHeap
from overweave.memory.device import STRIDE, read_clock, wait_at_least
from overweave.memory.layout import SIGNAL_STRIDE_BYTES
from overweave.memory.workspace import Workspace

# Positions in `state`, int64 words.
TURN = tl.constexpr(0)
CLOCK = tl.constexpr(1)


@triton.jit
def stamp_kernel(state, addresses, own, words, limits, rank, world_size):  # type: ignore[no-untyped-def]
    """See the module. own: one word per peer, here; addresses: where each rank's words lie."""
    turn = (tl.load(state + TURN) + 1).to(tl.int32)
    for peer in range(world_size):
        peer_words = tl.load(addresses + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(peer_words + rank * STRIDE, turn, sem="release", scope="sys")
    for peer in range(world_size):
        wait_at_least(own + peer * STRIDE, turn, words, limits)
    tl.store(state + TURN, turn.to(tl.int64))
    tl.store(state + CLOCK, read_clock())


class Stamp:
    """A barrier on the current stream that takes the time. Made collectively; bounded as all waits of the workspace."""

    def __init__(self, workspace: Workspace) -> None:
        group, device = workspace.group, workspace.device
        heap = CudaHeap(group, device, group.world_size * SIGNAL_STRIDE_BYTES)
        self._state = torch.zeros(2, dtype=torch.int64, device=device)
        addresses = torch.tensor(heap.addresses, dtype=torch.int64, device=device)
        size = (group.world_size * SIGNAL_STRIDE_BYTES // 4,)
        words = workspace.words.view(0, (workspace.words.tensor.numel() // 4,), torch.int32)
        self._arguments = [self._state, addresses, heap.view(0, size, torch.int32), words, workspace.limits]
        self._numbers = [group.rank, group.world_size]
        self._kept_alive = heap

    def __call__(self) -> None:
        """Enqueues it. Every rank calls as often."""
        stamp_kernel[(1,)](*self._arguments, *self._numbers, num_warps=4)

    def clock_ns(self) -> int:
        """What the device clock showed as this rank left the last barrier. Waits for it."""
        return int(self._state[CLOCK.value])
