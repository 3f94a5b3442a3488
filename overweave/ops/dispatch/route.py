"""The way of a call through torch's dispatcher: of code that a compiler reads or a tracer records, under autocast, and
of tensors that are differentiated. All other calls go past it.
"""

from __future__ import annotations

import torch

from overweave.errors import InputError, OverweaveError
from overweave.ir.operators.record import Operator
from overweave.memory.group import GroupLike, process_group_of
from overweave.ops.call.groups import group_of, refuse
from overweave.ops.call.operands import WEIGHTS, check_kinds
from overweave.ops.call.side_by_side import check_pairs
from overweave.ops.call.surroundings import is_read_by_compiler
from overweave.ops.dispatch.schema import OF_GRADIENTS, Given, beside, op_of, request_of, results_of


def by_dispatcher(operator: Operator, group: GroupLike, given: Given) -> dict[str, torch.Tensor]:
    """A call of an operator as one op `torch.ops.overweave.*`: its results by name.

    Raises InputError for an operator that torch's dispatcher does not know.
    """
    op = op_of(operator)
    if not _is_imagined():
        _check(operator, group, given)
    assert op is not None
    request = request_of(beside(operator), name_of(group), given)
    return results_of(given, op(*request.tensors, **request.options))


def _check(operator: Operator, group: GroupLike, given: Given) -> None:
    """Raises InputError, on every rank, for what no schema can say."""
    try:
        if op_of(operator) is None:
            cure = "Call it under torch.no_grad(), without tracers and autocast"
            raise InputError(f"{operator.name} in torch's dispatcher", "it has no op there", cure)
        x, w = given["x"], given["w"]
        if isinstance(x, (list, tuple)):
            check_pairs(operator, x, w)
            x, w = x[0], w[0]
        listed = dict(zip(WEIGHTS, w, strict=False)) if isinstance(w, (list, tuple)) else {"w": w}
        known = {name: value for name, value in given.items() if name not in OF_GRADIENTS}
        check_kinds(operator, known | {"x": x} | listed)
    except InputError as error:
        raise refuse(group_of(group), error) from None


def refused(group: GroupLike, error: OverweaveError) -> OverweaveError:
    """The error to raise, once the peers know that this rank takes no part. Where nothing runs, none needs to."""
    return error if _is_imagined() else refuse(group_of(group), error)


def _is_imagined() -> bool:
    """Whether nothing runs: a compiler reads, or a mode stands between ops and their kernels."""
    return is_read_by_compiler() or torch._C._len_torch_dispatch_stack() > 0


def name_of(group: GroupLike) -> str:
    """What torch calls a group: the one name that graphs can hold. Raises GroupError."""
    return str(process_group_of(group).group_name)


# A compiler takes the name as a constant of the graph. torch.compiler.assume_constant_result says so by this mark, too,
# and would load the compiler.
name_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
