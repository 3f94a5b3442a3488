"""The module of a fused kernel: the imports, functions and constants of the author's file that the kernel uses."""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import libcst as cst
from msgspec import Struct

from overweave.compiler.frontend.source.author import KernelSource, all_params, parameter_names
from overweave.compiler.frontend.source.language import (
    MemoryOpKind,
    Origins,
    assigned_names,
    assignments,
    calls_in,
    dotted,
    used_names,
)
from overweave.errors import InputError

# A directive names a load or store of the kernel itself. A helper's access that no directive names would get no wait
# and no notify; the compiler must find it, and refuse.


class ParameterAccess(Struct, frozen=True):
    """A call that accesses memory through a parameter. helper: the function that does so; empty for the kernel itself.

    kind: None if the source of the called function is unknown.
    """

    parameter: str
    kind: MemoryOpKind | None
    call: cst.Call
    helper: str = ""


class Callees:
    """The memory accesses of the functions at the top level of a file. _accesses: function -> its accesses, a cache."""

    def __init__(self, source: KernelSource) -> None:
        self._language = source.language
        self._functions = {
            node.name.value: node
            for node in source.module.body
            if isinstance(node, cst.FunctionDef) and node is not source.function
        }
        self._accesses: dict[str, tuple[ParameterAccess, ...]] = {}

    def parameter_accesses(self, function: cst.FunctionDef, origins: Origins) -> Iterator[ParameterAccess]:
        """Yield every call in a function that accesses memory through one of its parameters, or may do so."""
        local_names = {*parameter_names(function), *assigned_names([function.body])}
        for call in calls_in(function.body):
            kind = self._language.memory_kind(call)
            if kind is not None:
                nodes = [self._language.address_of(call)]
                if not self._language.tl_name(call):  # a method of an unknown object: an argument may be the pointer
                    nodes += [arg.value for arg in call.args]
                yield from (ParameterAccess(name, kind, call) for name in sorted(origins.parameters_of(*nodes)))
            elif name := self.helper_name(call):
                for access in self._accesses_of(name):
                    passed = origins.parameters_of(*_passed_for(call, self._functions[name], access.parameter))
                    yield from (ParameterAccess(parameter, access.kind, call, name) for parameter in sorted(passed))
            elif not self._is_known(call, local_names):
                passed = origins.parameters_of(*(arg.value for arg in call.args))
                yield from (ParameterAccess(parameter, None, call, dotted(call.func)) for parameter in sorted(passed))

    def helper_name(self, call: cst.Call) -> str:
        """Return the function of the file that is called; empty for any other call."""
        name = dotted(call.func)
        return name if name in self._functions else ""

    def _accesses_of(self, name: str) -> tuple[ParameterAccess, ...]:
        """Return the accesses of a helper, computed once."""
        if name not in self._accesses:
            self._accesses[name] = ()  # ends the recursion of a function that calls itself
            function = self._functions[name]
            origins = Origins(assignments(function.body), parameter_names(function), self._language)
            self._accesses[name] = tuple(self.parameter_accesses(function, origins))
        return self._accesses[name]

    def _is_known(self, call: cst.Call, local_names: set[str]) -> bool:
        """Whether a call is of `tl`, of a builtin, or a method of a local value."""
        name = dotted(call.func)
        root = name.split(".")[0]
        is_tl = any(name.startswith(f"{module}.") for module in self._language.modules)  # `tl.math.exp2`
        is_method = isinstance(call.func, cst.Attribute) and (not root or root in local_names)
        return bool(self._language.tl_name(call)) or is_tl or is_method or hasattr(builtins, root)


def _passed_for(call: cst.Call, function: cst.FunctionDef, parameter: str) -> list[cst.CSTNode]:
    """Return the arguments that a call may pass for a parameter; a starred argument may be any."""
    values: list[cst.CSTNode] = []
    names = parameter_names(function)
    position = names.index(parameter) if parameter in names else -1
    for position_of_arg, arg in enumerate(call.args):
        if (
            arg.star
            or (arg.keyword and arg.keyword.value == parameter)
            or (not arg.keyword and position_of_arg == position)
        ):
            values.append(arg.value)
    return values


JIT, AUTOTUNE = "jit", ("autotune",)
_PLAIN = re.compile(r"[\w.-]+", re.ASCII)


def fused_module(source: KernelSource, fused: cst.FunctionDef, exchanges: tuple[tuple[str, str], ...]) -> str:
    """Return the text of the module. exchanges: (tensor, schedule), for its docstring.

    Text of comments and callers is parsed into names, numbers and known words before it gets here.
    """
    needed = _needed_statements(source, fused)
    fused = fused.with_changes(decorators=jit_decorators(source))
    body: list[cst.CSTNode] = []
    for statement in source.module.body:
        if statement is source.function:
            body.append(fused)
        elif any(statement is one for one in needed):
            body.append(statement.visit(_Absolute(source)))  # type: ignore[arg-type]
    first_definition = next((i for i, node in enumerate(body) if not _is_import(node)), len(body))
    body.insert(first_definition, cst.parse_statement("import overweave.lang.tile_table as overweave_lang\n"))
    module = source.module.with_changes(header=(), body=tuple(body))
    return _header(source, exchanges) + module.code.lstrip("\n").rstrip("\n") + "\n"


def _header(source: KernelSource, exchanges: tuple[tuple[str, str], ...]) -> str:
    """Return the docstring of the module."""
    names = "".join(f"\n    {tensor}: {words}" for tensor, words in exchanges)
    file = source.path.name if _PLAIN.fullmatch(source.path.name) else "a file"
    about = f"{source.name} of {file}, fused by overweave. Written by a machine: change the source instead."
    return f'"""{about}\n{names}\n"""\n\n'


