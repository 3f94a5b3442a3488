"""How a matmul tile ends: it adds partials that peers sent, stores its result here or at peers, and notifies."""

import triton
import triton.language as tl

from overweave.ir.tile_order import ALL_RANKS
from overweave.kernels.epilogue import SUM, Elements, apply_steps, has_steps
from overweave.lang.tile_table import (
    COLUMNS,
    FINISHES,
    LATE_COUNT,
    LATE_HI,
    LATE_LO,
    OPERATION,
    PLACE,
    SIGNAL,
    SIGNALS_NOBODY,
    TO,
    WEIGHT,
    notify,
    read_column,
    wait_for_signals,
)
from overweave.memory.device.signals import STRIDE

# WEIGHTS, in all kernels: the number of B matrices, each an argument of its own; or EXPERTS: one tensor stacks any
# number.
EXPERTS = tl.constexpr(0)


@triton.jit
def weight_index(table, tile, WEIGHTS: tl.constexpr):
    """Return the index of the B matrix that the tile multiplies by: 0 if there is one only, and for an invalid tile."""
    weight = 0
    if WEIGHTS > 1:
        weight = tl.load(table + tile * COLUMNS + WEIGHT)
    if WEIGHTS == EXPERTS:
        weight = tl.maximum(tl.load(table + tile * COLUMNS + WEIGHT), 0)
    return weight


@triton.jit
def select_by_weight(weight, first, second, third, WEIGHTS: tl.constexpr):
    """Return the one of three arguments (descriptors, outputs or widths) of B matrix `weight`; None beyond WEIGHTS."""
    selected = first
    if WEIGHTS > 1:
        if weight == 1:
            selected = second
    if WEIGHTS > 2:
        if weight == 2:
            selected = third
    return selected


@triton.jit
def column_offset(weight, n, n_1, WEIGHTS: tl.constexpr):
    """Return the first column of B matrix `weight` if all B matrices were side by side. Widths: n, then n_1."""
    offset = 0
    if WEIGHTS > 1:
        offset += tl.where(weight > 0, n, 0)
    if WEIGHTS > 2:
        offset += tl.where(weight > 1, n_1, 0)
    if WEIGHTS == EXPERTS:
        offset += weight * n
    return offset // 8 * 8  # always a multiple of 8 already: rounding tells the compiler so


# A tile stores its result, and notifies, at its own rank, at one peer, or (a sum) at every rank (`TileRow.to`).
#
# `peers.peer_table`, int64: for step 0, 1, .., two words of rank (own + step) % world_size: the address of its
# signals, and the byte offset of its workspace memory from the own one, the same for all buffers. Then two words: the
# address of the own buffer to which peers' sums go, or 0; the interval in ns between strips that the Hopper kernel
# stores at a peer.

AT_ALL = tl.constexpr(ALL_RANKS)


@triton.jit
def at_peer(pointer, peers, steps):
    """Return a workspace pointer of this rank translated to rank (own + steps) % world_size."""
    distance = tl.load(peers.peer_table + 2 * steps + 1)
    return tl.multiple_of((pointer.to(tl.int64, bitcast=True) + distance).to(pointer.dtype, bitcast=True), 16)


@triton.jit
def sums_at_peer(out, peers, steps):
    """Return where rank (own + steps) % world_size keeps the all-reduced sums that this rank stores in `out`."""
    address = tl.load(peers.peer_table + 2 * peers.spread_ranks) + tl.load(peers.peer_table + 2 * steps + 1)
    return tl.multiple_of(address.to(out.dtype, bitcast=True), 16)


@triton.jit
def signals_at_peer(peers, steps):
    """Return a pointer to the signals of rank (own + steps) % world_size."""
    return tl.load(peers.peer_table + 2 * steps).to(tl.pointer_type(tl.int32))


@triton.jit
def output_pointer(target, table, tile, peers):
    """Translate `target` to the rank that the tile is stored at; to this rank if all ranks get it."""
    return at_peer(target, peers, tl.maximum(read_column(table, tile, TO), 0))


@triton.jit
def notify_stored_tile(table, tile, peers, verdict, world_size):
    """`lang.finish_tile` at the ranks that the tile was stored at: add 1 to its signal there, unless a wait failed."""
    signal = read_column(table, tile, SIGNAL)
    if signal != SIGNALS_NOBODY:
        target = read_column(table, tile, TO)
        first = tl.where(target == AT_ALL, 1, target)
        end = tl.where(target == AT_ALL, world_size, target + 1)
        for steps in range(first, end):
            notify(signals_at_peer(peers, steps) + signal * STRIDE, verdict == 1)


