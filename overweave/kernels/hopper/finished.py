"""What a consumer of the Hopper matmul does to a tile's products: its epilogue, and of a gated tile's two it makes one.

These two are the halves of one accumulator; or, of fp8, beside whose sums one step's product stands too, two of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from overweave.kernels.epilogue import BIAS, BY_ROWS, SCALES, finished_by_parts, gated, scales_beside
from overweave.kernels.hopper.received import half_of
from overweave.kernels.weights import EXPERTS, columns_before, weight_of


@gluon.jit
def finish(
    value, table, tile, ends, row, row_end, col, products, cols_end, EPILOGUE: gl.constexpr, WEIGHTS: gl.constexpr
):  # fmt: skip
    """The epilogue of some columns of a tile, of a weight that has cols_end."""
    bias, scale_w = ends.bias, ends.scale_w
    if EPILOGUE:
        if WEIGHTS != 1:
            before = columns_before(weight_of(table, tile, WEIGHTS), products.n, products.n_1, WEIGHTS)
            if BIAS & EPILOGUE:
                bias += before
            if BY_ROWS & EPILOGUE:
                scale_w += before
        beside = scales_beside(ends, table, tile, None, EPILOGUE)
        value = finished_by_parts(
            value, None, bias, ends.residual, beside, scale_w, ends.more, row, row_end, col, cols_end, EPILOGUE
        )  # fmt: skip
    return value


@gluon.jit
def gate_half(
    result, others, PART_N: gl.constexpr, table, tile, ends, row, row_end, col, n, EPILOGUE: gl.constexpr,
    WEIGHTS: gl.constexpr,
):  # fmt: skip
    """A consumer's two products made one, each scaled by its own before. They are one accumulator, or both."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART_N, 16])
    value, gate = result, others
    if result.shape[1] > PART_N:
        value, gate = half_of(result, False), half_of(result, True)
    if SCALES & EPILOGUE:
        beside = scales_beside(ends, table, tile, None, EPILOGUE)
        scale_w = ends.scale_w
        if WEIGHTS == EXPERTS and BY_ROWS & EPILOGUE:
            scale_w += 2 * columns_before(weight_of(table, tile, WEIGHTS), n, None, WEIGHTS)
        value = finished_by_parts(value, gate, None, None, beside, scale_w, None, row, row_end, col, n, EPILOGUE)
    else:
        value = gated(value, gate, EPILOGUE)
    return gl.convert_layout(value, layout)  # no instruction: all of both is the thread's own
