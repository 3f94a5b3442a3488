"""The tables of a routing in one launch: counts of experts, the order of pairs, tiles, and whose tokens a tile reads.

Pairs are dealt out to programs in their order. Each counts its experts, all meet, and each adds up what lies before its
own pairs: a counting sort, stable. Where tiles are to know their sources, they meet again. No program waits for one
that cannot run: there are no more of them than SMs; and the meeting has a deadline, behind which the tables are void.
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
    starts,
    counts,
    offsets,
    order,
    places,
    tokens,
    tiles,
    sources,
    count,
    reason,
    scratch,
    state,
    limits,
    pairs,
    shape,
    most,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SOURCES: tl.constexpr,
):
    """Each program routes PARTS times PART pairs. The tables are those of moe/routing.Routing.

    shape: kernels/arguments.TopkShape. scratch: int32 `[2, programs, BINS]`, `[programs]`. state:
    `meet`. most: how many tiles the tables hold. SOURCES: a power of two above their number, 0 without `starts`.
    """
    top, row_stride, col_stride, experts, source_count = shape
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
    rows_of_tiles = (total + BLOCK_M - 1) // BLOCK_M
    tiles_through = tl.cumsum(rows_of_tiles, 0)
    if program == 0:
        tl.store(counts + bins, total, mask=bins < experts)
        tl.store(offsets + bins + 1, through, mask=bins < experts)
        tl.store(offsets, 0)
        tl.store(count, tl.sum(rows_of_tiles, 0))
        if is_met == 1:
            for some in range(0, programs, AT_ONCE):
                other = some + tl.arange(0, AT_ONCE)
                each_wrong = tl.load(wrongs + other, mask=other < programs, other=0, volatile=True)
                any_wrong = tl.maximum(any_wrong, tl.max(each_wrong, 0))

    # Where the pairs of each expert go that are not placed yet; behind all those without one, as many as are in no bin.
    base = through - total + before
    base_of_none = routed + first - tl.sum(before, 0)
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

    if SOURCES > 0:
        is_met_again, meeting = meet(state, limits)
        is_met *= is_met_again
    store_tiles(
        tiles, sources, tokens, starts, source_count, total, through, rows_of_tiles, tiles_through, is_met, most,
        BLOCK_M, BLOCK, SOURCES,
    )  # fmt: skip
    if program == 0:
        is_late = (is_met == 0) | (tl.load(state + 2, volatile=True) == meeting + 1)
        tl.store(state + 2, 0)
        tl.store(reason, any_wrong + 2 * is_late.to(tl.int32))


@triton.jit
def store_tiles(
    tiles, sources, tokens, starts, source_count, total, through, rows_of_tiles, tiles_through, is_met, most,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, SOURCES: tl.constexpr,
):  # fmt: skip
    """The tiles of all experts, and whose tokens each reads; zeros behind them. total, through, rows_of_tiles,
    tiles_through: of each expert its rows, with those before it, and its tiles, with those before it.
    """
    bins = tl.arange(0, total.shape[0])
    for some in range(tl.program_id(0) * BLOCK, most, tl.num_programs(0) * BLOCK):
        tile = some + tl.arange(0, BLOCK)
        is_its = (tile[:, None] < tiles_through[None, :]) & (tile[:, None] >= (tiles_through - rows_of_tiles)[None, :])
        is_tile = (tile < tl.sum(rows_of_tiles, 0)) & (is_met == 1)
        expert = tl.sum(tl.where(is_its, bins[None, :], 0), 1)
        behind = tile - tl.sum(tl.where(is_its, (tiles_through - rows_of_tiles)[None, :], 0), 1)
        end = tl.sum(tl.where(is_its, through[None, :], 0), 1)
        row = tl.sum(tl.where(is_its, (through - total)[None, :], 0), 1) + behind * BLOCK_M
        height = tl.minimum(end - row, BLOCK_M)
        tl.store(tiles + tile * 3, tl.where(is_tile, expert, 0), mask=tile < most)
        tl.store(tiles + tile * 3 + 1, tl.where(is_tile, row, 0), mask=tile < most)
        tl.store(tiles + tile * 3 + 2, tl.where(is_tile, height, 0), mask=tile < most)
        low, high = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
        if SOURCES > 0:
            low_token = tl.load(tokens + row, mask=is_tile, other=0, volatile=True)
            high_token = tl.load(tokens + row + height - 1, mask=is_tile, other=0, volatile=True)
            low = source_of(starts, source_count, low_token, SOURCES)
            high = source_of(starts, source_count, high_token, SOURCES)
        tl.store(sources + tile * 2, tl.where(is_tile, low, 0), mask=tile < most)
        tl.store(sources + tile * 2 + 1, tl.where(is_tile, high, 0), mask=tile < most)


@triton.jit
def source_of(starts, count, token, SOURCES: tl.constexpr):
    """Which source each token is of: the last that begins at it or before."""
    source = tl.arange(0, SOURCES)
    begins = tl.load(starts + source, mask=(source > 0) & (source < count), other=0x7FFFFFFF)
    return tl.sum((begins[None, :] <= token[:, None]).to(tl.int32), 1)
