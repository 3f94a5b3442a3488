"""Repairs of the Triton interpreter, so that kernels which signal each other run on CPU and compute what a GPU would.

What Triton 3.6 does under TRITON_INTERPRET=1, and what this module makes of it:

    bf16 dot multiplies bit patterns            fp32 product of the values, added to the accumulator
    fp32 -> bf16 truncates                      rounds to nearest even, bit for bit as torch does
    NaN in fp8 (e4m3) reads as 480              is NaN; fp8 is rounded to as a GPU does, overflow to the largest number
    inline assembly is not implemented          the few forms overweave uses are recognised by pattern
    programs of a grid run one after another    each is a thread, so they may wait for each other; several grids too
    the language is patched at every call       once per process, so that launches may overlap
    a poll burns the core                       a poll that sees nothing new yields it
    sums are checked, and nobody is told        they are not checked
    functions are made anew by every process    made once, before it forks
    operands are asked what they are            those that need no conversion are taken as they are
    scalars break with numpy 2.4                converted through `.item()`
    a fraction that is passed stays Python's    is an fp32 scalar, which has `.to`
    only `tl.constexpr` is a constant           whatever the language is called: `T.constexpr`, too

It cannot show missing barriers, fences or scopes: that is the lint's work (compiler/). A process that interprets cannot
compile: import this module before triton, in a process of its own.
"""
# ruff: noqa: E402 - triton is imported behind what it asks for

from __future__ import annotations

import inspect
import os
import re
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from overweave.errors import MachineError

# Triton asks the environment when its own language library is imported: from then on it either compiles or interprets.
_INTERPRET = "TRITON_INTERPRET"
_said, _is_first = os.environ.get(_INTERPRET), "triton" not in sys.modules
if _is_first:
    os.environ[_INTERPRET] = "1"

import numpy as np
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter

from overweave.runtime.interpreted.operands import prepare_operands_shortly
from overweave.runtime.interpreted.source import make_functions_once
from overweave.runtime.interpreted.types import make_types_once

if _is_first:
    # Kernels that are decorated later ask the knob. Its setter would write the environment, which processes inherit.
    vars(triton.knobs.runtime)["interpret"] = True
    os.environ.pop(_INTERPRET)
    os.environ.update({} if _said is None else {_INTERPRET: _said})

_Builder = triton_interpreter.InterpreterBuilder
_Handle = triton_interpreter.TensorHandle
_POLL_PAUSE_S = 5e-4
_CONSTANT = re.compile(r"\bconstexpr\b")

_program = threading.local()
_is_repaired = False


def repair() -> None:
    """Applies all repairs; once per process, later calls do nothing. Raises MachineError if this process compiles."""
    global _is_repaired
    if _is_repaired:
        return
    if not isinstance(tl.zeros, triton_interpreter.InterpretedFunction):
        found = "triton was imported for compiling"
        cure = "Use a process that imports overweave.runtime.interpreter first, or set TRITON_INTERPRET=1"
        raise MachineError("interpret kernels in this process", found, cure)
    _Builder.create_dot = _dot
    _Builder.cast_impl = _cast
    _Builder.create_fp_to_fp = _cast_rounding
    _Builder.create_inline_asm = _inline_assembly
    _Builder.create_atomic_rmw = _atomic_rmw
    prepare_operands_shortly()
    _patch_language()
    _run_programs_as_threads()
    make_types_once()
    make_functions_once()
    _leave_out_what_nobody_looks_at()
    _is_repaired = True


def atomic_add(address: int, value: int) -> None:
    """Adds to an int32 word that kernels and other processes may be adding to. Release order."""
    _rmw(np.array([address], np.uint64), np.array([value], np.int32))


