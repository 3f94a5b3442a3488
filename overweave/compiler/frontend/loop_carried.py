"""Checks that the loop-carried variables of a streamed loop do not depend on the order of its iterations.

Iterations run in the order in which parts arrive. Sums, products, maxima and the online softmax are accepted, any other
recurrence is refused. Each value in the loop is a Recurrence: invariant, computed from the iteration or from its loads,
or a function of the value that a variable had when the iteration began.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import NamedTuple

from overweave.compiler.frontend.source.kernel import AnnotatedKernel, StreamedLoop
from overweave.compiler.frontend.symbols.directives import SourceLine


class Recurrence(NamedTuple):
    """How a value depends on loop-carried variables. variable: the one that it updates. scale: the maximum M in it.

    kind, where m is the old value of a running maximum and M the new one, as in the online softmax:
        steady, iteration, data   no loop-carried variable: invariant, of the iteration's number, of its loads
        old, sum, product, max    the old value; plus a term; times a factor; maximum or minimum with a value
        below, weight             `x - M`; `exp(x - M)`, and products of it with data
        drop, shrink              `m - M`; `exp(m - M)`
        scaled                    `old * exp(m - M)`, also plus a weight
        other                     any other function
    """

    kind: str
    variable: str = ""
    scale: str = ""


STEADY, ITERATION, DATA = Recurrence("steady"), Recurrence("iteration"), Recurrence("data")
NOT_CARRIED = (STEADY, ITERATION, DATA)  # may vary between iterations; several combine to the last of them
SHAPE_OPS = ("reshape", "view", "trans", "to", "cast", "broadcast_to", "expand_dims", "permute", "ravel", "multiple_of")
LINEAR_OPS = ("sum", "dot", "dot_scaled", *SHAPE_OPS)
EXPONENTIAL = ("exp", "exp2")
EXTREMA = ("maximum", "minimum", "max", "min")


def check_loop_carried(kernel: AnnotatedKernel, stream: StreamedLoop) -> None:
    """Raise DirectiveError for a loop whose result depends on the order of its iterations."""
    module = kernel.source.tree
    function = next(one for one in module.body if isinstance(one, ast.FunctionDef) and one.name == kernel.source.name)
    loops = [one for one in ast.walk(function) if isinstance(one, ast.For) and one.lineno > stream.directive.place.line]
    loop = min(loops, key=lambda one: one.lineno)
    _Loop(stream.directive.place, function, loop).check()


class _Loop:
    """The analysis of one loop. One method a statement type, `_for` for ast.For. values: variable -> what it
    holds at the current statement.

    used_behind: names that are read behind the loop. read: loop-carried variables whose old value the body reads.
    """

    def __init__(self, place: SourceLine, function: ast.FunctionDef, loop: ast.For) -> None:
        self.place, self.loop = place, loop
        self.variable = ast.unparse(loop.target)
        self.assigned = sorted(_stored_names(loop.body) - {self.variable})
        self.used_behind = {
            one.id
            for one in ast.walk(function)
            if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load) and one.lineno > (loop.end_lineno or 0)
        }
        self.values: dict[str, Recurrence] = {name: Recurrence("old", name) for name in self.assigned} | {
            self.variable: ITERATION
        }
        self.read: set[str] = set()

    def check(self) -> None:
        """Raise DirectiveError for the first variable whose recurrence depends on the order."""
        self.block(self.loop.body)
        for name in self.assigned:
            value = self.values[name]
            is_order_free = value.variable == name and value.kind in ("old", "sum", "product", "max")
            if value.kind == "scaled" and value.variable == name:
                is_order_free = self.values.get(value.scale) == Recurrence("max", value.scale)
            if is_order_free or (name not in self.used_behind and name not in self.read) or value == STEADY:
                continue
            is_other = value.kind == "other" and self.values.get(value.variable, STEADY).kind not in (
                "max",
                "scaled",
            )
            raise self.refused(value.variable if is_other and value.variable else name)

    def refused(self, name: str) -> Exception:
        """Return the error for a variable."""
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
            old = self.recurrence(ast.Name(node.target.id, ast.Load()))
            self.values[node.target.id] = binary_recurrence(old, self.recurrence(node.value), node.op)

    def _set(self, target: ast.expr, value: ast.expr) -> None:
        """Assign a value to a name, or to the names of a tuple, one by one where the value is a tuple, too."""
        if isinstance(target, ast.Name):
            self.values[target.id] = self.recurrence(value)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            kinds = [self.recurrence(element) for element in value.elts]
            for element, kind in zip(target.elts, kinds, strict=True):
                self.values |= {element.id: kind} if isinstance(element, ast.Name) else {}
        elif isinstance(target, ast.Tuple):
            kind = self.recurrence(value)
            for element in target.elts:
                self.values |= {element.id: _combine([kind])} if isinstance(element, ast.Name) else {}

    def _expr(self, node: ast.Expr) -> None:
        self.recurrence(node.value)

    def _if(self, node: ast.If) -> None:
        """Follow both branches, and merge their values."""
        self._check_condition(node.test)
        start = dict(self.values)
        self.block(node.body)
        taken_kinds, self.values = self.values, start
        self.block(node.orelse)
        self.values = {
            name: _merge_branches(taken_kinds.get(name, STEADY), kind) for name, kind in self.values.items()
        } | {name: kind for name, kind in taken_kinds.items() if name not in self.values}

    def _check_condition(self, test: ast.expr) -> None:
        """Raise for a condition on the iteration, or on a loop-carried variable."""
        kind = self.recurrence(test)
        if kind == ITERATION:
            found = (
                f"{self.variable} is asked in a condition, `{ast.unparse(test)[:40]}`, and its turns come in any order"
            )
            raise self.place.error(found, "Mask what is loaded instead, and begin what is carried above the loop")
        if kind not in NOT_CARRIED:
            raise self.refused(kind.variable)

    def _for(self, node: ast.For) -> None:
        """Follow an inner loop twice, so that its second iteration sees the values of the first."""
        self._set(node.target, node.iter)
        self.block(node.body)
        first = dict(self.values)
        self.block(node.body)
        self.values = {name: _merge_branches(first.get(name, kind), kind) for name, kind in self.values.items()}

    def _while(self, node: ast.While) -> None:
        self._check_condition(node.test)
        self.block(node.body)
        self.block(node.body)

    def recurrence(self, node: ast.expr) -> Recurrence:
        """Return the recurrence of an expression."""
        if isinstance(node, ast.Name):
            recurrence = self.values.get(node.id, STEADY)
            self.read |= {recurrence.variable} if recurrence.kind == "old" else set()
            return recurrence
        if isinstance(node, ast.BinOp):
            return binary_recurrence(self.recurrence(node.left), self.recurrence(node.right), node.op)
        if isinstance(node, ast.Subscript):
            return self.recurrence(node.value)
        if isinstance(node, ast.Attribute):
            return self.recurrence(node.value) if node.attr == "T" else STEADY
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd):
            return self.recurrence(node.operand)
        if isinstance(node, ast.IfExp):
            self._check_condition(node.test)
            return _merge_branches(self.recurrence(node.body), self.recurrence(node.orelse))
        if isinstance(node, ast.Call):
            return self._call(node)
        return _combine([self.recurrence(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)])

    def _call(self, node: ast.Call) -> Recurrence:
        """Return the recurrence of a call of `tl`, or of a method of a value."""
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        values = [*node.args, *(word.value for word in node.keywords)]
        kinds = [self.recurrence(one) for one in values]
        if isinstance(node.func, ast.Attribute) and self._is_value(node.func.value):
            kinds.insert(0, self.recurrence(node.func.value))
        first = kinds[0] if kinds else STEADY
        if name in ("load", "store", "gather", "scatter") or name.startswith("atomic_"):
            return self._check_access(name, kinds)
        if name == "where" and len(kinds) == 3:
            return _mask(kinds, values[2], values[1])
        if name in EXPONENTIAL and len(kinds) == 1:
            exponential = {
                "below": Recurrence("weight", scale=first.scale),
                "drop": Recurrence("shrink", scale=first.scale),
            }
            return exponential.get(first.kind, _combine(kinds))
        if name in EXTREMA and len(kinds) == 2 and any(kind.kind in ("old", "max") for kind in kinds):
            recurrences = [kind for kind in kinds if kind.kind in ("old", "max")]
            free = [kind for kind in kinds if kind in NOT_CARRIED]
            return Recurrence("max", recurrences[0].variable) if len(recurrences) == len(free) == 1 else _combine(kinds)
        if name in ("dot", "dot_scaled"):
            return self._dot(node, kinds)
        if name == "fma" and len(kinds) == 3:
            return binary_recurrence(binary_recurrence(kinds[0], kinds[1], ast.Mult()), kinds[2], ast.Add())
        if name in SHAPE_OPS and all(kind in NOT_CARRIED for kind in kinds[1:]):
            return first
        if name in LINEAR_OPS and first.kind == "weight" and all(kind in NOT_CARRIED for kind in kinds[1:]):
            return first
        return _combine(kinds)

    def _is_value(self, node: ast.expr) -> bool:
        """Whether an expression in front of a dot is a value, not a module."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return not isinstance(node, ast.Name) or node.id in self.values

    def _dot(self, node: ast.Call, kinds: list[Recurrence]) -> Recurrence:
        """Return the recurrence of `tl.dot(a, b, acc)`: acc plus a product, which is a weight if one factor is."""
        keyword_acc = [self.recurrence(word.value) for word in node.keywords if word.arg == "acc"]
        factors = kinds[:2]
        product = next((factor for factor in factors if factor.kind == "weight"), DATA)
        if any(factor not in NOT_CARRIED and factor.kind != "weight" for factor in factors) or all(
            factor.kind == "weight" for factor in factors
        ):
            product = _combine(factors)
        accumulator = keyword_acc or kinds[2:3] * (len(node.args) > 2)
        return binary_recurrence(accumulator[0], product, ast.Add()) if accumulator else product

    def _check_access(self, name: str, kinds: list[Recurrence]) -> Recurrence:
        """Check that the address and the stored value of an access do not depend on the order of iterations."""
        is_load = name in ("load", "gather")
        for kind in kinds if is_load else kinds[:1]:
            if kind not in NOT_CARRIED:
                raise self.refused(kind.variable or self.variable)
        overwrites = not is_load and len(kinds) > 1 and kinds[0] == STEADY and kinds[1] in (ITERATION, DATA)
        if overwrites and name in ("store", "scatter", "atomic_xchg", "atomic_cas"):
            found = "every turn stores to one place, and parts are walked in the order in which they arrive"
            raise self.place.error(found, "Store behind the loop, or at a place of the turn's own")
        others = [kind for kind in kinds[1:] if kind not in NOT_CARRIED]
        if others and not is_load and (kinds[0] != STEADY or name.startswith("atomic_")):
            raise self.refused(others[0].variable or self.variable)
        return DATA


