"""The way of a call through torch's dispatcher: of code that a compiler reads or a tracer records, under autocast, and
of tensors that are differentiated. All other calls go past it.
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
from overweave.ops.dispatch.fake import tell_counters
from overweave.ops.dispatch.schema import (
    DEFINED,
    OF_GRADIENTS,
    PLACE,
    Defined,
    OperatorArguments,
    request_of,
    results_of,
)


def by_dispatcher(operator: Operator, group: GroupLike, given: OperatorArguments) -> dict[str, torch.Tensor]:
    """A call of an operator as one op `torch.ops.overweave.*`: its results by name.

    Raises InputError for what the operator's schema cannot say, and for an operator without an op.
    """
    defined = DEFINED.get(operator.name)
    if defined is None:
        cure = "Call it under torch.no_grad(), without tracers and autocast"
        raise refused(group, InputError(f"{operator.name} in torch's dispatcher", "it has no op there", cure))
    if operator.exchanges:
        given = _in_one_row(operator, group, given)
    place = place_of(group)
    if is_read_by_compiler():
        return results_of(given, _by_op(defined, place, given))
    is_seen = is_watched() or is_any_autocast_enabled()
    if is_seen:
        tell_counters()
    try:
        found = _by_op(defined, place, given) if is_seen else defined.eager(place.name, given)
        return results_of(given, found)
    except OverweaveError:
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError):
        if not _is_imagined():  # torch's words say nothing of the operator, and leave its peers waiting
            _check(operator, group, given)
        raise


def _by_op(defined: Defined, place: GroupRank, given: OperatorArguments) -> list[torch.Tensor]:
    request = request_of(defined.names, place.name, given)
    results: list[torch.Tensor] = defined.op(*request.tensors, **request.options, **told_of(place))
    return results


def told_of(place: GroupRank) -> OperatorArguments:
    """What a recorded call tells of the place where it was recorded."""
    return {PLACE: [place.rank, place.world_size]}


def _in_one_row(operator: Operator, group: GroupLike, given: OperatorArguments) -> OperatorArguments:
    """What was passed, with the rows of x in the order in which they are sent.

    Where nothing runs, the values of counts and tokens are not looked at: the op does that, when it runs.
    """
    if not _is_imagined():
        try:
            return routed(operator, group_of(group), given)
        except InputError as error:
            raise refuse(group_of(group), error) from None
    tokens = given.get(TOKENS)
    if tokens is None:
        return given
    return {**given, "x": given["x"].index_select(0, torch.as_tensor(tokens)), TOKENS: None}


def _check(operator: Operator, group: GroupLike, given: OperatorArguments) -> None:
    """Raises InputError, on every rank, for arguments that do not fit the schema."""
    try:
        x = given["x"]
        known = {name: value for name, value in given.items() if name not in OF_GRADIENTS}
        if isinstance(x, (list, tuple)):
            check_pairs(operator, x, given["w"])
            known |= {"x": x[0], "w": given["w"][0]}
        check_kinds(operator, with_weights(known) if isinstance(known["w"], (list, tuple)) else known)
    except InputError as error:
        raise refuse(group_of(group), error) from None


def refused(group: GroupLike, error: OverweaveError) -> OverweaveError:
    """The error to raise, once the peers know that this rank takes no part. Where nothing runs, none needs to."""
    return error if _is_imagined() else refuse(group_of(group), error)


@contextmanager
def refusing(group: GroupLike) -> Iterator[None]:
    """What is refused inside, the peers hear of before it is raised."""
    try:
        yield
    except InputError as error:
        raise refused(group, error) from None


def _is_imagined() -> bool:
    """Whether nothing may run: a compiler or a tracer looks on."""
    return is_read_by_compiler() or is_watched()


class GroupRank(NamedTuple):
    """A rank in a group. name: what torch calls the group, the one thing of it that graphs can hold. ranks: of the
    world, in order: groups that have the same are equal, whatever they are called."""

    name: str
    world_size: int
    rank: int
    ranks: tuple[int, ...] = ()


_PLACES: dict[object, tuple[dist.ProcessGroup, GroupRank]] = {}  # of process groups, by themselves and by their names
atexit.register(_PLACES.clear)  # a process group must not outlive the interpreter


def place_of(group: GroupLike) -> GroupRank:
    """Where this rank stands in a group, remembered as long as the group lives. Raises GroupError."""
    key = dist.group.WORLD if group is None else group
    known = _PLACES.get(key)  # a mesh is no key: one that is equal has groups of its own
    if known is not None and known[0] in LIVE_GROUPS:
        return known[1]
    process_group = process_group_of(group)
    ranks = tuple(dist.get_process_group_ranks(process_group))
    place = GroupRank(str(process_group.group_name), process_group.size(), process_group.rank(), ranks)
    for gone in [each for each, (other, _) in _PLACES.items() if other not in LIVE_GROUPS]:
        del _PLACES[gone]
    _PLACES[process_group] = _PLACES[place.name] = process_group, place
    return place


# A compiler takes the place as a constant of the graph. torch.compiler.assume_constant_result says so by this mark,
# too, and would load the compiler.
place_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
