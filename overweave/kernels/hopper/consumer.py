"""A consumer of the Hopper matmul: its half of each tile, from the operands in shared memory to the result there.

A tile is up to SPLIT_N rectangles of PART_N columns, side by side. Rectangles that lie behind each other in shared
memory are the bytes of one as wide as all of them, because rows of at most 128 bytes are what a bulk tensor's swizzled
blocks are made of; so a tile is multiplied in as few accumulators as powers of two allow: of 192 columns in two.

What belongs together is passed on as a tuple, None where a kernel has none of it. stages: operands in shared memory,
`a_tiles, b_tiles`, and mbarriers that say which are full and empty. results: `c_tiles`, and the same of their halves.
sums: `addends, addend_tiles`, the storer's verdict on them, and its mbarrier. shares: their memory
(memory/shares.Shares), and what the storer is told of them. products, ends, peers, queue: kernels/arguments.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from overweave.kernels.epilogue import ENDINGS, GATE, finished_by_parts
from overweave.kernels.hopper.finished import finish, gate_half, of_product
from overweave.kernels.hopper.gluon import mbarrier
from overweave.kernels.hopper.received import hear_of_addends, store_spread, store_sum
from overweave.kernels.hopper.ring import LAST, NUMBER, VOID, lacking, receive
from overweave.kernels.hopper.shares import end_share, tell
from overweave.kernels.hopper.start import pass_claim
from overweave.kernels.hopper.stored import away
from overweave.kernels.hopper.tiles import place_of, read_column, record_time
from overweave.kernels.shares import LEFT_OUT, k_range
from overweave.kernels.weights import of_weight
from overweave.lang.tile_table import (
    ADDS_NOTHING,
    FINISHES,
    INTO,
    MULTIPLIED,
    PLACE,
    TO,
)

FP8_COLUMNS = 128  # of sums, beside which those of one step have registers


@gluon.constexpr_function
def widest(parts, part_n, is_fp8):
    """The most of `parts` rectangles that are a power of two, and fit where fp8 has a step's product beside sums."""
    most = min(parts, max(1, FP8_COLUMNS // part_n)) if is_fp8 else parts
    return 1 << (most.bit_length() - 1)


@gluon.jit
def side_by_side(tiles, at, PARTS: gl.constexpr, DOWN: gl.constexpr):
    """The rectangle `at` and those behind it as one: beside each other, or with DOWN one below the other."""
    ROWS: gl.constexpr = tiles.type.shape[1] * (PARTS if DOWN else 1)
    COLS: gl.constexpr = tiles.type.shape[2] * (1 if DOWN else PARTS)
    return tiles.index(at)._reinterpret(tiles.dtype, [ROWS, COLS], tiles.type.layout)


@gluon.jit
def columns_of_b(b_tiles, at, PARTS: gl.constexpr, B_IS_TRANSPOSED: gl.constexpr):
    """`[BLOCK_K, PARTS * PART_N]` of b."""
    b_tile = side_by_side(b_tiles, at, PARTS, B_IS_TRANSPOSED)
    return b_tile.permute((1, 0)) if B_IS_TRANSPOSED else b_tile


@gluon.jit
def no_sums(PART_M: gl.constexpr, COLS: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    return warpgroup_mma_init(gl.zeros((PART_M, COLS), gl.float32, layout))


@gluon.jit
def multiply(
    PARTS: gl.constexpr, HALF: gl.constexpr, step, stages, depth, PART_N: gl.constexpr, B_IS_TRANSPOSED: gl.constexpr,
    IN_COLUMNS: gl.constexpr,
):  # fmt: skip
    """Main loop. The sums of the most rectangles that are a power of two, those of the rest, and the next step.

    If there is no rest, the second is the first.
    """
    a_tiles, b_tiles, full, empty = stages
    STAGES: gl.constexpr = full.type.shape[0]
    STRIDE_A: gl.constexpr = a_tiles.type.shape[0] // STAGES
    STRIDE_B: gl.constexpr = b_tiles.type.shape[0] // STAGES
    OWN_A: gl.constexpr = 0 if IN_COLUMNS else HALF
    OWN_B: gl.constexpr = HALF if IN_COLUMNS else 0
    PART_M: gl.constexpr = a_tiles.type.shape[1]
    BLOCK_K: gl.constexpr = a_tiles.type.shape[2]
    IS_FP8: gl.constexpr = a_tiles.dtype.is_fp8()
    WIDE: gl.constexpr = widest(PARTS, PART_N, IS_FP8)
    REST: gl.constexpr = PARTS - WIDE
    sums = no_sums(PART_M, WIDE * PART_N)
    if REST > 0:
        rest = no_sums(PART_M, REST * PART_N)
    for index in range(gl.cdiv(depth, BLOCK_K)):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        a_tile = a_tiles.index(STRIDE_A * stage + OWN_A)
        at = STRIDE_B * stage + OWN_B
        sums = warpgroup_mma(a_tile, columns_of_b(b_tiles, at, WIDE, B_IS_TRANSPOSED), sums, is_async=True)
        if REST > 0:
            b_tile = columns_of_b(b_tiles, at + WIDE, REST, B_IS_TRANSPOSED)
            rest = warpgroup_mma(a_tile, b_tile, rest, is_async=True)
            sums, rest = warpgroup_mma_wait(2, (sums, rest))
            rest = warpgroup_mma_init(rest)
        else:
            sums = warpgroup_mma_wait(1, (sums,))
        sums = warpgroup_mma_init(sums)
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=index > 0)
        step += 1
    result = warpgroup_mma_wait(0, (sums,))
    others = result
    if REST > 0:
        others = warpgroup_mma_wait(0, (rest,))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    return result, others, step


@gluon.jit
def multiply_step(a_tile, b_tile):
    """The product of one step of k, alone."""
    ROWS: gl.constexpr = a_tile.shape[0]
    COLS: gl.constexpr = b_tile.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 32])
    nothing = warpgroup_mma_init(gl.zeros((ROWS, COLS), gl.float32, layout))
    return warpgroup_mma_wait(0, (warpgroup_mma(a_tile, b_tile, nothing, use_acc=False, is_async=True),))


