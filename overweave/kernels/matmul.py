"""The portable matmul: `out = a @ b`, tile by tile in the order of a table, waiting and signalling where it says.

    a [m, k], from one of two places: the own shard, read in place, or the workspace, filled by peers
    b [k, n], in either memory layout      out [m, n], stored in out's dtype; sums are fp32
    b_1 and out_1, b_2 and out_2: further weights, of other n, and their products: `TileRow.weight` says whose a tile is
    b_1 alone: the gate, of b's shape (kernels/epilogue.py)

One program holds one tile at a time. Prologue: claim a row of the table, wait for its signals. Main loop: bulk-tensor
loads, tensor cores. Epilogue: masked store, one signal; a tile with addends waits for them there and stores the sum
(kernels/received.py). Waits stand outside the pipelined loop, which must stay nested: flattening or
automatic warp specialisation lose the pipeline or the signals on Triton 3.6. A tile of half the columns
(`TileRow.width`) takes as long as a whole one here. A tile that is dealt out along k ends in kernels/shares.py.

Alone on one GPU it is an ordinary matmul: a table without waits and signals (`Matmul` in
runtime/kernel_calls/matmul.py).
SOURCE: Flux algorithms 1 and 2 (waits in the prologue, signals in the epilogue).
"""

import triton
import triton.language as tl

from overweave.kernels.epilogue import BIAS, BY_ROWS, ENDINGS, GATE, SCALES, finished, scaled_and_gated, scales_of
from overweave.kernels.received import store_sum, wait_for_addends
from overweave.kernels.shares import LEFT_OUT, SUMMED, end_share, k_range
from overweave.kernels.stored import finish_stored_tile, target_at
from overweave.kernels.weights import columns_before, of_weight, weight_of
from overweave.lang.tile_table import (
    ADDS_NOTHING,
    CLAIMED,
    COL,
    FROM_OWN_SHARD,
    INTO,
    MULTIPLIED,
    PLACE,
    READY,
    RECEIVED,
    ROW,
    ROW_END,
    SOURCE,
    SOURCE_ROW,
    STORED,
    WIDTH,
    claim_tile,
    finish_tile,
    read_column,
    record_time,
    wait_for_tile,
)


@triton.jit
def multiply_tile(a, b, row, col, low, high, PRECISION: tl.constexpr, B_IS_TRANSPOSED: tl.constexpr):
    """`a[row:, low:high] @ b[low:high, col:]` of a tile in fp32. Rows and columns beyond the matrices read as zero."""
    BLOCK_M: tl.constexpr = a.block_shape[0]
    BLOCK_K: tl.constexpr = a.block_shape[1]
    BLOCK_N: tl.constexpr = b.block_shape[0] if B_IS_TRANSPOSED else b.block_shape[1]
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for depth in range(low, high, BLOCK_K):
        a_tile = a.load([row, depth])
        if B_IS_TRANSPOSED:
            b_tile = b.load([col, depth]).T
        else:
            b_tile = b.load([depth, col])
        if PRECISION == "fp8":
            # SOURCE: DeepGEMM. Hopper's tensor cores add products of fp8 in about 14 bits: not beyond one step.
            accumulator += tl.dot(a_tile, b_tile)
        else:
            accumulator = tl.dot(a_tile, b_tile, accumulator, input_precision=PRECISION)
    return accumulator


