"""What a tile does to its sums before it stores them, in fp32: scales, bias, activation or gate, residual, in order.

Written once for both matmul kernels and for the sums: element-wise code keeps whatever layout its operands have. Which
steps there are is one number, the bits of an `Epilogue` (ir/epilogue.py), for which a kernel is compiled. Where tiles
add what peers sent, products are scaled (SCALES) and the rest (ENDINGS) is done to sums that are whole.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from overweave.ir.epilogue import EPILOGUE_BITS
from overweave.ir.operators.forms import GATE as GATE_WORD
from overweave.kernels.added import ADDED, DIGEST, PARTS, apply_added
from overweave.lang.tile_table import FROM_OWN_SHARD, ROW, SOURCE, SOURCE_ROW, read_column

BIAS = tl.constexpr(EPILOGUE_BITS["bias"])
SILU = tl.constexpr(EPILOGUE_BITS["silu"])
GELU = tl.constexpr(EPILOGUE_BITS["gelu"])
GELU_TANH = tl.constexpr(EPILOGUE_BITS["gelu_tanh"])
RESIDUAL = tl.constexpr(EPILOGUE_BITS["residual"])
BY_TENSOR = tl.constexpr(EPILOGUE_BITS["tensor"])
BY_ROWS = tl.constexpr(EPILOGUE_BITS["rows"])
GATE = tl.constexpr(EPILOGUE_BITS[GATE_WORD])
SCALES = tl.constexpr(EPILOGUE_BITS["tensor"] | EPILOGUE_BITS["rows"])
ENDINGS = tl.constexpr(~(SCALES.value | PARTS.value))


@gluon.constexpr_function
def of_product(epilogue, addends):
    """What is left to be done to a tile's products, or to the one that a gate made of two."""
    if addends:
        return epilogue & ~ENDINGS.value | (epilogue & DIGEST.value if PARTS.value & epilogue else 0)
    return (ENDINGS.value if GATE.value & epilogue else -1) & epilogue


@triton.jit
def activated(value, EPILOGUE: tl.constexpr):
    """SiLU, or GELU as torch's `approximate="none"` and `"tanh"` have it."""
    if SILU & EPILOGUE:  # in this order: interpreted, EPILOGUE is a plain int
        value = value / (1.0 + tl.exp(-value))
    if GELU & EPILOGUE:
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    if GELU_TANH & EPILOGUE:
        inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
        value = value - value / (1.0 + tl.exp(2.0 * inner))  # 0.5 * value * (1 + tanh(inner))
    return value


@triton.jit
def gated(value, gate, EPILOGUE: tl.constexpr):
    """`value * activation(gate)` of two products."""
    return value * activated(gate, EPILOGUE)


@triton.jit
def scales_beside(ends, table, tile, row, EPILOGUE: tl.constexpr):
    """Where the scale of row 0 of a tile's product would lie: that of its first row lies beside that row of `a`.

    row: the tile's first; None: it is read here.
    """
    beside = ends.scale_x
    if BY_ROWS & EPILOGUE:
        is_own = read_column(table, tile, SOURCE) == FROM_OWN_SHARD
        if row is None:
            row = read_column(table, tile, ROW)
        source_row = read_column(table, tile, SOURCE_ROW)
        beside = tl.where(is_own, ends.scale_x, ends.scale_gathered) + (source_row - row)
    return beside


@triton.jit
def scaled(value, scale_x, scale_w, more, rows, row_end, cols, n, EPILOGUE: tl.constexpr):
    """`value * scale_x * scale_w`: one scale each, or that of the row and that of the column; then what is registered
    of parts."""
    if BY_TENSOR & EPILOGUE:
        value *= tl.load(scale_x) * tl.load(scale_w)
    if BY_ROWS & EPILOGUE:
        by_row = tl.load(scale_x + rows, mask=rows < row_end, other=0.0)
        value *= by_row[:, None] * tl.load(scale_w + cols, mask=cols < n, other=0.0)[None, :]
    if PARTS & EPILOGUE:
        inside = (rows < row_end)[:, None] & (cols < n)[None, :]
        value = apply_added(value, more, None, inside, cols, n, EPILOGUE, True)
    return value


@triton.jit
def scaled_and_gated(value, gate, scale_x, scale_w, rows, row_end, cols, n, EPILOGUE: tl.constexpr):
    """`scaled(value) * activation(scaled(gate))`: scale_w has the gate's scales behind the n, or the one, of value."""
    if SCALES & EPILOGUE:
        value = scaled(value, scale_x, scale_w, None, rows, row_end, cols, n, EPILOGUE)
        of_gate = scale_w + (n if BY_ROWS & EPILOGUE else 1)
        gate = scaled(gate, scale_x, of_gate, None, rows, row_end, cols, n, EPILOGUE)
    return gated(value, gate, EPILOGUE)


