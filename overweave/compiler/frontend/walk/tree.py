"""Queries of a syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any


def defaults(helper: ast.FunctionDef) -> dict[str, ast.expr]:
    """Map each parameter that has a default to that default."""
    positional, keyword_only = [*helper.args.posonlyargs, *helper.args.args], helper.args.kwonlyargs
    values = dict(zip(reversed(positional), reversed(helper.args.defaults), strict=False))
    values |= {
        name: value for name, value in zip(keyword_only, helper.args.kw_defaults, strict=True) if value is not None
    }
    return {name.arg: value for name, value in values.items()}


def directives_by_line(statements: Sequence[ast.stmt], directives: Sequence[Any]) -> dict[int, list[Any]]:
    """Map the line of each statement to the directives right above it."""
    lines = sorted({statement.lineno for statement in statements})
    by_line: dict[int, list[Any]] = {}
    for directive in dict.fromkeys(directives):
        line_below = next((line for line in lines if line > directive.place.line), None)
        if line_below is not None:
            by_line.setdefault(line_below, []).append(directive)
    return by_line


def names_in(node: ast.expr) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def assigned_in(statements: Sequence[ast.stmt]) -> list[str]:
    """Return the names that statements assign, in the order of the text."""
    return list(dict.fromkeys(_stored_names(statements)))


def _stored_names(statements: Sequence[ast.stmt]) -> Iterator[str]:
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


def dotted(node: ast.expr) -> str:
    """`a.b.c` as text; empty for anything but names and dots."""
    if isinstance(node, ast.Name):
        return node.id
    left = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{left}.{node.attr}" if left and isinstance(node, ast.Attribute) else ""