@gluon.jit
def multiply_in_steps(
    PARTS: gl.constexpr, HALF: gl.constexpr, step, stages, depth, PART_N: gl.constexpr, B_IS_TRANSPOSED: gl.constexpr,
    IN_COLUMNS: gl.constexpr,
):  # fmt: skip
    """As `multiply`, for fp8, of which tensor cores keep about 14 bits as they add: each step's product is added to the
    sums in fp32, while the other consumer's is computed. SOURCE: DeepGEMM.
    """
    a_tiles, b_tiles, full, empty = stages
    STAGES: gl.constexpr = full.type.shape[0]
    STRIDE_A: gl.constexpr = a_tiles.type.shape[0] // STAGES
    STRIDE_B: gl.constexpr = b_tiles.type.shape[0] // STAGES
    OWN_A: gl.constexpr = 0 if IN_COLUMNS else HALF
    OWN_B: gl.constexpr = HALF if IN_COLUMNS else 0
    PART_M: gl.constexpr = a_tiles.type.shape[1]
    BLOCK_K: gl.constexpr = a_tiles.type.shape[2]
    WIDE: gl.constexpr = widest(PARTS, PART_N, True)
    REST: gl.constexpr = PARTS - WIDE
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE * PART_N, 32])
    sums = gl.zeros((PART_M, WIDE * PART_N), gl.float32, layout)
    if REST > 0:
        rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST * PART_N, 32])
        rest = gl.zeros((PART_M, REST * PART_N), gl.float32, rest_layout)
    for _ in range(gl.cdiv(depth, BLOCK_K)):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        a_tile = a_tiles.index(STRIDE_A * stage + OWN_A)
        at = STRIDE_B * stage + OWN_B
        sums += multiply_step(a_tile, columns_of_b(b_tiles, at, WIDE, B_IS_TRANSPOSED))
        if REST > 0:
            rest += multiply_step(a_tile, columns_of_b(b_tiles, at + WIDE, REST, B_IS_TRANSPOSED))
        mbarrier.arrive(empty.index(stage), count=1)
        step += 1
    others = sums
    if REST > 0:
        others = rest
    return sums, others, step


