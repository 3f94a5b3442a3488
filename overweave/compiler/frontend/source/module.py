"""The module around a fused kernel: of the author's file, what the kernel needs and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import libcst as cst

from overweave.compiler.frontend.source.author import KernelSource, listed, parameter_names
from overweave.compiler.frontend.source.language import dotted
from overweave.compiler.frontend.source.names import assigned_names, used_names
from overweave.errors import InputError

JIT, TUNED = "jit", ("autotune",)
_PLAIN = re.compile(r"[\w.-]+", re.ASCII)


def fused_module(source: KernelSource, fused: cst.FunctionDef, exchanges: tuple[tuple[str, str], ...]) -> str:
    """The text: what it is, the imports, the functions and constants that the kernel uses, the kernel.

    Nothing that a comment or a caller says gets here but as data that was parsed: names, numbers and known words.
    """
    kept = _needed(source, fused)
    fused = fused.with_changes(decorators=jit_decorators(source))
    body: list[cst.CSTNode] = []
    for statement in source.module.body:
        if statement is source.function:
            body.append(fused)
        elif any(statement is one for one in kept):
            body.append(statement.visit(_Absolute(source)))  # type: ignore[arg-type]
    at = next((i for i, node in enumerate(body) if not _is_import(node)), len(body))
    body.insert(at, cst.parse_statement("import overweave.lang.tile_table as overweave_lang\n"))
    module = source.module.with_changes(header=(), body=tuple(body))
    return _about(source, exchanges) + module.code.lstrip("\n").rstrip("\n") + "\n"


def _about(source: KernelSource, exchanges: tuple[tuple[str, str], ...]) -> str:
    names = "".join(f"\n    {tensor}: {words}" for tensor, words in exchanges)
    file = source.path.name if _PLAIN.fullmatch(source.path.name) else "a file"
    about = f"{source.name} of {file}, fused by overweave. Written by a machine: change the source instead."
    return f'"""{about}\n{names}\n"""\n\n'


def _needed(source: KernelSource, fused: cst.FunctionDef) -> list[cst.CSTNode]:
    """Top-level statements whose names the kernel uses, directly or through others of them, and what may bind any."""
    candidates = [node for node in source.module.body if node is not source.function and not _is_script(node)]
    wanted = _free(fused)
    kept: list[cst.CSTNode] = [node for node in candidates if _is_general(node)]
    changed = True
    while changed:
        changed = False
        for node in candidates:
            if not any(node is one for one in kept) and _defined(node) & wanted:
                kept.append(node)
                wanted |= _free(node)
                changed = True
    return kept


def _free(node: cst.CSTNode) -> set[str]:
    """The names that a top-level statement takes from the file: of a function, not its own variables."""
    if not isinstance(node, cst.FunctionDef):
        return used_names(node)
    said: list[cst.CSTNode | None] = [part for one in listed(node) for part in (one.annotation, one.default)]
    said += [*node.decorators, node.returns]
    own = {*parameter_names(node), *assigned_names([node.body])}
    return (used_names(node.body) - own).union(*(used_names(part) for part in said if part))


def _is_script(node: cst.CSTNode) -> bool:
    """Whether it is `if __name__ == "__main__":`, which no import runs."""
    return isinstance(node, cst.If) and "__name__" in used_names(node.test)


def _is_general(node: cst.CSTNode) -> bool:
    """Whether a statement is an import that decides how all names are read: from the future, or of everything."""
    parts = node.body if isinstance(node, cst.SimpleStatementLine) else ()
    imports = [part for part in parts if isinstance(part, cst.ImportFrom)]
    return any(isinstance(one.names, cst.ImportStar) or _is_future(one) for one in imports)


def _is_future(node: cst.ImportFrom) -> bool:
    return isinstance(node.module, cst.Name) and node.module.value == "__future__"


def _defined(node: cst.CSTNode) -> set[str]:
    """The names that a top-level statement binds: functions, classes, imports, assignments, and these inside `if`."""
    found: set[str] = set()
    if isinstance(node, cst.FunctionDef | cst.ClassDef):
        return {node.name.value}
    if isinstance(node, cst.SimpleStatementLine):
        for part in node.body:
            if isinstance(part, cst.Import | cst.ImportFrom) and not isinstance(part.names, cst.ImportStar):
                found |= {_bound(alias) for alias in part.names}
            elif isinstance(part, cst.Assign):
                found |= {name for target in part.targets for name in used_names(target.target)}
            elif isinstance(part, cst.AnnAssign | cst.AugAssign):
                found |= used_names(part.target)
        return found
    for child in node.children:
        if isinstance(child, cst.BaseStatement | cst.BaseSuite | cst.Else | cst.ExceptHandler | cst.Finally):
            found |= _defined(child)
    return found


class _Absolute(cst.CSTTransformer):
    """Imports by the whole name: the fused kernel stands in no package."""

    def __init__(self, source: KernelSource) -> None:
        super().__init__()
        self.source = source

    def leave_ImportFrom(self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom) -> cst.ImportFrom:
        if not original_node.relative:
            return updated_node
        package = _package(self.source.path.resolve())
        package = package[: len(package) + 1 - len(original_node.relative)]
        if not package:
            text = self.source.module.code_for_node(original_node)[:80]
            cure = "Import by the whole name, or let the file be one of a package"
            raise InputError(f"compile {self.source.name}", f"`{text}` leads to no package", cure)
        whole = ".".join([*package, *([dotted(original_node.module)] if original_node.module else ())])
        module = cst.parse_expression(whole)
        assert isinstance(module, cst.Name | cst.Attribute)
        return updated_node.with_changes(relative=(), module=module)


def _package(path: Path) -> list[str]:
    """The packages that a file stands in, the outermost first."""
    names: list[str] = []
    folder = path.parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return names


def _bound(alias: cst.ImportAlias) -> str:
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
    """`@triton.jit`, without what tunes the kernel: its constants are chosen by whoever calls it.

    Raises DirectiveError for any other decorator, and where there is none.
    """
    kept: list[cst.Decorator] = []
    for decorator in source.function.decorators:
        named = decorator.decorator.func if isinstance(decorator.decorator, cst.Call) else decorator.decorator
        name = named.attr.value if isinstance(named, cst.Attribute) else getattr(named, "value", "")
        if name == JIT:
            kept.append(decorator)
        elif name not in TUNED:
            cure = "Decorate it by @triton.jit, and @triton.autotune at most: calls name the constants"
            raise source.place().error(f"decorator {name!r} runs around the kernel", cure)
    if not kept:
        raise source.place().error("it is no Triton kernel", "Decorate it by @triton.jit")
    return kept
