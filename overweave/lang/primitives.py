"""The tile primitives of TileLink, for kernels that fuse computation and communication by hand (docs/primitives.md).

    producer_tile_notify  consumer_tile_wait      between the two sides of a channel, on one rank or across ranks
    peer_tile_notify      peer_tile_wait          between the same tile on two ranks
    tile_push_data        tile_pull_data          a tile of a symmetric tensor, by plain stores and loads

The host's side (`rank_notify`, `rank_wait`, `rank_copy_data`) is in ops/author/tile_program.py. One source for the GPU
and for the interpreter: memory/device/signals.py has both forms of what waits and notifies.

A notify is a release: stores of any thread of the CTA before it are visible to the CTA that waits for it. A wait is an
acquire: no load after it moves before it. Triton moves no access across either, and does not pipeline a loop that
contains one: keep waits outside the main loop, and check with the lint. A wait has a deadline; its verdict is 1, or 0
if it failed. A tile that depends on a failed wait is stored as NaN (`voided`) and signals no one.
SOURCE: TileLink, table 3 and sections 3.2 and 4.
"""

import triton
import triton.language as tl

from overweave.lang.mapping import MAPPING_COLUMNS
from overweave.lang.tile_table import complete_bulk_stores, voided
from overweave.memory.device.signals import STRIDE, notify, report_timeout, wait_at_least

__all__ = [
    "BROADCAST",
    "LOCAL",
    "P2P",
    "complete_bulk_stores",
    "consumer_column",
    "consumer_rows",
    "consumer_tile_wait",
    "peer_tile_notify",
    "peer_tile_wait",
    "producer_column",
    "producer_rank",
    "producer_rows",
    "producer_tile_notify",
    "tile_pull_data",
    "tile_push_data",
    "voided",
]

# Which rank a notify signals, and where data goes to or comes from.
LOCAL = tl.constexpr("local")  # this rank: a producer that pulls, or whose consumer is on this rank
P2P = tl.constexpr("p2p")  # the rank that owns the tile's rows
BROADCAST = tl.constexpr("broadcast")  # every rank

COLUMNS = tl.constexpr(len(MAPPING_COLUMNS))
LOW = tl.constexpr(MAPPING_COLUMNS.index("low"))
HIGH = tl.constexpr(MAPPING_COLUMNS.index("high"))
RANK = tl.constexpr(MAPPING_COLUMNS.index("rank"))
CHANNEL = tl.constexpr(MAPPING_COLUMNS.index("channel"))
CHANNEL_END = tl.constexpr(MAPPING_COLUMNS.index("channel_end"))
NEVER = tl.constexpr(1 << 30)  # a count that no signal reaches, so that a wait for an invalid signal times out


@triton.jit
def producer_tile_notify(channel, tile, MODE: tl.constexpr, verdict=1, rank=None):
    """Mark a producer's tile done: add one to its counter on this rank, on the rank that owns it, or on every rank.

    P2P: on the rank that owns it, or on `rank`. verdict: of the tile's own wait; if it is 0, nothing is signalled.
    """
    counter = _producer_counter(channel, tile)
    if MODE == "local":
        _raise_signal(channel, channel.rank, counter, verdict)
    elif MODE == "p2p":
        target = producer_rank(channel, tile) if rank is None else rank
        _raise_signal(channel, target, counter, verdict)
    else:
        tl.static_assert(MODE == "broadcast", "MODE is one of LOCAL, P2P, BROADCAST")
        ranks: tl.constexpr = channel.layout.world_size
        for step in range(ranks):
            _raise_signal(channel, (channel.rank + step) % ranks, counter, verdict)


@triton.jit
def consumer_tile_wait(channel, tile):
    """Wait until all producers' tiles that a consumer's tile depends on are done. Return 1, or 0 if the wait failed."""
    if channel.layout.is_same and channel.consumer_table is None:
        counter = _producer_counter(channel, tile)
        verdict = _wait_for_signal(channel, counter, _count_of(channel, counter))
    else:
        low, high = _consumer_counters(channel, tile)
        verdict = 1
        for counter in range(low, high):
            if verdict == 1:
                verdict = _wait_for_signal(channel, counter, _count_of(channel, counter))
    return verdict


@triton.jit
def peer_tile_notify(channel, tile, rank, verdict=1):
    """Notify `rank` that this rank is done with a producers' tile."""
    tl.static_assert(channel.layout.has_peers, "the TileChannel needs has_peers=True")
    _raise_signal(channel, rank, _peer_signal(channel, tile, channel.rank), verdict)


@triton.jit
def peer_tile_wait(channel, tile, rank):
    """Wait until `rank` notifies that it is done with a producers' tile. Return 1, or 0 if the wait failed."""
    tl.static_assert(channel.layout.has_peers, "the TileChannel needs has_peers=True")
    return _wait_for_signal(channel, _peer_signal(channel, tile, rank), 1)


@triton.jit
def tile_push_data(channel, tensor, tile, data, MODE: tl.constexpr, rank=None):
    """Store a producers' tile of a symmetric tensor on the rank that owns it, or on `rank` (P2P), or on every rank.

    data: `[tile_rows, tile_cols]`; elements beyond the tile's rows and columns are masked.
    """
    offsets, in_tile = _elements(channel, tensor, tile)
    data = data.to(tensor.own.dtype.element_ty)
    if MODE == "p2p":
        target = producer_rank(channel, tile) if rank is None else rank
        tl.store(_on_rank(tensor, target) + offsets, data, mask=in_tile)
    else:
        tl.static_assert(MODE == "broadcast", "MODE is one of P2P, BROADCAST")
        ranks: tl.constexpr = channel.layout.world_size
        for step in range(ranks):
            tl.store(_on_rank(tensor, (channel.rank + step) % ranks) + offsets, data, mask=in_tile)


@triton.jit
def tile_pull_data(channel, tensor, tile, MODE: tl.constexpr, rank=None):
    """Load a producers' tile of a symmetric tensor: `[tile_rows, tile_cols]`, zero beyond its rows and columns.

    P2P: from the rank that owns it, or from `rank`. BROADCAST: every rank's, `[ranks, tile_rows, tile_cols]`, ranks
    rounded up to a power of two with zeros.
    """
    offsets, in_tile = _elements(channel, tensor, tile)
    if MODE == "p2p":
        source = producer_rank(channel, tile) if rank is None else rank
        data = tl.load(_on_rank(tensor, source) + offsets, mask=in_tile, other=0.0)
    else:
        tl.static_assert(MODE == "broadcast", "MODE is one of P2P, BROADCAST")
        ranks = tl.arange(0, channel.layout.padded_ranks)
        is_rank = ranks < channel.layout.world_size
        bases = tl.load(tensor.addresses + ranks, mask=is_rank, other=0).to(tensor.own.dtype)
        in_tile = is_rank[:, None, None] & in_tile[None, :, :]
        data = tl.load(bases[:, None, None] + offsets[None, :, :], mask=in_tile, other=0.0)
    return data


@triton.jit
def producer_rows(channel, tile):
    """f_S of producers: the rows `[low, high)` of a tile."""
    tiles: tl.constexpr = channel.layout.tiles
    return _rows(channel.producer_table, tiles, tile)


@triton.jit
def producer_column(channel, tile):
    """f_S of producers: the first column of a tile."""
    tiles: tl.constexpr = channel.layout.tiles
    return _column(tiles, tile)


@triton.jit
def producer_rank(channel, tile):
    """f_R of producers: the rank that owns the rows of a tile."""
    tiles: tl.constexpr = channel.layout.tiles
    if channel.producer_table is None:
        rank = tile // channel.layout.tiles.per_shard
    else:
        rank = _entry(channel.producer_table, tiles, tile, RANK)
    return rank


@triton.jit
def consumer_rows(channel, tile):
    """f_S of consumers: the rows `[low, high)` of a tile."""
    tiles: tl.constexpr = channel.layout.consumed
    return _rows(channel.consumer_table, tiles, tile)


@triton.jit
def consumer_column(channel, tile):
    """f_S of consumers: the first column of a tile."""
    tiles: tl.constexpr = channel.layout.consumed
    return _column(tiles, tile)


@triton.jit
def _producer_counter(channel, tile):
    """f_C of producers: the counter of a tile."""
    tiles: tl.constexpr = channel.layout.tiles
    if channel.producer_table is None:
        row_in_shard = tile % tiles.per_shard // tiles.across
        counter = tile // tiles.per_shard * channel.layout.channels + row_in_shard // channel.layout.down
    else:
        counter = _entry(channel.producer_table, tiles, tile, CHANNEL)
    return counter


@triton.jit
def _consumer_counters(channel, tile):
    """f_C of consumers: the counters `[low, high)` of a tile; none if the tile is empty."""
    tiles: tl.constexpr = channel.layout.consumed
    if channel.consumer_table is None:
        tl.static_assert(channel.layout.is_static, "tiles of another matrix than the producers' need a consumer_table")
        first, last = _static_rows(tiles, tile)
        low = _counter_of_row(channel, first)
        high = tl.where(first < last, _counter_of_row(channel, last - 1) + 1, low)
    else:
        low = _entry(channel.consumer_table, tiles, tile, CHANNEL)
        high = _entry(channel.consumer_table, tiles, tile, CHANNEL_END)
    return low, high


