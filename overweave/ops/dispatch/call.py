"""One call of an operator, from what a caller passes to the tensors that hold its results, as its record says.

A call is put in the words of all operators, looked up, prepared if it is new to its group, and run. The first call of a
signature waits for all ranks, and raises on every rank if they differ; later calls only post what they are about to do
(memory/board/board.py).
"""

from __future__ import annotations

import torch

from overweave.compat.torch_names import (
    any_requires_grad,
    current_level,
    dispatch_tls_is_dispatch_key_included,
    get_tracing_state,
    is_any_autocast_enabled,
    len_torch_dispatch_stack,
)
from overweave.errors import InputError
from overweave.ir.counts import COUNTS
from overweave.ir.operators.forms import NORM
from overweave.ir.operators.record import Operator
from overweave.memory.group import Group
from overweave.ops.call.counts import TOKENS, RowCounts, routed
from overweave.ops.call.devices import ALIGNED_BYTES, is_away, run_on
from overweave.ops.call.groups import GroupLike, group_of, refuse
from overweave.ops.call.norm import with_norm
from overweave.ops.call.operands import CallArguments, check_kinds, problem_of_call, with_weights
from overweave.ops.call.prepare import prepare
from overweave.ops.call.prepared import CALLS, AgreedCall, CallKey, Tensors
from overweave.ops.call.row_map import refuse_maps
from overweave.ops.call.side_by_side import side_by_side
from overweave.ops.call.surroundings import PRE_DISPATCH, is_read_by_compiler, waited
from overweave.ops.dispatch.route import by_dispatcher

# What torch knows of tracers and autocast, without its functions of Python: every call asks.
_is_recorded, _is_dispatched = get_tracing_state, len_torch_dispatch_stack
_is_before_dispatch, _is_cast = dispatch_tls_is_dispatch_key_included, is_any_autocast_enabled
_is_grad_enabled = torch.is_grad_enabled
_Tensor = torch.Tensor  # looked up once
_LISTS = (list, tuple)
_PLAIN, _VALUES = frozenset((torch.Tensor, torch.nn.Parameter)), frozenset((bool, int, str))


def call(operator: Operator, group: GroupLike, given: CallArguments, gradients: str | None = None) -> Tensors:
    """Computes an operator: all tensors of the call by name, `y` among them.

    given: everything else that the caller passed, by name: `x`, `w`, and keywords that the operator's record may have.
    gradients: of the op in torch's dispatcher, which the names of the tensors that are differentiated; None: a caller,
    whose call takes the way of the dispatcher where something is to be recorded, cast or differentiated.
    Raises InputError or GroupError for arguments it cannot take, RankMismatch on every rank if ranks differ, PeerError
    for a peer that died or stalled.
    """
    if gradients is None:
        if given.get(NORM) is not None:
            given = with_norm(given)
        is_seen = is_read_by_compiler() or _is_recorded() or _is_dispatched() or _is_before_dispatch(PRE_DISPATCH)
        if is_seen or _is_cast() or (_is_grad_enabled() and any_requires_grad(*given.values())):
            return by_dispatcher(operator, group, given)
    x, w = given["x"], given["w"]
    first = x[0] if x.__class__ in _LISTS and x else x
    if is_away(first):
        return run_on(first.device, call, operator, group, given, gradients)
    resolved, counts = group_of(group), given.get(COUNTS)
    with resolved.lock:
        try:
            if gradients is not None:
                refuse_maps(operator.name, given.get("plan"))
            if counts is not None or given.get(TOKENS) is not None or x.__class__ in _LISTS:
                given = _normalised(operator, resolved, given)
                if "x" not in given:
                    return given  # the results themselves
                counts = given.get(COUNTS)
            elif w.__class__ in _LISTS and operator.forms.several_weights:
                given = with_weights(given)
            key, tensors, prepared = look_up(operator, resolved, given)
            if prepared is None:
                problem = problem_of_call(operator, resolved, given, tensors)
        except InputError as error:
            raise refuse(resolved, error) from None
        words = b"" if counts is None else counts.words
        if prepared is not None:
            prepared(tensors, words)
        else:
            caller = resolved, gradients or ""
            prepare(key, problem, caller, tensors, given.get("plan"), words)(tensors)
    if counts is not None:
        tensors["y"] = tensors["y"][: counts.received]
    return tensors


def _normalised(operator: Operator, group: Group, given: CallArguments) -> CallArguments:
    """What some operators alone take, in the words of all: tokens and counts of exchanges, several products.

    The results, without an x, of what is no call of several ranks. Raises InputError.
    """
    if operator.exchanges:
        given = routed(operator, group, given)
    if isinstance(given["x"], _LISTS):
        refuse_maps(operator.name, given.get("plan"))
        return side_by_side(operator, given, group.world_size)
    return given


def look_up(operator: Operator, group: Group, given: CallArguments) -> tuple[CallKey, Tensors, AgreedCall | None]:
    """Everything that decides how a call runs; its tensors, by the names under which plans know them; and the call that
    was prepared for the same.

    Equal keys need neither checks nor choices again. Raises InputError for tensors that no key can tell apart.
    """
    needs_gradient, calls = torch.is_grad_enabled(), CALLS.get(group.process_group)
    told: list[object] = [operator.name, len(given)]
    is_counted = given.get(COUNTS) is not None and operator.exchanges
    tensors: Tensors = {}
    try:
        for name, each in given.items():
            if each is None:
                continue
            kind = each.__class__
            if kind is RowCounts:  # a plan serves all counts up to the most
                told += (name, each.most)
                tensors[name] = each.matrix
                continue
            if kind in _VALUES or (kind not in _PLAIN and not isinstance(each, _Tensor)):
                told += (name, kind, each)  # 1, 1.0 and True are equal, and not the same
                continue
            if kind not in _PLAIN:  # its address may be asked for only with a warning, if at all
                each = given[name] = waited(each)
                check_kinds(operator, given)
            misaligned, gradient = each.data_ptr() % ALIGNED_BYTES, needs_gradient and each.requires_grad
            shape = each.shape[1:] if is_counted and name == "x" else each.shape
            told += (name, kind, shape, each.stride(), each.dtype, each.device, misaligned, gradient)
            tensors[name] = each
        key = tuple(told)
        prepared = None if calls is None else calls.get(key)
    except (TypeError, RuntimeError):  # it cannot be a key, or lies nowhere: what checks it will say what is wrong
        return (), tensors, None
    if prepared is not None and current_level() >= 0:  # a tangent is not to be seen in a key
        check_kinds(operator, given)
    return key, tensors, prepared