@triton.jit
def finished(value, bias, residual, scale_x, scale_w, more, rows, row_end, cols, n, EPILOGUE: tl.constexpr):
    """`activation(scaled(value) + bias) + residual` of the elements [rows, cols]; what is gated has its activation,
    and its scales before that.

    Of one of several weights, bias and scale_w begin at its columns, of which there are n.
    """
    value = scaled(value, scale_x, scale_w, more, rows, row_end, cols, n, EPILOGUE)
    if BIAS & EPILOGUE:
        value += tl.load(bias + cols, mask=cols < n, other=0.0).to(tl.float32)[None, :]
    if (GATE & EPILOGUE) == 0:
        value = activated(value, EPILOGUE)
    if RESIDUAL & EPILOGUE:
        inside = (rows < row_end)[:, None] & (cols < n)[None, :]
        addresses = residual + rows.to(tl.int64)[:, None] * n + cols[None, :]
        value += tl.load(addresses, mask=inside, other=0.0).to(tl.float32)
    if ADDED & EPILOGUE:
        inside = (rows < row_end)[:, None] & (cols < n)[None, :]
        offsets = rows.to(tl.int64)[:, None] * n + cols[None, :]
        value = apply_added(value, more, offsets, inside, cols, n, EPILOGUE)
    return value


@triton.jit
def ended(value, bias, residual, more, offsets, inside, cols, n, EPILOGUE: tl.constexpr):
    """`activation(value + bias) + residual` of elements of the result, which lie there at `offsets`, of columns `cols`.

    value: whole sums, in fp32. EPILOGUE: of ENDINGS alone.
    """
    if BIAS & EPILOGUE:
        value += tl.load(bias + cols, mask=cols < n, other=0.0).to(tl.float32)[None, :]
    value = activated(value, EPILOGUE)
    if RESIDUAL & EPILOGUE:
        value += tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
    if ADDED & EPILOGUE:
        value = apply_added(value, more, offsets, inside, cols, n, EPILOGUE)
    return value


@gluon.constexpr_function
def part_cols(epilogue):
    """Columns of a Gluon tile that are finished at a time. With a bias alone, fewer make the assembler read ahead so
    much of it that the widest tile spills registers (Triton 3.6).
    """
    return 32 if epilogue == BIAS.value else 16


@gluon.jit
def finished_by_parts(
    value, gate, bias, residual, scale_x, scale_w, more, row, row_end, col, n, EPILOGUE: gl.constexpr
):  # fmt: skip
    """`finished` for a Gluon tile from [row, col] on, or `scaled_and_gated` for that of two products, a few columns at
    a time: what a whole tile reads would not fit beside its sums. gate: the second product, or None.
    """
    ROWS: gl.constexpr = value.shape[0]
    COLS: gl.constexpr = value.shape[1]
    LAYOUT: gl.constexpr = value.type.layout
    PART: gl.constexpr = part_cols(EPILOGUE)
    if COLS > PART:
        HALF: gl.constexpr = COLS // 2
        left, right = value.reshape([ROWS, 2, HALF]).permute((0, 2, 1)).split()
        left_gate, right_gate = gate, gate
        if gate is not None:
            left_gate, right_gate = gate.reshape([ROWS, 2, HALF]).permute((0, 2, 1)).split()
        left = finished_by_parts(
            left, left_gate, bias, residual, scale_x, scale_w, more, row, row_end, col, n, EPILOGUE
        )  # fmt: skip
        right = finished_by_parts(
            right, right_gate, bias, residual, scale_x, scale_w, more, row, row_end, col + HALF, n, EPILOGUE
        )  # fmt: skip
        value = gl.join(left, right).permute((0, 2, 1)).reshape([ROWS, COLS])
        value = gl.convert_layout(value, LAYOUT)
    else:
        rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        # What a partition is handed tells the compiler nothing: rounded, it is known to be a multiple.
        cols = col // 16 * 16 + gl.arange(0, COLS, layout=gl.SliceLayout(0, LAYOUT))
        if gate is not None:
            value = scaled_and_gated(value, gate, scale_x, scale_w, rows, row_end, cols, n // 8 * 8, EPILOGUE)
        else:
            value = finished(value, bias, residual, scale_x, scale_w, more, rows, row_end, cols, n // 8 * 8, EPILOGUE)
    return value