def binary_recurrence(left: Recurrence, right: Recurrence, sign: ast.operator) -> Recurrence:
    """Return the recurrence of `left sign right`."""
    if left in NOT_CARRIED and right in NOT_CARRIED:
        return _combine([left, right])
    if isinstance(sign, ast.Add):
        return _add(left, right) or _add(right, left) or _combine([left, right])
    if isinstance(sign, ast.Sub):
        return _subtract(left, right)
    if isinstance(sign, ast.Mult | ast.Div):
        return (
            _multiply(left, right) or (isinstance(sign, ast.Mult) and _multiply(right, left)) or _combine([left, right])
        )
    return _combine([left, right])


def _add(left: Recurrence, right: Recurrence) -> Recurrence | None:
    """Return the recurrence of `left + right`, if left is a sum or a part of an online softmax; else None."""
    if left.kind in ("old", "sum") and right in NOT_CARRIED:
        return Recurrence("sum", left.variable)
    if left.kind == "scaled" and right.kind == "weight" and left.scale == right.scale:
        return left
    if left.kind == right.kind == "weight" and left.scale == right.scale:
        return left
    return left if left.kind in ("below", "drop") and right == STEADY else None


def _subtract(left: Recurrence, right: Recurrence) -> Recurrence:
    if right.kind == "max" and left in NOT_CARRIED:
        return Recurrence("below", scale=right.variable)
    if right.kind == "max" and left == Recurrence("old", right.variable):
        return Recurrence("drop", scale=right.variable)
    return _add(left, right) or _combine([left, right])


