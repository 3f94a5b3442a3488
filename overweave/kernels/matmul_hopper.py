"""The Hopper matmul: the same face, table and signals as the portable one (kernels/matmul.py), warp-specialised.

    producer  one warp: claims rows of the table, waits for their signals, loads tiles of a and b (bulk tensor)
    consumers two groups of four warps, each half of the tile's rows, or, with IN_COLUMNS, of the columns of a tile of
              64 rows: tensor cores, then the result to shared memory
    storer    one warp: bulk-tensor store, drain, signal, while the consumers are at the next tile

The producer passes each claimed row to the others through a ring in shared memory: the row's number, or LAST. That a
wait was void, or that a tile is narrow, travels as a bit of that number: all partitions agree on it, and none waits
for memory before it begins. A tile that a chunk's end cuts short is stored
by the consumers with a mask instead, because a bulk store would write into the next chunk.

A tile with addends ends otherwise (kernels/received_hopper.py): the storer waits for them while the consumers multiply,
and the consumers add them and store the sum, so that nothing but its signal is left to the storer.

With SPLIT_N = 2 the table may hold tiles of half the columns (`TileRow.width`). Descriptors of `b` and `out` are half a
tile wide then, and a whole tile is two loads and two stores of them: half tiles, side by side in shared memory, are the
bytes of a whole one, because rows of at most 128 bytes are what a bulk tensor's swizzled blocks are made of.
SOURCE: the structure of DeepGEMM and of Triton's Gluon tutorials (producer, two 64-row consumers, storer).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from overweave.kernels.epilogue import finished_by_parts
from overweave.kernels.hopper import load_tile, mbarrier, store_tile, wait_for_stores_read
from overweave.kernels.hopper_tiles import read_column, record_time, wait_for_tile
from overweave.kernels.received_hopper import await_addends, hear_of_addends, store_sum
from overweave.lang.tile_table import (
    ADDS_NOTHING,
    CLAIMED,
    COL,
    FROM_OWN_SHARD,
    MULTIPLIED,
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
    WIDTH,
)
from overweave.memory.device import STRIDE
from overweave.memory.ptx import COMPLETE_BULK_STORES

COMPLETE_ASSEMBLY = gl.constexpr(COMPLETE_BULK_STORES)
RING = gl.constexpr(4)
VOID, NARROW = gl.constexpr(1 << 30), gl.constexpr(1 << 29)
NUMBER = gl.constexpr((1 << 29) - 1)
LAST = gl.constexpr(-1)


@gluon.jit
def pass_on(ring, ring_full, ring_empty, turn, message):
    """Producer: the next row of the table for the other partitions."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    place = turn % RING
    mbarrier.wait(ring_empty.index(place), ((turn // RING) & 1) ^ 1)
    ring.index(place).store(gl.full([1], message, gl.int32, layout))
    mbarrier.arrive(ring_full.index(place), count=1)


@gluon.jit
def receive(ring, ring_full, ring_empty, turn):
    """The other partitions: the next row of the table, or LAST."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    place = turn % RING
    mbarrier.wait(ring_full.index(place), (turn // RING) & 1)
    message = gl.max(ring.index(place).load(layout), 0)
    mbarrier.arrive(ring_empty.index(place), count=1)
    return message


@gluon.jit
def produce(
    a_shard, a_workspace, b, a_tiles, b_tiles, ring, full, empty, ring_full, ring_empty, table, claims, signals, words,
    limits, trace, tiles, k, world_size, B_IS_TRANSPOSED: gl.constexpr, TWO_SOURCES: gl.constexpr, TRACED: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    PART_M: gl.constexpr = a_shard.block_type.shape[0]
    BLOCK_K: gl.constexpr = a_shard.block_type.shape[1]
    PART_N: gl.constexpr = b.block_type.shape[0] if B_IS_TRANSPOSED else b.block_type.shape[1]
    A_PARTS: gl.constexpr = a_tiles.type.shape[0] // STAGES
    B_PARTS: gl.constexpr = b_tiles.type.shape[0] // STAGES
    PART_BYTES: gl.constexpr = A_PARTS * a_shard.block_type.nbytes + b.block_type.nbytes
    BYTES: gl.constexpr = A_PARTS * a_shard.block_type.nbytes + B_PARTS * b.block_type.nbytes
    step = 0
    turn = 0
    tile = gl.atomic_add(claims, 1, sem="relaxed", scope="gpu")
    while tile < tiles:
        record_time(trace, tile, CLAIMED, TRACED)
        row = read_column(table, tile, SOURCE_ROW)
        col = read_column(table, tile, COL)
        width = read_column(table, tile, WIDTH) if B_PARTS > 1 else 0
        is_whole = width == 0
        verdict = wait_for_tile(table, tile, signals, words, limits, world_size)
        record_time(trace, tile, READY, TRACED)
        message = tile + (1 - verdict) * VOID
        if B_PARTS > 1:
            message += gl.where(is_whole, 0, NARROW)
        pass_on(ring, ring_full, ring_empty, turn, message)
        turn += 1
        a = a_shard
        if TWO_SOURCES:
            if read_column(table, tile, SOURCE) != FROM_OWN_SHARD:
                a = a_workspace
        for depth in range(0, k, BLOCK_K):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            arrived = full.index(stage)
            mbarrier.expect(arrived, BYTES, pred=is_whole)
            if B_PARTS > 1:
                mbarrier.expect(arrived, PART_BYTES, pred=not is_whole)
            for part in gl.static_range(A_PARTS):
                load_tile(a, [row + part * PART_M, depth], arrived, a_tiles.index(A_PARTS * stage + part))
            for part in gl.static_range(B_PARTS):
                from_col = col + part * PART_N
                place = b_tiles.index(B_PARTS * stage + part)
                if B_IS_TRANSPOSED:
                    load_tile(b, [from_col, depth], arrived, place, pred=is_whole or part == 0)
                else:
                    load_tile(b, [depth, from_col], arrived, place, pred=is_whole or part == 0)
            step += 1
        tile = gl.atomic_add(claims, 1, sem="relaxed", scope="gpu")
    pass_on(ring, ring_full, ring_empty, turn, LAST)


@gluon.jit
def consume_tile(
    WIDTH_N: gl.constexpr, HALF: gl.constexpr, message, turn, step, a_tiles, b_tiles, c_tiles, full, empty, c_full,
    c_empty, out, out_pointer, bias, residual, total, addends, verdicts, received, trace, table, n, k,
    B_IS_TRANSPOSED: gl.constexpr, IN_COLUMNS: gl.constexpr, EPILOGUE: gl.constexpr, ADDENDS: gl.constexpr,
    TRACED: gl.constexpr,
):  # fmt: skip
    """One consumer's half of a tile, `[PART_M, WIDTH_N]`; the next step. b_tiles and c_tiles have its width."""
    PART_M: gl.constexpr = c_tiles.type.shape[1]
    BLOCK_K: gl.constexpr = a_tiles.type.shape[2]
    STAGES: gl.constexpr = full.type.shape[0]
    STRIDE_A: gl.constexpr = a_tiles.type.shape[0] // STAGES
    STRIDE_B: gl.constexpr = b_tiles.type.shape[0] // STAGES
    STRIDE_C: gl.constexpr = c_tiles.type.shape[0] // 2
    OWN_A: gl.constexpr = 0 if IN_COLUMNS else HALF
    OWN_B: gl.constexpr = HALF if IN_COLUMNS else 0
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH_N, 16])
    tile = message & NUMBER
    row = read_column(table, tile, ROW) + OWN_A * PART_M
    row_end = read_column(table, tile, ROW_END)
    col = read_column(table, tile, COL) + OWN_B * WIDTH_N

    # Main loop.
    accumulator = warpgroup_mma_init(gl.zeros((PART_M, WIDTH_N), gl.float32, layout))
    for index in range(gl.cdiv(k, BLOCK_K)):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        b_tile = b_tiles.index(STRIDE_B * stage + OWN_B)
        if B_IS_TRANSPOSED:
            b_tile = b_tile.permute((1, 0))
        accumulator = warpgroup_mma(a_tiles.index(STRIDE_A * stage + OWN_A), b_tile, accumulator, is_async=True)
        accumulator = warpgroup_mma_init(warpgroup_mma_wait(1, (accumulator,)))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=index > 0)
        step += 1
    result = warpgroup_mma_wait(0, (accumulator,))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    result += gl.where(message < VOID, 0.0, float("nan"))
    if EPILOGUE:
        result = finished_by_parts(result, bias, residual, row, row_end, col, n, EPILOGUE)

    # Epilogue.
    if HALF == 0:
        record_time(trace, tile, MULTIPLIED, TRACED and ADDENDS > 0)
    mbarrier.wait(c_empty.index(HALF), (turn & 1) ^ 1)
    if ADDENDS > 0 and read_column(table, tile, PLACE) != ADDS_NOTHING:
        result += gl.where(hear_of_addends(verdicts, received, turn) == 1, 0.0, float("nan"))
        store_sum(result, total, addends, table, tile, row, row_end, col, n, ADDENDS)
    elif row + PART_M > row_end:
        rows = row + gl.arange(0, PART_M, layout=gl.SliceLayout(1, layout))
        cols = col + gl.arange(0, WIDTH_N, layout=gl.SliceLayout(0, layout))
        inside = (rows < row_end)[:, None] & (cols < n)[None, :]
        gl.store(out_pointer + rows.to(gl.int64)[:, None] * n + cols[None, :], result.to(out.dtype), mask=inside)
        gl.thread_barrier()  # one thread arrives for all: their stores come first
    else:
        c_tiles.index(STRIDE_C * HALF).store(result.to(out.dtype))
        fence_async_shared()
    mbarrier.arrive(c_full.index(HALF), count=1)
    return step


