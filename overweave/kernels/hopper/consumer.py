"""A consumer warpgroup of the Hopper matmul: computes its half of each tile, from shared memory to shared memory.

A tile is up to `traits.split_n` TMA boxes of PART_N columns, side by side. Boxes that are adjacent in shared memory
have the bytes of one wide box, since rows of at most 128 bytes are what swizzled blocks are made of; so a tile takes as
few accumulators as powers of two allow: 192 columns take two.
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
    apply_epilogue_by_columns,
    apply_steps,
    has_steps,
    reads_layout,
    row_scale_base,
)
from overweave.kernels.experts import finish_expert_rows
from overweave.kernels.hopper.shared import LAST, TILE_MASK, VOID_BIT, missing_parts, receive_message
from overweave.kernels.hopper.start import send_claim, send_claim_traced
from overweave.kernels.hopper.tile_end import column_half, receive_verdict, store_sum
from overweave.kernels.hopper.tiles import adjacent_boxes, consumer_position, is_short_tile, may_be_short, power_of_two
from overweave.kernels.tile_end import EXPERTS, column_offset, output_pointer, select_by_weight, weight_index
from overweave.lang.tile_table import ADDS_NOTHING, FINISHES, INTO, MULTIPLIED, PLACE, read_column, record_time


@gluon.jit
def apply_stages(
    traits: gl.constexpr, value, gate, table, tile, epilogue_args, row, row_end, col, outputs, cols_end, STAGES:
    gl.constexpr
):  # fmt: skip
    """Apply some stages of the epilogue to columns of a tile; return them. gate: the second product, or None.

    cols_end: width of the B matrix that the tile multiplies by.
    """
    if has_steps(traits.epilogue, STAGES):
        col_offset = 0
        if traits.weights != 1:
            col_offset = column_offset(
                weight_index(table, tile, traits.weights), outputs.n, outputs.n_1, traits.weights
            )
        row_scales = row_scale_base(epilogue_args, table, tile, None, traits.epilogue)
        value = apply_epilogue_by_columns(
            value, gate, epilogue_args.inputs, row_scales, row, row_end, col, cols_end, col_offset, traits.epilogue,
            STAGES
        )  # fmt: skip
    return value


@gluon.jit
def combine_gate(
    traits: gl.constexpr, result, rest_result, PART_N: gl.constexpr, table, tile, epilogue_args, row, row_end, col,
    outputs, cols_end
):  # fmt: skip
    """Combine a consumer's two products, value and gate, into one: the PART and PAIR stages of the epilogue.

    Both are halves of one accumulator; of fp8, whose step product needs registers too, `rest_result` is the second.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART_N, 16])
    PAIRS: gl.constexpr = PART | PAIR
    value, gate = result, rest_result
    if result.shape[1] > PART_N:
        value, gate = column_half(result, False), column_half(result, True)
    if reads_layout(traits.epilogue, PAIRS, ""):
        value = apply_stages(
            traits, value, gate, table, tile, epilogue_args, row, row_end, col, outputs, cols_end, PAIRS
        )
    else:
        value = apply_steps(value, gate, None, Elements(None, None, None, 0, 0, 0, None), traits.epilogue, PAIRS)
    return gl.convert_layout(value, layout)  # no instruction: both layouts keep an element in its thread


FP8_COLUMNS = 128  # of an accumulator: leaves registers for the product of one step


