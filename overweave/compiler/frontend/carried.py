"""What a streamed loop carries from turn to turn: its turns come in the order in which parts arrive, so it may count
on no order. Sums, products, maxima and the online softmax do not; everything else is refused.

Each value in the loop has a kind: it is the same in every turn, or made of the turn, or of what is loaded in it; or it
is what a variable held when the turn began, that and a term more, the greater of that and something, and so on.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import NamedTuple

from overweave.compiler.frontend.source.kernel import AnnotatedKernel, StreamedLoop
from overweave.compiler.frontend.symbols.directives import SourceLine


class Recurrence(NamedTuple):
    """how: see the names below. of: the variable that it goes on from. by: the maximum that it is scaled by."""

    how: str
    of: str = ""
    by: str = ""


STEADY, TURN, DATA = Recurrence("steady"), Recurrence("turn"), Recurrence("data")
FREE = (STEADY, TURN, DATA)  # in the order of what is made of them together
SHAPING = ("reshape", "view", "trans", "to", "cast", "broadcast_to", "expand_dims", "permute", "ravel", "multiple_of")
ADDING = ("sum", "dot", "dot_scaled", *SHAPING)
EXPONENTIAL = ("exp", "exp2")
GREATER = ("maximum", "minimum", "max", "min")


def check_carried(kernel: AnnotatedKernel, stream: StreamedLoop) -> None:
    """Raises DirectiveError for a loop whose result depends on the order of its turns."""
    module = kernel.source.tree
    function = next(one for one in module.body if isinstance(one, ast.FunctionDef) and one.name == kernel.source.name)
    loops = [one for one in ast.walk(function) if isinstance(one, ast.For) and one.lineno > stream.directive.place.line]
    loop = min(loops, key=lambda one: one.lineno)
    _Loop(stream.directive.place, function, loop).check()


class _Loop:
    def __init__(self, place: SourceLine, function: ast.FunctionDef, loop: ast.For) -> None:
        self.place, self.loop = place, loop
        self.variable = ast.unparse(loop.target)
        self.assigned = sorted(_stored(loop.body) - {self.variable})
        self.behind = {
            one.id
            for one in ast.walk(function)
            if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load) and one.lineno > (loop.end_lineno or 0)
        }
        self.kinds: dict[str, Recurrence] = {name: Recurrence("old", name) for name in self.assigned} | {
            self.variable: TURN
        }
        self.read: set[str] = set()

    def check(self) -> None:
        self.block(self.loop.body)
        for name in self.assigned:
            kind = self.kinds[name]
            is_even = kind.of == name and kind.how in ("old", "sum", "product", "max")
            if kind.how == "scaled" and kind.of == name:
                is_even = self.kinds.get(kind.by) == Recurrence("max", kind.by)
            if is_even or (name not in self.behind and name not in self.read) or kind == STEADY:
                continue
            is_clear = kind.how == "other" and self.kinds.get(kind.of, STEADY).how not in ("max", "scaled")
            raise self.refused(kind.of if is_clear and kind.of else name)

    def refused(self, name: str) -> Exception:
        found = f"{name} goes on from turn to turn, and parts are walked in the order in which they arrive"
        cure = f"Make it from {self.variable} in every turn, or carry sums, maxima or an online softmax"
        return self.place.error(found, cure)

    def block(self, statements: Sequence[ast.stmt]) -> None:
        for node in statements:
            rule: Callable[[ast.stmt], None] | None = getattr(self, f"_{type(node).__name__.lower()}", None)
            if rule:
                rule(node)

    def _assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._set(target, node.value)

    def _annassign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self._set(node.target, node.value)

    def _augassign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            old = self.kind(ast.Name(node.target.id, ast.Load()))
            self.kinds[node.target.id] = operated(old, self.kind(node.value), node.op)

    def _set(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.kinds[target.id] = self.kind(value)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            made = [self.kind(one) for one in value.elts]
            for one, kind in zip(target.elts, made, strict=True):
                self.kinds |= {one.id: kind} if isinstance(one, ast.Name) else {}
        elif isinstance(target, ast.Tuple):
            kind = self.kind(value)
            for one in target.elts:
                self.kinds |= {one.id: _mixed([kind])} if isinstance(one, ast.Name) else {}

    def _expr(self, node: ast.Expr) -> None:
        self.kind(node.value)

    def _if(self, node: ast.If) -> None:
        self._check_test(node.test)
        start = dict(self.kinds)
        self.block(node.body)
        taken, self.kinds = self.kinds, start
        self.block(node.orelse)
        self.kinds = {name: _joined(taken.get(name, STEADY), kind) for name, kind in self.kinds.items()} | {
            name: kind for name, kind in taken.items() if name not in self.kinds
        }

    def _check_test(self, test: ast.expr) -> None:
        kind = self.kind(test)
        if kind == TURN:
            found = (
                f"{self.variable} is asked in a condition, `{ast.unparse(test)[:40]}`, and its turns come in any order"
            )
            raise self.place.error(found, "Mask what is loaded instead, and begin what is carried above the loop")
        if kind not in FREE:
            raise self.refused(kind.of)

    def _for(self, node: ast.For) -> None:
        self._set(node.target, node.iter)
        self.block(node.body)
        once = dict(self.kinds)
        self.block(node.body)
        self.kinds = {name: _joined(once.get(name, kind), kind) for name, kind in self.kinds.items()}

    def _while(self, node: ast.While) -> None:
        self._check_test(node.test)
        self.block(node.body)
        self.block(node.body)

    def kind(self, node: ast.expr) -> Recurrence:
        """What kind of value an expression is."""
        if isinstance(node, ast.Name):
            found = self.kinds.get(node.id, STEADY)
            self.read |= {found.of} if found.how == "old" else set()
            return found
        if isinstance(node, ast.BinOp):
            return operated(self.kind(node.left), self.kind(node.right), node.op)
        if isinstance(node, ast.Subscript):
            return self.kind(node.value)
        if isinstance(node, ast.Attribute):
            return self.kind(node.value) if node.attr == "T" else STEADY
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd):
            return self.kind(node.operand)
        if isinstance(node, ast.IfExp):
            self._check_test(node.test)
            return _joined(self.kind(node.body), self.kind(node.orelse))
        if isinstance(node, ast.Call):
            return self._call(node)
        return _mixed([self.kind(one) for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)])

    def _call(self, node: ast.Call) -> Recurrence:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        values = [*node.args, *(word.value for word in node.keywords)]
        kinds = [self.kind(one) for one in values]
        if isinstance(node.func, ast.Attribute) and self._is_value(node.func.value):
            kinds.insert(0, self.kind(node.func.value))
        first = kinds[0] if kinds else STEADY
        if name in ("load", "store", "gather", "scatter") or name.startswith("atomic_"):
            return self._reached(name, kinds)
        if name == "where" and len(kinds) == 3:
            return _where(kinds, values[2], values[1])
        if name in EXPONENTIAL and len(kinds) == 1:
            made = {"below": Recurrence("weight", by=first.by), "drop": Recurrence("shrink", by=first.by)}
            return made.get(first.how, _mixed(kinds))
        if name in GREATER and len(kinds) == 2 and any(kind.how in ("old", "max") for kind in kinds):
            old = [kind for kind in kinds if kind.how in ("old", "max")]
            rest = [kind for kind in kinds if kind in FREE]
            return Recurrence("max", old[0].of) if len(old) == len(rest) == 1 else _mixed(kinds)
        if name in ("dot", "dot_scaled"):
            return self._dot(node, kinds)
        if name == "fma" and len(kinds) == 3:
            return operated(operated(kinds[0], kinds[1], ast.Mult()), kinds[2], ast.Add())
        if name in SHAPING and all(kind in FREE for kind in kinds[1:]):
            return first
        if name in ADDING and first.how == "weight" and all(kind in FREE for kind in kinds[1:]):
            return first
        return _mixed(kinds)

    def _is_value(self, node: ast.expr) -> bool:
        """Whether what stands before a dot is a value, and no module."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return not isinstance(node, ast.Name) or node.id in self.kinds

    def _dot(self, node: ast.Call, kinds: list[Recurrence]) -> Recurrence:
        named = [self.kind(word.value) for word in node.keywords if word.arg == "acc"]
        sides = kinds[:2]
        product = next((one for one in sides if one.how == "weight"), DATA)
        if any(one not in FREE and one.how != "weight" for one in sides) or all(one.how == "weight" for one in sides):
            product = _mixed(sides)
        added = named or kinds[2:3] * (len(node.args) > 2)
        return operated(added[0], product, ast.Add()) if added else product

    def _reached(self, name: str, kinds: list[Recurrence]) -> Recurrence:
        """A load or store. Its place is told by the turn alone; what a turn stores may be what all turns end with."""
        is_load = name in ("load", "gather")
        for kind in kinds if is_load else kinds[:1]:
            if kind not in FREE:
                raise self.refused(kind.of or self.variable)
        is_last = not is_load and len(kinds) > 1 and kinds[0] == STEADY and kinds[1] in (TURN, DATA)
        if is_last and name in ("store", "scatter", "atomic_xchg", "atomic_cas"):
            found = "every turn stores to one place, and parts are walked in the order in which they arrive"
            raise self.place.error(found, "Store behind the loop, or at a place of the turn's own")
        others = [kind for kind in kinds[1:] if kind not in FREE]
        if others and not is_load and (kinds[0] != STEADY or name.startswith("atomic_")):
            raise self.refused(others[0].of or self.variable)
        return DATA


