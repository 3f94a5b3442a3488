"""Two-shot all-reduce of packed messages: each program pushes its part of every shard to the shard's owner, sums its
part of the own shard, pushes that to all peers, and stores what they summed.

As kernels/packed/one_shot.py: the flag travels with the data, programs take their part by ticket and push before they
wait. All ranks deal a shard alike to programs, by the longest one, so a program waits for those of the same part only:
it ends once each rank has come to that part, and one resident program on each rank makes progress. Shards that are
shorter send and hear messages of zeros, so every rank hears from every other in each call, whatever its rows.
Every sum is made once, by its owner, in rank order, in fp32, rounded once: all ranks have the same bits. With a norm,
programs have a row of each shard, and every rank norms them all.
SOURCE: two-shot all-reduce as in TensorRT-LLM; flags in the message as in NCCL's LL protocol.
"""

import triton
import triton.language as tl

from overweave.kernels.packed.parts import (
    alarm_if_missing,
    load_words,
    open_call,
    push_to_all,
    stretch_of,
    sums_of,
    told_by,
    words_of,
)
from overweave.kernels.packed.rows import deliver, norm_row
from overweave.kernels.packed.scatter import push_parts
from overweave.memory.device.early import await_previous
from overweave.memory.device.packed import poll_messages


@triton.jit
def packed_two_shot_kernel(
    partial,
    out,
    after,
    spaces,
    state,
    words,
    limits,
    count,
    shard,
    span,
    turns,
    stride,
    half,
    rank,
    world_size,
    n,
    SENDERS: tl.constexpr,
    POLL: tl.constexpr,
    HELD: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
    EPS: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """partial, out: `count` int32 words of numbers, of which each rank owns `shard`, the last ones fewer or none.

    In a half of a space, behind the parts for what every rank sends of its partial, stand those for what it sends of
    its sums. The rest: see kernels/packed/one_shot.py.
    """
    # Added to a tensor: a number of one arrives as a plain number.
    rank = tl.zeros([], tl.int32) + rank
    stride = tl.zeros([], tl.int64) + stride
    dtype: tl.constexpr = out.dtype.element_ty
    epoch, part, here, mine, timeout_ns = open_call(spaces, state, limits, rank, stride, half, SENDERS)
    if CHAINED:
        await_previous()
    numbers = partial.to(tl.pointer_type(tl.int32))
    for turn in range(turns):
        push_parts(numbers, mine, part, turn, epoch, rank, count, shard, span, SENDERS, BLOCK)

    own_start, own_size = rank.to(tl.int64) * shard, words_of(rank, shard, count)
    behind = stride * (SENDERS + 1)
    squares, late = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    for turn in range(turns):
        at, first, left = stretch_of(part, turn, span, BLOCK)
        inside = (left > 0) & (first < shard)
        left = tl.minimum(left, own_size - first)
        own = load_words(numbers + own_start + first, left)
        looks = inside & (late == 0)
        found = poll_messages(here + at, stride, rank, epoch, looks, words, timeout_ns, SENDERS, POLL, HELD)
        late = tl.maximum(late, found[3 * SENDERS])
        sums = sums_of(own, found, rank, late > 0, after, own_start, first, left, n, dtype, SENDERS, EPILOGUE)
        # A sum that lacks a part is not sent: who waits for it ends by the alarm, and knows that its call is void.
        push_to_all(mine, behind + at, sums, epoch, inside & (late == 0), SENDERS)
        squares += deliver(out, after, own_start + first, sums, left, dtype)
    # Before the second wait, which this ends everywhere.
    alarm_if_missing(late, rank, epoch, words, limits, world_size)

    of_peers, late = _zeros(SENDERS, BLOCK), tl.zeros([BLOCK], tl.int32)
    for turn in range(turns):
        at, first, left = stretch_of(part, turn, span, BLOCK)
        looks = (left > 0) & (first < shard) & (late == 0)
        found = poll_messages(here + behind + at, stride, rank, epoch, looks, words, timeout_ns, SENDERS, POLL, HELD)
        late = tl.maximum(late, found[3 * SENDERS])
        more = _deliver_told(out, after, first, left, found, late > 0, rank, shard, count, dtype, SENDERS)
        of_peers = _added_squares(of_peers, more, SENDERS)
    alarm_if_missing(late, rank, epoch, words, limits, world_size)
    if after.z is not None:
        tl.debug_barrier()
        norm_row(out, after, squares, own_start, own_size, part, span, turns, EPS, BLOCK)
        for sender in tl.static_range(SENDERS):
            owner = tl.where(sender >= rank, sender + 1, sender)
            start, size = owner.to(tl.int64) * shard, words_of(owner, shard, count)
            norm_row(out, after, of_peers[sender], start, size, part, span, turns, EPS, BLOCK)


@triton.jit
def _zeros(SENDERS, BLOCK):
    zeros = ()
    for _ in tl.static_range(SENDERS):
        zeros += (tl.zeros([BLOCK], tl.float32),)
    return zeros


@triton.jit
def _deliver_told(out, after, first, left, found, is_void, rank, shard, count, dtype, SENDERS):
    """The shards of all peers as they came; returns what `deliver` does for each."""
    squares = ()
    for sender in tl.static_range(SENDERS):
        owner = tl.where(sender >= rank, sender + 1, sender)
        left_there = tl.minimum(left, words_of(owner, shard, count) - first)
        told, start = told_by(found, sender, is_void), owner.to(tl.int64) * shard
        squares += (deliver(out, after, start + first, told, left_there, dtype),)
    return squares


@triton.jit
def _added_squares(some, more, SENDERS):
    total = ()
    for sender in tl.static_range(SENDERS):
        total += (some[sender] + more[sender],)
    return total