@gluon.constexpr_function
def accumulator_parts(parts, part_n, is_fp8):
    """Return how many of `parts` TMA boxes the first accumulator takes: a power of two, of fp8 FP8_COLUMNS at most."""
    most = min(parts, max(1, FP8_COLUMNS // part_n)) if is_fp8 else parts
    return power_of_two(most)


@gluon.jit
def consume(traits: gl.constexpr, CONSUMER: gl.constexpr, claimed, start_ns, claim, stages, results, messages, work):
    """Consumer partition: compute its half of every tile of the message queue.

    claimed: the first claim, in flight, if this consumer passes it to the producer; else None. start_ns: of a traced
    kernel, when the program began.
    """
    if claimed is not None:
        if traits.traced:
            send_claim_traced(claimed, claim, work.queue, start_ns)
        else:
            send_claim(claimed, claim)
    SPLIT_N: gl.constexpr = traits.split_n
    step = 0
    iteration = 0
    message = receive_message(messages, iteration)
    while message != LAST:
        has_rows = 1
        if CONSUMER == 1 and may_be_short(traits):
            has_rows = 1 - is_short_tile(
                traits, work.queue.table, message & TILE_MASK, results.tiles.first.type.shape[1]
            )
        for missing in gl.static_range(SPLIT_N):
            if (SPLIT_N == 1 or missing_parts(message) == missing) and has_rows == 1:
                step = consume_tile(
                    traits, CONSUMER, SPLIT_N - missing, message, iteration, step, stages, results, work
                )
        if CONSUMER == 1 and may_be_short(traits):
            if has_rows == 0:
                step = skip_tile(CONSUMER, iteration, step, stages, results, work)
        iteration += 1
        message = receive_message(messages, iteration)


@gluon.jit
def skip_tile(CONSUMER: gl.constexpr, iteration, step, stages, results, work):
    """Skip a tile that has no rows for this consumer: release its stages and its result slot; return the next step."""
    STAGES: gl.constexpr = stages.full.type.shape[0]
    for _ in range(gl.cdiv(work.k, stages.a.type.shape[2])):
        mbarrier.wait(stages.full.index(step % STAGES), (step // STAGES) & 1)
        mbarrier.arrive(stages.empty.index(step % STAGES), count=1)
        step += 1
    mbarrier.wait(results.empty.index(CONSUMER), (iteration & 1) ^ 1)
    mbarrier.arrive(results.full.index(CONSUMER), count=1)
    return step


@gluon.jit
def consume_tile(
    traits: gl.constexpr, CONSUMER: gl.constexpr, PARTS: gl.constexpr, message, iteration, step, stages, results, work
):  # fmt: skip
    """Compute one consumer's half of a tile of PARTS TMA boxes, give it to the storer; return the next pipeline step.

    Waits for the tile's stages (`multiply`), and for the storer to free the result slot (`finish_tile_half`).
    """
    table, outputs = work.queue.table, work.outputs
    PART_M: gl.constexpr = results.tiles.first.type.shape[1]
    PART_N: gl.constexpr = results.tiles.first.type.shape[2]
    PRODUCTS: gl.constexpr = 2 if traits.is_gated else PARTS  # TMA boxes of B that are multiplied
    WIDE: gl.constexpr = accumulator_parts(PRODUCTS, PART_N, stages.a.dtype.is_fp8())
    HAS_REST: gl.constexpr = PRODUCTS > WIDE
    FIRST_PARTS: gl.constexpr = 1 if traits.is_gated else WIDE
    ROW_OFFSET: gl.constexpr = 0 if traits.in_columns else CONSUMER * PART_M
    COL_OFFSET: gl.constexpr = CONSUMER * PART_N if traits.in_columns else 0
    tile = message & TILE_MASK
    own_row, row, row_end, col, weight = consumer_position(traits, table, tile, ROW_OFFSET, COL_OFFSET, PART_M)
    target = output_of_tile(table, tile, weight, outputs, work.peers, traits.weights)
    cols_end = select_by_weight(weight, outputs.n, outputs.n_1, outputs.n_2, traits.weights)
    result, rest_result, step = multiply(traits, CONSUMER, PRODUCTS, PART_N, step, stages, work.k)
    result += gl.where(message < VOID_BIT, 0.0, float("nan"))
    if HAS_REST:
        rest_result += gl.where(message < VOID_BIT, 0.0, float("nan"))
    finish_tile_half(
        traits, CONSUMER, PARTS, FIRST_PARTS, result, rest_result, iteration, results, target, work, tile, own_row, row,
        row_end, col, cols_end,
    )  # fmt: skip
    mbarrier.arrive(results.full.index(CONSUMER), count=1)
    return step


@gluon.jit
def multiply(
    traits: gl.constexpr, CONSUMER: gl.constexpr, PARTS: gl.constexpr, PART_N: gl.constexpr, step, stages, depth
):  # fmt: skip
    """Main loop. Return (accumulator of the first boxes, of the rest or the first again, next pipeline step).

    Tensor cores accumulate fp8 in about 14 bits: each step's product is added in fp32 by CUDA cores, while the other
    consumer's is computed. SOURCE: DeepGEMM.
    """
    STAGES: gl.constexpr = traits.stages
    A_PARTS: gl.constexpr = stages.a.type.shape[0] // STAGES
    A_INDEX: gl.constexpr = 0 if traits.in_columns else CONSUMER
    B_INDEX: gl.constexpr = CONSUMER if traits.in_columns else 0
    PART_M: gl.constexpr = stages.a.type.shape[1]
    IS_FP8: gl.constexpr = stages.a.dtype.is_fp8()
    WIDE: gl.constexpr = accumulator_parts(PARTS, PART_N, IS_FP8)
    REST_PARTS: gl.constexpr = PARTS - WIDE
    sums = zero_accumulator(PART_M, WIDE * PART_N, IS_FP8)
    if REST_PARTS > 0:
        rest_sums = zero_accumulator(PART_M, REST_PARTS * PART_N, IS_FP8)
    for index in range(gl.cdiv(depth, stages.a.type.shape[2])):
        stage = step % STAGES
        mbarrier.wait(stages.full.index(stage), (step // STAGES) & 1)
        if traits.gathers:
            fence_async_shared()  # gathered rows were written by the generic proxy, wgmma reads by the async proxy
        a_tile = stages.a.index(A_PARTS * stage + A_INDEX)
        if IS_FP8:
            sums += multiply_fp8_step(a_tile, columns_of_b(traits, stages, stage, B_INDEX, WIDE))
            if REST_PARTS > 0:
                rest_sums += multiply_fp8_step(a_tile, columns_of_b(traits, stages, stage, B_INDEX + WIDE, REST_PARTS))
            mbarrier.arrive(stages.empty.index(stage), count=1)
        else:
            sums = warpgroup_mma(a_tile, columns_of_b(traits, stages, stage, B_INDEX, WIDE), sums, is_async=True)
            if REST_PARTS > 0:
                b_rest = columns_of_b(traits, stages, stage, B_INDEX + WIDE, REST_PARTS)
                rest_sums = warpgroup_mma(a_tile, b_rest, rest_sums, is_async=True)
                sums, rest_sums = warpgroup_mma_wait(2, (sums, rest_sums))
                rest_sums = warpgroup_mma_init(rest_sums)
            else:
                sums = warpgroup_mma_wait(1, (sums,))
            sums = warpgroup_mma_init(sums)
            mbarrier.arrive(stages.empty.index((step + STAGES - 1) % STAGES), count=1, pred=index > 0)
        step += 1
    result = sums
    if not IS_FP8:
        result = warpgroup_mma_wait(0, (sums,))
    rest_result = result
    if REST_PARTS > 0:
        rest_result = rest_sums
        if not IS_FP8:
            rest_result = warpgroup_mma_wait(0, (rest_sums,))
    if not IS_FP8:
        mbarrier.arrive(stages.empty.index((step + STAGES - 1) % STAGES), count=1)
    return result, rest_result, step


@gluon.jit
def zero_accumulator(ROWS: gl.constexpr, COLS: gl.constexpr, IS_FP8: gl.constexpr):
    """Return a zero accumulator: of wgmma, or of fp8 ordinary registers."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 32 if IS_FP8 else 16])
    sums = gl.zeros((ROWS, COLS), gl.float32, layout)
    if not IS_FP8:
        sums = warpgroup_mma_init(sums)
    return sums


@gluon.jit
def multiply_fp8_step(a_tile, b_tile):
    """Return the product of one step of k of fp8 operands, computed to its end."""
    zeros = warpgroup_mma_init(zero_accumulator(a_tile.shape[0], b_tile.shape[1], True))
    return warpgroup_mma_wait(0, (warpgroup_mma(a_tile, b_tile, zeros, use_acc=False, is_async=True),))


@gluon.jit
def columns_of_b(traits: gl.constexpr, stages, stage, PART: gl.constexpr, COUNT: gl.constexpr):
    """Return `[BLOCK_K, COUNT * PART_N]` of b: COUNT TMA boxes of a stage, from box PART on."""
    b_tile = adjacent_boxes(stages.b, stage, PART, COUNT, traits.stages, traits.b_is_transposed)
    return b_tile.permute((1, 0)) if traits.b_is_transposed else b_tile


@gluon.jit
def output_of_tile(table, tile, weight, outputs, peers, WEIGHTS: gl.constexpr):
    """Return the pointer to the output that a tile writes, translated to the rank that stores it."""
    target = select_by_weight(weight, outputs.out, outputs.out_1, outputs.out_2, WEIGHTS)
    if outputs.total is not None:
        target = gl.where(read_column(table, tile, INTO) == 0, target, outputs.total)
    if peers.peer_table is not None:
        target = output_pointer(target, table, tile, peers)
    return target


@gluon.jit
def finish_tile_half(
    traits: gl.constexpr, CONSUMER: gl.constexpr, PARTS: gl.constexpr, FIRST_PARTS: gl.constexpr, result, rest_result,
    iteration, results, target, work, tile, own_row, row, row_end, col, cols_end,
):  # fmt: skip
    """Apply the epilogue to a consumer's accumulators; store them once the storer has freed its result slot.

    result: the first FIRST_PARTS of PARTS TMA boxes, or with a gate both products; rest_result: the other boxes.
    """
    table, epilogue_args, outputs = work.queue.table, work.epilogue_args, work.outputs
    PART_N: gl.constexpr = results.tiles.first.type.shape[2]
    STAGES: gl.constexpr = PART if traits.addends > 0 else SUM if traits.is_gated else ALL
    if traits.is_gated:
        result = combine_gate(
            traits, result, rest_result, PART_N, table, tile, epilogue_args, row, row_end, col, outputs, cols_end
        )  # fmt: skip
    result = apply_stages(
        traits, result, None, table, tile, epilogue_args, row, row_end, col, outputs, cols_end, STAGES
    )
    if PARTS > FIRST_PARTS:
        rest_col = col + FIRST_PARTS * PART_N
        if traits.addends == 0:  # with addends, after the first half is stored: registers do not hold both
            rest_result = apply_stages(
                traits, rest_result, None, table, tile, epilogue_args, row, row_end, rest_col, outputs, cols_end, STAGES
            )  # fmt: skip
    if CONSUMER == 0:
        record_time(work.queue.trace, tile, MULTIPLIED, traits.traced and traits.addends > 0)
    mbarrier.wait(results.empty.index(CONSUMER), (iteration & 1) ^ 1)  # the storer is done with the last tile
    store_result(
        traits, CONSUMER, 0, result, results.tiles, iteration, target, work, tile, own_row, row, row_end, col, cols_end
    )
    if PARTS > FIRST_PARTS:
        if traits.addends > 0:
            rest_result = apply_stages(
                traits, rest_result, None, table, tile, epilogue_args, row, row_end, rest_col, outputs, cols_end, STAGES
            )  # fmt: skip
        store_result(
            traits, CONSUMER, FIRST_PARTS, rest_result, results.tiles, iteration, target, work, tile, own_row, row,
            row_end, rest_col, cols_end,
        )  # fmt: skip


@gluon.jit
def store_result(
    traits: gl.constexpr, CONSUMER: gl.constexpr, PART: gl.constexpr, result, c_tiles, iteration, target, work, tile,
    own_row, row, row_end, col, n,
):  # fmt: skip
    """Store some columns of a result: to shared memory for the storer; to `target` if masked, or with addends.

    PART: the first of its TMA boxes. row: first row of the result. own_row: first row that belongs to the tile
    (tiles.row_shift). n: columns of the output.
    """
    ROWS: gl.constexpr = result.shape[0]
    COLS: gl.constexpr = result.shape[1]
    COUNT: gl.constexpr = COLS // c_tiles.first.type.shape[2]
    DTYPE: gl.constexpr = c_tiles.first.dtype
    EPILOGUE: gl.constexpr = traits.epilogue
    layout: gl.constexpr = result.type.layout
    table, epilogue_args, peers = work.queue.table, work.epilogue_args, work.peers
    gl.static_assert(traits.addends > 0 or peers.spread_ranks is None)  # `store_sum` cannot mask rows before own_row
    if work.sums.tiles is not None:
        if read_column(table, tile, PLACE) != ADDS_NOTHING:
            result += gl.where(receive_verdict(work.sums, iteration) == 1, 0.0, float("nan"))
            addend = adjacent_boxes(c_tiles, CONSUMER, PART, COUNT, 2, False)
            result += addend.load(layout).to(gl.float32)
            if has_steps(EPILOGUE, SUM):
                if read_column(table, tile, FINISHES) != 0:
                    result = apply_epilogue_by_columns(
                        result, None, epilogue_args.inputs, None, row, row_end, col, n, 0, EPILOGUE, SUM
                    )  # fmt: skip
    if traits.addends > 0 and work.sums.tiles is None and read_column(table, tile, PLACE) != ADDS_NOTHING:
        result += gl.where(receive_verdict(work.sums, iteration) == 1, 0.0, float("nan"))
        store_sum(
            result,
            target,
            epilogue_args,
            work.sums.addends,
            peers,
            table,
            tile,
            row,
            row_end,
            col,
            n,
            traits.addends,
            EPILOGUE,
        )
    elif traits.weights == EXPERTS:
        result = finish_expert_rows(
            result, work.experts, row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)), row_end
        )
        adjacent_boxes(c_tiles, CONSUMER, PART, COUNT, 2, False).store(result.to(DTYPE))
        fence_async_shared()
    elif own_row + ROWS > row_end and peers.spread_ranks is not None:
        store_sum(result, target, epilogue_args, None, peers, table, tile, row, row_end, col, n, 0, EPILOGUE)
    elif own_row + ROWS > row_end:
        rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        cols = col + gl.arange(0, COLS, layout=gl.SliceLayout(0, layout))
        inside = ((rows >= own_row) & (rows < row_end))[:, None] & (cols < n)[None, :]
        gl.store(target + rows.to(gl.int64)[:, None] * n + cols[None, :], result.to(DTYPE), mask=inside)
        block_barrier()  # one thread arrives for all: after their stores
    else:
        adjacent_boxes(c_tiles, CONSUMER, PART, COUNT, 2, False).store(result.to(DTYPE))
        fence_async_shared()