def _multiply(left: Recurrence, right: Recurrence) -> Recurrence | None:
    """Return the recurrence of `left * right`, if left is a product or a part of an online softmax; else None."""
    if left.kind == "old" and right.kind == "shrink":
        return Recurrence("scaled", left.variable, right.scale)
    if left.kind in ("old", "product") and right in NOT_CARRIED:
        return Recurrence("product", left.variable)
    is_same = (left.kind == "weight" and right in NOT_CARRIED) or (
        left.kind in ("below", "drop", "max") and right == STEADY
    )
    return left if is_same else None


def _mask(kinds: list[Recurrence], other: ast.expr, value: ast.expr) -> Recurrence:
    """Return the recurrence of `tl.where(test, value, other)`: a masked weight, or its exponent, stays what it is."""
    test, value_kind, other_kind = kinds
    if (
        test in NOT_CARRIED
        and value_kind.kind in ("weight", "below")
        and other_kind == STEADY
        and not isinstance(other, ast.Name)
    ):
        return value_kind
    return _combine([*kinds])


def _merge_branches(left: Recurrence, right: Recurrence) -> Recurrence:
    """Return the recurrence of a variable behind an `if`: an update in one branch alone stays that update."""
    if left == right:
        return left
    if left in NOT_CARRIED and right in NOT_CARRIED:
        return _combine([left, right])
    old, other = (left, right) if left.kind == "old" else (right, left)
    is_update = old.kind == "old" and other.variable == old.variable and other.kind != "other"
    return other if is_update else _combine([left, right])


def _combine(kinds: Sequence[Recurrence]) -> Recurrence:
    """Return the recurrence of an unknown function of several values."""
    dependent = [kind for kind in kinds if kind not in NOT_CARRIED]
    if dependent:
        return Recurrence("other", dependent[-1].variable or dependent[-1].scale)
    return max(kinds, key=NOT_CARRIED.index, default=STEADY)


def _stored_names(statements: Sequence[ast.stmt]) -> set[str]:
    nodes = (node for statement in statements for node in ast.walk(statement))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