@gluon.jit
def hand_over(
    result, c_tiles, at, turn, target, ends, sums, peers, table, tile, row, row_end, col, n, ADDENDS: gl.constexpr,
    EPILOGUE: gl.constexpr,
):  # fmt: skip
    """The result of some columns: to shared memory, for the storer; or past it, with a mask or with what peers sent."""
    ROWS: gl.constexpr = result.shape[0]
    COLS: gl.constexpr = result.shape[1]
    DTYPE: gl.constexpr = c_tiles.dtype
    layout: gl.constexpr = result.type.layout
    addends, addend_tiles, verdicts, received = sums
    if addend_tiles is not None:
        if read_column(table, tile, PLACE) != ADDS_NOTHING:
            result += gl.where(hear_of_addends(verdicts, received, turn) == 1, 0.0, float("nan"))
            addend = side_by_side(c_tiles, at, COLS // c_tiles.type.shape[2], False)
            result += addend.load(layout).to(gl.float32)
            if ENDINGS & EPILOGUE:
                if read_column(table, tile, FINISHES) != 0:
                    result = finished_by_parts(
                        result, ends.bias, ends.residual, None, None, row, row_end, col, n, ENDINGS & EPILOGUE
                    )
    if ADDENDS > 0 and addend_tiles is None and read_column(table, tile, PLACE) != ADDS_NOTHING:
        result += gl.where(hear_of_addends(verdicts, received, turn) == 1, 0.0, float("nan"))
        store_sum(result, target, ends, addends, table, tile, row, row_end, col, n, ADDENDS, EPILOGUE)
    elif row + ROWS > row_end and peers.everyone is not None:
        store_spread(result, target, peers, table, tile, row, row_end, col, n)
    elif row + ROWS > row_end:
        rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        cols = col + gl.arange(0, COLS, layout=gl.SliceLayout(0, layout))
        inside = (rows < row_end)[:, None] & (cols < n)[None, :]
        gl.store(target + rows.to(gl.int64)[:, None] * n + cols[None, :], result.to(DTYPE), mask=inside)
        gl.thread_barrier()  # one thread arrives for all: their stores come first
    else:
        side_by_side(c_tiles, at, COLS // c_tiles.type.shape[2], False).store(result.to(DTYPE))
        fence_async_shared()


@gluon.jit
def target_of(table, tile, weight, products, peers, WEIGHTS: gl.constexpr):
    """The output that a tile writes, at the rank where it belongs."""
    target = of_weight(weight, products.out, products.out_1, products.out_2, WEIGHTS)
    if products.total is not None:
        target = gl.where(read_column(table, tile, INTO) == 0, target, products.total)
    if peers.places is not None:
        target = away(target, peers, gl.maximum(read_column(table, tile, TO), 0))
    return target


@gluon.jit
def end_tile(
    PARTS: gl.constexpr, WIDE: gl.constexpr, HALF: gl.constexpr, result, others, turn, results, target, products, ends,
    sums, peers, queue, tile, row, row_end, col, cols_end, EPILOGUE: gl.constexpr,
    ADDENDS: gl.constexpr, TRACED: gl.constexpr, WEIGHTS: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    """The products of all of k, finished and handed over."""
    c_tiles, _, c_empty = results
    table, trace = queue.table, queue.trace
    PART_N: gl.constexpr = c_tiles.type.shape[2]
    AT: gl.constexpr = c_tiles.type.shape[0] // 2 * HALF
    OF_PRODUCT: gl.constexpr = of_product(EPILOGUE, ADDENDS)
    if GATE & EPILOGUE:
        result = gate_half(result, others, PART_N, table, tile, ends, row, row_end, col, cols_end, EPILOGUE)
    result = finish(result, table, tile, ends, row, row_end, col, products, cols_end, OF_PRODUCT, WEIGHTS)
    if PARTS > WIDE:
        further = col + WIDE * PART_N
        if ADDENDS == 0:  # with addends, behind those of the others: both would not fit
            others = finish(others, table, tile, ends, row, row_end, further, products, cols_end, OF_PRODUCT, WEIGHTS)
    if not SPLIT_K:
        await_room(HALF, turn, c_empty, trace, table, tile, TRACED and ADDENDS > 0)
    hand_over(
        result, c_tiles, AT, turn, target, ends, sums, peers, table, tile, row, row_end, col, cols_end, ADDENDS,
        EPILOGUE,
    )  # fmt: skip
    if PARTS > WIDE:
        if ADDENDS > 0:
            others = finish(others, table, tile, ends, row, row_end, further, products, cols_end, OF_PRODUCT, WEIGHTS)
        hand_over(
            others, c_tiles, AT + WIDE, turn, target, ends, sums, peers, table, tile, row, row_end, further, cols_end,
            ADDENDS, EPILOGUE,
        )  # fmt: skip


@gluon.jit
def await_room(HALF: gl.constexpr, turn, c_empty, trace, table, tile, TRACED: gl.constexpr):
    """The products are there; the storer is done with the last tile."""
    if HALF == 0:
        record_time(trace, tile, MULTIPLIED, TRACED)
    mbarrier.wait(c_empty.index(HALF), (turn & 1) ^ 1)


@gluon.jit
def consume_tile(
    PARTS: gl.constexpr, HALF: gl.constexpr, message, turn, step, stages, results, products, ends, sums, shares, peers,
    queue, k, B_IS_TRANSPOSED: gl.constexpr, IN_COLUMNS: gl.constexpr,
    EPILOGUE: gl.constexpr, ADDENDS: gl.constexpr, TRACED: gl.constexpr, WEIGHTS: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    """One consumer's half of a tile of PARTS rectangles; the next step."""
    a_tiles, _, _, _ = stages
    c_tiles, c_full, c_empty = results
    _, addend_tiles, verdicts, received = sums
    memory, told_of = shares
    table, trace = queue.table, queue.trace
    GATED: gl.constexpr = (GATE & EPILOGUE) != 0
    PART_M: gl.constexpr = c_tiles.type.shape[1]
    PART_N: gl.constexpr = c_tiles.type.shape[2]
    IS_FP8: gl.constexpr = a_tiles.dtype.is_fp8()
    BLOCK_K: gl.constexpr = a_tiles.type.shape[2]
    PRODUCTS: gl.constexpr = 2 if GATED else PARTS  # of rectangles of columns
    WIDE: gl.constexpr = widest(PRODUCTS, PART_N, IS_FP8)
    HAS_REST: gl.constexpr = PRODUCTS > WIDE
    LEFT: gl.constexpr = 1 if GATED else WIDE
    SIZE: gl.constexpr = PART_M * PART_N * (2 if GATED else c_tiles.type.shape[0] // 2)
    BELOW: gl.constexpr = 0 if IN_COLUMNS else HALF * PART_M
    BESIDE: gl.constexpr = HALF * PART_N if IN_COLUMNS else 0
    tile = message & NUMBER
    if not SPLIT_K:
        row, row_end, col, weight = place_of(table, tile, BELOW, BESIDE, WEIGHTS)
        target = target_of(table, tile, weight, products, peers, WEIGHTS)
        cols_end = of_weight(weight, products.n, products.n_1, products.n_2, WEIGHTS)
    low, high = k_range(table, tile, k, BLOCK_K, SPLIT_K)
    if IS_FP8:
        result, others, step = multiply_in_steps(
            PRODUCTS, HALF, step, stages, high - low, PART_N, B_IS_TRANSPOSED, IN_COLUMNS
        )
    else:
        result, others, step = multiply(PRODUCTS, HALF, step, stages, high - low, PART_N, B_IS_TRANSPOSED, IN_COLUMNS)
    result += gl.where(message < VOID, 0.0, float("nan"))
    if HAS_REST:
        others += gl.where(message < VOID, 0.0, float("nan"))
    if SPLIT_K:
        told, result, others = end_share(HAS_REST, HALF, SIZE, result, others, memory, table, tile, message < VOID)
        await_room(HALF, turn, c_empty, trace, table, tile, TRACED and ADDENDS > 0)
        if told != LEFT_OUT:
            # Where the tile lies is read here: beside sums of shares there is no register for it.
            row, row_end, col, weight = place_of(table, tile, BELOW, BESIDE, WEIGHTS)
            target = target_of(table, tile, weight, products, peers, WEIGHTS)
            cols_end = of_weight(weight, products.n, products.n_1, products.n_2, WEIGHTS)
            end_tile(
                PARTS, LEFT, HALF, result, others, turn, results, target, products, ends, sums, peers, queue, tile, row,
                row_end, col, cols_end, EPILOGUE, ADDENDS, TRACED, WEIGHTS, SPLIT_K,
            )  # fmt: skip
        elif addend_tiles is not None:
            if read_column(table, tile, PLACE) != ADDS_NOTHING:
                hear_of_addends(verdicts, received, turn)  # what is loaded for nothing is there before the next tile's
        tell(told_of.index(HALF), told)
    else:
        end_tile(
            PARTS, LEFT, HALF, result, others, turn, results, target, products, ends, sums, peers, queue, tile, row,
            row_end, col, cols_end, EPILOGUE, ADDENDS, TRACED, WEIGHTS, SPLIT_K,
        )  # fmt: skip
    mbarrier.arrive(c_full.index(HALF), count=1)
    return step


@gluon.jit
def consume(
    HALF: gl.constexpr, stages, results, ring, products, ends, sums, shares, peers, queue, k,
    B_IS_TRANSPOSED: gl.constexpr, SPLIT_N: gl.constexpr, IN_COLUMNS: gl.constexpr, EPILOGUE: gl.constexpr,
    ADDENDS: gl.constexpr, TRACED: gl.constexpr, WEIGHTS: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    step = 0
    turn = 0
    message = receive(ring, turn)
    while message != LAST:
        for lacks in gl.static_range(SPLIT_N):
            if SPLIT_N == 1 or lacking(message) == lacks:
                step = consume_tile(
                    SPLIT_N - lacks, HALF, message, turn, step, stages, results, products, ends, sums, shares, peers,
                    queue, k, B_IS_TRANSPOSED, IN_COLUMNS, EPILOGUE, ADDENDS, TRACED, WEIGHTS, SPLIT_K,
                )  # fmt: skip
        turn += 1
        message = receive(ring, turn)


@gluon.jit
def consume_upper(
    claim, stages, results, ring, products, ends, sums, shares, peers, queue, k, B_IS_TRANSPOSED: gl.constexpr,
    SPLIT_N: gl.constexpr, IN_COLUMNS: gl.constexpr, EPILOGUE: gl.constexpr, ADDENDS: gl.constexpr,
    TRACED: gl.constexpr, WEIGHTS: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    pass_claim(claim[0], claim[1], claim[2])
    consume(
        0, stages, results, ring, products, ends, sums, shares, peers, queue, k, B_IS_TRANSPOSED, SPLIT_N, IN_COLUMNS,
        EPILOGUE, ADDENDS, TRACED, WEIGHTS, SPLIT_K,
    )  # fmt: skip


@gluon.jit
def consume_lower(
    stages, results, ring, products, ends, sums, shares, peers, queue, k, B_IS_TRANSPOSED: gl.constexpr,
    SPLIT_N: gl.constexpr, IN_COLUMNS: gl.constexpr, EPILOGUE: gl.constexpr, ADDENDS: gl.constexpr,
    TRACED: gl.constexpr, WEIGHTS: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    consume(
        1, stages, results, ring, products, ends, sums, shares, peers, queue, k, B_IS_TRANSPOSED, SPLIT_N, IN_COLUMNS,
        EPILOGUE, ADDENDS, TRACED, WEIGHTS, SPLIT_K,
    )  # fmt: skip