@triton.jit
def _counter_of_row(channel, row):
    """Return the counter of the producers' tile that holds a row."""
    tiles: tl.constexpr = channel.layout.tiles
    shard = row // tiles.shard_rows
    tile_row = (row - shard * tiles.shard_rows) // tiles.tile_rows
    return shard * channel.layout.channels + tile_row // channel.layout.down


@triton.jit
def _count_of(channel, counter):
    """Return how many tiles add to a counter."""
    if channel.counts is None:
        tiles: tl.constexpr = channel.layout.tiles
        part = counter % channel.layout.channels
        low = tl.minimum(part * channel.layout.down, tiles.down)
        high = tl.minimum((part + 1) * channel.layout.down, tiles.down)
        count = (high - low) * tiles.across
    else:
        is_valid = (counter >= 0) & (counter < channel.layout.counters)
        count = tl.load(channel.counts + counter, mask=is_valid, other=0)
    return count


@triton.jit
def _rows(table, tiles: tl.constexpr, tile):
    """Return the rows `[low, high)` of a tile, by the dynamic mapping `table` or, if it is None, by the static one."""
    if table is None:
        low, high = _static_rows(tiles, tile)
    else:
        low = _entry(table, tiles, tile, LOW)
        high = _entry(table, tiles, tile, HIGH)
    return low, high


@triton.jit
def _static_rows(tiles: tl.constexpr, tile):
    """Return the rows `[low, high)` of a tile, by the static mapping."""
    shard = tile // tiles.per_shard
    end = tl.minimum((shard + 1) * tiles.shard_rows, tiles.rows)
    low = tl.minimum(shard * tiles.shard_rows + tile % tiles.per_shard // tiles.across * tiles.tile_rows, end)
    return low, tl.minimum(low + tiles.tile_rows, end)


@triton.jit
def _column(tiles: tl.constexpr, tile):
    return tile % tiles.across * tiles.tile_cols


@triton.jit
def _entry(table, tiles: tl.constexpr, tile, COLUMN: tl.constexpr):
    """Load a column of a dynamic mapping, which has one row for each row of tiles."""
    return tl.load(table + tile // tiles.across * COLUMNS + COLUMN)


@triton.jit
def _peer_signal(channel, tile, rank):
    """Return the signal of a tile and a rank for `peer_tile_notify`."""
    return channel.layout.counters + tile * channel.layout.world_size + rank


@triton.jit
def _raise_signal(channel, rank, signal, verdict):
    """Add one to a signal of `rank`, after a CTA barrier and with release; do nothing for an invalid signal."""
    signal = tl.full((), 0, tl.int32) + signal
    is_valid = (signal >= 0) & (signal < channel.layout.signals)
    signals_of_rank = tl.load(channel.peers + rank).to(channel.signals.dtype)
    notify(signals_of_rank + tl.where(is_valid, signal, 0) * STRIDE, is_valid & (verdict == 1))


@triton.jit
def _wait_for_signal(channel, signal, count):
    """Wait for a signal of this rank. Return 1, or 0 if the wait failed, which is then reported to all ranks."""
    signal = tl.full((), 0, tl.int32) + signal
    is_valid = (signal >= 0) & (signal < channel.layout.signals)
    word = channel.signals + tl.where(is_valid, signal, 0) * STRIDE
    count = tl.where(is_valid, count, NEVER)
    verdict = wait_at_least(word, count, channel.words, channel.limits)
    if verdict == 0:
        ranks: tl.constexpr = channel.layout.world_size
        report_timeout(word, count, channel.number, signal, channel.words, channel.limits, ranks)
    return verdict


@triton.jit
def _elements(channel, tensor, tile):
    """Return (offsets, mask) of the elements of a producers' tile in a symmetric tensor."""
    tiles: tl.constexpr = channel.layout.tiles
    low, high = producer_rows(channel, tile)
    rows = low + tl.arange(0, tiles.tile_rows)
    cols = _column(tiles, tile) + tl.arange(0, tiles.tile_cols)
    mask = (rows < high)[:, None] & (cols < tiles.cols)[None, :]
    if tensor.layout.is_shard:
        rows -= producer_rank(channel, tile) * tiles.shard_rows
    return rows.to(tl.int64)[:, None] * tensor.layout.stride + cols[None, :], mask


@triton.jit
def _on_rank(tensor, rank):
    """Return the pointer to a rank's symmetric tensor."""
    return tl.load(tensor.addresses + rank).to(tensor.own.dtype)