@triton.jit
def multiply_tile_by_both(a, b, gate, row, col, low, high, PRECISION: tl.constexpr, B_IS_TRANSPOSED: tl.constexpr):
    """`multiply_tile` by two weights of one shape: each tile of a is loaded once."""
    BLOCK_M: tl.constexpr = a.block_shape[0]
    BLOCK_K: tl.constexpr = a.block_shape[1]
    BLOCK_N: tl.constexpr = b.block_shape[0] if B_IS_TRANSPOSED else b.block_shape[1]
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    gate_accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for depth in range(low, high, BLOCK_K):
        a_tile = a.load([row, depth])
        if B_IS_TRANSPOSED:
            b_tile = b.load([col, depth]).T
            gate_tile = gate.load([col, depth]).T
        else:
            b_tile = b.load([depth, col])
            gate_tile = gate.load([depth, col])
        if PRECISION == "fp8":  # as in `multiply_tile`
            accumulator += tl.dot(a_tile, b_tile)
            gate_accumulator += tl.dot(a_tile, gate_tile)
        else:
            accumulator = tl.dot(a_tile, b_tile, accumulator, input_precision=PRECISION)
            gate_accumulator = tl.dot(a_tile, gate_tile, gate_accumulator, input_precision=PRECISION)
    return accumulator, gate_accumulator


@triton.jit
def gate_tile(value, gate, ends, table, tile, row, row_end, col, n, EPILOGUE: tl.constexpr):
    """A tile's two products made one, each scaled by its own before."""
    rows, cols = row + tl.arange(0, value.shape[0]), col + tl.arange(0, value.shape[1])
    beside = ends.scale_x
    if SCALES & EPILOGUE:
        is_own = read_column(table, tile, SOURCE) == FROM_OWN_SHARD
        source_row = read_column(table, tile, SOURCE_ROW)
        beside = scales_of(ends.scale_x, ends.scales, is_own, row, source_row, EPILOGUE)
    return scaled_and_gated(value, gate, beside, ends.scale_w, rows, row_end, cols, n, EPILOGUE)


