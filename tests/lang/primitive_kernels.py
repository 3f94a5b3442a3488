"""Kernels that exercise one tile primitive each. Imported where Triton interprets, and where it compiles."""

import triton
import triton.language as tl

from overweave.lang.primitives import (
    BROADCAST,
    LOCAL,
    P2P,
    _consumer_counters,
    _count_of,
    _producer_counter,
    consumer_column,
    consumer_rows,
    consumer_tile_wait,
    peer_tile_notify,
    peer_tile_wait,
    producer_column,
    producer_rank,
    producer_rows,
    producer_tile_notify,
    tile_pull_data,
    tile_push_data,
    voided,
)

NOTHING, DROPPED, WRONG_TILE, NO_TILE = (tl.constexpr(fault) for fault in range(4))


@triton.jit
def mapping_kernel(channel, made, read, counted, TILES: tl.constexpr, CONSUMED: tl.constexpr, COUNTERS: tl.constexpr):
    """Writes down f_S, f_R and f_C of every tile, and how many tiles add to each counter."""
    for tile in range(TILES):
        low, high = producer_rows(channel, tile)
        counter = _producer_counter(channel, tile)
        tl.store(made + tile * 5, low)
        tl.store(made + tile * 5 + 1, high)
        tl.store(made + tile * 5 + 2, producer_rank(channel, tile))
        tl.store(made + tile * 5 + 3, counter)
        tl.store(made + tile * 5 + 4, producer_column(channel, tile))
    for tile in range(CONSUMED):
        low, high = consumer_rows(channel, tile)
        first, last = _consumer_counters(channel, tile)
        tl.store(read + tile * 5, low)
        tl.store(read + tile * 5 + 1, high)
        tl.store(read + tile * 5 + 2, first)
        tl.store(read + tile * 5 + 3, last)
        tl.store(read + tile * 5 + 4, consumer_column(channel, tile))
    for counter in range(COUNTERS):
        tl.store(counted + counter, _count_of(channel, counter))


