"""What a tile does to its sums before it stores them, in fp32: the steps of an `Epilogue` (ir/epilogue.py), in order.

Written once for both matmul kernels and for the sums: element-wise code keeps whatever layout its operands have. A
kernel is compiled for one number, a digest of the steps, and does those of some stages: where tiles add what peers
sent, those of PART to products and those of SUM to sums that are whole.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from hashlib import sha256
from typing import Any, ClassVar, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from overweave.ir.epilogue import Applied, Epilogue, Norm, Step
from overweave.ir.operators.forms import NORM_WEIGHT, Form, Input, OfRow
from overweave.lang.tile_table import FROM_OWN_SHARD, ROW, SOURCE, SOURCE_ROW, read_column

# A kernel is specialised by one integer: a digest of the functions, layouts and numbers of its Epilogue; by another one
# for what it does to whole rows, RMSNorm or a registered form. So another function or number makes another kernel.

PART, PAIR, SUM = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
ALL = tl.constexpr(7)
_STAGES = {"part": PART.value, "pair": PAIR.value, "sum": SUM.value}
_DIGEST_DIGITS = 10


class DeviceStep(NamedTuple):
    """What a device function does, and what it reads: (layout of an input, its index among all operands), or ("", a
    number). stage, of_gate: as of `Step`. combine, of_element, number: of whole rows (`OfRow`).
    """

    device: Any
    reads: tuple[tuple[str, Any], ...]
    stage: int = SUM.value
    of_gate: bool = False
    combine: str = ""
    of_element: Any = None
    number: Any = None


class Elements(NamedTuple):
    """Which elements steps are done to. offsets: of the elements in the row-major result, from `start` on; None of
    parts, which lie elsewhere. inside: which are any. cols: their columns, or of all rows alike, of n, behind `before`
    of other weights. row_scales: of their rows, or None.
    """

    offsets: Any
    inside: Any
    cols: Any
    n: Any
    start: Any
    before: Any
    row_scales: Any


class StepsByDigest:
    """digest -> the steps of an epilogue. It is a class since kernels may read no other mutable global."""

    steps: ClassVar[dict[int, tuple[DeviceStep, ...]]] = {}


_compiled = cache(triton.jit)


def _silu(value, beside):
    return value / (1.0 + tl.exp(-value))


def _gelu(value, beside):
    return 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))


def _gelu_tanh(value, beside):
    inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
    return value - value / (1.0 + tl.exp(2.0 * inner))  # 0.5 * value * (1 + tanh(inner))


def _at_most(value, beside):  # what is void stays NaN
    return tl.minimum(value, beside[0], propagate_nan=tl.PropagateNan.ALL)


def _within(value, beside):
    value = tl.minimum(value, beside[0], propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(value, -beside[0], propagate_nan=tl.PropagateNan.ALL)


ON_DEVICE = {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh, "at most": _at_most, "within": _within}


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


@cache
def epilogue_code(epilogue: Epilogue) -> int:
    """Return the integer that specialises a kernel with this epilogue, and record its steps; 0: there are none."""
    return _recorded([(step.applied.form, step) for step in epilogue.steps]) if epilogue.steps else 0


def rows_code(of_rows: Norm | Applied | None) -> int:
    """Return the integer that specialises a kernel with what it does to whole rows; 0: nothing."""
    if of_rows is None:
        return 0
    if isinstance(of_rows, Norm):
        return _recorded([(RMS_NORM, Step(Applied("", (of_rows.eps,)), "sum"))])
    return _recorded([(of_rows.form, Step(of_rows, "sum"))])


def _recorded(forms: list[tuple[Form, Step]]) -> int:
    """Record steps by their digest, and return it."""
    names, steps = list(_read_by(form for form, _ in forms)), []
    for form, step in forms:
        read = [(each.rows + each.cols, names.index(each.name) if each.name in names else 0) for each in form.inputs]
        of_row = form.of_row
        rows = (of_row.combine, _compiled(of_row.of_element), _compiled(of_row.number)) if of_row else ()
        reads = (*read, *(("", number) for number in step.applied.numbers))
        device = _compiled(form.device or ON_DEVICE[form.name])
        steps.append(DeviceStep(device, reads, _STAGES[step.stage], step.of_gate, *rows))
    text = [[getattr(part, "cache_key", getattr(part, "__name__", part)) for part in step] for step in steps]
    digest = int(sha256(repr(text).encode()).hexdigest()[:_DIGEST_DIGITS], 16)
    StepsByDigest.steps[digest] = tuple(steps)
    return digest


def _read_by(forms: Iterable[Form]) -> dict[str, None]:
    """Return the names of what forms read from the caller's tensors, in order: neither products nor scales of rows."""
    return dict.fromkeys(each.name for form in forms for each in form.inputs if each.rows not in "kx")


