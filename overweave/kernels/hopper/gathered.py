"""How the Hopper matmul loads rows that lie apart: two warps of their own, by asynchronous copies of 16 bytes a lane.

On Hopper no bulk-tensor load takes a list of rows. Where a lane's rows begin is read once a tile, and kept in 32 bits,
as addresses of so many rows would not fit the registers. Each lane arrives on the stage's mbarrier when its copies are
done; consumers order them before tensor cores by a proxy fence. Two warps, since with those of the consumers, the
producer and the storer they are three groups of four, which is as many as leave registers to the widest products.
SOURCE: CUTLASS, `MainloopSm90CpAsyncGmmaWarpSpecialized`.
MEASURED: by the producer's one warp, which has no registers for rows and so read their numbers anew at each step, a
gathered matmul took 1.8 to 3.5 times one without (benchmarks/results/grouped.h200.2026-11-29.txt).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from overweave.compat.triton_names import copy_to_shared
from overweave.kernels.experts import gathered_rows
from overweave.kernels.hopper.shared import LAST, NUMBER, receive
from overweave.kernels.hopper.tiles import is_short_tile
from overweave.lang.tile_table import ROW, ROW_END, read_column
from overweave.memory.device.ptx import WORDS_BEHIND

ROW_ASSEMBLY = gl.constexpr(WORDS_BEHIND)
GATHERING = gl.constexpr(64)  # threads that arrive on a stage's mbarrier beside the producer


@gluon.jit
def gather(traits: gl.constexpr, stages, ring, experts, table, k):
    """The rows of `a` of every tile of the ring."""
    PARTS: gl.constexpr = stages.a.type.shape[0] // traits.stages
    PART_M: gl.constexpr = stages.a.type.shape[1]
    BLOCK_K: gl.constexpr = stages.a.type.shape[2]
    WIDTH: gl.constexpr = 16 * 8 // stages.a.dtype.primitive_bitwidth  # elements of a copy
    ACROSS: gl.constexpr = BLOCK_K // WIDTH
    layout: gl.constexpr = gl.BlockedLayout([1, WIDTH], [32 // ACROSS, ACROSS], [2, 1], [1, 0])
    cols = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, layout))
    width = gl.cdiv(k, WIDTH) * WIDTH  # whole copies: known to be a multiple
    step = 0
    turn = 0
    message = receive(ring, turn)
    while message != LAST:
        tile = message & NUMBER
        row, row_end = read_column(table, tile, ROW), read_column(table, tile, ROW_END)
        is_short = is_short_tile(traits, table, tile, PART_M)
        below = gl.arange(0, PART_M, layout=gl.SliceLayout(1, layout))
        upper = words_before(experts, row + below, row_end, WIDTH)
        lower = upper
        if PARTS == 2:
            lower = words_before(experts, row + PART_M + below, row_end, WIDTH)
        for depth in range(0, k, BLOCK_K):
            stage = step % traits.stages
            mbarrier.wait(stages.empty.index(stage), ((step // traits.stages) & 1) ^ 1)
            is_column = (cols < width - depth)[None, :]
            beginning = experts.source + depth
            copy_rows(stages.a.index(PARTS * stage), beginning, upper, cols, is_column)
            if PARTS == 2:
                if is_short == 0:
                    copy_rows(stages.a.index(PARTS * stage + 1), beginning, lower, cols, is_column)
            async_copy.mbarrier_arrive(stages.full.index(stage), increment_count=False)
            step += 1
        turn += 1
        message = receive(ring, turn)


@gluon.jit
def words_before(experts, rows, row_end, WIDTH: gl.constexpr):
    """How many words of 16 bytes lie in the source before the row of which each row is made; -1 of those of none."""
    at, is_known = gathered_rows(experts, rows, row_end)
    return gl.where(is_known, at * (experts.stride // WIDTH), -1).to(gl.int32)


@gluon.jit
def copy_rows(place, beginning, words, cols, is_column):
    """Copies a step of rows; zeros of those that are none."""
    # In assembly, lest the compiler keep addresses that it could add anew.
    rows = gl.inline_asm_elementwise(
        ROW_ASSEMBLY, "=l,r,l", [gl.maximum(words, 0), beginning], dtype=gl.int64, is_pure=True, pack=1
    )
    rows = rows.to(beginning.dtype, bitcast=True)
    places = gl.multiple_of(rows, 16)[:, None] + cols[None, :]
    copy_to_shared(place, places, (words >= 0)[:, None] & is_column)