@triton.jit
def end_tile(
    value, verdict, ends, target, products, addends, peers, queue, protocol, tile, row, row_end, col, width, cols_end,
    weight, TRACED: tl.constexpr, EPILOGUE: tl.constexpr, ADDENDS: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """What a tile does with its sums: finishes, stores and announces them."""
    table, trace = queue.table, queue.trace
    BLOCK_M: tl.constexpr = value.shape[0]
    BLOCK_N: tl.constexpr = value.shape[1]
    rows = row + tl.arange(0, BLOCK_M)
    cols = col + tl.arange(0, BLOCK_N)
    col_end = col + tl.where(width == 0, BLOCK_N, width)  # compared apart from n: their minimum hides its divisors
    OF_PRODUCT: tl.constexpr = EPILOGUE if ADDENDS == 0 else SCALES & EPILOGUE
    if OF_PRODUCT:
        is_own = read_column(table, tile, SOURCE) == FROM_OWN_SHARD
        source_row = read_column(table, tile, SOURCE_ROW)
        beside = scales_of(ends.scale_x, ends.scales, is_own, row, source_row, OF_PRODUCT)
        own_bias, own_scales = ends.bias, ends.scale_w
        if WEIGHTS > 1:
            before = columns_before(weight, products.n, products.n_1, WEIGHTS)
            if BIAS & OF_PRODUCT:
                own_bias = own_bias + before
            if BY_ROWS & OF_PRODUCT:
                own_scales = own_scales + before
        value = finished(value, own_bias, ends.residual, beside, own_scales, rows, row_end, cols, cols_end, OF_PRODUCT)
    if ADDENDS > 0 and read_column(table, tile, PLACE) != ADDS_NOTHING:
        record_time(trace, tile, MULTIPLIED, TRACED)
        verdict &= wait_for_addends(table, tile, protocol)
        record_time(trace, tile, RECEIVED, TRACED)
        value += tl.where(verdict == 1, 0.0, float("nan"))
        store_sum(
            value, target, ends, addends, peers, table, tile, row, row_end, col, col_end, products.n, ADDENDS,
            ENDINGS & EPILOGUE,
        )  # fmt: skip
    else:
        inside = (rows < row_end)[:, None] & ((cols < col_end) & (cols < cols_end))[None, :]
        places = target + rows.to(tl.int64)[:, None] * cols_end + cols[None, :]
        tl.store(places, value.to(target.dtype.element_ty), mask=inside)
    if peers.places is not None:
        finish_stored_tile(table, tile, peers, verdict, protocol.world_size)
    else:
        finish_tile(table, tile, protocol.signals, verdict)


@triton.jit
def matmul_kernel(
    a_shard,
    a_workspace,
    b,
    b_1,
    b_2,
    products,
    ends,
    addends,
    peers,
    shares,
    queue,
    protocol,
    k,
    PRECISION: tl.constexpr,
    B_IS_TRANSPOSED: tl.constexpr,
    TWO_SOURCES: tl.constexpr,
    TRACED: tl.constexpr,
    EPILOGUE: tl.constexpr,
    ADDENDS: tl.constexpr,
    WEIGHTS: tl.constexpr,
    SPLIT_K: tl.constexpr,
):
    """Tuples: kernels/arguments.py; shares: memory/shares.Shares, or None. addends: int64 `[operations, ADDENDS]`."""
    BLOCK_N: tl.constexpr = b.block_shape[0] if B_IS_TRANSPOSED else b.block_shape[1]
    table, claims, trace, tiles = queue

    tile = claim_tile(claims)
    while tile < tiles:
        # Prologue.
        record_time(trace, tile, CLAIMED, TRACED)
        verdict = wait_for_tile(
            table, tile, protocol.signals, protocol.words, protocol.limits, protocol.world_size
        )  # fmt: skip
        record_time(trace, tile, READY, TRACED)
        row = read_column(table, tile, ROW)
        row_end = read_column(table, tile, ROW_END)
        col = read_column(table, tile, COL, BLOCK_N)
        source_row = read_column(table, tile, SOURCE_ROW)
        width = read_column(table, tile, WIDTH, 16)

        # Main loop.
        a = a_shard
        if TWO_SOURCES:
            if read_column(table, tile, SOURCE) != FROM_OWN_SHARD:
                a = a_workspace
        weight = weight_of(table, tile, WEIGHTS)
        target = of_weight(weight, products.out, products.out_1, products.out_2, WEIGHTS)
        if products.total is not None:
            target = tl.where(read_column(table, tile, INTO) == 0, target, products.total)
        if peers.places is not None:
            target = target_at(target, table, tile, peers)
        cols_end = of_weight(weight, products.n, products.n_1, products.n_2, WEIGHTS)
        low, high = k_range(table, tile, k, a_shard.block_shape[1], SPLIT_K)
        if GATE & EPILOGUE:
            accumulator, gate = multiply_tile_by_both(a, b, b_1, source_row, col, low, high, PRECISION, B_IS_TRANSPOSED)
        else:
            factor = of_weight(weight, b, b_1, b_2, WEIGHTS)
            accumulator = multiply_tile(a, factor, source_row, col, low, high, PRECISION, B_IS_TRANSPOSED)
            gate = accumulator
        accumulator += tl.where(verdict == 1, 0.0, float("nan"))

        # Epilogue.
        told = SUMMED
        if SPLIT_K:
            told, accumulator, gate = end_share(
                accumulator, gate, (GATE & EPILOGUE) != 0, shares, table, tile, verdict
            )  # fmt: skip
            verdict = (told == SUMMED).to(tl.int32)
        if SPLIT_K == 0 or told != LEFT_OUT:
            if GATE & EPILOGUE:
                accumulator = gate_tile(accumulator, gate, ends, table, tile, row, row_end, col, products.n, EPILOGUE)
            end_tile(
                accumulator, verdict, ends, target, products, addends, peers, queue, protocol, tile, row, row_end, col,
                width, cols_end, weight, TRACED, (ENDINGS & EPILOGUE) if GATE & EPILOGUE else EPILOGUE, ADDENDS,
                WEIGHTS,
            )  # fmt: skip
        record_time(trace, tile, STORED, TRACED)
        tile = claim_tile(claims)
