"""A consumer of the Hopper matmul: its half of each tile, from the operands in shared memory to the result there.

A tile is up to `traits.split_n` rectangles of PART_N columns, side by side. Rectangles that lie behind each other in
shared memory are the bytes of one as wide as all of them, because rows of at most 128 bytes are what a bulk tensor's
swizzled blocks are made of; so a tile is multiplied in as few accumulators as powers of two allow: of 192 columns in
two.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from overweave.compat.triton_names import block_barrier
from overweave.kernels.epilogue import (
    ALL,
    PAIR,
    PART,
    SUM,
    Elements,
    apply_steps,
    does,
    finished_by_parts,
    reads,
    scales_beside,
)
from overweave.kernels.experts import end_rows
from overweave.kernels.hopper.shared import LAST, NUMBER, VOID, lacking, receive
from overweave.kernels.hopper.start import pass_claim, pass_claim_traced
from overweave.kernels.hopper.tile_end import half_of, hear_of_addends, store_sum
from overweave.kernels.hopper.tiles import is_short_tile, may_be_short, place_of, power_of_two, side_by_side
from overweave.kernels.tile_end import EXPERTS, columns_before, of_weight, target_at, weight_of
from overweave.lang.tile_table import ADDS_NOTHING, FINISHES, INTO, MULTIPLIED, PLACE, read_column, record_time

# These two are the halves of one accumulator; or, of fp8, beside whose sums one step's product stands too, two of them.


@gluon.jit
def finish(
    traits: gl.constexpr, value, gate, table, tile, ends, row, row_end, col, products, cols_end, STAGES: gl.constexpr
):  # fmt: skip
    """Some stages of the epilogue of some columns of a tile, of a weight that has cols_end. gate: the product beside
    value, or None."""
    if does(traits.epilogue, STAGES):
        before = 0
        if traits.weights != 1:
            before = columns_before(weight_of(table, tile, traits.weights), products.n, products.n_1, traits.weights)
        scales = scales_beside(ends, table, tile, None, traits.epilogue)
        value = finished_by_parts(
            value, gate, ends.inputs, scales, row, row_end, col, cols_end, before, traits.epilogue, STAGES
        )  # fmt: skip
    return value


@gluon.jit
def gate_half(
    traits: gl.constexpr, result, others, PART_N: gl.constexpr, table, tile, ends, row, row_end, col, products, cols_end
):  # fmt: skip
    """A consumer's two products made one, each scaled by its own before. They are one accumulator, or both."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART_N, 16])
    PAIRS: gl.constexpr = PART | PAIR
    value, gate = result, others
    if result.shape[1] > PART_N:
        value, gate = half_of(result, False), half_of(result, True)
    if reads(traits.epilogue, PAIRS, ""):
        value = finish(traits, value, gate, table, tile, ends, row, row_end, col, products, cols_end, PAIRS)
    else:
        value = apply_steps(value, gate, None, Elements(None, None, None, 0, 0, 0, None), traits.epilogue, PAIRS)
    return gl.convert_layout(value, layout)  # no instruction: all of both is the thread's own


FP8_COLUMNS = 128  # of sums, beside which those of one step have registers


