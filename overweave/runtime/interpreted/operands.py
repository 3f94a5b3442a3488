"""Caches and shortcuts of the interpreter: rewritten functions, types and shapes, padding, conversion of operands.

Each `install_...` patches the interpreter for the rest of the process; `interpreter.repair` calls them.
"""

from __future__ import annotations

import ast
import copy
import linecache
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter
from triton.language.semantic import TritonSemantic

from overweave.runtime.interpreted.numbers import BIT_DTYPES, round_to_nearest

# The interpreter of Triton 3.6 rewrites functions, so that the value of every assignment is a tensor. It parses the
# source of each function again in every process that calls it: with ranks that are forked for few calls, a seventh of
# their time. Here a file is parsed once, and all known functions are rewritten before the first fork: ranks inherit
# them.

_Function = triton_interpreter.InterpretedFunction
_Rewriter = triton_interpreter.FunctionRewriter
_original_init: Callable[..., None] = _Function.__init__
_original_rewrite: Callable[[Any], Any] = _Rewriter.rewrite_ast

_files: dict[str, tuple[list[str], dict[int, ast.FunctionDef]]] = {}
_pending: list[Any] = []  # functions that have not been rewritten yet
_rewriting = threading.RLock()


def install_function_cache() -> None:
    """Patch the interpreter for the rest of this process and of those that it forks."""
    for helper in (_logical_and, _logical_or):
        setattr(triton_interpreter, helper.__name__, helper)  # rewritten functions look up missing names there
    _Rewriter.rewrite_ast = _rewrite
    _Function.__init__ = _init
    _pending.extend(each for each in vars(tl.standard).values() if isinstance(each, _Function))
    os.register_at_fork(before=compile_pending)


def _init(self: Any, fn: Any, **options: Any) -> None:
    _original_init(self, fn, **options)
    _pending.append(self)


def compile_pending() -> None:
    """Rewrite all pending functions, in one thread: Python 3.11 makes no syntax trees in several at a time. An error is
    suppressed: a call of the function raises it again."""
    with _rewriting:
        while _pending:
            with suppress(Exception):
                _pending.pop().rewrite()


def _rewrite(self: Any) -> Any:
    """Compile a function from the syntax tree of its file; by Triton itself if the file does not contain it."""
    code = self.fn.__code__
    node = _functions_of(code.co_filename).get(code.co_firstlineno)
    if node is None or node.name != self.fn.__name__:
        return _original_rewrite(self)
    node = copy.deepcopy(node)  # threads may rewrite one function concurrently
    node.decorator_list = []
    ast.fix_missing_locations(_Wrapper().visit(node))
    self.filename, self.def_file_lineno = code.co_filename, node.lineno
    return self._compile_and_exec(ast.Module([node], []))


def _functions_of(path: str) -> dict[int, ast.FunctionDef]:
    """Return first line -> decorated function of a file, from a cache."""
    linecache.checkcache(path)
    lines = linecache.getlines(path)
    cached = _files.get(path)
    if cached is None or cached[0] is not lines:
        nodes = (node for node in ast.walk(ast.parse("".join(lines))) if isinstance(node, ast.FunctionDef))
        functions = {node.decorator_list[0].lineno: node for node in nodes if node.decorator_list}
        cached = _files[path] = lines, functions
    return cached[1]


def _logical_and(left: Any, right: Callable[[], Any]) -> Any:
    """`left and right`; element-wise for blocks, as compiled."""
    return left.logical_and(right()) if _is_block(left) else left and right()


def _logical_or(left: Any, right: Callable[[], Any]) -> Any:
    return left.logical_or(right()) if _is_block(left) else left or right()


def _is_block(value: Any) -> bool:
    return isinstance(value, tl.tensor) and value.type.is_block()


class _Wrapper(ast.NodeTransformer):
    """Rewrites a function as Triton does, but keeps line numbers.

    `x = value` becomes `x = interpreter_semantic.to_tensor(value, False)`; `a and b` becomes
    `_logical_and(a, lambda: b)`.
    """

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        name = (_logical_and if isinstance(node.op, ast.And) else _logical_or).__name__
        no_arguments = ast.arguments([], [], kwonlyargs=[], kw_defaults=[], defaults=[])
        expression = node.values[0]
        for value in node.values[1:]:
            call = ast.Call(ast.Name(name, ast.Load()), [expression, ast.Lambda(no_arguments, value)], [])
            expression = ast.copy_location(call, node)
        return expression

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        if len(node.targets) > 1:
            raise ValueError("Multiple assignments are not supported")
        wrap = ast.Attribute(ast.Name("interpreter_semantic", ast.Load()), "to_tensor", ast.Load())
        self.generic_visit(node)
        node.value = ast.copy_location(ast.Call(wrap, [node.value, ast.Constant(False)], []), node.value)
        return node


