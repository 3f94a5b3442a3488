"""Registered epilogues (`Form` in ir/operators/forms.py): their device functions, compiled into the kernels.

A kernel is specialised by one integer: the bits of its Epilogue and, above them, a digest of the registered functions
and numbers. So another function or another number makes another kernel.
"""

from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from typing import Any, ClassVar

import triton
import triton.language as tl
from triton.experimental import gluon

from overweave.ir.epilogue import ADDED as ADDED_WORD
from overweave.ir.epilogue import EPILOGUE_BITS, Epilogue
from overweave.ir.operators.forms import registered

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
