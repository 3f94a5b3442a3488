"""One-shot all-reduce of packed messages: each program pushes its part to all peers, awaits theirs, adds and stores.

No head of the call, no signals, no other launch: the flag travels with the data. Programs take their part by ticket, in
the order in which they arrive, and push before they wait. So the lowest part that some rank has not pushed is held by
nobody that waits for a higher one, and one resident program on each rank makes progress.
Every rank adds the same numbers in rank order, in fp32, and rounds once.
SOURCE: one-shot all-reduce as in TensorRT-LLM; flags in the message as in NCCL's LL protocol.
"""

import triton
import triton.language as tl

from overweave.memory.device import TIMEOUT_NS, claim_alarm, report_alarm
from overweave.memory.packed import (
    DATA_WORDS,
    MESSAGE_BYTES,
    PACKED_OPERATION,
    poll_messages,
    push_message,
    take_ticket,
)


@triton.jit
def packed_all_reduce_kernel(
    partial,
    out,
    spaces,
    state,
    words,
    limits,
    count,
    stride,
    half,
    rank,
    world_size,
    SENDERS: tl.constexpr,
    POLL: tl.constexpr,
    HELD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """partial, out: `count` int32 words of numbers. spaces: where each rank's space lies; it has two halves of `half`
    bytes, and in each a part of `stride` bytes for every rank. SENDERS: one fewer than ranks. POLL, HELD: see
    memory/packed.py.
    """
    # Added to a tensor: a number of one arrives as a plain number.
    rank = tl.zeros([], tl.int32) + rank
    stride = tl.zeros([], tl.int64) + stride
    # What no ticket is needed for comes first: its loads are under way together with the ticket.
    timeout_ns = tl.load(limits + TIMEOUT_NS)
    here = tl.load(spaces + rank)
    peers = _peers_of(spaces, rank, SENDERS)
    epoch, place = take_ticket(state, tl.num_programs(0))
    messages = place * BLOCK + tl.arange(0, BLOCK)
    inside = messages * DATA_WORDS < count
    data = partial.to(tl.pointer_type(tl.int32)) + messages * DATA_WORDS
    own = _data_of(data, messages * DATA_WORDS, count)

    at = (epoch & 1).to(tl.int64) * half + messages.to(tl.int64) * MESSAGE_BYTES
    mine = at + rank.to(tl.int64) * stride
    for step in tl.static_range(SENDERS):
        push_message(peers[step] + mine, own[0], own[1], own[2], epoch, inside)

    found = poll_messages(here + at, stride, rank, epoch, inside, words, timeout_ns, SENDERS, POLL, HELD)
    missing = found[3 * SENDERS]
    total = out.to(tl.pointer_type(tl.int32)) + messages * DATA_WORDS
    for index in tl.static_range(DATA_WORDS):
        word = _added(own[index], found, index, rank, missing > 0, out.dtype.element_ty, SENDERS)
        tl.store(total + index, word, mask=messages * DATA_WORDS + index < count)

    late = tl.max(missing, 0)
    if late > 0:
        if claim_alarm(words, limits):
            sender = tl.where(late - 1 >= rank, late, late - 1)
            report_alarm(PACKED_OPERATION, sender, epoch, 0, words, limits, world_size)


@triton.jit
def _data_of(data, first, count):
    """The words of each message: up to three, the last message may have fewer."""
    return (
        tl.load(data, mask=first < count, other=0),
        tl.load(data + 1, mask=first + 1 < count, other=0),
        tl.load(data + 2, mask=first + 2 < count, other=0),
    )


@triton.jit
def _peers_of(spaces, rank, SENDERS):
    """Where the spaces of the peers lie, the next rank's first."""
    peers = ()
    for step in tl.static_range(SENDERS):
        peers += (tl.load(spaces + (rank + step + 1) % (SENDERS + 1)),)
    return peers


@triton.jit
def _added(own, found, index: tl.constexpr, rank, is_void, dtype: tl.constexpr, SENDERS: tl.constexpr):
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
    if dtype.primitive_bitwidth == 32:
        return low.to(tl.int32, bitcast=True)
    else:
        lower = low.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        upper = high.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16
        return upper | lower
