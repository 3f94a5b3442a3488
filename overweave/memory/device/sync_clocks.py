"""One instant on all GPUs: each rank's clock as it leaves a barrier, so that their clocks can be compared.

The kernel tells every peer that it has come, waits for all of them, and reads the device clock. Ranks leave within the
time that a store takes to cross NVLink, about 1 us.
"""

import triton
import triton.language as tl

from overweave.memory.device.signals import STRIDE, read_clock, wait_at_least

# Positions in `state`, int64 words.
TURN = tl.constexpr(0)
CLOCK = tl.constexpr(1)


@triton.jit
def stamp_kernel(state, addresses, signals, words, limits, rank, world_size):
    """See the module. signals: one word per peer, here; addresses: where each rank's lie. One block, one kernel."""
    turn = (tl.load(state + TURN) + 1).to(tl.int32)
    for peer in range(world_size):
        peer_signals = tl.load(addresses + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(peer_signals + rank * STRIDE, turn, sem="release", scope="sys")
    for peer in range(world_size):
        wait_at_least(signals + peer * STRIDE, turn, words, limits)
    tl.store(state + TURN, turn.to(tl.int64))
    tl.store(state + CLOCK, read_clock())
