"""Routing tables of a mixture of experts in one launch: a stable counting sort of (token, expert) pairs by expert.

Each program counts the experts of its contiguous pairs; after a grid barrier each sums the counts of the programs
before it, and places its pairs. The program that has a source rank's first pair stores where that source's rows begin.
The launch has at most as many programs as SMs, so that all are resident; the grid barrier has a deadline all the same,
after which the tables are void.
"""

import triton
import triton.language as tl

from overweave.memory.device.signals import wait_at_least

BARRIER_STEP = tl.constexpr(1 << 20)  # what all programs of one launch together add to the barrier word


@triton.jit
def grid_barrier(state, limits):
    """Wait at a grid barrier until all programs have come. Return (1, or 0 at the deadline; the barrier's number).

    state: int32 words: the barrier word as earlier launches left it; a 0, for the wait; 0, or the number plus one of a
    barrier at which a program timed out.
    """
    tl.debug_barrier()
    programs = tl.num_programs(0)
    increment = tl.where(tl.program_id(0) == 0, BARRIER_STEP - programs + 1, 1)
    seen = tl.atomic_add(state, increment, sem="acq_rel", scope="gpu")
    barrier = (seen & -BARRIER_STEP) + BARRIER_STEP
    has_met = wait_at_least(state, barrier, state + 1, limits)
    if has_met == 0:
        tl.store(state + 2, barrier + 1)
    return has_met, barrier


@triton.jit
def experts_of(ids, pair, pairs, top, row_stride, col_stride, experts):
    """Return (the expert of each pair, or `experts` if it has none; whether its id is invalid)."""
    is_pair = pair < pairs
    token, slot = (pair // top).to(tl.int64), (pair % top).to(tl.int64)
    expert_ids = tl.load(ids + token * row_stride + slot * col_stride, mask=is_pair, other=-1)
    has_expert = (expert_ids >= 0) & (expert_ids < experts)
    return tl.where(has_expert, expert_ids, experts), is_pair & (expert_ids != -1) & (has_expert == 0)


@triton.jit
def route_kernel(
    ids,
    counts,
    offsets,
    order,
    places,
    tokens,
    bounds,
    reason,
    scratch,
    state,
    limits,
    pairs,
    shape,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    BINS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Fill the tables of a routing (moe/routing.Routing). Each program sorts PARTS parts of PART pairs.

    ids: `[tokens, top]` (shape: TopkShape). Written: counts, offsets by expert; order: pairs sorted by expert, those
    without one last; places: the row of each pair; tokens: the token of each row; bounds: first row of each (source,
    expert); reason: error bits, 1: an id is invalid, 2: a program was late. scratch: int32 `[2, programs, BINS]`, then
    `[programs]`. state, limits: of `meet`.
    """
    top, row_stride, col_stride, experts, sources, shard = shape
    program, programs = tl.program_id(0), tl.num_programs(0)
    bins, own = tl.arange(0, BINS), tl.arange(0, PART)
    first = program * PART * PARTS
    counted = tl.zeros([BINS], tl.int32)
    wrong = 0
    for part in range(PARTS):
        expert, is_wrong = experts_of(ids, first + part * PART + own, pairs, top, row_stride, col_stride, experts)
        counted += tl.histogram(expert, BINS, mask=expert < experts)
        wrong = tl.maximum(wrong, tl.max(is_wrong.to(tl.int32), 0))
        # If programs are late, these entries may stay: every one names a pair and a token that exist.
        pair = first + part * PART + own
        tl.store(order + pair, pair, mask=pair < pairs)
        tl.store(tokens + pair, pair // top, mask=pair < pairs)
    tl.store(scratch + program * BINS + bins, counted)
    bases, wrongs = scratch + programs * BINS, scratch + 2 * programs * BINS
    tl.store(wrongs + program, wrong)
    is_met, barrier = grid_barrier(state, limits)

    total, before = tl.zeros([BINS], tl.int32), tl.zeros([BINS], tl.int32)
    any_wrong = 0
    if is_met == 1:
        for some in range(0, programs, AT_ONCE):
            other = some + tl.arange(0, AT_ONCE)
            place, is_any = scratch + other[:, None] * BINS + bins[None, :], (other < programs)[:, None]
            theirs = tl.load(place, mask=is_any, other=0, volatile=True)
            total += tl.sum(theirs, 0)
            before += tl.sum(tl.where((other < program)[:, None], theirs, 0), 0)
    through = tl.cumsum(total, 0)
    routed = tl.sum(total, 0)
    if program == 0:
        tl.store(counts + bins, total, mask=bins < experts)
        tl.store(offsets + bins + 1, through, mask=bins < experts)
        tl.store(offsets, 0)
        if is_met == 1:
            for some in range(0, programs, AT_ONCE):
                other = some + tl.arange(0, AT_ONCE)
                each_wrong = tl.load(wrongs + other, mask=other < programs, other=0, volatile=True)
                any_wrong = tl.maximum(any_wrong, tl.max(each_wrong, 0))

    # First free row of each expert for this program's pairs; pairs without an expert come behind all others.
    base = through - total + before
    base_of_none = routed + first - tl.sum(before, 0)
    for source in range(sources):
        begin = tl.minimum(source * shard * top, pairs)
        if (begin >= first) & ((begin < first + PART * PARTS) | (program == programs - 1)):
            ahead_of_it = tl.zeros([BINS], tl.int32)
            for part in range(PARTS):
                pair = first + part * PART + own
                expert, _unused = experts_of(ids, pair, pairs, top, row_stride, col_stride, experts)
                ahead_of_it += tl.histogram(expert, BINS, mask=(expert < experts) & (pair < begin))
            tl.store(bounds + source * experts + bins, (base + ahead_of_it) * is_met, mask=bins < experts)
    for part in range(PARTS):
        pair = first + part * PART + own
        expert, _unused = experts_of(ids, pair, pairs, top, row_stride, col_stride, experts)
        if is_met == 0:
            expert = expert * 0 + experts
        bin_counts = tl.histogram(expert, BINS, mask=expert < experts)
        ahead = tl.cumsum(bin_counts, 0) - bin_counts  # in the part, sorted
        # Sorted by expert, then by pair; lanes beyond the last pair come last.
        key = tl.sort(tl.where(pair < pairs, expert, experts + 1) * PART + own)
        sorted_expert, sorted_pair = key // PART, first + part * PART + key % PART
        is_pair, has_expert = sorted_expert <= experts, sorted_expert < experts
        tl.debug_barrier()  # all threads have read the bases of the part before
        tl.store(bases + program * BINS + bins, base - ahead)
        tl.debug_barrier()
        begin = tl.load(bases + program * BINS + sorted_expert, mask=has_expert, other=0, volatile=True)
        row = own + tl.where(has_expert, begin, base_of_none - tl.sum(bin_counts, 0))
        tl.store(places + sorted_pair, row, mask=is_pair)
        tl.store(order + row, sorted_pair, mask=is_pair)
        tl.store(tokens + row, sorted_pair // top, mask=is_pair)
        base += bin_counts
        base_of_none += tl.sum(((pair < pairs) & (expert == experts)).to(tl.int32), 0)

    if program == 0:
        is_late = (is_met == 0) | (tl.load(state + 2, volatile=True) == barrier + 1)
        tl.store(state + 2, 0)
        tl.store(reason, any_wrong + 2 * is_late.to(tl.int32))
