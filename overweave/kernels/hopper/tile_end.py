"""The end of a tile in the Hopper kernel: what peers sent, as in `kernels/tile_end.py`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from overweave.compat.triton_names import block_barrier, load_tile
from overweave.kernels.epilogue import SUM, Elements, apply_steps, does
from overweave.kernels.hopper.tiles import rectangle, wait_for_addends
from overweave.kernels.tile_end import AT_ALL, sums_at
from overweave.lang.tile_table import (
    ADDS_NOTHING,
    COL,
    FINISHES,
    OPERATION,
    PLACE,
    ROW,
    TO,
    read_column,
)

# The storer, which is idle during a tile's main loop, waits for the addends meanwhile, and passes its verdict on to the
# consumers through shared memory; the mbarrier carries what the acquire saw along.
#
# A single addend (`addend_tiles`) it loads too, to where the consumers will leave their result: they find it there when
# their product is done, add it, and the tile ends as any other, by a bulk-tensor store. So what arrives during the main
# loop costs no more than a look into shared memory. A sum of two has one value in either order.
#
# Of several addends the consumers read all, add and store strip by strip, 16 bytes a thread and four threads to a row:
# a strip of the product is turned to that layout by shuffles within the warp. They store past shared memory, so the
# storer has nothing left to do but to signal.

STRIP = gl.constexpr(64)  # columns; half as many where so much is loaded, or stored, at once that registers run out
MOST_ADDENDS, MOST_BESIDE_EPILOGUE = gl.constexpr(4), gl.constexpr(2)


@gluon.jit
def await_addends(sums, table, tile, protocol):
    """Storer: waits for a tile's addends, if it has any, and tells the consumers. 1, or 0 if the wait is void.

    Both consumers have read the last verdict: the storer has waited for what they stored after it.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    verdict = wait_for_addends(table, tile, protocol)
    sums.verdicts.index(0).store(gl.full([1], verdict, gl.int32, layout))
    fence_async_shared()  # nothing bulk reads it, but who stores to shared memory ahead of bulk stores owes a fence
    mbarrier.arrive(sums.received.index(0), count=1)
    return verdict


@gluon.jit
def load_addend(traits: gl.constexpr, sums, c_tiles, table, tile, lacks, verdict):
    """Storer: a tile's one addend, if it has any and that is there, to where the consumers leave their results.

    They wait for it as for the verdict: the mbarrier counts two arrivals, this one with the bytes. Of the table a row
    says how many rows further an operation's addend lies in its buffer than the result does in its own. What the last
    tile left there the storer has read.
    """
    SPLIT_N: gl.constexpr = traits.split_n
    STEP_M: gl.constexpr = 0 if traits.in_columns else c_tiles.first.type.shape[1]
    STEP_N: gl.constexpr = c_tiles.first.type.shape[2] if traits.in_columns else 0
    PART_N: gl.constexpr = c_tiles.first.type.shape[2]
    PART_BYTES: gl.constexpr = sums.tiles.block_type.nbytes
    is_there = (read_column(table, tile, PLACE) != ADDS_NOTHING) & (verdict == 1)
    row = read_column(table, tile, ROW) + gl.load(sums.addends + read_column(table, tile, OPERATION)).to(gl.int32)
    col = read_column(table, tile, COL)
    arrived = sums.received.index(0)
    mbarrier.arrive(arrived, count=1, pred=is_there == 0)
    for short in gl.static_range(SPLIT_N):
        mbarrier.expect(arrived, 2 * (SPLIT_N - short) * PART_BYTES, pred=is_there & (lacks == short))
    for half in gl.static_range(2):
        for part in gl.static_range(SPLIT_N):
            load_tile(
                sums.tiles, [row + half * STEP_M, col + half * STEP_N + part * PART_N], arrived,
                rectangle(c_tiles, half, part, 2), pred=is_there & (lacks < SPLIT_N - part),
            )  # fmt: skip