def operated(left: Recurrence, right: Recurrence, sign: ast.operator) -> Recurrence:
    """What kind of value an operator makes of two."""
    if left in FREE and right in FREE:
        return _mixed([left, right])
    if isinstance(sign, ast.Add):
        return _added(left, right) or _added(right, left) or _mixed([left, right])
    if isinstance(sign, ast.Sub):
        return _taken(left, right)
    if isinstance(sign, ast.Mult | ast.Div):
        return _scaled(left, right) or (isinstance(sign, ast.Mult) and _scaled(right, left)) or _mixed([left, right])
    return _mixed([left, right])


def _added(left: Recurrence, right: Recurrence) -> Recurrence | None:
    if left.how in ("old", "sum") and right in FREE:
        return Recurrence("sum", left.of)
    if left.how == "scaled" and right.how == "weight" and left.by == right.by:
        return left
    if left.how == right.how == "weight" and left.by == right.by:
        return left
    return left if left.how in ("below", "drop") and right == STEADY else None


def _taken(left: Recurrence, right: Recurrence) -> Recurrence:
    if right.how == "max" and left in FREE:
        return Recurrence("below", by=right.of)
    if right.how == "max" and left == Recurrence("old", right.of):
        return Recurrence("drop", by=right.of)
    return _added(left, right) or _mixed([left, right])