@gluon.constexpr_function
def widest(parts, part_n, is_fp8):
    """The most of `parts` rectangles that are a power of two, and fit where fp8 has a step's product beside sums."""
    most = min(parts, max(1, FP8_COLUMNS // part_n)) if is_fp8 else parts
    return power_of_two(most)


@gluon.jit
def consume(traits: gl.constexpr, HALF: gl.constexpr, claimed, begun, claim, stages, results, ring, work):
    """One consumer: every tile of the ring.

    claimed: the first claim, under way, if this one passes it on. begun: of a traced kernel, when the program began.
    """
    if claimed is not None:
        if traits.traced:
            pass_claim_traced(claimed, claim, work.queue, begun)
        else:
            pass_claim(claimed, claim)
    SPLIT_N: gl.constexpr = traits.split_n
    step = 0
    turn = 0
    message = receive(ring, turn)
    while message != LAST:
        is_its = 1
        if HALF == 1 and may_be_short(traits):
            is_its = 1 - is_short_tile(traits, work.queue.table, message & NUMBER, results.tiles.first.type.shape[1])
        for lacks in gl.static_range(SPLIT_N):
            if (SPLIT_N == 1 or lacking(message) == lacks) and is_its == 1:
                step = consume_tile(traits, HALF, SPLIT_N - lacks, message, turn, step, stages, results, work)
        if HALF == 1 and may_be_short(traits):
            if is_its == 0:
                step = pass_by(HALF, turn, step, stages, results, work)
        turn += 1
        message = receive(ring, turn)


@gluon.jit
def pass_by(HALF: gl.constexpr, turn, step, stages, results, work):
    """A tile that has no rows for this consumer; the next step."""
    STAGES: gl.constexpr = stages.full.type.shape[0]
    for _ in range(gl.cdiv(work.k, stages.a.type.shape[2])):
        mbarrier.wait(stages.full.index(step % STAGES), (step // STAGES) & 1)
        mbarrier.arrive(stages.empty.index(step % STAGES), count=1)
        step += 1
    mbarrier.wait(results.empty.index(HALF), (turn & 1) ^ 1)
    mbarrier.arrive(results.full.index(HALF), count=1)
    return step


@gluon.jit
def consume_tile(
    traits: gl.constexpr, HALF: gl.constexpr, PARTS: gl.constexpr, message, turn, step, stages, results, work
):  # fmt: skip
    """One consumer's half of a tile of PARTS rectangles; the next step."""
    table, products = work.queue.table, work.products
    PART_M: gl.constexpr = results.tiles.first.type.shape[1]
    PART_N: gl.constexpr = results.tiles.first.type.shape[2]
    PRODUCTS: gl.constexpr = 2 if traits.is_gated else PARTS  # of rectangles of columns
    WIDE: gl.constexpr = widest(PRODUCTS, PART_N, stages.a.dtype.is_fp8())
    HAS_REST: gl.constexpr = PRODUCTS > WIDE
    LEFT: gl.constexpr = 1 if traits.is_gated else WIDE
    BELOW: gl.constexpr = 0 if traits.in_columns else HALF * PART_M
    BESIDE: gl.constexpr = HALF * PART_N if traits.in_columns else 0
    tile = message & NUMBER
    own_row, row, row_end, col, weight = place_of(traits, table, tile, BELOW, BESIDE, PART_M)
    target = target_of(table, tile, weight, products, work.peers, traits.weights)
    cols_end = of_weight(weight, products.n, products.n_1, products.n_2, traits.weights)
    result, others, step = multiply(traits, HALF, PRODUCTS, PART_N, step, stages, work.k)
    result += gl.where(message < VOID, 0.0, float("nan"))
    if HAS_REST:
        others += gl.where(message < VOID, 0.0, float("nan"))
    end_tile(
        traits, HALF, PARTS, LEFT, result, others, turn, results, target, work, tile, own_row, row, row_end, col,
        cols_end,
    )  # fmt: skip
    mbarrier.arrive(results.full.index(HALF), count=1)
    return step


@gluon.jit
def multiply(
    traits: gl.constexpr, HALF: gl.constexpr, PARTS: gl.constexpr, PART_N: gl.constexpr, step, stages, depth
):  # fmt: skip
    """Main loop. The sums of the most rectangles that are a power of two, those of the rest, and the next step.

    If there is no rest, the second is the first. Of fp8 tensor cores keep about 14 bits as they add: each step's
    product is added to the sums in fp32, while the other consumer's is computed. SOURCE: DeepGEMM.
    """
    STAGES: gl.constexpr = traits.stages
    STRIDE_A: gl.constexpr = stages.a.type.shape[0] // STAGES
    OWN_A: gl.constexpr = 0 if traits.in_columns else HALF
    OWN_B: gl.constexpr = HALF if traits.in_columns else 0
    PART_M: gl.constexpr = stages.a.type.shape[1]
    IS_FP8: gl.constexpr = stages.a.dtype.is_fp8()
    WIDE: gl.constexpr = widest(PARTS, PART_N, IS_FP8)
    REST: gl.constexpr = PARTS - WIDE
    sums = no_sums(PART_M, WIDE * PART_N, IS_FP8)
    if REST > 0:
        rest = no_sums(PART_M, REST * PART_N, IS_FP8)
    for index in range(gl.cdiv(depth, stages.a.type.shape[2])):
        stage = step % STAGES
        mbarrier.wait(stages.full.index(stage), (step // STAGES) & 1)
        if traits.gathers:
            fence_async_shared()  # tensor cores read in the asynchronous proxy, gathered rows were not written there
        a_tile = stages.a.index(STRIDE_A * stage + OWN_A)
        if IS_FP8:
            sums += multiply_step(a_tile, columns_of_b(traits, stages, stage, OWN_B, WIDE))
            if REST > 0:
                rest += multiply_step(a_tile, columns_of_b(traits, stages, stage, OWN_B + WIDE, REST))
            mbarrier.arrive(stages.empty.index(stage), count=1)
        else:
            sums = warpgroup_mma(a_tile, columns_of_b(traits, stages, stage, OWN_B, WIDE), sums, is_async=True)
            if REST > 0:
                b_rest = columns_of_b(traits, stages, stage, OWN_B + WIDE, REST)
                rest = warpgroup_mma(a_tile, b_rest, rest, is_async=True)
                sums, rest = warpgroup_mma_wait(2, (sums, rest))
                rest = warpgroup_mma_init(rest)
            else:
                sums = warpgroup_mma_wait(1, (sums,))
            sums = warpgroup_mma_init(sums)
            mbarrier.arrive(stages.empty.index((step + STAGES - 1) % STAGES), count=1, pred=index > 0)
        step += 1
    result = sums
    if not IS_FP8:
        result = warpgroup_mma_wait(0, (sums,))
    others = result
    if REST > 0:
        others = rest
        if not IS_FP8:
            others = warpgroup_mma_wait(0, (rest,))
    if not IS_FP8:
        mbarrier.arrive(stages.empty.index((step + STAGES - 1) % STAGES), count=1)
    return result, others, step


@gluon.jit
def no_sums(ROWS: gl.constexpr, COLS: gl.constexpr, IS_FP8: gl.constexpr):
    """What products are added to: in tensor cores, or, of fp8, by threads."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 32 if IS_FP8 else 16])
    sums = gl.zeros((ROWS, COLS), gl.float32, layout)
    if not IS_FP8:
        sums = warpgroup_mma_init(sums)
    return sums


@gluon.jit
def multiply_step(a_tile, b_tile):
    """The product of one step of k, alone, of fp8."""
    nothing = warpgroup_mma_init(no_sums(a_tile.shape[0], b_tile.shape[1], True))
    return warpgroup_mma_wait(0, (warpgroup_mma(a_tile, b_tile, nothing, use_acc=False, is_async=True),))


@gluon.jit
def columns_of_b(traits: gl.constexpr, stages, stage, PART: gl.constexpr, MANY: gl.constexpr):
    """`[BLOCK_K, MANY * PART_N]` of b: MANY rectangles of a stage, from PART on."""
    b_tile = side_by_side(stages.b, stage, PART, MANY, traits.stages, traits.b_is_transposed)
    return b_tile.permute((1, 0)) if traits.b_is_transposed else b_tile


@gluon.jit
def target_of(table, tile, weight, products, peers, WEIGHTS: gl.constexpr):
    """The output that a tile writes, at the rank where it belongs."""
    target = of_weight(weight, products.out, products.out_1, products.out_2, WEIGHTS)
    if products.total is not None:
        target = gl.where(read_column(table, tile, INTO) == 0, target, products.total)
    if peers.places is not None:
        target = target_at(target, table, tile, peers)
    return target


@gluon.jit
def end_tile(
    traits: gl.constexpr, HALF: gl.constexpr, PARTS: gl.constexpr, WIDE: gl.constexpr, result, others, turn, results,
    target, work, tile, own_row, row, row_end, col, cols_end,
):  # fmt: skip
    """The products of all of k, finished and handed over."""
    table, ends, products = work.queue.table, work.ends, work.products
    PART_N: gl.constexpr = results.tiles.first.type.shape[2]
    STAGES: gl.constexpr = PART if traits.addends > 0 else SUM if traits.is_gated else ALL
    if traits.is_gated:
        result = gate_half(
            traits, result, others, PART_N, table, tile, ends, row, row_end, col, products, cols_end
        )  # fmt: skip
    result = finish(traits, result, None, table, tile, ends, row, row_end, col, products, cols_end, STAGES)
    if PARTS > WIDE:
        further = col + WIDE * PART_N
        if traits.addends == 0:  # with addends, behind those of the others: both would not fit
            others = finish(
                traits, others, None, table, tile, ends, row, row_end, further, products, cols_end, STAGES
            )  # fmt: skip
    if HALF == 0:
        record_time(work.queue.trace, tile, MULTIPLIED, traits.traced and traits.addends > 0)
    mbarrier.wait(results.empty.index(HALF), (turn & 1) ^ 1)  # the storer is done with the last tile
    hand_over(traits, HALF, 0, result, results.tiles, turn, target, work, tile, own_row, row, row_end, col, cols_end)
    if PARTS > WIDE:
        if traits.addends > 0:
            others = finish(
                traits, others, None, table, tile, ends, row, row_end, further, products, cols_end, STAGES
            )  # fmt: skip
        hand_over(
            traits, HALF, WIDE, others, results.tiles, turn, target, work, tile, own_row, row, row_end, further,
            cols_end,
        )  # fmt: skip


@gluon.jit
def hand_over(
    traits: gl.constexpr, HALF: gl.constexpr, PART: gl.constexpr, result, c_tiles, turn, target, work, tile, own_row,
    row, row_end, col, n,
):  # fmt: skip
    """The result of some columns: to shared memory, for the storer; or past it, with a mask or with what peers sent.

    PART: the first of its rectangles. row: where the result begins. own_row: from which row on it is the tile's
    (tiles.rows_ahead).
    """
    ROWS: gl.constexpr = result.shape[0]
    COLS: gl.constexpr = result.shape[1]
    MANY: gl.constexpr = COLS // c_tiles.first.type.shape[2]
    DTYPE: gl.constexpr = c_tiles.first.dtype
    EPILOGUE: gl.constexpr = traits.epilogue
    layout: gl.constexpr = result.type.layout
    table, ends, peers = work.queue.table, work.ends, work.peers
    gl.static_assert(traits.addends > 0 or peers.everyone is None)  # `store_sum` has no mask of rows ahead
    if work.sums.tiles is not None:
        if read_column(table, tile, PLACE) != ADDS_NOTHING:
            result += gl.where(hear_of_addends(work.sums, turn) == 1, 0.0, float("nan"))
            addend = side_by_side(c_tiles, HALF, PART, MANY, 2, False)
            result += addend.load(layout).to(gl.float32)
            if does(EPILOGUE, SUM):
                if read_column(table, tile, FINISHES) != 0:
                    result = finished_by_parts(
                        result, None, ends.inputs, None, row, row_end, col, n, 0, EPILOGUE, SUM
                    )  # fmt: skip
    if traits.addends > 0 and work.sums.tiles is None and read_column(table, tile, PLACE) != ADDS_NOTHING:
        result += gl.where(hear_of_addends(work.sums, turn) == 1, 0.0, float("nan"))
        store_sum(
            result, target, ends, work.sums.addends, peers, table, tile, row, row_end, col, n, traits.addends, EPILOGUE
        )
    elif traits.weights == EXPERTS:
        result = end_rows(result, work.experts, row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)), row_end)
        side_by_side(c_tiles, HALF, PART, MANY, 2, False).store(result.to(DTYPE))
        fence_async_shared()
    elif own_row + ROWS > row_end and peers.everyone is not None:
        store_sum(result, target, ends, None, peers, table, tile, row, row_end, col, n, 0, EPILOGUE)
    elif own_row + ROWS > row_end:
        rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        cols = col + gl.arange(0, COLS, layout=gl.SliceLayout(0, layout))
        inside = ((rows >= own_row) & (rows < row_end))[:, None] & (cols < n)[None, :]
        gl.store(target + rows.to(gl.int64)[:, None] * n + cols[None, :], result.to(DTYPE), mask=inside)
        block_barrier()  # one thread arrives for all: their stores come first
    else:
        side_by_side(c_tiles, HALF, PART, MANY, 2, False).store(result.to(DTYPE))
        fence_async_shared()
