"""The Hopper matmul: the same face, table and signals as the portable one (kernels/matmul.py), warp-specialised.

    producer  one warp: claims rows of the table, waits for their signals, loads tiles of a and b (bulk tensor)
    consumers two groups of four warps, each half of the tile's rows: tensor cores, then the result to shared memory
    storer    one warp: bulk-tensor store, drain, signal, while the consumers are at the next tile

The producer passes each claimed row to the others through a ring in shared memory: the row's number, or LAST. A void
wait travels as a bit of that number, so that all partitions agree on it. A tile that a chunk's end cuts short is stored
by the consumers with a mask instead, because a bulk store would write into the next chunk.
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

from overweave.kernels.hopper import load_tile, mbarrier, store_tile, wait_for_stores_read
from overweave.lang import (
    ALSO,
    ALSO_COUNT,
    CLAIMED,
    COL,
    COLUMNS,
    FROM_OWN_SHARD,
    OPERATION,
    READY,
    ROW,
    ROW_END,
    SIGNAL,
    SIGNALS_NOBODY,
    SOURCE,
    SOURCE_ROW,
    STORED,
    TRACE_COLUMNS,
    WAIT_COUNT,
    WAIT_HI,
    WAIT_LO,
)
from overweave.memory.device import CLOCK_ASSEMBLY, STRIDE, TIMEOUT_NS, sound_alarm
from overweave.memory.ptx import COMPLETE_BULK_STORES, WAIT_UNTIL_AT_LEAST_IN_WARP

WAIT_ASSEMBLY = gl.constexpr(WAIT_UNTIL_AT_LEAST_IN_WARP)
COMPLETE_ASSEMBLY = gl.constexpr(COMPLETE_BULK_STORES)
RING = gl.constexpr(4)
VOID = gl.constexpr(1 << 30)
LAST = gl.constexpr(-1)


@gluon.jit
def read_column(table, tile, COLUMN: gl.constexpr):
    return gl.load(table + tile * COLUMNS + COLUMN)


@gluon.jit
def record_time(trace, tile, COLUMN: gl.constexpr, TRACED: gl.constexpr):
    if TRACED:
        now = gl.inline_asm_elementwise(CLOCK_ASSEMBLY, "=l", [], dtype=gl.int64, is_pure=False, pack=1)
        gl.store(trace + tile * TRACE_COLUMNS + COLUMN, now)


@gluon.jit
def wait_for_tile(table, tile, signals, words, limits, world_size):
    """As `lang.wait_for_tile`, in a partition of one warp."""
    verdict = 1
    high = read_column(table, tile, WAIT_HI)
    also = read_column(table, tile, ALSO)
    for place in range(read_column(table, tile, WAIT_LO), high + (also >= 0).to(gl.int32)):
        if verdict == 1:
            signal = gl.where(place < high, place, also)
            count = gl.where(place < high, read_column(table, tile, WAIT_COUNT), read_column(table, tile, ALSO_COUNT))
            word = signals + signal * STRIDE
            verdict = gl.inline_asm_elementwise(
                WAIT_ASSEMBLY,
                "=r,l,r,l,l",
                [word, count, words, gl.load(limits + TIMEOUT_NS)],
                dtype=gl.int32,
                is_pure=False,
                pack=1,
            )
            if verdict == 0:
                sound_alarm(word, count, read_column(table, tile, OPERATION), signal, words, limits, world_size)
    return verdict


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
):  # fmt: skip
    HALF_M: gl.constexpr = a_shard.block_type.shape[0]
    BLOCK_K: gl.constexpr = a_shard.block_type.shape[1]
    STAGES: gl.constexpr = b_tiles.type.shape[0]
    BYTES: gl.constexpr = 2 * a_shard.block_type.nbytes + b.block_type.nbytes
    step = 0
    turn = 0
    tile = gl.atomic_add(claims, 1, sem="relaxed", scope="gpu")
    while tile < tiles:
        record_time(trace, tile, CLAIMED, TRACED)
        verdict = wait_for_tile(table, tile, signals, words, limits, world_size)
        record_time(trace, tile, READY, TRACED)
        pass_on(ring, ring_full, ring_empty, turn, tile + (1 - verdict) * VOID)
        turn += 1
        row = read_column(table, tile, SOURCE_ROW)
        col = read_column(table, tile, COL)
        a = a_shard
        if TWO_SOURCES:
            if read_column(table, tile, SOURCE) != FROM_OWN_SHARD:
                a = a_workspace
        for depth in range(0, k, BLOCK_K):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            arrived = full.index(stage)
            mbarrier.expect(arrived, BYTES)
            load_tile(a, [row, depth], arrived, a_tiles.index(2 * stage))
            load_tile(a, [row + HALF_M, depth], arrived, a_tiles.index(2 * stage + 1))
            if B_IS_TRANSPOSED:
                load_tile(b, [col, depth], arrived, b_tiles.index(stage))
            else:
                load_tile(b, [depth, col], arrived, b_tiles.index(stage))
            step += 1
        tile = gl.atomic_add(claims, 1, sem="relaxed", scope="gpu")
    pass_on(ring, ring_full, ring_empty, turn, LAST)


@gluon.jit
def consume(
    HALF: gl.constexpr, a_tiles, b_tiles, c_tiles, ring, full, empty, ring_full, ring_empty, c_full, c_empty, out,
    out_pointer, table, n, k, B_IS_TRANSPOSED: gl.constexpr,
):  # fmt: skip
    HALF_M: gl.constexpr = c_tiles.type.shape[1]
    BLOCK_N: gl.constexpr = c_tiles.type.shape[2]
    BLOCK_K: gl.constexpr = a_tiles.type.shape[2]
    STAGES: gl.constexpr = b_tiles.type.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    steps = gl.cdiv(k, BLOCK_K)
    step = 0
    turn = 0
    message = receive(ring, ring_full, ring_empty, turn)
    while message != LAST:
        tile = message & (VOID - 1)
        row = read_column(table, tile, ROW) + HALF * HALF_M
        row_end = read_column(table, tile, ROW_END)
        col = read_column(table, tile, COL)

        # Main loop.
        accumulator = warpgroup_mma_init(gl.zeros((HALF_M, BLOCK_N), gl.float32, layout))
        for index in range(steps):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            b_tile = b_tiles.index(stage)
            if B_IS_TRANSPOSED:
                b_tile = b_tile.permute((1, 0))
            accumulator = warpgroup_mma(a_tiles.index(2 * stage + HALF), b_tile, accumulator, is_async=True)
            accumulator = warpgroup_mma_init(warpgroup_mma_wait(1, (accumulator,)))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=index > 0)
            step += 1
        result = warpgroup_mma_wait(0, (accumulator,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        result += gl.where(message < VOID, 0.0, float("nan"))
        result = result.to(out.dtype)

        # Epilogue.
        mbarrier.wait(c_empty.index(HALF), (turn & 1) ^ 1)
        if row + HALF_M > row_end:
            rows = row + gl.arange(0, HALF_M, layout=gl.SliceLayout(1, layout))
            cols = col + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
            inside = (rows < row_end)[:, None] & (cols < n)[None, :]
            gl.store(out_pointer + rows.to(gl.int64)[:, None] * n + cols[None, :], result, mask=inside)
            gl.thread_barrier()  # one thread arrives for all: their stores come first
        else:
            c_tiles.index(HALF).store(result)
            fence_async_shared()
        mbarrier.arrive(c_full.index(HALF), count=1)
        turn += 1
        message = receive(ring, ring_full, ring_empty, turn)


@gluon.jit
def consume_upper(
    a_tiles, b_tiles, c_tiles, ring, full, empty, ring_full, ring_empty, c_full, c_empty, out, out_pointer, table, n, k,
    B_IS_TRANSPOSED: gl.constexpr,
):  # fmt: skip
    consume(
        0, a_tiles, b_tiles, c_tiles, ring, full, empty, ring_full, ring_empty, c_full, c_empty, out, out_pointer,
        table, n, k, B_IS_TRANSPOSED,
    )  # fmt: skip


@gluon.jit
def consume_lower(
    a_tiles, b_tiles, c_tiles, ring, full, empty, ring_full, ring_empty, c_full, c_empty, out, out_pointer, table, n, k,
    B_IS_TRANSPOSED: gl.constexpr,
):  # fmt: skip
    consume(
        1, a_tiles, b_tiles, c_tiles, ring, full, empty, ring_full, ring_empty, c_full, c_empty, out, out_pointer,
        table, n, k, B_IS_TRANSPOSED,
    )  # fmt: skip


@gluon.jit
def store(c_tiles, ring, ring_full, ring_empty, c_full, c_empty, out, table, signals, trace, TRACED: gl.constexpr):
    HALF_M: gl.constexpr = c_tiles.type.shape[1]
    turn = 0
    message = receive(ring, ring_full, ring_empty, turn)
    while message != LAST:
        tile = message & (VOID - 1)
        row = read_column(table, tile, ROW)
        row_end = read_column(table, tile, ROW_END)
        col = read_column(table, tile, COL)
        signal = read_column(table, tile, SIGNAL)
        for half in gl.static_range(2):
            mbarrier.wait(c_full.index(half), turn & 1)
            if row + (half + 1) * HALF_M <= row_end:
                store_tile(out, [row + half * HALF_M, col], c_tiles.index(half))
        wait_for_stores_read(0)
        mbarrier.arrive(c_empty.index(0), count=1)
        mbarrier.arrive(c_empty.index(1), count=1)
        if signal != SIGNALS_NOBODY:
            gl.inline_asm_elementwise(COMPLETE_ASSEMBLY, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
            gl.thread_barrier()
            gl.atomic_add(signals + signal * STRIDE, 1, mask=message < VOID, sem="release", scope="sys")
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
):
    DTYPE: gl.constexpr = a_shard.dtype
    A_SHAPE: gl.constexpr = a_shard.block_type.shape
    B_SHAPE: gl.constexpr = b.block_type.shape
    C_SHAPE: gl.constexpr = out.block_type.shape
    a_tiles = gl.allocate_shared_memory(DTYPE, [2 * STAGES, A_SHAPE[0], A_SHAPE[1]], a_shard.layout)
    b_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, B_SHAPE[0], B_SHAPE[1]], b.layout)
    c_tiles = gl.allocate_shared_memory(DTYPE, [2, C_SHAPE[0], C_SHAPE[1]], out.layout)
    ring = gl.allocate_shared_memory(gl.int32, [RING, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ring_full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    ring_empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    c_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    c_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    for place in gl.static_range(RING):
        mbarrier.init(ring_full.index(place), count=1)
        mbarrier.init(ring_empty.index(place), count=3)
    for half in gl.static_range(2):
        mbarrier.init(c_full.index(half), count=1)
        mbarrier.init(c_empty.index(half), count=1)
    # Argument tuples stand inline: a tuple kept in a variable would turn its constants into tensors.
    gl.warp_specialize(
        [
            (consume_upper, (
                a_tiles, b_tiles, c_tiles, ring, full, empty, ring_full, ring_empty, c_full, c_empty, out, out_pointer,
                table, n, k, B_IS_TRANSPOSED)),
            (consume_lower, (
                a_tiles, b_tiles, c_tiles, ring, full, empty, ring_full, ring_empty, c_full, c_empty, out, out_pointer,
                table, n, k, B_IS_TRANSPOSED)),
            (produce, (
                a_shard, a_workspace, b, a_tiles, b_tiles, ring, full, empty, ring_full, ring_empty, table, claims,
                signals, words, limits, trace, tiles, k, world_size, B_IS_TRANSPOSED, TWO_SOURCES, TRACED)),
            (store, (
                c_tiles, ring, ring_full, ring_empty, c_full, c_empty, out, table, signals, trace, TRACED)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip
