"""What stands beside tokens that travel to experts of other ranks, each in one launch: to whom a token goes, and in
which words its experts, weights and scales travel; where it stands among those that a rank gets; and the words read."""

import triton
import triton.language as tl

UNIT = tl.constexpr(4)  # words beside a token are whole ones of 16 bytes


@triton.jit
def choose_ranks_kernel(
    ids,
    weights,
    scales,
    targets,
    beside,
    tokens,
    experts,
    each,
    ranks,
    TOP: tl.constexpr,
    SLOTS: tl.constexpr,
    SCALES: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """targets int32 `[tokens, TOP]`: the rank of each expert of a token, -1 if there is none or if an earlier expert of
    the token is on that rank, `ranks` of a wrong id. beside int32 `[tokens, WORDS]`: experts plus one, weights, scales.
    ids `[tokens, TOP]`; weights, alike, and scales fp32 `[tokens, SCALES]`, or None. each: experts of a rank. SLOTS,
    COLUMNS: powers of two from TOP and SCALES on.
    """
    token, slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    is_token = token < tokens
    inside = is_token[:, None] & (slot < TOP)[None, :]
    at = token.to(tl.int64)[:, None] * TOP + slot[None, :]
    named = tl.load(ids + at, mask=inside, other=-1)
    is_some = (named >= 0) & (named < experts)
    expert = tl.where(is_some, named, 0).to(tl.int32)
    target = tl.where(is_some, expert // each, tl.where(named == -1, -1, ranks))
    is_same = target[:, :, None] == target[:, None, :]
    is_earlier = (slot[None, :] < slot[:, None])[None, :, :]
    is_again = tl.max((is_same & is_earlier).to(tl.int32), 2) != 0
    tl.store(targets + at, tl.where(is_again, -1, target), mask=inside)
    words = beside + token.to(tl.int64)[:, None] * WORDS
    tl.store(words + slot[None, :], tl.where(is_some, expert + 1, 0), mask=inside)
    if weights is not None:
        weight = tl.load(weights + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(words + TOP + slot[None, :], weight.to(tl.int32, bitcast=True), mask=inside)
    first: tl.constexpr = TOP if weights is None else 2 * TOP
    if SCALES > 0:
        column = tl.arange(0, COLUMNS)
        is_scale = is_token[:, None] & (column < SCALES)[None, :]
        scale = tl.load(scales + token.to(tl.int64)[:, None] * SCALES + column[None, :], mask=is_scale, other=0.0)
        tl.store(words + first + column[None, :], scale.to(tl.int32, bitcast=True), mask=is_scale)
    rest = first + SCALES + tl.arange(0, UNIT)
    nothing = tl.zeros([BLOCK, UNIT], tl.int32)
    tl.store(words + rest[None, :], nothing, mask=is_token[:, None] & (rest < WORDS)[None, :])


@triton.jit
def place_rows_kernel(
    targets,
    rows,
    offsets,
    counts,
    reason,
    places,
    told,
    tokens,
    ranks,
    TOP: tl.constexpr,
    SLOTS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """places int32 `[tokens, ranks]`: which row a token is of those that go to a rank; -1: none. told: int32 `[ranks +
    1]`, counts and their reason. targets: `choose_ranks_kernel`; rows, offsets, counts, reason: of their routing
    (moe/routing.Routing). RANKS: a power of two above `ranks`.
    """
    token, slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    is_token = token < tokens
    inside = is_token[:, None] & (slot < TOP)[None, :]
    at = token.to(tl.int64)[:, None] * TOP + slot[None, :]
    target = tl.load(targets + at, mask=inside, other=-1)
    begin = tl.load(offsets + target, mask=(target >= 0) & (target < ranks), other=0)
    row = tl.load(rows + at, mask=inside, other=0) - begin
    for rank in range(ranks):
        place = tl.max(tl.where(target == rank, row, -1), 1)
        tl.store(places + token.to(tl.int64) * ranks + rank, place, mask=is_token)
    if tl.program_id(0) == 0:
        column = tl.arange(0, RANKS)
        tl.store(told + column, tl.load(counts + column, mask=column < ranks, other=0), mask=column < ranks)
        tl.store(told + ranks, tl.load(reason))


@triton.jit
def read_beside_kernel(
    beside,
    ids,
    weights,
    scales,
    rows,
    low,
    high,
    TOP: tl.constexpr,
    SLOTS: tl.constexpr,
    SCALES: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ids int32 `[rows, TOP]`: experts from `low` to `high`, numbered from the first one, -1 for others; weights fp32,
    alike, 0 for these, and scales fp32 `[rows, SCALES]`, or None: of words as `choose_ranks_kernel` makes them.
    """
    row, slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    inside = (row < rows)[:, None] & (slot < TOP)[None, :]
    at = row.to(tl.int64)[:, None] * TOP + slot[None, :]
    words = beside + row.to(tl.int64)[:, None] * WORDS
    own = tl.load(words + slot[None, :], mask=inside, other=0) - 1 - low
    is_own = (own >= 0) & (own < high - low)
    tl.store(ids + at, tl.where(is_own, own, -1), mask=inside)
    if weights is not None:
        weight = tl.load(words + TOP + slot[None, :], mask=inside, other=0).to(tl.float32, bitcast=True)
        tl.store(weights + at, tl.where(is_own, weight, 0.0), mask=inside)
    first: tl.constexpr = TOP if weights is None else 2 * TOP
    if SCALES > 0:
        column = tl.arange(0, COLUMNS)
        is_scale = (row < rows)[:, None] & (column < SCALES)[None, :]
        scale = tl.load(words + first + column[None, :], mask=is_scale, other=0).to(tl.float32, bitcast=True)
        tl.store(scales + row.to(tl.int64)[:, None] * SCALES + column[None, :], scale, mask=is_scale)
