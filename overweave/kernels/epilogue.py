"""What a tile does to its sums before it stores them, in fp32: scales, bias, activation or gate, residual, in order.

Written once for both matmul kernels and for the sums: element-wise code keeps whatever layout its operands have. Which
steps there are is one number, the bits of an `Epilogue` (ir/epilogue.py), for which a kernel is compiled. Where tiles
add what peers sent, products are scaled (SCALES) and the rest (ENDINGS) is done to sums that are whole.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from hashlib import sha256
from typing import Any, ClassVar, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from overweave.ir.epilogue import ADDED as ADDED_WORD
from overweave.ir.epilogue import EPILOGUE_BITS, OF_PARTS, Applied, Epilogue, Norm
from overweave.ir.operators.forms import GATE as GATE_WORD
from overweave.ir.operators.forms import NORM_WEIGHT, Form, Input, OfRow
from overweave.lang.tile_table import FROM_OWN_SHARD, ROW, SOURCE, SOURCE_ROW, read_column

# A kernel is specialised by one integer: the bits of its Epilogue and, above them, a digest of the registered functions
# and numbers; by another one for what it does to whole rows, RMSNorm or a registered form. So another function or
# number makes another kernel.

ADDED = tl.constexpr(EPILOGUE_BITS[ADDED_WORD])
PARTS = tl.constexpr(EPILOGUE_BITS[OF_PARTS])
_DIGEST_AT, _DIGEST_DIGITS = 16, 10
DIGEST = tl.constexpr(-1 << _DIGEST_AT)


class Step(NamedTuple):
    """What a device function does, and what it reads: (layout of an input, its index among all operands), or ("", a
    number). of_parts: as of `Applied`. combine, of_element, number: of whole rows (`OfRow`).
    """

    device: Any
    reads: tuple[tuple[str, Any], ...]
    of_parts: bool = False
    combine: str = ""
    of_element: Any = None
    number: Any = None


class AddedSteps:
    """digest -> the steps of an epilogue. It is a class since kernels may read no other mutable global."""

    by_digest: ClassVar[dict[int, tuple[Step, ...]]] = {}


_compiled = cache(triton.jit)


def _square(value):
    return value * value


def _of_root_mean_square(squares, n, eps):
    return tl.rsqrt(squares / n + eps[0])


def _normed(value, scale, beside):
    return value * scale * beside[0]


RMS_NORM = Form(
    inputs=(Input(NORM_WEIGHT),),
    device=_normed,
    of_row=OfRow(of_element=_square, number=_of_root_mean_square),
)


def epilogue_code(epilogue: Epilogue) -> int:
    """Return the integer that specialises a kernel with this epilogue; records the steps of registered ones."""
    return epilogue.bits | (_recorded([(each.form, each) for each in epilogue.added]) if epilogue.added else 0)


def rows_code(of_rows: Norm | Applied | None) -> int:
    """Return the integer that specialises a kernel with what it does to whole rows; 0: nothing."""
    if of_rows is None:
        return 0
    return _recorded(
        [(RMS_NORM, Applied("", (of_rows.eps,))) if isinstance(of_rows, Norm) else (of_rows.form, of_rows)]
    )


def _recorded(forms: Iterable[tuple[Form, Applied]]) -> int:
    """Record steps by their digest, and return it, above the bits of an epilogue."""
    steps, first = [], 0
    for form, each in forms:
        read = [(read.rows + read.cols, first + index) for index, read in enumerate(form.inputs)]
        first += len(read)
        of_row = form.of_row
        rows = (of_row.combine, _compiled(of_row.of_element), _compiled(of_row.number)) if of_row else ()
        reads = (*read, *(("", number) for number in each.numbers))
        steps.append(Step(_compiled(form.device), reads, each.of_parts, *rows))
    text = [[getattr(part, "cache_key", getattr(part, "__name__", part)) for part in step] for step in steps]
    digest = int(sha256(repr(text).encode()).hexdigest()[:_DIGEST_DIGITS], 16)
    AddedSteps.by_digest[digest] = tuple(steps)
    return digest << _DIGEST_AT


def added_operands(forms: Iterable[Applied | Norm], tensors: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return the tensors that registered forms and a norm read, in order; None without any."""
    names = [name for each in forms for name in ((NORM_WEIGHT,) if isinstance(each, Norm) else each.inputs)]
    return tuple(tensors[name] for name in names) or None


