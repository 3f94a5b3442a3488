"""Device code of epilogues: the steps of an `Epilogue` (ir/epilogue.py), applied in order to fp32 values.

Both matmul kernels and the reductions share it: element-wise code keeps whatever layout its operands have. A kernel is
compiled for one integer, a digest of the steps. Where tiles add peers' partials, PART steps apply to each product, SUM
steps to the complete sum.
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

# A kernel is specialised by a digest of the functions, input layouts and numbers of its Epilogue, and by a second one
# of its row-wise form, RMSNorm or a registered one. So another function or number compiles another kernel.

PART, PAIR, SUM = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
ALL = tl.constexpr(7)
_STAGES = {"part": PART.value, "pair": PAIR.value, "sum": SUM.value}
_DIGEST_DIGITS = 10


class DeviceStep(NamedTuple):
    """A step's device function and what it reads.

    inputs: (layout of an input, its index among all operands), or ("", a number). stage, of_gate: as of `Step`.
    combine, of_element, number: of row-wise forms (`OfRow`).
    """

    device: Any
    inputs: tuple[tuple[str, Any], ...]
    stage: int = SUM.value
    of_gate: bool = False
    combine: str = ""
    of_element: Any = None
    number: Any = None


class Elements(NamedTuple):
    """The elements that steps are applied to.

    offsets: in the row-major result, counted from `start`; None if no input is read by element. inside: mask. cols:
    column of each element, or one row of columns for all. n: columns of the product. col_offset: first column of this
    product if those of all B matrices were side by side. row_scales: fp8 scale of each row, or None.
    """

    offsets: Any
    inside: Any
    cols: Any
    n: Any
    start: Any
    col_offset: Any
    row_scales: Any


class StepsByDigest:
    """Registry: digest -> steps of an epilogue. A class attribute, because kernels may read no other mutable global."""

    steps: ClassVar[dict[int, tuple[DeviceStep, ...]]] = {}


_compiled = cache(triton.jit)


def _silu(value, inputs):
    return value / (1.0 + tl.exp(-value))


def _gelu(value, inputs):
    return 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))


def _gelu_tanh(value, inputs):
    inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
    return value - value / (1.0 + tl.exp(2.0 * inner))  # 0.5 * value * (1 + tanh(inner))


def _clamp_above(value, inputs):  # propagates NaN, which marks a failed wait
    return tl.minimum(value, inputs[0], propagate_nan=tl.PropagateNan.ALL)


def _clamp_both(value, inputs):
    value = tl.minimum(value, inputs[0], propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(value, -inputs[0], propagate_nan=tl.PropagateNan.ALL)


ON_DEVICE = {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh, "at most": _clamp_above, "within": _clamp_both}


def _square(value):
    return value * value


def _inverse_rms(squares, n, eps):
    return tl.rsqrt(squares / n + eps[0])


def _rms_normalize(value, scale, inputs):
    return value * scale * inputs[0]


RMS_NORM = Form(
    inputs=(Input(NORM_WEIGHT),),
    device=_rms_normalize,
    of_row=OfRow(of_element=_square, number=_inverse_rms),
)


@cache
def epilogue_code(epilogue: Epilogue) -> int:
    """Return the integer that specialises a kernel with this epilogue, and record its steps; 0: there are none."""
    return _register_steps([(step.applied.form, step) for step in epilogue.steps]) if epilogue.steps else 0


def rows_code(of_rows: Norm | Applied | None) -> int:
    """Return the integer that specialises a kernel with what it does to whole rows; 0: nothing."""
    if of_rows is None:
        return 0
    if isinstance(of_rows, Norm):
        return _register_steps([(RMS_NORM, Step(Applied("", (of_rows.eps,)), "sum"))])
    return _register_steps([(of_rows.form, Step(of_rows, "sum"))])


def _register_steps(forms: list[tuple[Form, Step]]) -> int:
    """Store steps in the registry under their digest; return the digest."""
    names, steps = list(_input_names(form for form, _ in forms)), []
    for form, step in forms:
        tensors = [(each.rows + each.cols, names.index(each.name) if each.name in names else 0) for each in form.inputs]
        of_row = form.of_row
        rows = (of_row.combine, _compiled(of_row.of_element), _compiled(of_row.number)) if of_row else ()
        inputs = (*tensors, *(("", number) for number in step.applied.numbers))
        device = _compiled(form.device or ON_DEVICE[form.name])
        steps.append(DeviceStep(device, inputs, _STAGES[step.stage], step.of_gate, *rows))
    text = [[getattr(part, "cache_key", getattr(part, "__name__", part)) for part in step] for step in steps]
    digest = int(sha256(repr(text).encode()).hexdigest()[:_DIGEST_DIGITS], 16)
    StepsByDigest.steps[digest] = tuple(steps)
    return digest


def _input_names(forms: Iterable[Form]) -> dict[str, None]:
    """Return the caller's tensors that forms read by name, in order, without duplicates, products and row scales."""
    return dict.fromkeys(each.name for form in forms for each in form.inputs if each.rows not in "kx")


