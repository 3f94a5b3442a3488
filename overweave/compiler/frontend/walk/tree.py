"""What is asked of a syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any


def defaults(helper: ast.FunctionDef) -> dict[str, ast.expr]:
    listed, named = [*helper.args.posonlyargs, *helper.args.args], helper.args.kwonlyargs
    found = dict(zip(reversed(listed), reversed(helper.args.defaults), strict=False))
    found |= {one: value for one, value in zip(named, helper.args.kw_defaults, strict=True) if value is not None}
    return {one.arg: value for one, value in found.items()}


def below(statements: Sequence[ast.stmt], directives: Sequence[Any]) -> dict[int, list[Any]]:
    """The line of the statement below each directive -> the directives above it."""
    lines = sorted({one.lineno for one in statements})
    found: dict[int, list[Any]] = {}
    for said in dict.fromkeys(directives):
        below = next((line for line in lines if line > said.place.line), None)
        if below is not None:
            found.setdefault(below, []).append(said)
    return found


def names_in(node: ast.expr) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def assigned(statements: Sequence[ast.stmt]) -> list[str]:
    return list(dict.fromkeys(names_set(statements)))


def names_set(statements: Sequence[ast.stmt]) -> Iterator[str]:
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    left = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{left}.{node.attr}" if left and isinstance(node, ast.Attribute) else ""
