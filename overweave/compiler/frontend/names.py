"""Which names a piece of an author's source uses and assigns, and which parameters its variables are made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import libcst as cst

from overweave.compiler.frontend.language import Language

Assignment = tuple[str, cst.BaseExpression | None]
DESCRIBING = ("dtype", "type", "shape", "block_shape", "strides")  # of a tensor, and not where it lies


def _nothing(_: cst.CSTNode) -> bool:
    return False


class _Used(cst.CSTVisitor):
    """Names that are read or written; of `a.b` only `a`, of `f(x=y)` only `f` and `y`."""

    def __init__(self, skips: Callable[[cst.CSTNode], bool]) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._skips = skips

    def visit_Name(self, node: cst.Name) -> None:
        self.names.add(node.value)

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        if not self._skips(node):
            node.value.visit(self)
        return False

    def visit_Arg(self, node: cst.Arg) -> bool:
        node.value.visit(self)
        return False

    def visit_Call(self, node: cst.Call) -> bool:
        return not self._skips(node)


class _Assigned(cst.CSTVisitor):
    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[Assignment] = []

    def _add(self, target: cst.CSTNode, value: cst.BaseExpression | None) -> None:
        if isinstance(target, cst.Tuple | cst.List) and isinstance(value, cst.Tuple | cst.List):
            if len(target.elements) == len(value.elements):
                for part, made in zip(target.elements, value.elements, strict=True):
                    self._add(part.value, made.value)
                return
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
    """The last part of the name of what is called: `range` of `tl.range(...)` and of `range(...)`."""
    function = call.func
    if isinstance(function, cst.Attribute):
        return function.attr.value
    return function.value if isinstance(function, cst.Name) else ""


def used_names(node: cst.CSTNode, skips: Callable[[cst.CSTNode], bool] = _nothing) -> set[str]:
    """The names in a node. skips: calls and attributes whose inside does not count."""
    visitor = _Used(skips)
    node.visit(visitor)
    return visitor.names


def assignments(node: cst.CSTNode) -> list[Assignment]:
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


def accesses_in(node: cst.CSTNode, kind: str, language: Language) -> list[cst.Call]:
    """`tl.load(pointer)` and `descriptor.load(...)`, or stores, anywhere in a node."""
    return [call for call in calls_in(node) if language.is_access(call, kind)]


class Origins:
    """From which parameters each variable is made, whatever the path; what is loaded has no origin, nor has a dtype."""

    def __init__(self, found: Iterable[Assignment], parameters: Iterable[str], language: Language) -> None:
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
