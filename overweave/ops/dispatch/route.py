"""Calls through torch's dispatcher: of code that is compiled or traced, under autocast, or with tensors that require
grad. All other calls bypass it.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from overweave.compat.torch_names import is_any_autocast_enabled
from overweave.errors import InputError, OverweaveError
from overweave.ir.operators.record import Operator
from overweave.memory.group import LIVE_GROUPS, GroupLike, process_group_of
from overweave.ops.call.counts import TOKENS, routed
from overweave.ops.call.groups import group_of, refuse
from overweave.ops.call.operands import check_kinds, with_weights
from overweave.ops.call.side_by_side import check_pairs
from overweave.ops.call.surroundings import is_read_by_compiler, is_watched
from overweave.ops.dispatch.fake import register_flop_formulas
from overweave.ops.dispatch.schema import (
    DEFINED,
    OF_GRADIENTS,
    PLACE,
    Defined,
    OperatorArguments,
    results_of,
    to_schema_call,
)


def by_dispatcher(operator: Operator, group: GroupLike, arguments: OperatorArguments) -> dict[str, torch.Tensor]:
    """Call an operator as one op `torch.ops.overweave.*`; return its results by name.

    Raises InputError for arguments that do not fit the operator's schema, and for an operator without an op.
    """
    defined = DEFINED.get(operator.name)
    if defined is None:
        cure = "Call it under torch.no_grad(), without tracers and autocast"
        raise refused(group, InputError(f"{operator.name} in torch's dispatcher", "it has no op there", cure))
    if operator.exchanges:
        arguments = _route_rows(operator, group, arguments)
    place = group_rank_of(group)
    if is_read_by_compiler():
        return results_of(arguments, _by_op(defined, place, arguments))
    is_watched_or_cast = is_watched() or is_any_autocast_enabled()
    if is_watched_or_cast:
        register_flop_formulas()
    try:
        results = _by_op(defined, place, arguments) if is_watched_or_cast else defined.eager(place.name, arguments)
        return results_of(arguments, results)
    except OverweaveError:
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError):
        if not _nothing_runs():  # raise our own error, on all ranks, if the arguments explain it
            _raise_if_invalid(operator, group, arguments)
        raise


def _by_op(defined: Defined, place: GroupRank, arguments: OperatorArguments) -> list[torch.Tensor]:
    """Call the op itself, with the rank and world size of the place, so that they become part of a traced graph."""
    schema_call = to_schema_call(defined.names, place.name, arguments)
    results: list[torch.Tensor] = defined.op(*schema_call.tensors, **schema_call.options, **told_of(place))
    return results


def told_of(place: GroupRank) -> OperatorArguments:
    """Return the op's argument that names this rank and the world size in a traced graph."""
    return {PLACE: [place.rank, place.world_size]}


def _route_rows(operator: Operator, group: GroupLike, arguments: OperatorArguments) -> OperatorArguments:
    """Return the arguments with the rows of x in the order in which an all-to-all sends them.

    While tracing or compiling, values of counts and tokens are unknown: the op checks them when it runs.
    """
    if not _nothing_runs():
        try:
            return routed(operator, group_of(group), arguments)
        except InputError as error:
            raise refuse(group_of(group), error) from None
    tokens = arguments.get(TOKENS)
    if tokens is None:
        return arguments
    return {**arguments, "x": arguments["x"].index_select(0, torch.as_tensor(tokens)), TOKENS: None}


def _raise_if_invalid(operator: Operator, group: GroupLike, arguments: OperatorArguments) -> None:
    """Raise InputError, on every rank, if the arguments do not fit the schema."""
    try:
        x = arguments["x"]
        known = {name: value for name, value in arguments.items() if name not in OF_GRADIENTS}
        if isinstance(x, (list, tuple)):
            check_pairs(operator, x, arguments["w"])
            known |= {"x": x[0], "w": arguments["w"][0]}
        check_kinds(operator, with_weights(known) if isinstance(known["w"], (list, tuple)) else known)
    except InputError as error:
        raise refuse(group_of(group), error) from None


def refused(group: GroupLike, error: OverweaveError) -> OverweaveError:
    """Notify the peers that this rank refuses the call; return the error to raise. Under tracing nobody is notified."""
    return error if _nothing_runs() else refuse(group_of(group), error)


@contextmanager
def refusing(group: GroupLike) -> Iterator[None]:
    """Notify the peers of an InputError raised inside before it leaves, so that they raise instead of waiting."""
    try:
        yield
    except InputError as error:
        raise refused(group, error) from None


def _nothing_runs() -> bool:
    """Return whether a compiler or tracer watches, so that nothing may run."""
    return is_read_by_compiler() or is_watched()


class GroupRank(NamedTuple):
    """A rank in a group. name: torch's name of the group, which graphs can hold. ranks: the group's world ranks, in
    order: groups with the same ones are equal, whatever their names."""

    name: str
    world_size: int
    rank: int
    ranks: tuple[int, ...] = ()


_PLACES: dict[
    object, tuple[dist.ProcessGroup, GroupRank]
] = {}  # process group, or its name -> (process group, this rank in it)
atexit.register(_PLACES.clear)  # a process group must not outlive the interpreter


def group_rank_of(group: GroupLike) -> GroupRank:
    """Return this rank's place in a group, cached as long as the group lives. Raises GroupError."""
    key = dist.group.WORLD if group is None else group
    known = _PLACES.get(key)  # never a mesh: equal meshes have groups of their own
    if known is not None and known[0] in LIVE_GROUPS:
        return known[1]
    process_group = process_group_of(group)
    ranks = tuple(dist.get_process_group_ranks(process_group))
    place = GroupRank(str(process_group.group_name), process_group.size(), process_group.rank(), ranks)
    for gone in [each for each, (other, _) in _PLACES.items() if other not in LIVE_GROUPS]:
        del _PLACES[gone]
    _PLACES[process_group] = _PLACES[place.name] = process_group, place
    return place


# torch.compile treats the result as a constant of the graph. torch.compiler.assume_constant_result sets the same mark,
# but would import the compiler.
group_rank_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
