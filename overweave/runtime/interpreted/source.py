"""A cache of rewritten device functions: each file is parsed once.

The interpreter of Triton 3.6 rewrites functions, so that the value of every assignment is a tensor. It parses the
source of each function again in every process that calls it: with ranks that are forked for few calls, a seventh of
their time. Here a file is parsed once, and all known functions are rewritten before the first fork: ranks inherit them.
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
_pending: list[Any] = []  # functions that have not been rewritten yet


def install_function_cache() -> None:
    """Patch the interpreter for the rest of this process and of those that it forks."""
    for helper in (_logical_and, _logical_or):
        setattr(triton_interpreter, helper.__name__, helper)  # rewritten functions look up missing names there
    _Rewriter.rewrite_ast = _rewrite
    _Function.__init__ = _init
    _pending.extend(each for each in vars(tl.standard).values() if isinstance(each, _Function))
    os.register_at_fork(before=_compile_pending)


def _init(self: Any, fn: Any, **options: Any) -> None:
    _original_init(self, fn, **options)
    _pending.append(self)


def _compile_pending() -> None:
    """Rewrite all pending functions. An error is suppressed: a call of the function raises it again."""
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
