"""RMSNorm and registered epilogues (`Form` in ir/operators/forms.py): their device functions, compiled into kernels.

A kernel is specialised by one integer: the bits of its Epilogue and, above them, a digest of the registered functions
and numbers; by another one for what it does to whole rows. So another function or number makes another kernel.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from hashlib import sha256
from typing import Any, ClassVar, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon

from overweave.ir.epilogue import ADDED as ADDED_WORD
from overweave.ir.epilogue import EPILOGUE_BITS, OF_PARTS, Applied, Epilogue, Norm
from overweave.ir.operators.forms import NORM_WEIGHT, Form, Input, OfRow

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
