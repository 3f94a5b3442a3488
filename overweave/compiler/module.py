"""The module around a fused kernel: of the author's file, what the kernel needs and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterable

import libcst as cst

from overweave.compiler.author import Source
from overweave.compiler.names import used_names

JIT, TUNED = "jit", ("autotune",)
_PLAIN = re.compile(r"[\w.-]+", re.ASCII)


def fused_module(source: Source, fused: cst.FunctionDef, exchanges: tuple[tuple[str, str], ...]) -> str:
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
            body.append(statement)
    at = next((i for i, node in enumerate(body) if not _is_import(node)), len(body))
    body.insert(at, cst.parse_statement("import overweave.lang.tile_table as overweave_lang\n"))
    module = source.module.with_changes(header=(), body=tuple(body))
    return _about(source, exchanges) + module.code.lstrip("\n").rstrip("\n") + "\n"


def _about(source: Source, exchanges: tuple[tuple[str, str], ...]) -> str:
    names = "".join(f"\n    {tensor}: {words}" for tensor, words in exchanges)
    file = source.path.name if _PLAIN.fullmatch(source.path.name) else "a file"
    about = f"{source.name} of {file}, fused by overweave. Written by a machine: change the source instead."
    return f'"""{about}\n{names}\n"""\n\n'


def _needed(source: Source, fused: cst.FunctionDef) -> list[cst.CSTNode]:
    """Top-level statements whose names the kernel uses, directly or through others of them."""
    candidates = [node for node in source.module.body if node is not source.function]
    wanted, kept = used_names(fused), list[cst.CSTNode]()
    changed = True
    while changed:
        changed = False
        for node in candidates:
            if not any(node is one for one in kept) and _defined(node) & wanted:
                kept.append(node)
                wanted |= used_names(node)
                changed = True
    return kept


def _defined(node: cst.CSTNode) -> set[str]:
    """The names that a top-level statement binds: functions, imports and plain assignments."""
    if isinstance(node, cst.FunctionDef):
        return {node.name.value}
    found: set[str] = set()
    for part in node.body if isinstance(node, cst.SimpleStatementLine) else ():
        if isinstance(part, cst.Import | cst.ImportFrom) and not isinstance(part.names, cst.ImportStar):
            found |= {_bound(alias) for alias in part.names}
        elif isinstance(part, cst.Assign):
            found |= {name for target in part.targets for name in used_names(target.target)}
        elif isinstance(part, cst.AnnAssign):
            found |= used_names(part.target)
    return found


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


def jit_decorators(source: Source) -> list[cst.Decorator]:
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
            raise source.place().error(f"decorator {name!r} runs around the kernel", "Decorate it by @triton.jit only")
    if not kept:
        raise source.place().error("it is no Triton kernel", "Decorate it by @triton.jit")
    return kept
