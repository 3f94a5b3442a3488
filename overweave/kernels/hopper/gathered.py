"""How the producer of the Hopper matmul loads rows that lie apart: by asynchronous copies of 16 bytes a lane.

On Hopper no bulk-tensor load takes a list of rows. The copies count as arrived on the stage's mbarrier when they are
done; consumers order them before tensor cores by a proxy fence.
SOURCE: CUTLASS, `MainloopSm90CpAsyncGmmaWarpSpecialized`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from overweave.kernels.experts import gathered_rows
from overweave.lang.tile_table import ROW, ROW_END, read_column

AT_ONCE = gl.constexpr(8)  # rows: the addresses of more would not fit the producer's registers


@gluon.jit
def gather_rows(
    traits: gl.constexpr, experts, table, tile, depth, k, is_short, tiles, first, PARTS: gl.constexpr
):  # fmt: skip
    """A step of k of a tile's rows, into `PARTS` parts of shared memory; of a short tile into the first."""
    PART_M: gl.constexpr = tiles.type.shape[1]
    BLOCK_K: gl.constexpr = tiles.type.shape[2]
    BYTES: gl.constexpr = tiles.dtype.primitive_bitwidth // 8
    WIDTH: gl.constexpr = 16 // BYTES  # elements of a copy
    ACROSS: gl.constexpr = BLOCK_K // WIDTH
    layout: gl.constexpr = gl.BlockedLayout([1, WIDTH], [32 // ACROSS, ACROSS], [1, 1], [1, 0])
    row, row_end = read_column(table, tile, ROW), read_column(table, tile, ROW_END)
    cols = depth + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, layout))
    cols = gl.max_contiguous(gl.multiple_of(cols, WIDTH), WIDTH)
    stride = experts.stride // WIDTH * WIDTH  # known to be a multiple
    for part in gl.static_range(PARTS):
        if part == 0 or is_short == 0:
            place = tiles.index(first + part)
            for some in gl.static_range(PART_M // AT_ONCE):
                from_row = part * PART_M + some * AT_ONCE
                rows = row + from_row + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, layout))
                at, is_known = gathered_rows(experts, rows, row_end)
                places = experts.source + at[:, None] * stride + cols[None, :]
                mask = is_known[:, None] & (cols < k)[None, :]
                async_copy.async_copy_global_to_shared(place.slice(some * AT_ONCE, AT_ONCE), places, mask)


@gluon.jit
def gathered(arrived):
    """The mbarrier is to wait for the copies so far."""
    async_copy.mbarrier_arrive(arrived, increment_count=True)
