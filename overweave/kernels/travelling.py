"""Metadata of expert-parallel dispatch, one launch each: target ranks of tokens, their rows there, and unpacking.

Beside each token travels one row of int32 words, its metadata: top-k expert ids plus one (0: none), then routing
weights, then fp8 scales (fp32 bit patterns), padded to 16 bytes.
"""

import triton
import triton.language as tl

UNIT = tl.constexpr(4)  # a metadata row is padded to this many words, 16 bytes


@triton.jit
def choose_ranks_kernel(
    ids,
    weights,
    scales,
    targets,
    row_words,
    tokens,
    experts,
    experts_per_rank,
    ranks,
    TOP: tl.constexpr,
    SLOTS: tl.constexpr,
    SCALES: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Choose the rank that each (token, expert) pair is sent to, and pack the tokens' metadata rows.

    ids `[tokens, TOP]`; weights likewise, scales fp32 `[tokens, SCALES]`, or None. Written: targets int32 `[tokens,
    TOP]`: the expert's rank; -1 for no expert (id -1) or if an earlier expert of the token has the same rank; `ranks`
    for an invalid id. row_words int32 `[tokens, WORDS]`: the metadata. SLOTS, COLUMNS: TOP, SCALES rounded up to powers
    of two.
    """
    token, slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    is_token = token < tokens
    inside = is_token[:, None] & (slot < TOP)[None, :]
    pair = token.to(tl.int64)[:, None] * TOP + slot[None, :]
    expert_ids = tl.load(ids + pair, mask=inside, other=-1)
    is_valid = (expert_ids >= 0) & (expert_ids < experts)
    expert = tl.where(is_valid, expert_ids, 0).to(tl.int32)
    target = tl.where(is_valid, expert // experts_per_rank, tl.where(expert_ids == -1, -1, ranks))
    same_rank = target[:, :, None] == target[:, None, :]
    is_earlier = (slot[None, :] < slot[:, None])[None, :, :]
    is_duplicate = tl.max((same_rank & is_earlier).to(tl.int32), 2) != 0
    tl.store(targets + pair, tl.where(is_duplicate, -1, target), mask=inside)
    words = row_words + token.to(tl.int64)[:, None] * WORDS
    tl.store(words + slot[None, :], tl.where(is_valid, expert + 1, 0), mask=inside)
    if weights is not None:
        weight = tl.load(weights + pair, mask=inside, other=0.0).to(tl.float32)
        tl.store(words + TOP + slot[None, :], weight.to(tl.int32, bitcast=True), mask=inside)
    first: tl.constexpr = TOP if weights is None else 2 * TOP
    if SCALES > 0:
        column = tl.arange(0, COLUMNS)
        is_scale = is_token[:, None] & (column < SCALES)[None, :]
        scale = tl.load(scales + token.to(tl.int64)[:, None] * SCALES + column[None, :], mask=is_scale, other=0.0)
        tl.store(words + first + column[None, :], scale.to(tl.int32, bitcast=True), mask=is_scale)
    padding = first + SCALES + tl.arange(0, UNIT)
    zeros = tl.zeros([BLOCK, UNIT], tl.int32)
    tl.store(words + padding[None, :], zeros, mask=is_token[:, None] & (padding < WORDS)[None, :])


@triton.jit
def place_rows_kernel(
    targets,
    rows,
    offsets,
    counts,
    reason,
    positions,
    counts_out,
    tokens,
    ranks,
    TOP: tl.constexpr,
    SLOTS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store each token's row among those sent to each rank, and copy counts and error bits for the peers.

    targets: of `choose_ranks_kernel`. rows, offsets, counts, reason: tables of their routing (moe/routing.Routing).
    Written: positions int32 `[tokens, ranks]`, -1 where a token does not go; counts_out int32 `[ranks + 1]`: rows for
    each rank, then the error bits. RANKS: a power of two above `ranks`.
    """
    token, slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    is_token = token < tokens
    inside = is_token[:, None] & (slot < TOP)[None, :]
    pair = token.to(tl.int64)[:, None] * TOP + slot[None, :]
    target = tl.load(targets + pair, mask=inside, other=-1)
    rank_begin = tl.load(offsets + target, mask=(target >= 0) & (target < ranks), other=0)
    row = tl.load(rows + pair, mask=inside, other=0) - rank_begin
    for rank in range(ranks):
        position = tl.max(tl.where(target == rank, row, -1), 1)
        tl.store(positions + token.to(tl.int64) * ranks + rank, position, mask=is_token)
    if tl.program_id(0) == 0:
        column = tl.arange(0, RANKS)
        tl.store(counts_out + column, tl.load(counts + column, mask=column < ranks, other=0), mask=column < ranks)
        tl.store(counts_out + ranks, tl.load(reason))


@triton.jit
def read_metadata_kernel(
    row_words,
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
    """Unpack received metadata rows on a rank that has experts `[low, high)`.

    row_words: as `choose_ranks_kernel` packs them. Written: ids int32 `[rows, TOP]`: local expert numbers, -1 for other
    ranks' experts; weights fp32 likewise, 0 for these, and scales fp32 `[rows, SCALES]`, or None.
    """
    row, slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    inside = (row < rows)[:, None] & (slot < TOP)[None, :]
    pair = row.to(tl.int64)[:, None] * TOP + slot[None, :]
    words = row_words + row.to(tl.int64)[:, None] * WORDS
    local_expert = tl.load(words + slot[None, :], mask=inside, other=0) - 1 - low
    is_local = (local_expert >= 0) & (local_expert < high - low)
    tl.store(ids + pair, tl.where(is_local, local_expert, -1), mask=inside)
    if weights is not None:
        weight = tl.load(words + TOP + slot[None, :], mask=inside, other=0).to(tl.float32, bitcast=True)
        tl.store(weights + pair, tl.where(is_local, weight, 0.0), mask=inside)
    first: tl.constexpr = TOP if weights is None else 2 * TOP
    if SCALES > 0:
        column = tl.arange(0, COLUMNS)
        is_scale = (row < rows)[:, None] & (column < SCALES)[None, :]
        scale = tl.load(words + first + column[None, :], mask=is_scale, other=0).to(tl.float32, bitcast=True)
        tl.store(scales + row.to(tl.int64)[:, None] * SCALES + column[None, :], scale, mask=is_scale)
