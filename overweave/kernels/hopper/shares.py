"""The end of a share of a tile's steps of k, in the Hopper kernel (`kernels/shares.py` says what it means).

Each consumer leaves and counts in the products of its half, and sums those if it comes last. The halves of a tile may
be summed by different programs; the storer whose half comes second signals.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from overweave.compat.triton_names import block_barrier
from overweave.kernels.shares import LEFT_OUT, SUMMED, SUMMED_VOID, arrive
from overweave.lang.tile_table import ARRIVALS, DONE, PARTIAL, SHARE, SHARES, VOID_SHARE, read_column
from overweave.memory.device.ptx import OPAQUE_ADD

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