# A shape is shared by all types and tensors that have it, and is never written to.


class _Shape(NamedTuple):
    """What depends on a shape alone: attributes of a block type, and of a tensor, where they are constexprs."""

    sizes: Any
    numel: int
    text: str
    tensor_sizes: Any
    tensor_numel: Any


_SHAPES: dict[tuple[int, ...], _Shape] = {}
_NUMPY: dict[str, np.dtype[Any]] = {}  # name of Triton's dtype -> numpy's
_original_block: Callable[[Any, Any, Any], None] = tl.core.block_type.__init__
_original_numpy: Callable[[Any], np.dtype[Any]] = triton_interpreter._get_np_dtype
_bits: dict[str, int] = {}
_SCALAR = tl.core.tuple([]), tl.core.constexpr(1)


def install_type_cache() -> None:
    """Patch the interpreter for the rest of this process."""
    tl.core.block_type.__init__ = _init_block_type
    tl.core.tensor.__init__ = _init_tensor
    triton_interpreter._get_np_dtype = _numpy_dtype
    triton_interpreter._validate_np_data_size = _fits
    triton_interpreter.TensorHandle.__init__ = _init_handle


def _init_block_type(self: Any, element_ty: Any, shape: Iterable[Any]) -> None:
    """`block_type.__init__`, with the parts that depend on the shape from the cache."""
    sizes = tuple(size.value if isinstance(size, tl.core.constexpr) else size for size in shape)
    cached = _SHAPES.get(sizes)
    if cached is None:
        _original_block(self, element_ty, shape)
        constants = tl.core.tuple([tl.core.constexpr(size) for size in self.shape])
        cached = _Shape(self.shape, self.numel, str(self.shape), constants, tl.core.constexpr(self.numel))
        _SHAPES[sizes] = cached
    self.element_ty, self.shape, self.numel = element_ty, cached.sizes, cached.numel
    self.name = f"<{cached.text}, {element_ty}>"
    self.of_tensor = cached.tensor_sizes, cached.tensor_numel


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.of_tensor if type.is_block() else _SCALAR


def _numpy_dtype(type: Any) -> np.dtype[Any]:
    scalar = type.scalar
    if scalar.name not in _NUMPY:
        _NUMPY[scalar.name] = _original_numpy(scalar)
    return _NUMPY[scalar.name]


