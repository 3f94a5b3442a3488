"""Expert-parallel dispatch and combine: sends rows that tables on the device choose to peers, and sums what returns.

    push    copies the rows for each peer into that peer's staging buffer, at this rank's part of it, then signals
    land    copies all ranks' rows out of staging, in rank order without gaps, and zeros up to the capacity
    add     sums the parts of each token that came back, in fp32, in rank order; missing parts are not read

Each source has a fixed part of the staging buffer, of the most rows that a rank may send, so that no rank must learn
counts before it sends. Counts are pushed first, those of all ranks to all, so that every rank knows whether some rank
receives more rows than its capacity. Tables are clamped wherever they are read: a wrong one moves wrong rows, none
outside a buffer.
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

VOID_WORD = tl.constexpr(-1)  # all bits set: NaN in any floating-point dtype, and no expert
# Error bits, above those of moe/routing.
LATE = tl.constexpr(2)
TOO_MANY = tl.constexpr(4)


@triton.jit
def push_rows_kernel(
    counts_channel,
    rows_channel,
    counts,
    staging,
    meta_staging,
    source,
    own_counts,
    bounds,
    sizes: tl.constexpr,
):
    """Push rows to all peers, then notify them.

    counts_channel, rows_channel: signals of counts and of rows; of the latter each program counts as a tile of its
    rank's shard. counts: int32 `[W, W + 1]` on each rank: rows that each rank sends to each, then error bits; pushed if
    `sizes.pushes_counts`. staging, meta_staging: int32 `[W * most_sent, words]`: rows, and metadata if any. source,
    bounds, sizes: kernels/arguments.SentRows, RowBounds, RowSizes. own_counts: int32 `[W + 1]`.
    Rows without an index go by bulk copies. The loop over peers is not unrolled, so that they share one buffer.
    """
    program = tl.program_id(0)
    ranks: tl.constexpr = rows_channel.layout.world_size
    rank = tl.zeros([], tl.int32) + rows_channel.rank
    programs: tl.constexpr = rows_channel.layout.tiles.per_shard
    if sizes.pushes_counts:
        if program == 0:
            column = tl.arange(0, 2 * rows_channel.layout.padded_ranks)
            counts_to_push = tl.load(own_counts + column, mask=column <= ranks, other=0)
            for step in tl.static_range(1, ranks):
                peer = (rank + step) % ranks
                counts_at_peer = tl.load(counts.addresses + peer).to(counts.own.dtype) + rank * (ranks + 1)
                tl.store(counts_at_peer + column, counts_to_push, mask=column <= ranks)
                producer_tile_notify(counts_channel, rank, P2P, 1, peer)
    for step in range(1, bounds.peers + 1):
        peer = (rank + step) % ranks
        first = tl.load(source.starts + peer)
        count = tl.minimum(tl.maximum(tl.load(source.starts + peer + 1) - first, 0), bounds.most_sent)
        target = _staging_at_peer(staging, peer, rank, bounds.most_sent, sizes.words)
        if source.indices is None and not INTERPRETED and has_bulk_copies():
            _bulk_copy_rows(target, source.rows, first, count, bounds.source_rows, sizes.words)
        else:
            _copy_rows(target, source.rows, source.indices, first, count, bounds.source_rows, sizes.words, sizes)
        if sizes.metadata > 0:
            target = _staging_at_peer(meta_staging, peer, rank, bounds.most_sent, sizes.metadata)
            _copy_rows(target, source.metadata, source.indices, first, count, bounds.source_rows, sizes.metadata, sizes)
        producer_tile_notify(rows_channel, rank * programs + program, P2P, 1, peer)


@triton.jit
def land_rows_kernel(
    counts_channel,
    rows_channel,
    counts,
    staging,
    meta_staging,
    source,
    own_counts,
    bounds,
    out,
    meta_out,
    received,
    sizes: tl.constexpr,
):
    """Wait for all peers' counts and rows; store the rows in `out`, packed in rank order.

    out, meta_out: int32 `[most_received, words]`. received: int32 `[W + 2]`, written: first row of each source, end of
    the last, error bits; all rows are VOID_WORD if any is set or a wait failed. Others: as of `push_rows_kernel`, whose
    rows for this rank itself are read in place.
    """
    ranks: tl.constexpr = rows_channel.layout.world_size
    rank = tl.zeros([], tl.int32) + rows_channel.rank
    verdict = 1
    for step in range(1, ranks):
        if verdict == 1:
            verdict = consumer_tile_wait(counts_channel, (rank + step) % ranks)
    each = tl.arange(0, rows_channel.layout.padded_ranks)
    is_rank = each < ranks
    is_peer = is_rank & (each != rank) & (verdict == 1)
    is_pair = is_rank[:, None] & is_rank[None, :]
    all_counts = tl.load(
        counts.own + each[:, None] * (ranks + 1) + each[None, :], mask=is_pair & is_peer[:, None], other=0
    )
    own = tl.load(own_counts + each, mask=is_rank, other=0)
    table = tl.where((each == rank)[:, None], own[None, :], all_counts)
    table = tl.minimum(tl.maximum(table, 0), bounds.most_sent)
    why = tl.load(counts.own + each * (ranks + 1) + ranks, mask=is_peer, other=0)
    is_late = (tl.max(why & LATE, 0) | (tl.load(own_counts + ranks) & LATE)) != 0
    is_over = tl.max(tl.sum(table, 0), 0) > bounds.most_received
    reason = tl.where(is_late, LATE, 0) + tl.where(is_over, TOO_MANY, 0)
    is_void = (reason != 0) | (verdict == 0)
    rows_from = tl.sum(tl.where((each == rank)[None, :], table, 0), 1)
    through = tl.cumsum(rows_from, 0)
    if tl.program_id(0) == 0:
        tl.store(received, 0)
        tl.store(received + 1 + each, through, mask=is_rank)
        tl.store(received + 1 + ranks, reason)
    for step in range(ranks):
        peer = (rank + ranks - step) % ranks
        begin = tl.sum(tl.where(each == peer, through - rows_from, 0), 0)
        count = tl.where(is_void, 0, tl.sum(tl.where(each == peer, rows_from, 0), 0))
        if peer == rank:
            first = tl.load(source.starts + rank)
            target = out + begin.to(tl.int64) * sizes.words
            _copy_rows(target, source.rows, source.indices, first, count, bounds.source_rows, sizes.words, sizes)
            if sizes.metadata > 0:
                target = meta_out + begin.to(tl.int64) * sizes.metadata
                _copy_rows(
                    target, source.metadata, source.indices, first, count, bounds.source_rows, sizes.metadata, sizes
                )
        else:
            if verdict == 1:
                verdict = _wait_for_peer_rows(rows_channel, peer)
            _copy_received(out, staging.own, begin, peer, count, verdict, bounds.most_sent, sizes.words, sizes)
            if sizes.metadata > 0:
                _copy_received(
                    meta_out, meta_staging.own, begin, peer, count, verdict, bounds.most_sent, sizes.metadata, sizes
                )
    end = tl.where(is_void, 0, tl.sum(rows_from, 0))
    rest = tl.where(is_void, VOID_WORD, 0)
    _fill(out, end, rest, bounds.most_received, sizes.words, sizes)
    if sizes.metadata > 0:
        _fill(meta_out, end, rest, bounds.most_received, sizes.metadata, sizes)


@triton.jit
def add_rows_kernel(
    rows_channel,
    staging,
    parts,
    positions,
    received,
    y,
    tokens,
    bounds,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Wait for all peers; set y `[tokens, WIDTH]` to the sum of each token's parts, NaN if a wait failed.

    positions: int32 `[tokens, W]`: row of a token among those that each rank sends back, -1 for none. parts
    `[most_received, WIDTH]`: parts that this rank computed, in the order of `land_rows_kernel`: its own tokens' are
    read there, others from `staging`. received: of `land_rows_kernel`.
    """
    ranks: tl.constexpr = rows_channel.layout.world_size
    rank = tl.zeros([], tl.int32) + rows_channel.rank
    verdict = 1
    for step in range(1, ranks):
        if verdict == 1:
            verdict = _wait_for_peer_rows(rows_channel, (rank + ranks - step) % ranks)
    first = tl.load(received + rank)
    is_valid = (verdict == 1) & (tl.load(received + ranks + 1) == 0)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        wide = tl.zeros([], tl.int64) + token
        for start in range(0, WIDTH, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            total = tl.zeros([BLOCK], tl.float32)
            for source in tl.static_range(ranks):
                sent_row = tl.load(positions + token * ranks + source)
                row = tl.where(source == rank, first + sent_row, source * bounds.most_sent + sent_row)
                most = tl.where(source == rank, bounds.most_received, (source + 1) * bounds.most_sent)
                base = tl.where(source == rank, parts.to(tl.int64), staging.own.to(tl.int64)).to(parts.dtype)
                is_there = is_valid & (sent_row >= 0) & (row >= 0) & (row < most)
                addresses = tl.multiple_of(base, 16) + row.to(tl.int64) * WIDTH + columns
                total += tl.load(addresses, mask=(columns < WIDTH) & is_there, other=0.0).to(tl.float32)
            sums = voided(total, is_valid.to(tl.int32)).to(y.dtype.element_ty)
            tl.store(y + wide * WIDTH + columns, sums, mask=columns < WIDTH)


@triton.jit
def _wait_for_peer_rows(rows_channel, peer):
    """Wait until all programs of a peer have sent their part: they share one counter, that of its first tile."""
    return consumer_tile_wait(rows_channel, peer * rows_channel.layout.tiles.per_shard)


@triton.jit
def _staging_at_peer(tensor, peer, rank, shard, WORDS: tl.constexpr):
    """Return a pointer to this rank's part of a staging buffer on a peer."""
    base = tl.multiple_of(tl.load(tensor.addresses + peer).to(tensor.own.dtype), 16)
    return base + rank.to(tl.int64) * shard * WORDS


@triton.jit
def _bulk_copy_rows(target, source, first, count, last, WORDS: tl.constexpr):
    """Set target[:count] = source[first : first + count] by bulk copies, a contiguous part by each program."""
    each = (count + tl.num_programs(0) - 1) // tl.num_programs(0)
    begin = tl.minimum(tl.program_id(0) * each, count)
    row = tl.minimum(first + begin, last)
    size = tl.minimum(tl.minimum(each, count - begin), last - row)
    target += begin.to(tl.int64) * WORDS
    move_words(target, source + row.to(tl.int64) * WORDS, size * WORDS, 0, True, ALONE=True)


@triton.jit
def _copy_received(out, staging, begin, peer, count, verdict, shard, WORDS: tl.constexpr, sizes: tl.constexpr):
    """Copy a peer's rows from staging to `out` from row `begin` on; VOID_WORDs if they did not arrive in time."""
    source, target = staging + peer.to(tl.int64) * shard * WORDS, out + begin.to(tl.int64) * WORDS
    if verdict == 1:
        _copy_rows(target, source, None, 0, count, shard, WORDS, sizes)
    else:
        _fill(target, 0, VOID_WORD, count, WORDS, sizes)


@triton.jit
def _copy_rows(target, source, indices, first, count, last, WORDS: tl.constexpr, sizes: tl.constexpr):
    """Set target[:count] = source[indices[first : first + count]]; with indices None source[first : first + count].

    Rows of WORDS words; an index outside `[0, last)` copies nothing. Programs stride over blocks.
    """
    ROWS: tl.constexpr = sizes.step_rows
    BLOCK: tl.constexpr = sizes.step_words
    across: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    for step in range(tl.program_id(0), (count + ROWS - 1) // ROWS * across, tl.num_programs(0)):
        row = step // across * ROWS + tl.arange(0, ROWS)
        word = step % across * BLOCK + tl.arange(0, BLOCK)
        source_row = first + row
        if indices is not None:
            source_row = tl.load(indices + source_row, mask=row < count, other=0)
        is_row = (row < count) & (source_row >= 0) & (source_row < last)
        inside = is_row[:, None] & (word < WORDS)[None, :]
        words = tl.load(source + source_row.to(tl.int64)[:, None] * WORDS + word[None, :], mask=inside)
        tl.store(target + row.to(tl.int64)[:, None] * WORDS + word[None, :], words, mask=inside)


@triton.jit
def _fill(target, first, value, end, WORDS: tl.constexpr, sizes: tl.constexpr):
    """Set target[first:end] = value, rows of WORDS words."""
    ROWS: tl.constexpr = sizes.step_rows
    BLOCK: tl.constexpr = sizes.step_words
    across: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    for step in range(tl.program_id(0), (end - first + ROWS - 1) // ROWS * across, tl.num_programs(0)):
        row = first + step // across * ROWS + tl.arange(0, ROWS)
        word = step % across * BLOCK + tl.arange(0, BLOCK)
        inside = (row < end)[:, None] & (word < WORDS)[None, :]
        words = tl.zeros([ROWS, BLOCK], tl.int32) + value
        tl.store(target + row.to(tl.int64)[:, None] * WORDS + word[None, :], words, mask=inside)
