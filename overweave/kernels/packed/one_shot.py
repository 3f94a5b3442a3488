"""One-shot all-reduce of packed messages: each program pushes its part to all peers, awaits theirs, adds and stores.

No head of the call, no signals, no other launch: the flag travels with the data. Programs take their part by ticket, in
the order in which they arrive, and push before they wait. So the lowest part that some rank has not pushed is held by
nobody that waits for a higher one, and one resident program on each rank makes progress.
Every rank adds the same numbers in rank order, in fp32, finishes the sum if there is an epilogue, and rounds once. With
a norm, programs have whole rows.
SOURCE: one-shot all-reduce as in TensorRT-LLM; flags in the message as in NCCL's LL protocol.
"""

import triton
import triton.language as tl

from overweave.kernels.packed.parts import alarm_if_missing, load_words, open_call, push_to_all, stretch_of, sums_of
from overweave.kernels.packed.rows import deliver, norm_row
from overweave.memory.device.early import await_previous
from overweave.memory.device.packed import poll_messages


@triton.jit
def packed_all_reduce_kernel(
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
    """partial, out: `count` int32 words of numbers, in rows of n, of which each rank needs `shard`: all. after:
    what a norm (kernels/packed/rows.py) or EPILOGUE reads (kernels/arguments.AfterSums). turns: of a program,
    for its stretch of `span` words.

    spaces: where each rank's space lies; it has two halves of `half` bytes, and in each a part of `stride` bytes for
    every rank. SENDERS: one fewer than ranks. POLL, HELD: see memory/device/packed.py. CHAINED: this
    kernel starts before the matmul in front ends (memory/device/early.py).
    """
    # Added to a tensor: a number of one arrives as a plain number.
    rank = tl.zeros([], tl.int32) + rank
    stride = tl.zeros([], tl.int64) + stride
    epoch, part, here, mine, timeout_ns = open_call(spaces, state, limits, rank, stride, half, SENDERS)
    if CHAINED:
        await_previous()
    numbers = partial.to(tl.pointer_type(tl.int32))
    for turn in range(turns):
        at, first, left = stretch_of(part, turn, span, BLOCK)
        left = tl.minimum(left, count - first)
        push_to_all(mine, at, load_words(numbers + first, left), epoch, left > 0, SENDERS)
    squares, late = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    for turn in range(turns):
        at, first, left = stretch_of(part, turn, span, BLOCK)
        left = tl.minimum(left, count - first)
        own = load_words(numbers + first, left)
        # Who waited in vain in one turn does not wait in the next.
        inside = (left > 0) & (late == 0)
        found = poll_messages(here + at, stride, rank, epoch, inside, words, timeout_ns, SENDERS, POLL, HELD)
        late = tl.maximum(late, found[3 * SENDERS])
        sums = sums_of(own, found, rank, late > 0, after, 0, first, left, n, out.dtype.element_ty, SENDERS, EPILOGUE)
        squares += deliver(out, after, first, sums, left, out.dtype.element_ty)
    alarm_if_missing(late, rank, epoch, words, limits, world_size)
    if after.z is not None:
        tl.debug_barrier()
        norm_row(out, after, squares, 0, count, part, span, turns, EPS, BLOCK)
