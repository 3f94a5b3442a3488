"""Which names a piece of an author's source uses and assigns, and which parameters its variables are made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import cache

import libcst as cst

from overweave.compiler.frontend.source.language import Language

NameBinding = tuple[str, cst.BaseExpression | None]
DESCRIBING = ("dtype", "type", "shape", "block_shape", "strides")  # of a tensor, and not where it lies


_LAYOUT = ("whitespace", "leading_lines", "lines_after", "comma", "semicolon", "header", "footer", "lpar", "rpar")


@cache
def _parts_of(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    """The fields of a node that hold what it means: of `a.b` the `a`, of `b=c` in a call the `c`."""
    if kind in (cst.Attribute, cst.Arg):
        return ("value",)
    return tuple(field.name for field in fields(kind) if not field.name.startswith(_LAYOUT))


def _nothing(_: cst.CSTNode) -> bool:
    return False


def walk(node: cst.CSTNode, skips: Callable[[cst.CSTNode], bool] = _nothing) -> Iterator[cst.CSTNode]:
    """A node and all nodes in it, outer ones first, but for layout. skips: nodes that count as little as their inside.

    A visitor of LibCST makes the whole tree anew at each visit: this takes a quarter of its time.
    """
    ahead = [node]
    while ahead:
        here = ahead.pop()
        if skips(here):
            continue
        yield here
        held = [getattr(here, name) for name in _parts_of(type(here))]
        for value in reversed(held):
            values = value if isinstance(value, list | tuple) else (value,)
            ahead += [one for one in reversed(values) if isinstance(one, cst.CSTNode)]


def called(call: cst.Call) -> str:
    """The last part of the name of what is called: `range` of `tl.range(...)` and of `range(...)`."""
    function = call.func
    if isinstance(function, cst.Attribute):
        return function.attr.value
    return function.value if isinstance(function, cst.Name) else ""


def used_names(node: cst.CSTNode, skips: Callable[[cst.CSTNode], bool] = _nothing) -> set[str]:
    """The names that are read or written in a node; of `a.b` only `a`, of `f(x=y)` only `f` and `y`."""
    return {one.value for one in walk(node, skips) if isinstance(one, cst.Name)}


def assignments(node: cst.CSTNode) -> list[NameBinding]:
    """(name, value) of every assignment in a node."""
    pairs: list[NameBinding] = []
    for one in walk(node):
        if isinstance(one, cst.Assign):
            for target in one.targets:
                pairs += _assigned(target.target, one.value)
        elif isinstance(one, cst.AugAssign | cst.AnnAssign | cst.NamedExpr):
            pairs += _assigned(one.target, one.value)
        elif isinstance(one, cst.For):
            pairs += _assigned(one.target, one.iter)
    return pairs


def _assigned(target: cst.CSTNode, value: cst.BaseExpression | None) -> list[NameBinding]:
    if isinstance(target, cst.Tuple | cst.List) and isinstance(value, cst.Tuple | cst.List):
        if len(target.elements) == len(value.elements):
            pairs = zip(target.elements, value.elements, strict=True)
            return [one for part, made in pairs for one in _assigned(part.value, made.value)]
    if isinstance(target, cst.Subscript | cst.Attribute):
        return []
    return [(name, value) for name in sorted(used_names(target))]


def assigned_names(nodes: Iterable[cst.CSTNode]) -> set[str]:
    """Every name that the nodes assign."""
    return {name for node in nodes for name, _ in assignments(node)}


def calls_in(node: cst.CSTNode) -> list[cst.Call]:
    """Every call in a node, outer ones first."""
    return [one for one in walk(node) if isinstance(one, cst.Call)]


def accesses_in(node: cst.CSTNode, kind: str, language: Language) -> list[cst.Call]:
    """`tl.load(pointer)` and `descriptor.load(...)`, or stores, anywhere in a node."""
    return [call for call in calls_in(node) if language.is_access(call, kind)]


class Origins:
    """From which parameters each variable is made, whatever the path; what is loaded has no origin, nor has a dtype."""

    def __init__(self, found: Iterable[NameBinding], parameters: Iterable[str], language: Language) -> None:
        self._language = language
        self._known = {name: frozenset((name,)) for name in parameters}
        pairs = [(name, self._used(value)) for name, value in found if value is not None]
        changed = True
        while changed:
            changed = False
            for name, used in pairs:
                made = self._known.get(name, frozenset()) | self._all(used)
                if made != self._known.get(name, frozenset()):
                    self._known[name], changed = made, True

    def of(self, *nodes: cst.CSTNode) -> frozenset[str]:
        """The parameters that nodes are made from."""
        return frozenset().union(*(self._all(self._used(node)) for node in nodes))

    def _used(self, node: cst.CSTNode) -> set[str]:
        return used_names(node, self._hides)

    def _all(self, names: Iterable[str]) -> frozenset[str]:
        return frozenset().union(*(self._known.get(one, frozenset()) for one in names))

    def _hides(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Call):
            return self._language.kind(node) in ("load", "atomic")
        return isinstance(node, cst.Attribute) and node.attr.value in DESCRIBING
