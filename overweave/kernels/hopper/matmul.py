"""The Hopper matmul: the same face, table and signals as the portable one (kernels/matmul.py), warp-specialised.

    producer  one warp: claims rows of the table, waits for their signals, loads tiles of a and b (bulk tensor)
    consumers two groups of four warps, each half of the tile's rows, or, with IN_COLUMNS, of the columns of a tile of
              64 rows: tensor cores, then the result to shared memory
    storer    one warp: bulk-tensor store, drain, signal, while the consumers are at the next tile

The first row is claimed before the partitions start (hopper_start.py). The producer passes each claimed row to the
others through a ring in shared memory (hopper_ring.py), the consumers stand in hopper_consumer.py. A tile that a
chunk's end cuts short is stored by the consumers with a mask instead, because a bulk store would write into the next
chunk.

A tile with addends ends otherwise (received_hopper.py): the storer waits for them while the consumers multiply, and the
consumers add them. Of several, they store the sum too, so that nothing but its signal is left to the storer. A product
that belongs to a peer (`TileRow.to`) the storer stores there, by that peer's tensor map, in place of its own; a sum of
two that goes everywhere, by those of all peers besides.

A whole tile is SPLIT_N rectangles of columns, side by side, a narrow one (`TileRow.width`) as many as its columns need:
`b` is loaded and the result stored rectangle by rectangle, and multiplied in one or two accumulators.
`TileRow.weight` says by which of several weights a tile multiplies, and so which output it writes. A gated tile has two
products of one rectangle of columns: `b`'s lies before the gate's (`b_1`), both are multiplied in one accumulator.
SOURCE: the structure of DeepGEMM and of Triton's Gluon tutorials (producer, two 64-row consumers, storer).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from overweave.kernels.epilogue import GATE
from overweave.kernels.hopper.consumer import consume_lower, consume_upper
from overweave.kernels.hopper.gluon import load_tile, mbarrier, wait_for_stores_read
from overweave.kernels.hopper.received import await_addends, load_addend
from overweave.kernels.hopper.ring import LACKS, LAST, NUMBER, RING, VOID, lacking, pass_on, receive
from overweave.kernels.hopper.shares import hear, is_announced
from overweave.kernels.hopper.start import begin_claim, fetch_maps, place_for_claim, receive_claim
from overweave.kernels.hopper.stored import (
    AT_ALL,
    announce_everywhere,
    pace_of,
    store_parts_at,
    store_parts_at_peers,
    word_at,
)
from overweave.kernels.hopper.tiles import read_column, record_time, wait_for_tile
from overweave.kernels.shares import LEFT_OUT, SUMMED, k_range
from overweave.kernels.weights import of_weight, weight_of
from overweave.lang.tile_table import (
    ADDS_NOTHING,
    CLAIMED,
    COL,
    FROM_OWN_SHARD,
    INTO,
    PLACE,
    READY,
    RECEIVED,
    ROW,
    ROW_END,
    SIGNAL,
    SIGNALS_NOBODY,
    SOURCE,
    SOURCE_ROW,
    STORED,
    TO,
    WIDTH,
)
from overweave.memory.device.ptx import COMPLETE_BULK_STORES
from overweave.memory.device.signals import STRIDE

COMPLETE_ASSEMBLY = gl.constexpr(COMPLETE_BULK_STORES)


@gluon.jit
def produce(
    a_shard, a_workspace, b, b_1, b_2, stages, ring, queue, first, passed, protocol, k, B_IS_TRANSPOSED: gl.constexpr,
    TWO_SOURCES: gl.constexpr, TRACED: gl.constexpr, STAGES: gl.constexpr, SPLIT_N: gl.constexpr, GATED: gl.constexpr,
    WEIGHTS: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    table, claims, trace, tiles = queue
    a_tiles, b_tiles, full, empty = stages
    PART_M: gl.constexpr = a_shard.block_type.shape[0]
    BLOCK_K: gl.constexpr = a_shard.block_type.shape[1]
    PART_N: gl.constexpr = b.block_type.shape[0] if B_IS_TRANSPOSED else b.block_type.shape[1]
    A_PARTS: gl.constexpr = a_tiles.type.shape[0] // STAGES
    B_PARTS: gl.constexpr = b_tiles.type.shape[0] // STAGES
    A_BYTES: gl.constexpr = A_PARTS * a_shard.block_type.nbytes
    B_BYTES: gl.constexpr = b.block_type.nbytes
    step = 0
    turn = 0
    tile = receive_claim(first, passed)
    while tile < tiles:
        record_time(trace, tile, CLAIMED, TRACED)
        row = read_column(table, tile, SOURCE_ROW)
        col = read_column(table, tile, COL)
        width = read_column(table, tile, WIDTH) if SPLIT_N > 1 else 0
        lacks = gl.where(width == 0, 0, B_PARTS - width // PART_N)
        verdict = wait_for_tile(table, tile, protocol)
        record_time(trace, tile, READY, TRACED)
        pass_on(ring, turn, tile + (1 - verdict) * VOID + lacks * LACKS)
        turn += 1
        a = a_shard
        if TWO_SOURCES:
            if read_column(table, tile, SOURCE) != FROM_OWN_SHARD:
                a = a_workspace
        factor = of_weight(weight_of(table, tile, WEIGHTS), b, b_1, b_2, WEIGHTS)
        low, high = k_range(table, tile, k, BLOCK_K, SPLIT_K)
        for depth in range(low, high, BLOCK_K):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            arrived = full.index(stage)
            for short in gl.static_range(B_PARTS):
                mbarrier.expect(arrived, A_BYTES + (B_PARTS - short) * B_BYTES, pred=lacks == short)
            for part in gl.static_range(A_PARTS):
                load_tile(a, [row + part * PART_M, depth], arrived, a_tiles.index(A_PARTS * stage + part))
            for part in gl.static_range(B_PARTS):
                from_col = col if GATED else col + part * PART_N
                place = b_tiles.index(B_PARTS * stage + part)
                side = factor
                if GATED and part == 1:
                    side = b_1
                if B_IS_TRANSPOSED:
                    load_tile(side, [from_col, depth], arrived, place, pred=lacks < B_PARTS - part)
                else:
                    load_tile(side, [depth, from_col], arrived, place, pred=lacks < B_PARTS - part)
            step += 1
        tile = gl.atomic_add(claims, 1, sem="relaxed", scope="gpu")
    pass_on(ring, turn, LAST)


@gluon.jit
def store(
    results, ring, out, out_1, out_2, total_tiles, at_peers, sums_at_peers, peers, sums, shares, queue, protocol,
    TRACED: gl.constexpr, SPLIT_N: gl.constexpr, IN_COLUMNS: gl.constexpr, ADDENDS: gl.constexpr,
    WEIGHTS: gl.constexpr, SPLIT_K: gl.constexpr, PEERS: gl.constexpr,
):  # fmt: skip
    table, trace, tiles = queue.table, queue.trace, queue.tiles
    c_tiles, c_full, c_empty = results
    addends, addend_tiles, verdicts, received = sums
    memory, told_of = shares
    STEP_M: gl.constexpr = 0 if IN_COLUMNS else c_tiles.type.shape[1]
    STEP_N: gl.constexpr = c_tiles.type.shape[2] if IN_COLUMNS else 0
    PART_M: gl.constexpr = c_tiles.type.shape[1]
    turn = 0
    message = receive(ring, turn)
    while message != LAST:
        tile = message & NUMBER
        is_sound = message < VOID
        if ADDENDS > 0:
            gl.inline_asm_elementwise(COMPLETE_ASSEMBLY, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
            gl.thread_barrier()
            verdict = await_addends(verdicts, received, table, tile, protocol)
            if addend_tiles is not None:
                load_addend(
                    addend_tiles, c_tiles, received, addends, table, tile, lacking(message), verdict, SPLIT_N,
                    IN_COLUMNS,
                )  # fmt: skip
            is_sound = is_sound & (verdict == 1)
            record_time(trace, tile, RECEIVED, TRACED)
        row = read_column(table, tile, ROW)
        row_end = read_column(table, tile, ROW_END)
        col = read_column(table, tile, COL)
        signal = read_column(table, tile, SIGNAL)
        target = of_weight(weight_of(table, tile, WEIGHTS), out, out_1, out_2, WEIGHTS)
        if total_tiles is not None:
            if read_column(table, tile, INTO) != 0:
                target = total_tiles
        to, pace_ns = 0, 0
        if PEERS > 0:
            to, pace_ns = read_column(table, tile, TO), pace_of(peers, protocol.world_size, tile, tiles)
        ended = 0
        for half in gl.static_range(2):
            mbarrier.wait(c_full.index(half), turn & 1)
            is_ended = True
            if SPLIT_K:
                told = hear(told_of.index(half))
                is_ended = told != LEFT_OUT
                is_sound = is_sound & (told <= SUMMED)
                ended += is_ended.to(gl.int32)
            top, left = row + half * STEP_M, col + half * STEP_N
            if ADDENDS == 0 or addend_tiles is not None or read_column(table, tile, PLACE) == ADDS_NOTHING:
                if is_ended & (top + PART_M <= row_end):
                    store_parts_at(
                        to, target, at_peers, c_tiles, SPLIT_N * half, top, left, lacking(message), pace_ns, SPLIT_N,
                        PEERS,
                    )  # fmt: skip
                    if peers.everyone is not None:
                        if to == AT_ALL:
                            store_parts_at_peers(
                                sums_at_peers, c_tiles, SPLIT_N * half, top, left, lacking(message), pace_ns, SPLIT_N,
                                PEERS,
                            )  # fmt: skip
        wait_for_stores_read(0)
        mbarrier.arrive(c_empty.index(0), count=1)
        mbarrier.arrive(c_empty.index(1), count=1)
        if signal != SIGNALS_NOBODY:
            gl.inline_asm_elementwise(COMPLETE_ASSEMBLY, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
            gl.thread_barrier()
            if SPLIT_K:
                is_sound = is_announced(memory.arrivals, table, tile, ended, is_sound)
            word, is_told = protocol.signals + signal * STRIDE, is_sound
            if PEERS > 0:
                word = word_at(gl.maximum(to, 0), signal, peers)
            if peers.everyone is not None:
                is_told = is_told & (to != AT_ALL)
            gl.atomic_add(word, 1, mask=is_told, sem="release", scope="sys")
            if peers.everyone is not None:
                announce_everywhere(to, signal, peers, is_sound)
        record_time(trace, tile, STORED, TRACED)
        turn += 1
        message = receive(ring, turn)


@gluon.jit
def matmul_hopper_kernel(
    a_shard, a_workspace, b, b_1, b_2, out, out_1, out_2, total_tiles, tiles_1, tiles_2, tiles_3, tiles_4, tiles_5,
    tiles_6, tiles_7, sums_1, sums_2, sums_3, sums_4, sums_5, sums_6, sums_7, addend_tiles, products, ends, addends,
    peers, shares, queue, protocol, k, B_IS_TRANSPOSED: gl.constexpr, TWO_SOURCES: gl.constexpr, TRACED: gl.constexpr,
    STAGES: gl.constexpr, SPLIT_N: gl.constexpr, IN_COLUMNS: gl.constexpr, EPILOGUE: gl.constexpr,
    ADDENDS: gl.constexpr, WEIGHTS: gl.constexpr, SPLIT_K: gl.constexpr, PEERS: gl.constexpr,
):  # fmt: skip
    """Up to `addend_tiles`, tensor descriptors; behind them as `matmul_kernel`. `out` is what `products.out` points to.

    tiles_1 to tiles_7, sums_1 to sums_7: where tiles and sums go at peers, the next rank first, or None.
    """
    DTYPE: gl.constexpr = a_shard.dtype
    A_SHAPE: gl.constexpr = a_shard.block_type.shape
    B_SHAPE: gl.constexpr = b.block_type.shape
    C_SHAPE: gl.constexpr = out.block_type.shape
    A_PARTS: gl.constexpr = 1 if IN_COLUMNS else 2
    GATED: gl.constexpr = (GATE & EPILOGUE) != 0
    B_PARTS: gl.constexpr = 2 if IN_COLUMNS or GATED else SPLIT_N
    FURTHER_MAPS: gl.constexpr = (2 if WEIGHTS > 1 else 0) + (2 if WEIGHTS > 2 else 0) + (1 if GATED else 0)
    claimed = begin_claim(queue.claims)
    fetch_maps(4 + FURTHER_MAPS)
    a_tiles = gl.allocate_shared_memory(DTYPE, [A_PARTS * STAGES, A_SHAPE[0], A_SHAPE[1]], a_shard.layout)
    b_tiles = gl.allocate_shared_memory(DTYPE, [B_PARTS * STAGES, B_SHAPE[0], B_SHAPE[1]], b.layout)
    c_tiles = gl.allocate_shared_memory(out.dtype, [2 * SPLIT_N, C_SHAPE[0], C_SHAPE[1]], out.layout)
    ring = gl.allocate_shared_memory(gl.int32, [RING, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ring_full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    ring_empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    c_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    c_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    verdicts = gl.allocate_shared_memory(gl.int32, [1, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told_of = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    received = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    for place in gl.static_range(RING):
        mbarrier.init(ring_full.index(place), count=1)
        mbarrier.init(ring_empty.index(place), count=3)
    for half in gl.static_range(2):
        mbarrier.init(c_full.index(half), count=1)
        mbarrier.init(c_empty.index(half), count=1)
    if ADDENDS > 0:
        mbarrier.init(received.index(0), count=1 if addend_tiles is None else 2)
    first, passed = place_for_claim()
    # Argument tuples stand inline: a tuple kept in a variable would turn its constants into tensors.
    gl.warp_specialize(
        [
            (consume_upper, (
                (claimed, first, passed), (a_tiles, b_tiles, full, empty), (c_tiles, c_full, c_empty),
                (ring, ring_full, ring_empty), products, ends, (addends, addend_tiles, verdicts, received),
                (shares, told_of), peers, queue, k, B_IS_TRANSPOSED, SPLIT_N, IN_COLUMNS, EPILOGUE, ADDENDS, TRACED,
                WEIGHTS, SPLIT_K)),
            (consume_lower, (
                (a_tiles, b_tiles, full, empty), (c_tiles, c_full, c_empty), (ring, ring_full, ring_empty), products,
                ends, (addends, addend_tiles, verdicts, received), (shares, told_of), peers, queue, k, B_IS_TRANSPOSED,
                SPLIT_N, IN_COLUMNS, EPILOGUE, ADDENDS, TRACED, WEIGHTS, SPLIT_K)),
            (produce, (
                a_shard, a_workspace, b, b_1, b_2, (a_tiles, b_tiles, full, empty), (ring, ring_full, ring_empty),
                queue, first, passed, protocol, k, B_IS_TRANSPOSED, TWO_SOURCES, TRACED, STAGES, SPLIT_N, GATED,
                WEIGHTS, SPLIT_K)),
            (store, (
                (c_tiles, c_full, c_empty), (ring, ring_full, ring_empty), out, out_1, out_2, total_tiles,
                (tiles_1, tiles_2, tiles_3, tiles_4, tiles_5, tiles_6, tiles_7),
                (sums_1, sums_2, sums_3, sums_4, sums_5, sums_6, sums_7), peers,
                (addends, addend_tiles, verdicts, received), (shares, told_of), queue, protocol, TRACED, SPLIT_N,
                IN_COLUMNS, ADDENDS, WEIGHTS, SPLIT_K, PEERS)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip
