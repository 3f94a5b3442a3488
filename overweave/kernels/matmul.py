"""The portable matmul: `out = a @ b`, tile by tile in the order of a table, waiting and signalling where it says.

    a [m, k], from one of two places: the own shard, read in place, or the workspace, filled by peers
    b [k, n], in either memory layout      out [m, n], stored in out's dtype; sums are fp32
    b_1 and out_1, b_2 and out_2: further weights, of other n, and their products: `TileRow.weight` says whose a tile is
    b_1 alone: the gate, of b's shape (kernels/epilogue.py)

One program holds one tile at a time. Prologue: claim a row of the table, wait for its signals. Main loop: bulk-tensor
loads, tensor cores. Epilogue: masked store, one signal; a tile with addends waits for them there and stores the sum
(kernels/tile_end.py). Waits stand outside the pipelined loop, which must stay nested: flattening or
automatic warp specialisation lose the pipeline or the signals on Triton 3.6. A tile of half the columns
(`TileRow.width`) takes as long as a whole one here.

Alone on one GPU it is an ordinary matmul: a table without waits and signals (`Matmul` in
runtime/kernel_calls/matmul.py).
SOURCE: Flux algorithms 1 and 2 (waits in the prologue, signals in the epilogue).
"""

import triton
import triton.language as tl

from overweave.kernels.epilogue import ALL, PART, does, finished, scales_beside
from overweave.kernels.experts import end_rows, gathered_rows, is_sound, stored_rows, tiles_of
from overweave.kernels.tile_end import (
    EXPERTS,
    columns_before,
    finish_stored_tile,
    of_weight,
    store_sum,
    target_at,
    wait_for_addends,
    weight_of,
)
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
    SHIFT,
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
    experts,
    queue,
    protocol,
    k,
    traits: tl.constexpr,
):
    """Tuples and traits: kernels/arguments.py. addends: int64 `[operations, traits.addends]`."""
    BLOCK_N: tl.constexpr = b.block_shape[-2] if traits.b_is_transposed else b.block_shape[-1]
    table, claims, trace, tiles = queue
    tiles = tiles_of(tiles, traits.weights)

    tile = claim_tile(claims)
    while tile < tiles:
        # Prologue.
        record_time(trace, tile, CLAIMED, traits.traced)
        verdict = wait_for_tile(
            table, tile, protocol.signals, protocol.words, protocol.limits, protocol.world_size
        )  # fmt: skip
        record_time(trace, tile, READY, traits.traced)
        row = read_column(table, tile, ROW)
        row_end = read_column(table, tile, ROW_END)
        col = read_column(table, tile, COL, BLOCK_N)
        source_row = read_column(table, tile, SOURCE_ROW)
        width = read_column(table, tile, WIDTH, 16)

        # Main loop.
        a = a_shard
        if traits.two_sources:
            if read_column(table, tile, SOURCE) != FROM_OWN_SHARD:
                a = a_workspace
        weight = weight_of(table, tile, traits.weights)
        target = of_weight(weight, products.out, products.out_1, products.out_2, traits.weights)
        if products.total is not None:
            target = tl.where(read_column(table, tile, INTO) == 0, target, products.total)
        if peers.places is not None:
            target = target_at(target, table, tile, peers)
        cols_end = of_weight(weight, products.n, products.n_1, products.n_2, traits.weights)
        factor = of_weight(weight, b, b_1, b_2, traits.weights)
        from_col = col + read_column(table, tile, SHIFT, 16)
        if traits.weights == EXPERTS:
            verdict &= is_sound(table, tile)
        accumulator, gate = multiply_tile(traits, a, factor, b_1, experts, weight, source_row, row_end, from_col, k)
        accumulator += tl.where(verdict == 1, 0.0, float("nan"))

        # Epilogue.
        end_tile(
            traits, accumulator, gate, verdict, ends, target, products, addends, peers, experts, queue, protocol, tile,
            row, row_end, col, width, cols_end, weight,
        )  # fmt: skip
        record_time(trace, tile, STORED, traits.traced)
        tile = claim_tile(claims)


