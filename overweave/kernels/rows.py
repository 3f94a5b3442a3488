"""Rows that tables on the device choose, on their way to peers and in their places there: for experts of other ranks.

    push    what each peer is to have goes to this rank's rows of it, as many as there can be, with a signal behind
    land    what all ranks sent, put together source by source, behind each other; zeros up to a bound
    add     what came back of each token, added in fp32 in the order of ranks; who has no part of it is not read

Where a source's rows land follows from shapes alone, so nobody asks before it sends. How many came, counts say, which
are pushed first: those of all ranks to all, so that each knows whether some rank received more than the bound. Tables
are clamped wherever they are read: a wrong one moves wrong rows, none outside a buffer.
Few rows go the same way: of 94 us that 32 tokens took there and back, push, land and add took 22, between which packed
messages would save a release each (MEASURED: two H200s, 2026-11-29).
SOURCE: DeepEP (github.com/deepseek-ai/DeepEP) for tokens that travel once to a rank, and parts that are added where
they come from; FlashOverlap (arXiv 2504.19519), section 3.3.4, for rows stored where their destination has them.
"""

import triton
import triton.language as tl

from overweave.compat.triton_names import has_bulk_copies
from overweave.lang.primitives import P2P, consumer_tile_wait, producer_tile_notify, voided
from overweave.memory.device.copy import move_words
from overweave.memory.device.signals import INTERPRETED

VOID = tl.constexpr(-1)  # all bits: NaN in any dtype, and no expert
# Bits of a reason, behind those of moe/routing.
LATE = tl.constexpr(2)
TOO_MANY = tl.constexpr(4)


@triton.jit
def push_rows_kernel(
    counted,
    arrived,
    counts,
    landed,
    landed_beside,
    source,
    own_counts,
    bounds,
    sizes: tl.constexpr,
):
    """counted, arrived: channels; of the second each program is a tile of its rank's shard. counts: int32 `[W, W + 1]`,
    how many rows ranks send to each, and their reasons, where `sizes.tells`. landed, landed_beside: int32 `[W * shard,
    words]`, the second where something lies beside rows. source, bounds, sizes: kernels/arguments.SentRows, RowBounds,
    RowSizes. Rows that nobody chooses one by one go by bulk copies, with shared memory for one copy of the loop over
    peers: the compiler does not know how many these are.
    """
    program = tl.program_id(0)
    ranks: tl.constexpr = arrived.layout.world_size
    rank = tl.zeros([], tl.int32) + arrived.rank
    programs: tl.constexpr = arrived.layout.tiles.per_shard
    if sizes.tells:
        if program == 0:
            column = tl.arange(0, 2 * arrived.layout.padded_ranks)
            told = tl.load(own_counts + column, mask=column <= ranks, other=0)
            for step in tl.static_range(1, ranks):
                peer = (rank + step) % ranks
                place = tl.load(counts.addresses + peer).to(counts.own.dtype) + rank * (ranks + 1)
                tl.store(place + column, told, mask=column <= ranks)
                producer_tile_notify(counted, rank, P2P, 1, peer)
    for step in range(1, bounds.peers + 1):
        peer = (rank + step) % ranks
        first = tl.load(source.starts + peer)
        count = tl.minimum(tl.maximum(tl.load(source.starts + peer + 1) - first, 0), bounds.shard)
        target = _rows_at(landed, peer, rank, bounds.shard, sizes.words)
        if source.chosen is None and not INTERPRETED and has_bulk_copies():
            _send_stretch(target, source.rows, first, count, bounds.last, sizes.words)
        else:
            _move_rows(target, source.rows, source.chosen, first, count, bounds.last, sizes.words, sizes)
        if sizes.beside > 0:
            target = _rows_at(landed_beside, peer, rank, bounds.shard, sizes.beside)
            _move_rows(target, source.beside, source.chosen, first, count, bounds.last, sizes.beside, sizes)
        producer_tile_notify(arrived, rank * programs + program, P2P, 1, peer)


