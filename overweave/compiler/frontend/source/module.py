"""The module of a fused kernel: the imports, functions and constants of the author's file that the kernel uses."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import libcst as cst

from overweave.compiler.frontend.source.author import KernelSource, all_params, parameter_names
from overweave.compiler.frontend.source.language import dotted
from overweave.compiler.frontend.source.names import assigned_names, used_names
from overweave.errors import InputError

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
    """Return the name that `import a.b` or `import a as b` binds."""
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
            raise source.place().error(f"decorator {name!r} runs around the kernel", cure)
    if not jit:
        raise source.place().error("it is no Triton kernel", "Decorate it by @triton.jit")
    return jit
