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
    """Arguments of an op: tensors in the schema's order, and options by name."""

    tensors: tuple[Any, ...]
    options: OperatorArguments


def tensor_names(operator: Operator) -> tuple[str, ...]:
    """Return the names of the tensors that an operator takes besides x and w, in its schema's order."""
    return tuple(each.name for form in operator.forms.allowed for each in form.inputs)


def schema_of(operator: Operator, overload: str = "") -> str:
    """Return the schema of an operator's op, without its namespace."""
    tensors = ", ".join(f"Tensor? {name}=None" for name in tensor_names(operator))
    options = [text for keyword, text in _ROWS.items() if keyword in operator.keywords]
    options += [text for form in operator.forms.allowed for text in form.declared] + [_PLAN]
    options += [_SAVE, _GRADIENTS] if operator.gathers and not operator.exchanges else [_GRADIENTS]
    options.append(_PLACE)
    factors = ", ".join(("Tensor[] x", "Tensor[] w", *([tensors] if tensors else [])))
    name = f"{operator.name}.{overload}" if overload else operator.name
    return f"{name}({factors}, *, str group_name, {', '.join(options)}) -> Tensor[]"


def to_schema_call(names: tuple[str, ...], group_name: str, arguments: OperatorArguments) -> SchemaCall:
    """Convert the public function's arguments to the op's. names: `tensor_names(operator)`."""
    options: OperatorArguments = {"group_name": group_name}
    for name, value in arguments.items():
        if value is not None and name not in ("x", "w") and name not in names:
            options[name] = in_one_list(value) if name == COUNTS else value
    factors = [[*each] if isinstance(each, (list, tuple)) else [each] for each in (arguments["x"], arguments["w"])]
    return SchemaCall((*factors, *[arguments.get(name) for name in names]), options)


def arguments_from(names: tuple[str, ...], call: SchemaCall) -> OperatorArguments:
    """Convert the op's arguments to the public function's, without those of gradients and of the recorded group."""
    xs, ws, *tensors = call.tensors
    arguments: OperatorArguments = {"x": xs if len(xs) > 1 else xs[0], "w": list(ws) if len(ws) > 1 else ws[0]}
    arguments |= dict(zip(names, tensors, strict=False))  # torch leaves out what is None at the end
    arguments |= call.options
    for name in ("group_name", PLACE, *OF_GRADIENTS):
        arguments.pop(name, None)
    counts = arguments.get(COUNTS)
    if counts is not None:
        ranks = isqrt(len(counts))
        arguments[COUNTS] = [list(counts[row * ranks : (row + 1) * ranks]) for row in range(ranks)]
    return arguments


def in_one_list(counts: Any) -> list[int]:
    """Flatten counts `[W, W]` to a list, as the schema takes them."""
    rows = counts.rows if isinstance(counts, RowCounts) else counts
    return [each for row in (rows.tolist() if isinstance(rows, torch.Tensor) else rows) for each in row]


def results_of(arguments: OperatorArguments, results: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return an op's results by the names that plans use."""
    return dict(zip(results_named(arguments), results, strict=True))


def results_named(arguments: OperatorArguments) -> list[str]:
    """Return the names of a call's results, in the op's order."""
    names = results_beside(arguments, PRODUCTS[: _products(arguments)])
    return [*names, *([GATHERED_OUT] if arguments.get("return_gathered") else [])]


def in_order(arguments: OperatorArguments, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The results among the tensors of a call, as an op returns them."""
    return [tensors[name] for name in results_named(arguments)]


def _products(arguments: OperatorArguments) -> int:
    """How many a call returns: one for each weight over one x, one of all where they are summed."""
    return (
        len(arguments["w"])
        if isinstance(arguments["w"], (list, tuple)) and isinstance(arguments["x"], torch.Tensor)
        else 1
    )


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
