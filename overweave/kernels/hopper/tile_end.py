"""How a tile with addends ends in the Hopper kernel: adds partials of peers, as in `kernels/tile_end.py`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from overweave.compat.triton_names import block_barrier, load_tile
from overweave.kernels.epilogue import SUM, Elements, apply_steps, has_steps
from overweave.kernels.hopper.tiles import tma_box, wait_for_addends
from overweave.kernels.tile_end import AT_ALL, sums_at_peer
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

# The storer, idle during the main loop, waits for the addends then, and sends the status of that wait to the consumers
# through shared memory; the mbarrier makes what the acquire saw visible to them.
#
# A single addend it also loads, by TMA, to the slot of the consumer's result: a consumer adds it when its product is
# done, and the tile ends as any other, by a TMA store. So an addend that arrives during the main loop costs a read of
# shared memory. (A sum of two is the same in either order.)
#
# Several addends the consumers load from global memory, add and store strip by strip, 16 bytes a thread, four threads a
# row; a strip of the product is converted to that layout by shuffles within the warp. They store directly to global
# memory, and the storer only signals.

STRIP = gl.constexpr(64)  # columns; half as many where registers would not hold what is loaded or stored at once
MOST_ADDENDS, MOST_ADDENDS_WITH_EPILOGUE = gl.constexpr(4), gl.constexpr(2)


@gluon.jit
def wait_and_send_verdict(sums, table, tile, protocol):
    """Storer: wait for a tile's addends, if any, and send the status to the consumers. Return it: 1, or 0 if it failed.

    Both consumers have read the status of the last tile: the storer has waited for the results they stored after it.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    verdict = wait_for_addends(table, tile, protocol)
    sums.verdicts.index(0).store(gl.full([1], verdict, gl.int32, layout))
    fence_async_shared()  # not for this value: a shared store ahead of any bulk store needs the fence
    mbarrier.arrive(sums.received.index(0), count=1)
    return verdict


@gluon.jit
def load_addend(traits: gl.constexpr, sums, c_tiles, table, tile, missing, verdict):
    """Storer: start the TMA load of a tile's single addend, if it has one that arrived, to the consumers' result slots.

    Consumers wait for it together with the status: the mbarrier counts two arrivals, this one with the bytes.
    `sums.addends`: row of each operation's addend minus row of its result. The slots are free: the storer has read the
    last tile's results.
    """
    SPLIT_N: gl.constexpr = traits.split_n
    STEP_M: gl.constexpr = 0 if traits.in_columns else c_tiles.first.type.shape[1]
    STEP_N: gl.constexpr = c_tiles.first.type.shape[2] if traits.in_columns else 0
    PART_N: gl.constexpr = c_tiles.first.type.shape[2]
    PART_BYTES: gl.constexpr = sums.tiles.block_type.nbytes
    has_addend = (read_column(table, tile, PLACE) != ADDS_NOTHING) & (verdict == 1)
    row = read_column(table, tile, ROW) + gl.load(sums.addends + read_column(table, tile, OPERATION)).to(gl.int32)
    col = read_column(table, tile, COL)
    arrived = sums.received.index(0)
    mbarrier.arrive(arrived, count=1, pred=has_addend == 0)
    for missing_count in gl.static_range(SPLIT_N):
        mbarrier.expect(
            arrived, 2 * (SPLIT_N - missing_count) * PART_BYTES, pred=has_addend & (missing == missing_count)
        )
    for consumer in gl.static_range(2):
        for part in gl.static_range(SPLIT_N):
            load_tile(
                sums.tiles, [row + consumer * STEP_M, col + consumer * STEP_N + part * PART_N], arrived,
                tma_box(c_tiles, consumer, part, 2), pred=has_addend & (missing < SPLIT_N - part),
            )  # fmt: skip


