"""Patches of the Triton interpreter, so that kernels which signal each other run on CPU and compute what a GPU would.

What Triton 3.6 does under TRITON_INTERPRET=1, and what it does with these patches:

    bf16 computes with bit patterns             computes as a GPU, bit for bit (interpreted/numbers.py), and so do
                                                fp16, fp8 and all casts; fp8 that no compiler accepts raises
    a reduction is numpy's                      combines halves, as the lanes of a warp (interpreted/reductions.py)
    `a and b` of blocks is b                    is element-wise
    inline assembly is not implemented          the few forms overweave uses are recognised by pattern
    programs of a grid run one after another    each is a thread, so they may wait for each other; several grids, too
    the language is patched at every call       once per process, so that launches may overlap
    a poll burns the core                       a poll that reads the same value again yields the core
    integer overflow is checked                 it is not: only debug mode would report it
    functions are rewritten in every process    rewritten once, before it forks
    operands are converted in general           operands that need no conversion skip it
    scalars break with numpy 2.4                converted through `.item()`
    a float argument stays Python's             is an fp32 scalar, which has `.to`
    only `tl.constexpr` is a constexpr          `constexpr` of any module alias is one: `T.constexpr`, too

It cannot show missing barriers, fences or scopes: the lint does (compiler/). A process that interprets cannot compile:
import this module before triton, in a process of its own.
"""
# ruff: noqa: E402 - triton is imported after the environment is set

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

# Triton reads the environment when its language library is imported: from then on it either compiles or interprets.
_INTERPRET = "TRITON_INTERPRET"
_environment_value, _is_first = os.environ.get(_INTERPRET), "triton" not in sys.modules
if _is_first:
    os.environ[_INTERPRET] = "1"

import numpy as np
import triton
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter

from overweave.runtime.interpreted.numbers import atomic_rmw, install_gpu_arithmetic, round_to_bfloat16, round_to_fp8
from overweave.runtime.interpreted.operands import (
    compile_pending,
    install_function_cache,
    install_nan_padding,
    install_operand_shortcuts,
    install_type_cache,
)
from overweave.runtime.interpreted.reductions import install_warp_reductions

if _is_first:
    # Kernels that are decorated later read the knob. Its setter would write the environment, which processes inherit.
    vars(triton.knobs.runtime)["interpret"] = True
    os.environ.pop(_INTERPRET)
    os.environ.update({} if _environment_value is None else {_INTERPRET: _environment_value})

_Builder = triton_interpreter.InterpreterBuilder
_Handle = triton_interpreter.TensorHandle
_POLL_PAUSE_S = 5e-4
_POLICIES = (None,) * (len(inspect.signature(_Builder.create_load).parameters) - 3)  # two in 3.6, one in 3.9
_CONSTANT = re.compile(r"\bconstexpr\b")

_program = threading.local()
_is_repaired = False


def repair() -> None:
    """Apply all patches; once per process, later calls do nothing. Raises MachineError if this process compiles."""
    global _is_repaired
    if _is_repaired:
        return
    if not isinstance(tl.zeros, triton_interpreter.InterpretedFunction):
        found = "triton was imported for compiling"
        cure = "Use a process that imports overweave.runtime.interpreted.interpreter first, or set TRITON_INTERPRET=1"
        raise MachineError("interpret kernels in this process", found, cure)
    install_gpu_arithmetic()
    install_nan_padding()
    _Builder.create_inline_asm = _inline_assembly
    _Builder.create_atomic_rmw = _atomic_rmw
    install_operand_shortcuts()
    _patch_language()
    install_warp_reductions()
    _run_programs_as_threads()
    install_type_cache()
    install_function_cache()
    _skip_overflow_checks()
    _is_repaired = True


def atomic_add(address: int, value: int) -> None:
    """Add to an int32 word, atomically among kernels and processes, in release order."""
    _atomic_add_words(np.array([address], np.uint64), np.array([value], np.int32))


class _Results(list[Any]):
    """The results of inline assembly, as the builder returns them."""

    def get_result(self, index: int) -> Any:
        return self[index]


def _clock(builder: Any, values: list[Any]) -> Any:
    return _Handle(np.array([time.monotonic_ns()], np.int64), tl.int64)


def _read(builder: Any, values: list[Any]) -> Any:
    return builder.create_load(values[0], *_POLICIES, True)