def _init_handle(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if not _fits(data, dtype):
        raise ValueError(f"numpy data of {data.itemsize * 8} bits is wider than {dtype}")


def _fits(array: Any, dtype: Any) -> bool:
    """Return whether numpy's elements are no wider than Triton's; a Triton int1 takes a byte."""
    bits = _bits.get(dtype.name)
    if bits is None:
        bits = _bits[dtype.name] = 64 if isinstance(dtype, tl.pointer_type) else max(8, dtype.primitive_bitwidth)
    fits: bool = array.itemsize * 8 <= bits
    return fits


_Builder = triton_interpreter.InterpreterBuilder
_NAN = triton_interpreter._ir.PADDING_OPTION.PAD_NAN
_original_load = _Builder.create_descriptor_load
_original_block_load = getattr(_Builder, "create_tensor_pointer_load", None)  # gone from later Tritons


def install_nan_padding() -> None:
    """Patch the interpreter for the rest of this process."""
    _Builder.create_descriptor_load = _descriptor_load
    if _original_block_load is not None:
        _Builder.create_tensor_pointer_load = _block_load


def _descriptor_load(self: Any, descriptor: Any, indices: Any, *options: Any, **named: Any) -> Any:
    loaded = _original_load(self, descriptor, indices, *options, **named)
    return _pad(loaded, descriptor.materialize_pointers, indices) if descriptor.padding == _NAN else loaded


def _block_load(self: Any, pointer: Any, boundary_check: Any, padding: Any, *options: Any, **named: Any) -> Any:
    loaded = _original_block_load(self, pointer, boundary_check, padding, *options, **named)  # type: ignore[misc]
    return _pad(loaded, pointer.materialize_pointers, boundary_check) if padding == _NAN else loaded


def _pad(block: Any, materialize: Any, indices: Any) -> Any:
    """Replace elements out of bounds by NaN. materialize: returns pointers and mask."""
    name = block.dtype.scalar.name
    if name in BIT_DTYPES:
        mask = materialize(indices)[1]
        inside = mask if isinstance(mask, np.ndarray) else mask.data
        block.data = np.where(inside, block.data, round_to_nearest(np.array([np.nan], np.float32), name))
    return block


# Before each operator Triton 3.6 computes the common type and shape of both sides, and mostly converts neither: half of
# the time of a kernel of small tiles. Here two sides of one type and shape are taken as they are, a Python integer
# takes the integer type of the other side, and an integer added to a pointer keeps its type. Triton converts other
# operands.

_INTEGERS = {
    kind.name: (kind.get_int_min_value(), kind.get_int_max_value())
    for kind in (tl.int8, tl.uint8, tl.int16, tl.uint16, tl.int32, tl.uint32, tl.int64, tl.uint64)
}
_CLOSED_DTYPES = {*_INTEGERS, "fp32", "fp64"}  # dtypes whose operators yield the same dtype
_PLAIN = {tl.tensor, tl.dtype, tl.block_type, tl.pointer_type, int, bool, float, str, type(None)}

_original_check: Callable[..., Any] = TritonSemantic.binary_op_type_checking_impl
_original_broadcast: Callable[..., Any] = TritonSemantic.broadcast_impl_value
_original_unwrap: Callable[[Any], Any] = tl.core._unwrap_if_constexpr
_original_equal: Callable[[Any, Any], bool] = tl.dtype.__eq__
_BUILTIN_WRAPPER = tl.core.builtin(len).__code__  # of all builtins, which check for `_semantic`


def install_operand_shortcuts() -> None:
    """Patch the interpreter for the rest of this process.

    Call it before `_patch_language`, which captures functions.
    """
    TritonSemantic.binary_op_type_checking_impl = _check
    TritonSemantic.broadcast_impl_value = _broadcast
    tl.core._unwrap_if_constexpr = tl._unwrap_if_constexpr = _unwrap
    tl.dtype.__eq__ = _equal
    triton_interpreter._patch_attr = _patch_attribute


def _check(self: Any, lhs: Any, rhs: Any, *options: Any, **named: Any) -> Any:
    """Convert both sides to a common type, by a shortcut where no conversion is needed."""
    left, right = type(lhs), type(rhs)
    if left is tl.tensor and right is tl.tensor:
        dtype = lhs.dtype
        if dtype.name == rhs.dtype.name and dtype.name in _CLOSED_DTYPES:
            return self.broadcast_impl_value(lhs, rhs)
        if options[:1] == (True,) and dtype.is_ptr() and rhs.dtype.name in _INTEGERS:
            return self.broadcast_impl_value(lhs, rhs)
    elif left is tl.tensor and right is int and _is_within(rhs, lhs.dtype):
        return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, lhs.dtype))
    elif right is tl.tensor and left is int and _is_within(lhs, rhs.dtype):
        return self.broadcast_impl_value(self.scalar_constant(lhs, rhs.dtype), rhs)
    return _original_check(self, lhs, rhs, *options, **named)


def _is_within(value: int, dtype: Any) -> bool:
    bounds = _INTEGERS.get(dtype.name)
    return bounds is not None and bounds[0] <= value <= bounds[1]


def _broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
    """Broadcast two sides. Shapes are cached: equal ones are identical."""
    left, right = lhs.type, rhs.type
    if not left.is_block():
        return (_splat(lhs, right), rhs) if right.is_block() else (lhs, rhs)
    if not right.is_block():
        return lhs, _splat(rhs, left)
    return (lhs, rhs) if left.shape is right.shape else _original_broadcast(self, lhs, rhs)


def _splat(scalar: Any, block_type: Any) -> Any:
    dtype = scalar.type.scalar
    data = np.full(block_type.shape.values, scalar.handle.data, triton_interpreter._get_np_dtype(dtype))
    return tl.tensor(triton_interpreter.TensorHandle(data, dtype), block_type.with_element_ty(dtype))


def _unwrap(value: Any) -> Any:
    return value if type(value) in _PLAIN else _original_unwrap(value)


def _equal(self: Any, other: Any) -> bool:
    return self is other or _original_equal(self, other)


def _patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Patch a builtin to its undecorated function with `_semantic` bound: it is not checked for at each call."""
    semantic = TritonSemantic(builder)
    function = member.__wrapped__ if getattr(member, "__code__", None) is _BUILTIN_WRAPPER else member

    def call(*arguments: Any, **named: Any) -> Any:
        named["_semantic"] = semantic
        return function(*arguments, **named)

    scope.set_attr(owner, name, call)