@triton.jit
def land_rows_kernel(
    counted,
    arrived,
    counts,
    landed,
    landed_beside,
    source,
    own_counts,
    bounds,
    out,
    out_beside,
    received,
    sizes: tl.constexpr,
):
    """out `[most, words]`, out_beside: int32. received: int32 `[W + 2]`, where each source's rows begin, where the last
    end, and the reason for which all of them are void. The rest: as of `push_rows_kernel`, of which it gets the rows.
    """
    ranks: tl.constexpr = arrived.layout.world_size
    rank = tl.zeros([], tl.int32) + arrived.rank
    verdict = 1
    for step in range(1, ranks):
        if verdict == 1:
            verdict = consumer_tile_wait(counted, (rank + step) % ranks)
    each = tl.arange(0, arrived.layout.padded_ranks)
    is_rank = each < ranks
    is_peer = is_rank & (each != rank) & (verdict == 1)
    is_pair = is_rank[:, None] & is_rank[None, :]
    told = tl.load(counts.own + each[:, None] * (ranks + 1) + each[None, :], mask=is_pair & is_peer[:, None], other=0)
    own = tl.load(own_counts + each, mask=is_rank, other=0)
    table = tl.where((each == rank)[:, None], own[None, :], told)
    table = tl.minimum(tl.maximum(table, 0), bounds.shard)
    why = tl.load(counts.own + each * (ranks + 1) + ranks, mask=is_peer, other=0)
    is_late = (tl.max(why & LATE, 0) | (tl.load(own_counts + ranks) & LATE)) != 0
    is_over = tl.max(tl.sum(table, 0), 0) > bounds.most
    reason = tl.where(is_late, LATE, 0) + tl.where(is_over, TOO_MANY, 0)
    is_void = (reason != 0) | (verdict == 0)
    mine = tl.sum(tl.where((each == rank)[None, :], table, 0), 1)
    through = tl.cumsum(mine, 0)
    if tl.program_id(0) == 0:
        tl.store(received, 0)
        tl.store(received + 1 + each, through, mask=is_rank)
        tl.store(received + 1 + ranks, reason)
    for step in range(ranks):
        peer = (rank + ranks - step) % ranks
        begin = tl.sum(tl.where(each == peer, through - mine, 0), 0)
        count = tl.where(is_void, 0, tl.sum(tl.where(each == peer, mine, 0), 0))
        if peer == rank:
            first = tl.load(source.starts + rank)
            target = out + begin.to(tl.int64) * sizes.words
            _move_rows(target, source.rows, source.chosen, first, count, bounds.last, sizes.words, sizes)
            if sizes.beside > 0:
                target = out_beside + begin.to(tl.int64) * sizes.beside
                _move_rows(target, source.beside, source.chosen, first, count, bounds.last, sizes.beside, sizes)
        else:
            if verdict == 1:
                verdict = _wait_for_rows(arrived, peer)
            _land(out, landed.own, begin, peer, count, verdict, bounds.shard, sizes.words, sizes)
            if sizes.beside > 0:
                _land(out_beside, landed_beside.own, begin, peer, count, verdict, bounds.shard, sizes.beside, sizes)
    end = tl.where(is_void, 0, tl.sum(mine, 0))
    rest = tl.where(is_void, VOID, 0)
    _fill(out, end, rest, bounds.most, sizes.words, sizes)
    if sizes.beside > 0:
        _fill(out_beside, end, rest, bounds.most, sizes.beside, sizes)