def round_to_bfloat16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """fp32 values as bf16 bit patterns (uint16), rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    quiet = (bits >> 16).astype(np.uint16) | np.uint16(0x40)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, quiet, rounded)


_FP8_NUMBERS = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float().numpy()
_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max


def round_to_fp8(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Values as e4m3 bit patterns (uint8), rounded to nearest even; what overflows is the largest number."""
    clipped = np.clip(np.ascontiguousarray(values, np.float32), -_LARGEST_FP8, _LARGEST_FP8)
    return torch.from_numpy(clipped).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def _widened(handle: Any) -> np.ndarray[Any, Any]:
    """The values of a floating-point handle as fp32; bf16 and fp8 are stored as bit patterns."""
    data: np.ndarray[Any, Any] = handle.data
    if handle.dtype.scalar == tl.float8e4nv:
        numbers: np.ndarray[Any, Any] = _FP8_NUMBERS[data]
        return numbers
    if handle.dtype.scalar == tl.bfloat16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32)


_original_dot = _Builder.create_dot


def _dot(self: Any, a: Any, b: Any, d: Any, precision: Any, max_num_imprecise_acc: Any) -> Any:
    if a.dtype.scalar not in (*_PATTERNS, tl.float16, tl.float32) or d.data.dtype != np.float32:
        return _original_dot(self, a, b, d, precision, max_num_imprecise_acc)
    return _Handle(product(_widened(a), _widened(b)) + d.data, d.dtype.scalar)