@triton.jit
def multiply_tile(traits: tl.constexpr, a, b, gate, experts, weight, row, row_end, col, k):
    """`a[row:] @ b[:, col:]` of a tile in fp32, and of a gated one the same by `gate`. Rows and
    columns beyond the matrices read as zero. weight: of experts, which.
    """
    BLOCK_M: tl.constexpr = a.block_shape[0]
    BLOCK_K: tl.constexpr = a.block_shape[1]
    BLOCK_N: tl.constexpr = b.block_shape[-2] if traits.b_is_transposed else b.block_shape[-1]
    if traits.gathers:
        at, is_known = gathered_rows(experts, row + tl.arange(0, BLOCK_M), row_end)
        WORD: tl.constexpr = 16 * 8 // a.dtype.primitive_bitwidth  # rows are whole words of 16 bytes
        steps, whole = tl.arange(0, BLOCK_K), tl.cdiv(k, WORD) * WORD
        beginnings = experts.source + at[:, None] * (experts.stride // WORD * WORD) + steps[None, :]
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if traits.is_gated:
        gate_accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for depth in range(0, k, BLOCK_K):
        if traits.gathers:
            a_tile = tl.load(beginnings + depth, mask=is_known[:, None] & (steps < whole - depth)[None, :], other=0.0)
        else:
            a_tile = a.load([row, depth])
        b_tile = load_factor(traits, b, weight, depth, col)
        if traits.is_gated:
            gate_tile = load_factor(traits, gate, weight, depth, col)
        accumulator = multiply_step(traits, a_tile, b_tile, accumulator)
        if traits.is_gated:
            gate_accumulator = multiply_step(traits, a_tile, gate_tile, gate_accumulator)
    if not traits.is_gated:
        gate_accumulator = accumulator
    return accumulator, gate_accumulator


@triton.jit
def load_factor(traits: tl.constexpr, b, weight, depth, col):
    """A step of k of a weight's columns."""
    if traits.weights == EXPERTS:
        # An expert is a plane of the tensor: beyond its rows and columns lies nothing, not the next one.
        if traits.b_is_transposed:
            b_tile = b.load([weight, col, depth]).reshape(b.block_shape[1], b.block_shape[2]).T
        else:
            b_tile = b.load([weight, depth, col]).reshape(b.block_shape[1], b.block_shape[2])
    elif traits.b_is_transposed:
        b_tile = b.load([col, depth]).T
    else:
        b_tile = b.load([depth, col])
    return b_tile


@triton.jit
def multiply_step(traits: tl.constexpr, a_tile, b_tile, accumulator):
    """A step's product added to the sums of those before it."""
    if traits.precision == "fp8":
        # SOURCE: DeepGEMM. Hopper's tensor cores add products of fp8 in about 14 bits: not beyond one step.
        accumulator += tl.dot(a_tile, b_tile)
    else:
        accumulator = tl.dot(a_tile, b_tile, accumulator, input_precision=traits.precision)
    return accumulator


@triton.jit
def end_tile(
    traits: tl.constexpr, value, gate, verdict, ends, target, products, addends, peers, experts, queue, protocol, tile,
    row, row_end, col, width, cols_end, weight,
):  # fmt: skip
    """What a tile does with its sums: finishes, stores and announces them. gate: those of its second product."""
    table, trace = queue.table, queue.trace
    BLOCK_M: tl.constexpr = value.shape[0]
    BLOCK_N: tl.constexpr = value.shape[1]
    rows = row + tl.arange(0, BLOCK_M)
    cols = col + tl.arange(0, BLOCK_N)
    col_end = col + tl.where(width == 0, BLOCK_N, width)  # compared apart from n: their minimum hides its divisors
    STAGES: tl.constexpr = PART if traits.addends > 0 else ALL
    if does(traits.epilogue, STAGES):
        before = 0
        if traits.weights != 1:
            before = columns_before(weight, products.n, products.n_1, traits.weights)
        scales = scales_beside(ends, table, tile, row, traits.epilogue)
        value = finished(
            value, gate, ends.inputs, scales, rows, row_end, cols, cols_end, before, traits.epilogue, STAGES
        )  # fmt: skip
    if traits.addends > 0 and read_column(table, tile, PLACE) != ADDS_NOTHING:
        record_time(trace, tile, MULTIPLIED, traits.traced)
        verdict &= wait_for_addends(table, tile, protocol)
        record_time(trace, tile, RECEIVED, traits.traced)
        value += tl.where(verdict == 1, 0.0, float("nan"))
        store_sum(
            value, target, ends, addends, peers, table, tile, row, row_end, col, col_end, products.n, traits.addends,
            traits.epilogue,
        )  # fmt: skip
    elif traits.weights == EXPERTS:
        value = end_rows(value, experts, rows, row_end)
        at, is_stored = stored_rows(experts, rows, row_end)
        inside = is_stored[:, None] & ((cols < col_end) & (cols < cols_end))[None, :]
        places = target + at[:, None] * (cols_end // 8 * 8) + cols[None, :]  # whole words: known to be multiples
        tl.store(places, value.to(target.dtype.element_ty), mask=inside)
    else:
        inside = (rows < row_end)[:, None] & ((cols < col_end) & (cols < cols_end))[None, :]
        places = target + rows.to(tl.int64)[:, None] * cols_end + cols[None, :]
        tl.store(places, value.to(target.dtype.element_ty), mask=inside)
    if peers.places is not None:
        finish_stored_tile(table, tile, peers, verdict, protocol.world_size)
    else:
        finish_tile(table, tile, protocol.signals, verdict)
