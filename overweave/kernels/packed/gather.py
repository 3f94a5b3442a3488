"""Packed gather: each program pushes its part of the own shard to all peers, and stores theirs beside its own.

As kernels/packed/one_shot.py: the flag travels with the data, programs take their part by ticket and push before they
wait. All ranks deal shards alike to programs, by the longest one; who has fewer rows, or none, sends messages of zeros
that nobody stores, so every rank hears from every other in each call. Words are moved as they are, whatever their
dtype.
SOURCE: flags in the message as in NCCL's LL protocol.
"""

import triton
import triton.language as tl

from overweave.kernels.packed.parts import (
    alarm_if_missing,
    load_words,
    open_call,
    push_to_all,
    store_words,
    stretch_of,
    told_by,
    words_of,
)
from overweave.memory.device.early import let_next_begin
from overweave.memory.device.packed import poll_messages


@triton.jit
def packed_gather_kernel(
    x,
    gathered,
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
    SENDERS: tl.constexpr,
    POLL: tl.constexpr,
    HELD: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """x: the own one of the shards, of `shard` int32 words each, the last ones fewer or none, that `gathered` has in a
    row, `count` words. turns: of a program, for its stretch of `span` words. CHAINED: the matmul behind starts early.
    The rest: see kernels/packed/one_shot.py.
    """
    if CHAINED:
        let_next_begin()
    # Added to a tensor: a number of one arrives as a plain number.
    rank = tl.zeros([], tl.int32) + rank
    stride = tl.zeros([], tl.int64) + stride
    epoch, part, here, mine, timeout_ns = open_call(spaces, state, limits, rank, stride, half, SENDERS)
    source = x.to(tl.pointer_type(tl.int32))
    target = gathered.to(tl.pointer_type(tl.int32))
    for turn in range(turns):
        at, first, left = stretch_of(part, turn, span, BLOCK)
        inside = (left > 0) & (first < shard)
        left_here = tl.minimum(left, words_of(rank, shard, count) - first)
        own = load_words(source + first, left_here)
        push_to_all(mine, at, own, epoch, inside, SENDERS)
        store_words(target + rank.to(tl.int64) * shard + first, own, left_here)
    late = tl.zeros([BLOCK], tl.int32)
    for turn in range(turns):
        at, first, left = stretch_of(part, turn, span, BLOCK)
        inside = (left > 0) & (first < shard) & (late == 0)
        found = poll_messages(here + at, stride, rank, epoch, inside, words, timeout_ns, SENDERS, POLL, HELD)
        late = tl.maximum(late, found[3 * SENDERS])
        for sender in tl.static_range(SENDERS):
            owner = tl.where(sender >= rank, sender + 1, sender)
            left_there = tl.minimum(left, words_of(owner, shard, count) - first)
            store_words(target + owner.to(tl.int64) * shard + first, told_by(found, sender, late > 0), left_there)
    alarm_if_missing(late, rank, epoch, words, limits, world_size)
