"""The tables of a routing in one launch: counts of experts, the order of pairs, and where each source's rows begin.

Pairs are dealt out to programs in their order. Each counts its experts, all meet, and each adds up what lies before its
own pairs: a counting sort, stable. Who has the first pair of a source knows where its rows begin. No program waits for
one that cannot run: there are no more of them than SMs; and the meeting has a deadline, behind which the tables are
void.
"""

import triton
import triton.language as tl

from overweave.memory.device.signals import wait_at_least

MEETING = tl.constexpr(1 << 20)  # what the programs of a launch add to the word where they meet, all together


@triton.jit
def meet(state, limits):
    """Waits until all programs are here. Returns 1, or 0 at the deadline, and which meeting it is. state: a word as
    launches left it, a zero, and, of a launch whose programs came late, the number of their meeting plus one.
    """
    tl.debug_barrier()
    programs = tl.num_programs(0)
    share = tl.where(tl.program_id(0) == 0, MEETING - programs + 1, 1)
    seen = tl.atomic_add(state, share, sem="acq_rel", scope="gpu")
    meeting = (seen & -MEETING) + MEETING
    is_met = wait_at_least(state, meeting, state + 1, limits)
    if is_met == 0:
        tl.store(state + 2, meeting + 1)
    return is_met, meeting


@triton.jit
def experts_of(ids, pair, pairs, top, row_stride, col_stride, experts):
    """The expert of each pair, `experts` of those without one; and whether its id is wrong."""
    is_pair = pair < pairs
    token, slot = (pair // top).to(tl.int64), (pair % top).to(tl.int64)
    named = tl.load(ids + token * row_stride + slot * col_stride, mask=is_pair, other=-1)
    has_expert = (named >= 0) & (named < experts)
    return tl.where(has_expert, named, experts), is_pair & (named != -1) & (has_expert == 0)


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
    """Each program routes PARTS times PART pairs. The tables are those of moe/routing.Routing.

    shape: kernels/arguments.TopkShape. scratch: int32 `[2, programs, BINS]`, `[programs]`. state:
    `meet`.
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
        # What nobody overwrites, where programs come late, names pairs and tokens that exist.
        pair = first + part * PART + own
        tl.store(order + pair, pair, mask=pair < pairs)
        tl.store(tokens + pair, pair // top, mask=pair < pairs)
    tl.store(scratch + program * BINS + bins, counted)
    bases, wrongs = scratch + programs * BINS, scratch + 2 * programs * BINS
    tl.store(wrongs + program, wrong)
    is_met, meeting = meet(state, limits)

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

    # Where the pairs of each expert go that are not placed yet; behind all those without one, as many as are in no bin.
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
        its = tl.histogram(expert, BINS, mask=expert < experts)
        ahead = tl.cumsum(its, 0) - its  # in the part, sorted
        # Sorted by expert, and by number among those of one: behind the last are those that are no pairs.
        key = tl.sort(tl.where(pair < pairs, expert, experts + 1) * PART + own)
        sorted_expert, sorted_pair = key // PART, first + part * PART + key % PART
        is_pair, has_expert = sorted_expert <= experts, sorted_expert < experts
        tl.debug_barrier()  # of the part before all have read
        tl.store(bases + program * BINS + bins, base - ahead)
        tl.debug_barrier()
        begin = tl.load(bases + program * BINS + sorted_expert, mask=has_expert, other=0, volatile=True)
        row = own + tl.where(has_expert, begin, base_of_none - tl.sum(its, 0))
        tl.store(places + sorted_pair, row, mask=is_pair)
        tl.store(order + row, sorted_pair, mask=is_pair)
        tl.store(tokens + row, sorted_pair // top, mask=is_pair)
        base += its
        base_of_none += tl.sum(((pair < pairs) & (expert == experts)).to(tl.int32), 0)

    if program == 0:
        is_late = (is_met == 0) | (tl.load(state + 2, volatile=True) == meeting + 1)
        tl.store(state + 2, 0)
        tl.store(reason, any_wrong + 2 * is_late.to(tl.int32))
