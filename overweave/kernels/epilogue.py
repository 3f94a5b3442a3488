"""What a tile does to its sums before it stores them, in fp32: scales, bias, activation or gate, residual, in order.

Written once for both matmul kernels and for the sums: element-wise code keeps whatever layout its operands have. Which
steps there are is one number, the bits of an `Epilogue` (ir/epilogue.py), for which a kernel is compiled. Where tiles
add what peers sent, products are scaled (SCALES) and the rest (ENDINGS) is done to sums that are whole.
"""

from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from typing import Any, ClassVar

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from overweave.ir.epilogue import ADDED as ADDED_WORD
from overweave.ir.epilogue import EPILOGUE_BITS, Epilogue
from overweave.ir.operators.forms import GATE as GATE_WORD
from overweave.ir.operators.forms import registered
from overweave.lang.tile_table import FROM_OWN_SHARD, ROW, SOURCE, SOURCE_ROW, read_column

# A kernel is specialised by one integer: the bits of its Epilogue and, above them, a digest of the registered functions
# and numbers. So another function or another number makes another kernel.

ADDED = tl.constexpr(EPILOGUE_BITS[ADDED_WORD])
_DIGEST_AT, _DIGEST_DIGITS = 16, 10


class AddedSteps:
    """digest -> the steps of an epilogue. A step is a device function and what it reads: (layout of an input, its index
    among all operands), or ("", a number). It is a class since kernels may read no other mutable global.
    """

    by_digest: ClassVar[dict[int, tuple[tuple[Any, tuple[tuple[str, Any], ...]], ...]]] = {}


_compiled = cache(triton.jit)


def epilogue_code(epilogue: Epilogue) -> int:
    """Return the integer that specialises a kernel with this epilogue; records the steps of registered ones."""
    if not epilogue.added:
        return epilogue.bits
    steps, first = [], 0
    for each in epilogue.added:
        form = registered(each.name)
        read = [(read.rows + read.cols, first + index) for index, read in enumerate(form.inputs)]
        first += len(read)
        steps.append((_compiled(form.device), (*read, *(("", number) for number in each.numbers))))
    text = [(getattr(device, "cache_key", device.__name__), read) for device, read in steps]
    digest = int(sha256(repr(text).encode()).hexdigest()[:_DIGEST_DIGITS], 16)
    AddedSteps.by_digest[digest] = tuple(steps)
    return epilogue.bits | digest << _DIGEST_AT