@gluon.jit
def consume(
    HALF: gl.constexpr, a_tiles, b_tiles, c_tiles, ring, full, empty, ring_full, ring_empty, c_full, c_empty, out,
    out_pointer, bias, residual, total, addends, verdicts, received, trace, table, n, k,
    B_IS_TRANSPOSED: gl.constexpr, SPLIT_N: gl.constexpr, IN_COLUMNS: gl.constexpr, EPILOGUE: gl.constexpr,
    ADDENDS: gl.constexpr, TRACED: gl.constexpr,
):  # fmt: skip
    PART_M: gl.constexpr = c_tiles.type.shape[1]
    PART_N: gl.constexpr = c_tiles.type.shape[2]
    WHOLE_N: gl.constexpr = SPLIT_N * PART_N
    BLOCK_K: gl.constexpr = a_tiles.type.shape[2]
    B_ROWS: gl.constexpr = WHOLE_N if B_IS_TRANSPOSED else BLOCK_K
    B_COLS: gl.constexpr = BLOCK_K if B_IS_TRANSPOSED else WHOLE_N
    B_TILES: gl.constexpr = b_tiles.type.shape[0] // SPLIT_N
    whole_b = b_tiles._reinterpret(b_tiles.dtype, [B_TILES, B_ROWS, B_COLS], b_tiles.type.layout)
    whole_c = c_tiles._reinterpret(c_tiles.dtype, [2, PART_M, WHOLE_N], c_tiles.type.layout)
    step = 0
    turn = 0
    message = receive(ring, ring_full, ring_empty, turn)
    while message != LAST:
        if SPLIT_N == 1 or (message & NARROW) == 0:
            step = consume_tile(
                WHOLE_N, HALF, message, turn, step, a_tiles, whole_b, whole_c, full, empty, c_full, c_empty, out,
                out_pointer, bias, residual, total, addends, verdicts, received, trace, table, n, k,
                B_IS_TRANSPOSED, IN_COLUMNS, EPILOGUE, ADDENDS, TRACED,
            )  # fmt: skip
        else:
            step = consume_tile(
                PART_N, HALF, message, turn, step, a_tiles, b_tiles, c_tiles, full, empty, c_full, c_empty, out,
                out_pointer, bias, residual, total, addends, verdicts, received, trace, table, n, k,
                B_IS_TRANSPOSED, IN_COLUMNS, EPILOGUE, ADDENDS, TRACED,
            )  # fmt: skip
        turn += 1
        message = receive(ring, ring_full, ring_empty, turn)


