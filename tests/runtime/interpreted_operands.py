"""What the repaired interpreter makes on short ways is what Triton makes on its own: operands, and device functions.

Run by test_interpreter.py in a process of its own, as interpreted_kernels.py is.
"""

from __future__ import annotations

import ast
import sys
import traceback
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from overweave.runtime.interpreted import interpreter

interpreter.repair()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
import triton.runtime.interpreter as triton_interpreter  # noqa: E402

from overweave.runtime.backends import load  # noqa: E402
from overweave.runtime.host.processes import run_ranks  # noqa: E402 - forked now, with what this process has made
from overweave.runtime.interpreted import (  # noqa: E402
    operands,
)

load("host interpreter")

SEMANTIC = triton_interpreter.interpreter_semantic
KINDS = (tl.int1, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.float16, tl.bfloat16, tl.float32, tl.float64)
POINTERS = (tl.pointer_type(tl.float32), tl.pointer_type(tl.int32))
NUMBERS = (0, 1, -1, 255, 2**31, 2**40, True, 0.5)
HOW: tuple[tuple[bool, ...], ...] = ((), (True, True), (True, False), (False, False, True, True))


def tensor(kind: Any, shape: tuple[int, ...]) -> Any:
    data = np.arange(3, 3 + int(np.prod(shape))).reshape(shape or 1).astype(triton_interpreter._get_np_dtype(kind))
    handle = triton_interpreter.TensorHandle(data, kind)
    return tl.tensor(handle, tl.block_type(kind, list(shape)) if shape else kind)


def made(check: Callable[..., Any], *given: Any) -> list[tuple[str, str, list[Any]]] | type[Exception]:
    try:
        sides = check(SEMANTIC, *given)
    except Exception as error:  # noqa: BLE001 - compared with the other way's
        return type(error)
    return [(str(side.type), str(side.handle.data.dtype), side.handle.data.tolist()) for side in sides]


@pytest.mark.parametrize("how", HOW, ids=str)
def test_operands_are_tritons_own(how: tuple[bool, ...]):
    kinds = [*product((*KINDS, *POINTERS), ((), (4,), (2, 4), (2, 1), (8,)))]
    sides = [*(tensor(kind, shape) for kind, shape in kinds), *NUMBERS]
    for lhs, rhs in product(sides, sides):
        if isinstance(lhs, tl.tensor) or isinstance(rhs, tl.tensor):
            given = lhs, rhs, *how
            assert made(operands._check, *given) == made(operands._original_check, *given), given


def test_shapes_are_broadcast_as_by_triton():
    sides = [tensor(tl.float32, shape) for shape in ((), (1,), (4,), (2, 1), (2, 4), (1, 4), (2, 2, 1), (8,))]
    for given in product(sides, sides):
        assert made(operands._broadcast, *given) == made(operands._original_broadcast, *given), given


def test_types_are_equal_as_triton_says():
    others = [*KINDS, *POINTERS, tl.block_type(tl.int32, [4]), tl.constexpr(tl.int32), tl.dtype("int32"), None]
    for left, right in product(KINDS, others):
        assert (left == right) == operands._original_equal(left, right), (left, right)
    assert tl.int32 == tl.dtype("int32") != tl.int64


def test_what_is_wider_than_its_type_is_refused():
    for kind, bits in ((tl.int1, 8), (tl.bfloat16, 16), (tl.int32, 32), (POINTERS[0], 64)):
        triton_interpreter.TensorHandle(np.zeros(2, f"i{bits // 8}"), kind)
        if bits < 64:
            with pytest.raises(ValueError, match=f"{2 * bits} bits"):
                triton_interpreter.TensorHandle(np.zeros(2, f"i{bits // 4}"), kind)


@triton.jit
def assigning_kernel(out, ONE: tl.constexpr):
    one = ONE
    two: tl.constexpr = ONE + 1
    if one == 1:
        three = one + two
    three += 0
    tl.store(out, one.to(tl.int64) + three.to(tl.int64))  # numbers have no `to`


def test_what_is_assigned_is_a_tensor_also_of_a_second_function_of_the_same_lines():
    for kernel in (assigning_kernel, triton.jit(assigning_kernel.fn.__class__(*parts(assigning_kernel.fn)))):
        out = torch.zeros(1, dtype=torch.int64)
        kernel[(1,)](out, 1)
        assert out.item() == 4


def parts(function: Any) -> tuple[Any, ...]:
    return function.__code__, function.__globals__, function.__name__


@triton.jit
def failing_kernel(out):
    tl.store(out, 0)
    wrong = out.nothing_of_this_name
    tl.store(out, wrong)


def test_an_error_is_told_with_the_line_it_has_in_its_file():
    with pytest.raises(triton_interpreter.InterpreterError) as raised:
        failing_kernel[(1,)](torch.zeros(1))
    assert raised.value.__cause__ is not None
    frame = traceback.extract_tb(raised.value.__cause__.__traceback__)[-1]
    assert (frame.name, frame.line) == ("failing_kernel", "wrong = out.nothing_of_this_name")


@triton.jit
def twice_assigning_kernel(out):
    one = two = 1
    tl.store(out, one + two)


def test_what_triton_refuses_is_refused():
    for _ in range(2):
        with pytest.raises(Exception, match="Multiple assignments"):
            twice_assigning_kernel[(1,)](torch.zeros(1))


def test_threads_may_make_one_function_at_once():
    """Programs run as threads, and launches beside each other: what is read of a file is the same for all of them."""
    read = operands._functions_of(__file__)[failing_kernel.fn.__code__.co_firstlineno]
    before = ast.dump(read, include_attributes=True)
    assert callable(triton_interpreter.FunctionRewriter(failing_kernel.fn).rewrite_ast())
    assert ast.dump(read, include_attributes=True) == before
    assert "to_tensor" not in before


def unmade() -> list[str]:
    """Functions that this rank would have to make."""
    modules = [module for name, module in sys.modules.items() if name.startswith(("overweave", __name__))]
    every = [each for module in modules for each in vars(module).values()]
    functions = [each for each in every if isinstance(each, triton_interpreter.InterpretedFunction)]
    assert len(functions) > 20
    return [each.__name__ for each in functions if each.fn not in each.rewritten_fn]


def test_ranks_inherit_all_functions_but_the_one_that_is_refused():
    assert run_ranks(unmade, 2) == [["twice_assigning_kernel"]] * 2
    assert not operands._pending