def _scaled(left: Recurrence, right: Recurrence) -> Recurrence | None:
    if left.how == "old" and right.how == "shrink":
        return Recurrence("scaled", left.of, right.by)
    if left.how in ("old", "product") and right in FREE:
        return Recurrence("product", left.of)
    is_kept = (left.how == "weight" and right in FREE) or (left.how in ("below", "drop", "max") and right == STEADY)
    return left if is_kept else None


def _where(kinds: list[Recurrence], other: ast.expr, value: ast.expr) -> Recurrence:
    """A weight, or what it is made from, is masked."""
    test, taken, rest = kinds
    if test in FREE and taken.how in ("weight", "below") and rest == STEADY and not isinstance(other, ast.Name):
        return taken
    return _mixed([*kinds])


def _joined(left: Recurrence, right: Recurrence) -> Recurrence:
    if left == right:
        return left
    if left in FREE and right in FREE:
        return _mixed([left, right])
    old, other = (left, right) if left.how == "old" else (right, left)
    return other if old.how == "old" and other.of == old.of and other.how != "other" else _mixed([left, right])


def _mixed(kinds: Sequence[Recurrence]) -> Recurrence:
    """What is made of several values in a way that nothing is known of."""
    carried = [kind for kind in kinds if kind not in FREE]
    if carried:
        return Recurrence("other", carried[-1].of or carried[-1].by)
    return max(kinds, key=FREE.index, default=STEADY)


def _stored(statements: Sequence[ast.stmt]) -> set[str]:
    nodes = (node for statement in statements for node in ast.walk(statement))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