def _write(builder: Any, values: list[Any]) -> Any:
    builder.create_store(values[0], values[1], *_POLICIES)
    return _no_op(builder, values)


def _no_op(builder: Any, values: list[Any]) -> Any:
    return _Handle(np.zeros(1, np.int32), tl.int32)


_ASSEMBLY = (
    (re.compile(r"^mov\.u64 \$0, %globaltimer;$"), _clock),
    (re.compile(r"^ld\.(acquire|relaxed|volatile)[.\w]* \$0, \[\$1\];$"), _read),
    (re.compile(r"^st\.(release|relaxed)[.\w]* \[\$\d\], \$\d;( mov\.\w+ \$0, \w+;)?$"), _write),
    (re.compile(r"^(fence|cp\.async\.bulk\.wait_group|nanosleep)[^;]*;( (fence|mov)[^;]*;)*$"), _no_op),
)


def _inline_assembly(
    self: Any, assembly: str, constraints: str, values: list[Any], types: Any, is_pure: bool, pack: int
) -> _Results:
    """Emulate the known forms of inline assembly. Raises NotImplementedError for others."""
    text = " ".join(assembly.split())
    for pattern, effect in _ASSEMBLY:
        if pattern.match(text):
            return _Results([effect(self, values)])
    raise NotImplementedError(f"inline assembly not emulated: {text}")


def _atomic_rmw(self: Any, operation: Any, pointer: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
    """Run an atomic; yield the core if it is a poll that reads the same value again."""
    result = atomic_rmw(self, operation, pointer, value, mask, sem, scope)
    if value.data.size == 1 and not value.data.any():  # adding zero is how an interpreted kernel polls
        seen: dict[int, int] = _program.__dict__.setdefault("seen", {})
        address, loaded = int(pointer.data.item()), int(result.data.item())
        if seen.get(address) == loaded:
            time.sleep(_POLL_PAUSE_S)
        seen[address] = loaded
    return result


def _atomic_add_words(address: np.ndarray[Any, Any], value: np.ndarray[Any, Any]) -> None:
    native = triton_interpreter._interpreter
    native.atomic_rmw(native.RMW_OP.ADD, address, value, np.ones(1, bool), native.MEM_SEMANTIC.ACQUIRE_RELEASE)


def _patch_language() -> None:
    namespace = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    triton_interpreter._patch_lang(namespace)
    tl.core.tensor.__index__ = lambda self: int(self.handle.data.item())
    triton_interpreter._patch_lang = lambda function: SimpleNamespace(restore=lambda: None)


def _skip_overflow_checks() -> None:
    """Turn off overflow checks: they repeat integer sums in 64 bits, half of all time, and only debug mode reports."""
    options = triton_interpreter.interpreter_builder.options
    if not options.debug:
        triton_interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


def _run_programs_as_threads() -> None:
    """Launch each program of a grid in a thread; the builder's `grid_dim` and `grid_idx` become thread-local."""

    def of_thread(name: str) -> property:
        return property(lambda self: getattr(_program, name), lambda self, value: setattr(_program, name, value))

    for name in ("grid_idx", "grid_dim"):
        setattr(_Builder, name, of_thread(name))
    triton_interpreter.GridExecutor.__call__ = _launch


def _scalar(value: Any) -> Any:
    """Convert an argument of a launch to what the kernel computes with."""
    if isinstance(value, float):
        return tl.tensor(_Handle(np.array([value], np.float32), tl.float32), tl.float32)
    return triton_interpreter._implicit_cvt(value)


def _launch(self: Any, *arguments: Any, **options: Any) -> None:
    """Run all programs of the grid concurrently; return when all have ended. CPU tensors only."""
    compile_pending()  # of kernels that were imported behind the last fork
    names = inspect.getfullargspec(self.fn).args
    options = {name: option for name, option in options.items() if name in names}
    bound = inspect.getcallargs(self.fn, *arguments, **options)
    constexprs = {name for name, annotation in self.fn.__annotations__.items() if _CONSTANT.search(str(annotation))}
    bound = {name: value if name in constexprs else _scalar(value) for name, value in bound.items()}
    grid = self.grid(bound) if callable(self.grid) else self.grid
    grid = (*grid, 1, 1)[:3]
    errors: list[BaseException] = []

    def program(index: tuple[int, ...]) -> None:
        _program.grid_idx, _program.grid_dim = index, grid
        try:
            with np.errstate(all="ignore"):  # a GPU does not report a division by zero
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