@gluon.jit
def hear_of_addends(sums, turn):
    """Consumer: the storer's verdict on a tile's addends, which may be read behind it.

    To be called when the storer is done with the last tile, so that the mbarrier is at most one turn behind.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(sums.received.index(0), turn & 1)
    return gl.max(sums.verdicts.index(0).load(layout), 0)


@gluon.jit
def half_of(value, RIGHT: gl.constexpr):
    left, right = value.reshape([value.shape[0], 2, value.shape[1] // 2]).permute((0, 2, 1)).split()
    return right if RIGHT else left


@gluon.jit
def strip_of(value, AT: gl.constexpr, STRIPS: gl.constexpr):
    """Columns of a tile: the strip AT of STRIPS. No instruction: a choice of registers."""
    if STRIPS == 1:
        return value
    else:
        HALF: gl.constexpr = STRIPS // 2
        return strip_of(half_of(value, AT >= HALF), AT % HALF, HALF)


@gluon.constexpr_function
def wide_layout(rows, cols):
    """Of a strip: 8 columns in a thread, 4 threads beside each other, 8 below; further rows and columns in registers.

    Rows lie in warps as a tensor core has them, so that turning to its layout stays within each warp.
    """
    registers = [[0, 1], [0, 2], [0, 4]] + [[0, 32 << bit] for bit in range((cols // 32).bit_length() - 1)]
    registers += [[8, 0]] + [[64 << bit, 0] for bit in range((rows // 64).bit_length() - 1)]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, cols])


@gluon.jit
def store_sum(
    product, out, ends, addends, peers, table, tile, row, row_end, col, n, ADDENDS: gl.constexpr,
    EPILOGUE: gl.constexpr,
):  # fmt: skip
    """Adds the addends to a product, each at its place, and stores the sum in `out`, strip by strip; finished, if the
    tile's row says that it is whole, and at every rank, if it says so. ADDENDS 0: of a sum that is there.
    """
    ENDING: gl.constexpr = does(EPILOGUE, SUM)
    HEIGHT: gl.constexpr = product.shape[0]
    MOST: gl.constexpr = MOST_BESIDE_EPILOGUE if EPILOGUE else MOST_ADDENDS
    WIDTH: gl.constexpr = min(product.shape[1], STRIP if ADDENDS > 0 and ADDENDS <= MOST else STRIP // 2)
    STRIPS: gl.constexpr = product.shape[1] // WIDTH
    layout: gl.constexpr = wide_layout(HEIGHT, WIDTH)
    # Rows are whole 16 bytes long, and tiles begin at such. A partition knows nothing of what it is given, so: again.
    n, col = n // 8 * 8, col // 16 * 16
    out = gl.multiple_of(out.to(gl.int64).to(out.dtype), 16)
    if ADDENDS > 0:
        place = read_column(table, tile, PLACE)
        finishes = read_column(table, tile, FINISHES) != 0 if ENDING else False
        addresses = addends + read_column(table, tile, OPERATION) * ADDENDS
    rows = row + gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, layout))
    for strip in gl.static_range(STRIPS):
        cols = col + strip * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
        offsets = rows.to(gl.int64)[:, None] * n + cols[None, :]
        inside = (rows < row_end)[:, None] & (cols < n)[None, :]
        own = gl.convert_layout(strip_of(product, strip, STRIPS), layout)
        if ADDENDS > 0:
            result = gl.zeros((HEIGHT, WIDTH), gl.float32, layout)
            for index in gl.static_range(ADDENDS):  # unrolled: the loads of all addends are in flight together
                result += gl.where(place == index, own, 0.0)
                addend = gl.multiple_of(gl.load(addresses + index).to(out.dtype), 16)
                result += gl.load(addend + offsets, mask=inside, other=0.0).to(gl.float32)
            result += gl.where(place == ADDENDS, own, 0.0)
            if ENDING:
                if finishes:
                    result = apply_steps(
                        result, None, ends.inputs, Elements(offsets, inside, cols, n, 0, 0, None), EPILOGUE, SUM
                    )  # fmt: skip
        else:
            result = own
        places, rounded = out + offsets, result.to(out.dtype.element_ty)
        gl.store(places, rounded, mask=inside)
        if peers.everyone is not None:
            if read_column(table, tile, TO) == AT_ALL:
                for steps in range(1, peers.everyone):
                    gl.store(sums_at(out, peers, steps) + offsets, rounded, mask=inside)
    block_barrier()  # one thread arrives for all: their stores come first
