"""How the storer of the Hopper matmul stores what a consumer left of experts: whole, or row by row.

Rows that are scattered lie apart, and rows of a group that ends within the tile must not be followed by others: a bulk
store could do neither. So the warp reads pieces of eight rows from shared memory, and stores each row where it belongs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from overweave.compat.triton_names import reinterpret
from overweave.kernels.experts import stored_rows
from overweave.kernels.hopper.rectangles import place
from overweave.kernels.hopper.stored import store_parts

PIECE_M = gl.constexpr(8)  # rows: a block of swizzled shared memory


@gluon.jit
def store_rows_of(
    experts, target, out, c_tiles, half, row, row_end, col, lacks, n, SPLIT_N: gl.constexpr
):  # fmt: skip
    """One consumer's half of a tile from [row, col] on. target: the tensor map of `out`."""
    PART_M: gl.constexpr = c_tiles.first.type.shape[1]
    is_whole = row + PART_M <= row_end
    if experts.into is not None:
        store_pieces(experts, out, c_tiles, half, row, row_end, col, lacks, n, SPLIT_N)
    elif is_whole:
        store_parts(target, c_tiles, half, row, col, lacks, SPLIT_N)
    else:
        store_pieces(experts, out, c_tiles, half, row, row_end, col, lacks, n, SPLIT_N)


@gluon.jit
def store_pieces(experts, out, c_tiles, half, row, row_end, col, lacks, n, SPLIT_N: gl.constexpr):
    """Eight rows at a time, as wide as a row of shared memory."""
    PART_M: gl.constexpr = c_tiles.first.type.shape[1]
    PART_N: gl.constexpr = c_tiles.first.type.shape[2]
    BYTES: gl.constexpr = c_tiles.first.dtype.primitive_bitwidth // 8
    PIECE_N: gl.constexpr = min(PART_N, 128 // BYTES)
    WIDTH: gl.constexpr = 16 // BYTES
    ACROSS: gl.constexpr = PIECE_N // WIDTH
    layout: gl.constexpr = gl.BlockedLayout([1, WIDTH], [32 // ACROSS, ACROSS], [1, 1], [1, 0])
    DOWN: gl.constexpr = PART_M // PIECE_M
    PIECES: gl.constexpr = DOWN * (PART_N // PIECE_N)
    width = n // WIDTH * WIDTH  # rows of the result are whole 16 bytes: known to be a multiple
    for part in gl.static_range(SPLIT_N):
        tiles, number = place(c_tiles, half, part, 2)
        pieces = reinterpret(tiles, tiles.dtype, [tiles.type.shape[0] * PIECES, PIECE_M, PIECE_N], tiles.type.layout)
        if part == 0 or lacks < SPLIT_N - part:
            for below in range(gl.cdiv(gl.minimum(row_end - row, PART_M), PIECE_M)):
                rows = row + below * PIECE_M + gl.arange(0, PIECE_M, layout=gl.SliceLayout(1, layout))
                at, is_stored = stored_rows(experts, rows, row_end)
                for beside in gl.static_range(PART_N // PIECE_N):
                    piece = pieces.index(number * PIECES + beside * DOWN + below).load(layout)
                    cols = col + part * PART_N + beside * PIECE_N
                    cols = cols // WIDTH * WIDTH + gl.arange(0, PIECE_N, layout=gl.SliceLayout(0, layout))
                    inside = is_stored[:, None] & (cols < width)[None, :]
                    gl.store(out + at[:, None] * width + cols[None, :], piece, mask=inside)