def product(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """fp32, by numpy's own loops: a BLAS works for each program's thread with threads and a spin lock of its own.

    Where one of MKL's threads still holds that lock while a rank forks, every product of the rank waits for ever.
    """
    made: np.ndarray[Any, Any] = np.einsum("...mk,...kn->...mn", left, right)
    return made


_original_cast = _Builder.cast_impl
_FLOATS = (tl.float16, tl.float32, tl.float64)
_PATTERNS = (tl.bfloat16, tl.float8e4nv)


def _cast(self: Any, source: Any, target: Any) -> Any:
    have, want = source.dtype.scalar, target.scalar
    if have == want:
        return _original_cast(self, source, target)
    if want == tl.bfloat16 and (have in _FLOATS or have.is_int()):
        return _Handle(round_to_bfloat16(source.data), tl.bfloat16)
    if want == tl.float8e4nv and (have in _FLOATS or have == tl.bfloat16):
        return _Handle(round_to_fp8(_widened(source)), want)
    if have == tl.float8e4nv and want == tl.bfloat16:
        return _Handle(round_to_bfloat16(_widened(source)), want)
    if have in _PATTERNS and want in _FLOATS:
        return _Handle(_widened(source).astype(triton_interpreter._get_np_dtype(want)), want)
    return _original_cast(self, source, target)


_original_fp_to_fp = _Builder.create_fp_to_fp


def _cast_rounding(self: Any, source: Any, target: Any, mode: Any) -> Any:
    floats = (*_PATTERNS, *_FLOATS)
    if source.dtype.scalar in floats and target.scalar in floats:
        return _cast(self, source, target)
    return _original_fp_to_fp(self, source, target, mode)


class _Results(list[Any]):
    """What the builder's inline assembly returns."""

    def get_result(self, index: int) -> Any:
        return self[index]


def _clock(builder: Any, values: list[Any]) -> Any:
    return _Handle(np.array([time.monotonic_ns()], np.int64), tl.int64)


def _read(builder: Any, values: list[Any]) -> Any:
    return builder.create_load(values[0], None, None, True)


def _write(builder: Any, values: list[Any]) -> Any:
    builder.create_store(values[0], values[1], None, None)
    return _nothing(builder, values)


def _nothing(builder: Any, values: list[Any]) -> Any:
    return _Handle(np.zeros(1, np.int32), tl.int32)


_ASSEMBLY = (
    (re.compile(r"^mov\.u64 \$0, %globaltimer;$"), _clock),
    (re.compile(r"^ld\.(acquire|relaxed|volatile)[.\w]* \$0, \[\$1\];$"), _read),
    (re.compile(r"^st\.(release|relaxed)[.\w]* \[\$\d\], \$\d;( mov\.\w+ \$0, \w+;)?$"), _write),
    (re.compile(r"^(fence|cp\.async\.bulk\.wait_group|nanosleep)[^;]*;( (fence|mov)[^;]*;)*$"), _nothing),
)


def _inline_assembly(
    self: Any, assembly: str, constraints: str, values: list[Any], types: Any, is_pure: bool, pack: int
) -> _Results:
    text = " ".join(assembly.split())
    for pattern, effect in _ASSEMBLY:
        if pattern.match(text):
            return _Results([effect(self, values)])
    raise NotImplementedError(f"inline assembly not emulated: {text}")


_original_rmw = _Builder.create_atomic_rmw


def _atomic_rmw(self: Any, operation: Any, pointer: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
    result = _original_rmw(self, operation, pointer, value, mask, sem, scope)
    if value.data.size == 1 and not value.data.any():  # adding zero is how an interpreted kernel polls
        seen: dict[int, int] = _program.__dict__.setdefault("seen", {})
        address, found = int(pointer.data.item()), int(result.data.item())
        if seen.get(address) == found:
            time.sleep(_POLL_PAUSE_S)
        seen[address] = found
    return result


def _rmw(address: np.ndarray[Any, Any], value: np.ndarray[Any, Any]) -> None:
    native = triton_interpreter._interpreter
    native.atomic_rmw(native.RMW_OP.ADD, address, value, np.ones(1, bool), native.MEM_SEMANTIC.ACQUIRE_RELEASE)


def _patch_language() -> None:
    every = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    triton_interpreter._patch_lang(every)
    tl.core.tensor.__index__ = lambda self: int(self.handle.data.item())
    triton_interpreter._patch_lang = lambda function: SimpleNamespace(restore=lambda: None)


def _leave_out_what_nobody_looks_at() -> None:
    """Sums of integers are computed again in 64 bits, for an assertion that only debugging makes: half of all work."""
    options = triton_interpreter.interpreter_builder.options
    if not options.debug:
        triton_interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


def _run_programs_as_threads() -> None:
    """Grid index and grid size belong to the thread; `grid_dim` and `grid_idx` of the one builder read them."""

    def of_thread(name: str) -> property:
        return property(lambda self: getattr(_program, name), lambda self, value: setattr(_program, name, value))

    for name in ("grid_idx", "grid_dim"):
        setattr(_Builder, name, of_thread(name))
    triton_interpreter.GridExecutor.__call__ = _launch


def _scalar(value: Any) -> Any:
    """An argument of a launch as the kernel finds it."""
    if isinstance(value, float):
        return tl.tensor(_Handle(np.array([value], np.float32), tl.float32), tl.float32)
    return triton_interpreter._implicit_cvt(value)


def _launch(self: Any, *arguments: Any, **options: Any) -> None:
    """All programs of the grid at once; returns when all have ended. CPU tensors only."""
    names = inspect.getfullargspec(self.fn).args
    options = {name: option for name, option in options.items() if name in names}
    bound = inspect.getcallargs(self.fn, *arguments, **options)
    constants = {name for name, said in self.fn.__annotations__.items() if _CONSTANT.search(str(said))}
    bound = {name: value if name in constants else _scalar(value) for name, value in bound.items()}
    grid = self.grid(bound) if callable(self.grid) else self.grid
    grid = (*grid, 1, 1)[:3]
    errors: list[BaseException] = []

    def program(index: tuple[int, ...]) -> None:
        _program.grid_idx, _program.grid_dim = index, grid
        try:
            self.fn(**bound)
        except BaseException as error:  # noqa: BLE001 - raised below, in the launching thread
            errors.append(error)

    threads = [threading.Thread(target=program, args=(index,), daemon=True) for index in np.ndindex(*grid)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise triton_interpreter.InterpreterError(repr(errors[0])) from errors[0]


__all__ = ["atomic_add", "repair", "round_to_bfloat16", "round_to_fp8", "triton"]