def operands_of(what: Epilogue | Norm | Applied, tensors: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return the tensors that the steps read, in the order of their indices; None if they read none."""
    if isinstance(what, Epilogue):
        forms = [step.applied.form for step in what.steps]
    else:
        forms = [RMS_NORM if isinstance(what, Norm) else what.form]
    return tuple(tensors[name] for name in _input_names(forms)) or None


def gate_weights(epilogue: Epilogue, tensors: Mapping[str, Any]) -> list[Any]:
    """Return the gate weights: B matrices whose products the steps read."""
    return [tensors[each.name] for step in epilogue.steps for each in step.applied.form.inputs if each.rows == "k"]


@gluon.constexpr_function
def step_count(code):
    return len(StepsByDigest.steps[code]) if code else 0


@gluon.constexpr_function
def has_steps(code, stages):
    """Return whether the epilogue has a step of these stages."""
    return code != 0 and any(step.stage & stages for step in StepsByDigest.steps[code])


@gluon.constexpr_function
def reads_layout(code, stages, layout):
    """Return whether a step of these stages reads an input of this layout; layout "": any input in memory."""
    steps = [step for step in StepsByDigest.steps[code] if step.stage & stages] if code else []
    layouts = {each for step in steps for each, _ in step.inputs}
    return layout in layouts if layout else not layouts <= {"kn", ""}


@gluon.constexpr_function
def is_in_stages(code, step, stages):
    return StepsByDigest.steps[code][step].stage & stages != 0


@gluon.constexpr_function
def loads_as_words(operands, dtype, code, step, index, are_split):
    """Return whether an input can be loaded as int32 words of rows of `dtype`. are_split: a word may span two rows."""
    layout, operand = StepsByDigest.steps[code][step].inputs[index]
    return layout in (("yn",) if are_split else ("yn", "1n")) and operands[operand].dtype.element_ty == dtype


@gluon.constexpr_function
def step_field(code, step, field):
    """Return a field of a step, by its name in `DeviceStep`."""
    return getattr(StepsByDigest.steps[code][step], field)


@gluon.constexpr_function
def input_count(code, step):
    return len(StepsByDigest.steps[code][step].inputs)


@gluon.constexpr_function
def step_input(code, step, index, part):
    return StepsByDigest.steps[code][step].inputs[index][part]


@gluon.constexpr_function
def product_count_and_index(code, step):
    """Return (products of a tile: 2 with a gate; index of the product that the step changes: 1 for the gate)."""
    pairs = any(layout == "kn" for each in StepsByDigest.steps[code] for layout, _ in each.inputs)
    return 2 if pairs else 1, int(StepsByDigest.steps[code][step].of_gate)


@triton.jit
def read_input(operands, gate, elements, CODE: tl.constexpr, STEP: tl.constexpr, INDEX: tl.constexpr):
    """Load one input of a step in fp32, by its layout: per element, column or row, one for all, or a literal number.

    gate: the second product of the tile. elements: `Elements`.
    """
    LAYOUT: tl.constexpr = step_input(CODE, STEP, INDEX, 0)
    VALUE: tl.constexpr = step_input(CODE, STEP, INDEX, 1)
    if LAYOUT == "yn":
        return tl.load(operands[VALUE] + elements.start + elements.offsets, mask=elements.inside, other=0.0).to(
            tl.float32
        )
    elif LAYOUT == "1n":
        return _load_columns(operands[VALUE] + elements.col_offset, elements)
    elif LAYOUT == "1of_columns":
        PRODUCTS: tl.constexpr = product_count_and_index(CODE, STEP)[0]
        INDEX_OF_PRODUCT: tl.constexpr = product_count_and_index(CODE, STEP)[1]
        return _load_columns(operands[VALUE] + PRODUCTS * elements.col_offset + INDEX_OF_PRODUCT * elements.n, elements)
    elif LAYOUT == "1products":
        PRODUCT: tl.constexpr = product_count_and_index(CODE, STEP)[1]
        return tl.load(operands[VALUE] + PRODUCT)
    elif LAYOUT == "y1":
        return tl.load(
            operands[VALUE] + (elements.start + elements.offsets) // elements.n, mask=elements.inside, other=0.0
        ).to(tl.float32)
    elif LAYOUT == "11":
        return tl.load(operands[VALUE]).to(tl.float32)
    elif LAYOUT == "x1":
        return elements.row_scales
    elif LAYOUT == "kn":
        return gate
    else:
        return VALUE


@triton.jit
def _load_columns(operand, elements):
    """Load an input with one value a column."""
    of_columns = tl.load(operand + elements.cols, mask=elements.cols < elements.n, other=0.0).to(tl.float32)
    if len(elements.inside.shape) > len(elements.cols.shape):
        of_columns = of_columns[None, :]
    return of_columns


@triton.jit
def read_inputs(operands, gate, elements, CODE: tl.constexpr, STEP: tl.constexpr):
    """Return a tuple of all that a step reads: its inputs, then its numbers."""
    inputs = ()
    for index in tl.static_range(input_count(CODE, STEP)):
        inputs += (read_input(operands, gate, elements, CODE, STEP, index),)  # type: ignore[assignment]
    return inputs


@triton.jit
def apply_steps(value, gate, operands, elements, CODE: tl.constexpr, STAGES: tl.constexpr):
    """Apply the steps of some stages, in order. gate: the tile's second product, or None. elements: `Elements`."""
    for step in tl.static_range(step_count(CODE)):
        if is_in_stages(CODE, step, STAGES):
            if step_field(CODE, step, "of_gate"):
                gate = step_field(CODE, step, "device")(gate, read_inputs(operands, gate, elements, CODE, step))
            else:
                value = step_field(CODE, step, "device")(value, read_inputs(operands, gate, elements, CODE, step))
    return value


@triton.jit
def combine(one, other, ROWS: tl.constexpr):
    """Combine the contributions of elements to their row's statistic, element-wise: sum, or maximum that keeps NaN."""
    if step_field(ROWS, 0, "combine") == "sum":
        return one + other
    else:
        return larger(one, other)


@triton.jit
def combine_axis(contribution, AXIS: tl.constexpr, ROWS: tl.constexpr):
    """Reduce an axis by `combine`."""
    if step_field(ROWS, 0, "combine") == "sum":
        return tl.sum(contribution, AXIS)
    else:
        return tl.reduce(contribution, AXIS, larger)


@triton.jit
def larger(one, other):
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def row_statistic(combined, n, ROWS: tl.constexpr):
    """Return the statistic of each row (of RMSNorm: 1 / rms) from its combined contributions and n columns."""
    numbers = ()
    for index in tl.static_range(input_count(ROWS, 0)):
        if step_input(ROWS, 0, index, 0) == "":
            numbers += (step_input(ROWS, 0, index, 1),)  # type: ignore[assignment]
    return step_field(ROWS, 0, "number")(combined, n, numbers)


@triton.jit
def row_scale_base(epilogue_args, table, tile, row, CODE: tl.constexpr):
    """Return a pointer biased so that adding an output row gives the address of that row's fp8 scale.

    Scales are stored beside the rows of `a` that they belong to, own or gathered. row: first row of the tile; None:
    read from the table.
    """
    base = epilogue_args.scale_x
    if reads_layout(CODE, PART, "x1"):
        is_own = read_column(table, tile, SOURCE) == FROM_OWN_SHARD
        if row is None:
            row = read_column(table, tile, ROW)
        source_row = read_column(table, tile, SOURCE_ROW)
        base = tl.where(is_own, epilogue_args.scale_x, epilogue_args.scale_gathered) + (source_row - row)
    return base


@triton.jit
def apply_epilogue(
    value, gate, operands, scales, rows, row_end, cols, n, col_offset, CODE: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Apply some stages of the epilogue to the elements [rows, cols] of a product with n columns; return them.

    gate: the tile's second product, or None. scales: as of `row_scale_base`. col_offset: as of `Elements`.
    """
    row_scales = None
    if reads_layout(CODE, STAGES, "x1"):
        row_scales = tl.load(scales + rows, mask=rows < row_end, other=0.0)[:, None]
    inside = (rows < row_end)[:, None] & (cols < n)[None, :]
    offsets = rows.to(tl.int64)[:, None] * n + cols[None, :]
    return apply_steps(
        value, gate, operands, Elements(offsets, inside, cols, n, 0, col_offset, row_scales), CODE, STAGES
    )  # fmt: skip


@gluon.constexpr_function
def columns_at_a_time(code):
    """Return how many columns of a Gluon tile are finished at a time.

    With one step that reads columns, such as a bias, fewer make ptxas hoist so many loads that the widest tile spills
    registers (Triton 3.6).
    """
    steps = StepsByDigest.steps[code]
    return 32 if len(steps) == 1 and [layout for layout, _ in steps[0].inputs] == ["1n"] else 16


@gluon.jit
def apply_epilogue_by_columns(
    value, gate, operands, scales, row, row_end, col, n, col_offset, CODE: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Apply the epilogue to a Gluon tile from [row, col] on, a few columns at a time, to save registers."""
    ROWS: gl.constexpr = value.shape[0]
    COLS: gl.constexpr = value.shape[1]
    LAYOUT: gl.constexpr = value.type.layout
    WIDTH: gl.constexpr = columns_at_a_time(CODE)
    if COLS > WIDTH:
        HALF: gl.constexpr = COLS // 2
        left, right = value.reshape([ROWS, 2, HALF]).permute((0, 2, 1)).split()
        left_gate, right_gate = gate, gate
        if gate is not None:
            left_gate, right_gate = gate.reshape([ROWS, 2, HALF]).permute((0, 2, 1)).split()
        left = apply_epilogue_by_columns(
            left, left_gate, operands, scales, row, row_end, col, n, col_offset, CODE, STAGES
        )  # fmt: skip
        right = apply_epilogue_by_columns(
            right, right_gate, operands, scales, row, row_end, col + HALF, n, col_offset, CODE, STAGES
        )  # fmt: skip
        value = gl.join(left, right).permute((0, 2, 1)).reshape([ROWS, COLS])
        value = gl.convert_layout(value, LAYOUT)
    else:
        rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        # Warp-specialised partitions lose divisibility: rounding tells the compiler of it again.
        cols = col // 16 * 16 + gl.arange(0, COLS, layout=gl.SliceLayout(0, LAYOUT))
        value = apply_epilogue(value, gate, operands, scales, rows, row_end, cols, n // 8 * 8, col_offset, CODE, STAGES)
    return value
