"""The end of a tile in the Hopper kernel: what peers sent, and its share of k, as in `kernels/tile_end.py`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from overweave.compat.triton_names import block_barrier, load_tile
from overweave.kernels.epilogue import ENDINGS, ended
from overweave.kernels.hopper.tiles import rectangle, wait_for_addends
from overweave.kernels.tile_end import AT_ALL, LEFT_OUT, SUMMED, SUMMED_VOID, arrive, sums_at
from overweave.lang.tile_table import (
    ADDS_NOTHING,
    ARRIVALS,
    COL,
    DONE,
    FINISHES,
    OPERATION,
    PARTIAL,
    PLACE,
    ROW,
    SHARE,
    SHARES,
    TO,
    VOID_SHARE,
    read_column,
)
from overweave.memory.device.ptx import OPAQUE_ADD

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
    ENDING: gl.constexpr = ENDINGS & EPILOGUE
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
                    result = ended(result, ends.bias, ends.residual, ends.more, offsets, inside, cols, n, ENDING)
        else:
            result = own
        places, rounded = out + offsets, result.to(out.dtype.element_ty)
        gl.store(places, rounded, mask=inside)
        if peers.everyone is not None:
            if read_column(table, tile, TO) == AT_ALL:
                for steps in range(1, peers.everyone):
                    gl.store(sums_at(out, peers, steps) + offsets, rounded, mask=inside)
    block_barrier()  # one thread arrives for all: their stores come first


# Each consumer leaves and counts in the products of its half, and sums those if it comes last. The halves of a tile may
# be summed by different programs; the storer whose half comes second signals.

ADD_ASSEMBLY = gl.constexpr(OPAQUE_ADD)
FOUR = gl.constexpr(4)  # numbers of fp32 that a thread moves at once
GROUP = gl.constexpr(16)  # columns that four threads of a tensor core's layout have in two pairs each


@gluon.constexpr_function
def fours_layout(rows, cols):
    """Four columns in a thread, and four threads beside each other; rows lie as a tensor core has them."""
    registers = [[0, 1], [0, 2]] + [[0, 16 << bit] for bit in range((cols // 16).bit_length() - 1)]
    registers += [[8, 0]] + [[64 << bit, 0] for bit in range((rows // 64).bit_length() - 1)]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, cols])


@gluon.jit
def in_fours(value):
    """A tensor core's result with columns in another order: four in a row for each thread. No instruction."""
    LAYOUT: gl.constexpr = fours_layout(value.shape[0], value.shape[1])
    ROWS: gl.constexpr = value.shape[0]
    COLS: gl.constexpr = value.shape[1]
    pairs = value.reshape([ROWS, COLS // GROUP, 2, FOUR, 2])
    return gl.convert_layout(pairs.permute((0, 1, 3, 2, 4)).reshape([ROWS, COLS]), LAYOUT)


@gluon.jit
def out_of_fours(value, like):
    """Back again, to the layout of another."""
    LAYOUT: gl.constexpr = like.type.layout
    ROWS: gl.constexpr = value.shape[0]
    COLS: gl.constexpr = value.shape[1]
    pairs = value.reshape([ROWS, COLS // GROUP, FOUR, 2, 2])
    return gl.convert_layout(pairs.permute((0, 1, 3, 2, 4)).reshape([ROWS, COLS]), LAYOUT)


@gluon.jit
def offsets_of(fours):
    """Where each element of a share lies: a warp's 16 bytes of each thread beside each other."""
    ROWS: gl.constexpr = fours.shape[0]
    COLS: gl.constexpr = fours.shape[1]
    LAYOUT: gl.constexpr = fours.type.layout
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    cols = gl.arange(0, COLS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    return cols // GROUP * (ROWS * GROUP) + rows * GROUP + cols % GROUP


@gluon.jit
def aligned(partials, place):
    """The pointer `place` numbers on, known to lie at 16 bytes: a partition knows nothing of what it is given."""
    return gl.multiple_of((partials + place).to(gl.int64).to(partials.dtype), 16)


@gluon.jit
def leave(value, partials, place):
    """Stores a share's products at a place of the partials."""
    fours = in_fours(value)
    gl.store(aligned(partials, place) + offsets_of(fours), fours)


@gluon.jit
def summed(value, partials, place, step, share, shares):
    """The sum of all shares in order, of which the first lies at `place`. value: those products of `share`.

    Of two shares the other alone is read: which comes first makes no difference to their sum.
    """
    fours = in_fours(value)
    offsets = offsets_of(fours)
    if shares == 2:
        fours += gl.load(aligned(partials, place + (1 - share) * step) + offsets, cache_modifier=".cg")
    else:
        fours = gl.load(aligned(partials, place) + offsets, cache_modifier=".cg")
        for _ in range(1, shares):
            # Otherwise the compiler keeps one more address for each thread, for which there is no register.
            place = gl.inline_asm_elementwise(
                ADD_ASSEMBLY, "=l,l,l", [place, place * 0 + step], dtype=gl.int64, is_pure=False, pack=1
            )
            fours += gl.load(aligned(partials, place) + offsets, cache_modifier=".cg")
    return out_of_fours(fours, value)


@gluon.jit
def end_share(
    HAS_OTHERS: gl.constexpr, HALF: gl.constexpr, SIZE: gl.constexpr, result, others, memory, table, tile, is_sound,
):  # fmt: skip
    """Consumer: what it is to do with its half of a row's products, and these: sums, if the tile is to be ended.

    memory: memory/shares.Shares. SIZE: places of fp32 that a consumer has for the products of a share, `others` behind
    `result`.
    """
    AHEAD: gl.constexpr = result.shape[0] * result.shape[1]
    told = gl.where(is_sound, SUMMED, SUMMED_VOID)
    shares = read_column(table, tile, SHARES)
    if shares > 0:
        partial = read_column(table, tile, PARTIAL)
        first = (partial.to(gl.int64) * 2 + HALF) * SIZE
        share = read_column(table, tile, SHARE).to(gl.int64)
        own = first + share * (2 * SIZE)
        leave(result, memory.partials, own)
        if HAS_OTHERS:
            leave(others, memory.partials, own + AHEAD)
        told = arrive(memory.arrivals + partial * ARRIVALS + HALF, shares, is_sound)
        if told != LEFT_OUT:
            result = summed(result, memory.partials, first, 2 * SIZE, share, shares)
            if HAS_OTHERS:
                others = summed(others, memory.partials, first + AHEAD, 2 * SIZE, share, shares)
    return told, result, others


@gluon.jit
def tell(told_of, told):
    """Consumer: tells the storer, by the mbarrier that is arrived at next."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    told_of.store(gl.full([1], 0, gl.int32, layout) + told)
    fence_async_shared()  # nothing bulk reads it, but who stores to shared memory ahead of bulk stores owes a fence
    block_barrier()


@gluon.jit
def hear(told_of):
    """Storer: what a consumer told."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    return gl.max(told_of.load(layout), 0)


@gluon.jit
def is_announced(arrivals, table, tile, ended, is_sound):
    """Storer: whether both halves of a soundly summed tile are now stored, `ended` of them by this program."""
    announced = is_sound
    if read_column(table, tile, SHARES) > 0:
        announced = ended < 0
        if ended > 0:
            counter = arrivals + read_column(table, tile, PARTIAL) * ARRIVALS + DONE
            more = gl.where(is_sound, ended, ended + VOID_SHARE)
            before = gl.atomic_add(counter, more, sem="acq_rel", scope="gpu")
            fence_async_shared()  # its result was broadcast through shared memory
            if before % VOID_SHARE + ended == 2:
                gl.store(counter, 0)
                announced = before + more < VOID_SHARE
    return announced
