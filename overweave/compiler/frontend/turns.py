"""What a loop carries from turn to turn. A loop whose turns may come in another order must not count on their order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import libcst as cst

from overweave.compiler.frontend.language import Language
from overweave.compiler.frontend.names import assigned_names, assignments, calls_in, used_names

Block = cst.BaseSuite


def counted_on(loop: cst.For, function: cst.FunctionDef, language: Language) -> str | None:
    """A variable that takes another value in every turn and is used as if turns came in order; None if there is none.

    That is one that goes on from turn to turn and either tells where memory is reached, or is made without anything
    that was loaded, such as a pointer or a counter that is advanced. Sums of what is loaded are none.
    """
    carried = _carried(loop)
    loaded = _loaded(function, language)
    places = _made_from(_addressing(loop, language), loop)
    for name in sorted(carried):
        if name in places or (name not in loaded and _is_used(name, loop)):
            return name
    return None


class _Reads:
    """Walks statements in order. early: what is read before these statements have assigned it for certain."""

    def __init__(self) -> None:
        self.early: set[str] = set()

    def block(self, block: Block, known: set[str]) -> set[str]:
        for statement in block.body:
            known = self._statement(statement, known)
        return known

    def _statement(self, node: cst.CSTNode, known: set[str]) -> set[str]:
        if isinstance(node, cst.SimpleStatementLine):
            for part in node.body:
                known = self._part(part, known)
            return known
        if isinstance(node, cst.If):
            return self._either(node, known)
        if isinstance(node, cst.For | cst.While):
            self._read([node.iter if isinstance(node, cst.For) else node.test], known)
            target = used_names(node.target) if isinstance(node, cst.For) else set()
            self.block(node.body, known | target)
        elif isinstance(body := getattr(node, "body", None), cst.BaseSuite):
            return self.block(body, known)
        return known

    def _either(self, node: cst.If, known: set[str]) -> set[str]:
        self._read([node.test], known)
        taken = self.block(node.body, set(known))
        other = known
        if isinstance(node.orelse, cst.If):
            other = self._either(node.orelse, set(known))
        elif node.orelse is not None:
            other = self.block(node.orelse.body, set(known))
        return taken & other

    def _part(self, part: cst.CSTNode, known: set[str]) -> set[str]:
        made = assignments(part)
        targets = {name for name, _ in made}
        if isinstance(part, cst.AugAssign) or not targets:
            self._read([part], known)
        else:
            self._read([value for _, value in made if value is not None], known)
        return known | targets

    def _read(self, nodes: Iterable[cst.CSTNode], known: set[str]) -> None:
        for node in nodes:
            self.early |= used_names(node) - known


def _carried(loop: cst.For) -> set[str]:
    reads = _Reads()
    reads.block(loop.body, used_names(loop.target))
    return reads.early & assigned_names([loop.body])


def _loaded(function: cst.FunctionDef, language: Language) -> set[str]:
    """The variables into which something loaded goes, on whatever path."""
    pairs = [(name, value) for name, value in assignments(function.body) if value is not None]
    found = {name for name, value in pairs if any(language.kind(call) for call in calls_in(value))}
    return _reached(found, [(one, name) for name, value in pairs for one in used_names(value)])


def _addressing(loop: cst.For, language: Language) -> set[str]:
    """The names in the places, offsets and masks of what a loop loads and stores."""
    found: set[str] = set()
    for call in calls_in(loop.body):
        if kind := language.kind(call):
            nodes: Sequence[cst.CSTNode] = [call] if kind == "load" else [language.place(call)]
            found |= set().union(*map(used_names, nodes))
    return found


def _made_from(names: set[str], loop: cst.For) -> set[str]:
    """The names, and all that they are made from inside a loop."""
    pairs = [(name, value) for name, value in assignments(loop.body) if value is not None]
    return _reached(names, [(name, one) for name, value in pairs for one in used_names(value)])


def _reached(names: set[str], steps: Sequence[tuple[str, str]]) -> set[str]:
    """The names, and all to which steps lead from them."""
    found, more = set[str](), set(names)
    while more:
        found |= more
        more = {to for by, to in steps if by in found} - found
    return found


def _is_used(name: str, loop: cst.For) -> bool:
    """Whether anything in a loop uses a variable, but for its own assignments."""
    uses = _Uses(name)
    loop.body.visit(uses)
    return uses.found


class _Uses(cst.CSTVisitor):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.found = name, False

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Assign | cst.AugAssign) and {made for made, _ in assignments(node)} == {self.name}:
            return False
        if isinstance(node, cst.BaseSmallStatement | cst.BaseExpression):
            self.found = self.found or self.name in used_names(node)
            return False
        return True
