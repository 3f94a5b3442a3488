"""The names that source uses and assigns, and the parameters that its variables are computed from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import cache

import libcst as cst

from overweave.compiler.frontend.source.language import Language

NameBinding = tuple[str, cst.BaseExpression | None]
METADATA = ("dtype", "type", "shape", "block_shape", "strides")  # attributes of a tensor that hold no address


_LAYOUT = ("whitespace", "leading_lines", "lines_after", "comma", "semicolon", "header", "footer", "lpar", "rpar")


@cache
def _meaningful_fields(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    """Return the fields of a node type with code: without layout, without `b` of `a.b`, without `b` of `f(b=c)`."""
    if kind in (cst.Attribute, cst.Arg):
        return ("value",)
    return tuple(field.name for field in fields(kind) if not field.name.startswith(_LAYOUT))


def _skip_none(_: cst.CSTNode) -> bool:
    return False


def walk(node: cst.CSTNode, skips: Callable[[cst.CSTNode], bool] = _skip_none) -> Iterator[cst.CSTNode]:
    """Yield a node and all nodes in it, outer ones first, without layout. skips: whether to leave out a node.

    A visitor of LibCST rebuilds the tree at each visit: this takes a quarter of its time.
    """
    stack = [node]
    while stack:
        current = stack.pop()
        if skips(current):
            continue
        yield current
        field_values = [getattr(current, name) for name in _meaningful_fields(type(current))]
        for value in reversed(field_values):
            values = value if isinstance(value, list | tuple) else (value,)
            stack += [one for one in reversed(values) if isinstance(one, cst.CSTNode)]


def callee_name(call: cst.Call) -> str:
    """Return the last part of the called name: `range` of `tl.range(...)` and of `range(...)`."""
    function = call.func
    if isinstance(function, cst.Attribute):
        return function.attr.value
    return function.value if isinstance(function, cst.Name) else ""


def used_names(node: cst.CSTNode, skips: Callable[[cst.CSTNode], bool] = _skip_none) -> set[str]:
    """Return the names that a node reads or writes; of `a.b` only `a`, of `f(x=y)` only `f` and `y`."""
    return {one.value for one in walk(node, skips) if isinstance(one, cst.Name)}


def assignments(node: cst.CSTNode) -> list[NameBinding]:
    """Return (name, value) of every assignment in a node."""
    pairs: list[NameBinding] = []
    for one in walk(node):
        if isinstance(one, cst.Assign):
            for target in one.targets:
                pairs += _bindings(target.target, one.value)
        elif isinstance(one, cst.AugAssign | cst.AnnAssign | cst.NamedExpr):
            pairs += _bindings(one.target, one.value)
        elif isinstance(one, cst.For):
            pairs += _bindings(one.target, one.iter)
    return pairs


def _bindings(target: cst.CSTNode, value: cst.BaseExpression | None) -> list[NameBinding]:
    """Return the names that an assignment binds; a tuple of names takes a tuple of values one by one."""
    if isinstance(target, cst.Tuple | cst.List) and isinstance(value, cst.Tuple | cst.List):
        if len(target.elements) == len(value.elements):
            pairs = zip(target.elements, value.elements, strict=True)
            return [one for element, element_value in pairs for one in _bindings(element.value, element_value.value)]
    if isinstance(target, cst.Subscript | cst.Attribute):
        return []
    return [(name, value) for name in sorted(used_names(target))]


def assigned_names(nodes: Iterable[cst.CSTNode]) -> set[str]:
    """Return every name that the nodes assign."""
    return {name for node in nodes for name, _ in assignments(node)}


def calls_in(node: cst.CSTNode) -> list[cst.Call]:
    """Return every call in a node, outer ones first."""
    return [one for one in walk(node) if isinstance(one, cst.Call)]


def accesses_in(node: cst.CSTNode, kind: str, language: Language) -> list[cst.Call]:
    """Return every `tl.KIND(pointer, ...)` and `descriptor.KIND(...)` in a node; kind: load or store."""
    return [call for call in calls_in(node) if language.is_access(call, kind)]


class Origins:
    """The parameters that each variable is computed from, on any path. Loaded data and dtypes have no origin."""

    def __init__(self, bindings: Iterable[NameBinding], parameters: Iterable[str], language: Language) -> None:
        self._language = language
        self._parameters_of_name = {name: frozenset((name,)) for name in parameters}
        names_used = [(name, self._names_in(value)) for name, value in bindings if value is not None]
        changed = True
        while changed:
            changed = False
            for name, used in names_used:
                parameters_of_name = self._parameters_of_name.get(name, frozenset()) | self._union(used)
                if parameters_of_name != self._parameters_of_name.get(name, frozenset()):
                    self._parameters_of_name[name], changed = parameters_of_name, True

    def parameters_of(self, *nodes: cst.CSTNode) -> frozenset[str]:
        """Return the parameters that nodes are computed from."""
        return frozenset().union(*(self._union(self._names_in(node)) for node in nodes))

    def _names_in(self, node: cst.CSTNode) -> set[str]:
        return used_names(node, self._is_opaque)

    def _union(self, names: Iterable[str]) -> frozenset[str]:
        return frozenset().union(*(self._parameters_of_name.get(one, frozenset()) for one in names))

    def _is_opaque(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Call):
            return self._language.memory_kind(node) in ("load", "atomic")
        return isinstance(node, cst.Attribute) and node.attr.value in METADATA
