"""Which names a piece of an author's source uses and assigns, and which parameters its variables are made from."""

from __future__ import annotations

from collections.abc import Iterable

import libcst as cst


class _Used(cst.CSTVisitor):
    """Names that are read or written; of `a.b` only `a`, of `f(x=y)` only `f` and `y`."""

    def __init__(self, skips: tuple[str, ...]) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._skips = skips

    def visit_Name(self, node: cst.Name) -> None:
        self.names.add(node.value)

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        node.value.visit(self)
        return False

    def visit_Arg(self, node: cst.Arg) -> bool:
        node.value.visit(self)
        return False

    def visit_Call(self, node: cst.Call) -> bool:
        return called(node) not in self._skips


class _Assigned(cst.CSTVisitor):
    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[str, cst.BaseExpression | None]] = []

    def _add(self, target: cst.CSTNode, value: cst.BaseExpression | None) -> None:
        for name in sorted(used_names(target)) if not isinstance(target, cst.Subscript | cst.Attribute) else ():
            self.pairs.append((name, value))

    def visit_Assign(self, node: cst.Assign) -> None:
        for target in node.targets:
            self._add(target.target, node.value)

    def visit_AugAssign(self, node: cst.AugAssign) -> None:
        self._add(node.target, node.value)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        self._add(node.target, node.value)

    def visit_NamedExpr(self, node: cst.NamedExpr) -> None:
        self._add(node.target, node.value)

    def visit_For(self, node: cst.For) -> None:
        self._add(node.target, node.iter)


class _Calls(cst.CSTVisitor):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[cst.Call] = []

    def visit_Call(self, node: cst.Call) -> None:
        self.calls.append(node)


def called(call: cst.Call) -> str:
    """The last part of the name of what is called: `load` of `tl.load(...)` and of `descriptor.load(...)`."""
    function = call.func
    if isinstance(function, cst.Attribute):
        return function.attr.value
    return function.value if isinstance(function, cst.Name) else ""


def receiver(call: cst.Call) -> str:
    """The name before the dot of what is called, if it is a plain one."""
    function = call.func
    is_plain = isinstance(function, cst.Attribute) and isinstance(function.value, cst.Name)
    return function.value.value if is_plain else ""  # type: ignore[attr-defined]


def used_names(node: cst.CSTNode, skips: tuple[str, ...] = ()) -> set[str]:
    """The names in a node. skips: calls whose inside does not count."""
    visitor = _Used(skips)
    node.visit(visitor)
    return visitor.names


def assignments(node: cst.CSTNode) -> list[tuple[str, cst.BaseExpression | None]]:
    """(name, value) of every assignment in a node."""
    visitor = _Assigned()
    node.visit(visitor)
    return visitor.pairs


def assigned_names(nodes: Iterable[cst.CSTNode]) -> set[str]:
    """Every name that the nodes assign."""
    return {name for node in nodes for name, _ in assignments(node)}


def calls_in(node: cst.CSTNode) -> list[cst.Call]:
    """Every call in a node, outer ones first."""
    visitor = _Calls()
    node.visit(visitor)
    return visitor.calls


class Origins:
    """From which parameters each variable of a function is made, whatever the path; what is loaded has no origin."""

    def __init__(self, function: cst.FunctionDef, parameters: Iterable[str]) -> None:
        self._known = {name: frozenset((name,)) for name in parameters}
        pairs = [
            (name, used_names(value, ("load",))) for name, value in assignments(function.body) if value is not None
        ]
        changed = True
        while changed:
            changed = False
            for name, used in pairs:
                found = self._known.get(name, frozenset()).union(*(self._known.get(one, frozenset()) for one in used))
                if found != self._known.get(name, frozenset()):
                    self._known[name], changed = found, True

    def of(self, node: cst.CSTNode) -> frozenset[str]:
        """The parameters that a node is made from."""
        return frozenset().union(*(self._known.get(name, frozenset()) for name in used_names(node, ("load",))))


def memory_calls(node: cst.CSTNode, kind: str) -> list[cst.Call]:
    """`tl.load(pointer)` and `descriptor.load(...)`, or stores, anywhere in a node."""
    return [call for call in calls_in(node) if called(call) == kind and isinstance(call.func, cst.Attribute)]


def place_of(call: cst.Call) -> cst.CSTNode:
    """What a load or store addresses: the first argument of `tl.load`, or the descriptor."""
    if receiver(call) == "tl" and call.args:
        return call.args[0].value
    return call.func.value if isinstance(call.func, cst.Attribute) else call