@gluon.jit
def consume_upper(
    a_tiles, b_tiles, c_tiles, ring, full, empty, ring_full, ring_empty, c_full, c_empty, out, out_pointer, bias,
    residual, total, addends, verdicts, received, trace, table, n, k, B_IS_TRANSPOSED: gl.constexpr,
    SPLIT_N: gl.constexpr, IN_COLUMNS: gl.constexpr, EPILOGUE: gl.constexpr, ADDENDS: gl.constexpr,
    TRACED: gl.constexpr,
):  # fmt: skip
    consume(
        0, a_tiles, b_tiles, c_tiles, ring, full, empty, ring_full, ring_empty, c_full, c_empty, out, out_pointer, bias,
        residual, total, addends, verdicts, received, trace, table, n, k, B_IS_TRANSPOSED, SPLIT_N, IN_COLUMNS,
        EPILOGUE, ADDENDS, TRACED,
    )  # fmt: skip


@gluon.jit
def consume_lower(
    a_tiles, b_tiles, c_tiles, ring, full, empty, ring_full, ring_empty, c_full, c_empty, out, out_pointer, bias,
    residual, total, addends, verdicts, received, trace, table, n, k, B_IS_TRANSPOSED: gl.constexpr,
    SPLIT_N: gl.constexpr, IN_COLUMNS: gl.constexpr, EPILOGUE: gl.constexpr, ADDENDS: gl.constexpr,
    TRACED: gl.constexpr,
):  # fmt: skip
    consume(
        1, a_tiles, b_tiles, c_tiles, ring, full, empty, ring_full, ring_empty, c_full, c_empty, out, out_pointer, bias,
        residual, total, addends, verdicts, received, trace, table, n, k, B_IS_TRANSPOSED, SPLIT_N, IN_COLUMNS,
        EPILOGUE, ADDENDS, TRACED,
    )  # fmt: skip