# Addends: partial products of other ranks, in symmetric memory, which a tile adds to its own product. `addends`, int64
# `[operations, ADDENDS]`: base pointers, biased so that offsets of the output's rows find the addend's. Sums are in a
# fixed order: `TileRow.place` addends come before the own product. Columns are added strip by strip, so that the
# product and the sum never both hold registers in full.

STRIPS = tl.constexpr(16)  # of a tile, unless they would have fewer than LEAST_WIDTH columns
LEAST_WIDTH = tl.constexpr(8)


@triton.jit
def wait_for_addends(table, tile, protocol):
    """Wait until the tile's addends have arrived. Return 1; 0 if the wait timed out or was aborted."""
    signals, words, limits, world_size = protocol
    nobody = tl.full((), SIGNALS_NOBODY, tl.int32)
    return wait_for_signals(
        signals,
        read_column(table, tile, LATE_LO),
        read_column(table, tile, LATE_HI),
        read_column(table, tile, LATE_COUNT),
        nobody,
        nobody,
        read_column(table, tile, OPERATION),
        words,
        limits,
        world_size,
    )


@triton.jit
def store_sum(
    product, out, epilogue_args, addends, peers, table, tile, row, row_end, col, col_end, n, ADDENDS: tl.constexpr,
    EPILOGUE: tl.constexpr, STRIPS_LEFT: tl.constexpr = STRIPS,
):  # fmt: skip
    """Add the tile's addends to its product in fp32, in their order, and store the sum in `out` (or at all ranks).

    EPILOGUE: code of the steps (kernels/epilogue.py) that finish the sum if the tile's row says that it is complete.
    STRIPS_LEFT: recursion halves the tile until it is 1.
    """
    HEIGHT: tl.constexpr = product.shape[0]
    WIDTH: tl.constexpr = product.shape[1]
    if STRIPS_LEFT > 1 and WIDTH > LEAST_WIDTH:
        HALF: tl.constexpr = WIDTH // 2
        left, right = product.reshape(HEIGHT, 2, HALF).permute(0, 2, 1).split()
        store_sum(
            left, out, epilogue_args, addends, peers, table, tile, row, row_end, col, col_end, n, ADDENDS, EPILOGUE,
            STRIPS_LEFT // 2,
        )  # fmt: skip
        store_sum(
            right, out, epilogue_args, addends, peers, table, tile, row, row_end, col + HALF, col_end, n, ADDENDS,
            EPILOGUE, STRIPS_LEFT // 2,
        )  # fmt: skip
    else:
        rows, cols = row + tl.arange(0, HEIGHT), col + tl.arange(0, WIDTH)
        inside = (rows < row_end)[:, None] & ((cols < col_end) & (cols < n))[None, :]
        offsets = rows.to(tl.int64)[:, None] * n + cols[None, :]
        addresses = addends + read_column(table, tile, OPERATION) * ADDENDS
        product_index = read_column(table, tile, PLACE)
        result = tl.zeros((HEIGHT, WIDTH), dtype=tl.float32)
        for index in tl.static_range(ADDENDS):  # unrolled: the loads of all addends are in flight together
            result += tl.where(product_index == index, product, 0.0)
            addend = tl.multiple_of(tl.load(addresses + index).to(out.dtype), 16)
            result += tl.load(addend + offsets, mask=inside, other=0.0).to(tl.float32)
        result += tl.where(product_index == ADDENDS, product, 0.0)
        if has_steps(EPILOGUE, SUM):
            if read_column(table, tile, FINISHES) != 0:
                result = apply_steps(
                    result, None, epilogue_args.inputs, Elements(offsets, inside, cols, n, 0, 0, None), EPILOGUE, SUM
                )  # fmt: skip
        tl.store(out + offsets, result.to(out.dtype.element_ty), mask=inside)
        if peers.spread_ranks is not None:
            if read_column(table, tile, TO) == AT_ALL:
                for steps in range(1, peers.spread_ranks):
                    sums = sums_at_peer(out, peers, steps)
                    tl.store(sums + offsets, result.to(out.dtype.element_ty), mask=inside)