@gluon.constexpr_function
def how_many_steps(epilogue):
    return len(AddedSteps.by_digest[epilogue >> _DIGEST_AT])


@gluon.constexpr_function
def is_by_words(operands, dtype, lies, at):
    """Whether an input of columns has the dtype of the rows that lie in words."""
    return lies == "1n" and operands[at].dtype.element_ty == dtype


@gluon.constexpr_function
def of_step(epilogue, step, field):
    """A field of a step, by its name in `Step`."""
    return getattr(AddedSteps.by_digest[epilogue >> _DIGEST_AT][step], field)


@gluon.constexpr_function
def how_many_read(epilogue, step):
    return len(AddedSteps.by_digest[epilogue >> _DIGEST_AT][step].reads)


@gluon.constexpr_function
def read_of(epilogue, step, index, part):
    return AddedSteps.by_digest[epilogue >> _DIGEST_AT][step].reads[index][part]


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
        of_columns = tl.load(operands[AT] + cols, mask=cols < n, other=0.0).to(tl.float32)
        if len(inside.shape) > len(cols.shape):
            of_columns = of_columns[None, :]
        return of_columns
    elif LIES == "y1":
        return tl.load(operands[AT] + offsets // n, mask=inside, other=0.0).to(tl.float32)
    elif LIES == "11":
        return tl.load(operands[AT]).to(tl.float32)
    else:
        return AT


@triton.jit
def read_beside(operands, offsets, inside, cols, n, EPILOGUE: tl.constexpr, STEP: tl.constexpr):
    """All that a step reads: its inputs, then its numbers."""
    beside = ()
    for index in tl.static_range(how_many_read(EPILOGUE, STEP)):
        beside += (read_added(operands, offsets, inside, cols, n, EPILOGUE, STEP, index),)  # type: ignore[assignment]
    return beside


@triton.jit
def apply_added(value, operands, offsets, inside, cols, n, EPILOGUE: tl.constexpr, OF_PARTS: tl.constexpr = False):
    """Apply the registered epilogues in order: those of parts, or all others. offsets: of the elements in the row-major
    result; None for parts, which lie elsewhere. inside: of the elements. cols: their columns, or of all rows alike."""
    for step in tl.static_range(how_many_steps(EPILOGUE)):
        if of_step(EPILOGUE, step, "of_parts") == OF_PARTS:
            beside = read_beside(operands, offsets, inside, cols, n, EPILOGUE, step)
            value = of_step(EPILOGUE, step, "device")(value, beside)
    return value


@triton.jit
def join(one, other, ROWS: tl.constexpr):
    """What elements of rows count for, pair by pair. NaN if one is, as torch has it."""
    if of_step(ROWS, 0, "combine") == "sum":
        return one + other
    else:
        return _larger(one, other)


@triton.jit
def join_along(counted, AXIS: tl.constexpr, ROWS: tl.constexpr):
    """The same along an axis."""
    if of_step(ROWS, 0, "combine") == "sum":
        return tl.sum(counted, AXIS)
    else:
        return tl.reduce(counted, AXIS, _larger)


@triton.jit
def _larger(one, other):
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def number_of_row(joined, n, ROWS: tl.constexpr):
    """The number by which a row's elements are stored."""
    numbers = ()
    for index in tl.static_range(how_many_read(ROWS, 0)):
        if read_of(ROWS, 0, index, 0) == "":
            numbers += (read_of(ROWS, 0, index, 1),)  # type: ignore[assignment]
    return of_step(ROWS, 0, "number")(joined, n, numbers)


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
