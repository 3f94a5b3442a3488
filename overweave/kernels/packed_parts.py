"""What the kernels of packed messages share: peers' memory, a message's numbers, their sum, the alarm."""

import triton
import triton.language as tl

from overweave.memory.device import claim_alarm, report_alarm
from overweave.memory.packed import PACKED_OPERATION


@triton.jit
def peers_of(spaces, rank, SENDERS):
    """Where the spaces of the peers lie, the next rank's first."""
    peers = ()
    for step in tl.static_range(SENDERS):
        peers += (tl.load(spaces + (rank + step + 1) % (SENDERS + 1)),)
    return peers


@triton.jit
def data_of(data, first, count):
    """The words of each message: up to three, the last message may have fewer."""
    return (
        tl.load(data, mask=first < count, other=0),
        tl.load(data + 1, mask=first + 1 < count, other=0),
        tl.load(data + 2, mask=first + 2 < count, other=0),
    )


@triton.jit
def added(own, found, index: tl.constexpr, rank, is_void, dtype: tl.constexpr, SENDERS: tl.constexpr):
    """The sum of one word of all ranks, in rank order: two numbers of 16 bits, or one of 32. NaN where it is void."""
    low = tl.zeros(own.shape, tl.float32)
    high = tl.zeros(own.shape, tl.float32)
    for source in tl.static_range(SENDERS + 1):
        # Senders leave no gap where the own rank stands.
        behind = found[3 * (source if source < SENDERS else source - 1) + index]
        before = found[3 * (source - 1 if source > 0 else 0) + index]
        word = tl.where(source == rank, own, tl.where(source < rank, behind, before))
        if dtype.primitive_bitwidth == 32:
            low += word.to(tl.float32, bitcast=True)
        else:
            low += word.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
            high += (word >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    low = tl.where(is_void, float("nan"), low)
    high = tl.where(is_void, float("nan"), high)
    return word_of(low, high, dtype)


@triton.jit
def word_of(low, high, dtype: tl.constexpr):
    """Two numbers rounded to 16 bits, or one of 32, as a word."""
    if dtype.primitive_bitwidth == 32:
        return low.to(tl.int32, bitcast=True)
    else:
        lower = low.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        upper = high.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16
        return upper | lower


@triton.jit
def alarm_if_missing(missing, rank, epoch, words, limits, world_size):
    """Reports the peer whose message some element of `missing` (memory/packed.py) did not get, if there is one."""
    late = tl.max(missing, 0)
    if late > 0:
        if claim_alarm(words, limits):
            sender = tl.where(late - 1 >= rank, late, late - 1)
            report_alarm(PACKED_OPERATION, sender, epoch, 0, words, limits, world_size)