@triton.jit
def gather_kernel(channel, whole, x, out, ROWS: tl.constexpr, COLS: tl.constexpr, FAULT: tl.constexpr):
    """Push: the first program sends this rank's tiles to all ranks, the others wait for one consumer's tile each."""
    tiles: tl.constexpr = channel.layout.tiles
    consumed: tl.constexpr = channel.layout.consumed
    if tl.program_id(0) == 0:
        for index in range(tiles.per_shard):
            tile = channel.rank * tiles.per_shard + index
            low, high = producer_rows(channel, tile)
            rows = low + tl.arange(0, tiles.tile_rows)
            cols = producer_column(channel, tile) + tl.arange(0, tiles.tile_cols)
            inside = (rows < high)[:, None] & (cols < COLS)[None, :]
            data = tl.load(x + rows[:, None] * COLS + cols[None, :], mask=inside, other=0.0)
            tile_push_data(channel, whole, tile, data, BROADCAST)
            if FAULT == NOTHING:
                producer_tile_notify(channel, tile, BROADCAST)
            elif FAULT == WRONG_TILE:
                producer_tile_notify(channel, tile // tiles.per_shard * tiles.per_shard, BROADCAST)
            elif FAULT == NO_TILE:
                producer_tile_notify(channel, tile + 1000, BROADCAST)
    else:
        tile = tl.program_id(0) - 1
        verdict = consumer_tile_wait(channel, tile)
        low, high = consumer_rows(channel, tile)
        rows = low + tl.arange(0, consumed.tile_rows)
        cols = consumer_column(channel, tile) + tl.arange(0, consumed.tile_cols)
        at = rows[:, None] * COLS + cols[None, :]
        inside = (rows < high)[:, None] & (cols < COLS)[None, :]
        tl.store(out + at, voided(tl.load(whole.own + at, mask=inside), verdict), mask=inside)


@triton.jit
def scatter_kernel(channel, slots, x, out, COLS: tl.constexpr):
    """P2P: a tile goes to the rank that owns its rows, which adds what comes; each rank writes rows of its own."""
    tiles: tl.constexpr = channel.layout.tiles
    tile = tl.program_id(0)
    low, high = producer_rows(channel, tile)
    rows = low + tl.arange(0, tiles.tile_rows)
    cols = producer_column(channel, tile) + tl.arange(0, tiles.tile_cols)
    inside = (rows < high)[:, None] & (cols < COLS)[None, :]
    at = rows[:, None] * COLS + cols[None, :]
    data = tl.load(x + at, mask=inside, other=0.0)
    if producer_rank(channel, tile) == channel.rank + 1:
        tile_push_data(channel, slots, tile, data, P2P)
        producer_tile_notify(channel, tile, P2P)
    elif (producer_rank(channel, tile) == channel.rank) & (channel.rank > 0):
        verdict = consumer_tile_wait(channel, tile)
        tl.store(out + at, voided(data + tl.load(slots.own + at, mask=inside, other=0.0), verdict), mask=inside)


@triton.jit
def pull_kernel(ready, channel, shards, out, total, COLS: tl.constexpr, FAULT: tl.constexpr):
    """Pull: the first program loads every tile from its owner and tells this rank's own consumers, which store it."""
    tiles: tl.constexpr = channel.layout.tiles
    if tl.program_id(0) == 0:
        for tile in range(tiles.count):
            verdict = consumer_tile_wait(ready, producer_rank(channel, tile))
            low, high = producer_rows(channel, tile)
            rows = low + tl.arange(0, tiles.tile_rows)
            cols = producer_column(channel, tile) + tl.arange(0, tiles.tile_cols)
            inside = (rows < high)[:, None] & (cols < COLS)[None, :]
            data = tile_pull_data(channel, shards, tile, P2P)
            tl.store(out + rows[:, None] * COLS + cols[None, :], voided(data, verdict), mask=inside)
            if FAULT == NOTHING:
                producer_tile_notify(channel, tile, LOCAL, verdict)
    else:
        every = 1
        for rank in range(channel.layout.world_size):
            every = every * consumer_tile_wait(ready, rank)
        tile = tl.program_id(0) - 1
        every = every * consumer_tile_wait(channel, tile)
        low, high = producer_rows(channel, tile)
        rows = low + tl.arange(0, tiles.tile_rows)
        cols = producer_column(channel, tile) + tl.arange(0, tiles.tile_cols)
        inside = (rows < high)[:, None] & (cols < COLS)[None, :]
        at = rows[:, None] * COLS + cols[None, :]
        summed = tl.sum(tile_pull_data(channel, shards, tile, BROADCAST), 0) + tl.load(out + at, mask=inside, other=0.0)
        tl.store(total + at, voided(summed, every), mask=inside)


@triton.jit
def relay_kernel(channel, tensor, FAULT: tl.constexpr):
    """Peers: rank r adds one to what came from rank r - 1 and hands it to rank r + 1; rank 0 begins."""
    tile = tl.program_id(0)
    ranks: tl.constexpr = channel.layout.world_size
    verdict = 1
    if channel.rank > 0:
        verdict = peer_tile_wait(channel, tile, channel.rank - 1)
    data = tile_pull_data(channel, tensor, tile, P2P, channel.rank) + 1
    tile_push_data(channel, tensor, tile, voided(data, verdict), P2P, channel.rank)
    if channel.rank + 1 < ranks:
        tile_push_data(channel, tensor, tile, voided(data, verdict), P2P, channel.rank + 1)
        if FAULT == NOTHING:
            peer_tile_notify(channel, tile, channel.rank + 1, verdict)
        elif FAULT == WRONG_TILE:
            peer_tile_notify(channel, tile + 1, channel.rank + 1, verdict)


@triton.jit
def arrived_kernel(channel, whole, out, COLS: tl.constexpr):
    """Waits for what a copy engine brings: one consumer's tile for each program."""
    tiles: tl.constexpr = channel.layout.consumed
    tile = tl.program_id(0)
    verdict = consumer_tile_wait(channel, tile)
    low, high = consumer_rows(channel, tile)
    rows = low + tl.arange(0, tiles.tile_rows)
    cols = consumer_column(channel, tile) + tl.arange(0, tiles.tile_cols)
    inside = (rows < high)[:, None] & (cols < COLS)[None, :]
    at = rows[:, None] * COLS + cols[None, :]
    tl.store(out + at, voided(tl.load(whole.own + at, mask=inside), verdict), mask=inside)
