"""What a consumer of the Hopper matmul does to a tile's products: its epilogue, and of a gated tile's two it makes one.

These two are the halves of one accumulator; or, of fp8, beside whose sums one step's product stands too, two of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from overweave.kernels.epilogue import (
    BIAS,
    BY_ROWS,
    ENDINGS,
    GATE,
    SCALES,
    finished_by_parts,
    gated,
    scaled_and_gated,
    scales_of,
)
from overweave.kernels.hopper.received import half_of
from overweave.kernels.hopper.tiles import read_column
from overweave.kernels.weights import columns_before, weight_of
from overweave.lang.tile_table import FROM_OWN_SHARD, ROW, SOURCE, SOURCE_ROW


@gluon.constexpr_function
def of_product(epilogue, addends):
    """What is left to be done to a tile's products, or to the one that a gate made of two."""
    if addends:
        return SCALES.value & epilogue
    return (ENDINGS.value if GATE.value & epilogue else -1) & epilogue


@gluon.jit
def finish(
    value, table, tile, ends, row, row_end, col, products, cols_end, EPILOGUE: gl.constexpr, WEIGHTS: gl.constexpr
):  # fmt: skip
    """The epilogue of some columns of a tile, of a weight that has cols_end."""
    bias, scale_w = ends.bias, ends.scale_w
    if EPILOGUE:
        if WEIGHTS > 1:
            before = columns_before(weight_of(table, tile, WEIGHTS), products.n, products.n_1, WEIGHTS)
            if BIAS & EPILOGUE:
                bias += before
            if BY_ROWS & EPILOGUE:
                scale_w += before
        is_own = read_column(table, tile, SOURCE) == FROM_OWN_SHARD
        top, source_row = read_column(table, tile, ROW), read_column(table, tile, SOURCE_ROW)
        beside = scales_of(ends.scale_x, ends.scales, is_own, top, source_row, EPILOGUE)
        value = finished_by_parts(value, bias, ends.residual, beside, scale_w, row, row_end, col, cols_end, EPILOGUE)
    return value


@gluon.jit
def gate_half(
    result, others, PART_N: gl.constexpr, table, tile, ends, row, row_end, col, n, EPILOGUE: gl.constexpr
):  # fmt: skip
    """A consumer's two products made one, each scaled by its own before. They are one accumulator, or both."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART_N, 16])
    value, gate = result, others
    if result.shape[1] > PART_N:
        value, gate = half_of(result, False), half_of(result, True)
    if SCALES & EPILOGUE:
        is_own = read_column(table, tile, SOURCE) == FROM_OWN_SHARD
        top, source_row = read_column(table, tile, ROW), read_column(table, tile, SOURCE_ROW)
        beside = scales_of(ends.scale_x, ends.scales, is_own, top, source_row, EPILOGUE)
        value = gated_by_parts(value, gate, beside, ends.scale_w, row, row_end, col, n, EPILOGUE)
    else:
        value = gated(value, gate, EPILOGUE)
    return gl.convert_layout(value, layout)  # no instruction: all of both is the thread's own


@gluon.jit
def gated_by_parts(value, gate, scale_x, scale_w, row, row_end, col, n, EPILOGUE: gl.constexpr):
    """`scaled_and_gated` for two Gluon tiles of columns from `col` on, a few of these at a time."""
    ROWS: gl.constexpr = value.shape[0]
    COLS: gl.constexpr = value.shape[1]
    LAYOUT: gl.constexpr = value.type.layout
    if COLS > 16:
        HALF: gl.constexpr = COLS // 2
        left, right = value.reshape([ROWS, 2, HALF]).permute((0, 2, 1)).split()
        left_gate, right_gate = gate.reshape([ROWS, 2, HALF]).permute((0, 2, 1)).split()
        left = gated_by_parts(left, left_gate, scale_x, scale_w, row, row_end, col, n, EPILOGUE)
        right = gated_by_parts(right, right_gate, scale_x, scale_w, row, row_end, col + HALF, n, EPILOGUE)
        value = gl.join(left, right).permute((0, 2, 1)).reshape([ROWS, COLS])
        value = gl.convert_layout(value, LAYOUT)
    else:
        rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        cols = col // 16 * 16 + gl.arange(0, COLS, layout=gl.SliceLayout(0, LAYOUT))  # as in `finished_by_parts`
        value = scaled_and_gated(value, gate, scale_x, scale_w, rows, row_end, cols, n // 8 * 8, EPILOGUE)
    return value