@gluon.jit
def receive_verdict(sums, iteration):
    """Consumer: wait for the storer's status of this tile's addends, which may be read afterwards.

    Call it once the storer is done with the last tile: a parity wait must be at most one phase behind.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(sums.received.index(0), iteration & 1)
    return gl.max(sums.verdicts.index(0).load(layout), 0)


@gluon.jit
def column_half(value, RIGHT: gl.constexpr):
    left, right = value.reshape([value.shape[0], 2, value.shape[1] // 2]).permute((0, 2, 1)).split()
    return right if RIGHT else left


@gluon.jit
def column_strip(value, INDEX: gl.constexpr, STRIPS: gl.constexpr):
    """Return columns of a tile: strip INDEX of STRIPS. Emits no instruction: it selects registers."""
    if STRIPS == 1:
        return value
    else:
        HALF: gl.constexpr = STRIPS // 2
        return column_strip(column_half(value, INDEX >= HALF), INDEX % HALF, HALF)


@gluon.constexpr_function
def wide_layout(rows, cols):
    """Return the layout of a strip: 8 columns a thread, 4 threads a row, 8 rows a warp; the rest in registers.

    Each warp has the rows that wgmma gives it, so that converting between both layouts stays within a warp.
    """
    registers = [[0, 1], [0, 2], [0, 4]] + [[0, 32 << bit] for bit in range((cols // 32).bit_length() - 1)]
    registers += [[8, 0]] + [[64 << bit, 0] for bit in range((rows // 64).bit_length() - 1)]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, cols])


@gluon.jit
def store_sum(
    product, out, epilogue_args, addends, peers, table, tile, row, row_end, col, n, ADDENDS: gl.constexpr,
    EPILOGUE: gl.constexpr,
):  # fmt: skip
    """Add a tile's addends to its product in fp32, in order, and store the sum in `out` (or at all ranks), in strips.

    The epilogue finishes sums that are complete. ADDENDS 0: `product` is the sum; store it.
    """
    HAS_EPILOGUE: gl.constexpr = has_steps(EPILOGUE, SUM)
    HEIGHT: gl.constexpr = product.shape[0]
    MOST: gl.constexpr = MOST_ADDENDS_WITH_EPILOGUE if EPILOGUE else MOST_ADDENDS
    WIDTH: gl.constexpr = min(product.shape[1], STRIP if ADDENDS > 0 and ADDENDS <= MOST else STRIP // 2)
    STRIPS: gl.constexpr = product.shape[1] // WIDTH
    layout: gl.constexpr = wide_layout(HEIGHT, WIDTH)
    # Rows and tiles begin at multiples of 16 bytes; warp-specialised partitions lose that divisibility, so tell it
    # again.
    n, col = n // 8 * 8, col // 16 * 16
    out = gl.multiple_of(out.to(gl.int64).to(out.dtype), 16)
    if ADDENDS > 0:
        product_index = read_column(table, tile, PLACE)
        finishes = read_column(table, tile, FINISHES) != 0 if HAS_EPILOGUE else False
        addresses = addends + read_column(table, tile, OPERATION) * ADDENDS
    rows = row + gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, layout))
    for strip in gl.static_range(STRIPS):
        cols = col + strip * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
        offsets = rows.to(gl.int64)[:, None] * n + cols[None, :]
        inside = (rows < row_end)[:, None] & (cols < n)[None, :]
        own = gl.convert_layout(column_strip(product, strip, STRIPS), layout)
        if ADDENDS > 0:
            result = gl.zeros((HEIGHT, WIDTH), gl.float32, layout)
            for index in gl.static_range(ADDENDS):  # unrolled: the loads of all addends are in flight together
                result += gl.where(product_index == index, own, 0.0)
                addend = gl.multiple_of(gl.load(addresses + index).to(out.dtype), 16)
                result += gl.load(addend + offsets, mask=inside, other=0.0).to(gl.float32)
            result += gl.where(product_index == ADDENDS, own, 0.0)
            if HAS_EPILOGUE:
                if finishes:
                    result = apply_steps(
                        result, None, epilogue_args.inputs, Elements(offsets, inside, cols, n, 0, 0, None), EPILOGUE,
                        SUM
                    )  # fmt: skip
        else:
            result = own
        targets, rounded = out + offsets, result.to(out.dtype.element_ty)
        gl.store(targets, rounded, mask=inside)
        if peers.spread_ranks is not None:
            if read_column(table, tile, TO) == AT_ALL:
                for steps in range(1, peers.spread_ranks):
                    gl.store(sums_at_peer(out, peers, steps) + offsets, rounded, mask=inside)
    block_barrier()  # one thread arrives for all: after their stores