@gluon.jit
def store(
    c_tiles, ring, ring_full, ring_empty, c_full, c_empty, out, verdicts, received, table, signals, words,
    limits, trace, world_size, TRACED: gl.constexpr, SPLIT_N: gl.constexpr, IN_COLUMNS: gl.constexpr,
    ADDENDS: gl.constexpr,
):  # fmt: skip
    STEP_M: gl.constexpr = 0 if IN_COLUMNS else c_tiles.type.shape[1]
    STEP_N: gl.constexpr = c_tiles.type.shape[2] if IN_COLUMNS else 0
    PART_M: gl.constexpr = c_tiles.type.shape[1]
    PART_N: gl.constexpr = c_tiles.type.shape[2]
    turn = 0
    message = receive(ring, ring_full, ring_empty, turn)
    while message != LAST:
        tile = message & NUMBER
        is_sound = message < VOID
        if ADDENDS > 0:
            gl.inline_asm_elementwise(COMPLETE_ASSEMBLY, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
            gl.thread_barrier()
            verdict = await_addends(verdicts, received, table, tile, signals, words, limits, world_size)
            is_sound = is_sound & (verdict == 1)
            record_time(trace, tile, RECEIVED, TRACED)
        row = read_column(table, tile, ROW)
        row_end = read_column(table, tile, ROW_END)
        col = read_column(table, tile, COL)
        signal = read_column(table, tile, SIGNAL)
        is_whole = (message & NARROW) == 0
        for half in gl.static_range(2):
            mbarrier.wait(c_full.index(half), turn & 1)
            top, left = row + half * STEP_M, col + half * STEP_N
            if ADDENDS == 0 or read_column(table, tile, PLACE) == ADDS_NOTHING:
                if top + PART_M <= row_end:
                    store_tile(out, [top, left], c_tiles.index(SPLIT_N * half))
                    if SPLIT_N > 1:
                        if is_whole:
                            store_tile(out, [top, left + PART_N], c_tiles.index(SPLIT_N * half + 1))
        wait_for_stores_read(0)
        mbarrier.arrive(c_empty.index(0), count=1)
        mbarrier.arrive(c_empty.index(1), count=1)
        if signal != SIGNALS_NOBODY:
            gl.inline_asm_elementwise(COMPLETE_ASSEMBLY, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
            gl.thread_barrier()
            gl.atomic_add(signals + signal * STRIDE, 1, mask=is_sound, sem="release", scope="sys")
        record_time(trace, tile, STORED, TRACED)
        turn += 1
        message = receive(ring, ring_full, ring_empty, turn)


@gluon.jit
def matmul_hopper_kernel(
    a_shard,
    a_workspace,
    b,
    out,
    out_pointer,
    bias,
    residual,
    total,
    addends,
    table,
    claims,
    signals,
    words,
    limits,
    trace,
    tiles,
    n,
    k,
    world_size,
    B_IS_TRANSPOSED: gl.constexpr,
    TWO_SOURCES: gl.constexpr,
    TRACED: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT_N: gl.constexpr,
    IN_COLUMNS: gl.constexpr,
    EPILOGUE: gl.constexpr,
    ADDENDS: gl.constexpr,
):
    DTYPE: gl.constexpr = a_shard.dtype
    A_SHAPE: gl.constexpr = a_shard.block_type.shape
    B_SHAPE: gl.constexpr = b.block_type.shape
    C_SHAPE: gl.constexpr = out.block_type.shape
    A_PARTS: gl.constexpr = 1 if IN_COLUMNS else 2
    B_PARTS: gl.constexpr = 2 if IN_COLUMNS else SPLIT_N
    a_tiles = gl.allocate_shared_memory(DTYPE, [A_PARTS * STAGES, A_SHAPE[0], A_SHAPE[1]], a_shard.layout)
    b_tiles = gl.allocate_shared_memory(DTYPE, [B_PARTS * STAGES, B_SHAPE[0], B_SHAPE[1]], b.layout)
    c_tiles = gl.allocate_shared_memory(DTYPE, [2 * SPLIT_N, C_SHAPE[0], C_SHAPE[1]], out.layout)
    ring = gl.allocate_shared_memory(gl.int32, [RING, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ring_full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    ring_empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    c_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    c_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    verdicts = gl.allocate_shared_memory(gl.int32, [1, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
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
    mbarrier.init(received.index(0), count=1)
    # Argument tuples stand inline: a tuple kept in a variable would turn its constants into tensors.
    gl.warp_specialize(
        [
            (consume_upper, (
                a_tiles, b_tiles, c_tiles, ring, full, empty, ring_full, ring_empty, c_full, c_empty, out, out_pointer,
                bias, residual, total, addends, verdicts, received, trace, table, n, k, B_IS_TRANSPOSED,
                SPLIT_N, IN_COLUMNS, EPILOGUE, ADDENDS, TRACED)),
            (consume_lower, (
                a_tiles, b_tiles, c_tiles, ring, full, empty, ring_full, ring_empty, c_full, c_empty, out, out_pointer,
                bias, residual, total, addends, verdicts, received, trace, table, n, k, B_IS_TRANSPOSED,
                SPLIT_N, IN_COLUMNS, EPILOGUE, ADDENDS, TRACED)),
            (produce, (
                a_shard, a_workspace, b, a_tiles, b_tiles, ring, full, empty, ring_full, ring_empty, table, claims,
                signals, words, limits, trace, tiles, k, world_size, B_IS_TRANSPOSED, TWO_SOURCES, TRACED,
                STAGES)),
            (store, (
                c_tiles, ring, ring_full, ring_empty, c_full, c_empty, out, verdicts, received, table, signals,
                words, limits, trace, world_size, TRACED, SPLIT_N, IN_COLUMNS, ADDENDS)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip
