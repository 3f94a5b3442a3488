"""Packed scatter: each program pushes its part of every shard to the shard's owner, and adds its part of the own one.

As kernels/packed/one_shot.py: the flag travels with the data, programs take their part by ticket and push before they
wait. All ranks deal shards alike to programs, by the longest one; who owns fewer rows, or none, hears messages of zeros
that nobody stores, so every rank hears from every other in each call.
Owners add the same numbers in rank order, in fp32, finish the sum if there is an epilogue, and round once.
SOURCE: the first shot of the two-shot all-reduce of TensorRT-LLM; flags in the message as in NCCL's LL protocol.
"""

import triton
import triton.language as tl

from overweave.kernels.packed.parts import (
    alarm_if_missing,
    load_words,
    open_call,
    store_words,
    stretch_of,
    sums_of,
    words_of,
)
from overweave.memory.device.early import await_previous
from overweave.memory.device.packed import poll_messages, push_message


@triton.jit
def packed_scatter_kernel(
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
    EPILOGUE: tl.constexpr,
):
    """partial: `count` int32 words of numbers, of which each rank owns `shard`, the last ones fewer or none; out: the
    own ones, in rows of n numbers, as `after.residual`. turns: of a program, for its stretch of `span` words. The
    rest: see kernels/packed/one_shot.py.
    """
    # Added to a tensor: a number of one arrives as a plain number.
    rank = tl.zeros([], tl.int32) + rank
    stride = tl.zeros([], tl.int64) + stride
    epoch, part, here, mine, timeout_ns = open_call(spaces, state, limits, rank, stride, half, SENDERS)
    if CHAINED:
        await_previous()
    numbers = partial.to(tl.pointer_type(tl.int32))
    total = out.to(tl.pointer_type(tl.int32))
    for turn in range(turns):
        push_parts(numbers, mine, part, turn, epoch, rank, count, shard, span, SENDERS, BLOCK)
    late = tl.zeros([BLOCK], tl.int32)
    for turn in range(turns):
        at, first, left = stretch_of(part, turn, span, BLOCK)
        inside = (left > 0) & (first < shard) & (late == 0)
        left = tl.minimum(left, words_of(rank, shard, count) - first)
        own = load_words(numbers + rank.to(tl.int64) * shard + first, left)
        found = poll_messages(here + at, stride, rank, epoch, inside, words, timeout_ns, SENDERS, POLL, HELD)
        late = tl.maximum(late, found[3 * SENDERS])
        sums = sums_of(own, found, rank, late > 0, after, 0, first, left, n, out.dtype.element_ty, SENDERS, EPILOGUE)
        store_words(total + first, sums, left)
    alarm_if_missing(late, rank, epoch, words, limits, world_size)


@triton.jit
def push_parts(numbers, mine, part, turn, epoch, rank, count, shard, span, SENDERS: tl.constexpr, BLOCK: tl.constexpr):
    """A turn's messages of every peer's shard to that peer."""
    at, first, left = stretch_of(part, turn, span, BLOCK)
    inside = (left > 0) & (first < shard)
    # All loads before the first push, so that they are under way together.
    parts = ()
    for step in tl.static_range(SENDERS):
        owner = (rank + step + 1) % (SENDERS + 1)
        left_there = tl.minimum(left, words_of(owner, shard, count) - first)
        parts += load_words(numbers + owner.to(tl.int64) * shard + first, left_there)
    for step in tl.static_range(SENDERS):
        push_message(mine[step] + at, parts[3 * step], parts[3 * step + 1], parts[3 * step + 2], epoch, inside)
