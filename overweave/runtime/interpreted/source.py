"""Device functions as the Triton interpreter runs them, made from one reading of each file.

Triton 3.6 wraps the value of every assignment into a tensor. To do so it finds, tokenizes, parses and numbers the lines
of every function anew, in every process that calls it: with ranks that are forked for few calls, a seventh of all their
work. Here a file is parsed once, and every function that is known is made before the first fork: ranks inherit them.
Applied by `interpreter.repair`.
"""

from __future__ import annotations

import ast
import copy
import linecache
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import triton.language as tl
import triton.runtime.interpreter as triton_interpreter

_Function = triton_interpreter.InterpretedFunction
_Rewriter = triton_interpreter.FunctionRewriter
_original_init: Callable[..., None] = _Function.__init__
_original_rewrite: Callable[[Any], Any] = _Rewriter.rewrite_ast

_files: dict[str, tuple[list[str], dict[int, ast.FunctionDef]]] = {}
_pending: list[Any] = []  # functions that nobody has called yet


def install_function_cache() -> None:
    """For the rest of this process and of those that it forks."""
    for helper in (_logical_and, _logical_or):
        setattr(triton_interpreter, helper.__name__, helper)  # a function finds there what its own file does not have
    _Rewriter.rewrite_ast = _rewrite
    _Function.__init__ = _init
    _pending.extend(each for each in vars(tl.standard).values() if isinstance(each, _Function))
    os.register_at_fork(before=_compile_pending)


def _init(self: Any, fn: Any, **options: Any) -> None:
    _original_init(self, fn, **options)
    _pending.append(self)


def _compile_pending() -> None:
    """What one of them is refused for is told to who calls it."""
    while _pending:
        with suppress(Exception):
            _pending.pop().rewrite()


def _rewrite(self: Any) -> Any:
    """The function, compiled from its part of the file's tree; by Triton itself where no file has it."""
    code = self.fn.__code__
    found = _functions_of(code.co_filename).get(code.co_firstlineno)
    if found is None or found.name != self.fn.__name__:
        return _original_rewrite(self)
    found = copy.deepcopy(found)  # threads may make one function at once
    found.decorator_list = []
    ast.fix_missing_locations(_Wrapper().visit(found))
    self.filename, self.def_file_lineno = code.co_filename, found.lineno
    return self._compile_and_exec(ast.Module([found], []))


def _functions_of(path: str) -> dict[int, ast.FunctionDef]:
    """The decorated functions of a file, each by its first line."""
    linecache.checkcache(path)
    lines = linecache.getlines(path)
    known = _files.get(path)
    if known is None or known[0] is not lines:
        every = (node for node in ast.walk(ast.parse("".join(lines))) if isinstance(node, ast.FunctionDef))
        found = {node.decorator_list[0].lineno: node for node in every if node.decorator_list}
        known = _files[path] = lines, found
    return known[1]


def _logical_and(left: Any, right: Callable[[], Any]) -> Any:
    """`left and right`, of blocks element by element, as compiled: their truth is that of none."""
    return left.logical_and(right()) if _is_block(left) else left and right()


def _logical_or(left: Any, right: Callable[[], Any]) -> Any:
    return left.logical_or(right()) if _is_block(left) else left or right()


def _is_block(value: Any) -> bool:
    return isinstance(value, tl.tensor) and value.type.is_block()


class _Wrapper(ast.NodeTransformer):
    """What Triton makes of a function, and what it does not: where it stood.

    `x = value` becomes `x = interpreter_semantic.to_tensor(value, False)`, `a and b` becomes `_both(a, lambda: b)`.
    """

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        name = (_logical_and if isinstance(node.op, ast.And) else _logical_or).__name__
        nothing = ast.arguments([], [], kwonlyargs=[], kw_defaults=[], defaults=[])
        found = node.values[0]
        for value in node.values[1:]:
            call = ast.Call(ast.Name(name, ast.Load()), [found, ast.Lambda(nothing, value)], [])
            found = ast.copy_location(call, node)
        return found

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        if len(node.targets) > 1:
            raise ValueError("Multiple assignments are not supported")
        wrap = ast.Attribute(ast.Name("interpreter_semantic", ast.Load()), "to_tensor", ast.Load())
        self.generic_visit(node)
        node.value = ast.copy_location(ast.Call(wrap, [node.value, ast.Constant(False)], []), node.value)
        return node
