"""One-shot all-reduce of packed messages: each program pushes its part to all peers, awaits theirs, adds and stores.

No head of the call, no signals, no other launch: the flag travels with the data. Programs take their part by ticket, in
the order in which they arrive, and push before they wait. So the lowest part that some rank has not pushed is held by
nobody that waits for a higher one, and one resident program on each rank makes progress.
Every rank adds the same numbers in rank order, in fp32, and rounds once.
SOURCE: one-shot all-reduce as in TensorRT-LLM; flags in the message as in NCCL's LL protocol.
"""

import triton
import triton.language as tl

from overweave.kernels.packed_parts import added, alarm_if_missing, data_of, peers_of
from overweave.memory.device import TIMEOUT_NS
from overweave.memory.packed import DATA_WORDS, MESSAGE_BYTES, poll_messages, push_message, take_ticket


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
    peers = peers_of(spaces, rank, SENDERS)
    epoch, place = take_ticket(state, tl.num_programs(0))
    messages = place * BLOCK + tl.arange(0, BLOCK)
    inside = messages * DATA_WORDS < count
    data = partial.to(tl.pointer_type(tl.int32)) + messages * DATA_WORDS
    own = data_of(data, messages * DATA_WORDS, count)

    at = (epoch & 1).to(tl.int64) * half + messages.to(tl.int64) * MESSAGE_BYTES
    mine = at + rank.to(tl.int64) * stride
    for step in tl.static_range(SENDERS):
        push_message(peers[step] + mine, own[0], own[1], own[2], epoch, inside)

    found = poll_messages(here + at, stride, rank, epoch, inside, words, timeout_ns, SENDERS, POLL, HELD)
    missing = found[3 * SENDERS]
    total = out.to(tl.pointer_type(tl.int32)) + messages * DATA_WORDS
    for index in tl.static_range(DATA_WORDS):
        word = added(own[index], found, index, rank, missing > 0, out.dtype.element_ty, SENDERS)
        tl.store(total + index, word, mask=messages * DATA_WORDS + index < count)
    alarm_if_missing(missing, rank, epoch, words, limits, world_size)
