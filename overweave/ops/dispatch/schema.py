"""The schema of an operator in torch's dispatcher, as its record says, and a call in the order of the schema.

    matmul_reduce_scatter(Tensor[] x, Tensor[] w, Tensor? bias=None, ..., *, str group_name, ...) -> Tensor[]

Tensors stand before the star, since torch differentiates only those. Every operator returns a list: its products, then
the rows before a norm, then what was gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isqrt
from typing import Any, NamedTuple

import torch

from overweave.compat.torch_names import OpOverload
from overweave.ir.contract import GATHERED_OUT
from overweave.ir.counts import COUNTS
from overweave.ir.operators.forms import results_beside
from overweave.ir.operators.record import Operator
from overweave.ir.plan import indexed_name
from overweave.ir.problem import LONGEST_LIST
from overweave.ops.call.counts import RowCounts

NAMESPACE = "overweave"
OperatorArguments = dict[str, Any]
_ROWS = {"m": "SymInt? m=None", COUNTS: "SymInt[]? counts=None", "most": "int? most=None"}
_PLAN = "str? plan=None"
# Of the gradients: what a gather keeps for them; which tensors have one, in which all ranks agree; and the plan of the
# operator that computes that of x.
OF_GRADIENTS = ("save", "backward_plan", "gradients")
_SAVE, _GRADIENTS = 'str save="gathered"', 'str gradients="", str? backward_plan=None'
# The rank and the world size where a call was recorded. No kernel reads them. Shapes of results follow from them, so
# that they belong in the text of a graph, by which torch's caches know it.
PLACE, _PLACE = "place", "int[]? place=None"
PRODUCTS = tuple(indexed_name("y", index) for index in range(LONGEST_LIST))


class SchemaCall(NamedTuple):
    """A call in the words of a schema: tensors in order, and the rest by name."""

    tensors: tuple[Any, ...]
    options: OperatorArguments


def beside(operator: Operator) -> tuple[str, ...]:
    """The tensors that an operator takes beside its factors, in the order of its schema."""
    return tuple(each.name for form in operator.forms.allowed for each in form.inputs)


def schema_of(operator: Operator, overload: str = "") -> str:
    """The schema of an operator, without its namespace."""
    tensors = ", ".join(f"Tensor? {name}=None" for name in beside(operator))
    options = [text for keyword, text in _ROWS.items() if keyword in operator.keywords]
    options += [text for form in operator.forms.allowed for text in form.declared] + [_PLAN]
    options += [_SAVE, _GRADIENTS] if operator.gathers and not operator.exchanges else [_GRADIENTS]
    options.append(_PLACE)
    factors = ", ".join(("Tensor[] x", "Tensor[] w", *([tensors] if tensors else [])))
    name = f"{operator.name}.{overload}" if overload else operator.name
    return f"{name}({factors}, *, str group_name, {', '.join(options)}) -> Tensor[]"


def request_of(names: tuple[str, ...], group_name: str, given: OperatorArguments) -> SchemaCall:
    """A call of the public function, which passed `given`, in the words of the schema. names: `beside(operator)`."""
    options: OperatorArguments = {"group_name": group_name}
    for name, value in given.items():
        if value is not None and name not in ("x", "w") and name not in names:
            options[name] = in_one_list(value) if name == COUNTS else value
    factors = [[*each] if isinstance(each, (list, tuple)) else [each] for each in (given["x"], given["w"])]
    return SchemaCall((*factors, *[given.get(name) for name in names]), options)


def given_by(names: tuple[str, ...], request: SchemaCall) -> OperatorArguments:
    """What the public function would have been passed for a call in the words of the schema."""
    xs, ws, *tensors = request.tensors
    given: OperatorArguments = {"x": xs if len(xs) > 1 else xs[0], "w": list(ws) if len(ws) > 1 else ws[0]}
    given |= dict(zip(names, tensors, strict=False))  # torch leaves out what is None at the end
    given |= request.options
    for name in ("group_name", PLACE, *OF_GRADIENTS):
        given.pop(name, None)
    counts = given.get(COUNTS)
    if counts is not None:
        ranks = isqrt(len(counts))
        given[COUNTS] = [list(counts[row * ranks : (row + 1) * ranks]) for row in range(ranks)]
    return given


def in_one_list(counts: Any) -> list[int]:
    """Counts `[W, W]` as a schema has them, one behind the other."""
    rows = counts.rows if isinstance(counts, RowCounts) else counts
    return [each for row in (rows.tolist() if isinstance(rows, torch.Tensor) else rows) for each in row]


def results_of(given: OperatorArguments, results: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The list that an op returned, by the names under which plans know its tensors."""
    return dict(zip(results_named(given), results, strict=True))


def results_named(given: OperatorArguments) -> list[str]:
    """The names of a call's results, in the order in which an op returns them."""
    names = results_beside(given, PRODUCTS[: _products(given)])
    return [*names, *([GATHERED_OUT] if given.get("return_gathered") else [])]


def in_order(given: OperatorArguments, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The results among the tensors of a call, as an op returns them."""
    return [tensors[name] for name in results_named(given)]


def _products(given: OperatorArguments) -> int:
    """How many a call returns: one for each weight over one x, one of all where they are summed."""
    return len(given["w"]) if isinstance(given["w"], (list, tuple)) and isinstance(given["x"], torch.Tensor) else 1


Eager = Callable[
    [str, OperatorArguments], list[torch.Tensor]
]  # of a group's name, and what the public function was passed


class Defined(NamedTuple):
    """An op. names: of the tensors beside its factors. eager: what the op comes to where nothing stands between it and
    its kernels; two ways through torch's dispatcher are most of the host time of a small call."""

    op: OpOverload
    names: tuple[str, ...]
    eager: Eager


DEFINED: dict[str, Defined] = {}  # by the names of their operators
