"""The end of a tile that adds what peers sent: `out = addends[0] + ... + product + ...` in fp32, rounded once.

The addends lie where a table says, one row per operation and ADDENDS addresses wide: each is where row 0 of the output
would lie, so the output's own offsets find them. `TileRow.place` of them stand before the product. They are read a few
columns at a time, so that a tile's product and its sum never both hold registers in full. A sum that every rank gets is
stored at each of them (kernels/stored.py).
"""

import triton
import triton.language as tl

from overweave.kernels.epilogue import ended
from overweave.kernels.stored import AT_ALL, sums_at
from overweave.lang.tile_table import (
    FINISHES,
    LATE_COUNT,
    LATE_HI,
    LATE_LO,
    OPERATION,
    PLACE,
    SIGNALS_NOBODY,
    TO,
    read_column,
    wait_for_signals,
)

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
        if EPILOGUE:
            if read_column(table, tile, FINISHES) != 0:
                result = ended(result, ends.bias, ends.residual, ends.more, offsets, inside, cols, n, EPILOGUE)
        tl.store(out + offsets, result.to(out.dtype.element_ty), mask=inside)
        if peers.everyone is not None:
            if read_column(table, tile, TO) == AT_ALL:
                for steps in range(1, peers.everyone):
                    sums = sums_at(out, peers, steps)
                    tl.store(sums + offsets, result.to(out.dtype.element_ty), mask=inside)
