"""Synchronize the clocks of all GPUs: each rank reads its clock as it leaves a barrier.

The kernel notifies every peer, waits for all of them, and reads the device clock. Ranks leave within the time that a
store takes to cross NVLink, about 1 us.
"""

import triton
import triton.language as tl

from overweave.memory.device.signals import STRIDE, read_clock, wait_at_least

# Positions in `state`, int64 words.
ROUND = tl.constexpr(0)
CLOCK = tl.constexpr(1)


@triton.jit
def stamp_kernel(state, addresses, signals, words, limits, rank, world_size):
    """Run the barrier and store the clock. signals: one word per peer. addresses: of each rank's signals. One block."""
    round_number = (tl.load(state + ROUND) + 1).to(tl.int32)
    for peer in range(world_size):
        peer_signals = tl.load(addresses + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(peer_signals + rank * STRIDE, round_number, sem="release", scope="sys")
    for peer in range(world_size):
        wait_at_least(signals + peer * STRIDE, round_number, words, limits)
    tl.store(state + ROUND, round_number.to(tl.int64))
    tl.store(state + CLOCK, read_clock())