def _needed_statements(source: KernelSource, fused: cst.FunctionDef) -> list[cst.CSTNode]:
    """Return the top-level statements that define names of the kernel, transitively, or affect all names."""
    candidates = [node for node in source.module.body if node is not source.function and not _is_script(node)]
    names = _free_names(fused)
    needed: list[cst.CSTNode] = [node for node in candidates if _affects_all_names(node)]
    changed = True
    while changed:
        changed = False
        for node in candidates:
            if not any(node is one for one in needed) and _defined_names(node) & names:
                needed.append(node)
                names |= _free_names(node)
                changed = True
    return needed


def _free_names(node: cst.CSTNode) -> set[str]:
    """Return the names that a top-level statement reads from the file; a function's local names are left out."""
    if not isinstance(node, cst.FunctionDef):
        return used_names(node)
    signature: list[cst.CSTNode | None] = [part for one in all_params(node) for part in (one.annotation, one.default)]
    signature += [*node.decorators, node.returns]
    local_names = {*parameter_names(node), *assigned_names([node.body])}
    return (used_names(node.body) - local_names).union(*(used_names(part) for part in signature if part))


def _is_script(node: cst.CSTNode) -> bool:
    """Whether a statement is `if __name__ == "__main__":`."""
    return isinstance(node, cst.If) and "__name__" in used_names(node.test)


def _affects_all_names(node: cst.CSTNode) -> bool:
    """Whether a statement is `from __future__ import ...` or `from m import *`."""
    parts = node.body if isinstance(node, cst.SimpleStatementLine) else ()
    imports = [part for part in parts if isinstance(part, cst.ImportFrom)]
    return any(isinstance(one.names, cst.ImportStar) or _is_future(one) for one in imports)


def _is_future(node: cst.ImportFrom) -> bool:
    return isinstance(node.module, cst.Name) and node.module.value == "__future__"


def _defined_names(node: cst.CSTNode) -> set[str]:
    """Return the names that a top-level statement binds, also inside `if`, `try` and `with`."""
    names: set[str] = set()
    if isinstance(node, cst.FunctionDef | cst.ClassDef):
        return {node.name.value}
    if isinstance(node, cst.SimpleStatementLine):
        for part in node.body:
            if isinstance(part, cst.Import | cst.ImportFrom) and not isinstance(part.names, cst.ImportStar):
                names |= {_bound_name(alias) for alias in part.names}
            elif isinstance(part, cst.Assign):
                names |= {name for target in part.targets for name in used_names(target.target)}
            elif isinstance(part, cst.AnnAssign | cst.AugAssign):
                names |= used_names(part.target)
        return names
    for child in node.children:
        if isinstance(child, cst.BaseStatement | cst.BaseSuite | cst.Else | cst.ExceptHandler | cst.Finally):
            names |= _defined_names(child)
    return names


class _Absolute(cst.CSTTransformer):
    """Makes relative imports absolute: the fused kernel is in no package."""

    def __init__(self, source: KernelSource) -> None:
        super().__init__()
        self.source = source

    def leave_ImportFrom(self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom) -> cst.ImportFrom:
        """Replace `from .m import x` by `from package.m import x`. Raises InputError for a file in no package."""
        if not original_node.relative:
            return updated_node
        package = _package_path(self.source.path.resolve())
        package = package[: len(package) + 1 - len(original_node.relative)]
        if not package:
            text = self.source.module.code_for_node(original_node)[:80]
            cure = "Import by the whole name, or let the file be one of a package"
            raise InputError(f"compile {self.source.name}", f"`{text}` leads to no package", cure)
        module_name = ".".join([*package, *([dotted(original_node.module)] if original_node.module else ())])
        module = cst.parse_expression(module_name)
        assert isinstance(module, cst.Name | cst.Attribute)
        return updated_node.with_changes(relative=(), module=module)


def _package_path(path: Path) -> list[str]:
    """Return the packages around a file, the outermost first."""
    names: list[str] = []
    folder = path.parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return names


def _bound_name(alias: cst.ImportAlias) -> str:
    if alias.asname and isinstance(alias.asname.name, cst.Name):
        return alias.asname.name.value
    name: cst.BaseExpression = alias.name
    while isinstance(name, cst.Attribute):
        name = name.value
    return name.value if isinstance(name, cst.Name) else ""


def _is_import(node: cst.CSTNode) -> bool:
    parts: Iterable[cst.CSTNode] = node.body if isinstance(node, cst.SimpleStatementLine) else ()
    return any(isinstance(part, cst.Import | cst.ImportFrom) for part in parts)


def jit_decorators(source: KernelSource) -> list[cst.Decorator]:
    """Return the kernel's `@triton.jit`, without `@triton.autotune`: a call names the constants.

    Raises DirectiveError for any other decorator, and for a kernel without `@triton.jit`.
    """
    jit: list[cst.Decorator] = []
    for decorator in source.function.decorators:
        function = decorator.decorator.func if isinstance(decorator.decorator, cst.Call) else decorator.decorator
        name = function.attr.value if isinstance(function, cst.Attribute) else getattr(function, "value", "")
        if name == JIT:
            jit.append(decorator)
        elif name not in AUTOTUNE:
            cure = "Decorate it by @triton.jit, and @triton.autotune at most: calls name the constants"
            raise source.loc().error(f"decorator {name!r} runs around the kernel", cure)
    if not jit:
        raise source.loc().error("it is no Triton kernel", "Decorate it by @triton.jit")
    return jit
