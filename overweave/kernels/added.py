"""Epilogues that were registered (`Form` in ir/operators/forms.py): their functions, compiled with the kernels.

The bits of an Epilogue with such, and behind them a digest of their functions and numbers, are the number for which a
kernel is compiled: another function, or another number, makes another kernel.
"""

from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from typing import Any, ClassVar, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon

from overweave.ir.epilogue import ADDED as ADDED_WORD
from overweave.ir.epilogue import EPILOGUE_BITS, Epilogue
from overweave.ir.operators.forms import registered

ADDED = tl.constexpr(EPILOGUE_BITS[ADDED_WORD])
_DIGEST_AT, _DIGEST_DIGITS = 16, 10


class AddedStep(NamedTuple):
    """device: as Triton compiles it. inputs: which of all operands it reads, and how each lies. numbers: constants."""

    device: Any
    inputs: tuple[tuple[int, str], ...]
    numbers: tuple[float, ...]


class AddedSteps:
    """The steps of every number, by its digest: of a class, since Triton lets no other global be read."""

    by_digest: ClassVar[dict[int, tuple[AddedStep, ...]]] = {}


_compiled = cache(triton.jit)


def code_of(epilogue: Epilogue) -> int:
    """The number for which a kernel that ends with an epilogue is compiled."""
    if not epilogue.added:
        return epilogue.bits
    steps, first = [], 0
    for each in epilogue.added:
        form = registered(each.name)
        lie = [(first + index, read.rows + read.cols) for index, read in enumerate(form.inputs)]
        first += len(lie)
        steps.append(AddedStep(_compiled(form.device), tuple(lie), each.numbers))
    said = [(getattr(step.device, "cache_key", step.device.__name__), *step[1:]) for step in steps]
    digest = int(sha256(repr(said).encode()).hexdigest()[:_DIGEST_DIGITS], 16)
    AddedSteps.by_digest[digest] = tuple(steps)
    return epilogue.bits | digest << _DIGEST_AT


def added_operands(epilogue: Epilogue, tensors: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """What registered epilogues read, as kernels take it; None where there are none."""
    names = [read.name for each in epilogue.added for read in registered(each.name).inputs]
    return tuple(tensors[name] for name in names) or None


@gluon.constexpr_function
def added_steps(epilogue):
    """How many there are."""
    return len(AddedSteps.by_digest[epilogue >> _DIGEST_AT])


@gluon.constexpr_function
def added_inputs(epilogue, step):
    return len(AddedSteps.by_digest[epilogue >> _DIGEST_AT][step].inputs)


@gluon.constexpr_function
def added_place(epilogue, step, index):
    """Which of all operands an input is."""
    return AddedSteps.by_digest[epilogue >> _DIGEST_AT][step].inputs[index][0]


@gluon.constexpr_function
def added_lies(epilogue, step, index):
    return AddedSteps.by_digest[epilogue >> _DIGEST_AT][step].inputs[index][1]


@gluon.constexpr_function
def added_numbers(epilogue, step):
    return len(AddedSteps.by_digest[epilogue >> _DIGEST_AT][step].numbers)


@gluon.constexpr_function
def added_number(epilogue, step, index):
    return AddedSteps.by_digest[epilogue >> _DIGEST_AT][step].numbers[index]


@gluon.constexpr_function
def added_device(epilogue, step):
    return AddedSteps.by_digest[epilogue >> _DIGEST_AT][step].device


@triton.jit
def read_added(operand, offsets, inside, cols, n, LIES: tl.constexpr):
    """What stands beside elements of the result, in fp32: at their places, or of their columns or rows, or for all."""
    if LIES == "yn":
        return tl.load(operand + offsets, mask=inside, other=0.0).to(tl.float32)
    elif LIES == "1n":
        return tl.load(operand + cols, mask=cols < n, other=0.0).to(tl.float32)
    elif LIES == "y1":
        return tl.load(operand + offsets // n, mask=inside, other=0.0).to(tl.float32)
    else:
        return tl.load(operand).to(tl.float32)


@triton.jit
def with_added(value, operands, offsets, inside, cols, n, EPILOGUE: tl.constexpr):
    """What registered epilogues make of elements that lie in the result at `offsets`, one behind the other. cols: their
    columns, of a shape that goes with theirs."""
    for step in tl.static_range(added_steps(EPILOGUE)):
        beside = ()
        for index in tl.static_range(added_inputs(EPILOGUE, step)):
            PLACE: tl.constexpr = added_place(EPILOGUE, step, index)
            LIES: tl.constexpr = added_lies(EPILOGUE, step, index)
            beside += (read_added(operands[PLACE], offsets, inside, cols, n, LIES),)  # type: ignore[assignment]
        for index in tl.static_range(added_numbers(EPILOGUE, step)):
            beside += (added_number(EPILOGUE, step, index),)  # type: ignore[assignment]
        value = added_device(EPILOGUE, step)(value, beside)
    return value
