"""The portable matmul kernel: `out = a @ b`, persistent, tiles in the order of a table that says what to wait for.

    a [m, k], from one of two matrices: the own shard, read in place, or the workspace, filled by peers
    b [k, n], in either memory layout      out [m, n], stored in out's dtype; sums are fp32
    b_1 and out_1, b_2 and out_2: further B matrices of other widths; `TileRow.weight` says which a tile multiplies by
    b_1 alone, with a gated epilogue: the gate weight, of b's shape (kernels/epilogue.py)

One program computes one tile at a time. Prologue: claim a row of the table, wait for its signals. Main loop: TMA loads,
tensor cores. Epilogue: masked store, one signal; a tile with addends waits for them there and stores the sum
(kernels/tile_end.py). Waits stand outside the pipelined loop, which must stay nested: flattening or automatic warp
specialisation lose the pipeline or the signals on Triton 3.6. A tile of half the columns (`TileRow.width`) takes as
long as a whole one here.

Alone on one GPU it is an ordinary matmul: a table without waits and signals (runtime/kernel_calls/matmul.py).
SOURCE: Flux algorithms 1 and 2 (waits in the prologue, signals in the epilogue).
"""

import triton
import triton.language as tl

from overweave.kernels.epilogue import ALL, PART, apply_epilogue, has_steps, row_scale_base
from overweave.kernels.experts import finish_expert_rows, is_valid_tile, output_rows, source_rows, tile_count
from overweave.kernels.tile_end import (
    EXPERTS,
    column_offset,
    notify_stored_tile,
    output_pointer,
    select_by_weight,
    store_sum,
    wait_for_addends,
    weight_index,
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
    outputs,
    epilogue_args,
    addends,
    peers,
    experts,
    queue,
    protocol,
    k,
    traits: tl.constexpr,
):
    """Compute all tiles of a table. Tuples and traits: kernels/arguments.py.

    addends: int64 `[operations, traits.addends]`, biased base pointers (kernels/tile_end.py).
    """
    BLOCK_N: tl.constexpr = b.block_shape[-2] if traits.b_is_transposed else b.block_shape[-1]
    table, claims, trace, tiles = queue
    tiles = tile_count(tiles, traits.weights)

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
        weight = weight_index(table, tile, traits.weights)
        target = select_by_weight(weight, outputs.out, outputs.out_1, outputs.out_2, traits.weights)
        if outputs.total is not None:
            target = tl.where(read_column(table, tile, INTO) == 0, target, outputs.total)
        if peers.peer_table is not None:
            target = output_pointer(target, table, tile, peers)
        cols_end = select_by_weight(weight, outputs.n, outputs.n_1, outputs.n_2, traits.weights)
        b_matrix = select_by_weight(weight, b, b_1, b_2, traits.weights)
        from_col = col + read_column(table, tile, SHIFT, 16)
        if traits.weights == EXPERTS:
            verdict &= is_valid_tile(table, tile)
        accumulator, gate = multiply_tile(traits, a, b_matrix, b_1, experts, weight, source_row, row_end, from_col, k)
        accumulator += tl.where(verdict == 1, 0.0, float("nan"))

        # Epilogue.
        end_tile(
            traits, accumulator, gate, verdict, epilogue_args, target, outputs, addends, peers, experts, queue,
            protocol, tile, row, row_end, col, width, cols_end, weight,
        )  # fmt: skip
        record_time(trace, tile, STORED, traits.traced)
        tile = claim_tile(claims)


@triton.jit
def multiply_tile(traits: tl.constexpr, a, b, gate, experts, weight, row, row_end, col, k):
    """Return (a[row:] @ b[:, col:], a[row:] @ gate[:, col:]) of a tile in fp32; the first one twice without a gate.

    Rows and columns beyond the matrices read as zero. weight: the expert, of a stack of B matrices. With
    `traits.gathers` rows of a are loaded by the index in `experts`.
    """
    BLOCK_M: tl.constexpr = a.block_shape[0]
    BLOCK_K: tl.constexpr = a.block_shape[1]
    BLOCK_N: tl.constexpr = b.block_shape[-2] if traits.b_is_transposed else b.block_shape[-1]
    if traits.gathers:
        rows_in, is_valid = source_rows(experts, row + tl.arange(0, BLOCK_M), row_end)
        WORD: tl.constexpr = 16 * 8 // a.dtype.primitive_bitwidth  # rows are padded to 16 bytes
        k_offsets, k_padded = tl.arange(0, BLOCK_K), tl.cdiv(k, WORD) * WORD
        row_starts = experts.source + rows_in[:, None] * (experts.source_stride // WORD * WORD) + k_offsets[None, :]
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if traits.is_gated:
        gate_accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for depth in range(0, k, BLOCK_K):
        if traits.gathers:
            a_tile = tl.load(
                row_starts + depth, mask=is_valid[:, None] & (k_offsets < k_padded - depth)[None, :], other=0.0
            )
        else:
            a_tile = a.load([row, depth])
        b_tile = load_b_tile(traits, b, weight, depth, col)
        if traits.is_gated:
            gate_tile = load_b_tile(traits, gate, weight, depth, col)
        accumulator = add_product(traits, a_tile, b_tile, accumulator)
        if traits.is_gated:
            gate_accumulator = add_product(traits, a_tile, gate_tile, gate_accumulator)
    if not traits.is_gated:
        gate_accumulator = accumulator
    return accumulator, gate_accumulator


@triton.jit
def load_b_tile(traits: tl.constexpr, b, weight, depth, col):
    """Load `b[depth:, col:]`, `[BLOCK_K, BLOCK_N]`, of one B matrix."""
    if traits.weights == EXPERTS:
        # 3-D TMA: what lies beyond an expert's matrix reads as zero, not as the next expert's.
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
def add_product(traits: tl.constexpr, a_tile, b_tile, accumulator):
    """Return accumulator + a_tile @ b_tile."""
    if traits.precision == "fp8":
        # SOURCE: DeepGEMM. Hopper's tensor cores accumulate fp8 in about 14 bits: within one step of k only.
        accumulator += tl.dot(a_tile, b_tile)
    else:
        accumulator = tl.dot(a_tile, b_tile, accumulator, input_precision=traits.precision)
    return accumulator


@triton.jit
def end_tile(
    traits: tl.constexpr, value, gate, verdict, epilogue_args, target, outputs, addends, peers, experts, queue,
    protocol, tile, row, row_end, col, width, cols_end, weight,
):  # fmt: skip
    """Apply the epilogue to a tile's product, add its addends, store it, notify. gate: the second product."""
    table, trace = queue.table, queue.trace
    BLOCK_M: tl.constexpr = value.shape[0]
    BLOCK_N: tl.constexpr = value.shape[1]
    rows = row + tl.arange(0, BLOCK_M)
    cols = col + tl.arange(0, BLOCK_N)
    col_end = col + tl.where(
        width == 0, BLOCK_N, width
    )  # compared separately with n: a minimum would lose n's divisibility
    STAGES: tl.constexpr = PART if traits.addends > 0 else ALL
    if has_steps(traits.epilogue, STAGES):
        col_offset = 0
        if traits.weights != 1:
            col_offset = column_offset(weight, outputs.n, outputs.n_1, traits.weights)
        row_scales = row_scale_base(epilogue_args, table, tile, row, traits.epilogue)
        value = apply_epilogue(
            value, gate, epilogue_args.inputs, row_scales, rows, row_end, cols, cols_end, col_offset, traits.epilogue,
            STAGES
        )  # fmt: skip
    if traits.addends > 0 and read_column(table, tile, PLACE) != ADDS_NOTHING:
        record_time(trace, tile, MULTIPLIED, traits.traced)
        verdict &= wait_for_addends(table, tile, protocol)
        record_time(trace, tile, RECEIVED, traits.traced)
        value += tl.where(verdict == 1, 0.0, float("nan"))
        store_sum(
            value, target, epilogue_args, addends, peers, table, tile, row, row_end, col, col_end, outputs.n,
            traits.addends, traits.epilogue,
        )  # fmt: skip
    elif traits.weights == EXPERTS:
        value = finish_expert_rows(value, experts, rows, row_end)
        rows_out, is_stored = output_rows(experts, rows, row_end)
        inside = is_stored[:, None] & ((cols < col_end) & (cols < cols_end))[None, :]
        addresses = (
            target + rows_out[:, None] * (cols_end // 8 * 8) + cols[None, :]
        )  # a multiple of 8 already: tells the compiler
        tl.store(addresses, value.to(target.dtype.element_ty), mask=inside)
    else:
        inside = (rows < row_end)[:, None] & ((cols < col_end) & (cols < cols_end))[None, :]
        addresses = target + rows.to(tl.int64)[:, None] * cols_end + cols[None, :]
        tl.store(addresses, value.to(target.dtype.element_ty), mask=inside)
    if peers.peer_table is not None:
        notify_stored_tile(table, tile, peers, verdict, protocol.world_size)
    else:
        finish_tile(table, tile, protocol.signals, verdict)