@triton.jit
def add_rows_kernel(
    arrived,
    landed,
    parts,
    places,
    received,
    y,
    tokens,
    bounds,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y `[tokens, WIDTH]`. places: int32 `[tokens, W]`, which row of those that a rank sent back is a token's, -1 if
    none is. parts `[most, WIDTH]`, of this rank, as `land_rows_kernel` has them: its own tokens' are read there.
    """
    ranks: tl.constexpr = arrived.layout.world_size
    rank = tl.zeros([], tl.int32) + arrived.rank
    verdict = 1
    for step in range(1, ranks):
        if verdict == 1:
            verdict = _wait_for_rows(arrived, (rank + ranks - step) % ranks)
    first = tl.load(received + rank)
    is_valid = (verdict == 1) & (tl.load(received + ranks + 1) == 0)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        wide = tl.zeros([], tl.int64) + token
        for start in range(0, WIDTH, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            total = tl.zeros([BLOCK], tl.float32)
            for source in tl.static_range(ranks):
                place = tl.load(places + token * ranks + source)
                row = tl.where(source == rank, first + place, source * bounds.shard + place)
                most = tl.where(source == rank, bounds.most, (source + 1) * bounds.shard)
                base = tl.where(source == rank, parts.to(tl.int64), landed.own.to(tl.int64)).to(parts.dtype)
                is_there = is_valid & (place >= 0) & (row >= 0) & (row < most)
                at = tl.multiple_of(base, 16) + row.to(tl.int64) * WIDTH + columns
                total += tl.load(at, mask=(columns < WIDTH) & is_there, other=0.0).to(tl.float32)
            sums = voided(total, is_valid.to(tl.int32)).to(y.dtype.element_ty)
            tl.store(y + wide * WIDTH + columns, sums, mask=columns < WIDTH)


@triton.jit
def _wait_for_rows(arrived, peer):
    """Waits until all programs of a peer have sent their part. Its first tile stands for all, which share a counter."""
    return consumer_tile_wait(arrived, peer * arrived.layout.tiles.per_shard)


@triton.jit
def _rows_at(tensor, peer, rank, shard, WORDS: tl.constexpr):
    """Where a peer has the rows of a rank."""
    base = tl.multiple_of(tl.load(tensor.addresses + peer).to(tensor.own.dtype), 16)
    return base + rank.to(tl.int64) * shard * WORDS


@triton.jit
def _send_stretch(target, source, first, count, last, WORDS: tl.constexpr):
    """`target[:count] = source[first : first + count]` by bulk copies, a stretch of rows by each program."""
    each = (count + tl.num_programs(0) - 1) // tl.num_programs(0)
    begin = tl.minimum(tl.program_id(0) * each, count)
    row = tl.minimum(first + begin, last)
    size = tl.minimum(tl.minimum(each, count - begin), last - row)
    target += begin.to(tl.int64) * WORDS
    move_words(target, source + row.to(tl.int64) * WORDS, size * WORDS, 0, True, ALONE=True)


@triton.jit
def _land(out, landed, begin, peer, count, verdict, shard, WORDS: tl.constexpr, sizes: tl.constexpr):
    """A peer's rows to their place; void ones where it did not send them in time."""
    source, target = landed + peer.to(tl.int64) * shard * WORDS, out + begin.to(tl.int64) * WORDS
    if verdict == 1:
        _move_rows(target, source, None, 0, count, shard, WORDS, sizes)
    else:
        _fill(target, 0, VOID, count, WORDS, sizes)


@triton.jit
def _move_rows(target, source, chosen, first, count, last, WORDS: tl.constexpr, sizes: tl.constexpr):
    """`target[:count] = source[chosen[first : first + count]]`, or without `chosen` rows from `first` on; rows of
    WORDS, those of `source` below `last`. Programs take turns."""
    ROWS: tl.constexpr = sizes.step_rows
    BLOCK: tl.constexpr = sizes.step_words
    across: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    for step in range(tl.program_id(0), (count + ROWS - 1) // ROWS * across, tl.num_programs(0)):
        row = step // across * ROWS + tl.arange(0, ROWS)
        word = step % across * BLOCK + tl.arange(0, BLOCK)
        at = first + row
        if chosen is not None:
            at = tl.load(chosen + at, mask=row < count, other=0)
        is_row = (row < count) & (at >= 0) & (at < last)
        inside = is_row[:, None] & (word < WORDS)[None, :]
        words = tl.load(source + at.to(tl.int64)[:, None] * WORDS + word[None, :], mask=inside)
        tl.store(target + row.to(tl.int64)[:, None] * WORDS + word[None, :], words, mask=inside)


@triton.jit
def _fill(target, first, value, end, WORDS: tl.constexpr, sizes: tl.constexpr):
    """`target[first:end] = value`, rows of WORDS."""
    ROWS: tl.constexpr = sizes.step_rows
    BLOCK: tl.constexpr = sizes.step_words
    across: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    for step in range(tl.program_id(0), (end - first + ROWS - 1) // ROWS * across, tl.num_programs(0)):
        row = first + step // across * ROWS + tl.arange(0, ROWS)
        word = step % across * BLOCK + tl.arange(0, BLOCK)
        inside = (row < end)[:, None] & (word < WORDS)[None, :]
        words = tl.zeros([ROWS, BLOCK], tl.int32) + value
        tl.store(target + row.to(tl.int64)[:, None] * WORDS + word[None, :], words, mask=inside)
