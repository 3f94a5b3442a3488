"""Two-shot all-reduce of packed messages: each program pushes its part of every shard to the shard's owner, sums its
part of the own shard, pushes that to all peers, and stores what they summed.

As kernels/packed.py: the flag travels with the data, programs take their part by ticket and push before they wait. All
ranks deal a shard alike to programs, by the longest one, so a program waits for those of the same part only: it ends
once each rank has come to that part, and one resident program on each rank makes progress. Shards that are shorter send
and hear messages of zeros, so every rank hears from every other in each call, whatever its rows.
Every sum is made once, by its owner, in rank order, in fp32, rounded once: all ranks have the same bits.
SOURCE: two-shot all-reduce as in TensorRT-LLM; flags in the message as in NCCL's LL protocol.
"""

import triton
import triton.language as tl

from overweave.kernels.packed_parts import added, alarm_if_missing, data_of, peers_of, word_of
from overweave.memory.device import TIMEOUT_NS
from overweave.memory.packed import DATA_WORDS, MESSAGE_BYTES, poll_messages, push_message, take_ticket


@triton.jit
def packed_two_shot_kernel(
    partial,
    out,
    spaces,
    state,
    words,
    limits,
    count,
    shard,
    stride,
    half,
    rank,
    world_size,
    SENDERS: tl.constexpr,
    POLL: tl.constexpr,
    HELD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """partial, out: `count` int32 words of numbers, of which each rank owns `shard`, the last ones fewer or none.

    spaces: where each rank's space lies; it has two halves of `half` bytes, and in each a part of `stride` bytes for
    what every rank sends of its partial, then one for what it sends of its sums. SENDERS: one fewer than ranks.
    POLL, HELD: see memory/packed.py.
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
    first = messages * DATA_WORDS
    inside = first < shard
    numbers = partial.to(tl.pointer_type(tl.int32))
    total = out.to(tl.pointer_type(tl.int32))
    # All loads before the first push, so that they are under way together.
    own = _part_of(numbers, rank, first, shard, count)
    parts = _parts_of(numbers, rank, first, shard, count, SENDERS)

    at = (epoch & 1).to(tl.int64) * half + messages.to(tl.int64) * MESSAGE_BYTES
    mine = at + rank.to(tl.int64) * stride
    for step in tl.static_range(SENDERS):
        push_message(peers[step] + mine, parts[3 * step], parts[3 * step + 1], parts[3 * step + 2], epoch, inside)
    found = poll_messages(here + at, stride, rank, epoch, inside, words, timeout_ns, SENDERS, POLL, HELD)
    missing = found[3 * SENDERS]
    sums = _sums_of(own, found, rank, missing > 0, out.dtype.element_ty, SENDERS)
    # A sum that lacks a part is not sent: who waits for it ends by the alarm, and knows that its call is void.
    is_sent = inside & (missing == 0)
    behind = stride * (SENDERS + 1)
    for step in tl.static_range(SENDERS):
        push_message(peers[step] + mine + behind, sums[0], sums[1], sums[2], epoch, is_sent)
    _store(total, rank, first, sums, shard, count)
    # Before the second wait, which this ends everywhere.
    alarm_if_missing(missing, rank, epoch, words, limits, world_size)

    found = poll_messages(here + at + behind, stride, rank, epoch, inside, words, timeout_ns, SENDERS, POLL, HELD)
    missing = found[3 * SENDERS]
    for sender in tl.static_range(SENDERS):
        owner = tl.where(sender >= rank, sender + 1, sender)
        told = _told(found, sender, missing > 0, out.dtype.element_ty)
        _store(total, owner, first, told, shard, count)
    alarm_if_missing(missing, rank, epoch, words, limits, world_size)


@triton.jit
def _start(owner, shard):
    """Where an owner's words begin."""
    return owner.to(tl.int64) * shard


@triton.jit
def _words(owner, shard, count):
    """How many words an owner has; none or fewer where it has no rows."""
    return tl.minimum(count - _start(owner, shard), shard).to(tl.int32)


@triton.jit
def _store(total, owner, first, sums, shard, count):
    """Stores the words of each message in an owner's shard."""
    target = total + _start(owner, shard) + first
    size = _words(owner, shard, count)
    for index in tl.static_range(3):
        tl.store(target + index, sums[index], mask=first + index < size)


@triton.jit
def _part_of(numbers, owner, first, shard, count):
    """The words of each message in an owner's shard."""
    return data_of(numbers + _start(owner, shard) + first, first, _words(owner, shard, count))


@triton.jit
def _parts_of(numbers, rank, first, shard, count, SENDERS):
    """Those of all peers' shards, the next rank's first."""
    parts = ()
    for step in tl.static_range(SENDERS):
        parts += _part_of(numbers, (rank + step + 1) % (SENDERS + 1), first, shard, count)
    return parts


@triton.jit
def _sums_of(own, found, rank, is_void, dtype, SENDERS):
    """The words of each message of the own sum."""
    sums = ()
    for index in tl.static_range(DATA_WORDS):
        sums += (added(own[index], found, index, rank, is_void, dtype, SENDERS),)
    return sums


@triton.jit
def _told(found, sender, is_void, dtype):
    """The words of each message of a sender, NaN where it is void."""
    nan = tl.where(is_void, float("nan"), tl.zeros(is_void.shape, tl.float32))
    nothing = word_of(nan, nan, dtype)
    told = ()
    for index in tl.static_range(DATA_WORDS):
        told += (tl.where(is_void, nothing, found[3 * sender + index]),)
    return told