def added_operands(epilogue: Epilogue, tensors: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return the tensors that registered epilogues read, in order; None without any."""
    names = [read.name for each in epilogue.added for read in registered(each.name).inputs]
    return tuple(tensors[name] for name in names) or None


@gluon.constexpr_function
def how_many_steps(epilogue):
    return len(AddedSteps.by_digest[epilogue >> _DIGEST_AT])


@gluon.constexpr_function
def device_of(epilogue, step):
    return AddedSteps.by_digest[epilogue >> _DIGEST_AT][step][0]


@gluon.constexpr_function
def how_many_read(epilogue, step):
    return len(AddedSteps.by_digest[epilogue >> _DIGEST_AT][step][1])


@gluon.constexpr_function
def read_of(epilogue, step, index, part):
    return AddedSteps.by_digest[epilogue >> _DIGEST_AT][step][1][index][part]


@triton.jit
def read_added(
    operands, offsets, inside, cols, n, EPILOGUE: tl.constexpr, STEP: tl.constexpr, INDEX: tl.constexpr
):  # fmt: skip
    """Load one input of a step in fp32, by its layout: of each element, column or row, or one for all; or a number."""
    LIES: tl.constexpr = read_of(EPILOGUE, STEP, INDEX, 0)
    AT: tl.constexpr = read_of(EPILOGUE, STEP, INDEX, 1)
    if LIES == "yn":
        return tl.load(operands[AT] + offsets, mask=inside, other=0.0).to(tl.float32)
    elif LIES == "1n":
        return tl.load(operands[AT] + cols, mask=cols < n, other=0.0).to(tl.float32)
    elif LIES == "y1":
        return tl.load(operands[AT] + offsets // n, mask=inside, other=0.0).to(tl.float32)
    elif LIES == "11":
        return tl.load(operands[AT]).to(tl.float32)
    else:
        return AT


@triton.jit
def apply_added(value, operands, offsets, inside, cols, n, EPILOGUE: tl.constexpr):
    """Apply all registered epilogues in order. offsets: of the elements in the row-major result. cols: their columns,
    which broadcast with `offsets`."""
    for step in tl.static_range(how_many_steps(EPILOGUE)):
        beside = ()
        for index in tl.static_range(how_many_read(EPILOGUE, step)):
            beside += (read_added(operands, offsets, inside, cols, n, EPILOGUE, step, index),)  # type: ignore[assignment]
        value = device_of(EPILOGUE, step)(value, beside)
    return value


BIAS = tl.constexpr(EPILOGUE_BITS["bias"])
SILU = tl.constexpr(EPILOGUE_BITS["silu"])
GELU = tl.constexpr(EPILOGUE_BITS["gelu"])
GELU_TANH = tl.constexpr(EPILOGUE_BITS["gelu_tanh"])
RESIDUAL = tl.constexpr(EPILOGUE_BITS["residual"])
BY_TENSOR = tl.constexpr(EPILOGUE_BITS["tensor"])
BY_ROWS = tl.constexpr(EPILOGUE_BITS["rows"])
GATE = tl.constexpr(EPILOGUE_BITS[GATE_WORD])
SCALES = tl.constexpr(EPILOGUE_BITS["tensor"] | EPILOGUE_BITS["rows"])
ENDINGS = tl.constexpr(~SCALES.value)


@gluon.constexpr_function
def of_product(epilogue, addends):
    """What is left to be done to a tile's products, or to the one that a gate made of two."""
    if addends:
        return SCALES.value & epilogue
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
def scaled(value, scale_x, scale_w, rows, row_end, cols, n, EPILOGUE: tl.constexpr):
    """`value * scale_x * scale_w`: one scale each, or that of the row and that of the column."""
    if BY_TENSOR & EPILOGUE:
        value *= tl.load(scale_x) * tl.load(scale_w)
    if BY_ROWS & EPILOGUE:
        by_row = tl.load(scale_x + rows, mask=rows < row_end, other=0.0)
        value *= by_row[:, None] * tl.load(scale_w + cols, mask=cols < n, other=0.0)[None, :]
    return value


@triton.jit
def scaled_and_gated(value, gate, scale_x, scale_w, rows, row_end, cols, n, EPILOGUE: tl.constexpr):
    """`scaled(value) * activation(scaled(gate))`: scale_w has the gate's scales behind the n, or the one, of value."""
    if SCALES & EPILOGUE:
        value = scaled(value, scale_x, scale_w, rows, row_end, cols, n, EPILOGUE)
        of_gate = scale_w + (n if BY_ROWS & EPILOGUE else 1)
        gate = scaled(gate, scale_x, of_gate, rows, row_end, cols, n, EPILOGUE)
    return gated(value, gate, EPILOGUE)


@triton.jit
def finished(value, bias, residual, scale_x, scale_w, more, rows, row_end, cols, n, EPILOGUE: tl.constexpr):
    """`activation(scaled(value) + bias) + residual` of the elements [rows, cols]; what is gated has its activation,
    and its scales before that.

    Of one of several weights, bias and scale_w begin at its columns, of which there are n.
    """
    value = scaled(value, scale_x, scale_w, rows, row_end, cols, n, EPILOGUE)
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
        value = apply_added(value, more, offsets, inside, cols[None, :], n, EPILOGUE)
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
        value = apply_added(value, more, offsets, inside, cols[None, :], n, EPILOGUE)
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
