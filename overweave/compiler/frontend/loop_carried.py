"""Checks that the loop-carried variables of a streamed loop do not depend on the order of its iterations.

Iterations run in the order in which parts arrive. Sums, products, maxima and the online softmax are accepted, any other
recurrence is refused. Each value in the loop is a Recurrence: invariant, computed from the iteration or from its loads,
or a function of the value that a variable had when the iteration began.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from overweave.compiler.frontend.source.kernel import AnnotatedKernel, StreamedLoop
from overweave.compiler.frontend.symbols.directives import SourceLine


class Recurrence(NamedTuple):
    """How a value depends on loop-carried variables. variable: the one that it updates.

    scale: the maximum M in it: (its variable, where it is taken, and what scales it), so that all parts of an online
    softmax can be held to one maximum. kind, where m is the old value of a running maximum and M the new one:
        steady, iteration, data    no loop-carried variable: invariant, of the iteration's number, of its loads
        old, sum, product          the old value; plus a term; times a factor
        maximum, minimum, lifted   maximum or minimum with a value; a maximum times an invariant factor
        below, weight              `x - M`; `exp(x - M)`, and products of it with data
        drop, shrink               `m - M`; `exp(m - M)`
        scaled                     `old * exp(m - M)`, also plus a weight
        other                      any other function
    """

    kind: str
    variable: str = ""
    scale: tuple[str, ...] = ()


STEADY, ITERATION, DATA = Recurrence("steady"), Recurrence("iteration"), Recurrence("data")
NOT_CARRIED = (STEADY, ITERATION, DATA)  # may vary between iterations; several combine to the last of them
ELEMENTWISE_OPS = ("to", "cast", "broadcast_to", "expand_dims", "multiple_of")  # elementwise, and linear
LINEAR_OPS = ("sum", "dot", "dot_scaled", "reshape", "view", "trans", "permute", "ravel", *ELEMENTWISE_OPS)
EXPONENTIAL = ("exp", "exp2")
EXTREMA = {"maximum": "maximum", "max": "maximum", "minimum": "minimum", "min": "minimum"}
OVERWRITING = ("store", "scatter", "atomic_xchg", "atomic_cas")
OVERWRITES = (
    "every iteration stores to the same address, and parts are walked in the order in which they arrive",
    "Store after the loop, or to an address of the iteration's own",
)
ORDER_FREE = ("old", "sum", "product", "maximum", "minimum")


def check_loop_carried(kernel: AnnotatedKernel, stream: StreamedLoop) -> None:
    """Raise DirectiveError for a loop whose result depends on the order of its iterations."""
    module = kernel.source.tree
    function = next(one for one in module.body if isinstance(one, ast.FunctionDef) and one.name == kernel.source.name)
    loops = [one for one in ast.walk(function) if isinstance(one, ast.For) and one.lineno > stream.directive.loc.line]
    loop = min(loops, key=lambda one: one.lineno)
    _Loop(stream.directive.loc, function, loop).check()


class _Loop:
    """The analysis of one loop. One method a statement type, `_for` for ast.For. values: variable -> what it
    holds at the current statement.

    used_after: names that are read after the loop. read: loop-carried variables whose old value the body reads.
    updates: how often a variable has been assigned. stored: (variable that is stored, its updates at that store).
    """

    def __init__(self, loc: SourceLine, function: ast.FunctionDef, loop: ast.For) -> None:
        self.loc, self.loop = loc, loop
        self.variable = ast.unparse(loop.target)
        self.assigned = sorted(_stored_names(loop.body) - {self.variable})
        self.used_after = {
            one.id
            for one in ast.walk(function)
            if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load) and one.lineno > (loop.end_lineno or 0)
        }
        self.values: dict[str, Recurrence] = {name: Recurrence("old", name) for name in self.assigned} | {
            self.variable: ITERATION
        }
        self.read: set[str] = set()  # loop-carried variables whose old value is read
        self.updates: Counter[str] = Counter()  # variable -> its assignments so far
        self.stored: set[tuple[str, int]] = set()  # (variable that is stored, its assignments at that point)

    def check(self) -> None:
        """Raise DirectiveError for the first variable whose recurrence depends on the order."""
        self.block(self.loop.body)
        for name, updates in sorted(self.stored):
            if updates != self.updates[name]:  # the last iteration's update would be missing
                raise self.refused(name)
        for name in self.assigned:
            value = self.values[name]
            is_order_free = value.variable == name and value.kind in ORDER_FREE
            if value.kind == "scaled" and value.variable == name:
                peak = value.scale[0]
                is_order_free = self.values.get(peak) == Recurrence("maximum", peak, value.scale[:2])
            if is_order_free or (name not in self.used_after and name not in self.read) or value == STEADY:
                continue
            is_other = value.kind == "other" and self.values.get(value.variable, STEADY).kind not in (
                "maximum",
                "scaled",
            )
            raise self.refused(value.variable if is_other and value.variable else name)

    def refused(self, name: str) -> Exception:
        """Return the DirectiveError for a variable whose value depends on the order of iterations."""
        found = f"{name} is carried between iterations, and parts are walked in the order in which they arrive"
        cure = f"Compute it from {self.variable} in every iteration, or carry sums, maxima or an online softmax"
        return self.loc.error(found, cure)

    def block(self, statements: Sequence[ast.stmt]) -> None:
        """Follow statements in order, by one method for each statement type."""
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
            texts = node.target.id, ast.unparse(node.value)
            self.values[node.target.id] = binary_recurrence(old, self.recurrence(node.value), node.op, texts)
            self.updates[node.target.id] += 1

    def _set(self, target: ast.expr, value: ast.expr) -> None:
        """Assign a value to a name, or to the names of a tuple, one by one where the value is a tuple, too."""
        for name, recurrence in list(self._bindings(target, value)):
            self.values[name] = recurrence
            self.updates[name] += 1

    def _bindings(self, target: ast.expr, value: ast.expr) -> Iterator[tuple[str, Recurrence]]:
        """Yield (name, its recurrence) of an assignment; names of a tuple one by one if the value is a tuple, too."""
        if isinstance(target, ast.Name):
            yield target.id, self.recurrence(value)
        elif isinstance(target, ast.Tuple | ast.List):
            values = value.elts if isinstance(value, ast.Tuple | ast.List) else ()
            if len(values) == len(target.elts):
                for element, each in zip(target.elts, values, strict=True):
                    yield from self._bindings(element, each)
                return
            kind = _combine([self.recurrence(value)])
            yield from ((name, kind) for name in _stored_names([target]))

    def _expr(self, node: ast.Expr) -> None:
        self.recurrence(node.value)

    def _if(self, node: ast.If) -> None:
        """Follow both branches, and merge their values."""
        self._check_condition(node.test)
        start = dict(self.values)
        self.block(node.body)
        taken_kinds, self.values = self.values, start
        self.block(node.orelse)
        self._merge(taken_kinds, node)

    def _merge(self, others: Mapping[str, Recurrence], node: ast.stmt) -> None:
        """Merge the values of another path through a statement into those of this one."""
        where, values = f"or line {node.lineno}", self.values
        merged = {name: _merge_branches(others.get(name, STEADY), kind, where) for name, kind in values.items()}
        self.values = {**others, **merged}

    def _check_condition(self, test: ast.expr) -> None:
        """Raise for a condition on the iteration, or on a loop-carried variable."""
        kind = self.recurrence(test)
        if kind == ITERATION:
            found = (
                f"{self.variable} is used in a condition, `{ast.unparse(test)[:40]}`, and iterations run in any order"
            )
            raise self.loc.error(found, "Mask loaded data instead, and begin what is carried above the loop")
        if kind not in NOT_CARRIED:
            raise self.refused(kind.variable)

    def _for(self, node: ast.For) -> None:
        """Follow an inner loop twice, so that its second iteration sees the values of the first; it may have none."""
        start = dict(self.values)
        for _ in range(2):
            self._set(node.target, node.iter)
            self.block(node.body)
            self._merge(start, node)

    def _while(self, node: ast.While) -> None:
        start = dict(self.values)
        for _ in range(2):
            self._check_condition(node.test)
            self.block(node.body)
            self._merge(start, node)

    def recurrence(self, node: ast.expr) -> Recurrence:
        """Return how an expression depends on loop-carried variables. Raises DirectiveError as `check` does."""
        if isinstance(node, ast.Name):
            recurrence = self.values.get(node.id, STEADY)
            self.read |= {recurrence.variable} if recurrence.kind == "old" else set()
            return recurrence
        if isinstance(node, ast.BinOp):
            texts = ast.unparse(node.left), ast.unparse(node.right)
            return binary_recurrence(self.recurrence(node.left), self.recurrence(node.right), node.op, texts)
        if isinstance(node, ast.Subscript):
            return self.recurrence(node.value)
        if isinstance(node, ast.Attribute):
            return self.recurrence(node.value) if node.attr == "T" else STEADY
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd):
            return self.recurrence(node.operand)
        if isinstance(node, ast.IfExp):
            self._check_condition(node.test)
            return _merge_branches(self.recurrence(node.body), self.recurrence(node.orelse), _position(node))
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
                "below": Recurrence("weight", scale=(*first.scale, name)),
                "drop": Recurrence("shrink", scale=(*first.scale, name)),
            }
            return exponential.get(first.kind, _combine(kinds))
        if name in EXTREMA and len(kinds) == 2 and any(kind.kind in ("old", EXTREMA[name]) for kind in kinds):
            recurrences = [kind for kind in kinds if kind.kind in ("old", EXTREMA[name])]
            free = [kind for kind in kinds if kind in NOT_CARRIED]
            variable = recurrences[0].variable
            found = Recurrence(EXTREMA[name], variable, (variable, _position(node)))
            return found if len(recurrences) == len(free) == 1 else _combine(kinds)
        if name in ("dot", "dot_scaled"):
            return self._dot(node, kinds)
        if name == "fma" and len(kinds) == 3:
            return binary_recurrence(binary_recurrence(kinds[0], kinds[1], ast.Mult()), kinds[2], ast.Add())
        is_rounded = name in ("to", "cast") and _is_integer_or_bitcast(node)
        if name in ELEMENTWISE_OPS and not is_rounded and all(kind in NOT_CARRIED for kind in kinds[1:]):
            return first
        if name in LINEAR_OPS and first.kind == "weight" and all(kind in NOT_CARRIED for kind in kinds[1:]):
            return first
        return _combine(kinds)

    def _is_value(self, node: ast.expr) -> bool:
        """Whether `x` of `x.f(...)` is a value, not a module."""
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
        overwrites = not is_load and len(kinds) > 1 and kinds[0] == STEADY
        if overwrites and kinds[1] in (ITERATION, DATA) and name in OVERWRITING:
            raise self.loc.error(*OVERWRITES)
        for kind in kinds[1:] if not is_load else ():
            is_kept = overwrites and kind.kind in ORDER_FREE and not name.startswith("atomic_")
            if kind not in NOT_CARRIED and not is_kept:
                raise self.refused(kind.variable or self.variable)
            self.stored |= {(kind.variable, self.updates[kind.variable])} if kind not in NOT_CARRIED else set()
        return DATA


def binary_recurrence(
    left: Recurrence, right: Recurrence, sign: ast.operator, texts: tuple[str, str] = ("", "")
) -> Recurrence:
    """Return the recurrence of `left sign right`. texts: of both sides."""
    if left in NOT_CARRIED and right in NOT_CARRIED:
        return _combine([left, right])
    if isinstance(sign, ast.Add):
        return _add(left, right) or _add(right, left) or _combine([left, right])
    if isinstance(sign, ast.Sub):
        return _subtract(left, right)
    if isinstance(sign, ast.Mult):
        times = _multiply(left, right, f"* {texts[1]}") or _multiply(right, left, f"* {texts[0]}")
        return times or _combine([left, right])
    return (isinstance(sign, ast.Div) and _multiply(left, right, f"/ {texts[1]}")) or _combine([left, right])


def _add(left: Recurrence, right: Recurrence) -> Recurrence | None:
    """Return the recurrence of `left + right`, if left is a sum or a part of an online softmax; else None."""
    if left.kind in ("old", "sum") and right in NOT_CARRIED:
        return Recurrence("sum", left.variable)
    if left.kind in ("scaled", "weight") and right.kind == "weight" and left.scale == right.scale:
        return left
    return left if left.kind == "below" and right == STEADY else None


def _subtract(left: Recurrence, right: Recurrence) -> Recurrence:
    """Return the recurrence of `left - right`."""
    is_peak = right.kind in ("maximum", "lifted")
    if is_peak and left in NOT_CARRIED:
        return Recurrence("below", scale=right.scale)
    olds = Recurrence("old", right.variable), Recurrence("product", right.variable, right.scale[2:])
    if is_peak and left == olds[right.kind == "lifted"]:
        return Recurrence("drop", scale=right.scale)
    return _add(left, right) or _combine([left, right])


def _multiply(left: Recurrence, right: Recurrence, factor: str) -> Recurrence | None:
    """Return the recurrence of `left * right`, if left is a product or a part of an online softmax; else None.

    factor: the text of the operation with right, such as `* scale`.
    """
    if left.kind == "old" and right.kind == "shrink":
        return Recurrence("scaled", left.variable, right.scale)
    if left.kind in ("old", "product") and right in NOT_CARRIED:
        return Recurrence("product", left.variable, (*left.scale, factor) if right == STEADY else ("data",))
    if left.kind == "weight" and right in NOT_CARRIED:
        return left
    kinds = {"below": "below", "drop": "drop", "maximum": "lifted", "lifted": "lifted"}
    is_scaled = left.kind in kinds and right == STEADY
    return Recurrence(kinds[left.kind], left.variable, (*left.scale, factor)) if is_scaled else None


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


def _merge_branches(left: Recurrence, right: Recurrence, where: str) -> Recurrence:
    """Return the recurrence of a variable after an `if`: an update in one branch alone stays that update.

    where: of the `if`. A maximum that only one branch updates is a new one, and so is the scale of what it rescales.
    """
    if left == right:
        return left
    if left in NOT_CARRIED and right in NOT_CARRIED:
        return _combine([left, right])
    old, other = (left, right) if left.kind == "old" else (right, left)
    is_update = old.kind == "old" and other.variable == old.variable and other.kind in (*ORDER_FREE, "scaled")
    taken_at = other.scale[:1] + tuple(f"{at} {where}" for at in other.scale[1:2]) + other.scale[2:]
    return Recurrence(other.kind, other.variable, taken_at) if is_update else _combine([left, right])


def _position(node: ast.expr) -> str:
    return f"{node.lineno}:{node.col_offset}"


def _is_integer_or_bitcast(node: ast.Call) -> bool:
    """Whether a cast is to an integer dtype, which rounds in every iteration, or a bitcast."""
    nodes = [each for value in (*node.args[-1:], *node.keywords) for each in ast.walk(value)]
    dtypes = [each.attr for each in nodes if isinstance(each, ast.Attribute)]
    is_integer = any(word.startswith(("int", "uint")) for word in dtypes)
    return is_integer or any(word.arg == "bitcast" for word in node.keywords)


def _combine(kinds: Sequence[Recurrence]) -> Recurrence:
    """Return the recurrence of an unknown function of several values."""
    dependent = [kind for kind in kinds if kind not in NOT_CARRIED]
    if dependent:
        return Recurrence("other", dependent[-1].variable or dependent[-1].scale[0])
    return max(kinds, key=NOT_CARRIED.index, default=STEADY)


def _stored_names(statements: Sequence[ast.AST]) -> set[str]:
    nodes = (node for statement in statements for node in ast.walk(statement))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