def operands_of(what: Epilogue | Norm | Applied, tensors: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return the tensors that steps read, in order; None without any."""
    if isinstance(what, Epilogue):
        forms = [step.applied.form for step in what.steps]
    else:
        forms = [RMS_NORM if isinstance(what, Norm) else what.form]
    return tuple(tensors[name] for name in _read_by(forms)) or None


def factors_of(epilogue: Epilogue, tensors: Mapping[str, Any]) -> list[Any]:
    """Return the further weights, whose products steps read."""
    return [tensors[each.name] for step in epilogue.steps for each in step.applied.form.inputs if each.rows == "k"]


@gluon.constexpr_function
def how_many_steps(code):
    return len(StepsByDigest.steps[code]) if code else 0


@gluon.constexpr_function
def does(code, stages):
    """Whether any step is of some stages."""
    return code != 0 and any(step.stage & stages for step in StepsByDigest.steps[code])


@gluon.constexpr_function
def reads(code, stages, lies):
    """Whether any step of some stages reads what lies so, or, without a layout, anything in memory."""
    steps = [step for step in StepsByDigest.steps[code] if step.stage & stages] if code else []
    found = {layout for step in steps for layout, _ in step.reads}
    return lies in found if lies else not found <= {"kn", ""}


@gluon.constexpr_function
def is_of(code, step, stages):
    return StepsByDigest.steps[code][step].stage & stages != 0


@gluon.constexpr_function
def is_by_words(operands, dtype, code, step, index, are_split):
    """Whether an input has the dtype of the rows that lie in words, and their words. are_split: words hold two rows."""
    lies, at = StepsByDigest.steps[code][step].reads[index]
    return lies in (("yn",) if are_split else ("yn", "1n")) and operands[at].dtype.element_ty == dtype


@gluon.constexpr_function
def of_step(code, step, field):
    """A field of a step, by its name in `DeviceStep`."""
    return getattr(StepsByDigest.steps[code][step], field)


@gluon.constexpr_function
def how_many_read(code, step):
    return len(StepsByDigest.steps[code][step].reads)


@gluon.constexpr_function
def read_of(code, step, index, part):
    return StepsByDigest.steps[code][step].reads[index][part]


@gluon.constexpr_function
def columns_of(code, step):
    """Of inputs of all products' columns: times n, where those of a weight begin, and those of the step's product."""
    pairs = any(layout == "kn" for each in StepsByDigest.steps[code] for layout, _ in each.reads)
    return 2 if pairs else 1, int(StepsByDigest.steps[code][step].of_gate)


@triton.jit
def read_input(operands, gate, at, CODE: tl.constexpr, STEP: tl.constexpr, INDEX: tl.constexpr):
    """Load one input of a step in fp32, by its layout: of each element, column or row, or one for all; or a number.

    gate: the other product. at: `Elements`.
    """
    LIES: tl.constexpr = read_of(CODE, STEP, INDEX, 0)
    AT: tl.constexpr = read_of(CODE, STEP, INDEX, 1)
    if LIES == "yn":
        return tl.load(operands[AT] + at.start + at.offsets, mask=at.inside, other=0.0).to(tl.float32)
    elif LIES == "1n":
        return _across(operands[AT] + at.before, at)
    elif LIES == "1of_columns":
        EACH: tl.constexpr = columns_of(CODE, STEP)[0]
        OWN: tl.constexpr = columns_of(CODE, STEP)[1]
        return _across(operands[AT] + EACH * at.before + OWN * at.n, at)
    elif LIES == "1products":
        OF: tl.constexpr = columns_of(CODE, STEP)[1]
        return tl.load(operands[AT] + OF)
    elif LIES == "y1":
        return tl.load(operands[AT] + (at.start + at.offsets) // at.n, mask=at.inside, other=0.0).to(tl.float32)
    elif LIES == "11":
        return tl.load(operands[AT]).to(tl.float32)
    elif LIES == "x1":
        return at.row_scales
    elif LIES == "kn":
        return gate
    else:
        return AT


@triton.jit
def _across(operand, at):
    """What is read of each column, once."""
    of_columns = tl.load(operand + at.cols, mask=at.cols < at.n, other=0.0).to(tl.float32)
    if len(at.inside.shape) > len(at.cols.shape):
        of_columns = of_columns[None, :]
    return of_columns


@triton.jit
def read_beside(operands, gate, at, CODE: tl.constexpr, STEP: tl.constexpr):
    """All that a step reads: its inputs, then its numbers."""
    beside = ()
    for index in tl.static_range(how_many_read(CODE, STEP)):
        beside += (read_input(operands, gate, at, CODE, STEP, index),)  # type: ignore[assignment]
    return beside


@triton.jit
def apply_steps(value, gate, operands, at, CODE: tl.constexpr, STAGES: tl.constexpr):
    """Apply the steps of some stages to elements, in order. gate: the product beside value, or None. at: `Elements`."""
    for step in tl.static_range(how_many_steps(CODE)):
        if is_of(CODE, step, STAGES):
            if of_step(CODE, step, "of_gate"):
                gate = of_step(CODE, step, "device")(gate, read_beside(operands, gate, at, CODE, step))
            else:
                value = of_step(CODE, step, "device")(value, read_beside(operands, gate, at, CODE, step))
    return value


@triton.jit
def join(one, other, ROWS: tl.constexpr):
    """What elements of rows count for, pair by pair. NaN if one is, as torch has it."""
    if of_step(ROWS, 0, "combine") == "sum":
        return one + other
    else:
        return larger(one, other)


@triton.jit
def join_along(counted, AXIS: tl.constexpr, ROWS: tl.constexpr):
    """The same along an axis."""
    if of_step(ROWS, 0, "combine") == "sum":
        return tl.sum(counted, AXIS)
    else:
        return tl.reduce(counted, AXIS, larger)


@triton.jit
def larger(one, other):
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def number_of_row(joined, n, ROWS: tl.constexpr):
    """The number by which a row's elements are stored."""
    numbers = ()
    for index in tl.static_range(how_many_read(ROWS, 0)):
        if read_of(ROWS, 0, index, 0) == "":
            numbers += (read_of(ROWS, 0, index, 1),)  # type: ignore[assignment]
    return of_step(ROWS, 0, "number")(joined, n, numbers)


@triton.jit
def scales_beside(ends, table, tile, row, CODE: tl.constexpr):
    """Where the scale of row 0 of a tile's product would lie, if rows are scaled: that of its first row lies beside
    that row of `a`.

    row: the tile's first; None: it is read here.
    """
    beside = ends.scale_x
    if reads(CODE, PART, "x1"):
        is_own = read_column(table, tile, SOURCE) == FROM_OWN_SHARD
        if row is None:
            row = read_column(table, tile, ROW)
        source_row = read_column(table, tile, SOURCE_ROW)
        beside = tl.where(is_own, ends.scale_x, ends.scale_gathered) + (source_row - row)
    return beside


@triton.jit
def finished(
    value, gate, operands, scales, rows, row_end, cols, n, before, CODE: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """The elements [rows, cols] of a product behind the steps of some stages. gate: the product beside it, or None.

    scales: as of `scales_beside`. Of one of several weights there are n columns, behind `before` of others.
    """
    row_scales = None
    if reads(CODE, STAGES, "x1"):
        row_scales = tl.load(scales + rows, mask=rows < row_end, other=0.0)[:, None]
    inside = (rows < row_end)[:, None] & (cols < n)[None, :]
    offsets = rows.to(tl.int64)[:, None] * n + cols[None, :]
    return apply_steps(
        value, gate, operands, Elements(offsets, inside, cols, n, 0, before, row_scales), CODE, STAGES
    )  # fmt: skip


@gluon.constexpr_function
def part_cols(code):
    """Columns of a Gluon tile that are finished at a time. With one step that reads columns, such as a bias, fewer make
    the assembler read ahead so much of it that the widest tile spills registers (Triton 3.6).
    """
    steps = StepsByDigest.steps[code]
    return 32 if len(steps) == 1 and [layout for layout, _ in steps[0].reads] == ["1n"] else 16


@gluon.jit
def finished_by_parts(
    value, gate, operands, scales, row, row_end, col, n, before, CODE: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """`finished` for a Gluon tile from [row, col] on, a few columns at a time: what a whole tile reads would not fit
    beside its sums.
    """
    ROWS: gl.constexpr = value.shape[0]
    COLS: gl.constexpr = value.shape[1]
    LAYOUT: gl.constexpr = value.type.layout
    WIDTH: gl.constexpr = part_cols(CODE)
    if COLS > WIDTH:
        HALF: gl.constexpr = COLS // 2
        left, right = value.reshape([ROWS, 2, HALF]).permute((0, 2, 1)).split()
        left_gate, right_gate = gate, gate
        if gate is not None:
            left_gate, right_gate = gate.reshape([ROWS, 2, HALF]).permute((0, 2, 1)).split()
        left = finished_by_parts(
            left, left_gate, operands, scales, row, row_end, col, n, before, CODE, STAGES
        )  # fmt: skip
        right = finished_by_parts(
            right, right_gate, operands, scales, row, row_end, col + HALF, n, before, CODE, STAGES
        )  # fmt: skip
        value = gl.join(left, right).permute((0, 2, 1)).reshape([ROWS, COLS])
        value = gl.convert_layout(value, LAYOUT)
    else:
        rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        # What a partition is handed tells the compiler nothing: rounded, it is known to be a multiple.
        cols = col // 16 * 16 + gl.arange(0, COLS, layout=gl.SliceLayout(0, LAYOUT))
        value = finished(value, gate, operands, scales, rows, row_end, cols, n // 8 * 8, before, CODE, STAGES)
    return value
