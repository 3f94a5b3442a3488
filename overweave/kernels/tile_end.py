"""The end of a tile: its weight, what peers sent, and where its result is stored and told of."""

import triton
import triton.language as tl

from overweave.ir.tile_order import ALL_RANKS
from overweave.kernels.epilogue import SUM, Elements, apply_steps, does
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

# WEIGHTS: how many, each an argument; or EXPERTS: as many as there are, of one shape, in one tensor.
EXPERTS = tl.constexpr(0)


@triton.jit
def weight_of(table, tile, WEIGHTS: tl.constexpr):
    """By which weight the tile multiplies; known without a look where there is one. A void tile has the first."""
    weight = 0
    if WEIGHTS > 1:
        weight = tl.load(table + tile * COLUMNS + WEIGHT)
    if WEIGHTS == EXPERTS:
        weight = tl.maximum(tl.load(table + tile * COLUMNS + WEIGHT), 0)
    return weight


@triton.jit
def of_weight(weight, first, second, third, WEIGHTS: tl.constexpr):
    """What belongs to a weight: its descriptor, its output, its columns. Those beyond WEIGHTS are None."""
    chosen = first
    if WEIGHTS > 1:
        if weight == 1:
            chosen = second
    if WEIGHTS > 2:
        if weight == 2:
            chosen = third
    return chosen


@triton.jit
def columns_before(weight, n, n_1, WEIGHTS: tl.constexpr):
    """How many columns the weights before this one have: where its own begin among all of them."""
    before = 0
    if WEIGHTS > 1:
        before += tl.where(weight > 0, n, 0)
    if WEIGHTS > 2:
        before += tl.where(weight > 1, n_1, 0)
    if WEIGHTS == EXPERTS:
        before += weight * n
    return before // 8 * 8  # rows of all weights are whole 16 bytes: rounded, it is known to be a multiple


# Where a tile stores its result and tells so: at its own rank, at a peer, or, a sum, at every rank, of which peers are
# told (`TileRow.to`).
#
# `peers.places` has a row for each rank of the group, the own one first and the others as they follow it: where its
# signals lie, and how many bytes its slot lies behind the own one. A buffer of the workspace is equally far away.
# Behind them stands where sums of peers lie here, if sums go to every rank, and how far apart the Hopper kernel stores
# its strips.

AT_ALL = tl.constexpr(ALL_RANKS)


@triton.jit
def away(pointer, peers, steps):
    """What `pointer` is in the memory of the rank so many steps behind the own one."""
    distance = tl.load(peers.places + 2 * steps + 1)
    return tl.multiple_of((pointer.to(tl.int64, bitcast=True) + distance).to(pointer.dtype, bitcast=True), 16)


@triton.jit
def sums_at(out, peers, steps):
    """Where sums that are in `out` here go at the rank so many steps behind the own one."""
    place = tl.load(peers.places + 2 * peers.everyone) + tl.load(peers.places + 2 * steps + 1)
    return tl.multiple_of(place.to(out.dtype, bitcast=True), 16)


@triton.jit
def signals_of(peers, steps):
    """The signals of that rank."""
    return tl.load(peers.places + 2 * steps).to(tl.pointer_type(tl.int32))


@triton.jit
def target_at(target, table, tile, peers):
    """The output that a tile writes, at the rank where it belongs; of a sum that all ranks get, the own one's."""
    return away(target, peers, tl.maximum(read_column(table, tile, TO), 0))


@triton.jit
def finish_stored_tile(table, tile, peers, verdict, world_size):
    """As `lang.finish_tile`, wherever the tile is stored."""
    signal = read_column(table, tile, SIGNAL)
    if signal != SIGNALS_NOBODY:
        to = read_column(table, tile, TO)
        first = tl.where(to == AT_ALL, 1, to)
        end = tl.where(to == AT_ALL, world_size, to + 1)
        for steps in range(first, end):
            notify(signals_of(peers, steps) + signal * STRIDE, verdict == 1)


# The addends lie where a table says, one row per operation and ADDENDS addresses wide: each is where row 0 of the
# output would lie, so the output's own offsets find them. `TileRow.place` of them stand before the product. They are
# read a few columns at a time, so that a tile's product and its sum never both hold registers in full. A sum that every
# rank gets is stored at each of them (kernels/tile_end.py).

STRIPS = tl.constexpr(16)  # of a tile, unless they would have fewer than LEAST columns
LEAST = tl.constexpr(8)


@triton.jit
def wait_for_addends(table, tile, protocol):
    """Waits for the signals that the row names for its addends. 1, or 0 if the wait is void."""
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
    product, out, ends, addends, peers, table, tile, row, row_end, col, col_end, n, ADDENDS: tl.constexpr,
    EPILOGUE: tl.constexpr, PARTS: tl.constexpr = STRIPS,
):  # fmt: skip
    """Adds the addends to a product, each at its place, and stores the sum in `out`, strip by strip.

    EPILOGUE: what is done to the sum before it is rounded, if the tile's row says that it is whole.
    """
    HEIGHT: tl.constexpr = product.shape[0]
    WIDTH: tl.constexpr = product.shape[1]
    if PARTS > 1 and WIDTH > LEAST:
        HALF: tl.constexpr = WIDTH // 2
        left, right = product.reshape(HEIGHT, 2, HALF).permute(0, 2, 1).split()
        store_sum(
            left, out, ends, addends, peers, table, tile, row, row_end, col, col_end, n, ADDENDS, EPILOGUE, PARTS // 2
        )
        store_sum(
            right, out, ends, addends, peers, table, tile, row, row_end, col + HALF, col_end, n, ADDENDS, EPILOGUE,
            PARTS // 2,
        )  # fmt: skip
    else:
        rows, cols = row + tl.arange(0, HEIGHT), col + tl.arange(0, WIDTH)
        inside = (rows < row_end)[:, None] & ((cols < col_end) & (cols < n))[None, :]
        offsets = rows.to(tl.int64)[:, None] * n + cols[None, :]
        addresses = addends + read_column(table, tile, OPERATION) * ADDENDS
        place = read_column(table, tile, PLACE)
        result = tl.zeros((HEIGHT, WIDTH), dtype=tl.float32)
        for index in tl.static_range(ADDENDS):  # unrolled: the loads of all addends are in flight together
            result += tl.where(place == index, product, 0.0)
            addend = tl.multiple_of(tl.load(addresses + index).to(out.dtype), 16)
            result += tl.load(addend + offsets, mask=inside, other=0.0).to(tl.float32)
        result += tl.where(place == ADDENDS, product, 0.0)
        if does(EPILOGUE, SUM):
            if read_column(table, tile, FINISHES) != 0:
                result = apply_steps(
                    result, None, ends.inputs, Elements(offsets, inside, cols, n, 0, 0, None), EPILOGUE, SUM
                )  # fmt: skip
        tl.store(out + offsets, result.to(out.dtype.element_ty), mask=inside)
        if peers.everyone is not None:
            if read_column(table, tile, TO) == AT_ALL:
                for steps in range(1, peers.everyone):
                    sums = sums_at(out, peers, steps)
                    tl.store(sums + offsets, result.to(out.dtype.element_ty), mask=inside)


# A program leaves its products in memory, in fp32, and counts itself in. The one that finds all others there reads
# every share in the order of k, its own too, and ends the tile like any other, so that bits do not depend on who came
# last. Nobody waits. Counters are left at zero, for the next launch.

LEFT_OUT, SUMMED, SUMMED_VOID = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
